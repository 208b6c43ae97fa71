"""TMA: descriptors that clip, loads that complete an mbarrier later, stores that read shared memory later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton.ir import DESCRIPTOR_REDUCE_KIND

from .barriers import MBarrier
from .errors import InvalidOperand, location
from .numerics import NAN_BITS, poison, stored
from .scheduler import Event, Task, current
from .shared_memory import SharedView

_REDUCTIONS = {
    DESCRIPTOR_REDUCE_KIND.ADD: np.add,
    DESCRIPTOR_REDUCE_KIND.MIN: np.minimum,
    DESCRIPTOR_REDUCE_KIND.MAX: np.maximum,
}
MAX_BOX = 256
MAX_SHAPE = 1 << 32
MAX_STRIDE_BYTES = 1 << 40
ALIGNMENT = 16


@dataclass
class Descriptor:
    """A tensor map: `shape` and `strides` in elements, the box of one copy, and the box's layout in shared memory."""

    name: str
    address: int
    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any
    dtype: tl.dtype
    padding: str

    def __post_init__(self) -> None:
        size = self.dtype.primitive_bitwidth // 8
        rules = {
            f"the address is a multiple of {ALIGNMENT}": self.address % ALIGNMENT == 0,
            "it has 1 to 5 dimensions": 1 <= len(self.shape) == len(self.strides) == len(self.block) <= 5,
            "the last stride is 1": self.strides[-1] == 1,
            f"strides are multiples of {ALIGNMENT} bytes": all(s * size % ALIGNMENT == 0 for s in self.strides[:-1]),
            "strides are in [0, 2^40) bytes": all(0 <= s * size < MAX_STRIDE_BYTES for s in self.strides[:-1]),
            "sizes are in [1, 2^32]": all(1 <= s <= MAX_SHAPE for s in self.shape),
            "box sizes are powers of two": all(b > 0 and b & (b - 1) == 0 for b in self.block),
            # A row longer than the swizzle is split into several messages, other dimensions are not.
            f"box sizes are at most {MAX_BOX}": all(b <= MAX_BOX for b in self.block[:-1]),
            f"a row of the box has at least {ALIGNMENT} bytes": self.block[-1] * size >= ALIGNMENT,
            "the layout is of this element": self.layout.element_bitwidth == self.dtype.primitive_bitwidth,
            "the layout is of this rank": self.layout.rank == len(self.block),
            "a row of the box fills the swizzle": self.block[-1] * size % max(self.layout.swizzle_byte_width, 1) == 0,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InvalidOperand(f"tensor descriptor {self.name} breaks: {'; '.join(broken)} ({self})")

    @property
    def bytes(self) -> int:
        return int(np.prod(self.block)) * self.dtype.primitive_bitwidth // 8

    def places(self, coordinates: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of the box at `coordinates`, wrapped at 64 bits, and a mask of those in the tensor."""
        size = self.dtype.primitive_bitwidth // 8
        addresses = np.full((1,) * len(self.block), self.address, np.uint64)
        inside = np.ones((1,) * len(self.block), bool)
        for d, (start, block) in enumerate(zip(coordinates, self.block, strict=True)):
            along = [1] * len(self.block)
            along[d] = block
            index = (start + np.arange(block, dtype=np.int64)).reshape(along)
            inside = inside & (index >= 0) & (index < self.shape[d])
            # Products wrap modulo 2^64 like the hardware's, also for indices that are clipped.
            addresses = addresses + index.astype(np.uint64) * np.uint64(self.strides[d] * size)
        return np.broadcast_to(addresses, self.block), np.broadcast_to(inside, self.block)


def _is_one_span(view: SharedView) -> bool:
    """Return whether the box lies in shared memory as if it had a buffer of its own.

    A row longer than the swizzle is stored as several spans, each behind the same span of all rows. So some rows of a
    buffer lie side by side only if they have one span.
    """
    rows, columns = view.array.shape[-2:-1], view.array.shape[-1]
    swizzle = view.layout.swizzle_byte_width or columns * view.array.itemsize
    return rows == view.allocation.array.shape[-2:-1] or columns * view.array.itemsize <= swizzle


def _check(descriptor: Descriptor, coordinates: list[int], view: SharedView, what: str) -> None:
    rules = {
        f"{len(descriptor.block)} coordinates": len(coordinates) == len(descriptor.block),
        "coordinates of 32 bits": all(-(1 << 31) <= c < 1 << 31 for c in coordinates),
        f"a buffer of shape {descriptor.block}, not {list(view.array.shape)}": list(view.array.shape)
        == list(descriptor.block),
        f"a buffer of {descriptor.dtype}, not {view.dtype}": view.dtype == descriptor.dtype,
        f"a buffer of layout {descriptor.layout}, not {view.layout}": view.layout == descriptor.layout,
        "a buffer without gaps": view.array.flags.c_contiguous,
        "all rows of a buffer, or rows of one swizzle": _is_one_span(view),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise InvalidOperand(f"TMA {what} of {descriptor.name} at {location()} needs {'; '.join(broken)}")


class Landing:
    """A copy to shared memory. The data arrive in two halves, and each counts its bytes at the barrier."""

    def __init__(self, descriptor: Descriptor, coordinates: list[int], barrier: MBarrier, view: SharedView) -> None:
        _check(descriptor, coordinates, view, "load")
        task = current()
        self.program = task.program
        self.what = f"TMA load of {descriptor.name} at {location()}"
        barrier.check_asynchronous(task.clock)
        view.access(self.what, task.clock, self, 1, write=True, asynchronous=True)
        poison(view.array, view.dtype)
        self.barrier = barrier
        addresses, inside = descriptor.places(coordinates)
        dtype = stored(descriptor.dtype)
        fill = NAN_BITS[descriptor.dtype] if descriptor.padding == "nan" else 0
        bits = np.uint8 if dtype.itemsize == 1 else np.uint16
        fill = np.array(fill, bits).view(dtype) if descriptor.padding == "nan" else dtype.type(0)
        self._from = (addresses.reshape(-1), inside.reshape(-1), fill, dtype)
        self._to = view.array.reshape(-1)
        half = self._to.size // 2
        self._parts = 2
        for part in (slice(0, half), slice(half, None)):
            self.program.scheduler.later(Event(lambda part=part: self._land(part), self.what))
        self.program.copies.append(self)

    def _land(self, part: slice) -> None:
        addresses, inside, fill, dtype = self._from
        self._to[part] = self.program.memory.load(addresses[part], inside[part], fill, dtype, reader=-1)
        self._parts -= 1
        self.barrier.complete(self._to[part].nbytes, self, finished=self._parts == 0)
        if self._parts == 0:
            self.program.copies.remove(self)


class Stores:
    """The copies from shared memory that one partition has issued. Each is a bulk group of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.agent = ("TMA stores", task)
        self.writing = ("writes of TMA stores", task)
        self.issued = 0
        self.waited = 0
        self._reading: set[int] = set()

    def issue(self, descriptor: Descriptor, coordinates: list[int], view: SharedView, reduction: Any = None) -> None:
        _check(descriptor, coordinates, view, "store")
        if reduction is not None and view.dtype == tl.bfloat16:
            raise NotImplementedError(f"TMA reduction of bfloat16 at {location()}")
        what = f"TMA store to {descriptor.name} at {location()}"
        self.issued += 1
        number = self.issued
        view.access(what, self.task.clock, self.agent, number, write=False, asynchronous=True)
        addresses, inside = descriptor.places(coordinates)
        self._reading.add(number)
        program = self.task.program
        writer = program.new_writer()
        program.memory.written[writer] = self.writing, number
        known, where = self.task.clock.copy().known, location()

        def read() -> None:
            if reduction is None:
                program.memory.store(addresses, inside, view.array, writer, known)
            else:
                program.memory.reduce(addresses, inside, view.array, _REDUCTIONS[reduction], writer, known, where)
            self._reading.remove(number)

        program.scheduler.later(Event(read, what))

    def wait(self, pending: int) -> None:
        """Wait until all but the last `pending` have read their shared memory."""
        last = self.issued - pending
        where = location()
        self.task.program.scheduler.wait(
            lambda: all(number > last for number in self._reading), lambda: f"TMA stores at {where}"
        )
        self.waited = max(self.waited, last)
        self.task.clock.learn(self.agent, last)

    def wait_written(self) -> None:
        """Wait until all have written to global memory. A wait for their reads does not ensure that."""
        self.wait(0)
        self.task.clock.learn(self.writing, self.issued)
