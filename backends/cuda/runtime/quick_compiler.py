"""Triton's compiler without some repeated work, for processes that do nothing but compile.

`quick_compiler` replaces private parts of Triton while its block runs. The binaries remain equal, byte for byte:

* A nested loop is read less often. To find the variables that a loop changes, Triton reads its body once and erases
  the result, then reads it again, so it reads the body of a loop in a loop four times. Where the result will be
  erased, only its types count, so the second reading is left out: three remain.
* The syntax tree of a function is made once, not for each kernel and each set of argument types.
* The signature of one of Triton's functions is looked up once, not for each call in a kernel.
* Warnings are filtered once, not for each node of a syntax tree.
* The kernel's intermediate forms are not written to files.

A part that the installed Triton does not have is not replaced.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from triton import knobs
from triton.compiler import code_generator
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

_STORED = (".ptx", ".cubin", ".json")  # what `jit.stored` and Triton read again


class _BriefCache(FileCacheManager):
    """Triton's cache, with empty files for a kernel's forms before PTX, which have up to 2 MB of text."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return super().put(data if filename.endswith(_STORED) else "", filename, binary)


class _Replaced:
    """A module in which some functions are replaced."""

    def __init__(self, module: ModuleType, **functions: Callable[..., Any]) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_known_signature = cache(inspect.signature)


def _signature(function: Any) -> inspect.Signature:
    """Return the signature of a function; that of a method includes `self`, which Triton does not look for."""
    function = getattr(function, "__func__", function)
    return _known_signature(function) if isinstance(function, FunctionType) else inspect.signature(function)


def _parsing(parse: Callable[[Any], ast.Module]) -> Callable[[Any], ast.Module]:
    """Return `JITFunction.parse` with a memory: the function keeps its syntax tree, which Triton only reads."""

    def parse_once(function: Any) -> ast.Module:
        if "tree" not in vars(function):
            function.tree = parse(function)
        return function.tree

    return parse_once


def _finding_carries(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return `CodeGenerator._find_carries`, which reads and erases the body of a loop, with a mark for loops inside."""

    def find_carries(generator: Any, loop: Any, *rest: Any, **named: Any) -> Any:
        is_erased = getattr(generator, "is_erased", False)
        generator.is_erased = True
        try:
            carries = find(generator, loop, *rest, **named)
        finally:
            generator.is_erased = is_erased
        if is_erased:
            generator.left_out = loop.body
        return carries

    return find_carries


def _visiting(visit: Callable[..., Any]) -> Callable[..., Any]:
    """Return `CodeGenerator.visit_compound_statement` without the second reading of a loop that is erased."""

    def visit_statements(generator: Any, statements: Any) -> None:
        if statements is getattr(generator, "left_out", None) is not None:
            generator.left_out = None
        else:
            visit(generator, statements)

    return visit_statements


def _do_nothing(*_: Any) -> None:
    pass


REPLACEMENTS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (code_generator, "warnings", lambda x: _Replaced(x, catch_warnings=nullcontext, simplefilter=_do_nothing)),
    (code_generator, "inspect", lambda x: _Replaced(x, signature=_signature)),
    (JITFunction, "parse", _parsing),
    (code_generator.CodeGenerator, "_find_carries", _finding_carries),
    (code_generator.CodeGenerator, "visit_compound_statement", _visiting),
)


@contextmanager
def quick_compiler() -> Iterator[None]:
    """Compile faster inside the block. No other thread may use Triton's compiler meanwhile."""
    with ExitStack() as stack, warnings.catch_warnings(), knobs.cache.scope():
        for category in (DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
        knobs.cache.manager_class = _BriefCache
        for owner, name, replacement in REPLACEMENTS:
            if hasattr(owner, name):
                part = getattr(owner, name)
                stack.callback(setattr, owner, name, part)
                setattr(owner, name, replacement(part))
        yield
