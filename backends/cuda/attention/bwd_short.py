"""Backward of short sequences in one launch: their queries fit into one block and their keys into another.

A program has a head, with q, k, v, dO and P of the whole sequence. So it also computes delta, from a tile of the
output, and dQ, from the dS of dK: it reads each tensor once and computes each score once. The kernels for any length
take three launches and compute the scores twice.

Scores are transposed, [BLOCK_N, BLOCK_M], as in bwd_dkdv.py; for dQ, dS crosses shared memory. There are no atomics:
the bits are equal in every run. Grouped heads run by other kernels, because a loop over heads would take 40 registers.
See bwd.py for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import dot, round_to
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import RUNTIME_SIZES, UNALIGNED_POINTERS
from diyfa.backends.cuda.attention.scores import (
    first_row,
    head_features,
    product_gradient,
    row_delta,
    scores_log2,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import LOG2E, PACKED, head_view, load_tile, store_tile


@triton.jit(
    do_not_specialize=(*RUNTIME_SIZES, "stride_dlb", "stride_dlh"), do_not_specialize_on_alignment=UNALIGNED_POINTERS
)
def _bwd_short_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr,
    delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    stride_dqb, stride_dqh, stride_dqm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    heads_q, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale, softcap, threshold, keep_scale, sm_scale,
    c: tl.constexpr,
):  # fmt: skip
    """Compute delta, dQ, dK and dV of a head."""
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    b = tl.program_id(0) // heads_q
    h = tl.program_id(0) % heads_q
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    # If a sequence is shorter than the tensor, rows behind its end are zeros. Packed, they belong to the next one.
    q_rows = n_queries if c.LENGTHS == PACKED else seqlen_q
    k_rows = n_keys if c.LENGTHS == PACKED else seqlen_k
    offs_m = tl.arange(0, c.BLOCK_M)
    offs_n = tl.arange(0, c.BLOCK_N)
    rows, cols = offs_m[None, :], offs_n[:, None]

    k_position = (b, h, first_k, n_keys)
    keys = head_view(k_ptr, (stride_kb, stride_kh, stride_kn), k_position, c.FORM, c)
    values = head_view(v_ptr, (stride_vb, stride_vh, stride_vn), k_position, c.FORM, c)
    k = load_tile(keys, 0, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
    v = load_tile(values, 0, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    features = (scale, softcap, per_head, bias, rng_state_ptr, 0)
    q_position = (b, h, first_q, n_queries)
    queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), q_position, c.FORM, c)
    outputs = head_view(o_ptr, (stride_ob, stride_oh, stride_om), q_position, c.FORM, c)
    gradients = head_view(do_ptr, (stride_dob, stride_doh, stride_dom), q_position, c.FORM, c)
    q = load_tile(queries, 0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
    do = load_tile(gradients, 0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    o = load_tile(outputs, 0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
    row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    # Load lse as a [BLOCK_M, 1] tile: as a vector it would get the layout of the scores, and each thread would load it
    # 16 times.
    column = offs_m[:, None] + tl.arange(0, 1)[None, :]
    lse = tl.sum(tl.load(lse_ptr + row + column, mask=column < n_queries, other=float("inf")), 1)
    delta = row_delta(o, do, (dlse_ptr, stride_dlb, stride_dlh, stride_dlm), q_position, offs_m, c)
    tl.store(delta_ptr + row + offs_m, delta, mask=offs_m < q_rows)

    score, row_keys, column_keys = head_features(b, h, features, c)
    s_t = dot(k, tl.trans(q), c.PRECISION)  # [BLOCK_N, BLOCK_M]
    begins = (0, 0, tile_corner(0, 0, score, c))
    s_t, saved_t = scores_log2(s_t, rows, cols, begins, mask, True, score, True, PRECISE, c)
    visible = visible_pairs(rows, cols, mask, True, c) & (rows < n_queries)
    p_t = tl.where(visible, tl.math.exp2(s_t - (lse * LOG2E)[None, :]), 0.0)
    dp_t = dot(v, tl.trans(do), c.PRECISION)  # [BLOCK_N, BLOCK_M]
    p_dropped_t = p_t
    if c.DROPOUT:
        words = position_words(*column_keys, offs_n)
        keep_t = keep_tile(*words, *position_words(*row_keys, offs_m), threshold)
        p_dropped_t = tl.where(keep_t, p_t, 0.0)
        dp_t = tl.where(keep_t, dp_t * keep_scale, 0.0)
    dv = dot(round_to(p_dropped_t, do.dtype), do, c.PRECISION)
    ds_t = product_gradient(p_t * (dp_t - delta[None, :]), saved_t, score, c)
    ds_t = round_to(tl.where(visible, ds_t, 0.0), q.dtype)
    dk = dot(ds_t, q, c.PRECISION)
    dq = dot(tl.trans(ds_t), k, c.PRECISION)
    dq_rows = head_view(dq_ptr, (stride_dqb, stride_dqh, stride_dqm), (b, h, first_q, q_rows), c.FORM, c)
    store_tile(dq_rows, dq * sm_scale, 0, c.HEAD_DIM, c.FORM)

    if c.DROPOUT:
        dv *= keep_scale
    store_position = (b, h, first_k, k_rows)
    dk_rows = head_view(dk_ptr, (stride_dkb, stride_dkh, stride_dkn), store_position, c.FORM, c)
    dv_rows = head_view(dv_ptr, (stride_dvb, stride_dvh, stride_dvn), store_position, c.FORM, c)
    store_tile(dk_rows, dk * sm_scale, 0, c.HEAD_DIM, c.FORM)
    store_tile(dv_rows, dv, 0, c.HEAD_DIM_V, c.FORM)
