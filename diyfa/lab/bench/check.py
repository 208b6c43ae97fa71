"""A check of an implementation's result, made before it is timed: figures of wrong results are worth nothing."""

from __future__ import annotations

import torch

from diyfa.reference import reference_attention
from diyfa.testing import error_budget, measure_error, rounding_unit
from diyfa.yardstick import plain_flash_attention

ROWS = 64  # rows at each end of the result that are compared: all of them would take longer than the timing
# Peers round in their own ways, so more than the contract's budget is allowed: this finds wrong results, not inexact
# ones. `diyfa validate` holds diyfa to the budget.
SLACK = 4


class WrongResultError(RuntimeError):
    """An implementation's result is wrong; the message says by how much."""


def check_attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Return the largest error of the first and last rows of the first and last head, of equally many queries and keys.

    Raises WrongResultError beyond the allowed one, and for any NaN or infinity.
    """
    _check_shape_and_values(out, (*q.shape[:3], v.shape[3]))
    length, errors = q.shape[2], []
    for head in (slice(1), slice(-1, None)):
        head_q, head_k, head_v, head_out = (x.detach()[head, head].cpu() for x in (q, k, v, out))
        for begin, end in {(0, min(ROWS, length)), (max(0, length - ROWS), length)}:
            keys = slice(end if causal else None)  # the later ones are hidden from these rows
            part_q, part_k, part_v = head_q[:, :, begin:end], head_k[:, :, keys], head_v[:, :, keys]
            expected = reference_attention(part_q.double(), part_k.double(), part_v.double(), causal=causal)
            low = plain_flash_attention(part_q, part_k, part_v, causal=causal)
            assert isinstance(low, torch.Tensor) and isinstance(expected, torch.Tensor)
            errors.append(_check(head_out[:, :, begin:end], low, expected))
    return max(errors)


def check_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of the first and the last corner of a product. Raises as `check_attention` does."""
    _check_shape_and_values(out, (a.shape[0], b.shape[1]))
    errors = []
    for corner in (slice(ROWS), slice(-ROWS, None)):
        left, right = a.detach()[corner].cpu(), b.detach()[:, corner].cpu()
        low = (left.float() @ right.float()).to(out.dtype)
        errors.append(_check(out.detach()[corner, corner].cpu(), low, left.double() @ right.double()))
    return max(errors)


def _check_shape_and_values(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape:
        raise WrongResultError(f"wrong result: the shape is {tuple(out.shape)}, not {shape}")
    if not bool(torch.isfinite(out).all()):
        raise WrongResultError("wrong result: it has NaN or infinity")


def _check(actual: torch.Tensor, low: torch.Tensor, expected: torch.Tensor) -> float:
    error = measure_error(actual, expected)
    allowed = error_budget(measure_error(low, expected), rounding_unit(expected, actual.dtype))
    share = max(e / a for e, a in zip(error, allowed, strict=True))
    if share > SLACK:
        raise WrongResultError(f"wrong result: an error of {error.max_abs:.2g}, {share:.3g} times the allowed one")
    return error.max_abs
