"""Where the rows of a sequence lie, and how many there are. Kernels in Triton and in Gluon call these functions.

Lengths and offsets on the device cannot be checked before the launch, so they are clamped to the memory that exists.
`b` is a sequence, or a block of sequences. `inside` says which of a block are in the batch: only their lengths are
loaded. None: all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS


@triton.jit
def clamp(x, low, high):
    """Return x limited to [low, high]."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _load(pointer, inside):
    return tl.load(pointer) if inside is None else tl.load(pointer, mask=inside, other=0)


@triton.jit
def load_clamped(pointer, most, inside=None):
    """Load a length or an offset, clamped to [0, most]."""
    return clamp(_load(pointer, inside), 0, most)


@triton.jit
def packed_info(cu_seqlens_ptr, b, total, inside=None):
    """Return (first row, rows) of packed sequences."""
    first = load_clamped(cu_seqlens_ptr + b, total, inside)
    return first, clamp(_load(cu_seqlens_ptr + b + 1, inside), first, total) - first


@triton.jit
def packed_keys(cu_seqlens_k_ptr, seqused_ptr, b, total_k, inside=None):
    """Return (first row, keys) of packed sequences. `seqused_ptr`: they may use fewer keys than lie between offsets."""
    first_k, n_keys = packed_info(cu_seqlens_k_ptr, b, total_k, inside)
    if seqused_ptr is not None:
        n_keys = load_clamped(seqused_ptr + b, n_keys, inside)
    return first_k, n_keys


@triton.jit
def cached_keys(cu_seqlens_k_ptr, seqused_ptr, b, length, added, capacity, inside=None):
    """Return the keys of sequences whose rows lie in pages, or in entries of a contiguous cache.

    `length`: keys of each sequence, if no tensor says how many. `added`: keys that the call has appended to each.
    """
    if seqused_ptr is not None:
        n_keys = tl.minimum(_load(seqused_ptr + b, inside), capacity)  # so that the sum below cannot overflow
    elif cu_seqlens_k_ptr is not None:
        n_keys = _load(cu_seqlens_k_ptr + b + 1, inside) - _load(cu_seqlens_k_ptr + b, inside)
    else:
        n_keys = b * 0 + length  # b * 0: a zero of b's type and shape
    return clamp(n_keys + added, 0, capacity)


@triton.jit
def cache_entry(cache_batch_idx_ptr, b, entries, n_keys):
    """Return (entry of a sequence in a contiguous cache, n_keys). Without such an entry they are 0 and 0."""
    entry = b
    if cache_batch_idx_ptr is not None:
        entry = tl.load(cache_batch_idx_ptr + b)
        exists = (entry >= 0) & (entry < entries)
        n_keys = tl.where(exists, n_keys, 0)
        entry = tl.where(exists, entry, 0)
    return entry, n_keys


@triton.jit
def left_padding(leftpad_ptr, b, capacity, inside=None):
    """Return the rows of padding before the keys of sequences."""
    return b * 0 if leftpad_ptr is None else load_clamped(leftpad_ptr + b, capacity, inside)


@triton.jit
def seq_info(b, lengths, LENGTHS: tl.constexpr):
    """Return (first row in q, first row in k, queries, keys) of a sequence, without a cache.

    `lengths`: (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k).
    """
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k = lengths
    first_q = 0
    first_k = 0
    n_queries = seqlen_q
    n_keys = seqlen_k
    if LENGTHS == PACKED:
        first_q, n_queries = packed_info(cu_seqlens_q_ptr, b, total_q)
        first_k, n_keys = packed_info(cu_seqlens_k_ptr, b, total_k)
    if LENGTHS == SEQ_LENS:
        n_keys = load_clamped(seq_lens_ptr + b, seqlen_k)
        n_queries = tl.minimum(n_keys, seqlen_q)
    return first_q, first_k, n_queries, n_keys


@triton.jit
def cache_seq_info(b, lengths, c: tl.constexpr, inside=None):
    """Return (first row in q, queries, first row of packed keys, keys, padding before the keys) over a cache.

    Programs exist for `seqlen_q` queries and `capacity` keys of a sequence, so more do not count.
    """
    pointers, sizes = lengths
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr = pointers
    seqlen_q, total_q, total_k, length, added, capacity = sizes
    first_q = b * 0
    n_queries = first_q + seqlen_q
    if cu_seqlens_q_ptr is not None:
        first_q, n_queries = packed_info(cu_seqlens_q_ptr, b, total_q, inside)
        n_queries = tl.minimum(n_queries, seqlen_q)
    if c.PACKED_KEYS:
        first_k, n_keys = packed_keys(cu_seqlens_k_ptr, seqlens_ptr, b, total_k, inside)
        n_keys = tl.minimum(n_keys, capacity)
    else:
        first_k = b * 0
        n_keys = cached_keys(cu_seqlens_k_ptr, seqlens_ptr, b, length, added, capacity, inside)
    return first_q, n_queries, first_k, n_keys, left_padding(leftpad_ptr, b, capacity, inside)
