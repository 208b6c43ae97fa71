"""Modules with kernels are imported at half of the time, and are the same."""

from __future__ import annotations

import gc
import inspect
import json
import sys

import pytest
from subprocesses import run_python

from diyfa import imports

SOURCES = """
import importlib, inspect, json, pkgutil
from diyfa import imports

different, seen = [], 0

def compare(function):
    global seen
    seen += 1
    found = slowly(function)
    if imports.source_lines(function) != found:
        different.append(f"{function.__module__}.{function.__qualname__}")
    return found

slowly, inspect.getsourcelines = inspect.getsourcelines, compare
import diyfa.backends.cuda as cuda
for module in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
    importlib.import_module(module.name)
print(json.dumps({"different": different, "seen": seen}))
"""


def test_the_sources_of_all_kernels_are_the_same():
    found = json.loads(run_python(SOURCES, TRITON_INTERPRET="0").splitlines()[-1])
    assert found["different"] == [] and found["seen"] > 400  # Triton's own among them


class Methods:
    @staticmethod
    def last(a): return a  # fmt: skip


@pytest.mark.parametrize("function", [Methods.last, lambda a: a, Methods])
def test_the_source_of_what_no_kernel_is_like(function):
    assert imports.source_lines(function) == inspect.getsourcelines(function)


def test_changes_for_an_import_are_undone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_good_module.py").write_text("import gc\nenabled = gc.isenabled()\n")
    (tmp_path / "a_bad_module.py").write_text("from diyfa.imports import import_quickly\nimport_quickly('not_there')\n")
    before = inspect.getsourcelines
    assert imports.import_quickly("a_good_module").enabled is False
    assert gc.isenabled() and inspect.getsourcelines is before
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        imports.import_quickly("a_bad_module")
    assert gc.isenabled() and inspect.getsourcelines is before
    gc.disable()
    try:
        imports.import_quickly("a_good_module")
        assert not gc.isenabled()
    finally:
        gc.enable()
    del sys.modules["a_good_module"]
