"""float8 and int8 attention on every backend that has it, against the float64 reference of the quantised inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from targets import TARGETS, Target

import diyfa
from diyfa import registry
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, WEIGHT_SHIFT, Quantized
from diyfa.features import dtype_name
from diyfa.testing import LSE_UNIT, Error, error_budget, measure_error, rounding_unit
from diyfa.yardstick import largest_scores, plain_flash_attention

E4M3, E5M2, INT8, BF16, F16, F32 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16, torch.float32,
)  # fmt: skip
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}


@dataclass(frozen=True)
class Case:
    """One call. `kind`: of the descales. `means`: k and v were smoothed. `data`: how q, k and v are distributed."""

    dtype: torch.dtype = E4M3
    value_dtype: torch.dtype | None = None
    kind: str = "tensor"
    means: bool = False
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    head_dim: int = 32
    head_dim_v: int = 0
    layout: str = "bhsd"
    data: str = "normal"
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    lengths: tuple[int, ...] | None = None  # seq_lens, or those of packed sequences
    out_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)


def quantised(x: torch.Tensor, dtype: torch.dtype, kind: str, block: int, mean: torch.Tensor | None) -> Quantized:
    """x (B, H, S, D) in `dtype`, by other code than the library's."""
    if dtype in (BF16, F16):
        return Quantized(x.to(dtype), None, mean)
    magnitude = x.abs().amax(-1)
    if kind == "tensor":
        descale = magnitude.max().reshape(1)
        rows = descale.reshape(1, 1, 1, 1)
    elif kind == "head":
        descale = magnitude.amax(-1)
        rows = descale[:, :, None, None]
    else:
        descale = torch.stack([part.amax(-1) for part in magnitude.split(block, -1)], -1)
        rows = torch.cat([descale[..., i // block : i // block + 1] for i in range(x.shape[2])], -1)[..., None]
    descale, rows = descale / LARGEST[dtype], rows / LARGEST[dtype]
    values = x / torch.where(rows == 0, 1.0, rows)
    return Quantized((values.round() if dtype == INT8 else values).to(dtype), descale, mean)


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    batch = len(case.lengths) if case.lengths else 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = random(batch, case.heads, case.seqlen_q, case.head_dim)
    k = random(batch, case.heads_kv, case.seqlen_k, case.head_dim)
    v = random(batch, case.heads_kv, case.seqlen_k, case.head_dim_v or case.head_dim)
    if case.data == "outliers":  # a few channels hold nearly everything
        q[..., 3] *= 20
        k[..., 3] *= 30
        v[..., 5] *= 50
    elif case.data == "peaks":  # one dominant key, and rows of small weights
        q[..., 0], k[..., 0] = 6.0, 0.0
        k[:, :, case.seqlen_k // 2, 0] = 12.0
    elif case.data == "sink":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :, 0, 0] = 20.0
    elif case.data == "equal":
        q[:], k[:] = q[:, :, :1], k[:, :, :1]
    elif case.data == "zeros":
        q.zero_()
        v.zero_()
    elif case.data == "large":
        q, k = q * 30, k * 30
    return q, k, v


def make_call(case: Case) -> tuple[tuple[Quantized, Quantized, Quantized], dict[str, Any]]:
    q, k, v = draw(case)
    batch, generator = q.shape[0], torch.Generator().manual_seed(8)
    k_mean = v_mean = None
    if case.means:
        k_mean = 4 * torch.randn(batch, case.heads_kv, q.shape[3], generator=generator)
        v_mean = 4 * torch.randn(batch, case.heads_kv, v.shape[3], generator=generator)
    if case.kind == "head":  # of the group that shares a KV head
        group = case.heads // case.heads_kv
        whole = quantised(q.unflatten(1, (-1, group)).flatten(2, 3), case.dtype, "head", 0, None)
        values = whole.values.unflatten(2, (group, -1)).flatten(1, 2)
        q8 = Quantized(values, whole.descale)
    else:
        q8 = quantised(q, case.dtype, case.kind, BLOCK_Q, None)
    k8 = quantised(k, case.dtype, case.kind, BLOCK_K, k_mean)
    v8 = quantised(v, case.value_dtype or case.dtype, "head" if case.kind == "block" else case.kind, 0, v_mean)
    options = dict(case.options)
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, generator=generator)
    if case.alibi:
        options["alibi_slopes"] = torch.rand(case.heads, generator=generator)
    if case.bias:
        options["attn_bias"] = torch.randn(case.seqlen_q, case.seqlen_k, generator=generator)
    parts = q8, k8, v8
    if case.lengths and case.layout == "thd":
        offsets = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        parts = tuple(
            x._replace(values=torch.cat([x.values[i, :, :n].transpose(0, 1) for i, n in enumerate(case.lengths)]))
            for x in parts
        )
    elif case.lengths:
        options["seq_lens"] = torch.tensor(case.lengths, dtype=torch.int32)
        for x in parts:  # what lies beyond is never read into a result
            for i, n in enumerate(case.lengths):
                if x.values.dtype != INT8:
                    x.values[i, :, n:] = float("nan")
    elif case.layout == "bshd":
        parts = tuple(x._replace(values=x.values.transpose(1, 2).contiguous()) for x in parts)
    return parts, options


FUNCTIONS = {
    "bhsd": diyfa.flash_attention, "bshd": diyfa.flash_attention_v2, "thd": diyfa.flash_attention_varlen
}  # fmt: skip


def run(case: Case, target: Target, variant: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    parts, options = make_call(case)

    def move(x: Any) -> Any:
        return x.to(target.device) if isinstance(x, torch.Tensor) else x

    parts = tuple(Quantized(*map(move, x)) for x in parts)
    options = {name: move(x) for name, x in options.items()}
    if case.layout == "thd":
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    out, lse = FUNCTIONS[case.layout](
        *parts, **options, return_lse=True, backend=target.backend, variant=variant, out_dtype=case.out_dtype
    )
    return out.cpu(), lse.cpu()


def check(case: Case, target: Target, variant: str = "auto") -> None:
    out, lse = run(case, target, variant)
    parts, options = make_call(case)
    options["layout"] = case.layout
    want, want_lse = diyfa.reference_attention(*parts, **options, return_lse=True, dtype=torch.float64)
    plain, plain_lse = plain_flash_attention(*parts, **options, return_lse=True, out_dtype=case.out_dtype)
    assert out.dtype == plain.dtype and lse.dtype == torch.float32
    scores = LSE_UNIT * largest_scores(*parts, **options, dtype=torch.float64).abs()
    scores = scores[scores.isfinite()]
    unit = Error(float(scores.max()), float(scores.square().mean().sqrt()))
    for name, got, low, truth, rounding in (
        ("out", out, plain, want, rounding_unit(want, out.dtype)), ("lse", lse, plain_lse, want_lse, unit),
    ):  # fmt: skip
        error, budget = measure_error(got, truth), error_budget(measure_error(low, truth), rounding)
        assert error.max_abs <= budget.max_abs and error.rms <= budget.rms, f"{name}: {error}, allowed {budget}"


# No int8 or float8 on Ascend: its refusal has a test below.
targets = pytest.mark.parametrize("backend", [name for name in TARGETS if name != "npu"])

CASES = {
    "e4m3": Case(),
    "e4m3_head": Case(kind="head", heads=4, heads_kv=2),
    "e4m3_block": Case(kind="block", seqlen_q=150, seqlen_k=200),
    "e4m3_means": Case(kind="head", means=True, heads=4, heads_kv=1),
    "e5m2": Case(dtype=E5M2),
    "int8_bf16": Case(dtype=INT8, value_dtype=BF16, kind="block", seqlen_q=140, seqlen_k=140),
    "int8_f16": Case(dtype=INT8, value_dtype=F16, kind="head", means=True),
    "int8_e4m3": Case(dtype=INT8, value_dtype=E4M3, kind="block", means=True),
    "int8_e5m2": Case(dtype=INT8, value_dtype=E5M2),
    "causal": Case(means=True, options={"causal": True}),
    "window": Case(dtype=INT8, value_dtype=BF16, kind="block", seqlen_k=150, options={"window": (40, 3)}),
    "softcap": Case(kind="block", means=True, options={"softcap": 8.0, "causal": True}),
    "softcap_int8": Case(dtype=INT8, value_dtype=E4M3, means=True, options={"softcap": 8.0}),
    "sinks": Case(means=True, sinks=True, options={"causal": True}),
    "alibi": Case(kind="head", means=True, alibi=True, sinks=True),
    "bias": Case(means=True, bias=True),
    "scale_below_0": Case(kind="block", means=True, options={"sm_scale": -0.4, "causal": True}),
    "scale_0": Case(means=True, options={"sm_scale": 0.0}),
    "cross": Case(seqlen_q=20, seqlen_k=131, kind="block", options={"causal": True}),
    "one_query": Case(seqlen_q=1, seqlen_k=90, kind="head"),
    "one_visible_key": Case(means=True, options={"window": (0, 0)}),
    "no_visible_key": Case(seqlen_q=90, seqlen_k=30, means=True, sinks=True, options={"causal": True}),
    "seq_lens": Case(lengths=(50, 7, 70), kind="block", means=True, options={"causal": True}),
    "packed": Case(layout="thd", lengths=(50, 1, 70), kind="head", means=True, heads=4, options={"causal": True}),
    "packed_blocks": Case(layout="thd", lengths=(150, 20), seqlen_q=150, seqlen_k=150, kind="block", means=True),
    "bshd": Case(layout="bshd", kind="block", dtype=INT8, value_dtype=BF16),
    "odd_head_dim": Case(head_dim=40, head_dim_v=24, means=True),
    "narrow_head_dim": Case(dtype=INT8, value_dtype=BF16, head_dim=8),
    "float32_out": Case(out_dtype=F32),
    "float16_out": Case(out_dtype=F16, dtype=INT8, value_dtype=BF16),
    "outliers": Case(data="outliers", kind="head"),
    "outliers_int8": Case(data="outliers", dtype=INT8, value_dtype=E4M3, kind="block"),
    "peaks": Case(data="peaks", seqlen_k=200),
    "peaks_int8": Case(data="peaks", seqlen_k=200, dtype=INT8, value_dtype=E4M3, options={"causal": True}),
    "sink": Case(data="sink", kind="block", seqlen_k=150, options={"causal": True}),
    "equal_rows": Case(data="equal", seqlen_k=300, kind="block"),
    "zeros": Case(data="zeros", kind="head", means=True),
    "large_scores": Case(data="large", kind="head"),
}  # fmt: skip


@targets
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matrix(backend: str, case: Case) -> None:
    check(case, TARGETS[backend])


@pytest.mark.parametrize(
    "case", [CASES["e4m3_block"], CASES["sinks"], CASES["int8_bf16"]], ids=["e4m3", "sinks", "int8"]
)
def test_v1_of_the_cpu(case: Case) -> None:
    check(case, TARGETS["cpu"], "v1")


@targets
def test_random_calls(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    for _ in range(8):
        dtype = pick(E4M3, E4M3, E5M2, INT8)
        heads_kv = pick(1, 2)
        options: dict[str, Any] = pick(
            {}, {"causal": True}, {"window": (pick(0, 13, 90), pick(0, 5))}, {"softcap": 5.0}
        )
        case = Case(
            dtype=dtype, value_dtype=pick(BF16, F16, E4M3) if dtype == INT8 else None,
            kind=pick("tensor", "head", "block"),
            means=pick(True, False), heads=heads_kv * pick(1, 2), heads_kv=heads_kv, seqlen_q=pick(1, 33, 130),
            seqlen_k=pick(3, 64, 129), head_dim=pick(16, 32, 40), sinks=pick(True, False),
            data=pick("normal", "outliers", "peaks", "sink"), options=options,
        )  # fmt: skip
        check(case, TARGETS[backend])


@targets
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30], ids=["zero", "tiny", "huge"])
def test_extreme_descales(backend: str, factor: float) -> None:
    """Beside a scale that makes up for them, results are those of ordinary ones; a factor of 0 makes all scores 0."""
    target = TARGETS[backend]
    (q, k, v), _ = make_call(Case(kind="head"))
    q, k, v = (Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in (q, k, v))
    assert k.descale is not None
    scale = 0.3 / factor if factor else 0.3
    changed = k._replace(descale=k.descale * factor)
    out, lse = diyfa.flash_attention(q, changed, v, sm_scale=scale, return_lse=True, backend=backend)
    want, want_lse = diyfa.flash_attention(q, k, v, sm_scale=0.3 if factor else 0.0, return_lse=True, backend=backend)
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@targets
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_descale_shows(backend: str, name: str) -> None:
    target = TARGETS[backend]
    parts, _ = make_call(Case(kind="head"))
    given = dict(zip("qkv", parts, strict=True))
    descale = given[name].descale
    assert descale is not None
    descale[1, 0] = float("nan")
    moved = [Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in given.values()]
    out = diyfa.flash_attention(*moved, backend=backend).cpu()
    assert out[1, 0].isnan().all() and out[0].isfinite().all() and out[1, 1].isfinite().all()


def test_scaled_weights_do_not_saturate() -> None:
    """The factor is the largest power of two that the dtype holds: a weight of 1 becomes that number."""
    for dtype in (E4M3, E5M2):
        factor = 2.0 ** WEIGHT_SHIFT[dtype_name(dtype)]
        assert factor < LARGEST[dtype] < 2 * factor


@targets
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_mean_that_is_not_finite_shows(backend: str, value: float) -> None:
    """In every row of its head that sees a key, although a softmax does not see the mean of k."""
    target = TARGETS[backend]
    (q, k, v), _ = make_call(Case(kind="head", means=True, seqlen_q=70, seqlen_k=40))
    assert k.mean is not None
    k.mean[1, 0] = value
    q8, k8, v8 = (Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in (q, k, v))
    out = diyfa.flash_attention(q8, k8, v8, causal=True, backend=backend).cpu()
    assert out[1, 0, 30:].isnan().all() and (out[1, 0, :30] == 0).all()
    assert out[0].isfinite().all() and out[1, 1].isfinite().all()


@targets
def test_small_weights_are_not_lost(backend: str) -> None:
    """One key has most of the weight, 400 others 2**-10 each: unscaled, float8 would make all of them 0."""
    target = TARGETS[backend]
    q, k = torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 401, 32)
    q[..., 0], k[:, :, 0, 0] = 1.0, 7.0
    v = torch.ones(1, 1, 401, 32)
    v[:, :, 0] = 0.0
    one = torch.ones(1, device=target.device)
    parts = [Quantized(x.to(E4M3).to(target.device), one) for x in (q, k, v)]
    out = diyfa.flash_attention(*parts, sm_scale=1.0, backend=backend).cpu()
    want = 400 / (400 + torch.e**7)
    torch.testing.assert_close(out.float(), torch.full_like(out, want, dtype=F32), rtol=0.07, atol=0)


@targets
def test_a_quantised_call_and_its_tensors_are_one_call(backend: str) -> None:
    target = TARGETS[backend]
    (q, k, v), _ = make_call(Case(kind="block", means=True, seqlen_k=130))
    q, k, v = (Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in (q, k, v))
    wrapped = diyfa.flash_attention(q, k, v, causal=True, backend=backend)
    named = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale, "k_mean": k.mean, "v_mean": v.mean}
    for _ in range(3):  # a repeated call is found by its key
        plain = diyfa.flash_attention(q.values, k.values, v.values, causal=True, backend=backend, **named)
        assert torch.equal(wrapped.cpu(), plain.cpu())
    changed = diyfa.flash_attention(
        q.values, k.values, v.values, causal=True, backend=backend, **{**named, "v_mean": None}
    )
    assert not torch.equal(wrapped.cpu(), changed.cpu())


def test_kernels_without_these_types_say_so() -> None:
    from diyfa.problem import AttentionProblem

    pytest.importorskip("triton")
    problem = AttentionProblem("cuda", "sm_80", "float8_e4m3fn", "bhsd", 2, 4, 4, 64, 64, 64, 64)
    cuda, npu = registry.load_backend("cuda"), registry.load_backend("npu")
    assert cuda.unsupported(problem) == "float8 needs sm_89 or later, this is sm_80"
    assert cuda.unsupported(problem.replace(dtype="int8", value_dtype="bfloat16")) is None
    assert cuda.unsupported(problem.replace(dtype="int8", value_dtype="float8_e4m3fn")) is not None
    assert (
        cuda.unsupported(problem.replace(arch="sm_75", dtype="int8", value_dtype="float16"))
        == "int8 needs sm_80 or later, this is sm_75"
    )
    for dtype in ("float8_e4m3fn", "int8"):
        described = problem.replace(device_type="npu", arch="Ascend910B3", dtype=dtype)
        with pytest.raises(ValueError, match=f"no {dtype} matrix product"):
            registry.choose("attention_fwd", described, npu)
    hopper = problem.replace(arch="sm_90")
    assert registry.choose("attention_fwd", hopper, cuda).name == "v2"
    for variant in ("sm90", "v1", "split_kv"):
        with pytest.raises(ValueError, match=r"eight_bits|takes float16 and bfloat16, not float8_e4m3fn"):
            registry.choose("attention_fwd", hopper.replace(batch_invariant=variant == "split_kv"), cuda, variant)
    for kernel in [kernel for name in ("cuda", "cpu") for kernel in registry.load_backend(name).kernels]:
        if kernel.op == "attention_bwd":
            assert kernel.unsupported(hopper) is not None, kernel.name
