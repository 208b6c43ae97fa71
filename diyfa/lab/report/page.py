"""The report as one self-contained HTML page, drawn by ECharts and Tabulator, which it has inside.

The template needs jinja2 (`pip install 'diyfa[report]'`), which is imported when a page is made.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from typing import Any

from diyfa.lab.report.words import WORDS, both

LIBRARIES = ("echarts.min.js", "tabulator.min.js", "tabulator.min.css")


def check_libraries() -> None:
    """Raise ModuleNotFoundError, with the command that installs it, if jinja2 is missing."""
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError("the page needs jinja2: pip install 'diyfa[report]'")


def render_page(report: dict[str, Any]) -> str:
    """Return the page of a report as HTML.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    check_libraries()
    from jinja2 import Environment
    from markupsafe import Markup

    def text(key: str, **values: Any) -> Markup:
        return pair(both(key, **values))

    def pair(texts: tuple[str, str]) -> Markup:
        return Markup("").join(
            Markup('<span lang="{}">{}</span>').format(language, x)
            for language, x in zip(("en", "zh"), texts, strict=True)
        )

    folder = files("diyfa.lab.report")
    sources = {
        name: folder.joinpath("page").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    }
    for name in LIBRARIES:  # their source maps are not inside
        content = folder.joinpath("vendor").joinpath(name).read_text(encoding="utf-8")
        sources[name] = content.partition("\n//# sourceMappingURL")[0].partition("\n/*# sourceMappingURL")[0]
    data = {**report, "tables": [_interned(table) for table in report["tables"]], "words": WORDS}
    template = folder.joinpath("page").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            report=report,
            text=text,
            pair=pair,
            words=WORDS,
            data=_script(data),
            **{_name(x): y for x, y in sources.items()},
        )
    )


def _name(file: str) -> str:
    return file.replace(".", "_")


def _script(data: Any) -> str:
    """Return data as JSON that may stand in a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _interned(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose columns of text have each text once, and its number in the rows."""
    columns, cells = [], list(zip(*table["rows"], strict=True))
    for number, name in enumerate(table["columns"]):
        column: dict[str, Any] = {"name": name}
        if any(isinstance(x, str) for x in cells[number]):
            texts = {x: i for i, x in enumerate(dict.fromkeys(x for x in cells[number] if x is not None))}
            column["texts"] = list(texts)
            cells[number] = tuple(None if x is None else texts[x] for x in cells[number])
        columns.append(column)
    return {"id": table["id"], "columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}
