"""The functions of `backends/cuda/attention/block_info.py`, on many configurations at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import cached_blocks, key_ranges, query_ranges
from diyfa.backends.cuda.attention.tile_io import EQUAL
from diyfa.backends.cuda.runtime.constants import Constants

KINDS = ("key_ranges", "query_ranges", "query_ranges_edges", "query_ranges_whole_keys", "cached_blocks")
MANY = 1024
GROUP, PAD = tl.constexpr(3), tl.constexpr(5)  # rows of a token, and padding before the keys, for `cached_blocks`


@dataclass(frozen=True)
class RangeConstants(Constants):
    """What the functions read."""

    block_m: int
    block_n: int
    has_left: bool
    has_right: bool
    lengths: int = EQUAL.value


@triton.jit
def _ranges_kernel(cases_ptr, out_ptr, count, KIND: tl.constexpr, MANY: tl.constexpr, c: tl.constexpr):
    at = tl.program_id(0) * MANY + tl.arange(0, MANY)
    exists = at < count
    start = tl.load(cases_ptr + at * 5, mask=exists, other=0)
    n_queries = tl.load(cases_ptr + at * 5 + 1, mask=exists, other=0)
    n_keys = tl.load(cases_ptr + at * 5 + 2, mask=exists, other=0)
    left = tl.load(cases_ptr + at * 5 + 3, mask=exists, other=0)
    right = tl.load(cases_ptr + at * 5 + 4, mask=exists, other=0)
    mask = (n_queries, n_keys, n_keys - n_queries, left, right)
    if KIND == 0:
        begin, full_begin, full_end, end = key_ranges(start, mask, c)
    elif KIND < 4:
        begin, full_begin, full_end, end = query_ranges(start, mask, KIND == 2, KIND == 3, c)
    else:
        tile = start * GROUP // c.BLOCK_M
        first, n_blocks = cached_blocks(tile, n_queries, n_keys + PAD, PAD, (GROUP, left, right), c)
        begin = first * c.BLOCK_N
        end = begin + n_blocks * c.BLOCK_N
        full_begin = end
        full_end = end
    tl.store(out_ptr + at * 4, begin + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 1, full_begin + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 2, full_end + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 3, end + at * 0, mask=exists)


def run(
    cases: torch.Tensor,
    kind: str,
    blocks: tuple[int, int],
    has_left: bool,
    has_right: bool,
    device: str,
    lengths: int = EQUAL.value,
) -> torch.Tensor:
    """(begin, full_begin, full_end, end) of each row (start, queries, keys, left, right), on the CPU."""
    out = torch.full((len(cases), 4), -1, dtype=torch.int32, device=device)
    block_m, block_n = blocks
    rows = block_m * GROUP.value if kind == "cached_blocks" else block_m
    constants = RangeConstants(rows, block_n, has_left, has_right, lengths)
    grid = (triton.cdiv(len(cases), MANY),)
    _ranges_kernel[grid](cases.to(device), out, len(cases), KINDS.index(kind), MANY, constants)
    return out.cpu()
