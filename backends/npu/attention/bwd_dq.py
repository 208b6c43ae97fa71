"""dq for Ascend: one tile of query rows, a loop over the keys. See fwd.py for the persistent grid and the one loop."""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.primitives import (
    add_bias,
    base_of,
    cap_derivative,
    dot,
    dot_add,
    first_rows,
    key_range,
    load_lse,
    load_row,
    load_tile,
    masked,
    narrow,
    row_base_of,
    row_bias,
    score_tile,
    sequence,
    store_tile,
    task_in,
    task_of,
    tasks_of,
    turns_before,
)
from diyfa.backends.npu.runtime.compat import kernel


@kernel
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, together,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr,  # columns of q, k and dq beyond BLOCK_D, where one product is not enough; else 0
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    ALWAYS_MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PAD_D: tl.constexpr = HEAD_DIM < BLOCK_D
    PAD_REST: tl.constexpr = HEAD_DIM != BLOCK_D + REST
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    ROW_BIAS: tl.constexpr = BIAS == "q" or BIAS == "1"  # the same for all keys
    KEY_BIAS: tl.constexpr = BIAS == "qk" or BIAS == "k"
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = VARLEN or SEQ_LENS
    dealt = 0
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = tasks_of(
            cu_seqlens_q_ptr, sample, total_q, seqlen_q, batch, heads_q, BLOCK_M, VARLEN, BY_SAMPLE
        )
        for turn in range(turns_before(dealt), turns_before(dealt + tasks)):
            b, h, block = task_of(task_in(turn) - dealt, sample, blocks, batch, heads_q, together, BY_SAMPLE, True)
            row0 = block * BLOCK_M
            hk = h // group
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k,
                SEQ_LENS, VARLEN,
            )  # fmt: skip
            rows = sq if VARLEN else seqlen_q  # the next rows of packed sequences belong to another one
            lo, hi = key_range(
                row0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, SEQ_LENS
            )
            q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
            dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, VARLEN)
            dq_base = base_of(dq_ptr, b, h, start_q, stride_dqb, stride_dqh, stride_dqm, VARLEN)
            lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
            delta_base = row_base_of(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
            q_block = tl.make_block_ptr(q_base, (sq, HEAD_DIM), (stride_qm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0))
            dout_block = tl.make_block_ptr(
                dout_base, (sq, HEAD_DIM_V), (stride_dom, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
            )
            k_block = tl.make_block_ptr(k_base, (sk, HEAD_DIM), (stride_kn, 1), (lo, 0), (BLOCK_N, BLOCK_D), (1, 0))
            v_block = tl.make_block_ptr(v_base, (sk, HEAD_DIM_V), (stride_vn, 1), (lo, 0), (BLOCK_N, BLOCK_DV), (1, 0))
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            if REST:
                q_rest_block = tl.make_block_ptr(
                    q_base, (sq, HEAD_DIM), (stride_qm, 1), (row0, BLOCK_D), (BLOCK_M, REST), (1, 0)
                )
                k_rest_block = tl.make_block_ptr(
                    k_base, (sk, HEAD_DIM), (stride_kn, 1), (lo, BLOCK_D), (BLOCK_N, REST), (1, 0)
                )
                q_rest = load_tile(q_rest_block, PAD_REST)  # [BLOCK_M, REST]
                dq_rest = tl.zeros([BLOCK_M, REST], tl.float32)
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            lse = load_lse(lse_base, row0, sq, BLOCK_M)
            if ROW_BIAS:  # a weight is exp(s + bias - lse)
                lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, BLOCK_M, BIAS)
            delta = load_row(delta_base, row0, rows, BLOCK_M)
            slope = 0.0
            if ALIBI != "":
                slope = tl.load(slopes_ptr + b * stride_slope_b + h)
            if DROPOUT:
                delta = delta * keep_prob  # what dropout multiplies dp by is left to the end
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, BLOCK_M) + row0)
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            # Counted from 0: a loop that begins at a window's edge crashes AscendNPU IR 1.0.0.
            for step in range(0, hi - lo, BLOCK_N):
                n0 = lo + step
                k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
                s = dot(q, tl.trans(k), INTERPRET)  # [BLOCK_M, BLOCK_N]
                if REST:
                    k_rest = load_tile(k_rest_block, PAD_REST)  # [BLOCK_N, REST]
                    s = dot_add(q_rest, tl.trans(k_rest), s, INTERPRET)
                s, capped = score_tile(
                    s, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_minus, softcap_rate,
                    BLOCK_M, BLOCK_N, SOFTCAP, ALIBI, False,
                )  # fmt: skip
                if KEY_BIAS:
                    s = add_bias(
                        s, bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, row0, n0, sq, sk,
                        BLOCK_M, BLOCK_N, BIAS, False,
                    )  # fmt: skip
                p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
                v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
                dp = dot(dout, tl.trans(v), INTERPRET)  # [BLOCK_M, BLOCK_N]
                if DROPOUT:
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, BLOCK_N) + n0)
                    dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
                ds = p * (dp - delta[:, None])
                if SOFTCAP != "":
                    ds = ds * cap_derivative(capped, softcap_inverse)
                # Of ds, not of p: a product over fewer keys than the tile has leaves the other columns of its
                # accumulator as they were, so s and dp may hold anything there, NaN included.
                if MASKED:
                    ds = masked(
                        ds, 0.0, row0, n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N,
                        CAUSAL, HAS_LEFT, HAS_RIGHT, False, ALWAYS_MASK,
                    )  # fmt: skip
                ds = narrow(ds, k.dtype, INTERPRET)
                dq = dot_add(ds, k, dq, INTERPRET)
                if REST:
                    dq_rest = dot_add(ds, k_rest, dq_rest, INTERPRET)
                    k_rest_block = tl.advance(k_rest_block, (BLOCK_N, 0))
                k_block = tl.advance(k_block, (BLOCK_N, 0))
                v_block = tl.advance(v_block, (BLOCK_N, 0))
            # Nothing for rows that see no key. Beyond the sequence a causal mask cuts nothing, not even what no product
            # wrote.
            seen = tl.where(hi > lo, (sq - row0) if SEQ_LENS else BLOCK_M, 0)
            dq = first_rows(dq, seen, BLOCK_M) * grad_scale
            dq_block = tl.make_block_ptr(
                dq_base, (rows, HEAD_DIM), (stride_dqm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0)
            )
            store_tile(dq_block, narrow(dq, dq_ptr.dtype.element_ty, INTERPRET), PAD_D)
            if REST:
                dq_rest = first_rows(dq_rest, seen, BLOCK_M) * grad_scale
                dq_rest_block = tl.make_block_ptr(
                    dq_base, (rows, HEAD_DIM), (stride_dqm, 1), (row0, BLOCK_D), (BLOCK_M, REST), (1, 0)
                )
                store_tile(dq_rest_block, narrow(dq_rest, dq_ptr.dtype.element_ty, INTERPRET), PAD_REST)
        dealt += tasks
