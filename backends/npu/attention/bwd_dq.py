"""dq for Ascend. See fwd.py for the persistent grid and the single loop.

A task is one block of BLOCK_M query rows of one head. Its program holds q, dout, lse and delta, and loops over blocks
of BLOCK_N keys that the rows can see. For each block it recomputes the weights and adds to dq:

    p  = exp(s - lse)                   s = q kᵀ, scaled or capped, plus ALiBi and bias
    dp = dout vᵀ                        0 at dropped positions
    ds = p · (dp - delta)               times the cap's derivative with softcap; masked
    dq += ds k                          times grad_scale after the loop

With dropout delta is multiplied by 1 - p_drop, and grad_scale contains 1 / (1 - p_drop).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.block_mask import keep_visible, listed, visited_keys
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.launch import AttentionConstants
from diyfa.backends.npu.attention.primitives import (
    block_at,
    count_tasks,
    dense_head_base,
    dot,
    dot_add,
    head_base,
    keep_first_rows,
    load_lse,
    load_row,
    load_tile,
    locate_task,
    masked,
    narrow,
    product_gradient,
    rounds_before,
    row_bias,
    score_tile,
    sequence_info,
    store_tile,
    task_in_round,
)
from diyfa.backends.npu.attention.score_functions import function_gradient, function_scores
from diyfa.backends.npu.runtime.compat import kernel


@dataclass(frozen=True)
class QueryGradientConstants(AttentionConstants):
    """Constants of `_bwd_dq_kernel`."""

    masked: bool  # some tile of scores may need a mask
    block_d_tail: int  # columns of q, k and dq beyond block_d, for a second product; 0 if one holds all


@kernel
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, heads_in_parallel,
    c: tl.constexpr,
):  # fmt: skip
    """Write dq, as the file's header says. The arguments are those of fwd.py."""
    PAD_D: tl.constexpr = c.HEAD_DIM < c.BLOCK_D
    PAD_D_TAIL: tl.constexpr = c.HEAD_DIM != c.BLOCK_D + c.BLOCK_D_TAIL
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    ROW_BIAS: tl.constexpr = c.BIAS == "q" or c.BIAS == "1"  # the same for all keys
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = c.VARLEN or c.SEQ_LENS
    first_task = 0  # tasks of earlier samples
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = count_tasks(
            cu_seqlens_q_ptr, sample, total_q, seqlen_q, batch, heads_q, c.BLOCK_M, c.VARLEN, BY_SAMPLE
        )
        for round_index in range(rounds_before(first_task), rounds_before(first_task + tasks)):
            task = task_in_round(round_index) - first_task
            b, h, block = locate_task(task, sample, blocks, batch, heads_q, heads_in_parallel, BY_SAMPLE, True)
            row0 = block * c.BLOCK_M
            hk = h // group
            start_q, start_k, sq, sk = sequence_info(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
            )
            rows = sq if c.VARLEN else seqlen_q  # rows after a packed sequence belong to the next one
            lists, list_ptr, full_end, lo, hi = visited_keys(
                mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_mask_b,
                stride_mask_h, c,
            )  # fmt: skip
            q_base = head_base(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, c.VARLEN)
            k_base = head_base(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, c.VARLEN)
            v_base = head_base(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, c.VARLEN)
            dout_base = head_base(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, c.VARLEN)
            dq_base = head_base(dq_ptr, b, h, start_q, stride_dqb, stride_dqh, stride_dqm, c.VARLEN)
            lse_base = dense_head_base(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
            delta_base = dense_head_base(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
            q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
            dout_block = block_at(dout_base, sq, stride_dom, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
            k_block = block_at(k_base, sk, stride_kn, lo, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, lo, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            if c.BLOCK_D_TAIL:
                q_tail_block = block_at(q_base, sq, stride_qm, row0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D_TAIL)
                k_tail_block = block_at(k_base, sk, stride_kn, lo, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D_TAIL)
                q_tail = load_tile(q_tail_block, PAD_D_TAIL)  # [BLOCK_M, BLOCK_D_TAIL]
                dq_tail = tl.zeros([c.BLOCK_M, c.BLOCK_D_TAIL], tl.float32)
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            lse = load_lse(lse_base, row0, sq, c.BLOCK_M)
            if ROW_BIAS:  # a weight is exp(s + bias - lse)
                lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, c)
            delta = load_row(delta_base, row0, rows, c.BLOCK_M)
            if c.DROPOUT:
                delta = delta * keep_prob  # dp is not scaled: 1 / keep_prob follows after the loop
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
            dq = tl.zeros([c.BLOCK_M, c.BLOCK_D], tl.float32)
            # Counted from 0: a loop that begins at a window's edge crashes AscendNPU IR 1.0.0.
            for step in range(0, hi - lo, c.BLOCK_N):
                n0 = lo + step
                if c.MASK_K:
                    n0 = listed(step, list_ptr, c.MASK_K)
                    k = load_tile(block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D), PAD_D)
                else:
                    k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
                s = dot(q, tl.trans(k), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
                if c.BLOCK_D_TAIL:
                    if c.MASK_K:
                        k_tail_block = block_at(
                            k_base, sk, stride_kn, n0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D_TAIL
                        )
                    k_tail = load_tile(k_tail_block, PAD_D_TAIL)  # [BLOCK_N, BLOCK_D_TAIL]
                    s = dot_add(q_tail, tl.trans(k_tail), s, c.INTERPRET)
                s, capped = score_tile(
                    s, b, h, row0, n0, sq, sk, sm_scale, softcap, softcap_minus, softcap_rate,
                    per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, False, c,
                )  # fmt: skip
                if c.SCORE_FN is not None:
                    score = s
                    s, seen = function_scores(
                        s, b, h, step >= full_end, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k,
                        window_left, window_right, score_tensor0_ptr, score_tensor1_ptr,
                        score_tensor2_ptr, score_tensor3_ptr, c.MASKED, False, c,
                    )  # fmt: skip
                p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
                if c.MASK_K:
                    v = load_tile(block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV), PAD_DV)
                else:
                    v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
                dp = dot(dout, tl.trans(v), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
                if c.DROPOUT:
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                    dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
                ds = p * (dp - delta[:, None])
                ds = product_gradient(ds, capped, softcap_inverse, c)
                # Mask ds, not p: a product with fewer keys than the tile does not write the other columns of its
                # accumulator, so s and dp may hold anything there, NaN included.
                if c.SCORE_FN is not None:
                    ds = function_gradient(
                        ds, score, seen, b, h, row0, n0, sq, sk, window_right,
                        score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr, False, c,
                    )  # fmt: skip
                else:
                    if c.MASK_K:
                        ds = keep_visible(ds, 0.0, step >= full_end, lists, mask_bits_ptr, row0, n0, seqlen_k, False, c)
                    if c.MASKED:
                        ds = masked(ds, 0.0, row0, n0, sq, sk, window_left, window_right, False, c)
                ds = narrow(ds, k.dtype, c.INTERPRET)
                dq = dot_add(ds, k, dq, c.INTERPRET)
                if c.BLOCK_D_TAIL:
                    dq_tail = dot_add(ds, k_tail, dq_tail, c.INTERPRET)
                    if not c.MASK_K:
                        k_tail_block = tl.advance(k_tail_block, (c.BLOCK_N, 0))
                if not c.MASK_K:
                    k_block = tl.advance(k_block, (c.BLOCK_N, 0))
                    v_block = tl.advance(v_block, (c.BLOCK_N, 0))
            # Rows that see no key, and with SEQ_LENS rows beyond the sequence, get gradient 0. The causal mask does not
            # hide rows beyond the sequence, where tiles hold what no product wrote.
            n_seen_rows = tl.where(hi > lo, (sq - row0) if c.SEQ_LENS else c.BLOCK_M, 0)
            dq = keep_first_rows(dq, n_seen_rows, c.BLOCK_M) * grad_scale
            dq_block = block_at(dq_base, rows, stride_dqm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
            store_tile(dq_block, narrow(dq, dq_ptr.dtype.element_ty, c.INTERPRET), PAD_D)
            if c.BLOCK_D_TAIL:
                dq_tail = keep_first_rows(dq_tail, n_seen_rows, c.BLOCK_M) * grad_scale
                dq_tail_block = block_at(
                    dq_base, rows, stride_dqm, row0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D_TAIL
                )
                store_tile(dq_tail_block, narrow(dq_tail, dq_ptr.dtype.element_ty, c.INTERPRET), PAD_D_TAIL)
        first_task += tasks
