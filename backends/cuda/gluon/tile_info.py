"""How the consumers of the Hopper kernel learn about their next tile: Gluon helpers of `hopper/fwd.py`.

Finding a tile takes divisions, and packed also reads of the sequences' offsets, one depending on another: some hundred
to two thousand clocks. The producer does it, while the ring still has work for the consumers, and leaves the result in
shared memory. A notice without key blocks says that there is no tile left.

Each turn has a notice of its own, which nobody overwrites: the grid has enough programs (`grid_of`), and
in a dynamic deal none takes more tiles than it has notices for. So none need be waited for before it is written, and
programs can go through their tiles again where sums overflowed (`hopper/overflow.py`). Of barriers there are two, in
turns: the producer has loaded the queries of turn t before it writes the notice of turn t + 1, so all consumers have
done with those of turn t - 1, and with its barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED
from diyfa.backends.cuda.gluon.barriers import LANES, arrive_by_lane, wait_full

BARRIERS = gl.constexpr(2)
FIELDS = gl.constexpr(9)
WORDS = gl.constexpr(16)  # a power of two


@gluon.jit
def allocate_notices(NOTICES: gl.constexpr):
    """-> (NOTICES notices, their barriers)."""
    notices = gl.allocate_shared_memory(gl.int32, [NOTICES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(written.index(i), count=LANES)
    return notices, written


@gluon.jit
def is_last_turn(turn, notices, DEAL: gl.constexpr):
    """Whether the notice behind that of this turn must say that there is no tile left. Only a dynamic deal is asked: in
    others it is known beforehand."""
    if DEAL == "dynamic" and notices.shape[0] > BARRIERS:
        last = turn == notices.shape[0] - 2
    else:
        last = False
    return last


@gluon.jit
def write_notice(turn, b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys, notices, written):
    """Leave the tile of this turn. For partitions of one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
    field = gl.arange(0, WORDS, layout=LAYOUT)
    notice = gl.where(field == 0, b, h)
    notice = gl.where(field == 2, row0, notice)
    notice = gl.where(field == 3, first_block, notice)
    notice = gl.where(field == 4, end_block, notice)
    notice = gl.where(field == 5, first_q, notice)
    notice = gl.where(field == 6, first_k, notice)
    notice = gl.where(field == 7, n_queries, notice)
    notice = gl.where(field == 8, n_keys, notice)
    notices.index(turn % notices.shape[0]).store(notice)
    arrive_by_lane(written.index(turn % BARRIERS))


@gluon.jit
def _fields(notice, seqlen_q, seqlen_k, LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, LAYOUT: gl.constexpr):
    """A notice that every thread has all of, as scalars; what is the same for all tiles takes no registers."""
    field = gl.arange(0, WORDS, layout=LAYOUT)
    values = ()
    for i in gl.static_range(FIELDS):
        values += (gl.sum(gl.where(field == i, notice, 0), 0),)
    b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = values
    if not HAS_LEFT:
        first_block = 0
    if LENGTHS != PACKED:
        first_q = 0
        first_k = 0
    if LENGTHS == EQUAL:
        n_queries = seqlen_q
        n_keys = seqlen_k
    return b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys


@gluon.jit
def kept_notice(
    turn, notices, seqlen_q, seqlen_k, LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """The tile of this turn, which is known to be written: by this very warp, or long ago. For NUM_WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [NUM_WARPS], [0])
    notice = notices.index(turn % notices.shape[0]).load(LAYOUT)
    return _fields(notice, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, LAYOUT)


@gluon.jit
def read_notice(
    turn, notices, written, seqlen_q, seqlen_k,
    LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, BY_WARP: gl.constexpr,
):  # fmt: skip
    """The tile of this turn -> what was given to `write_notice`. For partitions of four warps."""
    wait_full(written.index(turn % BARRIERS), (turn // BARRIERS) & 1, BY_WARP)
    return kept_notice(turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, 4)
