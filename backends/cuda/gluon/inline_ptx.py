"""Completes the PTX of the Hopper kernel with what Gluon of Triton 3.6 and 3.7 has no words for.

Plain Python, no Triton types. Neither the warps of a consumer nor the lanes of the producer can wait and arrive at a
barrier each for itself there: Triton has them all meet before, and one arrive. `barriers.py` writes marks in front
of the instructions it means. A mark is no PTX, so ptxas refuses a kernel that was not completed. Between Triton's
making of the PTX and ptxas, `complete` acts on the marks:

* a marked release, one thread's arrival for four warps behind a barrier of all of them, becomes one of each warp for
  itself;
* a marked wait loses the barrier among warps that Triton puts in front of it;
* a marked arrival of one thread for the 32 of a warp becomes one of each.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton

from diyfa.backends.cuda.gluon.compat import has_gluon

# Part of the marks, and with them of the key under which Triton keeps the compiled kernel.
_EDITION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
RELEASE_MARK = f".release_by_warp_{_EDITION};"
WAIT_MARK = f".wait_by_warp_{_EDITION};"
ARRIVE_MARK = f".arrive_by_lane_{_EDITION};"

_RELEASE = re.compile(
    r"bar\.sync\s+\d+, 128;(?P<between>(?:(?!bar\.sync|mbarrier).)*?)"
    r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[(?P<barrier>%r\d+)\], 4;",
    re.DOTALL,
)
# No barrier, where an earlier one still holds.
_WAIT = re.compile(r"(?:bar\.sync\s+\d+, 128;)?(?P<wait>(?:(?!bar\.sync|mbarrier).)*?mbarrier\.try_wait)", re.DOTALL)
_ARRIVAL = re.compile(
    r"\A(?P<before>(?:(?!mbarrier).)*?)@%p\d+ (?P<arrival>mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\]), 32;",
    re.DOTALL,
)


def _release_by_warp(release: re.Match[str]) -> str:
    return (
        f"{release['between']}{{ .reg .pred one; elect.sync _|one, 0xffffffff; "
        f"@one mbarrier.arrive.shared::cta.b64 _, [{release['barrier']}]; }}"
    )


_EDITS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    RELEASE_MARK: (_RELEASE, _release_by_warp),
    WAIT_MARK: (_WAIT, lambda wait: wait["wait"]),
    ARRIVE_MARK: (_ARRIVAL, lambda arrival: f"{arrival['before']}{arrival['arrival']};"),
}


def complete(ptx: str) -> str:
    """PTX with marks -> PTX that does what they say; RuntimeError where a mark is not followed by what it speaks of."""
    for mark, (pattern, edit) in _EDITS.items():
        first, *marked = ptx.split(mark)
        parts = [first]
        for part in marked:
            edited, edits = pattern.subn(edit, part, count=1)
            if not edits:
                raise RuntimeError(f"what {mark!r} speaks of does not follow it: this Triton writes other PTX")
            parts.append(edited)
        ptx = "".join(parts)
    return ptx


def _wrap_ptx_stage(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: Any) -> None:
    """Triton's hook, called with the stages of each compilation."""
    make = stages["ptx"]

    def make_and_complete(source: Any, metadata: dict[str, Any]) -> str:
        return complete(make(source, metadata))

    stages["ptx"] = make_and_complete


_LOCK = threading.RLock()  # Triton's hook is the process's; without it ptxas would refuse the marks


@contextmanager
def completing() -> Iterator[None]:
    """Kernels with marks that are compiled inside are completed; others are as ever, and so is another's hook."""
    if not has_gluon():  # the patterns are made for the PTX of those versions
        yield
        return
    with _LOCK, triton.knobs.runtime.scope():
        other = triton.knobs.runtime.add_stages_inspection_hook

        def both(*arguments: Any) -> Any:
            asked = other(*arguments) if other is not None else None
            if not arguments:  # Triton 3.7 asks what to keep the kernel under besides; for our edits the marks say it
                return asked or ("", "")
            return _wrap_ptx_stage(*arguments)

        triton.knobs.runtime.add_stages_inspection_hook = both
        yield
