"""Post-processing of PTX, for operations that Gluon lacks in all versions that `compat.py` supports.

In Gluon the warps of a consumer cannot each wait and arrive at an mbarrier for themselves, nor can the lanes of the
producer: Triton synchronises them first, and one thread arrives for all. `barriers.py` writes markers in front of such
instructions. A marker is no PTX, so ptxas refuses a kernel that was not post-processed. `post_process` edits the PTX
before ptxas reads it:

* One thread's arrival for four warps, behind a barrier of all of them, becomes an arrival of each warp, without it.
* A wait loses the barrier among warps that Triton puts in front of it.
* One thread's arrival for the 32 lanes of a warp becomes an arrival of each lane.
* A thread prefetches the kernel's tensor maps.

Two edits need no marker. They are for kernels whose 256 threads all have `MAX_REGISTERS`:

* The barriers among four warps that Triton puts between initialisations of mbarriers go, because one thread initialises
  them all. Where registers are scarce ptxas spills more without these barriers.
* Warps pass no registers on.

Plain Python, no Triton types.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import triton

from diyfa.backends.cuda.gluon.compat import compile_with_older_ptxas, has_gluon

# Part of the markers, and so of the key under which Triton stores the compiled kernel.
_EDITION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
RELEASE_MARKER = f".release_per_warp_{_EDITION};"
WAIT_MARKER = f".wait_per_warp_{_EDITION};"
ARRIVE_MARKER = f".arrive_per_lane_{_EDITION};"
PREFETCH_MARKER = f".prefetch_tensor_maps_{_EDITION};"

_RELEASE = re.compile(
    r"bar\.sync\s+\d+, 128;(?P<between>(?:(?!bar\.sync|mbarrier).)*?)"
    r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[(?P<barrier>%r\d+)\], 4;",
    re.DOTALL,
)
# Triton omits the barrier if an earlier one still holds.
_WAIT = re.compile(r"(?:bar\.sync\s+\d+, 128;)?(?P<wait>(?:(?!bar\.sync|mbarrier).)*?mbarrier\.try_wait)", re.DOTALL)
_ARRIVAL = re.compile(
    r"\A(?P<before>(?:(?!mbarrier).)*?)@%p\d+ (?P<arrival>mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\]), 32;",
    re.DOTALL,
)


def _release_per_warp(release: re.Match[str]) -> str:
    return (
        f"{release['between']}{{ .reg .pred one; elect.sync _|one, 0xffffffff; "
        f"@one mbarrier.arrive.shared::cta.b64 _, [{release['barrier']}]; }}"
    )


_EDITS: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    RELEASE_MARKER: (_RELEASE, _release_per_warp),
    WAIT_MARKER: (_WAIT, lambda wait: wait["wait"]),
    ARRIVE_MARKER: (_ARRIVAL, lambda arrival: f"{arrival['before']}{arrival['arrival']};"),
}


# Two initialisations by one thread, with nothing but address arithmetic and comments beside the barrier between them.
_INITIALISATION = r"(?P<guard>@%p\d+) mbarrier\.init\.shared::cta\.b64 \[%r\d+\], \d+;\n"
_HARMLESS = r"(?:[ \t]*(?://[^\n]*|\.loc[^\n]*|\$L__tmp\d+:|(?:add\.s32|mov\.b32)[^\n]*)?\n)*?"
_BETWEEN_INITIALISATIONS = re.compile(
    rf"({_INITIALISATION}{_HARMLESS})[ \t]*bar\.sync\s+\d+, 128;\n(?={_HARMLESS}[ \t]*(?P=guard) mbarrier\.init)"
)
MAX_REGISTERS = 248  # of each of 256 threads: nearly all that a multiprocessor has
_ALL_REGISTERS = f".reqntid 256\n.maxnreg {MAX_REGISTERS}\n"
_TRANSFER = re.compile(r"[ \t]*setmaxnreg\.[^\n]*\n")
_TENSOR_MAP = re.compile(r"\.param \.align \d+ \.b8 (\w+)\[128\]")


def _prefetch_tensor_maps(ptx: str) -> str:
    """Return PTX in which one thread's prefetch of each parameter that is a tensor map replaces the marker."""
    names = dict.fromkeys(_TENSOR_MAP.findall(ptx))
    prefetches = "".join(f"@first prefetch.param.tensormap [{name}]; " for name in names)
    thread = "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    return ptx.replace(PREFETCH_MARKER, f"{thread}{prefetches}}}")


def post_process(ptx: str) -> str:
    """Return PTX with the edits that its markers ask for.

    Raises:
        RuntimeError: a marker is not followed by the instruction that it is for.
    """
    ptx = _prefetch_tensor_maps(ptx)
    if _ALL_REGISTERS in ptx:
        ptx = _TRANSFER.sub("", _BETWEEN_INITIALISATIONS.sub(r"\1", ptx))
    for marker, (pattern, edit) in _EDITS.items():
        first, *marked = ptx.split(marker)
        pieces = [first]
        for piece in marked:
            edited, edits = pattern.subn(edit, piece, count=1)
            if not edits:
                raise RuntimeError(f"what {marker!r} means does not follow it: this Triton writes other PTX")
            pieces.append(edited)
        ptx = "".join(pieces)
    return ptx


def _change_stages(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: Any) -> None:
    """Insert the post-processing into the stages of a compilation. Triton's hook calls this."""
    compile_with_older_ptxas(backend, stages, options)
    make = stages["ptx"]

    def make_and_post_process(source: Any, metadata: dict[str, Any]) -> str:
        return post_process(make(source, metadata))

    stages["ptx"] = make_and_post_process


# A process has one hook. The first thread installs it, and the last removes it: several may compile at once.
_LOCK = threading.Lock()
_installed = ExitStack()
_users = 0


def _install() -> None:
    """Set Triton's knobs for compilations, until `_installed` is closed."""
    _installed.enter_context(triton.knobs.compilation.scope())
    triton.knobs.compilation.store_binary_only = False  # `jit.stored` reads the PTX
    if not has_gluon():  # the patterns fit the PTX of the supported versions only
        return
    _installed.enter_context(triton.knobs.runtime.scope())
    other = triton.knobs.runtime.add_stages_inspection_hook

    def both(*arguments: Any) -> Any:
        previous_result = other(*arguments) if other is not None else None
        if not arguments:  # Triton since 3.7 asks for a cache key; markers and options already put our edits there
            return previous_result or ("", "")
        return _change_stages(*arguments)

    triton.knobs.runtime.add_stages_inspection_hook = both


@contextmanager
def post_processing() -> Iterator[None]:
    """Post-process the PTX of kernels compiled inside. PTX without markers does not change; others' hooks run, too."""
    global _users
    with _LOCK:
        if not _users:
            _install()
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if not _users:
                _installed.close()
