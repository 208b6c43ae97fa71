"""Ulysses: an all-to-all gives each rank all rows of some heads, and another brings the results back (Jacobs et al.
2023, arXiv:2309.14509).

Where there are fewer key/value heads than ranks, or they do not divide, each is repeated just so often that they do:
up to the least common multiple, which the query heads are a multiple of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.sharding import Segments


class _Order(NamedTuple):
    """Of the rows that ranks send one after another: which comes where in the sequence, and the opposite."""

    sequence: torch.Tensor
    ranks: torch.Tensor


@lru_cache(maxsize=8)
def _order_of(held: tuple[Segments, ...], device: torch.device) -> _Order | None:
    """None where the ranks' rows follow each other already."""
    rows, first = [], 0  # (row in the sequence, row as sent, number) of each segment
    for segment in (segment for segments in held for segment in segments):
        rows.append((segment.row, first, segment.rows))
        first += segment.rows
    ascending = sorted(rows)
    if ascending == rows:
        return None
    found = [torch.arange(0), *(torch.arange(sent, sent + number) for _, sent, number in ascending)]
    where, first = {}, 0
    for row, _, number in ascending:
        where[row] = first
        first += number
    back = [torch.arange(0), *(torch.arange(where[row], where[row] + number) for row, _, number in rows)]
    return _Order(*(torch.cat(x).to(device) for x in (found, back)))


class _Exchange(NamedTuple):
    """Between all heads of own rows and some heads of all rows; `dims` of each tensor are those of rows and heads."""

    group: dist.ProcessGroup
    order: _Order | None
    dims: tuple[tuple[int, int], ...]

    def gather_rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = self._exchanged(tensors, [(heads, rows) for rows, heads in self.dims])
        if self.order is None:
            return found
        return [x.index_select(rows, self.order.sequence) for x, (rows, _) in zip(found, self.dims, strict=True)]

    def gather_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.order is not None:
            pairs = zip(tensors, self.dims, strict=True)
            tensors = [x.index_select(rows, self.order.ranks) for x, (rows, _) in pairs]
        return self._exchanged(tensors, list(self.dims))

    def _exchanged(self, tensors: Sequence[torch.Tensor], dims: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Cut along the first of each tensor's `dims`, one part for each rank, and join what comes along the second."""
        ranks = dist.get_world_size(self.group)
        arrived = []
        for dtype in dict.fromkeys(x.dtype for x in tensors):  # one message for tensors of one dtype
            alike = [n for n, x in enumerate(tensors) if x.dtype == dtype]
            parts = [tensors[n].unflatten(dims[n][0], (ranks, -1)).movedim(dims[n][0], 0) for n in alike]
            sent = torch.cat([x.reshape(ranks, -1) for x in parts], 1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            sizes = [x[0].numel() for x in parts]
            for n, x, part in zip(alike, received.split(sizes, 1), parts, strict=True):
                whole = x.reshape(part.shape).movedim(0, dims[n][1])
                arrived.append((n, whole.flatten(dims[n][1], dims[n][1] + 1)))
        return [x for _, x in sorted(arrived, key=lambda pair: pair[0])]


class _Gather(torch.autograd.Function):
    """One direction of an exchange; its gradient is the other."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, rows: bool, *tensors: Any) -> Any:
        ctx.exchange, ctx.rows = exchange, rows
        return tuple(exchange.gather_rows(tensors) if rows else exchange.gather_heads(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        gather = ctx.exchange.gather_heads if ctx.rows else ctx.exchange.gather_rows
        return (None, None, *gather(gradients))


def refuses(heads: int, ranks: int) -> str | None:
    """Why the heads cannot be divided, or None."""
    return f"{heads} query heads cannot be divided between {ranks} ranks" if heads % ranks else None


def repeats_of(heads_kv: int, ranks: int) -> int:
    """How often each key/value head is sent, so that every rank gets as many."""
    return math.lcm(heads_kv, ranks) // heads_kv


class Ulysses(NamedTuple):
    """What the exchanges of one call need: `held` are the segments of this group's ranks."""

    group: dist.ProcessGroup
    held: tuple[Segments, ...]
    layout: str

    def scatter_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v of own rows -> of all rows in order, with this rank's heads; differentiable."""
        rows, heads = row_dim(self.layout), head_dim(self.layout)
        repeats = repeats_of(k.shape[heads], dist.get_world_size(self.group))
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, heads) for x in (k, v))
        exchange = _Exchange(self.group, _order_of(self.held, q.device), ((rows, heads),) * 3)
        return _Gather.apply(exchange, True, q, k, v)

    def gather_heads(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and the log-sum-exp where it is wanted, the other way."""
        results = [(out, (row_dim(self.layout), head_dim(self.layout)))]
        if lse is not None:
            results.append((lse, (lse.dim() - 1, lse.dim() - 2)))
        tensors, dims = zip(*results, strict=True)
        found = _Gather.apply(_Exchange(self.group, _order_of(self.held, out.device), dims), False, *tensors)
        return found[0], found[1] if lse is not None else None

    def scatter_results(self, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of what `gather_heads` returns, the opposite way; without autograd."""
        dims = ((row_dim(self.layout), head_dim(self.layout)), (dlse.dim() - 1, dlse.dim() - 2))
        return _Exchange(self.group, _order_of(self.held, dout.device), dims).gather_rows((dout, dlse))

    def gather_gradients(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of what `scatter_heads` returns, the opposite way, of keys like `k`; without autograd."""
        rows, heads = row_dim(self.layout), head_dim(self.layout)
        dq, dk, dv = _Exchange(self.group, _order_of(self.held, dq.device), ((rows, heads),) * 3).gather_heads(
            (dq, dk, dv)
        )
        if dk.shape[heads] > k.shape[heads]:
            dk, dv = (x.unflatten(heads, (k.shape[heads], -1)).sum(heads + 1) for x in (dk, dv))
        return dq, dk, dv

    def of_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The opposite of `own_heads`, with zeros for the heads of other ranks."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return torch.cat([x if n == rank else torch.zeros_like(x) for n in range(ranks)], -1)

    def own_heads(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of what has an entry for each query head, in its last dimension."""
        if x is None:
            return None
        size = x.shape[-1] // dist.get_world_size(self.group)
        return x.narrow(-1, dist.get_rank(self.group) * size, size)
