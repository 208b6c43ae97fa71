"""`diyfa warmup` fills triton-ascend's caches: afterwards calls on npu tensors start no compiler.

triton-ascend runs as on a device, from the call to its generated launcher; `planted_cann.py` says what is planted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from npu_serving import WARMED
from planted_cann import PlantedCann
from subprocesses import SUPPORT

from diyfa.backends.npu.runtime.compat import has_ascend_compiler
from diyfa.npu_stacks import installed_version

if not has_ascend_compiler() or installed_version("torch_npu") is None:
    pytest.skip("triton-ascend or torch_npu is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # each process imports PyTorch and triton-ascend
SERVED = {
    "_fwd_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_append_kernel", "_decode_kernel",
    "_combine_kernel", "_matmul_kernel",
}  # fmt: skip


class WarmUp(NamedTuple):
    cann: PlantedCann
    status: int
    printed: dict[str, Any]  # by `diyfa warmup --json`
    errors: str
    compiled: list[str]


def run(cann: PlantedCann, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**cann.environment, **environment}, capture_output=True, text=True, timeout=400)


def warm_up(cann: PlantedCann, shapes: tuple[str, ...], jobs: int) -> WarmUp:
    words = [argument for shape in shapes for argument in ("--shapes", shape)]
    done = run(cann, "-m", "diyfa", "warmup", *words, "--jobs", str(jobs), "--json")
    return WarmUp(cann, done.returncode, json.loads(done.stdout), done.stderr, cann.compiled())


def serve(cann: PlantedCann, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(cann, str(SUPPORT / "npu_serving.py"), **environment)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> WarmUp:
    """A warm-up in four processes, of which each but one must wait 5 s for the header that all launchers include."""
    return warm_up(PlantedCann(tmp_path_factory.mktemp("cann") / "cann", header_seconds=5.0), WARMED, 4)


def test_processes_beside_each_other_compile_each_kernel_once(warmed: WarmUp) -> None:
    assert (warmed.status, warmed.printed["failures"], warmed.printed["refused"]) == (0, [], []), warmed.errors
    back_half = [line for line in warmed.compiled if line.startswith("back half")]
    assert len(back_half) == warmed.printed["kernels"] == warmed.printed["compiled"]
    assert {line.partition("@")[2] for line in back_half} == SERVED
    headers = [line for line in warmed.compiled if "c++-header" in line]
    launchers = [line for line in warmed.compiled if ".cxx" in line]
    assert len(headers) == 1 and len(launchers) >= len(SERVED) - 1  # kernels with the same arguments share a launcher


def test_calls_after_a_warm_up_start_no_compiler(warmed: WarmUp) -> None:
    """Then one kernel is taken away: only that one is compiled, and with DIYFA_JIT=never none."""
    cann = warmed.cann
    done = serve(cann, DIYFA_JIT="never")
    assert done.returncode == 0, done.stderr
    assert {*cann.launched()} == SERVED and cann.compiled() == []

    (description,) = (cann.folder / "triton").glob("*/_fwd_kernel.json")
    shutil.rmtree(description.parent)
    refused = serve(cann, DIYFA_JIT="never")
    assert "RuntimeError: DIYFA_JIT=never, and _fwd_kernel would have to be compiled" in refused.stderr
    assert cann.launched() == [] and cann.compiled() == []
    done = serve(cann)
    assert done.returncode == 0, done.stderr
    assert [line.partition("@")[2] for line in cann.compiled()] == ["_fwd_kernel"]
    assert "DIYFA_JIT must be one of auto, never, got 'no'" in serve(cann, DIYFA_JIT="no").stderr

    for launcher in (cann.folder / "triton").glob("*/launcher*"):  # as a warm-up that was killed leaves it
        launcher.unlink()
    cann.launched()
    refused = serve(cann, DIYFA_JIT="never")
    assert "RuntimeError: DIYFA_JIT=never, and the launcher of _fwd_kernel would have to be compiled" in refused.stderr
    assert cann.launched() == [] and cann.compiled() == []


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    cann = PlantedCann(tmp_path / "cann", header_seconds=0.0)
    cann.refused.write_text("func.func @_bwd_dq_kernel")
    warmed = warm_up(cann, WARMED[:1], 2)
    (failure,) = warmed.printed["failures"]
    assert warmed.status == 1 and warmed.printed["compiled"] == warmed.printed["kernels"] - 1
    for words in ("_bwd_dq_kernel", "float16", "block_m=", "ub overflow: needs 387 KiB of 192"):
        assert words in failure and words in warmed.errors
