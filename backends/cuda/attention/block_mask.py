"""Block masks in the portable kernels: loops over the listed blocks of a tile, and the visible pairs of partial ones.

`diyfa.block_lists` describes the tensors. The entries of one head in `mask_blocks`, with nq blocks of queries and nk of
keys, are nq * nk codes, nq lists of 2 + nk entries, and nk lists of 2 + nq entries. A list begins with two counts: of
full blocks, and of full and partial ones.

BLOCK_M divides MASK_Q, and BLOCK_N divides MASK_K, so a tile of queries has one list of key blocks. A loop over these
keys counts positions in the list: `position // MASK_K` is the index in the list and `position % MASK_K` the key inside
of that block. Positions [0, full_end) lie in full blocks, [full_end, end) in partial ones. A tile of keys has a list of
query blocks of the same form.

The functions take a `view` of one head: (address of its entries, address of `mask_bits`, nq, nk).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import key_ranges, masked_keys
from diyfa.backends.cuda.attention.tile_io import EQUAL
from diyfa.problem import AttentionTensors

WORD = tl.constexpr(32)  # bits of a word
FULL = tl.constexpr(-1)


@triton.jit
def mask_view(tensors, b, h, seqlen_q, seqlen_k, c: tl.constexpr):
    """Return the `view` of head h of sample b. `tensors`: (mask_blocks, mask_bits, stride of samples, of heads)."""
    blocks_ptr, bits_ptr, stride_b, stride_h = tensors
    lists = blocks_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return lists, bits_ptr, tl.cdiv(seqlen_q, c.MASK_Q), tl.cdiv(seqlen_k, c.MASK_K)


@triton.jit
def listed_keys(view, row0, c: tl.constexpr):
    """Return (address of the list, end of the full positions, end) of the keys that rows [row0, row0 + BLOCK_M) see."""
    lists, _, nq, nk = view
    counts = lists + nq * nk + (row0 // c.MASK_Q) * (2 + nk)
    return counts + 2, tl.load(counts) * c.MASK_K, tl.load(counts + 1) * c.MASK_K


@triton.jit
def listed_queries(view, col0, c: tl.constexpr):
    """Return (address of the list, end of the full positions, end) of the queries that see [col0, col0 + BLOCK_N)."""
    lists, _, nq, nk = view
    counts = lists + nq * nk + nq * (2 + nk) + (col0 // c.MASK_K) * (2 + nq)
    return counts + 2, tl.load(counts) * c.MASK_Q, tl.load(counts + 1) * c.MASK_Q


@triton.jit
def key_loops(row0, mask, mask_tensors, b, h, seqlen_q, seqlen_k, c: tl.constexpr):
    """Return (full, masked, block_mask): the keys that queries [row0, row0 + BLOCK_M) visit without and with a mask.

    full, masked: (start, end, gap_at, gap), keys [start, end) without a gap of `gap` keys at `gap_at` (`masked_keys`).
    With a block mask [start, end) are positions in a list, and block_mask is (list, view); else it is not used.
    """
    ranges = key_ranges(row0, mask, c)
    _, full_begin, full_end, _ = ranges
    masked = masked_keys(ranges, c)
    block_mask = (0, 0)
    if c.MASK_K:
        view = mask_view(mask_tensors, b, h, seqlen_q, seqlen_k, c)
        list_ptr, full_end, end = listed_keys(view, row0, c)
        if c.LENGTHS != EQUAL:  # query blocks beyond a sample's end see no key
            n_queries, _, _, _, _ = mask
            full_end = tl.where(row0 < n_queries, full_end, 0)
            end = tl.where(row0 < n_queries, end, 0)
        masked = (full_end, end, 0, 0)
        block_mask = (list_ptr, view)
    return (full_begin, full_end, 0, 0), masked, block_mask


@triton.jit
def listed(position, list_ptr, BLOCK: tl.constexpr):
    """Return the query or key at a position of a list. BLOCK: MASK_Q or MASK_K."""
    return tl.load(list_ptr + position // BLOCK) * BLOCK + position % BLOCK


@triton.jit
def kept_pairs(view, row0, col0, rows, cols, c: tl.constexpr):
    """Return which pairs of the tile at (row0, col0) the mask keeps, of the shape that rows and cols broadcast to."""
    lists, bits_ptr, _, nk = view
    code = tl.load(lists + (row0 // c.MASK_Q) * nk + col0 // c.MASK_K)
    block = bits_ptr + tl.maximum(code, 0).to(tl.int64) * (c.MASK_Q * c.MASK_K // WORD)
    words = block + (rows % c.MASK_Q) * (c.MASK_K // WORD) + (cols % c.MASK_K) // WORD
    codes = tl.broadcast_to(code, words.shape)  # Triton 3.9's interpreter takes no scalar in a mask
    word = tl.load(words, mask=codes >= 0, other=0)
    return ((word >> (cols % WORD)) & 1 != 0) | (codes == FULL)


MASK_ARGUMENTS = ("mask_blocks_ptr", "mask_bits_ptr", "stride_maskb", "stride_maskh")


def mask_arguments(tensors: AttentionTensors) -> dict[str, Any]:
    """Return the arguments of a Gluon kernel. Without a mask all are None, and the kernel has none of them."""
    if tensors.mask_blocks is None:
        return dict.fromkeys(MASK_ARGUMENTS)
    return {"mask_blocks_ptr": tensors.mask_blocks, "mask_bits_ptr": tensors.mask_bits, **mask_strides(tensors)}


def mask_strides(tensors: AttentionTensors) -> dict[str, int]:
    """Return the strides of `mask_blocks` over samples and heads, 0 for a dimension that all share."""
    blocks: torch.Tensor | None = tensors.mask_blocks
    if blocks is None:
        return {"stride_maskb": 0, "stride_maskh": 0}
    b, h = (0 if blocks.shape[i] == 1 else blocks.stride(i) for i in (0, 1))
    return {"stride_maskb": b, "stride_maskh": h}
