"""`diyfa validate --invariant`: equal log-probabilities are counted as equal, and what breaks them is seen."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from targets import TARGETS
from typer.testing import CliRunner

import diyfa
from diyfa import registry
from diyfa.cli.app import app
from diyfa.lab import invariant
from diyfa.lab.invariant import GENERATIONS, Generation, compare


def run(layers: int, tokens: int) -> tuple[int, dict[str, Any]]:
    arguments = ["--invariant", "--backend", "cpu", "--layers", str(layers), "--tokens", str(tokens), "--json"]
    result = CliRunner().invoke(app, ["validate", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_no_log_probability_differs_in_the_mode() -> None:
    code, document = run(layers=2, tokens=34)
    assert code == 0 and document["ok"]
    assert [c["generation"] for c in document["comparisons"]] == [way.name for way in GENERATIONS]
    assert {(c["compared"], c["differing"]) for c in document["comparisons"]} == {(33 + 32 + 17, 0)}
    outside = {c["generation"]: c["differing_outside"] for c in document["comparisons"]}
    assert outside["token by token"] > 10, "the model must be one on which the mode matters"


@pytest.mark.parametrize("backend", [name for name in TARGETS if name != "cpu"])
def test_kernels(backend: str) -> None:
    """Chunks behind a shared prefix, with the kernels of the backend."""
    target = TARGETS[backend]
    way = Generation("chunks", chunk=3, page_size=4, shares_prefix=True)
    (comparison,) = compare(1, 9, torch.device(target.device), target.backend, [way])
    assert (comparison.compared, comparison.differing) == (8 + 7 + 4, 0)


def test_tokens_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a group has many tokens, where products have equal bits wherever a row stands."""
    x = torch.arange(21.0).reshape(7, 3)
    seen = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return 2 * rows

    assert torch.equal(invariant.in_groups(4, double, x), 2 * x) and seen == [4, 4]
    weights = [torch.randn(5, 3)]
    assert invariant.group_size(weights) == 1
    monkeypatch.setattr(invariant, "group_size", lambda weights: 4)
    (found,) = invariant.compare(1, 12, torch.device("cpu"), "cpu", invariant.GENERATIONS[1:2])
    assert found.compared == 11 + 10 + 6 and found.largest_outside < 0.01


def test_differences_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diyfa, "batch_invariant", nullcontext)
    monkeypatch.setattr(invariant, "GENERATIONS", GENERATIONS[1:2])
    code, document = run(layers=1, tokens=24)
    assert code == 1 and not document["ok"]
    (comparison,) = document["comparisons"]
    assert comparison["differing"] == comparison["differing_outside"] > 0
    assert comparison["largest_outside"] > 0


@pytest.mark.parametrize("bug", ["last bit", "NaN"])
def test_one_wrong_bit_is_seen(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    real, calls = diyfa.flash_attn_with_kvcache, []

    def attend(*arguments, **options):
        result = real(*arguments, **options)
        calls.append(registry.is_batch_invariant())
        if sum(calls) == 5:
            result.view(torch.int16).view(-1)[0] = 0x7E00 if bug == "NaN" else result.view(torch.int16).view(-1)[0] ^ 64
        return result

    monkeypatch.setattr(diyfa, "flash_attn_with_kvcache", attend)
    (comparison,) = compare(1, 8, torch.device("cpu"), "cpu", GENERATIONS[1:2])
    assert comparison.differing > 0


def test_shared_pages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, new_tokens = diyfa.flash_attn_with_kvcache, []

    def attend(q, *arguments, **options):
        new_tokens.append(q.shape[0] * q.shape[1])
        return real(q, *arguments, **options)

    monkeypatch.setattr(diyfa, "flash_attn_with_kvcache", attend)
    (way,) = (way for way in GENERATIONS if way.shares_prefix)
    (comparison,) = compare(1, 40, torch.device("cpu"), "cpu", [way])
    assert comparison.differing == 0
    tokens = 40 + 39 + 21
    assert sum(new_tokens) == 2 * (tokens - 2 * 16), "one page of 16 tokens is common to three sequences; in two modes"
