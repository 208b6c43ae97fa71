"""The choice of a launch's tile, and the fallback if this machine's compiler refuses it.

The order is: the tile that DIYFA_NPU_TILE asks for; the one that `diyfa tune` found for such problems; the table's.
CANN's compiler is mostly older than the one that the table was made with, and may refuse a tile. Then the call warns,
once, and runs the conservative tile. The process remembers refused kernels, so that equal calls use equal tiles. Only
a failure to compile causes this fallback; errors on the device are raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from diyfa.backends.npu.runtime import compiler, multibuffer
from diyfa.backends.npu.runtime.launch import run
from diyfa.backends.npu.runtime.tune import tuner
from diyfa.backends.npu.tables.configs import (
    AttentionTile,
    attention_key,
    candidates,
    conservative_tile,
    requested_tile,
    table_tile,
)
from diyfa.backends.npu.tables.requested import VARIABLE
from diyfa.problem import AttentionProblem, KVCacheProblem, Launch, cached_per_problem
from diyfa.tuning import bucket_size

Problem = AttentionProblem | KVCacheProblem
MakeLaunches = Callable[[AttentionTile], Sequence[Launch]]  # a kernel, with the kernels that pack or combine for it
MAX_REFUSED = 1024  # refused kernels to remember; a forgotten one is compiled and refused a second time
_refused: dict[Hashable, None] = {}


def is_fixed(problem: Problem) -> bool:
    """Return whether the tile may not be tuned, because another tile rounds differently."""
    return problem.batch_invariant if isinstance(problem, KVCacheProblem) else problem.deterministic


def chosen_tile(problem: Problem, kernel: str, make_launches: MakeLaunches) -> AttentionTile:
    """Return the tile of `kernel` for `problem`. Inside `diyfa tune` it first times the launches of each candidate."""
    requested = requested_tile(problem, kernel)
    if requested is not None:
        return requested
    if is_fixed(problem):
        return table_tile(problem, kernel)
    tiles = _candidates(problem, kernel, multibuffer.is_on())
    return tuner.best(
        f"attention_{kernel}", _bucket(problem, kernel), tiles, lambda tile: _run(make_launches(tile)), tiles[0]
    )


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        run(launch)


def run_tiled(problem: Problem, kernel: str, tile: AttentionTile, make_launches: MakeLaunches) -> Sequence[Launch]:
    """Run the launches with `tile`, or with the conservative tile if this machine's compiler refuses `tile`.

    Returns the launches that ran. Raises RuntimeError with the reasons if neither tile compiles, and if a refused tile
    may not be replaced: DIYFA_NPU_TILE asks for it, or the call is batch invariant.
    """
    launches = make_launches(tile)
    # A tile that may not be replaced is compiled once more, so that the error has its reason.
    if _refused and _is_replaceable(problem, kernel) and any(variant(launch) in _refused for launch in launches):
        launches = make_launches(conservative_tile(problem, kernel))
        _run(launches)
        return launches
    for launch in launches:
        try:
            run(launch)
        except Exception as error:
            if not compiler.is_compile_failure(error):
                raise
            return _run_conservative(problem, kernel, tile, make_launches, launch, error)
    return launches


def _is_batch_invariant(problem: Problem) -> bool:
    return isinstance(problem, KVCacheProblem) and problem.batch_invariant


def _is_replaceable(problem: Problem, kernel: str) -> bool:
    """Return whether the conservative tile may replace the chosen one."""
    return requested_tile(problem, kernel) is None and not _is_batch_invariant(problem)


def _run_conservative(
    problem: Problem, kernel: str, tile: AttentionTile, make_launches: MakeLaunches, refused: Launch, refusal: Exception
) -> Sequence[Launch]:
    """Run the launches with the conservative tile after the compiler refused launch `refused`, and warn."""
    first = _reason(problem, kernel, tile, refusal)
    if requested_tile(problem, kernel) is not None:
        raise RuntimeError(f"{first}. {VARIABLE} asks for this tile: name another one, or unset it") from refusal
    conservative = conservative_tile(problem, kernel)
    if _is_batch_invariant(problem):
        raise RuntimeError(
            f"{first}. In the batch invariant mode all calls have one tile: {VARIABLE}={kernel}={_shape(conservative)} "
            "asks for a smaller one for all"
        ) from refusal
    refused_variant, launches = variant(refused), make_launches(conservative)
    try:
        _run(launches)
    except Exception as error:
        if not compiler.is_compile_failure(error):
            raise
        second = _reason(problem, kernel, conservative, error)
        raise RuntimeError(f"{first}. The conservative tile does not compile either: {second}") from error
    while len(_refused) >= MAX_REFUSED:
        _refused.pop(next(iter(_refused)), None)
    _refused[refused_variant] = None
    command = f"diyfa tune --head-dim {problem.head_dim} --dtype {problem.dtype}"
    if isinstance(problem, KVCacheProblem):
        command += f" --page-size {problem.page_size}"
    advice = f"`{command}` measures what compiles here and keeps the fastest; "
    if problem.dtype == "int8":  # which that command does not make
        advice = ""
    warnings.warn(
        f"{first}. This process runs it with the conservative tile {_shape(conservative)} instead, which may be slow. "
        f"{advice}{VARIABLE}={kernel}={_shape(conservative)} asks for this tile and ends the warning",
        RuntimeWarning,
        stacklevel=3,
    )
    return launches


def _reason(problem: Problem, kernel: str, tile: AttentionTile, error: Exception) -> str:
    """Describe the refusal: kernel, tile, call, compiler and its error."""
    if isinstance(problem, KVCacheProblem):
        features = f"pages of {problem.page_size}" if problem.paged else "no pages"
    else:
        features = " ".join(sorted(problem.features - {"gqa"})) or "full"
    tile_text = f"the tile {_shape(tile)} of attention {kernel} ({problem.dtype}, D = {problem.head_dim}, {features})"
    version = compiler.compiler_version()
    compiler_text = f"{compiler.PROGRAM} {version}" if version else compiler.HOW_TO_FIND_IT
    return f"{tile_text} does not compile ({compiler_text}): {compiler.first_error(str(error))}"


def _shape(tile: AttentionTile) -> str:
    return f"{tile.block_m}x{tile.block_n}"


def variant(launch: Launch) -> Hashable:
    """Return the key of the compiled kernel, as Triton forms it, without the device."""
    types = tuple((name, getattr(x, "dtype", type(x))) for name, x in launch.arguments.items())
    return launch.kernel.__name__, types, tuple(launch.constants.items()), tuple(launch.options.items())


@cached_per_problem
def _candidates(problem: Problem, kernel: str, is_multibuffered: bool) -> tuple[AttentionTile, ...]:
    """Return the tiles to choose from. `is_multibuffered` is part of the cache's key: tiles depend on it."""
    return tuple(candidates(problem, kernel))


# Longer sequences only have more tiles, and more tasks only give each core more. Neither changes the best tile.
MAX_LENGTH, MIN_LENGTH, MAX_TASKS = 8192, 256, 64


@cached_per_problem
def _bucket(problem: Problem, kernel: str) -> tuple[Any, ...]:
    """Return all that the choice of a tile depends on. Lengths and the number of tasks are size classes."""

    def length(n: int) -> int:
        return bucket_size(min(max(n, MIN_LENGTH), MAX_LENGTH))

    if isinstance(problem, KVCacheProblem):
        return (
            problem.dtype,
            problem.layout,
            bucket_size(min(problem.batch * problem.heads_kv, MAX_TASKS)),
            bucket_size(problem.heads_q // problem.heads_kv),
            bucket_size(min(problem.seqlen_q, MIN_LENGTH)),
            length(problem.capacity),
            problem.head_dim,
            problem.head_dim_v,
            problem.page_size,
            problem.packed_keys,
            problem.window_left >= 0,
            problem.window_right >= 0,
            problem.softcap != 0.0,
            problem.alibi,
            problem.sinks,
            problem.num_splits,
        )
    tasks = problem.batch * problem.heads_q * -(-problem.seqlen_q // 128)
    return (
        problem.dtype,
        problem.layout,
        bucket_size(min(tasks, MAX_TASKS)),
        bucket_size(problem.heads_q // problem.heads_kv),
        length(problem.seqlen_q),
        length(problem.seqlen_k),
        problem.head_dim,
        problem.head_dim_v,
        attention_key(problem, kernel).mode,
        tuple(sorted(problem.features)),
        bucket_size(problem.window_left + 1),
        problem.bias,
        problem.mask,
        problem.score_fn,
    )
