"""Importing modules with kernels, and the kernel language with them, inside of a user's call."""

from __future__ import annotations

import gc
import importlib
import inspect
import linecache
import threading
from types import CodeType, FunctionType, ModuleType
from typing import Any

_slowly = inspect.getsourcelines
_lock = threading.Lock()
_before: list[tuple[bool, Any]] = []  # of each import that is going on, what the first of them found


def import_quickly(name: str) -> ModuleType:
    """`importlib.import_module` at half of its time, for modules of kernels.

    Importing leaves no garbage, but so many new objects that the garbage collector looks through all that PyTorch has
    made: it is paused. And Triton asks for the source of each function of a kernel, which Python finds token by token.
    """
    with _lock:
        _before.append(_before[0] if _before else (gc.isenabled(), inspect.getsourcelines))
        gc.disable()
        inspect.getsourcelines = source_lines  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        with _lock:
            was_enabled, lines = _before.pop()
            if not _before:
                inspect.getsourcelines = lines
                if was_enabled:
                    gc.enable()


def source_lines(function: Any) -> tuple[list[str], int]:
    """`inspect.getsourcelines`, which for a function looks at indentation behind the last line that has code."""
    code = function.__code__ if type(function) is FunctionType else None
    lines = [] if code is None else linecache.getlines(code.co_filename, function.__globals__)
    if code is None or code.co_name == "<lambda>" or code.co_firstlineno > len(lines):
        return _slowly(function)
    first = code.co_firstlineno - 1  # of its decorators, if it has some
    margin = _indentation(lines[first])
    head = next((i for i in range(first, len(lines)) if lines[i].lstrip().startswith("def ")), first)
    end = max(_last_line(code), head + 1)
    for i in range(end, len(lines)):
        if lines[i].strip():
            if _indentation(lines[i]) <= margin and not lines[i].lstrip().startswith(")"):
                break
            end = i + 1
    return lines[first:end], first + 1


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _last_line(code: CodeType) -> int:
    last = max((line for *_, line in code.co_lines() if line), default=0)
    return max([last, *[_last_line(x) for x in code.co_consts if isinstance(x, CodeType)]])
