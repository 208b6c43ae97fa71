"""dK and dV: each program has a block of keys and loops over the queries of a group or subgroup (`bwd_partials.py`).

Scores are computed transposed, [BLOCK_N, BLOCK_M], so that P and dS are left operands of the products that accumulate.
Grouped heads are summed in the accumulators: no atomics, equal bits in every run. See bwd.py for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import query_ranges
from diyfa.backends.cuda.attention.block_mask import kept_pairs, listed, listed_queries, mask_view
from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to
from diyfa.backends.cuda.attention.dropout import keep_tile, position_words
from diyfa.backends.cuda.attention.launch import RUNTIME_SIZES, UNALIGNED_POINTERS
from diyfa.backends.cuda.attention.scores import (
    captured_pointers,
    first_row,
    function_gradient,
    head_and_block,
    head_features,
    product_gradient,
    scores_log2,
    tile_corner,
    visible_pairs,
)
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import (
    DESCRIPTOR,
    EQUAL,
    LOG2E,
    PACKED,
    POINTER,
    head_view,
    load_tile,
    store_tile,
)


@triton.jit
def _statistics(lse_row, delta_row, offs_m, n_queries):
    """Return (lse, delta) of queries offs_m [BLOCK_M]. Beyond the end, weights are exp(s - inf) = 0.

    They are loaded as matrices of one column and summed over it, which the compiler does once: one load per thread. It
    would load a vector in the layout of the scores, where each thread has a quarter of it: BLOCK_M / 4 loads and masks.
    """
    rows = offs_m[:, None]  # [BLOCK_M, 1]
    column = rows + tl.arange(0, 1)[None, :]
    lse = tl.load(lse_row + column, mask=rows < n_queries, other=float("inf"))
    delta = tl.load(delta_row + column, mask=rows < n_queries, other=0.0)
    return tl.sum(lse, 1), tl.sum(delta, 1)


@triton.jit
def _dkdv_blocks(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_DV] fp32
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_DV]
    queries, gradients, statistics, col0, blocks, mask, block_mask, score, dropout,
    MASKED: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what queries [start, end) of one head contribute. `blocks`: (start, end, gap_at, gap).

    * MASKED: compare positions, and leave out the `gap` queries from `gap_at` on, which are the full blocks. Positions
      beyond the keys are not compared: they reach only their own rows of dk and dv, which the kernel clears. With a
      block mask, apply its bits, too.
    * With a block mask (c.MASK_Q), [start, end) are positions in a list of queries, and `block_mask` is (list, view).
    * EDGES: FORM does not know where a sequence ends, so only blocks inside it are full. CHECK_ROWS: rows of q and dO
      beyond the sequence are read as zeros. Their weights are exp(s - inf) = 0 in any case.
    * AHEAD: load statistics one block ahead, which removes most spills of loops with wgmma and adds some to others.

    The compiler must not move code out of the loops over queries and heads: the accumulators need the registers.
    """
    lse_row, delta_row = statistics
    start, end, gap_at, gap = blocks
    list_ptr, view = block_mask
    n_queries, _, _, _, _ = mask
    row_keys, column_words, threshold, keep_scale = dropout
    offs_n = col0 + tl.arange(0, c.BLOCK_N)
    PRECISE: tl.constexpr = k.dtype == tl.float32
    AHEAD: tl.constexpr = c.FORM == DESCRIPTOR and c.MASK_Q == 0
    EDGES: tl.constexpr = c.FORM != c.EDGE_FORM
    CHECK_ROWS: tl.constexpr = MASKED or not EDGES or c.MASK_Q != 0
    HAS_GAP: tl.constexpr = MASKED and (c.HAS_LEFT or EDGES) and c.MASK_Q == 0
    if AHEAD:
        first_m = start
        if HAS_GAP:
            first_m += tl.where(start >= gap_at, gap, 0)
        next_lse, next_delta = _statistics(lse_row, delta_row, first_m + tl.arange(0, c.BLOCK_M), n_queries)
    for start_m in tl.range(start, end, c.BLOCK_M, disable_licm=True):
        next_m = start_m + c.BLOCK_M
        if HAS_GAP:
            start_m += tl.where(start_m >= gap_at, gap, 0)
            next_m += tl.where(next_m >= gap_at, gap, 0)
        if c.MASK_Q:
            start_m = listed(start_m, list_ptr, c.MASK_Q)
        start_m = tl.multiple_of(start_m, c.BLOCK_M)
        offs_m = start_m + tl.arange(0, c.BLOCK_M)
        if AHEAD:  # the compiler itself would start these loads only where it waits for them
            lse, delta = next_lse, next_delta
            next_lse, next_delta = _statistics(lse_row, delta_row, next_m + tl.arange(0, c.BLOCK_M), n_queries)
        else:
            lse = tl.load(lse_row + offs_m, mask=offs_m < n_queries, other=float("inf"))
            delta = tl.load(delta_row + offs_m, mask=offs_m < n_queries, other=0.0)
        q = load_tile(queries, start_m, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, CHECK_ROWS, FORM, c)
        do = load_tile(gradients, start_m, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, CHECK_ROWS, FORM, c)
        s_t = dot(k, tl.trans(q), c.PRECISION)  # [BLOCK_N, BLOCK_M]
        begins = (start_m, col0, tile_corner(start_m, col0, score, c))
        rows, cols = offs_m[None, :], offs_n[:, None]
        visible = True
        if MASKED:
            visible = visible_pairs(rows, cols, mask, False, c)
            if c.MASK_Q:
                visible = visible & kept_pairs(view, start_m, col0, rows, cols, c)
        s_t, saved_t = scores_log2(s_t, rows, cols, begins, mask, visible, score, True, PRECISE, c)
        p_t = tl.math.exp2(s_t - (lse * LOG2E)[None, :])
        if MASKED:
            p_t = tl.where(visible, p_t, 0.0)
        p_dropped_t = p_t
        if c.DROPOUT:
            keep_t = keep_tile(*column_words, *position_words(*row_keys, offs_m), threshold)  # [BLOCK_N, BLOCK_M]
            p_dropped_t = tl.where(keep_t, p_t, 0.0)
        dv = dot_add(round_to(p_dropped_t, do.dtype), do, dv, c.PRECISION)
        dp_t = dot(v, tl.trans(do), c.PRECISION)  # [BLOCK_N, BLOCK_M]
        if c.DROPOUT:
            dp_t = tl.where(keep_t, dp_t * keep_scale, 0.0)
        ds_t = p_t * (dp_t - delta[None, :])
        ds_t = product_gradient(function_gradient(ds_t, cols, saved_t, score, c), saved_t, score, c)
        dk = dot_add(round_to(ds_t, q.dtype), q, dk, c.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=(*RUNTIME_SIZES, "subgroups"), do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,
    q_rows_ptr, do_rows_ptr,  # for EDGE_FORM: addresses of the tensors that FORM reads through descriptors
    lse_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, per_head_ptr, attn_bias_ptr, rng_state_ptr,
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,
    mask_blocks_ptr, mask_bits_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_per_headb, stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_maskb, stride_maskh,
    heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, interleaved_heads,
    scale, softcap, threshold, keep_scale,
    sm_scale,  # factor of dK
    subgroups,  # subgroups per KV head (`bwd_partials.py`)
    c: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys of a KV head, or of a subgroup of its query heads.

    1. Find the head and the sequence, load K and V, and find the queries that see these keys (`query_ranges`).
    2. For each query head, add what its masked blocks of queries contribute, then its full ones. With ONE_LOOP all
       count as masked.
    3. Scale the sums, and write them with zeros for keys beyond the end.
    """
    blocks_n = tl.cdiv(seqlen_k, c.BLOCK_N)
    pid = tl.program_id(0)
    heads_kv = heads_q // group  # one per subgroup
    # Under a causal mask the first key blocks have the most queries: longest first.
    head, block_n = head_and_block(pid, blocks_n, tl.num_programs(0) // blocks_n, interleaved_heads)
    col0 = block_n * c.BLOCK_N
    b = head // heads_kv
    hk = head % heads_kv
    lengths = (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, total_q, total_k)
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    if c.LENGTHS == PACKED and col0 >= n_keys:
        return
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    # At 256 features the two accumulators fill the registers. With a second copy of the loop they would spill.
    EDGES: tl.constexpr = c.FORM != c.EDGE_FORM
    HAS_MASK: tl.constexpr = c.HAS_RIGHT or c.HAS_LEFT or EDGES or c.MASK_Q != 0
    # Full blocks of a block mask are read in EDGE_FORM, too, if sequences may end in them.
    FULL_FORM: tl.constexpr = c.EDGE_FORM if c.MASK_Q != 0 else c.FORM
    ONE_LOOP: tl.constexpr = HAS_MASK and c.BLOCK_D > 128

    offs_n = col0 + tl.arange(0, c.BLOCK_N)
    k_position = (b, hk // subgroups, first_k, n_keys)
    keys = head_view(k_ptr, (stride_kb, stride_kh, stride_kn), k_position, c.FORM, c)
    values = head_view(v_ptr, (stride_vb, stride_vh, stride_vn), k_position, c.FORM, c)
    k = load_tile(keys, col0, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
    v = load_tile(values, col0, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)

    begin, full_begin, full_end, end = query_ranges(col0, mask, EDGES, False, c)
    gap = full_end - full_begin
    masked_end = full_begin  # the masked loop covers [begin, full_begin), and [full_end, end) if there is a later edge
    if c.HAS_LEFT or EDGES:
        masked_end = end - gap
    if ONE_LOOP:
        gap = 0
        masked_end = end
    strides_q = (stride_qb, stride_qh, stride_qm)
    strides_do = (stride_dob, stride_doh, stride_dom)
    per_head = (per_head_ptr, stride_per_headb)
    bias = (attn_bias_ptr, stride_biasb, stride_biash, stride_biasm, stride_biasn)
    captured = captured_pointers(score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr)
    features = (scale, softcap, per_head, bias, rng_state_ptr, captured)
    full = (full_begin, full_end, 0, 0)
    masked = (begin, masked_end, full_begin, gap)

    dk = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
    dv = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
    for g in tl.range(0, group, disable_licm=True):
        h = hk * group + g
        q_position = (b, h, first_q, n_queries)
        queries = head_view(q_ptr, strides_q, q_position, c.FORM, c)
        gradients = head_view(do_ptr, strides_do, q_position, c.FORM, c)
        row = first_row(b, h, first_q, heads_q, seqlen_q, total_q, c)
        statistics = (lse_ptr + row, delta_ptr + row)
        score, row_keys, column_keys = head_features(b, h, features, c)
        column_words = position_words(*column_keys, offs_n) if c.DROPOUT else column_keys
        dropout = (row_keys, column_words, threshold, keep_scale)
        visited_full, visited_masked, block_mask = full, masked, (0, 0)
        if c.MASK_Q:
            tensors = (mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh)
            view = mask_view(tensors, b, h, seqlen_q, seqlen_k, c)
            list_ptr, listed_full, listed_end = listed_queries(view, col0, c)
            if c.LENGTHS != EQUAL:  # no query sees a block beyond the keys
                listed_full = tl.where(col0 < n_keys, listed_full, 0)
                listed_end = tl.where(col0 < n_keys, listed_end, 0)
            visited_full = (0, listed_full, 0, 0)
            visited_masked = (0 if ONE_LOOP else listed_full, listed_end, 0, 0)
            block_mask = (list_ptr, view)
        if HAS_MASK:
            q_edge, do_edge = queries, gradients
            if EDGES:  # a masked block may extend beyond its sequence, whose end a descriptor does not know
                q_edge = head_view(q_rows_ptr, strides_q, q_position, c.EDGE_FORM, c)
                do_edge = head_view(do_rows_ptr, strides_do, q_position, c.EDGE_FORM, c)
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, q_edge, do_edge, statistics, col0, visited_masked, mask, block_mask, score, dropout,
                True, c.EDGE_FORM, c,
            )  # fmt: skip
            if FULL_FORM != c.FORM:
                queries, gradients = q_edge, do_edge
        if not ONE_LOOP:
            dk, dv = _dkdv_blocks(
                dk, dv, k, v, queries, gradients, statistics, col0, visited_full, mask, block_mask, score, dropout,
                False, FULL_FORM, c,
            )  # fmt: skip

    # Keys beyond the end were read as zeros, but their rows of dV are not zero: clear them.
    is_key = offs_n < n_keys
    if c.DROPOUT:
        dv *= keep_scale
    dk = tl.where(is_key[:, None], dk * sm_scale, 0.0)
    dv = tl.where(is_key[:, None], dv, 0.0)
    n_rows = n_keys if c.LENGTHS == PACKED else seqlen_k
    store_position = (b, hk, first_k, n_rows)
    dk_rows = head_view(dk_ptr, (stride_dkb, stride_dkh, stride_dkn), store_position, POINTER, c)
    dv_rows = head_view(dv_ptr, (stride_dvb, stride_dvh, stride_dvn), store_position, POINTER, c)
    store_tile(dk_rows, dk, col0, c.HEAD_DIM, c.FORM)
    store_tile(dv_rows, dv, col0, c.HEAD_DIM_V, c.FORM)
