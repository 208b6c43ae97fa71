"""The benchmark of the product: a dry run, processes that fail, and what it concludes from figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hopper_gluon  # noqa: F401
import pytest
import torch
from scripts import load_script

import diyfa

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "matmul.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script(SCRIPT)


def test_a_dry_run_measures_every_implementation() -> None:
    """In processes of their own, through the public function, with the Hopper kernel in the simulator."""
    arguments = ("--dry", "--points", "16x128x1024", "--rounds", "1", "--only", "64x64x64 s12 c1 group8 split2")
    found = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=280, check=True
    ).stdout.splitlines()
    rows = [json.loads(line) for line in found if line.startswith("{")]
    names = {"cublas", "portable", "sm90 64x64x64 s12 c1 group8 split2"}
    cases = {("float16", "nn"), ("bfloat16", "nn"), ("float16", "nt")}
    assert {(row["implementation"], row["dtype"], row["layout"], row["case"]) for row in rows} == {
        *((x, *kind, "graph") for x in names for kind in cases),
        *((x, dtype, "nn", "eager") for x in names for dtype in ("float16", "bfloat16")),
    }
    assert all(row["table"] == "few rows, fewest tiles, long K" and row["ms"] > 0 for row in rows)
    assert found[-1].startswith("dry: ") and not any("faster for" in line for line in found)


def test_float8_is_compared_with_float64(benchmark: ModuleType) -> None:
    """By the benchmark's own inputs and descales, beside PyTorch's product."""
    case, point, device = benchmark.FLOAT8_CASES[0], (48, 64, 80), torch.device("cpu")
    a, b = benchmark.make_inputs(point, case, device)
    descales = benchmark.make_descales(point, case, device)
    c = diyfa.triton_matmul(a, b, **descales, backend="cpu")
    assert b.stride(0) == 1
    assert benchmark.error_of(c, a, b, descales) <= benchmark.UNITS * benchmark.ROUNDING[case.dtype]
    assert benchmark.error_of(c, a, b, descales | {"a_descale": torch.ones(48, 1)}) > 0.1
