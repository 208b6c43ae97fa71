"""Which blocks the NPU kernels visit and which they mask: compared with the mask itself, as `test_block_ranges.py`."""

from __future__ import annotations

import npu_block_range_kernel
import pytest
import torch
from block_ranges import configurations, sees


def block_positions(cases: torch.Tensor, block: int, length: torch.Tensor) -> torch.Tensor:
    """[N, block]; -1 for what does not exist."""
    positions = cases[:, :1].long() + torch.arange(block)
    return torch.where(positions < length[:, None], positions, -1)


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "causal_left", "left", "right", "both", "none"])
@pytest.mark.parametrize("kind", ["key_range", "row_range"])
def test_npu_blocks(kind: str, mask: str, blocks: tuple[int, int]) -> None:
    (block_m, block_n), for_keys, causal = blocks, kind == "row_range", mask.startswith("causal")
    has_left, has_right = mask in ("left", "both", "causal_left"), mask in ("right", "both")
    cases = configurations(block_m, block_n, has_left, has_right, for_keys)
    if causal:
        cases[:, 4] = 0
    found = npu_block_range_kernel.run(cases, for_keys, block_m, block_n, causal, has_left, has_right or causal).long()
    _, sq, sk, left, right = (x.long() for x in cases.unbind(1))
    rows = block_positions(cases, block_n if for_keys else block_m, sk if for_keys else sq)
    offset, left, right = (x[:, None] for x in (sk - sq, left, right))
    lo, hi, needs_mask = found[:, :1], found[:, 1:2], found[:, 2:]
    others = sq if for_keys else sk
    assert bool((lo % (block_m if for_keys else block_n) == 0).all())
    for j in range(int(others.max())):
        at = torch.full_like(rows, j)
        pair = sees(at, rows, offset, left, right) if for_keys else sees(rows, at, offset, left, right)
        exists = (rows >= 0) & (j < others)[:, None]
        lost = (pair & exists).any(1, keepdim=True) & ~((lo <= j) & (j < hi))
        assert not bool(lost.any()), f"{int(lost.sum())} blocks leave out position {j}, which they see"
        if not for_keys and j < 8 * block_n:  # what is not masked is seen by all rows that exist
            unmasked = (needs_mask[:, j // block_n] == 0)[:, None] & (lo <= j) & (j < hi)
            wrong = unmasked & ((rows >= 0) & ~pair).any(1, keepdim=True)
            assert not bool(wrong.any()), f"{int(wrong.sum())} tiles take key {j} unmasked"
