"""Which releases of CANN, PyTorch, torch_npu and triton-ascend belong together on an Ascend machine: plain data.

The pairs are those of torch_npu's own compatibility table (COMPATIBILITY.md of its repository, read on 2026-11-24). A
machine brings CANN, torch and torch_npu; diyfa's extra `npu` adds triton-ascend and never chooses the others. This
module imports nothing of diyfa and no kernel language.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass

# Later releases depend on the package `triton` and overwrite it; pip then undoes either at the next installation.
TRITON_ASCEND = "3.2.0"
TRITON_ASCEND_CANN = "8.5.0"  # the oldest that its installation guide names for it
TRITON_ASCEND_PYTHON = ((3, 10), (3, 11))  # of those that diyfa runs on; there are no wheels for later ones
# What `bishengir-compile --version` says of the releases that every shipped tile is compiled with (1.1.0 is of CANN
# 9.0.0's date), and of the one that compiles the conservative tiles and refuses most others: ascendnpu-ir 1.0.0.
COMPILERS = ("1.1.0", "1.2.0")
COMPILER_OF_CANN_8_5 = "0.1.0"
TRITON_REMEDY = (
    f"pip uninstall -y triton triton-ascend && pip install --no-deps --no-cache-dir triton-ascend=={TRITON_ASCEND}, "
    "after everything else, in an environment without NVIDIA's Triton"
)


@dataclass(frozen=True)
class Stack:
    """One documented combination."""

    cann: str  # release; empty where none is documented yet
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
    """The leading numbers of a version: (8, 5, 0) of "8.5.0.alpha001", (8, 3) of "8.3.RC1", (2, 7, 1) of
    "2.7.1.post2+cpu"."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading.group().split(".")) if leading else ()


def stack_of(torch_npu: str) -> Stack | None:
    """The documented combination with this release of torch_npu, or None."""
    return next((stack for stack in STACKS if stack.torch_npu == torch_npu.split("+")[0]), None)


def torch_npu_for(torch: str, cann: str) -> str | None:
    """The release of torch_npu that is documented for a torch and a CANN, or for the torch alone where `cann` is
    empty or no pair names it (then the oldest); None where the torch is in no pair."""
    of_torch = [stack for stack in STACKS if release(stack.torch) == release(torch)]
    exact = [stack for stack in of_torch if cann and release(stack.cann) == release(cann)]
    return next((stack.torch_npu for stack in exact or of_torch), None)


def installed_version(distribution: str) -> str | None:
    """Version of an installed package, None where there is none of that name."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def triton_backends() -> tuple[str, ...]:
    """Names of the chips that the installed package `triton` compiles for; ("ascend",) for triton-ascend. Empty where
    there is none. Imports it, and raises whatever a broken one raises."""
    if importlib.util.find_spec("triton") is None:
        return ()
    return tuple(sorted(importlib.import_module("triton.backends").backends))


def triton_problem() -> str | None:
    """Why the installed package `triton` compiles nothing for an NPU and what to do about it, or None.

    triton-ascend and NVIDIA's Triton both install a package called `triton`; what was installed last wins, and pip
    still lists the other as installed.
    """
    try:
        backends = triton_backends()
    except Exception as error:  # a package of two halves raises whatever it likes
        return f"the installed package `triton` does not load ({type(error).__name__}: {error}): {TRITON_REMEDY}"
    if not backends:
        return f"triton-ascend is not installed: pip install triton-ascend=={TRITON_ASCEND}"
    if "ascend" not in backends:
        there = ", ".join(backends)
        return f"the installed package `triton` is not triton-ascend (it compiles for {there}): {TRITON_REMEDY}"
    return None
