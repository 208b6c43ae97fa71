"""Waits and arrivals that Gluon lacks.

Each warp of a consumer waits for a stage and releases it for itself. Gluon synchronises all four warps before either,
so that none can run ahead. A marker here makes `inline_ptx.py` remove that from the PTX.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.inline_ptx import ARRIVE_MARKER, PREFETCH_MARKER, RELEASE_MARKER, WAIT_MARKER

_RELEASE_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARKER}")
_WAIT_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARKER}")
_PREFETCH = gl.constexpr(f"mov.b32 $0, 0; {PREFETCH_MARKER}")
_ORDER_LANES = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
_ARRIVE_PER_LANE = gl.constexpr(f"mov.b32 $0, 0; {ARRIVE_MARKER}")
WARPS = gl.constexpr(4)  # warps per consumer
LANES = gl.constexpr(32)  # lanes per warp


@gluon.jit
def _inline_ptx(text: gl.constexpr):
    """Insert PTX at this point of the program, in order with copies, barriers and other inline PTX."""
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch_tensor_maps():
    """Start reading the kernel's tensor maps from memory, so that its first copies by TMA need not wait for them."""
    _inline_ptx(_PREFETCH)


@gluon.jit
def wait_for_previous_kernels():
    """Wait for the kernels before this one on the stream.

    A dependent launch may start while they still run. Before this call it must touch only its own shared memory.
    """
    _inline_ptx("griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def wait_for_stores():
    """Wait until this partition's TMA copies to global memory are written.

    `tma.store_wait` waits only until their shared memory has been read.
    """
    _inline_ptx("cp.async.bulk.wait_group 0; mov.b32 $0, 0;")


@gluon.jit
def idle_warps():
    """Do nothing: the partition of warps that only fill up the producer's warpgroup."""


@constexpr_function
def _named_barrier(action, number):
    """Return PTX of a named barrier of two warpgroups: bar.sync or bar.arrive."""
    return f"mov.b32 $0, 0; bar.{action} {number}, 256;"


@gluon.jit
def turn(ACTION: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait for the ping-pong turn of a consumer warpgroup ("sync"), or give it the turn and go on ("arrive").

    Each consumer has a named barrier, between itself and the one before it. Triton itself uses those below 8.
    """
    _inline_ptx(_named_barrier(ACTION, 8 + CONSUMER))


@gluon.jit
def sync_consumers():
    """Wait for the other one of two consumer warpgroups, in kernels without ping-pong turns."""
    _inline_ptx(_named_barrier("sync", 8))


@gluon.jit
def wait_full(barrier, phase):
    """Wait until the producer has filled a stage."""
    _inline_ptx(_WAIT_PER_WARP)
    mbarrier.wait(barrier, phase)


@gluon.jit
def release(barrier):
    """Tell the producer that this consumer has read a stage: one arrival of each of WARPS warps."""
    _inline_ptx(_RELEASE_PER_WARP)
    mbarrier.arrive(barrier, count=WARPS)


@gluon.jit
def order_lanes():
    """Order the stores of all lanes of a warp before the next instruction of any lane. Use it before a `release`."""
    _inline_ptx(_ORDER_LANES)


@gluon.jit
def arrive_per_lane(barrier):
    """Tell others that this partition of one warp has stored its data: LANES arrivals, for all lanes have stored.

    By PTX's rules one arrival behind a barrier of the warp would do. But compute-sanitizer's racecheck, which follows
    mbarriers, does not follow an order of two steps.
    """
    _inline_ptx(_ARRIVE_PER_LANE)
    mbarrier.arrive(barrier, count=LANES)
