"""The gradients of a score function's captured tensors, for Ascend: dS times the derivatives by the loaded values.

A task is one block of BLOCK_M query rows of one head, as in bwd_dq.py. For each tile of scores its program computes

    ds = p · (dp - delta)               the gradient of the function's result; 0 for hidden pairs

and adds ds times each derivative to the gradients, in fp32, by atomics: a function may load any element for any pair. So
sums have no fixed order, and deterministic calls are refused. The kernel has one tile, which is not tuned: a second run
would add twice.

The compiler would have both vector cores add the whole tile. So it may not share the kernel between them, and the work
of the second one is masked (`score_functions.add_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.block_mask import head_lists, listed, listed_keys
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.launch import AttentionConstants, attention_launch
from diyfa.backends.npu.attention.primitives import (
    block_at,
    count_tasks,
    dense_head_base,
    dot,
    head_base,
    key_range,
    load_lse,
    load_row,
    load_tile,
    locate_task,
    rounds_before,
    score_tile,
    sequence_info,
    task_in_round,
)
from diyfa.backends.npu.attention.score_functions import (
    SPELLING,
    add_captured_gradients,
    function_scores,
    visible_pairs,
)
from diyfa.backends.npu.runtime.compat import kernel
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.problem import AttentionGradients, AttentionProblem, Launch
from diyfa.score_code import JitSource, gradients_source
from diyfa.score_functions import MAX_TENSORS


@dataclass(frozen=True)
class CapturedConstants(AttentionConstants):
    """Constants of `_bwd_captured_kernel`."""

    masked: bool  # some tile of scores may need a mask
    score_gradients: JitSource


@kernel
def _bwd_captured_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    total0_ptr, total1_ptr, total2_ptr, total3_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, heads_in_parallel,
    c: tl.constexpr,
):  # fmt: skip
    PAD_D: tl.constexpr = c.HEAD_DIM != c.BLOCK_D
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
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
            if c.MASK_K:  # positions in the list of the block's keys
                lists = head_lists(mask_blocks_ptr, b, h, stride_mask_b, stride_mask_h)
                keys, full, hi = listed_keys(lists, row0, seqlen_q, seqlen_k, c)
                lo = 0
            else:
                lo, hi = key_range(row0, sq, sk, window_left, window_right, c)
                lists, full = 0, 0
            q_base = head_base(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, c.VARLEN)
            k_base = head_base(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, c.VARLEN)
            v_base = head_base(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, c.VARLEN)
            dout_base = head_base(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, c.VARLEN)
            lse_base = dense_head_base(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
            delta_base = dense_head_base(delta_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
            q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
            dout_block = block_at(dout_base, sq, stride_dom, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            lse = load_lse(lse_base, row0, sq, c.BLOCK_M)
            delta = load_row(delta_base, row0, rows, c.BLOCK_M)
            if c.DROPOUT:
                delta = delta * keep_prob  # dp is not scaled: keep_scale follows
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
            for step in range(0, hi - lo, c.BLOCK_N):
                n0 = lo + step
                if c.MASK_K:
                    n0 = listed(step, keys, c.MASK_K)
                k = load_tile(block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D), PAD_D)
                v = load_tile(block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV), PAD_DV)
                score, _ = score_tile(
                    dot(q, tl.trans(k), c.INTERPRET), b, h, row0, n0, sq, sk,
                    sm_scale, softcap, softcap_minus, softcap_rate,
                    per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, False, c,
                )  # fmt: skip
                seen = visible_pairs(
                    step >= full, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k, window_left, window_right,
                    c.MASKED, False, c,
                )  # fmt: skip
                s = function_scores(
                    score, seen, b, h, row0, n0, sq, sk,
                    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr, False, c,
                )  # fmt: skip
                p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
                dp = dot(dout, tl.trans(v), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
                if c.DROPOUT:
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                    dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
                ds = p * (dp - delta[:, None])
                if c.DROPOUT:
                    ds = ds * keep_scale
                add_captured_gradients(
                    ds, score, seen, b, h, row0, n0, sq, sk,
                    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
                    total0_ptr, total1_ptr, total2_ptr, total3_ptr, c,
                )  # fmt: skip
        first_task += tasks


# Index of a captured tensor -> its gradient.
Captured = dict[int, torch.Tensor]


def learned(gradients: AttentionGradients) -> Captured:
    """Return the gradients of captured tensors that are wanted, by the index of the tensor."""
    buffers = {n: getattr(gradients, f"dscore{n}") for n in range(MAX_TENSORS)}
    return {n: x for n, x in buffers.items() if x is not None}


def captured_launch(
    problem: AttentionProblem, values: dict[str, Any], captured: Captured, tile: AttentionTile
) -> Launch:
    """Return the launch. It adds to `total0_ptr`, … in float32. `values`: arguments and constants of all kernels."""
    totals = {n: torch.zeros_like(x, dtype=torch.float32) for n, x in captured.items()}
    wanted = tuple([n in captured for n in range(MAX_TENSORS)])
    values = {
        **values,
        **{f"total{n}_ptr": totals.get(n) for n in range(MAX_TENSORS)},
        "SCORE_GRADIENTS": gradients_source(problem.score_fn, wanted, SPELLING),
    }
    tasks = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.batch * problem.heads_q
    launch = attention_launch(_bwd_captured_kernel, CapturedConstants, "captured", problem, values, tile, tasks)
    return launch._replace(options={**launch.options, "enable_auto_bind_sub_block": False})
