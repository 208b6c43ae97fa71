"""Heads whose float32 gradients have more columns than one product: two tiles of columns each (compat.cut_columns)."""

from __future__ import annotations

import pytest
import test_npu_on_shim as shim
import torch

F32 = torch.float32
WIDE = [
    # Several tiles of rows and of keys, the last ones partial.
    shim.Case("mla", F32, heads_kv=1, seqlen_q=40, seqlen_k=70, head_dim=576, head_dim_v=512, causal=True),
    # The second tile is padded, and sequences end inside of tiles.
    shim.Case(
        "padded",
        F32,
        batch=2,
        heads=1,
        heads_kv=1,
        seqlen_q=40,
        seqlen_k=50,
        head_dim=521,
        head_dim_v=40,
        seq_lens=(50, 23),
    ),
    shim.Case("one-key", F32, heads=1, heads_kv=1, seqlen_q=20, seqlen_k=1, head_dim=560, head_dim_v=16, layout="bshd"),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_against_dense(npu: torch.device, monkeypatch: pytest.MonkeyPatch, case: shim.Case) -> None:
    monkeypatch.setattr(shim, "CASES", [case])  # which seeds its inputs
    shim.check_against_dense(case, npu, "auto")
