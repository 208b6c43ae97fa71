"""Block masks in the Ascend kernels: positions in the lists of a tile, and the bits of partial blocks.

`diyfa.block_lists` describes the tensors. BLOCK_M divides MASK_Q, and BLOCK_N divides MASK_K, so a tile of queries has
one list of key blocks. A loop over these keys counts positions in the list: block `position // MASK_K` of the list, key
`position % MASK_K` of that block. Positions [0, full) lie in blocks in which every query sees every key, [full, end) in
partial ones. The queries of a tile of keys have a list of the same form.

One scalar load finds the rows or keys of a position. `mask_bits` has a word for each query and each 32 keys of a block,
so a partial tile needs one vector of words, a word for each row, for each 32 keys. The usual test of a bit,
`word >> key & 1`, would shift each element by another distance, which the vector unit cannot do. So the test is
`word & 2^key` (`key_bits`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import key_range
from diyfa.problem import AttentionTensors

WORD = tl.constexpr(32)  # bits of a word
EMPTY, FULL = tl.constexpr(-2), tl.constexpr(-1)


@triton.jit
def head_lists(mask_blocks_ptr, b, h, stride_b, stride_h):
    """Return the address of the lists of head h of sample b."""
    return mask_blocks_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def listed_keys(lists, row0, seqlen_q, seqlen_k, c: tl.constexpr):
    """Return (address of the list, end of the full positions, end of all) of the keys that BLOCK_M queries see."""
    nq = tl.cdiv(seqlen_q, c.MASK_Q)
    nk = tl.cdiv(seqlen_k, c.MASK_K)
    counts = lists + nq * nk + (row0 // c.MASK_Q) * (2 + nk)
    return counts + 2, tl.load(counts) * c.MASK_K, tl.load(counts + 1) * c.MASK_K


@triton.jit
def listed_queries(lists, n0, seqlen_q, seqlen_k, c: tl.constexpr):
    """Return (address of the list, end of the full positions, end of all) of the queries that see BLOCK_N keys."""
    nq = tl.cdiv(seqlen_q, c.MASK_Q)
    nk = tl.cdiv(seqlen_k, c.MASK_K)
    counts = lists + nq * nk + nq * (2 + nk) + (n0 // c.MASK_K) * (2 + nq)
    return counts + 2, tl.load(counts) * c.MASK_Q, tl.load(counts + 1) * c.MASK_Q


@triton.jit
def visited_keys(
    mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_b, stride_h,
    c: tl.constexpr,
):  # fmt: skip
    """Return (lists, list_ptr, full_end, lo, hi): BLOCK_M queries from `row0` on loop over keys [lo, hi).

    With a block mask these are positions in the list at `list_ptr`, one of the head's `lists`, and those from
    `full_end` on lie in partial blocks. Without one, the first three are unused zeros.
    """
    if c.MASK_K:
        lists = head_lists(mask_blocks_ptr, b, h, stride_b, stride_h)
        list_ptr, full_end, hi = listed_keys(lists, row0, seqlen_q, seqlen_k, c)
        lo = 0
    else:
        lo, hi = key_range(row0, sq, sk, window_left, window_right, c)
        lists, list_ptr, full_end = 0, 0, 0
    return lists, list_ptr, full_end, lo, hi


@triton.jit
def listed(position, list_ptr, BLOCK: tl.constexpr):
    """Return the row or key at a position of a list. BLOCK: MASK_Q or MASK_K."""
    return tl.load(list_ptr + position // BLOCK) * BLOCK + position % BLOCK


@triton.jit
def key_bits(BLOCK: tl.constexpr):
    """Return 2^(key % 32) for each key of a tile, int32 [BLOCK], by shifts of all selected elements by one distance."""
    keys = tl.arange(0, BLOCK)
    bits = tl.full([BLOCK], 1, tl.int32)
    for power in tl.static_range(5):
        is_set = ((keys >> power) & 1).to(tl.float32) > 0.0
        bits = tl.where(is_set, bits << (1 << power), bits)
    return bits


@triton.jit
def block_code(lists, row0, n0, seqlen_k, c: tl.constexpr):
    """Return the code of the block that has the tile at (row0, n0): EMPTY, FULL, or its index in `mask_bits`."""
    return tl.load(lists + (row0 // c.MASK_Q) * tl.cdiv(seqlen_k, c.MASK_K) + n0 // c.MASK_K)


@triton.jit
def keep_visible(x, fill, is_partial, lists, bits_ptr, row0, n0, seqlen_k, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Return x where query and key see each other, else `fill`. x: [BLOCK_M, BLOCK_N], or TRANSPOSED its transpose.

    The bits are under a run-time `if`, so a tile of a full block pays nothing."""
    if is_partial:
        x = apply_bits(x, fill, lists, bits_ptr, row0, n0, seqlen_k, TRANSPOSED, c)
    return x


@triton.jit
def apply_bits(x, fill, lists, bits_ptr, row0, n0, seqlen_k, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Return x where the bits of the tile's block are 1, else `fill`. The block must be partial.

    1. Load a word for each row of the tile: the one that has the bit of the tile's first key.
    2. With more than 32 keys, replace it where a key's bit is in a later word.
    3. Test the key's bit of each word, and select.
    """
    code = block_code(lists, row0, n0, seqlen_k, c)
    WORDS: tl.constexpr = c.MASK_K // WORD  # words of a row of the block
    first_row = bits_ptr + code.to(tl.int64) * (c.MASK_Q * WORDS) + (row0 % c.MASK_Q) * WORDS  # of the tile, whole
    first_word = first_row + (n0 % c.MASK_K) // WORD  # of the tile's first row, for the tile's first key
    offs_m = tl.arange(0, c.BLOCK_M)
    rows = offs_m.to(tl.float32)
    keys = tl.arange(0, c.BLOCK_N).to(tl.float32)
    bits = key_bits(c.BLOCK_N)
    if WORDS == 2 and c.BLOCK_N <= WORD:
        # A row has two words, of which the tile needs one. The compiler makes a load of every second word one load of
        # all words between. From the second word of a row on, it would also read the word behind the block. So load the
        # first and the second words, and select.
        is_second = rows * 0.0 + ((n0 % c.MASK_K) // WORD).to(tl.float32) > 0.0
        words = tl.where(is_second, tl.load(first_row + offs_m * WORDS + 1), tl.load(first_row + offs_m * WORDS))
    else:
        words = tl.load(first_word + offs_m * WORDS)
    if c.BLOCK_N < WORD:  # the tile's first key gets bit 0
        words = words >> (n0 % WORD)
    if TRANSPOSED:
        rows, keys, words, bits = rows[None, :], keys[:, None], words[None, :], bits[:, None]
    else:
        rows, keys, words, bits = rows[:, None], keys[None, :], words[:, None], bits[None, :]
    for i in tl.static_range(1, c.BLOCK_N // WORD):
        next_words = tl.load(first_word + offs_m * WORDS + i)
        next_words = next_words[None, :] if TRANSPOSED else next_words[:, None]
        words = tl.where(keys >= i * WORD, next_words, words)
    # `bit` is 0.0, or at least 1.0 away from it, so rel + bit != rel means bit != 0. It is written so for AscendNPU IR
    # 1.1.0, which shares a square tile between both vector cores only if both sides of the comparison have the tile's
    # shape.
    bit = (words & bits).to(tl.float32)
    rel = rows - keys
    return tl.where(rel + bit != rel, x, fill)


def mask_strides(tensors: AttentionTensors) -> dict[str, int | None]:
    """Return the strides of `mask_blocks` over samples and heads, 0 for a dimension that all share; None without it."""
    blocks: torch.Tensor | None = tensors.mask_blocks
    if blocks is None:
        return {"stride_mask_b": None, "stride_mask_h": None}
    b, h = (0 if blocks.shape[i] == 1 else blocks.stride(i) for i in (0, 1))
    return {"stride_mask_b": b, "stride_mask_h": h}
