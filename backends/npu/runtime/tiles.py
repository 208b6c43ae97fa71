"""Which tile a launch gets, and what happens when this machine's compiler does not take it.

In this order: the tile that DIYFA_NPU_TILE asks for; what `diyfa tune` kept for such problems; the table's. CANN's
compiler is mostly older than the one that the table was made with, and may refuse a tile. Then the call warns, once,
and runs the conservative tile; the process remembers which compiled kernels it refused, so that equal calls use equal
tiles. Only a failure to compile leads there: what goes wrong on the device is raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

from diyfa.backends.npu.runtime import compiler
from diyfa.backends.npu.runtime.launch import run
from diyfa.backends.npu.runtime.tune import tuner
from diyfa.backends.npu.tables.asked import VARIABLE
from diyfa.backends.npu.tables.configs import (
    AttentionTile,
    asked_tile,
    attention_key,
    attention_tile,
    candidates,
    conservative_tile,
)
from diyfa.problem import AttentionProblem, Launch, kept
from diyfa.tuning import bucket_size

LaunchOf = Callable[[AttentionTile], Launch]
MOST_REFUSED = 1024  # compiled kernels; of what is forgotten, the next call finds out again
_refused: dict[Hashable, None] = {}


def chosen_tile(problem: AttentionProblem, kernel: str, launch_of: LaunchOf) -> AttentionTile:
    """The tile of `kernel` for `problem`. Inside `diyfa tune` it is measured first, with launches that `launch_of`
    makes. A deterministic problem is not tuned: another tile rounds differently."""
    asked = asked_tile(problem, kernel)
    if asked is not None:
        return asked
    if problem.deterministic:
        return attention_tile(problem, kernel)
    tiles = _candidates(problem, kernel)
    return tuner.best(
        f"attention_{kernel}", _bucket(problem, kernel), tiles, lambda tile: run(launch_of(tile)), tiles[0]
    )


def run_tiled(problem: AttentionProblem, kernel: str, tile: AttentionTile, launch_of: LaunchOf) -> Launch:
    """Run what `launch_of` makes of `tile`, or of the conservative one where this machine's compiler does not take
    `tile`; returns the launch that ran.

    Raises RuntimeError with both reasons where neither compiles, and where a tile that was asked for does not.
    """
    launch = launch_of(tile)
    if _refused and _variant(launch) in _refused:
        launch = launch_of(conservative_tile(problem, kernel))
        run(launch)
        return launch
    try:
        run(launch)
        return launch
    except Exception as error:
        if not compiler.is_compile_failure(error):
            raise
        refusal = error
    first = _reason(problem, kernel, tile, refusal)
    if asked_tile(problem, kernel) is not None:
        raise RuntimeError(f"{first}. {VARIABLE} asks for this tile: name another one, or unset it") from refusal
    variant, conservative = _variant(launch), conservative_tile(problem, kernel)
    launch = launch_of(conservative)
    try:
        run(launch)
    except Exception as error:
        if not compiler.is_compile_failure(error):
            raise
        second = _reason(problem, kernel, conservative, error)
        raise RuntimeError(f"{first}. The conservative tile does not compile either: {second}") from error
    while len(_refused) >= MOST_REFUSED:
        _refused.pop(next(iter(_refused)), None)
    _refused[variant] = None
    warnings.warn(
        f"{first}. This process runs it with the conservative tile {_shape(conservative)} instead, which may be slow. "
        f"`diyfa tune --head-dim {problem.head_dim} --dtype {problem.dtype}` measures what compiles here and keeps the "
        f"fastest; {VARIABLE}={kernel}={_shape(conservative)} asks for this tile and ends the warning",
        RuntimeWarning,
        stacklevel=2,
    )
    return launch


def _reason(problem: AttentionProblem, kernel: str, tile: AttentionTile, error: Exception) -> str:
    """Which compiler refused which tile of which kernel, and why."""
    features = " ".join(sorted(problem.features - {"gqa"})) or "full"
    what = f"the tile {_shape(tile)} of attention {kernel} ({problem.dtype}, D = {problem.head_dim}, {features})"
    version = compiler.compiler_version()
    by = f"{compiler.PROGRAM} {version}" if version else compiler.HOW_TO_FIND_IT
    return f"{what} does not compile ({by}): {compiler.first_error(str(error))}"


def _shape(tile: AttentionTile) -> str:
    return f"{tile.block_m}x{tile.block_n}"


def _variant(launch: Launch) -> Hashable:
    """What Triton would keep the compiled kernel under, but for the device."""
    types = tuple((name, getattr(x, "dtype", type(x))) for name, x in launch.arguments.items())
    return launch.kernel.__name__, types, tuple(launch.constants.items()), tuple(launch.options.items())


@kept
def _candidates(problem: AttentionProblem, kernel: str) -> tuple[AttentionTile, ...]:
    return tuple(candidates(problem, kernel))


# Of longer sequences tiles are worked on one after another in the same way; of more tasks cores just get more.
LONGEST, SHORTEST, MOST_TASKS = 8192, 256, 64


@kept
def _bucket(problem: AttentionProblem, kernel: str) -> tuple[Any, ...]:
    """Everything that the choice of a tile depends on, lengths and the number of tasks by size class."""

    def length(n: int) -> int:
        return bucket_size(min(max(n, SHORTEST), LONGEST))

    tasks = problem.batch * problem.heads_q * -(-problem.seqlen_q // 128)
    return (
        problem.dtype,
        problem.layout,
        bucket_size(min(tasks, MOST_TASKS)),
        bucket_size(problem.heads_q // problem.heads_kv),
        length(problem.seqlen_q),
        length(problem.seqlen_k),
        problem.head_dim,
        problem.head_dim_v,
        attention_key(problem, kernel).mode,
        tuple(sorted(problem.features)),
        bucket_size(problem.window_left + 1),
        problem.bias,
    )
