"""What the Ascend compiler makes of the kernels, executed on a CPU, against float64 attention: see `hivm`.

Accumulators hold NaN at first, on-chip memory and workspace too. With DIYFA_FULL_GATE=1 every small case of `cases.py`.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import CASES
from eight_bit_cases import Case as EightBitCase
from eight_bit_cases import check as check_eight_bits
from eight_bit_cases import check_not_finite, with_mask, with_score_function
from kvcache_cases import CacheCase, assert_appended, assert_in_budget
from kvcache_cases import run_case as run_cache_case
from merge_cases import MERGE_CASES, joined
from nonfinite import same_nonfinite
from poison import poisoned_allocations
from simulators.hivm import launch
from simulators.hivm.cores import Deadlock, FlagError
from simulators.hivm.ir import memref
from simulators.hivm.launch import compiled_on_cpu
from simulators.hivm.padded_product import padded_product
from targets import Target

from diyfa import BlockMask, flash_attention, triton_matmul, use_backend
from diyfa.backends.npu.attention.merge import merge
from diyfa.score_functions import score_function
from diyfa.testing import AttentionCase as Case
from diyfa.testing import Results, assert_within_budget, attention_function, expected_results, make_inputs, run_case

FULL = os.environ.get("DIYFA_FULL_GATE") == "1"


def _obstacle() -> str:
    """Why nothing can be compiled here, if so."""
    for package in ("triton-ascend", "ascendnpu-ir"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed: see docs/npu-design.md"
    if importlib.util.find_spec("ascendnpuir") is None:
        return "ascendnpuir is not installed: see docs/npu-design.md"
    return "TRITON_INTERPRET=1 turns kernels into Python" if os.environ.get("TRITON_INTERPRET") == "1" else ""


pytestmark = [pytest.mark.skipif(bool(_obstacle()), reason=_obstacle()), pytest.mark.timeout(600)]

# Chosen so that the pipeline of four workspace buffers goes round, tiles are full, partial and empty, programs take
# several tasks, and every kernel runs.
CHOSEN = [
    Case("even_d128", heads=1, seqlen_q=128, seqlen_k=1536, head_dim=128),
    Case("causal_d64", heads=2, heads_kv=1, seqlen_q=300, seqlen_k=700, head_dim=64, causal=True),
    CASES["bf16_causal_d128"],
    CASES["fp32_causal_d64"],
    CASES["lens_causal"],
    CASES["varlen_causal"],
    CASES["everything_dropout"],
    # Several tiles of the "featured" and "crowded" rows.
    Case("featured_d64", heads=1, seqlen_q=300, seqlen_k=700, head_dim=64, window=(500, 60), softcap=20.0, sinks=True),
    # The gradient of a bias without products.
    Case("bias_rows_sinks", heads=2, seqlen_q=70, seqlen_k=60, head_dim=16, bias="11q1", sinks=True, causal=True),
    # Gradients of more columns than one product has.
    Case("fp32_d576", heads=1, seqlen_q=24, seqlen_k=40, head_dim=576, head_dim_v=32, dtype="float32", causal=True),
    # Block masks: full and partial blocks; a mask for each head, the first of which sees no key of some blocks.
    CASES["mask_gqa_sinks"],
    Case("mask_heads", heads=4, heads_kv=1, seqlen_q=200, seqlen_k=150, head_dim=64, mask="1h:64:0.3"),
    # A score function that gathers, with the gradient of what it gathers.
    Case("score_fn_causal", heads=2, heads_kv=1, seqlen_q=20, seqlen_k=40, head_dim=16, causal=True, score_fn=True),
    Case("crowded_d128", heads=1, seqlen_q=200, seqlen_k=300, head_dim=128, window=(150, 0), alibi="h", dropout_p=0.2),
]
SMALL = [case for case in CASES.values() if not case.large]


def run(case: Case, variant: str = "auto", **how: Any) -> Any:
    """(results, log) of the case through compiled kernels."""
    inputs = make_inputs(case)
    attend = attention_function(case, backend="npu", variant=variant)
    with compiled_on_cpu(**how) as log, poisoned_allocations():
        return run_case(attend, inputs), log


@pytest.mark.parametrize("case", SMALL if FULL else CHOSEN, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    """Output, log-sum-exp and gradients, and no two accesses whose order is left open."""
    results, log = run(case)
    assert_within_budget(results, case)
    assert not log.races, "\n".join(log.races)
    if 0 not in case.sizes:
        assert "_fwd_kernel" in log.launches
        assert log.instructions > 100


@pytest.mark.parametrize("seqlen_q", [37, 100])  # of 100 queries some have positions below 0, and see no key
def test_a_score_function_that_reads_consecutive_elements(seqlen_q: int) -> None:
    """Tensors of each kind, a multiple of no tile, and the gradients of those of floating-point numbers."""

    @triton.jit
    def kinds(score, b, h, i, j, keep, factor, shift, small):
        scaled = score * tl.load(factor + i) + tl.load(shift + b) * (tl.load(small + j) * 100) * 0.01
        return tl.where(tl.load(keep + j), scaled, float("-inf"))

    case = Case(
        "kinds", heads=1, seqlen_q=seqlen_q, seqlen_k=83, head_dim=16, dtype="float32", score_fn=True,
        causal=seqlen_q > 83,
    )  # fmt: skip
    inputs, generator = make_inputs(case), torch.Generator().manual_seed(6)
    inputs.options["score_fn"] = score_function(kinds)
    inputs.options["score_tensors"] = (
        torch.rand(83, generator=generator) < 0.7,
        torch.randn(83, generator=generator).half().requires_grad_(),
        torch.randn(1, generator=generator, dtype=torch.float64).requires_grad_(),
        torch.randint(-3, 3, (83,), generator=generator, dtype=torch.int8),
    )
    with compiled_on_cpu() as log, poisoned_allocations():
        got = run_case(attention_function(case, backend="npu"), inputs)
    want = run_case(attention_function(case, backend="cpu"), inputs)
    assert got.dscore1 is not None and got.dscore2 is not None and got.dscore2.dtype == torch.float64
    for field, x, y in zip(Results._fields, got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-5, msg=field)
    assert "_bwd_captured_kernel" in log.launches and not log.races, "\n".join(log.races)


def test_a_small_tile_reads_no_bits_behind_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 keys have two words of bits, and a tile of 32 keys needs one. The last word ends the tensor."""
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(1, 1, 45, 16, generator=generator), torch.randn(1, 1, 61, 16, generator=generator)
    mask = BlockMask.from_dense(torch.rand(45, 61, generator=generator) < 0.4, 64)
    monkeypatch.setenv("DIYFA_NPU_TILE", "fwd=32x32")
    with compiled_on_cpu():
        out = flash_attention(q, k, k, mask=mask, backend="npu")
    torch.testing.assert_close(out, flash_attention(q, k, k, mask=mask, backend="cpu"))


def test_a_grid_larger_than_the_chip() -> None:
    """With TRITON_ALL_BLOCKS_PARALLEL=1 48 blocks run on 20 cube and 40 vector cores of a 910B3."""
    case = Case("many_heads", heads=48, heads_kv=24, seqlen_q=40, seqlen_k=70, head_dim=16, causal=True, sinks=True)
    results, log = run(case, programs=48, all_blocks_parallel=True)
    assert_within_budget(results, case)
    assert not log.races, "\n".join(log.races)
    assert {"_fwd_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_bwd_preprocess_kernel"} <= {*log.launches}
    started = dict(zip(log.launches, log.grids, strict=True))
    assert started["_fwd_kernel"] == started["_bwd_dq_kernel"] == (48, 20)
    assert started["_bwd_preprocess_kernel"] == (48, 40)


@pytest.mark.parametrize("name", ["causal_d64", "everything_dropout"])
def test_attention_without_multibuffering(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIYFA_NPU_MULTIBUFFER", "0")
    test_attention(next(case for case in CHOSEN if case.name == name))


def test_v1_forward() -> None:
    """The running output goes through global memory between the passes over the queries."""
    case = Case("v1", heads=1, seqlen_q=200, seqlen_k=300, head_dim=64, causal=True)
    results, log = run(case, variant="v1")
    assert_within_budget(results, case)
    assert "_fwd_v1_kernel" in log.launches
    assert not log.races, "\n".join(log.races)


# One and several splits, heads and queries packed together, keys in one piece, in pages and gathered from pages.
CACHE_CASES = [
    CacheCase("even-d128", (384, 384), heads=16, heads_kv=2, head_dim=128),
    CacheCase("page-16", (300, 17), page_size=16, leftpad=(100, 5)),
    CacheCase("page-128-d64", (500, 0), page_size=128, heads=4, head_dim=64, seqlen_q=4, dtype="bfloat16",
              num_splits=3),
    CacheCase("page-3", (5, 70), page_size=3, seqlen_q=2),  # the last keys end with the table
    CacheCase("chunk", (150,), seqlen_q=70, page_size=32, num_splits=1),
    CacheCase("features", (200, 40), seqlen_q=5, alibi="bh", sinks=True, page_size=64, causal=False, window=(90, 2),
              softcap=4.0, num_splits=2),
    CacheCase("latent", (150,), heads=16, head_dim=96, head_dim_v=64, latent=True, page_size=64, dtype="float32"),
    CacheCase("packed-single", (130, 9), lens_q=(1, 1), heads=6, heads_kv=2, page_size=64, by="used"),
    CacheCase("append", (20, 33), seqlen_q=3, added=3, rotary=32, page_size=16),
    CacheCase("append-halves", (20, 33), added=1, rotary=16, head_dim=40, interleaved=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.name)
def test_kvcache(case: CacheCase) -> None:
    """Attention over a cache, and appending to it."""
    with compiled_on_cpu() as log, poisoned_allocations(), use_backend("npu"):
        out, lse, *caches = run_cache_case(case, "cpu")
    assert_in_budget(case, out, lse)
    assert_appended(case, *caches)
    assert "_decode_kernel" in log.launches
    assert ("_append_kernel" in log.launches) == bool(case.added)
    assert not log.races, "\n".join(log.races)


@pytest.mark.parametrize("name", ["second half", "packed", "wide"])
def test_merged_outputs(name: str) -> None:
    """Of a part of the rows; see tests/numerics/test_merge.py."""
    case = MERGE_CASES[name]._replace(layout="bhsd")
    out, lse, partial, partial_lse = case.tensors()
    rows = slice(case.first, case.first + case.rows)
    target, target_lse = out[:, :, rows], lse[..., rows]
    expected, expected_lse = joined(target, target_lse, partial, partial_lse)
    with compiled_on_cpu() as log:
        merge("Ascend910B3", target, target_lse, partial, partial_lse)
    torch.testing.assert_close(target.double(), expected, rtol=4e-6, atol=4e-6, equal_nan=True)
    torch.testing.assert_close(target_lse.double(), expected_lse, rtol=5e-7, atol=4e-6, equal_nan=True)
    assert out[:, :, : case.first].isnan().all() and lse[..., : case.first].isnan().all()
    assert log.launches == ["_merge_kernel"] and not log.races, "\n".join(log.races)


def test_infinite_sinks() -> None:
    """One of -inf is none and one of +inf makes its head NaN, with rows that see nothing in the same tile."""
    case = next(case for case in CHOSEN if case.name == "bias_rows_sinks")
    infinite = make_inputs(case)
    with torch.no_grad():
        infinite.options["sinks"].copy_(torch.tensor([float("-inf"), float("inf")]))
    with compiled_on_cpu() as log, poisoned_allocations():
        got = run_case(attention_function(case, backend="npu"), infinite)
    want = run_case(attention_function(case, backend="cpu"), infinite)
    assert bool(want.lse[0, 0, :10].isposinf().all()) and bool(want.lse[0, 1].isnan().all())
    for field, x, y in zip(Results._fields, got, want, strict=True):
        if x is None:  # no score function
            assert y is None
            continue
        assert same_nonfinite(x, y), field
        torch.testing.assert_close(x, y, rtol=4e-3, atol=4e-3, equal_nan=True)
    assert "_bwd_dbias_rows_kernel" in log.launches


@pytest.mark.parametrize("layout", ["nn", "tn", "nt"])
def test_matmul(layout: str) -> None:
    """Operands as stored and transposed, sizes that fill no tile."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(150, 300, generator=generator).half()
    b = torch.randn(300, 290, generator=generator).half()
    a, b = (x.t().contiguous().t() if kind == "t" else x for x, kind in zip((a, b), layout, strict=True))
    with compiled_on_cpu() as log:
        c = triton_matmul(a, b, use_autotune=False, backend="npu")
    truth = a.double() @ b.double()
    assert log.launches == ["_matmul_kernel"]
    assert (c.double() - truth).abs().max() <= 2 * ((a @ b).double() - truth).abs().max()
    assert not log.races, "\n".join(log.races)


def test_products_leave_columns_beyond_the_keys_as_they_were() -> None:
    """A miscompilation that the kernels work around: the loads' zero padding does not reach the product.

    When a newer compiler writes these columns, this fails and the selects of the backward kernels may go.
    """
    q, k = torch.ones(64, 32, dtype=torch.float16), torch.ones(20, 32, dtype=torch.float16)
    s = torch.empty(64, 128)
    with compiled_on_cpu(stale=7.0):
        padded_product[(1,)](q, k, s, 20, BLOCK_M=64, BLOCK_N=128, HEAD_DIM=32)
    assert (s[:, :20] == 32).all()
    assert (s[:, 20:32] == 0).all(), "the last fractal"
    assert (s[:, 32:] == 7).all(), "zeros, as the load asked for, would be right"


# Every tile of 256 keys has four descales. Data: outliers, nothing but the largest integers, one key with most of the
# weight; rows that see one key, and none; head dims that fill no fractal of 32 columns.
INT8_CASES = {
    "even_d128": EightBitCase(heads=1, heads_kv=1, seqlen_q=128, seqlen_k=1536, head_dim=128),
    "causal_d64": EightBitCase(heads=2, heads_kv=1, seqlen_q=300, seqlen_k=700, head_dim=64, kind="block", means=True,
        options={"causal": True}),
    "outliers_d128": EightBitCase(data="outliers", seqlen_q=200, seqlen_k=330, head_dim=128, kind="block",
        value_dtype=torch.float16, means=True),
    "saturated": EightBitCase(data="saturated", seqlen_q=150, seqlen_k=600, head_dim=64, kind="block"),
    "peaks": EightBitCase(data="peaks", seqlen_k=400, kind="head", means=True, value_dtype=torch.float16),
    "one_visible_key": EightBitCase(kind="head", means=True, sinks=True, options={"window": (0, 0)}),
    "no_visible_key": EightBitCase(seqlen_q=190, seqlen_k=30, kind="block", means=True, sinks=True,
        options={"causal": True}),
    "featured": EightBitCase(lengths=(250, 1, 70), seqlen_q=250, seqlen_k=250, kind="block", means=True, sinks=True,
        alibi=True, heads=4, options={"window": (100, 20), "softcap": 8.0}),
    "packed": EightBitCase(layout="thd", lengths=(150, 1, 270), seqlen_q=270, seqlen_k=270, kind="block", means=True,
        options={"causal": True}),
    "bias_odd_d": EightBitCase(head_dim=40, head_dim_v=24, seqlen_k=100, kind="block", means=True, bias=True),
    "scale_below_0_d80": EightBitCase(heads=1, heads_kv=1, head_dim=80, seqlen_q=128, seqlen_k=512, kind="head",
        means=True, options={"sm_scale": -0.4}),
    "wide": EightBitCase(heads=1, heads_kv=1, head_dim=576, head_dim_v=64, seqlen_q=40, kind="block", means=True),
    "mask": with_mask(EightBitCase(seqlen_q=200, seqlen_k=150, head_dim=64, kind="block", means=True)),
    "score_fn": with_score_function(EightBitCase(seqlen_q=70, seqlen_k=200, head_dim=64, kind="block", means=True,
        options={"causal": True})),
}  # fmt: skip


@pytest.mark.parametrize("name", INT8_CASES)
def test_int8(name: str) -> None:
    """int8 q and k beside a v of 16 bits, with each kind of descale."""
    case = INT8_CASES[name]
    case = replace(case, dtype=torch.int8, value_dtype=case.value_dtype or torch.bfloat16)
    with compiled_on_cpu() as log, poisoned_allocations():
        check_eight_bits(case, Target("npu", "cpu", True))
    assert set(log.launches) == {"_fwd_kernel"} and not log.races, "\n".join(log.races)


@pytest.mark.parametrize("name", ["q_descale", "k_mean", "v_mean"])
def test_int8_factors_that_are_not_finite(name: str) -> None:
    """They show in rows that see a key only."""
    case = EightBitCase(
        torch.int8, torch.bfloat16, "head", means=True, sinks=True, seqlen_q=190, seqlen_k=30, options={"causal": True}
    )
    with compiled_on_cpu() as log, poisoned_allocations():
        check_not_finite(case, Target("npu", "cpu", True), name, float("nan"), first=160)
    assert not log.races, "\n".join(log.races)


def test_int8_products_are_exact() -> None:
    """The compiler takes int8 operands, and their sums are int32 (docs/log/eight-bits.md)."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-127, 128, (n, 64), dtype=torch.int8, generator=generator) for n in (64, 128))
    s = torch.empty(64, 128, dtype=torch.int32)
    with compiled_on_cpu() as log:
        padded_product[(1,)](q, k, s, 128, BLOCK_M=64, BLOCK_N=128, HEAD_DIM=64)
    assert torch.equal(s, q.int() @ k.int().mT)
    assert not log.races, "\n".join(log.races)


# ---- The executor can fail ------------------------------------------------------------------------------------------

VICTIM = Case("victim", heads=2, seqlen_q=200, seqlen_k=300, head_dim=64, causal=True)


def _without(matches: Callable[[Any], bool]) -> Callable[[Any], None]:
    """A change of a program: all operations that match are gone."""

    def clean(block: Any) -> None:
        block.operations = [each for each in block.operations if not matches(each)]
        for each in block.operations:
            for region in each.regions:
                clean(region)

    def change(program: Any) -> None:
        for function in program.functions.values():
            for region in function.regions:
                clean(region)

    return change


def _flags(source: str, target: str) -> Callable[[Any], bool]:
    def matches(each: Any) -> bool:
        return (
            each.name in ("hivm.hir.set_flag", "hivm.hir.wait_flag")
            and f"<{source}>" in each.attributes["set_pipe"]
            and f"<{target}>" in each.attributes["wait_pipe"]
        )

    return matches


def _between_cores(pipe: str) -> Callable[[Any], bool]:
    return lambda each: each.name.startswith("hivm.hir.sync_block_") and f"<{pipe}>" in each.attributes["tpipe"]


def _move_buffers(program: Any) -> None:
    """Every buffer of the vector cores that lies beyond the first begins 4 KiB further down."""
    function = program.functions["_fwd_kernel_mix_aiv"]

    def addresses(block: Any) -> Any:
        for each in block.operations:
            if each.name == "hivm.hir.pointer_cast" and memref(each.result_types[0])[2] == "ub":
                yield each.operands[0]
            for region in each.regions:
                yield from addresses(region)

    used = set(addresses(function.regions[0]))
    for each in function.regions[0].operations:
        if each.name == "arith.constant" and each.results[0] in used:
            value = int(each.attributes["value"].split()[0])
            if value >= 4096:
                each.attributes["value"] = f"{value - 4096} : i64"
                each.cache = None


CHANGES = {
    "no barrier between vector instructions": _without(
        lambda each: each.name == "hivm.hir.pipe_barrier" and "PIPE_V" in each.attributes["pipe"]
    ),
    "no wait for loads of the vector core": _without(_flags("PIPE_MTE2", "PIPE_V")),
    "no wait before stores of the vector core": _without(_flags("PIPE_V", "PIPE_MTE3")),
    "no wait for the product": _without(_flags("PIPE_M", "PIPE_FIX")),
    "no wait for the accumulator to be read": _without(_flags("PIPE_FIX", "PIPE_M")),
    "vector cores do not wait for scores": _without(_between_cores("PIPE_FIX")),
    "the cube core does not wait for weights": _without(_between_cores("PIPE_MTE3")),
    "no mask": _without(lambda each: each.name == "func.call" and "vsel_vs_1d" in each.attributes["callee"]),
    "no zero fill": _without(lambda each: each.name == "func.call" and "set_l1_2d" in each.attributes["callee"]),
    "buffers overlap": _move_buffers,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_broken_program_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler could get wrong, done to its output: a race, a wrong result or a flag out of step."""
    monkeypatch.setenv("DIYFA_NPU_MULTIBUFFER", "1")  # the buffers and flags that are changed are those of the pipeline
    compile_kernel = launch.compile_kernel

    def broken(*arguments: Any) -> Any:
        whole = compile_kernel(*arguments)
        program = launch.Program(whole.name, copy.deepcopy(whole.functions))
        CHANGES[name](program)
        return program

    monkeypatch.setattr(launch, "compile_kernel", broken)
    inputs = make_inputs(VICTIM)
    attend = attention_function(VICTIM, backend="npu")
    try:
        with launch.compiled_on_cpu(programs=1) as log, torch.no_grad(), poisoned_allocations():
            out, lse = attend(*inputs.leaves, return_lse=True, **inputs.options)
    except (Deadlock, FlagError):
        return
    truth = expected_results(VICTIM)
    wrong = any(
        not torch.allclose(x.double(), y.double(), atol=0.01) for x, y in zip((out, lse), truth[:2], strict=True)
    )
    assert log.races or wrong
