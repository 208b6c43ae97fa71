"""FlashAttention-2 forward (Dao 2023, arXiv:2307.08691, algorithm 1) with block pointers or TMA descriptors.

Each program has BLOCK_M queries of one head and loops over the keys in blocks of BLOCK_N. Scores stay on chip, the
softmax is updated by rescaling (online softmax), and the output is normalised once at the end. Differences from the
paper: There are two loops, one over blocks that every query sees, without a mask, and one over blocks that a window,
the causal diagonal or the end of the sequence cuts. The running maximum starts at a finite number (LOWEST), so that no
difference of maxima is -inf minus -inf. Exponentials are base 2, with the scale folded into one multiply-add. Query
heads of a KV head (GQA) are neighbours in the grid, so their keys are in L2. Causal grids start with the longest rows.
Optional features are compile-time flags: a call without them runs none of their instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_mask import kept_pairs, key_loops, listed
from diyfa.backends.cuda.attention.clear import clear_others, clearing_programs
from diyfa.backends.cuda.attention.configs import AttentionConfig, key_columns, schedule
from diyfa.backends.cuda.attention.dots import dot, dot_add, dot_float8, round_to
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.eight_bits import final_sums, query_factors, tile_scores
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    TileConstants,
    bind_launch,
    feature_arguments,
    input_arguments,
    interleaved_heads,
    is_settled,
    pointers,
    softmax_scale,
    strides,
    tile_constants,
    tuned_launches,
)
from diyfa.backends.cuda.attention.scores import (
    bias_corner,
    captured_pointers,
    first_row,
    head_and_block,
    head_features,
    past_gap,
    scores_log2,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import (
    DESCRIPTOR,
    EQUAL,
    LARGEST_PRODUCT,
    LN2,
    LOG2E,
    LOWEST,
    PACKED,
    POINTER,
    cdiv,
    head_view,
    load_tile,
    padded_head_dim,
    store_tile,
)
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.eight_bits import EIGHT_BITS, WEIGHT_SHIFT
from diyfa.problem import AttentionProblem, AttentionTensors, Launch, cached_per_kind


@triton.jit
def online_softmax_update(s, m_i, l_i, acc, scale_log2, SHIFT: tl.constexpr = 0):
    """Update running maximum, sum and output for a block of scores s [BLOCK_M, BLOCK_N].

    Returns (p, m_i, l_i, acc). p: the block's weights relative to the new maximum. m_i is in units of log2, and starts
    at LOWEST. SHIFT: keep the maximum that much lower, so that weights are up to 2**SHIFT.
    """
    if SHIFT:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2 - SHIFT)  # [BLOCK_M]
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
    p = tl.math.exp2(s * scale_log2 - m_new[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.math.exp2(m_i - m_new)  # [BLOCK_M]
    return p, m_new, l_i * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def add_sink(sink, m_i, l_i, acc):
    """Update running maximum, sum and output for a sink [BLOCK_M], the score of a key without a value.

    Returns (m_i, l_i, acc). If the sink is the maximum its weight is exactly 1. A fused multiply-subtract would give
    the rounding error of the product instead. The product of the largest sinks overflows float32: see `row_lse`.
    """
    product = tl.where(sink < float("inf"), tl.minimum(sink, LARGEST_PRODUCT), sink) * LOG2E
    m_new = tl.maximum(m_i, product)
    weight = tl.math.exp2(tl.where(product == m_new, sink - sink, product - m_new))
    alpha = tl.math.exp2(m_i - m_new)
    return m_new, l_i * alpha + weight, acc * alpha[:, None]


@triton.jit
def row_lse(sink, m_i, l_i):
    """Return the log-sum-exp of rows with a positive sum, which includes the sink. Without sinks, `sink` is 0."""
    lse = (m_i + tl.math.log2(l_i)) * LN2
    return tl.where((sink > LARGEST_PRODUCT) & (sink < float("inf")), sink, lse)


@triton.jit
def _attend_blocks(
    sums,  # acc [BLOCK_M, BLOCK_DV] fp32, l_i and m_i [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    keys, values, row0, blocks, mask, block_mask, score, dropout, factors,
    MASKED: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of `blocks`, and return the sums. `blocks`, `block_mask`: as `key_loops` returns them.

    MASKED: compare positions, leave out the gap of `blocks`, and with a block mask (c.MASK_K) apply its bits. Without
    MASKED every query sees all keys of these blocks; of a block mask they may still extend beyond a shorter sequence,
    which CHECK_END hides. `factors`: those of float8 and int8 (`query_factors`).
    """
    acc, l_i, m_i = sums
    start, end, gap_at, gap = blocks
    list_ptr, view = block_mask
    scale, _, _, _ = score
    row_words, column_keys, threshold = dropout
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    PRECISE: tl.constexpr = q.dtype == tl.float32
    # The compiler must not move code out of the loop: the accumulator needs the registers.
    NO_LICM: tl.constexpr = c.FORM == DESCRIPTOR or c.MASK_K != 0
    CHECK_END: tl.constexpr = MASKED or (c.MASK_K != 0 and c.LENGTHS != EQUAL)
    corner = tile_corner(row0, start, score, c)  # pointer to the bias of the next block
    for start_n in tl.range(start, end, c.BLOCK_N, disable_licm=NO_LICM):
        block_corner = corner
        if c.MASK_K:
            start_n = listed(start_n, list_ptr, c.MASK_K)
            block_corner = tile_corner(row0, start_n, score, c)
        elif MASKED:
            start_n, block_corner = past_gap(start_n, corner, gap_at, gap, score, c)
        start_n = tl.multiple_of(start_n, c.BLOCK_N)
        offs_n = start_n + tl.arange(0, c.BLOCK_N)
        k = load_tile(keys, start_n, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, CHECK_END, FORM, c)
        s = dot(q, tl.trans(k), c.PRECISION)  # [BLOCK_M, BLOCK_N]
        # Factor from s to units of log2. `scores_log2` applies the scale to adjusted scores itself.
        scale_log2 = 1.0 if c.ADJUSTED else scale * LOG2E
        if c.EIGHT_BITS:
            s, scale_log2 = tile_scores(s, scale_log2, factors, start_n, c)
        if c.NEGATE:
            s = -s
        visible = True
        if CHECK_END:
            visible = visible_pairs(offs_m[:, None], offs_n[None, :], mask, True, c)
            if c.MASK_K and MASKED:
                visible = visible & kept_pairs(view, row0, start_n, offs_m[:, None], offs_n[None, :], c)
        if c.ADJUSTED:
            begins = (row0, start_n, block_corner)
            s, _saved = scores_log2(
                s, offs_m[:, None], offs_n[None, :], begins, mask, visible, score, CHECK_END, PRECISE, c
            )
        if CHECK_END:
            s = tl.where(visible, s, float("-inf"))
        p, m_i, l_i, acc = online_softmax_update(s, m_i, l_i, acc, scale_log2, c.WEIGHT_SHIFT)
        if c.DROPOUT:  # after the sum: weights are normalised by the sum without dropout
            keep = keep_tile(*row_words, *position_words(*column_keys, offs_n), threshold)
            p = tl.where(keep, p, 0.0)
        v = load_tile(values, start_n, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, CHECK_END, FORM, c)
        if c.WEIGHT_SHIFT:
            acc += dot_float8(round_to(p, v.dtype), v)
        else:
            acc = dot_add(round_to(p, v.dtype), v, acc, c.PRECISION)
        if c.BIAS:
            corner = bias_corner(corner, 0, c.BLOCK_N, score)
    return acc, l_i, m_i


@triton.jit(do_not_specialize=(*RUNTIME_SIZES, "batch"), do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr,
    k_rows_ptr, v_rows_ptr,  # for EDGE_FORM: addresses of the tensors that FORM reads through descriptors
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr, sinks_ptr,
    q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr,
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    mask_blocks_ptr, mask_bits_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_maskb, stride_maskh,
    heads_q,
    group,  # query heads per KV head
    batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, interleaved_heads,
    scale, softcap, threshold,
    keep_scale,  # 1 / (1 - p) of the dropout
    c: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BLOCK_M queries of a head; packed, the last programs clear rows of no sequence instead.

    1. Find the head, the sequence and its lengths, and load the queries.
    2. Attend to the blocks of keys that all these queries see, then to those that a mask or the sequence's end cuts.
    3. Add the sink, normalise, and write out and lse.
    """
    blocks_m = tl.cdiv(seqlen_q, c.BLOCK_M)
    pid = tl.program_id(0)
    if c.LENGTHS == PACKED:
        tiles = blocks_m * heads_q * batch
        if pid >= tiles:
            out, longest, clearing = (o_ptr, stride_om, stride_oh), blocks_m * c.BLOCK_M, tl.num_programs(0) - tiles
            clear_others(cu_seqlens_q_ptr, batch, longest, pid - tiles, clearing, out, lse_ptr, heads_q, total_q, c)
            return
    head, block_m = head_and_block(pid, blocks_m, batch * heads_q, interleaved_heads)
    if c.HAS_RIGHT:  # longest first, so that the last programs to start are short
        block_m = blocks_m - 1 - block_m
    b = head // heads_q
    h = head % heads_q
    hk = h // group
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    row0 = block_m * c.BLOCK_M
    # The grid covers the longest sequence. A shorter one has no rows in this block, not even rows to fill with zeros.
    if c.LENGTHS == PACKED and row0 >= n_queries:
        return
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    offs_m = row0 + tl.arange(0, c.BLOCK_M)
    k_position = (b, hk, first_k, n_keys)
    strides_k = (stride_kb, stride_kh, stride_kn)
    strides_v = (stride_vb, stride_vh, stride_vn)
    queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), (b, h, first_q, n_queries), c.FORM, c)
    keys = head_view(k_ptr, strides_k, k_position, c.FORM, c)
    values = head_view(v_ptr, strides_v, k_position, c.FORM, c)
    q = load_tile(queries, row0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
    mask_tensors = (mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh)
    full, masked, block_mask = key_loops(row0, mask, mask_tensors, b, h, seqlen_q, seqlen_k, c)
    # Full blocks of a block mask are read in EDGE_FORM, too, if sequences may end in them.
    FULL_FORM: tl.constexpr = c.EDGE_FORM if c.MASK_K != 0 else c.FORM

    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    captured = captured_pointers(score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr)
    features = (scale, softcap, per_head, bias, rng_state_ptr, captured)
    score, row_keys, column_keys = head_features(b, h, features, c)
    heads_kv = heads_q // group
    factors = (1.0, 0, 0)
    if c.EIGHT_BITS:
        pointers = (q_descale_ptr, k_descale_ptr, k_mean_ptr)
        factors = query_factors(q, pointers, (b, h, hk, row0), (heads_q, heads_kv, seqlen_q, seqlen_k), c)
    row_words = position_words(*row_keys, offs_m) if c.DROPOUT else row_keys
    dropout = (row_words, column_keys, threshold)
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
    l_i = tl.zeros([c.BLOCK_M], tl.float32)
    sums = (acc, l_i, tl.full([c.BLOCK_M], LOWEST, tl.float32))
    if FULL_FORM == c.FORM:
        sums = _attend_blocks(
            sums, q, keys, values, row0, full, mask, block_mask, score, dropout, factors, False, c.FORM, c
        )
    if c.FORM != c.EDGE_FORM:  # a masked block may extend beyond its sequence, whose end a descriptor does not know
        keys = head_view(k_rows_ptr, strides_k, k_position, c.EDGE_FORM, c)
        values = head_view(v_rows_ptr, strides_v, k_position, c.EDGE_FORM, c)
    if FULL_FORM != c.FORM:
        sums = _attend_blocks(
            sums, q, keys, values, row0, full, mask, block_mask, score, dropout, factors, False, FULL_FORM, c
        )
    sums = _attend_blocks(
        sums, q, keys, values, row0, masked, mask, block_mask, score, dropout, factors, True, c.EDGE_FORM, c
    )
    if c.EIGHT_BITS:
        _, _, row_offset = factors
        sums = final_sums(sums, scale, row_offset, (v_descale_ptr, v_mean_ptr), (b, hk, heads_kv), offs_m, mask, c)
    acc, l_i, m_i = sums
    sink = tl.zeros([c.BLOCK_M], tl.float32)
    if c.SINKS:  # last, so that the weight of a row's only key is exactly exp2(0) in the loops
        sink += tl.load(sinks_ptr + h)
        m_i, l_i, acc = add_sink(sink, m_i, l_i, acc)

    # A row that saw no key or is beyond its sequence has out 0 and lse +inf.
    has_keys = (l_i != 0.0) & (offs_m < n_queries)
    out = tl.where(has_keys[:, None], acc / tl.where(has_keys, l_i, 1.0)[:, None], 0.0)
    if c.DROPOUT:
        out *= keep_scale
    lse = tl.where(has_keys, row_lse(sink, m_i, tl.where(has_keys, l_i, 1.0)), float("inf"))
    n_rows = n_queries if c.LENGTHS == PACKED else seqlen_q  # packed, the next rows belong to another sequence
    lse_row = lse_ptr + first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
    tl.store(lse_row + offs_m, lse, mask=offs_m < n_rows)
    # Results are written through addresses in every form.
    rows = head_view(o_ptr, (stride_ob, stride_oh, stride_om), (b, h, first_q, n_rows), POINTER, c)
    store_tile(rows, out, row0, c.HEAD_DIM_V, c.FORM)


@dataclass(frozen=True, eq=False)
class ForwardConstants(TileConstants):
    """Constants of the forward kernels."""

    sinks: bool
    negate: bool  # products are negated (`softmax_scale`)
    eight_bits: bool = False  # the fields below are those of the problem
    q_descale: int = 0
    k_descale: int = 0
    v_descale: int = 0
    k_mean: bool = False
    v_mean: bool = False
    weight_shift: int = 0  # weights are scaled by 2**weight_shift, 0 unless v is float8


@cached_per_kind
def constants(problem: AttentionProblem, config: AttentionConfig, negate: bool) -> ForwardConstants:
    """Return the kernel's constants."""
    eight_bits = problem.dtype in EIGHT_BITS
    weight_shift = WEIGHT_SHIFT.get(problem.value_dtype or problem.dtype, 0) if eight_bits else 0
    given = tile_constants(problem, config) | {"eight_bits": eight_bits, "weight_shift": weight_shift}
    return ForwardConstants.read_from(problem, config, **given, negate=negate)


def make_launch(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, config: AttentionConfig
) -> Launch:
    """Return the launch that fills out and lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    scale, negate = softmax_scale(problem, tensors.sm_scale)
    block_d, block_dv = key_columns(problem), padded_head_dim(problem.head_dim_v)
    m, n = config.block_m, config.block_n
    blocks, heads = cdiv(problem.seqlen_q, m), problem.batch * problem.heads_q
    values = {
        **input_arguments(problem, config, q=(q, m, block_d), k=(k, n, block_d), v=(v, n, block_dv)),
        **pointers(o=out, lse=lse),
        "batch": problem.batch,
        **strides(problem.layout, q=q, k=k, v=v, o=out),
        **feature_arguments(problem, tensors, scale),
        "interleaved_heads": interleaved_heads(problem, config, blocks, heads, q.device),
    }
    grid = blocks * heads + clearing_programs(problem)
    return bind_launch(_fwd_kernel, grid, values, constants(problem, config, negate), schedule(config))


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse."""
    launches = tuned_launches("fwd", problem, lambda config: [make_launch(problem, tensors, out, lse, config)])
    return Pass(launches, is_settled=partial(is_settled, problem, "fwd"))
