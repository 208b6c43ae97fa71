"""Packed sequences, attn_bias and dropout on npu tensors, alone and together, against the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import npu_dense as dense
import pytest
import torch

import diyfa
from diyfa import reference_attention
from diyfa.backends.npu.attention.bias import as_read

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN = float("nan")


@dataclass(frozen=True)
class Packed:
    """Packed sequences: lengths of each, rows before the first and after the last that belong to none (NaN there)."""

    name: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] = ()
    dtype: torch.dtype = F16
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    outside: tuple[int, int] = (0, 0)
    sinks: bool = False
    alibi: bool = False
    options: dict[str, Any] = field(default_factory=dict)


PACKED = [
    Packed("equal-sides", (70, 1, 33), outside=(0, 5)),
    Packed("causal-bf16-gqa", (40, 135), (70, 140), dtype=BF16, heads=4, options={"causal": True}),
    Packed("rows-of-no-sequence", (20, 30), (25, 15), dtype=F32, outside=(3, 7), options={"causal": True}),
    Packed("empty-sequences", (0, 17, 9, 0, 5), (4, 20, 0, 0, 6), dtype=F32, sinks=True, outside=(2, 0)),
    Packed("more-queries", (90, 40), (13, 50), options={"causal": True}),
    Packed("many-tiles", (300, 20, 131), (290, 150, 129), heads=1, heads_kv=1, options={"window": (33, 10)}),
    Packed("softcap-alibi-dv", (50, 66), (80, 20), head_dim_v=48, alibi=True, options={"softcap": 5.0}),
    Packed("dropout", (40, 70), (60, 33), options={"dropout_p": 0.3}),
    Packed(
        "everything", (70, 20, 0, 41), (55, 90, 8, 41), heads=4, dtype=BF16, outside=(1, 4), sinks=True, alibi=True,
        options={"window": (30, 6), "softcap": 7.0, "dropout_p": 0.2},
    ),
    Packed("longest-fills-its-tiles", (20, 30), (512, 15), heads=1, heads_kv=1),
]  # fmt: skip


def offsets(lengths: tuple[int, ...], start: int) -> torch.Tensor:
    return torch.tensor([start, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def differentiate(call: Any, inputs: dict[str, Any], leaves: tuple[str, ...], dout: Any, dlse: Any) -> dict[str, Any]:
    """{"out", "lse", "d…"} of `call(**inputs)`; `leaves` are the inputs that want a gradient."""
    inputs = {name: x.detach().requires_grad_() if name in leaves else x for name, x in inputs.items()}
    out, lse = call(**inputs, return_lse=True)
    gradients = torch.autograd.grad([out, lse], [inputs[n] for n in leaves], [dout.to(out.dtype), dlse.to(lse.dtype)])
    results = {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}
    return {name: x.detach().cpu() for name, x in results.items()}


def place(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def cast(inputs: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Everything that is computed with in `dtype` (None: its own); NaN that no result may depend on as 0."""

    def of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.nan_to_num(x.detach()).to(dtype or x.dtype)

    return {name: of(x) for name, x in inputs.items()}


def check(actual: dict[str, Any], inputs: dict[str, Any], leaves: tuple[str, ...], dout: Any, dlse: Any) -> None:
    """Within the error budget of PyTorch's attention in the dtype of q. `inputs` are the reference's."""
    clean = torch.nan_to_num(dout), torch.nan_to_num(dlse)
    runs = [differentiate(reference_attention, cast(inputs, d), leaves, *clean) for d in (F64, None)]
    truth, rough = ({name: x.double() for name, x in run.items()} for run in runs)
    p = inputs.get("dropout_p", 0.0)
    terms = dense.score_gradient_terms(cast(inputs, F64), clean[0]) / (1 - p) + clean[1].abs().max().item()
    dense.check(actual, truth, rough, terms)


def check_packed(case: Packed, npu: torch.device, variant: str = "auto") -> None:
    torch.manual_seed(PACKED.index(case))
    lengths_k = case.lengths_k or case.lengths_q
    before, after = case.outside
    cu_q, cu_k = offsets(case.lengths_q, before), offsets(lengths_k, before)
    tq, tk = int(cu_q[-1]) + after, int(cu_k[-1]) + after
    dv = case.head_dim_v or case.head_dim
    q, dout = torch.randn(tq, case.heads, case.head_dim), torch.randn(tq, case.heads, dv)
    k, v = torch.randn(tk, case.heads_kv, case.head_dim), torch.randn(tk, case.heads_kv, dv)
    dlse = torch.randn(case.heads, tq)
    for x in (q, dout, dlse.t(), k, v):
        x[:before], x[x.shape[0] - after :] = NAN, NAN
    inputs: dict[str, Any] = {"q": q.to(case.dtype), "k": k.to(case.dtype), "v": v.to(case.dtype), **case.options}
    leaves: tuple[str, ...] = ("q", "k", "v")
    dout = dout.to(case.dtype)
    if case.alibi:
        inputs["alibi_slopes"] = torch.rand(len(case.lengths_q), case.heads)
    if case.sinks:
        inputs["sinks"] = torch.randn(case.heads)
        leaves += ("sinks",)
    if "dropout_p" in case.options:
        inputs["rng_state"] = torch.tensor([2**63 + 12345 - 2**64, 7])
    inputs |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    longest = {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(lengths_k)}
    on_npu = place({**inputs, **longest}, npu)
    attend = partial(diyfa.flash_attention_varlen, variant=variant)
    actual = differentiate(attend, on_npu, leaves, dout.to(npu), dlse.to(npu))
    check(actual, {**inputs, "layout": "thd"}, leaves, dout, dlse)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_sequences(npu: torch.device, case: Packed) -> None:
    check_packed(case, npu)


def test_offsets_beyond_the_tensors_are_cut_off(npu: torch.device) -> None:
    """Offsets on a device are not checked by the host: kernels must stay inside the tensors all the same."""
    whole = torch.full((50, 2, 32), NAN, dtype=F16)
    whole[10:40] = torch.randn(30, 2, 32).half()
    q = whole.to(npu)[10:40]
    wild = torch.tensor([-(2**31), 20, 15, 2**31 - 1], dtype=torch.int32).to(npu)  # rows 0 to 20, none, 15 to 30
    out = diyfa.flash_attention_varlen(q, q, q, wild, wild, 30, 30).cpu()
    assert torch.isfinite(out).all()
    tame = torch.tensor([0, 20, 30], dtype=torch.int32).to(npu)
    assert torch.equal(out[:15], diyfa.flash_attention_varlen(q, q, q, tame, tame, 30, 30).cpu()[:15])


@dataclass(frozen=True)
class Dense:
    """A batch with features; `bias` is the shape of attn_bias."""

    name: str
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 40
    seqlen_k: int = 70
    head_dim: int = 32
    dtype: torch.dtype = F16
    bias: tuple[int, ...] = ()
    bias_dtype: torch.dtype | None = None
    bias_view: str = (
        ""  # "expanded", "expanded over rows", "transposed", "overlapping": row i begins one value after row i - 1
    )
    seq_lens: tuple[int, ...] = ()
    alibi: bool = False
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


DENSE = [
    Dense("bias", bias=(2, 2, 40, 70)),
    Dense("bias-fp32-of-bf16", dtype=BF16, bias=(1, 2, 40, 70), bias_dtype=F32, options={"causal": True}),
    Dense("bias-bf16-of-fp32", dtype=F32, bias=(2, 1, 40, 70), bias_dtype=BF16),
    Dense("bias-fp64", dtype=F32, bias=(2, 1, 1, 70), bias_dtype=F64),
    Dense("bias-expanded", bias=(1, 2, 40, 1), bias_view="expanded"),
    Dense("bias-transposed", dtype=F32, bias=(2, 40, 70), bias_view="transposed"),
    Dense("bias-overlapping", dtype=F32, bias=(109,), bias_view="overlapping"),
    Dense("bias-1d", dtype=F32, bias=(70,)),
    Dense("bias-scalar", dtype=F32, bias=(1, 1), heads=4),
    Dense("bias-heads", dtype=F32, bias=(2, 1, 1)),
    Dense("bias-rows-sinks", batch=3, heads=4, bias=(3, 1, 40, 1), sinks=True, seq_lens=(70, 21, 5),
          options={"causal": True, "dropout_p": 0.2}),
    Dense("bias-scalar-sinks", dtype=BF16, bias=(2, 1, 1), bias_dtype=F32, sinks=True, seqlen_q=150,
          options={"window": (9, 3), "softcap": 6.0}),
    Dense("bias-rows-fp32", dtype=F32, seqlen_q=150, bias=(1, 2, 150, 1), options={"causal": True}),
    Dense("bias-keys-expanded", bias=(2, 1, 1, 70), bias_view="expanded over rows", sinks=True),
    Dense("bias-long", dtype=F32, batch=1, heads=1, heads_kv=1, seqlen_q=200, seqlen_k=190, bias=(1, 190),
          options={"window": (50, 20)}),
    Dense("bias-lens-alibi-up", bias=(2, 40, 70), seq_lens=(70, 21), alibi=True),
    Dense("dropout", options={"dropout_p": 0.4}),
    Dense("dropout-bf16-gqa-causal", dtype=BF16, heads=4, options={"dropout_p": 0.1, "causal": True}),
    Dense("dropout-fp32-long", dtype=F32, batch=1, seqlen_q=150, seqlen_k=270, options={"dropout_p": 0.5}),
    Dense("dropout-bias", dtype=F32, bias=(1, 2, 40, 70), options={"dropout_p": 0.25}),
    Dense("everything", dtype=BF16, heads=4, bias=(4, 40, 70), seq_lens=(70, 33), alibi=True, sinks=True,
          options={"window": (30, 9), "softcap": 6.0, "dropout_p": 0.2}),
]  # fmt: skip


def dense_inputs(case: Dense) -> tuple[dict[str, Any], tuple[str, ...], torch.Tensor, torch.Tensor]:
    """(inputs, names of those that want a gradient, dout, dlse)."""
    torch.manual_seed(DENSE.index(case))
    b, h, hk, sq, sk, d = case.batch, case.heads, case.heads_kv, case.seqlen_q, case.seqlen_k, case.head_dim
    shapes = {"q": (b, h, sq, d), "k": (b, hk, sk, d), "v": (b, hk, sk, d)}
    inputs: dict[str, Any] = {name: torch.randn(shape).to(case.dtype) for name, shape in shapes.items()}
    inputs |= case.options
    leaves: tuple[str, ...] = ("q", "k", "v")
    dout, dlse = torch.randn(b, h, sq, d).to(case.dtype), torch.randn(b, h, sq)
    for i, length in enumerate(case.seq_lens):
        inputs["k"][i, :, length:] = inputs["v"][i, :, length:] = NAN
        for x in (inputs["q"], dout, dlse):
            x[i, :, min(length, sq) :] = NAN
    if case.bias:
        bias = torch.randn(case.bias).to(case.bias_dtype or case.dtype)
        if case.bias_view.startswith("expanded"):
            bias = bias.expand(b, h, sq, sk)
        if case.bias_view == "transposed":
            bias = bias.mT.contiguous().mT
        if case.bias_view == "overlapping":
            bias = bias.as_strided((sq, sk), (1, 1))
        inputs["attn_bias"] = bias
        leaves += ("attn_bias",)
    if case.alibi:  # slopes below 0 make scores grow with the distance: beyond the rows they must not overflow
        inputs["alibi_slopes"] = torch.tensor([-1.5, 0.5] * (h // 2))
    if case.sinks:
        inputs["sinks"] = torch.randn(h)
        leaves += ("sinks",)
    if case.seq_lens:
        inputs["seq_lens"] = torch.tensor(case.seq_lens, dtype=torch.int32)
    if "dropout_p" in case.options:
        inputs["rng_state"] = torch.tensor([-987654321987654321, 2**40 + 3])
    return inputs, leaves, dout, dlse


def run_dense(case: Dense, npu: torch.device, variant: str = "auto") -> dict[str, torch.Tensor]:
    inputs, leaves, dout, dlse = dense_inputs(case)
    on_npu = place(inputs, npu)
    if case.bias_view == "expanded":
        on_npu["attn_bias"] = inputs["attn_bias"][:1, :, :, :1].to(npu).expand(inputs["attn_bias"].shape)
    if case.bias_view == "expanded over rows":
        on_npu["attn_bias"] = inputs["attn_bias"][:, :1, :1].to(npu).expand(inputs["attn_bias"].shape)
    if case.bias_view == "overlapping":
        on_npu["attn_bias"] = inputs["attn_bias"]._base.to(npu).as_strided(inputs["attn_bias"].shape, (1, 1))
    if case.bias_view == "transposed":
        on_npu["attn_bias"] = inputs["attn_bias"].mT.to(npu).mT
    attend = partial(diyfa.flash_attention, variant=variant)
    return differentiate(attend, on_npu, leaves, dout.to(npu), dlse.to(npu))


def check_dense(case: Dense, npu: torch.device, variant: str = "auto") -> None:
    actual = run_dense(case, npu, variant)
    inputs, leaves, dout, dlse = dense_inputs(case)
    if case.bias:
        assert actual["dattn_bias"].dtype == inputs["attn_bias"].dtype
    check(actual, inputs, leaves, dout, dlse)


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_features(npu: torch.device, case: Dense) -> None:
    check_dense(case, npu)


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


@pytest.mark.parametrize("name", ["bias-scalar", "dropout-bias"])
def test_gradients_of_the_bias_are_deterministic(npu: torch.device, name: str) -> None:
    case = next(c for c in DENSE if c.name == name)
    first, second = run_dense(case, npu), run_dense(case, npu)
    for key, x in first.items():
        assert torch.equal(x, second[key]), key


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


def test_rows_that_share_memory(npu: torch.device) -> None:
    """The gradient of a sum over rows has a stride of 0 between them, which a block pointer cannot have."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 2, 33, 32) for name in "qkv"}
    weight, dlse = torch.randn(32), torch.zeros(1, 2, 33)
    actual = differentiate(
        diyfa.flash_attention, place(inputs, npu), ("q", "k", "v"), weight.to(npu).expand(1, 2, 33, 32), dlse.to(npu)
    )
    check(actual, inputs, ("q", "k", "v"), weight.expand(1, 2, 33, 32), dlse)
