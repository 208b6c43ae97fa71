"""Compilation of many kernels by several processes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
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


class _Compiler:
    """A process that compiles one kernel after another. Another one replaces it after a crash and after PER_PROCESS.

    The processes are new programs. A fork would copy a process that may have threads and a device, and
    `multiprocessing` would run the user's script once more.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._compiled = 0  # kernels of this process
        self._is_closed = False
        self._lock = threading.Lock()  # no process is started after `close`

    def compile(self, kernel: Recorded) -> Built:
        """Compile the kernel. Raises RuntimeError if the compiler is closed."""
        process = self._started()
        self._compiled += 1
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, kernel)
            return Built(kernel.name, *receive(process.stdout))
        except (EOFError, OSError):
            return Built(kernel.name, 0.0, f"the process that compiles it ended with {process.wait()}")

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, or a new one if it has crashed or compiled enough."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the compiler is closed")
            if self._process is None or self._compiled == PER_PROCESS or self._process.poll() is not None:
                self._kill()
                self._process, self._compiled = _start(), 0
            return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill the process, whatever it compiles."""
        with self._lock:
            self._is_closed = True
            self._kill()


def build(
    kernels: Iterable[Recorded], jobs: int, done: Callable[[Built], None], one_before_others: bool = False
) -> None:
    """Compile all kernels in at most `jobs` processes. `done` is called for each one, in this thread.

    `one_before_others`: kernels are compiled one at a time until one has succeeded.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    waiting: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    finished: queue.SimpleQueue[Built | BaseException] = queue.SimpleQueue()
    compilers = [_Compiler() for _ in range(min(jobs, waiting.qsize()))]

    def compile_waiting(compiler: _Compiler) -> None:
        try:
            while True:
                finished.put(compiler.compile(waiting.get_nowait()))
        except queue.Empty:
            pass
        except BaseException as error:  # `build` raises it
            finished.put(error)

    try:
        while one_before_others and waiting.qsize():
            built = compilers[0].compile(waiting.get_nowait())
            done(built)
            one_before_others = bool(built.error)
        left = waiting.qsize()
        for compiler in compilers:
            threading.Thread(target=compile_waiting, args=(compiler,), daemon=True).start()
        for _ in range(left):
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            done(result)
    finally:
        for compiler in compilers:
            compiler.close()


def _start() -> subprocess.Popen[bytes]:
    """Start a process that finds the same modules."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "diyfa.ready.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
