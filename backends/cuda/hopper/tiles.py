"""Which tile a number stands for, which key blocks it sees in which order, and how TMA finds its rows.

Sequences may be all as long as the tensor (EQUAL), end early (SEQ_LENS), or lie packed one after another (PACKED). A
TMA descriptor knows the end of a tensor only, so for the last two it gets two dimensions more (the idea of Triton's
`tools/ragged_tma.py`). Rows are counted to a bound of 2^30, and a coordinate of 2^30 - length + row lets the
sequence end exactly there: what lies beyond is read as zeros and not written, without a mask. The dimensions in front
bring the address back: 2^30 steps of 2^34 - stride elements are -2^30 * stride modulo 2^64 bytes, which cancels the
bound; the other one goes to the sequence's first row and `length` rows further. `gluon/tma.py` makes them.

Keys may lie in a cache (CACHED) whose rows have lengths of their own, beside queries that are EQUAL or PACKED. An entry
of a contiguous cache is a sample that ends early. So is each page: a block of keys comes from one page, or from several
that fill its rows one after another.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.attention.tile_io import CACHED, PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_store, optimisation_barrier, reinterpret
from diyfa.backends.cuda.gluon.tile_info import Tile
from diyfa.backends.cuda.hopper.configs import ROW_BOUND
from diyfa.backends.cuda.hopper.mma import buffer_index, buffer_of

BOUND = gl.constexpr(ROW_BOUND)


@aggregate
class KeyCache:
    """What a call with a cache says of its keys; all None without one, and a pointer that nobody needs."""

    seqused_ptr: gl.tensor | gl.constexpr  # (B,) int32: keys of each sequence
    block_table_ptr: gl.tensor | gl.constexpr
    cache_batch_idx_ptr: gl.tensor | gl.constexpr
    length: gl.tensor | gl.constexpr  # of each sequence, where nothing on the device says it
    added: gl.tensor | gl.constexpr  # keys that the call has appended to each
    entries: gl.tensor | gl.constexpr  # pages, or entries of a contiguous cache
    stride_table: gl.tensor | gl.constexpr
    PAGE_SIZE: gl.constexpr  # 0: contiguous

    @gluon.jit
    def keys_of(self, b, lengths_k_ptr, capacity):
        """(Entry of sequence b in a contiguous cache, how many keys it has)."""
        entry = b
        n_keys = self.length
        if self.seqused_ptr is not None:
            n_keys = gl.minimum(gl.load(self.seqused_ptr + b), capacity)
        elif lengths_k_ptr is not None:
            n_keys = gl.load(lengths_k_ptr + b + 1) - gl.load(lengths_k_ptr + b)
        n_keys = gl.minimum(gl.maximum(n_keys + self.added, 0), capacity)
        if self.cache_batch_idx_ptr is not None:
            entry = gl.load(self.cache_batch_idx_ptr + b)
            exists = (entry >= 0) & (entry < self.entries)
            n_keys = gl.where(exists, n_keys, 0)
            entry = gl.where(exists, entry, 0)
        return entry, n_keys

    @gluon.jit
    def table_of(self, b):
        """Where sequence b's pages are listed."""
        return self.block_table_ptr + b.to(gl.int64) * self.stride_table


@constexpr_function
def pages_of_block(block_n, page_size):
    """How many pages a block of keys comes from."""
    return max(block_n // page_size, 1)


@gluon.jit
def _lanes():
    """[32], for partitions of one warp: what is known of several pages takes a register of each lane."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@aggregate
class Problem:
    """Sizes of a call, lengths of its sequences, and the mask."""

    window_left: gl.tensor
    window_right: gl.tensor
    heads_q: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    total_k: gl.tensor
    heads: gl.tensor  # of all samples together
    heads_at_once: gl.tensor
    batch: gl.tensor
    lengths_q_ptr: gl.tensor | gl.constexpr  # None where all are EQUAL
    lengths_k_ptr: gl.tensor | gl.constexpr
    cache: KeyCache
    LENGTHS: gl.constexpr
    LENGTHS_K: gl.constexpr  # the same, or that of the cache
    CAUSAL: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    CHECK_KEYS: gl.constexpr  # there is no mask on the right, and keys may end inside a block

    @gluon.jit
    def behind_barrier(self):
        """The same, but nothing follows from its sizes before this place."""
        heads_q = optimisation_barrier(self.heads_q)
        heads_at_once = optimisation_barrier(self.heads_at_once)
        seqlen_q = optimisation_barrier(self.seqlen_q)
        return Problem(
            self.window_left, self.window_right, heads_q, seqlen_q, self.seqlen_k, self.total_q, self.total_k,
            self.heads, heads_at_once, self.batch, self.lengths_q_ptr, self.lengths_k_ptr, self.cache,
            self.LENGTHS, self.LENGTHS_K, self.CAUSAL, self.HAS_LEFT, self.HAS_RIGHT, self.CHECK_KEYS,
        )  # fmt: skip

    @gluon.jit
    def pages(self, tile, table, row, BLOCK_N: gl.constexpr):
        """The page that keys [row, row + BLOCK_N) of a tile lie in, or several, one for each lane. -1: without keys, or
        behind the window of all rows, where NaN may lie, which no weight of 0 removes."""
        PAGE_SIZE: gl.constexpr = self.cache.PAGE_SIZE
        COUNT: gl.constexpr = pages_of_block(BLOCK_N, PAGE_SIZE)
        number = row // PAGE_SIZE
        if COUNT > 1:
            number += _lanes()
        wanted = number * PAGE_SIZE < tile.n_keys
        if COUNT > 1:
            wanted = wanted & (_lanes() < COUNT)
            if self.HAS_LEFT:
                first_key = tile.row0 + tile.n_keys - tile.n_queries - self.window_left
                wanted = wanted & ((number + 1) * PAGE_SIZE > first_key)
        return gl.load(table + number, mask=wanted, other=-1)

    @gluon.jit
    def tile_count(self, BLOCK_M: gl.constexpr):
        """How many tiles the grid has; packed, some of them are empty (see `_packed_tile`)."""
        if self.LENGTHS == PACKED:
            count = (self.total_q // BLOCK_M + self.batch) * self.heads_q
        else:
            count = gl.cdiv(self.seqlen_q, BLOCK_M) * self.heads
        return count


@gluon.jit
def load_clamped(pointer, most):
    """A position read from the device, where it could not be checked before the launch, inside the memory there is."""
    return gl.minimum(gl.maximum(gl.load(pointer), 0), most)


@gluon.jit
def _packed_tile(index, problem, BLOCK_M: gl.constexpr):
    """Tile number -> (sequence, head, which of the sequence's tiles: negative or too large for an empty one).

    In each head the tiles of sequence b begin at number cu_seqlens_q[b] // BLOCK_M + b. The next sequence's begin far
    enough behind, since floor(x + n) - floor(x) + 1 >= ceil(n), and at most one number in between stays empty. So the
    sequence is found by counting beginnings, one for each lane, without sums over lengths or a word from the host.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers = problem.total_q // BLOCK_M + problem.batch  # of a head
    h = index // numbers
    number = index % numbers
    count = 0
    for start in range(0, problem.batch, 32):
        b = start + gl.arange(0, 32, layout=LANES)
        first = gl.load(problem.lengths_q_ptr + b, mask=b < problem.batch, other=0)
        first = gl.minimum(gl.maximum(first, 0), problem.total_q)
        begun = (b < problem.batch) & (first // BLOCK_M + b <= number)
        count += gl.sum(begun.to(gl.int32), 0)
    b = gl.maximum(count - 1, 0)
    return b, h, number - load_clamped(problem.lengths_q_ptr + b, problem.total_q) // BLOCK_M - b


@gluon.jit
def tile_of(index, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile number -> (whether there is such a tile, the tile). Only for partitions of one warp.

    At least one block is visited. `heads_at_once` heads take turns, so that their keys stay in L2 while the longest
    tiles of all of them start first. Packed, a head's sequences follow each other, longest tiles first in each.
    """
    first_q = 0
    first_k = 0
    n_queries = problem.seqlen_q
    n_keys = problem.seqlen_k
    if problem.LENGTHS == PACKED:
        b, h, tile_m = _packed_tile(index, problem, BLOCK_M)
        first_q = load_clamped(problem.lengths_q_ptr + b, problem.total_q)
        if problem.LENGTHS_K == PACKED:
            first_k = load_clamped(problem.lengths_k_ptr + b, problem.total_k)
        n_queries = gl.maximum(load_clamped(problem.lengths_q_ptr + b + 1, problem.total_q) - first_q, 0)
        if problem.LENGTHS_K == PACKED:
            n_keys = gl.maximum(load_clamped(problem.lengths_k_ptr + b + 1, problem.total_k) - first_k, 0)
            if problem.cache.seqused_ptr is not None:
                n_keys = load_clamped(problem.cache.seqused_ptr + b, n_keys)
        tiles_m = gl.cdiv(n_queries, BLOCK_M)
        exists = (tile_m >= 0) & (tile_m < tiles_m)
    else:
        tiles_m = gl.cdiv(problem.seqlen_q, BLOCK_M)
        first = index // (problem.heads_at_once * tiles_m) * problem.heads_at_once
        width = gl.minimum(problem.heads_at_once, problem.heads - first)
        rest = index % (problem.heads_at_once * tiles_m)
        head = first + rest % width
        tile_m = rest // width
        b = head // problem.heads_q
        h = head % problem.heads_q
        if problem.LENGTHS == SEQ_LENS:
            n_keys = load_clamped(problem.lengths_k_ptr + b, problem.seqlen_k)
            n_queries = gl.minimum(n_keys, problem.seqlen_q)
        exists = True
    if problem.LENGTHS_K == CACHED:
        first_k, n_keys = problem.cache.keys_of(b, problem.lengths_k_ptr, problem.seqlen_k)
    if problem.HAS_RIGHT:
        tile_m = tiles_m - 1 - tile_m
    row0 = tile_m * BLOCK_M
    if problem.LENGTHS == SEQ_LENS:  # a tile beyond the sample's end has rows to fill with zeros, but sees nothing
        n_keys = gl.where(row0 < n_queries, n_keys, 0)
    key0 = row0 + n_keys - n_queries  # the key that query row0 is aligned with
    end = n_keys
    if problem.HAS_RIGHT:
        end = key0 + BLOCK_M
        if not problem.CAUSAL:
            end += problem.window_right
        end = gl.minimum(n_keys, end)
    first_block = 0
    end_block = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    if problem.HAS_LEFT:
        first_block = gl.minimum(gl.maximum(key0 - problem.window_left, 0) // BLOCK_N, end_block - 1)
    return exists, Tile(b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys)


@aggregate
class BlockOrder:
    """The order in which a tile's key blocks are visited: from the right end inwards, at the left end, then the others.

    At the right end come those that a mask or the end of the keys cuts for one of the tile's rows and the next one; at
    the left end those that a window cuts, or the first one. Blocks in between are whole for all rows, and what rows
    have seen by then, their latest keys and the very first ones, is where most attention goes.
    """

    first_block: gl.tensor
    end_block: gl.tensor
    n_right: gl.tensor
    n_left: gl.tensor

    @gluon.jit
    def block(self, i):
        """The i-th block."""
        block = gl.where(i < self.n_right, self.end_block - 1 - i, self.first_block + i - self.n_right)
        return gl.where(i < self.n_right + self.n_left, block, self.end_block - 1 - i + self.n_left)

    @gluon.jit
    def without_last(self, n):
        """The same without the last n blocks, which are among those at the right end."""
        return BlockOrder(self.first_block, self.end_block - n, self.n_right - n, self.n_left)


@gluon.jit
def block_order(tile, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The order of a tile's key blocks."""
    n_blocks = tile.end_block - tile.first_block
    key0 = tile.row0 + tile.n_keys - tile.n_queries
    last_key = tile.n_keys - 1  # that the first row sees
    n_right = 1
    if problem.HAS_RIGHT:
        last_key = gl.minimum(key0 if problem.CAUSAL else key0 + problem.window_right, last_key)
    if problem.HAS_RIGHT or problem.CHECK_KEYS:
        n_right += tile.end_block - gl.maximum(last_key, 0) // BLOCK_N
    n_right = gl.minimum(n_right, n_blocks)
    n_left = 1
    if problem.HAS_LEFT:
        left_end = gl.cdiv(gl.maximum(key0 + (BLOCK_M - 1) - problem.window_left, 0), BLOCK_N)
        n_left = gl.maximum(left_end - tile.first_block, 1)
    return BlockOrder(tile.first_block, tile.end_block, n_right, gl.minimum(n_left, n_blocks - n_right))


@gluon.jit
def start_load(
    tensor, b, h, row, end, length, buffers, tile, full,
    BOXES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Start copying a tile, which fills BOXES buffers of equal columns; `full` completes when all bytes have arrived.

    RAGGED: `row` counts from the sequence's beginning; `end` says where that sequence ends (see `end_of`).
    """
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * BOXES
    mbarrier.expect(full, SIZE)
    for j in gl.static_range(BOXES):
        buffer = buffer_of(buffers, tile, j, BOXES)
        if RAGGED:
            coordinates = [BOUND, end, h, BOUND - length + row, j * WIDTH]
        else:
            coordinates = [b, h, row, j * WIDTH]
        async_load(tensor, coordinates, full, buffer)


@gluon.jit
def start_load_pages(
    tensor, cache,
    pages,  # `Problem.pages`
    h, row, n_keys, sample_steps, row_steps, buffers, tile, full,
    BOXES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The same for keys [row, row + BLOCK_N) of a sequence that lies in pages, each of which ends where its keys do.

    Of small pages each fills some rows of the tile. A page that the cache does not have has none.
    """
    PAGE_SIZE: gl.constexpr = cache.PAGE_SIZE
    COUNT: gl.constexpr = pages_of_block(BLOCK_N, PAGE_SIZE)
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * BOXES * COUNT
    mbarrier.expect(full, SIZE)
    parts = buffers
    if COUNT > 1:
        PARTS: gl.constexpr = buffers.shape[0] * COUNT
        parts = reinterpret(buffers, buffers.dtype, [PARTS] + tensor.block_shape, tensor.layout)
    number = row // PAGE_SIZE
    if COUNT > 1:
        number += _lanes()
    exists = (pages >= 0) & (pages < cache.entries)
    length = gl.where(exists, gl.minimum(gl.maximum(n_keys - number * PAGE_SIZE, 0), PAGE_SIZE), 0)
    end = gl.where(exists, pages, 0) * sample_steps + length * row_steps
    for i in gl.static_range(COUNT):
        if COUNT > 1:
            own_end = gl.sum(gl.where(_lanes() == i, end, 0), 0)
            first = BOUND - gl.sum(gl.where(_lanes() == i, length, 0), 0)
        else:
            own_end = end
            first = BOUND - length + row - number * PAGE_SIZE
        for j in gl.static_range(BOXES):
            buffer = parts.index(buffer_index(buffers, tile, j, BOXES) * COUNT + i)
            async_load(tensor, [BOUND, own_end, h, first, j * WIDTH], full, buffer)


@gluon.jit
def start_store(tensor, b, h, row, column, end, length, buffer, RAGGED: gl.constexpr):
    """Start writing one box of a tile, as `start_load` reads them; rows beyond the end stay as they are."""
    if RAGGED:
        async_store(tensor, [BOUND, end, h, BOUND - length + row, column], buffer)
    else:
        async_store(tensor, [b, h, row, column], buffer)


@gluon.jit
def end_of(b, first, length, sample_steps, row_steps, LENGTHS: gl.constexpr):
    """Where a sequence ends, in steps of its descriptor's second dimension.

    Packed, a step is a row; of samples it is what both a sample and a row are a multiple of. `first`: the sequence's
    first row, or its entry in a cache.
    """
    if LENGTHS == PACKED:
        end = first + length
    elif LENGTHS == SEQ_LENS:
        end = b * sample_steps + length * row_steps
    elif LENGTHS == CACHED:
        end = first * sample_steps + length * row_steps
    else:
        end = 0
    return end
