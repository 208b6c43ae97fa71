"""Attention as one dense formula, in the dtype of its inputs: in float64 the truth, in the tested dtype the budget."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

FACTOR = 2.0  # of PyTorch's own error in the same dtype
# Where that error is zero or tiny by construction: this many float32 roundings of the terms that a result is summed of.
FLOOR_ULPS = 4.0


class Call(NamedTuple):
    """Features of one call, all on the CPU."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None


def _sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: Any) -> tuple[torch.Tensor, ...]:
    """One sample (H, S, D) without padding -> (out, lse)."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])[None, :]
    if call.alibi is not None:
        s = s - call.alibi.to(s.dtype)[:, None, None] * (i - j).abs()
    left, right = call.window
    right = 0 if call.causal else right
    seen = torch.ones(s.shape[-2:], dtype=torch.bool)
    if right >= 0:
        seen &= j <= i + right
    if left >= 0:
        seen &= j >= i - left
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)], -1)
    lse = torch.logsumexp(s, -1)
    unseeing = torch.isinf(lse)
    p = torch.exp(s - lse.masked_fill(unseeing, 0.0)[..., None])
    return p[..., : k.shape[1]] @ v, lse.masked_fill(unseeing, float("inf"))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: Any = None) -> Any:
    """(B, H, S, D) -> (out, lse)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs, lses = [], []
    for b in range(q.shape[0]):
        sk = k.shape[2] if call.seq_lens is None else int(call.seq_lens[b])
        sq = q.shape[2] if call.seq_lens is None else min(sk, q.shape[2])
        out, lse = _sample(q[b, :, :sq], k[b, :, :sk], v[b, :, :sk], call, sinks)
        missing = q.shape[2] - sq
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, missing)))
        lses.append(torch.nn.functional.pad(lse, (0, missing), value=float("inf")))
    return torch.stack(outs), torch.stack(lses)


def with_gradients(
    inputs: dict[str, torch.Tensor], call: Call, dout: torch.Tensor, dlse: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """{"out", "lse", "dq", "dk", "dv"[, "dsinks"]} in float64, computed in `dtype`; `inputs` q, k, v[, sinks]."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], call, leaves.get("sinks"))
    finite = torch.isfinite(lse)
    loss = (out * dout.to(dtype)).sum() + (torch.where(finite, lse, 0) * torch.where(finite, dlse, 0).to(dtype)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: x.detach().double() for name, x in {"out": out, "lse": lse, **named}.items()}


def score_gradient_terms(inputs: dict[str, torch.Tensor], dout: torch.Tensor) -> float:
    """Largest sum of |terms| in dout · v, times what turns a score's gradient into that of q or k."""
    dp = dout.double().abs().norm(dim=-1).max() * inputs["v"].double().norm(dim=-1).max()
    to_input = max(inputs["q"].abs().max().item(), inputs["k"].abs().max().item()) * inputs["q"].shape[-1] ** -0.5
    return float(dp) * max(1.0, to_input)


def check(
    actual: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], rough: dict[str, torch.Tensor], terms: float
) -> None:
    """Every result is within FACTOR of the error of `rough`, the same formula in the tested dtype; `terms` is the size
    of what the gradients of the scores are differences of."""
    assert actual.keys() == truth.keys()
    for name, x in actual.items():
        expected, x = truth[name], x.double()
        assert x.shape == expected.shape, name
        finite = torch.isfinite(expected)
        assert torch.equal(torch.isfinite(x), finite), f"{name}: finite elsewhere than expected"
        assert torch.equal(x[~finite], expected[~finite]), f"{name}: infinities differ"
        if not finite.any():
            continue
        error = (x - expected)[finite].abs().max().item()
        budget = FACTOR * (rough[name] - expected)[finite].abs().max().item()
        summed = max(1.0, expected[finite].abs().max().item(), terms if name in ("dq", "dk", "dsinks") else 0.0)
        floor = FLOOR_ULPS * torch.finfo(torch.float32).eps * summed
        assert error <= budget + floor, f"{name}: error {error:.2e} beyond the budget {budget:.2e} + {floor:.2e}"
