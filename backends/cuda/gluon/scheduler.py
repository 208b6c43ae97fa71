"""Which tile each program of the Hopper kernel takes next: Gluon helpers of `hopper/fwd.py`.

Tiles are numbered so that in each group of heads whose keys share the L2 cache the longest come first
(`hopper/tiles.py`). DEAL says how the programs of a grid share the numbers:

* "static": every n-th, n programs. A grid of one program for each tile is this too. Under a causal mask the first
  program gets the longest of each round, so the programs of a persistent grid do not end together.
* "balanced": rounds of one tile for each program. Each group of heads begins a round; every second round of a group
  goes backwards, and every second group is the mirror image of the one before. What a round gives to the first
  programs the next gives to the last, and so do groups: no program has more than 4 % above its share.
* "dynamic": whoever comes first takes the next one. The producer draws a ticket when it comes to the last block of the
  tile before; number of programs + ticket is its next tile.

Only the producer deals; consumers read its notices (`gluon/tile_info.py`).

The tickets come from two words in global memory: the next ticket, and how many programs have left. The last one to
leave sets both to zero, so no launch has to clear them (`gluon/tile_counter.py` says whose words they are).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_place(DEAL: gl.constexpr):
    """Where a program begins: a place is a tile's number, or the number of a round."""
    if DEAL == "balanced":
        place = 0
    else:
        place = gl.program_id(0)
    return place


@gluon.jit
def end_place(tiles, group, DEAL: gl.constexpr):
    """The first place at which a program has nothing more to do; `group`: tiles of heads that take turns."""
    if DEAL == "balanced":
        programs = gl.num_programs(0)
        end = tiles // group * gl.cdiv(group, programs) + gl.cdiv(tiles % group, programs)
    else:
        end = tiles
    return end


@gluon.jit
def tile_number(place, tiles, group, DEAL: gl.constexpr):
    """Place -> (a tile's number, whether the program has a tile in that round)."""
    if DEAL == "balanced":
        programs = gl.num_programs(0)
        rounds = gl.cdiv(group, programs)  # of one group
        backwards = (place % rounds + place // rounds) % 2 == 1
        column = gl.where(backwards, programs - 1 - gl.program_id(0), gl.program_id(0))
        in_group = place % rounds * programs + column
        index = place // rounds * group + in_group
        exists = (in_group < group) & (index < tiles)
        index = gl.minimum(index, tiles - 1)  # lengths are read also for a tile that will be skipped
    else:
        index = place
        exists = True
    return index, exists


@gluon.jit
def draw_ticket(tickets_ptr, DEAL: gl.constexpr):
    """Ask for a ticket without waiting for it. For partitions of one warp, whose first lane will have it.

    `gl.atomic_add` would wait for the answer at once, to share it among the lanes.
    """
    if DEAL == "dynamic":
        ticket = gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0; "
            "@first atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }",
            "=r,l", [tickets_ptr], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        ticket = 0
    return ticket


@gluon.jit
def next_place(place, ticket, DEAL: gl.constexpr):
    """Where the program goes on; a drawn ticket is waited for."""
    if DEAL == "dynamic":
        drawn = gl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
        )
        place = gl.num_programs(0) + drawn
    elif DEAL == "balanced":
        place += 1
    else:
        place += gl.num_programs(0)
    return place


@gluon.jit
def leave(tickets_ptr):
    """Count the program as gone; the last one, after which nobody draws, makes both words zero for the next launch.

    Each program has received all its tickets before it leaves, and leaving is ordered (acq_rel), so zero is the last
    that either word is set to.
    """
    if gl.atomic_add(tickets_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(tickets_ptr, 0)
        gl.store(tickets_ptr + 1, 0)
