"""A check of an implementation's result, made before it is timed: figures of wrong results are worth nothing."""

from __future__ import annotations

import torch

from diyfa.reference import reference_attention
from diyfa.testing import error_budget, measure_error, rounding_unit
from diyfa.yardstick import plain_flash_attention

ROWS = 64  # rows of the result that are compared: all of them would take longer than the timing
# Peers round in their own ways, so more than the contract's budget is allowed: this finds wrong results, not inexact
# ones. `diyfa validate` holds diyfa to the budget.
SLACK = 4


class WrongResultError(RuntimeError):
    """An implementation's result is wrong; the message says by how much."""


def check_attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Return the largest error of the last rows of the last head. Raises WrongResultError beyond the allowed one."""
    rows = slice(-ROWS, None)
    last_q, last_k, last_v = (x.detach()[-1:, -1:].cpu() for x in (q[:, :, rows], k, v))
    expected = reference_attention(last_q.double(), last_k.double(), last_v.double(), causal=causal)
    low = plain_flash_attention(last_q, last_k, last_v, causal=causal)
    assert isinstance(low, torch.Tensor) and isinstance(expected, torch.Tensor)
    return _check(out.detach()[-1:, -1:, rows].cpu(), low, expected)


def check_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of a corner of a product. Raises WrongResultError beyond the allowed one."""
    left, right = a.detach()[-ROWS:].cpu(), b.detach()[:, -ROWS:].cpu()
    low = (left.float() @ right.float()).to(out.dtype)
    return _check(out.detach()[-ROWS:, -ROWS:].cpu(), low, left.double() @ right.double())


def _check(actual: torch.Tensor, low: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        raise WrongResultError(f"wrong result: the shape is {tuple(actual.shape)}, not {tuple(expected.shape)}")
    error = measure_error(actual, expected)
    allowed = error_budget(measure_error(low, expected), rounding_unit(expected, actual.dtype))
    share = max(e / a for e, a in zip(error, allowed, strict=True))
    if share > SLACK:
        raise WrongResultError(f"wrong result: an error of {error.max_abs:.2g}, {share:.3g} times the allowed one")
    return error.max_abs
