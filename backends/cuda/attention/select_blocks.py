"""Selection of key blocks by the products of block means (`diyfa.select_blocks`), without waiting for the device.

1. `_means_kernel` averages each block of queries, and each block of keys.
2. `_select_kernel`: a program has BLOCK_M blocks of queries of a head. It multiplies their means by those of all key
   blocks, selects the largest scores one after another, and writes codes (`diyfa.block_lists`).
3. `_edge_bits_kernel` writes the bits of *edge blocks*: key blocks that the diagonal or the end of the keys cuts. Each
   block of queries has EDGES consecutive ones. All heads share their bits.
4. `build_mask._lists_kernel` writes the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.build_mask import EMPTY, FULL, WORD, columns_of, lists_launch
from diyfa.backends.cuda.attention.launch import fields_of, pointers
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import on_device
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.block_lists import Selection, edge_blocks, list_length, n_blocks
from diyfa.problem import Launch

BLOCK_M = 16  # blocks of queries of a program: each load of the keys' means serves all of them
LARGEST = tl.constexpr(3e38)  # infinite scores rank as -LARGEST or LARGEST, and NaN as -LARGEST
MAX_COLUMNS = 1024  # most key blocks, whose scores must fit the registers of a program
MEAN_ROWS = tl.constexpr(32)  # rows of a block that are added at once


@dataclass(frozen=True, eq=False)
class SelectConstants(Constants):
    """Constants of the kernels."""

    block_q: int
    block_k: int
    head_dim: int
    block_d: int
    block_m: int
    columns: int  # a power of two: at least as many as there are key blocks
    causal: bool
    by_group: bool
    edges: int  # edge blocks of a block of queries (`edge_blocks`)


@triton.jit(do_not_specialize=("rows", "heads"))
def _means_kernel(x_ptr, means_ptr, stride_xb, stride_xh, stride_xm, heads, rows, BLOCK: tl.constexpr, c: tl.constexpr):
    """Write the mean of one block of BLOCK rows of x (B, H, rows, HEAD_DIM) to means (B * H, HEAD_DIM, blocks) fp32."""
    blocks = tl.cdiv(rows, BLOCK)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    x = x_ptr + (head // heads).to(tl.int64) * stride_xb + (head % heads).to(tl.int64) * stride_xh
    offs_d = tl.arange(0, c.BLOCK_D)
    total = tl.zeros([c.BLOCK_D], tl.float32)
    for row0 in range(0, BLOCK, MEAN_ROWS):
        row = block * BLOCK + row0 + tl.arange(0, MEAN_ROWS)
        at = x + row.to(tl.int64)[:, None] * stride_xm + offs_d[None, :]
        inside = (row < rows)[:, None] & (offs_d < c.HEAD_DIM)[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    count = tl.minimum(rows - block * BLOCK, BLOCK)
    means = means_ptr + head.to(tl.int64) * c.HEAD_DIM * blocks + block
    tl.store(means + offs_d * blocks, total / count, mask=offs_d < c.HEAD_DIM)


@triton.jit
def _scores(means_q_ptr, means_k_ptr, head_q, head_k, block_i, nq, nk, c: tl.constexpr):
    """Return the scores [BLOCK_M, COLUMNS]: products of the block means of a query head and of a KV head."""
    offs_n = tl.arange(0, c.COLUMNS)
    q_at = means_q_ptr + head_q.to(tl.int64) * c.HEAD_DIM * nq + block_i
    k_at = means_k_ptr + head_k.to(tl.int64) * c.HEAD_DIM * nk + offs_n
    scores = tl.zeros([c.BLOCK_M, c.COLUMNS], tl.float32)
    for d in range(c.HEAD_DIM):
        q = tl.load(q_at + d * nq, mask=block_i < nq, other=0.0)
        k = tl.load(k_at + d * nk, mask=offs_n < nk, other=0.0)
        scores += q[:, None] * k[None, :]
    return scores


@triton.jit(do_not_specialize=("heads", "group", "seqlen_q", "seqlen_k", "topk", "sinks", "local", "length"))
def _select_kernel(
    means_q_ptr, means_k_ptr, blocks_ptr, heads, group, seqlen_q, seqlen_k, topk, sinks, local,
    length,  # `list_length`: entries of `mask_blocks` for one head
    c: tl.constexpr,
):  # fmt: skip
    """Write the codes of all key blocks for BLOCK_M blocks of queries of a head.

    `topk`, `sinks` and `local` are those of `diyfa.select_blocks`, in key blocks. BY_GROUP: scores are summed over the
    `group` query heads of a KV head. The code of a chosen edge block is the index of its bits: block_i * EDGES + its
    number among the edge blocks of block_i.
    """
    nq, nk = tl.cdiv(seqlen_q, c.BLOCK_Q), tl.cdiv(seqlen_k, c.BLOCK_K)
    tiles = tl.cdiv(nq, c.BLOCK_M)
    head = tl.program_id(0) // tiles  # of all samples
    block_i = tl.program_id(0) % tiles * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    head_k = head // heads * (heads // group) + head % heads // group
    if c.BY_GROUP:
        scores = tl.zeros([c.BLOCK_M, c.COLUMNS], tl.float32)
        for i in range(group):
            scores += _scores(means_q_ptr, means_k_ptr, head // group * group + i, head_k, block_i, nq, nk, c)
    else:
        scores = _scores(means_q_ptr, means_k_ptr, head, head_k, block_i, nq, nk, c)
    scores = tl.where(scores == scores, tl.minimum(tl.maximum(scores, -LARGEST), LARGEST), -LARGEST)

    offs = tl.arange(0, c.COLUMNS)
    shift = seqlen_k - seqlen_q
    # Positions of the first and the last query of each block [BLOCK_M, 1], and of the first key [1, COLUMNS].
    first = (block_i * c.BLOCK_Q + shift)[:, None]
    last = (tl.minimum((block_i + 1) * c.BLOCK_Q, seqlen_q) - 1 + shift)[:, None]
    key = (offs * c.BLOCK_K)[None, :]
    exists = (block_i < nq)[:, None] & (offs < nk)[None, :]
    eligible = exists & (key <= last) if c.CAUSAL else exists
    # Always chosen, beside the topk: the first `sinks` key blocks, and with `local` those that the diagonal crosses and
    # local - 1 on either side of them.
    margin = (local - 1) * c.BLOCK_K
    is_near = (local > 0) & (key + c.BLOCK_K + margin > first) & (key - margin <= last)
    chosen = eligible & ((offs < sinks)[None, :] | is_near)
    scores = tl.where(eligible & (chosen == 0), scores, float("-inf"))
    for _ in range(topk):
        largest = tl.max(scores, 1)[:, None]
        column = tl.min(tl.where((scores == largest) & (scores > float("-inf")), offs[None, :], c.COLUMNS), 1)[:, None]
        is_next = offs[None, :] == column
        chosen = chosen | is_next
        scores = tl.where(is_next, float("-inf"), scores)

    is_full = key + c.BLOCK_K <= seqlen_k
    first_edge = (nk - 1) + first * 0  # [BLOCK_M, 1]: without a causal mask only the end of the keys cuts a block
    if c.CAUSAL:
        is_full = is_full & (key + (c.BLOCK_K - 1) <= first)
        first_edge = tl.maximum(first, 0) // c.BLOCK_K
    edge = block_i[:, None] * c.EDGES + offs[None, :] - first_edge  # index of the bits, of edge blocks
    codes = tl.where(chosen, tl.where(is_full, FULL, edge), EMPTY)
    lists = blocks_ptr + head.to(tl.int64) * length
    tl.store(lists + block_i[:, None] * nk + offs[None, :], codes, mask=exists)


@triton.jit(do_not_specialize=("seqlen_q", "seqlen_k"))
def _edge_bits_kernel(bits_ptr, seqlen_q, seqlen_k, c: tl.constexpr):
    """Write the bits of one edge block: number program_id % EDGES of block program_id // EDGES of queries."""
    slot = tl.program_id(0)
    first = slot // c.EDGES * c.BLOCK_Q + seqlen_k - seqlen_q
    first_edge = tl.cdiv(seqlen_k, c.BLOCK_K) - 1
    if c.CAUSAL:
        first_edge = tl.maximum(first, 0) // c.BLOCK_K
    word = tl.arange(0, c.BLOCK_K // WORD)
    bit = tl.arange(0, WORD)[None, None, :]
    j = (first_edge + slot % c.EDGES) * c.BLOCK_K + word[None, :, None] * WORD + bit
    for row0 in range(0, c.BLOCK_Q, 32):
        row = row0 + tl.arange(0, 32)
        i = (first + row)[:, None, None]
        seen = (i < seqlen_k) & (j < seqlen_k)
        if c.CAUSAL:
            seen = seen & (j <= i)
        at = bits_ptr + slot.to(tl.int64) * (c.BLOCK_Q * c.BLOCK_K // WORD) + row[:, None] * (c.BLOCK_K // WORD)
        tl.store(at + word[None, :], tl.sum(seen.to(tl.int32) << bit, 2))


def make_launches(
    q: torch.Tensor, k: torch.Tensor, how: Selection, blocks: torch.Tensor, bits: torch.Tensor
) -> list[Launch]:
    """Return the launches that fill `blocks` and `bits` of the mask of q (B, H, Sq, D) and k (B, Hk, Sk, D)."""
    batch, heads, seqlen_q, head_dim = q.shape
    sizes = seqlen_q, k.shape[2]
    nq, nk = n_blocks(*sizes, how.block)
    c = SelectConstants(
        *how.block, head_dim, padded_head_dim(head_dim), BLOCK_M, columns_of(nk), how.causal, how.by_group,
        edge_blocks(how, sizes),
    )  # fmt: skip
    means_q = q.new_empty((batch * heads, head_dim, nq), dtype=torch.float32)
    means_k = q.new_empty((batch * k.shape[1], head_dim, nk), dtype=torch.float32)
    launches = []
    for x, means, block in ((q, means_q, how.block[0]), (k, means_k, how.block[1])):
        b, h, m, _ = x.stride()
        arguments = {
            **pointers(x=x, means=means), "stride_xb": b, "stride_xh": h, "stride_xm": m, "heads": x.shape[1],
            "rows": x.shape[2],
        }  # fmt: skip
        grid = means.shape[0] * means.shape[2]
        launches.append(Launch(_means_kernel, grid, arguments, {"BLOCK": block, "c": c}, {"num_warps": 4}))
    lengths = {"seqlen_q": sizes[0], "seqlen_k": sizes[1]}
    arguments = {
        **pointers(means_q=means_q, means_k=means_k, blocks=blocks), **fields_of(how, "topk", "sinks", "local"),
        **lengths, "heads": heads, "group": heads // k.shape[1], "length": list_length(nq, nk),
    }  # fmt: skip
    grid = batch * heads * cdiv(nq, BLOCK_M)
    launches.append(Launch(_select_kernel, grid, arguments, {"c": c}, {"num_warps": 8}))
    if c.edges:
        at = {"bits_ptr": bits, **lengths}
        launches.append(Launch(_edge_bits_kernel, nq * c.edges, at, {"c": c}, {"num_warps": 4}))
    return [*launches, lists_launch(blocks, batch * heads, sizes, how.block)]


def select_blocks(q: torch.Tensor, k: torch.Tensor, how: Selection) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return `mask_blocks` and `mask_bits` for q (B, H, Sq, D) and k (B, Hk, Sk, D), or None for too many keys."""
    if n_blocks(q.shape[2], k.shape[2], how.block)[1] > MAX_COLUMNS:
        return None
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    nq, nk = n_blocks(q.shape[2], k.shape[2], how.block)
    blocks = torch.empty(*q.shape[:2], list_length(nq, nk), dtype=torch.int32, device=q.device)
    edges = nq * edge_blocks(how, (q.shape[2], k.shape[2]))
    bits = torch.empty(edges, how.block[0], how.block[1] // 32, dtype=torch.int32, device=q.device)
    with on_device(q):
        launch_each(make_launches(q, k, how, blocks, bits))
    return blocks, bits
