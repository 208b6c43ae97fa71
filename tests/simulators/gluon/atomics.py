"""Atomic additions in global memory: the order that they make, and races of plain accesses with them."""

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
    """One atomic number: the last step of each partition that changed it, and the clock that its releases published."""

    def __init__(self) -> None:
        self.steps: dict[Task, int] = {}
        self.released = Clock()


class Atomics:
    """The numbers that one launch changes atomically."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._places: dict[int, _Place] = {}

    def add(self, address: int, value: Any, dtype: np.dtype[Any], semantics: Any, program: Program) -> Any:
        """Add, and return the old value. `semantics` (acquire, release) decide which partitions it orders."""
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
        """Wait until the number is `value`, and acquire what atomic additions to it released."""
        place = self._places.setdefault(address, _Place())
        where = location()
        program.scheduler.wait(
            lambda: self._memory.peek(address, np.dtype(np.int32)) == value, lambda: f"turn {value} at {where}"
        )
        current().clock.join(place.released)

    def plain(self, addresses: np.ndarray, what: str) -> None:
        """Raise Race unless a plain load or store comes after every atomic access to the same address."""
        if not self._places:
            return
        known = current().clock.known
        for address in {int(a) for a in addresses.reshape(-1)} & self._places.keys():
            for task, step in self._places[address].steps.items():
                if known.get(task, 0) < step:
                    raise Race(f"{what} at {location()}, but nothing orders it after an atomic access by {task.name}")


class OfFirstLane(TensorHandle):
    """A number that only the first lane of a warp has, until a shuffle broadcasts it."""

    def __init__(self, value: TensorHandle) -> None:
        self.dtype, self.attr, self.value = value.dtype, {}, value

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        raise InvalidOperand(f"{location()} uses what only the first lane of the warp has")


def wait_for_value(pointer: TensorHandle, value: TensorHandle) -> None:
    """Wait, with acquire semantics, until a number in global memory has this value."""
    program = current().program
    program.touch_global("wait for a number")
    program.memory.atomics.wait(int(pointer.data.reshape(-1)[0]), int(value.data.reshape(-1)[0]), program)


def add_scalar(pointer: TensorHandle, value: TensorHandle, semantics: Any) -> TensorHandle:
    """Add atomically to one number in global memory; return the old value."""
    program = current().program
    program.touch_global("atomic addition")
    dtype = stored(value.dtype.scalar)
    if pointer.data.size != 1:
        raise NotImplementedError(f"atomic addition of a block at {location()}")
    number = value.data.reshape(-1)[0]
    old = program.memory.atomics.add(int(pointer.data.reshape(-1)[0]), number, dtype, semantics, program)
    return TensorHandle(np.array([old], dtype), value.dtype.scalar)
