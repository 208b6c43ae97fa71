"""The overflow fallback: computes tiles with a running maximum if a fixed one was not enough.

With the maximum of its first blocks, a row's sums can exceed what float32 holds. Consumers flag the tiles in which that
happened. When all tiles of the program are written, the same producer and consumers compute the flagged ones with a
running maximum. So such a tile takes about twice its time. Other tiles lose nothing.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.mma import ROWS, run_count

WARPS = gl.constexpr(4)  # warps per consumer
LARGEST_SUM = gl.constexpr(2.0**126)  # the reciprocal of a larger power of two is a denormal number


@gluon.jit
def overflown_rows(l_i, o, BOXES_V: gl.constexpr):
    """Return a mask [64] of rows whose sum l_i is too large for float32, or whose accumulators o are not all finite.

    Rows with a score of NaN are not in it: a running maximum would not change them.
    """
    lost = l_i > LARGEST_SUM
    for run in gl.static_range(run_count(BOXES_V)):
        row = gl.sum(o[run] * 0.0, 1)  # NaN if an element is not finite
        lost = lost | (gl.convert_layout(row, l_i.type.layout) != 0.0)
    return lost & (l_i == l_i)


@gluon.jit
def _per_warp(lost):
    """Return [4] int32 of [64]: whether a warp has a lost row."""
    return gl.max(lost.reshape([WARPS, ROWS // WARPS]), 1)


@aggregate
class OverflowFlags:
    """Flags of a program: a word for each consumer, tile slot and warp. Slot TILES is for all tiles of the program."""

    words: gl.shared_memory_descriptor | gl.constexpr  # [CONSUMERS * (TILES + 1), WARPS]; None without a fixed maximum
    CONSUMERS: gl.constexpr
    TILES: gl.constexpr  # slots for tiles

    @gluon.jit
    def flag(self, slot, lost, CONSUMER: gl.constexpr):
        """Write to `slot` whether a row of its tile is `lost` [64] int32."""
        self.words.index(CONSUMER * (self.TILES + 1) + slot).store(_per_warp(lost))

    @gluon.jit
    def finish(self, slot, lost, CONSUMER: gl.constexpr):
        """Write whether any row of the program is `lost`. Flag `slot`, behind the last tile, to end searches."""
        self.flag(slot, gl.full([ROWS], 1, gl.int32, lost.type.layout), CONSUMER)
        self.flag(self.TILES, lost, CONSUMER)

    @gluon.jit
    def is_flagged(self, slot, NUM_WARPS: gl.constexpr):
        """Return whether a consumer has flagged `slot`, as int32."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WARPS], [32], [NUM_WARPS], [0])  # every thread reads all words
        any_flag = 0
        for c in gl.static_range(self.CONSUMERS):
            any_flag |= gl.max(self.words.index(c * (self.TILES + 1) + slot).load(LAYOUT), 0)
        return any_flag

    @gluon.jit
    def any_flagged(self):
        """Return whether a consumer has flagged any tile of the program, as int32. For four warps."""
        return self.is_flagged(self.TILES, 4)

    @gluon.jit
    def next_flagged(self, slot, NUM_WARPS: gl.constexpr):
        """Return the first flagged slot at or after `slot`. The slot behind the last tile is always flagged."""
        while self.is_flagged(slot, NUM_WARPS) == 0:
            slot += 1
        return slot


@gluon.jit
def allocate_flags(CONSUMERS: gl.constexpr, TILES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [CONSUMERS * (TILES + 1), WARPS], LAYOUT)
    return OverflowFlags(words, CONSUMERS, TILES)
