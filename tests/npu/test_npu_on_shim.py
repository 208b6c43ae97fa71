"""The NPU kernels and their dispatch on real npu tensors, against dense attention in float64."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import npu_dense as dense
import pytest
import torch
from npu_dense import Call

import diyfa
from diyfa import registry
from diyfa.options import WHOLE, AttentionOptions, pack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One call: sizes, dtype, layout ("bhsd", "bshd", "3d", "packed": slices of one QKV tensor) and features."""

    name: str
    dtype: torch.dtype = torch.float16
    batch: int = 1
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 130
    head_dim: int = 64
    head_dim_v: int = 0
    layout: str = "bhsd"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    seq_lens: tuple[int, ...] = ()


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = [
    Case("fp16"),
    Case("bf16", BF16),
    Case("fp32", F32),
    Case("fp16-causal", causal=True),
    Case("bf16-causal-gqa", BF16, heads=4, causal=True),
    Case("fp32-causal-mqa", F32, heads=3, heads_kv=1, causal=True),
    Case("whole-tiles", seqlen_q=128, seqlen_k=512, head_dim=64),
    Case("several-tiles", F32, seqlen_q=300, seqlen_k=290, head_dim=32, heads=1, heads_kv=1, causal=True),
    Case("more-queries-than-keys", seqlen_q=200, seqlen_k=70, causal=True),
    Case("one-query", seqlen_q=1, seqlen_k=257, causal=True),
    Case("one-key", F32, seqlen_q=40, seqlen_k=1),
    *(Case(f"head-dim-{d}", F32, head_dim=d, seqlen_q=33, seqlen_k=50, causal=True) for d in (1, 17, 40, 80, 100)),
    Case("head-dim-128-bf16", BF16, head_dim=128),
    Case("head-dim-160", head_dim=160, seqlen_q=40, seqlen_k=70),
    Case("head-dim-256", head_dim=256, seqlen_q=70, seqlen_k=90, causal=True),
    Case("head-dims-192-128", BF16, head_dim=192, head_dim_v=128, causal=True),
    Case("bshd", layout="bshd", batch=2, heads=4, heads_kv=2, causal=True),
    Case("3d", layout="3d", heads=4, heads_kv=2),
    Case("packed", layout="packed", batch=2, seqlen_q=60, seqlen_k=60, causal=True),
    Case("seq-lens", batch=3, seq_lens=(130, 1, 64)),
    Case("seq-lens-causal", BF16, batch=3, seq_lens=(130, 40, 65), causal=True, layout="bshd"),
    Case("seq-lens-window-sinks", F32, batch=2, seq_lens=(100, 3), window=(7, 2), sinks=True),
    Case("seq-lens-of-whole-tiles", batch=2, seqlen_q=20, seqlen_k=512, head_dim=16, seq_lens=(512, 100)),
    Case("window", window=(20, 11)),
    Case("window-left-only", F32, window=(9, -1)),
    Case("window-right-only", F32, window=(-1, 30)),
    Case("window-right-beyond-the-keys", F32, seqlen_q=90, seqlen_k=20, window=(-1, 40)),
    Case("window-causal-long", F32, seqlen_q=300, seqlen_k=330, window=(33, 0), head_dim=16),
    Case("softcap", BF16, softcap=3.0, causal=True),
    Case("alibi", alibi=True),
    Case("alibi-causal-gqa", BF16, heads=4, alibi=True, causal=True),
    Case("sinks", sinks=True),
    Case("sinks-on-rows-without-keys", F32, seqlen_q=150, seqlen_k=20, causal=True, sinks=True),
    Case("everything", batch=2, heads=4, causal=False, window=(40, 3), softcap=5.0, alibi=True, sinks=True,
         seq_lens=(90, 130)),
]  # fmt: skip


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    """q, k, v[, sinks] and dout, dlse on the CPU in (B, H, S, D); NaN beyond each sequence's end."""
    torch.manual_seed(CASES.index(case))
    dv = case.head_dim_v or case.head_dim
    b, h, hk, sq, sk = case.batch, case.heads, case.heads_kv, case.seqlen_q, case.seqlen_k
    shapes = {"q": (b, h, sq, case.head_dim), "k": (b, hk, sk, case.head_dim), "v": (b, hk, sk, dv)}
    inputs = {name: torch.randn(shape).to(case.dtype) for name, shape in shapes.items()}
    inputs["dout"] = torch.randn(b, h, sq, dv).to(case.dtype)
    inputs["dlse"] = torch.randn(b, h, sq)
    for i, length in enumerate(case.seq_lens):
        for name in ("k", "v"):
            inputs[name][i, :, length:] = NAN
        for name in ("q", "dout", "dlse"):
            inputs[name][i, :, min(length, sq) :] = NAN
    if case.sinks:
        inputs["sinks"] = torch.randn(h)
    return inputs


def on_device(case: Case, x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A (B, H, S, D) tensor on the device in the case's layout."""
    if case.layout == "bshd":
        return x.transpose(1, 2).contiguous().to(device)
    if case.layout == "3d":
        return x.flatten(0, 1).to(device)
    return x.to(device)


def run(
    case: Case, inputs: dict[str, torch.Tensor], device: torch.device, variant: str = "auto"
) -> dict[str, torch.Tensor]:
    """Forward and backward by diyfa on the device; everything back on the CPU in (B, H, S, D)."""
    call = diyfa.flash_attention_v2 if case.layout in ("bshd", "packed") else diyfa.flash_attention
    if case.layout == "packed":  # gradients arrive through the slices' base
        packed = torch.stack([inputs[n].transpose(1, 2) for n in "qkv"], 2).to(device)
        leaves = {name: packed[:, :, i].detach().requires_grad_() for i, name in enumerate("qkv")}
    else:
        leaves = {name: on_device(case, inputs[name], device).requires_grad_() for name in "qkv"}
    features: dict[str, Any] = {"window": case.window, "softcap": case.softcap, "variant": variant}
    if case.alibi:
        features["alibi_slopes"] = slopes(case).to(device)
    if case.seq_lens:
        features["seq_lens"] = torch.tensor(case.seq_lens, dtype=torch.int32).to(device)
    if case.sinks:
        features["sinks"] = leaves["sinks"] = inputs["sinks"].to(device).requires_grad_()
    out, lse = call(leaves["q"], leaves["k"], leaves["v"], case.causal, return_lse=True, **features)
    assert out.device.type == device.type and out.dtype == case.dtype and lse.dtype == torch.float32
    sequence_first = case.layout in ("bshd", "packed")
    dout = (inputs["dout"].transpose(1, 2).contiguous() if sequence_first else inputs["dout"]).reshape(out.shape)
    dlse = inputs["dlse"].reshape(lse.shape)
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [dout.to(device), dlse.to(device)])
    results = {"out": out, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}

    def back(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().cpu()
        if name == "dsinks":
            return x
        if sequence_first:
            return x.transpose(1, 2)
        heads = case.heads_kv if name in ("dk", "dv") else case.heads
        return x.unflatten(0, (case.batch, heads)) if case.layout == "3d" else x

    named = {name: back(name, x) for name, x in results.items()}
    return {**named, "lse": lse.detach().cpu().reshape(case.batch, case.heads, case.seqlen_q)}


def slopes(case: Case) -> torch.Tensor:
    return torch.tensor([2.0 ** -(h + 1) for h in range(case.heads)])


def check_against_dense(case: Case, npu: torch.device, variant: str) -> None:
    inputs = make_inputs(case)
    actual = run(case, inputs, npu, variant)
    call = Call(
        case.causal,
        case.window,
        case.softcap,
        slopes(case) if case.alibi else None,
        None,
        torch.tensor(case.seq_lens) if case.seq_lens else None,
    )
    # Beyond a sequence's end the truth has zeros where the kernels were given NaN.
    clean = {name: torch.nan_to_num(x) for name, x in inputs.items()}
    dout, dlse = clean.pop("dout"), clean.pop("dlse")
    truth = dense.with_gradients(clean, call, dout, dlse, torch.float64)
    rough = dense.with_gradients(clean, call, dout, dlse, case.dtype)
    dense.check(actual, truth, rough, dense.score_gradient_terms(clean, dout))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_dense(npu: torch.device, case: Case) -> None:
    check_against_dense(case, npu, "auto")


V1_CASES = [case for case in CASES if not (case.softcap or case.alibi or case.sinks)]


@pytest.mark.parametrize("case", V1_CASES, ids=lambda case: case.name)
def test_v1_against_dense(npu: torch.device, case: Case) -> None:
    """The other schedule, and gradients from the output and lse it leaves."""
    check_against_dense(case, npu, "v1")


def test_v1_refusals(npu: torch.device) -> None:
    q = torch.randn(1, 1, 16, 32, dtype=F16).to(npu)
    assert diyfa.kernels_for("npu") == ["v2", "v1", "split_kv"]
    assert diyfa.explain(q, q, q, variant="v1").kernel == "v1"
    with pytest.raises(ValueError, match="v1 does not implement softcap"):
        diyfa.flash_attention(q, q, q, softcap=3.0, variant="v1")
    wide = torch.randn(1, 1, 16, 264, dtype=F16).to(npu)
    with pytest.raises(ValueError, match="head_dim 264 is beyond 256"):
        diyfa.flash_attention(wide, wide, wide, variant="v1")


def test_gradients_are_deterministic(npu: torch.device) -> None:
    case = next(c for c in CASES if c.name == "bf16-causal-gqa")
    first, second = (run(case, make_inputs(case), npu) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_output_alone_can_be_differentiated(npu: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16).to(npu).requires_grad_() for _ in range(3))
    dout = torch.randn(1, 2, 20, 16)
    alone = torch.autograd.grad(diyfa.flash_attention(q, k, v), (q, k, v), dout.to(npu))
    out, lse = diyfa.flash_attention(q, k, v, return_lse=True)
    both = torch.autograd.grad([out, lse], (q, k, v), [dout.to(npu), torch.zeros(1, 2, 20).to(npu)])
    for a, b in zip(alone, both, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_dispatch_of_the_operator(npu: torch.device) -> None:
    """The registered operator itself runs on npu tensors."""
    q, k, v = (torch.randn(2, 30, 2, 32, dtype=F16).to(npu) for _ in range(3))
    options = AttentionOptions("bshd", 32**-0.5, window_right=0)
    out, lse = torch.ops.diyfa.attention_fwd(q, k, v, "", *pack(WHOLE, options))
    assert out.device == q.device and lse.device == q.device
    assert out.shape == q.shape and out.stride() == q.stride() and lse.shape == (2, 2, 30)


def test_registry_chooses_npu(npu: torch.device) -> None:
    q = torch.randn(1, 2, 20, 16).to(npu)
    explanation = diyfa.explain(q, q, q, causal=True)
    assert (explanation.backend, explanation.kernel) == ("npu", "v2")
    assert explanation.config is not None and "npu" in explanation.why
    assert registry.load_backend("npu").arch(npu) == torch.npu.get_device_name(0)


def test_tensors_on_two_devices_are_refused(npu: torch.device) -> None:
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(ValueError, match="same device"):
        diyfa.flash_attention(q.to(npu), q, q)


@pytest.mark.skipif(not INTERPRETED, reason="CPU tensors run on the npu backend only in the interpreter")
def test_cpu_tensors_in_the_interpreter(npu: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, 40, 24, dtype=BF16) for _ in range(3))
    on_cpu = diyfa.flash_attention(q, k, v, causal=True, backend="npu")
    on_npu = diyfa.flash_attention(q.to(npu), k.to(npu), v.to(npu), causal=True)
    assert torch.equal(on_cpu, on_npu.cpu())


def test_float64_is_refused(npu: torch.device) -> None:
    q = torch.randn(1, 1, 16, 32, dtype=torch.float64).to(npu)
    with pytest.raises(ValueError, match="no float64 matrix product"):
        diyfa.flash_attention(q, q, q)


MATMULS = [
    (dtype, precision, transposed)
    for dtype, precision in ((F16, None), (BF16, None), (F32, None), (F32, "ieee"))
    for transposed in ((False, False), (True, False), (False, True), (True, True))
]


@pytest.mark.parametrize(("dtype", "precision", "transposed"), MATMULS)
def test_matmul(npu: torch.device, dtype: torch.dtype, precision: str | None, transposed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    shapes = (150, 70), (70, 290)
    a, b = (torch.randn(*(s[::-1] if t else s)).to(dtype) for s, t in zip(shapes, transposed, strict=True))
    on_npu = [x.to(npu).t() if t else x.to(npu) for x, t in zip((a, b), transposed, strict=True)]
    c = diyfa.triton_matmul(*on_npu, precision=precision)
    compute = F16 if dtype == F32 and precision is None else dtype
    assert c.dtype == compute
    a, b = (x.t() if t else x for x, t in zip((a, b), transposed, strict=True))
    truth = a.double() @ b.double()
    error = (c.cpu().double() - truth).abs().max()
    budget = 2 * ((a.to(compute) @ b.to(compute)).double() - truth).abs().max()
    assert error <= budget + 1e-6 * truth.abs().max()


def test_matmul_tile_and_gradient(npu: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 48, dtype=F16), torch.randn(48, 80, dtype=F16)
    dc = torch.randn(64, 80, dtype=F16)
    on_npu = [x.to(npu).requires_grad_() for x in (a, b)]
    c = diyfa.triton_matmul(*on_npu, 32, 16, 32)
    da, db = torch.autograd.grad(c, on_npu, dc.to(npu))
    torch.testing.assert_close(da.cpu().double(), dc.double() @ b.double().t(), atol=2e-2, rtol=2e-3)
    torch.testing.assert_close(db.cpu().double(), a.double().t() @ dc.double(), atol=2e-2, rtol=2e-3)


def test_matmul_refusals(npu: torch.device) -> None:
    a = torch.randn(1024, 1024).to(npu)
    with pytest.raises(ValueError, match="no tf32"):
        diyfa.triton_matmul(a, a, precision="tf32")
    with pytest.raises(ValueError, match="does not fit"):
        diyfa.triton_matmul(a, a, 512, 512, 64)


@pytest.mark.skipif(not INTERPRETED, reason="a real NPU computes")
def test_the_shim_refuses_what_it_cannot_compute(npu: torch.device) -> None:
    """A refusal must be an error: were it silent, every comparison here would be worth nothing."""
    x = torch.ones(4).to(npu)
    with pytest.raises(RuntimeError, match="error code is 500002"):
        x + x
    assert torch.isnan(torch.empty(1000, device=npu).cpu()).all()
