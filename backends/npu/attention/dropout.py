"""Dropout mask of a tile, bit for bit as `diyfa.dropout` defines it, from operations that the vector unit has.

A kernel forms the keys of a head once, on the scalar unit. From these it forms two words for each row, once, and two
words for each column, for each block. Both pairs of words give the tile: seven vector operations for each score,
including the select. Hardware and compiler shape this:

* Integer compares run on the scalar unit, so the upper 24 bits of an element are compared in fp32, which holds them
  exactly.
* The compiler turns logical and arithmetic right shifts of 32 bits into the same, arithmetic instruction. So words are
  int32, and a shift that must fill with zeros has a mask.
* The vector unit has no exclusive or: (x | y) - (x & y) takes one operation less than the compiler's expansion.
* Vectors of 64-bit integers and the upper half of a 32-bit product become scalar loops, so only a head's keys use them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.dropout import drop_threshold

# The constants of the definition as signed words.
WEYL = tl.constexpr(0x9E3779B9 - 2**32)
MIX_MULTIPLIER = tl.constexpr(0x846CA68B - 2**32)
WORD = tl.constexpr(0xFFFFFFFF)


def keep_threshold(dropout_p: float) -> float:
    """Return the `threshold` of `keep_tile`, a 24-bit integer as fp32."""
    return float(drop_threshold(dropout_p))


@triton.jit
def head_keys(rng_state_ptr, b, h, ORIGINS: tl.constexpr):
    """Return Philox4x32-10 of (seed, offset) at (b, h): (row_key0, row_key1, column_key0, column_key1), int32 scalars.

    `rng_state_ptr`: int64 [seed, offset] in device memory. With ORIGINS four words follow for each sample: its number,
    its first query head, its first query and its first key. `b`: sample. `h`: query head.
    """
    seed = tl.load(rng_state_ptr)
    offset = tl.load(rng_state_ptr + 1)
    k0 = seed & WORD
    k1 = (seed >> 32) & WORD
    c0 = h.to(tl.int64)
    c1 = b.to(tl.int64)
    if ORIGINS:
        origin_ptr = rng_state_ptr + 2 + 4 * b
        c0 = (c0 + tl.load(origin_ptr + 1)) & WORD
        c1 = tl.load(origin_ptr) & WORD
    c2 = offset & WORD
    c3 = (offset >> 32) & WORD
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = ((product1 >> 32) & WORD) ^ c1 ^ k0
        c1 = product1 & WORD
        c2 = ((product0 >> 32) & WORD) ^ c3 ^ k1
        c3 = product0 & WORD
        k0 = (k0 + 0x9E3779B9) & WORD
        k1 = (k1 + 0xBB67AE85) & WORD
    if ORIGINS:  # adds the first position, times WEYL, to the keys instead of to positions
        row = tl.load(origin_ptr + 2) * 0x9E3779B9
        column = tl.load(origin_ptr + 3) * 0x9E3779B9
        c0 = (c0 + row) & WORD
        c1 = (c1 + row) & WORD
        c2 = (c2 + column) & WORD
        c3 = (c3 + column) & WORD
    return c0.to(tl.int32), c1.to(tl.int32), c2.to(tl.int32), c3.to(tl.int32)


@triton.jit
def position_words(key0, key1, positions):
    """Return two words for each of `positions` (int32 [BLOCK]), as ([BLOCK], [BLOCK]) int32.

    Query positions take the row keys, key positions the column keys. Both count from the start of their sequence.
    """
    x = positions * WEYL
    return _mix(x + key0), _mix(x + key1)


@triton.jit
def _mix(x):
    return _xor_shifted(_xor_shifted(x, 15) * MIX_MULTIPLIER, 16)


@triton.jit
def _xor_shifted(x, BITS: tl.constexpr):
    """Return x ^ (x >> BITS), with zeros shifted in."""
    shifted = (x >> BITS) & ((1 << (32 - BITS)) - 1)
    return (x | shifted) - (x & shifted)


@triton.jit
def keep_tile(first0, first1, second0, second1, threshold):
    """Return True for each softmax weight that dropout keeps, bool [BLOCK_FIRST, BLOCK_SECOND]. `threshold` is fp32.

    Row words first give [BLOCK_M, BLOCK_N]. Column words first give its transpose [BLOCK_N, BLOCK_M], for kernels that
    hold transposed scores.
    """
    x = (first0[:, None] + second0[None, :]) * (first1[:, None] + second1[None, :])
    return (x >> 8).to(tl.float32) >= threshold
