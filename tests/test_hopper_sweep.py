"""What the Hopper sweep measures first, and what it concludes from its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from diyfa.backends.cuda.sm90 import Sm90Config


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "hopper_sweep.py"
    spec = importlib.util.spec_from_file_location("hopper_sweep", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_form_is_measured_once_and_the_best_guess_of_each_case_first(sweep: ModuleType) -> None:
    work = sweep.ordered(list(sweep.FORMS), list(sweep.PEERS), [])
    assert len(work) == len(set(work))
    assert {item for item in work if item[0] not in sweep.PEERS} == {
        (name, case) for case, names in sweep.FORMS.items() for name in names
    }
    peers = 3 * len(sweep.GRID)
    assert {name for name, _ in work[:peers]} == {"cudnn", "fa3", "fa4"}
    assert work[peers : peers + len(sweep.GRID)] == [(sweep.FORMS[case][0], case) for case in sweep.GRID]


def test_forms_differ(sweep: ModuleType) -> None:
    for case in sweep.FORMS:
        forms = sweep.candidates(*case)
        assert len(set(forms.values())) == len(forms)


def row(name: str, seqlen: int, tflops: float, error: float = 2e-3) -> dict:
    return {"implementation": name, "D": 128, "causal": True, "S": seqlen, "tflops": tflops, "error": error}


def test_summary(sweep: ModuleType, capsys: pytest.CaptureFixture) -> None:
    first, second, third = "2x64 dynamic pairs", "2x64 balanced pairs", "2x64 dynamic pingpong pairs"
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
    table = printed[printed.index("    (128, True)") :]
    found = eval("{" + table + "}", {"C": Sm90Config, "_ANY": 1 << 62, "_H200": "H200: "})
    forms = sweep.candidates(128, True)
    assert [(most, config.measured) for most, config in found[128, True]] == [
        (2048, "H200: 540"),
        (1 << 62, "H200: 630/655"),
    ]
    assert found[128, True][0][1].deal == forms[second].deal
