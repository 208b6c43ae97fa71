"""The handle that each integration returns: it undoes the integration's changes and counts its calls.

A seam is a point of other software where diyfa can be plugged in. It is on at most once; its handle switches it off.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import torch

_on: dict[str, Handle] = {}


class Handle:
    """The handle of one integration; `remove()` undoes its changes."""

    def __init__(self, seam: str, undo: ExitStack, detail: str) -> None:
        self.seam = seam
        self.detail = detail
        self.calls: Counter[str] = Counter()
        """How many calls went where since the seam was switched on; those in compiled graphs are not seen."""
        self._undo = undo

    @property
    def active(self) -> bool:
        return _on.get(self.seam) is self

    def remove(self) -> None:
        """Undo all changes. A second call does nothing."""
        if self.active:
            del _on[self.seam]
            self._undo.close()


def active_handle(seam: str) -> Handle | None:
    """Return the handle of a seam that is on, else None."""
    return _on.get(seam)


def switch_on(seam: str, undo: ExitStack, detail: str = "") -> Handle:
    """Switch on a seam that is off and return its handle, whose `remove()` closes `undo`."""
    assert seam not in _on, f"{seam} is on already"
    _on[seam] = Handle(seam, undo, detail)
    return _on[seam]


def refuse(reasons: dict[str, str], **arguments: object) -> None:
    """Raise ValueError for an argument of another library that is given and that diyfa lacks, with its reason."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not supported by diyfa: {reasons[name]}")


def record(seam: str, route: str) -> None:
    """Count one call of a seam that went to `route`."""
    handle = _on.get(seam)
    if handle is not None and not torch.compiler.is_compiling():
        handle.calls[route] += 1
