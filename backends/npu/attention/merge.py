"""Merge attention over one set of keys into attention over another by their log-sum-exps, in place, in one pass.

With w = 1 / (1 + exp(lse_a - lse_b)) the merged output is (1 - w) a + w b, and the merged log-sum-exp is
logaddexp(lse_a, lse_b), as FlashAttention-2 merges blocks (arXiv:2307.08691). A row that saw no key has lse +inf and
output 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.vector_io import load_block, load_values, store_block, store_values
from diyfa.backends.npu.runtime.compat import Constants, kernel, padded_head_dim
from diyfa.backends.npu.runtime.launch import bind_launch, device_guard, run, tensor_arguments, vector_programs
from diyfa.backends.npu.tables.configs import family_options
from diyfa.problem import Launch

MERGED_ELEMENTS = 4096  # output elements that a program merges at once
INF = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class MergeConstants(Constants):
    """Constants of `_merge_kernel`."""

    head_dim_v: int
    block_m: int
    block_dv: int


@kernel
def _merge_kernel(
    partial_ptr, partial_lse_ptr,
    out_ptr, lse_ptr,
    stride_partialb, stride_partialh, stride_partialm, stride_partial_lseb, stride_partial_lseh,
    stride_ob, stride_oh, stride_om, stride_lseb, stride_lseh,
    batch, heads, rows,
    c: tl.constexpr,
):  # fmt: skip
    """Merge `partial` and `partial_lse` into `out` and `lse`. A task is BLOCK_M rows of one head."""
    row_blocks = tl.cdiv(rows, c.BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * batch * heads, tl.num_programs(0)):
        b = (task // row_blocks // heads).to(tl.int64)
        h = (task // row_blocks % heads).to(tl.int64)
        row0 = task % row_blocks * c.BLOCK_M
        lse_base = lse_ptr + b * stride_lseb + h * stride_lseh
        lse = load_values(lse_base, row0, rows, c.BLOCK_M)
        partial_lse = load_values(
            partial_lse_ptr + b * stride_partial_lseb + h * stride_partial_lseh, row0, rows, c.BLOCK_M
        )
        valid_lse = tl.where(lse == INF, -INF, lse)
        valid_partial_lse = tl.where(partial_lse == INF, -INF, partial_lse)
        max_lse = tl.maximum(valid_lse, valid_partial_lse)
        max_lse = tl.where(max_lse == -INF, 0.0, max_lse)  # no key at all: both weights are 0, and so are both outputs
        weight = tl.exp(valid_lse - max_lse)
        partial_weight = tl.exp(valid_partial_lse - max_lse)
        weight_sum = weight + partial_weight
        store_values(lse_base, tl.where(weight_sum == 0.0, INF, max_lse + tl.log(weight_sum)), row0, rows, c.BLOCK_M)

        out_base = out_ptr + b * stride_ob + h * stride_oh
        partial_base = partial_ptr + b * stride_partialb + h * stride_partialh
        out = load_block(out_base, rows, stride_om, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
        partial = load_block(partial_base, rows, stride_partialm, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
        safe_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        out = out * (weight / safe_sum)[:, None] + partial * (partial_weight / safe_sum)[:, None]
        store_block(out_base, out, rows, stride_om, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)


def make_launch(
    arch: str, out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor
) -> Launch:
    """Return the launch. Outputs are (B, H, S, Dv), LSEs (B, H, S); the last dimension of each is contiguous."""
    batch, heads, rows, head_dim_v = out.shape
    block_dv = padded_head_dim(head_dim_v)
    block = max(1, MERGED_ELEMENTS // triton.next_power_of_2(block_dv))
    values = {
        **tensor_arguments("bhsd", out=out, partial=partial),
        "lse_ptr": lse, "stride_lseb": lse.stride(0), "stride_lseh": lse.stride(1),
        "partial_lse_ptr": partial_lse,
        "stride_partial_lseb": partial_lse.stride(0), "stride_partial_lseh": partial_lse.stride(1),
        "batch": batch, "heads": heads, "rows": rows, "HEAD_DIM_V": head_dim_v, "BLOCK_M": block, "BLOCK_DV": block_dv,
    }  # fmt: skip
    programs = vector_programs(arch, out.device, triton.cdiv(rows, block) * batch * heads)
    return bind_launch(_merge_kernel, MergeConstants, programs, values, family_options(arch))


def merge(arch: str, out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Merge `partial` and `partial_lse` into `out` (B, H, S, Dv) and `lse` (B, H, S), both float32."""
    with device_guard(out):
        run(make_launch(arch, out, lse, partial, partial_lse))
