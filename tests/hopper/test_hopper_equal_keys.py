"""Keys that are equal, values included, and have most of a row's weight: no single one of them dominates.

In the Gluon interpreter. Where the weights of such keys are rounded, their errors are equal, and out is off by that
much of their value; delta = rowsum(dout * out) then no longer cancels dout * v. With a running maximum they weigh
exactly 1. Gradients are those that a plain backward pass forms from the kernel's out and lse (`fixed_forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from fixed_forward import results_on
from hopper_interpreted import interpret, interpreted_only
from test_hopper_features import TWO

import diyfa
from diyfa.reference import reference_attention
from diyfa.testing import (
    LSE_UNIT,
    YARDSTICK_DRAWS,
    Error,
    Inputs,
    Results,
    error_budget,
    measure_error,
    rounding_unit,
    run_case,
)
from diyfa.yardstick import plain_flash_attention

pytestmark = interpreted_only

BLOCK, QUERIES, COLUMNS = 64, 128, 64


@dataclass(frozen=True)
class EqualKeys:
    """`scores` [keys] in nats, which all queries have, beside the products of features of `spread`.

    `equal`: keys of one value and without other features. `mean` is added to all values and to dout, of which the
    random part is then smaller.
    """

    name: str
    scores: torch.Tensor
    equal: torch.Tensor
    spread: float = 0.1
    mean: float = 0.0

    def inputs(self, nudge: int = 0) -> Inputs:
        """As `make_inputs` draws and nudges them."""
        generator, nudges = torch.Generator().manual_seed(3), torch.Generator().manual_seed(nudge)

        def random(*shape: int) -> torch.Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x * (1 + (2 * torch.rand(shape, generator=nudges, dtype=torch.float64) - 1) / 32 * (nudge != 0))

        keys = len(self.scores)
        q, k = self.spread * random(QUERIES, COLUMNS), self.spread * random(keys, COLUMNS)
        v, dout = random(keys, COLUMNS), random(QUERIES, COLUMNS)
        if self.mean:
            v, dout = 0.3 * v + self.mean, 0.3 * dout + self.mean
        v[self.equal] = v[0].clone()
        k[self.equal] = 0
        q[:, :2], k[:, 0] = 1, self.scores.round(decimals=0)  # two features, as one of 16 bits would round the sum
        k[:, 1] = self.scores - k[:, 0]
        tensors = [x.bfloat16()[None, None] for x in (q, k, v, dout)]
        leaves = (x.requires_grad_() for x in tensors[:3])
        return Inputs(*leaves, tensors[3], torch.zeros(1, 1, QUERIES), {"sm_scale": 1.0, "layout": "bhsd"})


def errors(results: Results, expected: Results) -> list[Error]:
    return [measure_error(x, want) for x, want in zip(results[:5], expected[:5], strict=True)]


def expected_of(inputs: Inputs) -> Results:
    wide = (x.detach().double().requires_grad_(x.requires_grad) for x in inputs[:5])
    return run_case(reference_attention, inputs._replace(**dict(zip(Inputs._fields, wide, strict=False))))


def over_budget(case: EqualKeys, compute: Callable[[Inputs], Results]) -> dict[str, float]:
    """Results whose largest or root-mean-square error is over its budget, and how often it is the budget."""
    inputs = case.inputs()
    expected = expected_of(inputs)
    yardstick = [Error(0.0, 0.0)] * 5
    for nudge in range(YARDSTICK_DRAWS):
        drawn = case.inputs(nudge)
        found = errors(run_case(plain_flash_attention, drawn), expected_of(drawn))
        yardstick = [Error(*map(max, x, y)) for x, y in zip(yardstick, found, strict=True)]
    got = compute(inputs)
    lse_unit = LSE_UNIT * float(case.scores.abs().max())
    over = {}
    for name, error, own, want in zip(Results._fields, errors(got, expected), yardstick, expected[:5], strict=False):
        unit = Error(lse_unit, lse_unit) if name == "lse" else rounding_unit(want, torch.bfloat16)
        share = max(e / b for e, b in zip(error, error_budget(own, unit), strict=True))
        if not share <= 1:
            over[name] = share
    return over


def few(more: float, nats: float, keys: int) -> EqualKeys:
    """In the middle of ordinary keys one of `nats`, and in blocks that the loop reaches later, in the same columns, so
    that the same thread has them, `keys` with `more` than that."""
    blocks = keys + 3
    places = torch.arange(blocks - 2, 0, -1)[: keys + 1] * BLOCK + 3
    scores = torch.zeros(blocks * BLOCK)
    scores[places] = nats + more
    scores[places[0]] = nats
    return EqualKeys(f"{keys}_keys_{more}_above_{nats}", scores, places)


def many(more: float, blocks: int, mean: float, equal: bool) -> EqualKeys:
    """All keys but those of the last block, which comes first, score `more`."""
    scores = torch.full((blocks * BLOCK,), more)
    scores[-BLOCK:] = 0
    where = torch.arange(len(scores) if equal else 0)
    return EqualKeys(f"{'equal' if equal else 'a_mean'}_{blocks}_blocks_{more}", scores, where, spread=0.0, mean=mean)


CASES = [
    few(0.09375, 30.0, 2), few(0.09375, 30.0, 3), few(0.34375, 60.0, 3), many(0.0037, 6, 0.0, equal=True),
    many(0.34375, 16, 0.0, equal=True), many(0.0037, 4, 1.0, equal=False), many(0.6, 12, 1.0, equal=False),
]  # fmt: skip


@pytest.mark.parametrize("fixed_max", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_that_follow(case: EqualKeys, fixed_max: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, replace(TWO, fixed_max=fixed_max))

    def compute(inputs: Inputs) -> Results:
        with torch.no_grad():
            out, lse = diyfa.flash_attention(
                *inputs.leaves, sm_scale=1.0, return_lse=True, backend="cuda", variant="sm90"
            )
        return results_on(inputs, "bhsd", out, lse)

    assert not over_budget(case, compute)
