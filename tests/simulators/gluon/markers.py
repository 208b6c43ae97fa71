"""Markers of `gluon/inline_ptx.py`, which say how the next instruction of some kind is meant.

Gluon has no words for that, so that module post-processes the PTX. Here the partition remembers the marker until the
instruction comes.
"""

from __future__ import annotations

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARKER, RELEASE_MARKER, WAIT_MARKER

from .errors import InvalidOperand, location
from .scheduler import current

MARKERS = (RELEASE_MARKER, WAIT_MARKER, ARRIVE_MARKER)


def leave_marker(text: str) -> None:
    """The running partition says what its next instruction of that kind means."""
    task = current()
    if task.marker is not None:
        raise InvalidOperand(f"{text!r} at {location()}, but what {task.marker!r} means has not come")
    task.marker = text


def take_marker(what: str, *meant: str) -> str | None:
    """The marker of the instruction that the running partition has come to; it may only be one that means such."""
    task = current()
    found, task.marker = task.marker, None
    if found is not None and found not in meant:
        raise InvalidOperand(f"{found!r} in front of {what} at {location()}: it means something else")
    return found


def leave_no_marker() -> None:
    """The running partition ends."""
    task = current()
    if task.marker is not None:
        raise InvalidOperand(f"{task.name} ends, but what {task.marker!r} means has not come")
