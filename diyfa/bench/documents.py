"""Benchmark files, read: what `diyfa bench`, the scripts in benchmarks/ and the first run on Ascend write.

A file is one object with `device`, `date`, `versions` and `rows`, or, as the oldest are, a list of rows that carry
those themselves. Rows are brought to one set of names here: `implementation`, `ms`, and the sizes `B, H, S, D` or
`M, N, K`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LIBRARIES = ("cuBLAS",)
_OF_THE_FILE = ("device", "device_type", "date", "versions", "benchmark")
_RENAMED = {"name": "implementation", "time_ms": "ms", "memory_mb": "peak_mib", "m": "M", "n": "N", "k": "K"}


@dataclass(frozen=True)
class Document:
    """One file: where, when and with what its rows were measured. `facts` are all other entries of the file."""

    path: str
    benchmark: str
    device: str
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(repr=False)
    facts: dict[str, Any] = field(default_factory=dict)


def read_document(path: Path) -> Document:
    """The document in the JSON file at `path`.

    Raises:
        ValueError: it is no benchmark file, with what is missing. OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if isinstance(content, list):
        content = _from_rows(path, content)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or "device" not in content:
        raise ValueError(f"{path} is no benchmark file: it needs an object with device and rows")
    rows = content["rows"]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no benchmark file: every row must be an object")
    return Document(
        str(path),
        str(content.get("benchmark", path.stem)),
        str(content["device"]),
        str(content.get("date", "")),
        dict(content.get("versions", {})),
        [_normalised(row) for row in rows],
        {name: x for name, x in content.items() if name not in (*_OF_THE_FILE, "rows")},
    )


def _from_rows(path: Path, rows: Sequence[Any]) -> Row:
    """A list of rows that say themselves where they were measured, as one object."""
    first = rows[0] if rows else None
    if not isinstance(first, dict) or "device" not in first:
        raise ValueError(f"{path} is no benchmark file: a list of rows must name the device in each")
    devices = {row.get("device") for row in rows}
    if len(devices) > 1:
        raise ValueError(f"{path} mixes devices, {', '.join(sorted(map(str, devices)))}: one file for each is needed")
    versions = {name: str(first[name]) for name in ("torch", "triton", "cuda", "torch_npu") if name in first}
    own = [{k: x for k, x in row.items() if k not in (*_OF_THE_FILE, *versions)} for row in rows]
    return {
        "benchmark": first.get("op", path.stem), "device": first["device"], "date": first.get("date", ""),
        "versions": versions, "rows": own,
    }  # fmt: skip


def _normalised(row: Row) -> Row:
    row = {_RENAMED.get(name, name): x for name, x in row.items()}
    size = row.pop("size", None)
    if isinstance(size, (list, tuple)):
        names = {3: "MNK", 4: "BHSD"}.get(len(size))
        row |= dict(zip(names, size, strict=True)) if names else {"size": "×".join(map(str, size))}
    if "M" in row and "implementation" not in row and "kernel" in row:  # matmul rows name the library or the tile
        kernel = row.pop("kernel")
        row |= (
            {"implementation": kernel}
            if kernel in LIBRARIES
            else {"implementation": "diyfa, best tile", "tile": kernel}
        )
    if "pass" not in row and "tflops" in row and "S" in row:
        row["pass"] = "forward"
    return row
