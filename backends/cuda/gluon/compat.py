"""Private parts of Triton that Gluon kernels use, and the versions that have them. Importable with any Triton."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from subprocess import SubprocessError
from typing import Any

import triton

from diyfa.backends.cuda.runtime.versions import TRITON

OLDEST, NEWEST = (3, 6), (3, 9)  # Gluon changes names and meanings from release to release


def has_gluon() -> bool:
    """Return whether the kernels are written for the Gluon of this Triton."""
    return OLDEST <= TRITON <= NEWEST


if has_gluon():
    from triton.experimental.gluon._runtime import GluonASTSource as GluonASTSource
    from triton.experimental.gluon.language import shared_memory_descriptor as _shared_memory
    from triton.experimental.gluon.language.nvidia.hopper import tma as _tma

    # Triton 3.8 renamed the TMA copies, and 3.9 removed the old names.
    async_load: Any = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
    async_store: Any = getattr(_tma, "async_store", None) or _tma.async_copy_shared_to_global
    from triton._C.libtriton import ir as _ir
    from triton.experimental.gluon.language._core import builtin as _builtin

    @_builtin
    def _reduce_add(tensor_desc, coord, src, _semantic=None):
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, at, src.handle)

    # Adds a box in shared memory to global memory. Gluon has this since Triton 3.8.
    async_reduce_add: Any = getattr(_tma, "async_atomic_add", None) or _reduce_add
    # View of (shared memory, dtype, shape, layout) on the same bytes. Before Triton 3.9 it was a private method.
    reinterpret: Any = getattr(_shared_memory, "reinterpret", None) or _shared_memory._reinterpret

    from triton.experimental import gluon as _gluon
    from triton.experimental.gluon import language as _gl

    # Triton 3.9 forms the descriptors of all products of a loop at the beginning of its body, and ptxas spills them:
    # 1.9 KB in `hopper/bwd_mla.py`. A descriptor stays where it is used if its index is hidden until then. Older
    # versions need none of this, and there it would cost 5 % of a causal backward pass.
    _HIDES_INDICES = _gl.constexpr(TRITON >= (3, 9))

    @_gluon.jit
    def optimisation_barrier(x):
        """Return x (32 bits) as a number that is unknown to the compiler before this point of the program.

        Otherwise the compiler derives values from x, such as reciprocals and addresses, before the first tile. It would
        hold them in registers, of which loops have none to spare.
        """
        return _gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)

    @_gluon.jit
    def hidden_index(index):
        """Return the index of a tile as a number that is hidden from the compiler until this point of the program."""
        return optimisation_barrier(index) if _HIDES_INDICES else index

    @_gluon.jit
    def index_behind(index, zero):
        """Return index + zero, where zero is a `hidden_index`, so that the sum is hidden as long as zero is."""
        return index + zero if _HIDES_INDICES else index


# Triton 3.9 brings two versions of ptxas and takes the newer one for sm_90. With the older one the Hopper kernel spills
# less in every config in which it spills at all (docs/log/hopper.md, "Versions of Triton").
NEWER_PTXAS, OLDER_PTXAS = "13.4", "12.9"
OLDER_PTX = 88  # the newest PTX that the older one reads


@cache
def ptxas_options() -> dict[str, int]:
    """Return compile options that make `compile_with_older_ptxas` choose the older ptxas.

    They are computed once per process, and are part of the key under which Triton stores the kernel. They are empty if
    Triton has other versions, or the user has chosen others by Triton's own variables: those were not compared. They
    are empty without a ptxas, too: the kernels of a pack do not need one.
    """
    if not has_gluon():
        return {}
    tools = triton.knobs.nvidia
    try:
        compared = tools.ptxas_blackwell.version == NEWER_PTXAS and tools.ptxas.version == OLDER_PTXAS
    except (RuntimeError, OSError, SubprocessError):  # not found, not executable, failed
        return {}
    return {"ptx_version": OLDER_PTX} if compared else {}


def compile_with_older_ptxas(backend: Any, stages: dict[str, Any], options: Any) -> None:
    """Make a compilation with `ptxas_options` use the older ptxas. Only its stages change: no variable and no knob."""
    if options.ptx_version != OLDER_PTX or not ptxas_options():
        return
    # Triton chooses ptxas by the architecture of the backend's target. The one to compile for is a separate argument.
    arch = backend.target.arch
    other = copy(backend)
    other.target = replace(backend.target, arch=80)
    stages["cubin"] = lambda source, metadata: other.make_cubin(source, metadata, options, arch)


def aggregate(cls: type) -> Any:
    """Make a class an aggregate, values that kernels pass around as one, with a constructor as dataclasses have.

    A field is annotated with the type of its values: `gl.tensor`, `gl.constexpr`, another aggregate, or a union of
    them. Methods are `@gluon.jit` functions. A module of aggregates must not postpone its annotations: Triton checks
    each value against them.
    """
    from triton.language.core import _aggregate, base_value, constexpr

    fields = dict(cls.__annotations__)

    def __init__(self, *values, **named):
        fields_by_name = dict(zip(fields, values, strict=False)) | named
        if len(values) + len(named) != len(fields) or fields_by_name.keys() != fields.keys():
            raise TypeError(f"{type(self).__name__} has the fields {list(fields)}, got {list(fields_by_name)}")
        for name, value in fields_by_name.items():
            setattr(self, name, value if isinstance(value, base_value) else constexpr(value))

    init = triton.constexpr_function(__init__)
    # Triton's cache key includes the source of everything that a kernel uses. The source of this class is its fields.
    init._unsafe_update_src(f"def __init__(self):\n    pass  # {cls.__module__}.{cls.__qualname__}: {fields}\n")
    cls.__init__ = init
    return _aggregate(cls)
