"""diyfa's kernels of PyTorch's flash operators, on CPU tensors: on CUDA they are the same functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from eager_budget import assert_matches_reference, leaves, with_gradients
from subprocesses import run_after_torch
from torch.utils.checkpoint import checkpoint

import diyfa
from diyfa import flash_attn_interface
from diyfa.integrations import Handle, use_in_pytorch

aten = torch.ops.aten
LENS_Q, LENS_K = (17, 0, 30, 6), (17, 5, 40, 3)


@pytest.fixture
def handle() -> Iterator[Handle]:
    handle = use_in_pytorch("cpu")
    with diyfa.use_backend("cpu"):
        yield handle
    handle.remove()


def offsets(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def packed(dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return leaves((sum(LENS_Q), 4, 32), (sum(LENS_K), 2, 32), (sum(LENS_K), 2, 32), dtype=dtype)


def varlen_with(*options: str) -> Any:
    """PyTorch's module of `varlen_attn`, if that takes these options."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    absent = set(options) - set(inspect.signature(varlen.varlen_attn).parameters)
    if absent:
        pytest.skip(f"varlen_attn of this PyTorch has no {' and '.join(sorted(absent))}")
    return varlen


PACKED = {"cu_seqlens_q": offsets(LENS_Q), "cu_seqlens_k": offsets(LENS_K), "layout": "thd"}
LONGEST = (max(LENS_Q), max(LENS_K))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product(handle: Handle, dtype: torch.dtype, causal: bool) -> None:
    shapes = ((2, 4, 37, 32), (2, 2, 37, 32), (2, 2, 37, 32))
    assert_matches_reference(
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3),
        leaves(*shapes, dtype=dtype), causal=causal, sm_scale=0.3,
    )  # fmt: skip
    assert handle.calls == {
        "_scaled_dot_product_flash_attention: diyfa": 1,
        "_scaled_dot_product_flash_attention_backward: diyfa": 1,
    }


def test_results_are_those_that_pytorch_describes(handle: Handle) -> None:
    """Shapes, dtypes and strides of the nine results are those that compiled graphs expect."""
    q, k, v = (x.detach().transpose(1, 2) for x in leaves(*[(2, 37, 4, 32)] * 3))
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    described = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)), 0.0, True)
    assert len(found) == len(described) == 9
    for got, want in zip(found, described, strict=True):
        if isinstance(want, torch.Tensor):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        else:
            assert got == want
    dense = [x.transpose(1, 2) for x in (q, k, v)]
    for lengths in ((None, None, 37, 37), (PACKED["cu_seqlens_q"],) * 2 + (30, 30)):
        inputs = dense if lengths[0] is None else [x.flatten(0, 1) for x in dense]
        found = aten._flash_attention_forward(*inputs, *lengths, 0.0, True, False)
        described = aten._flash_attention_forward(
            *(x.to("meta") for x in inputs), *(None if x is None else x.to("meta") for x in lengths[:2]), *lengths[2:],
            0.0, True, False,
        )  # fmt: skip
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in described]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)])
def test_dense(handle: Handle, window: tuple[int, int]) -> None:
    causal = window == (-1, 0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sizes = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
        return aten._flash_attention_forward(q, k, v, None, None, 37, 50, 0.0, causal, False, **sizes)[0]

    assert_matches_reference(attend, leaves((2, 37, 4, 32), (2, 50, 2, 32), (2, 50, 2, 32)), "bshd", window=window)


def test_dropout_travels_in_rng_state(handle: Handle) -> None:
    """The backward operator drops what the forward one dropped, and the state alone says what that was."""
    inputs = leaves(*[(2, 4, 37, 32)] * 3)
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        results = aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True)
        seen.append(results[6])
        return results[0]

    torch.manual_seed(7)
    first = with_gradients(attend, inputs)
    torch.manual_seed(7)
    again = with_gradients(attend, inputs)
    other = with_gradients(attend, inputs)
    assert seen[0].dtype == torch.uint64 and torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])

    options = {"causal": True, "dropout_p": 0.25, "rng_state": seen[0].view(torch.int64)}
    double = [x.detach().double().requires_grad_() for x in inputs]
    for got, want in zip(first, with_gradients(diyfa.reference_attention, double, **options), strict=True):
        torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("lengths", [(), (12, 25)])
def test_dropout_of_the_flash_operator(handle: Handle, lengths: tuple[int, ...]) -> None:
    """Its backward operator drops the same, dense and packed: the values' gradient is what the kept weights say."""
    q, k, v = leaves(*[(37, 4, 32) if lengths else (1, 37, 4, 32)] * 3, dtype=torch.float32)
    cu, longest = (offsets(lengths), max(lengths)) if lengths else (None, 37)
    results = aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.25, True, False, scale=0.2)
    # The output is linear in the values: <dout, out(v)> = <dv, v>, if the same weights are kept.
    dout = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    (dv,) = torch.autograd.grad(results[0], [v], dout)
    torch.testing.assert_close((dout * results[0]).sum(), (dv * v).sum(), atol=2e-4, rtol=2e-4)


def test_alibi(handle: Handle) -> None:
    """Dense and packed, without a gradient."""
    q, k, v = (x.detach() for x in leaves(*[(1, 37, 4, 32)] * 3, dtype=torch.float32))
    slopes, rest = torch.tensor([0.5, 0.25, 0.1, 0.0]), (37, 37, 0.0, True, False)
    want = diyfa.reference_attention(q, k, v, causal=True, alibi_slopes=slopes, layout="bshd")
    dense = aten._flash_attention_forward(q, k, v, None, None, *rest, alibi_slopes=slopes)[0]
    cu = offsets((37,))
    packed = aten._flash_attention_forward(q[0], k[0], v[0], cu, cu, *rest, alibi_slopes=slopes)[0]
    for found in (dense, packed[None]):
        torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-6)


def test_blocks_of_keys_as_context_parallel_calls(handle: Handle) -> None:
    """Partial results join by their log-sum-exp; the backward operator takes the joint ones for each block."""
    q, k, v = (x.detach() for x in leaves((1, 4, 20, 32), *[(1, 2, 50, 32)] * 2, dtype=torch.float32))
    blocks = [(x.contiguous(), y.contiguous()) for x, y in zip(k.split([31, 19], 2), v.split([31, 19], 2), strict=True)]
    found = [aten._scaled_dot_product_flash_attention(q, *block) for block in blocks]
    lse = torch.logaddexp(found[0][1], found[1][1])
    out = sum(part[0] * (part[1] - lse).exp()[..., None] for part in found)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = [
        aten._scaled_dot_product_flash_attention_backward(
            dout, q, *block, out, lse, None, None, 20, block[0].shape[2], 0.0, False, part[6], part[7]
        )
        for block, part in zip(blocks, found, strict=True)
    ]
    dq = gradients[0][0] + gradients[1][0]
    dk, dv = (torch.cat([x[i] for x in gradients], 2) for i in (1, 2))
    double = [x.double().requires_grad_() for x in (q, k, v)]
    want = with_gradients(diyfa.reference_attention, double)
    for got, expected in zip((out, dq, dk, dv), want, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (4, 9)])
def test_varlen_attn(handle: Handle, window: tuple[int, int]) -> None:
    varlen = varlen_with("window_size", "enable_gqa")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(
            q, k, v, offsets(LENS_Q), offsets(LENS_K), *LONGEST, window_size=window, enable_gqa=True, scale=0.2
        )

    assert_matches_reference(attend, packed(), window=window, sm_scale=0.2, **PACKED)
    assert handle.calls == {"_flash_attention_forward: diyfa": 1, "_flash_attention_backward: diyfa": 1}


def test_varlen_attn_over_pages(handle: Handle) -> None:
    """Pages, into a given tensor, with the log-sum-exp, and independent of the batch with one split."""
    varlen = varlen_with("block_table", "num_splits")
    q, k, v = (x.detach() for x in packed())
    pages = 8
    table = torch.tensor([[3, -1, -1], [2, -1, -1], [1, 4, 0], [5, -1, -1]], dtype=torch.int32)
    cache = torch.full((2, pages, 16, 2, 32), float("nan"), dtype=q.dtype)
    for b, (start, length) in enumerate(zip(offsets(LENS_K).tolist(), (16, 5, 40, 3), strict=False)):
        for j in range(length):
            for x, rows in zip(cache, (k, v), strict=True):
                x[table[b, j // 16], j % 16] = rows[start + j]
    used = torch.tensor((16, 5, 40, 3), dtype=torch.int32)
    options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
    aux = {"return_aux": varlen.AuxRequest(lse=True)}
    arguments = (q, *cache, offsets(LENS_Q), None, *LONGEST)
    expected, lse = diyfa.flash_attention_varlen(
        q, *cache, offsets(LENS_Q), None, *LONGEST, True, seqused_k=used, block_table=table, return_lse=True
    )
    found = varlen.varlen_attn(*arguments, **options, **aux)
    out = torch.full_like(q, float("nan"))
    written = varlen.varlen_attn_out(out, *arguments, **options, **aux)
    assert written[0] is out
    for result in (found, written):
        assert torch.equal(result[0], expected) and torch.equal(result[1], lse)
    alone = varlen.varlen_attn(*arguments, **options, num_splits=1)
    with diyfa.batch_invariant():
        same = diyfa.flash_attention_varlen(
            q, *cache, offsets(LENS_Q), None, *LONGEST, True, seqused_k=used, block_table=table
        )
    assert torch.equal(alone, same)
    with pytest.raises(ValueError, match="num_splits must be None or 1, got 4"):
        varlen.varlen_attn(*arguments, **options, num_splits=4)


def test_a_compiled_graph(handle: Handle) -> None:
    varlen = varlen_with("enable_gqa")
    lengths = (offsets(LENS_Q), offsets(LENS_K), *LONGEST)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q * 1.0, k * 1.0, v * 1.0
        return varlen.varlen_attn(q, k, v, *lengths, window_size=(9, 0), enable_gqa=True) * 1.0

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    eager = with_gradients(attend, packed())
    assert all(torch.equal(x, y) for x, y in zip(with_gradients(compiled, packed()), eager, strict=True))
    assert handle.calls == {"_flash_attention_forward: diyfa": 2, "_flash_attention_backward: diyfa": 2}


def test_gradient_checkpointing(handle: Handle) -> None:
    """The second forward drops what the first did."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention(q * 1.0, k, v, 0.25, True)[0]

    found = []
    for call in (attend, partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(7)
        found.append(with_gradients(call, leaves(*[(2, 4, 37, 32)] * 3)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert handle.calls["_scaled_dot_product_flash_attention: diyfa"] == 3


def test_export(handle: Handle) -> None:
    """Lengths that are not known before."""

    class Causal(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    q, k, v = (x.detach() for x in leaves(*[(2, 4, 19, 32)] * 3))
    shapes = {name: {2: torch.export.Dim("length", min=2, max=64)} for name in "qkv"}
    exported = torch.export.export(Causal(), (q, k, v), dynamic_shapes=shapes).module()
    for inputs in ((q, k, v), tuple(x[:, :, :7] for x in (q, k, v))):
        assert torch.equal(exported(*inputs), diyfa.flash_attention(*inputs, causal=True))


def test_deterministic_algorithms_are_asked_for(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backward = flash_attn_interface._flash_attn_backward
    monkeypatch.setattr(
        flash_attn_interface, "_flash_attn_backward", lambda *given: (seen.append(given[16]), backward(*given))[1]
    )
    inputs, without_offsets = leaves(*[(1, 2, 9, 16)] * 3), (None, None, 2, 2, 0.0, False, False)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            with_gradients(aten._scaled_dot_product_flash_attention, inputs)
            with_gradients(lambda q, k, v: aten._flash_attention_forward(q, k, v, *without_offsets), inputs)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True]


def _write_into(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    if not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip("not of this PyTorch")
    cu = offsets((9,))
    q, k, v = (x[0].transpose(0, 1) for x in inputs)
    return aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, cu, cu, 9, 9, 0.0, False, False)


NEED_PACKING = "cum_seq_k, seqused_k and block_table need packed queries"
REFUSED = [
    (lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.1, False, True), "return_debug_mask=True is"),
    (lambda q, k, v: aten._flash_attention_forward(
        q, k, v, None, None, 9, 9, 0.0, False, False, seqused_k=offsets((9,))), NEED_PACKING),
    (lambda q, k, v: aten._flash_attention_forward(
        q, k, v, None, offsets((9,)), 9, 9, 0.0, False, False), NEED_PACKING),
    (lambda q, k, v: _write_into(torch.empty(3, 9, 2, 16, dtype=q.dtype), q, k, v),
     r"out must be \(9, 2, 16\) of torch.float16, got \(3, 9, 2, 16\) of torch.float16"),
    (lambda q, k, v: _write_into(torch.empty(9, 2, 16), q, k, v), "out must be .* of torch.float16"),
    (lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k[:, :1], v), "k and v must have the same heads and"),
]  # fmt: skip


@pytest.mark.parametrize(("attend", "reason"), REFUSED)
def test_refused(handle: Handle, attend: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        attend(*(x.detach() for x in leaves(*[(1, 2, 9, 16)] * 3)))


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k", "block_table"])
def test_refusals_of_the_backward_operator(handle: Handle, name: str) -> None:
    """A gradient that would be of another attention."""
    if name == "block_table":
        varlen_with("block_table")
    inputs = leaves((9, 2, 16), (1, 16, 2, 16), (1, 16, 2, 16)) if name == "block_table" else leaves(*[(9, 2, 16)] * 3)
    given = {"alibi_slopes": torch.ones(2), "seqused_k": torch.tensor([7], dtype=torch.int32)}
    options = {name: given.get(name, torch.zeros((1, 1), dtype=torch.int32)), "seqused_k": given["seqused_k"]}
    if name == "alibi_slopes":
        del options["seqused_k"]
    lengths = (offsets((9,)), None if name == "block_table" else offsets((9,)), 9, 9, 0.0, True, False)
    with pytest.raises(ValueError, match=f"{name} has no gradient here"):
        aten._flash_attention_forward(*inputs, *lengths, **options)
    with torch.no_grad():
        assert aten._flash_attention_forward(*inputs, *lengths, **options)[0].isfinite().all()


def test_removal_restores_the_operators() -> None:
    q, k, v = (x.detach() for x in leaves(*[(1, 2, 9, 16)] * 3))
    handle = use_in_pytorch("cpu")
    assert use_in_pytorch("cpu") is handle and handle.active
    with pytest.raises(RuntimeError, match="diyfa is under PyTorch's attention for cpu; remove that handle first"):
        use_in_pytorch("cuda")
    handle.remove()
    handle.remove()
    assert not handle.active
    with pytest.raises(NotImplementedError), diyfa.use_backend("cpu"):
        aten._scaled_dot_product_flash_attention(q, k, v)
    with pytest.raises(ValueError, match="device_type must be one of"):
        use_in_pytorch("xpu")


RIVAL = """
import sys, torch, diyfa.integrations.pytorch as ours
from diyfa.integrations import use_in_pytorch
from torch.nn import attention
NAMES = list(ours.torch_operators.FLASH_OPERATORS)
NAMES = [name if hasattr(torch.ops.aten, name) else NAMES[3] for name in NAMES]  # the fifth is new
class Rival:  # another implementation, of two operators
    def __init__(self):
        self.library = torch.library.Library("aten", "IMPL", "CUDA")
        for name in NAMES[:2]:
            self.library.impl(name, lambda *given: None)
    def remove(self):
        self.library = None
def whose(name, key="CUDA"):  # the kernel that runs: diyfa's, the rival's, or PyTorch's
    found = torch._C._dispatch_dump(f"aten::{name}").partition(f"\\n{key}: ")[2].partition(" ::")[0]
    return "d" if "integrations/pytorch.py" in found else "r" if "<string>" in found else "-"
def show(handle=None):
    print("".join(map(whose, NAMES)), attention.current_flash_attention_impl(), handle and handle.active)
attention.register_flash_attention_impl("rival", register_fn=Rival)
"""
ORDERS = {
    "alone": (
        """
print("diyfa" in attention.list_flash_attention_impls(), attention.current_flash_attention_impl())
handle = use_in_pytorch()
show(handle)
attention.restore_flash_attention_impl()
show(handle)
attention.activate_flash_attention_impl("diyfa")
handle = use_in_pytorch("cuda")
show(handle)
handle.remove()
show(handle)
""",
        ["False None", "ddddd diyfa True", "----- None False", "ddddd diyfa True", "----- None False"],
    ),
    "before": (
        """
attention.activate_flash_attention_impl("rival")
handle = use_in_pytorch()
show(handle)
handle.remove()
show(handle)
handle.remove()
show(handle)
again = use_in_pytorch()
handle.remove()
show(again)
again.remove()
attention.restore_flash_attention_impl()
show(again)
""",
        ["ddddd diyfa True", "rr--- rival False", "rr--- rival False", "ddddd diyfa True", "----- None False"],
    ),
    "after": (
        """
handle = use_in_pytorch()
attention.activate_flash_attention_impl("rival")
show(handle)
handle.remove()
show(handle)
attention.activate_flash_attention_impl("diyfa")
handle.remove()
show(use_in_pytorch())
use_in_pytorch().remove()
show()
""",
        ["rr--- rival False", "rr--- rival False", "ddddd diyfa True", "----- None None"],
    ),
    "replaced by the one before": (
        """
attention.activate_flash_attention_impl("rival")
handle = use_in_pytorch()
attention.activate_flash_attention_impl("rival")
show(handle)
attention.restore_flash_attention_impl()
show(handle)
""",
        ["rr--- rival False", "----- None False"],
    ),
    "an error half-way": (
        """
attention.activate_flash_attention_impl("rival")
impl, seen = torch.library.Library.impl, []
def fail(library, name, *given, **options):
    seen.append(name)
    if len(seen) == 4:
        raise OSError("half-way")
    return impl(library, name, *given, **options)
for device_type in ("cuda", "cpu"):
    seen.clear()
    torch.library.Library.impl = fail
    try:
        use_in_pytorch(device_type)
    except OSError as error:  # its traceback keeps every frame alive
        torch.library.Library.impl = impl
        show()
        print(*[whose(name, "CPU") for name in NAMES[:2]])
use_in_pytorch().remove()
show()
""",
        ["rr--- rival None", "- -"] * 2 + ["rr--- rival None"],
    ),
    "the other is gone": (
        """
attention.activate_flash_attention_impl("rival")
handle = use_in_pytorch()
def gone():
    raise OSError("gone")
attention.register_flash_attention_impl("rival", register_fn=gone)
try:
    handle.remove()
except RuntimeError as error:
    print(error, repr(error.__cause__))
show(handle)
""",
        [
            "diyfa is out of PyTorch's attention, but 'rival', which was there before, did not come back: PyTorch's "
            "own flash attention is in its place OSError('gone')",
            "----- None False",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_another_implementation_in_the_registry(order: str) -> None:
    """What was active before diyfa is active after it, whoever takes which one away; nothing stays half-way."""
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("PyTorch's registry restores nothing before 2.11")
    code, expected = ORDERS[order]
    assert run_after_torch(RIVAL + code).splitlines() == expected
