"""What the Hopper sweep measures first, and what it concludes from its figures."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return load_script(Path(__file__).resolve().parents[2] / "benchmarks" / "hopper_sweep.py")


def test_peers_are_measured_beside_every_config(sweep: ModuleType) -> None:
    for case, names in sweep.CONFIG_NAMES.items():
        work = sweep.names_of(case, list(sweep.PEERS), [])
        assert len(work) == len(set(work))
        peers = ["cudnn", "fa3", "fa4"] if case in sweep.GRID else ["cudnn"]
        assert work == peers + list(names)
    some = sweep.names_of((128, True), [], ["q-registers"])
    assert some and all("q-registers" in name for name in some)


CHILD = """
import json, sys
name = sys.argv[1]
if name == "absent":
    print(json.dumps({"unavailable": "not installed"}), flush=True)
    sys.exit()
if name == "broken":
    sys.exit("no such kernel")
print("a library's greeting")
print(json.dumps({"ready": name}), flush=True)
turns = {}
for line in sys.stdin:
    if name == "hangs":
        sys.exit(124)
    turns[line] = turns.get(line, 0) + 1
    print(json.dumps({"ms": int(line) / 1024 * turns[line], "error": 0.5}), flush=True)
"""


def test_implementations_are_measured_in_turns(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_command", lambda name, case, options: [sys.executable, "-c", CHILD, name])
    options = argparse.Namespace(jobs=2, rounds=3, head_dim_v=0, seq_lens=[1024, 4096])
    names = ["one", "absent", "hangs", "broken", "two"]
    rows = list(sweep.measure_case(names, (128, True), options, time.monotonic() + 60))
    reasons = {row["implementation"]: row["unavailable"] for row in rows if "unavailable" in row}
    assert reasons == {"absent": "not installed", "hangs": "hung", "broken": "no such kernel"}
    measured = {(row["implementation"], row["S"]): row for row in rows if "ms" in row}
    assert set(measured) == {(name, seqlen) for name in ("one", "two") for seqlen in (1024, 4096)}
    row = measured["two", 4096]
    assert row["ms"] == 8.0 and row["rounds"] == 3 and row["spread"] == 1.0 and row["error"] == 0.5
    assert row["tflops"] == round(4 * 4 * 16 * 4096**2 * 128 / 2 / 8.0 / 1e9, 1)

    options.head_dim_v = 64
    rows = list(sweep.measure_case(["two"], (128, True), options, time.monotonic() + 60))
    assert (rows[1]["Dv"], rows[1]["tflops"]) == (64, round(2 * 4 * 16 * 4096**2 * (128 + 64) / 2 / 8.0 / 1e9, 1))

    late = list(sweep.measure_case(names, (128, True), options, time.monotonic() - 1))
    assert {row["implementation"] for row in late} == set(names) and not any("ms" in row for row in late)


def test_configs_differ(sweep: ModuleType) -> None:
    for case in sweep.CONFIG_NAMES:
        configs = sweep.candidates(*case)
        assert len(set(configs.values())) == len(configs)
    with pytest.raises(ValueError, match="sideways"):
        sweep.config_named(128, "2x64 sideways")


def row(name: str, seqlen: int, tflops: float, error: float = 2e-3) -> dict:
    return {"implementation": name, "D": 128, "causal": True, "S": seqlen, "tflops": tflops, "error": error}


def test_summary(sweep: ModuleType, capsys: pytest.CaptureFixture) -> None:
    first, second = (
        "2x64 persistent pairs boxes q-registers-2",
        "2x64 dynamic pairs boxes q-registers-2",
    )
    third = "2x64 dynamic pingpong pairs boxes q-registers-2 running-max"
    rows = [row(name, s, 600) for name in ("cudnn", "fa3") for s in (1024, 4096, 16384)]
    rows += [row(first, 1024, 500), row(first, 4096, 630), row(first, 16384, 655)]
    rows += [row(second, 1024, 540), row(second, 4096, 640), row(second, 16384, 600)]
    rows += [row(third, s, 900, error=0.1) for s in (1024, 4096, 16384)]  # fast because it is wrong
    rows.append({"implementation": "fa4", "D": 128, "causal": True, "unavailable": "not installed"})
    sweep.print_summary(rows)
    printed = capsys.readouterr().out
    assert third not in printed and "900.0" not in printed
    assert (
        "0.900 of cudnn 600.0" in printed and "2 of 3 points at or ahead" in printed and "the worst at 0.900" in printed
    )
