"""The functions of `backends/npu/attention/primitives.py` that choose blocks, on many configurations at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import key_range, row_range, tile_needs_mask
from diyfa.backends.npu.runtime.compat import Constants


@dataclass(frozen=True)
class RangeConstants(Constants):
    """What the functions read."""

    block_m: int
    block_n: int
    causal: bool
    has_left: bool
    has_right: bool
    seq_lens: bool = False


@triton.jit
def _ranges_kernel(
    cases_ptr, out_ptr, count,
    FOR_KEYS: tl.constexpr, BLOCK: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    start = tl.load(cases_ptr + at * 5, mask=exists, other=0)
    sq = tl.load(cases_ptr + at * 5 + 1, mask=exists, other=0)
    sk = tl.load(cases_ptr + at * 5 + 2, mask=exists, other=0)
    left = tl.load(cases_ptr + at * 5 + 3, mask=exists, other=0)
    right = tl.load(cases_ptr + at * 5 + 4, mask=exists, other=0)
    if FOR_KEYS:
        lo, hi = row_range(start, sq, sk, left, right, c)
    else:
        lo, hi = key_range(start, sq, sk, left, right, c)
    tl.store(out_ptr + at * 10, lo + at * 0, mask=exists)
    tl.store(out_ptr + at * 10 + 1, hi + at * 0, mask=exists)
    for tile in tl.static_range(8):  # of queries [start, start + BLOCK_M) with one block of keys after another
        needed = tile_needs_mask(start, tile * c.BLOCK_N, sq, sk, left, right, c)
        tl.store(out_ptr + at * 10 + 2 + tile, needed.to(tl.int32) + at * 0, mask=exists)


def run(
    cases: torch.Tensor, for_keys: bool, block_m: int, block_n: int, causal: bool, has_left: bool, has_right: bool
) -> torch.Tensor:
    """(lo, hi, whether each of eight tiles needs its mask) of each row (start, queries, keys, left, right)."""
    given = cases.to("npu")
    out = torch.full((len(cases), 10), -1, dtype=torch.int32).to("npu")
    block = 1024
    grid = (triton.cdiv(len(cases), block),)
    constants = RangeConstants(block_m, block_n, causal, has_left, has_right)
    _ranges_kernel[grid](given, out, len(cases), for_keys, block, constants)
    return out.cpu()
