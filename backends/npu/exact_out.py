"""The end of the forward pass for Ascend where a mask or dropout takes pairs out: rows of the output that are not
finite, formed anew (see exact.py). The log-sum-exp needs nothing: no product runs over what a mask hides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.bias import Bias
from diyfa.backends.npu.compat import INTERPRETED, kernel, padded_head_dim
from diyfa.backends.npu.configs import (
    attention_scalars,
    attention_sizes,
    exact_flags,
    exact_rows,
    may_leak,
)
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
    spoiled_rows,
    store_line,
    undecided,
)
from diyfa.backends.npu.launch import vector_programs
from diyfa.backends.npu.primitives import (
    base_of,
    load_row,
    narrow,
    row_base_of,
    sequence,
    task_in,
    task_of,
    tasks_of,
    turns_before,
)
from diyfa.problem import AttentionProblem, AttentionTensors


@kernel
def _exact_out_kernel(
    q_ptr, k_ptr, v_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr, lse_ptr,
    out_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of the output are looked at together; a row is formed anew from tiles of LINES keys."""
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
            out_base = base_of(out_ptr, b, h, start_q, stride_ob, stride_oh, stride_om, VARLEN)
            lse_base = row_base_of(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, VARLEN)
            spoiled = spoiled_rows(load_lines(out_base, stride_om, row0, sq, HEAD_DIM_V, BLOCK_DV, BLOCK_M))
            lse_rows = load_row(lse_base, row0, sq, BLOCK_M)
            spoiled = tl.where(lse_rows == lse_rows, spoiled, 0.0)  # else its scores are NaN, and so is all of it
            rows = 0
            if tl.sum(spoiled, 0) > 0.0:
                rows = tl.minimum(BLOCK_M, sq - row0)
            for i in range(row0, row0 + rows):
                old = load_line(out_base, i, stride_om, HEAD_DIM_V, BLOCK_DV)  # [BLOCK_DV]
                left = tl.sum(nonfinite(old), 0)
                if left > 0.0:
                    q = load_line(q_base, i, stride_qm, HEAD_DIM, BLOCK_D).to(tl.float32)  # [BLOCK_D]
                    lse = tl.load(lse_base + i)
                    slope = 0.0
                    if ALIBI != "":
                        slope = tl.load(slopes_ptr + b * stride_slope_b + h)
                    if DROPOUT:
                        row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                    lo, hi = range_of(i + sk - sq, sk, window_left, window_right, HAS_LEFT, CAUSAL or HAS_RIGHT)
                    out = tl.zeros([BLOCK_DV], tl.float32)
                    for n0 in range(lo, hi, LINES):
                        if left > 0.0:
                            k = load_lines(k_base, stride_kn, n0, hi, HEAD_DIM, BLOCK_D, LINES)  # [LINES, BLOCK_D]
                            s, _ = line_scores(
                                tl.sum(k * q[None, :], 1), positions(n0 - (i + sk - sq), LINES), slope,
                                sm_scale, softcap, softcap_minus, softcap_rate, SOFTCAP, ALIBI,
                            )  # fmt: skip
                            if BIAS != "":
                                s = s + key_bias(
                                    bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, i, n0, hi, LINES, BIAS
                                )
                            p = tl.exp(s - lse)  # [LINES]
                            p = tl.where(positions(n0, LINES) < hi.to(tl.float32), p, 0.0)
                            v = load_lines(v_base, stride_vn, n0, hi, HEAD_DIM_V, BLOCK_DV, LINES)  # [LINES, BLOCK_DV]
                            weighted = v * p[:, None]
                            if DROPOUT:  # a weight of 0 is not enough
                                keep = kept_line(
                                    row_key0, row_key1, i, column_key0, column_key1, n0, keep_threshold, LINES
                                )
                                kept = tl.broadcast_to(keep[:, None], [LINES, BLOCK_DV])
                                weighted = tl.where(kept > 0.0, weighted, 0.0)
                            out += tl.sum(weighted, 0)
                            left = undecided(old, out)
                    if DROPOUT:
                        out = out * keep_scale
                    new = narrow(replaced(old, out), out_ptr.dtype.element_ty, INTERPRET)
                    store_line(out_base, i, stride_om, new, HEAD_DIM_V, BLOCK_DV)
        dealt += tasks


def exact_out(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    strides: tuple[tuple[int, int, int], ...],
    bias: Bias,
) -> None:
    """Launch the kernel after those that filled out and lse, where it can have anything to do.

    `tensors` and `out` as kernels address them, with the strides of q, k, v and out.
    """
    if not may_leak(problem):
        return
    rows, lines = exact_rows(problem)
    tasks = triton.cdiv(problem.seqlen_q, rows) * problem.batch * problem.heads_q
    slopes = tensors.alibi_slopes
    _exact_out_kernel[(vector_programs(problem.arch, out.device, tasks),)](
        tensors.q, tensors.k, tensors.v,
        tensors.seq_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k, slopes, bias.tensor, tensors.rng_state, lse,
        out,
        *strides[0], *strides[1], *strides[2], *strides[3],
        0 if slopes is None or slopes.dim() == 1 else slopes.stride(0), *bias.strides,
        *attention_scalars(problem, tensors.sm_scale, tensors.dropout_p),
        *attention_sizes(problem),
        HEAD_DIM=problem.head_dim, HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded_head_dim(problem.head_dim), BLOCK_DV=padded_head_dim(problem.head_dim_v),
        BLOCK_M=rows, LINES=lines, BIAS=bias.dims, INTERPRET=INTERPRETED, **exact_flags(problem),
    )  # fmt: skip
