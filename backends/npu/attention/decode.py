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

Names: a *row* of a tile is one query of one head. A *query* counts in its sequence, a *key* in its sequence, padding
included. A *page row* is a key's position in its page. A *chunk* is CHUNK_ROWS rows of a tile, a vector program's task.
Sequences are packed (VARLEN, PACKED_KEYS) if they lie one after another without padding; q is packed if `_pack_kernel`
has copied it (Q_IS_PACKED).

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
    load_row,
    load_tile,
    narrow,
    packed_rows,
    running_max,
    store_row,
    store_tile,
)
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

MAX_CHUNK_ROWS = 16  # rows of a tile that a vector program packs or combines at once


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
class ChunkConstants(Constants):
    """Constants of the vector kernels, `_pack_kernel` and `_combine_kernel`. A task is a chunk of a tile's rows."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int
    heads: int
    queries: int
    chunk_rows: int
    varlen: bool
    interpret: bool


@triton.jit
def cached_keys(
    seqlens_ptr, cu_seqlens_k_ptr, batch_idx_ptr, leftpad_ptr, b, length, added, capacity, cache_dim0, c: tl.constexpr
):  # fmt: skip
    """Return (start_k, pad, n_keys) of sequence `b`: it has keys [pad, n_keys), and key 0 is row start_k if packed.

    `n_keys` counts the padding. The keys stay inside memory, whatever the lengths on the device say."""
    start_k = 0
    n_keys = length + added
    if c.CU_SEQLENS_K:
        start_k = tl.maximum(tl.load(cu_seqlens_k_ptr + b), 0)
        n_keys = tl.maximum(tl.load(cu_seqlens_k_ptr + b + 1), start_k) - start_k
    if c.PACKED_KEYS:  # SEQLENS may use fewer keys than lie between two offsets
        start_k = tl.minimum(start_k, cache_dim0)
        n_keys = tl.minimum(n_keys, cache_dim0 - start_k)
        if c.SEQLENS:
            n_keys = tl.minimum(n_keys, tl.load(seqlens_ptr + b))
    elif c.SEQLENS:
        n_keys = tl.minimum(tl.load(seqlens_ptr + b), capacity) + added
    n_keys = tl.minimum(tl.maximum(n_keys, 0), capacity)
    if c.BATCH_IDX:
        cache_b = tl.load(batch_idx_ptr + b)
        n_keys = tl.where((cache_b >= 0) & (cache_b < cache_dim0), n_keys, 0)
    pad = 0
    if c.LEFTPAD:
        pad = tl.minimum(tl.maximum(tl.load(leftpad_ptr + b), 0), n_keys)
    return start_k, pad, n_keys


@triton.jit
def cached_key_range(query0, n_valid_queries, pad, n_keys, offset, window_left, window_right, c: tl.constexpr):
    """Return (key_lo, key_hi): the tile whose first query is `query0` sees no keys outside [key_lo, key_hi).

    Query i is aligned with key i + `offset`. Without HAS_RIGHT and HAS_LEFT all keys [pad, n_keys) count as seen."""
    key_lo = pad
    key_hi = n_keys
    if c.HAS_RIGHT:
        key_hi = tl.minimum(key_hi, query0 + c.QUERIES + offset + window_right)
    if c.HAS_LEFT:
        key_lo = tl.maximum(key_lo, query0 + offset - window_left)
    if c.VARLEN:  # packed sequences may be shorter than the longest, for which the host made tiles
        key_hi = tl.where(n_valid_queries > 0, key_hi, key_lo)
    return key_lo, key_hi


@triton.jit
def blocks_of_split(key_lo, key_hi, split, splits, c: tl.constexpr):
    """Return (first_block, end_block) of split `split`. The splits divide the blocks with keys [key_lo, key_hi)."""
    first_block = key_lo // c.BLOCK_N
    end_block = tl.where(key_hi > key_lo, tl.cdiv(key_hi, c.BLOCK_N), first_block)
    blocks_per_split = tl.cdiv(end_block - first_block, splits)
    first_block += split * blocks_per_split
    end_block = tl.minimum(end_block, first_block + blocks_per_split)
    return first_block, end_block


@triton.jit
def nearest_page(page_ids, n_pages):
    """Clamp entries of the page table to existing pages."""
    return tl.minimum(tl.maximum(page_ids, 0), n_pages - 1)


@triton.jit
def first_stored_key(table_ptr, key_lo, n_keys, page_size, n_pages):
    """Find the first of the keys [key_lo, n_keys) in an existing page. Returns (page, page row, whether there is one).

    `table_ptr`: the sequence's row of the page table."""
    column = key_lo // page_size
    page_id = -1
    while (column * page_size < n_keys) & ((page_id < 0) | (page_id >= n_pages)):
        page_id = tl.load(table_ptr + column)
        column += 1
    key = tl.maximum((column - 1) * page_size, key_lo)
    return nearest_page(page_id, n_pages), key % page_size, (page_id >= 0) & (page_id < n_pages)


@triton.jit
def gathered_keys(
    table_ptr, key0, key_lo, n_keys, fallback_page, fallback_page_row, page_size, n_pages, c: tl.constexpr
):
    """Return (page, row in that page) of each key from `key0` on, int32 [BLOCK_N] each.

    Memory of keys that no query sees may not be read: it may hold NaN, and a weight of 0 times NaN is NaN. So other
    keys replace them: key `key_lo` those before it, which the left window hides from all queries; the sequence's last
    key those beyond it; and row `fallback_page_row` of `fallback_page` (`first_stored_key`) those whose table entry
    names no page.

    With AscendNPU IR 1.1.0 a select on loaded values or addresses would keep the compiler from dividing the tile
    between the vector cores, or from pipelining. This arithmetic does not.
    """
    keys = tl.minimum(tl.arange(0, c.BLOCK_N) + key0, n_keys - 1)
    if c.HAS_LEFT:
        keys = tl.maximum(keys, key_lo)
    page_ids = tl.load(table_ptr + keys // page_size)
    page = nearest_page(page_ids, n_pages)
    page_row = keys % page_size
    is_absent = tl.minimum(tl.maximum(page_ids - page, -1), 1)
    is_absent = is_absent * is_absent  # 0 or 1
    return page + is_absent * (fallback_page - page), page_row + is_absent * (fallback_page_row - page_row)


@triton.jit
def have_pages(table_ptr, key0, n_valid_keys, page_size, n_pages, c: tl.constexpr):
    """Return which of the `n_valid_keys` keys from `key0` on lie in an existing page, bool [BLOCK_N].

    This reads the table a second time: AscendNPU IR 1.1.0 makes no mask from values that also form addresses. The load
    is clamped, not masked: AscendNPU IR 1.2.0 would load beyond the table first and select afterwards."""
    cols = tl.minimum(tl.arange(0, c.BLOCK_N), n_valid_keys - 1)
    page_ids = tl.load(table_ptr + (key0 + cols) // page_size)
    return (page_ids - nearest_page(page_ids, n_pages)).to(tl.float32) == 0.0  # the vector core compares no integers


@triton.jit
def load_keys(
    base, page, page_row, n_valid_keys, stride_page, stride_n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Load `n_valid_keys` keys (or values) from row `page_row` of `page` on, zero beyond them, [BLOCK_N, BLOCK_D].

    With PAGES "gathered", `page` and `page_row` are [BLOCK_N], and beyond `n_valid_keys` the tile holds other keys of
    the sequence. Without pages the sequence's keys are one page, page 0, and begin at `base`."""
    if c.PAGES == "gathered":
        offs = page.to(tl.int64) * stride_page + page_row.to(tl.int64) * stride_n
        offs_d = tl.arange(0, BLOCK_D)
        if HEAD_DIM == BLOCK_D:
            x = tl.load(base + offs[:, None] + offs_d[None, :])
        else:
            x = tl.load(base + offs[:, None] + offs_d[None, :], mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        if c.PAGES == "whole":
            base += page.to(tl.int64) * stride_page
        base += page_row.to(tl.int64) * stride_n
        x = load_tile(block_at(base, n_valid_keys, stride_n, 0, 0, HEAD_DIM, c.BLOCK_N, BLOCK_D), HEAD_DIM != BLOCK_D)
    return x


@triton.jit
def query_per_row(c: tl.constexpr):
    """Return the query of each row of a tile, counted from the tile's first query, fp32 [BLOCK_M].

    A reshape or a division here would make the compiler use only one of the two vector cores."""
    rows = tl.arange(0, c.HEADS * c.QUERIES).to(tl.float32)
    row_query = rows
    if c.QUERIES == 1:
        row_query = tl.zeros([c.HEADS], tl.float32)
    else:
        for head in tl.static_range(1, c.HEADS):
            row_query = tl.where(rows >= head * c.QUERIES, rows - head * c.QUERIES, row_query)
    return row_query


@triton.jit
def head_value_per_row(ptr, n_valid_heads, other, c: tl.constexpr):
    """Return the value of each row's head, [BLOCK_M], from the values of a tile's heads at `ptr`.

    Heads of the tile from `n_valid_heads` on have the value `other`."""
    if c.QUERIES == 1:
        offs = tl.arange(0, c.HEADS)
        values = tl.load(ptr + offs, mask=offs < n_valid_heads, other=other)
    else:
        rows = tl.arange(0, c.HEADS * c.QUERIES).to(tl.float32)
        values = tl.zeros([c.HEADS * c.QUERIES], tl.float32)
        for head in tl.static_range(c.HEADS):
            offs = tl.arange(0, 1) + head
            value = tl.load(ptr + offs, mask=offs < n_valid_heads, other=other)
            values = tl.where(rows >= head * c.QUERIES, value, values)
    return values


@triton.jit
def mask_keys(s, row_query, n_valid_keys, distance, window_left, window_right, c: tl.constexpr):
    """Return s [BLOCK_M, BLOCK_N] with -inf from key `n_valid_keys` of the block on, and where a query sees no key.

    `distance`: position of the block's first key minus that of the tile's first query. `row_query`: `query_per_row`."""
    cols = tl.arange(0, c.BLOCK_N).to(tl.float32)
    s = tl.where((cols < n_valid_keys.to(tl.float32))[None, :], s, float("-inf"))
    rel = row_query[:, None] - cols[None, :]
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
    batch, heads_q, heads_kv, seqlen_q, total_q, length, added, capacity, page_size, cache_dim0,
    window_left, window_right, splits,
    c: tl.constexpr,
):  # fmt: skip
    """Write out and lse, or with PARTIAL those of each split, in fp32 and in the order of tasks, for `_combine_kernel`.

    For each task (b, hk, split, tile) a program

    1. finds the tile: queries [query0, query0 + QUERIES) of heads [head, head + HEADS); row r of it is query
       query0 + r % QUERIES of head + r // QUERIES;
    2. finds the sequence's keys [pad, n_keys), those that the tile sees, and their blocks in this split;
    3. finds where the rows of q, k and v lie, and loads q;
    4. for each block of keys: finds its page, loads k, forms, scales and masks the scores, updates the online softmax,
       loads v and accumulates;
    5. adds the sinks (split 0 alone), and stores out and lse. Rows that see no key get out 0 and lse +inf.

    q, out: (B, Sq, H, D), or VARLEN (Tq, H, D); lse: (B, H, Sq), or VARLEN (H, Tq). With HEADS and QUERIES above 1,
    `q_ptr` is the output of `_pack_kernel`, [tiles, BLOCK_M, HEAD_DIM].
    k, v: (Bc, Sc, Hk, D); with PAGES (pages, page_size, Hk, D), and block_table int32 (B, columns); PACKED_KEYS
    (Tk, Hk, D). `cache_dim0`: the first of these sizes. Strides are in elements.
    seqlens, batch_idx, leftpad: int32 (B,). cu_seqlens_q, cu_seqlens_k: int32 (B + 1,). slopes: fp32 (H,) or (B, H),
    with `stride_slope_b` 0 or H. sinks: fp32 (H,).
    `length`, `added`, `capacity`: numbers of keys, see `KVCacheTensors`. `window_left`, `window_right`: numbers of
    keys. `configs.attention_scalars` defines sm_scale to softcap_rate.

    Invariants: PAGES and PACKED_KEYS exclude each other, and both exclude BATCH_IDX. PACKED_KEYS implies CU_SEQLENS_K.
    PACKED_KEYS and LEFTPAD exclude each other. Several splits, or HEADS and QUERIES above 1 (Q_IS_PACKED), imply
    PARTIAL.
    """
    BLOCK_M: tl.constexpr = c.HEADS * c.QUERIES
    Q_IS_PACKED: tl.constexpr = c.HEADS > 1 and c.QUERIES > 1
    group = heads_q // heads_kv
    head_blocks = tl.cdiv(group, c.HEADS)
    tiles = tl.cdiv(seqlen_q, c.QUERIES) * head_blocks
    for task in range(tl.program_id(0), batch * heads_kv * splits * tiles, tl.num_programs(0)):
        # 1. The tile.
        tile = task % tiles
        split = task // tiles % splits
        hk = task // tiles // splits % heads_kv
        b = task // tiles // splits // heads_kv
        head_in_group = tile % head_blocks * c.HEADS
        query0 = tile // head_blocks * c.QUERIES
        head = hk * group + head_in_group
        n_valid_heads = tl.minimum(group - head_in_group, c.HEADS)
        start_q = 0
        sq = seqlen_q
        if c.VARLEN:
            start_q, sq = packed_rows(cu_seqlens_q_ptr, b, total_q)
        n_valid_queries = tl.maximum(sq - query0, 0)

        # 2. The blocks of keys that it sees in this split.
        start_k, pad, n_keys = cached_keys(
            seqlens_ptr, cu_seqlens_k_ptr, batch_idx_ptr, leftpad_ptr, b, length, added, capacity, cache_dim0, c
        )
        offset = n_keys - sq  # query i is aligned with key i + offset
        key_lo, key_hi = cached_key_range(query0, n_valid_queries, pad, n_keys, offset, window_left, window_right, c)
        first_block, end_block = blocks_of_split(key_lo, key_hi, split, splits, c)

        # 3. Memory.
        if Q_IS_PACKED:
            n_valid_rows = BLOCK_M
            stride_q = c.HEAD_DIM
            q_base = q_ptr + ((b * heads_kv + hk) * tiles + tile).to(tl.int64) * (BLOCK_M * c.HEAD_DIM)
        else:
            if c.QUERIES == 1:
                n_valid_rows = tl.where(n_valid_queries > 0, n_valid_heads, 0)
                stride_q = stride_qh
            else:
                n_valid_rows = n_valid_queries
                stride_q = stride_qm
            q_base = head_base(q_ptr, b, head, start_q + query0, stride_qb, stride_qh, stride_qm, c.VARLEN)
            if not c.VARLEN:
                q_base += query0.to(tl.int64) * stride_qm
        k_base = k_ptr + hk.to(tl.int64) * stride_kh
        v_base = v_ptr + hk.to(tl.int64) * stride_vh
        table = block_table_ptr
        if c.PAGES != "":
            table = block_table_ptr + b.to(tl.int64) * stride_table
            if c.PAGES == "gathered":
                fallback_page, fallback_page_row, has_page = first_stored_key(
                    table, key_lo, n_keys, page_size, cache_dim0
                )
                end_block = tl.where(has_page, end_block, first_block)
        elif c.PACKED_KEYS:
            k_base += start_k.to(tl.int64) * stride_kn
            v_base += start_k.to(tl.int64) * stride_vn
        else:
            cache_b = b
            if c.BATCH_IDX:
                cache_b = tl.minimum(tl.maximum(tl.load(batch_idx_ptr + b), 0), cache_dim0 - 1)
            k_base += cache_b.to(tl.int64) * stride_kb
            v_base += cache_b.to(tl.int64) * stride_vb
        q_block = block_at(q_base, n_valid_rows, stride_q, 0, 0, c.HEAD_DIM, BLOCK_M, c.BLOCK_D)
        q = load_tile(q_block, c.HEAD_DIM != c.BLOCK_D)  # [BLOCK_M, BLOCK_D]
        m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, c.BLOCK_DV], tl.float32)
        row_query = query_per_row(c)
        if c.ALIBI:
            slope = head_value_per_row(slopes_ptr + b.to(tl.int64) * stride_slope_b + head, n_valid_heads, 0.0, c)

        # 4. The keys. Counted from 0: a loop that begins at a window's edge crashes AscendNPU IR 1.0.0.
        for step in range(end_block - first_block):
            block = first_block + step
            key0 = tl.maximum(block * c.BLOCK_N, pad)
            n_valid_keys = tl.minimum((block + 1) * c.BLOCK_N, n_keys) - key0
            distance = key0 - query0 - offset  # from the tile's first query to the block's first key
            page = 0
            page_row = key0
            if c.PAGES == "whole":
                page_id = tl.load(table + key0 // page_size)
                page = nearest_page(page_id, cache_dim0)
                page_row = key0 % page_size
                n_valid_keys = tl.where(page == page_id, n_valid_keys, 0)
            elif c.PAGES == "gathered":
                page, page_row = gathered_keys(
                    table, key0, key_lo, n_keys, fallback_page, fallback_page_row, page_size, cache_dim0, c
                )
            k = load_keys(k_base, page, page_row, n_valid_keys, stride_kb, stride_kn, c.HEAD_DIM, c.BLOCK_D, c)
            s = dot(q, tl.trans(k), c.INTERPRET)  # [BLOCK_M, BLOCK_N]
            if c.SOFTCAP != "":
                s = capped_scores(s, softcap, softcap_minus, softcap_rate, c.SOFTCAP)
            else:
                s = s * sm_scale
            if c.ALIBI:
                cols = tl.arange(0, c.BLOCK_N).to(tl.float32) + distance.to(tl.float32)
                s = s - slope[:, None] * tl.abs(row_query[:, None] - cols[None, :])
            needs_mask = n_valid_keys < c.BLOCK_N
            if c.HAS_RIGHT:
                needs_mask = needs_mask | (distance + c.BLOCK_N - 1 > window_right)
            if c.HAS_LEFT:
                needs_mask = needs_mask | (distance < c.QUERIES - 1 - window_left)
            if c.ALWAYS_MASK:  # noqa: SIM114 - one is compiled in, the other tested at run time
                s = mask_keys(s, row_query, n_valid_keys, distance, window_left, window_right, c)
            elif needs_mask:
                s = mask_keys(s, row_query, n_valid_keys, distance, window_left, window_right, c)
            if c.PAGES == "gathered":
                is_stored = have_pages(table, key0, n_valid_keys, page_size, cache_dim0, c)
                s = tl.where(is_stored[None, :], s, float("-inf"))
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, c.INTERPRET)
            v = load_keys(v_base, page, page_row, n_valid_keys, stride_vb, stride_vn, c.HEAD_DIM_V, c.BLOCK_DV, c)
            acc = acc * alpha[:, None]
            acc = dot_add(narrow(p, v.dtype, c.INTERPRET), v, acc, c.INTERPRET)

        # 5. The sinks, and the results.
        if c.SINKS:  # a key without a value, as in the forward kernel; counted in split 0 only
            n_sinks = tl.where(split == 0, n_valid_heads, 0)
            sink = head_value_per_row(sinks_ptr + head, n_sinks, float("-inf"), c)
            m_new = running_max(m_i, sink, c.INTERPRET)
            alpha = tl.exp(m_i - m_new)
            l_i = l_i * alpha + tl.exp(sink - m_new)
            acc = keep_first_rows(acc, tl.where(end_block > first_block, BLOCK_M, 0), BLOCK_M) * alpha[:, None]
            m_i = m_new
        empty = l_i == 0.0  # the select drops an accumulator that no iteration wrote
        safe_l = tl.where(empty, 1.0, l_i)
        out = tl.where(empty[:, None], 0.0, acc / safe_l[:, None])
        lse = tl.where(empty, float("inf"), m_i + tl.log(safe_l))
        if c.PARTIAL:  # the workspace holds whole tiles in the order of tasks
            workspace_row = (((b * heads_kv + hk) * splits + split) * tiles + tile).to(tl.int64) * BLOCK_M
            out_base = out_ptr + workspace_row * c.HEAD_DIM_V
            lse_base = lse_ptr + workspace_row
            n_valid_rows = BLOCK_M
            stride_out = c.HEAD_DIM_V
        else:
            out_base = head_base(out_ptr, b, head, start_q + query0, stride_ob, stride_oh, stride_om, c.VARLEN)
            if not c.VARLEN:
                out_base += query0.to(tl.int64) * stride_om
            lse_base = dense_head_base(lse_ptr, b, head, start_q, heads_q, seqlen_q, total_q, c.VARLEN) + query0
            stride_out = stride_oh if c.QUERIES == 1 else stride_om
        out_block = block_at(out_base, n_valid_rows, stride_out, 0, 0, c.HEAD_DIM_V, BLOCK_M, c.BLOCK_DV)
        store_tile(out_block, narrow(out, out_ptr.dtype.element_ty, c.INTERPRET), c.HEAD_DIM_V != c.BLOCK_DV)
        store_row(lse_base, lse, 0, n_valid_rows, BLOCK_M)


@triton.jit
def locate_chunk(
    cu_seqlens_q_ptr, task, heads_q, heads_kv, seqlen_q, total_q, tiles,
    c: tl.constexpr,
):  # fmt: skip
    """Find chunk number `task`: CHUNK_ROWS rows of a tile, which are heads of one query, or queries of one head.

    Returns (pair, tile, first row of the chunk in the tile; b, query head, first row of the sequence in packed q,
    query, rows of the chunk that exist). `pair` is b * heads_kv + KV head; tiles are counted for each pair."""
    CHUNKS: tl.constexpr = c.HEADS * c.QUERIES // c.CHUNK_ROWS
    pair = task // CHUNKS // tiles
    tile = task // CHUNKS % tiles
    row_in_tile = task % CHUNKS * c.CHUNK_ROWS
    group = heads_q // heads_kv
    head_blocks = tl.cdiv(group, c.HEADS)
    head_in_group = tile % head_blocks * c.HEADS + row_in_tile // c.QUERIES
    query = tile // head_blocks * c.QUERIES + row_in_tile % c.QUERIES
    b = pair // heads_kv
    start_q = 0
    sq = seqlen_q
    if c.VARLEN:
        start_q, sq = packed_rows(cu_seqlens_q_ptr, b, total_q)
    if c.QUERIES == 1:
        n_valid_rows = tl.where(query < sq, tl.minimum(group - head_in_group, c.CHUNK_ROWS), 0)
    else:
        n_valid_rows = tl.where(head_in_group < group, tl.minimum(sq - query, c.CHUNK_ROWS), 0)
    head = pair % heads_kv * group + head_in_group
    return pair, tile, row_in_tile, b, head, start_q, query, tl.maximum(n_valid_rows, 0)


@kernel
def _pack_kernel(
    q_ptr, cu_seqlens_q_ptr,
    packed_q_ptr,
    stride_qb, stride_qh, stride_qm,
    batch, heads_q, heads_kv, seqlen_q, total_q, tiles,
    c: tl.constexpr,
):  # fmt: skip
    """Copy tiles of several queries of several heads, so that their rows are contiguous.

    In q these rows have no common stride, and a tile that `_decode_kernel` put together itself would not get the layout
    that the cube core reads. `packed_q_ptr`: [batch, heads_kv, tiles, BLOCK_M, HEAD_DIM] in q's dtype."""
    BLOCK_M: tl.constexpr = c.HEADS * c.QUERIES
    CHUNKS: tl.constexpr = BLOCK_M // c.CHUNK_ROWS
    for task in range(tl.program_id(0), batch * heads_kv * tiles * CHUNKS, tl.num_programs(0)):
        pair, tile, row_in_tile, b, head, start_q, query, n_valid_rows = locate_chunk(
            cu_seqlens_q_ptr, task, heads_q, heads_kv, seqlen_q, total_q, tiles, c
        )
        q_base = head_base(q_ptr, b, head, start_q + query, stride_qb, stride_qh, stride_qm, c.VARLEN)
        if not c.VARLEN:
            q_base += query.to(tl.int64) * stride_qm
        q_block = block_at(q_base, n_valid_rows, stride_qm, 0, 0, c.HEAD_DIM, c.CHUNK_ROWS, c.BLOCK_D)
        packed_base = packed_q_ptr + ((pair * tiles + tile).to(tl.int64) * BLOCK_M + row_in_tile) * c.HEAD_DIM
        packed_block = block_at(packed_base, c.CHUNK_ROWS, c.HEAD_DIM, 0, 0, c.HEAD_DIM, c.CHUNK_ROWS, c.BLOCK_D)
        store_tile(packed_block, load_tile(q_block, c.HEAD_DIM != c.BLOCK_D), c.HEAD_DIM != c.BLOCK_D)


@triton.jit
def load_split_lse(base, n_valid_rows, CHUNK_ROWS: tl.constexpr):
    """Load the log-sum-exps of a split [CHUNK_ROWS], -inf for rows that see no key in it."""
    lse = load_row(base, 0, n_valid_rows, CHUNK_ROWS)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@kernel
def _combine_kernel(
    partial_ptr, partial_lse_ptr, cu_seqlens_q_ptr,
    out_ptr, lse_ptr,
    stride_ob, stride_oh, stride_om,
    batch, heads_q, heads_kv, seqlen_q, total_q, tiles, splits,
    c: tl.constexpr,
):  # fmt: skip
    """Merge out and lse of all splits, CHUNK_ROWS rows at a time, from the workspace that `_decode_kernel` writes.

    The workspace: partial out fp32 [batch, heads_kv, splits, tiles, BLOCK_M, HEAD_DIM_V], partial lse the same without
    the last dimension. m_i is the maximum lse of the splits; a split has the weight exp(lse - m_i)."""
    BLOCK_M: tl.constexpr = c.HEADS * c.QUERIES
    CHUNKS: tl.constexpr = BLOCK_M // c.CHUNK_ROWS
    split_stride = (tiles * BLOCK_M).to(tl.int64)  # rows of the workspace from one split to the next
    for task in range(tl.program_id(0), batch * heads_kv * tiles * CHUNKS, tl.num_programs(0)):
        pair, tile, row_in_tile, b, head, start_q, query, n_valid_rows = locate_chunk(
            cu_seqlens_q_ptr, task, heads_q, heads_kv, seqlen_q, total_q, tiles, c
        )
        workspace_row = (pair * splits * tiles + tile).to(tl.int64) * BLOCK_M + row_in_tile  # of split 0
        m_i = tl.full([c.CHUNK_ROWS], LOWEST, tl.float32)
        for split in range(splits):
            lse = load_split_lse(partial_lse_ptr + workspace_row + split * split_stride, n_valid_rows, c.CHUNK_ROWS)
            m_i = running_max(m_i, lse, c.INTERPRET)
        l_i = tl.zeros([c.CHUNK_ROWS], tl.float32)
        acc = tl.zeros([c.CHUNK_ROWS, c.BLOCK_DV], tl.float32)
        for split in range(splits):
            split_row = workspace_row + split * split_stride
            weight = tl.exp(load_split_lse(partial_lse_ptr + split_row, n_valid_rows, c.CHUNK_ROWS) - m_i)
            block = block_at(
                partial_ptr + split_row * c.HEAD_DIM_V, n_valid_rows, c.HEAD_DIM_V, 0, 0, c.HEAD_DIM_V, c.CHUNK_ROWS,
                c.BLOCK_DV,
            )  # fmt: skip
            acc += weight[:, None] * load_tile(block, c.HEAD_DIM_V != c.BLOCK_DV)
            l_i += weight
        empty = l_i == 0.0
        safe_l = tl.where(empty, 1.0, l_i)
        out = tl.where(empty[:, None], 0.0, acc / safe_l[:, None])
        lse = tl.where(empty, float("inf"), m_i + tl.log(safe_l))
        out_base = head_base(out_ptr, b, head, start_q + query, stride_ob, stride_oh, stride_om, c.VARLEN)
        if not c.VARLEN:
            out_base += query.to(tl.int64) * stride_om
        stride = stride_oh if c.QUERIES == 1 else stride_om
        out_block = block_at(out_base, n_valid_rows, stride, 0, 0, c.HEAD_DIM_V, c.CHUNK_ROWS, c.BLOCK_DV)
        store_tile(out_block, narrow(out, out_ptr.dtype.element_ty, c.INTERPRET), c.HEAD_DIM_V != c.BLOCK_DV)
        lse_base = dense_head_base(lse_ptr, b, head, start_q, heads_q, seqlen_q, total_q, c.VARLEN) + query
        store_row(lse_base, lse, 0, n_valid_rows, c.CHUNK_ROWS)


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
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor,
    tile: AttentionTile | None = None,
) -> list[Launch]:  # fmt: skip
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
    # A program stores consecutive values of lse. Packed sequences of one query have lse (H, Tq), in which the heads of
    # a query are not consecutive: then `_combine_kernel` stores one row at a time.
    partial = splits > 1 or packed or (problem.varlen and queries == 1)
    chunk_rows = 1 if problem.varlen and queries == 1 else min(heads if queries == 1 else queries, MAX_CHUNK_ROWS)
    values = call_values(problem, tensors, tile) | {
        "HEADS": heads, "QUERIES": queries, "CHUNK_ROWS": chunk_rows, "splits": splits, "tiles": tiles // pairs
    }  # fmt: skip
    results = {**tensor_arguments(problem.layout, out=out), "lse_ptr": lse}
    vector_grid = vector_programs(problem.arch, device, tiles * tile.block_m // chunk_rows)
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
        launches.append(bind_launch(_pack_kernel, ChunkConstants, vector_grid, values | {"packed_q_ptr": x}, options))
        buffers = buffers | {"q_ptr": x}
    grid = cube_programs(problem.arch, device, tiles * splits)
    decode = values | buffers | {"PARTIAL": partial}
    launches.append(bind_launch(_decode_kernel, DecodeConstants, grid, decode, tile.compile_options(problem.arch)))
    if partial:
        combine = values | results | {"partial_ptr": buffers["out_ptr"], "partial_lse_ptr": buffers["lse_ptr"]}
        launches.append(bind_launch(_combine_kernel, ChunkConstants, vector_grid, combine, options))
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
    # A single query is at the last key, so no key is later.
    right = problem.window_right if problem.seqlen_q > 1 else -1
    sizes = ("batch", "heads_q", "heads_kv", "seqlen_q", "total_q", "capacity", "page_size", "window_left")
    constants = ("head_dim", "head_dim_v", "alibi", "sinks", "varlen", "packed_keys")
    flags = {"SEQLENS": "seqlens", "CU_SEQLENS_K": "cu_seqlens_k", "BATCH_IDX": "cache_batch_idx", "LEFTPAD": "leftpad"}
    return {
        **tensor_arguments(problem.layout, q=tensors.q),
        **tensor_arguments("thd" if problem.packed_keys else "bshd", k=tensors.k_cache, v=tensors.v_cache),
        **{f"{x}_ptr": getattr(tensors, x) for x in ("seqlens", "cu_seqlens_q", "cu_seqlens_k", "leftpad", "sinks")},
        "block_table_ptr": table, "stride_table": 0 if table is None else table.stride(0),
        "batch_idx_ptr": tensors.cache_batch_idx,
        "slopes_ptr": tensors.alibi_slopes, "stride_slope_b": per_head_stride(tensors.alibi_slopes),
        **configs.attention_scalars(problem, tensors.sm_scale, 0.0),
        **{name: getattr(problem, name) for name in sizes},
        "window_right": right, "length": tensors.length, "added": tensors.added,
        "cache_dim0": tensors.k_cache.shape[0],
        **{name.upper(): getattr(problem, name) for name in constants},
        **{name: getattr(tensors, x) is not None for name, x in flags.items()},
        "BLOCK_D": padded_head_dim(problem.head_dim), "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_N": tile.block_n, "HAS_LEFT": problem.window_left >= 0, "HAS_RIGHT": right >= 0,
        "SOFTCAP": configs.softcap_form(problem), "PAGES": configs.pages_form(problem, tile),
        "ALWAYS_MASK": configs.ALWAYS_MASK, "INTERPRET": INTERPRETED,
    }  # fmt: skip


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
