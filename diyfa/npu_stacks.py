"""Releases of CANN, PyTorch, torch_npu and triton-ascend that belong together on an Ascend machine, as plain data.

The pairs are those of torch_npu's compatibility table (COMPATIBILITY.md of its repository, read on 2026-11-24). The
machine has CANN, torch and torch_npu. diyfa's extra `npu` adds triton-ascend and never chooses the others. This module
imports nothing of diyfa and no kernel language.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass

# Later releases depend on the package `triton` and overwrite its files; pip undoes one of both when it next installs.
TRITON_ASCEND = "3.2.0"
TRITON_ASCEND_CANN = "8.5.0"  # the oldest CANN that its installation guide names
TRITON_ASCEND_PYTHON = ((3, 10), (3, 11))  # versions with wheels, among those that diyfa supports
# COMPILERS: versions, as `bishengir-compile --version` prints them, that compile every shipped tile; 1.1.0 has the date
# of CANN 9.0.0. CANN_8_5_COMPILER (ascendnpu-ir 1.0.0) compiles the conservative tiles and refuses most others.
COMPILERS = ("1.1.0", "1.2.0")
CANN_8_5_COMPILER = "0.1.0"
TRITON_REMEDY = (
    f"pip uninstall -y triton triton-ascend && pip install --no-deps --no-cache-dir triton-ascend=={TRITON_ASCEND}, "
    "after everything else, in an environment without NVIDIA's Triton"
)


@dataclass(frozen=True)
class Stack:
    """One documented combination."""

    cann: str  # release; "": none is documented yet
    torch: str
    torch_npu: str


STACKS = (
    Stack("8.5.0", "2.7.1", "2.7.1.post2"),
    Stack("8.5.0", "2.8.0", "2.8.0.post2"),
    Stack("8.5.0", "2.9.0", "2.9.0"),
    Stack("9.0.0", "2.7.1", "2.7.1.post4"),
    Stack("9.0.0", "2.8.0", "2.8.0.post4"),
    Stack("9.0.0", "2.9.0", "2.9.0.post2"),
    Stack("9.0.0", "2.10.0", "2.10.0"),
    Stack("9.1.0", "2.7.1", "2.7.1.post8"),
    Stack("9.1.0", "2.9.0", "2.9.0.post6"),
    Stack("9.1.0", "2.10.0", "2.10.0.post4"),
    Stack("9.1.0", "2.11.0", "2.11.0"),
    Stack("9.1.0", "2.12.0", "2.12.0"),
    Stack("", "2.13.0", "2.13.0"),
)


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
    exact = [stack for stack in candidates if cann and release(stack.cann) == release(cann)]
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
        return f"the installed package `triton` does not load ({type(error).__name__}: {error}): {TRITON_REMEDY}"
    if not backends:
        return f"triton-ascend is not installed: pip install triton-ascend=={TRITON_ASCEND}"
    if "ascend" not in backends:
        targets = ", ".join(backends)
        return f"the installed package `triton` is not triton-ascend (it compiles for {targets}): {TRITON_REMEDY}"
    return None
