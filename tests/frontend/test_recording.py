"""Calls of which one pass is recorded and the other runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import diyfa
from diyfa import use_backend
from diyfa.ready.recording import record, recording
from diyfa.registry import load_backend


@pytest.fixture(autouse=True)
def a_backend_that_records(monkeypatch):
    """The one of the CPU, which compiles nothing."""
    monkeypatch.setattr(load_backend("cpu"), "recording", lambda arch: nullcontext({}), raising=False)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 16, 16, generator=generator).requires_grad_() for _ in range(3)]


def gradients(out, given):
    return torch.autograd.grad(out, given, torch.ones_like(out))


def test_backward_is_recorded_after_a_forward_that_ran():
    """As often as equal calls come."""
    with use_backend("cpu"):
        for _ in range(3):
            given = inputs()
            out = diyfa.flash_attention(*given)
            assert out.detach().abs().max() > 0
            with recording("cpu", None):
                assert not any(x.any() for x in gradients(out, given))


def test_backward_runs_after_a_recorded_forward():
    """And equal calls afterwards are as ever."""
    with use_backend("cpu"):
        given = inputs()
        expected = gradients(diyfa.flash_attention(*given), given)
        for _ in range(3):
            with recording("cpu", None):
                out = diyfa.flash_attention(*given)
            assert not out.any()
            assert any(x.any() for x in gradients(out, given))
            again = gradients(diyfa.flash_attention(*given), given)
            assert all(map(torch.equal, again, expected))


def test_refusals_are_recorded_and_errors_of_other_code_are_raised():
    def mistaken():
        raise ValueError("not diyfa's")

    q = torch.zeros(1, 2, 16, 16)
    recorded = record("cpu", None, [("a call", lambda: diyfa.flash_attention(q, q, q, softcap=-1.0))])
    assert len(recorded.refused) == 1 and recorded.refused[0].startswith("a call: ")
    with pytest.raises(ValueError, match="not diyfa's"):
        record("cpu", None, [("another", mistaken)])
