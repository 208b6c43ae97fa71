"""Reports of kernels that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from zlib import crc32


@dataclass(frozen=True)
class CompileReport:
    """The result of compiling one kernel without the device, as `diyfa compile` and the CI gate show it."""

    backend: str
    target: str  # "sm_90", "Ascend910B3"
    kernel: str  # "attention_fwd/v2"
    case: str  # "float16 D=128 causal 128x64"
    ok: bool  # compiled, and passed the backend's gate (no spills; bound and pipelined)
    seconds: float
    registers: int | None = None
    spill_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict)  # bytes: {"shared": …} or {"ub": …, "l1": …, "l0c": …}
    notes: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)  # bytes of each of `memory` that the chip has
    metrics: dict[str, Any] = field(default_factory=dict)  # other facts that the backend read from the compiled kernel
    spill_budget: int | None = None  # bytes of spills that the gate allows
    compiler: str = ""  # name and version, if several compilers compile a kernel


class _Job(Protocol):
    @property
    def kernel(self) -> str: ...
    @property
    def case(self) -> str: ...


Job = TypeVar("Job", bound=_Job)


def sample_jobs(every: int, jobs: Iterable[Job], target: str, only: str | None = None) -> Iterator[Job]:
    """Yield the first case of each kernel, and one in `every` of the others, of all that is compiled for `target`.

    `only` leaves out jobs whose "kernel case" does not contain it. A checksum of the names selects: every nth of a list
    might always be the same tile. It includes the target, so that targets have different cases.
    """
    seen = set()
    for job in jobs:
        name = f"{job.kernel} {job.case}"
        if only is None or only in name:
            if job.kernel not in seen or crc32(f"{target} {name}".encode()) % every == 0:
                yield job
            seen.add(job.kernel)
