"""The order of operations of a row in batch-invariant mode, for `decode.py` in Triton and `hopper/chunks.py` in Gluon.

A row has the same bits in both kernels because each number that decides on them comes from the same sequence of float32
operations, whatever the tile, the warps and the layout:

1. Tensor cores add up the products of query and key in their accumulator, 16 features at a time in ascending order.
2. Keys form blocks of BLOCK_N and chunks of whole blocks, both counted from the sequence's first key that is no
   padding. A chunk starts with no maximum and no sums. Its blocks are visited from the last to the first.
3. A block's maximum is its largest product times the scale, rounded. The running maximum is the larger of it and the
   maximum so far. A weight is exp2(fma(product, scale, -running maximum)).
4. `sums_by_lane` adds the weights of a block to four sums for each row, by a tree of additions that is written out.
   `next_sum` adds them to the four sums of the blocks before. `sum_of_lanes` adds the four at the end of the chunk.
5. Tensor cores add values times rounded weights, 16 keys at a time in ascending order inside of a block. Before a block
   the sums so far are multiplied by exp2(old maximum - new maximum).
6. `fold` adds the sums of chunks, from the last to the first. Out is the total times the reciprocal of the sum of
   weights.

A block or a chunk that a row does not see changes no bit of it: the maximum stays, factors are 1, weights are 0. So it
makes no difference which blocks the other rows of its tile see. Multiply-adds are written out, and with COMPILE_OPTIONS
the compiler fuses no others. Steps 1 and 5 also need that the two kernels' instructions, mma.sync and wgmma, round
equally: `docs/log/decode.md` has what a GPU says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.tile_io import LARGEST_PRODUCT, LOG2E

# A compiler that fuses products and sums would decide for each kernel which ones.
COMPILE_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _first_plus_second_half(x):
    """Return elements i + elements i + n / 2 of the last of three dimensions [rows, lanes, n]."""
    halves = tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2))
    first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
    return first + second


@triton.jit
def sums_by_lane(p):
    """Return four sums for each row, [rows, 4], of weights [rows, 8 to 256]: one for each lane of an accumulator.

    A lane, 0 to 3, has the columns 8 * n + 2 * lane + bit. First the two bits are added. Then the first half of all n
    is added to the second, until one sum is left. Where warps have whole rows, a thread has all of a lane's columns.
    """
    N_ROWS: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    even, odd = tl.split(tl.reshape(p, (N_ROWS, N // 2, 2)))
    x = tl.permute(tl.reshape(even + odd, (N_ROWS, N // 8, 4)), (0, 2, 1))
    for i in tl.static_range(5):
        if 256 >> i <= N:
            x = _first_plus_second_half(x)
    return tl.reshape(x, (N_ROWS, 4))


@triton.jit
def sum_of_lanes(x):
    """Return the sums [rows] of [rows, 4]: (0 + 2) + (1 + 3)."""
    first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 2)), (0, 2, 1)))
    even, odd = tl.split(first + second)
    return even + odd


@triton.jit
def weights(s, scale, m_i):
    """Return exp2(s * scale - m_i) for products s [rows, columns] and the maximum m_i [rows], in units of log2."""
    return tl.math.exp2(tl.fma(s, scale, -m_i[:, None]))


@triton.jit
def next_sum(l_i, alpha, added):
    """Return the sums l_i * alpha + added, rounded once. `alpha`: factor of earlier sums; `added`: a block's sums."""
    return tl.fma(l_i, alpha, added)


@triton.jit
def chunk_factors(m_i, m_chunk):
    """Return (maximum of both, factor of the sums so far, factor of the chunk's sums)."""
    m_new = tl.maximum(m_i, m_chunk)
    return m_new, tl.math.exp2(m_i - m_new), tl.math.exp2(m_chunk - m_new)


@triton.jit
def fold(total, alpha, chunk_sum, beta):
    """Return total * alpha + chunk_sum * beta, all of one shape."""
    return tl.fma(total, alpha, chunk_sum * beta)


@triton.jit
def with_sink(sink, m_i, l_i):
    """Return (maximum, sum of weights, factor of the sums of values) with a sink. `add_sink` in fwd.py explains it."""
    limited = tl.where(sink < float("inf"), tl.minimum(sink, LARGEST_PRODUCT), sink)
    product = limited * LOG2E
    m_new = tl.maximum(m_i, product)
    weight = tl.math.exp2(tl.where(product == m_new, sink - sink, product - m_new))
    alpha = tl.math.exp2(m_i - m_new)
    return m_new, tl.fma(l_i, alpha, weight), alpha


@triton.jit
def without_sign_of_zero(x):
    """Return x with +0 for -0: the sign of a sum that cancels, or of one that underflows, is not kept."""
    return tl.where(x == 0.0, 0.0, x)
