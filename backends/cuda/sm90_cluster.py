"""How the Hopper kernel's ring is waited for and released, by one program or by two: Gluon helpers of `fwd_sm90.py`.

BY_WARP: the warps of a consumer wait for blocks and release them each for itself. Triton has all four meet before each
of both, so that none can run ahead.

CLUSTER = 2 programs run on neighbouring multiprocessors and work on neighbouring tiles of queries of one head, over the
same blocks of keys. Each loads every second piece of a block, and the copy lands in both programs' shared memory at
once (multicast). So a block is read from L2 once for 256 queries instead of once for 128. The barriers of the ring then
belong to both programs: half of the bytes that a program expects come from the other one, and a buffer is free when the
consumers of both have released it, always by warp.

What Gluon cannot say is marked here and completed in the PTX (`sm90_multicast.py`).
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from diyfa.backends.cuda.sm90_multicast import (
    ARRIVE_MARK,
    CLUSTER_RELEASE_MARK,
    COPIED_MARK,
    COPY_MARK,
    RELEASE_MARK,
    WAIT_MARK,
)

_COPY_TO_CLUSTER = gl.constexpr(f"mov.b32 $0, 0; {COPY_MARK}")
_COPIED = gl.constexpr(f"mov.b32 $0, 0; {COPIED_MARK}")
_RELEASE_BY_WARP = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARK}")
_RELEASE_IN_CLUSTER = gl.constexpr(f"mov.b32 $0, 0; {CLUSTER_RELEASE_MARK}")
_WAIT_BY_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARK}")
_ARRIVE_BY_LANE = gl.constexpr(f"mov.b32 $0, 0; {ARRIVE_MARK}")
WARPS = gl.constexpr(4)  # of a consumer
LANES = gl.constexpr(32)  # of a warp


@gluon.jit
def _say(text: gl.constexpr):
    """PTX at this place of the program, in order with copies, barriers and other such text."""
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_rank(CLUSTER: gl.constexpr):
    """Which program of its cluster this one is."""
    return gl.program_id(0) % CLUSTER


@gluon.jit
def cluster_id(CLUSTER: gl.constexpr):
    """The number of this program's cluster: without clusters, its own."""
    return gl.program_id(0) // CLUSTER


@gluon.jit
def cluster_count(CLUSTER: gl.constexpr):
    """How many clusters the grid has."""
    return gl.num_programs(0) // CLUSTER


@gluon.jit
def show_barriers(CLUSTER: gl.constexpr):
    """Let the other programs of the cluster see the barriers that were initialised before."""
    if CLUSTER != 1:
        _say("fence.mbarrier_init.release.cluster; mov.b32 $0, 0;")


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
def meet(CLUSTER: gl.constexpr):
    """Wait for all threads of the cluster: at the start, because all barriers must be there, and at the end, because
    copies and arrivals come from the other program until it is done. Every warp of the program has to take part."""
    if CLUSTER != 1:
        _say("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, 0;")


@gluon.jit
def bystander(CLUSTER: gl.constexpr):
    """Warps that fill a warpgroup up and are only met."""
    meet(CLUSTER)
    meet(CLUSTER)


@gluon.jit
def copy_piece(tensor, coordinates, full, buffer, piece: gl.constexpr, CLUSTER: gl.constexpr):
    """Start copying one piece of a block of K or V; in a cluster one program does, and all receive it."""
    if CLUSTER == 1:
        tma.async_copy_global_to_shared(tensor, coordinates, full, buffer)
    else:
        _say(_COPY_TO_CLUSTER)
        mine = cluster_rank(CLUSTER) == piece % CLUSTER
        tma.async_copy_global_to_shared(tensor, coordinates, full, buffer, pred=mine)
        _say(_COPIED)


@gluon.jit
def wait_full(full, phase, BY_WARP: gl.constexpr):
    """Wait until a block is there."""
    if BY_WARP:
        _say(_WAIT_BY_WARP)
    mbarrier.wait(full, phase)


@gluon.jit
def release(empty, CLUSTER: gl.constexpr, BY_WARP: gl.constexpr):
    """A consumer has done with a block: `releases_of` arrivals of all consumers free its buffer."""
    if not BY_WARP:
        mbarrier.arrive(empty, count=1)
    else:
        _say(_RELEASE_BY_WARP if CLUSTER == 1 else _RELEASE_IN_CLUSTER)
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
def releases_of(consumers, cluster, by_warp):
    """How many arrivals free a buffer: one of each consumer, or of each warp; in a cluster of both programs'."""
    return consumers * cluster * (4 if by_warp else 1)
