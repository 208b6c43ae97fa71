"""Forward attention for Ascend: FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithm 1) on cube and vector cores.

A task is one block of BLOCK_M query rows of one head. For each task a program

1. finds the sequence, its lengths, and the keys [lo, hi) that the block can see; loads q;
2. for each block of BLOCK_N keys: forms scores s = q kᵀ, scales or caps them, adds ALiBi and bias, masks them;
3. updates the online softmax: running maximum m_i, running sum l_i, weights p, and alpha, the rescale factor;
4. applies dropout to p, loads v, and accumulates acc = acc · alpha + p v;
5. after the loop adds the sink's weight to l_i, and stores out = acc / l_i (with dropout, also divided by 1 - p_drop)
   and lse = m_i + log(l_i).

Differences from a GPU kernel:

* The grid has at most one program per cube core. The launcher reserves cube-to-vector workspace for every program, and
  more programs than cores would run in a second wave. For packed sequences only blocks that exist are tasks.
* There is one loop over all key blocks. If MASKED, the mask is under a run-time `if`, unless ALWAYS_MASK
  (`primitives.masked`). With two loops (full blocks, then diagonal blocks) and square tiles the compiler would use only
  one of the two vector cores. With other tiles it uses both, but the two loops share the unified buffer of each, so
  tiles would have to be smaller.
* K is loaded as stored and transposed in `tl.dot(q, tl.trans(k))`: the cube instruction does this at no cost.
* Exponentials have base e: Ascend's exp2 is a multiplication and an exp.
* Every dimension that can overrun is loaded with zero padding, so rows of V beyond the keys bring no NaN.

With a block mask (MASK_K) the loop counts positions in a list of key blocks: see block_mask.py. With q and k of int8
(INT8) step 2 multiplies integers, and their factors and means come in as eight_bits.py says.

`per_head_ptr` holds ALiBi slopes. `configs.attention_scalars` defines the scalar arguments from sm_scale to grad_scale:
with softcap, products are multiplied by softcap_rate = 2 sm_scale / softcap and then capped. `primitives.locate_task`
explains `heads_in_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.block_mask import head_lists, keep_visible, listed, listed_keys
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.eight_bits import query_factors, scaled_products, with_means
from diyfa.backends.npu.attention.launch import AttentionConstants, attention_launch, call_values
from diyfa.backends.npu.attention.primitives import (
    block_at,
    count_tasks,
    dense_head_base,
    dot,
    dot_add,
    head_base,
    keep_first_rows,
    key_range,
    load_row,
    load_tile,
    locate_task,
    masked,
    narrow,
    rounds_before,
    row_bias,
    running_max,
    score_tile,
    sequence_info,
    store_row,
    store_tile,
    task_in_round,
)
from diyfa.backends.npu.attention.score_functions import function_scores
from diyfa.backends.npu.runtime.compat import kernel
from diyfa.backends.npu.runtime.launch import device_guard, tensor_arguments
from diyfa.backends.npu.runtime.tiles import chosen_tile, run_tiled
from diyfa.backends.npu.tables.configs import AttentionTile, fwd_tile
from diyfa.problem import AttentionProblem, AttentionTensors, Launch

# Initial running maximum. It is finite, so that exp(-inf - m) is 0 and not NaN for a row that has seen no key yet. No
# finite float32 is lower, so a bias that masks with float32's lowest value is not below it.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def online_softmax_update(s, m_i, l_i, INTERPRET: tl.constexpr):
    """Update the online softmax with a tile of scores [BLOCK_M, BLOCK_N]. Returns (p, alpha, m_i, l_i)."""
    m_new = running_max(m_i, tl.max(s, 1), INTERPRET)
    p = tl.exp(s - m_new[:, None])
    alpha = tl.exp(m_i - m_new)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@dataclass(frozen=True)
class ForwardConstants(AttentionConstants):
    """Constants of `_fwd_kernel`."""

    masked: bool  # some tile of scores may need a mask
    sinks: bool
    int8: bool  # q and k are int8; the fields below are those of the problem
    q_descale: int
    k_descale: int
    v_descale: int
    k_mean: bool
    v_mean: bool


@kernel
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, per_head_ptr, bias_ptr, rng_state_ptr, sinks_ptr,
    q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, heads_in_parallel,
    c: tl.constexpr,
):  # fmt: skip
    """Write out and lse, in the steps of the file's header.

    Rows of q, k, v and out lie at strides in elements over samples, heads and rows; packed (VARLEN), over heads and
    rows. lse: (B, H, Sq), packed (H, Tq). `window_left`, `window_right`: numbers of keys.
    """
    PAD_D: tl.constexpr = c.HEAD_DIM != c.BLOCK_D
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    ROW_BIAS: tl.constexpr = c.BIAS == "q" or c.BIAS == "1"  # the same for all keys
    group = heads_q // heads_kv
    BY_SAMPLE: tl.constexpr = c.VARLEN or c.SEQ_LENS
    first_task = 0  # tasks of earlier samples
    for sample in range(batch if BY_SAMPLE else 1):
        blocks, tasks = count_tasks(
            cu_seqlens_q_ptr, sample, total_q, seqlen_q, batch, heads_q, c.BLOCK_M, c.VARLEN, BY_SAMPLE
        )
        # Loop over the rounds in which this program's task belongs to this sample (`primitives.py`, tasks and rounds).
        for round_index in range(rounds_before(first_task), rounds_before(first_task + tasks)):
            task = task_in_round(round_index) - first_task
            b, h, block = locate_task(task, sample, blocks, batch, heads_q, heads_in_parallel, BY_SAMPLE, True)
            row0 = block * c.BLOCK_M
            hk = h // group
            start_q, start_k, sq, sk = sequence_info(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k, c
            )
            rows = sq if c.VARLEN else seqlen_q  # rows after a packed sequence belong to the next one
            if c.MASK_K:  # [lo, hi) are positions in the list; from full_end on they lie in partial blocks of the mask
                lists = head_lists(mask_blocks_ptr, b, h, stride_mask_b, stride_mask_h)
                keys, full_end, hi = listed_keys(lists, row0, seqlen_q, seqlen_k, c)
                lo = 0
            else:
                lo, hi = key_range(row0, sq, sk, window_left, window_right, c)
                lists, full_end = 0, 0
            q_base = head_base(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, c.VARLEN)
            k_base = head_base(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, c.VARLEN)
            v_base = head_base(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, c.VARLEN)
            out_base = head_base(out_ptr, b, h, start_q, stride_ob, stride_oh, stride_om, c.VARLEN)
            lse_base = dense_head_base(lse_ptr, b, h, start_q, heads_q, seqlen_q, total_q, c.VARLEN)
            q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
            k_block = block_at(k_base, sk, stride_kn, lo, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, lo, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
            l_i = tl.zeros([c.BLOCK_M], tl.float32)
            acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
            score_scale, score_rate = sm_scale, softcap_rate  # factor of products without softcap, with softcap
            if c.INT8:
                scale = sm_scale if c.SOFTCAP == "" else softcap_rate
                factor, offset = query_factors(
                    q, scale, q_descale_ptr, k_descale_ptr, k_mean_ptr, b, h, hk, row0, heads_q, heads_kv, seqlen_q, c
                )
                score_scale, score_rate = 1.0, 1.0  # `factor` [BLOCK_M] contains the scale
            if ROW_BIAS:
                bias = row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, c)
            if c.DROPOUT:
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
            for position in range(lo, hi, c.BLOCK_N):
                n0 = position
                if c.MASK_K:
                    n0 = listed(position, keys, c.MASK_K)
                    k = load_tile(block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D), PAD_D)
                else:
                    k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
                s = dot(q, tl.trans(k), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
                if c.INT8:
                    s = scaled_products(s, factor, offset, k_descale_ptr, b, hk, n0, heads_kv, seqlen_k, c)
                s, _capped = score_tile(
                    s, b, h, row0, n0, sq, sk, score_scale, softcap, softcap_minus, score_rate,
                    per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, False, c,
                )  # fmt: skip
                if ROW_BIAS:
                    s = s + bias[:, None]
                if c.SCORE_FN is not None:
                    s, _seen = function_scores(
                        s, b, h, position >= full_end, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k,
                        window_left, window_right, score_tensor0_ptr, score_tensor1_ptr,
                        score_tensor2_ptr, score_tensor3_ptr, c.MASKED, False, c,
                    )  # fmt: skip
                else:
                    if c.MASK_K:
                        is_partial = position >= full_end
                        s = keep_visible(
                            s, float("-inf"), is_partial, lists, mask_bits_ptr, row0, n0, seqlen_k, False, c
                        )
                    if c.MASKED:
                        s = masked(s, float("-inf"), row0, n0, sq, sk, window_left, window_right, False, c)
                p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, c.INTERPRET)
                if c.DROPOUT:  # drops weights only; l_i and lse stay without dropout
                    c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                    p = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), p, 0.0)
                if c.MASK_K:
                    v = load_tile(block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV), PAD_DV)
                else:
                    v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
                acc = acc * alpha[:, None]
                acc = dot_add(narrow(p, v.dtype, c.INTERPRET), v, acc, c.INTERPRET)
                if not c.MASK_K:
                    k_block = tl.advance(k_block, (c.BLOCK_N, 0))
                    v_block = tl.advance(v_block, (c.BLOCK_N, 0))
            if c.INT8:
                acc, m_i, l_i = with_means(acc, m_i, l_i, offset, v_descale_ptr, v_mean_ptr, b, hk, heads_kv, c)
            if c.SINKS:  # A key without a value. It comes last: the weight of a row's only key stays exp(0), exact.
                # Computed on vectors: the compiler passes an fp32 scalar to the cube core, which then waits for it.
                sink = tl.zeros([c.BLOCK_M], tl.float32) + load_row(sinks_ptr + h, 0, 1, 1)
                m_new = running_max(m_i, sink, c.INTERPRET)  # >= LOWEST: a sink of -inf adds 0, one of +inf gives NaN
                alpha = tl.exp(m_i - m_new)
                l_i = l_i * alpha + tl.exp(sink - m_new)
                # Without keys (hi <= lo) the loop has not written acc: all its rows become 0.
                acc = keep_first_rows(acc, tl.where(hi > lo, c.BLOCK_M, 0), c.BLOCK_M) * alpha[:, None]
                m_i = m_new
            # Rows that see no key and rows beyond the sequence get output 0 and lse +inf. If no loop iteration wrote
            # acc, which the compiler does not clear, the select drops it.
            is_row = (tl.arange(0, c.BLOCK_M) + row0).to(tl.float32) < sq.to(tl.float32)
            l_i = tl.where(is_row, l_i, 0.0)
            empty = l_i == 0.0
            safe_l = tl.where(empty, 1.0, l_i)
            out = tl.where(empty[:, None], 0.0, acc / safe_l[:, None])
            if c.DROPOUT:
                out = out * keep_scale
            lse = m_i + tl.log(safe_l)
            lse = tl.where(empty, float("inf"), lse)
            out_block = block_at(out_base, rows, stride_om, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
            store_tile(out_block, narrow(out, out_ptr.dtype.element_ty, c.INTERPRET), PAD_DV)
            store_row(lse_base, lse, row0, rows, c.BLOCK_M)
        first_task += tasks


def make_launch(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor,
    tile: AttentionTile | None = None,
) -> Launch:  # fmt: skip
    """Return the launch that fills out and lse. `tile` replaces the table's tile."""
    tile = tile or fwd_tile(problem)
    tasks = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.batch * problem.heads_q
    values = {**call_values(problem, tensors, "fwd"), **tensor_arguments(problem.layout, out=out), "lse_ptr": lse}
    return attention_launch(_fwd_kernel, ForwardConstants, "fwd", problem, values, tile, tasks)


def attention_fwd(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the forward kernel, which fills out (q's shape with v's head dim) and lse (`problem.lse_shape`, fp32)."""

    def launch(tile: AttentionTile) -> list[Launch]:
        return [make_launch(problem, tensors, out, lse, tile)]

    with device_guard(tensors.q):
        run_tiled(problem, "fwd", chosen_tile(problem, "fwd", launch), launch)
