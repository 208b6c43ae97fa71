"""Clears rows of packed tensors that no sequence covers: outputs, gradients and delta are 0, log-sum-exps +inf.

Such rows are before the first sequence, after the last one, and at the end of a sequence that is longer than the call
said. Mostly there are none, but only the device knows. Looking for them is cheaper than writing all rows twice. Forward
kernels of one launch look for them themselves (`clear_others`). The others have a kernel that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.seq_info import load_clamped, packed_info
from diyfa.backends.cuda.attention.tile_io import padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, KVCacheProblem, KVCacheTensors, Launch

CLEARED_ELEMENTS = tl.constexpr(2048)  # elements that a program clears at once
OFFSETS_AT_ONCE = tl.constexpr(128)  # elements of cu_seqlens
PROGRAMS = 4096  # programs of a launch, about, divided among the gaps between sequences
MAX_PROGRAMS, MIN_PROGRAMS = 64, 4  # programs of a gap
CLEARING_PROGRAMS = 64  # programs of a forward kernel that clear instead of attending


@dataclass(frozen=True, eq=False)
class ClearConstants(Constants):
    """Constants of the kernel."""

    head_dim: int
    head_dim_v: int
    block_d: int
    block_dv: int


@triton.jit
def _clear_range(begin, stop, program, n_programs, x, statistics, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Set rows [begin, stop) of all heads of x to 0, and of the statistics to `value`. Programs divide the rows.

    x: (pointer, stride of rows, of heads). statistics (H, T): (pointer or None, T, value).
    """
    x_ptr, stride_m, stride_h = x
    statistics_ptr, total, value = statistics
    ROWS: tl.constexpr = CLEARED_ELEMENTS // BLOCK_D
    cols = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([ROWS, BLOCK_D], x_ptr.dtype.element_ty)
    for i in range(program, tl.cdiv(stop - begin, ROWS) * heads, n_programs):
        h = (i % heads).to(tl.int64)
        offs_m = begin + i // heads * ROWS + tl.arange(0, ROWS)
        exists = offs_m < stop
        rows = offs_m.to(tl.int64)
        addresses = x_ptr + h * stride_h + rows[:, None] * stride_m + cols[None, :]
        tl.store(addresses, zeros, mask=exists[:, None] & (cols < HEAD_DIM)[None, :])
        if statistics_ptr is not None:
            tl.store(statistics_ptr + h * total + rows, value, mask=exists)


@triton.jit
def clear_others(cu_seqlens_ptr, batch, longest, program, n_programs, out, lse_ptr, heads, total, c: tl.constexpr):
    """Clear rows of out and lse that no sequence covers. Other programs write up to `longest` rows of each sequence.

    `n_programs` separate programs call it: in the others it would take registers from the loops over keys.
    """
    statistics = (lse_ptr, total, float("inf"))
    for b in range(program, batch, n_programs):
        first, rows = packed_info(cu_seqlens_ptr, b, total)
        begin = first + tl.minimum(rows, longest)
        _clear_range(begin, first + rows, 0, 1, out, statistics, heads, c.HEAD_DIM_V, c.BLOCK_DV)
    first = load_clamped(cu_seqlens_ptr, total)
    last = load_clamped(cu_seqlens_ptr + batch, total)
    if last < total:
        # Other programs write at the same time, so no row of a sequence may be cleared. Unused offsets may be 0: the
        # sequences end at the largest one.
        for start in range(0, batch, OFFSETS_AT_ONCE):
            i = start + tl.arange(0, OFFSETS_AT_ONCE)
            last = tl.maximum(last, tl.max(tl.load(cu_seqlens_ptr + i, mask=i < batch, other=0), 0))
    _clear_range(0, first, program, n_programs, out, statistics, heads, c.HEAD_DIM_V, c.BLOCK_DV)
    _clear_range(last, total, program, n_programs, out, statistics, heads, c.HEAD_DIM_V, c.BLOCK_DV)


@triton.jit(
    do_not_specialize=("batch", "heads", "total", "longest", "n_programs"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def _clear_kernel(
    cu_seqlens_ptr, x_ptr, y_ptr, statistics_ptr,
    stride_xm, stride_xh, stride_ym, stride_yh,
    batch, heads, total,
    longest,  # most rows of a sequence that other kernels write
    n_programs,  # programs of a gap; no constant, because it depends on the batch
    value,  # value for the statistics
    c: tl.constexpr,
):  # fmt: skip
    """Clear a gap between sequences. Gap b is before sequence b, the last gap behind the last sequence."""
    gap = tl.program_id(0) // n_programs
    start = load_clamped(cu_seqlens_ptr + tl.maximum(gap - 1, 0), total)
    end = load_clamped(cu_seqlens_ptr + gap, total)
    written = tl.minimum(tl.maximum(end - start, 0), longest)
    begin = tl.where(gap == 0, 0, start + written)
    stop = tl.where(gap == batch, total, end)
    program = tl.program_id(0) % n_programs
    x, y = (x_ptr, stride_xm, stride_xh), (y_ptr, stride_ym, stride_yh)
    statistics = (statistics_ptr, total, value)
    _clear_range(begin, stop, program, n_programs, x, statistics, heads, c.HEAD_DIM, c.BLOCK_D)
    if y_ptr is not None:
        _clear_range(begin, stop, program, n_programs, y, (None, total, value), heads, c.HEAD_DIM_V, c.BLOCK_DV)


def make_launch(
    cu_seqlens: torch.Tensor, longest: int, x: torch.Tensor, y: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None, value: float = 0.0,
) -> Launch:  # fmt: skip
    """Return the launch that clears x and y (T, H, ·), with last stride 1, and sets contiguous statistics (H, T)."""
    batch = cu_seqlens.shape[0] - 1
    total, heads, head_dim = x.shape
    head_dim_v = head_dim if y is None else y.shape[2]
    n_programs = 1 if is_interpreting() else max(MIN_PROGRAMS, min(MAX_PROGRAMS, PROGRAMS // (batch + 1)))
    values = ClearConstants(head_dim, head_dim_v, padded_head_dim(head_dim), padded_head_dim(head_dim_v))
    arguments = {
        "cu_seqlens_ptr": cu_seqlens, "x_ptr": x, "y_ptr": y, "statistics_ptr": statistics,
        "stride_xm": x.stride(0), "stride_xh": x.stride(1),
        "stride_ym": 0 if y is None else y.stride(0), "stride_yh": 0 if y is None else y.stride(1),
        "batch": batch, "heads": heads, "total": total, "longest": longest, "n_programs": n_programs, "value": value,
    }  # fmt: skip
    return Launch(_clear_kernel, (batch + 1) * n_programs, arguments, {"c": values}, {"num_warps": 4})


def clearing_programs(problem: AttentionProblem) -> int:
    """Return the number of programs of a forward kernel that run `clear_others`."""
    if not problem.varlen:
        return 0
    return 1 if is_interpreting() else CLEARING_PROGRAMS


def forward_launches(
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor
) -> list[Launch]:
    """Return the launches that clear rows of out and lse, none if sequences are not packed."""
    if tensors.cu_seqlens_q is None:
        return []
    return [make_launch(tensors.cu_seqlens_q, problem.seqlen_q, out, None, lse, float("inf"))]


def backward_launches(
    problem: AttentionProblem, tensors: AttentionTensors, gradients: AttentionGradients, delta: torch.Tensor | None
) -> list[Launch]:
    """Return the launches that clear rows of dq, dk and dv, and of delta if given; none if sequences are not packed."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return []
    return [
        make_launch(tensors.cu_seqlens_q, problem.seqlen_q, gradients.dq, statistics=delta),
        make_launch(tensors.cu_seqlens_k, problem.seqlen_k, gradients.dk, gradients.dv),
    ]
