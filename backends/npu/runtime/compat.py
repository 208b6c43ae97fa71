"""Differences between the Ascend compiler, Triton's interpreter and mainline Triton: decided here and nowhere else.

Releases of triton-ascend after 3.2.0 were read, not run: branch release/3.2.1 of its public repository (2026-04-16) and
main (2026-04-27), which is 3.5. No branch for 3.2.2 or 3.6 was public. What differs:

* Defaults of compiler options changed for 910B and 910_93. `stable_options` names them, so that every release compiles
  the kernels of the gate.
* The wheel has a `bishengir-compile` of its own, which goes before CANN's (`npu_stacks.bundled_compiler`).
* From 3.5 on a constexpr looks up attributes in its value (`Constants`).
* From 3.5 on `AscendBackend.get_codegen_implementation` takes the options, so `diyfa compile` needs 3.2.

Equal, and used here: `make_block_ptr`, `driver.active.utils.get_device_properties`, `MLIRCompilationError`,
`JITFunction.warmup`, `CompiledKernel._init_handles`, and a launcher that is built as C++17.

Triton reads `TRITON_INTERPRET` when a kernel is decorated, so this module reads it when it is imported.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from diyfa.npu_stacks import installed_version, release
from diyfa.score_code import JitSource

# In the interpreter the kernels run on CPU memory. Its `tl.dot` of bfloat16 multiplies bit patterns, so the kernels
# widen bfloat16 operands there (the INTERPRET flag). The cube unit forms float32 products of bfloat16 values, too.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Programs of the persistent grid in the interpreter: few, so that each loops over several tiles.
INTERPRETER_PROGRAMS = 3


@lru_cache(maxsize=1)
def has_ascend_compiler() -> bool:
    """Return whether the installed package `triton` is triton-ascend."""
    return installed_version("triton-ascend") is not None


@lru_cache(maxsize=1)
def interpreter_problem() -> str | None:
    """Return why kernels do not run in the interpreter of the installed Triton, or None. 3.9 has no block pointers."""
    version = None if has_ascend_compiler() else installed_version("triton")
    if version is None or release(version) < (3, 9):
        return None
    return (
        f"Triton {version} has no block pointers, through which its kernels read tiles: in the interpreter they run "
        "with triton-ascend, or with Triton up to 3.8"
    )


def padded_head_dim(head_dim: int, columns: int = 16) -> int:
    """Return the feature columns of a tile: the next multiple of `columns`, those of the cube unit's fractal.

    In mainline Triton it is a power of two, because block shapes must be."""
    if has_ascend_compiler():
        return -(-head_dim // columns) * columns
    return max(columns, 1 << (head_dim - 1).bit_length())


def split_columns(head_dim: int, max_columns: int) -> dict[str, int]:
    """Return the columns of dq and dk: BLOCK_D in a first tile, at most `max_columns`, BLOCK_D_TAIL in a second one.

    BLOCK_D_TAIL is 0 if the first tile has all columns."""
    tail = padded_head_dim(head_dim - max_columns) if head_dim > max_columns else 0
    return {"BLOCK_D": padded_head_dim(min(head_dim, max_columns)), "BLOCK_D_TAIL": tail}


@dataclass(frozen=True)
class Constants:
    """Base of the frozen dataclasses of constants that kernels are compiled for.

    An instance is the kernel's last argument `c`, a constexpr, which the kernel passes whole to its helpers. The host
    reads fields in lower case. They are plain values, and all are part of Triton's key of the compiled kernel. A kernel
    reads them in capitals as constexprs: `c.BLOCK_M` for `block_m`. Kernels compute derived constants themselves, since
    the code of a property would not be part of that key.
    """

    def __init_subclass__(cls) -> None:
        """Let Triton 3.2, the base of triton-ascend, look up an attribute of a constexpr in its value.

        Later releases do so. This patch covers `Constants` only."""
        from triton.language import constexpr

        def attribute(self: Any, name: str) -> Any:
            if name.isupper() and isinstance(self.value, Constants):
                return getattr(self.value, name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")

        if has_ascend_compiler() and not hasattr(constexpr, "__getattr__"):
            constexpr.__getattr__ = attribute

    def __getattr__(self, name: str) -> Any:
        from triton.language import constexpr

        if not name.isupper():
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        value = getattr(self, name.lower())
        if isinstance(value, JitSource):
            value = value.function()
        return value if INTERPRETED else constexpr(value)


def stable_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return compiler options with 3.2.0's defaults for 910B and 910_93, where later releases have others."""
    if options.get("compile_on_910_95"):
        return options
    return {"enable_select_analysis": False, "enable_auto_bind_sub_block": True, **options}


def kernel(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit` without specialising on the values or alignment of integers.

    By default Triton compiles another kernel for each integer that is 1 and for each that is a multiple of 16, so
    strides and lengths would make many. The compile gate promises nothing about the tiles of such variants either."""
    import triton

    parameters = inspect.signature(function).parameters.values()
    run_time = [x.name for x in parameters if x.annotation is inspect.Parameter.empty]
    return triton.jit(function, do_not_specialize=run_time)
