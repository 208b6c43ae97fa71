"""mbarriers with phases, arrivals and bytes, and named barriers."""

from __future__ import annotations

from typing import Any

from .clock import Clock
from .errors import BarrierMisuse, Race, location
from .scheduler import Task, current
from .shared_memory import SharedView

MAX_COUNT = (1 << 20) - 1
WARP = 32


class MBarrier:
    """A counter of arrivals and bytes. When both are complete, a phase ends and the next one begins.

    Everything before the arrivals of a phase happened before the end of every wait for it.
    """

    def __init__(self, name: str, count: int, task: Task) -> None:
        self.name, self.count = name, count
        self.made_by, self.made_at = task, task.step()
        self.pending, self.bytes = count, 0
        self.ended: list[Clock] = []  # one for each completed phase
        self._now = Clock()
        self._waited: dict[Task, int] = {}  # the last phase that each partition waited for

    def _visible(self, clock: Clock, asynchronous: bool) -> None:
        seen = clock.fenced if asynchronous else clock.known
        if seen.get(self.made_by, 0) < self.made_at:
            how = "without fence_async_shared after" if asynchronous else "before"
            raise Race(f"{self.name} is used at {location()} {how} its init has taken effect there")

    def state(self) -> str:
        return f"phase {len(self.ended)}: {self.pending} of {self.count} arrivals and {self.bytes} bytes missing"

    def arrive(self, count: int) -> None:
        task = current()
        self._visible(task.clock, False)
        task.step()
        if count > self.pending:
            raise BarrierMisuse(
                f"{task.name} arrives at {self.name} at {location()} with count {count}, {self.state()}: more arrivals "
                "than a phase takes"
            )
        self._now.join(task.clock)
        self.pending -= count
        self._end_phase()

    def expect(self, size: int) -> None:
        self.bytes += size
        if self.bytes > MAX_COUNT:
            raise BarrierMisuse(
                f"{self.bytes} bytes expected at {self.name} at {location()}: a phase counts {MAX_COUNT}"
            )
        self.arrive(1)

    def check_asynchronous(self, clock: Clock) -> None:
        """Check that the barrier's init is visible to TMA, whose copies complete here."""
        self._visible(clock, True)

    def complete(self, size: int, copy: Any, finished: bool) -> None:
        """Count `size` bytes that a copy has written."""
        self.bytes -= size
        if finished:
            self._now.learn(copy, 1)
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self._now.learn(self, len(self.ended) + 1)
            self.ended.append(self._now)
            self._now = Clock()
            self.pending = self.count

    def wait(self, parity: int) -> None:
        """Wait until the phase of that parity has ended. Phase -1, before the first, counts as ended."""
        task = current()
        self._visible(task.clock, False)
        if parity not in (0, 1):
            raise BarrierMisuse(f"{task.name} waits at {location()} for parity {parity} of {self.name}: it is 0 or 1")
        # The wait means the first phase of this parity that is neither before the partition's last awaited phase nor
        # before the last phase that it knows to have ended.
        phase = max(self._waited.get(task, -1), task.clock.known.get(self, 0) - 1)
        phase += (phase - parity) % 2
        self._waited[task] = phase
        where = location()
        task.program.scheduler.wait(
            lambda: (len(self.ended) - 1) % 2 == parity,
            lambda: f"parity {parity} of {self.name} at {where}, which is in {self.state()}",
        )
        if len(self.ended) > phase + 1:
            raise BarrierMisuse(
                f"{task.name} waits at {location()} for phase {phase} of {self.name} (parity {parity}), of which "
                f"{len(self.ended)} phases have ended: parity cannot tell them apart, the answer is of another phase"
            )
        if phase >= 0:
            task.clock.join(self.ended[phase])


class NamedBarrier:
    """A barrier of `bar.sync` and `bar.arrive`, complete when the number of threads that each states has come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.arrived: dict[Task, str] = {}
        self.threads = 0
        self.completed = 0
        self._now = Clock()
        self._ended: list[Clock] = []

    def _join(self, count: int) -> int:
        task = current()
        if task in self.arrived:
            raise BarrierMisuse(
                f"{task.name} comes to named barrier {self.number} at {location()} a second time before it completed "
                f"(first at {self.arrived[task]})"
            )
        if self.arrived and count != self.count:
            raise BarrierMisuse(
                f"named barrier {self.number} of {count} threads at {location()}, of {self.count} elsewhere"
            )
        self.count = count
        self.threads += task.num_warps * WARP
        if self.threads > count:
            raise BarrierMisuse(f"{self.threads} threads come to named barrier {self.number} of {count}")
        self.arrived[task] = location()
        task.step()
        self._now.join(task.clock)
        generation = self.completed
        if self.threads == count:
            self._ended.append(self._now)
            self._now, self.arrived, self.threads = Clock(), {}, 0
            self.completed += 1
        return generation

    def arrive(self, count: int) -> None:
        self._join(count)

    def sync(self, count: int) -> None:
        generation = self._join(count)
        task, where = current(), location()
        task.program.scheduler.wait(
            lambda: self.completed > generation,
            lambda: f"named barrier {self.number} at {where}, to which {self.threads} of {count} threads have come",
        )
        task.clock.join(self._ended[generation])


def barrier_at(view: SharedView) -> MBarrier:
    """Return the mbarrier that was initialised in this memory."""
    found = view.allocation.barriers.get(view.offset())
    if found is None:
        raise BarrierMisuse(f"mbarrier at {location()} of {view.allocation.name} was never initialised")
    return found


def init(view: SharedView, count: int) -> None:
    if view.array.size != 1:
        raise BarrierMisuse(f"mbarrier.init at {location()} of {view.array.size} barriers at once")
    if not 1 <= count <= MAX_COUNT:
        raise BarrierMisuse(f"mbarrier.init at {location()} with count {count}")
    if view.offset() in view.allocation.barriers:
        raise BarrierMisuse(f"mbarrier.init at {location()} of a barrier that is in use: invalidate it first")
    name = f"mbarrier {view.allocation.name}[{view.offset() // 8}]"
    view.allocation.barriers[view.offset()] = MBarrier(name, count, current())


def invalidate(view: SharedView) -> None:
    barrier_at(view)
    del view.allocation.barriers[view.offset()]
