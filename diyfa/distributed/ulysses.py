"""Ulysses: an all-to-all gives each rank all rows of some heads, and another brings the results back (Jacobs et al.
2023, arXiv:2309.14509).

A rank has its own rows with all heads (a shard), or all rows with its own heads:

    q, k, v         scatter_heads:    own rows -> own heads     dq, dk, dv   gather_gradients: own heads -> own rows
    out, lse        gather_heads:     own heads -> own rows     dout, dlse   scatter_results:  own rows -> own heads

If the number of ranks does not divide that of KV heads, each KV head is repeated until it does. The least common
multiple of KV heads and ranks is enough; it divides the query heads. Tensors with a number for each query head, such as
sinks, are not exchanged: `local_heads` returns those of a rank's heads, and `with_zero_heads` inverts it for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.sharding import Segments, ranges


class _Order(NamedTuple):
    """Indices (rows,) int64 that reorder all rows between the order of the sequence and that of concatenated shards."""

    to_sequence: torch.Tensor  # for each row of the sequence, its row among the concatenated shards
    to_shards: torch.Tensor  # the inverse


@lru_cache(maxsize=8)
def _row_order(segments_by_rank: tuple[Segments, ...], device: torch.device) -> _Order | None:
    """Return the order of the rows, or None if the concatenated shards are in the sequence's order."""
    by_shard, shard_row = [], 0  # (row in the sequence, row among the shards, number of rows) of each segment
    for segment in (segment for segments in segments_by_rank for segment in segments):
        by_shard.append((segment.row, shard_row, segment.rows))
        shard_row += segment.rows
    by_sequence = sorted(by_shard)
    if by_sequence == by_shard:
        return None
    # In a mesh the ranks of one group have only some rows of the sequence, so positions are counted anew.
    position_of, position = {}, 0
    for row, _, number in by_sequence:
        position_of[row] = position
        position += number
    to_sequence = ranges((row, row + number) for _, row, number in by_sequence)
    to_shards = ranges((position_of[row], position_of[row] + number) for row, _, number in by_shard)
    return _Order(to_sequence.to(device), to_shards.to(device))


class _Exchange(NamedTuple):
    """An exchange between (all heads, own rows) and (own heads, all rows).

    `dims`: for each tensor, its dimension of rows and its dimension of heads.
    """

    group: dist.ProcessGroup
    order: _Order | None
    dims: tuple[tuple[int, int], ...]

    def to_own_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        exchanged = self._exchanged(tensors, [(heads, rows) for rows, heads in self.dims])
        if self.order is None:
            return exchanged
        return [x.index_select(rows, self.order.to_sequence) for x, (rows, _) in zip(exchanged, self.dims, strict=True)]

    def to_own_rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.order is not None:
            pairs = zip(tensors, self.dims, strict=True)
            tensors = [x.index_select(rows, self.order.to_shards) for x, (rows, _) in pairs]
        return self._exchanged(tensors, list(self.dims))

    def _exchanged(self, tensors: Sequence[torch.Tensor], dims: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Cut each tensor along one dimension, send piece n to rank n, and join the received pieces along another.

        `dims`: for each tensor, the dimension to cut and the dimension to join.
        """
        ranks = dist.get_world_size(self.group)
        results = []  # (index in `tensors`, result)
        for dtype in dict.fromkeys(x.dtype for x in tensors):  # one message for tensors of one dtype
            same_dtype = [n for n, x in enumerate(tensors) if x.dtype == dtype]
            cuts, joins = ([dims[n][i] for n in same_dtype] for i in (0, 1))
            pieces = [tensors[n].unflatten(x, (ranks, -1)).movedim(x, 0) for n, x in zip(same_dtype, cuts, strict=True)]
            sent = torch.cat([x.reshape(ranks, -1) for x in pieces], 1)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            sizes = [x[0].numel() for x in pieces]
            for n, x, piece, join in zip(same_dtype, received.split(sizes, 1), pieces, joins, strict=True):
                results.append((n, x.reshape(piece.shape).movedim(0, join).flatten(join, join + 1)))
        return [x for _, x in sorted(results, key=lambda pair: pair[0])]


def refuses(heads: int, ranks: int) -> str | None:
    """Return why the heads cannot be divided, or None."""
    return f"{heads} query heads cannot be divided between {ranks} ranks" if heads % ranks else None


def kv_head_repeats(heads_kv: int, ranks: int) -> int:
    """Return how often each KV head is sent, so that all ranks get the same number."""
    return math.lcm(heads_kv, ranks) // heads_kv


class Ulysses(NamedTuple):
    """The exchanges of one call, without autograd."""

    group: dist.ProcessGroup
    segments_by_rank: tuple[Segments, ...]  # the segments of each rank of the group
    layout: str
    repeats: int  # of each KV head

    def scatter_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Exchange q, k and v: from all heads of own rows to own heads of all rows, in the sequence's order."""
        if self.repeats > 1:
            k, v = (x.repeat_interleave(self.repeats, head_dim(self.layout)) for x in (k, v))
        return self._exchange(q, k, v).to_own_heads((q, k, v))

    def gather_gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> list[torch.Tensor]:
        """Exchange the gradients of `scatter_heads`' results back; sum those of repeated heads."""
        dq, dk, dv = self._exchange(dq, dk, dv).to_own_rows((dq, dk, dv))
        if self.repeats > 1:
            heads = head_dim(self.layout)
            dk, dv = (x.unflatten(heads, (-1, self.repeats)).sum(heads + 1) for x in (dk, dv))
        return [dq, dk, dv]

    def gather_heads(self, out: torch.Tensor, lse: torch.Tensor | None) -> list[Any]:
        """Exchange out, and lse if given, from own heads of all rows to all heads of own rows."""
        results = (out,) if lse is None else (out, lse)
        return self._padded(self._exchange(*results).to_own_rows(results))

    def scatter_results(self, dout: torch.Tensor, dlse: torch.Tensor | None) -> list[Any]:
        """Exchange the gradients of `gather_heads`' results back."""
        gradients = (dout,) if dlse is None else (dout, dlse)
        return self._padded(self._exchange(*gradients).to_own_heads(gradients))

    def _exchange(self, *tensors: torch.Tensor) -> _Exchange:
        """Return the exchange of tensors that have the first one's dimensions, or are log-sum-exps without features."""
        rows, heads = row_dim(self.layout), head_dim(self.layout)
        features = tensors[0].dim()
        dims = tuple((rows, heads) if x.dim() == features else (x.dim() - 1, x.dim() - 2) for x in tensors)
        return _Exchange(self.group, _row_order(self.segments_by_rank, tensors[0].device), dims)

    @staticmethod
    def _padded(tensors: list[torch.Tensor]) -> list[Any]:
        """Return a pair of tensors, the second None if there is only one."""
        return [*tensors, None] if len(tensors) == 1 else tensors

    def local_heads(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's heads of a tensor whose last dimension is the query heads."""
        if x is None:
            return None
        size = x.shape[-1] // dist.get_world_size(self.group)
        return x.narrow(-1, dist.get_rank(self.group) * size, size)

    def with_zero_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Invert `local_heads`, with zeros for the heads of other ranks."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return torch.cat([x if n == rank else torch.zeros_like(x) for n in range(ranks)], -1)
