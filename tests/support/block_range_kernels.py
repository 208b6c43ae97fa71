"""The functions of `backends/cuda/attention/scores.py` that choose blocks, on many configurations at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.scores import key_blocks, query_blocks
from diyfa.backends.cuda.attention.tile_io import EQUAL
from diyfa.backends.cuda.runtime.constants import Constants


@dataclass(frozen=True)
class RangeConstants(Constants):
    """What the functions read."""

    block_m: int
    block_n: int
    has_left: bool
    has_right: bool
    lengths: int = EQUAL.value


@triton.jit
def _ranges_kernel(
    cases_ptr, out_ptr, count,
    OF_KEYS: tl.constexpr, EDGES: tl.constexpr, MANY: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * MANY + tl.arange(0, MANY)
    exists = at < count
    start = tl.load(cases_ptr + at * 5, mask=exists, other=0)
    n_queries = tl.load(cases_ptr + at * 5 + 1, mask=exists, other=0)
    n_keys = tl.load(cases_ptr + at * 5 + 2, mask=exists, other=0)
    left = tl.load(cases_ptr + at * 5 + 3, mask=exists, other=0)
    right = tl.load(cases_ptr + at * 5 + 4, mask=exists, other=0)
    mask = (n_queries, n_keys, n_keys - n_queries, left, right)
    if OF_KEYS:
        begin, full_begin, full_end, end = query_blocks(start, mask, EDGES, c)
    else:
        begin, full_begin, full_end, end = key_blocks(start, mask, c)
    tl.store(out_ptr + at * 4, begin + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 1, full_begin + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 2, full_end + at * 0, mask=exists)
    tl.store(out_ptr + at * 4 + 3, end + at * 0, mask=exists)


def run(
    cases: torch.Tensor, of_keys: bool, edges: bool, block_m: int, block_n: int, has_left: bool, has_right: bool,
    device: str,
) -> torch.Tensor:  # fmt: skip
    """(begin, full_begin, full_end, end) of each row (start, queries, keys, left, right), on the CPU."""
    cases = cases.to(device)
    out = torch.full((len(cases), 4), -1, dtype=torch.int32, device=device)
    many = 1024
    constants = RangeConstants(block_m, block_n, has_left, has_right)
    _ranges_kernel[(triton.cdiv(len(cases), many),)](cases, out, len(cases), of_keys, edges, many, constants)
    return out.cpu()
