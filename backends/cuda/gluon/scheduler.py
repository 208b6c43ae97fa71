"""The tile scheduler: which tile each program of a grid takes next.

Tiles are numbered so that in each group of heads whose keys share the L2 cache the longest come first
(`hopper/tiles.py`). A schedule says how programs share the numbers:

* "static": every n-th, n programs. A grid of one program for each tile is this too. Under a causal mask the first
  program gets the longest of each round, so the programs of a persistent grid do not end together.
* "dynamic": whoever comes first takes the next one. The producer draws a number from the tile counter when it comes to
  the last block of the tile before; number of programs + that is its next tile.

Only the producer asks the scheduler; consumers read its tile infos (`gluon/tile_info.py`).

The tile counter is two words in global memory: the next number, and how many programs have left. The last one to leave
sets both to zero, so no launch has to clear them (`gluon/tile_counter.py` says whose words they are).
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class TileScheduler:
    """Tile numbers for the producer of a program, whose first one is the program's own number."""

    counter_ptr: gl.tensor | gl.constexpr  # None unless dynamic
    SCHEDULE: gl.constexpr

    @gluon.jit
    def draw(self):
        """Ask the tile counter for a number without waiting for it. Only for partitions of one warp: lane 0 gets it.

        `gl.atomic_add` would wait for the answer at once, to share it among the lanes.
        """
        if self.SCHEDULE == "dynamic":
            drawn = gl.inline_asm_elementwise(
                "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0; "
                "@first atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }",
                "=r,l", [self.counter_ptr], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            drawn = 0
        return drawn

    @gluon.jit
    def next_tile(self, index, drawn):
        """The number behind `index` for this program. This is where it waits for what `draw` asked for."""
        if self.SCHEDULE == "dynamic":
            number = gl.inline_asm_elementwise(
                "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [drawn], dtype=gl.int32, is_pure=False, pack=1
            )
            index = gl.num_programs(0) + number
        else:
            index += gl.num_programs(0)
        return index

    @gluon.jit
    def leave(self):
        """Count the program as gone. The last one, after which nobody draws, zeroes both words for the next launch.

        Each program has received all its numbers before it leaves, and leaving is ordered (acq_rel), so zero is the
        last that either word is set to.
        """
        if gl.atomic_add(self.counter_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            gl.store(self.counter_ptr, 0)
            gl.store(self.counter_ptr + 1, 0)
