"""Helpers of every CUDA launcher: current device, multiprocessors, compile options, and whether it may compile."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from diyfa.arch import gpu_spec
from diyfa.backends.cuda.runtime.torch_private import current_device


@triton.jit
def _probe():
    pass


# Options of every kernel: one instruction multiplies by the scale and subtracts the maximum, with one rounding. Triton
# 3.10 requires it explicitly.
COMPILE_OPTIONS = {"enable_fp_fusion": True}

# Decided when kernels are decorated, as Triton decides it: a later change of the environment does not change kernels.
_INTERPRETING = not isinstance(_probe, JITFunction)
_NOTHING: AbstractContextManager[None] = nullcontext()


def is_interpreting() -> bool:
    """Return whether `@triton.jit` functions run in Triton's interpreter (on CPU tensors) instead of being compiled."""
    return _INTERPRETING


def can_overlap(arch: str) -> bool:
    """Return whether a kernel may be launched before the one that it waits for ends (programmatic dependent launch)."""
    spec = gpu_spec(arch)
    return spec is not None and spec.has_tma and not is_interpreting()


class StandIn(NamedTuple):
    """A GPU that calls are recorded for. Tensors on the CPU or without memory stand for tensors on it."""

    arch: str
    multiprocessors: int


stand_in: StandIn | None = None  # set inside `recording` (recording.py)


def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 0 for other devices, of interpreted or ahead-of-time compiled kernels."""
    if stand_in is not None:
        return stand_in.multiprocessors
    return _multiprocessors(device) if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


LOADED_AT = time.time()  # before any file with kernels
JIT_SETTINGS = ("auto", "never")


def may_compile() -> bool:
    """Return whether a user's call may compile, by the environment variable DIYFA_JIT. Raises ValueError if invalid."""
    setting = os.environ.get("DIYFA_JIT") or "auto"
    if setting not in JIT_SETTINGS:
        raise ValueError(f"DIYFA_JIT must be one of {', '.join(JIT_SETTINGS)}, got {setting!r}")
    return setting == "auto"


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which the current CUDA device is that of `x`. On that device, or the CPU, it does nothing."""
    index = x.get_device()
    if index < 0 or index == current_device():
        return _NOTHING
    return torch.cuda.device(index)
