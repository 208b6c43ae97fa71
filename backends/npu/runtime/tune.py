"""The autotuner of the NPU backend: `diyfa.tuning` with NPU events as timer, and the compiler among the versions.

A call never measures by itself, because every candidate must be compiled, some for minutes. `diyfa tune` measures, and
calls use its results.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

from diyfa import tuning as shared
from diyfa.backends.npu import device_name
from diyfa.backends.npu.runtime.compat import INTERPRETED
from diyfa.backends.npu.runtime.compiler import compiler_version, is_compile_failure
from diyfa.backends.npu.tables.requested import VARIABLE
from diyfa.npu_stacks import installed_version
from diyfa.problem import Tuning

MEASURE_MS = 60  # measured time of each candidate in each round
MIN_RUNS, MAX_RUNS = 3, 50  # runs in a measurement


def _npu() -> Any:
    return getattr(torch, "npu", None)


def _time(run: Callable[[], None]) -> float:
    """Return the median milliseconds of a run. The first run, which may compile, does not count."""
    npu = _npu()
    run()
    times: list[float] = []
    while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and sum(times) < MEASURE_MS):
        start, end = (npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        npu.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Tuner(shared.Tuner):
    """`diyfa.tuning.Tuner` on NPUs. `device` replaces the query for the current device, in tests."""

    device_needed = "there is no NPU to measure on"

    def __init__(
        self,
        timer: Callable[[Callable[[], None]], float] = _time,
        device: Callable[[], tuple[int, str] | None] | None = None,
        rounds: int = shared.ROUNDS,
    ) -> None:
        super().__init__(timer, rounds)
        self.device = device or _current_device

    def _device(self) -> tuple[int, str] | None:
        return self.device()

    def _measures_unasked(self) -> bool:
        return False

    def unavailable(self) -> str | None:
        if os.environ.get(VARIABLE):
            return f"{VARIABLE}={os.environ[VARIABLE]} asks for tiles, so that none is chosen: unset {VARIABLE}"
        return super().unavailable()

    def _identity(self, device_name: str) -> dict[str, str]:
        return {
            "device": device_name,
            "diyfa": shared.diyfa_version(),
            "triton": installed_version("triton-ascend") or "",
            "compiler": compiler_version(),
        }

    def _cannot_run(self, error: Exception) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or is_compile_failure(error)


def _current_device() -> tuple[int, str] | None:
    """Return (index, model) of the current NPU. None without one, and in the interpreter, where times mean nothing."""
    npu = _npu()
    if INTERPRETED or npu is None or not npu.is_available():
        return None
    index = npu.current_device()
    return index, device_name(index)


tuner = Tuner()
tuning: Tuning = tuner
