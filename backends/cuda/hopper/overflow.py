"""What the Hopper kernel does where a fixed maximum was not enough: Gluon helpers of `hopper/fwd.py`.

A row that is measured from the maximum of its first blocks can grow sums that float32 does not hold. Consumers flag the
tiles in which that happened, and when all tiles of the program are written, the same producer and consumers go through
the flagged ones again, this time with a running maximum. So such a tile costs about twice its time, and others nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.tile_info import kept_notice
from diyfa.backends.cuda.hopper.mma import ROWS, run_count

WARPS = gl.constexpr(4)  # of a consumer
LARGEST_SUM = gl.constexpr(2.0**126)  # whose reciprocal is no denormal number


@gluon.jit
def allocate_flags(CONSUMERS: gl.constexpr, NOTICES: gl.constexpr):
    """A word of each warp of each consumer for each of the program's tiles, and behind those one for all of them."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [CONSUMERS * (NOTICES + 1), WARPS], LAYOUT)


@gluon.jit
def overflown_rows(l_i, o, PIECES_V: gl.constexpr, JOINED: gl.constexpr):
    """Rows [64] whose sum l_i float32 cannot hold, or whose products with V in the accumulators o it could not.

    Not those of which a score is NaN: for them nothing would change.
    """
    lost = l_i > LARGEST_SUM
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        row = gl.sum(o[run] * 0.0, 1)  # NaN where one is not finite
        lost = lost | (gl.convert_layout(row, l_i.type.layout) != 0.0)
    return lost & (l_i == l_i)


@gluon.jit
def _by_warp(lost):
    """[64] -> [4]: whether a warp has such a row."""
    return gl.max(lost.reshape([WARPS, ROWS // WARPS]), 1)


@gluon.jit
def flag_tile(flags, turn, lost, CONSUMER: gl.constexpr, NOTICES: gl.constexpr):
    """Leave word whether the tile of this turn has rows that are `lost` [64] int32."""
    flags.index(CONSUMER * (NOTICES + 1) + turn).store(_by_warp(lost))


@gluon.jit
def end_flags(flags, turn, lost, CONSUMER: gl.constexpr, NOTICES: gl.constexpr):
    """Leave the same word for all tiles of the program, and flag the turn behind the last, where a search shall end."""
    flag_tile(flags, turn, gl.full([ROWS], 1, gl.int32, lost.type.layout), CONSUMER, NOTICES)
    flag_tile(flags, NOTICES, lost, CONSUMER, NOTICES)


@gluon.jit
def is_flagged(flags, turn, CONSUMERS: gl.constexpr, NOTICES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Whether a consumer has flagged the tile of this turn, of turn NOTICES any tile -> int32."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([WARPS], [32], [NUM_WARPS], [0])  # every thread reads all of them
    found = 0
    for c in gl.static_range(CONSUMERS):
        found |= gl.max(flags.index(c * (NOTICES + 1) + turn).load(LAYOUT), 0)
    return found


@gluon.jit
def next_flagged(
    turn, notices, flags, seqlen_q, seqlen_k, LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, CONSUMERS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The first turn from `turn` on that is flagged -> (turn, its notice). The one behind the last tile is."""
    NOTICES: gl.constexpr = notices.shape[0]
    while is_flagged(flags, turn, CONSUMERS, NOTICES, NUM_WARPS) == 0:
        turn += 1
    return turn, kept_notice(turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, NUM_WARPS)
