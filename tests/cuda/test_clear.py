"""Rows of packed tensors that no sequence covers are 0, log-sum-exps +inf: by the kernel that looks for them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from targets import TARGETS

from diyfa.backends.cuda.attention import clear
from diyfa.backends.cuda.runtime.launch import launch_kernel

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend does not run here", allow_module_level=True)
DEVICE = TARGETS["cuda"].device
TOTAL = 90
# offsets, rows of a sequence that are written at most -> covered ranges
PACKINGS: dict[str, tuple[list[int], int, list[tuple[int, int]]]] = {
    "all": ([0, 40, 90], 50, [(0, 90)]),
    "slack behind": ([0, 7, 7, 33], 26, [(0, 33)]),
    "slack before": ([21, 60, 90], 39, [(21, 90)]),
    "nothing": ([0, 0], 0, []),
    "nothing, far": ([90, 90, 90], 0, []),
    "longer than said": ([0, 40, 90], 32, [(0, 32), (40, 72)]),
    "beyond the memory": ([0, 50, 4000], 4000, [(0, 90)]),
    "before the memory": ([-9, 30, 50], 60, [(0, 50)]),
    "before the memory, and long": ([-9, 30, 50], 20, [(0, 20), (30, 50)]),
    "far beyond the memory": ([0, 4000, 4100], 50, [(0, 50)]),
    "falling": ([0, 60, 30, 80], 60, [(0, 60), (30, 80)]),
    "falling at the end": ([0, 60, 30], 60, [(0, 60)]),
    "many": ([*range(0, 88, 2), 88], 1, [(i, i + 1) for i in range(0, 88, 2)]),
}


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("name", PACKINGS)
def test_rows_of_no_sequence(monkeypatch: pytest.MonkeyPatch, name: str, shares: int) -> None:
    offsets, longest, covered = PACKINGS[name]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    x = torch.ones(TOTAL, 4, 2, 40, dtype=torch.float16, device=DEVICE)[:, :, 1]  # slices of something larger
    y = torch.ones(TOTAL, 2, 4, 24, dtype=torch.bfloat16, device=DEVICE)[:, 1]
    lse = torch.ones(4, TOTAL, device=DEVICE)
    outside = torch.ones(TOTAL, dtype=torch.bool, device=DEVICE)
    for first, last in covered:
        outside[first:last] = False
    launch = clear.launch_of(cu_seqlens, longest, x, y, lse, float("inf"))
    before = launch.constants["c"].shares
    values = clear.ClearConstants(40, 24, 4, 64, 32, shares)  # few rows at a time
    launch_kernel(launch._replace(grid=launch.grid // before * shares, constants={"c": values}))
    for cleared, value in ((x, 0.0), (y, 0.0), (lse.T, float("inf"))):
        assert bool((cleared[outside] == value).all()) and bool((cleared[~outside] == 1).all())
    assert bool((x._base[:, :, 0] == 1).all()) and bool((y._base[:, 0] == 1).all())
