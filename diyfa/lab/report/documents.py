"""Reading of the benchmark files that `diyfa bench`, the scripts in benchmarks/ and `diyfa first-run` write.

A file is one object with `device`, `date`, `versions` and `rows`. This module renames the fields of rows to one set of
names: `implementation`, `ms`, and the sizes `B, H, S, D` or `M, N, K`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_FILE_COLUMNS = ("device", "device_type", "date", "versions", "benchmark")
_RENAMED = {"name": "implementation", "time_ms": "ms", "memory_mb": "peak_mib"}


@dataclass(frozen=True)
class Document:
    """One file: its rows, with the device, date and versions of the measurement. `facts` are all other entries."""

    path: str
    benchmark: str
    device: str
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(repr=False)
    facts: dict[str, Any] = field(default_factory=dict)


def read_document(path: Path) -> Document:
    """Return the document in the JSON file at `path`.

    Raises:
        ValueError: it is no benchmark file; the message says what is missing. OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
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
        {name: x for name, x in content.items() if name not in (*_FILE_COLUMNS, "rows")},
    )


def _normalised(row: Row) -> Row:
    row = {_RENAMED.get(name, name): x for name, x in row.items()}
    size = row.pop("size", None)
    if isinstance(size, (list, tuple)):
        names = {3: "MNK", 4: "BHSD"}.get(len(size))
        row |= dict(zip(names, size, strict=True)) if names else {"size": "×".join(map(str, size))}
    if "pass" not in row and "tflops" in row and "S" in row:
        row["pass"] = "forward"
    return row
