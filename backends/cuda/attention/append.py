"""Appends new keys and values to a KV cache, and rotates the new keys and the queries, in one launch.

A program has a block of rows of one sequence: of new keys, of new values, or of queries. A row is one head of a token;
row number token * heads + head. Nothing in the cache is written but the new rows.

An *entry* of the cache is a page, or in a contiguous cache the memory of one sequence. A *slot* is a key's place in its
entry. A new key is dropped if its position is beyond the cache's capacity, or if its entry does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import round_to
from diyfa.backends.cuda.attention.launch import cache_arguments, pointers, strides
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import KVCacheProblem, KVCacheTensors, Launch, NewKeys

FLOAT8_LARGEST = tl.constexpr(448.0)  # largest float8_e4m3fn
TILE_ELEMENTS = 2048  # elements of a program, 16 per thread


@dataclass(frozen=True, eq=False)
class AppendConstants(Constants):
    """Constants of the kernel."""

    rows: int
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: no pages
    rotary: int  # number of features that are rotated
    interleaved: bool
    rotates_per_query: bool  # query i has the position of new key i; else all queries have that of the first
    float8: bool


@triton.jit
def _offsets(first, second, heads, strides):
    """Return the int64 offsets of rows: of heads of (sample, token) in a tensor, or of (entry, slot) in the cache."""
    return first.to(tl.int64) * strides[0] + second.to(tl.int64) * strides[1] + heads.to(tl.int64) * strides[2]


@triton.jit
def _load(x_ptr, offsets, exists, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (features of the rows at `offsets` [ROWS] of x, [ROWS, BLOCK_D]; mask of those that exist)."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = exists[:, None] & (cols < HEAD_DIM)
    return tl.load(x_ptr + offsets[:, None] + cols, mask=mask, other=0.0), mask


@triton.jit
def _load_rotated(x_ptr, offsets, exists, positions, rotary, c: tl.constexpr):
    """Return `_load` in float32, with each row rotated by the row of cos and sin that `positions` [ROWS] gives it.

    A row at a position that cos and sin do not have is not rotated. `rotary`: cos and sin (cos_rows, ROTARY / 2) by
    their addresses and strides, and cos_rows.
    """
    cos_ptr, stride_cos, sin_ptr, stride_sin, cos_rows = rotary
    x, mask = _load(x_ptr, offsets, exists, c.HEAD_DIM, c.BLOCK_D)
    x = x.to(tl.float32)
    # A feature and its partner are rotated in their plane, by the same angle.
    cols = tl.arange(0, c.BLOCK_D)
    if c.INTERLEAVED:  # pairs (0, 1), (2, 3), …
        is_second = cols % 2 == 1
        partners = tl.where(is_second, cols - 1, cols + 1)
        angles = cols // 2
    else:  # pairs (i, i + half)
        HALF: tl.constexpr = c.ROTARY // 2
        is_second = cols >= HALF
        partners = tl.where(is_second, cols - HALF, cols + HALF)
        angles = tl.where(is_second, cols - HALF, cols)
    has_row = (positions >= 0) & (positions < cos_rows)
    is_rotated = (exists & has_row)[:, None] & (cols < c.ROTARY)[None, :]
    partner_values = tl.load(x_ptr + offsets[:, None] + partners[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    position = positions.to(tl.int64)[:, None]
    cos = tl.load(cos_ptr + position * stride_cos + angles[None, :], mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * stride_sin + angles[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    return x * cos + tl.where(is_second[None, :], partner_values, -partner_values) * sin, mask


@triton.jit
def _store_in_cache(x, mask, offsets, b, heads, cache, c: tl.constexpr):
    """Write new keys or values x [ROWS, columns] of `heads` [ROWS] to `offsets` [ROWS] of the cache, in its dtype."""
    cache_ptr, descale_ptr, stride_db, stride_dh = cache
    if c.FLOAT8:
        x = x.to(tl.float32)
        if descale_ptr is not None:
            descale = tl.load(descale_ptr + b.to(tl.int64) * stride_db + heads.to(tl.int64) * stride_dh)
            x = tl.div_rn(x, tl.broadcast_to(descale[:, None], x.shape))
        # Both comparisons are false for a NaN, which stays.
        x = tl.where(x > FLOAT8_LARGEST, FLOAT8_LARGEST, tl.where(x < -FLOAT8_LARGEST, -FLOAT8_LARGEST, x))
    if x.dtype == tl.float32:
        x = round_to(x, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + offsets[:, None] + tl.arange(0, x.shape[1])[None, :], x, mask=mask)


@triton.jit
def _find_slots(b, positions, exists, tables, c: tl.constexpr):
    """Return (entry, slot, whether both exist) of new keys at `positions` of sequence b, each [ROWS]."""
    block_table_ptr, stride_table, cache_batch_idx_ptr, n_entries = tables
    slots = tl.where(exists, positions, 0)
    if c.PAGE_SIZE > 0:
        table = block_table_ptr + b.to(tl.int64) * stride_table
        entries = tl.load(table + slots // c.PAGE_SIZE, mask=exists, other=-1)
        slots = slots % c.PAGE_SIZE
    else:
        entry = b
        if cache_batch_idx_ptr is not None:
            entry = tl.load(cache_batch_idx_ptr + b)
        entries = entry + slots * 0
    return entries, slots, exists & (entries >= 0) & (entries < n_entries)


# Kernels are compiled for no value of these numbers and for no alignment of these pointers.
_RUNTIME = (
    "length", "stride_cos", "stride_sin", "stride_table", "stride_kdb", "stride_kdh", "stride_vdb", "stride_vdh",
    "heads_q", "heads_kv", "seqlen_q", "seqlen_new", "blocks_k", "blocks_v", "blocks_q", "cos_rows", "entries",
    "capacity",
)  # fmt: skip
_UNALIGNED = (
    "cos_ptr", "sin_ptr", "seqlens_ptr", "block_table_ptr", "cache_batch_idx_ptr", "k_descale_ptr", "v_descale_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr,
    seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, k_descale_ptr, v_descale_ptr,
    k_cache_ptr, v_cache_ptr, rotated_ptr,
    length,  # keys of each sequence before the append, if seqlens_ptr is None
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn, stride_vch, stride_rb, stride_rm, stride_rh,
    stride_cos, stride_sin, stride_table, stride_kdb, stride_kdh, stride_vdb, stride_vdh,
    heads_q, heads_kv, seqlen_q, seqlen_new,
    blocks_k, blocks_v, blocks_q,  # programs per sequence for keys, values, queries
    cos_rows,
    entries,  # of the cache
    capacity,
    c: tl.constexpr,
):  # fmt: skip
    """Write one block of a sequence: ROWS new keys or values to the cache, or ROWS rotated queries to `rotated`.

    The sequence's blocks are numbered: first those of keys, then those of values, then those of queries.
    """
    rotary = (cos_ptr, stride_cos, sin_ptr, stride_sin, cos_rows)
    blocks = blocks_k + blocks_v + blocks_q
    b = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n_cached = length
    if seqlens_ptr is not None:
        n_cached = tl.load(seqlens_ptr + b)
    if block < blocks_k + blocks_v:
        is_v = block >= blocks_k
        rows = tl.where(is_v, block - blocks_k, block) * c.ROWS + tl.arange(0, c.ROWS)
        tokens = rows // heads_kv
        heads = rows % heads_kv
        positions = n_cached + tokens
        # `n_cached + tokens < capacity` could overflow.
        exists = (tokens < seqlen_new) & (positions >= 0) & (n_cached < capacity - tokens)
        tables = (block_table_ptr, stride_table, cache_batch_idx_ptr, entries)
        row_entries, slots, exists = _find_slots(b, positions, exists, tables, c)
        if is_v:
            if v_ptr is not None:
                v_offsets = _offsets(b, tokens, heads, (stride_vb, stride_vn, stride_vh))
                v, v_mask = _load(v_ptr, v_offsets, exists, c.HEAD_DIM_V, c.BLOCK_DV)
                v_targets = _offsets(row_entries, slots, heads, (stride_vcb, stride_vcn, stride_vch))
                cache = (v_cache_ptr, v_descale_ptr, stride_vdb, stride_vdh)
                _store_in_cache(v, v_mask, v_targets, b, heads, cache, c)
        else:
            k_offsets = _offsets(b, tokens, heads, (stride_kb, stride_kn, stride_kh))
            if c.ROTARY > 0:
                k, k_mask = _load_rotated(k_ptr, k_offsets, exists, positions, rotary, c)
            else:
                k, k_mask = _load(k_ptr, k_offsets, exists, c.HEAD_DIM, c.BLOCK_D)
            k_targets = _offsets(row_entries, slots, heads, (stride_kcb, stride_kcn, stride_kch))
            cache = (k_cache_ptr, k_descale_ptr, stride_kdb, stride_kdh)
            _store_in_cache(k, k_mask, k_targets, b, heads, cache, c)
    elif c.ROTARY > 0:
        q_rows = (block - blocks_k - blocks_v) * c.ROWS + tl.arange(0, c.ROWS)
        q_tokens = q_rows // heads_q
        q_heads = q_rows % heads_q
        q_positions = n_cached + q_tokens * 0
        if c.ROTATES_PER_QUERY:
            q_positions += q_tokens
        q_offsets = _offsets(b, q_tokens, q_heads, (stride_qb, stride_qm, stride_qh))
        q, q_mask = _load_rotated(q_ptr, q_offsets, q_tokens < seqlen_q, q_positions, rotary, c)
        q_targets = _offsets(b, q_tokens, q_heads, (stride_rb, stride_rm, stride_rh))
        addresses = rotated_ptr + q_targets[:, None] + tl.arange(0, c.BLOCK_D)[None, :]
        tl.store(addresses, round_to(q, rotated_ptr.dtype.element_ty), mask=q_mask)


def make_launch(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> Launch | None:
    """Return the launch that writes `new`, or None if there is nothing to write."""
    cos, sin = new.cos, new.sin
    block_d, block_dv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    c = AppendConstants.read_from(
        problem, rows=TILE_ELEMENTS // max(block_d, block_dv), block_d=block_d, block_dv=block_dv,
        rotary=0 if cos is None else 2 * cos.shape[1], interleaved=new.interleaved,
        rotates_per_query=problem.window_left >= 0 or problem.window_right >= 0,
        float8=problem.cache_dtype != problem.dtype,
    )  # fmt: skip
    blocks_k = cdiv(new.k.shape[1] * problem.heads_kv, c.rows)
    blocks_v = 0 if new.v is None else blocks_k
    blocks_q = 0 if new.rotated_q is None else cdiv(problem.seqlen_q * problem.heads_q, c.rows)
    grid = problem.batch * (blocks_k + blocks_v + blocks_q)
    if not grid:
        return None
    q, k_cache, v_cache = tensors[:3]
    arguments = {
        **pointers(q=q, k=new.k, v=new.v, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache, rotated=new.rotated_q),
        **strides("bshd", q=q, k=new.k, v=new.v, kc=k_cache, vc=v_cache, r=new.rotated_q),
        **cache_arguments(problem, tensors),
        "stride_cos": 0 if cos is None else cos.stride(0), "stride_sin": 0 if sin is None else sin.stride(0),
        "cos_rows": 0 if cos is None else cos.shape[0],
        "heads_q": problem.heads_q, "seqlen_new": new.k.shape[1],
        "blocks_k": blocks_k, "blocks_v": blocks_v, "blocks_q": blocks_q,
    }  # fmt: skip
    return Launch(_append_kernel, grid, arguments, {"c": c}, {"num_warps": 4})


def unsupported(problem: KVCacheProblem) -> str | None:
    """Return why nothing can be appended, or None."""
    if problem.varlen or problem.packed_keys:
        return "append writes to a cache of (B, Sq, H, D) queries, not to packed keys"
    return None


def append_pass(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> Pass:
    """Return the pass that writes `new`."""
    launch = make_launch(problem, tensors, new)
    return Pass([] if launch is None else [launch])
