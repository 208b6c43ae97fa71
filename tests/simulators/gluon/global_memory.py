"""Global memory: the tensors of a launch, each in its own address range, far from all others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from .clock import Steps
from .errors import OutOfBounds, Race, location

REGION_BITS = 44
ALIGNMENT = 256  # addresses equal the real ones modulo this, so that alignment rules can be checked


class _Storage:
    def __init__(self, x: torch.Tensor, address: int, name: str) -> None:
        storage = x.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.address, self.name, self.keep = address, name, x
        self.writers = np.zeros(len(self.bytes), np.int32)
        self.reducers: np.ndarray | None = None  # the last writer that reduced into each byte
        self.reductions: list[tuple[int, int, int]] = []  # (writer, first item, last item) since items were written


class GlobalMemory:
    """The tensors of one launch by address, with checks of bounds and races."""

    def __init__(self, fixed_order: bool = False) -> None:
        self.fixed_order = fixed_order  # whether reductions of one item must be ordered
        self.writers = 0  # number of writers so far
        self.written: dict[int, tuple[Hashable, int]] = {}  # {writer: (agent, step) in which it has written}
        self.atomics: Any = None  # `Atomics` of this memory, set after both exist
        self._storages: list[_Storage] = []
        self._by_pointer: dict[int, _Storage] = {}

    def address_of(self, x: torch.Tensor, name: str) -> int:
        """Return the address of the tensor's first element."""
        real = x.untyped_storage().data_ptr()
        found = self._by_pointer.get(real)
        if found is None:
            address = ((len(self._storages) + 1) << REGION_BITS) + (1 << (REGION_BITS - 1)) + real % ALIGNMENT
            found = self._by_pointer[real] = _Storage(x, address, name)
            self._storages.append(found)
        return found.address + x.storage_offset() * x.element_size()

    def _locate(self, addresses: np.ndarray, itemsize: int, what: str) -> tuple[_Storage, np.ndarray]:
        """Return the storage that contains all addresses, and their offsets in it, in items."""
        region = int(addresses[0] >> REGION_BITS)
        if not 1 <= region <= len(self._storages):
            raise OutOfBounds(f"{what} at {location()}: the address is of no tensor")
        storage = self._storages[region - 1]
        offsets = addresses.astype(np.int64) - storage.address
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + itemsize > len(storage.bytes):
            raise OutOfBounds(
                f"{what} at {location()}: bytes {low} to {high + itemsize} of {storage.name}, whose storage has "
                f"{len(storage.bytes)}"
            )
        if (offsets % itemsize).any():
            raise OutOfBounds(f"{what} at {location()}: an address in {storage.name} is not a multiple of {itemsize}")
        return storage, offsets // itemsize

    @staticmethod
    def _items(storage: _Storage, dtype: np.dtype[Any]) -> np.ndarray:
        return storage.bytes[: len(storage.bytes) // dtype.itemsize * dtype.itemsize].view(dtype)

    def _is_race(self, before: np.ndarray, own: int, known: Steps) -> bool:
        """Return whether a writer of `before` is not `own` and its write is not `known` to have happened before."""
        for writer in {int(w) for w in before} - {0, own}:
            agent, step = self.written.get(writer, (None, 1))
            if known.get(agent, 0) < step:
                return True
        return False

    def _check_reductions(self, storage: _Storage, index: np.ndarray, known: Steps, what: str) -> None:
        """Raise Race unless a plain access comes after all reductions of the same items."""
        low, high = int(index.min()), int(index.max())
        for writer, first, last in storage.reductions:
            if first <= high and low <= last and self._is_race(np.array([writer]), 0, known):
                raise Race(f"{what} at {location()}: nothing orders it after a reduction in {storage.name}")

    def load(
        self,
        addresses: np.ndarray,
        mask: np.ndarray,
        other: np.ndarray,
        dtype: np.dtype[Any],
        reader: int,
        known: Steps | None = None,
    ) -> np.ndarray:
        """Return items where the mask is set, `other` elsewhere.

        It is a race to read an item that another writer writes in the same launch, unless that write is `known`.
        """
        result = np.broadcast_to(other, addresses.shape).astype(dtype)
        if mask.any():
            storage, index = self._locate(addresses[mask], dtype.itemsize, "load")
            if self._is_race(storage.writers[index * dtype.itemsize], reader, known or {}):
                raise Race(f"load at {location()}: somebody else writes {storage.name} there in the same launch")
            self._check_reductions(storage, index, known or {}, "load")
            result[mask] = self._items(storage, dtype)[index]
        return result

    def store(
        self, addresses: np.ndarray, mask: np.ndarray, values: np.ndarray, writer: int, known: Steps | None = None
    ) -> None:
        """Write items where the mask is set.

        Two writers of one item in one launch are a race, even with equal values, unless the first is `known`.
        """
        if not mask.any():
            return
        values = np.broadcast_to(values, addresses.shape)
        storage, index = self._locate(addresses[mask], values.itemsize, "store")
        if self._is_race(storage.writers[index * values.itemsize], writer, known or {}):
            raise Race(f"store at {location()}: {storage.name} was already written there by somebody else")
        self._check_reductions(storage, index, known or {}, "store")
        low, high = int(index.min()), int(index.max())
        if high - low + 1 == index.size:  # without gaps
            storage.reductions = [r for r in storage.reductions if not (low <= r[1] and r[2] <= high)]
        storage.writers[index * values.itemsize] = writer
        self._items(storage, values.dtype)[index] = values[mask]

    def peek(self, address: int, dtype: np.dtype[Any]) -> Any:
        """Return one item, like an atomic load."""
        storage, index = self._locate(np.array([address], np.uint64), dtype.itemsize, "atomic load")
        return self._items(storage, dtype)[index[0]]

    def add(self, address: int, value: Any, dtype: np.dtype[Any], writer: int) -> Any:
        """Add to one item and return its old value. A plain write of another writer in the same launch is a race."""
        storage, index = self._locate(np.array([address], np.uint64), dtype.itemsize, "atomic addition")
        if storage.writers[index[0] * dtype.itemsize] not in (0, writer):
            raise Race(f"atomic addition at {location()}: somebody else writes {storage.name} there without atomics")
        items = self._items(storage, dtype)
        old = items[index[0]]
        items[index[0]] = old + value
        return old

    def reduce(
        self,
        addresses: np.ndarray,
        mask: np.ndarray,
        values: np.ndarray,
        function: np.ufunc,
        writer: int,
        known: Steps,
        where: str,
    ) -> None:
        """Combine values with items, one at a time, so that no result is lost.

        Stores of other writers to these items must be `known`. With `fixed_order` the last reduction must be, too.
        """
        if not mask.any():
            return
        storage, index = self._locate(addresses[mask], values.itemsize, "reduction")
        if self._is_race(np.unique(storage.writers[index * values.itemsize]), writer, known):
            raise Race(f"reduction at {where}: nothing orders it after a store of somebody else in {storage.name}")
        storage.reductions.append((writer, int(index.min()), int(index.max())))
        if self.fixed_order:
            if storage.reducers is None:
                storage.reducers = np.zeros(len(storage.bytes), np.int32)
            if self._is_race(np.unique(storage.reducers[index * values.itemsize]), writer, known):
                raise Race(f"reduction at {where}: nothing orders it after that of somebody else in {storage.name}")
            storage.reducers[index * values.itemsize] = writer
        function.at(self._items(storage, values.dtype), index, values[mask])
