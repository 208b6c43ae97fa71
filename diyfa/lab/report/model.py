"""The content of a report as plain data: devices, sentences, series of the plots and tables.

The page, the terminal, Markdown and `--json` show the same content. Texts are (English, Chinese) pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from math import isfinite, isnan, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import diyfa
from diyfa.cli.table import figure
from diyfa.lab.report.points import (
    DEFAULT,
    DIYFA,
    IDENTITY,
    ORDER,
    Point,
    collect_points,
    is_wanted,
    ordered,
    report_name,
)
from diyfa.lab.report.words import both
from diyfa.lab.results import PURPOSES, Results, Row

SPREAD_LIMIT = 0.1  # relative; figures beyond it are marked
DIRECTIONS = ("forward", "backward")
BESIDE_LENGTH = 8192  # that of the predictions
Text = tuple[str, str]


class Peak(NamedTuple):
    """Dense 16-bit TFLOP/s and GB/s of a GPU, from NVIDIA's data sheets."""

    tflops: float
    gbs: float


PEAKS = {  # the first whose words are in the device's name
    "H200 NVL": Peak(835, 4800), "H200": Peak(989.4, 4800), "H100 PCIe": Peak(756, 2000),
    "H100 NVL": Peak(835, 3900), "H100": Peak(989.4, 3350), "A100-SXM4-80GB": Peak(312, 2039),
    "A100 80GB PCIe": Peak(312, 1935), "A100": Peak(312, 1555), "B200": Peak(2250, 8000),
}  # fmt: skip


def data_sheet_peak(device: str) -> Peak | None:
    """Return the data sheet's peaks of a device, or None."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)  # no GH200


def build_report(files: Sequence[Results], everything: bool = False) -> dict[str, Any]:
    """Return the content of the report; with `everything` also a table of ablations, trials and tile searches."""
    points = collect_points(files)
    rows = sum(len(results.rows) for results in files)
    wanted = sum(is_wanted(row, results, PURPOSES[:1]) for results in files for row in results.rows)
    devices = [_device(name, source, points, files) for name, source in _device_names(points, files)]
    panels = _panels(points)
    default = _default_implementations(panels)
    shown = sum(len(point.figures) for point in points)
    figures = sum(len(rows) for point in points for rows in point.figures.values())
    return {
        "version": diyfa.__version__,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "limit": SPREAD_LIMIT,
        "rows": rows,
        "left_out": 0 if everything else rows - wanted,
        "older": figures - shown,
        "devices": devices,
        "files": [_file(results) for results in files],
        "standing": _standings(devices),
        "implementations": ordered(name for panel in panels for name in panel["series"]),
        "default": default,
        "order": list(ORDER),
        "panels": panels,
        "heat": _heat(points),
        "roofline": _roofline(points, default),
        "memory": _memory(points),
        "decoding": _decoding(points),
        "beside": _beside(points),
        "tables": _tables(points, files, everything),
    }


def _file(results: Results) -> dict[str, Any]:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    clocks = ", ".join(f"{name} {value}" for name, value in results.clocks.items())
    return {"name": Path(results.path).name, "device": results.device, "date": results.date[:10],
            "benchmark": results.benchmark, "purpose": results.purpose, "versions": versions, "clocks": clocks,
            "rows": len(results.rows)}  # fmt: skip


# --- devices ---------------------------------------------------------------------------------------------------------


def _device_names(points: Sequence[Point], files: Sequence[Results]) -> list[tuple[str, str]]:
    """Return (device, source) pairs: measured devices first, those with most points first."""
    counts = Counter((point.device, "measured") for point in points if point.source == "measured")
    measured = {device for device, _ in counts}
    counts.update((p.device, "predicted") for p in points if p.source == "predicted" and p.device not in measured)
    named = {device for device, _ in counts}
    for results in files:  # files of other purposes only
        if not any("device" in row for row in results.rows) and results.device not in named:
            counts[results.device, "measured"] += 0
    return sorted(counts, key=lambda pair: (pair[1] != "measured", -counts[pair], pair[0]))


def _device(name: str, source: str, points: Sequence[Point], files: Sequence[Results]) -> dict[str, Any]:
    mine = [point for point in points if (point.device, point.source) == (name, source)]
    used = [row for point in mine for rows in point.figures.values() for row in rows]
    chosen = [files[index] for index in sorted({row["file"] for row in used})]
    chosen = chosen or [results for results in files if results.device == name]
    dates = sorted({row["date"] for row in used} or {results.date[:10] for results in chosen})
    versions: dict[str, list[str]] = {}
    for results in chosen:
        for package, version in results.versions.items():
            if version not in versions.setdefault(package, []):
                versions[package].append(version)
    clocks: dict[str, Any] = next((results.clocks for results in reversed(chosen) if results.clocks), {})
    peak = data_sheet_peak(name)
    return {
        "name": name, "source": source, "type": chosen[-1].device_type, "dates": [dates[0], dates[-1]],
        "versions": {package: ", ".join(each) for package, each in versions.items()}, "clocks": clocks,
        "kinds": dict(Counter(point.kind for point in mine)), "peak": None if peak is None else peak._asdict(),
        "ceilings": _ceilings(mine), "sentences": _sentences(mine, source),
    }  # fmt: skip


def _ceilings(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Return the best measured ceiling of each unit: matrix products and plain reads."""
    best: dict[str, dict[str, Any]] = {}
    for point in points:
        if point.source != "measured" or point.kind not in ("ceiling", "matmul"):
            continue
        for name, row in point.newest():
            for unit in ("tflops", "GB/s"):
                if row.get(unit, 0) > best.get(unit, {}).get("value", 0) and name != DIYFA:
                    best[unit] = {"unit": unit, "name": name, "value": _short(row[unit])}
    return list(best.values())


def _sentences(points: Sequence[Point], source: str) -> list[Text]:
    """Return one sentence for each direction, and for decoding, on how diyfa stands on a device."""
    if source == "predicted":
        shares = [
            row["predicted_share_of_cube_peak"] for point in points if point.identity.get("pass") == "forward"
            for _, row in point.newest() if "predicted_share_of_cube_peak" in row
        ]  # fmt: skip
        return [both("stands_predicted", low=f"{min(shares):.0%}", high=f"{max(shares):.0%}")] if shares else []
    sentences = []
    for direction in DIRECTIONS:
        mine = [p for p in points if p.kind == "attention" and p.identity["pass"] == direction and DIYFA in p.figures]
        if not mine:
            continue
        named = both("forward" if direction == "forward" else "backward")
        word = (named[0].capitalize(), named[1])
        if stands := _standing(mine):
            sentences.append(both("stands", direction=word, **stands))
        else:
            best = max(row["tflops"] for p in mine for name, row in p.newest() if name == DIYFA)
            sentences.append(both("stands_alone", direction=word, best=figure(best)))
    decode = [p for p in points if p.kind == "decode" and DIYFA in p.figures]
    stands, ceiling = _standing(decode), _read_ceiling(points)
    if stands and ceiling:
        best = max(row["GB/s"] for p in decode for name, row in p.newest() if name == DIYFA)
        stands = {name: stands[name] for name in ("peers", "median", "low", "high")}
        sentences.append(both("stands_decode", share=f"{best / ceiling[0]:.0%}", **stands))
    return sentences or [both("stands_other")]


def _standings(devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sentences of the first screen, devices with equal ones together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for device in devices:
        key = (device["source"], *device["sentences"], *device["dates"], *device["versions"].items())
        groups.setdefault(key, []).append(device)
    return [
        {"devices": [x["name"] for x in mine], "source": mine[0]["source"], "sentences": mine[0]["sentences"]}
        for mine in groups.values()
    ]


def _standing(points: Iterable[Point]) -> dict[str, Any]:
    """Return the places of the sentence `stands`, or nothing without a peer."""
    best = [peer for point in points if (peer := point.best_peer())]
    if not best:
        return {}
    peers = ordered({peer for point in points for peer in point.ratios()})
    ratios = [ratio for _, ratio in best]
    return {
        "peers": (", ".join(peers), "、".join(peers)), "wins": sum(round(ratio, 2) >= 1 for ratio in ratios),
        "points": len(ratios), "median": f"{median(ratios):.2f}", "low": f"{min(ratios):.2f}",
        "high": f"{max(ratios):.2f}",
    }  # fmt: skip


def _read_ceiling(points: Iterable[Point]) -> tuple[float, bool] | None:
    """Return the GB/s of plain reads and whether they were measured, or None if nothing is known."""
    points = list(points)
    for ceiling in _ceilings(points):
        if ceiling["unit"] == "GB/s":
            return ceiling["value"], True
    peak = data_sheet_peak(points[0].device) if points else None
    return (peak.gbs, False) if peak else None


# --- plots -----------------------------------------------------------------------------------------------------------


def _attention(points: Iterable[Point]) -> list[Point]:
    return [p for p in points if p.kind == "attention" and p.identity["pass"] in DIRECTIONS and DIYFA in p.figures]


def _families(identity: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the families of sizes whose points may share a curve: equal tokens, or an equal batch."""
    batch, heads, group = identity.get("B", 0), identity.get("H", 0), identity["group"]
    return (("tokens", batch * identity["S"], heads, group), ("batch", batch, heads, group))


def _curves(points: Sequence[Point]) -> list[tuple[dict[str, Any], tuple[Any, ...], list[Point]]]:
    """Return (panel, family, its points): of each panel the family with most lengths, if it has two or more."""
    grouped: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Point]]] = {}
    for point in _attention(points):
        i = point.identity
        if i["S"] != i["keys"]:
            continue
        panel = (point.device, point.source, i["pass"], i.get("dtype", ""), i["D"], i["Dv"], i["causal"])
        for family in _families(i):
            grouped.setdefault(panel, {}).setdefault(family, []).append(point)
    curves = []
    order = list(dict.fromkeys(point.device for point in points))
    for panel, families in sorted(
        grouped.items(), key=lambda item: (order.index(item[0][0]), *item[0][3:], item[0][2])
    ):
        family, mine = max(families.items(), key=lambda item: (len({p.identity["S"] for p in item[1]}), len(item[1])))
        if len({p.identity["S"] for p in mine}) > 1:
            names = ("device", "source", "pass", "dtype", "D", "Dv", "causal")
            curves.append((dict(zip(names, panel, strict=True)), family, sorted(mine, key=lambda p: p.identity["S"])))
    return curves


def _mark(row: Row) -> dict[str, Any]:
    """Return what a tooltip says of a figure."""
    return {name: row[name] for name in ("date", "spread", "ms", "commit", "clock_mhz") if row.get(name) is not None}


def _panels(points: Sequence[Point]) -> list[dict[str, Any]]:
    panels = []
    for panel, family, mine in _curves(points):
        series: dict[str, list[Any]] = {}
        for point in mine:
            for name, row in point.newest():
                if "tflops" in row:
                    series.setdefault(name, []).append([point.identity["S"], _short(row["tflops"]), _mark(row)])
        kind, size, heads, group = family
        shape = f"{'B·S' if kind == 'tokens' else 'B'} = {size}, H = {heads}" if size else ""
        shape += f", H/Hk = {group}" if group > 1 else ""
        panels.append({**panel, "shape": shape, "series": {name: series[name] for name in ordered(series)}})
    return panels


def _default_implementations(panels: Sequence[dict[str, Any]]) -> list[str]:
    """Return what plots show at first: diyfa and its usual peers, or other peers on a device without those."""
    names: set[str] = set()
    for device in {panel["device"] for panel in panels}:
        here = ordered(name for panel in panels if panel["device"] == device for name in panel["series"])
        usual = [name for name in here if name in DEFAULT]
        names.update(usual if len(usual) > 1 else [name for name in here if name in ORDER][:4])
    return ordered(names)


def _heat(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the cells of the heat maps: those of the panels by length, and the other shapes by pass."""
    in_panels = {id(point) for _, _, mine in _curves(points) for point in mine}
    cells = []
    for point in _attention(points):
        best = point.best_peer()
        if best is None:
            continue
        i = point.identity
        ratios = {name: round(ratio, 3) for name, ratio in point.ratios().items()}
        cells.append({
            "device": point.device, "pass": i["pass"], "dtype": i.get("dtype", ""), "D": i["D"], "Dv": i["Dv"],
            "causal": i["causal"], "S": i["S"], "keys": i["keys"], "B": i.get("B"), "H": i.get("H"),
            "group": i["group"], "ratio": round(best[1], 3), "peer": best[0], "ratios": ratios,
            "panel": id(point) in in_panels,
        })  # fmt: skip
    return cells


def attention_bytes(identity: dict[str, Any]) -> float:
    """Return the bytes that a pass must move: each input and output once, statistics left out."""
    size = 4 if identity.get("dtype") == "float32" else 2
    batch, heads, width = identity["B"], identity["H"], identity["D"] + identity["Dv"]
    elements = batch * (heads * identity["S"] + heads // identity["group"] * identity["keys"]) * width
    return size * elements * (2 if identity["pass"] == "backward" else 1)


def _roofline(points: Sequence[Point], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one roof for each measured device that has points and a ceiling or a data sheet."""
    roofs = []
    for device in dict.fromkeys(p.device for p in points if p.source == "measured"):
        mine = [p for p in points if p.device == device and p.source == "measured"]
        dots = []
        for point in mine:
            i = point.identity
            for name, row in point.newest():
                label = ""
                if name not in names:
                    continue
                if point.kind == "attention" and row.get("tflops") and i.get("B") and i.get("H") and row.get("ms"):
                    if i["pass"] not in DIRECTIONS:
                        continue
                    rate, intensity = row["tflops"], row["tflops"] * row["ms"] * 1e9 / attention_bytes(i)
                    label = f"{i['pass']}, D = {i['D']}, {'causal' if i['causal'] else 'full'}, S = {i['S']}"
                elif point.kind == "decode" and row.get("TFLOP/s") and row["GB/s"]:
                    rate, intensity = row["TFLOP/s"], 1e3 * row["TFLOP/s"] / row["GB/s"]
                    label = f"{i['table']}, {i['case']}"
                if label:
                    dots.append([_short(intensity), _short(rate), name, label, _mark(row)])
        peak = data_sheet_peak(device)
        if dots and (peak or _ceilings(mine)):
            roofs.append({"device": device, "dots": dots, "ceilings": _ceilings(mine),
                          "peak": None if peak is None else peak._asdict()})  # fmt: skip
    return roofs


def _memory(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the panels of peak memory: from rows of memory, or of devices without them from timings that have it."""
    panels: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    names = ("device", "pass", "D", "Dv", "causal")

    def add(key: tuple[Any, ...], point: Point) -> None:
        for name, row in point.newest():
            if row.get("peak_mib"):
                entry = [point.identity["S"], _short(row["peak_mib"]), _mark(row)]
                panels.setdefault(key, {}).setdefault(name, []).append(entry)

    rows = [point for point in points if point.kind == "memory" and point.source == "measured"]
    for point in sorted(rows, key=lambda point: point.identity["S"]):
        add((point.device, point.identity["pass"]), point)
    for panel, _, mine in _curves(points):
        if panel["source"] == "measured" and not any(point.device == panel["device"] for point in rows):
            for point in mine:
                add(tuple(panel[name] for name in names), point)
    return [
        {**dict(zip(names, key, strict=False)), "series": {name: series[name] for name in ordered(series)}}
        for key, series in panels.items()
    ]


def _decoding(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return decoding of each device: (group, case, implementation, share of the read bandwidth, GB/s)."""
    groups = []
    for device in dict.fromkeys(p.device for p in points if p.kind == "decode" and p.source == "measured"):
        mine = [p for p in points if p.device == device and p.source == "measured"]
        ceiling = _read_ceiling(mine)
        if ceiling is None:
            continue
        value, measured = ceiling
        bars = [
            [p.identity["table"], p.identity["case"], name, _short(row["GB/s"] / value), _short(row["GB/s"]),
             _mark(row)]
            for p in mine if p.kind == "decode" for name, row in p.newest() if "GB/s" in row
        ]  # fmt: skip
        about = both(
            "decoding_about", ceiling=both("read_measured" if measured else "read_nominal", value=round(value))
        )
        groups.append({"device": device, "about": about, "bars": bars})
    return groups


def _beside(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the share of its chip's peak of diyfa's forward, by chip and (D, mask); measured and predicted."""
    bars_by_device: dict[tuple[str, str], dict[tuple[int, bool], dict[str, Any]]] = {}
    curves = [point for _, _, mine in _curves(points) for point in mine]
    for point in [p for p in points if p.kind == "compiled"] + (curves or _attention(points)):
        i = point.identity
        if i.get("pass") != "forward" or DIYFA not in point.figures:
            continue
        row, bars = point.figures[DIYFA][-1], bars_by_device.setdefault((point.device, point.source), {})
        peak = data_sheet_peak(point.device)
        if point.kind == "compiled":
            share = row.get("predicted_share_of_cube_peak")
            if share is not None:
                bars[i["D"], i["mask"] == "causal"] = {
                    "share": share,
                    "S": BESIDE_LENGTH,
                    "tflops": row["predicted_tflops"],
                }
        elif point.kind == "attention" and peak and i.get("dtype") in ("float16", "bfloat16") and i["D"] == i["Dv"]:
            key, distance = (i["D"], i["causal"]), abs(log(i["S"] / BESIDE_LENGTH))
            entry = {"share": round(row["tflops"] / peak.tflops, 4), "S": i["S"], "tflops": round(row["tflops"], 1)}
            old = bars.get(key)
            if old is None or (distance, -entry["share"]) < (abs(log(old["S"] / BESIDE_LENGTH)), -old["share"]):
                bars[key] = entry
    shared = (
        set.intersection(*(set(bars) for bars in bars_by_device.values() if bars))
        if any(bars_by_device.values())
        else set()
    )
    shared = shared or {key for bars in bars_by_device.values() for key in bars}
    return [
        {"device": device, "source": source, "bars": [[*key, bars[key]] for key in sorted(shared) if key in bars]}
        for (device, source), bars in sorted(bars_by_device.items(), key=lambda item: item[0][1] != "measured") if bars
    ]  # fmt: skip


# --- tables ----------------------------------------------------------------------------------------------------------

# Columns of each table: fields of the identity, then figures.
_FIGURES: dict[str, tuple[str, ...]] = {
    "attention": ("tflops", "share", "ratio", "ms"), "decode": ("GB/s", "TFLOP/s", "ms", "ratio"),
    "memory": ("peak_mib", "ratio"), "host": ("host_us", "ratio"), "model": ("ms", "ratio"),
    "matmul": ("tflops", "ms", "ratio"), "feature": ("relative", "ms"), "packed": ("tflops", "ms"),
    "ceiling": ("tflops", "GB/s"), "tile": ("tflops", "ms"), "numerics": ("status", "result", "share"),
    "equivalence": ("error",),
    "compiled": ("predicted_tflops", "share", "bottleneck", "ub_kib", "l1_kib", "l0c_kib"),
}  # fmt: skip
_SHARED = ("spread", "clock_mhz", "commit", "date", "file")


def _tables(points: Sequence[Point], files: Sequence[Results], everything: bool) -> list[dict[str, Any]]:
    tables = []
    for kind in IDENTITY:
        mine = [point for point in points if point.kind == kind]
        if mine:
            tables.append(_table(kind, mine))
    for table in (_unavailable(files), _others(files) if everything else None):
        if table is not None and table["rows"]:
            tables.append(table)
    return tables


def _table(kind: str, points: Sequence[Point]) -> dict[str, Any]:
    identity = tuple("mask" if name == "causal" else name for name in IDENTITY[kind])
    columns = ("device", "source", *identity, "implementation", *_FIGURES[kind], *_SHARED)
    rows = [
        [_cell(name, implementation, row, point) for name in columns]
        for point in points for implementation, row in point.newest()
    ]  # fmt: skip
    used = [i for i, name in enumerate(columns) if any(row[i] is not None for row in rows) or name == "spread"]
    return {"id": kind, "columns": [columns[i] for i in used], "rows": [[row[i] for i in used] for row in rows]}


def _cell(name: str, implementation: str, row: Row, point: Point) -> Any:
    if name in ("device", "source"):
        return getattr(point, name)
    if name == "implementation":
        return implementation
    if name == "mask" and "causal" in point.identity:
        return "causal" if point.identity["causal"] else "full"
    if name == "ratio":
        best = point.best_peer() if implementation == DIYFA else None
        return None if best is None else round(best[1], 3)
    if name == "relative":
        return _short(row.get("ratio"))
    if name == "error":
        errors = [x for x in row.get("max_error", {}).values() if isinstance(x, (int, float))]
        return _short(max(errors, key=lambda x: (isnan(x), x), default=None))
    if name == "share":
        peak = data_sheet_peak(point.device)
        if point.kind == "attention" and peak and point.identity.get("dtype") in ("float16", "bfloat16"):
            return round(row["tflops"] / peak.tflops, 3)
        return _short(row.get("predicted_share_of_cube_peak", row.get("share")))
    return _short(point.identity.get(name, row.get(name)))


def _short(value: Any) -> Any:
    """Return a number with four significant digits, and what JSON or a table's cell cannot hold as text."""
    if isinstance(value, float) and isfinite(value):
        return float(f"{value:.4g}")
    return value if value is None or isinstance(value, (int, str)) else str(value)


def _unavailable(files: Sequence[Results]) -> dict[str, Any]:
    counts: Counter[tuple[str, ...]] = Counter()
    for results in files:
        for row in results.rows:
            if "unavailable" in row and is_wanted(row, results, PURPOSES[:1]):
                name = report_name(str(row.get("implementation", "")), results.device_type)
                counts[row.get("device", results.device), row["kind"], name, row["unavailable"]] += 1
    columns = ["device", "kind", "implementation", "reason", "cases"]
    return {"id": "unavailable", "columns": columns, "rows": [[*key, count] for key, count in counts.items()]}


def _others(files: Sequence[Results]) -> dict[str, Any]:
    """Return the rows of other purposes, each with its sizes in one text."""
    rows = []
    for index, results in enumerate(files):
        for row in results.rows:
            if is_wanted(row, results, PURPOSES[:1]) or "unavailable" in row or row["kind"] not in IDENTITY:
                continue
            purpose = row.get("purpose", results.purpose)
            named = {
                name: row[name] for name in (*IDENTITY[row["kind"]], "run", "code", "form", "feature") if name in row
            }
            case = ", ".join(
                f"{name} {value}" for name, value in named.items() if name not in ("pass", "case", "table")
            )
            case = ", ".join(x for x in (str(row.get("table", "")), str(row.get("case", "")), case) if x)
            figures = ("tflops", "GB/s", "ms", "host_us", "peak_mib", "predicted_tflops")
            unit = next((name for name in figures if name in row), None)
            rows.append([
                purpose, row.get("device", results.device), row["kind"], row.get("pass"), case,
                row.get("implementation"), _short(row.get(unit)) if unit else None, unit, _short(row.get("spread")),
                str(row.get("date", results.date))[:10], index,
            ])  # fmt: skip
    columns = ["purpose", "device", "kind", "pass", "case", "implementation", "value", "unit", "spread", "date", "file"]
    return {"id": "other", "columns": columns, "rows": rows}
