"""Quick imports of modules with kernels, and of the kernel language with them, inside a user's call."""

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
_before: list[tuple[bool, Any]] = []  # one entry for each running import: the state before the first of them


def import_quickly(name: str) -> ModuleType:
    """Import a module of kernels in half the time of `importlib.import_module`.

    The garbage collector is paused: importing leaves no garbage, but makes so many objects that the collector would
    search all of PyTorch's. Triton asks for the source of each kernel function, which `inspect` finds token by token.
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
    """Return what `inspect.getsourcelines` returns, for a function by the indentation behind its last line of code."""
    code = function.__code__ if type(function) is FunctionType else None
    lines = [] if code is None else linecache.getlines(code.co_filename, function.__globals__)
    if code is None or code.co_name == "<lambda>" or code.co_firstlineno > len(lines):
        return _slowly(function)
    first = code.co_firstlineno - 1  # the line of the first decorator, if there is one
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
