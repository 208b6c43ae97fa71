"""Releases of CANN, PyTorch, torch_npu and triton-ascend that belong together on an Ascend machine, as plain data.

Sources of the pairs: torch_npu's compatibility table (COMPATIBILITY.md of its repository, read on 2026-11-24), and the
release notes of TorchNPU 26.1.1 and 26.2.0 (read on 2026-11-29). The notes also name releases of triton-ascend: 3.2.2
for 26.1, and for CANN 9.2.0 with torch 2.7.1; 3.6.0 for CANN 9.2.0 with torch 2.10.0 and 2.13.0; none for other pairs.

diyfa installs none of these packages: its extra `npu` takes those that the machine has. This module imports nothing of
diyfa and no kernel language.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TritonAscend:
    """Requirements of a release of triton-ascend. `python`: versions with wheels, among those that diyfa supports."""

    cann: str  # the oldest CANN that its installation guide names
    python: tuple[tuple[int, int], ...]
    needs_triton: bool  # it depends on the package `triton` and overwrites its files, so pip lists both


TRITON_ASCEND = "3.2.0"  # tests and compile gate run with it; no index but Ascend's own mirror has a later one
_FROM_3_2_1 = TritonAscend("9.0.0", ((3, 10), (3, 11), (3, 12), (3, 13)), True)
TRITON_ASCENDS: dict[str, TritonAscend] = {
    TRITON_ASCEND: TritonAscend("8.5.0", ((3, 10), (3, 11)), False),
    "3.2.1": _FROM_3_2_1,
    "3.2.2": _FROM_3_2_1,
}
# Packages without which `import triton` fails. triton-ascend 3.2.0 does not declare them as dependencies, so the extra
# `npu` does, together with others that CANN's Python imports.
IMPORTED = ("pybind11", "numpy")
CXX20_TORCH = (2, 14)  # its ATen needs C++20, and triton-ascend 3.2.x builds the launcher of a kernel as C++17
# Versions of the compiler, as `bishengir-compile --version` prints them.
# COMPILERS: they compile every shipped tile. 1.1.0 was built when CANN 9.0.0 was.
# CANN_8_5_COMPILER: it is ascendnpu-ir 1.0.0, compiles the conservative tiles and refuses most others.
COMPILERS = ("1.1.0", "1.2.0")
CANN_8_5_COMPILER = "0.1.0"
GET_TRITON_ASCEND = (
    f"pip install --no-deps triton-ascend=={TRITON_ASCEND} (Python 3.12 and 3.13: 3.2.2 from Ascend's mirror), then "
    "pip install 'diyfa[npu]'"
)


def triton_remedy() -> str:
    """Return how to put triton-ascend, in the release that pip lists or else the tested one, over another Triton."""
    version = installed_version("triton-ascend") or TRITON_ASCEND
    return (
        f"pip uninstall -y triton triton-ascend && pip install --no-deps --no-cache-dir triton-ascend=={version}, "
        "after everything else, in an environment without NVIDIA's Triton"
    )


@dataclass(frozen=True)
class Stack:
    """One documented combination."""

    cann: str  # release: "9.1" is every 9.1.x
    torch: str
    torch_npu: str

    def has_cann(self, version: str) -> bool:
        """Return whether it is documented for this version of CANN."""
        numbers = release(self.cann)
        return release(version)[: len(numbers)] == numbers


# CANN -> {torch: torch_npu}. "9.1.0" is that release, "9.1" any of 9.1.x.
PAIRS = {
    "8.5.0": {"2.7.1": "2.7.1.post2", "2.8.0": "2.8.0.post2", "2.9.0": "2.9.0"},
    "9.0.0": {"2.7.1": "2.7.1.post4", "2.8.0": "2.8.0.post4", "2.9.0": "2.9.0.post2", "2.10.0": "2.10.0"},
    "9.1.0": {
        "2.7.1": "2.7.1.post8", "2.9.0": "2.9.0.post6", "2.10.0": "2.10.0.post4", "2.11.0": "2.11.0",
        "2.12.0": "2.12.0",
    },
    "9.1": {
        "2.7.1": "2.7.1.post10", "2.9.0": "2.9.0.post8", "2.10.0": "2.10.0.post6", "2.11.0": "2.11.0.post2",
        "2.12.0": "2.12.0.post2",
    },
    "9.2.0": {
        "2.7.1": "2.7.1.post11", "2.9.0": "2.9.0.post9", "2.10.0": "2.10.0.post7", "2.11.0": "2.11.0.post3",
        "2.12.0": "2.12.0.post3", "2.13.0": "2.13.0", "2.14.0": "2.14.0",
    },
}  # fmt: skip
STACKS = tuple(Stack(cann, *pair) for cann, pairs in PAIRS.items() for pair in pairs.items())


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "8.5.0.alpha001" -> (8, 5, 0), "8.3.RC1" -> (8, 3),
    "2.7.1.post2+cpu" -> (2, 7, 1)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading.group().split(".")) if leading else ()


def documented_stack(torch_npu: str) -> Stack | None:
    """Return the documented combination with this release of torch_npu, or None."""
    return next((stack for stack in STACKS if stack.torch_npu == torch_npu.split("+")[0]), None)


def torch_npu_for(torch: str, cann: str) -> str | None:
    """Return the release of torch_npu that is documented for a torch and a CANN.

    If `cann` is empty or in no pair with this torch, return the oldest release for the torch. Return None if the torch
    is in no pair.
    """
    candidates = [stack for stack in STACKS if release(stack.torch) == release(torch)]
    exact = [stack for stack in candidates if stack.has_cann(cann)]
    return next((stack.torch_npu for stack in exact or candidates), None)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None if no package has that name."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def triton_backends() -> tuple[str, ...]:
    """Return the names of the backends of the installed package `triton`: ("ascend",) for triton-ascend.

    Return () if `triton` is not installed. This imports `triton` and raises whatever a broken package raises.
    """
    if importlib.util.find_spec("triton") is None:
        return ()
    return tuple(sorted(importlib.import_module("triton.backends").backends))


def triton_problem() -> str | None:
    """Return why the installed package `triton` cannot compile for an NPU, with a remedy, or None if it can.

    triton-ascend and NVIDIA's Triton both install a package called `triton`. The one installed last wins, and pip still
    lists the other as installed.
    """
    try:
        backends = triton_backends()
    except Exception as error:  # a package mixed from both may raise anything
        if isinstance(error, ImportError) and error.name in IMPORTED:
            return f"triton-ascend imports {error.name} and does not declare it: pip install 'diyfa[npu]'"
        return f"the installed package `triton` does not load ({type(error).__name__}: {error}): {triton_remedy()}"
    if not backends:
        return f"triton-ascend is not installed: {GET_TRITON_ASCEND}"
    if "ascend" not in backends:
        targets = ", ".join(backends)
        return f"the installed package `triton` is not triton-ascend (it compiles for {targets}): {triton_remedy()}"
    return None


def launcher_problem(torch: str, triton_ascend: str) -> str | None:
    """Return why these versions cannot launch a kernel on a device, with a remedy, or None."""
    if release(torch)[:2] < CXX20_TORCH or release(triton_ascend)[:2] != (3, 2):
        return None
    return (
        f"triton-ascend {triton_ascend} builds launchers as C++17, torch {torch} needs C++20: take torch 2.13 or older"
    )


def bundled_compiler() -> Path | None:
    """Return the `bishengir-compile` inside triton-ascend, or None. From 3.2.1 on it goes before the one in PATH."""
    spec = importlib.util.find_spec("triton")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    programs = [Path(folder, "backends/ascend/bishengir/bin/bishengir-compile") for folder in folders]
    return next((program for program in programs if program.is_file()), None)


def cxx_compiler(environ: Mapping[str, str], which: Callable[[str], str | None]) -> str | None:
    """Return the C++ compiler with which triton-ascend builds launchers, or None: CC, else clang++, else g++."""
    return environ["CC"] if "CC" in environ else which("clang++") or which("g++")
