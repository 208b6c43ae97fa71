"""Markers of `gluon/inline_ptx.py`, which qualify the next barrier instruction of a kind.

Gluon cannot express these qualifiers, so that module post-processes the PTX. Here the partition stores the marker until
its instruction runs.
"""

from __future__ import annotations

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARKER, RELEASE_MARKER, WAIT_MARKER

from .errors import InvalidOperand, location
from .scheduler import current

MARKERS = (RELEASE_MARKER, WAIT_MARKER, ARRIVE_MARKER)


def leave_marker(text: str) -> None:
    """Store the marker for the running partition's next instruction of its kind."""
    task = current()
    if task.marker is not None:
        raise InvalidOperand(f"{text!r} at {location()}, but what {task.marker!r} means has not come")
    task.marker = text


def take_marker(what: str, *meant: str) -> str | None:
    """Return and clear the running partition's marker. Raise InvalidOperand unless it is one of `meant`, or None."""
    task = current()
    found, task.marker = task.marker, None
    if found is not None and found not in meant:
        raise InvalidOperand(f"{found!r} in front of {what} at {location()}: it means something else")
    return found


def leave_no_marker() -> None:
    """Check, at the running partition's end, that it has no unused marker."""
    task = current()
    if task.marker is not None:
        raise InvalidOperand(f"{task.name} ends, but what {task.marker!r} means has not come")
