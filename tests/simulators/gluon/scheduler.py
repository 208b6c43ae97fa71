"""A cooperative scheduler: partitions are threads, of which one runs at a time; asynchronous operations are events.

At each switch a seeded generator draws the partition or event that continues. Each seed is another interleaving, and
equal seeds give equal interleavings. Every partition and event has one weight for the whole run: one seed may let a
consumer run far ahead, another may delay every copy until all partitions wait for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from .clock import Clock
from .errors import Deadlock

WEIGHTS = (0.02, 0.3, 1.0, 1.0, 3.0, 50.0)


class _Abort(BaseException):
    """Unwinds a partition after another one failed."""


class Event:
    """An operation that the hardware performs by itself, some time after it was issued."""

    def __init__(self, run: Callable[[], None], what: str, ready: Callable[[], bool] | None = None) -> None:
        self.run, self.what, self.ready = run, what, ready
        self.weight = 1.0


class Task:
    """One partition of warps of one program."""

    def __init__(self, body: Callable[[], Any], name: str, program: Any, num_warps: int, clock: Clock) -> None:
        self.body, self.name, self.program, self.num_warps = body, name, program, num_warps
        self.clock = clock
        self.steps = 0
        self.marker: str | None = None  # qualifies the next instruction of its kind, see `markers.py`
        self.condition: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = lambda: "its turn"
        self.weight = 1.0
        self.alive = True
        self.thread: threading.Thread | None = None
        self.baton = threading.Semaphore(0)

    def step(self) -> int:
        """Begin a new step of this agent and return its number."""
        self.steps += 1
        self.clock.known[self] = self.steps
        return self.steps

    def __repr__(self) -> str:
        return self.name


_current: Task | None = None


def current() -> Task:
    """Return the partition that is running."""
    assert _current is not None, "no kernel is being interpreted"
    return _current


class Scheduler:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._event_weights = {0: (1.0,), 1: (1e-9,), 2: (1e9,)}.get(seed, WEIGHTS)
        self._task_weights = (1.0,) if seed < 3 else WEIGHTS
        self._tasks: list[Task] = []
        self._events: list[Event] = []
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def spawn(self, task: Task) -> None:
        task.weight = self._random.choice(self._task_weights)
        self._tasks.append(task)

    def later(self, event: Event) -> None:
        """Let `event` happen at some time from now on."""
        event.weight = self._random.choice(self._event_weights)
        self._events.append(event)

    def run(self) -> None:
        """Run all spawned tasks, and the tasks that they spawn, to their ends."""
        global _current
        try:
            self._resume(self._pick())
            self._done.wait()
            for task in self._tasks:
                if task.thread is not None:
                    task.thread.join()
        finally:
            _current = None
        if self._failure is not None:
            raise self._failure

    def pause(self) -> None:
        """Let the generator choose whether another task or an event runs now."""
        self._switch(current())

    def wait(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let others run until the condition holds."""
        task = current()
        task.condition, task.waits_for = condition, what
        self._switch(task)
        task.condition = None

    def _switch(self, task: Task) -> None:
        chosen = self._pick()
        if chosen is not task:
            self._resume(chosen)
            task.baton.acquire()
            if self._failure is not None:
                raise _Abort

    def _resume(self, task: Task) -> None:
        global _current
        _current = task
        if task.thread is None:
            task.thread = threading.Thread(target=self._work, args=(task,), name=task.name, daemon=True)
            task.thread.start()
        else:
            task.baton.release()

    def _pick(self) -> Task:
        """Run the events that are drawn before a task; return the task that is drawn."""
        while True:
            choices: list[Any] = [t for t in self._tasks if t.alive and (t.condition is None or t.condition())]
            choices += [e for e in self._events if e.ready is None or e.ready()]
            if not choices:
                raise Deadlock(self._report())
            chosen = choices[0]
            if len(choices) > 1:
                chosen = self._random.choices(choices, [c.weight for c in choices])[0]
            if isinstance(chosen, Task):
                return chosen
            self._events.remove(chosen)
            chosen.run()

    def _work(self, task: Task) -> None:
        try:
            task.body()
            task.alive = False
            if any(t.alive for t in self._tasks):
                self._resume(self._pick())
            else:
                self._done.set()
        except _Abort:
            pass
        except BaseException as failure:  # `run` raises it in the launching thread
            self._failure = failure
            for other in self._tasks:
                other.baton.release()
            self._done.set()

    def _report(self) -> str:
        lines = [f"{t.name} waits for {t.waits_for()}" for t in self._tasks if t.alive]
        return "deadlock:\n  " + "\n  ".join(lines)
