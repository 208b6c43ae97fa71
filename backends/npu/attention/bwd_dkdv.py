"""dk and dv for Ascend: one tile of keys, a loop over the query tiles of every query head of its group.

So grouped-query gradients are summed in the accumulator, and the result is the same from run to run. Scores are held
transposed, [BLOCK_N, BLOCK_M]: both products that accumulate take their left operand as the vector cores leave it.
"""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.primitives import (
    add_bias,
    base_of,
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


@kernel
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, together,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST: tl.constexpr,  # columns of q, k, dk and dq beyond BLOCK_D, where one product is not enough; else 0
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    ALWAYS_MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dk and dv of each tile of keys."""
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
            cu_seqlens_k_ptr, sample, total_k, seqlen_k, batch, heads_kv, BLOCK_N, VARLEN, BY_SAMPLE
        )
        for turn in range(turns_before(dealt), turns_before(dealt + tasks)):
            task = task_in(turn) - dealt
            b, hk, block = task_of(task, sample, blocks, batch, heads_kv, together, BY_SAMPLE, False)
            n0 = block * BLOCK_N
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k,
                SEQ_LENS, VARLEN,
            )  # fmt: skip
            # The next rows of packed sequences belong to another one.
            rows = sq if VARLEN else seqlen_q
            keys = sk if VARLEN else seqlen_k
            lo, hi = row_range(
                n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, SEQ_LENS
            )
            row_blocks = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
            dk_base = base_of(dk_ptr, b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, VARLEN)
            dv_base = base_of(dv_ptr, b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, VARLEN)
            k_block = tl.make_block_ptr(k_base, (sk, HEAD_DIM), (stride_kn, 1), (n0, 0), (BLOCK_N, BLOCK_D), (1, 0))
            v_block = tl.make_block_ptr(v_base, (sk, HEAD_DIM_V), (stride_vn, 1), (n0, 0), (BLOCK_N, BLOCK_DV), (1, 0))
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            if REST:
                k_rest_block = tl.make_block_ptr(
                    k_base, (sk, HEAD_DIM), (stride_kn, 1), (n0, BLOCK_D), (BLOCK_N, REST), (1, 0)
                )
                k_rest = load_tile(k_rest_block, PAD_REST)  # [BLOCK_N, REST]
                dk_rest = tl.zeros([BLOCK_N, REST], tl.float32)
            dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
            for step in range(row_blocks * group):
                h = hk * group + step // row_blocks
                row0 = lo + (step % row_blocks) * BLOCK_M
                q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
                dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, VARLEN)
                lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
                delta_base = row_base_of(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
                q_block = tl.make_block_ptr(
                    q_base, (sq, HEAD_DIM), (stride_qm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0)
                )
                dout_block = tl.make_block_ptr(
                    dout_base, (sq, HEAD_DIM_V), (stride_dom, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
                )
                q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
                dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
                lse = load_lse(lse_base, row0, sq, BLOCK_M)
                if ROW_BIAS:  # a weight is exp(s + bias - lse)
                    lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, BLOCK_M, BIAS)
                delta = load_row(delta_base, row0, rows, BLOCK_M)
                slope = 0.0
                if ALIBI != "":
                    slope = tl.load(slopes_ptr + b * stride_slope_b + h)
                s = dot(k, tl.trans(q), INTERPRET)  # [BLOCK_N, BLOCK_M]
                if REST:
                    q_rest_block = tl.make_block_ptr(
                        q_base, (sq, HEAD_DIM), (stride_qm, 1), (row0, BLOCK_D), (BLOCK_M, REST), (1, 0)
                    )
                    q_rest = load_tile(q_rest_block, PAD_REST)  # [BLOCK_M, REST]
                    s = dot_add(k_rest, tl.trans(q_rest), s, INTERPRET)
                s, capped = score_tile(
                    s, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_minus, softcap_rate,
                    BLOCK_M, BLOCK_N, SOFTCAP, ALIBI, True,
                )  # fmt: skip
                if KEY_BIAS:
                    s = add_bias(
                        s, bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, row0, n0, sq, sk,
                        BLOCK_M, BLOCK_N, BIAS, True,
                    )  # fmt: skip
                p = tl.exp(s - lse[None, :])  # [BLOCK_N, BLOCK_M]
                # Asked also where nothing has to be masked (keys beyond the last have rows of their own): without it
                # AscendNPU IR 1.1.0 leaves square tiles to one vector core, or overflows the unified buffer.
                p = masked(
                    p, 0.0, row0, n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, True, ALWAYS_MASK,
                )  # fmt: skip
                p = drop_columns(p, row0, sq, BLOCK_M)
                # The cube unit may overwrite a left operand, and in fp32 p is one: every use of p comes before it.
                dp = dot(v, tl.trans(dout), INTERPRET)  # [BLOCK_N, BLOCK_M]
                kept = p
                if DROPOUT:
                    delta = delta * keep_prob  # what dropout multiplies by is left to the end
                    row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                    r0, r1 = position_words(row_key0, row_key1, tl.arange(0, BLOCK_M) + row0)
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, BLOCK_N) + n0)
                    keep = keep_tile(c0, c1, r0, r1, keep_threshold)
                    kept = tl.where(keep, p, 0.0)
                    dp = tl.where(keep, dp, 0.0)
                ds = p * (dp - delta[None, :])
                if SOFTCAP != "":
                    ds = ds * cap_derivative(capped, softcap_inverse)
                ds = drop_columns(ds, row0, sq, BLOCK_M)
                dv = dot_add(narrow(kept, dout.dtype, INTERPRET), dout, dv, INTERPRET)
                ds = narrow(ds, q.dtype, INTERPRET)
                dk = dot_add(ds, q, dk, INTERPRET)
                if REST:
                    dk_rest = dot_add(ds, q_rest, dk_rest, INTERPRET)
            # Nothing for keys that no row sees and for keys beyond the sequence.
            seen = tl.where(row_blocks > 0, (sk - n0) if SEQ_LENS else BLOCK_N, 0)
            dk = first_rows(dk, seen, BLOCK_N) * grad_scale
            if REST:
                dk_rest = first_rows(dk_rest, seen, BLOCK_N) * grad_scale
            dv = first_rows(dv, seen, BLOCK_N)
            if DROPOUT:
                dv = dv * keep_scale
            dk_block = tl.make_block_ptr(
                dk_base, (keys, HEAD_DIM), (stride_dkn, 1), (n0, 0), (BLOCK_N, BLOCK_D), (1, 0)
            )
            dv_block = tl.make_block_ptr(
                dv_base, (keys, HEAD_DIM_V), (stride_dvn, 1), (n0, 0), (BLOCK_N, BLOCK_DV), (1, 0)
            )
            store_tile(dk_block, narrow(dk, dk_ptr.dtype.element_ty, INTERPRET), PAD_D)
            if REST:
                dk_rest_block = tl.make_block_ptr(
                    dk_base, (keys, HEAD_DIM), (stride_dkn, 1), (n0, BLOCK_D), (BLOCK_N, REST), (1, 0)
                )
                store_tile(dk_rest_block, narrow(dk_rest, dk_ptr.dtype.element_ty, INTERPRET), PAD_REST)
            store_tile(dv_block, narrow(dv, dv_ptr.dtype.element_ty, INTERPRET), PAD_DV)
        dealt += tasks
