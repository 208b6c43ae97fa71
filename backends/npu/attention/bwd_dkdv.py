"""dk and dv for Ascend. See fwd.py for the persistent grid and the single loop.

A task is one block of BLOCK_N keys of one KV head. Its program holds k and v, and loops over the query tiles of every
query head of the group. For each tile it recomputes the weights and adds to dk and dv (FlashAttention-2, algorithm 2):

    pᵀ  = exp(sᵀ - lse)                 sᵀ = k qᵀ, scaled or capped, plus ALiBi and bias; pᵀ is 0 where masked
    dpᵀ = v doutᵀ
    dsᵀ = pᵀ · (dpᵀ - delta)            times the cap's derivative with softcap
    dv += pᵀ dout
    dk += dsᵀ q                         times grad_scale after the loop

No other program adds to these rows, so nothing needs atomics and results are the same from run to run. All score tiles
are held transposed, [BLOCK_N, BLOCK_M]: then the left operands of both accumulating products need no transpose.

With dropout dpᵀ, and pᵀ in the dv product only, are 0 at dropped positions; delta is multiplied by 1 - p_drop, and both
gradients are divided by it after the loop. Columns of q, k and dk beyond one product's width (REST) go through a second
product.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.launch import AttentionConstants
from diyfa.backends.npu.attention.primitives import (
    base_of,
    block_at,
    cap_derivative,
    dot,
    dot_add,
    drop_columns,
    first_rows,
    load_lse,
    load_row,
    load_tile,
    masked,
    narrow,
    row_base_of,
    row_bias,
    row_range,
    score_tile,
    sequence,
    store_tile,
    task_in,
    task_of,
    tasks_of,
    turns_before,
)
from diyfa.backends.npu.runtime.compat import kernel


@dataclass(frozen=True)
class KeyGradientConstants(AttentionConstants):
    """Constants of `_bwd_dkdv_kernel`."""

    rest: int  # columns of q, k and dk beyond block_d, for a second product; 0 if one holds all


@kernel
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, together,
    c: tl.constexpr,
):  # fmt: skip
    """Write dk and dv. The module docstring lists the steps."""
    PAD_D: tl.constexpr = c.HEAD_DIM < c.BLOCK_D
    PAD_REST: tl.constexpr = c.HEAD_DIM != c.BLOCK_D + c.REST
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    ROW_BIAS: tl.constexpr = c.BIAS == "q" or c.BIAS == "1"  # the same for all keys
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = c.VARLEN or c.SEQ_LENS
    first_task = 0  # tasks of earlier samples
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = tasks_of(
            cu_seqlens_k_ptr, sample, total_k, seqlen_k, batch, heads_kv, c.BLOCK_N, c.VARLEN, BY_SAMPLE
        )
        for turn in range(turns_before(first_task), turns_before(first_task + tasks)):
            task = task_in(turn) - first_task
            b, hk, block = task_of(task, sample, blocks, batch, heads_kv, together, BY_SAMPLE, False)
            n0 = block * c.BLOCK_N
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
            )
            # Rows after a packed sequence belong to the next one.
            rows = sq if c.VARLEN else seqlen_q
            keys = sk if c.VARLEN else seqlen_k
            lo, hi = row_range(n0, sq, sk, window_left, window_right, c)
            row_blocks = tl.cdiv(tl.maximum(hi - lo, 0), c.BLOCK_M)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, c.VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, c.VARLEN)
            dk_base = base_of(dk_ptr, b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, c.VARLEN)
            dv_base = base_of(dv_ptr, b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, c.VARLEN)
            k_block = block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            if c.REST:
                k_rest_block = block_at(k_base, sk, stride_kn, n0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.REST)
                k_rest = load_tile(k_rest_block, PAD_REST)  # [BLOCK_N, REST]
                dk_rest = tl.zeros([c.BLOCK_N, c.REST], tl.float32)
            dk = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
            dv = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
            for step in range(row_blocks * group):  # query tiles of each head of the group
                h = hk * group + step // row_blocks
                row0 = lo + (step % row_blocks) * c.BLOCK_M
                q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, c.VARLEN)
                dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, c.VARLEN)
                lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
                delta_base = row_base_of(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
                q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
                dout_block = block_at(dout_base, sq, stride_dom, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
                q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
                dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
                lse = load_lse(lse_base, row0, sq, c.BLOCK_M)
                if ROW_BIAS:  # a weight is exp(s + bias - lse)
                    lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, c)
                delta = load_row(delta_base, row0, rows, c.BLOCK_M)
                s = dot(k, tl.trans(q), c.INTERPRET)  # [BLOCK_N, BLOCK_M]
                if c.REST:
                    q_rest_block = block_at(q_base, sq, stride_qm, row0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_M, c.REST)
                    q_rest = load_tile(q_rest_block, PAD_REST)  # [BLOCK_M, REST]
                    s = dot_add(k_rest, tl.trans(q_rest), s, c.INTERPRET)
                s, capped = score_tile(
                    s, b, h, row0, n0, sq, sk, sm_scale, softcap, softcap_minus, softcap_rate,
                    per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, True, c,
                )  # fmt: skip
                p = tl.exp(s - lse[None, :])  # [BLOCK_N, BLOCK_M]
                # Compiled in even if no tile needs it (padded keys only reach their own rows of dk and dv): without it
                # AscendNPU IR 1.1.0 leaves square tiles to one vector core, or overflows the unified buffer.
                p = masked(p, 0.0, row0, n0, sq, sk, window_left, window_right, True, c)
                p = drop_columns(p, row0, sq, c.BLOCK_M)
                # The cube unit may overwrite a left operand. In fp32 p itself is that of the dv product, so every
                # other use of p comes before that product.
                dp = dot(v, tl.trans(dout), c.INTERPRET)  # [BLOCK_N, BLOCK_M]
                kept = p
                if c.DROPOUT:
                    delta = delta * keep_prob  # 1 / keep_prob follows after the loop
                    row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                    r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                    keep = keep_tile(c0, c1, r0, r1, keep_threshold)
                    kept = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp, 0.0)
                ds = p * (dp - delta[None, :])
                if c.SOFTCAP != "":
                    ds = ds * cap_derivative(capped, softcap_inverse)
                ds = drop_columns(ds, row0, sq, c.BLOCK_M)
                dv = dot_add(narrow(kept, dout.dtype, c.INTERPRET), dout, dv, c.INTERPRET)
                ds = narrow(ds, q.dtype, c.INTERPRET)
                dk = dot_add(ds, q, dk, c.INTERPRET)
                if c.REST:
                    dk_rest = dot_add(ds, q_rest, dk_rest, c.INTERPRET)
            # Keys that no row sees and keys beyond the sequence get gradient 0.
            seen = tl.where(row_blocks > 0, (sk - n0) if c.SEQ_LENS else c.BLOCK_N, 0)
            dk = first_rows(dk, seen, c.BLOCK_N) * grad_scale
            if c.REST:
                dk_rest = first_rows(dk_rest, seen, c.BLOCK_N) * grad_scale
            dv = first_rows(dv, seen, c.BLOCK_N)
            if c.DROPOUT:
                dv = dv * keep_scale
            dk_block = block_at(dk_base, keys, stride_dkn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            dv_block = block_at(dv_base, keys, stride_dvn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            store_tile(dk_block, narrow(dk, dk_ptr.dtype.element_ty, c.INTERPRET), PAD_D)
            if c.REST:
                dk_rest_block = block_at(dk_base, keys, stride_dkn, n0, c.BLOCK_D, c.HEAD_DIM, c.BLOCK_N, c.REST)
                store_tile(dk_rest_block, narrow(dk_rest, dk_ptr.dtype.element_ty, c.INTERPRET), PAD_REST)
            store_tile(dv_block, narrow(dv, dv_ptr.dtype.element_ty, c.INTERPRET), PAD_DV)
        first_task += tasks
