"""Makes Triton's interpreter faster, and lets it run with every NumPy.

For each call of a kernel and of each of its helpers the interpreter looks for the builtins of `triton.language` among
all names there are, to replace them, which takes a third of the time. Their names are fixed. And up to Triton 3.6 it
makes an index of an array of one element with `int`, which NumPy has deprecated.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _builtins(owner: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


_NAMES = {owner: _builtins(owner) for owner in (tl, tl.core, tl.math, tl.tensor)}


def _patch_builtin(owner: Any, *how: Any) -> None:
    if owner not in _NAMES:
        _NAMES[owner] = _builtins(owner)
    names = _NAMES[owner]
    if names and tl.core.is_builtin(getattr(owner, names[0])):  # not so in a helper: its caller has replaced them all
        for name in names:
            interpreter._patch_attr(owner, name, getattr(owner, name), *how)


def _patch_lang_tensor(patch: Any, tensor: Any, *scope: Any) -> None:
    patch(tensor, *scope)
    set_attr = scope[0].set_attr if scope else setattr
    set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def install() -> None:
    """The faster search is for Triton since 3.6; that of triton-ascend never takes its replacements back, see
    `npu_interpreter.py`."""
    interpreter._patch_lang_tensor = partial(_patch_lang_tensor, interpreter._patch_lang_tensor)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_builtin = _patch_builtin
