"""`diyfa warmup` fills triton-ascend's caches: afterwards calls on npu tensors start no compiler.

triton-ascend runs as on a device, from the call to its generated launcher; see `planted_cann.py` for what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from npu_serving import WARMED
from planted_cann import PlantedCann
from subprocesses import SUPPORT

from diyfa.backends.npu.runtime.compat import has_ascend_compiler
from diyfa.npu_stacks import installed_version

if not has_ascend_compiler() or installed_version("torch_npu") is None:
    pytest.skip("triton-ascend or torch_npu is not installed", allow_module_level=True)


def run(cann: PlantedCann, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**cann.environment, **environment}, capture_output=True, text=True, timeout=400)


def warm_up(cann: PlantedCann, *shapes: str, jobs: int = 2) -> tuple[int, dict[str, Any], str]:
    """Return (exit status, what `diyfa warmup --json` printed, standard error)."""
    words = [argument for shape in shapes for argument in ("--shapes", shape)]
    done = run(cann, "-m", "diyfa", "warmup", *words, "--jobs", str(jobs), "--json")
    return done.returncode, json.loads(done.stdout), done.stderr


def serve(cann: PlantedCann, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(cann, str(SUPPORT / "npu_serving.py"), **environment)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlantedCann, dict[str, Any], list[str]]:
    cann = PlantedCann(tmp_path_factory.mktemp("cann") / "cann")
    status, printed, errors = warm_up(cann, *WARMED)
    assert status == 0, errors
    return cann, printed, cann.compiled()


def test_calls_after_a_warm_up_start_no_compiler(warmed) -> None:
    cann, printed, compiled = warmed
    assert printed["failures"] == [] and printed["refused"] == []
    assert sum(line.startswith("back half") for line in compiled) == printed["kernels"]
    cann.launched()
    done = serve(cann)
    assert done.returncode == 0, done.stderr
    launched = cann.launched()
    assert {*launched} == {
        "_fwd_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_append_kernel",
        "_decode_kernel", "_combine_kernel", "_matmul_kernel",
    }  # fmt: skip
    assert cann.compiled() == []


def test_the_launcher_of_each_kernel_is_compiled_too(warmed) -> None:
    _, printed, compiled = warmed
    launchers = [line for line in compiled if line.startswith("C++") and ".cxx" in line]
    headers = [line for line in compiled if "c++-header" in line]
    assert len(launchers) >= 1 and len(headers) == 1  # kernels with equal arguments share a launcher


def test_a_call_that_was_not_warmed_up_starts_compilers(tmp_path: Path) -> None:
    """What the test above counts would show a kernel that a warm-up leaves out."""
    cann = PlantedCann(tmp_path / "cann", header_seconds=0.0)
    status, _, errors = warm_up(cann, *WARMED[1:])
    assert status == 0, errors
    cann.compiled()
    done = serve(cann)
    assert done.returncode == 0, done.stderr
    back_half = [line.partition("@")[2] for line in cann.compiled() if line.startswith("back half")]
    assert sorted(back_half) == ["_bwd_dkdv_kernel", "_bwd_dq_kernel", "_bwd_preprocess_kernel", "_fwd_kernel"]


def test_processes_beside_each_other_wait_for_the_header(tmp_path: Path) -> None:
    """All launchers include one precompiled header. GCC fails on one that another process is writing."""
    cann = PlantedCann(tmp_path / "cann", header_seconds=6.0)
    status, printed, errors = warm_up(cann, *WARMED[:2], jobs=4)
    assert (status, printed["failures"]) == (0, []), errors
    assert sum("c++-header" in line for line in cann.compiled()) == 1


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    cann = PlantedCann(tmp_path / "cann", header_seconds=0.0)
    cann.refused.write_text("func.func @_bwd_dq_kernel")
    status, printed, errors = warm_up(cann, WARMED[0])
    (failure,) = printed["failures"]
    assert status == 1 and printed["compiled"] == printed["kernels"] - 1
    for words in ("_bwd_dq_kernel", "float16", "block_m=", "ub overflow: needs 387 KiB of 192"):
        assert words in failure and words in errors
