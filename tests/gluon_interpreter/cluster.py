"""A cluster: programs that run together and reach into each other's shared memory; the barrier of all their threads.

Gluon of Triton 3.6 has no words for that. Kernels write marks of `sm90_multicast.py` in front of the instruction they
mean, or around copies, which that module completes in the PTX; here the partition remembers the mark until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diyfa.backends.cuda.sm90_multicast import (
    ARRIVE_MARK,
    CLUSTER_RELEASE_MARK,
    COPIED_MARK,
    COPY_MARK,
    RELEASE_MARK,
    WAIT_MARK,
)

from .barriers import WARP
from .clock import Clock
from .errors import Deadlock, InvalidOperand, location
from .scheduler import Task, current

if TYPE_CHECKING:
    from .program import Program

MARKS = (RELEASE_MARK, CLUSTER_RELEASE_MARK, WAIT_MARK, ARRIVE_MARK)
WARPGROUP = 4  # warps


class Cluster:
    """Neighbouring programs of the grid. A program without neighbours is a cluster of its own."""

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.meeting = Meeting(self)
        self.copies_to_all = 0

    def __str__(self) -> str:
        return " and ".join(str(program.index[0]) for program in self.programs)

    @property
    def is_shared(self) -> bool:
        return len(self.programs) > 1


class Meeting:
    """`barrier.cluster`: complete when all threads of all programs that have not ended have come."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._arrived: dict[Task, str] = {}
        self._now = Clock()
        self._ended: list[Clock] = []

    def come(self) -> None:
        """The running partition arrives, and waits for everybody else."""
        task, where = current(), location()
        task.program.scheduler.pause()
        task.program.comes_to_meeting(where)
        task.step()
        self._now.join(task.clock)
        self._arrived[task] = where
        number = len(self._ended)
        self.advance()
        task.program.scheduler.wait(
            lambda: len(self._ended) > number, lambda: f"its cluster at {where}, {self._state()}"
        )
        task.clock.join(self._ended[number])

    def advance(self) -> None:
        """See whether somebody is missing still."""
        here = sum(task.num_warps for task in self._arrived)
        if self._arrived and here == self._expected():
            self._ended.append(self._now)
            self._now, self._arrived = Clock(), {}

    def _expected(self) -> int:
        """Warps. Those that have exited are not waited for."""
        return sum(program.warps for program in self._cluster.programs if not program.ended)

    def _state(self) -> str:
        here = WARP * sum(task.num_warps for task in self._arrived)
        programs = [program for program in self._cluster.programs if not program.ended]
        absent = [task.name for p in programs for task in p.partitions if task not in self._arrived]
        absent += [f"{p.padding} warps that fill up a warpgroup of program {p.index[0]}" for p in programs if p.padding]
        return f"to which {here} of {WARP * self._expected()} threads have come, not {', '.join(absent)}"


def mark(text: str) -> None:
    """The running partition says what its next instruction of that kind means."""
    task = current()
    if text == CLUSTER_RELEASE_MARK:
        _need_cluster(text)
    if task.mark is not None:
        raise InvalidOperand(f"{text!r} at {location()}, but what {task.mark!r} speaks of has not come")
    task.mark = text


def take_mark(what: str, *meant: str) -> str | None:
    """The mark of the instruction that the running partition has come to; it may only be one that means such."""
    task = current()
    found, task.mark = task.mark, None
    if found is not None and found not in meant:
        raise InvalidOperand(f"{found!r} in front of {what} at {location()}: it speaks of something else")
    return found


def begin_copies() -> None:
    """From here to the other mark, what the running partition copies goes to all programs."""
    task = current()
    _need_cluster(COPY_MARK)
    if task.copies_to_all is not None:
        raise InvalidOperand(f"{COPY_MARK!r} at {location()}, but {COPIED_MARK!r} has not come")
    task.copies_to_all = 0


def end_copies() -> None:
    task = current()
    if not task.copies_to_all:
        raise InvalidOperand(f"no copy stands between {COPY_MARK!r} and {COPIED_MARK!r} at {location()}")
    task.copies_to_all = None


def copies_to_all() -> bool:
    """Whether the copy that the running partition has come to stands between marks."""
    task = current()
    if task.copies_to_all is None:
        return False
    task.copies_to_all += 1
    task.program.cluster.copies_to_all += 1
    return True


def leave_no_mark() -> None:
    """The running partition ends."""
    task = current()
    left = task.mark or (None if task.copies_to_all is None else COPY_MARK)
    if left is not None:
        raise InvalidOperand(f"{task.name} ends, but what {left!r} speaks of has not come")


def _need_cluster(text: str) -> None:
    if not current().program.cluster.is_shared:
        raise InvalidOperand(f"{text!r} at {location()} in a kernel that is not launched in clusters")


def meets_before_partitions(program: Program) -> Deadlock:
    return Deadlock(
        f"program {program.index[0]} meets its cluster at {program.met_alone}, outside of warp_specialize, whose warps "
        "do not come there"
    )
