"""Append keys and values to a KV cache on Ascend, in place, with rotary embedding (Su et al. 2021, arXiv:2104.09864).

The kernel uses the vector cores alone. A task is one token of one sequence: all heads of its new key and value, or of
its query. Scalar code finds where the key goes: to a row of an *entry* of the cache, which is a page, or the memory of
one sequence in a contiguous cache. A key beyond the capacity, or whose entry does not exist, is skipped: the number of
its heads to copy is 0. Nothing but rows of new keys and values is written to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import narrow
from diyfa.backends.npu.attention.vector_io import load_block, store_block
from diyfa.backends.npu.runtime.compat import INTERPRETED, Constants, kernel, padded_head_dim
from diyfa.backends.npu.runtime.launch import bind_launch, device_guard, run, tensor_arguments, vector_programs
from diyfa.backends.npu.tables import configs
from diyfa.problem import KVCacheProblem, KVCacheTensors, Launch, NewKeys

MAX_HEADS = 16  # heads of a token that a vector program copies at once, at most


@dataclass(frozen=True)
class AppendConstants(Constants):
    """Constants of `_append_kernel`."""

    head_dim_v: int
    block_dv: int
    half: int  # half of the features that are rotated
    block_half: int
    unrotated: int  # features of a key or query that are not rotated
    block_unrotated: int
    heads: int
    interleaved: bool
    seqlens: bool
    paged: bool
    batch_idx: bool
    latent: bool
    interpret: bool


@triton.jit
def load_heads(base, heads, stride_h, FEATURES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Load features of a token's heads, [HEADS, BLOCK], zero beyond them."""
    return load_block(base, heads, stride_h, 0, FEATURES, HEADS, BLOCK)


@triton.jit
def store_heads(base, x, heads, stride_h, FEATURES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Store features of a token's heads from x [HEADS, BLOCK], except beyond them."""
    store_block(base, x, heads, stride_h, 0, FEATURES, HEADS, BLOCK)


@triton.jit
def copy_token(
    source, target, cos_ptr, sin_ptr, position, cos_rows, n_heads, stride_sh, stride_th, stride_cos, stride_sin,
    HALF: tl.constexpr, UNROTATED: tl.constexpr, BLOCK_UNROTATED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Copy the first `n_heads` heads of one token from address `source` to address `target`, HEADS at a time.

    The first 2 * HALF features of a head are rotated by row `position` of cos and sin. These have `cos_rows` rows; a
    token at a position beyond them is copied without rotation. UNROTATED features follow, which are not rotated. With
    HALF 0, as for values, cos and sin are not read."""
    dtype = target.dtype.element_ty
    ROTATED: tl.constexpr = 2 * HALF
    BLOCK: tl.constexpr = 2 * c.BLOCK_HALF
    if HALF > 0:
        # One row of cos and sin, [1, BLOCK_HALF]. Beyond their last row none is read: sin is 0, and cos becomes 1.
        n_rows = tl.where(position < cos_rows, 1, 0)
        row = tl.minimum(position, cos_rows - 1).to(tl.int64)
        cos = load_heads(cos_ptr + row * stride_cos, n_rows, 1, HALF, 1, c.BLOCK_HALF).to(tl.float32)
        sin = load_heads(sin_ptr + row * stride_sin, n_rows, 1, HALF, 1, c.BLOCK_HALF).to(tl.float32)
        cos = cos + (1 - n_rows).to(tl.float32)
    for block in range(tl.cdiv(n_heads, c.HEADS)):
        h0 = block * c.HEADS
        heads = tl.minimum(n_heads - h0, c.HEADS)
        source_heads = source + h0 * stride_sh.to(tl.int64)
        target_heads = target + h0 * stride_th.to(tl.int64)
        if HALF > 0:
            if c.INTERLEAVED:  # loading every other feature would waste 15/16 of the buffer
                x = load_heads(source_heads, heads, stride_sh, ROTATED, c.HEADS, BLOCK).to(tl.float32)
                x0, x1 = tl.split(tl.reshape(x, [c.HEADS, c.BLOCK_HALF, 2]))
                x = tl.reshape(tl.join(x0 * cos - x1 * sin, x0 * sin + x1 * cos), [c.HEADS, BLOCK])
                store_heads(target_heads, narrow(x, dtype, c.INTERPRET), heads, stride_th, ROTATED, c.HEADS, BLOCK)
            else:
                x0 = load_heads(source_heads, heads, stride_sh, HALF, c.HEADS, c.BLOCK_HALF).to(tl.float32)
                x1 = load_heads(source_heads + HALF, heads, stride_sh, HALF, c.HEADS, c.BLOCK_HALF).to(tl.float32)
                y0 = narrow(x0 * cos - x1 * sin, dtype, c.INTERPRET)
                y1 = narrow(x0 * sin + x1 * cos, dtype, c.INTERPRET)
                store_heads(target_heads, y0, heads, stride_th, HALF, c.HEADS, c.BLOCK_HALF)
                store_heads(target_heads + HALF, y1, heads, stride_th, HALF, c.HEADS, c.BLOCK_HALF)
        if UNROTATED > 0:
            x = load_heads(source_heads + ROTATED, heads, stride_sh, UNROTATED, c.HEADS, BLOCK_UNROTATED)
            store_heads(target_heads + ROTATED, x, heads, stride_th, UNROTATED, c.HEADS, BLOCK_UNROTATED)


@kernel
def _append_kernel(
    k_new_ptr, v_new_ptr, q_ptr, cos_ptr, sin_ptr, seqlens_ptr, block_table_ptr, batch_idx_ptr,
    k_ptr, v_ptr, rotated_q_ptr,
    stride_k_newb, stride_k_newh, stride_k_newm, stride_v_newb, stride_v_newh, stride_v_newm,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_rotated_qb, stride_rotated_qh, stride_rotated_qm, stride_table, stride_cos, stride_sin,
    batch, heads_q, heads_kv, seqlen_q, seqlen_new, length, capacity, page_size, entries, columns, cos_rows, q_step,
    c: tl.constexpr,
):  # fmt: skip
    """Write new keys and values to the cache and rotated queries to `rotated_q_ptr`.

    A sequence has seqlen_new tasks for its keys and values, then seqlen_q for its queries: seqlen_q is 0 if q is not
    rotated. `length`: keys of each sequence before the append, unless SEQLENS. `columns`: pages that a row of
    block_table names. `entries`: how many the cache has. `q_step`: 1 if query i has the position of new key i, 0 if
    all queries have that of the first."""
    for task in range(tl.program_id(0), batch * (seqlen_new + seqlen_q), tl.num_programs(0)):
        b = task // (seqlen_new + seqlen_q)
        token = task % (seqlen_new + seqlen_q)
        first_position = length
        if c.SEQLENS:
            # At most the largest position that is used, so that sums do not overflow.
            first_position = tl.minimum(tl.load(seqlens_ptr + b), tl.maximum(capacity, cos_rows))
        if token < seqlen_new:
            key = first_position + token
            exists = (key >= 0) & (key < capacity)
            if c.PAGED:
                table_column = tl.minimum(tl.maximum(key // page_size, 0), columns - 1)
                entry = tl.load(block_table_ptr + b.to(tl.int64) * stride_table + table_column)
                row_in_entry = key % page_size
            else:
                entry = b
                if c.BATCH_IDX:
                    entry = tl.load(batch_idx_ptr + b)
                row_in_entry = key
            exists = exists & (entry >= 0) & (entry < entries)
            heads = tl.where(exists, heads_kv, 0)
            entry = tl.where(exists, entry, 0).to(tl.int64)
            row_in_entry = tl.where(exists, row_in_entry, 0).to(tl.int64)
            copy_token(
                k_new_ptr + b.to(tl.int64) * stride_k_newb + token.to(tl.int64) * stride_k_newm,
                k_ptr + entry * stride_kb + row_in_entry * stride_kn,
                cos_ptr, sin_ptr, tl.maximum(key, 0), cos_rows, heads, stride_k_newh, stride_kh, stride_cos, stride_sin,
                c.HALF, c.UNROTATED, c.BLOCK_UNROTATED, c,
            )  # fmt: skip
            if not c.LATENT:
                copy_token(
                    v_new_ptr + b.to(tl.int64) * stride_v_newb + token.to(tl.int64) * stride_v_newm,
                    v_ptr + entry * stride_vb + row_in_entry * stride_vn,
                    cos_ptr, sin_ptr, key, cos_rows, heads, stride_v_newh, stride_vh, stride_cos, stride_sin,
                    0, c.HEAD_DIM_V, c.BLOCK_DV, c,
                )  # fmt: skip
        elif c.HALF > 0:
            query = token - seqlen_new
            copy_token(
                q_ptr + b.to(tl.int64) * stride_qb + query.to(tl.int64) * stride_qm,
                rotated_q_ptr + b.to(tl.int64) * stride_rotated_qb + query.to(tl.int64) * stride_rotated_qm,
                cos_ptr, sin_ptr, tl.maximum(first_position + query * q_step, 0), cos_rows, heads_q, stride_qh,
                stride_rotated_qh, stride_cos, stride_sin,
                c.HALF, c.UNROTATED, c.BLOCK_UNROTATED, c,
            )  # fmt: skip


def make_launch(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> Launch:
    """Return the launch that appends `new`, and rotates q if `new` has a buffer for it."""
    half = new.cos.shape[1] if new.cos is not None else 0
    unrotated = problem.head_dim - 2 * half
    seqlen_q = 0 if new.rotated_q is None else problem.seqlen_q
    seqlen_new = new.k.shape[1]
    table = tensors.block_table
    heads = max(problem.heads_kv, problem.heads_q if seqlen_q else 0)
    values: dict[str, Any] = {
        **tensor_arguments("bshd", k_new=new.k, v_new=new.k if new.v is None else new.v),
        **tensor_arguments("bshd", k=tensors.k_cache, v=tensors.v_cache, q=tensors.q),
        **tensor_arguments("bshd", rotated_q=tensors.q if new.rotated_q is None else new.rotated_q),
        "cos_ptr": new.cos, "sin_ptr": new.sin, "cos_rows": 0 if new.cos is None else new.cos.shape[0],
        "stride_cos": 0 if new.cos is None else new.cos.stride(0),
        "stride_sin": 0 if new.sin is None else new.sin.stride(0),
        "seqlens_ptr": tensors.seqlens, "length": tensors.length, "batch_idx_ptr": tensors.cache_batch_idx,
        "block_table_ptr": table, "stride_table": 0 if table is None else table.stride(0),
        "columns": 0 if table is None else table.shape[1], "entries": tensors.k_cache.shape[0],
        **{name: getattr(problem, name) for name in ("batch", "heads_q", "heads_kv", "capacity", "page_size")},
        "seqlen_q": seqlen_q, "seqlen_new": seqlen_new,
        "q_step": int(problem.window_left >= 0 or problem.window_right >= 0),
        "HEAD_DIM_V": problem.head_dim_v, "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "HALF": half, "BLOCK_HALF": padded_head_dim(half),
        "UNROTATED": unrotated, "BLOCK_UNROTATED": padded_head_dim(unrotated),
        "HEADS": min(triton.next_power_of_2(heads), MAX_HEADS),
        "INTERLEAVED": new.interleaved, "SEQLENS": tensors.seqlens is not None, "PAGED": problem.paged,
        "BATCH_IDX": tensors.cache_batch_idx is not None, "LATENT": new.v is None, "INTERPRET": INTERPRETED,
    }  # fmt: skip
    grid = vector_programs(problem.arch, tensors.q.device, problem.batch * (seqlen_new + seqlen_q))
    return bind_launch(_append_kernel, AppendConstants, grid, values, configs.family_options(problem.arch))


def kvcache_append(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> None:
    """Write `new` to the caches, and the rotated q to its buffer if there is one."""
    with device_guard(tensors.q):
        run(make_launch(problem, tensors, new))
