"""Tiles of the "v1" forward kernel, as a table. It needs neither Triton nor a device.

They are smaller than those of "v2", because the unified buffer also holds the running output of a tile of rows. The
mask is always compiled in, so there is one row for each operand width and head-dim class. The Ascend compiler accepted
every row, as in configs.py.
"""

from __future__ import annotations

from diyfa.arch import ELEMENT_BYTES, NPUArch
from diyfa.backends.npu.tables.configs import AttentionTile, family
from diyfa.problem import AttentionProblem, refuse_features

FEATURES = frozenset({"causal", "window", "seq_lens", "gqa", "head_dim_v"})
MAX_HEAD_DIM = 256

# (bytes of an element, largest head dim) -> (query rows, keys); on A2 and A3 all bound and pipelined four deep
_SHAPES: dict[tuple[int, int], tuple[int, int]] = {
    (2, 64): (64, 128),
    (2, 128): (64, 128),
    (2, 256): (32, 128),
    (4, 64): (64, 128),
    (4, 128): (64, 128),
    (4, 256): (32, 64),
}


def v1_tile(problem: AttentionProblem) -> AttentionTile:
    """Return the tile for `problem`. The 950 has the same tiles, but its compiler neither binds nor pipelines them."""
    widest = max(problem.head_dim, problem.head_dim_v)
    width = ELEMENT_BYTES[problem.dtype]
    rows, keys = next(shape for (w, head_dim), shape in _SHAPES.items() if w == width and widest <= head_dim)
    on_950 = family(problem.arch) is NPUArch.A5
    return AttentionTile(rows, keys, bound=not on_950, pipelined=0 if on_950 else 4)


def v1_unsupported(problem: AttentionProblem) -> str | None:
    """Return why "v1" cannot run `problem`, or None."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return f"head_dim {widest} is beyond {MAX_HEAD_DIM}, the most whose tiles fit the unified buffer in v1"
    return refuse_features(problem, FEATURES, "v1")
