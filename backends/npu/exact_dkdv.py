"""After dk and dv for Ascend, where a mask or dropout takes pairs out: rows of them that are not finite, formed anew
(see exact.py), for both together.
"""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.compat import kernel
from diyfa.backends.npu.dropout import head_keys
from diyfa.backends.npu.exact import (
    kept_line,
    line_scores,
    load_line,
    load_lines,
    nonfinite,
    positions,
    query_bias,
    range_of,
    replaced,
    sees_nothing,
    spoiled_rows,
    store_line,
    undecided,
)
from diyfa.backends.npu.primitives import (
    base_of,
    cap_derivative,
    load_lse,
    load_row,
    narrow,
    row_base_of,
    sequence,
    task_in,
    task_of,
    tasks_of,
    turns_before,
)


@kernel
def _exact_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, LINES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of dk and dv are looked at together; a row is formed anew from tiles of LINES queries of every query
    head of its group."""
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = VARLEN or SEQ_LENS
    dealt = 0
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = tasks_of(
            cu_seqlens_k_ptr, sample, total_k, seqlen_k, batch, heads_kv, BLOCK_N, VARLEN, BY_SAMPLE
        )
        for turn in range(turns_before(dealt), turns_before(dealt + tasks)):
            b, hk, block = task_of(task_in(turn) - dealt, sample, blocks, batch, heads_kv, heads_kv, BY_SAMPLE, False)
            key0 = block * BLOCK_N
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k,
                SEQ_LENS, VARLEN,
            )  # fmt: skip
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
            dk_base = base_of(dk_ptr, b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, VARLEN)
            dv_base = base_of(dv_ptr, b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, VARLEN)
            spoiled = spoiled_rows(load_lines(dk_base, stride_dkn, key0, sk, HEAD_DIM, BLOCK_D, BLOCK_N))
            spoiled += spoiled_rows(load_lines(dv_base, stride_dvn, key0, sk, HEAD_DIM_V, BLOCK_DV, BLOCK_N))
            found = tl.sum(spoiled, 0)
            keys = 0
            if found > 0.0:
                if not DROPOUT:  # a key that is NaN makes all of its row so, unless no query sees it
                    k_rows = load_lines(k_base, stride_kn, key0, sk, HEAD_DIM, BLOCK_D, BLOCK_N)
                    own = tl.sum(tl.where(k_rows == k_rows, 0.0, 1.0), 1)
                    blind = sees_nothing(
                        key0 - sk + sq, sq, window_right, window_left, BLOCK_N, CAUSAL or HAS_RIGHT, HAS_LEFT
                    )  # fmt: skip
                    found = tl.sum(tl.where(own > 0.0, spoiled * blind, spoiled), 0)
                if found > 0.0:
                    keys = tl.minimum(BLOCK_N, sk - key0)
            for j in range(key0, key0 + keys):
                old_dk = load_line(dk_base, j, stride_dkn, HEAD_DIM, BLOCK_D)  # [BLOCK_D]
                old_dv = load_line(dv_base, j, stride_dvn, HEAD_DIM_V, BLOCK_DV)  # [BLOCK_DV]
                left = tl.sum(nonfinite(old_dk), 0) + tl.sum(nonfinite(old_dv), 0)
                if left > 0.0:
                    k = load_line(k_base, j, stride_kn, HEAD_DIM, BLOCK_D).to(tl.float32)  # [BLOCK_D]
                    v = load_line(v_base, j, stride_vn, HEAD_DIM_V, BLOCK_DV).to(tl.float32)  # [BLOCK_DV]
                    lo, hi = range_of(j - sk + sq, sq, window_right, window_left, CAUSAL or HAS_RIGHT, HAS_LEFT)
                    steps = tl.cdiv(tl.maximum(hi - lo, 0), LINES)
                    dk = tl.zeros([BLOCK_D], tl.float32)
                    dv = tl.zeros([BLOCK_DV], tl.float32)
                    for step in range(steps * group):
                        if left > 0.0:
                            h = hk * group + step // steps
                            m0 = lo + step % steps * LINES
                            q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
                            dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, VARLEN)
                            lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
                            delta_base = row_base_of(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
                            lse = load_lse(lse_base, m0, hi, LINES)
                            delta = load_row(delta_base, m0, hi, LINES)
                            slope = 0.0
                            if ALIBI != "":
                                slope = tl.load(slopes_ptr + b * stride_slope_b + h)
                            q = load_lines(q_base, stride_qm, m0, hi, HEAD_DIM, BLOCK_D, LINES)  # [LINES, BLOCK_D]
                            s, capped = line_scores(
                                tl.sum(q * k[None, :], 1), positions(m0 - (j - sk + sq), LINES), slope,
                                sm_scale, softcap, softcap_minus, softcap_rate, SOFTCAP, ALIBI,
                            )  # fmt: skip
                            if BIAS != "":
                                s = s + query_bias(
                                    bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, j, sk, m0, hi,
                                    LINES, BIAS,
                                )  # fmt: skip
                            inside = positions(m0, LINES) < hi.to(tl.float32)
                            p = tl.where(inside, tl.exp(s - lse), 0.0)  # [LINES]
                            dout = load_lines(dout_base, stride_dom, m0, hi, HEAD_DIM_V, BLOCK_DV, LINES)
                            dp = tl.sum(dout * v[None, :], 1)  # dout [LINES, BLOCK_DV]
                            weighted = dout * p[:, None]
                            if DROPOUT:
                                delta = delta * keep_prob  # what dropout multiplies by is left to the end
                                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                                keep = kept_line(
                                    column_key0, column_key1, j, row_key0, row_key1, m0, keep_threshold, LINES
                                )
                                dp = tl.where(keep > 0.0, dp, 0.0)
                                kept = tl.broadcast_to(keep[:, None], [LINES, BLOCK_DV])
                                weighted = tl.where(kept > 0.0, weighted, 0.0)  # a weight of 0 is not enough
                            ds = p * (dp - delta)
                            if SOFTCAP != "":
                                ds = ds * cap_derivative(capped, softcap_inverse)
                            ds = tl.where(inside, ds, 0.0)
                            dk += tl.sum(q * ds[:, None], 0)
                            dv += tl.sum(weighted, 0)
                            left = undecided(old_dk, dk) + undecided(old_dv, dv)
                    if DROPOUT:
                        dv = dv * keep_scale
                    new_dk = narrow(replaced(old_dk, dk * grad_scale), dk_ptr.dtype.element_ty, INTERPRET)
                    new_dv = narrow(replaced(old_dv, dv), dv_ptr.dtype.element_ty, INTERPRET)
                    store_line(dk_base, j, stride_dkn, new_dk, HEAD_DIM, BLOCK_D)
                    store_line(dv_base, j, stride_dvn, new_dv, HEAD_DIM_V, BLOCK_DV)
        dealt += tasks
