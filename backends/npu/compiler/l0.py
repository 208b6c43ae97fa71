"""L0A and L0B: how the compiler's library streams the operands of a matrix product through them.

These two memories do not appear in the compiler's last intermediate form: the library's `mma_tile` takes whole operands
in L1 and cuts them along k. How it does so was read from its bitcode (meta_op.aic.c220.bc of ascendnpu-ir 1.2.0, the
functions mma_tile<...> of all operand types): each memory is used as two halves in turn, and a slice of k is the
longest multiple of 16 of which the longer of the operands' other sides, rounded up to 16, fits half of 64 KiB. Where
not even 16 fit, the library divides by zero.

That bitcode is of the 910B and 910_93. The 950's is of a form that LLVM does not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.arch import NPUArch, npu_spec
from diyfa.backends.npu.compiler.hivm import Module, Product

HALF = 32 * 1024  # bytes
ALIGNMENT = 16  # of a slice of k


def longest_slice(m: int, n: int, width: int) -> int:
    """How much of k goes at a time through a product [m, k] @ [k, n] of operands of `width` bytes; 0 where none can."""
    side = -(-max(m, n) // ALIGNMENT) * ALIGNMENT
    return HALF // width // side // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True)
class Slices:
    """How one product goes through L0A and L0B."""

    k: int  # of a slice; the last one may be shorter
    count: int
    l0a: int  # bytes of a whole slice of the left operand
    l0b: int  # and of the right one


def slices(product: Product) -> Slices:
    """Raises ValueError where there is no slice that fits."""
    width = product.bits // 8
    longest = longest_slice(product.m, product.n, width)
    if not longest:
        raise ValueError(f"[{product.m}, {product.k}] @ [{product.k}, {product.n}] does not fit L0A and L0B in slices")
    k = min(longest, -(-product.k // ALIGNMENT) * ALIGNMENT)
    return Slices(k, -(-product.k // longest), product.m * k * width, k * product.n * width)


def use(module: Module, target: str) -> dict[str, int]:
    """Bytes of L0A and of L0B that a kernel's products reach at most; nothing where that is not known."""
    spec = npu_spec(target)
    work = [module.task, *(part for loop in module.loops for part in (loop.tile, loop.masked))]
    products = [product for part in work for product in part.products]
    if not products or spec is None or spec.arch is NPUArch.A5:
        return {}
    found = [slices(product) for product in products]
    return {name: HALF + max(getattr(each, name) for each in found) for name in ("l0a", "l0b")}
