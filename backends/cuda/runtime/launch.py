"""What every CUDA launcher needs: the right current device, whether Triton interprets, and the launch itself."""

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


# For every kernel: one instruction multiplies by the scale and subtracts the maximum, rounding once. Triton 3.10 asks
# for it to be said.
COMPILE_OPTIONS = {"enable_fp_fusion": True}

# Asked of Triton itself, at the time the kernels are decorated: the environment may change later, they do not.
_INTERPRETING = not isinstance(_probe, JITFunction)
_NOTHING: AbstractContextManager[None] = nullcontext()


def is_interpreting() -> bool:
    """Whether `@triton.jit` functions run in Triton's interpreter (on CPU tensors) instead of being compiled."""
    return _INTERPRETING


def can_overlap(arch: str) -> bool:
    """Whether a kernel may be launched before the one that it waits for ends (programmatic dependent launch)."""
    spec = gpu_spec(arch)
    return spec is not None and spec.has_tma and not is_interpreting()


class StandIn(NamedTuple):
    """A GPU that calls are recorded for: tensors of the CPU, or without memory, are taken for its own."""

    arch: str
    multiprocessors: int


stand_in: StandIn | None = None  # while `recording` of recording.py says so


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 of another device, on which kernels are interpreted or described to be compiled ahead of time."""
    if stand_in is not None:
        return stand_in.multiprocessors
    return _multiprocessors(device) if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


LOADED_AT = time.time()  # before any file with kernels
JIT_SETTINGS = ("auto", "never")


def may_compile() -> bool:
    """Whether a user's call may compile, by the environment variable DIYFA_JIT. Raises ValueError for other values."""
    setting = os.environ.get("DIYFA_JIT") or "auto"
    if setting not in JIT_SETTINGS:
        raise ValueError(f"DIYFA_JIT must be one of {', '.join(JIT_SETTINGS)}, got {setting!r}")
    return setting == "auto"


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which the current CUDA device is that of `x`; it does nothing when it already is, or on the CPU."""
    index = x.get_device()
    if index < 0 or index == current_device():
        return _NOTHING
    return torch.cuda.device(index)
