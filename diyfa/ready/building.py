"""Compiling many kernels by several processes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from diyfa.ready.recording import Recorded
from diyfa.ready.worker import receive, send


class Built(NamedTuple):
    """What came of a kernel."""

    name: str
    seconds: float
    error: str  # "": it is compiled


def cores() -> int:
    """How many processes may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(kernels: Iterable[Recorded], jobs: int, done: Callable[[Built], None]) -> None:
    """Have all kernels compiled by at most `jobs` processes; `done` is told of each, one after another.

    The processes are other programs, not forks of this one, which may have threads and a device, nor made by
    `multiprocessing`, which would run the user's script again.
    """
    waiting: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
    for kernel in kernels:
        waiting.put(kernel)
    finished: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()
    n_workers = min(jobs, waiting.qsize())
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="diyfa-compile-") as folder:
        environment = _environment(folder)

        def work() -> None:
            process: subprocess.Popen[bytes] | None = None
            try:
                while True:
                    try:
                        kernel = waiting.get_nowait()
                    except queue.Empty:
                        break
                    if process is None:
                        process = _start(environment)
                        processes.append(process)
                    assert process.stdin is not None and process.stdout is not None
                    try:
                        send(process.stdin, kernel)
                        seconds, error = receive(process.stdout)
                    except (EOFError, OSError):  # it crashed; the next kernel gets another one
                        seconds, error = 0.0, f"the process that compiles it ended with {process.wait()}"
                        process = None
                    finished.put(Built(kernel.name, seconds, error))
                if process is not None and process.stdin is not None:
                    process.stdin.close()
                    process.wait()
                finished.put(None)
            except BaseException as error:
                finished.put(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(n_workers)]
        for thread in threads:
            thread.start()
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
            for process in processes:
                process.kill()
                process.wait()


def _start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "diyfa.ready.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _environment(folder: str) -> dict[str, str]:
    """This process's, with the same modules, and a folder for what Triton leaves behind besides the binary."""
    found = os.environ | {"TRITON_CACHE_DIR": str(Path(folder, "triton")), "OMP_NUM_THREADS": "1"}
    found.pop("TRITON_INTERPRET", None)
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return found
