"""The tile scheduler: which tile each program of a grid takes next.

Tiles are numbered so that the longest tiles come first within each group of heads whose keys are in the L2 cache
together (`hopper/tiles.py`). There are two schedules:

* "static": of n programs, each takes every n-th tile. So does a grid of one program per tile. Under a causal mask the
  first program gets the longest tile of each n, so the programs of a persistent grid do not end at the same time.
* "dynamic": a program takes the next tile that nobody has. The producer draws a number from the tile counter at the
  last block of a tile, with FIND_AHEAD at the last but one. Its next tile is that number + the number of programs.

Only the producer asks the scheduler. Consumers read the producer's tile infos (`gluon/tile_info.py`).

The tile counter is two words in global memory: the next number, and the number of programs that have left. The last
program to leave sets both to zero, so no launch has to clear them (`gluon/tile_counter.py` allocates them).
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class TileScheduler:
    """Source of tile numbers for a producer. The first tile of a program has the program's own number."""

    counter_ptr: gl.tensor | gl.constexpr  # None unless dynamic
    SCHEDULE: gl.constexpr

    @gluon.jit
    def draw(self):
        """Draw a number from the tile counter without waiting for it. Only for partitions of one warp: lane 0 gets it.

        `gl.atomic_add` would wait at once, to broadcast the number to all lanes.
        """
        if self.SCHEDULE == "dynamic":
            drawn_number = gl.inline_asm_elementwise(
                "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0; "
                "@first atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }",
                "=r,l", [self.counter_ptr], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            drawn_number = 0
        return drawn_number

    @gluon.jit
    def next_tile(self, index, drawn_number):
        """Return the number of this program's tile after `index`. It waits for the number that `draw` asked for."""
        if self.SCHEDULE == "dynamic":
            number = gl.inline_asm_elementwise(
                "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [drawn_number],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            index = gl.num_programs(0) + number
        else:
            index += gl.num_programs(0)
        return index

    @gluon.jit
    def leave(self):
        """Count the program as gone. The last program, after which nobody draws, zeroes both words for the next launch.

        Each program has received all its numbers before it leaves, and leaving is ordered (acq_rel). So both words are
        zero in the end.
        """
        if gl.atomic_add(self.counter_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            gl.store(self.counter_ptr, 0)
            gl.store(self.counter_ptr + 1, 0)
