"""The gradients of a score function's captured tensors: dS times the derivatives by the loaded values.

Each program has a block of queries and loops over the keys that they see. For each block of keys it computes the scores
and dS another time. It adds dS times the derivatives to the *totals*, one fp32 tensor for each captured one, by
atomics: a function may load any element for any pair. So sums have no fixed order, and deterministic calls are refused.
The tile is not tuned: the second run of a measurement would add twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import key_ranges
from diyfa.backends.cuda.attention.block_mask import kept_pairs, listed, listed_keys, mask_view
from diyfa.backends.cuda.attention.bwd_dbias import config
from diyfa.backends.cuda.attention.bwd_dq import score_gradient
from diyfa.backends.cuda.attention.configs import schedule
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    AttentionConstants,
    attention_constants,
    bind_launch,
)
from diyfa.backends.cuda.attention.score_functions import SPELLING
from diyfa.backends.cuda.attention.scores import (
    captured_pointers,
    first_row,
    head_features,
    load_statistics,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import POINTER, cdiv, head_view, load_tile
from diyfa.problem import AttentionProblem, Captured, Launch
from diyfa.score_code import JitSource, gradients_source
from diyfa.score_programs import MAX_TENSORS

_TOTALS = tuple(f"total{n}_ptr" for n in range(MAX_TENSORS))


@triton.jit(do_not_specialize=RUNTIME_SIZES, do_not_specialize_on_alignment=(*UNALIGNED_POINTERS, *_TOTALS))
def _bwd_captured_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    lse_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr,
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    mask_blocks_ptr, mask_bits_ptr,
    total0_ptr, total1_ptr, total2_ptr, total3_ptr,  # fp32, None for tensors without a gradient
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_maskb, stride_maskh,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    scale, softcap, threshold, keep_scale,
    c: tl.constexpr,
):  # fmt: skip
    """Add the gradients of BLOCK_M queries of a head to the totals, in one loop that masks all blocks of keys."""
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    pid = tl.program_id(0)
    row0 = pid % blocks_m * c.BLOCK_M
    h = pid // blocks_m % heads_q
    b = pid // blocks_m // heads_q
    hk = h // group
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    if row0 >= n_queries:
        return
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    begin, _, _, end = key_ranges(row0, mask, c)
    if c.MASK_K:  # positions in the list of the queries' key blocks
        view = mask_view((mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh), b, h, seqlen_q, seqlen_k, c)
        list_ptr, _, end = listed_keys(view, row0, c)
        begin = 0
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    q_position = (b, h, first_q, n_queries)
    k_position = (b, hk, first_k, n_keys)
    queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), q_position, POINTER, c)
    gradients = head_view(do_ptr, (stride_dob, stride_doh, stride_dom), q_position, POINTER, c)
    keys = head_view(k_ptr, (stride_kb, stride_kh, stride_kn), k_position, POINTER, c)
    values = head_view(v_ptr, (stride_vb, stride_vh, stride_vn), k_position, POINTER, c)
    q = load_tile(queries, row0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, POINTER, c)
    do = load_tile(gradients, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, POINTER, c)
    row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    lse_log2, delta = load_statistics(lse_ptr, delta_ptr, row, offs_m, n_queries)
    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    captured = captured_pointers(score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr)
    totals = (total0_ptr, total1_ptr, total2_ptr, total3_ptr)
    features = (scale, softcap, per_head, bias, rng_state_ptr, captured)
    score, row_keys, column_keys = head_features(b, h, features, c)
    row_words = position_words(*row_keys, offs_m) if c.DROPOUT else row_keys
    for position in tl.range(begin, end, c.BLOCK_N, disable_licm=True):
        col0 = position
        if c.MASK_K:
            col0 = listed(position, list_ptr, c.MASK_K)
        offs_n = col0 + tl.arange(0, c.BLOCK_N)
        k = load_tile(keys, col0, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, True, POINTER, c)
        v = load_tile(values, col0, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, True, POINTER, c)
        rows, cols = offs_m[:, None], offs_n[None, :]
        visible = visible_pairs(rows, cols, mask, True, c)
        if c.MASK_K:
            visible = visible & kept_pairs(view, row0, col0, rows, cols, c)
        keep = True
        if c.DROPOUT:
            keep = keep_tile(*row_words, *position_words(*column_keys, offs_n), threshold)
        begins = (row0, col0, tile_corner(row0, col0, score, c))
        ds, saved = score_gradient(
            q, k, v, do, lse_log2, delta, rows, cols, begins, visible, keep, keep_scale, mask, score, True, c
        )
        _tanh, argument = saved
        s, positions, seen = argument  # of the score function
        c.SCORE_GRADIENTS(ds, s, b, h, positions, cols, seen, captured, totals)


@dataclass(frozen=True, eq=False)
class CapturedConstants(AttentionConstants):
    """Constants of the kernel."""

    score_gradients: JitSource


def make_launch(problem: AttentionProblem, values: dict[str, Any], captured: Captured) -> tuple[Launch, Captured]:
    """Return (launch, the totals by number of the captured tensor). `values`: `Backward.pointer_arguments`."""
    tile = config(problem)
    assert tile is not None, "unsupported() accepted a problem that no tile fits"
    totals = {n: torch.zeros_like(x, dtype=torch.float32) for n, x in captured.items()}
    values = {**values, **{name: totals.get(n) for n, name in enumerate(_TOTALS)}}
    learned_tensors = tuple([n in captured for n in range(MAX_TENSORS)])
    constants = CapturedConstants.read_from(
        problem, tile, **attention_constants(problem),
        score_gradients=gradients_source(problem.score_fn, learned_tensors, SPELLING),
    )  # fmt: skip
    grid = cdiv(problem.seqlen_q, tile.block_m) * problem.heads_q * problem.batch
    return bind_launch(_bwd_captured_kernel, grid, values, constants, schedule(tile)), totals


def round_totals(totals: Captured, captured: Captured) -> None:
    """Write the totals to the gradients `captured`, rounded to their dtypes."""
    for n, x in captured.items():
        x.copy_(totals[n])
