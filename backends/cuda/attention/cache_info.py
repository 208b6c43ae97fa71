"""Where the sequences of a KV cache lie, and which blocks of keys a tile of rows sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def sequence_info(b, inside, lengths, c: tl.constexpr):
    """Look up sequences `b` -> (first row in q, queries, first row of packed keys, keys, padding before the keys).

    Nothing is loaded for sequences that are not `inside` the batch. The host cannot check lengths on the device before
    the launch, so they are clamped to the memory that exists.
    """
    pointers, sizes = lengths
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr = pointers
    seqlen_q, total_q, total_k, length, added, capacity = sizes
    first_q = b * 0
    n_queries = first_q + seqlen_q
    first_k = b * 0
    pad = b * 0
    if cu_seqlens_q_ptr is not None:
        first_q = _clamp(tl.load(cu_seqlens_q_ptr + b, mask=inside, other=0), 0, total_q)
        end_q = _clamp(tl.load(cu_seqlens_q_ptr + b + 1, mask=inside, other=0), 0, total_q)
        n_queries = _clamp(end_q - first_q, 0, seqlen_q)
    if cu_seqlens_k_ptr is not None:
        first_k = tl.maximum(tl.load(cu_seqlens_k_ptr + b, mask=inside, other=0), 0)
        end_k = tl.maximum(tl.load(cu_seqlens_k_ptr + b + 1, mask=inside, other=0), 0)
        if c.PACKED_KEYS:
            first_k = tl.minimum(first_k, total_k)
            end_k = tl.minimum(end_k, total_k)
        n_keys = end_k - first_k
        if seqlens_ptr is not None:
            # Packed keys begin at their offset, even if the call uses fewer of them than the offsets leave room for.
            used = tl.load(seqlens_ptr + b, mask=inside, other=0)
            n_keys = tl.minimum(n_keys, used) if c.PACKED_KEYS else used
    elif seqlens_ptr is not None:
        n_keys = tl.minimum(tl.load(seqlens_ptr + b, mask=inside, other=0), capacity) + added
    else:
        n_keys = b * 0 + length + added
    n_keys = _clamp(n_keys, 0, capacity)
    if leftpad_ptr is not None:
        pad = _clamp(tl.load(leftpad_ptr + b, mask=inside, other=0), 0, capacity)
    return first_q, n_queries, first_k, n_keys, pad


@triton.jit
def first_visible_key(block_m, n_queries, n_keys, pad, mask, c: tl.constexpr):
    """Return the first key that any row of a tile sees."""
    group, window_left, _ = mask
    begin = pad
    if c.HAS_LEFT:
        begin = tl.maximum(pad, block_m * c.BLOCK_M // group + n_keys - n_queries - window_left)
    return begin


@triton.jit
def visible_blocks(block_m, n_queries, n_keys, pad, mask, c: tl.constexpr):
    """Return the blocks of keys that a tile sees: (number of the first, counted from `pad`; how many).

    A tile that has rows gets at least one block, so that some program writes its results. A tile
    without rows gets none.
    """
    group, _, window_right = mask
    row0 = block_m * c.BLOCK_M
    rows = n_queries * group
    end = n_keys
    if c.HAS_RIGHT:
        last = (tl.minimum(row0 + c.BLOCK_M, rows) - 1) // group
        end = tl.minimum(n_keys, last + n_keys - n_queries + window_right + 1)
    first = (first_visible_key(block_m, n_queries, n_keys, pad, mask, c) - pad) // c.BLOCK_N
    n_blocks = tl.cdiv(tl.maximum(end - pad, 0), c.BLOCK_N) - first
    return first, tl.where(row0 < rows, tl.maximum(n_blocks, 1), 0)
