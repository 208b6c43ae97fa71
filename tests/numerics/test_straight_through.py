"""Gradients straight through the rounding to float8 or int8 are those of 16-bit attention at the rounded numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from eager_budget import assert_within_budget_of
from eight_bit_cases import KEY_FACTOR
from targets import TARGETS, Target

import diyfa
from diyfa import BlockMask, block_mask, masks, registry
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, EIGHT_BIT_DTYPES, Quantized, dequantised, hadamard
from diyfa.problem import as_bhsd
from diyfa.yardstick import plain_flash_attention

BF16 = torch.bfloat16
targets = pytest.mark.parametrize("backend", TARGETS)


@dataclass(frozen=True)
class Case:
    """One call. `how`: arguments of `quantize`. `learned`: sinks and attn_bias are given, and want gradients."""

    dtype: torch.dtype = BF16
    how: dict[str, Any] = field(default_factory=dict)
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    head_dim: int = 32
    head_dim_v: int = 0
    layout: str = "bhsd"
    data: str = "normal"
    learned: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def draw(case: Case) -> list[torch.Tensor]:
    """Return q, k and v (B, H, S, D), in the case's dtype, and sinks and attn_bias if these are learned."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = random(2, case.heads, case.seqlen_q, case.head_dim)
    k = random(2, case.heads_kv, case.seqlen_k, case.head_dim)
    v = random(2, case.heads_kv, case.seqlen_k, case.head_dim_v or case.head_dim)
    if case.data == "outliers":
        q[..., 3] *= 10
        k[..., 3] *= 10
        v[..., 5] *= 50
    elif case.data == "peaks":  # each query has a key with nearly all of the weight
        q, k = 4 * q, k + q.mean(1, keepdim=True) * 4
    elif case.data == "sink":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :, 0, 0] = 12.0
    elif case.data == "video":
        k, v = k + 4 * random(2, case.heads_kv, 1, case.head_dim), v + 3
    inputs = [x.to(case.dtype) for x in (q, k, v)]
    if case.learned:
        inputs += [random(case.heads), random(1, case.heads, case.seqlen_q, case.seqlen_k)]
    return inputs


def laid_out(case: Case, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return q, k and v in the case's layout."""
    if case.layout == "bshd":
        return [x.transpose(1, 2) for x in leaves[:3]]
    return [x.flatten(0, 1) for x in leaves[:3]] if case.layout == "3d" else leaves[:3]


def quantised(case: Case, leaves: list[torch.Tensor]) -> tuple[list[Quantized], dict[str, Any]]:
    """Return q, k and v as the case's function takes them, and its options."""
    layout = "bshd" if case.layout == "bshd" else "bhsd"
    parts = [*diyfa.quantize(*laid_out(case, leaves), **case.how, layout=layout, straight_through=True)]
    options = dict(case.options)
    if case.learned:
        options |= {"sinks": leaves[3], "attn_bias": leaves[4]}
    return parts, options


def gradients(results: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the leaves for fixed gradients of out and the log-sum-exp."""
    generator = torch.Generator().manual_seed(1)
    out, lse = results
    dout = torch.randn(out.shape, generator=generator).to(BF16).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    given = (dout.to(out.device), dlse.to(lse.device))
    return [x.cpu() for x in torch.autograd.grad((out, lse), leaves, given)]


def run(case: Case, target: Target, leaves: list[torch.Tensor]) -> Any:
    parts, options = quantised(case, leaves)

    def move(x: Any) -> Any:
        return x.to(target.device) if isinstance(x, (torch.Tensor, BlockMask)) else x

    function = diyfa.flash_attention_v2 if case.layout == "bshd" else diyfa.flash_attention
    return function(
        *(Quantized(*map(move, x)) for x in parts), **{name: move(x) for name, x in options.items()}, return_lse=True,
        backend=target.backend,
    )  # fmt: skip


def expected(case: Case, leaves: list[torch.Tensor], double: list[torch.Tensor]) -> Any:
    """Return the exact results of the numbers that are quantised from `leaves`, with gradients of `double`."""
    parts, options = quantised(case, [*leaves[:3], *double[3:]])
    for i, x in enumerate(laid_out(case, double)):
        parts[i] = parts[i]._replace(source=hadamard(x) if case.how.get("rotate") and i < 2 else x)
    layout = "bshd" if case.layout == "bshd" else "bhsd"
    return diyfa.reference_attention(*parts, **options, layout=layout, return_lse=True, dtype=torch.float64)


def plain(case: Case, leaves: list[torch.Tensor]) -> Any:
    """Attention in 16 bits of the numbers that the quantised values stand for, straight through to the leaves."""
    parts, options = quantised(case, leaves)
    layout, dtype = "bshd" if case.layout == "bshd" else "bhsd", torch.float16 if case.dtype == torch.float16 else BF16
    numbers = []
    # The sources are not those of `parts`: if the library's were wrong, the budget would allow for it.
    sources = laid_out(case, leaves)
    if case.how.get("rotate"):
        sources[:2] = (hadamard(x.float()) for x in sources[:2])
    for x, source, block in zip(parts, sources, (BLOCK_Q, BLOCK_K, 1), strict=True):
        values = as_bhsd(x.values if x.values.dim() == 4 else x.values[None], layout)
        number = as_bhsd(dequantised(values, x.descale, torch.float32, block, x.mean), layout).view(x.values.shape)
        source = source.to(dtype)
        numbers.append(number.to(dtype) + (source - source.detach()))
    return plain_flash_attention(*numbers, **options, layout=layout, return_lse=True)


def check(case: Case, target: Target) -> None:
    leaves = [x.requires_grad_() for x in draw(case)]
    double = [x.detach().double().requires_grad_() for x in leaves]
    if case.learned:
        double[3] = leaves[3].detach().clone().requires_grad_()  # sinks are float32
    results = run(case, target, leaves)
    found, want = gradients(results, leaves), gradients(expected(case, leaves, double), double)
    low = gradients(plain(case, leaves), leaves)
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    for name, x, got, rough, truth in zip(names, leaves, found, low, want, strict=False):
        assert got.dtype == x.dtype and got.shape == x.shape
        assert_within_budget_of(rough, got, truth, name)


INT8: dict[str, Any] = {"dtype": "int8"}
CAUSAL: dict[str, Any] = {"causal": True}
CASES = {
    "float8": Case(),
    "int8": Case(how=INT8),
    "per_head": Case(how={"per": "head", "smooth": True}, heads=4),
    "per_block": Case(how={"per": "block"}, seqlen_q=150, seqlen_k=140, options=CAUSAL),
    "rotated": Case(how={"per": "block", "smooth": True, "rotate": True}, heads=4, options=CAUSAL),
    "float16": Case(torch.float16, how={"per": "head"}),
    "float16_int8": Case(torch.float16, how={**INT8, "rotate": True}, options=CAUSAL),
    "float32": Case(torch.float32, how={"per": "head", "smooth": True}),
    "learned": Case(how={"smooth": True}, learned=True, options=CAUSAL),
    "learned_int8": Case(how={**INT8, "per": "block", "smooth": True}, learned=True, heads=4),
    "softcap": Case(how={"smooth": True}, data="video", options={"softcap": 8.0}),
    "window": Case(how=INT8, options={"window": (20, 3)}),
    "scale_below_0": Case(options={"sm_scale": -0.4}),
    "one_visible_key": Case(how={"smooth": True}, options={"window": (0, 0)}),
    "no_visible_key": Case(seqlen_q=90, seqlen_k=30, how={"smooth": True}, learned=True, options=CAUSAL),
    "one_query": Case(seqlen_q=1, seqlen_k=33),
    "seq_lens": Case(options={"seq_lens": torch.tensor([50, 7], dtype=torch.int32), **CAUSAL}),
    "mask": Case(seqlen_q=130, how={"smooth": True}, options={"mask": block_mask(masks.causal, 1, 1, 130, 70)}),
    "bshd": Case(layout="bshd", how={"per": "block", "smooth": True, "rotate": True}, heads=4),
    "3d": Case(layout="3d", how={"per": "block", "smooth": True}),
    "odd_head_dim": Case(head_dim=40, head_dim_v=24, how={"per": "block", "smooth": True}),
    "float32_out": Case(options={"out_dtype": torch.float32}),
    "outliers": Case(data="outliers", how={"per": "block"}),
    "outliers_rotated": Case(data="outliers", how={"rotate": True}),
    "outliers_int8": Case(data="outliers", how=INT8),
    "peaks": Case(data="peaks", how={"per": "block"}),
    "peaks_int8": Case(data="peaks", how={**INT8, "smooth": True}),
    "peaks_causal": Case(data="peaks", how={"smooth": True, "rotate": True}, options=CAUSAL),
    "sink": Case(data="sink", how={"per": "head"}, options=CAUSAL),
    "video": Case(data="video", how={"per": "block", "smooth": True}),
    "video_plain": Case(data="video", how={"per": "block"}),
}  # fmt: skip


def on(backend: str, case: Case) -> Case:
    """The case with what the backend has: of Ascend's kernels int8."""
    if backend != "npu":
        return case
    return replace(case, how={**case.how, **INT8}, dtype=case.dtype if case.dtype == torch.float16 else BF16)


@targets
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(backend: str, case: Case) -> None:
    case = on(backend, case)
    if backend == "cuda" and "mask" in case.options:  # of 8 bits with a block mask only the CPU has kernels
        with pytest.raises(ValueError, match="does not implement mask for float8"):
            check(case, TARGETS[backend])
        return
    check(case, TARGETS[backend])


@targets
def test_the_forward_pass_is_that_of_inference(backend: str) -> None:
    case, target = on(backend, CASES["per_block"]), TARGETS[backend]
    leaves = [x.requires_grad_() for x in draw(case)]
    trained = run(case, target, leaves)
    with torch.no_grad():
        inferred = run(case, target, leaves)
    assert trained[0].requires_grad and not inferred[0].requires_grad
    assert all(torch.equal(x, y) for x, y in zip(trained, inferred, strict=True))


@targets
def test_only_what_wants_a_gradient_gets_one(backend: str) -> None:
    """Also sinks alone; and if nothing does, the call is inference."""
    case, target = on(backend, CASES["learned"]), TARGETS[backend]
    leaves = draw(case)
    assert not run(case, target, leaves)[0].requires_grad
    whole = [x.clone().requires_grad_() for x in leaves]
    want = gradients(run(case, target, whole), whole)
    for i in range(len(leaves)):
        one = [x.clone().requires_grad_(j == i) for j, x in enumerate(leaves)]
        (found,) = gradients(run(case, target, one), one[i : i + 1])
        assert torch.equal(found, want[i])


def test_only_eight_bits_are_saved() -> None:
    """The backward pass reads the values and small tensors: neither inputs nor results are kept for it."""
    leaves = [torch.randn(1, 2, 64, 32, dtype=BF16).requires_grad_() for _ in range(3)]
    parts = diyfa.quantize(*leaves, smooth=True, straight_through=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        diyfa.flash_attention(*parts, backend="cpu").float().sum().backward()
    large = [x.dtype for x in saved if x.numel() > 64]
    assert large == [torch.float8_e4m3fn] * 3 and large[0] in EIGHT_BIT_DTYPES


def test_compiled_programs_train() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        parts = diyfa.quantize(q, k, v, "block", "int8", smooth=True, rotate=True, straight_through=True)
        return diyfa.flash_attention(*parts, causal=True, sinks=sinks, backend="cpu")

    leaves = [torch.randn(2, 2, 40, 32, dtype=BF16).requires_grad_() for _ in range(3)]
    leaves.append(torch.randn(2, requires_grad=True))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, want = (
        torch.autograd.grad(function(*leaves).float().sin().sum(), leaves) for function in (compiled, attend)
    )
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)


def test_a_backend_without_the_backward_pass_refuses_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = registry.choose

    def without_backward(op: str, *arguments: Any) -> Any:
        if op == "attention_bwd":
            raise ValueError("no backward kernel")
        return choose(op, *arguments)

    monkeypatch.setattr(registry, "choose", without_backward)
    leaves = [torch.randn(1, 2, 31, 24, dtype=BF16).requires_grad_() for _ in range(3)]
    parts = diyfa.quantize(*leaves, straight_through=True)
    with pytest.raises(ValueError, match="no backward kernel"):
        diyfa.flash_attention(*parts, backend="cpu")
    with torch.no_grad():
        diyfa.flash_attention(*parts, backend="cpu")


def test_explain_shows_both_passes() -> None:
    leaves = [torch.randn(1, 2, 16, 32, dtype=torch.float16).requires_grad_() for _ in range(3)]
    parts = diyfa.quantize(*leaves, dtype="int8", straight_through=True)
    explained = diyfa.explain(*parts, backend="cpu")
    assert explained.problem.dtype == "int8" and explained.backward is not None
    assert explained.backward.problem.dtype == "float16" and explained.backward.problem.k_descale == 0
    with torch.no_grad():
        assert diyfa.explain(*parts, backend="cpu").backward is None


def test_refusals() -> None:
    q, k, v = (torch.randn(1, 2, 16, 32, dtype=BF16).requires_grad_() for _ in range(3))
    parts = diyfa.quantize(q, k, v, straight_through=True)
    for function in (diyfa.flash_attention, diyfa.explain):
        with pytest.raises(ValueError, match="takes no dropout_p"):
            function(*parts, dropout_p=0.1, backend="cpu")
        q8, k8, _ = diyfa.quantize(q, k, v, dtype="int8", straight_through=True)
        with pytest.raises(ValueError, match=r"v requires a gradient, so it must come from quantize"):
            function(q8, k8, v, backend="cpu")
    with pytest.raises(ValueError, match="straight_through=True takes no score_fn"):
        diyfa.flash_attention(*parts, score_fn=KEY_FACTOR, score_tensors=(torch.ones(16),), backend="cpu")
    packed = [x._replace(values=x.values[0].transpose(0, 1)) for x in parts]
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed sequences of quantised tensors have no backward pass"):
        diyfa.flash_attention_varlen(*packed, offsets, offsets, 16, 16, backend="cpu")
    with torch.no_grad():
        diyfa.flash_attention_varlen(*packed, offsets, offsets, 16, 16, backend="cpu")
    out = diyfa.flash_attention(*parts, backend="cpu").float()
    for loss in (out.sin().sum(), out.sum()):  # a gradient of out that depends on the inputs, and one that does not
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (dq.float().sum() + q.float().sum()).backward()
