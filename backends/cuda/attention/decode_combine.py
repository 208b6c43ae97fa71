"""The kernels that merge the partial results of `_decode_kernel`, and how these kernels write rows of out and lse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from diyfa.backends.cuda.attention.block_info import cached_blocks
from diyfa.backends.cuda.attention.decode_configs import DecodeConfig
from diyfa.backends.cuda.attention.dots import round_to
from diyfa.backends.cuda.attention.fixed_order import COMPILE_OPTIONS as FIXED_ORDER_OPTIONS
from diyfa.backends.cuda.attention.fixed_order import chunk_factors, fold, with_sink, without_sign_of_zero
from diyfa.backends.cuda.attention.fwd import add_sink, row_lse
from diyfa.backends.cuda.attention.seq_info import cache_seq_info
from diyfa.backends.cuda.attention.stream_k import (
    COMBINED_ELEMENTS,
    combined_columns,
    combined_rows,
    find_shared_tile,
    partials_slot,
    rows_per_tile,
    tiles_per_sequence,
)
from diyfa.backends.cuda.attention.tile_io import LOWEST, cdiv
from diyfa.backends.cuda.runtime.signature import arguments_among
from diyfa.problem import KVCacheProblem, Launch, cached_per_kind

if TYPE_CHECKING:
    from diyfa.backends.cuda.attention.decode import DecodeConstants


@triton.jit
def store_rows(
    acc,  # [rows, columns from `first_column` on]
    l_i, m_i,  # [rows]
    rows, first_column, b, hk, first_q, n_queries, outputs, PACKED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Normalise the sums of some rows of a sequence, and write out and lse of the rows that are queries."""
    o_ptr, lse_ptr, sinks_ptr, v_descale_ptr, strides, sizes = outputs
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh = strides
    heads_kv, group, seqlen_q, total_q = sizes
    tokens = rows // group
    heads = hk * group + rows % group
    exists = tokens < n_queries
    sink = tl.zeros_like(m_i)
    if sinks_ptr is not None:
        sink += tl.load(sinks_ptr + heads, mask=exists, other=0.0)
        if c.CHUNK > 0:
            m_i, l_i, alpha = with_sink(sink, m_i, l_i)
            acc = acc * alpha[:, None]
        else:
            m_i, l_i, acc = add_sink(sink, m_i, l_i, acc)
    # A row that saw no key has out = 0, lse = +inf.
    has_keys = l_i != 0.0
    if c.CHUNK > 0:
        factor = tl.where(has_keys, 1.0 / tl.where(has_keys, l_i, 1.0), 0.0)
        out = tl.where(factor[:, None] == 0.0, 0.0, acc * factor[:, None])
    else:
        out = tl.where(has_keys[:, None], acc / tl.where(has_keys, l_i, 1.0)[:, None], 0.0)
    if v_descale_ptr is not None:
        out *= tl.load(v_descale_ptr + b.to(tl.int64) * stride_vdb + hk.to(tl.int64) * stride_vdh)
    lse = tl.where(has_keys, row_lse(sink, m_i, tl.where(has_keys, l_i, 1.0)), float("inf"))
    if PACKED:
        lse_rows = heads.to(tl.int64) * total_q + first_q + tokens
    else:
        lse_rows = (b.to(tl.int64) * heads_kv * group + heads) * seqlen_q + tokens
    tl.store(lse_ptr + lse_rows, lse, mask=exists)
    cols = first_column + tl.arange(0, acc.shape[1])
    base = o_ptr + b.to(tl.int64) * stride_ob
    addresses = base + ((first_q + tokens).to(tl.int64) * stride_om + heads.to(tl.int64) * stride_oh)[:, None]
    if c.CHUNK > 0:
        out = without_sign_of_zero(out)
    else:  # adding 0 makes -0 a 0: the sign of a sum that cancelled would depend on how its blocks were grouped
        out = out + 0.0
    out = round_to(out, o_ptr.dtype.element_ty)
    tl.store(addresses + cols[None, :], out, mask=exists[:, None] & (cols[None, :] < c.HEAD_DIM_V))


@triton.jit
def add_chunk(m_i, l_i, acc, m_chunk, l_chunk, acc_chunk):
    """Add the sums of a chunk to the sums of the chunks before -> (m_i, l_i, acc)."""
    m_new, alpha, beta = chunk_factors(m_i, m_chunk)
    l_new = fold(l_i, alpha, l_chunk, beta)
    acc = fold(acc, tl.broadcast_to(alpha[:, None], acc.shape), acc_chunk, tl.broadcast_to(beta[:, None], acc.shape))
    return m_new, l_new, acc


_RUNTIME = (
    "stride_vdb", "stride_vdh", "batch", "heads_kv", "group", "blocks_m", "seqlen_q", "total_q", "total_k", "length",
    "added", "capacity", "window_left", "window_right", "rows_per_tile", "chunks_per_tile", "n_shares",
    "rows_per_program",
)  # fmt: skip
_UNALIGNED = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqlens_ptr", "leftpad_ptr", "sinks_ptr", "v_descale_ptr")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _combine_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr, sinks_ptr, v_descale_ptr, o_ptr, lse_ptr, sums_ptr,
    statistics_ptr, length, capacity,
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh, batch, heads_kv, group, blocks_m, seqlen_q, total_q,
    total_k, added, window_left, window_right,
    n_shares,
    rows_per_program,  # rows that a program has, one after another
    c: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of some rows and columns of a tile whose keys several programs shared.

    1. Recompute the schedule to find the tile, and the shares that have chunks of it (`find_shared_tile`). That needs
       no output of `_decode_kernel`, so with OVERLAP it runs beside that kernel.
    2. Wait for `_decode_kernel`.
    3. If the tile is shared, read the chunks' partial results, PARTIALS at a time, and write out and lse.

    The grid is (blocks of `rows_per_program` rows x blocks of COLUMNS columns, heads_in_parallel, tiles and head rounds
    if BY_TILE, else shares).
    """
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    tile_mask = (group, window_left, window_right)
    outputs = (
        o_ptr, lse_ptr, sinks_ptr, v_descale_ptr,
        (stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh),
        (heads_kv, group, seqlen_q, total_q),
    )  # fmt: skip
    row0 = tl.program_id(0) // (c.BLOCK_DV // c.COLUMNS) * rows_per_program
    first_column = tl.program_id(0) % (c.BLOCK_DV // c.COLUMNS) * c.COLUMNS
    tile, hk, sequence, first_share, last_share, is_unfinished = find_shared_tile(
        n_shares, heads_kv, batch, blocks_m, lengths, tile_mask, c
    )
    b = tile // blocks_m
    first_q, n_queries, _, _, _ = sequence
    if c.OVERLAP:
        gdc_wait()
    first_row = tile % blocks_m * c.BLOCK_M
    rows_end = tl.minimum(row0 + rows_per_program, n_queries * group - first_row)
    for row in range(row0, tl.where(is_unfinished, rows_end, 0)):
        rows = first_row + row + tl.arange(0, 1)
        cols = first_column + tl.arange(0, c.COLUMNS)
        m_i = tl.full([1], LOWEST, tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, c.COLUMNS], tl.float32)
        for start in range(first_share, last_share + 1, c.PARTIALS):
            shares = start + tl.arange(0, c.PARTIALS)
            exists = shares <= last_share
            slots = partials_slot(shares * tl.num_programs(1) + tl.program_id(1), shares == first_share)
            statistics = statistics_ptr + slots * (2 * c.BLOCK_M) + row
            m = tl.load(statistics, mask=exists, other=LOWEST)
            sums_of_weights = tl.load(statistics + c.BLOCK_M, mask=exists, other=0.0)
            addresses = sums_ptr + (slots.to(tl.int64) * c.BLOCK_M + row)[:, None] * c.BLOCK_DV + cols[None, :]
            sums = tl.load(addresses, mask=exists[:, None], other=0.0)  # [PARTIALS, COLUMNS]
            m_new = tl.maximum(m_i, tl.max(m, 0))
            alpha = tl.math.exp2(m_i - m_new)
            weights = tl.math.exp2(m - m_new)  # [PARTIALS]
            l_i = l_i * alpha + tl.sum(sums_of_weights * weights, 0)
            acc = acc * alpha[:, None] + tl.sum(sums * weights[:, None], 0)[None, :]
            m_i = m_new
        PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
        store_rows(acc, l_i, m_i, rows, first_column, b, hk, first_q, n_queries, outputs, PACKED, c)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _combine_in_order_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr, sinks_ptr, v_descale_ptr, o_ptr, lse_ptr,
    sums_ptr,  # [tiles and KV heads, chunks_per_tile, rows_per_tile, BLOCK_DV]
    statistics_ptr,  # [tiles and KV heads, chunks_per_tile, 2, rows_per_tile]: maxima, sums of weights
    length, capacity,
    stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh, heads_kv, group, blocks_m, seqlen_q, total_q, total_k,
    added, window_left, window_right, rows_per_tile, chunks_per_tile, c: tl.constexpr,
):  # fmt: skip
    """Fold the fixed chunks of one row of a tile from the last to the first, and write out and lse.

    The grid has a program for each tile, KV head and row.
    """
    lengths = (
        (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_ptr, leftpad_ptr),
        (seqlen_q, total_q, total_k, length, added, capacity),
    )
    tile_mask = (group, window_left, window_right)
    outputs = (
        o_ptr, lse_ptr, sinks_ptr, v_descale_ptr,
        (stride_ob, stride_oh, stride_om, stride_vdb, stride_vdh),
        (heads_kv, group, seqlen_q, total_q),
    )  # fmt: skip
    tile_and_head = tl.program_id(0) // rows_per_tile
    row = tl.program_id(0) % rows_per_tile
    tile = tile_and_head // heads_kv
    b = tile // blocks_m
    block_m = tile % blocks_m
    first_q, n_queries, _, n_keys, pad = cache_seq_info(b, lengths, c)
    first, n_blocks = cached_blocks(block_m, n_queries, n_keys, pad, tile_mask, c)
    rows = block_m * c.BLOCK_M + row + tl.arange(0, 1)
    if (n_blocks > 0) & (tl.max(rows, 0) < n_queries * group):
        cols = tl.arange(0, c.BLOCK_DV)
        m_i = tl.full([1], LOWEST, tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, c.BLOCK_DV], tl.float32)
        begin = first // c.CHUNK
        for end in range(tl.cdiv(first + n_blocks, c.CHUNK), begin, -c.PARTIALS):
            chunk = tl.arange(0, c.PARTIALS)
            exists = end - 1 - chunk >= begin
            slots = tile_and_head.to(tl.int64) * chunks_per_tile + end - 1 - chunk
            statistics = statistics_ptr + slots * (2 * rows_per_tile) + row
            m_chunks = tl.load(statistics, mask=exists, other=LOWEST)
            l_chunks = tl.load(statistics + rows_per_tile, mask=exists, other=0.0)
            sums = sums_ptr + (slots * rows_per_tile + row)[:, None] * c.BLOCK_DV + cols[None, :]
            acc_chunks = tl.load(sums, mask=exists[:, None], other=0.0)
            for i in tl.static_range(c.PARTIALS):
                is_chunk = chunk == i
                m_chunk = tl.sum(tl.where(is_chunk, m_chunks, 0.0), 0) + tl.zeros([1], tl.float32)
                l_chunk = tl.sum(tl.where(is_chunk, l_chunks, 0.0), 0) + tl.zeros([1], tl.float32)
                acc_chunk = tl.sum(tl.where(is_chunk[:, None], acc_chunks, 0.0), 0)[None, :]
                m_i, l_i, acc = add_chunk(m_i, l_i, acc, m_chunk, l_chunk, acc_chunk)
        PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
        store_rows(acc, l_i, m_i, rows, 0, b, tile_and_head % heads_kv, first_q, n_queries, outputs, PACKED, c)


# Constants that only `_decode_kernel` reads, to load keys and form scores; and `one_round`, which spares its loop a
# division. The kernels here are compiled without them.
_NOT_COMBINED: dict[str, Any] = {
    "softcap": False, "alibi": False, "head_dim": 0, "block_d": 0, "block_d_tail": 0, "page_size": 0, "one_page": False,
    "value_pairs": False, "values_in_keys": False, "widen": False, "chunks_apart": False, "one_round": False,
}  # fmt: skip


@cached_per_kind
def _combine_constants(
    problem: KVCacheProblem, c: DecodeConstants, by_tile: bool, columns: int, partials: int
) -> DecodeConstants:
    """Constants of the combine kernel that follows a `_decode_kernel` with the constants `c`."""
    return replace(c, **_NOT_COMBINED | {"by_tile": by_tile, "columns": columns, "partials": partials})


def combine_launch(
    problem: KVCacheProblem, config: DecodeConfig, c: DecodeConstants, arguments: dict[str, Any], programs: int,
    heads_in_parallel: int,
) -> Launch:  # fmt: skip
    """The launch that merges what `programs` programs of `_decode_kernel` with these arguments leave."""
    rows, rows_per_program = rows_per_tile(problem, config), 1
    if c.chunks_apart:
        kernel = _combine_in_order_kernel
        grid: int | tuple[int, int, int] = programs // arguments["chunks_per_tile"] * rows
        constants = _combine_constants(problem, c, False, c.columns, c.partials)
    else:
        kernel = _combine_kernel
        # These constants vary with batch and capacity. `_decode_kernel` does not have them, for it takes seconds to
        # compile.
        tiles = problem.batch * tiles_per_sequence(problem, config) * problem.heads_kv
        by_tile, columns = c.one_scan and tiles < programs, combined_columns(problem, config, programs)
        shared, column_blocks = tiles if by_tile else programs, c.block_dv // columns
        rows_per_program = min(combined_rows(rows * column_blocks * shared), rows)
        grid = cdiv(rows, rows_per_program) * column_blocks, heads_in_parallel, shared // heads_in_parallel
        constants = _combine_constants(problem, c, by_tile, columns, max(8, COMBINED_ELEMENTS // columns))
    arguments = arguments | {"n_shares": programs // heads_in_parallel, "rows_per_program": rows_per_program}
    # Programs of one warp all fit beside `_decode_kernel`, and wait there with everything known but the sums.
    options = {"num_warps": 1, **({"launch_pdl": True} if c.overlap else {})}
    options |= FIXED_ORDER_OPTIONS if problem.batch_invariant else {}
    return Launch(kernel, grid, arguments_among(kernel, arguments), {"c": constants}, options)
