"""What training may hand to the kernels on npu tensors: rows of no sequence, and tensors that lie otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import diyfa
from diyfa import reference_attention
from diyfa.backends.npu.attention.bias import as_read
from diyfa.backends.npu.runtime.launch import distinct_rows
from diyfa.testing import AttentionCase, attention_function, make_inputs, run_case

F16, F32 = torch.float16, torch.float32


def test_rows_of_no_sequence_are_not_read(npu: torch.device) -> None:
    """NaN before the first and behind the last packed sequence; all results are those of the sequences alone."""
    torch.manual_seed(0)
    whole = [torch.randn(60, 2, 32) for _ in range(4)]
    for x in whole:
        x[:3], x[53:] = float("nan"), float("nan")
    dlse, found = torch.randn(2, 60), []
    for first, rows in ((3, slice(0, 60)), (0, slice(3, 53))):
        cu = torch.tensor([first, first + 20, first + 50], dtype=torch.int32).to(npu)
        *leaves, dout = (x[rows].to(npu) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        results = diyfa.flash_attention_varlen(*leaves, cu, cu, 30, 30, True, return_lse=True)
        gradients = torch.autograd.grad(results, leaves, (dout, dlse[:, rows].to(npu)))
        found.append([x.detach().cpu() for x in (results[0], results[1].t(), *gradients)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x[3:53], y)
    assert not any(x[:3].any() or x[53:].any() for x in found[0][2:])


def test_gradients_of_captured_tensors_in_several_launches(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace of the second call holds two of its six tasks."""
    from score_functions import FUNCTIONS

    from diyfa.backends.npu.attention import bwd_captured

    torch.manual_seed(0)
    case, found = FUNCTIONS["relative"], []
    x, dout = torch.randn(80, 1, 16), torch.randn(80, 1, 16)
    cu = torch.tensor([0, 10, 50, 80], dtype=torch.int32).to(npu)
    for most in (bwd_captured.WORKSPACE_BYTES, 2 * 32 * 64 * 8):
        monkeypatch.setattr(bwd_captured, "WORKSPACE_BYTES", most)
        (table,) = (t.to(npu).requires_grad_() for t in case.tensors(3, 1, 40))
        options = {"score_fn": case.jit, "score_tensors": (table,), "causal": True}
        out = diyfa.flash_attention_varlen(*[x.to(npu)] * 3, cu, cu, 40, 40, **options)
        found.append(torch.autograd.grad(out, table, dout.to(npu))[0].cpu())
    assert found[0].any()
    torch.testing.assert_close(found[0], found[1])


View = Callable[[torch.Tensor], torch.Tensor]
BIAS_VIEWS: dict[str, tuple[tuple[int, ...], View]] = {  # the shape in memory, and the bias as it is given
    "expanded": ((1, 2, 40, 1), lambda x: x.expand(2, 2, 40, 70)),
    "expanded over rows": ((2, 1, 1, 70), lambda x: x.expand(2, 2, 40, 70)),
    "transposed": ((2, 70, 40), lambda x: x.mT),
    "overlapping": ((109,), lambda x: x.as_strided((40, 70), (1, 1))),  # each row begins one value after the one before
}


def gradients_of(npu: torch.device, dout: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """out, lse and the gradients of a call of 40 queries and 70 keys, on the CPU."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, rows, 32).to(npu).requires_grad_() for rows in (40, 70, 70)]
    if bias is not None:
        leaves.append(bias.detach().requires_grad_())
    out, lse = diyfa.flash_attention(*leaves[:3], attn_bias=leaves[3] if bias is not None else None, return_lse=True)
    dlse = torch.randn(lse.shape).to(npu)
    return tuple(x.detach().cpu() for x in (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))


@pytest.mark.parametrize("name", BIAS_VIEWS)
def test_a_bias_that_lies_otherwise(npu: torch.device, name: str) -> None:
    """Gives what the same numbers one after another do, for the gradient too."""
    shape, view = BIAS_VIEWS[name]
    bias, dout = torch.randn(shape), torch.randn(2, 2, 40, 32).to(npu)
    got = gradients_of(npu, dout, view(bias.to(npu)))
    want = gradients_of(npu, dout, view(bias).contiguous().to(npu))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_rows_of_a_gradient_that_share_memory(npu: torch.device) -> None:
    """The gradient of a sum over rows has a stride of 0 between them, which a block pointer cannot have."""
    weight = torch.randn(32)
    expanded = weight.to(npu).expand(2, 2, 40, 32)
    for x, y in zip(
        gradients_of(npu, expanded), gradients_of(npu, weight.expand(expanded.shape).contiguous().to(npu)), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_rows_are_copied_only_where_several_have_one_address(layout: str) -> None:
    """A copy of a result would be lost: a single row, whose stride means nothing, is none."""
    rows = {"bhsd": 2, "bshd": 1, "thd": 0}[layout]
    for shape in ([2, 3, 4, 16], [5, 6, 7, 16]):
        whole = torch.zeros(shape[4 - (3 if layout == "thd" else 4) :])
        single = whole.narrow(rows, 0, 1)
        strides = [0 if dim == rows else stride for dim, stride in enumerate(whole.stride())]
        assert distinct_rows(whole, layout) is whole
        without_stride = single.as_strided(single.shape, strides)
        assert distinct_rows(without_stride, layout) is without_stride
        copy = distinct_rows(whole.as_strided(whole.shape, strides), layout)
        assert copy.is_contiguous() and copy.shape == whole.shape


def test_slopes_below_zero(npu: torch.device) -> None:
    """Scores grow with the distance then: those beyond a sequence's end must not overflow."""
    case = AttentionCase("slopes", batch=2, seqlen_q=40, seqlen_k=70, bias="hqk", seq_lens=(70, 21), alibi="h")
    found = []
    for device, backend in ((npu, "npu"), ("cpu", "cpu")):
        inputs = make_inputs(case, device)
        inputs.options["alibi_slopes"] = torch.tensor([-1.5, 0.5]).to(device)
        found.append(run_case(attention_function(case, backend=backend), inputs))
    for x, y in zip(*found, strict=True):
        assert x is None or torch.allclose(x.float(), y.float(), rtol=1e-2, atol=1e-2)


def test_a_bias_is_copied_only_where_kernels_need_it() -> None:
    whole = torch.randn(2, 3, 40, 70)
    for bias in (whole, whole[:, :1], whole[:1, :, 5:30, 7:], whole[..., :1].clone(), whole[0, 0, 0], whole.half()):
        assert as_read(bias).tensor is bias
    expanded = whole[:1, :, :, :1].clone().expand(2, 3, 40, 70)
    assert as_read(expanded) == (expanded, "q", (0, 40, 1))
    for bias in (
        whole.mT,
        whole.double(),
        whole[..., ::2],
        torch.randn(109).as_strided((40, 70), (1, 1)),
        whole[..., :1],
    ):
        read = as_read(bias)
        assert read.tensor is not None and read.tensor is not bias
        assert read.tensor.is_contiguous() and torch.equal(read.tensor, bias.float())


@pytest.mark.parametrize("dtype", [F16, F32])
def test_a_bias_of_the_lowest_value_masks(npu: torch.device, dtype: torch.dtype) -> None:
    """Masks are often made of the dtype's lowest finite value, or of -inf: also for rows that see nothing else."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 32).to(dtype) for n in (20, 40, 40))
    for value in (torch.finfo(dtype).min, float("-inf")):
        bias = torch.zeros(20, 40, dtype=dtype)
        bias[:, 30:] = value
        bias[3] = value
        actual = diyfa.flash_attention(*(x.to(npu) for x in (q, k, v)), attn_bias=bias.to(npu)).cpu()
        expected = reference_attention(q.double(), k.double(), v.double(), attn_bias=bias.double())
        torch.testing.assert_close(actual.double(), expected, atol=2e-3, rtol=2e-3)
