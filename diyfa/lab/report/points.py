"""The figures of a report: the newest of each point and implementation, and diyfa's ratio to each peer.

A point is what was measured without who did it: device, pass, sizes, … (`IDENTITY`). Rows of one file at one point and
implementation are one figure, their median. A ratio divides two figures of one file, never of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from diyfa.lab.results import PURPOSES, Results, Row

DIYFA = "diyfa"
# Names in result files, in lower case without spaces and punctuation -> the name in reports.
ALIASES = {
    "cudnn": "cuDNN", "sdpacudnn": "cuDNN", "cudnnthroughpytorch": "cuDNN", "pytorchsdpacudnn": "cuDNN",
    "fa2": "FA2", "flashattention2": "FA2", "pytorchflashattention2": "FA2", "pytorchflash": "FA2",
    "fa3": "FA3", "flashattention3": "FA3", "flashattn3": "FA3",
    "fa4": "FA4", "flashattention4": "FA4",
    "torchnpu": "npu_fusion_attention", "npufusionattention": "npu_fusion_attention",
    "sdpaflash": "FA2", "pytorchflashcpu": "PyTorch flash", "sdpamath": "PyTorch math",
    "pytorchefficient": "PyTorch efficient", "sdpa": "PyTorch SDPA", "pytorchsdpa": "PyTorch SDPA",
    "pytorch": "PyTorch", "cublas": "cuBLAS",
}  # fmt: skip
PEERS = tuple(dict.fromkeys(ALIASES.values()))
DEFAULT = (DIYFA, "cuDNN", "FA3", "FA4", "npu_fusion_attention")
ORDER = tuple(dict.fromkeys((*DEFAULT, *PEERS)))

# Fields of a row that say what was measured, by kind, without the implementation; the rest are figures.
_ATTENTION = ("dtype", "D", "Dv", "causal", "S", "keys", "B", "H", "group")
IDENTITY: dict[str, tuple[str, ...]] = {
    "attention": ("pass", *_ATTENTION),
    "decode": ("table", "case"),
    "memory": ("pass", "S"),
    "host": ("pass",),
    "model": ("work",),
    "matmul": ("dtype", "M", "N", "K"),
    "feature": ("case", "pass", "dtype", "D"),
    "packed": ("case", "pass", "dtype", "D"),
    "ceiling": ("case", "dtype", "M", "N", "K"),
    "compiled": ("pass", "dtype", "D", "mask", "tile"),
    "tile": ("pass", "kernel", "feature", "tile", "block_m", "block_n", "num_warps", "num_stages", *_ATTENTION),
    "numerics": ("case", "variant"),
    "equivalence": ("case",),
}
# The figure by which implementations are compared, and whether more is better.
COMPARED = {
    "attention": ("tflops", True), "decode": ("ms", False), "memory": ("peak_mib", False), "model": ("ms", False),
    "host": ("host_us", False), "matmul": ("tflops", True), "packed": ("tflops", True),
}  # fmt: skip


def ordered(names: Iterable[str]) -> list[str]:
    """Return names in the order of legends: diyfa and the usual peers, other peers, other kernels."""
    return sorted(set(names), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def report_name(name: str, device_type: str) -> str:
    """Return the name of an implementation in reports."""
    plain = "".join(c for c in name.partition(" (fa3")[0].lower() if c.isalnum())
    if device_type != "cuda" and plain == "sdpaflash":
        return "PyTorch flash"
    return ALIASES.get(plain, name)


@dataclass
class Point:
    """All figures at one point. `figures` has of each implementation one row for each file, the oldest first."""

    kind: str
    device: str
    source: str
    identity: dict[str, Any]
    figures: dict[str, list[Row]] = field(default_factory=dict)

    def newest(self) -> Iterator[tuple[str, Row]]:
        """Yield each implementation with its newest figure."""
        for name in ordered(self.figures):
            yield name, self.figures[name][-1]

    def ratios(self) -> dict[str, float]:
        """Return diyfa's speed relative to each peer, above 1 where diyfa is better, from the newest common file."""
        if self.kind not in COMPARED:
            return {}
        name, more_is_better = COMPARED[self.kind]
        mine = {row["file"]: row[name] for row in self.figures.get(DIYFA, []) if name in row}
        found = {}
        for peer in (x for x in self.figures if x in PEERS):
            both = [row for row in self.figures[peer] if row["file"] in mine and row.get(name) and mine[row["file"]]]
            if both:
                ratio = mine[both[-1]["file"]] / both[-1][name]
                found[peer] = ratio if more_is_better else 1 / ratio
        return found

    def best_peer(self) -> tuple[str, float] | None:
        """Return the peer that is the hardest to beat, and diyfa's ratio to it, or None without a peer."""
        ratios = self.ratios()
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None


def is_wanted(row: Row, results: Results, purposes: Iterable[str]) -> bool:
    """Return whether the purpose of a row is one of `purposes`."""
    return row.get("purpose", results.purpose) in purposes


def collect_points(files: Sequence[Results]) -> list[Point]:
    """Return the points of all rows that compare, in the order of the files."""
    points: dict[tuple[Any, ...], Point] = {}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    order = sorted(range(len(files)), key=lambda index: (files[index].date, files[index].path))
    for index in order:
        results = files[index]
        for row in results.rows:
            if not is_wanted(row, results, PURPOSES[:1]) or "unavailable" in row or row["kind"] not in IDENTITY:
                continue
            kind, source = row["kind"], row.get("source", "measured")
            device = row.get("device", results.device)
            identity = {name: row[name] for name in IDENTITY[kind] if name in row}
            identity = _normal(kind, identity)
            key = (kind, device, source, *sorted(identity.items()))
            name = report_name(str(row.get("implementation", DIYFA)), results.device_type)
            points.setdefault(key, Point(kind, device, source, identity))
            groups.setdefault((key, name, index), []).append(row)
    for (key, name, index), rows in groups.items():
        points[key].figures.setdefault(name, []).append(_merged(rows, files[index], index))
    for point in points.values():
        for figures in point.figures.values():  # rows of a file that was continued may be newer than its date
            figures.sort(key=lambda row: row["date"])
    return list(points.values())


def _normal(kind: str, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity with the defaults of fields that files may leave out."""
    if kind == "attention":
        return {**identity, "Dv": identity.get("Dv", identity["D"]), "keys": identity.get("keys", identity["S"]),
                "group": identity.get("group", 1)}  # fmt: skip
    return identity


def _merged(rows: list[Row], results: Results, index: int) -> Row:
    """Return one row: medians of the numbers, the spread over the rows where they do not say their own."""
    first = rows[0]
    merged = {name: x for name, x in first.items() if name not in IDENTITY[first["kind"]]}
    compared = COMPARED.get(first["kind"], ("", True))[0]
    for name in first:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        if name in merged and len(values) == len(rows) and not isinstance(first[name], bool) and name != "run":
            merged[name] = median(values)
    values = [row[compared] for row in rows if compared in row]
    if len(values) > 1 and "spread" not in first and median(values):
        merged["spread"] = (max(values) - min(values)) / median(values)
    return {**merged, "file": index, "date": str(first.get("date", results.date))[:10]}
