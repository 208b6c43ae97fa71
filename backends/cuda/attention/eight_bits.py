"""Factors, means and the scale of weights, which the forward kernel applies to q, k and v of float8 and int8.

With q = q8 · dq, k = k8 · dk + mk and v = v8 · dv + mv (`diyfa.eight_bits`) a score is
scale · (dq dk q8·k8 + dq q8·mk). The factor dq dk joins the softmax scale. It is one number for each tile, because the
rows of a tile share their descales. The second term is the same for all keys of a query. It changes no weight of the
softmax, so it is added to the log-sum-exp at the end. With softcap it does change weights, and is added in the loop.
Weights sum to l, so the output is (dv · p8 v8 + l · mv) / l.

Weights are rounded to the dtype of v. `WEIGHT_SHIFT` of `diyfa.eight_bits` says by how much they are scaled before. The
running maximum is that much lower. This scales weights, sums and accumulators by one number, and leaves the log-sum-exp
and the quotient as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa import eight_bits as definition
from diyfa.backends.cuda.attention.tile_io import LOG2E, LOWEST

BLOCK_Q, BLOCK_K = tl.constexpr(definition.BLOCK_Q), tl.constexpr(definition.BLOCK_K)
NONE = tl.constexpr(0)
PER_TENSOR, PER_BLOCK = tl.constexpr(definition.PER_TENSOR), tl.constexpr(definition.PER_BLOCK)
SMALLEST_SCALE = tl.constexpr(1e-30)  # -inf still masks, and every exponential of a score is 1


@triton.jit
def _load_factor(pointer, head, block, blocks, KIND: tl.constexpr):
    """Return a descale. `head` counts through all samples; `blocks`: descales of each head."""
    factor = 1.0
    if KIND == PER_TENSOR:
        factor = tl.load(pointer)
    elif KIND == PER_BLOCK:
        factor = tl.load(pointer + head.to(tl.int64) * blocks + block)
    elif KIND != NONE:
        factor = tl.load(pointer + head)
    return factor


@triton.jit
def _load_mean(pointer, head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a mean [BLOCK_D] in fp32."""
    offs_d = tl.arange(0, BLOCK_D)
    return tl.load(pointer + head.to(tl.int64) * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)


@triton.jit
def query_factors(q, pointers, position, sizes, c: tl.constexpr):
    """Return (factor of the products, pointer to the descales of the head's blocks of k, offset of each row [BLOCK_M]).

    If blocks of k have descales, the factor lacks them (`tile_scores`); else the pointer is 0. `position`: (sample,
    query head, KV head, first row). `sizes`: (query heads, KV heads, queries, keys); queries and keys of the longest.
    """
    q_descale_ptr, k_descale_ptr, k_mean_ptr = pointers
    b, h, hk, row0 = position
    heads_q, heads_kv, seqlen_q, seqlen_k = sizes
    kv_head = b * heads_kv + hk
    q_head = kv_head
    if c.Q_DESCALE == PER_BLOCK:
        q_head = b * heads_q + h
    factor = _load_factor(q_descale_ptr, q_head, row0 // BLOCK_Q, tl.cdiv(seqlen_q, BLOCK_Q), c.Q_DESCALE)
    offset = tl.zeros([c.BLOCK_M], tl.float32)
    if c.K_MEAN:
        mean = _load_mean(k_mean_ptr, kv_head, c.HEAD_DIM, c.BLOCK_D)
        offset = tl.sum(q.to(tl.float32) * mean[None, :], 1) * factor
    blocks = 0
    if c.K_DESCALE == PER_BLOCK:
        blocks = k_descale_ptr + kv_head.to(tl.int64) * tl.cdiv(seqlen_k, BLOCK_K)
    else:
        factor *= _load_factor(k_descale_ptr, kv_head, 0, 0, c.K_DESCALE)
    return factor, blocks, offset


@triton.jit
def tile_scores(s, scale_log2, factors, start_n, c: tl.constexpr):
    """Return (scores, their scale in units of log2) of products s [BLOCK_M, BLOCK_N] with keys from start_n on.

    Scores that are adjusted later (`scores_log2`) are q·k themselves. Others keep their integers, and the factor is in
    the scale, which must be positive.
    """
    factor, blocks, offset = factors
    if c.K_DESCALE == PER_BLOCK:
        factor *= tl.load(blocks + start_n // BLOCK_K)
    s = s.to(tl.float32)
    if c.ADJUSTED:
        s = s * factor + offset[:, None]
    else:
        scale_log2 = scale_log2 * factor
        scale_log2 = tl.where(scale_log2 < SMALLEST_SCALE, SMALLEST_SCALE, scale_log2)  # a NaN stays
    return s, scale_log2


@triton.jit
def final_sums(sums, scale, offset, pointers, position, rows, mask, c: tl.constexpr):
    """Return the sums (acc, l_i, m_i) of the KV loop with the factor and the mean of v.

    Unless scores are ADJUSTED, the loop has left out the rows' offsets, which are added to m_i here. `position`:
    (sample, KV head, KV heads). `rows` [BLOCK_M]: positions of the queries.
    """
    acc, l_i, m_i = sums
    v_descale_ptr, v_mean_ptr = pointers
    b, hk, heads_kv = position
    kv_head = b * heads_kv + hk
    acc *= _load_factor(v_descale_ptr, kv_head, 0, 0, c.V_DESCALE)
    if c.V_MEAN:
        acc += l_i[:, None] * _load_mean(v_mean_ptr, kv_head, c.HEAD_DIM_V, c.BLOCK_DV)[None, :]
    # A NaN factor makes sums NaN even where all keys are hidden. Sums of a row that sees no key stay empty.
    has_keys = l_i != 0.0
    if c.HAS_RIGHT:
        _, _, shift, _, window_right = mask
        has_keys = has_keys & (rows + (shift + window_right) >= 0)
    acc = tl.where(has_keys[:, None], acc, 0.0)
    if c.K_MEAN and not c.ADJUSTED:
        if c.NEGATE:
            offset = -offset
        m_i += offset * (scale * LOG2E)
        # An offset that is not finite must make the row NaN, although the softmax ran without it.
        l_i = tl.where(offset - offset == 0.0, l_i, float("nan"))
    return acc, tl.where(has_keys, l_i, 0.0), tl.where(has_keys, m_i, LOWEST)
