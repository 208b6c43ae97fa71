"""Tiles of the kernels over a KV cache, and which of them fit a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.arch import ELEMENT_BYTES, gpu_spec
from diyfa.backends.cuda.attention.tile_io import padded_head_dim
from diyfa.problem import (
    KVCACHE_FEATURES,
    AttentionProblem,
    KVCacheProblem,
    as_kvcache_problem,
    by_kind,
    kept,
    refuse_features,
)

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class DecodeConfig:
    """Rows (queries of a group of heads) x keys of a block, and how the compiler schedules it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    # Blocks of keys that take as long as to put parts of a tile together, where programs rather have whole tiles.
    split_cost: int = 0


def feature_blocks(head_dim: int) -> tuple[int, int]:
    """head_dim as one or two tiles: (features of the first, of the second or 0).

    Their widths are powers of two. One tile of MLA's 576 features would be 1024 wide; two are 512 and 64, and the first
    is what its values are.
    """
    whole = padded_head_dim(head_dim)
    first = whole // 2
    if whole == 16 or head_dim <= first:
        return whole, 0
    second = padded_head_dim(head_dim - first)
    return (first, second) if first + second < whole else (whole, 0)


# (at most this wide) -> keys of a block, warps, stages, programs of a multiprocessor. The first that fits is taken.
# Decoding waits for memory: what counts is how many bytes are on their way, not how large a tile is. Registers let as
# many programs run at once.
_ROWS: tuple[tuple[int, int, int, int, int], ...] = (
    (64, 128, 4, 3, 2),
    (64, 64, 4, 4, 2),
    (64, 64, 4, 3, 2),
    (64, 32, 4, 2, 2),
    (64, 16, 4, 1, 2),
    (128, 64, 4, 3, 2),
    (128, 64, 4, 2, 2),
    (128, 32, 4, 2, 2),
    (128, 16, 4, 1, 2),
    (256, 32, 4, 3, 2),
    (256, 32, 4, 2, 2),
    (256, 16, 4, 2, 2),
    (256, 16, 4, 2, 1),
    (1024, 32, 8, 3, 1),
    (1024, 32, 8, 2, 1),
    (1024, 16, 8, 2, 1),
    (1024, 16, 8, 1, 1),
)
# A cache of float8, first: its blocks are half as large, and it is its instructions that take time.
_FLOAT8_ROWS: tuple[tuple[int, int, int, int, int], ...] = ((128, 128, 4, 3, 2),)
TURING_BLOCK_N = 16  # more keys' products in registers spill
RESERVED = 1024  # bytes of shared memory that the system takes for each program
# In batch-invariant mode every call has tiles of as many rows, whether they are of one new token or of a training
# sequence: the layout of a tile decides in what order a row is summed.
INVARIANT_BLOCK_M = 32
# Beyond 32 rows Triton multiplies by wgmma where there is that. It is right for tiles that copies bring to shared
# memory as they are, not for those that pass through registers, nor for values narrower than keys, unless they
# are the keys' first tile.
MMA_BLOCK_M = 32


def _is_turing(problem: KVCacheProblem) -> bool:
    """Triton emits no tensor-core instructions for it, and no copies that go on beside a computation."""
    spec = gpu_spec(problem.arch)
    return spec is None or not spec.has_bf16


def is_widened(problem: KVCacheProblem) -> bool:
    """Whether products are multiply-adds of float32, which tiles become as they are read."""
    return problem.dtype == "float32" or _is_turing(problem)


def block_m_of(problem: KVCacheProblem) -> int:
    """Rows of a tile."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    if is_widened(problem):
        return 16
    if problem.batch_invariant:
        return INVARIANT_BLOCK_M
    if rows <= 16:
        return 16
    first, second = feature_blocks(problem.head_dim)
    passes_registers = not problem.aligned or problem.cache_dtype == FLOAT8
    spec = gpu_spec(problem.arch)
    if rows > 32 and reads_values_once(problem) and not passes_registers and spec is not None and spec.has_wgmma:
        return 64
    if rows <= 32 or passes_registers or second or first != padded_head_dim(problem.head_dim_v) or first > 128:
        return MMA_BLOCK_M
    return 64


def reads_values_once(problem: KVCacheProblem) -> bool:
    """Whether the first tile of the keys is that of the values."""
    return problem.latent and feature_blocks(problem.head_dim)[0] == problem.head_dim_v


def reads_value_pairs(problem: KVCacheProblem) -> bool:
    """Whether float8 values are read as pairs of features, which become operands of products in registers."""
    of_float8 = problem.cache_dtype == FLOAT8 and not is_widened(problem) and not reads_values_once(problem)
    return of_float8 and problem.aligned and problem.head_dim_v % 2 == 0


def shared_bytes(problem: KVCacheProblem, block_m: int, block_n: int, num_stages: int) -> int:
    """Shared memory of a program: the queries, the weights, and the blocks of keys and values on their way.

    Values in the keys' memory need less. That must not decide on a tile: it may not change a result.
    """
    d, dv = sum(feature_blocks(problem.head_dim)), padded_head_dim(problem.head_dim_v)
    size = ELEMENT_BYTES["float32" if is_widened(problem) else problem.dtype]
    block, buffers = block_n * (d + dv), max(1, num_stages - 1)  # one stage computes
    keys = block * size * buffers
    if problem.cache_dtype == FLOAT8:  # converted, some goes through shared memory once more
        # What lies at other addresses may not have another tile where bits are promised.
        pairs = reads_value_pairs(problem) and not problem.batch_invariant
        keys = block * (buffers + (0 if pairs else size))
    if num_stages == 1 or _is_turing(problem):  # first keys, then values
        keys = block_n * max(d, dv) * size
    return keys + size * block_m * (d + block_n)


@kept
def decode_config(problem: KVCacheProblem) -> DecodeConfig | None:
    """The tile for a call, or None where none fits. Keys of a block and warps depend on features and dtypes alone."""
    return _config_of_kind(problem, block_m_of(problem))


@by_kind
def _config_of_kind(problem: KVCacheProblem, block_m: int) -> DecodeConfig | None:
    spec = gpu_spec(problem.arch)
    if spec is None:
        return None
    width = max(padded_head_dim(problem.head_dim_v), feature_blocks(problem.head_dim)[0])
    rows = _FLOAT8_ROWS + _ROWS if problem.cache_dtype == FLOAT8 else _ROWS
    for widest, block_n, warps, stages, several in rows:
        if _is_turing(problem) and block_n > TURING_BLOCK_N:
            continue
        shared = shared_bytes(problem, block_m, block_n, stages)
        if width <= widest and shared <= spec.shared_per_block and several * (shared + RESERVED) <= spec.shared_per_sm:
            if block_m > MMA_BLOCK_M:  # larger ones spill
                block_n, warps = (32, 8) if width > 64 else (64, 4)
            return DecodeConfig(block_m, block_n, warps, stages, several)
    return None


# (at most so many queries of a head of keys, of all its query heads, at least so many keys): forward passes with fewer
# tiles than multiprocessors that these kernels run, too, because they share the keys of a head among programs. H100,
# 2026-11-25, 32 heads of 128, us for 1 / 4 / 16 / 32 / 48 queries of 8192 keys: 55 / 56 / 59 / 64 / 87, the portable
# forward 137 / 138 / 87 / 86 / 87, the Hopper forward 79 to 80; of 1024 keys 11 / 12 / 15 / 19 / 30, 21 to 23, and 12.
SMALL_CALLS: tuple[tuple[int, int], ...] = ((16, 2048), (32, 8192))
FULL_GPU = 132  # multiprocessors of the GPU that is assumed if a call is described without a device, as for compiling


def is_small_call(problem: AttentionProblem) -> bool:
    """Whether a forward pass is one of `SMALL_CALLS`."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    listed = any(rows <= most and problem.seqlen_k >= least for most, least in SMALL_CALLS)
    return listed and problem.batch * problem.heads_q < FULL_GPU


def unsupported(problem: KVCacheProblem) -> str | None:
    """Why no tile runs a call, or None."""
    if decode_config(problem) is None:
        widths = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"no tile for {problem.dtype} and head_dims {widths} fits the shared memory of {problem.arch}"
    return None


def attention_unsupported(problem: AttentionProblem) -> str | None:
    """Why a forward pass does not run by these kernels, or None."""
    if not problem.batch_invariant and not is_small_call(problem):
        return "split_kv runs a forward pass inside diyfa.batch_invariant(), and outside of it few queries of many keys"
    return refuse_features(problem, KVCACHE_FEATURES, "split_kv") or unsupported(as_kvcache_problem(problem))
