"""The schema of result files: every recorded file has it, and what breaks it is named on reading and on writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diyfa.lab.results import COMMON_FIELDS, FILE_FIELDS, KINDS, PURPOSES, SCHEMA, check, read_results, write_results

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
HOST_ROW = {"kind": "host", "implementation": "diyfa", "pass": "forward", "host_us": 20.5}


def document(*rows: Any, **changes: Any) -> dict[str, Any]:
    head = {"benchmark": "b", "purpose": "comparison", "device": "GPU", "device_type": "cuda", "date": "2026-11-28"}
    return {"schema": SCHEMA, **head, "versions": {"torch": "2"}, "rows": list(rows), **changes}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_file_has_the_schema(path: Path) -> None:
    results = read_results(path)
    assert results.rows and results.device and results.date and results.versions


def test_predictions_are_marked_as_such() -> None:
    """Whatever a cost model or another machine's timings say was not measured."""
    for path in RECORDED:
        results = read_results(path)
        predicted = [row for row in results.rows if row.get("source") == "predicted"]
        if results.device_type == "npu" or "predicted" in path.stem:
            assert len(predicted) == len(results.rows), path
        else:
            assert not predicted, path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_results(path, document(HOST_ROW, chip={"cores": 20}, note="a note"))
    results = read_results(path)
    assert results.rows == [HOST_ROW] and results.facts == {"chip": {"cores": 20}} and results.note == "a note"
    assert [x.name for x in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is no JSON file"),
        ("[" * 200_000, "is no JSON file"),
        ("[]", "it is no object"),
        ('{"device": "x", "rows": []}', "it has no schema version"),
        (document(schema=SCHEMA + 1), "this diyfa reads up to"),
        (document(schema=True), "its schema is True"),
        (document(purpose="fun"), "purpose is 'fun', not one of comparison, before and after"),
        (document(device=7), "device is 7, not a text"),
        ({name: x for name, x in document(HOST_ROW).items() if name != "versions"}, "versions is missing"),
        (document({**HOST_ROW, "purpose": "fun"}), r"rows\[0\] \(host\): purpose is 'fun', not one of comparison"),
        (document(1), r"rows\[0\] is no object"),
        (document(HOST_ROW, {"kind": "magic"}), r"rows\[1\]: kind is 'magic', not one of attention, packed"),
        (document({**HOST_ROW, "kind": []}), r"rows\[0\]: kind is \[\]"),
        (document({**HOST_ROW, "host_us": "fast"}), r"rows\[0\] \(host\): host_us is 'fast', not a number"),
        (document({**HOST_ROW, "spread": True}), r"spread is True, not a number"),
        (document({**HOST_ROW, "source": "guessed"}), r"source is 'guessed', not one of measured, predicted"),
        (document({"kind": "host", "pass": "forward"}), r"implementation is missing \(and 1 more faults\)"),
        (document({**HOST_ROW, "host_us": float("nan")}), "host_us is nan, not 0 or from 1e-12 to"),
        (document({**HOST_ROW, "host_us": float("inf")}), "host_us is inf, not 0 or from"),
        (document({**HOST_ROW, "host_us": -1}), "host_us is -1, not 0 or from"),
        (document({**HOST_ROW, "host_us": 1e-320}), "host_us is 1e-320, not 0 or from"),
        (document({**HOST_ROW, "group": 0}), "group is 0, not at least 1"),
        (document({**HOST_ROW, "mask": []}), r"mask is \[\], not a text"),
        (document({**HOST_ROW, "max_error": 1.0}), "max_error is 1.0, not an object"),
        (document({**HOST_ROW, "date": "today"}), "date is 'today', not an ISO 8601 date"),
        (document(date="2026-11-28 noon"), "date is '2026-11-28 noon', not an ISO 8601 date"),
        (document(device="a\nb"), r"'device' is 'a\\nb', which has characters that are no text"),
        (document(versions={"torch": 2}), "versions.torch is 2, not a text"),
        (document(versions={"torch": "\ud800"}), "'versions.torch' is .*, which has characters that are no text"),
        (document(clocks={"sm_mhz": "fast"}), "clocks.sm_mhz is 'fast', not a number"),
        (document({**HOST_ROW, "clocks": {"sm_mhz": float("inf")}}), "clocks.sm_mhz is inf, not 0 or from"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as refusal:
        read_results(path)
    assert str(path) in str(refusal.value)


def test_a_broken_document_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("kept")
    with pytest.raises(ValueError, match=r"rows\[0\] \(host\): host_us is missing"):
        write_results(path, document({"kind": "host", "implementation": "diyfa", "pass": "forward"}))
    assert path.read_text() == "kept"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Who reads the old file while a new one is written reads the old one to its end."""
    path = tmp_path / "x.json"
    write_results(path, document(HOST_ROW))
    before = path.read_text()
    with path.open() as old:
        write_results(path, document(HOST_ROW, HOST_ROW))
        assert old.read() == before != path.read_text()


def test_figures_that_round_to_0_and_texts_of_several_lines_are_read() -> None:
    zero = {**HOST_ROW, "host_us": 0.0, "run": 0, "note": "one\ntwo"}
    assert not check(document(zero, note="a\tb", date="2026-11-28T10:00:00+00:00"))


def test_a_reason_replaces_the_figures() -> None:
    assert not check(document({"kind": "host", "implementation": "diyfa", "unavailable": "refused"}))


@pytest.mark.parametrize("page", ["docs/results.md", "docs/zh/results.md"])
def test_the_page_has_every_field(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in (*FILE_FIELDS, *COMMON_FIELDS, *KINDS, *PURPOSES, *(x for kind in KINDS.values() for x in kind.fields)):
        assert f"`{name}`" in text, name
