"""Rows of packed tensors that no sequence covers are 0, log-sum-exps +inf: by the kernel that looks for them, and by
kernels that attend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from guarded_memory import guard
from packings import HOSTILE, OVERLAPPING, PACKINGS, TOTAL, assert_rows, attend_to
from targets import TARGETS

from diyfa.backends.cuda.attention import clear, fwd
from diyfa.backends.cuda.attention.configs import AttentionConfig
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.backends.cuda.runtime.launcher import launch_kernel

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend does not run here", allow_module_level=True)
DEVICE = TARGETS["cuda"].device


@pytest.mark.parametrize("n_programs", [1, 3])
@pytest.mark.parametrize("name", PACKINGS)
def test_rows_of_no_sequence(monkeypatch: pytest.MonkeyPatch, name: str, n_programs: int) -> None:
    offsets, longest, covered = PACKINGS[name]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    x = torch.ones(TOTAL, 4, 2, 40, dtype=torch.float16, device=DEVICE)[:, :, 1]  # slices of something larger
    y = torch.ones(TOTAL, 2, 4, 24, dtype=torch.bfloat16, device=DEVICE)[:, 1]
    lse = torch.ones(4, TOTAL, device=DEVICE)
    outside = torch.ones(TOTAL, dtype=torch.bool, device=DEVICE)
    for first, last in covered:
        outside[first:last] = False
    launch = clear.make_launch(cu_seqlens, longest, x, y, lse, float("inf"))
    before = launch.arguments["n_programs"]
    launch_kernel(
        launch._replace(
            grid=launch.grid // before * n_programs, arguments=launch.arguments | {"n_programs": n_programs}
        )
    )
    for cleared, value in ((x, 0.0), (y, 0.0), (lse.T, float("inf"))):
        assert bool((cleared[outside] == value).all()) and bool((cleared[~outside] == 1).all())
    assert bool((x._base[:, :, 0] == 1).all()) and bool((y._base[:, 0] == 1).all())


@pytest.mark.parametrize(
    "form, longest, programs", [("portable", TOTAL, 1), ("portable", 33, 3), ("portable", 1, 70), ("tma", 33, 1)]
)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_forward_pass_leaves_no_row_unwritten(
    name: str, form: str, longest: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the offsets are that nobody could check; of a sequence that is longer than said, whole tiles."""
    if name in OVERLAPPING and not is_interpreting():
        pytest.skip("heads of a row may hold what different programs wrote last")
    monkeypatch.setattr(fwd, "clearing_programs", lambda problem: programs)
    if is_interpreting() and form == "portable":
        guard(monkeypatch)
    with use_config("fwd", AttentionConfig(16, 16, 4, 1, form)):
        out, lse = attend_to("v2", HOSTILE[name], longest, DEVICE)
    assert_rows(out, lse, HOSTILE[name], -(-longest // 16) * 16)
