"""The benchmark of the product: a dry run, processes that fail, and what it concludes from figures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hopper_gluon  # noqa: F401
import pytest
import torch
from scripts import load_script

import diyfa
from diyfa.backends.cuda.hopper import matmul_configs

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "matmul.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script(SCRIPT)


def test_a_dry_run_measures_every_implementation() -> None:
    """In processes of their own, through the public function, with the Hopper kernel in the simulator."""
    arguments = ("--dry", "--points", "16x128x1024", "--rounds", "1", "--only", "64x128x128 s4 c1 group8 split2")
    found = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=280, check=True
    ).stdout.splitlines()
    rows = [json.loads(line) for line in found if line.startswith("{")]
    names = {"cublas", "portable", "sm90 64x128x128 s4 c1 group8 split2"}
    cases = {("float16", "nn"), ("bfloat16", "nn"), ("float16", "nt")}
    assert {(row["implementation"], row["dtype"], row["layout"], row["case"]) for row in rows} == {
        *((x, *kind, "graph") for x in names for kind in cases),
        *((x, dtype, "nn", "eager") for x in names for dtype in ("float16", "bfloat16")),
    }
    assert all(row["table"] == "few rows, long K" and row["ms"] > 0 for row in rows)
    assert found[-1].startswith("dry: ") and not any("AUTOMATIC" in line for line in found)


def test_float8_is_compared_with_float64(benchmark: ModuleType) -> None:
    """By the benchmark's own inputs and descales, beside PyTorch's product."""
    case, point, device = benchmark.FLOAT8_CASES[0], (48, 64, 80), torch.device("cpu")
    a, b = benchmark.make_inputs(point, case, device)
    descales = benchmark.make_descales(point, case, device)
    c = diyfa.triton_matmul(a, b, **descales, backend="cpu")
    assert b.stride(0) == 1
    assert benchmark.error_of(c, a, b, descales) <= benchmark.UNITS * benchmark.ROUNDING[case.dtype]
    assert benchmark.error_of(c, a, b, descales | {"a_descale": torch.ones(48, 1)}) > 0.1


CHILD = """
import json, sys
name = sys.argv[1]
if name == "broken":
    sys.exit("no such kernel")
print("a library's greeting")
count = 0
for line in sys.stdin:
    request = json.loads(line)
    if "prepare" in request:
        errors = [5.0 if name == "wrong" and point[0] == 1000 else 0.5 for point, case in request["prepare"]]
        if name == "wrong at ragged sizes":
            errors[0] = float("nan")
        print(json.dumps({"errors": errors}), flush=True)
        continue
    count += 1
    if name == "hangs" and count == 2:
        sys.exit(124)
    print(json.dumps({"ms": count * (2.0 if request["case"][2] == "eager" else 1.0)}), flush=True)
"""
POINT = (1000, 1000, 500)


@pytest.fixture
def started(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., object]]:
    """Return a function that starts a benchmark of these implementations."""
    monkeypatch.setattr(benchmark, "_command", lambda name, options: [sys.executable, "-c", CHILD, name])
    every = []

    def start(*names: str, budget: float = 60) -> object:
        every.append(benchmark.Benchmark(names, argparse.Namespace(rounds=3, budget=budget)))
        return every[-1]

    yield start
    for each in every:
        each.close()


def test_implementations_are_measured_in_turns(benchmark: ModuleType, started: Callable[..., Any]) -> None:
    names = ["good", "wrong", "hangs", "broken", "wrong at ragged sizes"]
    bench = started(*names)
    jobs = [(benchmark.RAGGED[1], benchmark.CASES[0]), (POINT, benchmark.CASES[0]), ((8, 8, 8), benchmark.CASES[0])]
    bench.prepare(dict.fromkeys(names, jobs))
    bench.measure(names, POINT, (benchmark.CASES[0], benchmark.CASES[3]))
    by_name = {(row["implementation"], row.get("case", row.get("unavailable"))): row for row in bench.rows}
    assert set(by_name) == {
        ("good", "graph"), ("good", "eager"), ("hangs", "graph"), ("hangs", "hung"), ("broken", "no such kernel"),
        ("wrong", "wrong at (1000, 1000, 500): off by 5.0 units"),
        ("wrong at ragged sizes", "wrong at (129, 136, 80): off by nan units"),
    }  # fmt: skip
    # The counts are 1, 2, 3 of the graph and 4, 5, 6 of eager calls, which take twice as long.
    assert by_name["good", "graph"]["ms"] == 2.0 and by_name["good", "eager"]["ms"] == 10.0
    assert by_name["good", "graph"]["tflops"] == pytest.approx(2 * 1000 * 1000 * 500 / 2.0 / 1e9)
    assert bench.fastest(POINT) == ["hangs", "good"]
    bench.measure(["wrong"], (8, 8, 8), (benchmark.CASES[0],))
    assert bench.rows[-1]["case"] == "graph"  # it is wrong at the other point only


def test_no_time_is_left(benchmark: ModuleType, started: Callable[..., Any]) -> None:
    bench = started("good", budget=-1)
    bench.measure(["good"], (8, 8, 8), (benchmark.CASES[0],))
    assert [row["unavailable"] for row in bench.rows] == ["no time left"]


def row(table: str, name: str, ms: float | None, m: int = 8, mode: str = "graph", layout: str = "nn") -> dict:
    head = {"table": table, "implementation": name, "dtype": "float16", "layout": layout, "M": m, "N": 8, "K": 8}
    return {**head, "unavailable": "hung"} if ms is None else {**head, "case": mode, "ms": ms, "tflops": 1 / ms}


def test_conclusions(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A candidate counts at all points of its class; one that hung at one of them is out."""
    names = list(benchmark.ALL_CONFIGS)[:4]
    rows = [
        row("large", name, ms) for name, ms in (("cublas", 2.0), ("portable", 2.5), (names[0], 1.0), (names[1], 2.0))
    ]
    rows += [row("large", name, ms, 16) for name, ms in (("cublas", 4.0), ("portable", 4.0), (names[1], 4.0))]
    rows += [row("large", names[0], None, 16)]
    rows += [row("large", "cublas", 9.0, 16, "eager"), row("large", names[1], 6.0, 16, "eager")]
    rows += [
        row("narrow", name, ms, 24)
        for name, ms in (("cublas", 1.0), ("portable", 1.0), (names[2], 1.5), (names[3], 1.25))
    ]
    speeds = benchmark.relative_speeds(rows, "large", benchmark.CASES[0])
    assert speeds == {"cublas": 1.0, names[1]: 1.0, "portable": pytest.approx(0.8**0.5), names[0]: 0.0}
    assert benchmark.conclusions(rows, benchmark.CASES[0]) == (
        {"narrow": [names[3], names[2]], "large": [names[1]]},
        ["large"],
    )
    benchmark.print_summary(rows, benchmark.CASES, "H100")
    text = capsys.readouterr().out
    assert "AUTOMATIC: frozenset[str] = frozenset({'large'})" in text
    codes = [benchmark.config_code(benchmark.ALL_CONFIGS[name]) for name in names]
    assert f"narrow: {codes[3]}, {codes[2]}" in text and "8x8x8 0, 16x8x8 0" in text
    line = next(line for line in text.splitlines() if line.startswith("16x8x8"))
    assert names[1] in line and line.split()[-7:] == ["1.000", "-", "-", "1.500", "-", "1.000", "0.2"]


def test_every_class_has_a_point(benchmark: ModuleType) -> None:
    measured = {matmul_configs.problem_class(*point).name for point in benchmark.POINTS}
    assert measured == {row.name for row in matmul_configs.TABLE}


def test_every_point_has_candidates(benchmark: ModuleType) -> None:
    """By the code that the summary prints, too."""
    for point in benchmark.POINTS:
        assert benchmark.configs_of(point, benchmark.CASES[0])
        assert benchmark.configs_of(point, benchmark.FLOAT8_CASES[0])
    for config in benchmark.ALL_CONFIGS.values():
        assert eval(benchmark.config_code(config), {"_config": matmul_configs._config}) == config


def test_names_are_of_one_candidate_each(benchmark: ModuleType) -> None:
    for table in matmul_configs.TABLE:
        assert len({benchmark.config_name(config) for config in table.candidates}) == len(table.candidates)
