"""How the consumers of the Hopper kernel learn about their next tile: Gluon helpers of `fwd_sm90.py`.

Finding a tile takes divisions, and packed also reads of the sequences' offsets, one depending on another: some hundred
to two thousand clocks. The producer does it, far ahead since it loads the tile, and leaves the result in shared memory:
eight int32. A notice without key blocks says that there is no tile left.

There are two notices, in turns. Before the producer writes one it has, for the tile before, waited for the consumers to
have done with the queries of the tile before that one: so all of them have read the notice that it replaces.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.sm90_cluster import wait_full

NOTICES = gl.constexpr(2)
FIELDS = gl.constexpr(8)


@gluon.jit
def allocate_notices():
    """-> (notices, their barriers)."""
    notices = gl.allocate_shared_memory(gl.int32, [NOTICES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [NOTICES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NOTICES):
        mbarrier.init(written.index(i), count=1)
    return notices, written


@gluon.jit
def write_notice(turn, b, h, row0, first_block, end_block, first_q, n_queries, n_keys, notices, written):
    """Leave the tile of this turn. For partitions of one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    field = gl.arange(0, FIELDS, layout=LAYOUT)
    notice = gl.where(field == 0, b, h)
    notice = gl.where(field == 2, row0, notice)
    notice = gl.where(field == 3, first_block, notice)
    notice = gl.where(field == 4, end_block, notice)
    notice = gl.where(field == 5, first_q, notice)
    notice = gl.where(field == 6, n_queries, notice)
    notice = gl.where(field == 7, n_keys, notice)
    place = turn % NOTICES
    notices.index(place).store(notice)
    mbarrier.arrive(written.index(place), count=1)


@gluon.jit
def read_notice(turn, notices, written, BY_WARP: gl.constexpr):
    """The tile of this turn -> what was given to `write_notice`. For partitions of four warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])  # every thread reads all of it
    place = turn % NOTICES
    wait_full(written.index(place), (turn // NOTICES) & 1, BY_WARP)
    notice = notices.index(place).load(LAYOUT)
    field = gl.arange(0, FIELDS, layout=LAYOUT)
    values = ()
    for i in gl.static_range(FIELDS):
        values += (gl.sum(gl.where(field == i, notice, 0), 0),)
    return values
