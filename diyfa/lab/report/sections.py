"""The sections of a report: the rows of all documents, sorted into one table for each kind of row.

Sections are plain data, so that the terminal, the page and `--json` show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diyfa.cli.table import figure
from diyfa.lab.report.documents import Document, Row


@dataclass
class Section:
    """One table. `unit` is that of its numbers; `best` holds for each row the column that is marked, or None."""

    title: str
    unit: str
    columns: list[str]
    rows: list[list[Any]]
    best: list[int | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # reasons of failed or missing results


@dataclass(frozen=True)
class _Pivot:
    """A table with a row for each combination of `index` and a column for each implementation."""

    title: str
    value: str
    unit: str
    index: tuple[str, ...]
    belongs: Callable[[Row], bool]
    higher_is_better: bool = True


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


_PIVOTS = (
    _Pivot(
        "Attention", "tflops", "TFLOP/s", ("pass", "dtype", "D", "causal", "S", "B", "H", "group"),
        lambda row: "tflops" in row and "S" in row and "implementation" in row and "block_m" not in row,
    ),
    _Pivot("Matrix product", "tflops", "TFLOP/s", ("dtype", "M", "N", "K"), _has("tflops", "M", "implementation")),
    _Pivot("Peak memory", "peak_mib", "MiB", ("pass", "S"), _has("peak_mib", "S", "pass"), False),
    _Pivot("Host time of a call", "host_us", "µs", ("pass",), _has("host_us"), False),
    _Pivot("Attention over a KV cache", "ms", "ms", ("table", "case"), _has("ms", "GB/s"), False),
    _Pivot(
        "Tiles of a kernel", "tflops", "TFLOP/s", ("table", "D", "causal", "feature", "case", "tile"),
        _has("tflops", "table", "tile", "case"),
    ),
    _Pivot("Tiles over a KV cache", "ms", "ms", ("case", "tile"), _has("ms", "tile"), False),
    _Pivot("Whole models", "ms", "ms", ("work",), _has("work", "ms"), False),
    _Pivot("Features", "ratio", "times the plain call", ("case", "D", "pass"), _has("ratio"), False),
    _Pivot("Packed sequences and windows", "tflops", "TFLOP/s", ("table", "case", "D", "pass"), _has("tflops", "case")),
)  # fmt: skip


def build_sections(documents: Sequence[Document]) -> list[Section]:
    """Return every section that has rows, in a fixed order. The last one counts rows of unknown kinds by fields."""
    several = len({document.device for document in documents}) > 1
    rows = [{**row, "device": document.device} for document in documents for row in document.rows]
    makers: list[tuple[Callable[[Row], bool], Callable[[list[Row]], Section]]] = [
        (_has("status"), _numerics),
        (lambda row: row.get("table") == "compiled", _compiled),
        (lambda row: row.get("table") == "equivalence", _equivalence),
        *((pivot.belongs, partial(_pivoted, pivot, several)) for pivot in _PIVOTS),
        (_has("block_m", "kernel"), partial(_tiles, several)),
    ]
    unavailable = [row for row in rows if "unavailable" in row and row.get("table") not in ("equivalence", "tiles")]
    remaining = [row for row in rows if "unavailable" not in row or row.get("table") in ("equivalence", "tiles")]
    sections = []
    for belongs, make in makers:
        mine = [row for row in remaining if belongs(row)]
        remaining = [row for row in remaining if not belongs(row)]
        if mine:
            sections.append(make(mine))
    if unavailable:
        sections.append(_not_measured(unavailable))
    if remaining:
        sections.append(_remaining(remaining))
    return sections


def _label(row: Row, several: bool) -> str:
    name = str(row.get("implementation", "diyfa"))
    return f"{name}, {row['device']}" if several else name


def _shown(name: str, value: Any) -> Any:
    """Return the value of field `name` of a row, in words if it is a boolean."""
    if not isinstance(value, bool):
        return value
    words = ("causal", "full") if name == "causal" else ("yes", "no")
    return words[0] if value else words[1]


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _pivoted(pivot: _Pivot, several: bool, rows: list[Row]) -> Section:
    index = [name for name in pivot.index if any(name in row for row in rows)]
    names = _in_order(_label(row, several) for row in rows)
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        values = lines.setdefault(tuple(row.get(name) for name in index), {})
        value, label = row[pivot.value], _label(row, several)
        better = max if pivot.higher_is_better else min
        values[label] = better(value, values[label]) if label in values else value
    table, best = [], []
    for key in sorted(lines, key=lambda key: tuple(_rank(x) for x in key)):
        values = lines[key]
        pick = max if pivot.higher_is_better else min
        winner = pick(values, key=lambda name: values[name]) if len(values) > 1 else None
        table.append([*map(_shown, index, key), *(_rounded(values.get(name)) for name in names)])
        best.append(None if winner is None else len(index) + names.index(winner))
    return Section(pivot.title, pivot.unit, [_heading(name) for name in index] + names, table, best)


def _rank(value: Any) -> tuple[Any, ...]:
    """Return the sort key of a value of one column: None first, the forward pass before the backward."""
    if isinstance(value, str):
        return 2, value != "forward", value
    return (0,) if value is None else (1, value)


def _heading(name: str) -> str:
    return "mask" if name == "causal" else name


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(figure(value))


def _numerics(rows: list[Row]) -> Section:
    table, notes = [], []
    for row in rows:
        error_share = row.get("share")
        table.append([row["case"], row.get("variant", ""), row["status"], row.get("result", ""), _rounded(error_share)])
        if row.get("reason"):
            notes.append(f"{row['case']}: {row['reason']}")
    counts = {status: sum(row["status"] == status for row in rows) for status in _in_order(r["status"] for r in rows)}
    title = "Numerics: " + ", ".join(f"{count} {status}" for status, count in counts.items())
    columns = ["case", "variant", "status", "worst", "share of the allowed error"]
    return Section(title, "error / allowed", columns, table, notes=notes)


def _equivalence(rows: list[Row]) -> Section:
    names = _in_order(row["implementation"] for row in rows)
    lines: dict[str, dict[str, Any]] = {}
    notes = []
    for row in rows:
        lines.setdefault(row["case"], {})
        if "unavailable" in row:
            notes.append(f"{row['implementation']}, {row['case']}: {row['unavailable']}")
            continue
        lines[row["case"]][row["implementation"]] = f"{max(row['max_error'].values()):.1e}"
    table = [[case, *(values.get(name) for name in names)] for case, values in lines.items()]
    title = "npu_fusion_attention: largest error of out, lse and gradients against float64"
    return Section(title, "absolute error", ["call", *names], table, notes=notes)


def _compiled(rows: list[Row]) -> Section:
    """Return the section of kernels that were compiled ahead of time, with predicted speed."""
    index = ("chip", "kernel", "pass", "dtype", "D", "mask", "tile")
    values = ("ub_kib", "l1_kib", "l0c_kib", "bound", "pipelined", "passes", "mask_passes", "predicted_tflops")
    compiled = [row for row in rows if "error" not in row]
    notes = [" ".join(str(row[name]) for name in (*index, "error")) for row in rows if "error" in row]
    table = [
        [
            *(row[name] for name in index),
            *(_shown(name, row[name]) for name in values),
            f"{100 * row['predicted_share_of_cube_peak']:.0f} %",
            row["bottleneck"],
        ]
        for row in compiled
    ]
    columns = [
        *index, "UB KiB", "L1 KiB", "L0C KiB", "bound", "pipe", "passes", "mask adds", "predicted TFLOP/s",
        "of cube peak", "waits for",
    ]  # fmt: skip
    return Section("Compiled for Ascend, not run: predicted", "see columns", columns, table, notes=notes)


def _tiles(several: bool, rows: list[Row]) -> Section:
    """Return the section with the best tile of each problem and the tile of the config table."""
    index = ("device",) * several + ("kernel", "dtype", "D", "causal", "S")
    index = tuple(name for name in index if any(name in row for row in rows))
    groups: dict[tuple[Any, ...], list[Row]] = {}
    notes = []
    for row in rows:
        if "unavailable" in row:
            notes.append(f"{row['kernel']} {row['block_m']}×{row['block_n']}: {row['unavailable']}")
            continue
        groups.setdefault(tuple(row.get(name) for name in index), []).append(row)
    table = []
    for key, some in groups.items():
        best = max(some, key=lambda row: row["tflops"])
        default = next((row for row in some if row.get("default")), None)
        gain = None if default is None else _rounded(best["tflops"] / default["tflops"]) if default["tflops"] else None
        tile = f"{best['block_m']}×{best['block_n']}"
        values = [len(some), tile, _rounded(best["tflops"]), None if default is None else _tile(default), gain]
        table.append([*map(_shown, index, key), *values])
    columns = [*(_heading(name) for name in index), "timed", "best tile", "TFLOP/s", "table's tile", "best / table's"]
    return Section("Tiles", "TFLOP/s", columns, table, notes=notes)


def _tile(row: Row) -> str:
    return f"{row['block_m']}×{row['block_n']}"


def _not_measured(rows: list[Row]) -> Section:
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row["device"], str(row.get("implementation", "")), str(row["unavailable"]))
        reasons[key] = reasons.get(key, 0) + 1
    table: list[list[Any]] = [[*key, count] for key, count in reasons.items()]
    return Section("Not measured", "cases", ["device", "implementation", "reason", "cases"], table)


def _remaining(rows: list[Row]) -> Section:
    kinds: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row["device"], ", ".join(name for name in row if name != "device"))
        kinds[key] = kinds.get(key, 0) + 1
    table: list[list[Any]] = [[*key, count] for key, count in kinds.items()]
    return Section("Rows of another kind", "rows", ["device", "fields", "rows"], table)
