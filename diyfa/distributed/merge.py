"""The merge of attention over disjoint sets of keys into attention over all of them, by their log-sum-exp.

With the weight w = sigmoid(lse_b - lse_a) the joint output is (1 - w) a + w b. The joint log-sum-exp is
logaddexp(lse_a, lse_b). Split-KV combines its splits in the same way. Outputs come in float32 (float64 for float64
inputs): outputs may cancel in the sum, the errors of rounded ones would not. A first output that covers all rows
becomes the accumulator. The others are merged into it in place, and it is rounded once at the end.
"""

from __future__ import annotations

import torch

from diyfa.ops import Pair, empty_lse
from diyfa.problem import LAYOUTS, VARLEN, as_bhsd, dtype_name, empty_output
from diyfa.registry import resolve_backend

INF = float("inf")


def row_dim(layout: str) -> int:
    """Return the dimension of the sequence in q, k, v and the output. In the log-sum-exp it is the last."""
    return 0 if layout == VARLEN else LAYOUTS[layout][2]


def head_dim(layout: str) -> int:
    """Return the dimension of the heads in q, k, v and the output. In the log-sum-exp it is the last but one."""
    return 1 if layout == VARLEN else LAYOUTS[layout][1]


def as_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x (B, H, S) or (H, T) in the output's order of dimensions, with a last dimension of 1."""
    return (x if layout == "bhsd" else x.transpose(-1, -2))[..., None]


def merge(out: torch.Tensor, lse: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Merge `partial_out` (B, H, S, Dv) and `partial_lse` (B, H, S) into `out` and `lse`, in place.

    A log-sum-exp of +inf marks a row that saw no key; its output is 0.
    """
    seen, partial_seen = (x.masked_fill(x == INF, -INF) for x in (lse, partial_lse))
    weight = torch.sigmoid(seen - partial_seen).masked_fill_(seen == -INF, 0.0)
    partial_weight = torch.sigmoid(partial_seen - seen).masked_fill_(partial_seen == -INF, 0.0)
    out.mul_(weight[..., None]).addcmul_(partial_out, partial_weight[..., None])  # lerp_ subtracts, which overflows
    joint = torch.logaddexp(seen, partial_seen)
    lse.copy_(joint.masked_fill_(joint == -INF, INF))


class Merged:
    """The running output of queries shaped like `q`: merges outputs over disjoint keys, each of a range of rows."""

    def __init__(self, q: torch.Tensor, head_dim_v: int, layout: str, backend: str = "") -> None:
        self.q, self.head_dim_v, self.layout, self.dim = q, head_dim_v, layout, row_dim(layout)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None  # +inf where no key was seen yet
        self.merge = getattr(resolve_backend(q.device, backend), "merge", merge)

    def add(self, first_row: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge `out` and `lse` into the rows from `first_row` on. This object may keep and overwrite both tensors.

        A log-sum-exp of +inf marks a row that saw no key.
        """
        if self.out is None and out.shape[self.dim] == self.q.shape[self.dim]:
            self.out, self.lse = out, lse
            return
        if self.out is None or self.lse is None:
            self.out = empty_output(self.q, self.head_dim_v, dtype_name(out.dtype)).zero_()
            self.lse = empty_lse(self.q, self.layout).fill_(INF)
        out_rows = self.out.narrow(self.dim, first_row, out.shape[self.dim])
        lse_rows = self.lse.narrow(-1, first_row, out.shape[self.dim])
        self.merge(*self._by_head(out_rows, lse_rows), *self._by_head(out, lse))

    def _by_head(self, out: torch.Tensor, lse: torch.Tensor) -> Pair:
        """Return views (B, H, S, Dv) and (B, H, S)."""
        if self.layout == VARLEN:
            return out.transpose(0, 1)[None], lse[None]
        return as_bhsd(out, self.layout), lse

    def result(self) -> Pair:
        """Return out in q's dtype, and the log-sum-exp, +inf for rows that saw no key."""
        if self.out is None or self.lse is None:
            return empty_output(self.q, self.head_dim_v).zero_(), empty_lse(self.q, self.layout).fill_(INF)
        return self.out.to(self.q.dtype), self.lse
