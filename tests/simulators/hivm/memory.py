"""Memories of an AI core as bytes at planned addresses, and references into them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 1,
}  # fmt: skip
NUMPY = {
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16), "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32), "i16": np.dtype(np.int16), "i8": np.dtype(np.int8),
}  # fmt: skip
ON_CHIP_GRANULE, GLOBAL_GRANULE = 32, 2
POISON = 0xFF  # bytes of NaN in every floating-point format, and of -1 in every integer format


class OutOfBounds(Exception):
    """An access outside of a memory."""


class Memory:
    """Bytes, NaN until written. `order` tells accesses apart by granules of `granule` bytes (on chip everything is
    aligned to 32). `shared`: all blocks see it."""

    def __init__(self, name: str, size: int, granule: int, data: np.ndarray | None = None) -> None:
        self.name, self.granule, self.shared = name, granule, granule < ON_CHIP_GRANULE
        self.data = np.full(size, POISON, np.uint8) if data is None else data

    @property
    def size(self) -> int:
        return self.data.size


@dataclass(frozen=True)
class Ref:
    """A memref: elements of type `dtype` in `memory`; `base` in bytes, `offset` and `strides` in elements."""

    memory: Memory
    dtype: str
    base: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __repr__(self) -> str:
        start = self.base + self.offset * BITS[self.dtype] // 8
        return f"{'x'.join(map(str, self.sizes))}x{self.dtype} at {self.memory.name}+{start}"

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def with_layout(self, **changes: Any) -> Ref:
        return replace(self, **changes)

    def _check(self) -> None:
        low = self.offset + sum(min(0, (n - 1) * s) for n, s in zip(self.sizes, self.strides, strict=True))
        high = self.offset + sum(max(0, (n - 1) * s) for n, s in zip(self.sizes, self.strides, strict=True))
        bits = BITS[self.dtype]
        if self.base * 8 + low * bits < 0 or self.base * 8 + (high + 1) * bits > self.memory.size * 8:
            raise OutOfBounds(f"{self} strides {self.strides}: {self.memory.name} has {self.memory.size} bytes")

    def view(self) -> np.ndarray:
        """Return a writable view of the elements, bf16 as bit patterns."""
        if min(self.sizes, default=1) <= 0:
            return np.empty(tuple(max(0, n) for n in self.sizes), NUMPY[self.dtype])
        self._check()
        kind = NUMPY[self.dtype]
        size = kind.itemsize
        return np.ndarray(
            self.sizes,
            kind,
            self.memory.data,
            self.base + self.offset * size,
            [stride * size for stride in self.strides],
        )

    def read(self) -> np.ndarray:
        """Return a copy of the elements, bf16 as float32, i1 as bool."""
        if self.dtype == "i1":
            rows = [np.unpackbits(x, bitorder="little")[: self.sizes[-1]] for x in self._rows_of_bits()]
            return np.array(rows, bool).reshape(self.sizes)
        values = self.view()
        if self.dtype == "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.copy()

    def write(self, values: Any) -> None:
        """Store `values`, which broadcast to the sizes; float32 to bf16 rounds to nearest even."""
        if self.dtype == "i1":
            rows = np.broadcast_to(values, self.sizes).reshape(-1, self.sizes[-1])
            for row, target in zip(rows, self._rows_of_bits(), strict=True):
                target[:] = np.packbits(row, bitorder="little")
        elif self.dtype == "bf16":
            self.view()[...] = to_bf16(np.asarray(values, np.float32))
        else:
            self.view()[...] = values

    def _rows_of_bits(self) -> list[np.ndarray]:
        """Return the bytes of each row of a mask. The first element is in the lowest bit."""
        *outer, size = self.sizes
        *steps, step = self.strides
        if (
            (size > 1 and step != 1)
            or self.offset % 8
            or any(s % 8 for n, s in zip(outer, steps, strict=True) if n > 1)
        ):
            raise ValueError(f"a mask whose rows are not whole bytes: {self} strides {self.strides}")
        found = []
        for index in np.ndindex(*outer):
            start = self.base + (self.offset + sum(i * s for i, s in zip(index, steps, strict=True))) // 8
            end = start + (size + 7) // 8
            if start < 0 or end > self.memory.size:
                raise OutOfBounds(f"{self}: {self.memory.name} has {self.memory.size} bytes")
            found.append(self.memory.data[start:end])
        return found

    def granules(self) -> Any:
        """Return the indices (or a slice) of the memory's granules that contain the elements."""
        return _granules(self.memory.granule, BITS[self.dtype], self.base, self.offset, self.sizes, self.strides)


@lru_cache(maxsize=4096)
def _granules(
    granule: int, bits: int, base: int, offset: int, all_sizes: tuple[int, ...], all_strides: tuple[int, ...]
) -> Any:
    sizes, strides = list(all_sizes), list(all_strides)
    if min(sizes, default=1) <= 0:
        return slice(0, 0)
    run = 1  # contiguous elements at the end
    while sizes and (sizes[-1] == 1 or strides[-1] == run):
        run *= sizes.pop()
        strides.pop()
    starts = np.array([offset], np.int64)
    for n, s in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(n) * s).ravel()
    first = (base * 8 + starts * bits) // 8 // granule
    last = (base * 8 + (starts + run) * bits - 1) // 8 // granule
    if len(first) == 1:
        return slice(int(first[0]), int(last[0]) + 1)
    longest = int((last - first).max())
    return np.unique(np.minimum(first[:, None] + np.arange(longest + 1), last[:, None]))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of the nearest bfloat16 of float32 values, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense row-major array."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
