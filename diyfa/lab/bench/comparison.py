"""The table that `diyfa bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diyfa.cli.table import figure, table
from diyfa.terminal import printable

if TYPE_CHECKING:
    from diyfa.lab.bench.runner import BenchmarkResult


def comparison_table(
    results: Sequence[BenchmarkResult],
    title: str,
    unavailable: Sequence[tuple[str, tuple[int, ...], str]] = (),
    spread_limit: float = 0.1,
) -> None:
    """Print `results` in their order, each with its speed relative to the fastest of its size.

    Times and speeds whose spread exceeds `spread_limit` stand behind a ~, which a line below explains.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("rich is required to print tables: pip install 'diyfa[cli]'") from error
    fastest: dict[tuple[int, ...], float] = {}
    for r in results:
        fastest[r.size] = min(r.time_ms, fastest.get(r.size, r.time_ms))
    headings = ["size", "implementation", "tile", "ms", "TFLOP/s", "peak MiB", "of fastest"]
    rows: list[list[str]] = []
    styles: list[str | None] = []
    previous: tuple[int, ...] | None = None
    for r in results:
        label = "×".join(map(str, r.size)) if r.size != previous else ""
        tile = "" if r.block_config is None else " ".join(f"{k}={v}" for k, v in r.block_config.items())
        relative = f"{fastest[r.size] / r.time_ms:.0%}"
        mark = "~" if r.spread > spread_limit else ""
        figures = [f"{mark}{figure(r.time_ms)}", f"{mark}{figure(r.tflops)}", figure(r.memory_mb), f"{mark}{relative}"]
        rows.append([label, r.name, tile, *figures])
        styles.append("bold green" if r.time_ms == fastest[r.size] else None)
        previous = r.size
    if not any(row[2] for row in rows):  # no tiles were given
        headings, rows = [x for x in headings if x != "tile"], [[*row[:2], *row[3:]] for row in rows]
    result = table(title, headings, rows, styles)
    for line, following in zip(result.rows, rows[1:], strict=False):
        line.end_section = following[0] != ""  # the next size begins
    with printable():
        console = Console()
        console.print(result)
        if unsteady := [r.spread for r in results if r.spread > spread_limit]:
            text = f"~ {len(unsteady)} of {len(results)} figures are unsteady: their calls spread by more than"
            console.print(f"{text} {spread_limit:.0%}, up to {max(unsteady):.0%}", highlight=False, markup=False)
        for name, size, reason in unavailable:
            console.print(f"{name} not measured at {'×'.join(map(str, size))}: {reason}", highlight=False, markup=False)
