"""`diyfa.warmup`: compile the kernels of calls, in several processes, before the calls come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from diyfa.ready.building import Built, build, cores
from diyfa.ready.recording import Recorded, backend_for_arch, backend_here, record
from diyfa.ready.words import parse

SECONDS = 10.0  # least time between two lines in a log


class Warmed(NamedTuple):
    """The result of `diyfa.warmup`."""

    kernels: int  # kernels that the calls launch
    compiled: int  # kernels compiled now
    failures: tuple[str, ...]
    refused: tuple[str, ...]  # calls that the device does not run, with the reason
    seconds: float

    def __str__(self) -> str:
        text = f"{self.kernels} kernels, of which {self.compiled} were compiled in {self.seconds:.1f} s"
        for verb, several in (("did not compile", self.failures), ("calls cannot run", self.refused)):
            text += f"; {len(several)} {verb}: {several[0]}" if several else ""
        return text


def warmup(
    calls: Callable[[], object] | str | Iterable[Callable[[], object] | str],
    *,
    arch: str | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> Warmed:
    """Compile the kernels of calls to come into the cache folder, in several processes, unless they are there already.

        diyfa.warmup("attention bfloat16 D=128 H=32/8 B=4 S=2048 causal")
        diyfa.warmup(lambda: model(batch).loss.backward())

    Args:
        calls: a call in words (`diyfa.ready.words`), a function, or several of both. A function is called once, with
            its own tensors. diyfa's operations in it compute nothing and return 0; the rest of the function runs as
            usual. No other thread may call diyfa until it returns.
        arch: a GPU that need not be here ("sm_90"); CPU tensors stand for its tensors. Default: the current device.
        jobs: processes; default: the number of cores.
        quiet: print nothing. Else lines on standard error show the progress, and a last one the result.

    Raises:
        ValueError: a description that is not understood, no usable device, or an unknown architecture.
        Any other error that a function raises.
    """
    start = time.monotonic()
    listed = [calls] if callable(calls) or isinstance(calls, str) else list(calls)
    named = [parse(each) if isinstance(each, str) else (getattr(each, "__name__", "a call"), each) for each in listed]
    name = backend_for_arch(arch) if arch else backend_here()
    recording = record(name, arch, named)
    warmed = warm(list(recording.kernels.values()), cores() if jobs is None else jobs, None if quiet else _Lines())
    warmed = warmed._replace(refused=tuple(recording.refused), seconds=time.monotonic() - start)
    if not quiet:
        print(f"diyfa.warmup: {warmed}", file=sys.stderr, flush=True)
    return warmed


def warm(kernels: list[Recorded], jobs: int, watch: Callable[[int, int, Built], None] | None = None) -> Warmed:
    """Compile those of `kernels` that are not compiled yet. `watch` is called with (number done, of how many, last)."""
    start = time.monotonic()
    missing = [kernel for kernel in kernels if not kernel.is_stored()]
    failures: list[str] = []
    count = 0

    def done(built: Built) -> None:
        nonlocal count
        count += 1
        if built.error:
            failures.append(f"{built.name}: {built.error}")
        if watch is not None:
            watch(count, len(missing), built)

    build(missing, jobs, done, any(getattr(kernel, "shares_a_header", False) for kernel in missing))
    compiled = len(missing) - len(failures)
    return Warmed(len(kernels), compiled, tuple(failures), (), time.monotonic() - start)


class _Lines:
    """Progress on standard error: a new line, at most every `SECONDS`, or on a terminal one line that is rewritten."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, count: int, total: int, built: Built) -> None:
        is_terminal, now = sys.stderr.isatty(), time.monotonic()
        text = f"diyfa.warmup: {count} of {total} kernels, {built.name}"
        if is_terminal:
            filled = 24 * count // total
            print(
                f"\r\x1b[K[{'#' * filled:24}] {text}", end="\n" if count == total else "", file=sys.stderr, flush=True
            )
        elif now - self.last >= SECONDS:
            self.last = now
            print(text, file=sys.stderr, flush=True)
