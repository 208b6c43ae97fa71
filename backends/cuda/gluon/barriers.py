"""How the Hopper kernel's ring is waited for and released: Gluon helpers of `hopper/fwd.py`.

BY_WARP: the warps of a consumer wait for blocks and release them each for itself. Triton has all four meet before each
of both, so that none can run ahead. Gluon cannot say that; it is marked here and completed in PTX (`inline_ptx.py`).
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARK, RELEASE_MARK, WAIT_MARK

_RELEASE_BY_WARP = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARK}")
_WAIT_BY_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARK}")
_ARRIVE_BY_LANE = gl.constexpr(f"mov.b32 $0, 0; {ARRIVE_MARK}")
WARPS = gl.constexpr(4)  # of a consumer
LANES = gl.constexpr(32)  # of a warp


@gluon.jit
def _say(text: gl.constexpr):
    """PTX at this place of the program, in order with copies, barriers and other such text."""
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernels_before():
    """Wait for what ran before on the stream: the kernel is launched while that may still end (programmatic dependent
    launch), and until here it has touched nothing but its own shared memory."""
    _say("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def await_stores():
    """Wait until all that this partition has copied to global memory is written there; `tma.store_wait` waits until it
    has been read."""
    _say("cp.async.bulk.wait_group 0; mov.b32 $0, 0;")


@gluon.jit
def idle():
    """Warps that only fill up the producer's warpgroup."""


@gluon.jit
def wait_full(full, phase, BY_WARP: gl.constexpr):
    """Wait until a block is there."""
    if BY_WARP:
        _say(_WAIT_BY_WARP)
    mbarrier.wait(full, phase)


@gluon.jit
def release(empty, BY_WARP: gl.constexpr):
    """A consumer has done with a block: `releases_of` arrivals of all consumers free its buffer."""
    if not BY_WARP:
        mbarrier.arrive(empty, count=1)
    else:
        _say(_RELEASE_BY_WARP)
        mbarrier.arrive(empty, count=WARPS)


@gluon.jit
def arrive_by_lane(barrier):
    """What this partition of one warp has stored is there: LANES arrivals, for all lanes have stored.

    Each speaks for itself. One arrival behind a meeting of the warp is as good by PTX's rules, but compute-sanitizer's
    racecheck, which follows mbarriers, does not follow an order of two steps.
    """
    _say(_ARRIVE_BY_LANE)
    mbarrier.arrive(barrier, count=LANES)


@constexpr_function
def releases_of(consumers, by_warp):
    """How many arrivals free a buffer: one of each consumer, or of each warp."""
    return consumers * (4 if by_warp else 1)
