"""After dq for Ascend, where a mask hides keys from queries: rows of dq that are not finite, anew (see exact.py).

Dropout by itself changes nothing here: the gradient of a dropped score depends on the key as well.
"""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.compat import kernel
from diyfa.backends.npu.dropout import head_keys
from diyfa.backends.npu.exact import (
    kept_line,
    key_bias,
    line_scores,
    load_line,
    load_lines,
    nonfinite,
    positions,
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
def _exact_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of dq are looked at together; a row is formed anew from tiles of LINES keys."""
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = VARLEN or SEQ_LENS
    dealt = 0
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = tasks_of(
            cu_seqlens_q_ptr, sample, total_q, seqlen_q, batch, heads_q, BLOCK_M, VARLEN, BY_SAMPLE
        )
        for turn in range(turns_before(dealt), turns_before(dealt + tasks)):
            b, h, block = task_of(task_in(turn) - dealt, sample, blocks, batch, heads_q, heads_q, BY_SAMPLE, False)
            row0 = block * BLOCK_M
            hk = h // group
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k,
                SEQ_LENS, VARLEN,
            )  # fmt: skip
            q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, VARLEN)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
            dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, VARLEN)
            dq_base = base_of(dq_ptr, b, h, start_q, stride_dqb, stride_dqh, stride_dqm, VARLEN)
            lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
            delta_base = row_base_of(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
            spoiled = spoiled_rows(load_lines(dq_base, stride_dqm, row0, sq, HEAD_DIM, BLOCK_D, BLOCK_M))
            # Where the log-sum-exp or delta is NaN, so is all of a row, unless it sees nothing.
            lse_rows = load_row(lse_base, row0, sq, BLOCK_M)
            known = tl.where(lse_rows == lse_rows, load_row(delta_base, row0, sq, BLOCK_M), lse_rows)
            blind = sees_nothing(
                row0 + sk - sq, sk, window_left, window_right, BLOCK_M, HAS_LEFT, CAUSAL or HAS_RIGHT
            )  # fmt: skip
            spoiled = tl.where(known == known, spoiled, spoiled * blind)
            rows = 0
            if tl.sum(spoiled, 0) > 0.0:
                rows = tl.minimum(BLOCK_M, sq - row0)
            for i in range(row0, row0 + rows):
                old = load_line(dq_base, i, stride_dqm, HEAD_DIM, BLOCK_D)  # [BLOCK_D]
                left = tl.sum(nonfinite(old), 0)
                if left > 0.0:
                    q = load_line(q_base, i, stride_qm, HEAD_DIM, BLOCK_D).to(tl.float32)  # [BLOCK_D]
                    dout = load_line(dout_base, i, stride_dom, HEAD_DIM_V, BLOCK_DV).to(tl.float32)  # [BLOCK_DV]
                    lse = tl.load(lse_base + i)
                    delta = tl.load(delta_base + i)
                    slope = 0.0
                    if ALIBI != "":
                        slope = tl.load(slopes_ptr + b * stride_slope_b + h)
                    if DROPOUT:
                        delta = delta * keep_prob  # what dropout multiplies dp by is left to the end
                        row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                    lo, hi = range_of(i + sk - sq, sk, window_left, window_right, HAS_LEFT, CAUSAL or HAS_RIGHT)
                    dq = tl.zeros([BLOCK_D], tl.float32)
                    for n0 in range(lo, hi, LINES):
                        if left > 0.0:
                            k = load_lines(k_base, stride_kn, n0, hi, HEAD_DIM, BLOCK_D, LINES)  # [LINES, BLOCK_D]
                            s, capped = line_scores(
                                tl.sum(k * q[None, :], 1), positions(n0 - (i + sk - sq), LINES), slope,
                                sm_scale, softcap, softcap_minus, softcap_rate, SOFTCAP, ALIBI,
                            )  # fmt: skip
                            if BIAS != "":
                                s = s + key_bias(
                                    bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, i, n0, hi, LINES, BIAS
                                )
                            p = tl.exp(s - lse)  # [LINES]
                            v = load_lines(v_base, stride_vn, n0, hi, HEAD_DIM_V, BLOCK_DV, LINES)  # [LINES, BLOCK_DV]
                            dp = tl.sum(v * dout[None, :], 1)
                            if DROPOUT:
                                keep = kept_line(
                                    row_key0, row_key1, i, column_key0, column_key1, n0, keep_threshold, LINES
                                )
                                dp = tl.where(keep > 0.0, dp, 0.0)
                            ds = p * (dp - delta)
                            if SOFTCAP != "":
                                ds = ds * cap_derivative(capped, softcap_inverse)
                            ds = tl.where(positions(n0, LINES) < hi.to(tl.float32), ds, 0.0)
                            dq += tl.sum(k * ds[:, None], 0)
                            left = undecided(old, dq)
                    new = narrow(replaced(old, dq * grad_scale), dq_ptr.dtype.element_ty, INTERPRET)
                    store_line(dq_base, i, stride_dqm, new, HEAD_DIM, BLOCK_D)
        dealt += tasks
