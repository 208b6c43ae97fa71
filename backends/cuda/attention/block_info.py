"""The ranges that a mask leaves: keys that a tile of queries sees, and queries that see a block of keys.

Kernels in Triton and in Gluon call these functions. So they create no tensors: in Gluon those need a layout.

Query i is aligned with key i + offset, and sees the keys from `window_left` before that one to `window_right` after it
(causal: 0 after). So key j is seen by the queries from `window_right` before query j - offset to `window_left` after
it. One rule serves both directions.

A range is four positions, (begin, full_begin, full_end, end). For keys that a tile of queries sees: every key that some
query sees is in [begin, end), and all queries see each key in [full_begin, full_end). For queries that see a block of
keys, likewise. Blocks in [full_begin, full_end) need no mask. Blocks outside [begin, end) are not visited: a window
costs its width.

`mask` is (n_queries, n_keys, offset, window_left, window_right) of one sequence. `tile_mask`, over a cache, is (group,
window_left, window_right), because the numbers differ from tile to tile; group: query heads of a KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS

# The next three functions have one direction: rows see columns. Either rows are queries and columns are keys, or rows
# are keys and columns the queries that see them. A row is given by the column that it is aligned with.


@triton.jit
def first_visible(aligned, before):
    """Return the first column that a row sees. It sees `before` columns to the left of column `aligned`."""
    return tl.maximum(aligned - before, 0)


@triton.jit
def end_visible(aligned, after, length):
    """Return the end (exclusive) of the columns that a row sees: `after` to the right of `aligned`, of `length`."""
    return tl.minimum(length, tl.maximum(aligned + after + 1, 0))


@triton.jit
def visible_range(first, last, before, after, length, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """Return the range of columns that rows see, which are aligned with the columns [first, last].

    `before`, `after`: how many columns a row sees to the left and right of its own; without HAS_BEFORE or HAS_AFTER,
    all. full_end may be before full_begin: then no column is seen by all rows.
    """
    begin = 0
    full_begin = 0
    full_end = length
    end = length
    if HAS_BEFORE:
        begin = first_visible(first, before)
        full_begin = first_visible(last, before)
    if HAS_AFTER:
        full_end = end_visible(first, after, length)
        end = end_visible(last, after, length)
    return begin, full_begin, full_end, end


@triton.jit
def last_block(end, BLOCK: tl.constexpr):
    """Return the block that has the last position before `end`, or block 0 if there is none."""
    return (tl.maximum(end, 1) - 1) // BLOCK


@triton.jit
def key_ranges(row0, mask, c: tl.constexpr):
    """Return the keys that queries [row0, row0 + BLOCK_M) see. All bounds but `end` are multiples of BLOCK_N."""
    n_queries, n_keys, offset, window_left, window_right = mask
    first = row0 + offset
    begin, full_begin, full_end, end = visible_range(
        first, row0 + (c.BLOCK_M - 1) + offset, window_left, window_right, n_keys, c.HAS_LEFT, c.HAS_RIGHT
    )
    if c.LENGTHS == SEQ_LENS:  # query blocks beyond a sample's end see no key
        end = tl.where(row0 < n_queries, end, 0)
        full_end = tl.where(row0 < n_queries, full_end, 0)
    full_end = full_end // c.BLOCK_N * c.BLOCK_N
    if c.HAS_LEFT:
        begin = begin // c.BLOCK_N * c.BLOCK_N
        full_begin = tl.cdiv(tl.minimum(full_begin, end), c.BLOCK_N) * c.BLOCK_N
        full_begin = tl.maximum(full_begin, begin)
        full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_ranges(col0, mask, EDGES: tl.constexpr, WHOLE_KEYS: tl.constexpr, c: tl.constexpr):
    """Return the queries that see keys [col0, col0 + BLOCK_N). `begin` and `full_begin` are multiples of BLOCK_M.

    Two flags decide whether blocks that reach beyond the sequence count as full:

    * EDGES: the last block of queries is not full if it extends beyond the last query. Set it if the caller reads full
      blocks without a check for the sequence's end. The block then lies in [full_end, end), and full_end is a multiple
      of BLOCK_M. Without EDGES the block may be full: rows beyond the last query read as zeros and their lse as inf, so
      their weights are 0.
    * WHOLE_KEYS: a block of keys that extends beyond the last key has no full blocks of queries, so that a mask drops
      its missing keys. Set it if the caller forms dQ of the block's weights. Missing keys read as zeros, so their
      weights exp(0 - lse) may be infinite; without dQ these reach only the missing keys' own rows of dK and dV.
    """
    n_queries, n_keys, offset, window_left, window_right = mask
    first = col0 - offset
    begin, full_begin, full_end, end = visible_range(
        first, col0 + (c.BLOCK_N - 1) - offset, window_right, window_left, n_queries, c.HAS_RIGHT, c.HAS_LEFT
    )
    if EDGES:
        full_end = full_end // c.BLOCK_M * c.BLOCK_M
    elif c.HAS_LEFT:
        full_end = tl.where(full_end < n_queries, full_end // c.BLOCK_M * c.BLOCK_M, n_queries)
    if c.LENGTHS == SEQ_LENS or (c.LENGTHS == PACKED and WHOLE_KEYS):  # no query sees a block beyond the keys
        end = tl.where(col0 < n_keys, end, 0)
        full_end = tl.where(col0 < n_keys, full_end, 0)
    if WHOLE_KEYS:
        full_begin = tl.where(col0 + c.BLOCK_N <= n_keys, full_begin, end)
    begin = begin // c.BLOCK_M * c.BLOCK_M
    full_begin = tl.cdiv(full_begin, c.BLOCK_M) * c.BLOCK_M
    full_begin = tl.maximum(tl.minimum(full_begin, tl.cdiv(end, c.BLOCK_M) * c.BLOCK_M), begin)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def masked_keys(ranges, c: tl.constexpr):
    """Return (begin, end, gap_begin, gap) of one loop over the keys that need a mask. `ranges`: from `key_ranges`.

    With HAS_LEFT these keys lie on both sides of the full ones, the gap. The loop counts without the gap: position n is
    key n if n < gap_begin, else key n + gap. Without HAS_LEFT all of these keys follow the full ones, position n is key
    n, and callers do not use the gap.
    """
    begin, full_begin, full_end, end = ranges
    gap = full_end - full_begin
    if c.HAS_LEFT:  # both edges: [begin, full_begin) and [full_end, end)
        masked_begin = begin
        masked_end = end - gap
    else:
        masked_begin = full_end
        masked_end = end
    return masked_begin, masked_end, full_begin, gap


@triton.jit
def first_cached_key(block_m, n_queries, n_keys, pad, tile_mask, c: tl.constexpr):
    """Return the first key of a cache that any row of a tile sees. Its arguments are those of `cached_blocks`."""
    group, window_left, _ = tile_mask
    begin = pad
    if c.HAS_LEFT:
        begin = tl.maximum(pad, first_visible(block_m * c.BLOCK_M // group + n_keys - n_queries, window_left))
    return begin


@triton.jit
def end_of_cached_keys(block_m, n_queries, n_keys, tile_mask, c: tl.constexpr):
    """Return the end of the keys of a cache that any row of a tile sees. Its arguments are those of `cached_blocks`."""
    group, _, window_right = tile_mask
    end = n_keys
    if c.HAS_RIGHT:
        end_row = tl.minimum(block_m * c.BLOCK_M + c.BLOCK_M, n_queries * group)
        end = end_visible((end_row - 1) // group + n_keys - n_queries, window_right, n_keys)
    return end


@triton.jit
def cached_blocks(block_m, n_queries, n_keys, pad, tile_mask, c: tl.constexpr):
    """Return the blocks of keys of a cache that a tile sees: (number of the first one, how many).

    The first `pad` of the sequence's n_keys keys are padding, which nobody sees: block 0 begins at key `pad`. Tile
    `block_m` has rows [block_m * BLOCK_M, (block_m + 1) * BLOCK_M) of the sequence; row = token * group + head in the
    group. A tile that has rows gets at least one block, so that some program writes its results. A tile without rows
    gets none.
    """
    group, _, _ = tile_mask
    row0 = block_m * c.BLOCK_M
    rows = n_queries * group
    end = end_of_cached_keys(block_m, n_queries, n_keys, tile_mask, c)
    first = (first_cached_key(block_m, n_queries, n_keys, pad, tile_mask, c) - pad) // c.BLOCK_N
    n_blocks = tl.cdiv(tl.maximum(end - pad, 0), c.BLOCK_N) - first
    return first, tl.where(row0 < rows, tl.maximum(n_blocks, 1), 0)
