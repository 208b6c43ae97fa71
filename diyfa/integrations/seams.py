"""What an integration has changed, and where calls went since: the handle that each of them returns.

A seam is a place of other software where diyfa can be put in. Each is on once at most; its handle takes it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

_on: dict[str, Handle] = {}


class Handle:
    """What one integration changed; `remove()` takes it back."""

    def __init__(self, seam: str, undo: Callable[[], None], detail: str) -> None:
        self.seam = seam
        self.detail = detail
        self.calls: Counter[str] = Counter()
        """How many calls went where since the seam was switched on; those in compiled graphs are not seen."""
        self._undo = undo

    @property
    def active(self) -> bool:
        return _on.get(self.seam) is self

    def remove(self) -> None:
        """Everything as before; a second time does nothing."""
        if self.active:
            del _on[self.seam]
            self._undo()


def handle_of(seam: str) -> Handle | None:
    """The handle of a seam that is on."""
    return _on.get(seam)


def switch_on(seam: str, undo: Callable[[], None], detail: str = "") -> Handle:
    """A handle of a seam that was off."""
    assert seam not in _on, f"{seam} is on already"
    _on[seam] = Handle(seam, undo, detail)
    return _on[seam]


def switch_off(seam: str) -> None:
    """Others have taken back what the seam's handle would."""
    _on.pop(seam, None)


def record(seam: str, where: str) -> None:
    """One call of a seam went there."""
    handle = _on.get(seam)
    if handle is not None and not torch.compiler.is_compiling():
        handle.calls[where] += 1
