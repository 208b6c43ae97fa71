"""Triton's language as it was imported, while a Gluon kernel runs.

Triton's own interpreter exchanges the functions of `triton.language` while it runs a kernel, and those that a helper
function makes it exchange once more it leaves exchanged (Triton 3.6). So a kernel that any other test interpreted in
this process would change what Gluon's semantics, which are built on the same functions, do here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton.language as tl

_MISSING = object()
_PLACES = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)
assert tl.core.add.__module__ == tl.core.__name__, "imported after another kernel was interpreted"
_IMPORTED = [(place, dict(vars(place))) for place in _PLACES]


def _assign(place: object, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(place, name)
    else:
        setattr(place, name, value)


@contextmanager
def language_as_imported() -> Iterator[None]:
    """Inside, nothing of the language is exchanged; afterwards what was, is again."""
    exchanged = []
    for place, imported in _IMPORTED:
        now = dict(vars(place))
        for name in imported.keys() | now.keys():
            before, after = imported.get(name, _MISSING), now.get(name, _MISSING)
            if before is not after:
                exchanged.append((place, name, after))
                _assign(place, name, before)
    try:
        yield
    finally:
        for place, name, value in exchanged:
            _assign(place, name, value)
