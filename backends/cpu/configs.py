"""Tile sizes of the CPU backend.

One tile pair is one `torch.matmul` over all batches and heads, so batch · heads · BLOCK_M · BLOCK_N scores share the
interpreter's cost for a step. With more samples and heads, a smaller tile amortises that cost and still fits the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.problem import AttentionProblem, MatmulProblem


@dataclass(frozen=True)
class AttentionConfig:
    """Queries (block_m) and keys (block_n) of one tile."""

    block_m: int
    block_n: int


@dataclass(frozen=True)
class MatmulConfig:
    """Tile of the product: (block_m, block_k) @ (block_k, block_n)."""

    block_m: int
    block_n: int
    block_k: int


# (largest batch · heads of the row, tile). Forward and backward, causal, float32, D = 64, on two busy x86 cores,
# 2026-11-21, best of six in ms for square tiles of 128 / 256 / 512 rows (differences below a tenth are noise):
ATTENTION: tuple[tuple[float, AttentionConfig], ...] = (
    (32, AttentionConfig(256, 256)),  # B·H = 4, S = 2048: 2642 / 2487 / 2958; B·H = 32, S = 512: 1564 / 1305 / 1271
    (float("inf"), AttentionConfig(128, 128)),  # B·H = 128, S = 256: 405 / 481 / 607
)
MATMUL = MatmulConfig(512, 512, 512)


def attention_config(problem: AttentionProblem) -> AttentionConfig:
    """Return the tile for `problem`, with a block mask at most one of its blocks: hidden ones are skipped."""
    units = problem.batch * problem.heads_q
    tile = next(config for max_units, config in ATTENTION if units <= max_units)
    if not problem.mask:
        return tile
    block_q, block_k = problem.mask
    return AttentionConfig(min(tile.block_m, block_q), min(tile.block_n, block_k))


def matmul_config(problem: MatmulProblem) -> MatmulConfig:
    """Return the requested tile, else the default."""
    return MatmulConfig(*problem.block) if problem.block else MATMUL
