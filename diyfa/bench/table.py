"""The comparison table of `BenchmarkRunner`, drawn with rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diyfa.bench.runner import BenchmarkResult


def comparison_table(
    results: Sequence[BenchmarkResult], title: str, unavailable: Sequence[tuple[str, tuple[int, ...], str]] = ()
) -> None:
    """Print `results`, in their order, with each one's speed relative to the fastest of its size."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("rich is required to print tables: pip install 'diyfa[cli]'") from error
    fastest: dict[tuple[int, ...], float] = {}
    for r in results:
        fastest[r.size] = min(r.time_ms, fastest.get(r.size, r.time_ms))
    table = Table(title=title)
    for heading in ("size", "implementation", "tile"):
        table.add_column(heading, no_wrap=heading == "implementation")
    for heading in ("ms", "TFLOP/s", "peak MiB", "of fastest"):
        table.add_column(heading, justify="right")
    previous: tuple[int, ...] | None = None
    for r in results:
        best = r.time_ms == fastest[r.size]
        label = "×".join(map(str, r.size)) if r.size != previous else ""
        tile = "" if r.block_config is None else " ".join(f"{k}={v}" for k, v in r.block_config.items())
        share = f"{fastest[r.size] / r.time_ms:.0%}"
        if previous is not None and r.size != previous:
            table.add_section()
        row = (label, r.name, tile, f"{r.time_ms:.3f}", f"{r.tflops:.2f}", f"{r.memory_mb:.1f}", share)
        table.add_row(*row, style="bold green" if best else None)
        previous = r.size
    console = Console()
    console.print(table)
    for name, size, reason in unavailable:
        console.print(f"{name} not measured at {'×'.join(map(str, size))}: {reason}", highlight=False, markup=False)
