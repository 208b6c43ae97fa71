"""dk and dv for Ascend. See fwd.py for the persistent grid and the single loop.

A task is one block of BLOCK_N keys of one KV head. Its program holds k and v, and loops over the query tiles of every
query head of the group. For each tile it recomputes the weights and adds to dk and dv (FlashAttention-2, algorithm 2):

    pᵀ  = exp(sᵀ - lse)                 sᵀ = k qᵀ, scaled or capped, plus ALiBi and bias; pᵀ is 0 where masked
    dpᵀ = v doutᵀ
    dsᵀ = pᵀ · (dpᵀ - delta)            times the cap's derivative with softcap
    dv += pᵀ dout
    dk += dsᵀ q                         times grad_scale after the loop (`configs.attention_scalars`)

No other program adds to these rows, so nothing needs atomics and results are the same from run to run. All score tiles
are held transposed, [BLOCK_N, BLOCK_M]: then the left operands of both accumulating products need no transpose.

With dropout dpᵀ, and pᵀ in the dv product only, are 0 at dropped positions; delta is multiplied by 1 - p_drop, and both
gradients are divided by it after the loop. Columns of q, k and dk beyond one product's width (BLOCK_D_TAIL) go through
a second product.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.block_mask import head_lists, keep_visible, listed, listed_queries
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.launch import AttentionConstants
from diyfa.backends.npu.attention.primitives import (
    block_at,
    count_tasks,
    dense_head_base,
    dot,
    dot_add,
    drop_columns,
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
    row_range,
    score_tile,
    sequence_info,
    store_tile,
    task_in_round,
)
from diyfa.backends.npu.attention.score_functions import function_gradient, function_scores
from diyfa.backends.npu.runtime.compat import kernel


@dataclass(frozen=True)
class KeyGradientConstants(AttentionConstants):
    """Constants of `_bwd_dkdv_kernel`."""

    block_d_tail: int  # columns of q, k and dk beyond block_d, for a second product; 0 if one holds all


@kernel
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, heads_in_parallel,
    c: tl.constexpr,
):  # fmt: skip
    """Write dk and dv. For each task, a block of keys of a KV head (b, hk), a program

    1. finds the sequence and the query rows that see these keys: rows [lo, hi), or with a block mask the list of each
       query head;
    2. loads k and v, and clears dk and dv;
    3. for each tile of query rows of each head of the group adds to dk and dv, as the file's header says;
    4. clears rows of keys that do not exist or that no query sees, scales, and stores dk and dv.
    """
    PAD_D: tl.constexpr = c.HEAD_DIM < c.BLOCK_D
    PAD_D_TAIL: tl.constexpr = c.HEAD_DIM != c.BLOCK_D + c.BLOCK_D_TAIL
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    ROW_BIAS: tl.constexpr = c.BIAS == "q" or c.BIAS == "1"  # the same for all keys
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = c.VARLEN or c.SEQ_LENS
    first_task = 0  # tasks of earlier samples
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = count_tasks(
            cu_seqlens_k_ptr, sample, total_k, seqlen_k, batch, heads_kv, c.BLOCK_N, c.VARLEN, BY_SAMPLE
        )
        for round_index in range(rounds_before(first_task), rounds_before(first_task + tasks)):
            task = task_in_round(round_index) - first_task
            b, hk, block = locate_task(task, sample, blocks, batch, heads_kv, heads_in_parallel, BY_SAMPLE, False)
            n0 = block * c.BLOCK_N
            start_q, start_k, sq, sk = sequence_info(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
            )
            # Rows after a packed sequence belong to the next one.
            rows = sq if c.VARLEN else seqlen_q
            keys = sk if c.VARLEN else seqlen_k
            first_head = 0
            if c.MASK_K:
                # The compiler clears dk and dv in the first iteration of the inner loop (over rows) in the first
                # iteration of the outer loop (over heads). If the first head had no rows, nothing would clear them. So
                # the outer loop begins with the first head of which a query sees one of these keys; `group`: none.
                first_head = group
                for i in range(group):
                    lists = head_lists(mask_blocks_ptr, b, hk * group + group - 1 - i, stride_mask_b, stride_mask_h)
                    _, _, end = listed_queries(lists, n0, seqlen_q, seqlen_k, c)
                    first_head = tl.where(end > 0, group - 1 - i, first_head)
            else:
                lo, hi = row_range(n0, sq, sk, window_left, window_right, c)
                lists, full_end = 0, 0
                row_blocks = tl.cdiv(tl.maximum(hi - lo, 0), c.BLOCK_M)
            k_base = head_base(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, c.VARLEN)
            v_base = head_base(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, c.VARLEN)
            dk_base = head_base(dk_ptr, b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, c.VARLEN)
            dv_base = head_base(dv_ptr, b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, c.VARLEN)
            k_block = block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            if c.BLOCK_D_TAIL:
                k_tail_block = block_at(k_base, sk, stride_kn, n0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D_TAIL)
                k_tail = load_tile(k_tail_block, PAD_D_TAIL)  # [BLOCK_N, BLOCK_D_TAIL]
                dk_tail = tl.zeros([c.BLOCK_N, c.BLOCK_D_TAIL], tl.float32)
            dk = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
            dv = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
            # Without a block mask the outer loop has one iteration, and `step` is the number of a tile among those of
            # all heads. With one each head has its own list of query blocks, and `step` is a position in it.
            for head in range(first_head, group if c.MASK_K else 1):
                if c.MASK_K:
                    h = hk * group + head
                    lists = head_lists(mask_blocks_ptr, b, h, stride_mask_b, stride_mask_h)
                    list_ptr, full_end, end = listed_queries(lists, n0, seqlen_q, seqlen_k, c)
                for step in range(0, end if c.MASK_K else row_blocks * group, c.BLOCK_M if c.MASK_K else 1):
                    if c.MASK_K:
                        row0 = listed(step, list_ptr, c.MASK_Q)
                    else:
                        h = hk * group + step // row_blocks
                        row0 = lo + (step % row_blocks) * c.BLOCK_M
                    q_base = head_base(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, c.VARLEN)
                    dout_base = head_base(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, c.VARLEN)
                    lse_base = dense_head_base(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
                    delta_base = dense_head_base(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
                    q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
                    dout_block = block_at(dout_base, sq, stride_dom, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
                    q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
                    dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
                    lse = load_lse(lse_base, row0, sq, c.BLOCK_M)
                    if ROW_BIAS:  # a weight is exp(s + bias - lse)
                        lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, c)
                    delta = load_row(delta_base, row0, rows, c.BLOCK_M)
                    s = dot(k, tl.trans(q), c.INTERPRET)  # [BLOCK_N, BLOCK_M]
                    if c.BLOCK_D_TAIL:
                        q_tail_block = block_at(
                            q_base, sq, stride_qm, row0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D_TAIL
                        )
                        q_tail = load_tile(q_tail_block, PAD_D_TAIL)  # [BLOCK_M, BLOCK_D_TAIL]
                        s = dot_add(k_tail, tl.trans(q_tail), s, c.INTERPRET)
                    s, capped = score_tile(
                        s, b, h, row0, n0, sq, sk, sm_scale, softcap, softcap_minus, softcap_rate,
                        per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, True, c,
                    )  # fmt: skip
                    if c.SCORE_FN is not None:
                        score = s
                        s, seen = function_scores(
                            s, b, h, step >= full_end, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k,
                            window_left, window_right, score_tensor0_ptr, score_tensor1_ptr,
                            score_tensor2_ptr, score_tensor3_ptr, c.MASK_K == 0 or c.SEQ_LENS, True, c,
                        )  # fmt: skip
                    p = tl.exp(s - lse[None, :])  # [BLOCK_N, BLOCK_M]
                    # No tile may need this mask: padded keys reach only their own rows of dk and dv. But without it
                    # AscendNPU IR 1.1.0 leaves square tiles to one vector core, or overflows the unified buffer.
                    if c.SCORE_FN is None:
                        if c.MASK_K:
                            p = keep_visible(
                                p, 0.0, step >= full_end, lists, mask_bits_ptr, row0, n0, seqlen_k, True, c
                            )
                        if c.MASK_K == 0 or c.SEQ_LENS:
                            p = masked(p, 0.0, row0, n0, sq, sk, window_left, window_right, True, c)
                        p = drop_columns(p, row0, sq, c.BLOCK_M)
                    # The cube unit may overwrite the left operand of a product. In fp32 the dv product takes p itself,
                    # so every other use of p comes before it.
                    dp = dot(v, tl.trans(dout), c.INTERPRET)  # [BLOCK_N, BLOCK_M]
                    p_dropped = p
                    if c.DROPOUT:
                        delta = delta * keep_prob  # 1 / keep_prob follows after the loop
                        row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                        r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
                        c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                        keep = keep_tile(c0, c1, r0, r1, keep_threshold)
                        p_dropped = tl.where(keep, p, 0.0)
                        dp = tl.where(keep, dp, 0.0)
                    ds = p * (dp - delta[None, :])
                    ds = product_gradient(ds, capped, softcap_inverse, c)
                    if c.SCORE_FN is not None:
                        ds = function_gradient(
                            ds, score, seen, b, h, row0, n0, sq, sk, window_right,
                            score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr, True, c,
                        )  # fmt: skip
                    else:
                        ds = drop_columns(ds, row0, sq, c.BLOCK_M)
                    dv = dot_add(narrow(p_dropped, dout.dtype, c.INTERPRET), dout, dv, c.INTERPRET)
                    ds = narrow(ds, q.dtype, c.INTERPRET)
                    dk = dot_add(ds, q, dk, c.INTERPRET)
                    if c.BLOCK_D_TAIL:
                        dk_tail = dot_add(ds, q_tail, dk_tail, c.INTERPRET)
            # Keys that no row sees and keys beyond the sequence get gradient 0.
            seen_blocks = (group - first_head) if c.MASK_K else row_blocks
            n_seen_keys = tl.where(seen_blocks > 0, (sk - n0) if c.SEQ_LENS else c.BLOCK_N, 0)
            dk = keep_first_rows(dk, n_seen_keys, c.BLOCK_N) * grad_scale
            if c.BLOCK_D_TAIL:
                dk_tail = keep_first_rows(dk_tail, n_seen_keys, c.BLOCK_N) * grad_scale
            dv = keep_first_rows(dv, n_seen_keys, c.BLOCK_N)
            if c.DROPOUT:
                dv = dv * keep_scale
            dk_block = block_at(dk_base, keys, stride_dkn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            dv_block = block_at(dv_base, keys, stride_dvn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            store_tile(dk_block, narrow(dk, dk_ptr.dtype.element_ty, c.INTERPRET), PAD_D)
            if c.BLOCK_D_TAIL:
                dk_tail_block = block_at(
                    dk_base, keys, stride_dkn, n0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D_TAIL
                )
                store_tile(dk_tail_block, narrow(dk_tail, dk_ptr.dtype.element_ty, c.INTERPRET), PAD_D_TAIL)
            store_tile(dv_block, narrow(dv, dv_ptr.dtype.element_ty, c.INTERPRET), PAD_DV)
        first_task += tasks
