"""Which tile a program of the Hopper kernel works on, and how TMA finds its rows: Gluon helpers of `hopper/fwd.py`.

Sequences may be all as long as the tensor (EQUAL), end early (SEQ_LENS), or lie packed one after another (PACKED). A
TMA descriptor knows the end of a tensor only, so for the last two it gets two dimensions more (the idea of Triton's
`tools/ragged_tma.py`). Rows are counted to a bound of 2^30, and a coordinate of 2^30 - length + row lets the
sequence end exactly there: what lies beyond is read as zeros and not written, without a mask. The dimensions in front
bring the address back: 2^30 steps of 2^34 - stride elements are -2^30 * stride modulo 2^64 bytes, which cancels the
bound; the other one goes to the sequence's first row and `length` rows further. `gluon/tma.py` makes them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS
from diyfa.backends.cuda.hopper.configs import ROW_BOUND

BOUND = gl.constexpr(ROW_BOUND)


@gluon.jit
def here(x):
    """x (32 bits) as a number that nobody can know before this place. Else what follows from it, as reciprocals or
    addresses do, would be computed before the first tile, and would wait in registers that the loops have none of to
    spare."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def tile_count(heads, heads_q, batch, seqlen_q, total_q, BLOCK_M: gl.constexpr, LENGTHS: gl.constexpr):
    """How many tiles the grid has; packed, some of them are empty (see `_packed_tile`)."""
    if LENGTHS == PACKED:
        count = (total_q // BLOCK_M + batch) * heads_q
    else:
        count = gl.cdiv(seqlen_q, BLOCK_M) * heads
    return count


@gluon.jit
def group_count(tiles, heads_at_once, seqlen_q, BLOCK_M: gl.constexpr, LENGTHS: gl.constexpr):
    """How many tiles the heads have that take turns; packed sequences are one group."""
    if LENGTHS == PACKED:
        count = tiles
    else:
        count = heads_at_once * gl.cdiv(seqlen_q, BLOCK_M)
    return count


@gluon.jit
def _clamped(pointer, most):
    """A position read from the device, where it could not be checked before the launch, inside the memory there is."""
    return gl.minimum(gl.maximum(gl.load(pointer), 0), most)


@gluon.jit
def _packed_tile(
    index, batch, total_q, cu_seqlens_q_ptr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Tile number -> (sequence, head, which of the sequence's tiles: negative or too large for an empty one).

    In each head the tiles of sequence b begin at number cu_seqlens_q[b] // BLOCK_M + b. The next sequence's begin far
    enough behind, since floor(x + n) - floor(x) + 1 >= ceil(n), and at most one number in between stays empty. So the
    sequence is found by counting beginnings, one for each lane, without sums over lengths or a word from the host.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots = total_q // BLOCK_M + batch
    h = index // slots
    slot = index % slots
    count = 0
    for start in range(0, batch, 32):
        b = start + gl.arange(0, 32, layout=LANES)
        first = gl.load(cu_seqlens_q_ptr + b, mask=b < batch, other=0)
        first = gl.minimum(gl.maximum(first, 0), total_q)
        begun = (b < batch) & (first // BLOCK_M + b <= slot)
        count += gl.sum(begun.to(gl.int32), 0)
    b = gl.maximum(count - 1, 0)
    return b, h, slot - _clamped(cu_seqlens_q_ptr + b, total_q) // BLOCK_M - b


@gluon.jit
def tile_of(
    index, lengths_q_ptr, lengths_k_ptr,
    heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LENGTHS: gl.constexpr,
):  # fmt: skip
    """Tile number -> (exists, sample, head, first query, key blocks from, to, first rows in q and k, queries, keys).

    For partitions of one warp. At least one block is visited.
    `heads_at_once` heads take turns, so that their keys stay in L2 while the longest tiles of all of them start first;
    packed, a head's sequences follow each other, longest tiles first in each.
    """
    first_q = 0
    first_k = 0
    n_queries = seqlen_q
    n_keys = seqlen_k
    if LENGTHS == PACKED:
        b, h, tile_m = _packed_tile(index, batch, total_q, lengths_q_ptr, BLOCK_M)
        first_q = _clamped(lengths_q_ptr + b, total_q)
        first_k = _clamped(lengths_k_ptr + b, total_k)
        n_queries = gl.maximum(_clamped(lengths_q_ptr + b + 1, total_q) - first_q, 0)
        n_keys = gl.maximum(_clamped(lengths_k_ptr + b + 1, total_k) - first_k, 0)
        tiles_m = gl.cdiv(n_queries, BLOCK_M)
        exists = (tile_m >= 0) & (tile_m < tiles_m)
    else:
        tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
        first = index // (heads_at_once * tiles_m) * heads_at_once
        width = gl.minimum(heads_at_once, heads - first)
        rest = index % (heads_at_once * tiles_m)
        head = first + rest % width
        tile_m = rest // width
        b = head // heads_q
        h = head % heads_q
        if LENGTHS == SEQ_LENS:
            n_keys = _clamped(lengths_k_ptr + b, seqlen_k)
            n_queries = gl.minimum(n_keys, seqlen_q)
        exists = True
    if HAS_RIGHT:
        tile_m = tiles_m - 1 - tile_m
    row0 = tile_m * BLOCK_M
    key0 = row0 + n_keys - n_queries  # the key that query row0 is aligned with
    end = n_keys
    if HAS_RIGHT:
        end = key0 + BLOCK_M
        if not CAUSAL:
            end += window_right
        end = gl.minimum(n_keys, end)
    if LENGTHS == SEQ_LENS:  # a tile beyond the sample's end has rows to fill with zeros, but sees nothing
        end = gl.where(row0 < n_queries, end, 0)
    first_block = 0
    end_block = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    if HAS_LEFT:
        first_block = gl.minimum(gl.maximum(key0 - window_left, 0) // BLOCK_N, end_block - 1)
    return exists, b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys


@gluon.jit
def edges_of(
    row0, first_block, end_block, n_queries, n_keys, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
):  # fmt: skip
    """How many key blocks a tile visits first: (at the right end of what it sees, then at the left end).

    At the right end those that a mask or the end of the keys cuts for one of its rows and the next one; at the left end
    those that a window cuts, or the first one. Blocks in between are whole for all rows, and what rows have seen by
    then, their latest keys and the very first ones, is where most attention goes.
    """
    n_blocks = end_block - first_block
    key0 = row0 + n_keys - n_queries
    last_key = n_keys - 1  # that the first row sees
    n_right = 1
    if HAS_RIGHT:
        last_key = gl.minimum(key0 if CAUSAL else key0 + window_right, last_key)
    if HAS_RIGHT or CHECK_KEYS:
        n_right += end_block - gl.maximum(last_key, 0) // BLOCK_N
    n_right = gl.minimum(n_right, n_blocks)
    n_left = 1
    if HAS_LEFT:
        n_left = gl.maximum(gl.cdiv(gl.maximum(key0 + (BLOCK_M - 1) - window_left, 0), BLOCK_N) - first_block, 1)
    return n_right, gl.minimum(n_left, n_blocks - n_right)


@gluon.jit
def block_at(i, first_block, end_block, n_right, n_left):
    """The i-th key block of a tile's walk: from the right end inwards, at the left end, then the others."""
    block = gl.where(i < n_right, end_block - 1 - i, first_block + i - n_right)
    return gl.where(i < n_right + n_left, block, end_block - 1 - i + n_left)


@gluon.jit
def start_load(
    tensor, b, h, row, end, length, buffers, index, full,
    PIECES: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Start copying a tile, which fills PIECES buffers of equal columns; `full` completes when all bytes have arrived.

    RAGGED: `row` counts from the sequence's beginning; `end` says where that sequence ends (see `end_of`).
    """
    WIDTH: gl.constexpr = tensor.block_shape[-1]
    SIZE: gl.constexpr = tensor.block_type.nbytes * PIECES
    mbarrier.expect(full, SIZE)
    for j in gl.static_range(PIECES):
        buffer = buffers.index(index * PIECES + j)
        if RAGGED:
            coordinates = [BOUND, end, h, BOUND - length + row, j * WIDTH]
        else:
            coordinates = [b, h, row, j * WIDTH]
        tma.async_copy_global_to_shared(tensor, coordinates, full, buffer)


@gluon.jit
def start_store(tensor, b, h, row, column, end, length, buffer, RAGGED: gl.constexpr):
    """Start writing one piece of a tile, as `start_load` reads them; rows beyond the end stay as they are."""
    if RAGGED:
        tma.async_copy_shared_to_global(tensor, [BOUND, end, h, BOUND - length + row, column], buffer)
    else:
        tma.async_copy_shared_to_global(tensor, [b, h, row, column], buffer)


@gluon.jit
def end_of(b, first, length, sample_steps, row_steps, LENGTHS: gl.constexpr):
    """Where a sequence ends, in steps of its descriptor's second dimension.

    Packed, a step is a row; of samples it is what both a sample and a row are a multiple of.
    """
    if LENGTHS == PACKED:
        end = first + length
    elif LENGTHS == SEQ_LENS:
        end = b * sample_steps + length * row_steps
    else:
        end = 0
    return end
