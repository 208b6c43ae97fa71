"""Readable figures and tables: three significant digits, and no number is broken over two lines."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIGURE = re.compile(r"~?[-+./\d]+(e[-+]\d+)?%?")
PROSE = 32  # characters: a column with longer cells is text, which may be broken between words
NARROWEST_PROSE = 24  # characters: the smallest width of such a column


def figure(value: float) -> str:
    """Return `value` with three significant digits, and all digits before the point: 0.0712, 7.12, 712, 71234."""
    if not math.isfinite(value):
        return str(value)
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 9.999 becomes 10.0
    return f"{value:.{max(0, 2 - exponent)}f}" if exponent >= -4 else f"{value:.2e}"


def shown(value: Any) -> str:
    """Return the text of one cell of a report: "" for None, `figure` of a float, str of anything else."""
    return "" if value is None else figure(value) if isinstance(value, float) else str(value)


def table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str | None] = (),
    **options: Any,
) -> Table:
    """Return a rich table of cells with markup, with one entry of `styles` for each row.

    Columns of figures are aligned to the right. Only long text is broken, between words, and headings that are longer
    than the cells below.
    """
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", **options)
    for heading, *cells in zip(headings, *rows, strict=True):
        plain = [Text.from_markup(cell).plain for cell in cells]
        longest = max((len(line) for cell in plain for line in cell.splitlines()), default=0)
        figures = any(plain) and all(FIGURE.fullmatch(cell) for cell in plain if cell)
        result.add_column(
            heading.replace(" ", "\n") if len(heading) > longest else heading,
            justify="right" if figures else "left",
            no_wrap=longest <= PROSE,
            min_width=longest if longest <= PROSE else NARROWEST_PROSE,
            overflow="fold",
        )
    for index, row in enumerate(rows):
        result.add_row(*row, style=styles[index] if styles else None)
    return result


def fits(candidate: Table, console: Console) -> bool:
    """Return whether `console` has room for all columns, the breakable ones at their smallest width."""
    return console.measure(candidate, options=console.options.update(max_width=10_000)).minimum <= console.width
