"""dQ: each program has a block of queries and loops over the keys, as the forward pass does. See bwd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_mask import kept_pairs, key_loops, listed
from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import RUNTIME_SIZES, UNALIGNED_POINTERS
from diyfa.backends.cuda.attention.scores import (
    bias_corner,
    captured_pointers,
    first_row,
    function_gradient,
    head_and_block,
    head_features,
    load_statistics,
    past_gap,
    product_gradient,
    scores_log2,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, POINTER, head_view, load_tile, store_tile


@triton.jit
def score_gradient(
    q, k, v, do, lse_log2, delta, rows, cols, begins, visible, keep, keep_scale, mask, score,
    MASKED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Return (a tile [BLOCK_M, BLOCK_N] of dS, the gradient of the final scores; what `scores_log2` saves for it).

    `visible`, `keep` [BLOCK_M, BLOCK_N]: which pairs the mask and dropout keep, or True. `begins`: see `scores_log2`.
    """
    PRECISE: tl.constexpr = q.dtype == tl.float32
    s = dot(q, tl.trans(k), c.PRECISION)
    s, saved = scores_log2(s, rows, cols, begins, mask, visible, score, MASKED, PRECISE, c)
    p = tl.math.exp2(s - lse_log2[:, None])
    dp = dot(do, tl.trans(v), c.PRECISION)
    if c.DROPOUT:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return ds, saved


@triton.jit
def _dq_blocks(
    dq,  # [BLOCK_M, BLOCK_D] fp32
    q,  # [BLOCK_M, BLOCK_D]
    do,  # [BLOCK_M, BLOCK_DV]
    lse_log2,  # [BLOCK_M]
    delta,  # [BLOCK_M]
    keys, values, row0, blocks, mask, block_mask, score, dropout,
    MASKED: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Add to dq what the keys of `blocks` contribute. `block_mask` and MASKED are as in `_attend_blocks` of fwd.py.

    The compiler must not move code out of the loop: the registers are full.
    """
    start, end, gap_at, gap = blocks
    list_ptr, view = block_mask
    CHECK_END: tl.constexpr = MASKED or (c.MASK_K != 0 and c.LENGTHS != EQUAL)
    row_words, column_keys, threshold, keep_scale = dropout
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    corner = tile_corner(row0, start, score, c)
    for start_n in tl.range(start, end, c.BLOCK_N, disable_licm=True):
        block_corner = corner
        if c.MASK_K:
            start_n = listed(start_n, list_ptr, c.MASK_K)
            block_corner = tile_corner(row0, start_n, score, c)
        elif MASKED:
            start_n, block_corner = past_gap(start_n, corner, gap_at, gap, score, c)
        start_n = tl.multiple_of(start_n, c.BLOCK_N)
        offs_n = start_n + tl.arange(0, c.BLOCK_N)
        k = load_tile(keys, start_n, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, CHECK_END, FORM, c)
        v = load_tile(values, start_n, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, CHECK_END, FORM, c)
        rows, cols = offs_m[:, None], offs_n[None, :]
        visible = visible_pairs(rows, cols, mask, True, c) if CHECK_END else True
        if c.MASK_K and MASKED:
            visible = visible & kept_pairs(view, row0, start_n, rows, cols, c)
        keep = True
        if c.DROPOUT:
            keep = keep_tile(*row_words, *position_words(*column_keys, offs_n), threshold)
        begins = (row0, start_n, block_corner)
        ds, saved = score_gradient(
            q, k, v, do, lse_log2, delta, rows, cols, begins, visible, keep, keep_scale, mask, score, CHECK_END, c
        )
        ds = product_gradient(function_gradient(ds, cols, saved, score, c), saved, score, c)
        dq = dot_add(round_to(ds, k.dtype), k, dq, c.PRECISION)
        if c.BIAS:
            corner = bias_corner(corner, 0, c.BLOCK_N, score)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    k_rows_ptr, v_rows_ptr,  # for EDGE_FORM: addresses of the tensors that FORM reads through descriptors
    lse_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr,
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    mask_blocks_ptr, mask_bits_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_maskb, stride_maskh,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, interleaved_heads,
    scale, softcap, threshold, keep_scale, sm_scale,
    c: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M queries of a head: keys without a mask first, as in fwd.py."""
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    pid = tl.program_id(0)
    head, block_m = head_and_block(pid, blocks_m, tl.num_programs(0) // blocks_m, interleaved_heads)
    if c.HAS_RIGHT:  # longest first
        block_m = blocks_m - 1 - block_m
    b = head // heads_q
    h = head % heads_q
    hk = h // group
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    row0 = block_m * c.BLOCK_M
    if c.LENGTHS == PACKED and row0 >= n_queries:
        return
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    q_position = (b, h, first_q, n_queries)
    k_position = (b, hk, first_k, n_keys)
    strides_k = (stride_kb, stride_kh, stride_kn)
    strides_v = (stride_vb, stride_vh, stride_vn)
    queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), q_position, c.FORM, c)
    gradients = head_view(do_ptr, (stride_dob, stride_doh, stride_dom), q_position, c.FORM, c)
    keys = head_view(k_ptr, strides_k, k_position, c.FORM, c)
    values = head_view(v_ptr, strides_v, k_position, c.FORM, c)
    q = load_tile(queries, row0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
    do = load_tile(gradients, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    lse_log2, delta = load_statistics(lse_ptr, delta_ptr, row, offs_m, n_queries)
    mask_tensors = (mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh)
    full, masked, block_mask = key_loops(row0, mask, mask_tensors, b, h, seqlen_q, seqlen_k, c)
    FULL_FORM: tl.constexpr = c.EDGE_FORM if c.MASK_K != 0 else c.FORM  # as in fwd.py
    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    captured = captured_pointers(score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr)
    features = (scale, softcap, per_head, bias, rng_state_ptr, captured)
    score, row_keys, column_keys = head_features(b, h, features, c)
    row_words = position_words(*row_keys, offs_m) if c.DROPOUT else row_keys
    dropout = (row_words, column_keys, threshold, keep_scale)
    dq = tl.zeros([c.BLOCK_M, c.BLOCK_D], tl.float32)
    if FULL_FORM == c.FORM:
        dq = _dq_blocks(
            dq, q, do, lse_log2, delta, keys, values, row0, full, mask, block_mask, score, dropout, False, c.FORM, c
        )
    if c.FORM != c.EDGE_FORM:  # a masked block may extend beyond its sequence, whose end a descriptor does not know
        keys = head_view(k_rows_ptr, strides_k, k_position, c.EDGE_FORM, c)
        values = head_view(v_rows_ptr, strides_v, k_position, c.EDGE_FORM, c)
    if FULL_FORM != c.FORM:
        dq = _dq_blocks(
            dq, q, do, lse_log2, delta, keys, values, row0, full, mask, block_mask, score, dropout, False, FULL_FORM, c
        )
    dq = _dq_blocks(
        dq, q, do, lse_log2, delta, keys, values, row0, masked, mask, block_mask, score, dropout, True, c.EDGE_FORM, c
    )
    if c.LENGTHS != EQUAL:  # a descriptor may have read any numbers beyond the sequence
        dq = tl.where((offs_m < n_queries)[:, None], dq, 0.0)
    n_rows = n_queries if c.LENGTHS == PACKED else seqlen_q
    rows = head_view(dq_ptr, (stride_dqb, stride_dqh, stride_dqm), (b, h, first_q, n_rows), POINTER, c)
    store_tile(rows, dq * sm_scale, row0, c.HEAD_DIM, c.FORM)
