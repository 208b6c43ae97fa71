"""Attention over a KV cache: split-KV decoding (flash-decoding) with a stream-K schedule, and its combine.

The query heads that share a head of keys, and the new tokens of a sequence, are the rows of one tile: row
token * group + head, so that a tile of rows is a range of tokens. The keys of a tile of rows are walked in blocks. All
blocks of all tiles lie on one line, and each program takes an equal part of it (Osama et al. 2023, arXiv:2301.03598):
a batch of ragged lengths is as balanced as a uniform one. How long the line is follows from lengths on the device, so
each program adds up the batch's work itself. As many heads of keys as divide the programs are walked at the same time,
each by a program of its own that has the same part of the line; other heads take turns on it. A program that leaves a
tile unfinished, or goes on where another began, puts its unnormalised sums to a workspace, and `_combine_kernel` merges
them.

In batch-invariant mode keys are divided into parts of PART_KEYS, counted from the first one that is no padding. Each
part is summed by itself, in order, and parts are added up from the first to the last. A block or a part that a row does
not see leaves its sums as they are, bit for bit. So nothing but a row's own query and keys decides on its result, nor
does it matter whether one program has all parts of a tile or each part has its own, which `_fold_kernel` adds up.

Keys are gathered row by row, in pages or not: a page may have any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from diyfa.backends.cuda.attention.clear import forward_launches
from diyfa.backends.cuda.attention.decode_configs import (
    COMBINED_ELEMENTS,
    PART_KEYS,
    DecodeConfig,
    combined_columns,
    combined_rows,
    decode_config,
    feature_blocks,
    has_long_line,
    heads_together,
    is_split,
    is_widened,
    parts_apart,
    programs,
    reads_value_pairs,
    reads_values_once,
    row_blocks,
    rows_per_tile,
    scan_of,
)
from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to
from diyfa.backends.cuda.attention.fwd import LOWEST, add_sink, lse_of, online_softmax_update
from diyfa.backends.cuda.attention.launch import (
    cache_arguments,
    forced_config,
    strides,
)
from diyfa.backends.cuda.attention.scores import score_without_bias, scores_log2, visible_pairs
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
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
    by_kind,
    per_head_stride,
)

_INTERPRETING = tl.constexpr(is_interpreting())
FOLDED_PARTS = 8  # that a program of `_fold_kernel` reads at once
# To begin a tile of rows takes as long as so many blocks of keys, which counts where programs have many blocks.
TILE_COST = tl.constexpr(2)
LONG_SHARE = tl.constexpr(8)


@dataclass(frozen=True, eq=False)
class DecodeConstants(Constants):
    """Constants of both kernels."""

    split: bool  # programs share the keys of a tile
    scan: int  # tiles whose work is added up at once
    one_scan: bool  # those are all
    long_line: bool  # there may be more blocks than 32 bits count
    one_turn: bool  # all heads of keys are walked at the same time
    by_tile: bool  # the combine kernel has programs for each tile, of which there are fewer than that share the line
    has_left: bool
    has_right: bool
    softcap: bool
    alibi: bool
    bias: bool  # there is none
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    block_d: int
    block_rest: int  # features of keys beyond block_d, 0: none
    block_dv: int
    page_size: int  # 0: no pages
    one_page: bool  # a block of keys lies in one
    packed_keys: bool
    value_pairs: bool  # of float8 features are read
    values_in_keys: bool  # the first tile of the keys is that of the values
    widen: bool  # products are of float32, whatever the inputs are
    overlap: bool  # the combine kernel is launched before this one ends, and waits
    parts: int  # of a tile, which the combine kernel reads at once
    columns: int  # of a row, which a program of it has
    part: int  # blocks of keys of a part, in batch-invariant mode; else 0
    parts_apart: bool  # each has a program of its own
    split_cost: int  # `DecodeConfig`'s
    precision: str


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _sequence(b, inside, lengths, c: tl.constexpr):
    """Sequences b -> (first row in q, queries, first row of packed keys, keys, padding before them).

    Those not `inside` of the batch are not looked up. Lengths on the device cannot be checked before the launch; they
    are clamped to the memory there is.
    """
    pointers, sizes = lengths
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr = pointers
    seqlen_q, total_q, total_k, length, added, capacity = sizes
    first_q = b * 0
    n_queries = first_q + seqlen_q
    first_k = b * 0
    pad = b * 0
    if cu_seqlens_q_ptr is not None:
        first_q = _clamp(tl.load(cu_seqlens_q_ptr + b, mask=inside, other=0), 0, total_q)
        end_q = _clamp(tl.load(cu_seqlens_q_ptr + b + 1, mask=inside, other=0), 0, total_q)
        n_queries = _clamp(end_q - first_q, 0, seqlen_q)
    if cu_seqlens_k_ptr is not None:
        first_k = tl.maximum(tl.load(cu_seqlens_k_ptr + b, mask=inside, other=0), 0)
        end_k = tl.maximum(tl.load(cu_seqlens_k_ptr + b + 1, mask=inside, other=0), 0)
        if c.PACKED_KEYS:
            first_k = tl.minimum(first_k, total_k)
            end_k = tl.minimum(end_k, total_k)
        n_keys = end_k - first_k
        if seqlens_ptr is not None:
            # Packed keys begin at their offset, also where fewer of them are used than lie there.
            used = tl.load(seqlens_ptr + b, mask=inside, other=0)
            n_keys = tl.minimum(n_keys, used) if c.PACKED_KEYS else used
    elif seqlens_ptr is not None:
        n_keys = tl.minimum(tl.load(seqlens_ptr + b, mask=inside, other=0), capacity) + added
    else:
        n_keys = b * 0 + length + added
    n_keys = _clamp(n_keys, 0, capacity)
    if leftpad_ptr is not None:
        pad = _clamp(tl.load(leftpad_ptr + b, mask=inside, other=0), 0, capacity)
    return first_q, n_queries, first_k, n_keys, pad


@triton.jit
def _first_key(block_m, n_queries, n_keys, pad, mask, c: tl.constexpr):
    """The first key that a tile of rows can see."""
    group, window_left, _ = mask
    begin = pad
    if c.HAS_LEFT:
        begin = tl.maximum(pad, block_m * c.BLOCK_M // group + n_keys - n_queries - window_left)
    return begin


@triton.jit
def _key_blocks(block_m, n_queries, n_keys, pad, mask, c: tl.constexpr):
    """Blocks of keys that a tile of rows sees -> (the first, counted from `pad` on, how many).

    A tile that has rows has a block at least, for its results are to be written; one that has none has none.
    """
    group, _, window_right = mask
    row0 = block_m * c.BLOCK_M
    rows = n_queries * group
    end = n_keys
    if c.HAS_RIGHT:
        last = (tl.minimum(row0 + c.BLOCK_M, rows) - 1) // group
        end = tl.minimum(n_keys, last + n_keys - n_queries + window_right + 1)
    first = (_first_key(block_m, n_queries, n_keys, pad, mask, c) - pad) // c.BLOCK_N
    count = tl.cdiv(tl.maximum(end - pad, 0), c.BLOCK_N) - first
    return first, tl.where(row0 < rows, tl.maximum(count, 1), 0)


@triton.jit
def _blocks_of_tiles(start, batch, blocks_m, lengths, mask, c: tl.constexpr):
    """Blocks of keys that each of `c.SCAN` tiles of rows sees, from tile `start` on; none beyond the last."""
    tiles = start + tl.arange(0, c.SCAN)
    inside = tiles < batch * blocks_m
    _, n_queries, _, n_keys, pad = _sequence(tiles // blocks_m, inside, lengths, c)
    _, counts = _key_blocks(tiles % blocks_m, n_queries, n_keys, pad, mask, c)
    return tl.where(inside, counts, 0)


@triton.jit
def _work_of(counts, cost, c: tl.constexpr):
    """Tiles with so many blocks -> how much of the line each takes, none those without."""
    tile_cost, least = cost
    work = counts + tile_cost
    if c.SPLIT_COST > 0:
        work = tl.maximum(work, least)
    return tl.where(counts > 0, work, 0)


@triton.jit
def _line_of_work(sharers, batch, blocks_m, turns, lengths, mask, c: tl.constexpr):
    """The line of work: for each tile of rows of each sequence, for each of `turns`, its blocks.

    Returns (its length, the equal share of each of `sharers`, `cost`, blocks of the first tiles). `cost` is (what
    beginning a tile counts, what the smallest tile counts).
    """
    LINE: tl.constexpr = tl.int64 if c.LONG_LINE else tl.int32
    first_counts = _blocks_of_tiles(0, batch, blocks_m, lengths, mask, c)
    blocks = tl.sum(first_counts.to(LINE), 0)
    begun = tl.sum((first_counts > 0).to(tl.int32), 0)
    most = 0
    if c.SPLIT_COST > 0:
        most = tl.max(first_counts, 0)
    if not c.ONE_SCAN:
        for start in range(c.SCAN, batch * blocks_m, c.SCAN):
            counts = _blocks_of_tiles(start, batch, blocks_m, lengths, mask, c)
            blocks += tl.sum(counts.to(LINE), 0)
            begun += tl.sum((counts > 0).to(tl.int32), 0)
            if c.SPLIT_COST > 0:
                most = tl.maximum(most, tl.max(counts, 0))
    # Where all programs have little to do, even parts of the blocks are shortest.
    tile_cost = tl.where(blocks * turns >= LONG_SHARE * sharers, TILE_COST, 0)
    work = (blocks + tile_cost * begun) * turns
    share = tl.maximum(tl.cdiv(work, sharers), 1)
    least = 0
    if c.SPLIT_COST > 0:
        # Whole tiles, as many for each program: where that takes no longer than to put parts together.
        tiles = tl.cdiv(begun * turns, sharers)
        if tiles * (most + tile_cost).to(LINE) <= share + c.SPLIT_COST:
            least = most + tile_cost
            share = tl.maximum(tiles.to(LINE) * least, 1)
            work = (begun * turns).to(LINE) * least
    return work, share, (tile_cost, least), first_counts


@triton.jit
def _passed(counts, ahead, place, turns, cost, c: tl.constexpr):
    """Tiles with so many blocks, the first of which begins at `ahead` -> (how many end at or before a place of the
    line, where the last of these ends or 0, where all end)."""
    work = _work_of(counts, cost, c).to(ahead.dtype) * turns
    ends = ahead + (work if c.SCAN == 1 else tl.cumsum(work, 0))
    passed = ends <= place
    return tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(passed, ends, 0), 0), tl.max(ends, 0)


@triton.jit
def _tile_at(place, first_counts, cost, batch, blocks_m, turns, lengths, mask, c: tl.constexpr):
    """The tile of rows that a place of the line lies in, and the place where that begins."""
    tile, before, ahead = _passed(first_counts, place * 0, place, turns, cost, c)
    if not c.ONE_SCAN:
        for start in range(c.SCAN, batch * blocks_m, c.SCAN):
            counts = _blocks_of_tiles(start, batch, blocks_m, lengths, mask, c)
            tiles_here, before_here, ahead = _passed(counts, ahead, place, turns, cost, c)
            tile += tiles_here
            before = tl.maximum(before, before_here)
    return tile, before


@triton.jit
def _place_of(tile, first_counts, cost, total, turns, c: tl.constexpr):
    """The place where one of the first tiles begins, in a line of the length `total`."""
    work = _work_of(first_counts, cost, c).to(total.dtype)
    return tl.sum(tl.where(tl.arange(0, c.SCAN) < tile, work, 0), 0) * turns


@triton.jit
def _pages_of(table, keys, there, c: tl.constexpr):
    """The pages that keys of a sequence lie in; -1 for those that are not `there`."""
    # Without a sign to look at, dividing by a power of two is a shift.
    return tl.load(table + keys.to(tl.uint32) // c.PAGE_SIZE, mask=there, other=-1)


@triton.jit
def _key_rows(page, offs_n, n_keys, pages, strides, c: tl.constexpr):
    """Keys offs_n of a sequence -> (which exist, where their rows of k and v begin), [BLOCK_N] each.

    A page that the cache does not have is not looked at.
    """
    stride_kb, stride_kn, stride_vb, stride_vn = strides
    exists = offs_n < n_keys
    if c.PAGE_SIZE > 0:
        is_page = (page >= 0) & (page < pages)
        exists = (exists & is_page) != 0  # a bool in the interpreter, too, where that of one page becomes numbers
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
    """Features [FIRST, FIRST + WIDTH) of rows -> [rows, WIDTH]; what does not exist, or is beyond HEAD_DIM, is zero."""
    cols = FIRST + tl.arange(0, WIDTH)
    mask = exists[:, None]
    if FIRST + WIDTH > HEAD_DIM:
        mask = mask & (cols[None, :] < HEAD_DIM)
    return tl.load(base + rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _of_pairs(pairs, ODD: tl.constexpr):
    """The first or second float8 of each pair, as float16."""
    if _INTERPRETING:
        x = ((pairs >> (8 * ODD)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # of two pairs at once; Triton's own code for the above takes three times the instructions
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $1, 0, " + ("0x31" if ODD else "0x20")
            + "; mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 $0, low; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return x


@triton.jit
def _load_pairs(base, rows, exists, c: tl.constexpr):
    """Rows of float8 values -> their even and their odd features, [rows, BLOCK_DV / 2] float16 each.

    Tensor cores take two keys of a feature side by side. Of 16-bit elements `ldmatrix` brings them together; float8 is
    read as pairs of features, which are such elements.
    """
    HALF: tl.constexpr = c.BLOCK_DV // 2
    cols = tl.arange(0, HALF)
    mask = exists[:, None]
    if c.BLOCK_DV > c.HEAD_DIM_V:
        mask = mask & (cols[None, :] < c.HEAD_DIM_V // 2)
    addresses = (base + rows[:, None]).to(tl.pointer_type(tl.uint16), bitcast=True) + cols[None, :]
    pairs = tl.load(addresses, mask=mask, other=0)
    return _of_pairs(pairs, 0), _of_pairs(pairs, 1)


@triton.jit
def _attend_keys(
    q,  # [BLOCK_M, BLOCK_D]
    q_rest,  # [BLOCK_M, BLOCK_REST]
    tokens,  # [BLOCK_M]
    begin, end, pad,
    first_key,  # that the tile can see
    cache, mask, score, c: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of keys -> (acc, l_i, m_i), not normalised; m_i is in units of log2.

    mask and score: of scores.py, slopes being [BLOCK_M, 1].
    """
    k_base, v_base, table, pages, strides = cache
    _, n_keys, _, _, _ = mask
    PRECISE: tl.constexpr = q.dtype == tl.float32
    m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([c.BLOCK_M], tl.float32)
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV // (2 if c.VALUE_PAIRS else 1)], tl.float32)
    acc_odd = acc
    page = 0
    if c.PAGE_SIZE > 0:
        keys = pad + begin * c.BLOCK_N
        if not c.ONE_PAGE:
            keys += tl.arange(0, c.BLOCK_N)
        there = keys < n_keys
        if c.HAS_LEFT and not c.ONE_PAGE:  # pages behind the window may hold NaN, and a weight of 0 times NaN is NaN
            there = there & (keys >= first_key)
        page = _pages_of(table, keys, there, c)
    for block in tl.range(begin, end):
        offs_n = pad + block * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
        exists, k_rows, v_rows = _key_rows(page, offs_n, n_keys, pages, strides, c)
        if c.PAGE_SIZE > 0:  # a block ahead: the loads of keys wait for no other load
            next_keys = (pad + block * c.BLOCK_N if c.ONE_PAGE else offs_n) + c.BLOCK_N
            page = _pages_of(table, next_keys, next_keys < n_keys, c)
        k = _load_rows(k_base, k_rows, exists, 0, c.BLOCK_D, c.HEAD_DIM).to(q.dtype)
        s = dot(q, tl.trans(k), c.PRECISION)  # [BLOCK_M, BLOCK_N]
        if c.BLOCK_REST > 0:
            rest = _load_rows(k_base, k_rows, exists, c.BLOCK_D, c.BLOCK_REST, c.HEAD_DIM).to(q.dtype)
            s = dot_add(q_rest, tl.trans(rest), s, c.PRECISION)
        s, _tanh = scores_log2(s, tokens[:, None], offs_n[None, :], (0, 0, 0), mask, score, True, PRECISE, c)
        visible = exists[None, :] & visible_pairs(tokens[:, None], offs_n[None, :], mask, False, c)
        s = tl.where(visible, s, float("-inf"))
        m_before = m_i
        p, m_i, l_i, acc = online_softmax_update(s, m_i, l_i, acc, 1.0, False)
        p = round_to(p, q.dtype)
        if c.VALUE_PAIRS:
            even, odd = _load_pairs(v_base, v_rows, exists, c)
            acc = dot_add(p, even, acc, c.PRECISION)
            acc_odd = dot_add(p, odd, acc_odd * tl.math.exp2(m_before - m_i)[:, None], c.PRECISION)
        else:
            v = k
            if not c.VALUES_IN_KEYS:
                v = _load_rows(v_base, v_rows, exists, 0, c.BLOCK_DV, c.HEAD_DIM_V).to(q.dtype)
            acc = dot_add(p, v, acc, c.PRECISION)
    if c.VALUE_PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (c.BLOCK_M, c.BLOCK_DV))
    return acc, l_i, m_i


@triton.jit
def _store_rows(
    acc,  # [rows, columns from `first_column` on]
    l_i, m_i,  # [rows]
    rows, first_column, b, hk, first_q, n_queries, outputs, PACKED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Normalise the sums of a sequence's rows and write them, and the log-sum-exp, as far as there are queries."""
    o_ptr, lse_ptr, sinks_ptr, v_descale_ptr, strides, sizes = outputs
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh = strides
    heads_kv, group, seqlen_q, total_q = sizes
    tokens = rows // group
    heads = hk * group + rows % group
    exists = tokens < n_queries
    sink = tl.zeros_like(m_i)
    if sinks_ptr is not None:
        sink += tl.load(sinks_ptr + heads, mask=exists, other=0.0)
        m_i, l_i, acc = add_sink(sink, m_i, l_i, acc)
    # A row that saw no key: out 0, lse +inf.
    live = l_i != 0.0
    out = tl.where(live[:, None], acc / tl.where(live, l_i, 1.0)[:, None], 0.0)
    if v_descale_ptr is not None:
        out *= tl.load(v_descale_ptr + b.to(tl.int64) * stride_vdb + hk.to(tl.int64) * stride_vdh)
    lse = tl.where(live, lse_of(sink, m_i, tl.where(live, l_i, 1.0)), float("inf"))
    if PACKED:
        lse_rows = heads.to(tl.int64) * total_q + first_q + tokens
    else:
        lse_rows = (b.to(tl.int64) * heads_kv * group + heads) * seqlen_q + tokens
    tl.store(lse_ptr + lse_rows, lse, mask=exists)
    cols = first_column + tl.arange(0, acc.shape[1])
    base = o_ptr + b.to(tl.int64) * stride_ob
    addresses = base + ((first_q + tokens).to(tl.int64) * stride_om + heads.to(tl.int64) * stride_oh)[:, None]
    # 0 + x: a sum that cancelled has one sign of zero, however many blocks it was made of.
    out = round_to(out + 0.0, o_ptr.dtype.element_ty)
    tl.store(addresses + cols[None, :], out, mask=exists[:, None] & (cols[None, :] < c.HEAD_DIM_V))


@triton.jit
def _powers_of_two(largest):
    """(x, 1/x), powers of two: a row of bfloat16 times x is exact as float16, but for what is 2**-31 of its `largest`.

    float8 becomes float16 in one instruction, exactly, and bfloat16 in five.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))  # not finite: x = 1
    # To the top of float16's range, 2**14 to 2**15.
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _attend_rows(b, hk, block_m, begin, end, sequence, inputs, mask, c: tl.constexpr):
    """Blocks [begin, end) of keys, for one tile of rows of what `_sequence` describes -> (acc, l_i, m_i, rows)."""
    first_q, n_queries, first_k, n_keys, pad = sequence
    queries, keys, values, places, features, score = inputs
    q_ptr, stride_qb, stride_qh, stride_qm = queries
    k_ptr, stride_kb, stride_kh, stride_kn = keys
    v_ptr, stride_vb, stride_vh, stride_vn = values
    block_table_ptr, stride_table, cache_batch_idx_ptr, entries = places
    slopes_ptr, stride_slopeb, k_descale_ptr, stride_kdb, stride_kdh = features
    scale, softcap = score
    group, window_left, window_right = mask
    rows = block_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    tokens = rows // group
    heads = hk * group + rows % group
    exists = tokens < n_queries
    q_base = q_ptr + b.to(tl.int64) * stride_qb
    q_rows = (first_q + tokens).to(tl.int64) * stride_qm + heads.to(tl.int64) * stride_qh
    q = _load_rows(q_base, q_rows, exists, 0, c.BLOCK_D, c.HEAD_DIM)
    q_rest = q
    if c.BLOCK_REST > 0:
        q_rest = _load_rows(q_base, q_rows, exists, c.BLOCK_D, c.BLOCK_REST, c.HEAD_DIM)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + b.to(tl.int64) * stride_kdb + hk.to(tl.int64) * stride_kdh)
    if c.WIDEN:
        q = q.to(tl.float32)
        q_rest = q_rest.to(tl.float32)
    elif k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        if c.BLOCK_REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
        down, up = _powers_of_two(largest)
        q = (q.to(tl.float32) * down[:, None]).to(tl.float16)
        q_rest = (q_rest.to(tl.float32) * down[:, None]).to(tl.float16)
        scale *= up[:, None]
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
        entry = b
        if cache_batch_idx_ptr is not None:
            entry = tl.load(cache_batch_idx_ptr + b)
            has_entry = (entry >= 0) & (entry < entries)
            n_keys = tl.where(has_entry, n_keys, 0)
            entry = tl.where(has_entry, entry, 0)
        k_base += entry.to(tl.int64) * stride_kb
        v_base += entry.to(tl.int64) * stride_vb
    cache = (k_base, v_base, table, entries, (stride_kb, stride_kn, stride_vb, stride_vn))
    pairs = (n_queries, n_keys, offset, window_left, window_right)
    score = score_without_bias(scale, softcap, slopes)
    first_key = _first_key(block_m, n_queries, n_keys, pad, mask, c)
    acc, l_i, m_i = _attend_keys(q, q_rest, tokens, begin, end, pad, first_key, cache, pairs, score, c)
    return acc, l_i, m_i, rows


@triton.jit
def _add_part(m_i, l_i, acc, m_part, l_part, acc_part):
    """Sums of some keys and those of a part of the others -> of both. Rounded alike wherever it is compiled: which of
    the products are fused is said."""
    m_new = tl.maximum(m_i, m_part)
    alpha = tl.math.exp2(m_i - m_new)
    beta = tl.math.exp2(m_part - m_new)
    l_new = tl.fma(l_i, alpha, l_part * beta)
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), acc_part * beta[:, None])
    return m_new, l_new, acc


@triton.jit
def _attend_parts(b, hk, block_m, begin, end, sequence, inputs, mask, c: tl.constexpr):
    """`_attend_rows` of all parts that blocks [begin, end) lie in, one after another."""
    if c.PART == 0 or c.PARTS_APART:  # they are in one
        acc, l_i, m_i, rows = _attend_rows(b, hk, block_m, begin, end, sequence, inputs, mask, c)
    else:
        m_i = tl.full([c.BLOCK_M], LOWEST, tl.float32)
        l_i = tl.zeros([c.BLOCK_M], tl.float32)
        acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
        rows = block_m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        for n in range(begin // c.PART, tl.cdiv(end, c.PART)):
            first, last = tl.maximum(begin, n * c.PART), tl.minimum(end, (n + 1) * c.PART)
            acc_part, l_part, m_part, _ = _attend_rows(b, hk, block_m, first, last, sequence, inputs, mask, c)
            m_i, l_i, acc = _add_part(m_i, l_i, acc, m_part, l_part, acc_part)
    return acc, l_i, m_i, rows


_RUNTIME = (
    "stride_slopeb", "stride_table", "stride_kdb", "stride_kdh", "stride_vdb", "stride_vdh", "batch", "heads_kv",
    "group", "blocks_m", "entries", "seqlen_q", "total_q", "total_k", "length", "added", "capacity", "window_left",
    "window_right", "rows_per_tile", "parts", "sharers", "rows_each",
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
    sums_ptr,  # [2 · programs, BLOCK_M, BLOCK_DV]
    statistics_ptr,  # [2 · programs, 2, BLOCK_M]
    length,  # of each sequence, where nothing on the device says it: a repeated call gives it anew
    capacity, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    stride_slopeb, stride_table, stride_kdb, stride_kdh, stride_vdb, stride_vdh,
    batch, heads_kv,
    group,  # query heads that share one key head
    blocks_m,  # tiles of rows of the longest sequence
    entries,  # pages, or batch entries of a contiguous cache
    seqlen_q, total_q, total_k, added, window_left, window_right,
    rows_per_tile,  # that there are
    parts,  # programs of a tile, each with one part, for PARTS_APART
    scale, softcap,
    c: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    mask = (group, window_left, window_right)
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
    if not c.SPLIT:
        pid = tl.program_id(0)
        part = 0
        if c.PARTS_APART:
            part = pid % parts
            pid = pid // parts
        tile = pid // heads_kv
        hk = pid % heads_kv
        b = tile // blocks_m
        block_m = tile % blocks_m
        sequence = _sequence(b, True, lengths, c)
        first_q, n_queries, _, n_keys, pad = sequence
        first, count = _key_blocks(block_m, n_queries, n_keys, pad, mask, c)
        end = first + count
        if c.PARTS_APART:
            first = tl.maximum(first, part * c.PART)
            end = tl.minimum(end, (part + 1) * c.PART)
        if first < end:
            acc, l_i, m_i, rows = _attend_parts(b, hk, block_m, first, end, sequence, inputs, mask, c)
            if c.PARTS_APART:
                offs_m = tl.arange(0, c.BLOCK_M)
                slot = pid.to(tl.int64) * parts + part
                sums = sums_ptr + (slot * rows_per_tile + offs_m[:, None]) * c.BLOCK_DV
                statistics = statistics_ptr + slot * (2 * rows_per_tile) + offs_m
                is_row = offs_m < rows_per_tile
                tl.store(sums + tl.arange(0, c.BLOCK_DV)[None, :], acc, mask=is_row[:, None])
                tl.store(statistics, m_i, mask=is_row)
                tl.store(statistics + rows_per_tile, l_i, mask=is_row)
            else:
                _store_rows(acc, l_i, m_i, rows, 0, b, hk, first_q, n_queries, outputs, PACKED, c)
    else:
        # Programs that share a part of the line, each for a head of keys of its own.
        together = tl.num_programs(0)
        pid = tl.program_id(1) * together + tl.program_id(0)
        turns = 1 if c.ONE_TURN else heads_kv // together
        total, share, cost, first_counts = _line_of_work(tl.num_programs(1), batch, blocks_m, turns, lengths, mask, c)
        tile_cost, _ = cost
        at = tl.minimum(tl.program_id(1) * share, total)
        stop = tl.minimum(at + share, total)
        tile, before = _tile_at(at, first_counts, cost, batch, blocks_m, turns, lengths, mask, c)
        while at < stop:
            b = tile // blocks_m
            block_m = tile % blocks_m
            sequence = _sequence(b, True, lengths, c)
            first_q, n_queries, _, n_keys, pad = sequence
            first, count = _key_blocks(block_m, n_queries, n_keys, pad, mask, c)
            work = _work_of(count, cost, c)
            tile_end = before + work.to(at.dtype) * turns
            if at < tile_end:
                from_work = (at - before).to(tl.int32)
                hk = tl.program_id(0)
                if not c.ONE_TURN:
                    hk += from_work // work * together
                    from_work = from_work % work
                to_work = tl.minimum(work, from_work + (stop - at)).to(tl.int32)
                begin = tl.maximum(from_work - tile_cost, 0)
                end = tl.maximum(to_work - tile_cost, 0)
                if c.SPLIT_COST > 0:
                    end = tl.minimum(end, count)
                if begin < end:
                    acc, l_i, m_i, rows = _attend_rows(
                        b, hk, block_m, first + begin, first + end, sequence, inputs, mask, c
                    )
                    if end - begin == count:
                        _store_rows(acc, l_i, m_i, rows, 0, b, hk, first_q, n_queries, outputs, PACKED, c)
                    else:
                        # What goes on here is in the first of the program's two places, what begins in the other.
                        slot = 2 * pid + (begin == 0)
                        offs_m = tl.arange(0, c.BLOCK_M)
                        offs_d = tl.arange(0, c.BLOCK_DV)
                        sums = sums_ptr + slot.to(tl.int64) * (c.BLOCK_M * c.BLOCK_DV)
                        tl.store(sums + offs_m[:, None] * c.BLOCK_DV + offs_d[None, :], acc)
                        tl.store(statistics_ptr + slot * (2 * c.BLOCK_M) + offs_m, m_i)
                        tl.store(statistics_ptr + slot * (2 * c.BLOCK_M) + c.BLOCK_M + offs_m, l_i)
                at += to_work - from_work
            else:
                before = tile_end
                tile += 1


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _combine_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr, sinks_ptr, v_descale_ptr, o_ptr, lse_ptr, sums_ptr,
    statistics_ptr, length, capacity,
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh, batch, heads_kv, group, blocks_m, seqlen_q, total_q,
    total_k, added, window_left, window_right,
    sharers,  # of the line of work
    rows_each,  # that a program has, one after another
    c: tl.constexpr,
):  # fmt: skip
    """Columns of some rows of a tile, if programs of `_decode_kernel` share it: of the tile that one of them leaves
    unfinished, or BY_TILE. Which they are, follows from the same line of work, before there is anything to read."""
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    mask = (group, window_left, window_right)
    outputs = (
        o_ptr, lse_ptr, sinks_ptr, v_descale_ptr,
        (stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh),
        (heads_kv, group, seqlen_q, total_q),
    )  # fmt: skip
    row0 = tl.program_id(0) // (c.BLOCK_DV // c.COLUMNS) * rows_each
    first_column = tl.program_id(0) % (c.BLOCK_DV // c.COLUMNS) * c.COLUMNS
    hk = tl.program_id(1)
    together = tl.num_programs(1)
    turns = 1 if c.ONE_TURN else heads_kv // together
    total, share, cost, first_counts = _line_of_work(sharers, batch, blocks_m, turns, lengths, mask, c)
    tile_cost, _ = cost
    if c.BY_TILE:
        tile = tl.program_id(2) // turns
        before = _place_of(tile, first_counts, cost, total, turns, c)
    else:
        owner = tl.program_id(2)
        end_of_part = tl.maximum(tl.minimum(owner * share + share, total) - 1, 0)
        tile, before = _tile_at(end_of_part, first_counts, cost, batch, blocks_m, turns, lengths, mask, c)
    b = tile // blocks_m
    first_q, n_queries, _, n_keys, pad = _sequence(b, b < batch, lengths, c)
    _, count = _key_blocks(tile % blocks_m, n_queries, n_keys, pad, mask, c)
    work = tl.maximum(_work_of(count, cost, c), 1)
    first_block = before + tile_cost  # the place of it
    if not c.ONE_TURN:
        if c.BY_TILE:
            turn = tl.program_id(2) % turns
        else:
            turn = ((end_of_part - before) // work).to(tl.int32)
        first_block += turn * work
        hk += turn * together
    if c.BY_TILE:
        owner = (first_block // share).to(tl.int32)
    stop = tl.minimum(owner * share + share, total)
    end = first_block + count
    is_left = (owner * share <= first_block) & (first_block < stop) & (stop < end)
    last = ((end - 1) // share).to(tl.int32)  # the sharer that finishes it
    if c.OVERLAP:
        gdc_wait()
    first_row = tile % blocks_m * c.BLOCK_M
    rows_end = tl.minimum(row0 + rows_each, n_queries * group - first_row)
    for row in range(row0, tl.where(is_left, rows_end, 0)):
        rows = first_row + row + tl.arange(0, 1)
        cols = first_column + tl.arange(0, c.COLUMNS)
        m_i = tl.full([1], LOWEST, tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, c.COLUMNS], tl.float32)
        for start in range(owner, last + 1, c.PARTS):
            part = start + tl.arange(0, c.PARTS)
            exists = part <= last
            slot = 2 * (part * together + tl.program_id(1)) + (part == owner)
            statistics = statistics_ptr + slot * (2 * c.BLOCK_M) + row
            m = tl.load(statistics, mask=exists, other=LOWEST)
            sums_of_weights = tl.load(statistics + c.BLOCK_M, mask=exists, other=0.0)
            sums = sums_ptr + (slot.to(tl.int64) * c.BLOCK_M + row)[:, None] * c.BLOCK_DV + cols[None, :]
            parts = tl.load(sums, mask=exists[:, None], other=0.0)  # [PARTS, COLUMNS]
            m_new = tl.maximum(m_i, tl.max(m, 0))
            alpha = tl.math.exp2(m_i - m_new)
            weights = tl.math.exp2(m - m_new)  # [PARTS]
            l_i = l_i * alpha + tl.sum(sums_of_weights * weights, 0)
            acc = acc * alpha[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
            m_i = m_new
        packed: tl.constexpr = cu_seqlens_q_ptr is not None
        _store_rows(acc, l_i, m_i, rows, first_column, b, hk, first_q, n_queries, outputs, packed, c)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _fold_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr, sinks_ptr, v_descale_ptr, o_ptr, lse_ptr,
    sums_ptr,  # [tiles, parts, rows_per_tile, BLOCK_DV]
    statistics_ptr,  # [tiles, parts, 2, rows_per_tile]
    length, capacity,
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh, heads_kv, group, blocks_m, seqlen_q, total_q, total_k,
    added, window_left, window_right, rows_per_tile, parts, c: tl.constexpr,
):  # fmt: skip
    """One row of a tile whose parts have programs of their own: their sums, from the first to the last."""
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    mask = (group, window_left, window_right)
    outputs = (
        o_ptr, lse_ptr, sinks_ptr, v_descale_ptr,
        (stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh),
        (heads_kv, group, seqlen_q, total_q),
    )  # fmt: skip
    owner = tl.program_id(0) // rows_per_tile
    row = tl.program_id(0) % rows_per_tile
    tile = owner // heads_kv
    b = tile // blocks_m
    block_m = tile % blocks_m
    first_q, n_queries, _, n_keys, pad = _sequence(b, True, lengths, c)
    first, count = _key_blocks(block_m, n_queries, n_keys, pad, mask, c)
    rows = block_m * c.BLOCK_M + row + tl.arange(0, 1)
    if (count > 0) & (tl.max(rows, 0) < n_queries * group):
        cols = tl.arange(0, c.BLOCK_DV)
        m_i = tl.full([1], LOWEST, tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, c.BLOCK_DV], tl.float32)
        end = tl.cdiv(first + count, c.PART)
        for start in range(first // c.PART, end, c.PARTS):  # so many are read at once
            number = tl.arange(0, c.PARTS)
            exists = start + number < end
            slot = owner.to(tl.int64) * parts + start + number
            statistics = statistics_ptr + slot * (2 * rows_per_tile) + row
            m_parts = tl.load(statistics, mask=exists, other=LOWEST)
            l_parts = tl.load(statistics + rows_per_tile, mask=exists, other=0.0)
            sums = sums_ptr + (slot * rows_per_tile + row)[:, None] * c.BLOCK_DV + cols[None, :]
            acc_parts = tl.load(sums, mask=exists[:, None], other=0.0)
            for i in tl.static_range(c.PARTS):
                is_part = number == i
                m_part = tl.sum(tl.where(is_part, m_parts, 0.0), 0) + tl.zeros([1], tl.float32)
                l_part = tl.sum(tl.where(is_part, l_parts, 0.0), 0) + tl.zeros([1], tl.float32)
                acc_part = tl.sum(tl.where(is_part[:, None], acc_parts, 0.0), 0)[None, :]
                m_i, l_i, acc = _add_part(m_i, l_i, acc, m_part, l_part, acc_part)
        packed: tl.constexpr = cu_seqlens_q_ptr is not None
        _store_rows(acc, l_i, m_i, rows, 0, b, owner % heads_kv, first_q, n_queries, outputs, packed, c)


def constants_of(problem: KVCacheProblem, config: DecodeConfig, parts: int = 1, together: int = 1) -> DecodeConstants:
    """What the kernels are compiled for; `parts`, `together`: see `parts_apart` and `heads_together`."""
    scan = scan_of(problem, config)
    is_one_scan = problem.batch * row_blocks(problem, config) <= scan
    return _constants_of_kind(
        problem, config, is_split(problem), scan, is_one_scan, has_long_line(problem, config),
        together == problem.heads_kv, parts > 1,
    )  # fmt: skip


@by_kind
def _constants_of_kind(
    problem: KVCacheProblem, config: DecodeConfig, split: bool, scan: int, one_scan: bool, long_line: bool,
    one_turn: bool, parts_apart: bool,
) -> DecodeConstants:  # fmt: skip
    block_d, block_rest = feature_blocks(problem.head_dim)
    return DecodeConstants(
        split=split,
        scan=scan,
        one_scan=one_scan,
        long_line=long_line,
        one_turn=one_turn,
        by_tile=False,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        softcap=problem.softcap != 0.0,
        alibi=problem.alibi,
        bias=False,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=block_d,
        block_rest=block_rest,
        block_dv=padded_head_dim(problem.head_dim_v),
        page_size=problem.page_size,
        one_page=problem.paged and problem.page_size % config.block_n == 0 and not problem.leftpad,
        packed_keys=problem.packed_keys,
        value_pairs=reads_value_pairs(problem),
        values_in_keys=reads_values_once(problem),
        widen=is_widened(problem),
        overlap=split and can_overlap(problem.arch),
        parts=FOLDED_PARTS,
        columns=padded_head_dim(problem.head_dim_v),
        part=PART_KEYS // config.block_n if problem.batch_invariant else 0,
        parts_apart=parts_apart,
        split_cost=config.split_cost,
        precision="ieee",
    )


# Constants that the kernels behind `_decode_kernel` do not read: how it reads keys and forms scores.
_NOT_COMBINED: dict[str, Any] = {
    "softcap": False, "alibi": False, "head_dim": 0, "block_d": 0, "block_rest": 0, "page_size": 0, "one_page": False,
    "value_pairs": False, "values_in_keys": False, "widen": False, "parts_apart": False,
}  # fmt: skip


@by_kind
def _constants_of_combine(
    problem: KVCacheProblem, c: DecodeConstants, by_tile: bool, columns: int, parts: int
) -> DecodeConstants:
    """Constants of the `_combine_kernel` or `_fold_kernel` that follows a `_decode_kernel` with the constants `c`."""
    return DecodeConstants(**vars(c) | _NOT_COMBINED | {"by_tile": by_tile, "columns": columns, "parts": parts})


def config_of(problem: KVCacheProblem) -> DecodeConfig:
    """The tile of a call that `unsupported` lets through, or what `use_config("decode", ...)` names."""
    config = forced_config("decode", problem) or decode_config(problem)
    assert config is not None, "unsupported() accepted a problem that no tile fits"
    return config


def workspace(problem: KVCacheProblem, config: DecodeConfig, device: torch.device) -> torch.Tensor | None:
    """Memory for the parts of tiles that programs share: two for each program."""
    columns = padded_head_dim(problem.head_dim_v) + 2
    count = programs(problem, config, device)
    if problem.batch_invariant and parts_apart(problem, config, device) > 1:
        return torch.empty(count * rows_per_tile(problem, config) * columns, dtype=torch.float32, device=device)
    if not is_split(problem):
        return None
    return torch.empty(2 * count * config.block_m * columns, dtype=torch.float32, device=device)


def launches_of(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: DecodeConfig,
    memory: torch.Tensor | None,
) -> list[Launch]:
    """What fills out and lse, through `workspace`."""
    q, k, v = tensors.q, tensors.k_cache, tensors.v_cache
    keys_layout = VARLEN if problem.packed_keys else "bshd"
    count = programs(problem, config, q.device)
    if not count:
        return []
    parts = parts_apart(problem, config, q.device)
    together = heads_together(problem, count)
    c = constants_of(problem, config, parts, together)
    sums = statistics = None
    if memory is not None:
        rows = count * rows_per_tile(problem, config) if parts > 1 else 2 * count * config.block_m
        width = padded_head_dim(problem.head_dim_v)
        sums, statistics = memory, memory[rows * width :]
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "cu_seqlens_q_ptr": tensors.cu_seqlens_q,
        "cu_seqlens_k_ptr": tensors.cu_seqlens_k,
        "leftpad_ptr": tensors.leftpad,
        "slopes_ptr": tensors.alibi_slopes,
        "sinks_ptr": tensors.sinks,
        "o_ptr": out,
        "lse_ptr": lse,
        "sums_ptr": sums,
        "statistics_ptr": statistics,
        **strides(problem.layout, q=q, o=out),
        **strides(keys_layout, k=k, v=v),
        **cache_arguments(problem, tensors),
        "stride_slopeb": per_head_stride(tensors.alibi_slopes),
        "batch": problem.batch,
        "group": problem.heads_q // problem.heads_kv,
        "blocks_m": row_blocks(problem, config),
        "total_q": problem.total_q,
        "total_k": k.shape[0],
        "added": tensors.added,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "rows_per_tile": rows_per_tile(problem, config),
        "parts": parts,
        "scale": tensors.sm_scale / (problem.softcap or 1.0),
        "softcap": problem.softcap,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = [
        Launch(_decode_kernel, (together, count // together) if c.split else count, arguments, {"c": c}, options)
    ]
    if memory is not None:
        rows = rows_per_tile(problem, config)
        rows_each = 1
        grid: int | tuple[int, int, int] = count // parts * rows
        kernel, merging = _fold_kernel, _constants_of_combine(problem, c, False, c.columns, c.parts)
        if parts == 1:  # constants that differ with batch and capacity are not those of `_decode_kernel`
            tiles = problem.batch * row_blocks(problem, config) * problem.heads_kv
            by_tile, columns = c.one_scan and tiles < count, combined_columns(problem, config, count)
            shared, wide = tiles if by_tile else count, c.block_dv // columns
            rows_each = min(combined_rows(rows * wide * shared), rows)
            grid = cdiv(rows, rows_each) * wide, together, shared // together
            kernel = _combine_kernel
            merging = _constants_of_combine(problem, c, by_tile, columns, max(8, COMBINED_ELEMENTS // columns))
        given = arguments | {"sharers": count // together, "rows_each": rows_each}
        merged = {name: given[name] for name in kernel.arg_names if name in given}
        early = {"launch_pdl": True} if c.overlap else {}
        # With one warp all of them fit beside `_decode_kernel`, and wait there with everything known but the sums.
        launches.append(Launch(kernel, grid, merged, {"c": merging}, {"num_warps": 1, **early}))
    return launches


def cache_pass(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: DecodeConfig | None = None,
    launches: Callable[..., list[Launch]] = launches_of,
) -> Pass:
    """Fills out and lse. `config`, `launches`: another kernel's that splits the work alike."""
    config = config or config_of(problem)
    memory = workspace(problem, config, tensors.q.device)
    found = [*forward_launches(problem, tensors, out, lse), *launches(problem, tensors, out, lse, config, memory)]
    return Pass(found, [] if memory is None else [memory])


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """The same for a forward pass, whose keys lie in a cache that holds them all."""
    over_cache, of_cache = as_kvcache(problem, tensors)
    rows = out if problem.varlen else as_bhsd(out, problem.layout).transpose(1, 2)
    return cache_pass(over_cache, of_cache, rows, lse)._replace(given=of_cache.present())
