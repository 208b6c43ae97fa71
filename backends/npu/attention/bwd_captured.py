"""The gradients of a score function's captured tensors, for Ascend: dS times the derivatives by the loaded values.

A function may load any element for any pair, so these gradients are sums by atomics. In a kernel with matrix products
each atomic addition would be done twice: the compiler divides stores between the two vector cores, but lets both do all
atomic additions. So there are two kernels, and a workspace between them:

1. `_bwd_score_gradient_kernel` stores the scores that the function gets and ds = p · (dp - delta), the gradient of its
   result, 0 for hidden pairs;
2. `_bwd_captured_kernel`, on the vector cores, adds ds times each derivative at the offset of each load, in fp32.

A task is one block of BLOCK_M query rows of one head with all its keys. The workspace holds a number of tasks, and both
kernels are launched once for each such number of them. Sums have no fixed order, and deterministic calls are refused.
The tile is not tuned: the second run of a measurement would add twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.block_mask import listed, visited_keys
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.launch import AttentionConstants, attention_launch
from diyfa.backends.npu.attention.primitives import (
    block_at,
    dense_head_base,
    dot,
    head_base,
    load_lse,
    load_row,
    load_tile,
    score_tile,
    sequence_info,
)
from diyfa.backends.npu.attention.score_functions import (
    add_captured_gradients,
    function_scores,
    spelling,
)
from diyfa.backends.npu.runtime.compat import kernel
from diyfa.backends.npu.runtime.launch import bind_launch, vector_programs
from diyfa.backends.npu.tables.configs import AttentionTile, family_options
from diyfa.problem import AttentionProblem, Captured, Launch
from diyfa.score_code import JitSource, gradients_source
from diyfa.score_programs import MAX_TENSORS

WORKSPACE_BYTES = 256 * 2**20  # of scores and ds, unless one task needs more


@dataclass(frozen=True)
class ScoreGradientConstants(AttentionConstants):
    """Constants of `_bwd_score_gradient_kernel`."""

    masked: bool  # some tile of scores may need a mask


@dataclass(frozen=True)
class CapturedConstants(AttentionConstants):
    """Constants of `_bwd_captured_kernel`."""

    score_gradients: JitSource


@triton.jit
def task_rows(task, heads_q, seqlen_q, BLOCK_M: tl.constexpr):
    """Return (sample, query head, first query row) of a task."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    row0 = task % blocks * BLOCK_M
    h = task // blocks % heads_q
    b = task // blocks // heads_q
    return b, h, row0


@triton.jit
def task_keys(
    mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_mask_b, stride_mask_h,
    c: tl.constexpr,
):  # fmt: skip
    """Return `visited_keys` of a task: none (hi = lo) if row0 is beyond the sequence."""
    lists, list_ptr, full_end, lo, hi = visited_keys(
        mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_mask_b,
        stride_mask_h, c,
    )  # fmt: skip
    if not c.MASK_K:
        hi = tl.minimum(hi, seqlen_k)  # a packed sequence may be longer than the host knows
    return lists, list_ptr, full_end, lo, tl.where(row0 < sq, hi, lo)


@triton.jit
def workspace_tile(ptr, index, n0, stride_task, stride_row, c: tl.constexpr):
    """Return a block pointer to a tile of the launch's `index`-th task, at key n0 of its [BLOCK_M, stride_row]."""
    base = ptr + tl.cast(index, tl.int64) * stride_task
    return tl.make_block_ptr(
        base, (c.BLOCK_M, stride_row), (stride_row, 1), (0, n0), (c.BLOCK_M, c.BLOCK_N), (1, 0)
    )  # fmt: skip


@kernel
def _bwd_score_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    scores_ptr, ds_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h, stride_task, stride_row,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    first_task, n_tasks,
    c: tl.constexpr,
):  # fmt: skip
    """Store scores and ds of `n_tasks` tasks to the workspace, from task `first_task` on."""
    PAD_D: tl.constexpr = c.HEAD_DIM != c.BLOCK_D
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    group = heads_q // heads_kv
    for index in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        b, h, row0 = task_rows(first_task + index, heads_q, seqlen_q, c.BLOCK_M)
        start_q, start_k, sq, sk = sequence_info(
            seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
        )
        lists, list_ptr, full_end, lo, hi = task_keys(
            mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_mask_b,
            stride_mask_h, c,
        )  # fmt: skip
        hk = h // group
        rows = sq if c.VARLEN else seqlen_q  # rows after a packed sequence belong to the next one
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
                n0 = listed(step, list_ptr, c.MASK_K)
            k = load_tile(block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D), PAD_D)
            v = load_tile(block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV), PAD_DV)
            score, _ = score_tile(
                dot(q, tl.trans(k), c.INTERPRET), b, h, row0, n0, sq, sk,
                sm_scale, softcap, softcap_minus, softcap_rate,
                per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, False, c,
            )  # fmt: skip
            s, seen = function_scores(
                score, b, h, step >= full_end, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k,
                window_left, window_right, score_tensor0_ptr, score_tensor1_ptr,
                score_tensor2_ptr, score_tensor3_ptr, c.MASKED, False, c,
            )  # fmt: skip
            p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
            dp = dot(dout, tl.trans(v), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
            if c.DROPOUT:
                c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
            ds = p * (dp - delta[:, None])
            if c.DROPOUT:
                ds = ds * keep_scale
            ds = tl.where(seen > 0.0, ds, 0.0)  # products leave anything in hidden pairs
            tl.store(workspace_tile(scores_ptr, index, n0, stride_task, stride_row, c), score)
            tl.store(workspace_tile(ds_ptr, index, n0, stride_task, stride_row, c), ds)


@kernel
def _bwd_captured_kernel(
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    mask_blocks_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    scores_ptr, ds_ptr, total0_ptr, total1_ptr, total2_ptr, total3_ptr,
    stride_mask_b, stride_mask_h, stride_task, stride_row,
    heads_q, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    first_task, n_tasks,
    c: tl.constexpr,
):  # fmt: skip
    """Add the gradients of captured tensors of the tasks in the workspace."""
    for index in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        b, h, row0 = task_rows(first_task + index, heads_q, seqlen_q, c.BLOCK_M)
        _start_q, _start_k, sq, sk = sequence_info(
            seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
        )
        _lists, list_ptr, _full_end, lo, hi = task_keys(
            mask_blocks_ptr, b, h, row0, sq, sk, seqlen_q, seqlen_k, window_left, window_right, stride_mask_b,
            stride_mask_h, c,
        )  # fmt: skip
        for step in range(0, hi - lo, c.BLOCK_N):
            n0 = lo + step
            if c.MASK_K:
                n0 = listed(step, list_ptr, c.MASK_K)
            score = tl.load(workspace_tile(scores_ptr, index, n0, stride_task, stride_row, c))
            ds = tl.load(workspace_tile(ds_ptr, index, n0, stride_task, stride_row, c))
            add_captured_gradients(
                ds, score, b, h, row0, n0, sq, sk, window_right,
                score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
                total0_ptr, total1_ptr, total2_ptr, total3_ptr, c,
            )  # fmt: skip


def captured_launches(
    problem: AttentionProblem, values: dict[str, Any], totals: Captured, tile: AttentionTile
) -> Iterator[Launch]:
    """Yield the launches: of both kernels, for as many tasks as the workspace holds. They add to `totals`, float32.

    `values`: arguments and constants of all kernels of the backward pass.
    """
    rows, block = tile.block_m, problem.mask[1] if problem.mask else tile.block_n  # a list has whole blocks of a mask
    keys = triton.cdiv(problem.seqlen_k, block) * block
    tasks = triton.cdiv(problem.seqlen_q, rows) * problem.batch * problem.heads_q
    tasks_per_launch = max(1, min(tasks, WORKSPACE_BYTES // (8 * rows * max(keys, 1))))
    device = values["lse_ptr"].device
    scores, ds = (torch.empty(tasks_per_launch * rows * keys, dtype=torch.float32, device=device) for _ in range(2))
    learned_tensors = tuple([n in totals for n in range(MAX_TENSORS)])
    values = {
        **values,
        **{f"total{n}_ptr": totals.get(n) for n in range(MAX_TENSORS)},
        "scores_ptr": scores, "ds_ptr": ds, "stride_task": rows * keys, "stride_row": keys,
        "SCORE_GRADIENTS": gradients_source(problem.score_fn, learned_tensors, spelling(problem)),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip
    for first_task in range(0, tasks, tasks_per_launch):
        values |= {"first_task": first_task, "n_tasks": min(tasks_per_launch, tasks - first_task)}
        yield attention_launch(
            _bwd_score_gradient_kernel, ScoreGradientConstants, "score_gradient", problem, values, tile,
            values["n_tasks"],
        )  # fmt: skip
        grid = vector_programs(problem.arch, device, values["n_tasks"])
        yield bind_launch(_bwd_captured_kernel, CapturedConstants, grid, values, family_options(problem.arch))
