"""Tiles of the matrix product on Hopper: candidates by class of (M, N, K)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diyfa.arch import gpu_spec
from diyfa.backends.cuda.attention.tile_io import cdiv
from diyfa.backends.cuda.gluon.compat import ptxas_options
from diyfa.backends.cuda.gluon.inline_ptx import MAX_REGISTERS
from diyfa.backends.cuda.hopper.configs import environment_refusal
from diyfa.backends.cuda.matmul.configs import ELEMENT_BYTES, FLOAT8, sizes_refusal, tma_refusal
from diyfa.problem import MAX_STEPS, MatmulProblem, cached_per_problem

SHARED_BYTES = 232448  # for one program on sm_90
BARRIER_BYTES = 1024
STORE_BYTES = 128  # of a row of a TMA store: the swizzle
CONSUMER_ROWS = 64  # the M of a warpgroup's product
FLOAT8_SUMS = 64 * 128  # of a consumer: each has a register for the sum, and one for the next product


@dataclass(frozen=True)
class Sm90MatmulConfig:
    """Tile [block_m, block_n] of a program, which multiplies `block_k` of K at a time.

    `block_k` counts 16-bit elements; of float32 a step has half as many, of float8 twice as many. `consumers` divide
    the rows of a tile; with `pingpong` each has a whole one, and they take turns. `group_m`: tile rows that use the
    same columns of b in the L2 cache. `split_k`: programs that divide K of a tile.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    consumers: int = 2
    pingpong: bool = False
    group_m: int = 8
    split_k: int = 1

    def __post_init__(self) -> None:
        # With one stage, a consumer would wait for a step's copy while it holds the only stage, for the step before.
        if self.stages < 2 or self.group_m < 1 or self.split_k < 1:
            raise ValueError(f"stages must be at least 2, group_m and split_k at least 1, got {self}")
        if self.consumers not in (1, 2) or self.rows not in (CONSUMER_ROWS, 2 * CONSUMER_ROWS):
            raise ValueError(f"block_m must give each of 1 or 2 consumers 64 or 128 rows, got {self}")
        if self.pingpong and (self.split_k > 1 or self.consumers != 2):
            raise ValueError(f"pingpong needs two consumers and tiles with equally many steps: no split_k, got {self}")

    @property
    def rows(self) -> int:
        """Rows of a consumer's tile."""
        return self.block_m if self.pingpong else self.block_m // self.consumers


@dataclass(frozen=True)
class ProblemClass:
    """A class of (M, N, K) and its candidates, the default first.

    A problem belongs to the first class whose bounds it does not exceed. `max_tiles`: tiles of 128 x 128. `min_k`:
    smallest K.
    """

    name: str
    candidates: tuple[Sm90MatmulConfig, ...]
    measured: str  # device, date, problem: TFLOP/s
    max_m: int = 1 << 62
    max_n: int = 1 << 62
    max_tiles: int = 1 << 62
    max_k: int = 1 << 62
    min_k: int = 0


def _config(block_m: int, block_n: int, block_k: int, stages: int, **rest: int | bool) -> Sm90MatmulConfig:
    return Sm90MatmulConfig(block_m, block_n, block_k, stages, **rest)  # type: ignore[arg-type]


_SMALL = _config(64, 64, 128, 6, consumers=1)
_FEW_ROWS = _config(64, 64, 64, 12, consumers=1)  # one span of swizzled bytes, so that `copied_rows` may be few
_SMALLEST = _config(64, 32, 64, 16, consumers=1)
_ONE_CONSUMER = _config(64, 128, 64, 8, consumers=1)
_LONG_STEPS = _config(64, 128, 128, 4, consumers=1)
_SQUARE = _config(128, 128, 64, 6)
_SQUARE_IN_TURNS = _config(128, 128, 64, 5, pingpong=True)
_LARGE = _config(128, 256, 64, 4)
_TALL = _config(256, 128, 64, 3)
_H200 = "H200, 2026-11-30, float16, TFLOP/s, "
TABLE: tuple[ProblemClass, ...] = (  # the default first
    ProblemClass(
        "few rows, fewest tiles, long K",
        (replace(_FEW_ROWS, split_k=4), replace(_FEW_ROWS, split_k=8), replace(_FEW_ROWS, split_k=2), _SMALLEST),
        max_m=32,
        max_n=2048,
        min_k=1024,
        measured=_H200 + "16x1024x8192: 20",
    ),
    ProblemClass(
        "few rows, few tiles, long K",
        (_SMALLEST, replace(_FEW_ROWS, split_k=2), _FEW_ROWS),
        max_m=32,
        max_n=4096,
        min_k=1024,
        measured=_H200 + "16x4096x4096: 31",
    ),
    ProblemClass(
        "few rows, long K",
        (_FEW_ROWS, replace(_LONG_STEPS, split_k=2), replace(_FEW_ROWS, split_k=2), _SMALLEST),
        max_m=32,
        min_k=1024,
        measured=_H200 + "16x8192x8192, 32x8192x8192, 16x14336x4096: 49, 98, 46",
    ),
    ProblemClass(
        "skinny, long K",
        (_SMALL, _FEW_ROWS, replace(_ONE_CONSUMER, split_k=2), _SMALLEST),
        max_m=64,
        min_k=1024,
        measured=_H200 + "64x8192x8192: 196",
    ),
    ProblemClass("skinny", (_SMALL, _FEW_ROWS, _SMALLEST), max_m=64, measured=_H200 + "64x8192x512: 60"),
    ProblemClass(
        "few tiles, long K",
        (_LONG_STEPS, _ONE_CONSUMER, _config(128, 64, 64, 8), replace(_SQUARE, split_k=2)),
        max_tiles=66,
        min_k=2048,
        measured=_H200 + "8192x128x8192 and its transpose: 367, 378",
    ),
    ProblemClass(
        "fewest tiles",
        (_SMALL, _SMALLEST, _FEW_ROWS, _ONE_CONSUMER),
        max_tiles=32,
        measured=_H200 + "512x512x512: 37",
    ),
    ProblemClass(
        "few tiles",
        (_LONG_STEPS, _ONE_CONSUMER, _config(128, 64, 64, 8)),
        max_tiles=132,
        measured=_H200 + "1024x1024x1024: 225",
    ),
    ProblemClass(
        "narrow",
        (_SQUARE_IN_TURNS, _SQUARE, _TALL),
        max_n=128,
        measured=_H200 + "65536x128x4096: 458",
    ),
    ProblemClass(
        "short K",
        (_config(64, 256, 64, 4, pingpong=True), _SQUARE_IN_TURNS, _LARGE, _SQUARE),
        max_k=512,
        measured=_H200 + "8192x8192x128: 377",
    ),
    ProblemClass(
        "one wave",
        (_LARGE, _SQUARE_IN_TURNS, _SQUARE, _TALL),
        max_tiles=264,
        measured=_H200 + "2048x2048x2048: 607",
    ),
    ProblemClass(
        "large",
        (_LARGE, replace(_LARGE, group_m=16), replace(_LARGE, group_m=4), _SQUARE_IN_TURNS, _SQUARE, _TALL),
        measured=_H200 + "4096x4096x4096, 8192x8192x8192: 694, 700",
    ),
)  # fmt: skip


def problem_class(m: int, n: int, k: int) -> ProblemClass:
    """Return the class of (M, N, K)."""
    tiles = cdiv(m, 128) * cdiv(n, 128)
    return next(
        row
        for row in TABLE
        if m <= row.max_m and n <= row.max_n and tiles <= row.max_tiles and row.min_k <= k <= row.max_k
    )


def store_columns(problem: MatmulProblem, config: Sm90MatmulConfig) -> int:
    """Return the columns of a TMA store: at most 128 bytes of a row, of float32 partial sums if K is split."""
    dtype = problem.out_dtype if config.split_k == 1 else "float32"
    return min(config.block_n, STORE_BYTES // ELEMENT_BYTES[dtype])


def copied_rows(problem: MatmulProblem, config: Sm90MatmulConfig) -> int:
    """Return the rows of a that a consumer's box copies: all, or of a lone tile of few rows a power of two.

    These lie side by side in shared memory only if a row of the box has one span of swizzled bytes.
    """
    has_one_span = config.block_k * ELEMENT_BYTES[problem.dtype] <= STORE_BYTES
    few = 1 << max(4, (problem.m - 1).bit_length())
    return min(few, config.rows) if has_one_span and problem.k_major[0] else config.rows


def shared_bytes(config: Sm90MatmulConfig, problem: MatmulProblem) -> int:
    """Return the bytes of shared memory for operand stages and stores."""
    stage = (config.block_m + config.block_n) * config.block_k * ELEMENT_BYTES[problem.dtype]
    buffers = min(2, config.block_n // store_columns(problem, config))
    return config.stages * stage + config.consumers * buffers * config.rows * STORE_BYTES


def config_refusal(config: Sm90MatmulConfig, problem: MatmulProblem) -> str | None:
    """Return why a program cannot run `problem` with `config`, or None."""
    needed = shared_bytes(config, problem) + BARRIER_BYTES
    if needed > SHARED_BYTES:
        return f"{config} needs {needed} bytes of shared memory, of {SHARED_BYTES}"
    if config.split_k > 1 and problem.n * ELEMENT_BYTES["float32"] % 16:
        return f"rows of float32 partial sums ({problem.n}) are not a multiple of 16 bytes: K cannot be split"
    steps = cdiv(problem.k, config.block_k)
    if config.split_k > 1 and (config.split_k - 1) * cdiv(steps, config.split_k) >= steps:
        return f"{config} divides {steps} steps of K so that a split has none"
    if problem.dtype == FLOAT8 and config.rows * config.block_n > FLOAT8_SUMS:
        return f"{config} needs two registers for each sum of float8 products, more than a thread has"
    tiles = cdiv(problem.m, config.block_m) * cdiv(problem.n, config.block_n) * config.split_k
    if tiles * steps > MAX_STEPS:
        return f"32 bits do not count {tiles} tiles times their steps of BLOCK_K"
    return None


def fits(config: Sm90MatmulConfig, problem: MatmulProblem) -> bool:
    """Return whether a program can run `problem` with `config`."""
    return config_refusal(config, problem) is None


def for_problem(config: Sm90MatmulConfig, problem: MatmulProblem) -> Sm90MatmulConfig:
    """Return `config` with steps of the problem's dtype, and no more splits than steps.

    K is not split where TMA cannot write rows of partial sums.
    """
    block_k = config.block_k * 2 // ELEMENT_BYTES[problem.dtype]
    steps = max(1, cdiv(problem.k, block_k))
    split_k = cdiv(steps, cdiv(steps, config.split_k))  # each split has a step
    if problem.n * ELEMENT_BYTES["float32"] % 16:
        split_k = 1
    return replace(config, block_k=block_k, split_k=split_k)


@cached_per_problem
def candidates(problem: MatmulProblem) -> tuple[Sm90MatmulConfig, ...]:
    """Return the tiles of the problem's class that fit, the default first."""
    row = problem_class(problem.m, problem.n, problem.k)
    tiles = (for_problem(config, problem) for config in row.candidates)
    return tuple(dict.fromkeys(config for config in tiles if fits(config, problem)))


def select_config(problem: MatmulProblem) -> Sm90MatmulConfig:
    """Return the default tile."""
    return candidates(problem)[0]


def compile_options(config: Sm90MatmulConfig) -> dict[str, int]:
    """Return the compiler options of a config. With one consumer, its warps and the producer's share all registers."""
    options = {"num_warps": 4, "launch_pdl": True, **ptxas_options()}
    if config.consumers == 1:
        options["maxnreg"] = MAX_REGISTERS
    return options


def _refusal(problem: MatmulProblem) -> str | None:
    spec = gpu_spec(problem.arch)
    if spec is None or not spec.has_wgmma:
        return f"wgmma needs sm_90, this is {problem.arch}"
    if problem.block is not None:
        return "it takes tiles of its own table, not block_m, block_n and block_k"
    if problem.compute_dtype != problem.dtype or (problem.dtype == "float32" and problem.precision != "tf32"):
        return (
            "it multiplies float16, bfloat16, float8 and tf32 as they are, "
            f"not {problem.dtype} in {problem.compute_dtype}"
        )
    if problem.dtype in ("float32", FLOAT8) and problem.k_major != (True, True):
        return "wgmma of tf32 and float8 needs both operands contiguous along K: a row-major, b column-major"
    if reason := tma_refusal(problem) or sizes_refusal(problem):
        return reason
    if not candidates(problem):  # all of one class have too many steps, none too much shared memory
        row = problem_class(problem.m, problem.n, problem.k)
        return config_refusal(for_problem(row.candidates[0], problem), problem)
    return None


def unsupported(problem: MatmulProblem) -> str | None:
    """Return why the kernel cannot run `problem`, or None."""
    return _refusal(problem) or environment_refusal()
