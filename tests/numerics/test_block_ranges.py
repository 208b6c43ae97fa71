"""Which blocks are visited, and which need no mask: compared with the mask itself, over all small sizes and windows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from block_ranges import configurations, sees
from targets import TARGETS

from diyfa.backends.cpu.tiles import Visibility
from diyfa.ops import normalised_window
from diyfa.problem import AttentionProblem
from diyfa.reference import visible_keys


def check_ranges(ranges, blocks, others, offset, left, right, other_block: int, transposed: bool, edges: bool) -> None:
    """`ranges` (begin, full_begin, full_end, end) of the rows (or, transposed, columns) `blocks` [N, block].

    `others` [N]: how many columns (rows) there are. Positions of `blocks` that do not exist are -1.
    """
    begin, full_begin, full_end, end = (x[:, None] for x in ranges)
    assert bool(((begin <= full_begin) & (full_begin <= full_end)).all())
    for name, x in (("begin", begin), ("full_begin", full_begin), ("full_end", full_end)):
        whole = x % other_block == 0
        if name == "full_end" and transposed and not edges:  # the last full block may overrun the queries
            whole = whole | (x == end)
        assert bool(whole.all()), name
    exists = blocks >= 0
    for j in range(int(others.max())):
        at = torch.full_like(blocks, j)
        pair = sees(at, blocks, offset, left, right) if transposed else sees(blocks, at, offset, left, right)
        pair = pair & exists & (j < others)[:, None]
        visited = (
            ((begin <= j) & (j < full_begin)) | ((full_begin <= j) & (j < full_end)) | ((full_end <= j) & (j < end))
        )
        lost = pair.any(1, keepdim=True) & ~visited
        assert not bool(lost.any()), f"{int(lost.sum())} blocks leave out position {j}, which they see"
        unmasked = (full_begin <= j) & (j < full_end) & (j < others)[:, None]
        wrong = unmasked & (exists & ~pair).any(1, keepdim=True)
        assert not bool(wrong.any()), f"{int(wrong.sum())} blocks take position {j} unmasked"
        assert not bool(((full_begin <= j) & (j < full_end) & (j >= others[:, None])).any()) or transposed


@pytest.mark.skipif("cuda" not in TARGETS, reason="no Triton")
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("mask", ["left", "right", "both", "none"])
@pytest.mark.parametrize("kind", ["key_blocks", "query_blocks", "query_blocks_edges"])
def test_cuda_blocks(kind: str, mask: str, blocks: tuple[int, int]) -> None:
    import block_range_kernels

    (block_m, block_n), of_keys, edges = blocks, kind != "key_blocks", kind.endswith("edges")
    has_left, has_right = mask in ("left", "both"), mask in ("right", "both")
    cases = configurations(block_m, block_n, has_left, has_right, of_keys)
    found = block_range_kernels.run(
        cases, of_keys, edges, block_m, block_n, has_left, has_right, TARGETS["cuda"].device
    )
    start, sq, sk, left, right = (x.long() for x in cases.unbind(1))
    length, others, block, other = (sk, sq, block_n, block_m) if of_keys else (sq, sk, block_m, block_n)
    positions = start[:, None] + torch.arange(block)
    positions = torch.where(positions < length[:, None], positions, -1)
    columns = (x[:, None] for x in (sk - sq, left, right))
    check_ranges(found.long().unbind(1), positions, others, *columns, other, of_keys, edges)
    if not of_keys:  # full blocks hold keys only
        assert bool((found[:, 2] <= torch.maximum(found[:, 1], cases[:, 2])).all())


@pytest.mark.parametrize("lens", [None, (7, 3), (1, 9)], ids=str)
@pytest.mark.parametrize("sizes", list(product((1, 4, 9), (1, 5, 9))), ids=str)
def test_cpu_blocks(sizes: tuple[int, int], lens: tuple[int, int] | None) -> None:
    sq, sk = sizes
    seq_lens = None if lens is None else torch.tensor(lens, dtype=torch.int32).clamp(max=sk)
    for left, right in product(range(-1, 12), range(-1, 12)):
        problem = AttentionProblem("cpu", "", "float32", "bhsd", 2, 1, 1, sq, sk, 8, 8, left, right)
        visibility = Visibility(problem, seq_lens)
        want = visible_keys(2, sq, sk, (left, right), seq_lens)[0]
        for block_m, block_n in ((1, 1), (2, 3), (4, 2), (16, 16)):
            seen = torch.zeros_like(want)
            for m0 in range(0, sq, block_m):
                m1 = min(sq, m0 + block_m)
                start, stop = visibility.key_range(m0, m1)
                for n0 in range(start, stop, block_n):
                    n1 = min(n0 + block_n, stop)
                    mask = visibility.mask(m0, m1, n0, n1)
                    seen[:, :, m0:m1, n0:n1] = True if mask is None else mask
            assert torch.equal(seen, want), (left, right, block_m, block_n)


def test_a_normalised_window_shows_the_same_keys() -> None:
    for sq, sk, left, right, causal in product(range(6), range(6), range(-1, 8), range(-1, 8), (False, True)):
        want = visible_keys(1, sq, sk, (left, 0 if causal else right))[0]
        got = visible_keys(1, sq, sk, normalised_window(left, 0 if causal else right, sq, sk))[0]
        assert torch.equal(got, want), (sq, sk, left, right, causal)


def test_bounds_that_exclude_nothing_are_dropped() -> None:
    """They would cost a mask, and a kernel of their own."""
    assert normalised_window(7, 5, 5, 7) == (-1, -1)
    assert normalised_window(6, 3, 5, 7) == (6, 3)
