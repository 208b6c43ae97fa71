"""This machine's Ascend compiler, `bishengir-compile` of CANN or triton-ascend.

Here are its version, its errors in one line, and DIYFA_JIT=never, which forbids to start it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from diyfa.npu_stacks import bundled_compiler

PROGRAM = "bishengir-compile"
HOW_TO_FIND_IT = (
    f"{PROGRAM} is not in PATH: source CANN's set_env.sh (/usr/local/Ascend/cann/set_env.sh, before CANN 8.5 "
    "/usr/local/Ascend/ascend-toolkit/set_env.sh)"
)

JIT_SETTINGS = ("auto", "never")  # of DIYFA_JIT
_forbidden: ContextVar[str] = ContextVar("name of the kernel that may not be compiled", default="")


@contextmanager
def compiling_if_allowed(kernel: str) -> Iterator[None]:
    """Launch `kernel` inside the block. With DIYFA_JIT=never Triton then raises RuntimeError instead of compiling it.

    Raises ValueError for another value than `JIT_SETTINGS`."""
    setting = os.environ.get("DIYFA_JIT") or "auto"
    if setting not in JIT_SETTINGS:
        raise ValueError(f"DIYFA_JIT must be one of {', '.join(JIT_SETTINGS)}, got {setting!r}")
    if setting == "auto":
        yield
        return
    _check_before_compiling()
    token = _forbidden.set(kernel)
    try:
        yield
    finally:
        _forbidden.reset(token)


@cache
def _check_before_compiling() -> None:
    """Patch Triton's backend. It is asked for the stages of a compilation if a kernel is in no cache, and only then.

    The kernel may be there without the C++ function that launches it, such as after a warm-up that was killed."""
    from triton.backends import backends

    ascend: Any = backends["ascend"]  # not the classes that an import finds: Triton loads its backends by path

    def checked(compile_: Callable[..., Any], what: str) -> Callable[..., Any]:
        def compile_if_allowed(*arguments: Any, **options: Any) -> Any:
            if kernel := _forbidden.get():
                raise RuntimeError(
                    f"DIYFA_JIT=never, and {what}{kernel} would have to be compiled: it is not in Triton's cache "
                    "folder (TRITON_CACHE_DIR). `diyfa warmup` compiles it, or run the call once with DIYFA_JIT=auto"
                )
            return compile_(*arguments, **options)

        return compile_if_allowed

    ascend.compiler.add_stages = checked(ascend.compiler.add_stages, "")
    functions = ascend.driver.__init__.__globals__
    name = "_build_npu_ext"  # private: starts the C++ compiler
    if name in functions:
        functions[name] = checked(functions[name], "the launcher of ")


@cache
def compiler_version() -> str:
    """Return the version of the compiler in use, such as "0.1.0 (e4e2ba9841d1 2026-01-16)"; "" without one."""
    program = bundled_compiler() or shutil.which(PROGRAM)
    if program is None:
        return ""
    try:
        process = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(rf"{PROGRAM} (?:version )?(\S+)(?: \(.*?(\w+ \d+-\d+-\d+)\))?", process.stdout + process.stderr)
    return "unknown" if match is None else f"{match[1]} ({match[2]})" if match[2] else match[1]


def is_compile_failure(error: BaseException) -> bool:
    """Return whether Triton raised `error` before any launch, because a kernel does not compile or fit."""
    from triton.compiler import errors
    from triton.runtime.errors import OutOfResources

    names = ("CompilationError", "MLIRCompilationError")  # the second is triton-ascend's
    error_types = [getattr(errors, name) for name in names if hasattr(errors, name)]
    # With TRITON_ASCEND_COMPILE_SPEED_OPT triton-ascend remembers failures, and reports them without a type of its own.
    return isinstance(error, (*error_types, OutOfResources)) or str(error) == "already failed once"


def first_error(log: str) -> str:
    """Return the first error in the compiler's output, in one line."""
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits", log)
    if overflow:
        memory, needed, available = overflow[1], int(overflow[2]) // 8192, int(overflow[3]) // 8192
        return f"{memory} overflow: needs {needed} KiB of {available}"
    # Triton's exception adds lines around the compiler's output.
    lines = [x for x in log.splitlines() if x.strip() and not x.startswith(("///", "[INFO]")) and "encounters" not in x]
    errors = [x for x in lines if "error" in x.lower() and "Failed to run" not in x]
    line = errors[0] if errors else (lines or ["no output"])[-1]
    return " ".join(line.split())[:300]
