"""The errors that the interpreter reports: one class for each kind of bug of a warp-specialised kernel."""

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
CALLERS = 3  # functions in a reported location


class KernelBug(AssertionError):
    """Behaviour of a kernel that the hardware forbids or does not define."""


class Deadlock(KernelBug):
    """Every partition waits, and no event can wake one."""


class Race(KernelBug):
    """Two accesses to the same memory, at least one of them a write, that nothing orders."""


class Uninitialised(KernelBug):
    """A read of shared memory that nobody has written."""


class BarrierMisuse(KernelBug):
    """A barrier that is used before its init, gets too many arrivals, or is waited for in a wrong phase."""


class OutOfBounds(KernelBug):
    """An access to global memory outside the storage of its tensor."""


class InvalidOperand(KernelBug):
    """A layout, shape, alignment or dtype that the instruction does not accept."""


class Overflow(KernelBug):
    """Integer arithmetic beyond the range of its type."""


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the kernel's source, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
        frame = frame.f_back
    return frame


def _place() -> FrameType | None:
    return _outside(sys._getframe(2))


def location() -> str:
    """Return file, line and function of the running kernel source, and of its callers (CALLERS in all)."""
    frame, found = _place(), []
    while frame is not None and len(found) < CALLERS:
        found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = _outside(frame.f_back)
    return ", from ".join(found) or "the interpreter"


def assigned_name() -> str:
    """Return the variable that the running line assigns, or the line's location."""
    frame = _place()
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(\w+)\s*=[^=]", line)
    return found[1] if found else location()
