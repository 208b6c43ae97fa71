"""Marks of `gluon/inline_ptx.py`, which say how the next instruction of some kind is meant.

Gluon has no words for that. That module completes the PTX accordingly; here the partition remembers the mark until the
instruction comes.
"""

from __future__ import annotations

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARK, RELEASE_MARK, WAIT_MARK

from .errors import InvalidOperand, location
from .scheduler import current

MARKS = (RELEASE_MARK, WAIT_MARK, ARRIVE_MARK)


def mark(text: str) -> None:
    """The running partition says what its next instruction of that kind means."""
    task = current()
    if task.mark is not None:
        raise InvalidOperand(f"{text!r} at {location()}, but what {task.mark!r} speaks of has not come")
    task.mark = text


def take_mark(what: str, *meant: str) -> str | None:
    """The mark of the instruction that the running partition has come to; it may only be one that means such."""
    task = current()
    found, task.mark = task.mark, None
    if found is not None and found not in meant:
        raise InvalidOperand(f"{found!r} in front of {what} at {location()}: it speaks of something else")
    return found


def leave_no_mark() -> None:
    """The running partition ends."""
    task = current()
    if task.mark is not None:
        raise InvalidOperand(f"{task.name} ends, but what {task.mark!r} speaks of has not come")
