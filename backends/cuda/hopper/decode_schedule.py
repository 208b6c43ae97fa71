"""The schedule of work over a cache (`attention/stream_k.py`) for Gluon kernels. All sequences have `seqlen_q` queries.

Rules and numbers are those of `stream_k.py` and `block_info.py`, so that `_combine_kernel` finds the partial results.
This file has what they cannot share with Gluon: vectors, which need layouts here.

Each role of a kernel walks the same chunks by itself. It begins with a copy of the `Share` that `find_share` returns,
and takes one `Chunk` after another.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.block_info import end_of_cached_keys
from diyfa.backends.cuda.attention.seq_info import cache_entry, cache_seq_info
from diyfa.backends.cuda.attention.stream_k import divide_work, next_chunk, partials_slot, tile_work
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.tiles import KeyCache

SCAN = gl.constexpr(128)  # tiles whose work is added up at once


@aggregate
class Sizes:
    """Sizes of a call, and where its keys lie."""

    config: gl.constexpr  # has BLOCK_M, BLOCK_N, SPLIT_COST, HAS_LEFT = False, HAS_RIGHT, PACKED_KEYS = False
    cache: KeyCache
    leftpad_ptr: gl.tensor | gl.constexpr  # None: no padding
    capacity: gl.tensor  # the most keys of a sequence
    batch: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor  # query heads that share a KV head
    blocks_m: gl.tensor  # tiles of a sequence
    seqlen_q: gl.tensor

    @gluon.jit
    def count_blocks(self, tile, inside=None):
        """Look up tiles -> (blocks of keys that each sees, keys of its sequence, padding before them).

        `inside`: as in seq_info.py. A tile gets at least one block, so that some program writes its results.
        """
        config: gl.constexpr = self.config
        pointers = (None, None, self.cache.seqused_ptr, self.leftpad_ptr)
        lengths = (pointers, (self.seqlen_q, 0, 0, self.cache.length, self.cache.added, self.capacity))
        _, n_queries, _, n_keys, pad = cache_seq_info(tile // self.blocks_m, lengths, config, inside)
        end = end_of_cached_keys(tile % self.blocks_m, n_queries, n_keys, (self.group, 0, 0), config)
        return gl.maximum(gl.cdiv(gl.maximum(end - pad, 0), config.BLOCK_N), 1), n_keys, pad

    @gluon.jit
    def count_blocks_from(self, start, LAYOUT: gl.constexpr):
        """Return the blocks of keys that each of the SCAN tiles from `start` on sees: 0 beyond the last tile."""
        n_tiles = self.batch * self.blocks_m
        tile = start + gl.arange(0, SCAN, layout=LAYOUT)
        n_blocks, _, _ = self.count_blocks(tile, tile < n_tiles)
        return gl.where(tile < n_tiles, n_blocks, 0)


@aggregate
class Chunk:
    """Blocks [begin, end) of the keys of a tile, counted from the first key behind the padding. end = 0: no chunk."""

    tile: gl.tensor  # number among the tiles of all sequences
    hk: gl.tensor  # KV head
    begin: gl.tensor
    end: gl.tensor
    n_blocks: gl.tensor  # of the tile
    n_keys: gl.tensor  # of the sequence
    pad: gl.tensor  # rows of padding before its keys

    @gluon.jit
    def is_whole(self):
        """Return whether the chunk is the whole tile. Else its results are partial, and `slot` says where they go."""
        return self.end - self.begin == self.n_blocks

    @gluon.jit
    def slot(self):
        """Return the `partials_slot` of the chunk."""
        return partials_slot(gl.program_id(1) * gl.num_programs(0) + gl.program_id(0), (self.begin == 0).to(gl.int32))

    @gluon.jit
    def sequence(self, sizes):
        """Return the number of the sequence."""
        return self.tile // sizes.blocks_m

    @gluon.jit
    def entry(self, sizes):
        """Return the `cache_entry` of the sequence."""
        return cache_entry(sizes.cache.cache_batch_idx_ptr, self.sequence(sizes), sizes.cache.entries, self.n_keys)

    @gluon.jit
    def tokens_and_heads(self, rows, sizes):
        """Return (tokens, query heads) of rows of the tile."""
        row = self.tile % sizes.blocks_m * sizes.config.BLOCK_M + rows
        return row // sizes.group, self.hk * sizes.group + row % sizes.group


@aggregate
class Share:
    """The rest of a program's share of the iteration space. It fits 32 bits: more blocks would take a program hours."""

    tile: gl.tensor
    done_in_tile: gl.tensor  # position of the rest, counted from the tile's beginning
    remaining: gl.tensor  # its length
    tile_cost: gl.tensor  # `cost` of `divide_work`
    min_tile_work: gl.tensor

    @gluon.jit
    def next(self, sizes):
        """Return the next chunk that has blocks, and the share behind it."""
        SPLIT_COST: gl.constexpr = sizes.config.SPLIT_COST
        tile, done_in_tile, remaining = self.tile, self.done_in_tile, self.remaining
        cost = (self.tile_cost, self.min_tile_work)
        hk, begin, end = 0, 0, 0
        n_blocks, n_keys, pad = 0, 0, 0
        while (begin >= end) & (remaining > 0):
            n_blocks, n_keys, pad = sizes.count_blocks(tile)
            work = tile_work(n_blocks, cost, SPLIT_COST)
            if done_in_tile < work * (sizes.heads_kv // gl.num_programs(0)):
                head_round, begin, end, taken = next_chunk(
                    done_in_tile, 0, done_in_tile + remaining, n_blocks, work, cost, False, SPLIT_COST
                )
                hk = head_round * gl.num_programs(0) + gl.program_id(0)
                done_in_tile += taken
                remaining -= taken
            else:
                done_in_tile = gl.to_tensor(0)
                tile += 1
        end = gl.where(begin < end, end, 0)
        return (
            Chunk(tile, hk, begin, end, n_blocks, n_keys, pad),
            Share(tile, done_in_tile, remaining, self.tile_cost, self.min_tile_work),
        )


@gluon.jit
def find_share(sizes):
    """Find the share of this program: share `gl.program_id(1)` of `gl.num_programs(1)`. For four warps."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SPLIT_COST: gl.constexpr = sizes.config.SPLIT_COST
    head_rounds = sizes.heads_kv // gl.num_programs(0)
    n_tiles = sizes.batch * sizes.blocks_m
    total_blocks = gl.full([], 0, gl.int64)
    max_blocks = 0
    for start in range(0, n_tiles, SCAN):
        n_blocks = sizes.count_blocks_from(start, LANES)
        total_blocks += gl.sum(n_blocks.to(gl.int64), 0)
        max_blocks = gl.maximum(max_blocks, gl.max(n_blocks, 0))
    length, share, cost = divide_work(total_blocks, n_tiles, max_blocks, head_rounds, gl.num_programs(1), SPLIT_COST)
    position = gl.minimum(gl.program_id(1) * share, length)
    # The share begins in the tile that follows those that end at or before its position. Ends are sums over pairs of
    # tiles, because the Gluon of Triton 3.6 has no `cumsum`.
    PAIRS: gl.constexpr = gl.BlockedLayout([SCAN, 1], [1, 32], [1, 4], [1, 0])
    earlier = gl.arange(0, SCAN, layout=gl.SliceLayout(1, PAIRS))[:, None]
    later = gl.arange(0, SCAN, layout=gl.SliceLayout(0, PAIRS))
    first_tile = 0
    tile_start = gl.full([], 0, gl.int64)
    ahead = gl.full([], 0, gl.int64)  # work of the tiles before `start`
    for start in range(0, n_tiles, SCAN):
        work = tile_work(sizes.count_blocks_from(start, LANES), cost, SPLIT_COST)  # of SCAN tiles it fits 32 bits
        work = gl.convert_layout(work, gl.SliceLayout(1, PAIRS))
        ends = gl.sum(gl.where(earlier <= later[None, :], work[:, None], 0), 0)
        ends = ahead + ends.to(gl.int64) * head_rounds
        is_before = (ends <= position) & (start + later < n_tiles)
        first_tile += gl.sum(is_before.to(gl.int32), 0)
        tile_start = gl.maximum(tile_start, gl.max(gl.where(is_before, ends, 0), 0))
        ahead = gl.max(ends, 0)
    remaining = gl.minimum(share, length - position)
    tile_cost, min_tile_work = cost
    return Share(first_tile, (position - tile_start).to(gl.int32), remaining.to(gl.int32), tile_cost, min_tile_work)
