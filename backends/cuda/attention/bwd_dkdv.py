"""dK and dV: each program owns a block of keys and loops over the queries of every head in the group.

Scores are formed transposed, [BLOCK_N, BLOCK_M], so that P and dS are left operands of the products that accumulate.
Grouped heads are summed in the accumulators: no atomics, the same bits in every run. See bwd.py for the formulas.
"""

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
    query_blocks,
    scores_log2,
    sequence_of,
    visible_pairs,
)
from diyfa.backends.cuda.attention.tile_io import (
    DESCRIPTOR,
    LOG2E,
    PACKED,
    POINTER,
    head_base,
    load_tile,
    store_tile,
)


@triton.jit
def _statistics(lse_row, delta_row, offs_m, n_queries):
    """(lse, delta) of the queries offs_m [BLOCK_M]; those that do not exist weigh exp(s - inf) = 0.

    Loaded as matrices of one column, whose sums the compiler does not form twice: one load for each thread. A vector it
    would load in the layout of the scores, where each thread has a quarter of it: BLOCK_M / 4 loads and masks.
    """
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    column = rows + tl.arange(0, 1)[None, :]
    lse = tl.load(lse_row + column, mask=rows < n_queries, other=float("inf"))
    delta = tl.load(delta_row + column, mask=rows < n_queries, other=0.0)
    return tl.sum(lse, 1), tl.sum(delta, 1)


@triton.jit
def _dkdv_blocks(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_DV] fp32
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_DV]
    q_ref, do_ref, lse_row, delta_row, bias_base,
    b, h, first_q, start, end, gap_at, gap, col0, offs_n, offset, n_queries, n_keys, window_left, window_right,
    stride_qm, stride_dom, stride_biasm, stride_biasn, scale, softcap, slope,
    row_key0, row_key1, column_word0, column_word1, threshold, keep_scale,
    MASKED: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Query blocks [start, end) of one head, leaving out `gap` at `gap_at` (MASKED with HAS_LEFT: both edges in one).

    AHEAD: statistics are loaded a block ahead. It spares the wgmma loops most of their spills, and gives others some.
    Nothing is moved out of the loops, this one and that over the heads: the accumulators need the registers.
    MASKED compares positions, and clears what lies beyond a shorter sequence. Where all have one length, queries beyond
    the end read as zeros and weigh exp(s - inf) = 0: the last block needs no mask.
    """
    PRECISE: tl.constexpr = k.dtype == tl.float32
    AHEAD: tl.constexpr = c.FORM == DESCRIPTOR
    EDGES: tl.constexpr = c.FORM != c.EDGE_FORM
    CHECK_ROWS: tl.constexpr = MASKED or not EDGES
    HAS_GAP: tl.constexpr = MASKED and (c.HAS_LEFT or EDGES)
    if AHEAD:
        first_m = start
        if HAS_GAP:
            first_m += tl.where(start >= gap_at, gap, 0)
        next_lse, next_delta = _statistics(lse_row, delta_row, first_m + tl.arange(0, c.BLOCK_M), n_queries)
    for start_m in tl.range(start, end, c.BLOCK_M, disable_licm=True):
        next_m = start_m + c.BLOCK_M
        if HAS_GAP:
            start_m += tl.where(start_m >= gap_at, gap, 0)
            next_m += tl.where(next_m >= gap_at, gap, 0)
        start_m = tl.multiple_of(start_m, c.BLOCK_M)
        offs_m = start_m + tl.arange(0, c.BLOCK_M)
        if AHEAD:  # the compiler would start these copies where it waits for them
            lse, delta = next_lse, next_delta
            next_lse, next_delta = _statistics(lse_row, delta_row, next_m + tl.arange(0, c.BLOCK_M), n_queries)
        else:
            lse = tl.load(lse_row + offs_m, mask=offs_m < n_queries, other=float("inf"))
            delta = tl.load(delta_row + offs_m, mask=offs_m < n_queries, other=0.0)
        q = load_tile(
            q_ref, b, h, first_q, start_m, n_queries, stride_qm, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D, CHECK_ROWS, FORM, c
        )
        do = load_tile(
            do_ref, b, h, first_q, start_m, n_queries, stride_dom, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV, CHECK_ROWS,
            FORM, c,
        )  # fmt: skip
        s_t = dot(k, tl.trans(q), c.PRECISION)  # [BLOCK_N, BLOCK_M]
        corner = bias_base
        if c.BIAS:
            corner = bias_corner(bias_base, start_m, col0, stride_biasm, stride_biasn)
        s_t, tanh_t = scores_log2(
            s_t, start_m, col0, offs_m[None, :], offs_n[:, None], n_queries, n_keys, offset, scale, softcap, slope,
            corner, stride_biasm, stride_biasn, True, PRECISE, c,
        )  # fmt: skip
        p_t = tl.math.exp2(s_t - (lse * LOG2E)[None, :])
        if MASKED:
            visible = visible_pairs(
                offs_m[None, :], offs_n[:, None], n_keys, offset, window_left, window_right, False, c
            )
            p_t = tl.where(visible, p_t, 0.0)
        kept_t = p_t
        if c.DROPOUT:
            row_word0, row_word1 = position_words(row_key0, row_key1, offs_m)
            keep_t = keep_tile(column_word0, column_word1, row_word0, row_word1, threshold)  # [BLOCK_N, BLOCK_M]
            kept_t = tl.where(keep_t, p_t, 0.0)
        dv = dot_add(round_to(kept_t, do.dtype), do, dv, c.PRECISION)
        dp_t = dot(v, tl.trans(do), c.PRECISION)  # [BLOCK_N, BLOCK_M]
        if c.DROPOUT:
            dp_t = tl.where(keep_t, dp_t * keep_scale, 0.0)
        ds_t = p_t * (dp_t - delta[None, :])
        if c.SOFTCAP:
            ds_t = ds_t * (1.0 - tanh_t * tanh_t)
        dk = dot_add(round_to(ds_t, q.dtype), q, dk, c.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    q_rows_ptr, do_rows_ptr,  # addresses of what FORM reads through descriptors, for EDGE_FORM
    lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_slopeb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale, softcap, threshold, keep_scale,
    sm_scale,  # what the gradient is multiplied by in the end
    c: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(seqlen_k, c.BLOCK_N)
    pid = tl.program_id(0)
    col0 = (pid % blocks_n) * c.BLOCK_N  # under a causal mask the first key blocks have the most queries: longest first
    heads_kv = heads_q // group
    b = (pid // blocks_n) // heads_kv
    hk = (pid // blocks_n) % heads_kv
    first_q, first_k, n_queries, n_keys = sequence_of(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
    )
    if c.LENGTHS == PACKED and col0 >= n_keys:
        return
    offset = n_keys - n_queries
    # At 256 features the two accumulators fill the registers; a second copy of the loop would push them out.
    EDGES: tl.constexpr = c.FORM != c.EDGE_FORM
    HAS_MASK: tl.constexpr = c.HAS_RIGHT or c.HAS_LEFT or EDGES
    ONE_LOOP: tl.constexpr = HAS_MASK and c.BLOCK_D > 128

    offs_n = col0 + tl.arange(0, c.BLOCK_N)
    k_ref = head_base(k_ptr, b, hk, first_k, stride_kb, stride_kh, stride_kn, c.FORM, c)
    v_ref = head_base(v_ptr, b, hk, first_k, stride_vb, stride_vh, stride_vn, c.FORM, c)
    k = load_tile(k_ref, b, hk, first_k, col0, n_keys, stride_kn, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D, True, c.FORM, c)
    v = load_tile(v_ref, b, hk, first_k, col0, n_keys, stride_vn, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV, True, c.FORM, c)

    begin, full_begin, full_end, end = query_blocks(
        col0, n_queries, n_keys, offset, window_left, window_right, EDGES, c
    )
    gap = full_end - full_begin
    masked_end = full_begin  # [begin, full_begin), and where there is a later edge [full_end, end) in the same loop
    if c.HAS_LEFT or EDGES:
        masked_end = end - gap
    if ONE_LOOP:
        gap = 0
        masked_end = end

    dk = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
    dv = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
    for g in tl.range(0, group, disable_licm=True):
        h = hk * group + g
        q_ref = head_base(q_ptr, b, h, first_q, stride_qb, stride_qh, stride_qm, c.FORM, c)
        do_ref = head_base(do_ptr, b, h, first_q, stride_dob, stride_doh, stride_dom, c.FORM, c)
        row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
        lse_row = lse_ptr + row
        delta_row = delta_ptr + row
        slope, bias_base, row_key0, row_key1, column_key0, column_key1 = head_features(
            slopes_ptr, bias_ptr, rng_state_ptr, b, h, stride_slopeb, stride_biasb, stride_biash, c
        )
        column_word0, column_word1 = 0, 0
        if c.DROPOUT:
            column_word0, column_word1 = position_words(column_key0, column_key1, offs_n)
        if HAS_MASK:
            q_edge, do_edge = q_ref, do_ref
            if EDGES:  # a masked block may reach beyond its sequence, which a descriptor does not know
                q_edge = head_base(q_rows_ptr, b, h, first_q, stride_qb, stride_qh, stride_qm, c.EDGE_FORM, c)
                do_edge = head_base(do_rows_ptr, b, h, first_q, stride_dob, stride_doh, stride_dom, c.EDGE_FORM, c)
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_edge, do_edge, lse_row, delta_row, bias_base, b, h, first_q, begin, masked_end,
                full_begin, gap, col0, offs_n, offset, n_queries, n_keys, window_left, window_right, stride_qm,
                stride_dom, stride_biasm, stride_biasn, scale, softcap, slope, row_key0, row_key1, column_word0,
                column_word1, threshold, keep_scale, True, c.EDGE_FORM, c,
            )  # fmt: skip
        if not ONE_LOOP:
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_ref, do_ref, lse_row, delta_row, bias_base, b, h, first_q, full_begin, full_end, 0, 0,
                col0, offs_n, offset, n_queries, n_keys, window_left, window_right, stride_qm, stride_dom, stride_biasm,
                stride_biasn, scale, softcap, slope, row_key0, row_key1, column_word0, column_word1, threshold,
                keep_scale, False, c.FORM, c,
            )  # fmt: skip

    # Keys beyond the end were read as zeros but still collected dV; they get exact zeros.
    live = offs_n < n_keys
    if c.DROPOUT:
        dv *= keep_scale
    dk = tl.where(live[:, None], dk * sm_scale, 0.0)
    dv = tl.where(live[:, None], dv, 0.0)
    n_rows = n_keys if c.LENGTHS == PACKED else seqlen_k
    dk_base = head_base(dk_ptr, b, hk, first_k, stride_dkb, stride_dkh, stride_dkn, POINTER, c)
    dv_base = head_base(dv_ptr, b, hk, first_k, stride_dvb, stride_dvh, stride_dvn, POINTER, c)
    store_tile(dk_base, dk, col0, n_rows, stride_dkn, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D, c.FORM)
    store_tile(dv_base, dv, col0, n_rows, stride_dvn, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV, c.FORM)
