"""Faster imports of modules with kernels. They import the kernel language as well, while a user's call waits."""

from __future__ import annotations

import gc
import importlib
import inspect
import linecache
import threading
from types import CodeType, FunctionType, ModuleType
from typing import Any

_plain_getsourcelines = inspect.getsourcelines
_lock = threading.Lock()
# One entry for each `import_quickly` that runs, in any thread. All are equal: whether the garbage collector was on, and
# `inspect.getsourcelines`, before the first of them. The last one to end restores both.
_states_before: list[tuple[bool, Any]] = []


def import_quickly(name: str) -> ModuleType:
    """Import a module of kernels in half the time of `importlib.import_module`.

    The garbage collector is paused: importing leaves no garbage, but makes so many objects that the collector would
    search all of PyTorch's. Triton asks `inspect` for the source of each kernel function. `inspect` reads the function
    token by token; `source_lines` replaces that meanwhile.
    """
    with _lock:
        _states_before.append(_states_before[0] if _states_before else (gc.isenabled(), inspect.getsourcelines))
        gc.disable()
        inspect.getsourcelines = source_lines  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        with _lock:
            was_enabled, getsourcelines = _states_before.pop()
            if not _states_before:
                inspect.getsourcelines = getsourcelines
                if was_enabled:
                    gc.enable()


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return what `inspect.getsourcelines` returns: the lines of a function, and the number of the first one.

    The code object knows the first line and the last line that has code. Behind the latter, all lines belong to the
    function that are indented deeper than its first line, or that close a parenthesis. Anything but a function that is
    defined by `def` goes to `inspect`.
    """
    code = function.__code__ if type(function) is FunctionType else None
    lines = [] if code is None else linecache.getlines(code.co_filename, function.__globals__)
    if code is None or code.co_name == "<lambda>" or code.co_firstlineno > len(lines):
        return _plain_getsourcelines(function)
    first = code.co_firstlineno - 1  # the line of the first decorator, if there is one
    first_indentation = _indentation(lines[first])
    definition = next((i for i in range(first, len(lines)) if lines[i].lstrip().startswith("def ")), first)
    end = max(_last_line(code), definition + 1)
    for i in range(end, len(lines)):
        if lines[i].strip():
            if _indentation(lines[i]) <= first_indentation and not lines[i].lstrip().startswith(")"):
                break
            end = i + 1
    return lines[first:end], first + 1


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _last_line(code: CodeType) -> int:
    """Return the number of the last line that has code, of the function or of one inside it."""
    last = max((line for *_, line in code.co_lines() if line), default=0)
    return max([last, *[_last_line(x) for x in code.co_consts if isinstance(x, CodeType)]])
