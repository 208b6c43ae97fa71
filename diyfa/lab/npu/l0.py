"""Use of L0A and L0B by the products of a compiled kernel. `backends/npu/tables/l0.py` has the rule for slices."""

from __future__ import annotations

from dataclasses import dataclass

from diyfa.arch import NPUArch, npu_spec
from diyfa.backends.npu.tables.l0 import HALF, alignment, longest_slice
from diyfa.lab.npu.hivm import Module, Product


@dataclass(frozen=True)
class Slices:
    """Slices in which a product passes through L0A and L0B."""

    k: int  # k of a slice; the last slice may be shorter
    count: int
    l0a: int  # bytes of a whole slice of the left operand
    l0b: int  # bytes of a whole slice of the right operand


def slices(product: Product) -> Slices:
    """Return the slices of a product. Raises ValueError if no slice fits."""
    width = product.bits // 8
    longest = longest_slice(product.m, product.n, width)
    if not longest:
        raise ValueError(f"[{product.m}, {product.k}] @ [{product.k}, {product.n}] does not fit L0A and L0B in slices")
    multiple = alignment(width)
    k = min(longest, -(-product.k // multiple) * multiple)
    return Slices(k, -(-product.k // longest), product.m * k * width, k * product.n * width)


def use(module: Module, target: str) -> dict[str, int]:
    """Return the most bytes of L0A and of L0B that a kernel's products use; {} if unknown."""
    spec = npu_spec(target)
    work = [module.task, *(region for loop in module.loops for region in (loop.tile, loop.masked))]
    products = [product for region in work for product in region.products]
    if not products or spec is None or spec.arch is NPUArch.A5:
        return {}
    sliced = [slices(product) for product in products]
    return {name: HALF + max(getattr(each, name) for each in sliced) for name in ("l0a", "l0b")}
