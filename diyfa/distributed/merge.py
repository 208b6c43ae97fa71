"""Attention over some keys and attention over others make attention over all of them, by their log-sum-exp.

With weights w = sigmoid(lse_b - lse_a) the joint output is (1 - w) a + w b and the joint log-sum-exp logaddexp(lse_a,
lse_b), which is how split-KV and FlashAttention's blocks are joined, too. Outputs to be joined come in float32 (float64
of float64 inputs): rounded ones would not cancel where the whole one does. The first that covers all rows becomes the
sum, and each other one is added to it in place; nothing else is read or written, until the sum is rounded.
"""

from __future__ import annotations

import torch

from diyfa.ops import Pair, empty_lse
from diyfa.problem import LAYOUTS, VARLEN, dtype_name, empty_output

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


class Merged:
    """The output of queries shaped like `q`, from outputs over disjoint keys, each for some of the rows."""

    def __init__(self, q: torch.Tensor, head_dim_v: int, layout: str) -> None:
        self.q, self.head_dim_v, self.layout, self.dim = q, head_dim_v, layout, row_dim(layout)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None  # -inf where no key was seen yet

    def add(self, first: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rows from `first` on, of tensors that nobody else has; a log-sum-exp of +inf says that a row saw no key."""
        lse = lse.masked_fill(lse == INF, -INF)
        if self.out is None and out.shape[self.dim] == self.q.shape[self.dim]:
            self.out, self.lse = out, lse
            return
        if self.out is None or self.lse is None:
            self.out = empty_output(self.q, self.head_dim_v, dtype_name(out.dtype)).zero_()
            self.lse = empty_lse(self.q, self.layout).fill_(-INF)
        own_out = self.out.narrow(self.dim, first, out.shape[self.dim])
        own_lse = self.lse.narrow(-1, first, out.shape[self.dim])
        weight = torch.sigmoid(lse - own_lse).masked_fill_(lse == -INF, 0.0)
        own_out.lerp_(out, as_rows(weight, self.layout))
        own_lse.copy_(torch.logaddexp(own_lse, lse))

    def result(self) -> Pair:
        """(out in q's dtype, log-sum-exp with +inf for rows that saw no key)."""
        if self.out is None or self.lse is None:
            return empty_output(self.q, self.head_dim_v).zero_(), empty_lse(self.q, self.layout).fill_(INF)
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == -INF, INF)
