"""Jit functions from text: functions that a user's call defines, in the constants of the kernels that call them."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import triton


@dataclass(frozen=True)
class JitSource:
    """The source of a jit function. `name` contains a hash of the text; `module` has the names that the text uses."""

    name: str
    text: str
    module: str

    def __repr__(self) -> str:
        return self.name  # in Triton's names of specialised functions, and in the key of its cache

    def function(self) -> Any:
        """Return the jit function."""
        return _jit_function(self)


@lru_cache(maxsize=256)
def _jit_function(source: JitSource) -> Any:
    # Triton reads the source of a function from its file, and Python looks for that in linecache.
    file = f"<diyfa {source.name}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names = dict(vars(import_module(source.module)))
    exec(compile(source.text, file, "exec"), names)
    return triton.jit(names[source.name])
