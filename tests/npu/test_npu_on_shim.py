"""The NPU kernels and their dispatch on npu tensors.

`make test-npu` runs the matrix of cases there too (tests/numerics/test_attention_matrix.py). The cases here straddle
the tiles of the NPU, which are larger than most of those cases.
"""

from __future__ import annotations

import os

import pytest
import torch

import diyfa
from diyfa import registry
from diyfa.testing import AttentionCase, assert_within_budget, attention_function, make_inputs, run_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def case(name: str, dtype: str = "float16", **changes: object) -> AttentionCase:
    """A case of 65 queries, 130 keys and heads of 64 features, or of packed sequences."""
    sizes = {"head_dim": 64} if "lens_q" in changes else {"seqlen_q": 65, "seqlen_k": 130, "head_dim": 64}
    layout = {"layout": "thd"} if "lens_q" in changes else {}
    return AttentionCase(name, dtype=dtype, **{**sizes, **layout, **changes})


# Both schedules compute these.
PLAIN = [
    case("fp16"),
    case("bf16", "bfloat16"),
    case("fp32", "float32"),
    case("bf16-causal-gqa", "bfloat16", heads=4, heads_kv=2, causal=True),
    case("fp32-causal-mqa", "float32", heads=3, heads_kv=1, causal=True),
    case("whole-tiles", seqlen_q=128, seqlen_k=512),
    case("several-tiles", "float32", seqlen_q=300, seqlen_k=290, head_dim=32, heads=1, causal=True),
    case("more-queries-than-keys", seqlen_q=200, seqlen_k=70, causal=True),
    case("one-query", seqlen_q=1, seqlen_k=257, causal=True),
    case("one-key", "float32", seqlen_q=40, seqlen_k=1),
    *(case(f"d{d}", "float32", head_dim=d, seqlen_q=33, seqlen_k=50, causal=True) for d in (1, 17, 40, 80, 100)),
    case("d128", "bfloat16", head_dim=128),
    case("d160", head_dim=160, seqlen_q=40, seqlen_k=70),
    case("d256", head_dim=256, seqlen_q=70, seqlen_k=90, causal=True),
    case("dv-192-128", "bfloat16", head_dim=192, head_dim_v=128, causal=True),
    case("lens", batch=3, seq_lens=(130, 1, 64)),
    case("lens-causal", "bfloat16", batch=3, seq_lens=(130, 40, 65), causal=True, layout="bshd"),
    case("lens-of-whole-tiles", batch=2, seqlen_q=20, seqlen_k=512, head_dim=16, seq_lens=(512, 100)),
    case("window", window=(20, 11)),
    case("window-left", "float32", window=(9, -1)),
    case("window-right", "float32", window=(-1, 30)),
    case("window-right-beyond-the-keys", "float32", seqlen_q=90, seqlen_k=20, window=(-1, 40)),
    case("window-causal-long", "float32", seqlen_q=300, seqlen_k=330, window=(33, 0), head_dim=16),
]
FEATURES = [
    case("alibi-causal-gqa", "bfloat16", heads=4, heads_kv=2, alibi="h", causal=True),
    case("sinks-on-rows-without-keys", "float32", seqlen_q=150, seqlen_k=20, causal=True, sinks=True),
    case("dropout-long", "float32", seqlen_q=150, seqlen_k=270, dropout_p=0.5),
    case("bias-rows", "float32", seqlen_q=150, bias="1hq1", causal=True),
    case("bias-long", "float32", heads=1, seqlen_q=200, seqlen_k=190, bias="1k", window=(50, 20)),
    case("bias-heads-sinks", "bfloat16", seqlen_q=150, bias="h11", bias_dtype="float32", sinks=True, window=(9, 3),
         softcap=6.0),
    case("bias-rows-sinks", batch=3, heads=4, heads_kv=2, bias="b1q1", sinks=True, seq_lens=(70, 21, 5), causal=True,
         dropout_p=0.2),
    case("everything", "bfloat16", batch=2, heads=4, heads_kv=2, bias="hqk", seq_lens=(90, 130), alibi="h", sinks=True,
         window=(40, 3), softcap=5.0, dropout_p=0.2),
    # Heads whose float32 gradients have more columns than one product: two tiles of columns each
    # (compat.split_columns), of which the second may be padded.
    case("mla", "float32", heads_kv=1, seqlen_q=40, seqlen_k=70, head_dim=576, head_dim_v=512, causal=True),
    case("padded", "float32", batch=2, heads=1, seqlen_q=40, seqlen_k=50, head_dim=521, head_dim_v=40,
         seq_lens=(50, 23)),
    case("one-key-of-560", "float32", heads=1, seqlen_q=20, seqlen_k=1, head_dim=560, head_dim_v=16, layout="bshd"),
]  # fmt: skip
PACKED = [
    case("packed-bf16-gqa", "bfloat16", lens_q=(40, 135), lens_k=(70, 140), heads=4, heads_kv=2, causal=True),
    case("packed-empty", "float32", lens_q=(0, 17, 9, 0, 5), lens_k=(4, 20, 0, 0, 6), sinks=True, slack=2),
    case("packed-more-queries", lens_q=(90, 40), lens_k=(13, 50), causal=True),
    case("packed-many-tiles", lens_q=(300, 20, 131), lens_k=(290, 150, 129), heads=1, window=(33, 10)),
    case("packed-longest-fills-its-tiles", lens_q=(20, 30), lens_k=(512, 15), heads=1),
    case("packed-everything", "bfloat16", head_dim_v=48, lens_q=(70, 20, 0, 41), lens_k=(55, 90, 8, 41), heads=4,
         heads_kv=2, slack=4, sinks=True, alibi="bh", window=(30, 6), softcap=7.0, dropout_p=0.2),
]  # fmt: skip
CASES = {x.name: x for x in (*PLAIN, *FEATURES, *PACKED)}


def check(case: AttentionCase, npu: torch.device, variant: str = "auto") -> None:
    """Forward and backward are within the error budget."""
    results = run_case(attention_function(case, variant=variant), make_inputs(case, npu))
    assert_within_budget(results, case)


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(npu: torch.device, name: str) -> None:
    check(CASES[name], npu)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_v1_against_the_reference(npu: torch.device, case: AttentionCase) -> None:
    """The other schedule, and gradients from the output and lse it leaves."""
    check(case, npu, "v1")


@pytest.mark.parametrize("name", ["bf16-causal-gqa", "bias-heads-sinks", "bias-rows-sinks"])
def test_gradients_are_deterministic(npu: torch.device, name: str) -> None:
    first, second = (run_case(attention_function(CASES[name]), make_inputs(CASES[name], npu)) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert x is None or torch.equal(x, y)


def test_v1_refusals(npu: torch.device) -> None:
    q = torch.randn(1, 1, 16, 32, dtype=F16).to(npu)
    assert diyfa.kernels_for("npu") == ["v2", "v1", "split_kv"]
    assert diyfa.explain(q, q, q, variant="v1").kernel == "v1"
    with pytest.raises(ValueError, match="v1 does not implement softcap"):
        diyfa.flash_attention(q, q, q, softcap=3.0, variant="v1")
    wide = torch.randn(1, 1, 16, 264, dtype=F16).to(npu)
    with pytest.raises(ValueError, match="head_dim 264 is beyond 256"):
        diyfa.flash_attention(wide, wide, wide, variant="v1")


def test_registry_chooses_npu(npu: torch.device) -> None:
    q = torch.randn(1, 2, 20, 16).to(npu)
    explanation = diyfa.explain(q, q, q, causal=True)
    assert (explanation.backend, explanation.kernel) == ("npu", "v2")
    assert explanation.config is not None and "npu" in explanation.why
    assert registry.load_backend("npu").arch(npu) == torch.npu.get_device_name(0)


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
