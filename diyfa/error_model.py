"""How wrong float32 arithmetic may make attention: the standard deviation of every element of every result.

The error budget (`diyfa.testing`) compares a kernel with PyTorch, which is exact by luck wherever few numbers meet: a
query that sees one key has the weight exp(0) = 1 in PyTorch, while any FlashAttention recomputes it in the backward
pass from a score and a log-sum-exp that were rounded separately. What that costs follows from the formulas and the
inputs, not from a constant: with the unit roundoff u, independent roundings of these sizes are propagated through the
derivatives, and their squares added (Higham & Mary 2019, "A new approach to probabilistic rounding error analysis").

* a score, a sum of D products: u · scale · Σ|q · k|; a log-sum-exp: u · (1 + |lse|); an exponential: u, relative to
  itself; so a weight has, relative to itself, u · (2 + scale · Σ|q · k| + |lse|)
* dp = dout · v: u · Σ|dout · v|; delta = rowsum(dout · out) - dlse: u · (Σ|dout · out| + |dlse|)
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
    unit_roundoff: float


def _root_sum(squares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Standard deviation of a product whose left factor has the variances `squares`."""
    return (squares @ x.square()).sqrt()


def deviations(terms: Terms) -> dict[str, torch.Tensor]:
    """Standard deviations of out, lse, dq, dk, dv, dscores (B, H, Sq, Sk) and, with sinks, dsinks (H,).

    dk and dv belong to each query head; those of heads that share keys add up like all variances.
    """
    q, k, v, dout, dlse, out, lse, weights, kept, scale, softcap, sinks, unit = terms
    magnitude = abs(scale) * (q.abs() @ k.abs().mT)  # [B, H, Sq, Sk]
    relative = unit * (2 + magnitude + lse.abs()[..., None])  # of a weight
    delta = (dout * out).sum(-1) - dlse
    delta_error = unit * ((dout * out).abs().sum(-1) + dlse.abs())
    dp, dp_error = dout @ v.mT, unit * (dout.abs() @ v.abs().mT)
    ratio = torch.where(weights > 0, kept / weights.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)
    ds_error = relative.square() * (ratio * dp - delta[..., None]).square()
    ds_error = weights.square() * (ds_error + (ratio * dp_error).square() + delta_error[..., None].square())
    weight_error = (kept * relative).square()
    qk_error = ds_error  # of the gradients of scale * q @ k
    if softcap:
        qk_error = ds_error * (1 - torch.tanh(scale * (q @ k.mT) / softcap).square()).square()
    found = {
        "out": _root_sum(weight_error, v),
        "lse": ((weights * relative).square().sum(-1) + (unit * (1 + lse.abs())).square()).sqrt(),
        "dq": abs(scale) * _root_sum(qk_error, k),
        "dk": abs(scale) * _root_sum(qk_error.mT, q),
        "dv": _root_sum(weight_error.mT, dout),
        "dscores": ds_error.sqrt(),
    }
    if sinks is not None:
        sink_weight = torch.exp(sinks[:, None] - lse)
        error = (unit * (1 + lse.abs()) * delta).square() + delta_error.square()
        found["dsinks"] = (sink_weight.square() * error).sum((0, 2)).sqrt()
    return found
