"""The report as one self-contained HTML page: tables, and TFLOP/s by sequence length as curves.

It needs jinja2 and plotly (`pip install 'diyfa[report]'`), which are imported when a page is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import diyfa
from diyfa.cli.table import shown
from diyfa.lab.report.documents import Document, Row
from diyfa.lab.report.sections import Section, build_sections

COLOURS = ("#2a6fbb", "#d1495b", "#3c8d5a", "#8a5aa8", "#c98a1b", "#4a4a4a")  # not told apart by red and green alone
PASSES = ("forward", "backward")


def check_libraries() -> None:
    """Raise ModuleNotFoundError, with the command that installs the missing libraries, if any is missing."""
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"the page needs {' and '.join(missing)}: pip install 'diyfa[report]'")


def attention_curves(documents: Sequence[Document]) -> list[Any]:
    """Return a plotly figure for each pass: panels by (dtype, D, mask), curves by implementation and device."""
    from plotly.subplots import make_subplots

    rows = [
        {**row, "device": document.device}
        for document in documents
        for row in document.rows
        if all(name in row for name in ("tflops", "S", "D", "causal", "pass", "implementation"))
        and "block_m" not in row
    ]
    several = len({row["device"] for row in rows}) > 1
    figures = []
    for direction in PASSES:
        mine = [row for row in rows if row["pass"] == direction]
        panels = sorted({_panel(row) for row in mine})
        if not panels:
            continue
        columns = min(3, len(panels))
        lines = -(-len(panels) // columns)
        titles = [f"{dtype} D = {d}, {'causal' if causal else 'full'}".strip() for dtype, d, causal in panels]
        figure = make_subplots(lines, columns, subplot_titles=titles, shared_xaxes=False)
        for name, points in _curves(mine, several).items():
            for panel, xy in points.items():
                line, column = divmod(panels.index(panel), columns)
                _add_curve(figure, name, list(_curves(mine, several)).index(name), sorted(xy), line + 1, column + 1)
        figure.update_layout(
            title=f"Attention, {direction}: TFLOP/s by sequence length",
            template="plotly_white",
            height=120 + 280 * lines,
            hovermode="x unified",
            legend={"orientation": "h", "y": -0.08},
        )
        lengths = sorted({row["S"] for row in mine})
        figure.update_xaxes(
            type="log", title="S", tickvals=lengths, ticktext=[_length(s) for s in lengths], hoverformat=",d"
        )
        figure.update_yaxes(rangemode="tozero")
        figures.append(figure)
    return figures


def _length(s: int) -> str:
    """Return a length for people to read, such as 16k for 16384."""
    return f"{s // 1024}k" if s >= 1024 and s % 1024 == 0 else str(s)


def _panel(row: Row) -> tuple[str, int, bool]:
    return str(row.get("dtype", "")), row["D"], bool(row["causal"])


def _curves(rows: list[Row], several: bool) -> dict[str, dict[tuple[str, int, bool], list[tuple[int, float]]]]:
    """Return {curve: {panel: [(S, best TFLOP/s)]}}."""
    best: dict[tuple[str, tuple[str, int, bool], int], float] = {}
    for row in rows:
        name = f"{row['implementation']}, {row['device']}" if several else str(row["implementation"])
        key = name, _panel(row), row["S"]
        best[key] = max(row["tflops"], best.get(key, 0.0))
    curves: dict[str, dict[tuple[str, int, bool], list[tuple[int, float]]]] = {}
    for (name, panel, s), value in best.items():
        curves.setdefault(name, {}).setdefault(panel, []).append((s, value))
    return curves


def _add_curve(figure: Any, name: str, index: int, points: list[tuple[int, float]], line: int, column: int) -> None:
    import plotly.graph_objects as go

    first = not any(trace.name == name for trace in figure.data)
    figure.add_trace(
        go.Scatter(
            x=[s for s, _ in points],
            y=[value for _, value in points],
            name=name,
            legendgroup=name,
            showlegend=first,
            mode="lines+markers",
            line={"color": COLOURS[index % len(COLOURS)], "dash": "solid" if index < len(COLOURS) else "dot"},
        ),
        row=line,
        col=column,
    )


def render_page(documents: Sequence[Document], sections: Sequence[Section] | None = None) -> str:
    """Return the page as HTML that includes plotly's script.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    check_libraries()
    from jinja2 import Environment

    template = files("diyfa.lab.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    figures = attention_curves(documents)
    figures_html = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0, div_id=f"figure-{index}")
        for index, figure in enumerate(figures)
    ]
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            documents=documents,
            sections=build_sections(documents) if sections is None else sections,
            figures=figures_html,
            shown=shown,
            version=diyfa.__version__,
        )
    )
