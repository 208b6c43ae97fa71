"""The benchmark of the product: a dry run, processes that fail, and what it concludes from figures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import hopper_gluon  # noqa: F401
import pytest
from scripts import load_script

from diyfa.backends.cuda.hopper import matmul_configs

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "matmul.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script(SCRIPT)


def test_a_dry_run_measures_every_implementation() -> None:
    """In processes of their own, through the public function, with the Hopper kernel in the simulator."""
    arguments = ("--dry", "--points", "16x128x1024", "--dtypes", "bfloat16", "--rounds", "1", "--only", "split2")
    found = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=280, check=True
    ).stdout.splitlines()
    rows = [json.loads(line) for line in found if line.startswith("{")]
    names = {"cublas", "portable", "sm90 64x128x128 s4 c1 group8 split2"}
    assert {(row["implementation"], row["case"]) for row in rows} == {
        (x, mode) for x in names for mode in ("graph", "eager")
    }
    assert all(row["table"] == "skinny, long K" and row["ms"] > 0 for row in rows)
    assert found[-1].startswith("dry: ") and not any("AUTOMATIC" in line for line in found)


CHILD = """
import json, sys
name = sys.argv[1]
if name == "broken":
    sys.exit("no such kernel")
print("a library's greeting")
for count, line in enumerate(sys.stdin):
    request = json.loads(line)
    if name == "hangs" and count == 1:
        sys.exit(124)
    answer = {"error": 0.5 if name == "wrong" else 0.0}
    if name != "wrong":
        answer["ms"] = (count + 1) * (2.0 if request["mode"] == "eager" else 1.0)
    print(json.dumps(answer), flush=True)
"""


def test_implementations_are_measured_in_turns(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_command", lambda name, options: [sys.executable, "-c", CHILD, name])
    options = argparse.Namespace(rounds=3, modes=["graph", "eager"])
    names = ["good", "wrong", "hangs", "broken"]
    rows = list(benchmark.measure_point(names, (1000, 1000, 500), "float16", options, time.monotonic() + 60))
    by_name = {(row["implementation"], row.get("case", row.get("unavailable"))): row for row in rows}
    assert set(by_name) == {
        ("good", "graph"), ("good", "eager"), ("hangs", "graph"), ("hangs", "hung"), ("broken", "no such kernel"),
        ("wrong", "wrong: off by 5.00e-01 of the largest element"),
    }  # fmt: skip
    # Rounds count 1, 2; 3, 4; 5, 6: graphs take 1, 3, 5 and eager calls twice 2, 4, 6.
    assert by_name["good", "graph"]["ms"] == 3.0 and by_name["good", "eager"]["ms"] == 8.0
    assert by_name["good", "graph"]["tflops"] == pytest.approx(2 * 1000 * 1000 * 500 / 3.0 / 1e9)


def test_no_time_is_left(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_command", lambda name, options: [sys.executable, "-c", CHILD, name])
    options = argparse.Namespace(rounds=1, modes=["graph"])
    rows = list(benchmark.measure_point(["good"], (8, 8, 8), "float16", options, time.monotonic() - 1))
    assert [row["unavailable"] for row in rows] == ["no time left"]


def row(table: str, name: str, ms: float | None, m: int = 8) -> dict:
    head = {"table": table, "implementation": name, "dtype": "float16", "M": m, "N": 8, "K": 8}
    return {**head, "unavailable": "hung"} if ms is None else {**head, "case": "graph", "ms": ms}


def test_conclusions(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A candidate counts at all points of its class; one that hung at one of them is out."""
    rows = [
        row("large", name, ms) for name, ms in (("cublas", 2.0), ("portable", 2.5), ("sm90 a", 1.0), ("sm90 b", 2.0))
    ]
    rows += [row("large", name, ms, 16) for name, ms in (("cublas", 4.0), ("portable", 4.0), ("sm90 b", 4.0))]
    rows += [row("large", "sm90 a", None, 16)]
    rows += [
        row("narrow", name, ms) for name, ms in (("cublas", 1.0), ("portable", 1.0), ("sm90 c", 1.5), ("sm90 d", 1.25))
    ]
    speeds = benchmark.relative_speeds(rows, "large")
    assert speeds == {"cublas": 1.0, "sm90 b": 1.0, "portable": pytest.approx(0.8**0.5), "sm90 a": 0.0}
    assert benchmark.conclusions(rows) == ({"narrow": ["sm90 d", "sm90 c"], "large": ["sm90 b"]}, ["large"])
    benchmark.print_summary(rows)
    text = capsys.readouterr().out
    assert "AUTOMATIC: frozenset[str] = frozenset({'large'})" in text and "narrow: sm90 d; sm90 c" in text


def test_every_class_has_a_point(benchmark: ModuleType) -> None:
    measured = {matmul_configs.problem_class(*point).name for point in benchmark.POINTS}
    assert measured == {row.name for row in matmul_configs.TABLE}


def test_names_are_of_one_candidate_each(benchmark: ModuleType) -> None:
    for table in matmul_configs.TABLE:
        assert len({benchmark.config_name(config) for config in table.candidates}) == len(table.candidates)
