"""Attention over a KV cache for Ascend: split-KV, as in FlashDecoding (Dao et al. 2023), in one persistent kernel.

A query tile is HEADS query heads of one KV head times QUERIES queries of one sequence, packed into the BLOCK_M rows of
one product. With one new token and no packing a product would have one row. The keys of a sequence are cut into blocks
at multiples of BLOCK_N, and the blocks into splits. A task is one (sequence, KV head, split, tile), and the grid has at
most one program per cube core. The host computes the number of splits from the capacity of the cache, so it never waits
for lengths on the device.

Up to three kernels run:

1. `_pack_kernel`, if HEADS and QUERIES are both above 1: copies q, so that the rows of each tile are contiguous.
2. `_decode_kernel`: for each task finds the keys that the tile sees in its split, runs online softmax over their
   blocks as fwd.py does, and writes out and lse; if PARTIAL, it writes those of the split to a workspace in fp32.
3. `_combine_kernel`, if PARTIAL: merges the splits of each row by their lse. PARTIAL: there are several splits, or rows
   of a tile have no common stride in out or lse.

Loading keys:

* A block of keys is one load if it is contiguous: in a contiguous cache, in packed keys, and in pages whose size is a
  multiple of BLOCK_N (PAGES "whole"). One scalar load of the page table finds its page.
* With other page sizes keys are gathered row by row (PAGES "gathered"), which compiles to a copy for each key.
* Block n covers keys [n * BLOCK_N, (n + 1) * BLOCK_N) without left padding and without keys beyond the sequence:
  `n_valid_keys` keys from `key0` on. Keys outside are not loaded, and left padding needs no mask.

Batch-invariant mode has one split, fixed BLOCK_M and BLOCK_N, and keys cut at multiples of BLOCK_N. Then a row of the
result is bitwise the same whatever else is in the call: it depends on its own query, its keys in their order, and the
left padding before them. In this mode the kernel also computes the forward pass of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.fwd import LOWEST, online_softmax_update
from diyfa.backends.npu.attention.primitives import (
    block_at,
    capped_scores,
    dense_head_base,
    dot,
    dot_add,
    head_base,
    keep_first_rows,
    load_tile,
    narrow,
    packed_rows,
    running_max,
    store_row,
    store_tile,
)
from diyfa.backends.npu.attention.vector_io import load_block, load_values, store_block, store_values
from diyfa.backends.npu.runtime.compat import INTERPRETED, Constants, kernel, padded_head_dim
from diyfa.backends.npu.runtime.launch import (
    bind_launch,
    cube_programs,
    device_guard,
    tensor_arguments,
    vector_programs,
)
from diyfa.backends.npu.runtime.tiles import chosen_tile, run_tiled
from diyfa.backends.npu.tables import configs
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.problem import (
    AttentionProblem,
    AttentionTensors,
    KVCacheProblem,
    KVCacheTensors,
    Launch,
    as_bhsd,
    as_kvcache,
    per_head_stride,
)

VECTOR_ROWS = 16  # rows of a tile that a vector program packs or combines at once, at most


@dataclass(frozen=True)
class DecodeConstants(Constants):
    """Constants of `_decode_kernel`."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    block_n: int
    heads: int  # query heads in a tile
    queries: int  # queries of each head in a tile
    has_left: bool
    has_right: bool  # also if causal; not for a single query, which is at the last key
    softcap: str
    alibi: bool
    sinks: bool
    always_mask: bool
    partial: bool
    varlen: bool
    seqlens: bool
    cu_seqlens_k: bool
    packed_keys: bool
    pages: str  # "": no pages; "whole": each block of keys is inside one page; "gathered": it may not be
    batch_idx: bool
    leftpad: bool
    interpret: bool


@dataclass(frozen=True)
class RowConstants(Constants):
    """Constants of the vector kernels, `_pack_kernel` and `_combine_kernel`. They take `rows` rows of a tile."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    heads: int
    queries: int
    rows: int
    varlen: bool
    interpret: bool


@triton.jit
def key_bounds(
    seqlens_ptr, cu_seqlens_k_ptr, batch_idx_ptr, leftpad_ptr, b, length, added, capacity, entries, c: tl.constexpr
):  # fmt: skip
    """Return (first row in packed keys, first key, end) for the keys of sequence `b`: keys [first key, end) count.

    The range stays inside memory, whatever the lengths on the device say."""
    start = 0
    count = length + added
    if c.CU_SEQLENS_K:
        start = tl.maximum(tl.load(cu_seqlens_k_ptr + b), 0)
        count = tl.maximum(tl.load(cu_seqlens_k_ptr + b + 1), start) - start
    if c.PACKED_KEYS:  # SEQLENS may use fewer keys than lie between two offsets
        start = tl.minimum(start, entries)
        count = tl.minimum(count, entries - start)
        if c.SEQLENS:
            count = tl.minimum(count, tl.load(seqlens_ptr + b))
    elif c.SEQLENS:
        count = tl.minimum(tl.load(seqlens_ptr + b), capacity) + added
    count = tl.minimum(tl.maximum(count, 0), capacity)
    if c.BATCH_IDX:
        entry = tl.load(batch_idx_ptr + b)
        count = tl.where((entry >= 0) & (entry < entries), count, 0)
    first = 0
    if c.LEFTPAD:
        first = tl.minimum(tl.maximum(tl.load(leftpad_ptr + b), 0), count)
    return start, first, count


@triton.jit
def nearest_page(entries, pages):
    """Clamp page table entries to existing pages."""
    return tl.minimum(tl.maximum(entries, 0), pages - 1)


@triton.jit
def first_key(table_ptr, first, count, page_size, pages):
    """Find the first of the keys [first, count) in an existing page. Returns (page, row in it, whether one exists)."""
    column = first // page_size
    page = -1
    while (column * page_size < count) & ((page < 0) | (page >= pages)):
        page = tl.load(table_ptr + column)
        column += 1
    key = tl.maximum((column - 1) * page_size, first)
    return nearest_page(page, pages), key % page_size, (page >= 0) & (page < pages)


@triton.jit
def gathered_rows(table_ptr, key0, lo, count, fallback_page, fallback_row, page_size, pages, c: tl.constexpr):
    """Return (page, row in the page) of each key from `key0` on, [BLOCK_N] each.

    Keys that the left window hides from all queries (before `lo`) are replaced by key `lo`, keys beyond the sequence by
    its last key, and keys whose entry names no page by the key at `fallback_row` of `fallback_page` (`first_key`).
    Their memory may not be read: it may hold NaN, and a weight of 0 times NaN is NaN.

    With AscendNPU IR 1.1.0 any select on loaded values or addresses costs the split over the vector cores or the
    pipeline. This arithmetic does not.
    """
    keys = tl.minimum(tl.arange(0, c.BLOCK_N) + key0, count - 1)
    if c.HAS_LEFT:
        keys = tl.maximum(keys, lo)
    entries = tl.load(table_ptr + keys // page_size)
    page = nearest_page(entries, pages)
    row = keys % page_size
    absent = tl.minimum(tl.maximum(entries - page, -1), 1)
    absent = absent * absent  # 0 or 1
    return page + absent * (fallback_page - page), row + absent * (fallback_row - row)


@triton.jit
def have_pages(table_ptr, key0, n_valid_keys, page_size, pages, c: tl.constexpr):
    """Return whether each of the `n_valid_keys` keys from `key0` on lies in an existing page, bool [BLOCK_N].

    This reads the table a second time: AscendNPU IR 1.1.0 makes no mask from values that also form addresses. The load
    is clamped, not masked: AscendNPU IR 1.2.0 would load beyond the table first and select afterwards."""
    cols = tl.minimum(tl.arange(0, c.BLOCK_N), n_valid_keys - 1)
    entries = tl.load(table_ptr + (key0 + cols) // page_size)
    return (entries - nearest_page(entries, pages)).to(tl.float32) == 0.0  # the vector core compares no integers


@triton.jit
def load_keys(
    base, page, row, rows, stride_page, stride_n, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, c: tl.constexpr
):
    """Load [BLOCK_N, BLOCK_D]: `rows` keys (or values) from `row` of `page` on, zero beyond them.

    With PAGES "gathered", `page` and `row` are [BLOCK_N], and beyond `rows` the tile holds other keys of the
    sequence."""
    if c.PAGES == "gathered":
        offs = page.to(tl.int64) * stride_page + row.to(tl.int64) * stride_n
        offs_d = tl.arange(0, BLOCK_D)
        if HEAD_DIM == BLOCK_D:
            x = tl.load(base + offs[:, None] + offs_d[None, :])
        else:
            x = tl.load(base + offs[:, None] + offs_d[None, :], mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        if c.PAGES == "whole":
            base += page.to(tl.int64) * stride_page
        base += row.to(tl.int64) * stride_n
        x = load_tile(block_at(base, rows, stride_n, 0, 0, HEAD_DIM, c.BLOCK_N, BLOCK_D), HEAD_DIM != BLOCK_D)
    return x


@triton.jit
def query_per_row(c: tl.constexpr):
    """Return the query number, in the tile, of each row, fp32 [HEADS * QUERIES].

    A reshape or a division here would make the compiler use only one of the two vector cores."""
    rows = tl.arange(0, c.HEADS * c.QUERIES).to(tl.float32)
    queries = rows
    if c.QUERIES == 1:
        queries = tl.zeros([c.HEADS], tl.float32)
    else:
        for head in tl.static_range(1, c.HEADS):
            queries = tl.where(rows >= head * c.QUERIES, rows - head * c.QUERIES, queries)
    return queries


@triton.jit
def head_value_per_row(ptr, heads, other, c: tl.constexpr):
    """Return for each row the value of its head, [HEADS * QUERIES]. Heads from `heads` on have the value `other`."""
    if c.QUERIES == 1:
        offs = tl.arange(0, c.HEADS)
        values = tl.load(ptr + offs, mask=offs < heads, other=other)
    else:
        rows = tl.arange(0, c.HEADS * c.QUERIES).to(tl.float32)
        values = tl.zeros([c.HEADS * c.QUERIES], tl.float32)
        for head in tl.static_range(c.HEADS):
            offs = tl.arange(0, 1) + head
            value = tl.load(ptr + offs, mask=offs < heads, other=other)
            values = tl.where(rows >= head * c.QUERIES, value, values)
    return values


@triton.jit
def mask_keys(s, rows, n_valid_keys, distance, window_left, window_right, c: tl.constexpr):
    """Return s [BLOCK_M, BLOCK_N] with -inf from key `n_valid_keys` of the block on, and where a query sees no key.

    `distance`: position of the block's first key minus that of the tile's first query. `rows`: `query_per_row`."""
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    s = tl.where((cols < n_valid_keys.to(tl.float32))[None, :], s, float("-inf"))
    rel = rows[:, None] - cols[None, :]
    if c.HAS_RIGHT:
        s = tl.where(rel >= (distance - window_right).to(tl.float32), s, float("-inf"))
    if c.HAS_LEFT:
        s = tl.where(rel <= (distance + window_left).to(tl.float32), s, float("-inf"))
    return s


@kernel
def _decode_kernel(
    q_ptr, k_ptr, v_ptr,
    seqlens_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, block_table_ptr, batch_idx_ptr, leftpad_ptr, slopes_ptr, sinks_ptr,
    out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_table, stride_slope_b,
    sm_scale, softcap, softcap_minus, softcap_rate,
    batch, heads_q, heads_kv, seqlen_q, total_q, length, added, capacity, page_size, entries,
    window_left, window_right, splits,
    c: tl.constexpr,
):  # fmt: skip
    """Write out and lse, or with PARTIAL those of each split for `_combine_kernel`. The module docstring lists steps.

    `entries`: pages of the cache, batch entries or packed rows. Rows that see no key get out 0 and lse +inf."""
    BLOCK_M: tl.constexpr = c.HEADS * c.QUERIES
    Q_IS_PACKED: tl.constexpr = c.HEADS > 1 and c.QUERIES > 1
    group = heads_q // heads_kv
    head_blocks = tl.cdiv(group, c.HEADS)
    tiles = tl.cdiv(seqlen_q, c.QUERIES) * head_blocks
    for task in range(tl.program_id(0), batch * heads_kv * splits * tiles, tl.num_programs(0)):
        tile = task % tiles
        split = task // tiles % splits
        hk = task // tiles // splits % heads_kv
        b = task // tiles // splits // heads_kv
        h0 = tile % head_blocks * c.HEADS
        row0 = tile // head_blocks * c.QUERIES
        head = hk * group + h0
        heads = tl.minimum(group - h0, c.HEADS)

        # Find the tile's queries, and the blocks of keys that they see in this split.
        start_q = 0
        sq = seqlen_q
        if c.VARLEN:
            start_q, sq = packed_rows(cu_seqlens_q_ptr, b, total_q)
        queries = tl.maximum(sq - row0, 0)
        start_k, first, count = key_bounds(
            seqlens_ptr, cu_seqlens_k_ptr, batch_idx_ptr, leftpad_ptr, b, length, added, capacity, entries, c
        )
        offset = count - sq
        lo = first
        hi = count
        if c.HAS_RIGHT:
            hi = tl.minimum(hi, row0 + c.QUERIES + offset + window_right)
        if c.HAS_LEFT:
            lo = tl.maximum(lo, row0 + offset - window_left)
        if c.VARLEN:
            hi = tl.where(queries > 0, hi, lo)
        block0 = lo // c.BLOCK_N
        block1 = tl.where(hi > lo, tl.cdiv(hi, c.BLOCK_N), block0)
        blocks_per_split = tl.cdiv(block1 - block0, splits)
        block0 += split * blocks_per_split
        block1 = tl.minimum(block1, block0 + blocks_per_split)

        if Q_IS_PACKED:  # q_ptr is the output of `_pack_kernel`
            n_valid_rows = BLOCK_M
            stride_q = c.HEAD_DIM
            q_base = q_ptr + ((b * heads_kv + hk) * tiles + tile).to(tl.int64) * (BLOCK_M * c.HEAD_DIM)
        else:
            if c.QUERIES == 1:
                n_valid_rows = tl.where(queries > 0, heads, 0)
                stride_q = stride_qh
            else:
                n_valid_rows = queries
                stride_q = stride_qm
            q_base = head_base(q_ptr, b, head, start_q + row0, stride_qb, stride_qh, stride_qm, c.VARLEN)
            if not c.VARLEN:
                q_base += row0.to(tl.int64) * stride_qm
        k_base = k_ptr + hk.to(tl.int64) * stride_kh
        v_base = v_ptr + hk.to(tl.int64) * stride_vh
        table = block_table_ptr
        if c.PAGES != "":
            table = block_table_ptr + b.to(tl.int64) * stride_table
            if c.PAGES == "gathered":
                fallback_page, fallback_row, has_page = first_key(table, lo, count, page_size, entries)
                block1 = tl.where(has_page, block1, block0)
        elif c.PACKED_KEYS:
            k_base += start_k.to(tl.int64) * stride_kn
            v_base += start_k.to(tl.int64) * stride_vn
        else:
            entry = b
            if c.BATCH_IDX:
                entry = tl.minimum(tl.maximum(tl.load(batch_idx_ptr + b), 0), entries - 1)
            k_base += entry.to(tl.int64) * stride_kb
            v_base += entry.to(tl.int64) * stride_vb
        q_block = block_at(q_base, n_valid_rows, stride_q, 0, 0, c.HEAD_DIM, BLOCK_M, c.BLOCK_D)
        q = load_tile(q_block, c.HEAD_DIM != c.BLOCK_D)
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, c.BLOCK_DV], tl.float32)
        rows = query_per_row(c)
        if c.ALIBI:
            slope = head_value_per_row(slopes_ptr + b.to(tl.int64) * stride_slope_b + head, heads, 0.0, c)
        # Counted from 0: a loop that begins at a window's edge crashes AscendNPU IR 1.0.0.
        for step in range(block1 - block0):
            block = block0 + step
            key0 = tl.maximum(block * c.BLOCK_N, first)
            n_valid_keys = tl.minimum((block + 1) * c.BLOCK_N, count) - key0
            distance = key0 - row0 - offset  # from the tile's first query to the block's first key
            page = 0
            row = key0
            if c.PAGES == "whole":
                entry = tl.load(table + key0 // page_size)
                page = nearest_page(entry, entries)
                row = key0 % page_size
                n_valid_keys = tl.where(page == entry, n_valid_keys, 0)
            elif c.PAGES == "gathered":
                page, row = gathered_rows(table, key0, lo, count, fallback_page, fallback_row, page_size, entries, c)
            k = load_keys(k_base, page, row, n_valid_keys, stride_kb, stride_kn, c.HEAD_DIM, c.BLOCK_D, c)
            s = dot(q, tl.trans(k), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
            if c.SOFTCAP != "":
                s = capped_scores(s, softcap, softcap_minus, softcap_rate, c.SOFTCAP)
            else:
                s = s * sm_scale
            if c.ALIBI:
                cols = tl.arange(0, c.BLOCK_N).to(tl.float32) + distance.to(tl.float32)
                s = s - slope[:, None] * tl.abs(rows[:, None] - cols[None, :])
            needs_mask = n_valid_keys < c.BLOCK_N
            if c.HAS_RIGHT:
                needs_mask = needs_mask | (distance + c.BLOCK_N - 1 > window_right)
            if c.HAS_LEFT:
                needs_mask = needs_mask | (distance < c.QUERIES - 1 - window_left)
            if c.ALWAYS_MASK:  # noqa: SIM114 - one is compiled in, the other tested at run time
                s = mask_keys(s, rows, n_valid_keys, distance, window_left, window_right, c)
            elif needs_mask:
                s = mask_keys(s, rows, n_valid_keys, distance, window_left, window_right, c)
            if c.PAGES == "gathered":
                s = tl.where(have_pages(table, key0, n_valid_keys, page_size, entries, c)[None, :], s, float("-inf"))
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, c.INTERPRET)
            v = load_keys(v_base, page, row, n_valid_keys, stride_vb, stride_vn, c.HEAD_DIM_V, c.BLOCK_DV, c)
            acc = acc * alpha[:, None]
            acc = dot_add(narrow(p, v.dtype, c.INTERPRET), v, acc, c.INTERPRET)
        if c.SINKS:  # a key without a value, as in the forward kernel; counted in split 0 only
            n_sinks = tl.where(split == 0, heads, 0)
            sink = head_value_per_row(sinks_ptr + head, n_sinks, float("-inf"), c)
            m_new = running_max(m_i, sink, c.INTERPRET)
            alpha = tl.exp(m_i - m_new)
            l_i = l_i * alpha + tl.exp(sink - m_new)
            acc = keep_first_rows(acc, tl.where(block1 > block0, BLOCK_M, 0), BLOCK_M) * alpha[:, None]
            m_i = m_new
        empty = l_i == 0.0  # the select drops an accumulator that no iteration wrote
        safe_l = tl.where(empty, 1.0, l_i)
        out = tl.where(empty[:, None], 0.0, acc / safe_l[:, None])
        lse = tl.where(empty, float("inf"), m_i + tl.log(safe_l))
        if c.PARTIAL:  # the workspace holds whole tiles in the order of tasks
            first_row = (((b * heads_kv + hk) * splits + split) * tiles + tile).to(tl.int64) * BLOCK_M
            out_base = out_ptr + first_row * c.HEAD_DIM_V
            lse_base = lse_ptr + first_row
            n_valid_rows = BLOCK_M
            stride_out = c.HEAD_DIM_V
        else:
            out_base = head_base(out_ptr, b, head, start_q + row0, stride_ob, stride_oh, stride_om, c.VARLEN)
            if not c.VARLEN:
                out_base += row0.to(tl.int64) * stride_om
            lse_base = dense_head_base(lse_ptr, b, head, start_q, heads_q, seqlen_q, total_q, c.VARLEN) + row0
            stride_out = stride_oh if c.QUERIES == 1 else stride_om
        out_block = block_at(out_base, n_valid_rows, stride_out, 0, 0, c.HEAD_DIM_V, BLOCK_M, c.BLOCK_DV)
        store_tile(out_block, narrow(out, out_ptr.dtype.element_ty, c.INTERPRET), c.HEAD_DIM_V != c.BLOCK_DV)
        store_row(lse_base, lse, 0, n_valid_rows, BLOCK_M)


@triton.jit
def locate_rows(
    cu_seqlens_q_ptr, pair, tile, r0, heads_q, heads_kv, seqlen_q, total_q,
    c: tl.constexpr,
):  # fmt: skip
    """Describe ROWS rows of a tile from row `r0` on: heads of one query, or queries of one head.

    `pair` is b * heads_kv + KV head. Returns (b, query head, first row of the sequence in packed q, query, rows that
    exist)."""
    group = heads_q // heads_kv
    head_blocks = tl.cdiv(group, c.HEADS)
    in_group = tile % head_blocks * c.HEADS + r0 // c.QUERIES
    query = tile // head_blocks * c.QUERIES + r0 % c.QUERIES
    b = pair // heads_kv
    start = 0
    length = seqlen_q
    if c.VARLEN:
        start, length = packed_rows(cu_seqlens_q_ptr, b, total_q)
    if c.QUERIES == 1:
        n_valid_rows = tl.where(query < length, tl.minimum(group - in_group, c.ROWS), 0)
    else:
        n_valid_rows = tl.where(in_group < group, tl.minimum(length - query, c.ROWS), 0)
    return b, pair % heads_kv * group + in_group, start, query, tl.maximum(n_valid_rows, 0)


@kernel
def _pack_kernel(
    q_ptr, cu_seqlens_q_ptr,
    packed_q_ptr,
    stride_qb, stride_qh, stride_qm,
    batch, heads_q, heads_kv, seqlen_q, total_q, tiles,
    c: tl.constexpr,
):  # fmt: skip
    """Copy tiles of several queries of several heads, so that their rows are contiguous.

    In q no single stride leads along these rows. A tile assembled inside `_decode_kernel` would not get the layout that
    the cube core reads."""
    CHUNKS: tl.constexpr = c.HEADS * c.QUERIES // c.ROWS
    for task in range(tl.program_id(0), batch * heads_kv * tiles * CHUNKS, tl.num_programs(0)):
        pair = task // CHUNKS // tiles
        b, head, start, query, n_valid_rows = locate_rows(
            cu_seqlens_q_ptr, pair, task // CHUNKS % tiles, task % CHUNKS * c.ROWS, heads_q, heads_kv, seqlen_q,
            total_q, c,
        )  # fmt: skip
        q_base = head_base(q_ptr, b, head, start + query, stride_qb, stride_qh, stride_qm, c.VARLEN)
        if not c.VARLEN:
            q_base += query.to(tl.int64) * stride_qm
        q = load_block(q_base, n_valid_rows, stride_qm, 0, c.HEAD_DIM, c.ROWS, c.BLOCK_D)
        row = (pair * tiles + task // CHUNKS % tiles).to(tl.int64) * (c.HEADS * c.QUERIES) + task % CHUNKS * c.ROWS
        store_block(packed_q_ptr + row * c.HEAD_DIM, q, c.ROWS, c.HEAD_DIM, 0, c.HEAD_DIM, c.ROWS, c.BLOCK_D)


@triton.jit
def split_lse(base, rows, ROWS: tl.constexpr):
    """Load the log-sum-exps of a split [ROWS], -inf for rows that see no key in it."""
    lse = load_values(base, 0, rows, ROWS)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@kernel
def _combine_kernel(
    partial_ptr, partial_lse_ptr, cu_seqlens_q_ptr,
    out_ptr, lse_ptr,
    stride_ob, stride_oh, stride_om,
    batch, heads_q, heads_kv, seqlen_q, total_q, tiles, splits,
    c: tl.constexpr,
):  # fmt: skip
    """Merge out and lse of all splits, ROWS rows at a time, from the workspace that `_decode_kernel` writes.

    m_i is the maximum lse of the splits; a split has the weight exp(lse - m_i)."""
    CHUNKS: tl.constexpr = c.HEADS * c.QUERIES // c.ROWS
    split_stride = (tiles * (c.HEADS * c.QUERIES)).to(tl.int64)  # rows of the workspace from one split to the next
    for task in range(tl.program_id(0), batch * heads_kv * tiles * CHUNKS, tl.num_programs(0)):
        pair = task // CHUNKS // tiles
        b, head, start, query, n_valid_rows = locate_rows(
            cu_seqlens_q_ptr, pair, task // CHUNKS % tiles, task % CHUNKS * c.ROWS, heads_q, heads_kv, seqlen_q,
            total_q, c,
        )  # fmt: skip
        first_row = (pair * splits * tiles + task // CHUNKS % tiles).to(tl.int64) * (
            c.HEADS * c.QUERIES
        ) + task % CHUNKS * c.ROWS
        m_i = tl.full([c.ROWS], LOWEST, tl.float32)
        for split in range(splits):
            lse = split_lse(partial_lse_ptr + first_row + split * split_stride, n_valid_rows, c.ROWS)
            m_i = running_max(m_i, lse, c.INTERPRET)
        l_i = tl.zeros([c.ROWS], tl.float32)
        acc = tl.zeros([c.ROWS, c.BLOCK_DV], tl.float32)
        for split in range(splits):
            row = first_row + split * split_stride
            weight = tl.exp(split_lse(partial_lse_ptr + row, n_valid_rows, c.ROWS) - m_i)
            partial = load_block(
                partial_ptr + row * c.HEAD_DIM_V, n_valid_rows, c.HEAD_DIM_V, 0, c.HEAD_DIM_V, c.ROWS, c.BLOCK_DV
            )
            acc += weight[:, None] * partial
            l_i += weight
        empty = l_i == 0.0
        safe_l = tl.where(empty, 1.0, l_i)
        out = tl.where(empty[:, None], 0.0, acc / safe_l[:, None])
        lse = tl.where(empty, float("inf"), m_i + tl.log(safe_l))
        out_base = head_base(out_ptr, b, head, start + query, stride_ob, stride_oh, stride_om, c.VARLEN)
        if not c.VARLEN:
            out_base += query.to(tl.int64) * stride_om
        stride = stride_oh if c.QUERIES == 1 else stride_om
        out = narrow(out, out_ptr.dtype.element_ty, c.INTERPRET)
        store_block(out_base, out, n_valid_rows, stride, 0, c.HEAD_DIM_V, c.ROWS, c.BLOCK_DV)
        lse_base = dense_head_base(lse_ptr, b, head, start, heads_q, seqlen_q, total_q, c.VARLEN) + query
        store_values(lse_base, lse, 0, n_valid_rows, c.ROWS)


def split_count(problem: KVCacheProblem, tile: AttentionTile, tiles: int, programs: int) -> int:
    """Return the number of splits of a sequence's keys. One split has `tiles` tasks; `programs` programs take them.

    Every program should get several tasks, which evens out sequences of different lengths. A split has at least
    `configs.DECODE_SPLIT_BLOCKS` blocks if the sequence fills its capacity; the host does not know the lengths.
    """
    if problem.batch_invariant:
        return 1
    keys = problem.capacity
    if problem.window_left >= 0 and problem.window_right >= 0:
        keys = min(keys, problem.window_left + problem.window_right + problem.seqlen_q)
    blocks = triton.cdiv(keys, tile.block_n)
    if problem.num_splits:
        return max(1, min(problem.num_splits, blocks))
    target = triton.cdiv(configs.DECODE_TASKS * programs, max(tiles, 1))
    return max(1, min(target, blocks // configs.DECODE_SPLIT_BLOCKS, configs.DECODE_MAX_SPLITS))


def make_launches(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    tile: AttentionTile | None = None,
) -> list[Launch]:
    """Return the launches that fill out and lse, one to three. `tile` replaces the table's tile."""
    tile = tile or configs.untuned_tile(problem, "decode")
    group = problem.heads_q // problem.heads_kv
    heads = heads_per_tile(problem, tile)
    queries = tile.block_m // heads
    pairs = problem.batch * problem.heads_kv
    tiles = pairs * triton.cdiv(group, heads) * triton.cdiv(problem.seqlen_q, queries)
    device = tensors.q.device
    splits = split_count(problem, tile, tiles, cube_programs(problem.arch, device, tiles * problem.capacity))
    packed = min(heads, queries) > 1
    # A program stores consecutive values of lse. Packed sequences of one query have lse (H, Tq), where heads are not
    # consecutive: then `_combine_kernel` stores one row at a time.
    partial = splits > 1 or packed or (problem.varlen and queries == 1)
    rows_per_program = 1 if problem.varlen and queries == 1 else min(heads if queries == 1 else queries, VECTOR_ROWS)
    values = call_values(problem, tensors, tile) | {
        "HEADS": heads, "QUERIES": queries, "ROWS": rows_per_program, "splits": splits, "tiles": tiles // pairs
    }  # fmt: skip
    results = {**tensor_arguments(problem.layout, out=out), "lse_ptr": lse}
    vector_grid = vector_programs(problem.arch, device, tiles * tile.block_m // rows_per_program)
    options = configs.family_options(problem.arch)
    launches = []
    buffers = results
    if partial:
        rows = tiles * splits * tile.block_m
        buffers = results | {
            "out_ptr": out.new_empty((rows, problem.head_dim_v), dtype=torch.float32),
            "lse_ptr": lse.new_empty(rows),
        }
    if packed:
        x = tensors.q.new_empty(tiles * tile.block_m, problem.head_dim)
        launches.append(bind_launch(_pack_kernel, RowConstants, vector_grid, values | {"packed_q_ptr": x}, options))
        buffers = buffers | {"q_ptr": x}
    grid = cube_programs(problem.arch, device, tiles * splits)
    decode = values | buffers | {"PARTIAL": partial}
    launches.append(bind_launch(_decode_kernel, DecodeConstants, grid, decode, tile.compile_options(problem.arch)))
    if partial:
        combine = values | results | {"partial_ptr": buffers["out_ptr"], "partial_lse_ptr": buffers["lse_ptr"]}
        launches.append(bind_launch(_combine_kernel, RowConstants, vector_grid, combine, options))
    return launches


def heads_per_tile(problem: KVCacheProblem, tile: AttentionTile) -> int:
    """Return the number of query heads in a tile; it has block_m / heads queries of each.

    One query: block_m. Fewer queries than block_m: the heads of a KV head, at most block_m / 2. Else 1."""
    group = triton.next_power_of_2(problem.heads_q // problem.heads_kv)
    if problem.seqlen_q == 1:
        return tile.block_m
    return min(group, tile.block_m // 2) if problem.seqlen_q < tile.block_m else 1


def call_values(problem: KVCacheProblem, tensors: KVCacheTensors, tile: AttentionTile) -> dict[str, Any]:
    """Return the kernels' arguments and constants of a call by name, except results."""
    table = tensors.block_table
    keys = "thd" if problem.packed_keys else "bshd"
    # A single query is at the last key, so no key is later.
    right = problem.window_right if problem.seqlen_q > 1 else -1
    names = "batch heads_q heads_kv seqlen_q total_q capacity page_size window_left"
    return {
        **tensor_arguments(problem.layout, q=tensors.q),
        **tensor_arguments(keys, k=tensors.k_cache, v=tensors.v_cache),
        "seqlens_ptr": tensors.seqlens,
        "cu_seqlens_q_ptr": tensors.cu_seqlens_q,
        "cu_seqlens_k_ptr": tensors.cu_seqlens_k,
        "block_table_ptr": table,
        "stride_table": 0 if table is None else table.stride(0),
        "batch_idx_ptr": tensors.cache_batch_idx,
        "leftpad_ptr": tensors.leftpad,
        "slopes_ptr": tensors.alibi_slopes,
        "stride_slope_b": per_head_stride(tensors.alibi_slopes),
        "sinks_ptr": tensors.sinks,
        **configs.attention_scalars(problem, tensors.sm_scale, 0.0),
        **{name: getattr(problem, name) for name in names.split()},
        "window_right": right,
        "length": tensors.length,
        "added": tensors.added,
        "entries": tensors.k_cache.shape[0],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_N": tile.block_n,
        "HAS_LEFT": problem.window_left >= 0,
        "HAS_RIGHT": right >= 0,
        "SOFTCAP": configs.softcap_form(problem),
        "ALIBI": problem.alibi,
        "SINKS": problem.sinks,
        "ALWAYS_MASK": configs.ALWAYS_MASK,
        "VARLEN": problem.varlen,
        "SEQLENS": tensors.seqlens is not None,
        "CU_SEQLENS_K": tensors.cu_seqlens_k is not None,
        "PACKED_KEYS": problem.packed_keys,
        "PAGES": configs.pages_form(problem, tile),
        "BATCH_IDX": tensors.cache_batch_idx is not None,
        "LEFTPAD": tensors.leftpad is not None,
        "INTERPRET": INTERPRETED,
    }


def kvcache_fwd(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the kernels that fill out (q's shape with v's head dim) and lse (`problem.lse_shape`, fp32)."""

    def launches(tile: AttentionTile) -> list[Launch]:
        return make_launches(problem, tensors, out, lse, tile)

    with device_guard(tensors.q):
        run_tiled(problem, "decode", chosen_tile(problem, "decode", launches), launches)


def attention_fwd(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Run the forward pass of training in batch-invariant mode, with k and v as the cache."""
    if not problem.varlen:
        out = as_bhsd(out, problem.layout).transpose(1, 2)
    kvcache_fwd(*as_kvcache(problem, tensors), out, lse)
