"""From the products q·k to the scores of a tile: mask, softcap, ALiBi, bias, dropout.

The forward and the backward kernels use these functions. A tile is [BLOCK_M, BLOCK_N] or, in the dK/dV kernel,
transposed. Positions come as `rows` and `cols` that broadcast to it ([BLOCK_M, 1] and [1, BLOCK_N], or [1, BLOCK_M] and
[BLOCK_N, 1]). Query i is aligned with key i + offset. It sees the keys from `window_left` before that one to
`window_right` after it (causal: 0 after). Helpers take these tuples:

    mask = (queries, keys, offset, window_left, window_right)           of one sequence
    score = (scale, (softcap, slope), (bias pointer, stride_biasm, stride_biasn), function)    of one head
    function = (sample, head, captured tensors)                         of the user's score function
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dropout import head_keys
from diyfa.backends.cuda.attention.tile_io import LOG2E, PACKED


@triton.jit
def head_and_block(pid, blocks, heads, interleaved_heads):
    """Return (head among those of all samples, block) of a program: head after head, so that their data stays in L2.

    The blocks of the last `interleaved_heads` heads alternate. Otherwise the longest blocks of the very last head,
    under a causal mask, would start when there is little else to do (`interleaved_heads` in launch.py).
    """
    n_sequential = heads - interleaved_heads
    interleaved_index = pid - n_sequential * blocks
    if interleaved_index < 0:
        head = pid // blocks
        block = pid % blocks
    else:
        head = n_sequential + interleaved_index % interleaved_heads
        block = interleaved_index // interleaved_heads
    return head, block


@triton.jit
def first_row(b, h, first, heads_q, seqlen_q, total_q, c: tl.constexpr):
    """Return the offset of head h of sample b in contiguous statistics (lse, delta), (B, H, Sq) or (H, Tq)."""
    if c.LENGTHS == PACKED:
        row = h.to(tl.int64) * total_q + first
    else:
        row = (b.to(tl.int64) * heads_q + h) * seqlen_q
    return row


@triton.jit
def head_features(b, h, features, c: tl.constexpr):
    """Return (`score`, dropout's row keys, dropout's column keys) of query head h of sample b.

    It loads the head's numbers, through one pointer, so that kernels need not name them.
    """
    scale, softcap, per_head, bias, rng_state_ptr, captured = features
    per_head_ptr, stride_per_headb = per_head
    attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn = bias
    slope = 0.0
    if c.ALIBI:
        slope = tl.load(per_head_ptr + b * stride_per_headb + h)
    bias_base = 0
    if c.BIAS:
        bias_base = attn_bias_ptr + b.to(tl.int64) * stride_biasb + h.to(tl.int64) * stride_biash
    row_key0, row_key1, column_key0, column_key1 = 0, 0, 0, 0
    if c.DROPOUT:
        row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
    score = (scale, (softcap, slope), (bias_base, stride_biasm, stride_biasn), (b, h, captured))
    return score, (row_key0, row_key1), (column_key0, column_key1)


@triton.jit
def captured_pointers(pointer0, pointer1, pointer2, pointer3):
    """Return the pointers of captured tensors, 0 for None: a jit function cannot return that."""
    return (
        0 if pointer0 is None else pointer0, 0 if pointer1 is None else pointer1,
        0 if pointer2 is None else pointer2, 0 if pointer3 is None else pointer3,
    )  # fmt: skip


@triton.jit
def past_gap(start_n, corner, gap_at, gap, score, c: tl.constexpr):
    """Return (first key, bias corner) of a block of `masked_keys`, moved past the gap if it is behind it."""
    if c.HAS_LEFT:
        skipped = tl.where(start_n >= gap_at, gap, 0)
        start_n += skipped
        if c.BIAS:
            corner = bias_corner(corner, 0, skipped, score)
    return start_n, corner


@triton.jit
def load_statistics(lse_ptr, delta_ptr, row, offs_m, n_queries):
    """Return (lse in units of log2, delta) of queries offs_m. Beyond the end, weights are exp(s - inf) = 0."""
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < n_queries, other=float("inf"))
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < n_queries, other=0.0)
    return lse * LOG2E, delta


@triton.jit
def row_delta(o, do, dlse, position, offs_m, c: tl.constexpr):
    """Return delta [BLOCK_M] = rowsum(dO * O) - dLSE of queries offs_m, from their tiles [BLOCK_M, BLOCK_DV].

    `position`: as in `head_view`. Beyond the end both tiles are zeros, and delta is 0.
    """
    dlse_ptr, stride_dlb, stride_dlh, stride_dlm = dlse
    b, h, first_q, n_queries = position
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    if dlse_ptr is not None:
        dlse_row = dlse_ptr + b.to(tl.int64) * stride_dlb + h.to(tl.int64) * stride_dlh
        if c.LENGTHS == PACKED:
            dlse_row = dlse_row + first_q.to(tl.int64) * stride_dlm
        delta -= tl.load(dlse_row + offs_m.to(tl.int64) * stride_dlm, mask=offs_m < n_queries, other=0.0)
    return delta


@triton.jit
def visible_pairs(rows, cols, mask, CHECK_END: tl.constexpr, c: tl.constexpr):
    """Return the mask of a tile: which query sees which key. CHECK_END: the tile may extend beyond the keys."""
    _, n_keys, offset, window_left, window_right = mask
    if CHECK_END:
        visible = cols < n_keys
        if c.HAS_RIGHT:
            visible = visible & (cols <= rows + (offset + window_right))
    elif c.HAS_RIGHT:
        visible = cols <= rows + (offset + window_right)
    else:
        visible = cols >= 0
    if c.HAS_LEFT:
        visible = visible & (cols >= rows + (offset - window_left))
    return visible


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Return the hyperbolic tangent of fp32 by one exponential, with an absolute error of 1e-7.

    PRECISE, for fp32 inputs: the error is also relative near 0, by the odd polynomial of the Cephes library (tanhf).
    """
    t = 1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2E)) + 1.0)
    if PRECISE:
        z = x * x
        poly = -5.70498872745e-3
        poly = poly * z + 2.06390887954e-2
        poly = poly * z - 5.37397155531e-2
        poly = poly * z + 1.33314422036e-1
        poly = poly * z - 3.33332819422e-1
        t = tl.where(tl.abs(x) < 0.625, poly * z * x + x, t)
    return t


@triton.jit
def bias_corner(corner, row, col, score):
    """Return the pointer `corner` into attn_bias moved by `row` rows and `col` columns, in 64 bits.

    Loops over keys carry this pointer from block to block. If they computed it from their counter, LLVM would widen the
    counter to 64 bits, and then set the accumulators to 0 a second time on the way past the loop. For that, ptxas
    serialises the loop's wgmma (C7515).
    """
    _, _, bias, _ = score
    _, stride_biasm, stride_biasn = bias
    return corner + tl.cast(row, tl.int64) * stride_biasm + tl.cast(col, tl.int64) * stride_biasn


@triton.jit
def tile_corner(row, col, score, c: tl.constexpr):
    """Return the pointer to attn_bias of the tile at (row, col) of a head, or an unused 0 without a bias."""
    _, _, bias, _ = score
    corner, _, _ = bias
    if c.BIAS:
        corner = bias_corner(corner, row, col, score)
    return corner


@triton.jit
def function_pairs(rows, cols, mask, visible, CHECK_END: tl.constexpr, c: tl.constexpr):
    """Return `seen` of a tile for the score function: (visible pairs, rows to read for, columns to read for).

    `visible`: those that a mask leaves, or True. Rows beyond the end are in every last tile, columns with CHECK_END.
    Of more queries than keys, some have positions below 0. Nothing is read for those from which a mask hides all keys.
    """
    n_queries, n_keys, offset, _, window_right = mask
    exist_m = rows < n_queries
    exist_n = cols >= 0
    if CHECK_END:
        exist_n = cols < n_keys
    pairs = exist_m & exist_n & visible
    if c.HAS_RIGHT:
        exist_m = exist_m & (rows + (offset + window_right) >= 0)
    if c.MASK_K and CHECK_END:
        exist_m = tl.max(pairs.to(tl.int32), 0 if rows.shape[0] == 1 else 1, keep_dims=True) != 0
    return pairs, exist_m, exist_n


@triton.jit
def scores_log2(
    s, rows, cols, begins, mask, visible, score, MASKED: tl.constexpr, PRECISE: tl.constexpr, c: tl.constexpr
):
    """Return (scores in units of log2, what their gradient needs) of products s.

    softcap · tanh(s · scale / softcap) - slope · |distance| + bias; `scale` is already divided by the softcap. The
    score function comes last; it gets the pairs that are `visible`, and scores of others are -inf. `begins`: (row,
    column, bias corner) of the tile. Without MASKED all keys of the tile exist.

    What the gradient needs: (tanh of the softcap, (scores that the function got, positions, `seen`)).
    """
    row0, col0, corner = begins
    n_queries, n_keys, offset, _, _ = mask
    scale, factors, bias, function = score
    softcap, slope = factors
    _, stride_biasm, stride_biasn = bias
    UNIT: tl.constexpr = LOG2E if c.SCORE_FN is None else 1.0  # a score function gets natural units
    t = s
    if c.SOFTCAP:
        t = tanh(s * scale, PRECISE)
        s = t * (softcap * UNIT)
    else:
        s = s * (scale * UNIT)
    if c.ALIBI:
        distance = (rows + offset).to(tl.float32) - cols.to(tl.float32)
        s = s - (slope * UNIT) * tl.abs(distance)
    if c.BIAS:
        # 32 bits suffice inside of a tile. Columns are checked only if they may be beyond the end, so that rows of
        # other tiles are read in wide pieces.
        addresses = corner + (rows - row0) * stride_biasm + (cols - col0) * stride_biasn
        if MASKED:
            bias = tl.load(addresses, mask=(rows < n_queries) & (cols < n_keys), other=0.0)
        else:
            bias = tl.load(addresses, mask=(rows < n_queries) & (cols >= 0), other=0.0)
        s = s + bias.to(tl.float32) * UNIT
    argument = (0, 0, 0)
    if c.SCORE_FN is not None:
        b, h, captured = function
        seen = function_pairs(rows, cols, mask, visible, MASKED, c)
        positions = rows + offset
        argument = (s, positions, seen)
        s = c.SCORE_FN(s, b, h, positions, cols, seen, captured)
        pairs, _, _ = seen
        s = tl.where(pairs, s * LOG2E, float("-inf"))
    return s, (t, argument)


@triton.jit
def function_gradient(ds, cols, saved, score, c: tl.constexpr):
    """Return the gradient of the scores before the score function from that behind it."""
    if c.SCORE_FN is not None:
        _, argument = saved
        s, positions, seen = argument
        _, _, _, function = score
        b, h, captured = function
        slope = c.SCORE_SLOPE(s, b, h, positions, cols, seen, captured)
        ds = tl.where(ds != 0.0, ds * slope, 0.0)  # hidden pairs may have any slope
    return ds


@triton.jit
def product_gradient(ds, saved, score, c: tl.constexpr):
    """Return the gradient of the products, without the scale, from that of the scores before the score function."""
    if c.SOFTCAP:
        t, _ = saved
        ds = ds * (1.0 - t * t)
    return ds
