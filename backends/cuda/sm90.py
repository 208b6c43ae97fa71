"""Which problems the Hopper kernel (`fwd_sm90.py`) runs, and its tile for each: plain data, importable everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from diyfa.backends.cuda.configs import TMA_MIN_WORK, has_tma
from diyfa.backends.cuda.launch import is_interpreting
from diyfa.problem import AttentionProblem, refuse_features

FEATURES = frozenset({"causal", "gqa"})
TRITON = (3, 6)  # Gluon changes names and meanings from release to release
CONSUMER_ROWS = 64
L2_BYTES = 32 << 20  # of 50 MB: what keys and values of neighbouring heads may fill


@dataclass(frozen=True)
class Sm90Config:
    """Tile and schedule of the Hopper kernel: 64 * consumers queries, keys in blocks of block_n."""

    consumers: int
    block_n: int
    slots: int  # buffers of [block_n, head_dim] that K and V share
    own_o: bool  # out leaves through buffers of its own, not those of Q
    consumer_registers: int
    producer_registers: int
    persistent: bool = False  # one program for each multiprocessor, which takes tiles in turn
    pingpong: bool = False  # consumers issue their products in turns
    measured: str = ""


C = Sm90Config
# By head_dim: (without a mask, causal).
_CONFIGS: dict[int, tuple[Sm90Config, Sm90Config]] = {
    64: (C(3, 128, 8, False, 160, 32), C(3, 128, 8, False, 160, 32)),
    128: (C(2, 128, 4, True, 240, 24), C(2, 128, 4, True, 240, 24)),
    256: (C(2, 64, 4, False, 240, 24), C(2, 64, 4, False, 240, 24)),
}
_forced: dict[int, Sm90Config] = {}


def config_of(problem: AttentionProblem) -> Sm90Config:
    """The tile of a problem that `unsupported` accepts."""
    if _forced and problem.head_dim in _forced:
        return _forced[problem.head_dim]
    return _CONFIGS[problem.head_dim][problem.causal]


def heads_together(problem: AttentionProblem) -> int:
    """How many query heads take turns: with a causal mask, as many as keep their keys and values in L2."""
    if not problem.causal:
        return 1
    pair_bytes = 2 * 2 * problem.seqlen_k * problem.head_dim
    return max(1, L2_BYTES // pair_bytes) * (problem.heads_q // problem.heads_kv)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_of(problem: AttentionProblem, config: Sm90Config, tiles: int, device: torch.device) -> int:
    """Programs to launch for `tiles` tiles."""
    return min(tiles, _multiprocessors(device)) if config.persistent else tiles


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the portable kernel has to run `problem`, or None."""
    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if problem.arch != "sm_90":
        return f"sm90 is written for sm_90 (wgmma, setmaxnreg), this is {problem.arch}"
    if version != TRITON:
        return f"sm90 is written in the Gluon of Triton {'.'.join(map(str, TRITON))}, this is Triton {triton.__version__}"
    if is_interpreting():
        return "sm90 is written in Gluon, which Triton's interpreter does not run"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"sm90 takes float16 and bfloat16, not {problem.dtype}"
    if reason := refuse_features(problem, FEATURES, "sm90"):
        return reason
    if problem.head_dim not in _CONFIGS:
        return f"sm90 takes head_dim {', '.join(map(str, _CONFIGS))}, not {problem.head_dim}"
    if not problem.aligned:
        return "sm90 reads through TMA, which needs addresses and strides that are multiples of 16 bytes"
    if not has_tma(problem):
        return f"sm90 pays from {TMA_MIN_WORK} multiply-adds in the scores on"
    return None
