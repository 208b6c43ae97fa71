"""What the interpreter reports: each kind of bug that a warp-specialised kernel can have."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from types import FrameType

import triton

_OWN = os.path.dirname(__file__)
_NOT_THE_KERNEL = (_OWN, os.path.dirname(triton.__file__), threading.__file__)
CALLERS = 3  # functions that a place is given by


class KernelBug(AssertionError):
    """A kernel does what the hardware does not allow or does not define."""


class Deadlock(KernelBug):
    """Everybody waits and nothing is under way that could wake anybody."""


class Race(KernelBug):
    """Two accesses to one place, at least one of them a write, that nothing orders."""


class Uninitialised(KernelBug):
    """Shared memory is read that nobody has written."""


class BarrierMisuse(KernelBug):
    """A barrier is used before it is initialised, gets too many arrivals, or is waited for in a wrong phase."""


class OutOfBounds(KernelBug):
    """An access to global memory outside the storage of its tensor."""


class InvalidOperand(KernelBug):
    """A layout, shape, alignment or dtype that the instruction does not take."""


class Overflow(KernelBug):
    """Integer arithmetic left the range of its type."""


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the kernel's source, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
        frame = frame.f_back
    return frame


def _place() -> FrameType | None:
    return _outside(sys._getframe(2))


def location() -> str:
    """File, line and function of the kernel's source that is being run, and the same of whoever called that."""
    frame, found = _place(), []
    while frame is not None and len(found) < CALLERS:
        found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = _outside(frame.f_back)
    return ", from ".join(found) or "the interpreter"


def assigned_name() -> str:
    """The variable that the line being run assigns, or that line's place."""
    frame = _place()
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(\w+)\s*=[^=]", line)
    return found[1] if found else location()
