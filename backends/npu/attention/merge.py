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

from diyfa.backends.npu.attention.primitives import block_at, load_row, load_tile, store_row, store_tile
from diyfa.backends.npu.runtime.compat import Constants, kernel, padded_head_dim
from diyfa.backends.npu.runtime.launch import addressed, described, device_guard, run, vector_programs
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
    part_ptr, part_lse_ptr,
    out_ptr, lse_ptr,
    stride_partb, stride_parth, stride_partm, stride_part_lseb, stride_part_lseh,
    stride_ob, stride_oh, stride_om, stride_lseb, stride_lseh,
    batch, heads, rows,
    c: tl.constexpr,
):  # fmt: skip
    """Merge `part` and `part_lse` into `out` and `lse`. A task is BLOCK_M rows of one head."""
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    row_blocks = tl.cdiv(rows, c.BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * batch * heads, tl.num_programs(0)):
        b = (task // row_blocks // heads).to(tl.int64)
        h = (task // row_blocks % heads).to(tl.int64)
        row0 = task % row_blocks * c.BLOCK_M
        lse_base = lse_ptr + b * stride_lseb + h * stride_lseh
        lse = load_row(lse_base, row0, rows, c.BLOCK_M)
        part_lse = load_row(part_lse_ptr + b * stride_part_lseb + h * stride_part_lseh, row0, rows, c.BLOCK_M)
        seen = tl.where(lse == INF, -INF, lse)
        part_seen = tl.where(part_lse == INF, -INF, part_lse)
        most = tl.maximum(seen, part_seen)
        most = tl.where(most == -INF, 0.0, most)  # no key at all: both weights are 0, and so are both outputs
        weight = tl.exp(seen - most)
        part_weight = tl.exp(part_seen - most)
        both = weight + part_weight
        store_row(lse_base, tl.where(both == 0.0, INF, most + tl.log(both)), row0, rows, c.BLOCK_M)

        out_base = out_ptr + b * stride_ob + h * stride_oh
        part_base = part_ptr + b * stride_partb + h * stride_parth
        out_block = block_at(out_base, rows, stride_om, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
        part_block = block_at(part_base, rows, stride_partm, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
        out = load_tile(out_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
        part = load_tile(part_block, PAD_DV)
        total = tl.where(both == 0.0, 1.0, both)
        out = out * (weight / total)[:, None] + part * (part_weight / total)[:, None]
        store_tile(out_block, out, PAD_DV)


def launch_of(arch: str, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> Launch:
    """Return the launch. Outputs are (B, H, S, Dv), LSEs (B, H, S); the last dimension of each is contiguous."""
    batch, heads, rows, head_dim_v = out.shape
    block_dv = padded_head_dim(head_dim_v)
    block = max(1, MERGED_ELEMENTS // triton.next_power_of_2(block_dv))
    values = {
        **addressed("bhsd", out=out, part=part),
        "lse_ptr": lse, "stride_lseb": lse.stride(0), "stride_lseh": lse.stride(1),
        "part_lse_ptr": part_lse, "stride_part_lseb": part_lse.stride(0), "stride_part_lseh": part_lse.stride(1),
        "batch": batch, "heads": heads, "rows": rows, "HEAD_DIM_V": head_dim_v, "BLOCK_M": block, "BLOCK_DV": block_dv,
    }  # fmt: skip
    programs = vector_programs(arch, out.device, triton.cdiv(rows, block) * batch * heads)
    return described(_merge_kernel, MergeConstants, programs, values)


def merge(arch: str, out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge `part` and `part_lse` into `out` (B, H, S, Dv) and `lse` (B, H, S), both float32."""
    with device_guard(out):
        run(launch_of(arch, out, lse, part, part_lse))
