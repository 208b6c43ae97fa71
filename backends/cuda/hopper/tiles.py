"""Tiles: from a number to a tile, the order of its key blocks, and TMA copies of its rows.

Sequences may all be as long as the tensor (EQUAL), end early (SEQ_LENS), or be packed one after another (PACKED). A TMA
descriptor knows only the end of a tensor. For SEQ_LENS and PACKED it has two more dimensions (the idea of Triton's
`tools/ragged_tma.py`). Rows are counted to a bound of 2^30. A coordinate of 2^30 - length + row makes the sequence end
exactly at the bound: rows beyond it are read as zeros and not written, without a mask. The two leading dimensions bring
the address back. 2^30 steps of 2^34 - stride elements are -2^30 * stride modulo 2^64 bytes, which cancels the bound.
The other dimension adds the sequence's first row and `length` rows. `gluon/tma.py` makes the descriptors.

Keys may be in a cache (CACHED), whose sequences have lengths of their own; queries are EQUAL or PACKED. An entry of a
contiguous cache is a sample that ends early, and so is each page. A key block is copied from one page, or from several
that fill its rows one after another.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.attention.block_info import first_visible, last_block, visible_range
from diyfa.backends.cuda.attention.seq_info import cache_entry, cached_keys, load_clamped, packed_info, packed_keys
from diyfa.backends.cuda.attention.tile_io import CACHED, PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.block_mask import BlockMask, listed_blocks, tile_list
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_store, optimisation_barrier, reinterpret
from diyfa.backends.cuda.gluon.tile_info import Tile
from diyfa.backends.cuda.hopper.configs import ROW_BOUND
from diyfa.backends.cuda.hopper.mma import box_buffer, buffer_index

BOUND = gl.constexpr(ROW_BOUND)


@aggregate
class KeyCache:
    """Arguments that describe the keys of a cache. An unused pointer is None; without a cache, all are None."""

    seqused_ptr: gl.tensor | gl.constexpr  # (B,) int32: keys of each sequence
    block_table_ptr: gl.tensor | gl.constexpr
    cache_batch_idx_ptr: gl.tensor | gl.constexpr
    length: gl.tensor | gl.constexpr  # keys of each sequence, if no tensor says how many
    added: gl.tensor | gl.constexpr  # keys that the call has appended to each sequence
    entries: gl.tensor | gl.constexpr  # number of pages, or of entries of a contiguous cache
    stride_table: gl.tensor | gl.constexpr
    PAGE_SIZE: gl.constexpr  # 0: contiguous

    @gluon.jit
    def table_row(self, b):
        """Return the address of sequence b's row in the page table."""
        return self.block_table_ptr + b.to(gl.int64) * self.stride_table


@constexpr_function
def pages_per_block(block_n, page_size):
    """Return the number of pages that a key block is copied from."""
    return max(block_n // page_size, 1)


@gluon.jit
def _lanes():
    """Return the lane numbers [32], for partitions of one warp: with a page per lane, pages take few registers."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@aggregate
class Problem:
    """Sizes of a call, lengths of its sequences, and its mask."""

    window_left: gl.tensor
    window_right: gl.tensor
    heads_q: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    total_k: gl.tensor
    heads: gl.tensor  # batch * heads_q
    heads_in_parallel: gl.tensor  # heads whose tiles alternate, `heads_in_parallel` in `hopper/configs.py`
    batch: gl.tensor
    lengths_q_ptr: gl.tensor | gl.constexpr  # None if all sequences are EQUAL
    lengths_k_ptr: gl.tensor | gl.constexpr
    cache: KeyCache
    mask: BlockMask
    LENGTHS: gl.constexpr  # of queries: EQUAL, SEQ_LENS or PACKED
    LENGTHS_K: gl.constexpr  # of keys: equal to LENGTHS, or CACHED, or PACKED
    CAUSAL: gl.constexpr  # implies HAS_RIGHT
    HAS_LEFT: gl.constexpr  # in the forward, implies HAS_RIGHT or CHECK_KEYS
    HAS_RIGHT: gl.constexpr
    CHECK_KEYS: gl.constexpr  # no mask on the right, and keys may end inside a block; excludes HAS_RIGHT

    @gluon.jit
    def behind_barrier(self):
        """Return the problem with sizes behind `optimisation_barrier`: nothing is computed from them before here."""
        heads_q = optimisation_barrier(self.heads_q)
        heads_in_parallel = optimisation_barrier(self.heads_in_parallel)
        seqlen_q = optimisation_barrier(self.seqlen_q)
        return Problem(
            self.window_left, self.window_right, heads_q, seqlen_q, self.seqlen_k, self.total_q, self.total_k,
            self.heads, heads_in_parallel, self.batch, self.lengths_q_ptr, self.lengths_k_ptr, self.cache,
            self.mask,
            self.LENGTHS, self.LENGTHS_K, self.CAUSAL, self.HAS_LEFT, self.HAS_RIGHT, self.CHECK_KEYS,
        )  # fmt: skip

    @gluon.jit
    def keys_of_rows(self, key0, ROWS: gl.constexpr, n_keys):
        """Return the `visible_range` of ROWS queries, of which the first is aligned with key0."""
        right = 0 if self.CAUSAL else self.window_right
        return visible_range(key0, key0 + (ROWS - 1), self.window_left, right, n_keys, self.HAS_LEFT, self.HAS_RIGHT)

    @gluon.jit
    def tile_list(self, tile, row0, BLOCK_N: gl.constexpr):
        """Return the list of key blocks of a tile, for its rows from row0 on. For a block mask."""
        sizes = self.seqlen_q, self.seqlen_k
        listed = tile.listed
        return tile_list(self.mask, tile.b, tile.h, row0, sizes, listed.n_full, listed.n_partial, BLOCK_N)

    @gluon.jit
    def pages(self, tile, table, row, BLOCK_N: gl.constexpr):
        """Return the page of keys [row, row + BLOCK_N), or if pages are smaller a page in each lane.

        -1 replaces pages without keys, and small pages left of the window of all rows. The latter may hold NaN, which a
        weight of 0 would not remove.
        """
        PAGE_SIZE: gl.constexpr = self.cache.PAGE_SIZE
        COUNT: gl.constexpr = pages_per_block(BLOCK_N, PAGE_SIZE)
        number = row // PAGE_SIZE
        if COUNT > 1:
            number += _lanes()
        is_needed = number * PAGE_SIZE < tile.n_keys
        if COUNT > 1:
            is_needed = is_needed & (_lanes() < COUNT)
            if self.HAS_LEFT:
                first_key = first_visible(tile.row0 + tile.n_keys - tile.n_queries, self.window_left)
                is_needed = is_needed & ((number + 1) * PAGE_SIZE > first_key)
        return gl.load(table + number, mask=is_needed, other=-1)

    @gluon.jit
    def tile_count(self, BLOCK_M: gl.constexpr):
        """Return the number of tiles of the grid. Packed, some of them are empty (`_packed_tile`)."""
        if self.LENGTHS == PACKED:
            count = (self.total_q // BLOCK_M + self.batch) * self.heads_q
        else:
            count = gl.cdiv(self.seqlen_q, BLOCK_M) * self.heads
        return count


@gluon.jit
def _packed_tile(index, problem, BLOCK_M: gl.constexpr):
    """Return (sequence, head, tile within the sequence) of a tile number. An empty tile is negative or too large.

    In each head the tiles of sequence b begin at number cu_seqlens_q[b] // BLOCK_M + b. That leaves enough numbers, for
    floor(x + n) - floor(x) + 1 >= ceil(n), and at most one of them stays empty. So the sequence is found by counting
    beginnings, one per lane. That needs no sum over lengths, and the host need not know them.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers = problem.total_q // BLOCK_M + problem.batch  # tile numbers per head
    h = index // numbers
    number = index % numbers
    count = 0
    for start in range(0, problem.batch, 32):
        b = start + gl.arange(0, 32, layout=LANES)
        first = gl.load(problem.lengths_q_ptr + b, mask=b < problem.batch, other=0)
        first = gl.minimum(gl.maximum(first, 0), problem.total_q)
        has_begun = (b < problem.batch) & (first // BLOCK_M + b <= number)
        count += gl.sum(has_begun.to(gl.int32), 0)
    b = gl.maximum(count - 1, 0)
    return b, h, number - load_clamped(problem.lengths_q_ptr + b, problem.total_q) // BLOCK_M - b


@gluon.jit
def locate_tile(index, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (whether a tile number has a tile, the tile). Only for partitions of one warp.

    A tile has at least one key block. Tiles of `heads_in_parallel` heads alternate: the longest tiles of all these
    heads start first, while their keys stay in L2. Packed, a head's sequences follow each other, each with its longest
    tiles first.
    """
    first_q = 0
    first_k = 0
    n_queries = problem.seqlen_q
    n_keys = problem.seqlen_k
    cache = problem.cache
    if problem.LENGTHS == PACKED:
        b, h, tile_m = _packed_tile(index, problem, BLOCK_M)
        first_q, n_queries = packed_info(problem.lengths_q_ptr, b, problem.total_q)
        if problem.LENGTHS_K == PACKED:
            first_k, n_keys = packed_keys(problem.lengths_k_ptr, cache.seqused_ptr, b, problem.total_k)
        tiles_m = gl.cdiv(n_queries, BLOCK_M)
        exists = (tile_m >= 0) & (tile_m < tiles_m)
    else:
        tiles_m = gl.cdiv(problem.seqlen_q, BLOCK_M)
        first_head = index // (problem.heads_in_parallel * tiles_m) * problem.heads_in_parallel
        n_heads = gl.minimum(problem.heads_in_parallel, problem.heads - first_head)
        index_in_group = index % (problem.heads_in_parallel * tiles_m)
        head = first_head + index_in_group % n_heads
        tile_m = index_in_group // n_heads
        b = head // problem.heads_q
        h = head % problem.heads_q
        if problem.LENGTHS == SEQ_LENS:
            n_keys = load_clamped(problem.lengths_k_ptr + b, problem.seqlen_k)
            n_queries = gl.minimum(n_keys, problem.seqlen_q)
        exists = True
    if problem.LENGTHS_K == CACHED:
        n_keys = cached_keys(problem.lengths_k_ptr, cache.seqused_ptr, b, cache.length, cache.added, problem.seqlen_k)
        first_k, n_keys = cache_entry(cache.cache_batch_idx_ptr, b, cache.entries, n_keys)
    if problem.HAS_RIGHT or problem.mask.MASK_K > 0:  # of most masks, too, the last rows see the most keys
        tile_m = tiles_m - 1 - tile_m
    row0 = tile_m * BLOCK_M
    if problem.LENGTHS == SEQ_LENS:  # a tile beyond the sample's end sees no key, but its rows are filled with zeros
        n_keys = gl.where(row0 < n_queries, n_keys, 0)
    begin, _, _, end = problem.keys_of_rows(row0 + n_keys - n_queries, BLOCK_M, n_keys)
    end_block = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    first_block = gl.minimum(begin // BLOCK_N, end_block - 1)
    listed = None
    if problem.mask.MASK_K > 0:
        sizes = problem.seqlen_q, problem.seqlen_k
        listed, end_block = listed_blocks(problem.mask, b, h, row0, sizes, BLOCK_N)
    return exists, Tile(b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys, listed)


@aggregate
class BlockOrder:
    """The order in which a tile visits its key blocks: n_right from the right end, n_left from the left end, the rest.

    The n_right blocks, from right to left, are those that the right mask or the end of the keys cuts for a row of the
    tile, and one more. The n_left blocks, from left to right, are those that a window cuts, or the first one. The rest
    comes from right to left; all rows see it whole. Most attention goes to a row's latest keys and to the very first
    ones, which it has seen by then.
    """

    first_block: gl.tensor
    end_block: gl.tensor
    n_right: gl.tensor
    n_left: gl.tensor

    @gluon.jit
    def block(self, i):
        """Return the block at position i of the order."""
        block = gl.where(i < self.n_right, self.end_block - 1 - i, self.first_block + i - self.n_right)
        return gl.where(i < self.n_right + self.n_left, block, self.end_block - 1 - i + self.n_left)

    @gluon.jit
    def without_last(self, n):
        """Return the order without the tile's last n blocks, which must be among the n_right."""
        return BlockOrder(self.first_block, self.end_block - n, self.n_right - n, self.n_left)


@gluon.jit
def block_order(tile, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the order of a tile's key blocks."""
    n_blocks = tile.end_block - tile.first_block
    key0 = tile.row0 + tile.n_keys - tile.n_queries  # the key that the first row is aligned with
    _, full_begin, full_end, _ = problem.keys_of_rows(key0, BLOCK_M, tile.n_keys)
    n_right = 1
    if problem.HAS_RIGHT or problem.CHECK_KEYS:
        n_right += tile.end_block - last_block(full_end, BLOCK_N)
    n_right = gl.minimum(n_right, n_blocks)
    n_left = gl.maximum(gl.cdiv(full_begin, BLOCK_N) - tile.first_block, 1)
    return BlockOrder(tile.first_block, tile.end_block, n_right, gl.minimum(n_left, n_blocks - n_right))


@gluon.jit
def right_to_left(tile):
    """Return the order of batch-invariant mode: a tile's key blocks from the last to the first."""
    n_blocks = tile.end_block - tile.first_block
    return BlockOrder(tile.first_block, tile.end_block, n_blocks, gl.to_tensor(0))


@gluon.jit
def start_load(
    tensor, b, h, row, end, length, buffers, tile, full,
    BOXES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Start copying a tile to BOXES buffers of equally many columns. `full` completes when all bytes have arrived.

    RAGGED: `row` counts from the sequence's beginning, and `end` is the sequence's `sequence_end`.
    """
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * BOXES
    mbarrier.expect(full, SIZE)
    for j in gl.static_range(BOXES):
        buffer = box_buffer(buffers, tile, j, BOXES)
        if RAGGED:
            coordinates = [BOUND, end, h, BOUND - length + row, j * WIDTH]
        else:
            coordinates = [b, h, row, j * WIDTH]
        async_load(tensor, coordinates, full, buffer)


@gluon.jit
def _box_buffers(buffers, tensor, COUNT: gl.constexpr):
    """Return `buffers` as COUNT times as many, each for one box of the tensor; COUNT boxes fill one of them."""
    boxes = buffers
    if COUNT > 1:
        BOXES: gl.constexpr = buffers.shape[0] * COUNT
        boxes = reinterpret(buffers, buffers.dtype, [BOXES] + tensor.block_shape, tensor.layout)
    return boxes


@gluon.jit
def start_load_pages(
    tensor, cache,
    pages,  # `Problem.pages`
    h, row, n_keys, sample_steps, row_steps, buffers, tile, full,
    BOXES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Start copying keys [row, row + BLOCK_N) of a sequence in pages. `full` completes when all bytes have arrived.

    Each page ends where its keys end. A page of fewer than BLOCK_N keys fills PAGE_SIZE rows of the tile. A page number
    that the cache does not have fills them with zeros.
    """
    PAGE_SIZE: gl.constexpr = cache.PAGE_SIZE
    COUNT: gl.constexpr = pages_per_block(BLOCK_N, PAGE_SIZE)
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * BOXES * COUNT
    mbarrier.expect(full, SIZE)
    page_buffers = _box_buffers(buffers, tensor, COUNT)
    number = row // PAGE_SIZE
    if COUNT > 1:
        number += _lanes()
    exists = (pages >= 0) & (pages < cache.entries)
    length = gl.where(exists, gl.minimum(gl.maximum(n_keys - number * PAGE_SIZE, 0), PAGE_SIZE), 0)
    end = gl.where(exists, pages, 0) * sample_steps + length * row_steps
    for i in gl.static_range(COUNT):
        if COUNT > 1:
            page_end = gl.sum(gl.where(_lanes() == i, end, 0), 0)
            first_row = BOUND - gl.sum(gl.where(_lanes() == i, length, 0), 0)
        else:
            page_end = end
            first_row = BOUND - length + row - number * PAGE_SIZE
        for j in gl.static_range(BOXES):
            buffer = page_buffers.index(buffer_index(buffers, tile, j, BOXES) * COUNT + i)
            async_load(tensor, [BOUND, page_end, h, first_row, j * WIDTH], full, buffer)


@gluon.jit
def start_load_listed(
    tensor, b, h, keys,
    i, columns,  # key block of the tile, and its `TileList.columns`
    buffers, tile, full,
    BOXES: gl.constexpr,
):  # fmt: skip
    """Start copying a key block whose units a list names. `full` completes when all bytes have arrived."""
    UNITS: gl.constexpr = keys.UNITS
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * BOXES * UNITS
    mbarrier.expect(full, SIZE)
    unit_buffers = _box_buffers(buffers, tensor, UNITS)
    for unit in gl.static_range(UNITS):
        row = keys.first_key(i, columns, unit)
        for j in gl.static_range(BOXES):
            buffer = unit_buffers.index(buffer_index(buffers, tile, j, BOXES) * UNITS + unit)
            async_load(tensor, [b, h, row, j * WIDTH], full, buffer)


@gluon.jit
def start_store(tensor, b, h, row, column, end, length, buffer, RAGGED: gl.constexpr):
    """Start writing one box of a tile, with the arguments of `start_load`. Rows beyond the end are not written."""
    if RAGGED:
        async_store(tensor, [BOUND, end, h, BOUND - length + row, column], buffer)
    else:
        async_store(tensor, [b, h, row, column], buffer)


@gluon.jit
def sequence_end(b, first, length, sample_steps, row_steps, LENGTHS: gl.constexpr):
    """Return the end of a sequence, in steps of its descriptor's second dimension.

    Packed, a step is a row. Otherwise it is a common divisor of the strides of samples and rows. `first`: the
    sequence's first row, or its entry in a cache.
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
