"""Where the commands write: results to standard output, progress and notes to standard error."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console()
err = Console(stderr=True)


def print_json(document: Any) -> None:
    """One JSON document on standard output, whatever the terminal's width."""
    print(json.dumps(document, indent=1, default=str))


def progress_bar(enabled: bool = True) -> Progress:
    """A progress bar on standard error; `disable` for --json."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
        disable=not enabled,
    )
