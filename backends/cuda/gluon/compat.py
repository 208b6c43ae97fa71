"""What Gluon kernels use of Triton's private parts, and which versions have them. Importable with any Triton."""

from __future__ import annotations

from typing import Any

import triton

from diyfa.backends.cuda.runtime.versions import TRITON

OLDEST, NEWEST = (3, 6), (3, 9)  # Gluon changes names and meanings from release to release


def has_gluon() -> bool:
    """Whether this Triton is one whose Gluon the kernels are written in."""
    return OLDEST <= TRITON <= NEWEST


if has_gluon():
    from triton.experimental.gluon.language import shared_memory_descriptor as _shared_memory
    from triton.experimental.gluon.language.nvidia.hopper import tma as _tma

    # TMA copies under the names they have since Triton 3.8; 3.9 has removed the old ones.
    async_load: Any = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
    async_store: Any = getattr(_tma, "async_store", None) or _tma.async_copy_shared_to_global
    # (shared memory, dtype, shape, layout) -> the same bytes seen as that. Before Triton 3.9 it was a private method.
    reinterpret: Any = getattr(_shared_memory, "reinterpret", None) or _shared_memory._reinterpret


def aggregate(cls: type) -> Any:
    """A class of values that kernels pass around as one, with a constructor made from its fields, as dataclasses have.

    A field is annotated with the type of its values: `gl.tensor`, `gl.constexpr`, another aggregate, or a union of
    them. Methods are `@gluon.jit` functions. A module of aggregates must not postpone its annotations: Triton checks
    each value against them.
    """
    from triton.language.core import _aggregate, base_value, constexpr

    fields = dict(cls.__annotations__)

    def __init__(self, *values, **named):
        given = dict(zip(fields, values, strict=False)) | named
        if len(values) + len(named) != len(fields) or given.keys() != fields.keys():
            raise TypeError(f"{type(self).__name__} has the fields {list(fields)}, got {list(given)}")
        for name, value in given.items():
            setattr(self, name, value if isinstance(value, base_value) else constexpr(value))

    init = triton.constexpr_function(__init__)
    # Triton keeps compiled kernels under the source of what they use: of this class that is its fields.
    init._unsafe_update_src(f"def __init__(self):\n    pass  # {cls.__module__}.{cls.__qualname__}: {fields}\n")
    cls.__init__ = init
    return _aggregate(cls)
