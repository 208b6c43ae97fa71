"""Masks by name in a form that kernels evaluate: an any of terms, each an all of comparisons.

A function of `diyfa.masks` that has this form carries it as its attribute `terms`. `diyfa.block_mask` hands it to a
backend that has `build_mask`, which finds most blocks full or empty from their corners, and evaluates the others only.
Comparisons of query position i and key j:

    band            -left <= j - i <= right                     numbers (left, right)
    before          j < count                                   number (count)
    prefix          j < lengths[b]                              tensor lengths (B,)
    same            ids[i] == ids[j], or ids[b, i] == ids[b, j] tensor ids (S,) or (B, S)
    tiles           `masks.sliding_tile`                        numbers (volume, tokens, text, 3 counts, 3 windows)
    dense           keep[b, h, row, j]                          tensor (B, H, Sq, Sk) bool, numbers: its strides
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


Terms = tuple[tuple[Comparison, ...], ...]  # True where all comparisons of one of the terms are


def with_terms(function: Function, name: str, *numbers: int, tensors: tuple[torch.Tensor, ...] = ()) -> Function:
    """Return a mask function that carries one comparison as its terms."""
    bounded = tuple(min(number, UNBOUNDED) for number in numbers)
    function.terms = ((Comparison(name, bounded, tensors),),)  # type: ignore[attr-defined]
    return function


def terms_of(function: Any) -> Terms | None:
    """Return the terms of a mask function, or None."""
    return getattr(function, "terms", None)


def combined(function: Function, parts: Sequence[Any], is_all: bool) -> Function:
    """Return a mask function that carries the terms of all, or any, of its `parts`, if these have terms."""
    known = [terms_of(part) for part in parts]
    if any(terms is None for terms in known):
        return function
    total: Terms = ((),) if is_all else ()
    for terms in known:
        assert terms is not None
        if is_all and len(total) * len(terms) > MAX_NUMBERS + MAX_TENSORS:  # more than `fits`; they would multiply
            return function
        total = tuple((*a, *b) for a in total for b in terms) if is_all else (*total, *terms)
    function.terms = total  # type: ignore[attr-defined]
    return function


def fits(terms: Terms, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> bool:
    """Return whether a kernel evaluates `terms` for a mask of these sizes as PyTorch's operators would.

    These take a negative position as one from the end, and refuse one that a tensor does not have.
    """
    parts = [part for term in terms for part in term]
    tensors = [(part.name, x) for part in parts for x in part.tensors]
    if len(tensors) > MAX_TENSORS or sum(len(part.numbers) for part in parts) > MAX_NUMBERS:
        return False
    if seqlen_q > seqlen_k and any(part.name in ("same", "tiles") for part in parts):
        return False
    for name, x in tensors:
        sizes = (batch,) if name == "prefix" else (seqlen_k,) if x.dim() == 1 else (batch, seqlen_k)
        wide_enough = all(size >= wanted for size, wanted in zip(x.shape, sizes, strict=False))
        if x.device != device or not (name == "dense" or wide_enough):
            return False
    return True
