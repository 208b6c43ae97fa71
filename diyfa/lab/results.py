"""Result files of benchmarks: their schema, the check of it, and how to read and write them.

A file is one JSON object: entries that hold for all rows (`FILE_FIELDS`) and a list of `rows`. A row says its `kind`;
`KINDS` lists the fields of each. `device`, `date`, `versions`, `clocks` and `purpose` of the file hold for every row
that does not have them itself. docs/results.md explains the fields.
"""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = 1
Row = dict[str, Any]

# Reports leave all purposes but the first out, unless asked for.
PURPOSES = ("comparison", "before and after", "ablation", "trial", "tile search")
SOURCES = ("measured", "predicted")

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,), "object": (dict,), "list": (list,),
}  # fmt: skip

FILE_FIELDS = {
    "schema": "integer", "benchmark": "text", "purpose": "text", "device": "text", "device_type": "text",
    "date": "text", "versions": "object", "clocks": "object", "note": "text", "rows": "list",
}  # fmt: skip
OPTIONAL_FILE_FIELDS = ("clocks", "note")

# Fields that a row of any kind may have.
COMMON_FIELDS = {
    "implementation": "text", "commit": "text", "source": "text", "purpose": "text", "unavailable": "text",
    "device": "text", "date": "text", "versions": "object", "clocks": "object", "clock_mhz": "number",
    "run": "integer", "table": "text", "case": "text", "note": "text", "pass": "text", "dtype": "text",
    "D": "integer", "Dv": "integer", "causal": "boolean", "S": "integer", "keys": "integer", "B": "integer",
    "H": "integer", "group": "integer", "M": "integer", "N": "integer", "K": "integer", "ms": "number",
    "ms_p20": "number", "ms_p80": "number", "spread": "number", "tflops": "number", "GB/s": "number",
    "TFLOP/s": "number", "peak_mib": "number", "host_us": "number", "ratio": "number", "work": "text", "mask": "text",
    "tile": "text", "variant": "text", "kernel": "text", "feature": "text", "block_m": "integer",
    "block_n": "integer", "num_warps": "integer", "num_stages": "integer", "status": "text", "max_error": "object",
    "predicted_tflops": "number", "predicted_share_of_cube_peak": "number",
}  # fmt: skip
SIZES = ("D", "Dv", "S", "keys", "B", "H", "group", "M", "N", "K")  # at least 1; other numbers may be 0
# Other magnitudes are no figures, and reports could not compute with them.
SMALLEST, LARGEST = 1e-12, 1e15
PROSE = ("note", "unavailable")  # the texts that may have several lines


class Kind(NamedTuple):
    """One kind of row: what it is about, and the fields that it must have unless it has `unavailable`."""

    about: str
    fields: tuple[str, ...]


KINDS = {
    "attention": Kind("a pass of attention", ("implementation", "pass", "D", "causal", "S", "tflops")),
    "packed": Kind("attention over packed sequences, or another named case", ("case", "pass", "tflops")),
    "feature": Kind("a feature, relative to the plain call", ("case", "pass", "ms", "ratio")),
    "decode": Kind("attention over a KV cache", ("implementation", "table", "case", "ms", "GB/s")),
    "matmul": Kind("a matrix product", ("implementation", "dtype", "M", "N", "K", "ms", "tflops")),
    "memory": Kind("peak memory of a call", ("implementation", "pass", "S", "peak_mib")),
    "host": Kind("host time of a call", ("implementation", "pass", "host_us")),
    "model": Kind("a whole model", ("implementation", "work", "ms")),
    "ceiling": Kind("what the device reaches at best: `tflops` or `GB/s`", ("implementation", "case")),
    "tile": Kind("one tile of a kernel", ()),
    "compiled": Kind(
        "a kernel compiled ahead of time, with predicted speed",
        ("source", "device", "pass", "D", "mask", "tile", "predicted_tflops", "predicted_share_of_cube_peak"),
    ),
    "numerics": Kind("a result against the reference", ("case", "status")),
    "equivalence": Kind("errors of a call against the reference", ("implementation", "case", "max_error")),
    "done": Kind("a step without figures", ()),
}


@dataclass(frozen=True)
class Results:
    """One result file. `facts` are its entries beside those of `FILE_FIELDS`."""

    path: str
    benchmark: str
    purpose: str
    device: str
    device_type: str
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(repr=False)
    clocks: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)


def read_results(path: Path) -> Results:
    """Return the results in the JSON file at `path`, after a check of its schema.

    Raises:
        ValueError: it is no result file, or of a newer schema; the message names the row and what is wrong with it.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if wrong := check(document):
        more = f" (and {len(wrong) - 1} more faults)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{path} is no result file of schema {SCHEMA}: {wrong[0]}{more}. docs/results.md has the fields"
        )
    known = {name: document[name] for name in FILE_FIELDS if name in document and name != "schema"}
    return Results(str(path), **known, facts={name: x for name, x in document.items() if name not in FILE_FIELDS})


def write_results(path: Path, document: dict[str, Any]) -> None:
    """Write `document` to `path`, whole or not at all. Create its folder. Raises ValueError if it breaks the schema."""
    document = {"schema": SCHEMA, **document}
    if wrong := check(document):
        raise ValueError(f"{path} is not written, it breaks the schema: {wrong[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    head = json.dumps({name: x for name, x in document.items() if name != "rows"}, indent=1, ensure_ascii=False)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in document["rows"])
    partial.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    partial.replace(path)


def check(document: Any) -> list[str]:
    """Return what breaks the schema in a document, in words; an empty list if nothing does."""
    if not isinstance(document, dict):
        return ["it is no object"]
    version = document.get("schema")
    if version is None:
        return ["it has no schema version: an early diyfa wrote it, measure again"]
    if not _is("integer", version) or not 1 <= version <= SCHEMA:
        return [f"its schema is {version!r}, this diyfa reads up to {SCHEMA}: install the newer one that wrote it"]
    missing = [name for name in FILE_FIELDS if name not in document and name not in OPTIONAL_FILE_FIELDS]
    wrong = [f"{name} is missing" for name in missing]
    wrong += _wrong_values(document, FILE_FIELDS)
    if isinstance(document.get("purpose"), str) and document["purpose"] not in PURPOSES:
        wrong.append(f"purpose is {document['purpose']!r}, not one of {', '.join(PURPOSES)}")
    if isinstance(document.get("rows"), list):
        for number, row in enumerate(document["rows"]):
            wrong += [f"rows[{number}]{fault}" for fault in check_row(row)]
    return wrong


def check_row(row: Any) -> list[str]:
    """Return what breaks the schema in one row."""
    if not isinstance(row, dict):
        return [" is no object"]
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return [f": kind is {kind!r}, not one of {', '.join(KINDS)}"]
    needed = () if "unavailable" in row else KINDS[kind].fields
    wrong = [f" ({kind}): {name} is missing" for name in needed if name not in row]
    wrong += [f" ({kind}): {fault}" for fault in _wrong_values(row, COMMON_FIELDS)]
    if row.get("source", "measured") not in SOURCES:
        wrong.append(f" ({kind}): source is {row['source']!r}, not one of {', '.join(SOURCES)}")
    if row.get("purpose", PURPOSES[0]) not in PURPOSES:
        wrong.append(f" ({kind}): purpose is {row['purpose']!r}, not one of {', '.join(PURPOSES)}")
    return wrong


def _is(name: str, value: Any) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _wrong_values(entries: dict[str, Any], fields: dict[str, str]) -> list[str]:
    """Return what is wrong with the entries that `fields` gives a type, in words."""
    wrong = [
        fault for name, value in entries.items() if name in fields and (fault := _fault(name, value, fields[name]))
    ]
    for name, kind in (("versions", "text"), ("clocks", "number")):
        if isinstance(entries.get(name), dict):
            values = entries[name].items()
            wrong += [fault for key, value in values if (fault := _fault(f"{name}.{key}", value, kind))]
    if isinstance(entries.get("date"), str) and not _is_date(entries["date"]):
        wrong.append(f"date is {entries['date']!r}, not an ISO 8601 date")
    return wrong


def _fault(name: str, value: Any, kind: str) -> str:
    """Return what is wrong with a value that must be of a kind, or an empty text."""
    if not _is(kind, value):
        return f"{name} is {value!r}, not {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if kind in ("number", "integer"):
        if name in SIZES and value < 1:
            return f"{name} is {value!r}, not at least 1"
        if not (value == 0 or SMALLEST <= value <= LARGEST):  # nan is neither
            return f"{name} is {value!r}, not 0 or from {SMALLEST} to {LARGEST}"
    if kind == "text":
        refused = ("Cs",) if name in PROSE else ("Cs", "Cc")
        if any(unicodedata.category(c) in refused for c in name + value):
            return f"{name!r} is {value!r}, which has characters that are no text"
    return ""


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        return False
    return len(text) == 10 or text[10] == "T"
