"""Score functions on every backend: values and all gradients, those of captured tensors included.

The reference runs the function by PyTorch and autograd derives it. It is compared with PyTorch code written by hand,
and the backends with the reference: the Triton kernels derive the function themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from guarded_memory import guard
from targets import TARGETS, Target

pytest.importorskip("triton")

import triton
import triton.language as tl
from score_functions import FUNCTIONS

import diyfa
from diyfa import BlockMask, masks

SIZES = {"ragged": (2, 2, 1, 45, 61, 16), "few queries": (1, 2, 2, 3, 61, 16), "one": (1, 1, 1, 1, 1, 8)}
RAGGED = SIZES["ragged"]
WEIGHT = 0.7  # of lse in the loss


def leaves(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    batch, heads, heads_kv, seqlen_q, seqlen_k, d = sizes
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, seqlen_q, d), *[(batch, heads_kv, seqlen_k, d)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.fixture(params=TARGETS)
def here(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Each backend. Where an NPU is host memory, PyTorch's operators compute there; diyfa sums gradients of a bias."""
    target = TARGETS[request.param]
    if target.computes:
        yield target
        return
    from npu_interpreter import HostArithmetic, on_the_host

    with HostArithmetic(), on_the_host("sum.dim_IntList"):
        yield target


def results(
    attend: Any, inputs: list[torch.Tensor], captured: Any, here: Target | None = None, **options: Any
) -> list[torch.Tensor]:
    """out, lse, then the gradients of inputs and of captured tensors of floating-point numbers, on the CPU."""
    device = "cpu" if here is None else here.device
    inputs = [x.detach().clone().to(device).requires_grad_() for x in inputs]
    captured = [x.detach().clone().to(device).requires_grad_(x.is_floating_point()) for x in captured]
    if here is not None:
        options = {n: x.to(device) if isinstance(x, (torch.Tensor, BlockMask)) else x for n, x in options.items()}
        options["backend"] = here.backend
    out, lse = attend(*inputs, score_tensors=tuple(captured), return_lse=True, **options)
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
    learned = [x for x in captured if x.requires_grad]
    loss = (out * dout).sum() + WEIGHT * lse.masked_fill(lse.isinf(), 0.0).sum()
    gradients = torch.autograd.grad(loss, [*inputs, *learned], allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (out, lse, *gradients)]


def oracle(inputs: list[torch.Tensor], captured: Any, **options: Any) -> list[torch.Tensor]:
    wide = [x.double() if x.is_floating_point() else x for x in captured]
    for name in ("attn_bias", "sinks", "alibi_slopes"):
        if name in options:
            options[name] = options[name].double()
    return results(diyfa.reference_attention, [x.double() for x in inputs], wide, dtype=torch.float64, **options)


def assert_close(found: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    assert len(found) == len(want)
    for n, (x, y) in enumerate(zip(found, want, strict=True)):
        assert not x.isnan().any(), n
        same = x.isinf() & (x.double() == y.double())
        error = torch.where(same, 0.0, (x.double() - y.double()).abs())
        finite = y[y.isfinite()]
        scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        assert error.numel() == 0 or float(error.max()) <= tolerance * scale, (n, float(error.max()), scale)


def by_hand(case: Any, visible: Any = None) -> Any:
    """Attention in PyTorch with the function that is written by hand."""

    def attend(q: Any, k: Any, v: Any, score_tensors: Any, return_lse: bool) -> Any:
        (batch, heads, seqlen_q, d), seqlen_k = q.shape, k.shape[2]
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        b = torch.arange(batch)[:, None, None, None]
        h = torch.arange(heads)[:, None, None]
        i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
        s = case.plain(q @ k.mT / math.sqrt(d), b, h, i, j, *score_tensors)
        if visible is not None:
            s = s.masked_fill(~visible(i, j), -torch.inf)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)

    return attend


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_reference_is_what_one_writes_by_hand(name: str, sizes: str) -> None:
    case, inputs = FUNCTIONS[name], [x.double() for x in leaves(SIZES[sizes])]
    batch, heads, _, _, seqlen_k, _ = SIZES[sizes]
    captured = [x.double() if x.is_floating_point() else x for x in case.tensors(batch, heads, seqlen_k)]
    want = results(by_hand(case), inputs, captured)
    assert_close(results(diyfa.reference_attention, inputs, captured, score_fn=case.jit), want, 1e-12)
    causal = results(by_hand(case, lambda i, j: j <= i), inputs, captured)
    found = results(diyfa.reference_attention, inputs, captured, score_fn=case.jit, causal=True)
    assert_close(found, causal, 1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("sizes", "causal"), [("ragged", True), ("ragged", False), ("few queries", True), ("one", False)]
)
def test_values_and_gradients(here: Target, name: str, sizes: str, causal: bool) -> None:
    case, inputs = FUNCTIONS[name], leaves(SIZES[sizes])
    batch, heads, _, _, seqlen_k, _ = SIZES[sizes]
    captured = case.tensors(batch, heads, seqlen_k)
    want = oracle(inputs, captured, score_fn=case.jit, causal=causal)
    found = results(diyfa.flash_attention, inputs, captured, score_fn=case.jit, causal=causal, here=here)
    assert_close(found, want)


COMPOSED: dict[str, dict[str, Any]] = {
    "window and sinks": {"window": (9, 4), "sinks": torch.tensor([0.3, 2.0])},
    "softcap, ALiBi and bias": {"softcap": 4.0, "alibi_slopes": torch.tensor([0.1, 0.05]), "causal": True,
        "attn_bias": torch.linspace(-1, 1, 45 * 61).view(45, 61)},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([7, 11])},
    "seq_lens": {"seq_lens": torch.tensor([61, 23], dtype=torch.int32), "causal": True},
    "mask": {"mask": "random"},
    "mask and seq_lens": {"mask": "random", "seq_lens": torch.tensor([50, 33], dtype=torch.int32)},
}  # fmt: skip


@pytest.mark.parametrize("name", ["relative", "documents"])
@pytest.mark.parametrize("composed", COMPOSED)
def test_with_other_features(here: Target, name: str, composed: str) -> None:
    """The function comes last: it gets what softcap, ALiBi and a bias made of the score."""
    case, options = FUNCTIONS[name], dict(COMPOSED[composed])
    seqlen_k = 140 if "mask" in options and name == "documents" else 61
    inputs = leaves((2, 2, 1, 45, seqlen_k, 16))
    if "mask" in options:
        keep = torch.rand(45, seqlen_k, generator=torch.Generator().manual_seed(3)) < 0.4
        keep[7] = False
        keep[:, 64:128] = True  # a full block, if there are as many keys
        options["mask"] = BlockMask.from_dense(keep, 64)
    captured = case.tensors(2, 2, seqlen_k)
    if composed == "seq_lens":  # rows beyond the end are read by nobody
        for x in inputs:
            x[1, :, 23:] = torch.nan
    want = oracle([x.nan_to_num() for x in inputs], captured, score_fn=case.jit, **options)
    found = results(diyfa.flash_attention, inputs, captured, score_fn=case.jit, here=here, **options)
    assert_close(found, want)


@pytest.mark.parametrize(("sizes", "shape"), [("ragged", (45, 61)), ("ragged", (2, 1, 45, 1)), ("ragged", (1, 1)),
                                              ("one", (1, 1))])  # fmt: skip
def test_gradients_of_a_bias(here: Target, sizes: str, shape: tuple[int, ...]) -> None:
    """Behind a function a bias that is equal for all keys does not cancel in the softmax."""
    case, inputs = FUNCTIONS["scaled_by_key"], leaves(SIZES[sizes])
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    captured = case.tensors(2, 2, 61)

    def attend(*qkv: torch.Tensor, **options: Any) -> Any:
        *qkv, b = qkv
        function = diyfa.flash_attention if "backend" in options else diyfa.reference_attention
        return function(*qkv, attn_bias=b, score_fn=case.jit, **options)

    want = results(attend, [x.double() for x in (*inputs, bias)], [x.double() for x in captured], dtype=torch.float64)
    assert want[5].any()
    assert_close(results(attend, [*inputs, bias], captured, here=here), want)


@pytest.mark.parametrize("name", ["scaled_by_key", "relative", "documents"])
def test_packed_sequences(here: Target, name: str) -> None:
    """b is the number of the sequence, i and j count in it."""
    case, generator = FUNCTIONS[name], torch.Generator().manual_seed(4)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 20, 33], [0, 31, 40, 70]))
    inputs = [torch.randn(rows, 2, 16, generator=generator) for rows in (33, 70, 70)]
    lengths: dict[str, Any] = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "causal": True, "score_fn": case.jit}
    captured = case.tensors(3, 2, 31)
    want = oracle(inputs, captured, layout="thd", **lengths)
    longest = {"max_seqlen_q": 20, "max_seqlen_k": 31, "here": here}
    assert_close(results(diyfa.flash_attention_varlen, inputs, captured, **lengths, **longest), want)


def test_the_layout_with_heads_behind_the_sequence_and_half_precision(here: Target) -> None:
    case, inputs = FUNCTIONS["relative"], [x.transpose(1, 2).half() for x in leaves(RAGGED)]
    captured = [x.half() for x in case.tensors(2, 2, 61)]
    want = oracle(inputs, captured, layout="bshd", score_fn=case.jit)
    found = results(diyfa.flash_attention_v2, inputs, captured, score_fn=case.jit, here=here)
    assert {x.dtype for x in (found[0], *found[2:])} == {torch.float16}
    assert_close(found, want, 4e-3)


# ---- Hostile data ----------------------------------------------------------------------------------------------------


@triton.jit
def one_key(score, b, h, i, j, chosen):
    """One visible key for each query, none for those of which `chosen` says -1."""
    return tl.where(tl.load(chosen + i) == j, score, float("-inf"))


@triton.jit
def nothing(score, b, h, i, j):
    return tl.where(j >= 0, float("-inf"), score)


@triton.jit
def huge(score, b, h, i, j, factor):
    return score * tl.load(factor + h)


@triton.jit
def logarithm(score, b, h, i, j, weights):
    """-inf for keys of weight 0, with an infinite derivative by the weight, and 0 / 0 by the score."""
    return tl.log(tl.exp(score) * tl.load(weights + j))


@triton.jit
def constant(score, b, h, i, j):
    return 0.0


def test_one_visible_key_or_none(here: Target) -> None:
    inputs = leaves(RAGGED)
    chosen = torch.arange(61) * 5 % 61
    chosen[::4] = -1
    want = oracle(inputs, (chosen,), score_fn=one_key)
    found = results(diyfa.flash_attention, inputs, (chosen,), score_fn=one_key, here=here)
    assert_close(found, want)
    empty = results(diyfa.flash_attention, inputs, (), score_fn=nothing, here=here)
    assert bool((empty[1] == torch.inf).all())
    assert all(not x.any() for n, x in enumerate(empty) if n != 1)


def test_huge_scores_and_functions_without_the_score(here: Target) -> None:
    inputs = leaves(RAGGED)
    factor = torch.tensor([1e4, -3e3])
    want = oracle(inputs, (factor,), score_fn=huge)
    found = results(diyfa.flash_attention, inputs, (factor,), score_fn=huge, here=here)
    assert_close(found[:1] + found[2:], want[:1] + want[2:], 3e-3)  # weights have the error of scores of 1e4
    assert_close(found[1:2], want[1:2])
    want = oracle(inputs, (), score_fn=constant)
    found = results(diyfa.flash_attention, inputs, (), score_fn=constant, here=here)
    assert_close(found, want)
    assert not found[2].any() and not found[3].any()


def test_an_infinite_slope_behind_a_weight_of_zero_gives_no_nan(here: Target) -> None:
    inputs, weights = leaves(RAGGED), torch.rand(61) + 0.1
    weights[5] = 0.0
    found = results(diyfa.flash_attention, inputs, (weights,), score_fn=logarithm, here=here)
    keep = torch.ones(45, 61, dtype=torch.bool)
    keep[:, 5] = False
    shown = weights.clone()
    shown[5] = 1.0
    mask = BlockMask.from_dense(keep, 64)
    want = oracle(inputs, (shown,), score_fn=logarithm, mask=mask)
    assert_close(found, want)


def test_only_what_visible_pairs_need_is_read(here: Target) -> None:
    """Elsewhere captured tensors may be NaN, or end: a causal table has no place for later keys."""
    inputs, bias = leaves((1, 2, 2, 45, 45, 16)), torch.full((2, 128), torch.nan)
    bias[:, 64 : 64 + 45] = torch.randn(2, 45)  # distances 0 to 44
    captured = (bias,)
    found = results(diyfa.flash_attention, inputs, captured, score_fn=FUNCTIONS["relative"].jit, causal=True, here=here)
    want = oracle(inputs, (bias.nan_to_num(),), score_fn=FUNCTIONS["relative"].jit, causal=True)
    assert_close(found, want)


@triton.jit
def by_position(score, b, h, i, j, queries, keys):
    return score + tl.load(queries + i) * tl.load(keys + j)


@pytest.mark.parametrize("backend", ["cuda", "npu"])
@pytest.mark.parametrize("mask", ["causal", "window", "blocks"])
def test_nothing_is_read_outside_of_captured_tensors(monkeypatch: pytest.MonkeyPatch, mask: str, backend: str) -> None:
    """The first of more queries than keys have positions below 0. They see no key."""
    here = TARGETS.get(backend)
    if here is None or not here.interpreted or here.device != "cpu":
        pytest.skip("only the interpreter shows each address")
    inputs, captured = leaves((1, 1, 1, 70, 40, 16)), (torch.randn(40), torch.randn(40))
    blocks = diyfa.block_mask(masks.causal, 1, 1, 70, 40)
    kinds: dict[str, Any] = {"causal": {"causal": True}, "window": {"window": (5, 0)}, "blocks": {"mask": blocks}}
    options = kinds[mask]
    want = oracle(inputs, captured, score_fn=by_position, **options)
    accesses = guard(monkeypatch, backend)
    assert_close(results(diyfa.flash_attention, inputs, captured, score_fn=by_position, here=here, **options), want)
    assert accesses()


# ---- Derivatives that users give -------------------------------------------------------------------------------------


@triton.jit
def rounded(score, b, h, i, j, step):
    return (score / tl.load(step)).to(tl.int32) * tl.load(step)


@triton.jit
def straight_through(score, b, h, i, j, step):
    return 1.0


def test_the_users_derivative(here: Target) -> None:
    inputs, step = leaves(RAGGED), (torch.tensor([0.25]),)
    options: dict[str, Any] = {"score_fn": rounded, "score_grad_fn": straight_through, "causal": True}
    want = oracle(inputs, step, **options)
    assert want[2].any()
    assert_close(results(diyfa.flash_attention, inputs, step, here=here, **options), want, 2e-4)
    derived = results(diyfa.flash_attention, inputs, step, score_fn=rounded, causal=True, here=here)
    assert not derived[2].any()


def test_a_second_call_with_other_tensors_repeats_nothing_old(here: Target) -> None:
    case, inputs = FUNCTIONS["relative"], leaves(RAGGED)
    for n in range(3):
        captured = [x + n for x in case.tensors(2, 2, 61)]
        want = oracle(inputs, captured, score_fn=case.jit)
        found = results(diyfa.flash_attention, inputs, captured, score_fn=case.jit, here=here)
        assert_close(found, want)


def test_deterministic_gradients(here: Target) -> None:
    inputs, case = leaves(RAGGED), FUNCTIONS["relative"]
    options: dict[str, Any] = {"score_fn": case.jit, "deterministic": True, "here": here}
    if here.backend != "cpu":
        with pytest.raises(ValueError, match=r"gradients of score_tensors by atomics"):
            results(diyfa.flash_attention, inputs, case.tensors(2, 2, 61), **options)
        q, k, v = (x.to(here.device).requires_grad_() for x in inputs)
        captured = [x.to(here.device) for x in case.tensors(2, 2, 61)]
        out = diyfa.flash_attention(
            q, k, v, score_fn=case.jit, score_tensors=captured, deterministic=True, backend=here.backend
        )
        assert out.requires_grad  # without gradients of captured tensors
        return
    one, two = (results(diyfa.flash_attention, inputs, case.tensors(2, 2, 61), **options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


# ---- Masks -----------------------------------------------------------------------------------------------------------


@triton.jit
def document_mask(b, h, i, j, ids):
    return (tl.load(ids + i) == tl.load(ids + j)) & (j <= i)


def test_a_jit_function_is_a_mask_function() -> None:
    ids = torch.arange(200) // 70
    found = diyfa.block_mask(document_mask, 1, 1, 100, 200, block_size=64, mask_tensors=(ids,))
    want = diyfa.block_mask(masks.document(ids), 1, 1, 100, 200, block_size=64)
    assert torch.equal(found.to_dense(), want.to_dense())
    with pytest.raises(ValueError, match=r"document_mask takes 1 captured tensors, got 0 in mask_tensors"):
        diyfa.block_mask(document_mask, 1, 1, 100, 200)
    with pytest.raises(ValueError, match="mask_tensors belong to a jit function"):
        diyfa.block_mask(masks.causal, 1, 1, 100, 200, mask_tensors=(ids,))
