"""Tile sizes of the CPU backend.

One tile pair is one `torch.matmul` over all batches and heads, so the interpreter's cost for each step is shared by
batch · heads · BLOCK_M · BLOCK_N scores; the more batch and heads there are, the smaller the tile that amortises it
and still fits the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.problem import AttentionProblem, MatmulProblem


@dataclass(frozen=True)
class AttentionConfig:
    """Rows of queries and of keys in one tile."""

    block_m: int
    block_n: int


@dataclass(frozen=True)
class MatmulConfig:
    """Tile of the product: (block_m, block_k) @ (block_k, block_n)."""

    block_m: int
    block_n: int
    block_k: int


# (most batch · heads the row is for, tile)
ATTENTION: tuple[tuple[float, AttentionConfig], ...] = (
    (4, AttentionConfig(512, 512)),
    (32, AttentionConfig(256, 256)),
    (float("inf"), AttentionConfig(128, 128)),
)
MATMUL = MatmulConfig(512, 512, 512)


def attention_config(problem: AttentionProblem) -> AttentionConfig:
    """The tile for `problem`."""
    units = problem.batch * problem.heads_q
    return next(config for most, config in ATTENTION if units <= most)


def matmul_config(problem: MatmulProblem) -> MatmulConfig:
    """The tile asked for, else the table's."""
    return MatmulConfig(*problem.block) if problem.block else MATMUL
