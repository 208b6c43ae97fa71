"""The overflow fallback: tiles in which a fixed maximum was too small are computed again, with a running maximum.

With a fixed maximum (`fixed_max_step` in `softmax.py`) a row keeps the maximum of its first blocks. If later scores are
much larger, its sums exceed what float32 holds.

1. First pass: for each tile, a consumer writes a flag that says whether that happened in one of its rows
   (`overflown_rows`, `OverflowFlags.flag`). After its last tile it writes one flag for all of them (`finish`).
2. If a consumer flagged any tile (`any_flagged`), the producer and the consumers run once more, with a running maximum.
   They compute the flagged tiles only (`next_flagged`) and write their rows again.

So a flagged tile takes about twice its time, and every other tile only the check. All flags are written in the first
pass and read after it, so they need no barriers.
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
    """Return which rows [64] have overflown: the sum of weights l_i is too large, or an accumulator of o is not finite.

    Rows whose l_i is NaN do not count: they have a score of NaN, and a running maximum would not change that.
    """
    lost = l_i > LARGEST_SUM
    for run in gl.static_range(run_count(BOXES_V)):
        row = gl.sum(o[run] * 0.0, 1)  # NaN if an element is not finite
        lost = lost | (gl.convert_layout(row, l_i.type.layout) != 0.0)
    return lost & (l_i == l_i)


@gluon.jit
def _per_warp(lost):
    """Return the maximum of `lost` [64] over the rows of each warp, [4]. So a warp reduces and writes for itself."""
    return gl.max(lost.reshape([WARPS, ROWS // WARPS]), 1)


@aggregate
class OverflowFlags:
    """Flags of a program: for each consumer, slot and warp an int32 that is not 0 if a row of the warp has overflown.

    Slots 0 to TILES - 1 are those of the tile infos (`gluon/tile_info.py`). Slot TILES is for all tiles of the program.
    """

    words: gl.shared_memory_descriptor | gl.constexpr  # [CONSUMERS * (TILES + 1), WARPS]; None without a fixed maximum
    CONSUMERS: gl.constexpr
    TILES: gl.constexpr

    @gluon.jit
    def flag(self, slot, lost, CONSUMER: gl.constexpr):
        """Write the flag of a slot: whether one of its rows is `lost` [64] int32."""
        self.words.index(CONSUMER * (self.TILES + 1) + slot).store(_per_warp(lost))

    @gluon.jit
    def finish(self, slot, lost, CONSUMER: gl.constexpr):
        """Write the flag of all tiles, and flag `slot`, which has the end marker, so that `next_flagged` ends there.

        `lost` [64] int32: whether the row has overflown in any tile of the program.
        """
        self.flag(slot, gl.full([ROWS], 1, gl.int32, lost.type.layout), CONSUMER)
        self.flag(self.TILES, lost, CONSUMER)

    @gluon.jit
    def is_flagged(self, slot, NUM_WARPS: gl.constexpr):
        """Return whether a consumer has flagged `slot`, as int32. For partitions of NUM_WARPS warps."""
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
        """Return the first flagged slot at or after `slot`. The slot of the end marker is always flagged."""
        while self.is_flagged(slot, NUM_WARPS) == 0:
            slot += 1
        return slot


@gluon.jit
def allocate_flags(CONSUMERS: gl.constexpr, TILES: gl.constexpr):
    """Allocate `OverflowFlags`. They are not initialised: each is written before it is read."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [CONSUMERS * (TILES + 1), WARPS], LAYOUT)
    return OverflowFlags(words, CONSUMERS, TILES)
