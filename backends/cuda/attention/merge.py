"""Merges attention over some keys with attention over others by their log-sum-exps, in place, in one pass.

With w = 1 / (1 + exp(lse_a - lse_b)) the merged output is (1 - w) a + w b, and its log-sum-exp is logaddexp(lse_a,
lse_b), as FlashAttention-2 merges its blocks (arXiv:2307.08691). An lse of +inf means that the row saw no key. Its
output is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import on_device
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.problem import Launch

MERGED_ELEMENTS = 4096  # elements of a program's tile
INF = tl.constexpr(float("inf"))


@dataclass(frozen=True, eq=False)
class MergeConstants(Constants):
    """Constants of the kernel."""

    head_dim_v: int
    block_m: int
    block_dv: int


@triton.jit(do_not_specialize=("heads", "rows"))
def _merge_kernel(
    partial_ptr, partial_lse_ptr,
    o_ptr, lse_ptr,
    stride_pb, stride_ph, stride_pm, stride_plb, stride_plh,
    stride_ob, stride_oh, stride_om, stride_lb, stride_lh,
    heads, rows,
    c: tl.constexpr,
):  # fmt: skip
    """Merge `partial` into `o` and `lse` in BLOCK_M rows of a head."""
    blocks = tl.cdiv(rows, c.BLOCK_M)
    pid = tl.program_id(0)
    b = (pid // blocks // heads).to(tl.int64)
    h = (pid // blocks % heads).to(tl.int64)
    offs_m = pid % blocks * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    offs_d = tl.arange(0, c.BLOCK_DV)
    exists = offs_m < rows
    inside = exists[:, None] & (offs_d < c.HEAD_DIM_V)[None, :]

    lse_at = lse_ptr + b * stride_lb + h * stride_lh + offs_m
    lse = tl.load(lse_at, mask=exists, other=0.0)
    partial_lse = tl.load(partial_lse_ptr + b * stride_plb + h * stride_plh + offs_m, mask=exists, other=0.0)
    valid_lse = tl.where(lse == INF, -INF, lse)
    valid_partial_lse = tl.where(partial_lse == INF, -INF, partial_lse)
    max_lse = tl.maximum(valid_lse, valid_partial_lse)
    # A row that saw no key in either has weights and outputs of 0.
    max_lse = tl.where(max_lse == -INF, 0.0, max_lse)
    weight, partial_weight = tl.exp(valid_lse - max_lse), tl.exp(valid_partial_lse - max_lse)
    weight_sum = weight + partial_weight
    merged_lse = tl.where(weight_sum == 0.0, INF, max_lse + tl.log(weight_sum))

    rows_m = offs_m.to(tl.int64)[:, None]
    o_at = o_ptr + b * stride_ob + h * stride_oh + rows_m * stride_om + offs_d[None, :]
    partial_at = partial_ptr + b * stride_pb + h * stride_ph + rows_m * stride_pm + offs_d[None, :]
    o = tl.load(o_at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_DV]
    partial = tl.load(partial_at, mask=inside, other=0.0)
    safe_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    tl.store(o_at, o * (weight / safe_sum)[:, None] + partial * (partial_weight / safe_sum)[:, None], mask=inside)
    tl.debug_barrier()  # every warp has read the log-sum-exps of all rows
    tl.store(lse_at, merged_lse, mask=exists)


def make_launch(out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor) -> Launch:
    """Return the launch for outputs (B, H, S, Dv) and LSEs (B, H, S), whose last dimensions are contiguous."""
    batch, heads, rows, head_dim_v = out.shape
    block_dv = padded_head_dim(head_dim_v)
    values = MergeConstants(head_dim_v, max(1, MERGED_ELEMENTS // block_dv), block_dv)
    strides = {
        f"stride_{name}{dim}": stride
        for name, x in {"p": partial, "pl": partial_lse, "o": out, "l": lse}.items()
        for dim, stride in zip("bhm", x.stride()[:-1], strict=False)
    }
    pointers = {"partial_ptr": partial, "partial_lse_ptr": partial_lse, "o_ptr": out, "lse_ptr": lse}
    arguments = {**pointers, **strides, "heads": heads, "rows": rows}
    return Launch(_merge_kernel, batch * heads * cdiv(rows, values.block_m), arguments, {"c": values}, {"num_warps": 4})


def merge(out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Merge `partial` into `out` (B, H, S, Dv) and `lse` (B, H, S), both float32, in place."""
    with on_device(out):
        launch_kernel(make_launch(out, lse, partial, partial_lse))
