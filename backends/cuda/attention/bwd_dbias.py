"""The gradient of attn_bias: dS, summed over the dimensions over which the bias was broadcast.

Each program adds up all dS of its entries of the bias, so sums have a fixed order and there are no atomics. Its loop
depends on the shape of the bias (REDUCE):

* NOTHING: the bias has both Sq and Sk. A program has a tile of it and loops over its samples and heads.
* QUERIES: one number for each key. A program has a block of keys and loops over the queries of one head.
* KEYS: one number for each query, or one for all. A program has a block of queries and loops over the keys of one head.

The last two write partial sums for each head, (B, H, Sk) or (B, H, Sq), which PyTorch adds up. Scores are computed
another time, but only for calls whose bias needs a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import key_ranges, query_ranges
from diyfa.backends.cuda.attention.block_mask import kept_pairs, mask_view
from diyfa.backends.cuda.attention.bwd_dq import score_gradient
from diyfa.backends.cuda.attention.configs import AttentionConfig, portable_config, schedule
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    AttentionConstants,
    attention_constants,
    bind_launch,
    pointers,
)
from diyfa.backends.cuda.attention.score_functions import SPELLING
from diyfa.backends.cuda.attention.scores import (
    captured_pointers,
    first_row,
    function_gradient,
    head_features,
    load_statistics,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import EQUAL, POINTER, cdiv, head_view, load_tile
from diyfa.problem import AttentionProblem, Launch
from diyfa.score_code import slope_source

NOTHING = tl.constexpr(0)
QUERIES = tl.constexpr(1)
KEYS = tl.constexpr(2)


@triton.jit(do_not_specialize=(*RUNTIME_SIZES, "steps", "heads_out"), do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _bwd_dbias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    lse_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr,
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    mask_blocks_ptr, mask_bits_ptr, dbias_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_maskb, stride_maskh,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale, softcap, threshold, keep_scale,
    stride_outb, stride_outh, stride_outm, stride_outn,
    heads_out,  # heads of the result: 1 if the bias is broadcast over them
    steps,  # tiles that a program adds up
    c: tl.constexpr,
):  # fmt: skip
    """Add up `steps` tiles of dS: for entries of the bias (NOTHING), or over the queries or keys of a head.

    `b_out`, `h_out`: sample and head of the result, of which a dimension of the bias may have only one. `b`, `h`: those
    of the tile at hand.
    """
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    blocks_n = tl.cdiv(seqlen_k, c.BLOCK_N)
    pid = tl.program_id(0)
    block_m = 0
    block_n = 0
    if c.REDUCE == NOTHING:
        block_m = pid % blocks_m
        block_n = (pid // blocks_m) % blocks_n
        pid = pid // (blocks_m * blocks_n)
    elif c.REDUCE == QUERIES:
        block_n = pid % blocks_n
        pid = pid // blocks_n
    else:
        block_m = pid % blocks_m
        pid = pid // blocks_m
    b_out = pid // heads_out
    h_out = pid % heads_out
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    # The loop omits tiles that no query of any head sees.
    first_step = pid * 0
    last_step = first_step + steps
    if c.REDUCE == NOTHING:
        if c.LENGTHS == EQUAL:
            mask = (seqlen_q, seqlen_k, seqlen_k - seqlen_q, window_left, window_right)
            begin, _, _, end = key_ranges(block_m * c.BLOCK_M, mask, c)
            is_visible = (block_n * c.BLOCK_N < end) & (block_n * c.BLOCK_N + c.BLOCK_N > begin)
            last_step = tl.where(is_visible, steps, 0)
    else:
        _, _, n_queries, n_keys = seq_info(b_out, lengths, c.LENGTHS)
        mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
        if c.REDUCE == QUERIES:
            begin, _, _, end = query_ranges(block_n * c.BLOCK_N, mask, False, False, c)
            first_step = begin // c.BLOCK_M
            last_step = tl.cdiv(end, c.BLOCK_M)
        else:
            begin, _, _, end = key_ranges(block_m * c.BLOCK_M, mask, c)
            first_step = begin // c.BLOCK_N
            last_step = tl.cdiv(end, c.BLOCK_N)
    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    captured = captured_pointers(score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr)
    features = (scale, softcap, per_head, bias, rng_state_ptr, captured)
    total = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
    for step in tl.range(first_step, last_step, disable_licm=True):
        b = b_out
        h = h_out
        tile_m = block_m
        tile_n = block_n
        if c.REDUCE == NOTHING:  # loop over the heads, then the samples, of a bias entry
            heads_per_bias = heads_q // heads_out
            h = h_out + step % heads_per_bias
            b = b_out + step // heads_per_bias
        elif c.REDUCE == QUERIES:
            tile_m = step
        else:
            tile_n = step
        hk = h // group
        row0 = tile_m * c.BLOCK_M
        col0 = tile_n * c.BLOCK_N
        first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
        tile_mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
        offs_m = row0 + tl.arange(0, c.BLOCK_M)
        offs_n = col0 + tl.arange(0, c.BLOCK_N)
        q_position = (b, h, first_q, n_queries)
        k_position = (b, hk, first_k, n_keys)
        queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), q_position, POINTER, c)
        gradients = head_view(do_ptr, (stride_dob, stride_doh, stride_dom), q_position, POINTER, c)
        keys = head_view(k_ptr, (stride_kb, stride_kh, stride_kn), k_position, POINTER, c)
        values = head_view(v_ptr, (stride_vb, stride_vh, stride_vn), k_position, POINTER, c)
        q = load_tile(queries, row0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, POINTER, c)
        do = load_tile(gradients, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, POINTER, c)
        k = load_tile(keys, col0, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, True, POINTER, c)
        v = load_tile(values, col0, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, True, POINTER, c)
        row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
        lse_log2, delta = load_statistics(lse_ptr, delta_ptr, row, offs_m, n_queries)
        score, row_keys, column_keys = head_features(b, h, features, c)
        begins = (row0, col0, tile_corner(row0, col0, score, c))
        rows, cols = offs_m[:, None], offs_n[None, :]
        visible = visible_pairs(rows, cols, tile_mask, True, c) & (offs_m < n_queries)[:, None]
        if c.MASK_K:
            tensors = (mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh)
            visible = visible & kept_pairs(mask_view(tensors, b, h, seqlen_q, seqlen_k, c), row0, col0, rows, cols, c)
        keep = True
        if c.DROPOUT:
            row_words, column_words = position_words(*row_keys, offs_m), position_words(*column_keys, offs_n)
            keep = keep_tile(*row_words, *column_words, threshold)
        ds, saved = score_gradient(
            q, k, v, do, lse_log2, delta, rows, cols, begins, visible, keep, keep_scale, tile_mask, score, True, c
        )
        total += function_gradient(ds, cols, saved, score, c)

    out_m = block_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    out_n = block_n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    base = dbias_ptr + b_out.to(tl.int64) * stride_outb + h_out.to(tl.int64) * stride_outh
    if c.REDUCE == NOTHING:
        addresses = base + out_m.to(tl.int64)[:, None] * stride_outm + out_n.to(tl.int64)[None, :] * stride_outn
        tl.store(addresses, total, mask=(out_m < seqlen_q)[:, None] & (out_n < seqlen_k)[None, :])
    elif c.REDUCE == QUERIES:
        tl.store(base + out_n, tl.sum(total, 0), mask=out_n < seqlen_k)
    else:
        tl.store(base + out_m, tl.sum(total, 1), mask=out_m < seqlen_q)


def config(problem: AttentionProblem) -> AttentionConfig | None:
    """Return the table's tile, or None if none fits."""
    return portable_config("dbias", problem)


@dataclass(frozen=True, eq=False)
class BiasGradientConstants(AttentionConstants):
    """Constants of the kernel."""

    reduce: int


def make_launch(problem: AttentionProblem, values: dict[str, Any], dbias: torch.Tensor) -> tuple[Launch, torch.Tensor]:
    """Return (launch, tensor that it fills): `dbias` itself or partial sums. `dbias` has the shape of attn_bias.

    `values`: `Backward.pointer_arguments`.
    """
    tile = config(problem)
    assert tile is not None, "unsupported() accepted a problem that no tile fits"
    shape = (1,) * (4 - dbias.dim()) + tuple(dbias.shape)
    batch, heads, seqlen_q, seqlen_k = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    blocks_m, blocks_n = cdiv(seqlen_q, tile.block_m), cdiv(seqlen_k, tile.block_n)
    if shape[2] == seqlen_q and shape[3] == seqlen_k:
        reduce, out = NOTHING, dbias.view(shape)
        grid, steps = blocks_m * blocks_n * shape[0] * shape[1], batch * heads // (shape[0] * shape[1])
        heads_out = shape[1]
    elif shape[3] == seqlen_k:
        reduce, out = QUERIES, dbias.new_empty((batch, heads, 1, seqlen_k), dtype=torch.float32)
        grid, steps, heads_out = blocks_n * batch * heads, blocks_m, heads
    else:
        reduce, out = KEYS, dbias.new_empty((batch, heads, seqlen_q, 1), dtype=torch.float32)
        grid, steps, heads_out = blocks_m * batch * heads, blocks_n, heads
    values = {
        **values,
        **pointers(dbias=out),
        **dict(zip(("stride_outb", "stride_outh", "stride_outm", "stride_outn"), out.stride(), strict=True)),
        "heads_out": heads_out, "steps": steps,
    }  # fmt: skip
    given = attention_constants(problem) | {"reduce": reduce.value}
    given["score_slope"] = slope_source(problem.score_fn, SPELLING)
    constants = BiasGradientConstants.read_from(problem, tile, **given)
    return bind_launch(_bwd_dbias_kernel, grid, values, constants, schedule(tile)), out


def add_up(sums: torch.Tensor, dbias: torch.Tensor) -> None:
    """Add up the launch's partial sums into `dbias`, unless they are `dbias` itself."""
    if sums.untyped_storage().data_ptr() != dbias.untyped_storage().data_ptr():
        shape = (1,) * (4 - dbias.dim()) + tuple(dbias.shape)
        broadcast = [i for i in range(4) if shape[i] == 1 and sums.shape[i] != 1]
        dbias.copy_((sums.sum(broadcast, keepdim=True) if broadcast else sums).view(dbias.shape))
