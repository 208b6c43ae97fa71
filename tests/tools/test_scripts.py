"""Scripts that no test runs find what they import: benchmarks, and what is run by hand on a device. And what is said of
tests is said of tests that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sampled import SAMPLE_INTERVALS
from scripts import load_script

from diyfa.lab.bench import record
from diyfa.lab.bench.record import environment
from diyfa.lab.results import check_row, read_results

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "manual").glob("*.py")])


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script(ROOT / "benchmarks" / f"{name}.py")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "tests/hopper"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    load_script(path)


def test_predictions_of_context_parallel_are_a_result_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, path = benchmark("context_parallel", monkeypatch), tmp_path / "results.json"
    arguments = ["--predict", "8", "--tokens", "65536", "--kernel-tflops", "600", "500", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", *arguments])
    script.main()
    rows = read_results(path).rows
    assert {row["source"] for row in rows} == {"predicted"}
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    for row in rows:  # not faster than eight devices of the assumed speed
        limit = 8 * {"forward": 600, "backward": 500}[row["pass"]]
        assert 0.5 * limit < row["tflops"] < limit
        assert row["ms"] / 1e3 == pytest.approx(row["facts"][f"{row['pass']}_s"])


@pytest.mark.parametrize("d, dv, heads", [(64, 64, 32), (192, 128, 8)])
@pytest.mark.parametrize("name, passed", [("cuDNN forward", "forward"), ("table", "backward")])
def test_rows_of_the_hopper_backward(
    monkeypatch: pytest.MonkeyPatch, d: int, dv: int, heads: int, name: str, passed: str
) -> None:
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    script = benchmark("hopper_bwd", monkeypatch)
    measured = {"d": d, "causal": True, "s": 4096, "group": 1, "name": name, "ms": 2.0, "tflops": 500.0}
    row = script.result_row(measured)
    assert check_row(row) == []
    assert (row["implementation"], row["pass"]) == (name.removesuffix(" forward"), passed)
    assert (row["B"], row["H"], row["S"], row["D"], row["Dv"]) == (4, heads, 4096, d, dv)


def test_the_hopper_sweep_writes_a_result_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    script, path = benchmark("hopper_sweep", monkeypatch), tmp_path / "results.json"
    measured = {"implementation": "cudnn", "D": 64, "Dv": 64, "causal": False, "S": 1024, "B": 16, "H": 32}
    measured |= {"ms": 0.5, "tflops": 500.0, "error": 1e-3, "spread": 0.01, "rounds": 3}
    absent = {"implementation": "fa4", "D": 64, "causal": False, "unavailable": "not installed"}
    monkeypatch.setattr(script, "measure_case", lambda *arguments: iter([measured, absent]))
    monkeypatch.setattr(record, "environment", lambda device: {**environment(torch.device("cpu")), "device": "H200"})
    arguments = ["--cases", "64-full", "128-causal", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["hopper_sweep.py", *arguments])
    script.main()
    results = read_results(path)
    assert (results.purpose, len(results.rows)) == ("tile search", 4)
    assert [row.get("tflops") for row in results.rows] == [500.0, None] * 2


@pytest.mark.parametrize("name", SAMPLE_INTERVALS)
def test_tests_of_which_some_cases_run(name: str) -> None:
    path, test = name.split("[")[0].split("::")
    assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text()
