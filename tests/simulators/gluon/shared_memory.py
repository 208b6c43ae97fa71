"""Shared memory: poisoned buffers, views of them, and a log of accesses that finds races."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from .clock import Clock
from .errors import InvalidOperand, Race, Uninitialised, location
from .numerics import poison, stored

MAX_BYTES = 232448  # for one program on sm_90
SWIZZLE_ROWS = 8  # every swizzle repeats after these rows


def _bounds(array: np.ndarray) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
    return low, high


@dataclass
class Access:
    """One access to shared memory. `asynchronous`: by TMA or wgmma instead of register instructions."""

    array: np.ndarray
    write: bool
    asynchronous: bool
    agent: Hashable
    step: int
    what: str
    low: int = 0
    high: int = 0

    def __post_init__(self) -> None:
        self.low, self.high = _bounds(self.array)

    def overlaps(self, other: Access) -> bool:
        if self.high <= other.low or other.high <= self.low:
            return False
        if self.array.flags.c_contiguous and other.array.flags.c_contiguous:
            return True
        return np.shares_memory(self.array, other.array)

    def covers(self, other: Access) -> bool:
        return self.array.flags.c_contiguous and self.low <= other.low and other.high <= self.high


class Allocation:
    """One `allocate_shared_memory`: its bytes, its mbarriers if any, and the accesses that still matter."""

    def __init__(self, dtype: tl.dtype, shape: list[int], name: str) -> None:
        self.array = np.empty(shape, stored(dtype))
        poison(self.array, dtype)
        self.dtype, self.name = dtype, name
        self.bytes = math.prod(shape) * self.array.itemsize
        self.barriers: dict[int, Any] = {}
        self._accesses: list[Access] = []

    def access(self, new: Access, clock: Clock) -> None:
        """Log an access. Raise Race if it conflicts with one that `clock` does not know to have happened before."""
        if not new.write and not any(old.write and old.overlaps(new) for old in self._accesses):
            raise Uninitialised(f"{new.what} reads from {self.name} what nobody has written")
        kept = []
        for old in self._accesses:
            conflicts = (old.write or new.write) and old.overlaps(new)
            if conflicts:
                fence_needed = not old.asynchronous and new.asynchronous
                if clock.known.get(old.agent, 0) < old.step:
                    raise Race(f"{new.what}, but nothing has waited for the end of: {old.what} (in {self.name})")
                if fence_needed and clock.fenced.get(old.agent, 0) < old.step:
                    raise Race(f"{new.what} without fence_async_shared after: {old.what} (in {self.name})")
            superseded = new.covers(old) and (new.write or (not old.write and old.agent == new.agent))
            if not superseded:
                kept.append(old)
        kept.append(new)
        self._accesses = kept


class SharedView:
    """The value of a shared_memory_descriptor: a NumPy view of an allocation, and its layout."""

    __slots__ = ("allocation", "array", "dtype", "layout")

    def __init__(self, allocation: Allocation, array: np.ndarray, layout: Any, dtype: tl.dtype | None = None) -> None:
        self.allocation, self.array, self.layout = allocation, array, layout
        self.dtype = dtype or allocation.dtype

    def offset(self) -> int:
        return _bounds(self.array)[0] - _bounds(self.allocation.array)[0]

    def index(self, i: int, layout: Any) -> SharedView:
        if not 0 <= i < self.array.shape[0]:
            raise InvalidOperand(f"index {i} of shared memory of shape {self.array.shape}, at {location()}")
        return type(self)(self.allocation, self.array[i], layout, self.dtype)

    def reshape(self, shape: list[int], layout: Any) -> SharedView:
        array = self.array.reshape(shape)
        if not np.shares_memory(array, self.array):
            raise InvalidOperand(f"{self.array.shape} of strided shared memory has no view {shape}, at {location()}")
        return SharedView(self.allocation, array, layout, self.dtype)

    def values(self) -> np.ndarray:
        """Return the elements in the shape that the kernel sees."""
        return self.array

    def store(self, values: np.ndarray) -> None:
        self.array[...] = values

    def of_another_type(self, dtype: tl.dtype, shape: list[int], layout: Any) -> SharedView:
        """Return a view of the same bytes as another dtype.

        The order of its elements is the array's, not the layout's. So a kernel must write and read them as one dtype.
        """
        if not self.array.flags.c_contiguous or math.prod(shape) * stored(dtype).itemsize != self.array.nbytes:
            raise InvalidOperand(f"{self.array.shape} seen as {shape} of {dtype} at {location()} is not as many bytes")
        return SharedView(self.allocation, self.array.reshape(-1).view(stored(dtype)).reshape(shape), layout, dtype)

    def reinterpreted(self, shape: list[int], layout: Any) -> SharedView:
        """Return a view of the same bytes as tiles with equal rows and several times the columns, or with fewer rows.

        A row fills the swizzle. So consecutive tiles are one wider tile of the same swizzle, and a multiple of
        SWIZZLE_ROWS rows of a tile is a tile.
        """
        rows, columns = self.array.shape[-2:]
        count, rest = divmod(shape[-1], columns)
        wider = rest == 0 and shape[-2] == rows
        shorter = shape[-1] == columns and rows % shape[-2] == 0 and shape[-2] % SWIZZLE_ROWS == 0
        rules = {
            "as many bytes": math.prod(shape) == self.array.size,
            "memory without gaps": self.array.flags.c_contiguous,
            "whole tiles": wider or shorter,
            "the same element": layout.element_bitwidth == 8 * self.array.itemsize,
            "the same swizzle": layout.swizzle_byte_width == self.layout.swizzle_byte_width,
            "rows of one swizzle": columns * self.array.itemsize == layout.swizzle_byte_width,
            "rows that are not transposed": not layout.transposed and not self.layout.transposed,
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise InvalidOperand(f"{self.array.shape} seen as {shape} at {location()} needs {'; '.join(broken)}")
        if shorter:
            return SharedView(self.allocation, self.array.reshape(shape), layout)
        tiles = self.array.reshape(*shape[:-2], count, rows, columns)
        return JoinedView(self.allocation, np.moveaxis(tiles, -3, -2), layout)

    def access(
        self, what: str, clock: Clock, agent: Hashable, step: int, *, write: bool, asynchronous: bool = False
    ) -> None:
        self.allocation.access(Access(self.array, write, asynchronous, agent, step, what), clock)


class JoinedView(SharedView):
    """Consecutive tiles as one matrix. Its array is [..., rows, tiles, columns of a tile]."""

    __slots__ = ()

    def values(self) -> np.ndarray:
        return self.array.reshape(*self.array.shape[:-2], -1)

    def store(self, values: np.ndarray) -> None:
        self.array[...] = values.reshape(self.array.shape)
