"""The Gluon interpreter reports each kind of bug, in every interleaving, and lets right kernels pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import gluon_kernels as kernels
import pytest
import torch
import triton.language as tl
from hopper_interpreted import ON_HOPPER
from simulators.gluon import (
    BarrierMisuse,
    Deadlock,
    InterpretedKernel,
    InvalidOperand,
    KernelBug,
    OutOfBounds,
    Overflow,
    Race,
    Uninitialised,
)
from subprocesses import SUPPORT, run_python
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SEEDS = (0, 1, 2, 3, 4, 5)


def descriptor(x: torch.Tensor, *block: int, **changes) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float16)
    fields = {"shape": list(x.shape), "strides": list(x.stride()), "block_shape": list(block), "layout": layout}
    return TensorDescriptor(x, **{**fields, **changes})


def launch_double_rows(
    source: TensorDescriptor, target: TensorDescriptor, sums: torch.Tensor, programs: int = 1, seed: int = 0,
    stages: int = 2, per_warp_arrive: bool = False, bug: str = "",
) -> None:  # fmt: skip
    kernel = InterpretedKernel(kernels.double_rows, seed)
    kernel[(programs,)](source, target, sums, len(sums), STAGES=stages, PER_WARP=per_warp_arrive, BUG=bug)


def double_rows(bug: str = "", seed: int = 0, **options) -> None:
    rows = 90
    source = torch.randn(rows, 64, dtype=torch.float16)
    # What lies behind the tensors in their storages must neither be read nor written.
    target = torch.full((rows + 30, 64), float("nan"), dtype=torch.float16)
    sums = torch.full((rows,), float("nan"))
    descriptors = descriptor(source, 16, 64), descriptor(target[:rows], 16, 64)
    launch_double_rows(*descriptors, sums, seed=seed, bug=bug, **options)
    assert torch.equal(target[:rows], source + source) and target[rows:].isnan().all()
    torch.testing.assert_close(sums, source.float().sum(1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_right_pipeline_passes(seed: int, stages: int) -> None:
    double_rows(seed=seed, stages=stages, per_warp_arrive=seed % 2 == 1)


@pytest.mark.parametrize(("bug", "message"), [
    ("one_arrival", "per warp is one of each of 4, not 1"),
    ("wrong_marker", r"release_per_warp.* in front of mbarrier\.wait"),
    ("marker_of_nothing", r"release_per_warp.* in front of mbarrier\.expect"),
    ("two_markers", "wait_per_warp.* but what .*release_per_warp.* means has not come"),
    ("marker_at_the_end", "ends, but what .*wait_per_warp.* means has not come"),
])  # fmt: skip
def test_a_marker_without_its_instruction_is_reported(bug: str, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(InvalidOperand, match=message):
            double_rows(bug, seed, per_warp_arrive=True)


def test_a_constant_is_defined_once() -> None:
    with pytest.raises(InvalidOperand, match="defines the constant TWICE in each round of a static_range"):
        InterpretedKernel(kernels.constant_in_rounds)[(1,)](torch.zeros(2, dtype=torch.int32))


def test_the_default_of_an_argument_is_no_tuple() -> None:
    with pytest.raises(InvalidOperand, match="a default cannot be a tuple, pass factors"):
        InterpretedKernel(kernels.tuple_default)[(1,)](torch.zeros(1, dtype=torch.int32))


def test_no_partition_gets_a_block_of_registers() -> None:
    with pytest.raises(InvalidOperand, match="no register tensors as arguments of workers"):
        InterpretedKernel(kernels.block_to_partition)[(1,)](torch.zeros(64, dtype=torch.int32))


def test_a_seed_is_an_interleaving() -> None:
    def report(seed: int) -> str:
        with pytest.raises(KernelBug) as caught:
            double_rows("no_wait", seed)
        return str(caught.value).replace(f"seed {seed}", "")

    first = [report(seed) for seed in range(8)]
    assert first == [report(seed) for seed in range(8)]
    assert len(set(first)) > 1


def test_several_programs_must_not_write_one_place() -> None:
    x = torch.randn(32, 64, dtype=torch.float16)
    target, sums = torch.empty_like(x), torch.empty(32)
    with pytest.raises(Race, match="already written there by somebody else"):
        launch_double_rows(descriptor(x, 16, 64), descriptor(target, 16, 64), sums, programs=2)


def multiply(bug: str = "", seed: int = 0, dtype: torch.dtype = torch.float16) -> None:
    a, b = torch.randn(64, 192, dtype=dtype), torch.randn(192, 32, dtype=dtype)
    c = torch.full((64, 32), float("nan"))
    kernel = InterpretedKernel(kernels.multiply, seed)
    kernel[(1,)](descriptor(a, 64, 32), descriptor(b, 32, 32), c, 6, STAGES=2, BUG=bug)
    torch.testing.assert_close(c, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["", "through_registers", "through_shared"])
def test_a_right_product_passes(variant: str, dtype: torch.dtype, seed: int) -> None:
    multiply(variant, seed, dtype)


def take_turns(bug: str = "", seed: int = 0) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    InterpretedKernel(kernels.take_turns, seed)[(1,)](out, TURNS=3, BUG=bug)
    assert (out == 6).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_order_two_partitions(seed: int) -> None:
    take_turns(seed=seed)


BUGS = {
    double_rows: [
        ("no_wait", KernelBug, "nothing has waited for the end of|nobody has written|more arrivals than"),
        ("early_release", Race, "nothing has waited for the end of: "),
        ("wrong_parity", KernelBug, "parity cannot tell|nothing has waited|waits for parity 1|more arrivals than"),
        ("no_release", Deadlock, r"partition 1 .*waits for parity 0 of mbarrier empty\[0\] .*1 of 1 arrivals"),
        ("released_twice", KernelBug, "more arrivals than a phase takes|nothing has waited|deadlock"),
        ("too_few_bytes", KernelBug, "bytes expected and bytes copied differ|nothing has waited|-1024 bytes missing"),
        ("too_many_bytes", Deadlock, "2048 bytes missing"),
        ("no_init", BarrierMisuse, "never initialised"),
        ("init_twice", BarrierMisuse, "in use"),
        ("no_fence_after_init", Race, "without fence_async_shared after its init"),
        ("no_fence", Race, "TMA store to target .* without fence_async_shared after: store at"),
        ("no_fence_after_reading", Race, "TMA load of source .* without fence_async_shared after: load at"),
        ("no_store_wait", Race, "store at .*, but nothing has waited for the end of: TMA store"),
        ("store_at_the_end", KernelBug, "the program ends while still running: TMA stores"),
        ("layout_mismatch", ValueError, "Layout mismatch"),
        ("wrong_warps", InvalidOperand, "a layout for 8 warps, 4 run there"),
        ("wrong_slice", ValueError, "Layout mismatch"),
        ("no_mask", OutOfBounds, "bytes 320 to 384 of sums_ptr, whose storage has 360"),
    ],
    multiply: [
        ("no_wait", Race, r"computes with \(__mul__\) the accumulator of wgmma"),
        ("operand_layout", InvalidOperand, "a in registers needs DotOperandLayout"),
        ("wrong_instruction", InvalidOperand, "32 columns by 64"),
    ],
    take_turns: [
        ("no_start", Uninitialised, "load at .* reads from shared what nobody has written"),
        ("no_first_turn", Deadlock, "waits for named barrier 8 .* 128 of 256 threads"),
        ("no_turns", Race, "nothing has waited for the end of: (load|store)"),
        ("arrive_twice", KernelBug, "a second time before it completed|nothing has waited"),
        ("reserved_barrier", BarrierMisuse, "the compiler itself uses those below 3"),
        ("wrong_count", BarrierMisuse, "named barrier [89]"),
    ],
}


@pytest.mark.parametrize(
    ("run", "bug", "error", "message"), [(run, *bug) for run, some in BUGS.items() for bug in some]
)
def test_a_planted_bug_is_reported(run: Callable[[str, int], None], bug: str, error: type, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(error, match=message):
            run(bug, seed)


@pytest.mark.parametrize(("operation", "n", "x", "expected"), [
    ("divide", 1, 0.0, -2),
    ("remainder", 1, 0.0, -1),
    ("carried", 1, 0.0, -3),
    ("unrolled", 1, 0.0, -4),
    ("round", 1, 1 + 2**-8, 1.0),  # halfway: to even
    ("round", 1, 1 + 3 * 2**-8, 1 + 2**-6),
    ("round", 1, 1 + 2**-8 + 2**-20, 1 + 2**-7),
])  # fmt: skip
def test_arithmetic_is_the_hardwares(operation: str, n: int, x: float, expected: float) -> None:
    out = torch.zeros(1)
    InterpretedKernel(kernels.arithmetic)[(1,)](torch.tensor([x]), n, out, OPERATION=operation)
    assert out.item() == expected


# What `of_subnormals` computes, and the instruction that the compiler makes of it.
SMALL, LARGE = 2.0**-130, 0.75 * 2.0**128
OF_SUBNORMALS = (
    ("ex2.approx.ftz.f32", 0.0),
    ("ex2.approx.f32", SMALL),
    ("fma.rn.ftz.f32", -130.0),  # which multiplies subnormal arguments by 2^23 before
    ("setp.lt.f32", -130 * math.log(2)),
    ("div.full.f32", SMALL / 4),
    ("div.full.f32", 1 / LARGE),
    ("cvt.rmi.ftz.f32.f32", 0.0),
    ("cvt.rpi.ftz.f32.f32", 0.0),
    ("sqrt.approx.ftz.f32", 0.0),
    ("rsqrt.approx.ftz.f32", math.inf),
    ("add.f32", 2 * SMALL),
    ("fma.rn.f32", -SMALL),
    ("max.f32", SMALL),
    ("setp.neu.f32", SMALL),
    ("cvt.rn.bf16.f32", SMALL),
    ("cvt.rn.f16.f32", 2.0**-20),
    ("rcp.approx.ftz.f32", 0.0),
    ("rcp.approx.ftz.f32", math.inf),
)


def of_subnormals(kernel: object, device: str = "cpu") -> torch.Tensor:
    x = torch.tensor([SMALL, -130.0, 2.0**-20, LARGE, math.nan], device=device)
    out = torch.full((len(OF_SUBNORMALS),), math.nan, device=device)
    kernel[(1,)](x, out)
    return out.cpu()


def test_subnormal_numbers_are_flushed_where_the_hardware_does() -> None:
    expected = torch.tensor([value for _, value in OF_SUBNORMALS])
    torch.testing.assert_close(of_subnormals(InterpretedKernel(kernels.of_subnormals)), expected, rtol=1e-4, atol=0)


def test_the_compiler_makes_the_instructions_of_which_that_is_known() -> None:
    """Whatever the version of Triton. Runs without its interpreter."""
    code = """
import gluon_kernels, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
source = GluonASTSource(gluon_kernels.of_subnormals, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {}, {})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
    ptx = run_python(code, SUPPORT, TRITON_INTERPRET="0")
    used = set(re.findall(r"^\s*([a-z0-9]+(?:\.\w+)*)", ptx, re.MULTILINE))
    assert {name for name, _ in OF_SUBNORMALS} <= used
    assert {name for name in used if ".ftz" in name} <= {name for name, _ in OF_SUBNORMALS}


@pytest.mark.skipif(not ON_HOPPER, reason="needs an sm_90 GPU")
def test_the_hardware_flushes_those() -> None:
    expected = torch.tensor([value for _, value in OF_SUBNORMALS])
    torch.testing.assert_close(of_subnormals(kernels.of_subnormals, "cuda"), expected, rtol=1e-2, atol=0)


def test_products_keep_subnormal_numbers() -> None:
    a, b, c = torch.full((64, 192), SMALL).bfloat16(), torch.ones(192, 32).bfloat16(), torch.zeros(64, 32)
    kernel = InterpretedKernel(kernels.multiply)
    kernel[(1,)](descriptor(a, 64, 32), descriptor(b, 32, 32), c, 6, STAGES=2, BUG="")
    assert (c == 192 * SMALL).all()


def test_overflow_and_reads_beyond_a_storage_are_reported() -> None:
    x, out = torch.zeros(4), torch.zeros(1)
    with pytest.raises(Overflow):
        InterpretedKernel(kernels.arithmetic)[(1,)](x, 3, out, OPERATION="overflow")
    for n in (4, -1):
        with pytest.raises(OutOfBounds, match="x_ptr"):
            InterpretedKernel(kernels.arithmetic)[(1,)](x, n, out, OPERATION="beyond")


def test_what_another_program_writes_must_not_be_read() -> None:
    x, out = torch.zeros(2), torch.zeros(2)
    InterpretedKernel(kernels.arithmetic)[(2,)](x, 5, out, OPERATION="write_then_read")
    assert out.tolist() == [5, 5]
    with pytest.raises(Race, match="somebody else writes x_ptr there"):
        InterpretedKernel(kernels.arithmetic)[(2,)](x, 5, out, OPERATION="read_others")


@pytest.mark.parametrize(("block", "changes", "rule"), [
    ((16, 64), {"strides": [2**40, 1]}, r"strides are in \[0, 2\^40\) bytes"),
    ((512, 64), {}, "box sizes are at most 256"),
    ((16, 64), {"layout": gl.NVMMASharedLayout(128, 32, 2)}, "the layout is of this element"),
    ((16, 32), {"layout": gl.NVMMASharedLayout(128, 16, 2)}, "a row of the box fills the swizzle"),
])  # fmt: skip
def test_descriptors_keep_the_rules_of_tma(
    block: tuple, changes: dict, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda self: None)  # Triton's own checks
    x = torch.zeros(90, 64, dtype=torch.float16)
    source = descriptor(x, *block, **changes)
    with pytest.raises(InvalidOperand, match=rule):
        launch_double_rows(source, descriptor(x, 16, 64), torch.zeros(90))


def test_a_descriptor_larger_than_its_tensor_is_out_of_bounds() -> None:
    x, target = torch.zeros(40, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.float16)
    with pytest.raises(OutOfBounds, match="source"):
        launch_double_rows(descriptor(x, 16, 64, shape=[64, 64]), descriptor(target, 16, 64), torch.zeros(64))


def join_tiles(bug: str = "") -> None:
    out = torch.full((64, 128), float("nan"), dtype=torch.float16)
    InterpretedKernel(kernels.join_tiles)[(1,)](out, BUG=bug)
    assert (out[:, :64] == 2).all() and (out[:, 64:] == 3).all()


def test_tiles_behind_one_another_are_a_wider_tile() -> None:
    join_tiles()


def test_rows_of_a_tile_are_a_shorter_tile() -> None:
    """Unless the swizzle does not repeat after them."""
    out = torch.full((64, 64), float("nan"), dtype=torch.float16)
    kernel = InterpretedKernel(kernels.split_tiles)
    kernel[(1,)](out, N_ROWS=16)
    assert (out == 4 + torch.arange(64)[:, None] // 16).all()
    with pytest.raises(InvalidOperand, match=r"needs .*whole tiles"):
        kernel[(1,)](out, N_ROWS=4)


@pytest.mark.parametrize(
    ("bug", "rule"), [("bytes", "as many bytes"), ("rows", "whole tiles"), ("swizzle", "the same swizzle")]
)
def test_other_views_of_tiles_are_reported(bug: str, rule: str) -> None:
    with pytest.raises(InvalidOperand, match=f"needs .*{rule}"):
        join_tiles(bug)


def test_what_tritons_interpreter_leaves_behind_changes_nothing() -> None:
    """As after a kernel of another test: the language's functions stay exchanged when a helper function ran."""
    add = tl.core.add

    def exchanged(*args, **kwargs):
        raise AssertionError("the language is not the one that was imported")

    tl.core.add = exchanged
    try:
        double_rows()
        assert tl.core.add is exchanged
    finally:
        tl.core.add = add
