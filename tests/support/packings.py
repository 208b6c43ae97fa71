"""Offsets of packed sequences, good and bad, and which rows kernels must write for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from diyfa import registry
from diyfa.problem import AttentionProblem, AttentionTensors

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
# More for kernels that attend. In some, rows are those of two sequences, or of one that begins below the first and of
# none: they hold what was written last.
OVERLAPPING = ("falling", "largest numbers", "below the first")
HOSTILE: dict[str, list[int]] = {
    **{name: offsets for name, (offsets, _, _) in PACKINGS.items()},
    "slack on both sides": [13, 40, 71],
    "nothing, in the middle": [40, 40, 40],
    "unused offsets": [0, 17, 23, 0, 0],
    "unused offsets, slack before": [5, 17, 23, 0, 0],
    "unused offsets, all": [0, 0, 0],
    "more sequences than are looked at once": [3, *[9] * 140, 27, *[0] * 20],
    "largest numbers": [0, 2**31 - 1, -(2**31), 50],
    "largest numbers behind": [0, 20, 2**31 - 1, 2**31 - 1],
    "below the first": [50, 20, 40],
}
KEYS = 3  # of each sequence


def assert_rows(out: torch.Tensor, lse: torch.Tensor, offsets: Sequence[int], max_rows: int = TOTAL) -> None:
    """out (T, H, D) and lse (H, T) of `attend_to`: rows of sequence b, at most so many, hold b + 1, others nothing."""
    at = [min(max(x, 0), TOTAL) for x in offsets]
    for row in range(TOTAL):
        allowed = {b + 1 for b, (i, j) in enumerate(pairwise(at)) if i <= row < min(j, i + max_rows)}
        longer = any(i + max_rows <= row < j for i, j in pairwise(at))
        if not allowed or row < at[0] or longer:
            allowed.add(0)
        values = out[row].unique().tolist()
        assert len(values) == 1 and values[0] in allowed, (row, values, allowed)
        expected = math.log(KEYS) if values[0] else float("inf")
        torch.testing.assert_close(lse[:, row], torch.full_like(lse[:, row], expected), rtol=1e-6, atol=1e-6)


def attend_to(
    variant: str, offsets: Sequence[int], longest: int = TOTAL, device: str = "cpu", heads: int = 4, head_dim: int = 40
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (T, H, D) and lse (H, T) of a kernel that is handed these offsets of queries, past all checks, and writes to
    memory with NaN in it and around it."""
    batch, total_k = len(offsets) - 1, KEYS * (len(offsets) - 1)
    backend = registry.load_backend("cuda")
    q = torch.zeros(TOTAL, heads, head_dim, dtype=torch.bfloat16, device=device)
    k = torch.zeros(total_k, heads // 2, head_dim, dtype=torch.bfloat16, device=device)
    v = torch.arange(1, batch + 1, device=device).repeat_interleave(KEYS)[:, None, None].expand_as(k).to(k.dtype)
    offset_tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (offsets, range(0, total_k + 1, KEYS))]
    tensors = AttentionTensors(
        q, k, v.contiguous(), 1.0, cu_seqlens_q=offset_tensors[0], cu_seqlens_k=offset_tensors[1]
    )
    problem = AttentionProblem(
        "cuda", backend.arch(q.device), "bfloat16", "thd", batch, heads, heads // 2, longest, KEYS, head_dim, head_dim,
        total_q=TOTAL, total_k=total_k,
    )  # fmt: skip
    around = torch.full((TOTAL + 2, heads + 1, head_dim + 8), float("nan"), dtype=q.dtype, device=device)
    out = around[1:-1, :-1, :-8]
    lse_around = torch.full((heads + 2, TOTAL), float("nan"), device=device)
    lse = lse_around[1:-1]
    registry.choose("attention_fwd", problem, backend, variant).launch(problem, tensors, out, lse)
    before = [x.clone() for x in (out, lse)]
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    assert bool(around.isnan().all()) and bool(lse_around.isnan().all()), "written outside"
    return before[0].cpu(), before[1].cpu()
