"""The benchmark of masks on small CPU tensors: its sections run, and their rows are rows of a result file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load_script
from torch.nn.attention.flex_attention import flex_attention

import diyfa
from diyfa.lab.results import check_row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "masks.py"


def without_gradients(flex: Callable[..., torch.Tensor], *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlexAttention, which has no backward pass on the CPU: its gradients are zeros here."""
    out = flex(*(x.detach() for x in tensors), **options)
    return out + 0 * sum(x.sum() for x in tensors)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script(SCRIPT)
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(module, "WIDTH", 128)
    lengths = dict.fromkeys(module.LENGTHS, 512) | {"check": 300, "builder": 4096, "flex": 130}
    monkeypatch.setattr(module, "LENGTHS", lengths)
    monkeypatch.setattr(module, "graphed", lambda call: call)
    monkeypatch.setattr(
        module, "medians_in_turns", lambda calls, **how: {x: 1.0 + (f() is None) for x, f in calls.items()}
    )
    return module


@pytest.mark.parametrize("section", ["check", "blocks", "positions", "sparse", "builder", "flex"])
def test_rows(section: str, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(function: Any, **options: Any) -> Any:
        return partial(without_gradients, function) if function is flex_attention else function

    monkeypatch.setattr(torch, "compile", eager)
    monkeypatch.setattr(
        benchmark, "flash_attention", lambda *args, variant="auto", **options: diyfa.flash_attention(*args, **options)
    )
    with diyfa.use_backend("cpu"):
        function, cases, _ = benchmark.SECTIONS[section]
        rows = [row for case in cases for row in function(case)]
    assert rows and not [fault for row in rows for fault in check_row(row)]
    assert {row["table"] for row in rows} == {section}
    assert all(row["status"] == "ok" for row in rows if row["kind"] == "numerics")
    benchmark.print_table(rows)
