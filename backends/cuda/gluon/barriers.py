"""Waiting and arriving, in the ways that Gluon has no words for.

The warps of a consumer wait for a stage and release it each for itself. Triton has all four meet before each of both,
so that none can run ahead. Gluon cannot say otherwise: a marker here says it to what post-processes the PTX
(`inline_ptx.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARKER, RELEASE_MARKER, WAIT_MARKER

_RELEASE_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARKER}")
_WAIT_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARKER}")
_ORDER_LANES = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
_ARRIVE_PER_LANE = gl.constexpr(f"mov.b32 $0, 0; {ARRIVE_MARKER}")
WARPS = gl.constexpr(4)  # of a consumer
LANES = gl.constexpr(32)  # of a warp


@gluon.jit
def _inline_ptx(text: gl.constexpr):
    """PTX at this place of the program, in order with copies, barriers and other such text."""
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous_kernels():
    """Wait for the kernels before this one on the stream.

    A dependent launch may start while they still run. Until here this one has touched only its own shared memory.
    """
    _inline_ptx("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def wait_for_stores():
    """Wait until all that this partition has copied to global memory is written. `tma.store_wait` waits only until it
    has been read."""
    _inline_ptx("cp.async.bulk.wait_group 0; mov.b32 $0, 0;")


@gluon.jit
def idle_warps():
    """The partition of warps that only fill up the producer's warpgroup."""


@gluon.jit
def wait_full(barrier, phase):
    """Wait until the producer has filled a stage."""
    _inline_ptx(_WAIT_PER_WARP)
    mbarrier.wait(barrier, phase)


@gluon.jit
def release(barrier):
    """Tell the producer that this consumer has done with a stage: WARPS arrivals, one of each."""
    _inline_ptx(_RELEASE_PER_WARP)
    mbarrier.arrive(barrier, count=WARPS)


@gluon.jit
def order_lanes():
    """What all lanes of a warp have stored comes before what one of them does next: in front of a `release`."""
    _inline_ptx(_ORDER_LANES)


@gluon.jit
def arrive_per_lane(barrier):
    """Tell others that what this partition of one warp has stored is there: LANES arrivals, for all lanes have stored.

    One arrival behind a barrier of the warp is as good by PTX's rules. But compute-sanitizer's racecheck, which
    follows mbarriers, does not follow an order of two steps.
    """
    _inline_ptx(_ARRIVE_PER_LANE)
    mbarrier.arrive(barrier, count=LANES)
