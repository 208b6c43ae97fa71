"""What Gluon kernels use of Triton's private parts, and which versions have them. Importable with any Triton."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import triton

from diyfa.backends.cuda.runtime.versions import TRITON

OLDEST, NEWEST = (3, 6), (3, 9)  # Gluon changes names and meanings from release to release


def has_gluon() -> bool:
    """Whether this Triton is one whose Gluon the kernels are written in."""
    return OLDEST <= TRITON <= NEWEST


if has_gluon():
    from triton.experimental.gluon._runtime import GluonASTSource as GluonASTSource
    from triton.experimental.gluon.language import shared_memory_descriptor as _shared_memory
    from triton.experimental.gluon.language.nvidia.hopper import tma as _tma

    # TMA copies under the names they have since Triton 3.8; 3.9 has removed the old ones.
    async_load: Any = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
    async_store: Any = getattr(_tma, "async_store", None) or _tma.async_copy_shared_to_global
    from triton._C.libtriton import ir as _ir
    from triton.experimental.gluon.language._core import builtin as _builtin

    @_builtin
    def _reduce_add(tensor_desc, coord, src, _semantic=None):
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, at, src.handle)

    # Adds a box in shared memory to global memory, which Gluon has a word for since Triton 3.8.
    async_reduce_add: Any = getattr(_tma, "async_atomic_add", None) or _reduce_add
    # (shared memory, dtype, shape, layout) -> the same bytes seen as that. Before Triton 3.9 it was a private method.
    reinterpret: Any = getattr(_shared_memory, "reinterpret", None) or _shared_memory._reinterpret


# Triton 3.9 forms the descriptors of all products of a block at its beginning and spills them, but for those of an
# index that it does not know until later (`hopper/bwd_mla.py`).
FORMS_DESCRIPTORS_EARLY = TRITON >= (3, 9)

# Triton 3.9 brings two versions of ptxas and takes the newer one for sm_90. With the older one the Hopper kernel spills
# less in every config in which it spills at all (docs/log/hopper.md, "Versions of Triton").
NEWER_PTXAS, OLDER_PTXAS = "13.4", "12.9"
OLDER_PTX = 88  # the newest PTX that the older one reads


@cache
def ptxas_options() -> dict[str, int]:
    """Compile options of a kernel for which `compile_with_older_ptxas` shall choose the older ptxas.

    They are asked for once in a process, and are part of the key under which Triton keeps the kernel. Where Triton has
    other versions, or the user has chosen others by Triton's own variables, there are none: nothing is known of those.
    """
    if not has_gluon():
        return {}
    tools = triton.knobs.nvidia
    compared = tools.ptxas_blackwell.version == NEWER_PTXAS and tools.ptxas.version == OLDER_PTXAS
    return {"ptx_version": OLDER_PTX} if compared else {}


def compile_with_older_ptxas(backend: Any, stages: dict[str, Any], options: Any) -> None:
    """Change the stages of a compilation with `ptxas_options`, and nothing outside of it: no variable, no knob."""
    if options.ptx_version != OLDER_PTX or not ptxas_options():
        return
    # Triton chooses by the architecture of the backend's target; what to compile for, it is told beside that.
    arch = backend.target.arch
    other = copy(backend)
    other.target = replace(backend.target, arch=80)
    stages["cubin"] = lambda source, metadata: other.make_cubin(source, metadata, options, arch)


def as_gluon(function: Any) -> Any:
    """Compile a `@triton.jit` function for Gluon kernels, as Gluon does with its `sum` and `max`.

    The function may not make vectors itself: in Gluon these need a layout.
    """
    from triton.experimental import gluon

    return gluon.jit(function.fn)


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
