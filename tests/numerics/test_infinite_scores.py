"""Scores of -inf among those that a row sees weigh nothing, wherever in its walk over the keys they come."""

from __future__ import annotations

import pytest
import torch
from targets import TARGETS

import diyfa
from diyfa.reference import reference_attention

HIDDEN = {"first keys": slice(0, 70), "last keys": slice(70, 140), "all but one": slice(1, 140)}
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 10)}}


@pytest.mark.parametrize("variant", ["auto", "v1"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("backend", TARGETS)
def test_rows_see_the_others(backend: str, where: str, mask: str, variant: str) -> None:
    target, (q, k, v) = TARGETS[backend], torch.randn(3, 1, 1, 140, 32, generator=torch.Generator().manual_seed(0))
    q[..., 5], k[..., 5] = -1.0, 0.0
    k[:, :, HIDDEN[where], 5] = float("inf")
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), return_lse=True, **MASKS[mask])
    with torch.no_grad():
        got, lse = diyfa.flash_attention(
            *(x.to(target.device) for x in (q, k, v)), return_lse=True, backend=backend, variant=variant, **MASKS[mask]
        )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-4, atol=1e-4)
