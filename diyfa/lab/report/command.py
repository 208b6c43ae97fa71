"""`diyfa report`: show benchmark files of any number of devices as tables and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diyfa.cli.output import out, print_json
from diyfa.cli.table import fits, shown, table
from diyfa.lab.report.documents import Document, read_document
from diyfa.lab.report.page import check_libraries, render_page
from diyfa.lab.report.sections import Section, build_sections

BAD = ("FAIL", "error")
NOTES_SHOWN = 3


def _table(section: Section, columns: Sequence[int], title: str) -> Table:
    rows, styles = [], []
    for line, row in enumerate(section.rows):
        best = section.best[line] if section.best else None
        cells = [escape(shown(value)) for value in row]
        if best is not None:
            cells[best] = f"[bold green]{cells[best]}[/]"
        rows.append([cells[column] for column in columns])
        styles.append("bold red" if any(value in BAD for value in row) else None)
    return table(escape(title), [section.columns[column] for column in columns], rows, styles)


def _fitting(section: Section) -> Table | Group:
    """Return the whole table. If it is too wide, move values that all rows share to its title, or return lines."""
    title, every = f"{section.title} ({section.unit})", range(len(section.columns))
    full_table = _table(section, every, title)
    if fits(full_table, out):
        return full_table
    shared = [i for i in every if len({row[i] for row in section.rows}) == 1]
    shared_values = [_named(section.columns[i], section.rows[0][i]) for i in shared if section.rows[0][i] is not None]
    short_table = _table(section, [i for i in every if i not in shared], ", ".join([title, *shared_values]))
    return short_table if fits(short_table, out) else _lines(section)


def _named(column: str, value: Any) -> str:
    """Return `value` with the name of its column, or without it if `value` is a word that needs none."""
    speaks_for_itself = isinstance(value, str) and value not in ("yes", "no") and " " not in column
    return shown(value) if speaks_for_itself else f"{column} {shown(value)}"


def _lines(section: Section) -> Group:
    """Return the rows of a table that is too wide, each as names and values."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for row in section.rows:
        pairs = zip(section.columns, row, strict=True)
        grid.add_row(" -", Text(", ".join(_named(column, value) for column, value in pairs if value is not None)))
    return Group(Text(f"{section.title} ({section.unit})", style="italic"), grid)


def _print(documents: Sequence[Document], sections: Sequence[Section]) -> None:
    for document in documents:
        out.print(
            f"{document.device}, {document.benchmark}, {document.date}: {len(document.rows)} rows", highlight=False
        )
    for section in sections:
        out.print(_fitting(section))
        for note in section.notes[:NOTES_SHOWN]:
            out.print(f"  {note}", highlight=False, markup=False)
        if len(section.notes) > NOTES_SHOWN:
            out.print(f"  and {len(section.notes) - NOTES_SHOWN} more notes, all on the page", highlight=False)


def run(paths: Sequence[Path], output: Path | None, json: bool) -> int:
    """Read and print, and write the page to `output` if given. Return the exit status 0.

    Raises OSError or ValueError for a file that is no benchmark file, ModuleNotFoundError without the page's libraries.
    """
    if output is not None:
        check_libraries()
    documents = [read_document(path) for path in paths]
    sections = build_sections(documents)
    if output is not None:
        output.write_text(render_page(documents, sections), encoding="utf-8")
    if json:
        about = [{**asdict(document), "rows": len(document.rows)} for document in documents]
        print_json({"documents": about, "sections": [asdict(section) for section in sections]})
        return 0
    _print(documents, sections)
    if output is not None:
        out.print(f"written: {output}", highlight=False)
    return 0
