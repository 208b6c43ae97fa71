"""Scripts that no test runs find what they import: benchmarks, and what is run by hand on a device. And what is said of
tests is said of tests that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sampled import QUICK, SAMPLE_INTERVALS, quick

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "manual").glob("*.py")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("benchmarks", "tests/hopper"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("name", SAMPLE_INTERVALS)
def test_tests_of_which_some_cases_run(name: str) -> None:
    path, test = name.split("[")[0].split("::")
    assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text()


def test_quick_tests_are_a_sample_of_each_of_their_folders() -> None:
    cases = [f"test_{name}.py::test_it[{n}]" for name in ("one", "other") for n in range(40)]
    items = [SimpleNamespace(nodeid=f"tests/{folder}/{case}") for folder in (*QUICK, "hopper") for case in cases]
    chosen = [item.nodeid for item in quick(items)]
    in_folder = {folder: [name for name in chosen if f"/{folder}/" in name] for folder in (*QUICK, "hopper")}
    assert len(in_folder["tools"]) == len(cases) and not in_folder["hopper"]
    for folder, every in QUICK.items():
        assert {f"tests/{folder}/test_{name}.py::test_it[0]" for name in ("one", "other")} <= {*in_folder[folder]}
        assert 0.4 * len(cases) / every < len(in_folder[folder]) <= 2 * len(cases) / every + 2, folder
