"""Backward attention for Ascend: FlashAttention-2 (arXiv:2307.08691, algorithm 2) as separate kernels without atomics.

1. `_bwd_preprocess_kernel`: delta = rowsum(dout * out) - dlse, so that the log-sum-exp has a gradient too;
2. `_bwd_dkdv_kernel`: one tile of keys, a loop over the query tiles of every query head of its group, so grouped-query
   gradients are summed in the accumulator and the result is the same from run to run;
3. `_bwd_dq_kernel`: one tile of query rows, a loop over the keys;
4. `_bwd_dbias_kernel`: one tile of attn_bias, a loop over what it is broadcast over, when it wants a gradient;
5. `_bwd_dsinks_kernel`: one program for each head, when there are sinks.

`_bwd_dkdv_kernel` works on transposed scores [BLOCK_N, BLOCK_M]: both products that accumulate take their left operand
as the vector cores leave it. See fwd.py for the persistent grid, the one loop and the padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.bias import Bias, as_read, as_written
from diyfa.backends.npu.compat import INTERPRETED, kernel, padded_head_dim
from diyfa.backends.npu.configs import (
    PREPROCESS_ROWS,
    attention_flags,
    attention_scalars,
    attention_sizes,
    attention_tile,
    bwd_tiles,
    preprocess_rows,
)
from diyfa.backends.npu.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.launch import addressed, cube_programs, device_guard, launch_options, vector_programs
from diyfa.backends.npu.primitives import (
    add_bias,
    base_of,
    dot,
    dot_add,
    drop_columns,
    first_of_next,
    key_range,
    load_lse,
    load_row,
    load_tile,
    mask_tile,
    narrow,
    row_base_of,
    row_bias,
    sequence,
    store_row,
    store_tile,
    task_of,
    tasks_of,
    tile_needs_mask,
)
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors


@kernel
def _bwd_preprocess_kernel(
    out_ptr, dout_ptr, dlse_ptr, seq_lens_ptr,
    delta_ptr,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    batch, heads_q, seqlen_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SEQ_LENS: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse. Packed sequences are one sample here: every row stands for itself."""
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    row_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * batch * heads_q, tl.num_programs(0)):
        b, h, block = task_of(task, 0, row_blocks, heads_q, False)
        row0 = block * BLOCK_M
        sq = seqlen_q
        if SEQ_LENS:
            sq = tl.minimum(tl.load(seq_lens_ptr + b), seqlen_q)
        row_base = (b * heads_q + h).to(tl.int64) * seqlen_q
        out_base = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        dout_base = dout_ptr + b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh
        out_block = tl.make_block_ptr(
            out_base, (sq, HEAD_DIM_V), (stride_om, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
        )
        dout_block = tl.make_block_ptr(
            dout_base, (sq, HEAD_DIM_V), (stride_dom, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
        )
        out = load_tile(out_block, PAD_DV).to(tl.float32)  # [BLOCK_M, BLOCK_DV]
        dout = load_tile(dout_block, PAD_DV).to(tl.float32)
        delta = tl.sum(out * dout, 1)
        if HAS_DLSE:
            delta = delta - load_row(dlse_ptr + row_base, row0, sq, BLOCK_M)
        store_row(delta_ptr + row_base, delta, row0, seqlen_q, BLOCK_M)


@triton.jit
def score_tile(
    s, rel, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_rate, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):
    """Scores from raw products, and for softcap the tanh whose derivative scales the gradient."""
    tanh = s
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp(s * softcap_rate) + 1.0)
        s = tanh * softcap
    else:
        s = s * sm_scale
    if ALIBI:
        s = s - slope * tl.abs(rel - (n0 - row0 - (sk - sq)).to(tl.float32))
    return s, tanh


@kernel
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dq_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_doubled, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PAD_D: tl.constexpr = HEAD_DIM != BLOCK_D
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    ROW_BIAS: tl.constexpr = BIAS == "q" or BIAS == "1"  # the same for all keys
    KEY_BIAS: tl.constexpr = BIAS == "qk" or BIAS == "k"
    group = heads_q // heads_kv
    first = tl.program_id(0)
    for sample in range(batch if VARLEN else 1):
        blocks, tasks = tasks_of(cu_seqlens_q_ptr, sample, total_q, seqlen_q, batch, heads_q, BLOCK_M, VARLEN)
        for task in range(first, tasks, tl.num_programs(0)):
            b, h, block = task_of(task, sample, blocks, heads_q, VARLEN)
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
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            lse = load_lse(lse_base, row0, sq, BLOCK_M)
            if ROW_BIAS:  # a weight is exp(s + bias - lse)
                lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, BLOCK_M, BIAS)
            delta = load_row(delta_base, row0, rows, BLOCK_M)
            slope = 0.0
            if ALIBI:
                slope = tl.load(slopes_ptr + b * stride_slope_b + h)
            if DROPOUT:
                delta = delta * keep_prob  # what dropout multiplies dp by is left to the end
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, BLOCK_M) + row0)
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for n0 in range(lo, hi, BLOCK_N):
                k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
                rel = (tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)
                s, tanh = score_tile(
                    dot(q, tl.trans(k), INTERPRET), rel, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_rate,
                    SOFTCAP, ALIBI,
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
                if SOFTCAP:
                    ds = ds * (1.0 - tanh * tanh)
                # Of ds, not of p: a product over fewer keys than the tile has leaves the other columns of its
                # accumulator as they were, so s and dp may hold anything there, NaN included.
                if MASKED:  # noqa: SIM102 - when compiled, then at run time
                    if tile_needs_mask(
                        row0, n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT
                    ):
                        rel = (tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)
                        cols = tl.arange(0, BLOCK_N)[None, :].to(tl.float32)
                        ds = mask_tile(
                            ds, rel, cols, 0.0, row0, n0, sq, sk, window_left, window_right, CAUSAL, HAS_LEFT, HAS_RIGHT
                        )
                dq = dot_add(narrow(ds, k.dtype, INTERPRET), k, dq, INTERPRET)
                k_block = tl.advance(k_block, (BLOCK_N, 0))
                v_block = tl.advance(v_block, (BLOCK_N, 0))
            # The accumulator of a loop that ran no iteration is not cleared.
            dq = tl.where(hi > lo, dq, 0.0) * grad_scale
            if SEQ_LENS:  # beyond the sequence a causal mask cuts nothing, not even what no product wrote
                real = ((tl.arange(0, BLOCK_M) + row0).to(tl.float32) < sq.to(tl.float32))[:, None]
                dq = tl.where(real, dq, 0.0)
            dq_block = tl.make_block_ptr(
                dq_base, (rows, HEAD_DIM), (stride_dqm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0)
            )
            store_tile(dq_block, narrow(dq, dq_ptr.dtype.element_ty, INTERPRET), PAD_D)
        first = first_of_next(first, tasks, tl.num_programs(0))


@kernel
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_doubled, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PAD_D: tl.constexpr = HEAD_DIM != BLOCK_D
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    ROW_BIAS: tl.constexpr = BIAS == "q" or BIAS == "1"  # the same for all keys
    KEY_BIAS: tl.constexpr = BIAS == "qk" or BIAS == "k"
    group = heads_q // heads_kv
    first = tl.program_id(0)
    for sample in range(batch if VARLEN else 1):
        blocks, tasks = tasks_of(cu_seqlens_k_ptr, sample, total_k, seqlen_k, batch, heads_kv, BLOCK_N, VARLEN)
        for task in range(first, tasks, tl.num_programs(0)):
            b, hk, block = task_of(task, sample, blocks, heads_kv, VARLEN)
            n0 = block * BLOCK_N
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, b, seqlen_q, seqlen_k, total_q, total_k,
                SEQ_LENS, VARLEN,
            )  # fmt: skip
            # The next rows of packed sequences belong to another one.
            rows = sq if VARLEN else seqlen_q
            keys = sk if VARLEN else seqlen_k
            offset = sk - sq
            # Query rows [lo, hi) that can see a key of this tile.
            lo = 0
            hi = sq
            if CAUSAL:
                lo = tl.maximum(0, n0 - offset) // BLOCK_M * BLOCK_M
            if HAS_RIGHT:
                lo = tl.maximum(0, n0 - offset - window_right) // BLOCK_M * BLOCK_M
            if HAS_LEFT:
                hi = tl.minimum(sq, n0 + BLOCK_N - offset + window_left)
            if SEQ_LENS:  # noqa: SIM102 - when compiled, then at run time
                if n0 >= sk:
                    hi = lo
            row_blocks = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_M)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, VARLEN)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, VARLEN)
            dk_base = base_of(dk_ptr, b, hk, start_k, stride_dkb, stride_dkh, stride_dkn, VARLEN)
            dv_base = base_of(dv_ptr, b, hk, start_k, stride_dvb, stride_dvh, stride_dvn, VARLEN)
            k_block = tl.make_block_ptr(k_base, (sk, HEAD_DIM), (stride_kn, 1), (n0, 0), (BLOCK_N, BLOCK_D), (1, 0))
            v_block = tl.make_block_ptr(v_base, (sk, HEAD_DIM_V), (stride_vn, 1), (n0, 0), (BLOCK_N, BLOCK_DV), (1, 0))
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
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
                if ALIBI:
                    slope = tl.load(slopes_ptr + b * stride_slope_b + h)
                rel = (tl.arange(0, BLOCK_M)[None, :] - tl.arange(0, BLOCK_N)[:, None]).to(tl.float32)
                s, tanh = score_tile(
                    dot(k, tl.trans(q), INTERPRET), rel, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_rate,
                    SOFTCAP, ALIBI,
                )  # fmt: skip
                if KEY_BIAS:
                    s = add_bias(
                        s, bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, row0, n0, sq, sk,
                        BLOCK_M, BLOCK_N, BIAS, True,
                    )  # fmt: skip
                p = tl.exp(s - lse[None, :])  # [BLOCK_N, BLOCK_M]
                if MASKED:  # noqa: SIM102 - when compiled, then at run time
                    if tile_needs_mask(
                        row0, n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT
                    ):
                        rel = (tl.arange(0, BLOCK_M)[None, :] - tl.arange(0, BLOCK_N)[:, None]).to(tl.float32)
                        cols = tl.arange(0, BLOCK_N)[:, None].to(tl.float32)
                        p = mask_tile(
                            p, rel, cols, 0.0, row0, n0, sq, sk, window_left, window_right, CAUSAL, HAS_LEFT, HAS_RIGHT
                        )
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
                if SOFTCAP:
                    ds = ds * (1.0 - tanh * tanh)
                ds = drop_columns(ds, row0, sq, BLOCK_M)
                dv = dot_add(narrow(kept, dout.dtype, INTERPRET), dout, dv, INTERPRET)
                dk = dot_add(narrow(ds, q.dtype, INTERPRET), q, dk, INTERPRET)
            # Nothing for keys that no row sees (an accumulator is not cleared by a loop of no iteration) and for keys
            # beyond the sequence.
            dk = tl.where(row_blocks > 0, dk, 0.0) * grad_scale
            dv = tl.where(row_blocks > 0, dv, 0.0)
            if DROPOUT:
                dv = dv * keep_scale
            if SEQ_LENS:
                real = ((tl.arange(0, BLOCK_N) + n0).to(tl.float32) < sk.to(tl.float32))[:, None]
                dk = tl.where(real, dk, 0.0)
                dv = tl.where(real, dv, 0.0)
            dk_block = tl.make_block_ptr(
                dk_base, (keys, HEAD_DIM), (stride_dkn, 1), (n0, 0), (BLOCK_N, BLOCK_D), (1, 0)
            )
            dv_block = tl.make_block_ptr(
                dv_base, (keys, HEAD_DIM_V), (stride_dvn, 1), (n0, 0), (BLOCK_N, BLOCK_DV), (1, 0)
            )
            store_tile(dk_block, narrow(dk, dk_ptr.dtype.element_ty, INTERPRET), PAD_D)
            store_tile(dv_block, narrow(dv, dv_ptr.dtype.element_ty, INTERPRET), PAD_DV)
        first = first_of_next(first, tasks, tl.num_programs(0))


@kernel
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, slopes_ptr, bias_ptr, rng_state_ptr,
    dbias_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dbias_b, stride_dbias_h, stride_dbias_m,
    stride_slope_b, stride_bias_b, stride_bias_h, stride_bias_m,
    sm_scale, softcap, softcap_doubled, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    own_batch, own_heads,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEQ_LENS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, DBIAS: tl.constexpr,
    DROPOUT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dbias = the sum of p · (dp - delta) over what the bias is broadcast over, in one order: no atomics.

    A program owns a tile of the bias (DBIAS says which dimensions it has, `own_batch` and `own_heads` how many samples
    and heads) and walks over the tiles of scores that it was added to.
    """
    PAD_D: tl.constexpr = HEAD_DIM != BLOCK_D
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    ROW_BIAS: tl.constexpr = BIAS == "q" or BIAS == "1"  # the same for all keys
    KEY_BIAS: tl.constexpr = BIAS == "qk" or BIAS == "k"
    row_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    key_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    group = heads_q // heads_kv
    own_rows = row_blocks if DBIAS == "qk" or DBIAS == "q" else 1
    own_keys = key_blocks if DBIAS == "qk" or DBIAS == "k" else 1
    # How many tiles of scores share a tile of the bias, by dimension: one where the bias has that dimension.
    shared_batch = batch // own_batch
    shared_heads = heads_q // own_heads
    shared_rows = row_blocks // own_rows
    shared_keys = key_blocks // own_keys
    for task in range(tl.program_id(0), own_batch * own_heads * own_rows * own_keys, tl.num_programs(0)):
        own_n = task % own_keys
        own_m = task // own_keys % own_rows
        own_h = task // own_keys // own_rows % own_heads
        own_b = task // own_keys // own_rows // own_heads
        steps = shared_batch * shared_heads * shared_rows * shared_keys
        if DBIAS == "qk" and not SEQ_LENS:  # a tile that no row sees a key of has nothing to sum
            lo, hi = key_range(
                own_m * BLOCK_M, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N,
                CAUSAL, HAS_LEFT, HAS_RIGHT, False,
            )  # fmt: skip
            if (own_n * BLOCK_N >= hi) | (own_n * BLOCK_N < lo):
                steps = 0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(steps):
            n0 = (own_n + step % shared_keys) * BLOCK_N
            row0 = (own_m + step // shared_keys % shared_rows) * BLOCK_M
            h = own_h + step // shared_keys // shared_rows % shared_heads
            b = own_b + step // shared_keys // shared_rows // shared_heads
            hk = h // group
            start_q, start_k, sq, sk = sequence(
                seq_lens_ptr, None, None, b, seqlen_q, seqlen_k, total_q, total_k, SEQ_LENS, False
            )
            q_base = base_of(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, False)
            k_base = base_of(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, False)
            v_base = base_of(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, False)
            dout_base = base_of(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, False)
            q_block = tl.make_block_ptr(q_base, (sq, HEAD_DIM), (stride_qm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0))
            dout_block = tl.make_block_ptr(
                dout_base, (sq, HEAD_DIM_V), (stride_dom, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
            )
            k_block = tl.make_block_ptr(k_base, (sk, HEAD_DIM), (stride_kn, 1), (n0, 0), (BLOCK_N, BLOCK_D), (1, 0))
            v_block = tl.make_block_ptr(v_base, (sk, HEAD_DIM_V), (stride_vn, 1), (n0, 0), (BLOCK_N, BLOCK_DV), (1, 0))
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            lse = load_lse(row_base_of(lse_ptr, b, h, 0, heads_q, seqlen_q, total_q, False), row0, sq, BLOCK_M)
            if ROW_BIAS:  # a weight is exp(s + bias - lse)
                lse = lse - row_bias(bias_ptr, b, h, stride_bias_b, stride_bias_h, row0, sq, BLOCK_M, BIAS)
            delta = load_row(
                row_base_of(delta_ptr, b, h, 0, heads_q, seqlen_q, total_q, False), row0, seqlen_q, BLOCK_M
            )
            slope = 0.0
            if ALIBI:
                slope = tl.load(slopes_ptr + b * stride_slope_b + h)
            rel = (tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)
            s, _ = score_tile(
                dot(q, tl.trans(k), INTERPRET), rel, row0, n0, sq, sk, slope, sm_scale, softcap, softcap_rate,
                SOFTCAP, ALIBI,
            )  # fmt: skip
            if KEY_BIAS:
                s = add_bias(
                    s, bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, row0, n0, sq, sk,
                    BLOCK_M, BLOCK_N, BIAS, False,
                )  # fmt: skip
            p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            dp = dot(dout, tl.trans(v), INTERPRET)  # [BLOCK_M, BLOCK_N]
            if DROPOUT:
                delta = delta * keep_prob  # what dropout multiplies dp by is left to the end
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, BLOCK_M) + row0)
                c0, c1 = position_words(column_key0, column_key1, tl.arange(0, BLOCK_N) + n0)
                dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
            ds = p * (dp - delta[:, None])
            if tile_needs_mask(
                row0, n0, sq, sk, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT
            ):
                rel = (tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]).to(tl.float32)
                cols = tl.arange(0, BLOCK_N)[None, :].to(tl.float32)
                ds = mask_tile(
                    ds, rel, cols, 0.0, row0, n0, sq, sk, window_left, window_right, CAUSAL, HAS_LEFT, HAS_RIGHT
                )
            if CAUSAL and SEQ_LENS:  # noqa: SIM102 - when compiled, then at run time
                if (
                    row0 + BLOCK_M > sq
                ):  # beyond the sequence a causal mask cuts nothing, not even what no product wrote
                    rows = tl.arange(0, BLOCK_M)[:, None].to(tl.float32)
                    ds = tl.where(rows < (sq - row0).to(tl.float32), ds, 0.0)
            acc += ds
        if DROPOUT:
            acc = acc * keep_scale
        out_base = dbias_ptr + own_b.to(tl.int64) * stride_dbias_b + own_h.to(tl.int64) * stride_dbias_h
        dtype = dbias_ptr.dtype.element_ty
        if DBIAS == "qk":
            block = tl.make_block_ptr(
                out_base, (seqlen_q, seqlen_k), (stride_dbias_m, 1), (own_m * BLOCK_M, own_n * BLOCK_N),
                (BLOCK_M, BLOCK_N), (1, 0),
            )  # fmt: skip
            store_tile(block, narrow(acc, dtype, INTERPRET), True)
        elif DBIAS == "k":
            store_row(out_base, narrow(tl.sum(acc, 0), dtype, INTERPRET), own_n * BLOCK_N, seqlen_k, BLOCK_N)
        elif DBIAS == "q":
            store_row(out_base, narrow(tl.sum(acc, 1), dtype, INTERPRET), own_m * BLOCK_M, seqlen_q, BLOCK_M)
        else:
            tl.store(out_base, narrow(tl.sum(tl.sum(acc, 1), 0), dtype, INTERPRET))


@kernel
def _bwd_dsinks_kernel(sinks_ptr, lse_ptr, delta_ptr, dsinks_ptr, batch, heads_q, seqlen_q, BLOCK_M: tl.constexpr):
    """dsink = -sum over (b, i) of exp(sink - lse) · delta: a sink takes weight from a row and brings no value.

    Packed sequences are one sample here. The delta of rows that are in no sequence, where lse is inf, may be anything.
    """
    for h in range(tl.program_id(0), heads_q, tl.num_programs(0)):
        sink = tl.load(sinks_ptr + h)
        total = tl.zeros([BLOCK_M], tl.float32)
        row_blocks = tl.cdiv(seqlen_q, BLOCK_M)
        for step in range(row_blocks * batch):
            b = step // row_blocks
            row0 = (step % row_blocks) * BLOCK_M
            base = (b * heads_q + h).to(tl.int64) * seqlen_q
            lse = load_row(lse_ptr + base, row0, seqlen_q, BLOCK_M)
            delta = load_row(delta_ptr + base, row0, seqlen_q, BLOCK_M)  # zero beyond the rows
            real = ((tl.arange(0, BLOCK_M) + row0).to(tl.float32) < seqlen_q.to(tl.float32)) & (lse != float("inf"))
            total -= tl.where(real, tl.exp(sink - lse) * delta, 0.0)
        tl.store(dsinks_ptr + h, tl.sum(total, 0))


def _flags(problem: AttentionProblem, kernel: str) -> dict[str, bool]:
    """The forward's flags but the sinks: a sink changes lse, and nothing else that the backward kernels read."""
    flags = attention_flags(problem, kernel)
    del flags["SINKS"]
    return flags


def _launch_dbias(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    lse: torch.Tensor,
    dout: torch.Tensor,
    delta: torch.Tensor,
    bias: Bias,
    dbias: torch.Tensor,
    stride: dict[str, tuple[int, ...]],
    feature_strides: tuple[int, ...],
    sizes: tuple[float, ...],
    shared: dict[str, object],
) -> None:
    """Fill the gradient of the bias."""
    q, k, v = tensors.q, tensors.k, tensors.v
    tile = attention_tile(problem, "dbias")
    written = as_written(dbias)
    assert written.tensor is not None
    shape = (1,) * (4 - dbias.dim()) + tuple(dbias.shape)
    own_batch, own_heads = shape[:2]
    tasks = own_batch * own_heads
    tasks *= triton.cdiv(problem.seqlen_q, tile.block_m) if "q" in written.dims else 1
    tasks *= triton.cdiv(problem.seqlen_k, tile.block_n) if "k" in written.dims else 1
    flags = _flags(problem, "dbias")
    del flags["VARLEN"], flags["MASKED"]  # packed sequences have no bias, and the last tile of keys is always masked
    _bwd_dbias_kernel[(cube_programs(problem.arch, q.device, tasks),)](
        q, k, v, dout, lse, delta, tensors.seq_lens, tensors.alibi_slopes, bias.tensor, tensors.rng_state,
        written.tensor,
        *stride["q"], *stride["k"], *stride["v"], *stride["dout"], *written.strides, *feature_strides,
        *sizes, own_batch, own_heads,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, DBIAS=written.dims, **shared, **flags,
        **launch_options(tile, problem.arch),
    )  # fmt: skip
    if written.tensor is not dbias:
        dbias.copy_(written.tensor)


def attention_bwd(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> None:
    """Launch the backward kernels, which fill the gradients.

    `dout` is shaped like `out`, `dlse` like `lse`; any strides but the last of `dout`.
    """
    batch, heads_q, seqlen_q = problem.batch, problem.heads_q, problem.seqlen_q
    # Kernels that treat each row for itself see packed sequences as one sample.
    row_sizes = (1, heads_q, problem.total_q) if problem.varlen else (batch, heads_q, seqlen_q)
    dq, dk, dv, dbias, dsinks = gradients
    delta = torch.empty_like(lse)
    dlse = None if dlse is None else dlse.contiguous()
    slopes = tensors.alibi_slopes
    stride = {name: addressed(x, problem.layout)[1] for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    q, stride["q"] = addressed(tensors.q, problem.layout)
    k, stride["k"] = addressed(tensors.k, problem.layout)
    v, stride["v"] = addressed(tensors.v, problem.layout)
    dout, stride["dout"] = addressed(dout, problem.layout)
    bias = as_read(tensors.attn_bias)
    feature_strides = (0 if slopes is None or slopes.dim() == 1 else slopes.stride(0), *bias.strides)
    shared: dict[str, object] = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "INTERPRET": INTERPRETED,
    }
    lengths = (tensors.seq_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    sizes = (*attention_scalars(problem, tensors.sm_scale, tensors.dropout_p), *attention_sizes(problem))
    tiles = bwd_tiles(problem)
    rows = preprocess_rows(problem)
    with device_guard(q):
        tasks = triton.cdiv(row_sizes[2], rows) * row_sizes[0] * heads_q
        _bwd_preprocess_kernel[(vector_programs(problem.arch, q.device, tasks),)](
            out, dout, dlse, tensors.seq_lens,
            delta,
            *stride["out"], *stride["dout"],
            *row_sizes,
            HEAD_DIM_V=problem.head_dim_v, BLOCK_DV=padded_head_dim(problem.head_dim_v), BLOCK_M=rows,
            SEQ_LENS=problem.seq_lens, HAS_DLSE=dlse is not None,
        )  # fmt: skip
        tile = tiles["dkdv"]
        tasks = triton.cdiv(problem.seqlen_k, tile.block_n) * batch * problem.heads_kv
        _bwd_dkdv_kernel[(cube_programs(problem.arch, q.device, tasks),)](
            q, k, v, dout, lse, delta, *lengths, slopes, bias.tensor, tensors.rng_state,
            dk, dv,
            *stride["q"], *stride["k"], *stride["v"], *stride["dout"], *stride["dk"], *stride["dv"],
            *feature_strides,
            *sizes,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, **shared, **_flags(problem, "dkdv"),
            **launch_options(tile, problem.arch),
        )  # fmt: skip
        tile = tiles["dq"]
        tasks = triton.cdiv(seqlen_q, tile.block_m) * batch * heads_q
        _bwd_dq_kernel[(cube_programs(problem.arch, q.device, tasks),)](
            q, k, v, dout, lse, delta, *lengths, slopes, bias.tensor, tensors.rng_state,
            dq,
            *stride["q"], *stride["k"], *stride["v"], *stride["dout"], *stride["dq"],
            *feature_strides,
            *sizes,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, **shared, **_flags(problem, "dq"),
            **launch_options(tile, problem.arch),
        )  # fmt: skip
        if dbias is not None:
            tensors = tensors._replace(q=q, k=k, v=v)
            _launch_dbias(problem, tensors, lse, dout, delta, bias, dbias, stride, feature_strides, sizes, shared)
        if dsinks is not None:
            _bwd_dsinks_kernel[(vector_programs(problem.arch, q.device, heads_q),)](
                tensors.sinks, lse, delta, dsinks, *row_sizes, BLOCK_M=PREPROCESS_ROWS
            )
