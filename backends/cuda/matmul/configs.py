"""Tiles of the matrix product: the table, the tiles that fit a device, and the choice without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from diyfa.arch import ELEMENT_BYTES as ATTENTION_BYTES
from diyfa.arch import GPUArch, GPUSpec, gpu_spec
from diyfa.backends.cuda.attention.tile_io import cdiv
from diyfa.problem import MAX_STEPS, MatmulProblem, cached_per_problem


@dataclass(frozen=True)
class MatmulConfig:
    """Tile [block_m, block_n] of a program, which multiplies `block_k` of K at a time.

    `group_m`: row tiles that use the same columns of b in the L2 cache. `split_k`: programs that divide K of a tile and
    write partial sums ("pointers" only). For "tma": with `persistent`, one program per multiprocessor computes many
    tiles; `store_halves` stores a tile in two halves, which leaves shared memory for another stage.
    """

    form: str  # "tma" or "pointers"
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_k: int = 1
    persistent: bool = False
    store_halves: bool = False


@dataclass(frozen=True)
class Row:
    """Row of the table: its problems, its tile, and measured figures."""

    kind: str  # see `problem_kind`
    min_shared: int  # fewest bytes of shared memory per block of the architectures that this row is for
    max_m: int  # largest M for which the row is a default
    config: MatmulConfig
    measured: str = "not measured yet"  # device, date, problem: TFLOP/s


FLOAT8 = "float8_e4m3fn"
ELEMENT_BYTES = {**ATTENTION_BYTES, FLOAT8: 1}
ANY = 1 << 62
KIB = 1024
# In each class the first row whose max_m suffices is the default, and all rows are candidates. Four figures are those
# of 512^3, 1024^3, 4096^3 and 8192^3.
_H200 = "H200, 2026-11-21, bfloat16, TFLOP/s: "
T, P = partial(MatmulConfig, "tma"), partial(MatmulConfig, "pointers")
# fmt: off
TABLE: tuple[Row, ...] = (
    # Hopper and data-centre Blackwell, tensor descriptors
    Row("mma", 200 * KIB, 64, T(64, 64, 128, 4, 4), _H200 + "512^3 40, 16x8192x8192 39"),
    Row("mma", 200 * KIB, 1024, T(128, 128, 64, 4, 4), _H200 + "29 175 623 652"),
    Row("mma", 200 * KIB, ANY, T(128, 256, 64, 8, 3, persistent=True), _H200 + "22 132 692 667"),
    Row("mma", 200 * KIB, ANY, T(128, 256, 64, 8, 4, store_halves=True), _H200 + "23 128 687 662"),
    Row("mma", 200 * KIB, ANY, T(128, 256, 64, 8, 4, persistent=True, store_halves=True), _H200 + "22 125 683 653"),
    Row("mma", 200 * KIB, ANY, T(128, 256, 64, 8, 3), _H200 + "22 126 631 675"),
    Row("mma", 200 * KIB, ANY, T(256, 128, 64, 8, 3, persistent=True), _H200 + "22 119 598 618"),
    Row("mma", 200 * KIB, ANY, T(128, 128, 64, 8, 4), _H200 + "28 170 592 617"),
    Row("mma", 200 * KIB, ANY, T(128, 128, 64, 4, 4, persistent=True), _H200 + "31 183 648 645"),
    Row("mma", 200 * KIB, ANY, T(128, 64, 64, 4, 5), _H200 + "35 200 441 463"),
    Row("mma", 200 * KIB, ANY, T(64, 128, 64, 4, 5), _H200 + "34 204 473 479"),
    # Consumer Blackwell, tensor descriptors
    Row("mma", 0, 64, T(64, 64, 64, 4, 4)),
    Row("mma", 0, ANY, T(128, 128, 64, 8, 3)),
    Row("mma", 0, ANY, T(128, 128, 32, 4, 4)),
    Row("mma", 0, ANY, T(128, 64, 64, 4, 3)),
    # Ampere and later, plain pointers. With few rows, reading b is all the work, so K is split among programs
    Row("mma", 0, 16, P(16, 64, 128, 4, 4, group_m=1, split_k=4), _H200 + "16x8192x8192 43"),
    Row("mma", 0, 64, P(64, 64, 32, 8, 4, group_m=1, split_k=4), _H200 + "16x8192x8192 44"),
    Row("mma", 0, 512, P(64, 64, 64, 4, 3), _H200 + "34 168 343 324"),
    Row("mma", 0, ANY, P(128, 128, 32, 4, 4), _H200 + "25 142 491 488"),
    Row("mma", 0, ANY, P(128, 128, 64, 8, 3), _H200 + "26 150 489 505"),
    Row("mma", 0, ANY, P(128, 64, 32, 4, 4), _H200 + "28 152 379 392"),
    Row("mma", 0, ANY, P(64, 128, 64, 4, 3), _H200 + "30 164 434 414"),
    Row("mma", 200 * KIB, ANY, P(128, 256, 64, 8, 3), _H200 + "22 125 615 618"),
    Row("mma", 0, ANY, P(16, 64, 128, 4, 4, group_m=1, split_k=8), _H200 + "16x8192x8192 43"),
    # Loads of single elements: a step's addresses and elements are in registers
    Row("narrow", 0, 16, P(16, 64, 64, 4, 3, group_m=1, split_k=4)),
    Row("narrow", 0, 512, P(64, 64, 32, 4, 3)),
    Row("narrow", 0, ANY, P(64, 128, 32, 8, 3)),
    Row("narrow", 0, ANY, P(64, 64, 32, 4, 3, group_m=1, split_k=4)),
    # Fragments of 4-byte inputs take twice the registers
    Row("wide", 0, 16, P(16, 32, 32, 4, 3, group_m=1, split_k=4)),
    Row("wide", 0, 512, P(64, 64, 32, 8, 3)),
    Row("wide", 0, ANY, P(128, 64, 32, 8, 4)),
    Row("wide", 0, ANY, P(128, 64, 32, 8, 3)),
    # Sums of float8 take a second register for the next product
    Row("float8", 200 * KIB, 64, T(64, 64, 256, 4, 4)),
    Row("float8", 200 * KIB, ANY, T(128, 128, 128, 8, 4)),
    Row("float8", 200 * KIB, ANY, T(128, 128, 128, 8, 4, persistent=True)),
    Row("float8", 200 * KIB, ANY, T(64, 128, 128, 4, 5)),
    Row("float8", 0, ANY, T(128, 128, 64, 8, 3)),
    Row("float8", 0, 16, P(16, 64, 256, 4, 4, group_m=1, split_k=4)),
    Row("float8", 0, 512, P(64, 64, 128, 4, 3)),
    Row("float8", 0, ANY, P(128, 128, 64, 8, 3)),
    Row("float8", 0, ANY, P(64, 128, 128, 4, 3)),
    Row("narrow float8", 0, 16, P(16, 64, 64, 4, 3, group_m=1, split_k=4)),
    Row("narrow float8", 0, ANY, P(64, 64, 64, 4, 3)),
    # Without tensor cores: the operands of a whole block_k step are in registers, so tiles are small
    Row("fma", 0, 64, P(32, 32, 32, 4, 2)),
    Row("fma", 0, ANY, P(64, 64, 16, 8, 2)),
)
# fmt: on
FLOAT8_MIN_K = 32  # of a product
# Candidates with split_k are measured only for problems with at most this many rows.
SPLIT_MAX_M = 64


def problem_kind(problem: MatmulProblem) -> str:
    """Return what limits the tile: "fma", "wide", "narrow", "float8", "narrow float8" or "mma".

    * fma: Triton (3.2 to 3.9) multiplies without tensor cores, before Ampere and for float32 in full precision. The
      operands of a whole step are in registers.
    * wide: float32 inputs on tensor cores, as tf32 or cast to 2 bytes.
    * float8: products are added to the sums one by one, so that each sum has two registers.
    * narrow: without 16-byte alignment elements are copied one by one, 2-byte ones through registers.
    * mma: all other problems.
    """
    full = problem.compute_dtype == "float32" and problem.precision == "ieee"
    spec = gpu_spec(problem.arch)
    if full or (spec is not None and spec.arch in (GPUArch.VOLTA, GPUArch.TURING)):
        return "fma"
    if problem.dtype == "float32":
        return "wide"
    kinds = ("float8", "narrow float8") if problem.dtype == FLOAT8 else ("mma", "narrow")
    return kinds[0 if problem.aligned else 1]


def shared_bytes(config: MatmulConfig, problem: MatmulProblem) -> int:
    """Return the bytes of shared memory for the ring of operand tiles and for the result's tile.

    With "pointers" both use the same memory, so it is the larger one.
    """
    size = ELEMENT_BYTES[problem.dtype]
    step = (config.block_m + config.block_n) * config.block_k
    ring = step * size * config.num_stages
    if problem.compute_dtype != problem.dtype:  # operands pass through shared memory a second time, after the cast
        ring += step * ELEMENT_BYTES[problem.compute_dtype]
    tile = config.block_m * config.block_n * ELEMENT_BYTES[problem.out_dtype]
    if config.form == "pointers":
        return max(ring, tile)
    return ring + (tile // 2 if config.store_halves else tile)  # a descriptor stores from shared memory


def _limits(arch: str) -> GPUSpec:
    """Return the limits of `arch`, or those of sm_80 if it is not a GPU (Triton's interpreter)."""
    return gpu_spec(arch) or gpu_spec("sm_80")  # type: ignore[return-value]


def fits(config: MatmulConfig, problem: MatmulProblem) -> bool:
    """Return whether one block of `problem.arch` has the shared memory that `config` needs, with 1 KiB for barriers."""
    return shared_bytes(config, problem) + KIB <= _limits(problem.arch).shared_per_block


def requested_config(problem: MatmulProblem, form: str) -> MatmulConfig | None:
    """Return the caller's tile with as many pipeline stages as fit, or None if not even one fits."""
    assert problem.block is not None
    block_m, block_n, block_k = problem.block
    num_warps = 4 if block_m * block_n < 128 * 128 else 8
    for num_stages in (4, 3, 2, 1):
        config = MatmulConfig(form, block_m, block_n, block_k, num_warps, num_stages)
        if fits(config, problem):
            return config
    return None


def _table_rows(problem: MatmulProblem, form: str) -> list[Row]:
    shared_per_block, kind = _limits(problem.arch).shared_per_block, problem_kind(problem)
    rows = [r for r in TABLE if r.config.form == form and r.kind == kind and r.min_shared <= shared_per_block]
    if form == "tma" and any(r.min_shared for r in rows):
        rows = [r for r in rows if r.min_shared]
    return rows


def _reduced(config: MatmulConfig, problem: MatmulProblem) -> MatmulConfig | None:
    """Return `config` with fewer stages, then a smaller block_k, so that it fits (float32 takes twice the room)."""
    for divisor, stages in product((1, 2, 4), range(config.num_stages, 1, -1)):
        smaller = MatmulConfig(**{**vars(config), "block_k": max(16, config.block_k // divisor), "num_stages": stages})
        if fits(smaller, problem):
            return smaller
    return None


@cached_per_problem
def default_config(problem: MatmulProblem, form: str) -> MatmulConfig | None:
    """Return the tile without measuring: the caller's, or the table's. None if the caller's does not fit."""
    if problem.block is not None:
        return requested_config(problem, form)
    for row in _table_rows(problem, form):
        if problem.m <= row.max_m and (config := _reduced(row.config, problem)):
            return config
    raise AssertionError(f"no tile for {problem}")  # the table has a row that fits every architecture


@cached_per_problem
def candidates(problem: MatmulProblem, form: str) -> Sequence[MatmulConfig]:
    """Return the autotuner's candidates: the class's tiles that fit and suit the number of rows."""
    reduced = (_reduced(row.config, problem) for row in _table_rows(problem, form))
    has_few_rows = problem.m <= SPLIT_MAX_M
    return tuple(
        dict.fromkeys(
            c for c in reduced if c and (c.split_k == 1 or has_few_rows) and (c.block_m <= 128 or problem.m > 128)
        )
    )


def sizes_refusal(problem: MatmulProblem) -> str | None:
    """Return why 32 bits cannot count the problem's elements, rounded up to whole tiles, or its tiles, or None."""
    m, n, k = problem.m, problem.n, problem.k
    if max(m, n, k) > MAX_STEPS:
        return f"each dimension may have at most {MAX_STEPS} elements, got {(m, n, k)}"
    if cdiv(m, 16) * cdiv(n, 16) > MAX_STEPS:
        return f"the result may have at most {MAX_STEPS} tiles of 16 x 16, got {m} x {n} elements"
    return None


def _unsupported(problem: MatmulProblem, form: str) -> str | None:
    """Return why either form cannot run `problem`, or None."""
    spec = gpu_spec(problem.arch)
    if spec is not None and not spec.has_bf16 and "bfloat16" in (problem.dtype, problem.compute_dtype):
        return f"bfloat16 needs compute capability 8.0 or later, this is {problem.arch}"
    if problem.dtype == FLOAT8 and not (spec is None or spec.has_fp8):
        return f"float8 needs compute capability 8.9 or later, this is {problem.arch}"
    if problem.dtype == FLOAT8 and problem.block is not None and problem.block[2] < FLOAT8_MIN_K:
        return f"products of float8 have a block_k of at least {FLOAT8_MIN_K}, got {problem.block[2]}"
    if reason := sizes_refusal(problem):
        return reason
    if problem.block is not None and default_config(problem, form) is None:
        one_stage = MatmulConfig(form, *problem.block, num_warps=8, num_stages=1)
        return f"tile {problem.block} needs {shared_bytes(one_stage, problem)} bytes of shared memory, too many here"
    return None


# Most rows for which the pointer form's split of K wins: 43.6 TFLOP/s against 40.5 at 16x8192x8192 (H200).
FEW_ROWS = 16


def tma_refusal(problem: MatmulProblem) -> str | None:
    """Return why TMA cannot read the inputs or write the result, or None."""
    if not problem.aligned:
        return "an input's strides or base address are not multiples of 16 bytes"
    if problem.aligned_out is False:
        return "out has columns that are not contiguous, or rows or an address that are no multiples of 16 bytes"
    if problem.aligned_out is None and problem.n * ELEMENT_BYTES[problem.out_dtype] % 16:
        return f"rows of the result ({problem.n} x {problem.out_dtype}) are not a multiple of 16 bytes"
    return None


def unsupported_tma(problem: MatmulProblem) -> str | None:
    """Return why the descriptor form cannot run `problem`, or None."""
    spec = gpu_spec(problem.arch)
    if spec is None or not spec.has_tma:
        return f"TMA needs Hopper or later, this is {problem.arch}"
    if problem.dtype == "float32" or problem.compute_dtype != problem.dtype:
        return f"reads float16, bfloat16 and float8 as is, not {problem.dtype} computed in {problem.compute_dtype}"
    if reason := tma_refusal(problem):
        return reason
    if problem.m <= FEW_ROWS and problem.block is None:
        return f"with {problem.m} rows reading b is all the work, which the pointer form splits along its depth"
    if problem.block is not None and max(problem.block) > 256:
        return f"a descriptor's block has at most 256 elements in each dimension, got {problem.block}"
    return _unsupported(problem, "tma")


def unsupported_pointers(problem: MatmulProblem) -> str | None:
    """Return why the pointer form cannot run `problem`, or None."""
    return _unsupported(problem, "pointers")
