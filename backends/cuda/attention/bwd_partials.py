"""Subgroups of a group: the query heads of a KV head, divided among programs for dK and dV.

A program has a block of keys, and the queries of all heads that see it. With many query heads per KV head, there may be
fewer key blocks than multiprocessors. So a group may be divided into subgroups of equal size. To the kernels that
compute dK and dV, each subgroup is a group with a KV head of its own, which has the group's K and V. For each subgroup
these kernels write partial sums in float32. `_sum_partials_kernel` adds those of a group up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from diyfa.backends.cuda.attention.configs import MIN_QUERIES
from diyfa.backends.cuda.attention.dots import round_to
from diyfa.backends.cuda.attention.launch import fields_of, pointers, strides
from diyfa.backends.cuda.attention.seq_info import packed_info
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, cdiv
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import can_overlap
from diyfa.problem import AttentionProblem, AttentionTensors, Launch

# Enough key blocks per program that runs at once: nearly one, for subgroups cost a tenth. Under a causal mask nearly
# two, for the longest block takes twice the average.
BLOCKS_PER_PROGRAM, BLOCKS_PER_PROGRAM_CAUSAL = 0.85, 1.7
MAX_PARTIAL_ELEMENTS = 1 << 27  # elements of the partial dK and dV, 512 MiB
# Tile of a program of `_sum_partials_kernel`, and subgroups that it loads at once. It is small: many loads are in
# flight.
SUM_ROWS, SUM_COLUMNS, SUBGROUPS_AT_ONCE = tl.constexpr(32), tl.constexpr(64), tl.constexpr(4)


def count_subgroups(problem: AttentionProblem, block_n: int, programs_at_once: int) -> int:
    """Return the number of subgroups of a group.

    It is the smallest that gives enough blocks of `block_n` keys for `programs_at_once` programs. Each subgroup has at
    least MIN_QUERIES queries, and the partial sums at most MAX_PARTIAL_ELEMENTS elements.
    """
    group = problem.heads_q // problem.heads_kv
    rows = problem.total_k if problem.varlen else problem.batch * problem.seqlen_k
    blocks = rows * problem.heads_kv // block_n
    max_by_memory = MAX_PARTIAL_ELEMENTS // max(rows * problem.heads_kv * (problem.head_dim + problem.head_dim_v), 1)
    max_subgroups = min(problem.seqlen_q * group // MIN_QUERIES, max_by_memory)
    if group == 1 or problem.batch_invariant:  # in the mode, sums may not depend on the number of sequences
        return 1
    divisors = [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n <= max_subgroups)]
    is_uneven = problem.window_right >= 0 and problem.window_left < 0
    enough = programs_at_once * (BLOCKS_PER_PROGRAM_CAUSAL if is_uneven else BLOCKS_PER_PROGRAM)
    return next((n for n in divisors if blocks * n >= enough), divisors[-1])


def partial_sizes(problem: AttentionProblem, subgroups: int) -> list[int]:
    """Return the numbers of elements of the partial dK and dV, 0 if groups are not divided."""
    rows = problem.total_k if problem.varlen else problem.batch * problem.seqlen_k
    heads = problem.heads_kv * subgroups if subgroups > 1 else 0
    return [rows * heads * d for d in (problem.head_dim, problem.head_dim_v)]


def partials_in_layout(problem: AttentionProblem, memory: Sequence[torch.Tensor], subgroups: int) -> list[torch.Tensor]:
    """Return memory of `partial_sizes` elements as dK and dV with a head per subgroup, in the layout of the problem."""
    rows = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    shapes = [(*rows, problem.heads_kv * subgroups, d) for d in (problem.head_dim, problem.head_dim_v)]
    views = [x.view(shape) for x, shape in zip(memory, shapes, strict=True)]
    return [x.transpose(1, 2) for x in views] if problem.layout == "bhsd" else views


@dataclass(frozen=True, eq=False)
class PartialsConstants(Constants):
    """Constants of `_sum_partials_kernel`."""

    lengths: int  # EQUAL or PACKED
    head_dim: int
    head_dim_v: int
    overlap: bool  # launched before the kernel that it waits for ends (programmatic dependent launch)


@triton.jit
def _sum_tile(partials_ptr, out, row0, column0, rows, stride_row, heads, subgroups, HEAD_DIM: tl.constexpr):
    """Write a [SUM_ROWS, SUM_COLUMNS] tile of the sum of a KV head's `subgroups` heads of `partials_ptr`.

    `partials_ptr`: [rows, n_heads, HEAD_DIM] fp32. `rows`: (first row of the sequence, its number of rows). `heads`:
    (n_heads, KV head).
    """
    first_row, end = rows
    n_heads, hk = heads
    first = hk * subgroups
    offs = row0 + tl.arange(0, SUM_ROWS)
    columns = column0 + tl.arange(0, SUM_COLUMNS)
    is_element = (offs < end)[:, None] & (columns < HEAD_DIM)[None, :]
    offsets = ((first_row + offs.to(tl.int64)) * n_heads + first)[:, None] * HEAD_DIM + columns[None, :]
    total = tl.zeros([SUM_ROWS, SUM_COLUMNS], tl.float32)
    for subgroup in range(0, subgroups, SUBGROUPS_AT_ONCE):
        for i in tl.static_range(SUBGROUPS_AT_ONCE):
            exists = is_element & (subgroup + i + 0 * offs < subgroups)[:, None]
            total += tl.load(partials_ptr + offsets + (subgroup + i) * HEAD_DIM, mask=exists, other=0.0)
    addresses = out + offs.to(tl.int64)[:, None] * stride_row + columns[None, :]
    tl.store(addresses, round_to(total, out.dtype.element_ty), mask=is_element)


@triton.jit(
    do_not_specialize=("heads_kv", "seqlen_k", "total_k", "subgroups"),
    do_not_specialize_on_alignment=("cu_seqlens_k_ptr",),
)
def _sum_partials_kernel(
    dk_partials_ptr, dv_partials_ptr,  # (B, Sk, Hk * subgroups, D) or (Tk, Hk * subgroups, D) fp32
    cu_seqlens_k_ptr,
    dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    heads_kv, seqlen_k, total_k, subgroups,
    c: tl.constexpr,
):  # fmt: skip
    """Add up a tile of dK and a tile of dV of a KV head."""
    blocks = tl.cdiv(seqlen_k, SUM_ROWS)
    pid = tl.program_id(0)
    column0 = tl.program_id(1) * SUM_COLUMNS
    row0 = pid % blocks * SUM_ROWS
    hk = pid // blocks % heads_kv
    b = pid // blocks // heads_kv
    first_row = b.to(tl.int64) * seqlen_k
    end = seqlen_k
    dk = dk_ptr + hk.to(tl.int64) * stride_dkh
    dv = dv_ptr + hk.to(tl.int64) * stride_dvh
    if c.LENGTHS == PACKED:
        first_k, n_keys = packed_info(cu_seqlens_k_ptr, b, total_k)
        first_row = first_k.to(tl.int64)
        end = tl.minimum(n_keys, seqlen_k)  # a sequence may be longer than the call said: its other rows have no sums
        dk += first_row * stride_dkn
        dv += first_row * stride_dvn
    else:
        dk += b.to(tl.int64) * stride_dkb
        dv += b.to(tl.int64) * stride_dvb
    if c.OVERLAP:
        gdc_wait()
    if row0 < end:
        heads = (heads_kv * subgroups, hk)
        rows = (first_row, end)
        if column0 < c.HEAD_DIM:
            _sum_tile(dk_partials_ptr, dk, row0, column0, rows, stride_dkn, heads, subgroups, c.HEAD_DIM)
        if column0 < c.HEAD_DIM_V:
            _sum_tile(dv_partials_ptr, dv, row0, column0, rows, stride_dvn, heads, subgroups, c.HEAD_DIM_V)


def make_launch(
    problem: AttentionProblem, tensors: AttentionTensors, memory: Sequence[torch.Tensor], subgroups: int,
    dk: torch.Tensor, dv: torch.Tensor,
) -> Launch:  # fmt: skip
    """Return the launch that adds up dk and dv from the partial sums in `memory`."""
    d, dv_columns = problem.head_dim, problem.head_dim_v
    dk_partials, dv_partials = memory
    arguments = {
        **pointers(dk_partials=dk_partials, dv_partials=dv_partials, cu_seqlens_k=tensors.cu_seqlens_k, dk=dk, dv=dv),
        **strides(problem.layout, dk=dk, dv=dv),
        **fields_of(problem, "heads_kv", "seqlen_k", "total_k"),
        "subgroups": subgroups,
    }
    overlap = can_overlap(problem.arch)
    constants = PartialsConstants((PACKED if problem.varlen else EQUAL).value, d, dv_columns, overlap)
    rows = cdiv(problem.seqlen_k, SUM_ROWS.value) * problem.batch * problem.heads_kv
    options = {"num_warps": 4, **({"launch_pdl": True} if overlap else {})}
    grid = rows, cdiv(max(d, dv_columns), SUM_COLUMNS.value)
    return Launch(_sum_partials_kernel, grid, arguments, {"c": constants}, options)
