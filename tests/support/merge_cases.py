"""Outputs over some keys, to be joined with outputs over others, and what that must give."""

from __future__ import annotations

from typing import NamedTuple

import torch

INF = float("inf")
LSES = (0.0, 3.0, -40.0, 1e4, -1e4, 3e38, -3e38, INF, float("nan"))  # INF: no key


class MergeCase(NamedTuple):
    layout: str
    rows: int
    head_dim: int
    first: int = 0  # row of the whole that the part begins with
    after: int = 0  # rows of the whole behind it
    heads: int = 3
    batch: int = 2

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, lse, part, part_lse) of the layout: every pair of `LSES` and random ones; rows outside hold NaN."""
        generator = torch.Generator().manual_seed(0)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        batch = 1 if self.layout == "thd" else self.batch
        all_rows = self.first + self.rows + self.after
        out, partial_out = (
            some(batch, self.heads, all_rows, self.head_dim),
            some(batch, self.heads, self.rows, self.head_dim),
        )
        lse, partial_lse = 5 * some(batch, self.heads, all_rows), 5 * some(batch, self.heads, self.rows)
        merged_lse = lse[..., self.first : self.first + self.rows]
        for i, (a, b) in enumerate((a, b) for a in LSES for b in LSES):
            index = i % batch, i // batch % self.heads, i // batch // self.heads
            if index[2] < self.rows:
                merged_lse[index], partial_lse[index] = a, b
        for x, at in ((out[:, :, self.first : self.first + self.rows], merged_lse), (partial_out, partial_lse)):
            x[at == INF], x[at.isnan()] = 0, float("nan")
        for x in (out, lse):
            x[:, :, : self.first] = x[:, :, self.first + self.rows :] = float("nan")
        return self._laid_out(out), self._lse(lse), self._laid_out(partial_out), self._lse(partial_lse)

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "thd":
            return x[0].transpose(0, 1).contiguous()
        return x if self.layout == "bhsd" else x.transpose(1, 2).contiguous()

    def _lse(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] if self.layout == "thd" else x


MERGE_CASES = {
    "bhsd": MergeCase("bhsd", 70, 128),
    "second half": MergeCase("bhsd", 64, 64, first=64),
    "bshd in the middle": MergeCase("bshd", 33, 40, first=5, after=3),
    "packed": MergeCase("thd", 41, 80, first=9),
    "wide": MergeCase("bhsd", 19, 512, after=1),
    "narrow": MergeCase("bshd", 15, 8),
    "one row": MergeCase("bhsd", 1, 192, batch=1, heads=1, first=1),
}


def joined(
    out: torch.Tensor, lse: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, of rows (..., D) and (...)."""
    a, b = (x.double().masked_fill(x == INF, -INF) for x in (lse, partial_lse))
    none = (a == -INF) & (b == -INF)
    weights = torch.stack((a, b)).softmax(0).masked_fill(none, 0.0)
    total = weights[0, ..., None] * out.double() + weights[1, ..., None] * partial_out.double()
    return total, torch.logaddexp(a, b).masked_fill(none, INF)
