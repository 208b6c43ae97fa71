"""Kernels without multibuffering: the variable, the file that keeps it, the conservative tile, `diyfa validate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diyfa.backends.npu.runtime import multibuffer, tiles
from diyfa.backends.npu.tables import configs
from diyfa.lab.npu import specs
from diyfa.lab.validate import CASES, Judge, WatchedJudge, _judge_for

ARCH = "Ascend910B3"
ON = {"multibuffer": True, "limit_auto_multi_buffer_only_for_local_buffer": False, "set_workspace_multibuffer": 4}


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(multibuffer.VARIABLE, raising=False)
    multibuffer.kept_off.cache_clear()
    yield
    multibuffer.kept_off.cache_clear()


def options(kernel: str = "attention_fwd/v2") -> dict[tuple[str, str], dict]:
    """Compiler options of the kernels whose name begins so, by name and case, as a call gives them."""
    jobs = specs.shipped_jobs(ARCH)
    return {(job.kernel, job.case): job.options for job in jobs if job.kernel.startswith(kernel)}


def test_every_kernel_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = options("")
    gathers = "score_fn[relative]"  # has the conservative tile, which is never buffered so
    forward = [each for (kernel, case), each in usual.items() if kernel == "attention_fwd/v2" and gathers not in case]
    assert all(each.items() >= ON.items() or each["set_workspace_multibuffer"] == 2 for each in forward)
    monkeypatch.setenv(multibuffer.VARIABLE, "0")
    without = options("")
    assert len(without) == len(usual) > 400
    others = [case for _, case in without.keys() - usual.keys()]  # a tile has another shape then, two of int8
    assert len(others) == 4 and all(" D=256 " in case and case.endswith(" 32x128") for case in others)
    for name, after in without.items():
        assert after["multibuffer"] is False and not after.keys() & set(multibuffer.WORKSPACE_OPTIONS)
        before = usual.get(name, {})
        assert {x: before[x] for x in before.keys() - {"multibuffer", *multibuffer.WORKSPACE_OPTIONS}} == {
            x: after[x] for x in after.keys() - {"multibuffer"} if before
        }


def test_the_conservative_tile_never_has_it() -> None:
    problem = specs.example(ARCH)
    tile = configs.conservative_tile(problem, "fwd")
    assert not tile.multibuffer
    launched = specs.attention_job(problem, "fwd", tile).options
    assert launched["multibuffer"] is False and not launched.keys() & set(multibuffer.WORKSPACE_OPTIONS)
    assert configs.candidates(problem, "fwd")[-2:] == [replace(tile, multibuffer=True), tile]


def test_every_call_reads_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tile depends on it, and an equal call was made before."""
    crowded = {"head_dim": 256, "head_dim_v": 256, "softcap": 1.0, "alibi": True, "sinks": True, "bias": "1hqk"}
    problem = specs.example(ARCH).replace(**crowded)
    for value, rows in (("1", 64), ("0", 32), ("1", 64)):
        monkeypatch.setenv(multibuffer.VARIABLE, value)
        assert tiles.chosen_tile(problem, "fwd", lambda tile: []).block_m == rows


def test_a_value_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(multibuffer.VARIABLE, "off")
    with pytest.raises(ValueError, match=r"DIYFA_NPU_MULTIBUFFER='off': expected 0 .* or 1"):
        multibuffer.is_on()


def test_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for these versions, the variable goes first, and what is no such file counts for nothing."""
    assert multibuffer.is_on() and multibuffer.state() is None and multibuffer.may_try_without()
    path = multibuffer.keep_off("causal: no answer within 600 s")
    assert path == multibuffer.path() and json.loads(path.read_text())["because"] == "causal: no answer within 600 s"
    assert not multibuffer.is_on() and not multibuffer.may_try_without()
    assert multibuffer.state() == f"without multibuffering, kept in {path} because of: causal: no answer within 600 s"
    assert not any(each["multibuffer"] for each in options().values())
    monkeypatch.setenv(multibuffer.VARIABLE, "1")
    assert multibuffer.is_on() and multibuffer.state() is None and not multibuffer.may_try_without()
    monkeypatch.setenv(multibuffer.VARIABLE, "0")
    assert multibuffer.state() == "without multibuffering (DIYFA_NPU_MULTIBUFFER=0)"
    monkeypatch.delenv(multibuffer.VARIABLE)
    for name, version in (("compiler_version", lambda: "9.9.9"), ("installed_version", lambda name: "9.9.9")):
        with monkeypatch.context() as other:
            other.setattr(multibuffer, name, version)
            multibuffer.kept_off.cache_clear()
            assert multibuffer.is_on()
    for text in ("", "[]", "{", '{"versions": 1}', "[" * 100_000):
        path.write_text(text)
        multibuffer.kept_off.cache_clear()
        assert multibuffer.is_on()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path / "file"))
    assert multibuffer.keep_off("a case") is None and multibuffer.is_on()


def test_a_disk_that_is_full_leaves_the_file_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced whole, so another process never reads half of it."""
    path = multibuffer.keep_off("the first case")
    assert path is not None
    write = Path.write_text

    def write_half(self: Path, text: str, encoding: str) -> int:
        write(self, text[: len(text) // 2], encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    assert multibuffer.keep_off("the second case") is None
    assert multibuffer.kept_off() == "the first case" and [*path.parent.iterdir()] == [path]


# A process that judges without computing: of the cases named, those that hang or are wrong with multibuffering.
FAKE = """
import json, sys, time
def answer(**what):
    print("@diyfa " + json.dumps(what), flush=True)
answer(ready={})
for line in sys.stdin:
    step = json.loads(line)
    fault = json.loads(sys.argv[1]).get(step["name"], "")
    on = step["environment"].get("DIYFA_NPU_MULTIBUFFER") != "0"
    if fault == "hang" and on:
        time.sleep(60)
    if fault == "crash":
        sys.exit(7)
    wrong = fault == "wrong" and on
    kernel = step["arguments"].get("variant", "matmul")
    row = {"case": step["name"], "kernel": kernel, "result": "dk", "passes": "both", "reason": ""}
    row |= {"status": "FAIL", "share": 3.0} if wrong else {"status": "pass", "share": 0.5}
    answer(row=row)
    answer(done=True, can_continue=True)
"""


def judge(**faults: str) -> WatchedJudge:
    return WatchedJudge(torch.device("cpu"), "npu", (sys.executable, "-c", FAKE, json.dumps(faults)))


@pytest.mark.parametrize(
    ("fault", "with_it"), [("hang", "no answer within 2 s"), ("wrong", "3 times the allowed error of dk")]
)
def test_validate_tries_without_it(fault: str, with_it: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diyfa.lab.validate.LIMIT_S", 2.0)
    judging = judge(**{CASES[1].name: fault})
    try:
        assert judging.attention(CASES[0], "v2").status == "pass" and judging.without_multibuffer == ""
        verdict = judging.attention(CASES[1], "v2")
        assert (verdict.status, verdict.share) == ("pass", 0.5)
        assert verdict.reason == f"right without multibuffering; with it: {with_it}"
        assert multibuffer.kept_off() == f"v2, {CASES[1].name}: {with_it}"
        assert str(multibuffer.path()) in judging.without_multibuffer
        product = judging.matmul((16, 16, 16), torch.float16)
        assert (product.case, product.kernel, product.status) == ("16x16x16, float16", "matmul", "pass")
    finally:
        judging.close()


def test_validate_reports_what_fails_either_way() -> None:
    judging = judge(**{CASES[0].name: "crash"})
    try:
        verdict = judging.attention(CASES[0], "v2")
        assert verdict.status == "FAIL" and verdict.reason == "the process ended with exit status 7"
        assert multibuffer.may_try_without() and judging.attention(CASES[1], "v2").status == "pass"
    finally:
        judging.close()


def test_a_decision_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(multibuffer.VARIABLE, "1")
    judging = judge(**{CASES[0].name: "wrong"})
    try:
        assert judging.attention(CASES[0], "v2").status == "FAIL" and not multibuffer.path().exists()
    finally:
        judging.close()


def test_only_compiled_kernels_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = cast(torch.device, SimpleNamespace(type="npu"))  # PyTorch knows the name where torch_npu is
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert type(_judge_for(npu, "npu")) is WatchedJudge
    for device, backend in (("cuda", "cuda"), ("cpu", "cpu"), ("cpu", "npu")):
        assert type(_judge_for(torch.device(device), backend)) is Judge
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert type(_judge_for(npu, "npu")) is Judge
