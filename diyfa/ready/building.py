"""Compilation of many kernels by several processes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from diyfa.ready.recording import Recorded
from diyfa.ready.worker import receive, send

# Kernels that one process compiles. It frees no memory: 4 to 5 MB for each kernel. Starting another one takes 3 s.
PER_PROCESS = 100


class Built(NamedTuple):
    """The result of compiling one kernel."""

    name: str
    seconds: float
    error: str  # "" after success


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(
    kernels: Iterable[Recorded], jobs: int, done: Callable[[Built], None], one_before_others: bool = False
) -> None:
    """Compile all kernels in at most `jobs` processes. `done` is called for each one, in this thread.

    `one_before_others`: kernels are compiled one at a time until one has succeeded.

    The processes are new programs. A fork would copy a process that may have threads and a device, and
    `multiprocessing` would run the user's script once more.
    """
    waiting: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    finished: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []

    def compile_with(process: subprocess.Popen[bytes], kernel: Recorded) -> Built:
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, kernel)
            return Built(kernel.name, *receive(process.stdout))
        except (EOFError, OSError):
            return Built(kernel.name, 0.0, f"the process that compiles it ended with {process.wait()}")

    lock, is_over = threading.Lock(), False  # the lock guards `processes` and `is_over`
    one_at_a_time, has_succeeded = threading.Lock(), not one_before_others

    def compile_first(process: subprocess.Popen[bytes], kernel: Recorded) -> Built:
        """Compile the kernel: until one has succeeded, while no other thread compiles."""
        nonlocal has_succeeded
        if not has_succeeded:
            with one_at_a_time:
                if not has_succeeded:
                    built = compile_with(process, kernel)
                    has_succeeded = not built.error
                    return built
        return compile_with(process, kernel)

    def work() -> None:
        """Compile waiting kernels in processes of this thread's own, one after another, until none is left."""
        process: subprocess.Popen[bytes] | None = None
        try:
            for number in count():
                try:
                    kernel = waiting.get_nowait()
                except queue.Empty:
                    break
                if process is not None and number % PER_PROCESS == 0:
                    process.kill()
                    process.wait()
                if process is None or process.poll() is not None:  # not started yet, killed or crashed
                    with lock:
                        if is_over:  # `build` has killed it and waits for no more results
                            return
                        process = _start()
                        processes.append(process)
                finished.put(compile_first(process, kernel))
            finished.put(None)
        except BaseException as error:  # `build` raises it
            finished.put(error)

    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    n_workers = min(jobs, waiting.qsize())
    for _ in range(n_workers):
        threading.Thread(target=work, daemon=True).start()
    try:
        while n_workers:
            built = finished.get()
            if isinstance(built, BaseException):
                raise built
            if built is None:
                n_workers -= 1
            else:
                done(built)
    finally:
        with lock:
            is_over = True
        for process in processes:
            process.kill()
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    """Start a worker process that finds the same modules."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "diyfa.ready.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
