"""Tile infos: the producer tells the consumers which tile comes next.

Finding a tile takes divisions, and for packed sequences also dependent reads of their offsets: some hundred to two
thousand clocks. The producer does it while the ring still has work for the consumers, and writes the result to shared
memory. A tile info without key blocks is the end marker: no tile is left.

A program's tiles have slots 0, 1, ..., in which nobody overwrites a tile info. The grid has enough programs for that
(`grid_size`), and a dynamic schedule gives no program more tiles than slots. So the producer need not wait before it
writes a tile info, and a program can repeat tiles whose sums overflowed (`hopper/overflow.py`). All slots use the same
two barriers. The producer has loaded the queries of slot t before it writes slot t + 1. So all consumers have finished
with the queries of slot t - 1, and with its barrier.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.attention.tile_io import CACHED, EQUAL, PACKED
from diyfa.backends.cuda.gluon.barriers import LANES, arrive_per_lane, wait_full
from diyfa.backends.cuda.gluon.block_mask import Listed
from diyfa.backends.cuda.gluon.compat import aggregate

BARRIERS = gl.constexpr(2)
FIELDS = gl.constexpr(9)
LISTED_FIELDS = gl.constexpr(4)  # more, with a block mask
WORDS = gl.constexpr(16)  # a power of two


@aggregate
class Tile:
    """A tile of queries of one head, and its key blocks [first_block, end_block). The end marker has end_block = 0."""

    b: gl.tensor  # sample
    h: gl.tensor  # query head
    row0: gl.tensor  # first query
    first_block: gl.tensor
    end_block: gl.tensor
    first_q: gl.tensor  # first row of the sequence in packed queries
    first_k: gl.tensor  # first row of the sequence in packed keys, or its entry in a contiguous cache
    n_queries: gl.tensor  # queries of the sequence
    n_keys: gl.tensor  # keys of the sequence
    listed: Listed | gl.constexpr  # None without a block mask

    @gluon.jit
    def if_any(self, exists):
        """Return the tile if it exists, else the end marker."""
        end_block = gl.where(exists, self.end_block, 0)
        return Tile(
            self.b, self.h, self.row0, self.first_block, end_block,
            self.first_q, self.first_k, self.n_queries, self.n_keys, self.listed,
        )  # fmt: skip


@gluon.jit
def unpack_words(words, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return COUNT of the words, from number FIRST on, as scalars. Every thread has all of `words`, in this layout."""
    field = gl.arange(0, words.shape[0], layout=LAYOUT)
    fields = ()
    for i in gl.static_range(FIRST, FIRST + COUNT):
        fields += (gl.sum(gl.where(field == i, words, 0), 0),)
    return fields


@gluon.jit
def _from_words(words, problem, LAYOUT: gl.constexpr):
    """Return the tile of words that every thread has all of. Fields that are equal for all tiles take no registers."""
    listed = None
    b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = unpack_words(words, 0, FIELDS, LAYOUT)
    if problem.mask.MASK_K > 0:
        n_full, n_partial, code, next_code = unpack_words(words, FIELDS, LISTED_FIELDS, LAYOUT)
        listed = Listed(n_full, n_partial, code, next_code)
    if not problem.HAS_LEFT:
        first_block = 0
    if problem.LENGTHS != PACKED:
        first_q = 0
    if problem.LENGTHS_K != PACKED and problem.LENGTHS_K != CACHED:
        first_k = 0
    if problem.LENGTHS == EQUAL:
        n_queries = problem.seqlen_q
    if problem.LENGTHS_K == EQUAL:
        n_keys = problem.seqlen_k
    return Tile(b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys, listed)


@aggregate
class TileInfos:
    """The tile infos of a program, one per slot, and their barriers."""

    words: gl.shared_memory_descriptor  # [COUNT, WORDS]
    written: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.jit
    def is_last(self, slot, scheduler):
        """Return whether `slot` is the last that may have a tile, so that the next one must be the end marker.

        Only a dynamic schedule needs this: in a static one `grid_size` sees to it.
        """
        if scheduler.SCHEDULE == "dynamic" and self.COUNT > BARRIERS:
            last = slot == self.COUNT - 2
        else:
            last = False
        return last

    @gluon.jit
    def write(self, slot, tile):
        """Write a tile to `slot`. Only for partitions of one warp."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
        fields = (
            tile.b, tile.h, tile.row0, tile.first_block, tile.end_block, tile.first_q, tile.first_k, tile.n_queries,
            tile.n_keys,
        )  # fmt: skip
        if tile.listed is not None:
            fields += (tile.listed.n_full, tile.listed.n_partial, tile.listed.code, tile.listed.next_code)
        field = gl.arange(0, WORDS, layout=LAYOUT)
        words = gl.where(field == 0, fields[0], fields[1])
        for i in gl.static_range(2, len(fields)):
            words = gl.where(field == i, fields[i], words)
        self.words.index(slot % self.COUNT).store(words)
        arrive_per_lane(self.written.index(slot % BARRIERS))

    @gluon.jit
    def reread(self, slot, problem, NUM_WARPS: gl.constexpr):
        """Return the tile of `slot` without waiting: this warp, or an earlier pass, wrote it. For NUM_WARPS warps."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [NUM_WARPS], [0])
        words = self.words.index(slot % self.COUNT).load(LAYOUT)
        return _from_words(words, problem, LAYOUT)

    @gluon.jit
    def read(self, slot, problem):
        """Wait until `slot` is written and return its tile. For partitions of four warps."""
        wait_full(self.written.index(slot % BARRIERS), (slot // BARRIERS) & 1)
        return self.reread(slot, problem, 4)


@gluon.jit
def allocate_tile_infos(COUNT: gl.constexpr):
    """Allocate COUNT tile infos and their barriers, and initialise the barriers."""
    words = gl.allocate_shared_memory(gl.int32, [COUNT, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(written.index(i), count=LANES)
    return TileInfos(words, written, COUNT)
