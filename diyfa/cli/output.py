"""Output of the commands: results on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

out = Console()
err = Console(stderr=True)


def print_json(document: Any) -> None:
    """Print one JSON document to standard output, whatever the terminal's width."""
    print(json.dumps(document, indent=1, default=str))


def writable(path: Path | None) -> Path | None:
    """Return `path` after a test that a file can be written there. Raises typer.BadParameter if not.

    Commands call this before they begin, so that a wrong name does not cost minutes of work. A missing folder is mostly
    a typing error, so it is not created.
    """
    if path is None:
        return None
    if not path.parent.exists():
        raise typer.BadParameter(f"cannot write {path}: there is no folder {path.parent}")
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    return path


class LoggedProgress(Progress):
    """A progress bar. In a log, where a bar cannot move, it prints a line, at most every `SECONDS`."""

    SECONDS = 10.0
    logs = False
    _last = 0.0

    def start(self) -> None:
        self._last = time.monotonic()
        super().start()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.logs and time.monotonic() - self._last >= self.SECONDS:
            self._last = time.monotonic()
            task = next(task for task in self.tasks if task.id == task_id)
            done = f"{task.completed:.0f}" + ("" if task.total is None else f" of {task.total:.0f}")
            left = task.time_remaining
            done += f" after {task.elapsed or 0.0:.0f} s" + ("" if left is None else f", about {left:.0f} s left")
            line = f"{task.description}: {done}, {task.fields['note']}"
            err.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_bar(enabled: bool = True) -> Progress:
    """Return a progress bar on standard error; it prints lines if that is no terminal. --json: `enabled` is false."""
    progress = LoggedProgress(
        SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=err, disable=not enabled or not err.is_terminal,
    )  # fmt: skip
    progress.logs = enabled and not err.is_terminal
    return progress
