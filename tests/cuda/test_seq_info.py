"""Lengths and offsets on the device are clamped to the memory that exists: the host may not see them before a launch,
as in a replayed graph."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

pytest.importorskip("triton")

import seq_info_kernels
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend does not run here", allow_module_level=True)

LEAST, MOST = -(2**31), 2**31 - 1
WRONG = [LEAST, -3, 0, 1, 5, 8, 9, 100, MOST]


def tensor(values):
    return torch.tensor(values, dtype=torch.int32, device=TARGETS["cuda"].device)


def clamp(x, low, high):
    return min(max(x, low), high)


@pytest.mark.parametrize("used", [None, *WRONG])
def test_packed_sequences_lie_inside_the_tensor(used: int | None) -> None:
    total = 8
    cu_seqlens = [x for pair in product(WRONG, WRONG) for x in pair]
    seqused = None if used is None else tensor([used] * (len(cu_seqlens) - 1))
    found = seq_info_kernels.packed(tensor(cu_seqlens), seqused, total)
    for (begin, end), row in zip(pairwise(cu_seqlens), found, strict=True):
        first = clamp(begin, 0, total)
        rows = clamp(end, first, total) - first
        keys = rows if used is None else clamp(used, 0, rows)
        assert row == [first, rows, first, keys], (begin, end)


@pytest.mark.parametrize("added", [0, 2])
def test_sequences_lie_inside_the_cache(added: int) -> None:
    capacity, entries, batch = 8, 5, len(WRONG)
    values = tensor(WRONG)
    for row, x in zip(
        seq_info_kernels.cached(batch, (None, values, values, values), 3, added, capacity, entries), WRONG, strict=True
    ):
        exists = 0 <= x < entries
        keys = clamp(min(x, capacity) + added, 0, capacity)
        assert row == [x if exists else 0, keys if exists else 0, clamp(x, 0, capacity)], x
    # seqused goes before cu_seqlens_k, and that before one length for all
    offsets = tensor([0, 3, 3, 20, 18])
    found = seq_info_kernels.cached(4, (offsets, None, None, None), 5, added, capacity, entries)
    assert found == [[b, clamp(n + added, 0, capacity), 0] for b, n in enumerate((3, 0, 17, -2))]
    found = seq_info_kernels.cached(4, (offsets, tensor([1, 2, 3, 4]), None, None), 5, added, capacity, entries)
    assert found == [[b, b + 1 + added, 0] for b in range(4)]
    found = seq_info_kernels.cached(2, (None, None, None, tensor([0, 1])), 5, added, capacity, entries)
    assert found == [[0, 5 + added, 0], [1, 5 + added, 1]]
