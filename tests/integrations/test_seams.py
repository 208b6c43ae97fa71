"""The handles that integrations return."""

from __future__ import annotations

from contextlib import ExitStack

from diyfa.integrations.seams import active_handle, switch_on


def test_an_old_handle_does_not_remove_a_new_one() -> None:
    undone: list[str] = []

    def undo(name: str) -> ExitStack:
        stack = ExitStack()
        stack.callback(undone.append, name)
        return stack

    old = switch_on("a seam of tests", undo("old"))
    old.remove()
    new = switch_on("a seam of tests", undo("new"))
    old.remove()
    assert undone == ["old"] and new.active and not old.active and active_handle("a seam of tests") is new
    new.remove()
    new.remove()
    assert undone == ["old", "new"] and not new.active and active_handle("a seam of tests") is None
