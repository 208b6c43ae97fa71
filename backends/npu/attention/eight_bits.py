"""Factors and means of int8 queries and keys, which the forward kernel applies.

With q = q8 · dq, k = k8 · dk + mk and values v · dv + mv (`diyfa.eight_bits`) a score is
scale · (dq dk q8·k8 + dq q8·mk). The cube core multiplies the integers exactly, in int32.

* The first term has one factor for the tile, scale · dq · dk. If each block of BLOCK_K keys has a descale of its own,
  it has one for each key. A tile has one descale of q: its queries lie in one block of BLOCK_Q. Its keys are whole
  blocks of BLOCK_K, or lie in one. The scale of scores is part of the factor, so int8 adds a conversion to the loop and
  no multiplication.
* The second term is the same for all keys, an offset of each row. It changes no weight of the softmax, so it is added
  to the log-sum-exp at the end. With softcap or a score function it does change weights, and is added in the loop.

A factor is a vector of equal values where a scalar would do: an fp32 scalar that the kernel loads or computes breaks
its pipeline.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa import eight_bits as definition

BLOCK_Q, BLOCK_K = tl.constexpr(definition.BLOCK_Q), tl.constexpr(definition.BLOCK_K)
NONE = tl.constexpr(0)
PER_TENSOR, PER_BLOCK = tl.constexpr(definition.PER_TENSOR), tl.constexpr(definition.PER_BLOCK)


@triton.jit
def load_factor(pointer, head, block, blocks, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Return a descale as [SIZE] equal values. `head` counts through all samples; `blocks`: descales of each head."""
    factor = tl.full([SIZE], 1.0, tl.float32)
    if KIND == PER_TENSOR:
        factor = factor * tl.load(pointer)
    elif KIND == PER_BLOCK:
        factor = factor * tl.load(pointer + head.to(tl.int64) * blocks + block)
    elif KIND != NONE:
        factor = factor * tl.load(pointer + head)
    return factor


@triton.jit
def load_mean(pointer, head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a mean [BLOCK_D] in fp32."""
    offs_d = tl.arange(0, BLOCK_D)
    return tl.load(pointer + head.to(tl.int64) * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)


@triton.jit
def query_factors(
    q, scale, q_descale_ptr, k_descale_ptr, k_mean_ptr, b, h, hk, row0, heads_q, heads_kv, seqlen_q, c: tl.constexpr
):
    """Return (factor of the products, offset of each row's scores [BLOCK_M]).

    The factor has [BLOCK_M] equal values. If blocks of keys have descales of their own, it lacks these (`key_factors`)
    and has [BLOCK_N]. `scale`: of the scores. `seqlen_q`: that of the longest sequence."""
    SIZE: tl.constexpr = c.BLOCK_N if c.K_DESCALE == PER_BLOCK else c.BLOCK_M
    kv_head = b * heads_kv + hk
    q_head = kv_head
    if c.Q_DESCALE == PER_BLOCK:
        q_head = b * heads_q + h
    block = row0 // BLOCK_Q
    blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    factor = load_factor(q_descale_ptr, q_head, block, blocks, c.Q_DESCALE, SIZE) * scale
    offset = tl.zeros([c.BLOCK_M], tl.float32)
    if c.K_MEAN:
        mean = load_mean(k_mean_ptr, kv_head, c.HEAD_DIM, c.BLOCK_D)
        row_factor = load_factor(q_descale_ptr, q_head, block, blocks, c.Q_DESCALE, c.BLOCK_M) * scale
        offset = tl.sum(q.to(tl.float32) * mean[None, :], 1) * row_factor
    if c.K_DESCALE != PER_BLOCK:
        factor = factor * load_factor(k_descale_ptr, kv_head, 0, 0, c.K_DESCALE, SIZE)
    return factor, offset


@triton.jit
def key_factors(k_descale_ptr, b, hk, n0, heads_kv, seqlen_k, c: tl.constexpr):
    """Return the descale of each key of a tile, [BLOCK_N]. `seqlen_k`: that of the longest sequence."""
    blocks = tl.cdiv(seqlen_k, BLOCK_K)
    base = k_descale_ptr + (b * heads_kv + hk).to(tl.int64) * blocks
    block = n0 // BLOCK_K
    keys = tl.arange(0, c.BLOCK_N)
    # A tile may extend beyond the last block.
    factor = tl.load(base + tl.minimum(block, blocks - 1) + keys * 0)
    for i in tl.static_range(1, c.BLOCK_N // BLOCK_K):
        next_factor = tl.load(base + tl.minimum(block + i, blocks - 1) + keys * 0)
        factor = tl.where(keys.to(tl.float32) < i * BLOCK_K, factor, next_factor)
    return factor


@triton.jit
def scaled_products(s, factor, offset, k_descale_ptr, b, hk, n0, heads_kv, seqlen_k, c: tl.constexpr):
    """Return integer products s [BLOCK_M, BLOCK_N] as scores in fp32: times their factors, and with softcap or a score
    function plus the rows' offset."""
    s = s.to(tl.float32)
    if c.K_DESCALE == PER_BLOCK:
        s = s * (factor * key_factors(k_descale_ptr, b, hk, n0, heads_kv, seqlen_k, c))[None, :]
    else:
        s = s * factor[:, None]
    if c.K_MEAN and (c.SOFTCAP != "" or c.SCORE_FN is not None):
        s = s + offset[:, None]
    return s


@triton.jit
def with_means(acc, m_i, l_i, offset, v_descale_ptr, v_mean_ptr, b, hk, heads_kv, c: tl.constexpr):
    """Return (acc, m_i, l_i) after the KV loop, with the factor and the mean of v, and with the rows' offset of scores
    if the loop left it out."""
    kv_head = b * heads_kv + hk
    if c.V_DESCALE != NONE:
        acc = acc * load_factor(v_descale_ptr, kv_head, 0, 0, c.V_DESCALE, c.BLOCK_M)[:, None]
    if c.V_MEAN:
        acc = acc + l_i[:, None] * load_mean(v_mean_ptr, kv_head, c.HEAD_DIM_V, c.BLOCK_DV)[None, :]
    has_keys = l_i != 0.0  # a factor or mean that is not finite does not reach the other rows
    if c.V_DESCALE != NONE or c.V_MEAN:
        acc = tl.where(has_keys[:, None], acc, 0.0)
    if c.K_MEAN and not (c.SOFTCAP != "" or c.SCORE_FN is not None):
        m_i = m_i + tl.where(has_keys, offset, 0.0)
        # An offset that is not finite must make a row that sees a key NaN, although the softmax ran without it.
        l_i = tl.where(has_keys & (offset - offset != 0.0), float("nan"), l_i)
    return acc, m_i, l_i
