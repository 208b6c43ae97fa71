"""Where the commands write: results to standard output, progress and notes to standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console()
err = Console(stderr=True)


def print_json(document: Any) -> None:
    """One JSON document on standard output, whatever the terminal's width."""
    print(json.dumps(document, indent=1, default=str))


def writable(path: Path | None) -> Path | None:
    """`path`, once it is certain that a file can be written there; makes its folder.

    Asked before a command begins, so that minutes of work are not lost for a wrong name. Raises typer.BadParameter.
    """
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    return path


def progress_bar(enabled: bool = True) -> Progress:
    """A progress bar on standard error, where that is a terminal; `enabled` is false for --json."""
    return Progress(
        SpinnerColumn("line"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
        disable=not enabled or not err.is_terminal,
    )
