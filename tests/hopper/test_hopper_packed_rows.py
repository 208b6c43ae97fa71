"""The Hopper forward leaves no row of packed tensors unwritten, whatever the offsets are that nobody could check."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hopper_interpreted import interpret, interpret_prefill, interpreted_only
from packings import HOSTILE, OVERLAPPING, assert_rows, attend_to
from poison import poisoned_allocations

import diyfa
from diyfa import kvcache
from diyfa.backends.cuda.hopper.configs import Sm90Config

pytestmark = interpreted_only

ONE = Sm90Config(1, 64, 4, True, 232, 24, fixed_max=True)
DYNAMIC = Sm90Config(2, 64, 4, True, 240, 24, persistent=True, scheduler="dynamic", pingpong=True, fixed_max=True)
CONFIGS = {
    "one": (ONE, 64),
    "persistent": (DYNAMIC, 64),
    "direct": (replace(DYNAMIC, separate_o_buffer=False, store_from_registers=True), 192),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", [x for x in HOSTILE if x not in OVERLAPPING])  # races, and known to be
def test_no_row_is_left_unwritten(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, head_dim = CONFIGS[config]
    interpret(monkeypatch, tile)
    out, lse = attend_to("sm90", HOSTILE[name], longest=128, head_dim=head_dim, heads=2)
    assert_rows(out, lse, HOSTILE[name])


@pytest.mark.parametrize("offsets", [[5, 17, 150], [0, 120, 0, 0], [150, 150, 150]], ids=str)
def test_over_pages_and_into_memory_that_is_given(offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_prefill(monkeypatch, ONE)
    for check in ("_check_values", "_check_packed_values"):
        monkeypatch.setattr(kvcache, check, lambda *arguments: None)
    batch, rows = len(offsets) - 1, 160
    q = torch.zeros(rows, 4, 64, dtype=torch.bfloat16)
    pages = torch.ones(2, batch, 16, 2, 64, dtype=q.dtype)
    given = torch.full_like(q, float("nan"))
    ends, used = torch.tensor(offsets, dtype=torch.int32), torch.full((batch,), 9, dtype=torch.int32)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    with diyfa.use_backend("cuda"), poisoned_allocations():
        out, lse = diyfa.flash_attention_varlen(
            q, *pages, ends, None, 150, 16, seqused_k=used, block_table=table, out=given, return_lse=True
        )
    covered = torch.zeros(rows, dtype=torch.bool)
    covered[offsets[0] : max(offsets)] = True
    assert out.data_ptr() == given.data_ptr()
    assert bool((out[covered] == 1).all()) and bool((out[~covered] == 0).all())
    torch.testing.assert_close(lse, torch.where(covered, math.log(9), float("inf")).expand_as(lse))
