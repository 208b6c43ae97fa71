"""The overflow fallback: what the kernel does where a fixed maximum was not enough.

A row that is measured from the maximum of its first blocks can grow sums that float32 does not hold. Consumers flag the
tiles in which that happened. When all tiles of the program are written, the same producer and consumers go through the
flagged ones again, this time with a running maximum. So such a tile costs about twice its time, and others nothing.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.mma import ROWS, run_count

WARPS = gl.constexpr(4)  # of a consumer
LARGEST_SUM = gl.constexpr(2.0**126)  # whose reciprocal is no denormal number


@gluon.jit
def overflown_rows(l_i, o, BOXES_V: gl.constexpr):
    """Rows [64] whose sum l_i float32 cannot hold, or whose products with V in the accumulators o it could not.

    Not those of which a score is NaN: for them nothing would change.
    """
    lost = l_i > LARGEST_SUM
    for run in gl.static_range(run_count(BOXES_V)):
        row = gl.sum(o[run] * 0.0, 1)  # NaN where one is not finite
        lost = lost | (gl.convert_layout(row, l_i.type.layout) != 0.0)
    return lost & (l_i == l_i)


@gluon.jit
def _per_warp(lost):
    """[64] -> [4]: whether a warp has such a row."""
    return gl.max(lost.reshape([WARPS, ROWS // WARPS]), 1)


@aggregate
class OverflowFlags:
    """For each consumer a word of each of its warps for each of the program's tiles, and behind those one for all."""

    words: gl.shared_memory_descriptor | gl.constexpr  # [CONSUMERS * (TILES + 1), WARPS]; None without a fixed maximum
    CONSUMERS: gl.constexpr
    TILES: gl.constexpr  # at most

    @gluon.jit
    def flag(self, turn, lost, CONSUMER: gl.constexpr):
        """Say whether the tile of this turn has rows that are `lost` [64] int32."""
        self.words.index(CONSUMER * (self.TILES + 1) + turn).store(_per_warp(lost))

    @gluon.jit
    def finish(self, turn, lost, CONSUMER: gl.constexpr):
        """Say the same of all tiles of the program, and flag the turn behind the last, where a search shall end."""
        self.flag(turn, gl.full([ROWS], 1, gl.int32, lost.type.layout), CONSUMER)
        self.flag(self.TILES, lost, CONSUMER)

    @gluon.jit
    def is_flagged(self, turn, NUM_WARPS: gl.constexpr):
        """Whether a consumer has flagged the tile of this turn -> int32."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WARPS], [32], [NUM_WARPS], [0])  # every thread reads all of them
        found = 0
        for c in gl.static_range(self.CONSUMERS):
            found |= gl.max(self.words.index(c * (self.TILES + 1) + turn).load(LAYOUT), 0)
        return found

    @gluon.jit
    def any_flagged(self):
        """Whether a consumer has flagged any tile of the program -> int32. For four warps."""
        return self.is_flagged(self.TILES, 4)

    @gluon.jit
    def next_flagged(self, turn, NUM_WARPS: gl.constexpr):
        """The first turn from `turn` on that is flagged. The one behind the last tile is."""
        while self.is_flagged(turn, NUM_WARPS) == 0:
            turn += 1
        return turn


@gluon.jit
def allocate_flags(CONSUMERS: gl.constexpr, TILES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [CONSUMERS * (TILES + 1), WARPS], LAYOUT)
    return OverflowFlags(words, CONSUMERS, TILES)
