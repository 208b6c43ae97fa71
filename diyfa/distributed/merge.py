"""Attention over some keys and attention over others make attention over all of them, by their log-sum-exp.

With weights w = sigmoid(lse_b - lse_a) the joint output is (1 - w) a + w b and the joint log-sum-exp logaddexp(lse_a,
lse_b), which is how split-KV and FlashAttention's blocks are joined, too. Outputs to be joined come in float32 (float64
of float64 inputs): rounded ones would not cancel where the whole one does. The first that covers all rows becomes the
sum, and each other one is added to it in place; nothing else is read or written, until the sum is rounded.
"""

from __future__ import annotations

import torch

from diyfa.ops import Pair, empty_lse
from diyfa.problem import LAYOUTS, VARLEN, as_bhsd, dtype_name, empty_output
from diyfa.registry import resolve_backend

INF = float("inf")


def row_dim(layout: str) -> int:
    """The dimension of the sequence in q, k, v and the output; that of the log-sum-exp is its last."""
    return 0 if layout == VARLEN else LAYOUTS[layout][2]


def head_dim(layout: str) -> int:
    """The dimension of the heads in q, k, v and the output; that of the log-sum-exp is the one before its rows."""
    return 1 if layout == VARLEN else LAYOUTS[layout][1]


def as_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(B, H, S) or (H, T) as a factor of the output."""
    return (x if layout == "bhsd" else x.transpose(-1, -2))[..., None]


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """`out` (B, H, S, Dv) and `lse` (B, H, S) become those over their own keys and the part's, in place; a log-sum-exp
    of +inf says that a row saw no key, and its output is 0."""
    seen, part_seen = (x.masked_fill(x == INF, -INF) for x in (lse, part_lse))
    weight = torch.sigmoid(seen - part_seen).masked_fill_(seen == -INF, 0.0)
    part_weight = torch.sigmoid(part_seen - seen).masked_fill_(part_seen == -INF, 0.0)
    out.mul_(weight[..., None]).addcmul_(part, part_weight[..., None])  # lerp_ subtracts, which overflows
    joint = torch.logaddexp(seen, part_seen)
    lse.copy_(joint.masked_fill_(joint == -INF, INF))


class Merged:
    """The output of queries shaped like `q`, from outputs over disjoint keys, each for some of the rows."""

    def __init__(self, q: torch.Tensor, head_dim_v: int, layout: str, backend: str = "") -> None:
        self.q, self.head_dim_v, self.layout, self.dim = q, head_dim_v, layout, row_dim(layout)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None  # +inf where no key was seen yet
        self.merge = getattr(resolve_backend(q.device, backend), "merge", merge)

    def add(self, first: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rows from `first` on, of tensors that nobody else has; a log-sum-exp of +inf says that a row saw no key."""
        if self.out is None and out.shape[self.dim] == self.q.shape[self.dim]:
            self.out, self.lse = out, lse
            return
        if self.out is None or self.lse is None:
            self.out = empty_output(self.q, self.head_dim_v, dtype_name(out.dtype)).zero_()
            self.lse = empty_lse(self.q, self.layout).fill_(INF)
        own_out = self.out.narrow(self.dim, first, out.shape[self.dim])
        own_lse = self.lse.narrow(-1, first, out.shape[self.dim])
        self.merge(*self._by_head(own_out, own_lse), *self._by_head(out, lse))

    def _by_head(self, out: torch.Tensor, lse: torch.Tensor) -> Pair:
        """As (B, H, S, Dv) and (B, H, S)."""
        if self.layout == VARLEN:
            return out.transpose(0, 1)[None], lse[None]
        return as_bhsd(out, self.layout), lse

    def result(self) -> Pair:
        """(out in q's dtype, log-sum-exp with +inf for rows that saw no key)."""
        if self.out is None or self.lse is None:
            return empty_output(self.q, self.head_dim_v).zero_(), empty_lse(self.q, self.layout).fill_(INF)
        return self.out.to(self.q.dtype), self.lse
