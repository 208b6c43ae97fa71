"""Dropout's mask of a tile, bit for bit as `diyfa.dropout` defines it.

A kernel computes the keys of its head once, the words of its rows once, and the words of its columns for each block.
The mask of a tile takes two additions, one product and one comparison of these words for each score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.dropout import drop_threshold

WEYL = tl.constexpr(0x9E3779B9)
MIX_MULTIPLIER = tl.constexpr(0x846CA68B)


def keep_threshold(dropout_p: float) -> int:
    """Return the `threshold` of `keep_tile`: `drop_threshold` moved up by 8 bits, to compare all 32 bits of an element.

    It is a multiple of 256 for every probability, so that Triton specialises all kernels in the same way.
    """
    return drop_threshold(dropout_p) * 256


@triton.jit
def head_keys(rng_state_ptr, b, h, ORIGINS: tl.constexpr):
    """Return (row_key0, row_key1, column_key0, column_key1), uint32: Philox4x32-10 of (seed, offset) at (b, h).

    `rng_state_ptr`: int64 [seed, offset] in device memory. With ORIGINS, four words per sample follow: its number, and
    its first query head, query and key. `b`, `h`: sample and query head, integers or vectors of integers.
    """
    seed = tl.load(rng_state_ptr).to(tl.uint64, bitcast=True)
    offset = tl.load(rng_state_ptr + 1).to(tl.uint64, bitcast=True)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = h.to(tl.uint32)
    c1 = b.to(tl.uint32)
    if ORIGINS:
        origin_ptr = rng_state_ptr + 2 + 4 * b
        c0 += _low_word(origin_ptr + 1)
        c1 = _low_word(origin_ptr)
    c2 = offset.to(tl.uint32) + c0 * 0
    c3 = (offset >> 32).to(tl.uint32) + c0 * 0
    multiplier0 = tl.full((), 0xD2511F53, tl.uint32)
    multiplier1 = tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, multiplier0)
        high1 = tl.umulhi(c2, multiplier1)
        low0 = c0 * multiplier0
        low1 = c2 * multiplier1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    if ORIGINS:  # position i with the shifted key has the words of position i + origin with the original key
        row = _low_word(origin_ptr + 2) * WEYL
        column = _low_word(origin_ptr + 3) * WEYL
        c0 += row
        c1 += row
        c2 += column
        c3 += column
    return c0, c1, c2, c3


@triton.jit
def _low_word(pointer):
    return tl.load(pointer).to(tl.uint64, bitcast=True).to(tl.uint32)


@triton.jit
def position_words(key0, key1, positions):
    """Return two words ([BLOCK], [BLOCK]) uint32 for integers `positions` [BLOCK].

    Query positions take the row keys, key positions the column keys. Positions count from the start of their sequence.
    """
    x = positions.to(tl.uint32) * WEYL
    return _mix(x + key0), _mix(x + key1)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 15)) * MIX_MULTIPLIER
    return x ^ (x >> 16)


@triton.jit
def keep_tile(first0, first1, second0, second1, threshold):
    """Return the mask of softmax weights that dropout keeps, bool [BLOCK_FIRST, BLOCK_SECOND].

    With row words first it is [BLOCK_M, BLOCK_N]. With column words first it is transposed, [BLOCK_N, BLOCK_M], for
    kernels with transposed scores.
    """
    x = (first0[:, None] + second0[None, :]) * (first1[:, None] + second1[None, :])
    return x.to(tl.int32, bitcast=True) >= threshold
