"""Rows of packed tensors that no sequence covers: outputs and gradients are 0 there, log-sum-exps +inf, delta 0.

They lie before the first sequence and after the last one, and where a sequence is longer than the longest is said to
be. Mostly there are none, and only the device knows: to look is cheaper than to write everything twice. Forward kernels
of one launch look themselves (`clear_others`), for all others a kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.tile_io import padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, KVCacheProblem, KVCacheTensors, Launch

CLEARED_ELEMENTS = tl.constexpr(2048)  # that a program clears at once
OFFSETS_AT_ONCE = tl.constexpr(128)
PROGRAMS = 4096  # of a launch, about: for each gap between sequences as many as that leaves, but not too few
MOST_PROGRAMS, FEWEST_PROGRAMS = 64, 4  # of a gap
CLEARING_PROGRAMS = 64  # of a forward kernel, beside those that attend


@dataclass(frozen=True, eq=False)
class ClearConstants(Constants):
    """Constants of the kernel."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int


@triton.jit
def _clear_range(
    begin, stop, share, shares,
    x,  # (pointer, stride of rows, of heads)
    statistics_ptr, heads, total, value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows [begin, stop) of all heads become 0, of the statistics `value`: one of `shares` equal parts of them."""
    x_ptr, stride_m, stride_h = x
    ROWS: tl.constexpr = CLEARED_ELEMENTS // BLOCK_D
    cols = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([ROWS, BLOCK_D], x_ptr.dtype.element_ty)
    for i in range(share, tl.cdiv(stop - begin, ROWS) * heads, shares):
        h = (i % heads).to(tl.int64)
        offs_m = begin + i // heads * ROWS + tl.arange(0, ROWS)
        exists = offs_m < stop
        rows = offs_m.to(tl.int64)
        addresses = x_ptr + h * stride_h + rows[:, None] * stride_m + cols[None, :]
        tl.store(addresses, zeros, mask=exists[:, None] & (cols < HEAD_DIM)[None, :])
        if statistics_ptr is not None:
            tl.store(statistics_ptr + h * total + rows, value, mask=exists)


@triton.jit
def clear_others(cu_seqlens_ptr, batch, longest, share, shares, out, lse_ptr, heads, total, c: tl.constexpr):
    """Clear rows of out and lse that no sequence covers, beside programs that write up to `longest` rows of each.

    Programs of their own do it, `shares` of them: in all others it would take registers from the loops over keys.
    """
    for b in range(share, batch, shares):
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), 0), total)
        begin += tl.minimum(tl.maximum(end - begin, 0), longest)
        _clear_range(begin, end, 0, 1, out, lse_ptr, heads, total, float("inf"), c.HEAD_DIM_V, c.BLOCK_DV)
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr), 0), total)
    last = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + batch), 0), total)
    if last < total:
        # Nothing orders this and what others write. Unused offsets may be 0: sequences end at the largest one.
        for start in range(0, batch, OFFSETS_AT_ONCE):
            i = start + tl.arange(0, OFFSETS_AT_ONCE)
            last = tl.maximum(last, tl.max(tl.load(cu_seqlens_ptr + i, mask=i < batch, other=0), 0))
    _clear_range(0, first, share, shares, out, lse_ptr, heads, total, float("inf"), c.HEAD_DIM_V, c.BLOCK_DV)
    _clear_range(last, total, share, shares, out, lse_ptr, heads, total, float("inf"), c.HEAD_DIM_V, c.BLOCK_DV)


@triton.jit(
    do_not_specialize=("batch", "heads", "total", "longest", "shares"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def _clear_kernel(
    cu_seqlens_ptr, x_ptr, y_ptr, statistics_ptr,
    stride_xm, stride_xh, stride_ym, stride_yh,
    batch, heads, total,
    longest,  # rows of a sequence that other kernels write
    shares,  # programs of a gap, which depend on the batch: no constant
    value,  # that the statistics become
    c: tl.constexpr,
):  # fmt: skip
    """Clears the gap between two sequences: gap b lies before sequence b, the last one behind the last sequence."""
    gap = tl.program_id(0) // shares
    start = tl.load(cu_seqlens_ptr + tl.maximum(gap - 1, 0))
    end = tl.load(cu_seqlens_ptr + gap)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, 0), total)
    written = tl.minimum(tl.maximum(end - start, 0), longest)
    begin = tl.where(gap == 0, 0, start + written)
    stop = tl.where(gap == batch, total, end)
    share = tl.program_id(0) % shares
    x, y = (x_ptr, stride_xm, stride_xh), (y_ptr, stride_ym, stride_yh)
    _clear_range(begin, stop, share, shares, x, statistics_ptr, heads, total, value, c.HEAD_DIM, c.BLOCK_D)
    if y_ptr is not None:
        _clear_range(begin, stop, share, shares, y, None, heads, total, value, c.HEAD_DIM_V, c.BLOCK_DV)


def launch_of(
    cu_seqlens: torch.Tensor,
    longest: int,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
    value: float = 0.0,
) -> Launch:
    """Of x and y (T, H, ·), whose last stride is 1, and statistics (H, T), contiguous, which become `value`."""
    batch = cu_seqlens.shape[0] - 1
    total, heads, head_dim = x.shape
    head_dim_v = head_dim if y is None else y.shape[2]
    shares = 1 if is_interpreting() else max(FEWEST_PROGRAMS, min(MOST_PROGRAMS, PROGRAMS // (batch + 1)))
    values = ClearConstants(head_dim, head_dim_v, padded_head_dim(head_dim), padded_head_dim(head_dim_v))
    arguments = {
        "cu_seqlens_ptr": cu_seqlens, "x_ptr": x, "y_ptr": y, "statistics_ptr": statistics,
        "stride_xm": x.stride(0), "stride_xh": x.stride(1),
        "stride_ym": 0 if y is None else y.stride(0), "stride_yh": 0 if y is None else y.stride(1),
        "batch": batch, "heads": heads, "total": total, "longest": longest, "shares": shares, "value": value,
    }  # fmt: skip
    return Launch(_clear_kernel, (batch + 1) * shares, arguments, {"c": values}, {"num_warps": 4})


def clearing_programs(problem: AttentionProblem) -> int:
    """How many programs of a forward kernel run `clear_others`."""
    if not problem.varlen:
        return 0
    return 1 if is_interpreting() else CLEARING_PROGRAMS


def forward_launches(
    problem: AttentionProblem | KVCacheProblem,
    tensors: AttentionTensors | KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[Launch]:
    """What clears rows of out and lse; nothing where sequences are not packed."""
    if tensors.cu_seqlens_q is None:
        return []
    return [launch_of(tensors.cu_seqlens_q, problem.seqlen_q, out, None, lse, float("inf"))]


def backward_launches(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    gradients: AttentionGradients,
    delta: torch.Tensor | None,
) -> list[Launch]:
    """What clears rows of dq, dk and dv, and of delta, where there is one."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return []
    return [
        launch_of(tensors.cu_seqlens_q, problem.seqlen_q, gradients.dq, statistics=delta),
        launch_of(tensors.cu_seqlens_k, problem.seqlen_k, gradients.dk, gradients.dv),
    ]
