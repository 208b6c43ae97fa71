"""The report as text: a summary for the terminal, and Markdown for an issue tracker."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from diyfa.cli.table import figure

LINES = 40
LENGTH = 4096  # the length that the summary shows, or the nearest
# Why a ratio may differ from the quotient of the two speeds beside it.
RATIOS = "Speeds are the newest. Each ratio is of two figures of one file."


def _masked(entry: dict[str, Any]) -> str:
    width = f"{entry['D']}/{entry['Dv']}" if entry["D"] != entry["Dv"] else str(entry["D"])
    return f"D = {width} {'causal' if entry['causal'] else 'full'}"


def _at(panel: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Return a length of the panel, the nearest to `LENGTH` at which diyfa was measured, and the figures there."""
    lengths = [s for s, _, _ in panel["series"]["diyfa"]]
    length = min(lengths, key=lambda s: (abs(s - LENGTH), s))
    by_name = {name: x for name, entries in panel["series"].items() for s, x, _ in entries if s == length}
    return length, by_name


def _compared(report: dict[str, Any], panel: dict[str, Any], length: int) -> tuple[str, str]:
    """Return the best peer at a point and diyfa's ratio to it."""
    names = ("device", "pass", "dtype", "D", "Dv", "causal")
    for cell in report["heat"]:
        if cell["panel"] and cell["S"] == length and all(cell[name] == panel[name] for name in names):
            return cell["peer"], f"{cell['ratio']:.2f}"
    return "", "-"


def figures_at_one_length(report: dict[str, Any], implementations: list[str]) -> list[list[str]]:
    """Return rows of device, pass, point, S, TFLOP/s of each implementation and diyfa's ratio to the best peer."""
    rows = []
    for panel in report["panels"]:
        length, found = _at(panel)
        cells = [figure(found[name]) if name in found else "-" for name in implementations]
        rows.append(
            [panel["device"], panel["pass"], _masked(panel), str(length), *cells, _compared(report, panel, length)[1]]
        )
    return rows


def summary(report: dict[str, Any], width: int) -> list[str]:
    """Return at most `LINES` lines of at most `width` characters: devices, where diyfa stands, and figures."""
    lines = [f"{len(report['files'])} file{'s' if len(report['files']) > 1 else ''}, {report['rows']} rows"]
    if report["left_out"]:
        lines[0] += f"; {report['left_out']} of ablations, trials and earlier code left out"
    for group in report["standing"]:
        lines += _wrapped(", ".join(group["devices"]), width, "")
        for english, _ in group["sentences"]:
            lines += _wrapped(english, width, "  ")
    table: dict[tuple[Any, ...], list[str]] = {}
    for panel in report["panels"]:
        length, found = _at(panel)
        peer, ratio = _compared(report, panel, length)
        row = table.setdefault((panel["device"], panel["D"], panel["Dv"], panel["causal"], length), [""] * 6)
        place = 0 if panel["pass"] == "forward" else 3
        beaten = f"{peer[:9]} {figure(found[peer])}" if peer in found else ""
        row[place : place + 3] = [figure(found["diyfa"]), beaten, ratio]
    lengths = sorted({length for *_, length in table})
    rows = []
    for (device, d, dv, causal, length), row in table.items():
        point = _masked({"D": d, "Dv": dv, "causal": causal}).replace(" = ", "=")
        rows.append([device.replace("NVIDIA ", "")[:9], f"{point} {length}" if len(lengths) > 1 else point, *row])
    if rows:
        lines.append(f"TFLOP/s at {' or '.join(map(str, lengths))} tokens, beside the best peer of each point:")
        heads = ["", "", "forward", "best peer", "ratio", "backward", "best peer", "ratio"]
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        for row in [heads, *rows]:
            cells = [x.ljust(n) if i < 2 else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True))]
            lines.append(" ".join(cells).rstrip()[:width])
        lines += _wrapped(RATIOS, width, "")
    if len(lines) > LINES:
        rest = len(lines) - LINES + 1
        lines = [*lines[: LINES - 1], f"and {rest} more lines: --output writes the page, --markdown all of them"]
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ")


def markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown: sentences, and one table of figures for each kind of plot."""
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: dict[str, Any]) -> Iterator[str]:
    yield f"## diyfa report, {report['date']}\n"
    for group in report["standing"]:
        mark = " **(predicted, not run)**" if group["source"] == "predicted" else ""
        sentences = " ".join(_escaped(english) for english, _ in group["sentences"])
        yield f"- **{_escaped(', '.join(group['devices']))}**{mark}: {sentences}"
    implementations = report["default"]
    rows = figures_at_one_length(report, implementations)
    if rows:
        heads = ["device", "pass", "point", "S", *implementations, "ratio to the best peer"]
        yield from _rows(f"Attention, TFLOP/s near S = {LENGTH}", heads, rows)
        yield f"\n{RATIOS}"
    for decoding in report["decoding"]:
        cells = [[case, name, f"{share:.0%}", str(gbs)] for table, case, name, share, gbs, _ in decoding["bars"]
                 if table == "decode"]  # fmt: skip
        if cells:
            heads = ["case", "implementation", "share of the read bandwidth", "GB/s"]
            yield from _rows(f"Decoding, {decoding['device']}", heads, cells)
    predicted = [x for x in report["beside"] if x["source"] == "predicted"]
    cells = [[x["device"], f"D = {d} {'causal' if causal else 'full'}", f"{bar['share']:.0%}", "predicted"]
             for x in predicted for d, causal, bar in x["bars"]]  # fmt: skip
    if cells:
        yield from _rows(
            "Predictions of a cost model: nothing ran", ["chip", "forward", "of the peak", "source"], cells
        )


def _rows(title: str, heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"\n### {_escaped(title)}\n"
    yield f"| {' | '.join(map(_escaped, heads))} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(map(_escaped, row))} |"


def _escaped(text: str) -> str:
    """Return a text whose signs Markdown does not take for markup."""
    return re.sub(r"[\\`*\[\]<>|~]", r"\\\g<0>", text)
