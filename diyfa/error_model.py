"""How wrong float32 arithmetic may make attention: the standard deviation of every element of every result.

The error budget (`diyfa.testing`) compares a kernel with PyTorch, which is exact by luck wherever few numbers meet: a
query that sees one key has the weight exp(0) = 1 in PyTorch, while any FlashAttention recomputes it in the backward
pass from a score and a log-sum-exp that were rounded separately. What that costs follows from the formulas and the
inputs, not from a constant: independent errors of the sizes below are propagated through the derivatives, and their
squares added (Higham & Mary 2019, "A new approach to probabilistic rounding error analysis"). u is the unit roundoff.

* every sum of products, from the scores to the results: u · Σ|terms|
* a log-sum-exp: u · (1 + |lse|); an exponential: u, relative to itself; so a weight has, relative to itself,
  u · (2 + scale · Σ|q · k| + |lse|)
* delta = rowsum(dout · out) - dlse: u · (Σ|dout · out| + |dlse|), and what rounding this output to the dtype that it is
  saved in changes of it. PyTorch, which keeps the weights, has no such error: with one weight, of 1, its dp - delta is
  exactly 0, whatever the dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Terms(NamedTuple):
    """What a call works with, in float64, (B, H, S, ...) with the heads of k and v repeated; nothing but numbers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor  # 0 where a row sees nothing
    weights: torch.Tensor  # (B, H, Sq, Sk), the softmax
    kept: torch.Tensor  # the same after dropout
    scale: float
    softcap: float
    sinks: torch.Tensor | None  # (H,)
    dtype: torch.dtype  # of q and out
    unit_roundoff: float  # of the arithmetic


def _of_product(unit: float, a: torch.Tensor, variance: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Standard deviation of a @ b summed in the arithmetic, where a has the variances given and b is exact."""
    return (variance @ b.square() + (unit * (a.abs() @ b.abs())).square()).sqrt()


def deviations(terms: Terms) -> dict[str, torch.Tensor]:
    """Standard deviations of out, lse, dq, dk, dv, dscores (B, H, Sq, Sk) and, with sinks, dsinks (H,).

    dk and dv belong to each query head; those of heads that share keys add up like all variances.
    """
    q, k, v, dout, dlse, out, lse, weights, kept, scale, softcap, sinks, dtype, unit = terms
    relative = unit * (2 + abs(scale) * (q.abs() @ k.abs().mT) + lse.abs()[..., None])  # of a weight
    dp, dp_error = dout @ v.mT, unit * (dout.abs() @ v.abs().mT)
    delta = (dout * out).sum(-1) - dlse
    delta_error = unit * ((dout * out).abs().sum(-1) + dlse.abs())
    delta_error = delta_error + (dout * (out.to(dtype).double() - out)).sum(-1).abs()
    ratio = torch.where(weights > 0, kept / weights.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)
    difference = ratio * dp - delta[..., None]
    ds = weights * difference
    ds_variance = (relative * difference).square() + (ratio * dp_error).square() + delta_error[..., None].square()
    ds_variance = weights.square() * ds_variance
    ds_qk, qk_variance = ds, ds_variance  # of scale * q @ k, before the softcap
    if softcap:
        slope = 1 - torch.tanh(scale * (q @ k.mT) / softcap).square()
        ds_qk, qk_variance = ds * slope, ds_variance * slope.square()
    kept_variance = (kept * relative).square()
    found = {
        "out": _of_product(unit, kept, kept_variance, v),
        "lse": ((weights * relative).square().sum(-1) + (unit * (1 + lse.abs())).square()).sqrt(),
        "dq": abs(scale) * _of_product(unit, ds_qk, qk_variance, k),
        "dk": abs(scale) * _of_product(unit, ds_qk.mT, qk_variance.mT, q),
        "dv": _of_product(unit, kept.mT, kept_variance.mT, dout),
        "dscores": ds_variance.sqrt(),
    }
    if sinks is not None:
        weight = torch.exp(sinks[:, None] - lse)
        variance = (weight * unit * (2 + lse.abs()) * delta).square() + (weight * delta_error).square()
        found["dsinks"] = (variance.sum((0, 2)) + (unit * (weight * delta).abs().sum((0, 2))).square()).sqrt()
    return found
