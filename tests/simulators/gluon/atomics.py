"""Atomic additions in global memory: what they order, and plain accesses that nothing orders with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle

from .clock import Clock
from .errors import InvalidOperand, Race, location
from .global_memory import GlobalMemory
from .numerics import stored
from .program import Program
from .scheduler import Task, current

_ACQUIRE = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASE = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


class _Place:
    """One number: the last step of each partition that changed it atomically, and what its releases passed on."""

    def __init__(self) -> None:
        self.steps: dict[Task, int] = {}
        self.released = Clock()


class Atomics:
    """The places of one launch that are changed atomically."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._places: dict[int, _Place] = {}

    def add(self, address: int, value: Any, dtype: np.dtype[Any], semantics: Any, program: Program) -> Any:
        """Add, and return what was there. Orders partitions as far as `semantics` says."""
        task = current()
        program.scheduler.pause()
        place = self._places.setdefault(address, _Place())
        if semantics in _ACQUIRE:
            task.clock.join(place.released)
        place.steps[task] = task.step()
        if semantics in _RELEASE:
            place.released.join(task.clock)
        return self._memory.add(address, value, dtype, program.writer_of(task))

    def wait(self, address: int, value: int, program: Program) -> None:
        """Wait until atomic additions have made it `value`, and acquire what they released."""
        place = self._places.setdefault(address, _Place())
        where = location()
        program.scheduler.wait(
            lambda: self._memory.peek(address, np.dtype(np.int32)) == value, lambda: f"turn {value} at {where}"
        )
        current().clock.join(place.released)

    def plain(self, addresses: np.ndarray, what: str) -> None:
        """A load or store that is not atomic must come after every atomic access to the same place."""
        if not self._places:
            return
        known = current().clock.known
        for address in {int(a) for a in addresses.reshape(-1)} & self._places.keys():
            for task, step in self._places[address].steps.items():
                if known.get(task, 0) < step:
                    raise Race(f"{what} at {location()}, but nothing orders it after an atomic access by {task.name}")


class OfFirstLane(TensorHandle):
    """A number that the first lane of a warp has and the others do not, until a shuffle hands it round."""

    def __init__(self, value: TensorHandle) -> None:
        self.dtype, self.attr, self.value = value.dtype, {}, value

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        raise InvalidOperand(f"{location()} uses what only the first lane of the warp has")


def wait_for_value(pointer: TensorHandle, value: TensorHandle) -> None:
    """Wait until a number of the running program's global memory has this value; acquires."""
    program = current().program
    program.touch_global("wait for a number")
    program.memory.atomics.wait(int(pointer.data.reshape(-1)[0]), int(value.data.reshape(-1)[0]), program)


def add_scalar(pointer: TensorHandle, value: TensorHandle, semantics: Any) -> TensorHandle:
    """An atomic addition to one number of the running program's global memory."""
    program = current().program
    program.touch_global("atomic addition")
    dtype = stored(value.dtype.scalar)
    if pointer.data.size != 1:
        raise NotImplementedError(f"atomic addition of a block at {location()}")
    number = value.data.reshape(-1)[0]
    old = program.memory.atomics.add(int(pointer.data.reshape(-1)[0]), number, dtype, semantics, program)
    return TensorHandle(np.array([old], dtype), value.dtype.scalar)
