"""Releases that belong together, and a package `triton` that is not triton-ascend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from diyfa import npu_stacks
from diyfa.backends import npu
from diyfa.backends.npu.runtime import compiler
from diyfa.backends.npu.runtime.compat import stable_options
from diyfa.backends.npu.runtime.compiler import compiling_if_allowed
from diyfa.backends.npu.runtime.multibuffer import options_in_use
from diyfa.lab.npu import aot
from diyfa.npu_stacks import STACKS, TRITON_ASCEND, documented_stack, installed_version, release, torch_npu_for

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
    assert torch_npu_for("2.10.0", "9.1.0") == "2.10.0.post4"
    assert torch_npu_for("2.10.0", "9.1.1") == "2.10.0.post6"
    assert torch_npu_for("2.10.0", "9.2.0.beta1") == "2.10.0.post7"
    assert torch_npu_for("2.5.1", "8.5.0") is None
    found = documented_stack("2.8.0.post2")
    assert found is not None and (found.cann, found.torch) == ("8.5.0", "2.8.0")
    assert documented_stack("2.8.0.post99") is None


# What a machine of vllm-ascend has: the versions that triton-ascend 3.2.2 pins, too.
STAND_INS = {
    "torch": "2.10.0", "torch_npu": "2.10.0.post4", "triton-ascend": "3.2.2", "triton": "3.2.0", "numpy": "1.26.4",
    "attrs": "24.2.0", "decorator": "5.1.1", "psutil": "6.0.0", "pybind11": "2.13.6", "PyYAML": "6.0.1",
}  # fmt: skip


def test_an_installation_replaces_nothing(tmp_path: Path) -> None:
    """pip would install diyfa alone beside triton-ascend 3.2.2. It has no index, so it fails if it wants anything."""
    if not (installed_version("pip") and release(installed_version("setuptools") or "") >= (77,)):
        pytest.skip("pip and setuptools 77 build the package's metadata")
    for name, version in STAND_INS.items():
        folder = tmp_path / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "INSTALLER").write_text("pip\n")
        (folder / "RECORD").write_text("")
    report = tmp_path / "report.json"
    command = ["-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, *command, f"{ROOT}[npu]"], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert [each["metadata"]["name"] for each in json.loads(report.read_text())["install"]] == ["diyfa"]


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
    version = installed_version("triton-ascend") or TRITON_ASCEND
    assert "pip uninstall -y triton triton-ascend" in problem and f"triton-ascend=={version}," in problem
    # pip still lists triton-ascend 3.2.2 where NVIDIA's Triton lies over it.
    monkeypatch.setattr(npu_stacks, "installed_version", lambda name: "3.2.2" if name == "triton-ascend" else None)
    assert "triton-ascend==3.2.2, after everything else" in (npu_stacks.triton_problem() or "")


def test_a_triton_of_two_packages_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves where the two overwrote each other: its import raises."""
    pretend_triton(monkeypatch)
    for module, error in ((None, "ModuleNotFoundError"), (ModuleType("triton.backends"), "AttributeError")):
        monkeypatch.setitem(sys.modules, "triton.backends", module)
        problem = npu_stacks.triton_problem()
        assert problem and f"does not load ({error}" in problem and "pip uninstall -y" in problem


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_stacks.importlib.util, "find_spec", lambda name: None)
    problem = npu_stacks.triton_problem()
    assert problem and problem.startswith("triton-ascend is not installed: pip install --no-deps triton-ascend==3.2.0 ")
    assert "pip install 'diyfa[npu]'" in problem


def test_a_package_that_triton_ascend_does_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.2.0 imports pybind11 and requires nothing."""

    def no_pybind11() -> tuple[str, ...]:
        raise ModuleNotFoundError("No module named 'pybind11'", name="pybind11")

    monkeypatch.setattr(npu_stacks, "triton_backends", no_pybind11)
    want = "triton-ascend imports pybind11 and does not declare it: pip install 'diyfa[npu]'"
    assert npu_stacks.triton_problem() == want


def test_a_torch_whose_headers_need_another_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by the first call, which would otherwise fail in a C++ compiler."""
    assert npu_stacks.launcher_problem("2.13.0+cpu", "3.2.2") is None
    assert npu_stacks.launcher_problem("2.14.0", "3.6.0") is None
    assert npu_stacks.launcher_problem("2.14.0", "") is None
    pretend_triton(monkeypatch, ascend=1)
    monkeypatch.setattr(npu, "installed_version", lambda name: "3.2.2")
    monkeypatch.setattr("torch.__version__", "2.14.0+cpu")
    monkeypatch.setattr(npu, "_triton_checked", False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ImportError, match=r"3\.2\.2 builds launchers as C\+\+17, torch 2\.14\.0\+cpu needs C\+\+20: take torch"
    ):
        npu._kernel_module("attention.fwd")


def test_the_compiler_inside_triton_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "triton/backends/ascend/bishengir/bin/bishengir-compile"
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "triton")])
    monkeypatch.setattr(npu_stacks.importlib.util, "find_spec", lambda name: spec)
    assert npu_stacks.bundled_compiler() is None
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'bishengir-compile 1.3.0 (/build 0123456789ab 2026-08-01)'\n")
    program.chmod(0o755)
    assert npu_stacks.bundled_compiler() == program
    compiler.compiler_version.cache_clear()
    try:
        assert compiler.compiler_version() == "1.3.0 (0123456789ab 2026-08-01)"
    finally:
        compiler.compiler_version.cache_clear()


def test_whether_a_call_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty DIYFA_JIT is none; tests/npu/test_npu_warmup.py has "never"."""
    for value in ("", "auto"):
        monkeypatch.setenv("DIYFA_JIT", value)
        with compiling_if_allowed("a kernel"):
            pass
    monkeypatch.setenv("DIYFA_JIT", "Never")
    with (
        pytest.raises(ValueError, match="DIYFA_JIT must be one of auto, never, got 'Never'"),
        compiling_if_allowed("a kernel"),
    ):
        pass


def test_options_are_those_of_the_gate_in_every_release() -> None:
    """Later releases have other defaults for 910B."""
    assert stable_options({}) == {"enable_select_analysis": False, "enable_auto_bind_sub_block": True}
    assert stable_options({"enable_auto_bind_sub_block": False})["enable_auto_bind_sub_block"] is False
    on_950 = {"compile_on_910_95": True, "enable_select_analysis": True}
    assert stable_options(on_950) == on_950
    assert options_in_use({}).items() >= stable_options({}).items()


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
    pretend_triton(monkeypatch, nvidia=1)
    monkeypatch.setattr("importlib.metadata.version", lambda name: TRITON_ASCEND)
    with pytest.raises(aot.CompilerMissing, match="is not triton-ascend"):
        aot.check_front_half()
