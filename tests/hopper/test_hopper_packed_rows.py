"""The Hopper forward leaves no row of packed tensors unwritten, whatever the offsets are that nobody could check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import interpret  # noqa: E402
from packings import HOSTILE, OVERLAPPING, assert_rows, attend_to  # noqa: E402

from diyfa.backends.cuda.hopper.configs import Sm90Config  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

ONE = Sm90Config(1, 64, 4, True, 232, 24)
DYNAMIC = Sm90Config(2, 64, 4, True, 240, 24, persistent=True, scheduler="dynamic", pingpong=True)
CONFIGS = {
    "one": (ONE, 64),
    "persistent": (DYNAMIC, 64),
    "direct": (replace(DYNAMIC, own_o=False, direct=True), 192),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", [x for x in HOSTILE if x not in OVERLAPPING])  # races, and known to be
def test_no_row_is_left_unwritten(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, head_dim = CONFIGS[config]
    interpret(monkeypatch, tile)
    out, lse = attend_to("sm90", HOSTILE[name], longest=128, head_dim=head_dim, heads=2)
    assert_rows(out, lse, HOSTILE[name])
