"""`diyfa report`: benchmark files of any number of devices as tables, and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from diyfa.bench.documents import Document, read_document
from diyfa.bench.page import check_libraries, render_page
from diyfa.bench.sections import Section, build_sections
from diyfa.cli.output import err, out, print_json

BAD = ("FAIL", "error")
NOTES_SHOWN = 3
NARROWEST_COLUMN = 7  # of the terminal's columns that a table's take, borders included; beyond that cells lose letters


def _table(section: Section) -> Table:
    table = Table(title=f"{section.title} ({section.unit})", title_justify="left")
    for index, column in enumerate(section.columns):
        numbers = any(isinstance(row[index], (int, float)) for row in section.rows)
        table.add_column(column, justify="right" if numbers else "left")
    for line, row in enumerate(section.rows):
        best = section.best[line] if section.best else None
        cells = ["" if value is None else str(value) for value in row]
        if best is not None:
            cells[best] = f"[bold green]{cells[best]}[/]"
        table.add_row(*cells, style="bold red" if any(value in BAD for value in row) else None)
    return table


def _lines(section: Section) -> Text:
    """The rows of a table that is too wide, each as names and values; words mostly stand by themselves."""
    lines = [f"{section.title} ({section.unit})"]
    for row in section.rows:
        cells = []
        for column, value in zip(section.columns, row, strict=True):
            alone = isinstance(value, str) and value not in ("yes", "no") and " " not in column
            cells += [] if value is None else [value if alone else f"{column} {value}"]
        lines.append("  " + ", ".join(cells))
    return Text("\n".join(lines))


def _print(documents: Sequence[Document], sections: Sequence[Section]) -> None:
    for document in documents:
        out.print(
            f"{document.device}, {document.benchmark}, {document.date}: {len(document.rows)} rows", highlight=False
        )
    for section in sections:
        out.print(_table(section) if NARROWEST_COLUMN * len(section.columns) <= out.width else _lines(section))
        for note in section.notes[:NOTES_SHOWN]:
            out.print(f"  {note}", highlight=False, markup=False)
        if len(section.notes) > NOTES_SHOWN:
            out.print(f"  … and {len(section.notes) - NOTES_SHOWN} more notes, all on the page", highlight=False)


def run(paths: Sequence[Path], output: Path | None, json: bool) -> int:
    """Read, print and, where `output` says so, write the page; exit status 0, or 2 when its libraries are missing."""
    if output is not None:
        try:
            check_libraries()
        except ModuleNotFoundError as error:
            err.print(str(error), markup=False)
            return 2
    try:
        documents = [read_document(path) for path in paths]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from error
    sections = build_sections(documents)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render_page(documents, sections), encoding="utf-8")
    if json:
        about = [{**asdict(document), "rows": len(document.rows)} for document in documents]
        print_json({"documents": about, "sections": [asdict(section) for section in sections]})
        return 0
    _print(documents, sections)
    if output is not None:
        out.print(f"written: {output}", highlight=False)
    return 0
