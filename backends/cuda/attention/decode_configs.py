"""Tiles of the kernels over a KV cache, what fits a GPU, and how many programs share the work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from diyfa.arch import ELEMENT_BYTES, gpu_spec
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.problem import KVCacheProblem

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class DecodeConfig:
    """Rows (queries of a group of heads) x keys of a block, and how the compiler schedules it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


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


# (at most this wide) -> keys of a block, warps, stages. The first that leaves room for a second program on a
# multiprocessor is taken, else the first that fits. Decoding waits for memory: what counts is how many bytes are on
# their way, not how large a tile is.
_ROWS: tuple[tuple[int, int, int, int], ...] = (
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (128, 64, 4, 2),
    (128, 32, 4, 2),
    (256, 32, 4, 2),
    (256, 16, 4, 2),
    (256, 16, 4, 1),
    (1024, 32, 8, 2),
    (1024, 16, 8, 2),
    (1024, 16, 8, 1),
)
MAX_PROGRAMS_PER_SM = 3
RESERVED = 1024  # bytes of shared memory that the system takes for each program
# In batch-invariant mode every call has tiles of as many rows, whether they are of one new token or of a training
# sequence: the layout of a tile decides in what order a row is summed.
INVARIANT_BLOCK_M = 32
# Beyond 32 rows Triton multiplies by wgmma where there is that. It is right for tiles that copies bring to shared
# memory as they are, not for those that pass through registers, nor for values narrower than keys.
MMA_BLOCK_M = 32


def is_widened(problem: KVCacheProblem) -> bool:
    """Whether tiles become float32 as they are read: on Turing, for which Triton emits no tensor-core instructions."""
    spec = gpu_spec(problem.arch)
    return problem.dtype == "float32" or spec is None or not spec.has_bf16


def block_m_of(problem: KVCacheProblem) -> int:
    """Rows of a tile."""
    if problem.batch_invariant:
        return INVARIANT_BLOCK_M
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    if rows <= 16 or is_widened(problem):
        return 16
    first, second = feature_blocks(problem.head_dim)
    passes_registers = not problem.aligned or problem.cache_dtype == FLOAT8
    if rows <= 32 or passes_registers or second or first != padded_head_dim(problem.head_dim_v) or first > 128:
        return MMA_BLOCK_M
    return 64


def reads_values_once(problem: KVCacheProblem) -> bool:
    """Whether the first tile of the keys is that of the values."""
    return problem.latent and feature_blocks(problem.head_dim)[0] == problem.head_dim_v


def shared_bytes(problem: KVCacheProblem, block_m: int, block_n: int, num_stages: int) -> int:
    """Shared memory of a program: the queries, the weights, and `num_stages` blocks of keys and values."""
    d, dv = sum(feature_blocks(problem.head_dim)), padded_head_dim(problem.head_dim_v)
    if reads_values_once(problem):
        dv = 0
    size = ELEMENT_BYTES["float32" if is_widened(problem) else problem.dtype]
    keys = block_n * (d + dv)
    # float8 is converted in registers and goes through shared memory once more, beside the blocks on their way.
    stored = keys * num_stages + keys * size if problem.cache_dtype == FLOAT8 else keys * size * num_stages
    return stored + size * block_m * (d + block_n)


@lru_cache(maxsize=4096)
def decode_config(problem: KVCacheProblem) -> DecodeConfig | None:
    """The tile for a call, or None where none fits. Keys of a block and warps depend on features and dtypes alone."""
    spec = gpu_spec(problem.arch)
    if spec is None:
        return None
    width = max(padded_head_dim(problem.head_dim_v), feature_blocks(problem.head_dim)[0])
    narrowest = next(widest for widest, *_ in _ROWS if width <= widest)

    def at_once(problem: KVCacheProblem, block_n: int, stages: int) -> int:
        return spec.shared_per_sm // (shared_bytes(problem, INVARIANT_BLOCK_M, block_n, stages) + RESERVED)

    # Values of their own need more. Where they lie must not decide on a tile.
    apart = problem.replace(latent=False)
    fitting = [row for row in _ROWS if row[0] >= narrowest and at_once(apart, row[1], row[3])]
    if not fitting:
        return None
    _, block_n, warps, stages = next((row for row in fitting if at_once(apart, row[1], row[3]) > 1), fitting[0])
    several = min(at_once(problem, block_n, stages), MAX_PROGRAMS_PER_SM)
    return DecodeConfig(block_m_of(problem), block_n, warps, stages, several)


FULL_GPU = 132  # multiprocessors of what is described without a device, to be compiled ahead of time
# How many times the programs that run at once `num_splits` may ask for: their workspace is what bounds it.
MAX_WAVES = 16


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return FULL_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_split(problem: KVCacheProblem) -> bool:
    """Whether programs share the keys of a sequence. With one split, and in batch-invariant mode, none does."""
    return not problem.batch_invariant and problem.num_splits != 1


def row_blocks(problem: KVCacheProblem, config: DecodeConfig) -> int:
    """Tiles of rows that one head of keys has in the longest sequence."""
    return cdiv(problem.seqlen_q * (problem.heads_q // problem.heads_kv), config.block_m)


def programs(problem: KVCacheProblem, config: DecodeConfig, device: torch.device) -> int:
    """Programs to launch; it depends on nothing that is on the device, so a graph may be replayed with other lengths."""
    tiles = problem.batch * problem.heads_kv * row_blocks(problem, config)
    if not is_split(problem):
        return tiles
    blocks = max(1, cdiv(problem.capacity, config.block_n))
    at_once = config.programs_per_sm * _multiprocessors(device)
    if problem.num_splits > 1:
        return min(tiles * min(problem.num_splits, blocks), MAX_WAVES * at_once)
    return min(tiles * blocks, at_once)
