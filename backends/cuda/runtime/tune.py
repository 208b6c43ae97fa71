"""The autotuner of the CUDA backend: `diyfa.tuning` with Triton's timer and errors, and the current CUDA device.

A problem is measured at its first call, since its candidates are compiled for it. In a process that should not compile,
because a pack is installed or DIYFA_JIT=never, only `diyfa tune` measures. If nothing can be measured, `best` says what
it returns. The environment variable DIYFA_AUTOTUNE=0 or `set_enabled` turns tuning off. DIYFA_CACHE_DIR moves the file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from diyfa import tuning as shared
from diyfa.arch import gpu_arch_name
from diyfa.backends.cuda.runtime.launch import is_interpreting, may_compile
from diyfa.problem import Tuning
from diyfa.tuning import ROUNDS, diyfa_version

try:
    from triton.errors import TritonError
except ImportError:  # Triton 3.2 has no common base class
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    _KERNEL_ERRORS: tuple[type[Exception], ...] = (CompilationError, OutOfResources, PTXASError)
else:
    _KERNEL_ERRORS = (TritonError,)

WARMUP_MS, MEASURE_MS = 20, 60


def identity(device_name: str) -> dict[str, str]:
    """Return what a measurement depends on besides the problem. Each value has a cache file of its own."""
    versions = {"diyfa": diyfa_version(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return {"device": device_name, **versions}


def _bench(run: Callable[[], None]) -> float:
    return triton.testing.do_bench(run, warmup=WARMUP_MS, rep=MEASURE_MS, return_mode="median")


def cannot_run(error: Exception) -> bool:
    """Return whether `error` means only that this tile does not compile or does not fit. Other errors are bugs."""
    if isinstance(error, (*_KERNEL_ERRORS, torch.cuda.OutOfMemoryError)):
        return True
    # If a pass of Triton's compiler gives up, it raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)


class Tuner(shared.Tuner):
    """`diyfa.tuning.Tuner` on CUDA. For tests, `device` and `may_measure` replace the answers of the current device."""

    device_needed = "there is no CUDA device to measure on"
    _cannot_run = staticmethod(cannot_run)

    def __init__(
        self, timer: Callable[[Callable[[], None]], float] = _bench,
        device: Callable[[], tuple[int, str] | None] | None = None, may_measure: Callable[[], bool] | None = None,
        rounds: int = ROUNDS,
    ) -> None:  # fmt: skip
        super().__init__(timer, rounds)
        self._current_device = device or _current_device
        self._measurable = may_measure or _may_measure

    def _device(self) -> tuple[int, str] | None:
        return self._current_device()

    def _measures_unasked(self) -> bool:
        return may_compile() and not _has_pack()

    def _identity(self, device_name: str) -> dict[str, str]:
        return identity(device_name)

    def _may_measure(self) -> bool:
        return self._measurable()


def _current_device() -> tuple[int, str] | None:
    """Return (index, model) of the current CUDA device, None if nothing can be measured."""
    if is_interpreting():
        return None
    # is_initialized first: every call runs this, and is_available asks the driver.
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    return index, torch.cuda.get_device_name(index)


def _has_pack() -> bool:
    """Return whether a pack serves the current device."""
    from diyfa.backends.cuda.runtime.pack import installed

    return torch.cuda.is_initialized() and (
        installed(gpu_arch_name(*torch.cuda.get_device_capability())).pack is not None
    )


def _may_measure() -> bool:
    return may_compile() and not torch.cuda.is_current_stream_capturing()


_tuner = Tuner()
tuning: Tuning = _tuner
best, is_settled, state = _tuner.best, _tuner.is_settled, _tuner.state


def set_enabled(on: bool) -> bool:
    """Turn tuning on or off for this process, and return the previous setting."""
    previous, _tuner.enabled = _tuner.enabled, bool(on)
    return previous


def set_recording(on: bool) -> bool:
    """Make `best` run each candidate once instead of measuring it, or measure. Return the previous setting."""
    previous, _tuner.recording = _tuner.recording, bool(on)
    return previous
