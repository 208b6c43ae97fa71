"""One program of the grid: its shared memory, its barriers, and its unfinished operations."""

from __future__ import annotations

from typing import Any

from .barriers import NamedBarrier
from .errors import InvalidOperand, KernelBug, Race, location
from .global_memory import GlobalMemory
from .scheduler import Scheduler, Task
from .shared_memory import MAX_BYTES, Allocation
from .tma import Landing, Stores
from .wgmma import Products

# Named barriers that the compiler uses itself: two, and one more for each partition except the first.
COMPILER_BARRIERS = 2


class Program:
    def __init__(
        self, scheduler: Scheduler, memory: GlobalMemory, index: tuple[int, int, int], grid: tuple[int, int, int]
    ) -> None:
        self.scheduler, self.memory, self.index, self.grid = scheduler, memory, index, grid
        self.semantic: Any = None
        self.copies: list[Landing] = []  # unfinished ones
        self.is_alone = True  # earlier kernels on the stream have certainly ended
        self.reserved_barriers = COMPILER_BARRIERS
        self._allocations: list[Allocation] = []
        self._named: dict[int, NamedBarrier] = {}
        self._products: dict[Task, Products] = {}
        self._stores: dict[Task, Stores] = {}
        self._task_ids: dict[Task, int] = {}

    def add_allocation(self, allocation: Allocation) -> None:
        self._allocations.append(allocation)
        used = sum(a.bytes for a in self._allocations)
        if used > MAX_BYTES:
            raise InvalidOperand(f"{used} bytes of shared memory with {allocation.name}, there are {MAX_BYTES}")

    def touch_global(self, what: str) -> None:
        """Check, before an access to global memory, that earlier kernels on the stream have ended."""
        if not self.is_alone:
            raise Race(f"{what} at {location()} in a dependent launch, before griddepcontrol.wait")

    def named_barrier(self, number: int) -> NamedBarrier:
        return self._named.setdefault(number, NamedBarrier(number))

    def products(self, task: Task) -> Products:
        return self._products.setdefault(task, Products(task))

    def stores(self, task: Task) -> Stores:
        return self._stores.setdefault(task, Stores(task))

    def new_writer(self) -> int:
        """Return a new number for a writer to global memory."""
        self.memory.writers += 1
        return self.memory.writers

    def writer_of(self, task: Task) -> int:
        if task not in self._task_ids:
            self._task_ids[task] = self.new_writer()
        return self._task_ids[task]

    def finish(self) -> None:
        """Check that no operation may still run: it would touch shared memory that is no longer the program's."""
        left = [copy.what for copy in self.copies]
        left += [what for products in self._products.values() for what in products.running()]
        left += [f"TMA stores of {s.task}" for s in self._stores.values() if s.waited < s.issued]
        if left:
            raise KernelBug(f"the program ends while still running: {', '.join(left)}")
        barriers = [b for a in self._allocations for b in a.barriers.values()]
        incomplete = [f"{b.name} is in {b.state()}" for b in barriers if b.bytes]
        if incomplete:
            raise KernelBug(f"bytes expected and bytes copied differ at the end: {'; '.join(incomplete)}")
