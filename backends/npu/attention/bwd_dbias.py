"""Gradient of an attn_bias that differs from key to key, for Ascend.

A task is one tile of the bias. Its program loops over the tiles of scores that this tile was broadcast to. For a bias
that is the same for all keys, bwd_dbias_rows.py needs no tiles.
"""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.attention.block_mask import EMPTY, block_code, head_lists, keep_visible
from diyfa.backends.npu.attention.dropout import head_keys, keep_tile, position_words
from diyfa.backends.npu.attention.primitives import (
    block_at,
    dense_head_base,
    dot,
    head_base,
    key_range,
    load_lse,
    load_row,
    load_tile,
    masked,
    narrow,
    rounds_before,
    score_tile,
    sequence_info,
    store_row,
    store_tile,
    task_in_round,
)
from diyfa.backends.npu.attention.score_functions import function_gradient, function_scores
from diyfa.backends.npu.runtime.compat import kernel


@kernel
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr,
    seq_lens_ptr, per_head_ptr, bias_ptr, rng_state_ptr,
    mask_blocks_ptr, mask_bits_ptr, score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    dbias_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dbias_b, stride_dbias_h, stride_dbias_m,
    stride_per_head_b, stride_bias_b, stride_bias_h, stride_bias_m,
    stride_mask_b, stride_mask_h,
    sm_scale, softcap, softcap_minus, softcap_inverse, softcap_rate, keep_threshold, keep_prob, keep_scale, grad_scale,
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    bias_batch, bias_heads,
    c: tl.constexpr,
):  # fmt: skip
    """Write dbias: the sum of p · (dp - delta) over the dimensions along which the bias is broadcast.

    The order of the sum is fixed, and there are no atomics. BIAS: the bias's dimensions in a tile, "qk" or "k".
    `bias_batch`, `bias_heads`: its number of samples and of heads, 1 if broadcast.
    """
    PAD_D: tl.constexpr = c.HEAD_DIM != c.BLOCK_D
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    row_blocks = tl.cdiv(seqlen_q, c.BLOCK_M)
    key_blocks = tl.cdiv(seqlen_k, c.BLOCK_N)
    group = heads_q // heads_kv
    bias_row_blocks = row_blocks if c.BIAS == "qk" else 1
    # Number of score tiles for one tile of the bias, by dimension: 1 if the bias has that dimension.
    samples_per_bias = batch // bias_batch
    heads_per_bias = heads_q // bias_heads
    row_blocks_per_bias = row_blocks // bias_row_blocks
    for round_index in range(rounds_before(bias_batch * bias_heads * bias_row_blocks * key_blocks)):
        task = task_in_round(round_index)
        bias_n = task % key_blocks
        bias_m = task // key_blocks % bias_row_blocks
        bias_h = task // key_blocks // bias_row_blocks % bias_heads
        bias_b = task // key_blocks // bias_row_blocks // bias_heads
        steps = samples_per_bias * heads_per_bias * row_blocks_per_bias
        if c.BIAS == "qk" and not c.SEQ_LENS:  # skip a tile if no row sees a key of it
            lo, hi = key_range(bias_m * c.BLOCK_M, seqlen_q, seqlen_k, window_left, window_right, c)
            if (bias_n * c.BLOCK_N >= hi) | (bias_n * c.BLOCK_N < lo):
                steps = 0
        acc = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
        for step in range(steps):
            n0 = bias_n * c.BLOCK_N
            row0 = (bias_m + step % row_blocks_per_bias) * c.BLOCK_M
            h = bias_h + step // row_blocks_per_bias % heads_per_bias
            b = bias_b + step // row_blocks_per_bias // heads_per_bias
            hk = h // group
            start_q, start_k, sq, sk = sequence_info(
                seq_lens_ptr, None, None, b, seqlen_q, seqlen_k, total_q, total_k, c
            )
            q_base = head_base(q_ptr, b, h, start_q, stride_qb, stride_qh, stride_qm, False)
            k_base = head_base(k_ptr, b, hk, start_k, stride_kb, stride_kh, stride_kn, False)
            v_base = head_base(v_ptr, b, hk, start_k, stride_vb, stride_vh, stride_vn, False)
            dout_base = head_base(dout_ptr, b, h, start_q, stride_dob, stride_doh, stride_dom, False)
            q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
            dout_block = block_at(dout_base, sq, stride_dom, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
            k_block = block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            lse = load_lse(dense_head_base(lse_ptr, b, h, 0, heads_q, seqlen_q, total_q, False), row0, sq, c.BLOCK_M)
            delta = load_row(
                dense_head_base(delta_ptr, b, h, 0, heads_q, seqlen_q, total_q, False), row0, seqlen_q, c.BLOCK_M
            )
            s, _ = score_tile(
                dot(q, tl.trans(k), c.INTERPRET), b, h, row0, n0, sq, sk,
                sm_scale, softcap, softcap_minus, softcap_rate,
                per_head_ptr, stride_per_head_b, bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, False, c,
            )  # fmt: skip
            lists, code = 0, 0
            if c.MASK_K:
                lists = head_lists(mask_blocks_ptr, b, h, stride_mask_b, stride_mask_h)
                code = block_code(lists, row0, n0, seqlen_k, c)
            if c.SCORE_FN is not None:
                score = s
                s, seen = function_scores(
                    s, b, h, code >= 0, lists, mask_bits_ptr, row0, n0, sq, sk, seqlen_k,
                    window_left, window_right, score_tensor0_ptr, score_tensor1_ptr,
                    score_tensor2_ptr, score_tensor3_ptr, True, False, c,
                )  # fmt: skip
            p = tl.exp(s - lse[:, None])  # [BLOCK_M, BLOCK_N]
            dout = load_tile(dout_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            dp = dot(dout, tl.trans(v), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
            if c.DROPOUT:
                delta = delta * keep_prob  # dp is not scaled: 1 / keep_prob follows after the loop
                row_key0, row_key1, column_key0, column_key1 = head_keys(rng_state_ptr, b, h, c.DROPOUT_ORIGINS)
                r0, r1 = position_words(row_key0, row_key1, tl.arange(0, c.BLOCK_M) + row0)
                c0, c1 = position_words(column_key0, column_key1, tl.arange(0, c.BLOCK_N) + n0)
                dp = tl.where(keep_tile(r0, r1, c0, c1, keep_threshold), dp, 0.0)
            ds = p * (dp - delta[:, None])
            if c.MASK_K:  # noqa: SIM102
                if code == EMPTY:
                    ds = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
            if c.SCORE_FN is not None:
                ds = function_gradient(
                    ds, score, seen, b, h, row0, n0, sq, sk, window_right,
                    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr, False, c,
                )  # fmt: skip
            else:
                if c.MASK_K:
                    ds = keep_visible(ds, 0.0, code >= 0, lists, mask_bits_ptr, row0, n0, seqlen_k, False, c)
                ds = masked(ds, 0.0, row0, n0, sq, sk, window_left, window_right, False, c)
            # Masks do not hide everything beyond the sequence: neither what no product wrote, nor 0 times a NaN. This
            # select is unconditional, and in this form: else AscendNPU IR 1.1.0 does not pipeline the loop.
            is_row = (tl.arange(0, c.BLOCK_M) + row0).to(tl.float32) < sq.to(tl.float32)
            ds = tl.where(is_row[:, None], ds, 0.0)
            acc += ds
        if c.DROPOUT:
            acc = acc * keep_scale
        out_base = dbias_ptr + bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h
        dtype = dbias_ptr.dtype.element_ty
        if c.BIAS == "qk":
            block = tl.make_block_ptr(
                out_base, (seqlen_q, seqlen_k), (stride_dbias_m, 1), (bias_m * c.BLOCK_M, bias_n * c.BLOCK_N),
                (c.BLOCK_M, c.BLOCK_N), (1, 0),
            )  # fmt: skip
            store_tile(block, narrow(acc, dtype, c.INTERPRET), True)
        else:
            store_row(out_base, narrow(tl.sum(acc, 0), dtype, c.INTERPRET), bias_n * c.BLOCK_N, seqlen_k, c.BLOCK_N)
