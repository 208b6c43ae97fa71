"""Masks in a form that kernels evaluate: a query sees a key if all comparisons of at least one term are true.

A mask function that has this form carries it as its attribute `terms`. `diyfa.block_mask` passes the terms to the
backend's `build_mask`, if the backend has one. That decides most blocks by the positions of their corners, and
evaluates the pairs of the others only. Comparisons of query position i and key j:

    band            -left <= j - i <= right                     numbers (left, right)
    before          j < count                                   number (count)
    prefix          j < lengths[b]                              tensor lengths (B,)
    same            ids[i] == ids[j], or ids[b, i] == ids[b, j] tensor ids (S,) or (B, S)
    tiles           `masks.sliding_tile`                        numbers (tokens of a tile, tokens of the grid, 1 with
                                                                text, 3 numbers of tiles, 3 windows in tiles)
    dense           keep[b, h, i + Sq - Sk, j]                  tensor keep (B, H, Sq, Sk) bool, numbers: its strides
    function        the program of a jit function               source, captured tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

UNBOUNDED = 1 << 30  # larger than any position
MAX_NUMBERS, MAX_TENSORS = 12, 4
Function = TypeVar("Function", bound=Callable[..., Any])


class Comparison(NamedTuple):
    """One comparison of the table above."""

    name: str
    numbers: tuple[int, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    source: str = ""  # program of a jit function (`diyfa.score_programs`)


Terms = tuple[tuple[Comparison, ...], ...]  # visible if all comparisons of at least one term are true


def with_terms(function: Function, name: str, *numbers: int, tensors: tuple[torch.Tensor, ...] = ()) -> Function:
    """Set the terms of a mask function to one term with one comparison, and return the function."""
    bounded = tuple(min(number, UNBOUNDED) for number in numbers)
    function.terms = ((Comparison(name, bounded, tensors),),)  # type: ignore[attr-defined]
    return function


def terms_of(function: Any) -> Terms | None:
    """Return the terms of a mask function, or None."""
    return getattr(function, "terms", None)


def combined(function: Function, parts: Sequence[Any], is_all: bool) -> Function:
    """Set the terms of a mask function that is all, or any, of the masks `parts`, if all of these have terms.

    For "all", each combination of one term of each mask is a term. Returns the function.
    """
    terms_of_parts = [terms_of(part) for part in parts]
    if any(terms is None for terms in terms_of_parts):
        return function
    total: Terms = ((),) if is_all else ()
    for terms in terms_of_parts:
        assert terms is not None
        # `fits` would refuse so many terms, and their number would grow with each product.
        if is_all and len(total) * len(terms) > MAX_NUMBERS + MAX_TENSORS:
            return function
        total = tuple((*a, *b) for a in total for b in terms) if is_all else (*total, *terms)
    function.terms = total  # type: ignore[attr-defined]
    return function


def fits(terms: Terms, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> bool:
    """Return whether kernels evaluate `terms` for a mask of these sizes, with the result of PyTorch's operators.

    PyTorch's operators take a negative index as one from the end, and refuse an index beyond the end. The kernels do
    neither, so they do not make masks with such indices.
    """
    comparisons = [comparison for term in terms for comparison in term]
    tensors = [(comparison.name, x) for comparison in comparisons for x in comparison.tensors]
    if len(tensors) > MAX_TENSORS or sum(len(comparison.numbers) for comparison in comparisons) > MAX_NUMBERS:
        return False
    reads_positions = any(x.name in ("same", "tiles") or (x.name == "function" and x.tensors) for x in comparisons)
    if seqlen_q > seqlen_k and reads_positions:
        return False  # the first queries have negative positions
    for name, x in tensors:
        sizes = (batch,) if name == "prefix" else (seqlen_k,) if x.dim() == 1 else (batch, seqlen_k)
        wide_enough = all(size >= wanted for size, wanted in zip(x.shape, sizes, strict=False))
        if x.device != device or not (name in ("dense", "function") or wide_enough):
            return False
        if not x.numel():  # no index lies inside of it
            return False
    return True
