"""What the interpreter reports: each kind of bug that a warp-specialised kernel can have."""

from __future__ import annotations

import os
import sys

import triton

_OWN = os.path.dirname(__file__)
_TRITON = os.path.dirname(triton.__file__)


class KernelBug(AssertionError):
    """A kernel does what the hardware does not allow or does not define."""


class Deadlock(KernelBug):
    """Everybody waits and nothing is under way that could wake anybody."""


class Race(KernelBug):
    """Two accesses to one place, at least one of them a write, that nothing orders."""


class BarrierMisuse(KernelBug):
    """A barrier is used before it is initialised, gets too many arrivals, or is waited for in a wrong phase."""


class OutOfBounds(KernelBug):
    """An access to global memory outside the storage of its tensor."""


class InvalidOperand(KernelBug):
    """A layout, shape, alignment or dtype that the instruction does not take."""


class Overflow(KernelBug):
    """Integer arithmetic left the range of its type."""


def location() -> str:
    """File, line and function of the kernel's source that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OWN, _TRITON)):
            return f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "the interpreter"
