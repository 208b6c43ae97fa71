"""Outputs over disjoint keys joined by their log-sum-exps, on every backend."""

from __future__ import annotations

import pytest
import torch
from merge_cases import INF, MERGE_CASES, MergeCase, joined
from targets import Target

from diyfa.distributed import merge as joining
from diyfa.registry import load_backend


def by_head(x: torch.Tensor, layout: str) -> torch.Tensor:
    return {"bhsd": x, "bshd": x.transpose(1, 2) if x.dim() == 4 else x, "thd": x.transpose(0, 1)[None]}[layout]


@pytest.mark.parametrize("case", MERGE_CASES.values(), ids=MERGE_CASES)
def test_merged_rows(target: Target, case: MergeCase) -> None:
    out, lse, part, part_lse = case.tensors()
    rows = slice(case.first, case.first + case.rows)
    wide, narrow = (lambda x: by_head(x, case.layout)), (lambda x: x if x.dim() == 3 else x[None])
    expected, expected_lse = joined(wide(out)[:, :, rows], narrow(lse)[..., rows], wide(part), narrow(part_lse))
    merged = joining.Merged(out.to(target.device), case.head_dim, case.layout, target.backend)
    assert (merged.merge == joining.merge) == (target.backend == "cpu")  # the others have kernels
    merged.out, merged.lse = out.to(target.device), lse.to(target.device)
    strided = torch.nn.functional.pad(part, (0, 8)).to(target.device)[..., : case.head_dim]
    merged.add(case.first, strided, part_lse.to(target.device))
    found, found_lse = wide(merged.out.cpu()), narrow(merged.lse.cpu())
    torch.testing.assert_close(found[:, :, rows].double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(found_lse[..., rows].double(), expected_lse, rtol=5e-7, atol=2e-6, equal_nan=True)
    outside = torch.ones(found.shape[2], dtype=torch.bool)
    outside[rows] = False
    assert found[:, :, outside].isnan().all() and found_lse[..., outside].isnan().all()


def test_large_outputs(target: Target) -> None:
    """Those that cancel do not overflow on the way."""
    out, part = (torch.full((1, 1, 2, 16), x).to(target.device) for x in (2.5e38, -2.5e38))
    lse = torch.zeros(1, 1, 2)
    merged = joining.Merged(out, 16, "bhsd", target.backend)
    merged.add(0, out, lse.to(target.device))
    merged.add(0, part, lse.to(target.device))
    found = merged.result()
    assert not found[0].cpu().any() and torch.allclose(found[1].cpu(), torch.tensor(2.0).log())


def test_nan_shows_beside_a_part_without_keys(target: Target) -> None:
    out, nothing = torch.ones(1, 1, 1, 16).to(target.device), torch.zeros(1, 1, 1, 16).to(target.device)
    merged = joining.Merged(out, 16, "bhsd", target.backend)
    merged.add(0, out, torch.full((1, 1, 1), float("nan")).to(target.device))
    merged.add(0, nothing, torch.full((1, 1, 1), INF).to(target.device))
    assert all(bool(x.cpu().isnan().all()) for x in merged.result())


def test_rows_of_no_part() -> None:
    out, lse, part, part_lse = MERGE_CASES["second half"].tensors()
    merged = joining.Merged(out, 64, "bhsd", "cpu")
    merged.add(64, part, part_lse)
    out, lse = merged.result()
    assert not out[:, :, :64].any() and (lse[:, :, :64] == INF).all()
    torch.testing.assert_close(lse[:, :, 64:], part_lse, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_many_rows_at_once(head_dim: int) -> None:
    """Statistics are overwritten where other warps read them."""
    case = MergeCase("bhsd", 4096, head_dim, heads=32)
    whole = [x.cuda() for x in case.tensors()]
    expected, expected_lse = joined(*whole)
    out, lse, part, part_lse = whole
    load_backend("cuda").merge(out, lse, part, part_lse)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=5e-7, atol=2e-6, equal_nan=True)
