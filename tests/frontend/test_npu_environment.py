"""What is said of an Ascend machine, on machines planted in a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import run_python

from diyfa.arch import NPUArch
from diyfa.device import NPUCapabilities, NPUStatus
from diyfa.npu_environment import FINE, UNTESTED, WRONG, Finding, Machine, findings
from diyfa.npu_stacks import installed_version, launcher_problem

Change = Callable[[Machine], Machine]
PARTS = [
    "chip", "driver, firmware", "CANN", "set_env.sh", "bishengir-compile", "C++, Python.h", "Python",
    "torch, torch_npu",
]  # fmt: skip
CHIP = NPUCapabilities("Ascend910B3", NPUArch.A2, 20, 40, 1, 1, 1, 1, 1, 64.0)
VERSIONS = {"torch": "2.7.1+cpu", "torch_npu": "2.7.1.post2", "triton-ascend": "3.2.0"}
DRIVER = "Version=25.0.rc1.1\nascendhal_version=7.35.23\ncompatible_version_fw=[6.4.0,6.4.99],[7.0.0,7.7.99]\n"
FIRMWARE = "Version=7.7.0.1.231\nfirmware_version=1.0\n"
COMPILER = "bishengir-compile 1.1.0 (/build 428ab8fdab46 2026-04-30) \nllvm 19.1.7 e4ce5939f6e1\n"
COMPILER_8_5 = "bishengir-compile version 0.1.0 (e4e2ba9841d1 2026-01-16)\nOptimized build\n"  # of CANN 8.5.0


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def plant_cann(folder: Path, version: str, place: str = "cann") -> Path:
    """CANN in FOLDER/PLACE, with its script and its compiler; the place itself."""
    home = folder / place
    write(home / "aarch64-linux/ascend_toolkit_install.info", f"package_name=Ascend-cann-toolkit\nversion={version}\n")
    write(folder / place.split("/")[0] / "set_env.sh", "export ASCEND_HOME_PATH=\n")
    plant_compiler(home, COMPILER)
    return home


def plant_compiler(home: Path, says: str, status: int = 0) -> None:
    write(home / "bin/bishengir-compile", f"#!/bin/sh\ncat <<'END'\n{says}END\nexit {status}\n", 0o755)


@pytest.fixture
def healthy(tmp_path: Path) -> Machine:
    """A 910B3 with CANN 8.5.0 and the torch_npu made for it, its environment set."""
    ascend = tmp_path / "usr/local/Ascend"
    home = plant_cann(ascend, "8.5.0")
    write(ascend / "driver/version.info", DRIVER)
    write(ascend / "firmware/version.info", FIRMWARE)
    write(tmp_path / "usr/bin/g++", "#!/bin/sh\n", 0o755)
    write(tmp_path / "include/Python.h", "")
    environ = {
        "ASCEND_HOME_PATH": str(home),
        "PATH": os.pathsep.join([str(home / "bin"), str(tmp_path / "usr/bin"), "/bin"]),
    }
    status = NPUStatus(True, True, "2.7.1.post2")
    include = tmp_path / "include"
    return Machine(tmp_path, environ, tmp_path / "home", (3, 11), VERSIONS, lambda: None, status, CHIP, None, include)


def judged(machine: Machine, part: str) -> Finding:
    return next(finding for finding in findings(machine) if finding.part == part)


def expect(machine: Machine, part: str, verdict: str, *words: str) -> None:
    finding = judged(machine, part)
    text = f"{finding.found}: {finding.remedy}"
    assert finding.verdict == verdict, text
    assert (finding.remedy == "") == (verdict == FINE), text
    assert all(word in text for word in words), text


def test_a_healthy_machine(healthy: Machine) -> None:
    found = findings(healthy)
    assert [finding.part for finding in found] == [*PARTS, "triton-ascend"]
    assert [finding for finding in found if finding.verdict != FINE or finding.remedy] == []
    texts = {finding.part: finding.found for finding in found}
    assert texts["chip"] == "Ascend910B3, 20 cube and 40 vector cores"
    assert texts["driver, firmware"] == "25.0.rc1.1, 7.7.0.1.231"
    assert texts["CANN"].startswith("8.5.0 in ")
    assert texts["bishengir-compile"].startswith("1.1.0 of 2026-04-30 in ")


def test_another_machine_has_no_such_lines(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {}, tmp_path, (3, 13), {"torch": "2.13.0", "triton": "3.6.0"}, lambda: "no")
    assert findings(machine) == []
    write(tmp_path / "dev/davinci_manager", "")
    assert len(findings(machine)) == len(PARTS) + 1


def test_a_user_without_a_home(no_home: None, healthy: Machine) -> None:
    assert Machine(versions={}, status=healthy.status).home is None
    assert findings(replace(healthy, home=None)) == findings(healthy)


@pytest.mark.parametrize(
    ("place", "script"), [("cann", "cann/set_env.sh"), ("ascend-toolkit/latest", "ascend-toolkit/set_env.sh")]
)
@pytest.mark.parametrize("where", ["usr/local/Ascend", "home/Ascend"])
def test_cann_whose_environment_is_not_set(tmp_path: Path, place: str, script: str, where: str) -> None:
    """By root or by a user, from 8.5.0 and before: the remedy is the one script that is there."""
    plant_cann(tmp_path / where, "8.5.0", place)
    status = NPUStatus(True, False, "2.7.1.post2", "torch_npu does not load: libhccl.so", "source it")
    machine = Machine(tmp_path, {"PATH": "/bin"}, tmp_path / "home", (3, 11), VERSIONS, lambda: None, status)
    expect(machine, "CANN", WRONG, "8.5.0 in ", "source set_env.sh")
    expect(machine, "set_env.sh", WRONG, f"source {tmp_path / where / script}`")
    expect(machine, "bishengir-compile", WRONG, "not found", "source its set_env.sh")
    expect(machine, "chip", WRONG, "libhccl.so", "source it")


def test_no_cann(tmp_path: Path) -> None:
    status = NPUStatus(True, False, "2.7.1.post2", "torch_npu does not load", "install CANN")
    machine = Machine(tmp_path, {}, tmp_path, (3, 11), VERSIONS, lambda: None, status)
    expect(machine, "CANN", WRONG, "not found", "install CANN 8.5.0 or later")
    expect(machine, "set_env.sh", WRONG, "Ascend/cann/set_env.sh or ", "ascend-toolkit/set_env.sh (before CANN 8.5.0)")
    expect(machine, "driver, firmware", WRONG, "install the driver, or mount")


def test_a_cann_folder_without_a_version(healthy: Machine, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    machine = replace(healthy, environ={**healthy.environ, "ASCEND_HOME_PATH": str(tmp_path / "elsewhere")})
    expect(machine, "CANN", UNTESTED, "unknown version in ", "elsewhere", "no ascend_toolkit_install.info")


@pytest.mark.parametrize(
    ("script", "seconds", "why"),
    [("#!/no/such/interpreter", 20, ""), ("#!/bin/sh\nexec sleep 20", 0.2, "timed out"),
     ("#!/bin/sh\nkill -SEGV $$", 20, "signal 11")],
    ids=["absent", "hangs", "crashes"],
)  # fmt: skip
def test_a_compiler_that_does_not_run(
    healthy: Machine, script: str, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diyfa.npu_environment.COMPILER_SECONDS", seconds)
    write(healthy.root / "usr/local/Ascend/cann/bin/bishengir-compile", f"{script}\n", 0o755)
    expect(healthy, "bishengir-compile", WRONG, "does not run", why)


def test_either_variable_says_which_cann(healthy: Machine, tmp_path: Path) -> None:
    """The one that 8.5.0's script sets before the older one."""
    other = str(plant_cann(tmp_path / "other", "8.3.RC1"))
    old = {"ASCEND_TOOLKIT_HOME": other}
    expect(replace(healthy, environ={**healthy.environ, **old}), "CANN", FINE, "8.5.0 in ")
    path = {"PATH": healthy.environ["PATH"]}
    expect(replace(healthy, environ={**path, **old}), "CANN", WRONG, f"8.3.RC1 in {other}")
    expect(replace(healthy, environ={**path, **old}), "set_env.sh", FINE, f"ASCEND_TOOLKIT_HOME={other}")


@pytest.mark.parametrize(
    "script", ["printf 'bishengir-compile 1.1.0 \\377\\n'", "echo bishengir-compile 1.1.0 >&2"], ids=["bytes", "stderr"]
)
def test_a_compiler_with_an_unknown_answer(healthy: Machine, script: str) -> None:
    write(healthy.root / "usr/local/Ascend/cann/bin/bishengir-compile", f"#!/bin/sh\n{script}\n", 0o755)
    expect(healthy, "bishengir-compile", FINE, "1.1.0 in ")


def test_an_environment_of_a_removed_cann(healthy: Machine, tmp_path: Path) -> None:
    """After an upgrade, in a shell from before."""
    gone = str(tmp_path / "gone")
    machine = replace(healthy, environ={**healthy.environ, "ASCEND_HOME_PATH": gone})
    expect(machine, "set_env.sh", WRONG, gone, "no such folder", f"source {tmp_path}/usr/local/Ascend/cann/set_env.sh`")


@pytest.mark.parametrize("closed", ["", "cann", "cann/aarch64-linux/ascend_toolkit_install.info", "driver"])
def test_unreadable_files(healthy: Machine, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CANN that was installed for a group: of its folders nothing is seen from outside, and every part is judged."""
    place = healthy.root / "usr/local/Ascend" / closed
    stat, read_text = os.stat, Path.read_text

    def denied(path: Any) -> bool:
        return str(path).startswith(f"{place}{os.sep}")

    def planted_stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        if denied(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    def planted_read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if denied(path) or path == place:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", planted_stat)  # the superuser is denied nothing
    monkeypatch.setattr(Path, "read_text", planted_read_text)
    assert len(findings(healthy)) == len(PARTS) + 1
    unset = replace(healthy, environ={"PATH": "/bin"})
    expect(unset, "set_env.sh", WRONG, "set_env.sh")


def test_a_driver_in_another_folder(healthy: Machine) -> None:
    write(healthy.root / "etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/huawei\n")
    expect(healthy, "driver, firmware", UNTESTED, "opt/huawei/driver/version.info")  # the chip works all the same
    write(healthy.root / "opt/huawei/driver/version.info", "Version=25.5.0\n")
    write(healthy.root / "opt/huawei/firmware/version.info", "Version=7.8.0.5.1\n")
    expect(healthy, "driver, firmware", UNTESTED, "25.5.0, 7.8.0.5.1", "names no firmware")


def with_versions(**changes: str) -> Change:
    versions = {name.replace("_ascend", "-ascend"): version for name, version in changes.items()}
    return lambda machine: replace(machine, versions={n: x for n, x in {**VERSIONS, **versions}.items() if x})


def with_file(path: str, text: str) -> Change:
    return lambda machine: write(machine.root / "usr/local/Ascend" / path, text) or machine


def with_cann(version: str) -> Change:
    return lambda machine: plant_cann(machine.root / "usr/local/Ascend", version) and machine


def with_compiler(says: str, status: int = 0) -> Change:
    return lambda machine: plant_compiler(machine.root / "usr/local/Ascend/cann", says, status) or machine


def with_chip(**changes: Any) -> Change:
    return lambda machine: replace(machine, chip=replace(CHIP, **changes))


FW, PAIR, ASCEND = "firmware/version.info", "torch, torch_npu", "triton-ascend"
# What differs from a healthy machine, the part that is judged, the verdict, and words of what is said.
JUDGED: list[tuple[Change, str, str, tuple[str, ...]]] = [
    (with_cann("8.5.0.alpha002"), "CANN", FINE, ("8.5.0.alpha002",)),
    (with_cann("8.5.1"), "CANN", UNTESTED, ("torch_npu 2.7.1.post2 is documented for CANN 8.5.0",)),
    (with_cann("9.0.0"), "CANN", UNTESTED, ("for CANN 8.5.0", "for this one it is torch_npu 2.7.1.post4")),
    (with_cann("8.3.RC1"), "CANN", WRONG, ("8.3.RC1", "is made for CANN 8.5.0: install")),
    (with_cann("main"), "CANN", UNTESTED, ("main in ", "its ascend_toolkit_install.info has no number of a release")),
    (with_compiler(COMPILER.replace("1.1.0", "1.2.0")), "bishengir-compile", FINE, ("1.2.0",)),
    (with_compiler(COMPILER_8_5), "bishengir-compile", UNTESTED, ("0.1.0 of 2026-01-16 in ", "refuses most tiles")),
    (with_compiler(COMPILER.replace("1.1.0", "0.9.3")), "bishengir-compile", UNTESTED,
     ("0.9.3", "proven with 1.1.0 and 1.2.0", "diyfa tune")),
    (with_compiler("LLVM version 19\n"), "bishengir-compile", UNTESTED, ("--version says 'LLVM version 19'",)),
    (with_compiler("", 1), "bishengir-compile", UNTESTED, ("--version says 'nothing'",)),
    (with_compiler(COMPILER, 1), "bishengir-compile", UNTESTED, ("--version says 'bishengir-compile 1.1.0",)),
    (with_compiler("cannot load libLLVM.so\n", 127), "bishengir-compile", WRONG, ("does not run", "libLLVM.so")),
    (with_file(FW, FIRMWARE), "driver, firmware", FINE, ()),
    (with_file(FW, "Version=6.4.12.1.241\n"), "driver, firmware", FINE, ()),
    (with_file(FW, "Version=7.7.99\n"), "driver, firmware", FINE, ()),
    (with_file(FW, "Version=6.4.0\n"), "driver, firmware", FINE, ()),
    (with_file(FW, "Version=7.8.0.1.2\n"), "driver, firmware", WRONG, ("firmware [6.4.0,6.4.99],[7.0.0,7.7.99]",)),
    (with_file(FW, "Version=6.3.0\n"), "driver, firmware", WRONG, ("install the pair of one release",)),
    (with_file(FW, ""), "driver, firmware", UNTESTED, ("not found", "npu-smi info")),
    (with_versions(torch="2.9.0", torch_npu="2.9.0"), PAIR, FINE, ()),
    (with_versions(torch_npu="2.7.1.post99"), PAIR, UNTESTED, ("not in diyfa's table", "torch_npu==2.7.1.post2 is")),
    (with_versions(torch_npu="2.7.1.post2+git1a2b3c4"), PAIR, FINE, ()),
    (with_versions(torch="2.7.0"), PAIR, WRONG, ("they must be of one release: torch==2.7.1",)),
    (with_versions(torch="2.8.0"), PAIR, WRONG, ("one release: torch==2.7.1, or torch_npu==2.8.0.post2",)),
    (with_versions(torch="2.5.1", torch_npu="2.5.1"), PAIR, UNTESTED, ("not in diyfa's table",)),
    (with_versions(torch="2.9.1", torch_npu=""), PAIR, WRONG, ("no torch_npu is documented for this torch",)),
    (with_versions(torch_npu=""), PAIR, WRONG, ("pip install --no-deps torch_npu==2.7.1.post2",)),
    (lambda machine: replace(machine, triton=lambda: "is not triton-ascend: pip …"), ASCEND, WRONG, ("pip …",)),
    (with_versions(triton="3.3.1"), ASCEND, UNTESTED, ("3.2.0, and triton 3.3.1", "works, but")),
    (with_versions(triton_ascend="3.2.1", triton="3.2.0"), ASCEND, FINE, ("3.2.1, and triton 3.2.0",)),
    (with_versions(triton_ascend="3.2.2", triton="3.5.0"), ASCEND, FINE, ("3.2.2, and triton 3.5.0",)),
    (with_versions(triton_ascend="3.6.0"), ASCEND, UNTESTED, ("knows 3.2.0, 3.2.1 and 3.2.2", "tested with 3.2.0")),
    (with_versions(triton_ascend="3.6.0", triton="3.6.0"), ASCEND, UNTESTED, ("3.6.0, and triton 3.6.0: diyfa knows",)),
    (with_versions(triton_ascend="3.2.2rc3", triton="3.2.0"), ASCEND, UNTESTED, ("3.2.2rc3, and triton 3.2.0: diyfa",)),
    (with_versions(triton_ascend="3.2.0+git1234", triton="3.2.0"), ASCEND, UNTESTED, ("works, but",)),
    (with_versions(triton_ascend="unknown"), ASCEND, UNTESTED, ("unknown: diyfa knows",)),
    (with_chip(cube_cores=18, vector_cores=36), "chip", UNTESTED, ("18 cube and 36", "expected 20 and 40")),
    (with_chip(vector_cores=38), "chip", UNTESTED, ("20 cube and 38",)),
    (with_chip(name="Ascend310P3"), "chip", WRONG, ("Ascend310P3", "A2 (910B)")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "part", "verdict", "words"), JUDGED)
def test_a_part_that_differs(healthy: Machine, change: Change, part: str, verdict: str, words: tuple[str, ...]) -> None:
    expect(change(healthy), part, verdict, *words)


def test_a_python_without_wheels(healthy: Machine) -> None:
    expect(replace(healthy, python=(3, 10)), "Python", FINE)
    expect(replace(healthy, python=(3, 13)), "Python", UNTESTED, "3.2.0 has wheels for Python 3.10, 3.11")
    expect(replace(healthy, python=(3, 12), versions={**VERSIONS, "triton-ascend": "3.2.2"}), "Python", FINE)
    without = {name: version for name, version in VERSIONS.items() if name != "triton-ascend"}
    expect(replace(healthy, python=(3, 13), versions=without), "Python", UNTESTED, "3.2.1 and 3.2.2 have wheels for it")
    expect(replace(healthy, python=(3, 14), versions=without), "Python", WRONG, "has no wheel")
    for version in ("3.2.2rc3", "3.2.2+git1234", "3.6.0"):  # of such a release the last known one before it tells
        machine = replace(healthy, python=(3, 12), versions={**VERSIONS, "triton-ascend": version})
        expect(machine, "Python", FINE)
        expect(machine, "CANN", WRONG, "triton-ascend 3.2.2 is made for CANN 9.0.0")
        expect(replace(machine, python=(3, 14)), "Python", UNTESTED, "triton-ascend 3.2.2 has wheels for Python 3.10, ")


# The stacks that people have in autumn 2026: CANN, torch, torch_npu, triton-ascend, Python; verdicts of the parts that
# these decide (others are fine), and words of the remedy.
PLANTED: dict[str, tuple[tuple[str, str, str, str, tuple[int, int]], dict[str, tuple[str, str]]]] = {
    "vllm-ascend": (("9.1.0", "2.10.0", "2.10.0.post4", "3.2.2", (3, 12)), {}),
    "CANN 9.1 before its patch": (
        ("9.1.1", "2.10.0", "2.10.0.post4", "3.2.2", (3, 11)),
        {"CANN": (UNTESTED, "documented for CANN 9.1.0; for this one it is torch_npu 2.10.0.post6")},
    ),
    "CANN 9.2, torch 2.10": (
        ("9.2.0", "2.10.0", "2.10.0.post7", "3.6.0", (3, 12)),
        {"triton-ascend": (UNTESTED, "diyfa knows 3.2.0, 3.2.1 and 3.2.2")},
    ),
    "CANN 9.2, torch 2.11": (("9.2.0", "2.11.0", "2.11.0.post3", "3.2.2", (3, 13)), {}),
    "torch 2.14": (
        ("9.2.0", "2.14.0", "2.14.0", "3.2.2", (3, 11)),
        {"torch, torch_npu": (WRONG, "as C++17, torch 2.14.0 needs C++20: take torch 2.13")},
    ),
    "torch 2.14 with the tested compiler": (
        ("8.5.0", "2.14.0", "2.14.0", "3.2.0", (3, 11)),
        {
            "torch, torch_npu": (WRONG, "triton-ascend 3.2.0 builds launchers as C++17"),
            "CANN": (UNTESTED, "torch_npu 2.14.0 is documented for CANN 9.2.0"),
        },
    ),
    "a CANN too old for it": (
        ("8.5.0", "2.9.0", "2.9.0", "3.2.2", (3, 11)),
        {"CANN": (WRONG, "triton-ascend 3.2.2 is made for CANN 9.0.0")},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_stack(healthy: Machine, name: str) -> None:
    (cann, torch_version, torch_npu, triton_ascend, python), expected = PLANTED[name]
    plant_cann(healthy.root / "usr/local/Ascend", cann)
    versions = {"torch": torch_version, "torch_npu": torch_npu, "triton-ascend": triton_ascend}
    if triton_ascend in ("3.2.1", "3.2.2"):
        versions["triton"] = "3.2.0"  # it depends on it
    machine = replace(healthy, versions=versions, python=python)
    verdicts = {finding.part: finding for finding in findings(machine)}
    judged_otherwise = {part: finding.verdict for part, finding in verdicts.items() if finding.verdict != FINE}
    assert judged_otherwise == {part: verdict for part, (verdict, _) in expected.items()}
    assert all(words in verdicts[part].remedy for part, (_, words) in expected.items())


@pytest.mark.parametrize(("cann", "torch_version", "post"), [("9.0.0", "2.11.0", "3"), ("10.0.0", "2.10.0", "7")])
def test_no_torch_npu_is_documented_for_this_cann(healthy: Machine, cann: str, torch_version: str, post: str) -> None:
    """Then none is named for it."""
    plant_cann(healthy.root / "usr/local/Ascend", cann)
    torch_npu = f"{torch_version}.post{post}"
    machine = replace(healthy, versions={**VERSIONS, "torch": torch_version, "torch_npu": torch_npu})
    assert judged(machine, "CANN").remedy == f"torch_npu {torch_npu} is documented for CANN 9.2.0"


def test_a_slim_image(healthy: Machine) -> None:
    """Without a C++ compiler or Python's headers the first launch fails."""
    expect(healthy, "C++, Python.h", FINE, "usr/bin/g++, found")
    (healthy.include / "Python.h").unlink()
    expect(healthy, "C++, Python.h", WRONG, "g++, not found", "install Python.h (apt install python3-dev")
    bare = replace(healthy, environ={**healthy.environ, "PATH": str(healthy.root / "empty")})
    expect(bare, "C++, Python.h", WRONG, "not found, not found", "a C++ compiler (apt install g++) and Python.h")
    named = replace(healthy, environ={**healthy.environ, "CC": "clang-17"})
    expect(named, "C++, Python.h", WRONG, "clang-17, ", "the C++ compiler that CC names, or unset CC")
    write(healthy.include / "Python.h", "")
    for words in ("", "ccache g++"):  # triton-ascend starts CC as one program, if it is set at all
        expect(replace(healthy, environ={**healthy.environ, "CC": words}), "C++, Python.h", WRONG, "unset CC")
    (healthy.include / "Python.h").unlink()
    write(healthy.root / "usr/bin/clang++", "#!/bin/sh\n", 0o755)
    expect(healthy, "C++, Python.h", WRONG, "usr/bin/clang++, not found")


def test_the_compiler_inside_triton_ascend_goes_first(healthy: Machine, tmp_path: Path) -> None:
    """From 3.2.1 on triton-ascend calls its own, whatever PATH says."""
    plant_compiler(tmp_path / "wheel", COMPILER.replace("1.1.0", "1.3.0"))
    machine = replace(healthy, bundled=tmp_path / "wheel/bin/bishengir-compile")
    expect(machine, "bishengir-compile", UNTESTED, "1.3.0", str(tmp_path / "wheel"))


INFO = """
import sys
from diyfa.cli import main
for arguments in ([], ["--json"]):
    sys.argv = ["diyfa", "info", *arguments]
    try:
        main()
    except SystemExit as done:
        assert not done.code
    print("=====")
"""


def test_info(tmp_path: Path) -> None:
    """The command in a shell that has sourced a planted CANN: as lines, and as JSON."""
    pytest.importorskip("typer")
    home = plant_cann(tmp_path, "8.5.0")
    for folder in ("opp", "runtime", "compiler"):  # torch_npu asks for them
        (home / folder).mkdir()
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    sourced = {"ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp"), "PATH": path}  # by set_env.sh
    printed, document, _ = run_python(INFO, COLUMNS="200", **sourced).split("=====")
    for part in (*PARTS, "triton-ascend"):
        assert re.search(rf"^(fine|untested|wrong) +{re.escape(part)}  ", printed, re.M), (part, printed)
    assert re.search(r"^fine +bishengir-compile  +1\.1\.0 of 2026-04-30 in ", printed, re.M)
    report: dict[str, Any] = json.loads(document[document.index("{") :])
    found = {finding["part"]: finding for finding in report["ascend"]}
    assert list(found) == [*PARTS, "triton-ascend"]
    assert found["CANN"]["found"].startswith("8.5.0 in ") and report["cann"] == "8.5.0"
    assert all(finding["verdict"] == FINE or finding["remedy"] for finding in report["ascend"])
    if hasattr(torch, "npu") and torch.npu.is_available():  # on a chip, or on the host shim
        assert found["chip"]["found"].startswith(torch.npu.get_device_name(0))
        launches = launcher_problem(torch.__version__, installed_version("triton-ascend") or "") is None
        assert found["torch, torch_npu"]["verdict"] == (FINE if launches else WRONG)
        assert found["triton-ascend"]["verdict"] == FINE
