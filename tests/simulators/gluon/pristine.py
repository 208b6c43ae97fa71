"""A context that restores Triton's language, as it was imported, while a Gluon kernel runs.

Triton's own interpreter replaces functions of `triton.language` while it runs a kernel. Functions that a helper makes
it replace a second time stay replaced (Triton 3.6). Gluon's semantics use the same functions, so a kernel that another
test of the process has interpreted would change their results here.
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
    """Restore the imported language inside the context, and the replacements after it."""
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
