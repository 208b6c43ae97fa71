"""Which blocks are visited, and which need no mask: compared with the mask itself, over all small sizes and windows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from block_ranges import check, configurations
from targets import TARGETS

from diyfa.backends.cpu.tiles import Visibility
from diyfa.ops import normalised_window
from diyfa.problem import AttentionProblem
from diyfa.reference import visible_keys


@pytest.mark.skipif("cuda" not in TARGETS, reason="no Triton")
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("mask", ["left", "right", "both", "none"])
@pytest.mark.parametrize("kind", ["key_ranges", "query_ranges", "query_ranges_edges", "cached_blocks"])
def test_cuda_blocks(kind: str, mask: str, blocks: tuple[int, int]) -> None:
    import block_range_kernels

    for_keys, has_left, has_right = kind.startswith("query"), mask in ("left", "both"), mask in ("right", "both")
    cases = configurations(*blocks, has_left, has_right, for_keys)
    found = block_range_kernels.run(cases, kind, blocks, has_left, has_right, TARGETS["cuda"].device)
    check(found, cases, for_keys, blocks, kind == "query_ranges")


@pytest.mark.skipif("cuda" not in TARGETS, reason="no Triton")
@pytest.mark.parametrize("mask", ["left", "right", "both", "none"])
@pytest.mark.parametrize(("kind", "lengths"), [
    ("key_ranges", "SEQ_LENS"), ("query_ranges", "SEQ_LENS"), ("query_ranges_whole_keys", "SEQ_LENS"),
    ("query_ranges_whole_keys", "PACKED"),
])  # fmt: skip
def test_cuda_blocks_beyond_a_sequence_visit_nothing(kind: str, lengths: str, mask: str) -> None:
    import block_range_kernels

    from diyfa.backends.cuda.attention import tile_io

    blocks, for_keys = (16, 32), kind.startswith("query")
    has_left, has_right = mask in ("left", "both"), mask in ("right", "both")
    cases = configurations(*blocks, has_left, has_right, for_keys, rows=128)
    if lengths == "SEQ_LENS":  # queries and keys have one length, up to that of the tensors
        cases = cases[cases[:, 1] <= cases[:, 2]]
    constant = getattr(tile_io, lengths).value
    found = block_range_kernels.run(cases, kind, blocks, has_left, has_right, TARGETS["cuda"].device, constant)
    beyond = cases[:, 0] >= cases[:, 2 if for_keys else 1]
    assert beyond.any() and not beyond.all()
    check(found[beyond], cases[beyond], for_keys, blocks, for_keys, most_unseen=0)
    check(found[~beyond], cases[~beyond], for_keys, blocks, for_keys)
    if kind == "query_ranges_whole_keys":  # keys beyond the end need a mask
        ends = cases[:, 0] + blocks[1] > cases[:, 2]
        assert torch.equal(found[ends, 1], found[ends, 2])


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
