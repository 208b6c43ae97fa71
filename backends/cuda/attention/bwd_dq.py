"""dQ: each program owns a block of queries and loops over the keys, as the forward pass does. See bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import RUNTIME_SIZES, UNALIGNED_POINTERS
from diyfa.backends.cuda.attention.scores import (
    bias_corner,
    first_row,
    head_features,
    key_blocks,
    load_statistics,
    masked_keys,
    scores_log2,
    sequence_of,
    visible_pairs,
)
from diyfa.backends.cuda.attention.tile_io import (
    EQUAL,
    PACKED,
    POINTER,
    head_base,
    load_tile,
    store_tile,
)


@triton.jit
def score_gradient(
    q, k, v, do, lse_log2, delta, row0, col0, rows, cols, visible, keep, n_queries, n_keys, offset, scale, softcap,
    slope, keep_scale, corner, stride_biasm, stride_biasn,
    MASKED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of (dS behind the softcap, tanh of the softcap)."""
    PRECISE: tl.constexpr = q.dtype == tl.float32
    s = dot(q, tl.trans(k), c.PRECISION)
    s, t = scores_log2(
        s, row0, col0, rows, cols, n_queries, n_keys, offset, scale, softcap, slope, corner, stride_biasm, stride_biasn,
        MASKED, PRECISE, c,
    )  # fmt: skip
    p = tl.math.exp2(s - lse_log2[:, None])
    dp = dot(do, tl.trans(v), c.PRECISION)
    if c.DROPOUT:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return ds, t


@triton.jit
def _dq_blocks(
    dq,  # [BLOCK_M, BLOCK_D] fp32
    q,  # [BLOCK_M, BLOCK_D]
    do,  # [BLOCK_M, BLOCK_DV]
    lse_log2,  # [BLOCK_M]
    delta,  # [BLOCK_M]
    k_ref, v_ref, bias_base,
    b, hk, first_k, start, end, gap_at, gap, row0, offs_m, offset, n_queries, n_keys, window_left, window_right,
    stride_kn, stride_vn, stride_biasm, stride_biasn, scale, softcap, slope,
    row_word0, row_word1, column_key0, column_key1, threshold, keep_scale,
    MASKED: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Key blocks [start, end) without the gap; MASKED as in the forward pass.

    Nothing is moved out of the loop: the registers are full.
    """
    corner = bias_base
    if c.BIAS:
        corner = bias_corner(bias_base, row0, start, stride_biasm, stride_biasn)
    for start_n in tl.range(start, end, c.BLOCK_N, disable_licm=True):
        block_corner = corner
        if MASKED and c.HAS_LEFT:
            skipped = tl.where(start_n >= gap_at, gap, 0)
            start_n += skipped
            if c.BIAS:
                block_corner = bias_corner(corner, 0, skipped, stride_biasm, stride_biasn)
        start_n = tl.multiple_of(start_n, c.BLOCK_N)
        offs_n = start_n + tl.arange(0, c.BLOCK_N)
        k = load_tile(
            k_ref, b, hk, first_k, start_n, n_keys, stride_kn, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D, MASKED, FORM, c
        )
        v = load_tile(
            v_ref, b, hk, first_k, start_n, n_keys, stride_vn, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV, MASKED, FORM, c
        )
        visible = True
        if MASKED:
            visible = visible_pairs(
                offs_m[:, None], offs_n[None, :], n_keys, offset, window_left, window_right, True, c
            )
        keep = True
        if c.DROPOUT:
            column_word0, column_word1 = position_words(column_key0, column_key1, offs_n)
            keep = keep_tile(row_word0, row_word1, column_word0, column_word1, threshold)
        ds, t = score_gradient(
            q, k, v, do, lse_log2, delta, row0, start_n, offs_m[:, None], offs_n[None, :], visible, keep, n_queries,
            n_keys, offset, scale, softcap, slope, keep_scale, block_corner, stride_biasm, stride_biasn, MASKED, c,
        )  # fmt: skip
        if c.SOFTCAP:
            ds = ds * (1.0 - t * t)
        dq = dot_add(round_to(ds, k.dtype), k, dq, c.PRECISION)
        if c.BIAS:
            corner = bias_corner(corner, 0, c.BLOCK_N, stride_biasm, stride_biasn)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    k_rows_ptr, v_rows_ptr,  # addresses of what FORM reads through descriptors, for EDGE_FORM
    lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_slopeb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale, softcap, threshold, keep_scale, sm_scale,
    c: tl.constexpr,
):  # fmt: skip
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    pid = tl.program_id(0)
    block_m = pid % blocks_m
    if c.HAS_RIGHT:  # longest first
        block_m = blocks_m - 1 - block_m
    b = (pid // blocks_m) // heads_q
    h = (pid // blocks_m) % heads_q
    hk = h // group
    first_q, first_k, n_queries, n_keys = sequence_of(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
    )
    row0 = block_m * c.BLOCK_M
    if c.LENGTHS == PACKED and row0 >= n_queries:
        return
    offset = n_keys - n_queries
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    q_ref = head_base(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qm, c.FORM, c)
    do_ref = head_base(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dom, c.FORM, c)
    k_ref = head_base(k_ptr, b, hk, first_k, stride_kb, stride_kh, stride_kn, c.FORM, c)
    v_ref = head_base(v_ptr, b, hk, first_k, stride_vb, stride_vh, stride_vn, c.FORM, c)
    q = load_tile(q_ref, b, h, first_q, row0, n_queries, stride_qm, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D, True, c.FORM, c)
    do = load_tile(
        do_ref, b, h, first_q, row0, n_queries, stride_dom, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV, True, c.FORM, c
    )
    row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    lse_log2, delta = load_statistics(lse_ptr, delta_ptr, row, offs_m, n_queries)
    begin, full_begin, full_end, end = key_blocks(row0, n_queries, n_keys, offset, window_left, window_right, c)
    masked_begin, masked_end, gap = masked_keys(begin, full_begin, full_end, end, c)
    slope, bias_base, row_key0, row_key1, column_key0, column_key1 = head_features(
        slopes_ptr, bias_ptr, rng_state_ptr, b, h, stride_slopeb, stride_biasb, stride_biash, c
    )
    row_word0, row_word1 = 0, 0
    if c.DROPOUT:
        row_word0, row_word1 = position_words(row_key0, row_key1, offs_m)
    dq = tl.zeros([c.BLOCK_M, c.BLOCK_D], tl.float32)
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_ref, v_ref, bias_base, b, hk, first_k, full_begin, full_end, 0, 0, row0, offs_m,
        offset, n_queries, n_keys, window_left, window_right, stride_kn, stride_vn, stride_biasm, stride_biasn, scale,
        softcap, slope, row_word0, row_word1, column_key0, column_key1, threshold, keep_scale, False, c.FORM, c,
    )  # fmt: skip
    if c.FORM != c.EDGE_FORM:  # a masked block may reach beyond its sequence, which a descriptor does not know
        k_ref = head_base(k_rows_ptr, b, hk, first_k, stride_kb, stride_kh, stride_kn, c.EDGE_FORM, c)
        v_ref = head_base(v_rows_ptr, b, hk, first_k, stride_vb, stride_vh, stride_vn, c.EDGE_FORM, c)
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, k_ref, v_ref, bias_base, b, hk, first_k, masked_begin, masked_end, full_begin, gap,
        row0, offs_m, offset, n_queries, n_keys, window_left, window_right, stride_kn, stride_vn, stride_biasm,
        stride_biasn, scale, softcap, slope, row_word0, row_word1, column_key0, column_key1, threshold, keep_scale,
        True, c.EDGE_FORM, c,
    )  # fmt: skip
    if c.LENGTHS != EQUAL:  # what a descriptor read beyond the sequence may be anything
        dq = tl.where((offs_m < n_queries)[:, None], dq, 0.0)
    n_rows = n_queries if c.LENGTHS == PACKED else seqlen_q
    dq_base = head_base(dq_ptr, b, h, first_q, stride_dqb, stride_dqh, stride_dqm, POINTER, c)
    store_tile(dq_base, dq * sm_scale, row0, n_rows, stride_dqm, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D, c.FORM)
