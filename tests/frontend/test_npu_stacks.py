"""Releases that belong together, and a package `triton` that is not triton-ascend."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from diyfa import npu_stacks
from diyfa.backends import npu
from diyfa.npu_stacks import STACKS, TRITON_ASCEND, documented_stack, release, torch_npu_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]


def test_every_pair_is_one_torch_and_is_there_once() -> None:
    assert all(release(stack.torch_npu) == release(stack.torch) >= (2, 7) for stack in STACKS)
    assert len({stack.torch_npu for stack in STACKS}) == len(STACKS)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("8.5.0", (8, 5, 0)), ("8.3.RC1", (8, 3)), ("2.7.1.post2+cpu", (2, 7, 1)), ("9.0.0-beta.1", (9, 0, 0)), ("x", ())],
)
def test_release(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_release_of_torch_npu() -> None:
    assert torch_npu_for("2.7.1+cpu", "8.5.0") == "2.7.1.post2"
    assert torch_npu_for("2.7.1", "9.0.0.beta1") == "2.7.1.post4"
    assert torch_npu_for("2.9.0", "") == "2.9.0"
    assert torch_npu_for("2.13.0", "9.0.0") == "2.13.0"
    assert torch_npu_for("2.5.1", "8.5.0") is None
    found = documented_stack("2.8.0.post2")
    assert found is not None and (found.cann, found.torch) == ("8.5.0", "2.8.0")
    assert documented_stack("2.8.0.post99") is None


def test_the_extra_chooses_neither_torch_nor_torch_npu() -> None:
    """The machine has them, in releases that belong to its CANN."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    names = {re.split(r"[\[<>=~! ]", requirement)[0].replace("_", "-") for requirement in extras["npu"]}
    assert not names & {"torch", "torch-npu", "triton", "diyfa"}
    assert f"triton-ascend=={TRITON_ASCEND}" in extras["npu"]


def pretend_triton(monkeypatch: pytest.MonkeyPatch, **backends: object) -> None:
    module = ModuleType("triton.backends")
    module.backends = backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.backends", module)
    monkeypatch.setattr(npu_stacks.importlib.util, "find_spec", lambda name: SimpleNamespace())


def test_plain_triton_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_triton(monkeypatch, ascend=1)
    assert npu_stacks.triton_problem() is None
    pretend_triton(monkeypatch, nvidia=1, amd=1)
    problem = npu_stacks.triton_problem()
    assert problem and "is not triton-ascend (it compiles for amd, nvidia)" in problem
    assert "pip uninstall -y triton triton-ascend" in problem and f"triton-ascend=={TRITON_ASCEND}" in problem


def test_a_triton_of_two_packages_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves where the two overwrote each other: its import raises."""
    pretend_triton(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    problem = npu_stacks.triton_problem()
    assert problem and "does not load (ModuleNotFoundError" in problem and "pip uninstall -y" in problem
    monkeypatch.setitem(sys.modules, "triton.backends", ModuleType("triton.backends"))
    problem = npu_stacks.triton_problem()
    assert problem and "does not load (AttributeError" in problem and "pip uninstall -y" in problem


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_stacks.importlib.util, "find_spec", lambda name: None)
    assert npu_stacks.triton_problem() == f"triton-ascend is not installed: pip install triton-ascend=={TRITON_ASCEND}"


def test_a_call_with_plain_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the driver of NVIDIA's Triton is asked for a GPU. The interpreter runs with either."""
    pretend_triton(monkeypatch, nvidia=1)
    monkeypatch.setattr(npu, "_triton_checked", False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ImportError, match=r"is not triton-ascend.*pip uninstall -y triton triton-ascend"):
        npu._kernel_module("attention.fwd")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    assert npu._kernel_module("attention.fwd") == "diyfa.backends.npu.attention.fwd"


def test_the_ahead_of_time_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip lists triton-ascend as installed although the other lies over it."""
    from diyfa.lab.npu import aot

    pretend_triton(monkeypatch, nvidia=1)
    monkeypatch.setattr("importlib.metadata.version", lambda name: TRITON_ASCEND)
    with pytest.raises(aot.CompilerMissing, match="is not triton-ascend"):
        aot.check_front_half()
