"""Allocations that come filled with NaN: what a kernel reads or returns without writing it shows in a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _poison(x: torch.Tensor) -> torch.Tensor:
    """Fill the storage of a fresh tensor with NaN (integers: their largest value) by one flat copy, which every device
    can do."""
    value = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max if x.dtype != torch.bool else True
    length = x.untyped_storage().nbytes() // x.element_size()
    if length:
        with torch.no_grad():
            x.as_strided((length,), (1,), 0).copy_(torch.full((length,), value, dtype=x.dtype))
    return x


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, every uninitialised allocation from Python (`empty`, `empty_like`, `empty_strided`, `new_empty`,
    `new_empty_strided`) comes filled with NaN, so that a kernel which reads or returns what nobody wrote is found.

    Process-wide, so it reaches backward passes on autograd's threads; not for use while code is compiled.
    """
    allocators: list[tuple[Any, str]] = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in allocators]

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _poison(allocate(*args, **kwargs))

    for owner, name, allocate in originals:
        setattr(owner, name, poisoned(allocate))
    try:
        yield
    finally:
        for owner, name, allocate in originals:
            setattr(owner, name, allocate)
