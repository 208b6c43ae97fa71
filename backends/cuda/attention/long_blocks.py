"""Key blocks that many queries see, which the Hopper backward with a block mask begins first.

A persistent program takes one key block after another. If one that takes many times the average begins late, all other
programs are idle until it ends. With a window and a few first tokens that all queries see, the pass took 1.4 times as
long. A key block is *long* if more than twice as many of the mask's blocks of queries see it as see a key block of its
head on average. Heads are heads of K; their query heads count together.

`long_blocks` is one tensor int32: the number of long key blocks; the numbers of these, in any order; and for each
number 1 if it is long, else 0. Numbers are those of `locate_key_block` (`hopper/bwd_tiles.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_mask import mask_strides
from diyfa.backends.cuda.attention.launch import pointers
from diyfa.backends.cuda.attention.tile_io import cdiv
from diyfa.problem import AttentionProblem, AttentionTensors, Launch

BLOCK = tl.constexpr(128)  # key blocks at a time


@triton.jit
def key_block_number(head, block_n, heads, blocks_n, interleaved_heads):
    """Return the number of a key block of a head: the inverse of `locate_key_block`."""
    n_sequential = heads - interleaved_heads
    interleaved = n_sequential * blocks_n + block_n * interleaved_heads + head - n_sequential
    return tl.where(head < n_sequential, head * blocks_n + block_n, interleaved)


@triton.jit
def _count_seen(counts_ptr, start, group_size, stride_h, nq, nk):
    """Return how many blocks of queries see key blocks [start, start + BLOCK), [BLOCK], in all heads of a group.

    `counts_ptr`: the count of listed blocks, full and partial, in the list of key block 0 of the group's first head.
    """
    block_n = start + tl.arange(0, BLOCK)
    n_seen = tl.zeros([BLOCK], tl.int32)
    for _ in range(group_size):
        at = counts_ptr + block_n.to(tl.int64) * (2 + nq)
        n_seen += tl.load(at, mask=block_n < nk, other=0)
        counts_ptr += stride_h
    return n_seen


@triton.jit(
    do_not_specialize=[
        "stride_maskb", "stride_maskh", "heads", "heads_kv", "group_size", "nq", "nk", "interleaved_heads"
    ],
    do_not_specialize_on_alignment=["mask_blocks_ptr"],
)  # fmt: skip
def _find_long_blocks_kernel(
    mask_blocks_ptr,
    long_blocks_ptr,  # its first number is 0
    stride_maskb, stride_maskh,
    heads,  # batch * heads_kv
    heads_kv,  # of a sample; where programs divide groups of query heads (`bwd_partials.py`), the number of subgroups
    group_size,  # query heads of a head of K, or of a subgroup
    nq, nk,  # blocks of the mask: of queries, of keys
    interleaved_heads,  # as in `locate_key_block`
):  # fmt: skip
    """Write which key blocks of one head of K are long."""
    head = tl.program_id(0)
    b = head // heads_kv
    h = head % heads_kv * group_size
    counts_ptr = mask_blocks_ptr + b.to(tl.int64) * stride_maskb + h.to(tl.int64) * stride_maskh
    # Behind nq * nk codes and nq lists of 2 + nk entries come the lists of key blocks; their second entry is the count.
    counts_ptr += nq * nk + nq * (2 + nk) + 1
    total = 0.0
    for start in range(0, nk, BLOCK):
        total += tl.sum(_count_seen(counts_ptr, start, group_size, stride_maskh, nq, nk).to(tl.float32))
    flags_ptr = long_blocks_ptr + 1 + heads * nk
    for start in range(0, nk, BLOCK):
        n_seen = _count_seen(counts_ptr, start, group_size, stride_maskh, nq, nk)
        is_long = (n_seen.to(tl.float32) * nk > 2 * total).to(tl.int32)
        block_n = start + tl.arange(0, BLOCK)
        number = key_block_number(head, block_n, heads, nk, interleaved_heads)
        tl.store(flags_ptr + number, is_long, mask=block_n < nk)
        first = tl.atomic_add(long_blocks_ptr, tl.sum(is_long))  # programs of other heads add theirs, too
        tl.store(long_blocks_ptr + 1 + first + tl.cumsum(is_long) - is_long, number, mask=is_long != 0)


def long_blocks_launch(
    problem: AttentionProblem, tensors: AttentionTensors, long_blocks: torch.Tensor, sizes: Mapping[str, Any]
) -> Launch:
    """Return the launch that fills `long_blocks`, whose first number is 0. `sizes`: arguments of the main kernel."""
    heads_kv = problem.heads_q // sizes["group_size"]
    nq, nk = cdiv(problem.seqlen_q, problem.mask[0]), cdiv(problem.seqlen_k, problem.mask[1])
    arguments = {
        **pointers(mask_blocks=tensors.mask_blocks, long_blocks=long_blocks),
        **mask_strides(tensors),
        "heads": problem.batch * heads_kv, "heads_kv": heads_kv, "nq": nq, "nk": nk,
        "group_size": sizes["group_size"], "interleaved_heads": sizes["interleaved_heads"],
    }  # fmt: skip
    return Launch(_find_long_blocks_kernel, problem.batch * heads_kv, arguments, {}, {"num_warps": 4})
