"""Attention over a KV cache: split-KV decoding (flash-decoding).

`stream_k.py` has the schedule: which blocks of keys a program attends to. `decode_combine.py` merges the partial
results of programs that share a tile. This file has the attention between them, and the launches.

A tile is BLOCK_M rows. The query heads that share a KV head (the group), and the new tokens of a sequence, are rows of
the same tile: row = token * group + head in the group, so that a tile is a range of tokens. A program gathers the keys
of a tile row by row, block after block. So a page may have any size.

In batch-invariant mode only a row's own query and keys decide on its result, bit for bit: `fixed_order.py` has the
order of operations. Keys are divided into fixed chunks, counted from the first key that is not padding. Each chunk has
sums of its own, which are then folded. So the result is equal whether one program has all chunks of a tile or each
chunk has a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import copysign, gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from diyfa.backends.cuda.attention.block_info import cached_blocks, first_cached_key
from diyfa.backends.cuda.attention.clear import forward_launches
from diyfa.backends.cuda.attention.decode_combine import add_chunk, combine_launch, store_rows
from diyfa.backends.cuda.attention.decode_configs import (
    DecodeConfig,
    chunk_keys,
    decode_config,
    feature_blocks,
    is_widened,
    reads_value_pairs,
    reads_values_once,
)
from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to
from diyfa.backends.cuda.attention.fixed_order import COMPILE_OPTIONS as FIXED_ORDER_OPTIONS
from diyfa.backends.cuda.attention.fixed_order import next_sum, sum_of_lanes, sums_by_lane, weights
from diyfa.backends.cuda.attention.fwd import online_softmax_update
from diyfa.backends.cuda.attention.launch import (
    cache_arguments,
    fields_of,
    forced_config,
    pointers,
    positive_scale,
    strides,
)
from diyfa.backends.cuda.attention.scores import scores_log2, visible_pairs
from diyfa.backends.cuda.attention.seq_info import cache_entry, cache_seq_info
from diyfa.backends.cuda.attention.stream_k import (
    SCANS,
    begin_share,
    chunks_per_tile,
    count_tiles,
    fixed_chunk,
    has_wide_positions,
    is_split,
    next_chunk,
    partials_slot,
    programs,
    rows_per_tile,
    store_fixed_chunk,
    store_partials,
    tile_work,
    tiles_per_sequence,
    workspace,
    workspace_parts,
)
from diyfa.backends.cuda.attention.tile_io import LOG2E, LOWEST, padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import can_overlap, is_interpreting
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import (
    VARLEN,
    AttentionProblem,
    AttentionTensors,
    KVCacheProblem,
    KVCacheTensors,
    Launch,
    as_bhsd,
    as_kvcache,
    cached_per_kind,
    per_head_stride,
)

_INTERPRETING = tl.constexpr(is_interpreting())
PARTIALS_AT_ONCE = 8  # chunks that a program of `_combine_in_order_kernel` reads at once


@dataclass(frozen=True, eq=False)
class DecodeConstants(Constants):
    """Constants of `_decode_kernel`, `_combine_kernel` and `_combine_in_order_kernel`.

    chunk > 0 excludes split. chunks_apart implies chunk > 0.
    """

    split: bool  # programs have shares of the iteration space; else each has a whole tile, or with chunks_apart a chunk
    scan: int  # tiles whose work is added up at once
    one_scan: bool  # one scan has all tiles
    wide_positions: bool  # positions on the line (`stream_k.py`) may need more than 32 bits
    one_round: bool  # all KV heads are walked at the same time: head_rounds is 1
    by_tile: bool  # `_combine_kernel` has programs for each tile, which implies one_scan; else for each share
    has_left: bool
    has_right: bool  # not for a single query, which is at the last key
    softcap: bool
    alibi: bool
    bias: bool  # always False; scores.py asks for it
    score_fn: None  # likewise
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    block_d: int
    block_d_tail: int  # width of a second tile for the features from block_d on; 0: none
    block_dv: int
    page_size: int  # 0: no pages
    one_page: bool  # each block of keys lies in one page
    packed_keys: bool
    value_pairs: bool  # float8 values are read as pairs of features
    values_in_keys: bool  # the first BLOCK_D features of the keys are the values
    widen: bool  # inputs become float32, and products are of float32
    overlap: bool  # the combine kernel is launched before this kernel ends (programmatic dependent launch)
    partials: int  # chunks of a tile that a combine kernel reads at once
    columns: int  # columns of a row that a program of `_combine_kernel` has
    chunk: int  # blocks of keys of a fixed chunk in batch-invariant mode; else 0
    chunks_apart: bool  # each fixed chunk has a program of its own
    split_cost: int  # as in `DecodeConfig`
    precision: str


@triton.jit
def _load_pages(table, keys, exists, c: tl.constexpr):
    """Load the pages that keys of a sequence lie in; -1 for keys that do not exist."""
    # An unsigned division by a power of two is a single shift.
    return tl.load(table + keys.to(tl.uint32) // c.PAGE_SIZE, mask=exists, other=-1)


@triton.jit
def _key_rows(page, offs_n, n_keys, pages, strides, c: tl.constexpr):
    """Find keys `offs_n` of a sequence -> (which exist, offsets of their rows in k and in v), [BLOCK_N] each.

    Keys in a page that the cache does not have count as absent.
    """
    stride_kb, stride_kn, stride_vb, stride_vn = strides
    exists = offs_n < n_keys
    if c.PAGE_SIZE > 0:
        is_page = (page >= 0) & (page < pages)
        exists = (exists & is_page) != 0  # the interpreter makes numbers of a single page's bool
        page = tl.where(is_page if c.ONE_PAGE else exists, page, 0).to(tl.int64)
        row = (offs_n.to(tl.uint32) % c.PAGE_SIZE).to(tl.int64)
        k_rows = page * stride_kb + row * stride_kn
        v_rows = page * stride_vb + row * stride_vn
    else:
        k_rows = offs_n.to(tl.int64) * stride_kn
        v_rows = offs_n.to(tl.int64) * stride_vn
    return exists, k_rows, v_rows


@triton.jit
def _load_rows(base, rows, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load features [FIRST, FIRST + WIDTH) of rows -> [rows, WIDTH]. Absent rows and features beyond HEAD_DIM are 0."""
    cols = FIRST + tl.arange(0, WIDTH)
    mask = exists[:, None]
    if FIRST + WIDTH > HEAD_DIM:
        mask = mask & (cols[None, :] < HEAD_DIM)
    return tl.load(base + rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _unpack_pairs(pairs, ODD: tl.constexpr):
    """Convert the first (ODD = 0) or second (ODD = 1) float8 of each pair to float16."""
    if _INTERPRETING:
        x = ((pairs >> (8 * ODD)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # two pairs at once: a third of the instructions that Triton needs for the above
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $1, 0, " + ("0x31" if ODD else "0x20")
            + "; mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return x


@triton.jit
def _load_pairs(base, rows, exists, c: tl.constexpr):
    """Load rows of float8 values -> (even features, odd features), [rows, BLOCK_DV / 2] float16 each.

    Tensor cores take values of two keys side by side. `ldmatrix` brings them together, but only for 16-bit elements. So
    float8 is read as pairs of features, which are 16 bits.
    """
    HALF: tl.constexpr = c.BLOCK_DV // 2
    cols = tl.arange(0, HALF)
    mask = exists[:, None]
    if c.BLOCK_DV > c.HEAD_DIM_V:
        mask = mask & (cols[None, :] < c.HEAD_DIM_V // 2)
    addresses = (base + rows[:, None]).to(tl.pointer_type(tl.uint16), bitcast=True) + cols[None, :]
    pairs = tl.load(addresses, mask=mask, other=0)
    return _unpack_pairs(pairs, 0), _unpack_pairs(pairs, 1)


@triton.jit
def _weights_in_order(s, m_i, visible, tokens, keys, mask, score, PRECISE: tl.constexpr, c: tl.constexpr):
    """Return (weights p, running maximum, factor of earlier sums) of products s in the order of `fixed_order.py`.

    tokens: [BLOCK_M, 1]; keys: [1, BLOCK_N].
    """
    scale_log2 = 1.0
    if c.SOFTCAP or c.ALIBI:
        s, _tanh = scores_log2(s, tokens, keys, (0, 0, 0), mask, True, score, True, PRECISE, c)
        scaled = s
    else:
        scale, _, _, _ = score
        scale_log2 = scale * LOG2E
        scaled = s * scale_log2
    m_new = tl.maximum(m_i, tl.max(tl.where(visible, scaled, float("-inf")), 1))
    p = tl.where(visible, weights(s, scale_log2, m_new), 0.0)
    return p, m_new, tl.math.exp2(m_i - m_new)


@triton.jit
def _attend_keys(
    q,  # [BLOCK_M, BLOCK_D]
    q_tail,  # [BLOCK_M, BLOCK_D_TAIL]
    tokens,  # [BLOCK_M]
    begin, end,  # blocks, counted from key `pad`
    pad,
    first_key,  # the first key that the tile sees
    cache, mask, score, c: tl.constexpr,
):  # fmt: skip
    """Attend to blocks [begin, end) of keys -> (acc [BLOCK_M, BLOCK_DV], l_i, m_i [BLOCK_M]), not normalised.

    m_i is in units of log2. `mask` and `score` are those of scores.py; slopes are [BLOCK_M, 1]. With CHUNK the blocks
    lie in one fixed chunk and are visited from the last to the first. With VALUE_PAIRS acc has the even features and
    acc_odd the odd ones.
    """
    k_base, v_base, table, pages, strides = cache
    _, n_keys, _, _, _ = mask
    PRECISE: tl.constexpr = q.dtype == tl.float32
    m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
    if c.CHUNK > 0:
        l_i = tl.zeros([c.BLOCK_M, 4], tl.float32)  # `sums_by_lane`
    else:
        l_i = tl.zeros([c.BLOCK_M], tl.float32)
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV // (2 if c.VALUE_PAIRS else 1)], tl.float32)
    acc_odd = acc
    page = 0
    if c.PAGE_SIZE > 0:  # the pages of the first block of the loop
        keys = pad + (end - 1 if c.CHUNK > 0 else begin) * c.BLOCK_N
        if not c.ONE_PAGE:
            keys += tl.arange(0, c.BLOCK_N)
        is_key = keys < n_keys
        # Do not read pages left of the window: they may hold NaN, and a weight of 0 times NaN is NaN. With ONE_PAGE the
        # loop visits no block of such a page.
        if c.HAS_LEFT and not c.ONE_PAGE:
            is_key = is_key & (keys >= first_key)
        page = _load_pages(table, keys, is_key, c)
    for block in tl.range(begin, end):
        if c.CHUNK > 0:
            block = begin + end - 1 - block
        offs_n = pad + block * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
        exists, k_rows, v_rows = _key_rows(page, offs_n, n_keys, pages, strides, c)
        if c.PAGE_SIZE > 0:  # load the pages of the next block now, so that its keys need not wait for this load
            keys = pad + block * c.BLOCK_N if c.ONE_PAGE else offs_n
            if c.CHUNK > 0:
                next_keys = keys - c.BLOCK_N
                page = _load_pages(table, next_keys, next_keys >= (pad if c.ONE_PAGE else first_key), c)
            else:
                next_keys = keys + c.BLOCK_N
                page = _load_pages(table, next_keys, next_keys < n_keys, c)
        k = _load_rows(k_base, k_rows, exists, 0, c.BLOCK_D, c.HEAD_DIM).to(q.dtype)
        s = dot(q, tl.trans(k), c.PRECISION)  # [BLOCK_M, BLOCK_N]
        if c.BLOCK_D_TAIL > 0:
            k_tail = _load_rows(k_base, k_rows, exists, c.BLOCK_D, c.BLOCK_D_TAIL, c.HEAD_DIM).to(q.dtype)
            s = dot_add(q_tail, tl.trans(k_tail), s, c.PRECISION)
        visible = exists[None, :] & visible_pairs(tokens[:, None], offs_n[None, :], mask, False, c)
        if c.CHUNK > 0:
            p, m_i, alpha = _weights_in_order(
                s, m_i, visible, tokens[:, None], offs_n[None, :], mask, score, PRECISE, c
            )
            l_i = next_sum(l_i, tl.broadcast_to(alpha[:, None], l_i.shape), sums_by_lane(p))
            acc = acc * alpha[:, None]
        else:
            s, _tanh = scores_log2(s, tokens[:, None], offs_n[None, :], (0, 0, 0), mask, True, score, True, PRECISE, c)
            s = tl.where(visible, s, float("-inf"))
            m_before = m_i
            p, m_i, l_i, acc = online_softmax_update(s, m_i, l_i, acc, 1.0)
        p = round_to(p, q.dtype)
        if c.VALUE_PAIRS:
            even, odd = _load_pairs(v_base, v_rows, exists, c)
            acc = dot_add(p, even, acc, c.PRECISION)
            if c.CHUNK == 0:
                alpha = tl.math.exp2(m_before - m_i)
            acc_odd = dot_add(p, odd, acc_odd * alpha[:, None], c.PRECISION)
        else:
            v = k
            if not c.VALUES_IN_KEYS:
                v = _load_rows(v_base, v_rows, exists, 0, c.BLOCK_DV, c.HEAD_DIM_V).to(q.dtype)
            acc = dot_add(p, v, acc, c.PRECISION)
    if c.CHUNK > 0:
        l_i = sum_of_lanes(l_i)
    if c.VALUE_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (c.BLOCK_M, c.BLOCK_DV))
    return acc, l_i, m_i


@triton.jit
def _powers_of_two(largest):
    """Return powers of two (x, 1 / x) such that a row of bfloat16 times x fits float16.

    `largest`: the row's largest absolute value. Elements of at least 2**-31 times `largest` keep all their bits.

    Why not bfloat16: float8 keys become float16 in one instruction, exactly, but bfloat16 in five.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))  # if not finite, x = 1
    # x brings the largest element to the top of float16's range, 2**14 to 2**15.
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _attend_rows(b, hk, block_m, begin, end, sequence, inputs, tile_mask, c: tl.constexpr):
    """Attend to blocks [begin, end) of keys for tile `block_m` of sequence b -> (acc, l_i, m_i, rows).

    rows [BLOCK_M] are token * group + head in the group. The rest is as in `_attend_keys`.
    """
    first_q, n_queries, first_k, n_keys, pad = sequence
    queries, keys, values, cache_lookup, score_inputs, score = inputs
    q_ptr, stride_qb, stride_qh, stride_qm = queries
    k_ptr, stride_kb, stride_kh, stride_kn = keys
    v_ptr, stride_vb, stride_vh, stride_vn = values
    block_table_ptr, stride_table, cache_batch_idx_ptr, entries = cache_lookup
    slopes_ptr, stride_slopeb, k_descale_ptr, stride_kdb, stride_kdh = score_inputs
    scale, softcap = score
    group, window_left, window_right = tile_mask
    rows = block_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    tokens = rows // group
    heads = hk * group + rows % group
    exists = tokens < n_queries
    q_base = q_ptr + b.to(tl.int64) * stride_qb
    q_rows = (first_q + tokens).to(tl.int64) * stride_qm + heads.to(tl.int64) * stride_qh
    q = _load_rows(q_base, q_rows, exists, 0, c.BLOCK_D, c.HEAD_DIM)
    q_tail = q
    if c.BLOCK_D_TAIL > 0:
        q_tail = _load_rows(q_base, q_rows, exists, c.BLOCK_D, c.BLOCK_D_TAIL, c.HEAD_DIM)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + b.to(tl.int64) * stride_kdb + hk.to(tl.int64) * stride_kdh)
    if c.WIDEN:
        q = q.to(tl.float32)
        q_tail = q_tail.to(tl.float32)
    elif k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        if c.BLOCK_D_TAIL > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_tail.to(tl.float32)), 1))
        factor, inverse = _powers_of_two(largest)
        q = (q.to(tl.float32) * factor[:, None]).to(tl.float16)
        q_tail = (q_tail.to(tl.float32) * factor[:, None]).to(tl.float16)
        scale *= inverse[:, None]
    slopes = 0.0
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + b * stride_slopeb + heads, mask=exists, other=0.0)[:, None]
    offset = n_keys - n_queries
    k_base = k_ptr + hk.to(tl.int64) * stride_kh
    v_base = v_ptr + hk.to(tl.int64) * stride_vh
    table = 0
    if c.PAGE_SIZE > 0:
        table = block_table_ptr + b.to(tl.int64) * stride_table
    elif c.PACKED_KEYS:
        k_base += first_k.to(tl.int64) * stride_kn
        v_base += first_k.to(tl.int64) * stride_vn
    else:
        entry, n_keys = cache_entry(cache_batch_idx_ptr, b, entries, n_keys)
        k_base += entry.to(tl.int64) * stride_kb
        v_base += entry.to(tl.int64) * stride_vb
    cache = (k_base, v_base, table, entries, (stride_kb, stride_kn, stride_vb, stride_vn))
    mask = (n_queries, n_keys, offset, window_left, window_right)
    score = (scale, (softcap, slopes), (0, 0, 0), (0, 0, 0))  # no bias, no score function
    first_key = first_cached_key(block_m, n_queries, n_keys, pad, tile_mask, c)
    acc, l_i, m_i = _attend_keys(q, q_tail, tokens, begin, end, pad, first_key, cache, mask, score, c)
    return acc, l_i, m_i, rows


@triton.jit
def _attend_chunks(b, hk, block_m, begin, end, sequence, inputs, tile_mask, c: tl.constexpr):
    """`_attend_rows` for all fixed chunks that blocks [begin, end) lie in, folded from the last to the first."""
    if c.CHUNK == 0 or c.CHUNKS_APART:  # the blocks are one chunk
        acc, l_i, m_i, rows = _attend_rows(b, hk, block_m, begin, end, sequence, inputs, tile_mask, c)
    else:
        m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([c.BLOCK_M], tl.float32)
        acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
        rows = block_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        first_chunk, end_chunk = begin // c.CHUNK, tl.cdiv(end, c.CHUNK)
        for i in range(first_chunk, end_chunk):
            n = first_chunk + end_chunk - 1 - i
            first, last = tl.maximum(begin, n * c.CHUNK), tl.minimum(end, (n + 1) * c.CHUNK)
            acc_chunk, l_chunk, m_chunk, _ = _attend_rows(b, hk, block_m, first, last, sequence, inputs, tile_mask, c)
            m_i, l_i, acc = add_chunk(m_i, l_i, acc, m_chunk, l_chunk, acc_chunk)
    return acc, l_i, m_i, rows


_RUNTIME = (
    "stride_slopeb", "stride_table", "stride_kdb", "stride_kdh", "stride_vdb", "stride_vdh", "batch", "heads_kv",
    "group", "blocks_m", "entries", "seqlen_q", "total_q", "total_k", "length", "added", "capacity", "window_left",
    "window_right", "rows_per_tile", "chunks_per_tile",
)  # fmt: skip
_UNALIGNED = (
    "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqlens_ptr", "block_table_ptr", "cache_batch_idx_ptr", "leftpad_ptr",
    "slopes_ptr", "sinks_ptr", "k_descale_ptr", "v_descale_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, leftpad_ptr,
    slopes_ptr, sinks_ptr, k_descale_ptr, v_descale_ptr,
    o_ptr, lse_ptr,
    sums_ptr,  # [slots, rows of a slot, BLOCK_DV]
    statistics_ptr,  # [slots, 2, rows of a slot]: maxima, sums of weights
    length,  # keys of each sequence without `added`, if no tensor has lengths; a repeated call may pass another
    capacity, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    stride_slopeb, stride_table, stride_kdb, stride_kdh, stride_vdb, stride_vdh,
    batch, heads_kv,
    group,  # query heads that share a KV head
    blocks_m,  # tiles of the longest sequence
    entries,  # number of pages, or of batch entries of a contiguous cache
    seqlen_q, total_q, total_k, added, window_left, window_right,
    rows_per_tile,  # rows of a tile that exist in the longest sequence, at most BLOCK_M
    chunks_per_tile,  # programs of a tile, if CHUNKS_APART
    scale, softcap,
    c: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks of keys that the schedule (`stream_k.py`) gives this program.

    1. Find the program's share of the line (SPLIT), or its tile or fixed chunk.
    2. SPLIT: walk along the share, from `position` to `share_end`, and cut a chunk of each tile and head that it
       touches. A chunk is blocks [begin, end), counted from `first`, the first block that the tile sees. `taken` is its
       length on the line: its blocks, and what `cost` adds to the tile (`divide_work`).
    3. For each chunk, load the queries and attend to its blocks of keys.
    4. If the chunk is a whole tile, normalise the sums and write out and lse. Else write the sums to a slot of the
       workspace, for the combine kernel.

    Each tile with rows has at least one block, so its out and lse are written even if the rows see no key.

    The grid is (heads_in_parallel, shares) if SPLIT, else one program for each tile and KV head, or fixed chunk.
    """
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    tile_mask = (group, window_left, window_right)
    inputs = (
        (q_ptr, stride_qb, stride_qh, stride_qm),
        (k_ptr, stride_kb, stride_kh, stride_kn),
        (v_ptr, stride_vb, stride_vh, stride_vn),
        (block_table_ptr, stride_table, cache_batch_idx_ptr, entries),
        (slopes_ptr, stride_slopeb, k_descale_ptr, stride_kdb, stride_kdh),
        (scale, softcap),
    )
    outputs = (
        o_ptr, lse_ptr, sinks_ptr, v_descale_ptr,
        (stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh),
        (heads_kv, group, seqlen_q, total_q),
    )  # fmt: skip
    if c.OVERLAP:
        gdc_launch_dependents()
    memory = (sums_ptr, statistics_ptr)
    if not c.SPLIT:
        b, hk, block_m, sequence, first, end, chunk = fixed_chunk(
            chunks_per_tile, heads_kv, blocks_m, lengths, tile_mask, c
        )
        first_q, n_queries, _, _, _ = sequence
        if first < end:  # else the tile has no rows, or sees no key of the fixed chunk
            acc, l_i, m_i, rows = _attend_chunks(b, hk, block_m, first, end, sequence, inputs, tile_mask, c)
            if c.CHUNKS_APART:
                store_fixed_chunk(acc, l_i, m_i, chunk, chunks_per_tile, rows_per_tile, memory, c)
            else:
                store_rows(acc, l_i, m_i, rows, 0, b, hk, first_q, n_queries, outputs, PACKED, c)
    else:
        heads_in_parallel = tl.num_programs(0)
        program = tl.program_id(1) * heads_in_parallel + tl.program_id(0)
        head_rounds = 1 if c.ONE_ROUND else heads_kv // heads_in_parallel
        position, share_end, tile, tile_start, cost = begin_share(batch, blocks_m, head_rounds, lengths, tile_mask, c)
        while position < share_end:
            b = tile // blocks_m
            block_m = tile % blocks_m
            sequence = cache_seq_info(b, lengths, c)
            first_q, n_queries, _, n_keys, pad = sequence
            first, n_blocks = cached_blocks(block_m, n_queries, n_keys, pad, tile_mask, c)
            work = tile_work(n_blocks, cost, c.SPLIT_COST)
            tile_end = tile_start + work.to(position.dtype) * head_rounds
            if position < tile_end:
                head_round, begin, end, taken = next_chunk(
                    position, tile_start, share_end, n_blocks, work, cost, c.ONE_ROUND, c.SPLIT_COST
                )
                hk = tl.program_id(0) + head_round * heads_in_parallel
                if begin < end:  # else the share has no block of the tile (`next_chunk`)
                    acc, l_i, m_i, rows = _attend_rows(
                        b, hk, block_m, first + begin, first + end, sequence, inputs, tile_mask, c
                    )
                    if end - begin == n_blocks:
                        store_rows(acc, l_i, m_i, rows, 0, b, hk, first_q, n_queries, outputs, PACKED, c)
                    else:
                        slot = partials_slot(program, begin == 0)
                        store_partials(acc, l_i, m_i, slot, memory, c)
                position += taken
            else:
                tile_start = tile_end
                tile += 1


def kernel_constants(
    problem: KVCacheProblem, config: DecodeConfig, chunks: int = 1, heads_in_parallel: int = 1
) -> DecodeConstants:
    """Return the constants of `_decode_kernel` for `chunks` chunks per tile and so many `heads_in_parallel`."""
    tiles = count_tiles(problem, config)
    scan = next((scan for scan in SCANS if tiles <= scan), SCANS[-1])
    by_size = {
        "scan": scan,
        "one_scan": tiles <= scan,
        "wide_positions": has_wide_positions(problem, config),
        "one_round": heads_in_parallel == problem.heads_kv,
        "chunks_apart": chunks > 1,
        "has_right": problem.window_right >= 0 and problem.seqlen_q > 1,
    }
    return _constants_for_kind(problem, config, is_split(problem), *by_size.items())


@cached_per_kind
def _constants_for_kind(
    problem: KVCacheProblem, config: DecodeConfig, split: bool, *by_size: tuple[str, Any]
) -> DecodeConstants:
    """Return the constants. `by_size`: (name, value) of those that depend on sizes of the problem."""
    block_d, block_d_tail = feature_blocks(problem.head_dim)
    block_dv = padded_head_dim(problem.head_dim_v)
    return DecodeConstants.read_from(
        problem, config, **dict(by_size), split=split, by_tile=False, has_left=problem.window_left >= 0, bias=False,
        score_fn=None, block_d=block_d, block_d_tail=block_d_tail, block_dv=block_dv, columns=block_dv,
        one_page=problem.paged and problem.page_size % config.block_n == 0 and not problem.leftpad,
        value_pairs=reads_value_pairs(problem), values_in_keys=reads_values_once(problem), widen=is_widened(problem),
        overlap=split and can_overlap(problem.arch), partials=PARTIALS_AT_ONCE, precision="ieee",
        chunk=chunk_keys(problem) // config.block_n if problem.batch_invariant else 0,
    )  # fmt: skip


def select_config(problem: KVCacheProblem) -> DecodeConfig:
    """Return the config of a call that `unsupported` accepts, or the one that `use_config("decode", ...)` sets."""
    config = forced_config("decode", problem) or decode_config(problem)
    assert config is not None, "unsupported() accepted a problem that no tile fits"
    return config


def _scale(problem: KVCacheProblem, sm_scale: float) -> float:
    """Return the kernel's scale. In batch-invariant mode it is +-`positive_scale`, which the Hopper forward takes."""
    if problem.batch_invariant and not (problem.softcap or problem.alibi):
        return copysign(positive_scale(sm_scale), sm_scale)
    return sm_scale / (problem.softcap or 1.0)


def make_launches(
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor, config: DecodeConfig,
    memory: torch.Tensor | None,
) -> list[Launch]:  # fmt: skip
    """Return the launches that fill out and lse. `memory`: the `workspace`, or None."""
    q, k, v = tensors.q, tensors.k_cache, tensors.v_cache
    keys_layout = VARLEN if problem.packed_keys else "bshd"
    count = programs(problem, config, q.device)
    if not count:
        return []
    chunks = chunks_per_tile(problem, config, q.device)
    # KV heads that are walked at the same time: their rows lie side by side in memory. It divides both.
    heads_in_parallel = gcd(problem.heads_kv, count)
    c = kernel_constants(problem, config, chunks, heads_in_parallel)
    sums, statistics = workspace_parts(memory, problem)
    arguments = {
        **pointers(q=q, k=k, v=v, o=out, lse=lse, sums=sums, statistics=statistics, slopes=tensors.alibi_slopes),
        **pointers(**fields_of(tensors, "cu_seqlens_q", "cu_seqlens_k", "leftpad", "sinks")),
        **strides(problem.layout, q=q, o=out),
        **strides(keys_layout, k=k, v=v),
        **cache_arguments(problem, tensors),
        "stride_slopeb": per_head_stride(tensors.alibi_slopes),
        **fields_of(problem, "batch", "total_q", "window_left", "window_right", "softcap"),
        "group": problem.heads_q // problem.heads_kv,
        "blocks_m": tiles_per_sequence(problem, config),
        "total_k": k.shape[0],
        "added": tensors.added,
        "rows_per_tile": rows_per_tile(problem, config),
        "chunks_per_tile": chunks,
        "scale": _scale(problem, tensors.sm_scale),
    }
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if problem.batch_invariant:
        options |= FIXED_ORDER_OPTIONS
    grid = (heads_in_parallel, count // heads_in_parallel) if c.split else count
    main = Launch(_decode_kernel, grid, arguments, {"c": c}, options)
    if memory is None:
        return [main]
    return [main, combine_launch(problem, config, c, arguments, count, heads_in_parallel)]


def cache_pass(
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor,
    config: DecodeConfig | None = None, launch_maker: Callable[..., list[Launch]] = make_launches,
) -> Pass:  # fmt: skip
    """Return the pass that fills out and lse. `config`, `launch_maker`: of another kernel with the same schedule."""
    config = config or select_config(problem)
    memory = workspace(problem, config, tensors.q.device)
    clearing = forward_launches(problem, tensors, out, lse)
    launches = launch_maker(problem, tensors, out, lse, config, memory)
    return Pass([*clearing, *launches], [] if memory is None else [memory])


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse of a forward pass: its keys are a cache that is full."""
    cache_problem, cache_tensors = as_kvcache(problem, tensors)
    rows = out if problem.varlen else as_bhsd(out, problem.layout).transpose(1, 2)
    return cache_pass(cache_problem, cache_tensors, rows, lse)._replace(inputs=cache_tensors.present())
