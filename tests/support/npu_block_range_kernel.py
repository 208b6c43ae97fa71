"""The functions of `backends/npu/attention/primitives.py` that choose blocks, on many configurations at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import key_range, row_range, tile_needs_mask


@triton.jit
def _ranges_kernel(
    cases_ptr, out_ptr, count,
    OF_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * MANY + tl.arange(0, MANY)
    exists = at < count
    start = tl.load(cases_ptr + at * 5, mask=exists, other=0)
    sq = tl.load(cases_ptr + at * 5 + 1, mask=exists, other=0)
    sk = tl.load(cases_ptr + at * 5 + 2, mask=exists, other=0)
    left = tl.load(cases_ptr + at * 5 + 3, mask=exists, other=0)
    right = tl.load(cases_ptr + at * 5 + 4, mask=exists, other=0)
    if OF_KEYS:
        lo, hi = row_range(start, sq, sk, left, right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, False)
    else:
        lo, hi = key_range(start, sq, sk, left, right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, False)
    tl.store(out_ptr + at * 10, lo + at * 0, mask=exists)
    tl.store(out_ptr + at * 10 + 1, hi + at * 0, mask=exists)
    for tile in tl.static_range(8):  # of queries [start, start + BLOCK_M) with one block of keys after another
        needed = tile_needs_mask(
            start, tile * BLOCK_N, sq, sk, left, right, BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT
        )
        tl.store(out_ptr + at * 10 + 2 + tile, needed.to(tl.int32) + at * 0, mask=exists)


def run(
    cases: torch.Tensor, of_keys: bool, block_m: int, block_n: int, causal: bool, has_left: bool, has_right: bool
) -> torch.Tensor:
    """(lo, hi, whether each of eight tiles needs its mask) of each row (start, queries, keys, left, right)."""
    given = cases.to("npu")
    out = torch.full((len(cases), 10), -1, dtype=torch.int32).to("npu")
    many = 1024
    grid = (triton.cdiv(len(cases), many),)
    _ranges_kernel[grid](given, out, len(cases), of_keys, block_m, block_n, causal, has_left, has_right, many)
    return out.cpu()
