"""Block masks in the portable kernels: loops over the listed blocks of a tile, and the visible pairs of partial ones.

`diyfa.block_lists` describes the tensors. BLOCK_M divides MASK_Q, and BLOCK_N divides MASK_K, so a tile of queries has
one list of key blocks. A loop over its keys counts positions in the list: `position // MASK_K` is the index in the list
and `position % MASK_K` the key inside of that block. Positions [0, full) lie in full blocks, [full, end) in partial
ones. A tile of keys has a list of query blocks of the same form.

The functions take a `view` of one head: (address of its entries of `mask_blocks`, address of `mask_bits`, number of
blocks of queries, number of blocks of keys).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

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
