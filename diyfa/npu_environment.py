"""A verdict on each component of an Ascend machine: fine, untested or wrong.

Fine: diyfa's tests use this version, the vendor documents the combination, or diyfa was written for it after a reading
of its source (triton-ascend 3.2.1 and 3.2.2). Untested: nothing is known against it. Wrong: it cannot work, and
`remedy` says what to do. Nothing of diyfa has run on a chip yet, so "fine" promises no more than that.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diyfa.arch import npu_spec
from diyfa.device import NPUCapabilities, NPUStatus, detect_npu, npu_status
from diyfa.npu_stacks import (
    CANN_8_5_COMPILER,
    COMPILERS,
    TRITON_ASCEND,
    TRITON_ASCENDS,
    TritonAscend,
    bundled_compiler,
    cxx_compiler,
    documented_stack,
    installed_version,
    launcher_problem,
    release,
    torch_npu_for,
    triton_problem,
)
from diyfa.tuning import home_folder

FINE, UNTESTED, WRONG = "fine", "untested", "wrong"
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# (CANN, set_env.sh) below the folder "Ascend", since 8.5.0 and before.
CANN_FOLDERS = (("cann", "cann/set_env.sh"), ("ascend-toolkit/latest", "ascend-toolkit/set_env.sh"))
NOT_STARTED = (126, 127)  # exit statuses of a program that cannot be executed, or whose libraries are missing
COMPILER_SECONDS = 30  # time limit of `bishengir-compile --version`, which reads no input


@dataclass(frozen=True)
class Finding:
    """The verdict on one component of the machine."""

    part: str
    found: str  # version and folder, or "not found"
    verdict: str  # FINE, UNTESTED or WRONG
    remedy: str  # why it is not fine, and what to do; "" if it is


Judgement = tuple[str, str, str]  # the fields of a Finding behind `part`


def _versions() -> dict[str, str]:
    names = ("torch", "torch_npu", "triton", "triton-ascend")
    return {name: version for name in names if (version := installed_version(name)) is not None}


@dataclass(frozen=True)
class Machine:
    """The facts that are judged. Tests give another root, environment and devices."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path | None = field(default_factory=home_folder)
    python: tuple[int, int] = sys.version_info[:2]
    versions: Mapping[str, str] = field(default_factory=_versions)  # installed distributions
    triton: Callable[[], str | None] = triton_problem
    status: NPUStatus = field(default_factory=npu_status)
    chip: NPUCapabilities | None = None
    bundled: Path | None = field(default_factory=bundled_compiler)  # the compiler inside triton-ascend
    include: Path = field(default_factory=lambda: Path(sysconfig.get_paths()["include"]))  # the folder of Python.h

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(chip=detect_npu() if npu_status().available else None)

    @property
    def known_triton_ascend(self) -> str:
        """The known release whose needs hold for the installed triton-ascend: the last one that is not later than it.

        It is the tested one if there is none."""
        installed = release(self.versions.get("triton-ascend", ""))
        return next((name for name in reversed(TRITON_ASCENDS) if release(name) <= installed), TRITON_ASCEND)

    @property
    def triton_ascend(self) -> TritonAscend:
        """The requirements of `known_triton_ascend`."""
        return TRITON_ASCENDS[self.known_triton_ascend]

    @property
    def folders(self) -> list[Path]:
        """The default folders of CANN: that of root, and that of other users."""
        return [self.root / "usr/local/Ascend", *([self.home / "Ascend"] if self.home else [])]


def _cann_in(folder: Path) -> str | None:
    """Return the version of the CANN in a folder such as /usr/local/Ascend/cann, or None."""
    if not os.path.isdir(folder):  # pathlib would raise for a folder without permission
        return None
    versions = (_fields(info).get("version") for info in sorted(folder.glob("*/ascend_toolkit_install.info")))
    return next(filter(None, versions), None)


def _sourced(machine: Machine) -> Path | None:
    """Return the folder of the CANN that the environment points to, or None."""
    return next((Path(machine.environ[name]) for name in CANN_VARIABLES if machine.environ.get(name)), None)


def cann_version(machine: Machine) -> str | None:
    """Return the version of the CANN that the environment points to, or None."""
    home = _sourced(machine)
    return None if home is None else _cann_in(home) or f"unknown version in {home}"


def _scripts(machine: Machine) -> list[Path]:
    scripts = [folder / script for folder in machine.folders for _, script in CANN_FOLDERS]
    return [script for script in scripts if os.path.exists(script)]  # Path.exists raises without permission


def _installed(machine: Machine) -> list[str]:
    """Return "VERSION in FOLDER" for each CANN in the default folders."""
    folders = [folder / name for folder in machine.folders for name, _ in CANN_FOLDERS]
    return [f"{version} in {name}" for name in folders if (version := _cann_in(name))]


def _cann(machine: Machine) -> Judgement:
    home, needs = _sourced(machine), machine.triton_ascend.cann
    if home is None:
        if installed := _installed(machine):
            return "; ".join(installed), WRONG, "this shell does not use it: source set_env.sh (next line)"
        return "not found", WRONG, f"install CANN {needs} or later, toolkit and operators of your chip"
    version = _cann_in(home)
    if version is None:
        return f"unknown version in {home}", UNTESTED, "there is no ascend_toolkit_install.info in it"
    text, torch_npu = f"{version} in {home}", machine.versions.get("torch_npu", "")
    if not release(version):
        return text, UNTESTED, "its ascend_toolkit_install.info has no number of a release"
    if release(version) < release(needs):
        made_for = f"triton-ascend {machine.known_triton_ascend} is made for CANN {needs}"
        return text, WRONG, f"{made_for}: install that or a later one"
    stack = documented_stack(torch_npu)
    if stack is None:
        return text, UNTESTED, f"no CANN is documented for torch_npu {torch_npu or '(not installed)'}"
    if stack.has_cann(version):
        return text, FINE, ""
    remedy = f"torch_npu {torch_npu} is documented for CANN {stack.cann}"
    better = documented_stack(torch_npu_for(stack.torch, version) or "")
    if better and better.has_cann(version):
        remedy += f"; for this one it is torch_npu {better.torch_npu}"
    return text, UNTESTED, remedy


def _set_env(machine: Machine) -> Judgement:
    scripts, home = _scripts(machine), _sourced(machine)
    source = f"run `source {scripts[0]}`, in every shell" if scripts else ""
    if home is not None:
        variable = next(name for name in CANN_VARIABLES if machine.environ.get(name))
        if os.path.isdir(home):
            return f"{variable}={home}", FINE, ""
        return f"{variable}={home}", WRONG, f"there is no such folder, or it is closed: {source or 'install CANN'}"
    if source:
        return ", ".join(map(str, scripts)), WRONG, source
    looked = " or ".join(str(machine.folders[0] / script) for _, script in CANN_FOLDERS)
    return "not found", WRONG, f"looked for {looked} (before CANN 8.5.0): install CANN, then source it"


def _compiler(machine: Machine) -> Judgement:
    compiler = machine.bundled or shutil.which("bishengir-compile", path=machine.environ.get("PATH", ""))
    if compiler is None:
        return "not found", WRONG, "it comes with CANN: source its set_env.sh, which puts it on PATH"
    path = str(compiler)
    try:
        command = [path, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return path, WRONG, f"it does not run: {error}"
    printed = done.stdout + done.stderr
    version = re.search(r"bishengir-compile\s+(?:version\s+)?(\d\S*)", printed)
    date = re.search(r"\d{4}-\d\d-\d\d", printed)
    answer = next(iter((done.stderr or done.stdout).strip().splitlines()), "nothing")
    if done.returncode < 0 or done.returncode in NOT_STARTED:
        status = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return path, WRONG, f"it does not run: {status}; --version says {answer!r}"
    if done.returncode or version is None:
        return path, UNTESTED, f"--version says {answer!r}"
    text = f"{version[1]} of {date[0]} in {path}" if date else f"{version[1]} in {path}"
    if version[1] == CANN_8_5_COMPILER:
        remedy = "it refuses most tiles; slower ones take their place, with a warning: `diyfa tune` finds the fastest"
        return text, UNTESTED, remedy
    if version[1] not in COMPILERS:
        remedy = f"every tile is proven with {' and '.join(COMPILERS)}: let `diyfa tune` find those that work with it"
        return text, UNTESTED, remedy
    return text, FINE, ""


def _fields(path: Path) -> dict[str, str]:
    """Return the NAME=VALUE lines of a file, or {} if it does not exist or cannot be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines) if value}


def _in_a_range(version: str, ranges: str) -> bool:
    """Return whether a version lies in one of the ranges, such as "[7.0.0,7.2.99],[8.0.0,8.9.9]".

    Only as many numbers of the version are compared as the end of a range has.
    """
    number = release(version)
    ends = [(release(low), release(high)) for low, high in re.findall(r"\[([\d.]+),\s*([\d.]+)\]", ranges)]
    return any(low <= number[: len(low)] and number[: len(high)] <= high for low, high in ends)


def _driver(machine: Machine) -> Judgement:
    install_info = _fields(machine.root / "etc/ascend_install.info")
    folder = machine.root / install_info.get("Driver_Install_Path_Param", "/usr/local/Ascend").lstrip("/")
    driver, firmware = (_fields(folder / name / "version.info") for name in ("driver", "firmware"))
    if "Version" not in driver:
        verdict = UNTESTED if machine.status.available else WRONG
        text = f"no {folder}/driver/version.info"
        return text, verdict, "install the driver, or mount that folder into the container"
    text = f"{driver.get('package_version', driver['Version'])}, {firmware.get('Version', 'not found')}"
    if "Version" not in firmware:
        remedy = f"no {folder}/firmware/version.info (usual in a container): `npu-smi info` on the host knows it"
        return text, UNTESTED, remedy
    ranges = driver.get("compatible_version_fw", "")
    if not ranges:
        return text, UNTESTED, "the driver names no firmware"
    if not _in_a_range(firmware["Version"], ranges):
        return text, WRONG, f"this driver takes firmware {ranges}: install the pair of one release"
    return text, FINE, ""


def _chip(machine: Machine) -> Judgement:
    if machine.chip is None:
        return "not found", WRONG, f"{machine.status.problem}; {machine.status.remedy}"
    name, cores = machine.chip.name, (machine.chip.cube_cores, machine.chip.vector_cores)
    text, spec = f"{name}, {cores[0]} cube and {cores[1]} vector cores", npu_spec(name)
    if spec is None:
        return text, WRONG, "diyfa has kernels for the A2 (910B), A3 (910_93) and A5 (950) families"
    if cores != (spec.cube_cores, spec.vector_cores):
        remedy = f"expected {spec.cube_cores} and {spec.vector_cores}; launches take what the driver tells"
        return text, UNTESTED, remedy
    return text, FINE, ""


def _torch(machine: Machine) -> Judgement:
    torch, torch_npu = machine.versions.get("torch"), machine.versions.get("torch_npu")
    text = f"torch {torch}, torch_npu {torch_npu or 'not found'}"
    documented = torch_npu_for(torch or "", cann_version(machine) or "")
    if torch_npu is None:
        install = f"pip install --no-deps torch_npu=={documented}"
        return text, WRONG, install if documented else "no torch_npu is documented for this torch"
    if problem := launcher_problem(torch or "", machine.versions.get("triton-ascend", "")):
        return text, WRONG, problem
    if release(torch_npu) != release(torch or ""):
        remedy = f"they must be of one release: torch=={'.'.join(map(str, release(torch_npu)))}"
        return text, WRONG, remedy + (f", or torch_npu=={documented}" if documented else "")
    if documented_stack(torch_npu) is None:
        remedy = f"; torch_npu=={documented} is, for this torch" if documented else ""
        return text, UNTESTED, f"not in diyfa's table of pairs{remedy}"
    return text, FINE, ""


def _triton(machine: Machine) -> Judgement:
    version, plain_triton = machine.versions.get("triton-ascend"), machine.versions.get("triton")
    text = f"{version or 'not found'}" + (f", and triton {plain_triton}" if plain_triton else "")
    if problem := machine.triton():
        return text, WRONG, problem
    if plain_triton and not machine.triton_ascend.needs_triton:
        remedy = f"works, but pip lists triton {plain_triton} too and may put it in its place: `pip uninstall triton` "
        return text, UNTESTED, f"{remedy}removes triton-ascend's files with it, so reinstall that after it"
    if version not in TRITON_ASCENDS:
        *names, last = TRITON_ASCENDS
        return text, UNTESTED, f"diyfa knows {', '.join(names)} and {last}, and is tested with {TRITON_ASCEND}"
    return text, FINE, ""


def _cxx(machine: Machine) -> Judgement:
    path, has_header = machine.environ.get("PATH", ""), os.path.exists(machine.include / "Python.h")
    compiler = cxx_compiler(machine.environ, lambda name: shutil.which(name, path=path))
    missing = []
    if not compiler or not shutil.which(compiler, path=path):
        named = "the C++ compiler that CC names, or unset CC"
        missing.append(named if "CC" in machine.environ else "a C++ compiler (apt install g++)")
    if not has_header:
        missing.append("Python.h (apt install python3-dev, or a Python with headers)")
    text = f"{compiler or 'not found'}, {'found' if has_header else 'not found'}"
    if missing:
        return text, WRONG, f"the first launch compiles C++, so install {' and '.join(missing)}"
    return text, FINE, ""


def _python(machine: Machine) -> Judgement:
    text = f"{machine.python[0]}.{machine.python[1]}, {platform.machine()}"
    if machine.python in machine.triton_ascend.python:
        return text, FINE, ""
    if "triton-ascend" in machine.versions:
        supported = ", ".join(f"{major}.{minor}" for major, minor in machine.triton_ascend.python)
        return text, UNTESTED, f"triton-ascend {machine.known_triton_ascend} has wheels for Python {supported}"
    later = [name for name, needs in TRITON_ASCENDS.items() if machine.python in needs.python]
    if not later:
        return text, WRONG, "triton-ascend has no wheel"
    return text, UNTESTED, f"of triton-ascend only {' and '.join(later)} have wheels for it"


CHECKS = {
    "chip": _chip, "driver, firmware": _driver, "CANN": _cann, "set_env.sh": _set_env, "bishengir-compile": _compiler,
    "C++, Python.h": _cxx,  # the first launch of a kernel compiles a launcher in C++, which includes Python.h
    "Python": _python, "torch, torch_npu": _torch, "triton-ascend": _triton,
}  # fmt: skip


def is_ascend(machine: Machine) -> bool:
    """Return whether the machine has any component of an Ascend machine."""
    return (
        bool({"torch_npu", "triton-ascend"} & set(machine.versions))
        or _sourced(machine) is not None
        or bool(_scripts(machine))
        or (machine.root / "dev/davinci_manager").exists()
    )


def findings(machine: Machine) -> list[Finding]:
    """Return the verdict on each component, from the chip up, or [] if this is no Ascend machine."""
    return [Finding(part, *check(machine)) for part, check in CHECKS.items()] if is_ascend(machine) else []
