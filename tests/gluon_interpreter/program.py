"""One program of the grid: its shared memory, its partitions, its cluster, and what it must not leave behind."""

from __future__ import annotations

from typing import Any

import numpy as np

from .barriers import NamedBarrier
from .cluster import WARPGROUP, Cluster
from .errors import InvalidOperand, KernelBug, Race, location
from .global_memory import GlobalMemory
from .scheduler import Scheduler, Task, current
from .shared_memory import MAX_BYTES, Allocation, SharedView
from .tma import Landing, Stores
from .wgmma import Products

# Named barriers that the compiler uses itself: two, and one for each partition but the first.
COMPILER_BARRIERS = 2


class Program:
    def __init__(
        self,
        scheduler: Scheduler,
        memory: GlobalMemory,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        cluster: Cluster,
    ) -> None:
        self.scheduler, self.memory, self.index, self.grid, self.cluster = scheduler, memory, index, grid, cluster
        self.semantic: Any = None
        self.copies: list[Landing] = []  # under way to this program's memory, from wherever
        self.partitions: list[Task] = []
        self.padding = 0  # warps that the compiler adds to fill a warpgroup, and that do nothing
        self.met_alone: str | None = None  # where, when there were no partitions yet
        self.ended = False
        self.is_alone = True  # kernels before on the stream are known to have ended
        self.reserved_barriers = COMPILER_BARRIERS
        self._allocations: list[Allocation] = []
        self._named: dict[int, NamedBarrier] = {}
        self._products: dict[Task, Products] = {}
        self._stores: dict[Task, Stores] = {}
        self._task_ids: dict[Task, int] = {}
        self._places: dict[tuple[str, int], Allocation] = {}
        self._reached: dict[Any, tuple[int, str]] = {}  # by other programs: the last step of each agent
        cluster.programs.append(self)

    def add_allocation(self, allocation: Allocation) -> None:
        self._allocations.append(allocation)
        used = sum(a.bytes for a in self._allocations)
        if used > MAX_BYTES:
            raise InvalidOperand(f"{used} bytes of shared memory with {allocation.name}, there are {MAX_BYTES}")
        where = location()
        allocation.place = (where, sum(place[0] == where for place in self._places))
        self._places[allocation.place] = allocation

    def touch_global(self, what: str) -> None:
        """Called before each access to global memory."""
        if not self.is_alone:
            raise Race(f"{what} at {location()} in a dependent launch, before griddepcontrol.wait")

    # ---- the cluster

    @property
    def warps(self) -> int:
        return self.padding + sum(task.num_warps for task in self.partitions)

    def begin_partitions(self, tasks: list[Task]) -> None:
        """Beside the first partition, for as long as the program lasts."""
        self.partitions += tasks
        self.padding = -sum(task.num_warps for task in tasks) % WARPGROUP

    def comes_to_meeting(self, where: str) -> None:
        if len(self.partitions) == 1:
            self.met_alone = where

    def same_place(self, view: SharedView) -> SharedView:
        """What lies here where `view` lies in the memory of another program of the cluster."""
        found = self._places.get(view.allocation.place)
        if found is None:
            raise Race(
                f"{location()} reaches for memory of program {self.index[0]}, of which nothing says that it has begun"
            )
        array = np.ndarray(view.array.shape, view.array.dtype, found.array, view.offset(), view.array.strides)
        return SharedView(found, array, view.layout)

    def reached_by(self, agent: Any, step: int, what: str) -> None:
        """Another program's copy or arrival, which must come while this one lasts."""
        if self.ended:
            raise KernelBug(f"{what}, but program {self.index[0]} has ended")
        self._reached[agent] = step, what

    def named_barrier(self, number: int) -> NamedBarrier:
        return self._named.setdefault(number, NamedBarrier(number))

    def products(self, task: Task) -> Products:
        return self._products.setdefault(task, Products(task))

    def stores(self, task: Task) -> Stores:
        return self._stores.setdefault(task, Stores(task))

    def new_writer(self) -> int:
        """A number for somebody who writes to global memory."""
        self.memory.writers += 1
        return self.memory.writers

    def writer_of(self, task: Task) -> int:
        if task not in self._task_ids:
            self._task_ids[task] = self.new_writer()
        return self._task_ids[task]

    def finish(self) -> None:
        """What is still under way, or may be, would touch shared memory that is no longer the program's."""
        known = current().clock.known
        coming = [what for agent, (step, what) in self._reached.items() if known.get(agent, 0) < step]
        if coming:
            raise KernelBug(f"program {self.index[0]} ends, but nothing has waited for: {coming[0]}")
        left = [copy.what for copy in self.copies]
        left += [what for products in self._products.values() for what in products.running()]
        left += [f"TMA stores of {s.task}" for s in self._stores.values() if s.waited < s.issued]
        if left:
            raise KernelBug(f"the program ends while still running: {', '.join(left)}")
        barriers = [b for a in self._allocations for b in a.barriers.values()]
        incomplete = [f"{b.name} is in {b.state()}" for b in barriers if b.bytes]
        if incomplete:
            raise KernelBug(f"bytes expected and bytes copied differ at the end: {'; '.join(incomplete)}")
        self.ended = True
        self.cluster.meeting.advance()
