"""Tiles of the kernels over a KV cache, and which of them fit a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diyfa.arch import ELEMENT_BYTES, gpu_spec
from diyfa.backends.cuda.attention.tile_io import padded_head_dim
from diyfa.problem import (
    KVCACHE_FEATURES,
    AttentionProblem,
    KVCacheProblem,
    as_kvcache_problem,
    cached_per_kind,
    cached_per_problem,
    refuse_features,
)

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class DecodeConfig:
    """Rows of a tile, keys of a block, and how the kernel is compiled and launched."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    # Programs have whole tiles if that takes at most this many more key blocks than equal shares (`stream_k.py`).
    split_cost: int = 0


def feature_blocks(head_dim: int) -> tuple[int, int]:
    """Return (width of the first tile, width of the second or 0) of one or two tiles that cover head_dim features.

    Widths are powers of two. One tile for MLA's 576 features would be 1024 wide; two are 512 and 64 wide, and the first
    has just the values.
    """
    whole = padded_head_dim(head_dim)
    first = whole // 2
    if whole == 16 or head_dim <= first:
        return whole, 0
    second = padded_head_dim(head_dim - first)
    return (first, second) if first + second < whole else (whole, 0)


# (largest width of a tile of features, keys of a block, warps, stages, programs per multiprocessor). The first row that
# fits is taken. Decoding waits for memory, so the number of bytes in flight counts, not the size of a tile. Registers
# suffice for the row's number of programs.
_ROWS: tuple[tuple[int, int, int, int, int], ...] = (
    (64, 128, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 3, 2), (64, 32, 4, 2, 2), (64, 16, 4, 1, 2),
    (128, 64, 4, 3, 2), (128, 64, 4, 2, 2), (128, 32, 4, 2, 2), (128, 16, 4, 1, 2),
    (256, 32, 4, 3, 2), (256, 32, 4, 2, 2), (256, 16, 4, 2, 2), (256, 16, 4, 2, 1),
    (1024, 32, 8, 3, 1), (1024, 32, 8, 2, 1), (1024, 16, 8, 2, 1), (1024, 16, 8, 1, 1),
)  # fmt: skip
# Rows that come first for a float8 cache: its blocks are half as large, and instructions take more time than memory.
_FLOAT8_ROWS: tuple[tuple[int, int, int, int, int], ...] = ((128, 128, 4, 3, 2),)
TURING_BLOCK_N = 16  # with more keys, products in registers spill
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each program
# Batch-invariant mode: all calls with the same head dims and dtypes have the same keys in a block and in a chunk, which
# is a multiple of every block. `fixed_order.py` says what else decides on a row's bits: not the rows of a tile.
INVARIANT_BLOCK_M = 32
CHUNK_KEYS = 1024
# The mode on Hopper, where `hopper/fwd.py` runs training and prompts by wgmma: (largest width of a tile, keys of a
# chunk, tile of the decoding kernels). Blocks are as long as the Hopper forward's. The rows of a tile do not matter,
# because mma.sync and wgmma round equally there (`docs/log/decode.md`): `choose_block_m` has them.
HOPPER_INVARIANT: tuple[tuple[int, int, DecodeConfig], ...] = (
    (64, 1024, DecodeConfig(16, 128, 4, 3, 2)),
    (128, 1024, DecodeConfig(16, 128, 4, 2, 2)),
    (256, 1024, DecodeConfig(16, 64, 4, 2, 1)),
)
# With more rows Triton multiplies by wgmma on GPUs that have it. That is right for tiles that are copied to shared
# memory as they are. It is not for tiles that pass through registers, nor for values narrower than keys, unless the
# values are the keys' first tile.
MMA_BLOCK_M = 32


def has_hopper_order(problem: KVCacheProblem | AttentionProblem) -> bool:
    """Return whether HOPPER_INVARIANT has the blocks and the chunks of a call in batch-invariant mode."""
    cache_dtype, latent = getattr(problem, "cache_dtype", problem.dtype), getattr(problem, "latent", False)
    widest = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    is_half = problem.dtype in ("float16", "bfloat16") and cache_dtype == problem.dtype
    return problem.arch == "sm_90" and is_half and not latent and 64 <= widest <= HOPPER_INVARIANT[-1][0]


def _hopper_invariant(problem: KVCacheProblem | AttentionProblem) -> tuple[int, int, DecodeConfig]:
    widest = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    return next(row for row in HOPPER_INVARIANT if widest <= row[0])


def chunk_keys(problem: KVCacheProblem | AttentionProblem) -> int:
    """Return the keys of a chunk in batch-invariant mode."""
    return _hopper_invariant(problem)[1] if has_hopper_order(problem) else CHUNK_KEYS


def _is_turing(problem: KVCacheProblem) -> bool:
    """Return whether the GPU is older than Ampere: Triton has no tensor-core products or asynchronous copies for it."""
    spec = gpu_spec(problem.arch)
    return spec is None or not spec.has_bf16


def is_widened(problem: KVCacheProblem) -> bool:
    """Return whether tiles become float32 as they are read, and products are float32 multiply-adds."""
    return problem.dtype == "float32" or _is_turing(problem)


def choose_block_m(problem: KVCacheProblem) -> int:
    """Return the rows of a tile."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    if is_widened(problem):
        return 16
    if problem.batch_invariant and has_hopper_order(problem):
        return 16 if rows <= 16 else MMA_BLOCK_M
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
    """Return whether the values are the first tile of the keys, and need not be read again."""
    return problem.latent and feature_blocks(problem.head_dim)[0] == problem.head_dim_v


def reads_value_pairs(problem: KVCacheProblem) -> bool:
    """Return whether float8 values are read as pairs of features, and converted in registers (`_load_pairs`)."""
    is_float8 = problem.cache_dtype == FLOAT8 and not is_widened(problem) and not reads_values_once(problem)
    return is_float8 and problem.aligned and problem.head_dim_v % 2 == 0


def shared_bytes(problem: KVCacheProblem, block_m: int, block_n: int, num_stages: int) -> int:
    """Return a program's bytes of shared memory: the queries, the weights, and the key and value blocks in flight.

    Values that are the keys' first tile need less, which is not counted: the choice of a tile, and with it the result,
    may not depend on it.
    """
    d, dv = sum(feature_blocks(problem.head_dim)), padded_head_dim(problem.head_dim_v)
    size = ELEMENT_BYTES["float32" if is_widened(problem) else problem.dtype]
    block, buffers = block_n * (d + dv), max(1, num_stages - 1)  # one stage computes
    keys = block * size * buffers
    if problem.cache_dtype == FLOAT8:  # converted operands may go through shared memory once more
        # In batch-invariant mode unaligned tensors get the same tile.
        pairs = reads_value_pairs(problem) and not problem.batch_invariant
        keys = block * (buffers + (0 if pairs else size))
    if num_stages == 1 or _is_turing(problem):  # values follow in the memory of the keys
        keys = block_n * max(d, dv) * size
    return keys + size * block_m * (d + block_n)


@cached_per_problem
def decode_config(problem: KVCacheProblem) -> DecodeConfig | None:
    """Return the config for a call, or None if none fits. block_n and num_warps depend on head dims and dtypes only."""
    return _config_for_kind(problem, choose_block_m(problem))


@cached_per_kind
def _config_for_kind(problem: KVCacheProblem, block_m: int) -> DecodeConfig | None:
    spec = gpu_spec(problem.arch)
    if spec is None:
        return None
    if problem.batch_invariant and has_hopper_order(problem):
        return replace(_hopper_invariant(problem)[2], block_m=block_m)
    width = max(padded_head_dim(problem.head_dim_v), feature_blocks(problem.head_dim)[0])
    rows = _FLOAT8_ROWS + _ROWS if problem.cache_dtype == FLOAT8 else _ROWS
    for widest, block_n, warps, stages, programs_per_sm in rows:
        if _is_turing(problem) and block_n > TURING_BLOCK_N:
            continue
        shared = shared_bytes(problem, block_m, block_n, stages)
        fits = shared <= spec.shared_per_block and programs_per_sm * (shared + RESERVED) <= spec.shared_per_sm
        if fits and width <= widest:
            if block_m > MMA_BLOCK_M:  # larger blocks spill
                block_n, warps = (32, 8) if width > 64 else (64, 4)
            return DecodeConfig(block_m, block_n, warps, stages, programs_per_sm)
    return None


# Forward passes that these kernels run as well, with fewer tiles than multiprocessors: (most rows of a KV head, which
# are queries times its query heads; fewest keys). They are faster here because programs share the keys of a head. H100,
# 32 heads of 128, us for 1 / 4 / 16 / 32 / 48 queries of 8192 keys: 55 / 56 / 59 / 64 / 87; the portable forward 137 /
# 138 / 87 / 86 / 87; the Hopper forward 79 to 80. Of 1024 keys 11 / 12 / 15 / 19 / 30; 21 to 23; 12.
SMALL_CALLS: tuple[tuple[int, int], ...] = ((16, 2048), (32, 8192))
MOST_ROWS = max(most for most, _ in SMALL_CALLS)
FULL_GPU = 132  # multiprocessors of the GPU that is assumed if a call is described without a device, as for compiling


def is_small_call(problem: AttentionProblem) -> bool:
    """Return whether `SMALL_CALLS` lists a forward pass."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    if problem.batch * problem.heads_q >= FULL_GPU or rows > MOST_ROWS:
        return False
    return any(rows <= max_rows and problem.seqlen_k >= min_keys for max_rows, min_keys in SMALL_CALLS)


def unsupported(problem: KVCacheProblem) -> str | None:
    """Return why no tile runs a call, or None."""
    if decode_config(problem) is None:
        widths = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"no tile for {problem.dtype} and head_dims {widths} fits the shared memory of {problem.arch}"
    return None


def attention_unsupported(problem: AttentionProblem) -> str | None:
    """Return why a forward pass does not run by these kernels, or None."""
    if not problem.batch_invariant and not is_small_call(problem):
        return "split_kv runs a forward pass inside diyfa.batch_invariant(), and outside of it few queries of many keys"
    return refuse_features(problem, KVCACHE_FEATURES, "split_kv") or unsupported(as_kvcache_problem(problem))
