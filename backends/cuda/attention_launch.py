"""What the attention launchers share: the softmax scale a kernel takes, and which tile it runs with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from diyfa.backends.cuda import tune
from diyfa.backends.cuda.configs import AttentionConfig, candidates
from diyfa.problem import AttentionProblem

_forced: dict[str, AttentionConfig] = {}


def softmax_scale(sm_scale: float) -> tuple[float, bool]:
    """(|sm_scale|, negate scores first): the running maximum is taken before scaling, which needs a positive scale.

    A scale of 0 becomes the smallest that keeps -inf a mask and every exponential at 1.
    """
    return abs(sm_scale) or 1e-30, sm_scale < 0


@contextmanager
def use_config(kind: str, config: AttentionConfig) -> Iterator[None]:
    """Launch every kernel of `kind` ("fwd", "dkdv", "dq") with this tile inside the block: for sweeps and tests."""
    _forced[kind] = config
    try:
        yield
    finally:
        del _forced[kind]


@lru_cache(maxsize=4096)
def _bucket(problem: AttentionProblem) -> tuple[object, ...]:
    """Everything that the choice of a tile depends on, lengths and batch by size class."""
    return (
        problem.dtype,
        problem.layout,
        tune.bucket_size(problem.batch * problem.heads_q),
        tune.bucket_size(problem.heads_q // problem.heads_kv),
        tune.bucket_size(problem.seqlen_q),
        tune.bucket_size(problem.seqlen_k),
        problem.head_dim,
        problem.head_dim_v,
        problem.causal,
        problem.seq_lens,
        problem.aligned,
    )


@lru_cache(maxsize=4096)
def _tiles(kind: str, problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    tiles = tuple(candidates(kind, problem))
    assert tiles, "unsupported() accepted a problem that no tile fits"
    return tiles


def tuned_config(kind: str, problem: AttentionProblem, run: Callable[[AttentionConfig], None]) -> AttentionConfig:
    """The tile for this problem's bucket: measured once where tuning is possible and allowed, else the table's.

    A deterministic problem always takes the table's: another tile rounds differently.
    """
    if _forced and kind in _forced:
        return _forced[kind]
    tiles = _tiles(kind, problem)
    if problem.deterministic or len(tiles) == 1:
        return tiles[0]
    return tune.best(f"attention_{kind}", _bucket(problem), tiles, run, tiles[0])
