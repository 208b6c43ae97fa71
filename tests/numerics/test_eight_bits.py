"""float8 and int8 attention on every backend that has it, against the float64 reference of the quantised inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from eight_bit_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    INT8,
    LARGEST,
    Case,
    check,
    check_not_finite,
    make_call,
    with_mask,
    with_score_function,
)
from targets import TARGETS, Target

import diyfa
from diyfa import registry
from diyfa.eight_bits import WEIGHT_SHIFT, Quantized
from diyfa.features import dtype_name
from diyfa.problem import AttentionProblem

try:
    import hopper_interpreted  # before any kernel runs

    INTERPRETED = ["sm90"] if hopper_interpreted.is_interpreting() else []
except (ImportError, pytest.skip.Exception):  # another Triton, or none
    INTERPRETED = []

targets = pytest.mark.parametrize("backend", TARGETS)


def on(backend: str, case: Case) -> Case:
    """The case in types that the backend has: of Ascend's kernels int8 q and k beside a v of 16 bits."""
    if backend == "sm90":  # which has no narrower heads
        return replace(case, head_dim=64)
    value_dtype = case.value_dtype or case.dtype
    if backend != "npu" or (case.dtype == INT8 and value_dtype in (BF16, F16)):
        return case
    return replace(case, dtype=INT8, value_dtype=F16 if E5M2 in (case.dtype, value_dtype) else BF16)


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
    "saturated_int8": Case(
        data="saturated", dtype=INT8, value_dtype=BF16, kind="block", head_dim=128, seqlen_k=200,
        options={"causal": True},
    ),
}  # fmt: skip


@targets
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matrix(backend: str, case: Case) -> None:
    check(on(backend, case), TARGETS[backend])


@pytest.mark.parametrize(
    "case", [CASES["e4m3_block"], CASES["sinks"], CASES["int8_bf16"]], ids=["e4m3", "sinks", "int8"]
)
def test_v1_of_the_cpu(case: Case) -> None:
    check(case, Target("cpu", "cpu", False), "v1")


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
        check(on(backend, case), TARGETS[backend])


@pytest.fixture(params=[*TARGETS, *INTERPRETED])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend, and the Hopper kernel in the Gluon interpreter."""
    if request.param in INTERPRETED:
        hopper_interpreted.interpret(monkeypatch, seed=3)
    return request.param


def run_by(kernel: str) -> tuple[Target, str]:
    """The target and the variant."""
    return (TARGETS["cuda"], "sm90") if kernel == "sm90" else (TARGETS[kernel], "auto")


def attend(kernel: str, *parts: Quantized, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse on the CPU."""
    target, variant = run_by(kernel)
    moved = [Quantized(*(y if y is None else y.to(target.device) for y in x)) for x in parts]
    out, lse = diyfa.flash_attention(*moved, **options, return_lse=True, backend=target.backend, variant=variant)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30], ids=["zero", "tiny", "huge"])
def test_extreme_descales(kernel: str, factor: float) -> None:
    """Beside a scale that makes up for them, results are those of ordinary ones; a factor of 0 makes all scores 0."""
    (q, k, v), _ = make_call(on(kernel, Case(kind="head", seqlen_q=130, seqlen_k=130)))
    assert k.descale is not None
    changed = k._replace(descale=k.descale * factor)
    found = attend(kernel, q, changed, v, sm_scale=0.3 / factor if factor else 0.3, causal=True)
    want = attend(kernel, q, k, v, sm_scale=0.3 if factor else 0.0, causal=True)
    torch.testing.assert_close(found[0].float(), want[0].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [2.0**-105, 2.0**105], ids=["tiny_q", "huge_q"])
def test_descales_that_make_up_for_each_other(kernel: str, factor: float) -> None:
    """Results are those of ordinary ones, with descales of blocks and without a mask, too."""
    (q, k, v), _ = make_call(on(kernel, Case(kind="block", seqlen_q=130, seqlen_k=256)))
    assert q.descale is not None and k.descale is not None
    changed = q._replace(descale=q.descale * factor), k._replace(descale=k.descale / factor)
    for causal in (False, True):
        found, want = attend(kernel, *changed, v, causal=causal), attend(kernel, q, k, v, causal=causal)
        torch.testing.assert_close(found[0].float(), want[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=1e-5)


@targets
def test_a_v_of_16_bits_may_have_a_descale(backend: str) -> None:
    (q, k, v), _ = make_call(Case(dtype=INT8, value_dtype=F16, kind="head"))
    for descale in (torch.tensor([[2.0, 0.5], [-4.0, 1.0]]), torch.tensor(8.0)):
        out, _ = attend(backend, q, k, v._replace(descale=descale), out_dtype=F32)
        want, _ = attend(backend, q, k, v, out_dtype=F32)
        torch.testing.assert_close(out, want * (descale[..., None, None] if descale.dim() else descale))


@pytest.mark.parametrize("backend", [name for name in TARGETS if name != "cuda"])
@pytest.mark.parametrize("change", [with_mask, with_score_function])
def test_int8_with_a_mask_or_a_score_function(backend: str, change: Callable[[Case], Case]) -> None:
    for kind in ("head", "block"):
        case = Case(dtype=INT8, value_dtype=BF16, kind=kind, means=True, sinks=True, seqlen_q=150, seqlen_k=130)
        check(change(case), TARGETS[backend])


@targets
def test_blocks_that_fill_the_sequences(backend: str) -> None:
    """Descales of blocks, where no last block is shorter: the next head's follow at once."""
    case = Case(kind="block", seqlen_q=128, seqlen_k=128, heads=4, heads_kv=2, options={"causal": True})
    check(on(backend, case), TARGETS[backend])


def test_scaled_weights_do_not_saturate() -> None:
    """The factor is the largest power of two that the dtype holds: a weight of 1 becomes that number."""
    for dtype in (E4M3, E5M2):
        factor = 2.0 ** WEIGHT_SHIFT[dtype_name(dtype)]
        assert factor < LARGEST[dtype] < 2 * factor


NOT_FINITE = [
    ("q_descale", float("nan")), ("k_descale", float("nan")), ("v_descale", float("nan")), ("k_mean", float("nan")),
    ("k_mean", float("inf")), ("v_mean", float("nan")), ("v_mean", float("-inf")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 3), "softcap": 9.0}], ids=["causal", "softcap"])
def test_what_is_not_finite_shows_where_a_key_is_seen(
    kernel: str, name: str, value: float, options: dict[str, Any]
) -> None:
    """In every row of its head that sees a key, with sinks and without, and in no row that sees none."""
    target, variant = run_by(kernel)
    if kernel == "sm90":  # which takes no softcap beside a mean
        options = {key: x for key, x in options.items() if key != "softcap"}
    for kind, means, sinks, types in (
        ("head", True, True, {}),
        ("block", True, False, {}),
        ("head", "mean" in name, True, {}),
        ("block", True, True, {"dtype": INT8, "value_dtype": BF16}),
    ):
        case = Case(kind=kind, means=means, sinks=sinks, seqlen_q=70, seqlen_k=40, options=options, **types)
        check_not_finite(on(kernel, case), target, name, value, 27 if "window" in options else 30, variant)


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
def test_what_is_not_finite_shows_in_v1_of_the_cpu(name: str, value: float) -> None:
    case = Case(kind="head", means=True, sinks=True, seqlen_q=70, seqlen_k=40, options={"causal": True})
    check_not_finite(case, Target("cpu", "cpu", False), name, value, first=30, variant="v1")


def test_blocks_of_a_longest_sequence_beyond_all_rows(kernel: str) -> None:
    """`max_seqlen` may be larger than all sequences together. Descales of blocks are laid out by it."""
    case = on(kernel, Case(layout="thd", lengths=(70, 20), heads=2, heads_kv=2, seqlen_q=90, seqlen_k=90))
    (q, k, v), options = make_call(case)
    generator, (target, variant) = torch.Generator().manual_seed(0), run_by(kernel)
    q_descale, k_descale = (torch.rand(2, 2, blocks, generator=generator) / 30 for blocks in (3, 5))
    descales = {"q_descale": q_descale, "k_descale": k_descale}
    tensors = {"q": q.values, "k": k.values, "v": v.values, **options, **descales}
    results = diyfa.flash_attention_varlen(
        **{name: x.to(target.device) for name, x in tensors.items()}, max_seqlen_q=300, max_seqlen_k=300,
        return_lse=True, backend=target.backend, variant=variant,
    )  # fmt: skip
    want = diyfa.reference_attention(**tensors, layout="thd", return_lse=True, dtype=torch.float64)
    torch.testing.assert_close(results[1].cpu(), want[1].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0].cpu().double(), want[0], rtol=0.1, atol=0.1 * float(want[0].abs().max()))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 3)], ids=["all", "window"])
def test_what_is_not_finite_does_not_show_in_a_sequence_without_keys(kernel: str, window: tuple[int, int]) -> None:
    target, variant = run_by(kernel)
    case = Case(INT8, BF16, "head", True, layout="thd", lengths=(70, 20), sinks=True, seqlen_q=70, seqlen_k=70)
    (q, k, v), options = make_call(on(kernel, case))
    assert k.mean is not None and v.mean is not None and k.descale is not None
    k.mean[0], v.mean[0], k.descale[0] = float("nan"), float("inf"), float("nan")
    k, v = k._replace(values=k.values[:20]), v._replace(values=v.values[:20])
    options["cu_seqlens_k"] = torch.tensor([0, 0, 20], dtype=torch.int32)
    parts = [Quantized(*(None if y is None else y.to(target.device) for y in x)) for x in (q, k, v)]
    options = {name: x.to(target.device) for name, x in options.items()}
    results = diyfa.flash_attention_varlen(
        *parts, **options, max_seqlen_q=70, max_seqlen_k=70, window=window, return_lse=True, backend=target.backend,
        variant=variant,
    )  # fmt: skip
    out, lse = (x.cpu() for x in results)
    assert (out[:70] == 0).all() and out[70:].isfinite().all() and lse[:, 70:].isfinite().all()
    torch.testing.assert_close(lse[:, :70], options["sinks"].cpu()[:, None].expand(-1, 70), rtol=0, atol=1e-6)


@pytest.mark.parametrize("descale", [torch.ones(1), torch.ones(1, 1, 7)], ids=["tensor", "block"])
def test_small_weights_are_not_lost(kernel: str, descale: torch.Tensor) -> None:
    """One key has most of the weight, 400 others 2**-10 each: unscaled, float8 would make all of them 0."""
    q, k = torch.zeros(1, 1, 128, 64), torch.zeros(1, 1, 401, 64)
    q[..., 0], k[:, :, 0, 0] = 1.0, 7.0
    v = torch.ones(1, 1, 401, 64)
    v[:, :, 0] = 0.0
    dtypes = (INT8, INT8, F16) if kernel == "npu" else (E4M3, E4M3, E4M3)
    parts = [Quantized(x.to(dtype), torch.ones(1)) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    parts[1] = parts[1]._replace(descale=descale)
    out, _ = attend(kernel, *parts, sm_scale=1.0)
    want = 400 / (400 + torch.e**7)
    torch.testing.assert_close(out.float(), torch.full_like(out, want, dtype=F32), rtol=0.07, atol=0)


@targets
def test_a_quantised_call_and_its_tensors_are_one_call(backend: str) -> None:
    device = TARGETS[backend].device
    (q, k, v), _ = make_call(on(backend, Case(kind="block", means=True, seqlen_k=130)))
    wrapped, _ = attend(backend, q, k, v, causal=True)
    named = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale, "k_mean": k.mean, "v_mean": v.mean}

    def plain(**changes: None) -> torch.Tensor:
        given = {name: x if x is None else x.to(device) for name, x in {**named, **changes}.items()}
        values = (x.values.to(device) for x in (q, k, v))
        return diyfa.flash_attention(*values, causal=True, backend=backend, **given).cpu()

    for _ in range(3):  # a repeated call is found by its key
        assert torch.equal(wrapped, plain())
    assert not torch.equal(wrapped, plain(v_mean=None))


def test_gpus_without_these_types_say_so() -> None:
    pytest.importorskip("triton.knobs")  # mainline Triton
    problem = AttentionProblem("cuda", "sm_80", "float8_e4m3fn", "bhsd", 2, 4, 4, 64, 64, 64, 64)
    cuda = registry.load_backend("cuda")
    assert cuda.unsupported(problem) == "float8 needs sm_89 or later, this is sm_80"
    assert cuda.unsupported(problem.replace(dtype="int8", value_dtype="bfloat16")) is None
    assert cuda.unsupported(problem.replace(dtype="int8", value_dtype="float8_e4m3fn")) is not None
    assert (
        cuda.unsupported(problem.replace(arch="sm_75", dtype="int8", value_dtype="float16"))
        == "int8 needs sm_80 or later, this is sm_75"
    )
    hopper = problem.replace(arch="sm_90")
    assert registry.choose("attention_fwd", hopper, cuda).name == "v2"
    for variant, changes in (
        ("sm90", {"dtype": "float8_e5m2"}), ("v1", {}), ("split_kv", {"batch_invariant": True}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"eight_bits|float8_e4m3fn and int8, not float8_e5m2"):
            registry.choose("attention_fwd", hopper.replace(**changes), cuda, variant)
    for kernel in [kernel for name in ("cuda", "cpu") for kernel in registry.load_backend(name).kernels]:
        if kernel.op == "attention_bwd":
            assert kernel.unsupported(hopper) is not None, kernel.name


def test_ascend_kernels_say_what_they_take() -> None:
    npu = registry.load_backend("npu")
    ascend = AttentionProblem("npu", "Ascend910B3", "float8_e4m3fn", "bhsd", 2, 4, 4, 64, 64, 64, 64)
    int8 = ascend.replace(dtype="int8", value_dtype="bfloat16")
    for arch in ("Ascend910B3", "Ascend950PR_9589"):
        assert registry.choose("attention_fwd", int8.replace(arch=arch), npu).name == "v2"
        with pytest.raises(ValueError, match="triton-ascend has no float8_e4m3fn matrix product"):
            registry.choose("attention_fwd", ascend.replace(arch=arch), npu)
    with pytest.raises(ValueError, match="int8 q and k need a v of float16 or bfloat16 on NPUs, got float8_e4m3fn"):
        registry.choose("attention_fwd", int8.replace(value_dtype="float8_e4m3fn"), npu)
    with pytest.raises(ValueError, match="v1 does not implement eight_bits"):
        registry.choose("attention_fwd", int8, npu, "v1")
    with pytest.raises(ValueError, match="split_kv does not implement eight_bits"):
        registry.choose("attention_fwd", int8.replace(batch_invariant=True), npu)
    with pytest.raises(ValueError, match="v2 does not implement eight_bits"):
        registry.choose("attention_bwd", int8, npu)
