"""The division of a sequence's rows between N ranks, and functions that shard and unshard tensors by it.

`load_balance` has two rules:

* "none": all rows are cut into N equal ranges, and rank n holds the n-th.
* "zigzag": every sequence is cut into 2N chunks, and rank n holds chunks n and 2N - 1 - n. Under a causal mask the work
  of a chunk grows with its index, so all pairs cost the same. Packed sequences are cut one by one, whatever their
  lengths, and each rank's rows are in the order of the sequences.

All ranks hold the same number of rows. If a length is no multiple of 2N, some chunks are one row longer; the ranks
with the fewest rows so far get them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
LOAD_BALANCES = ("zigzag", "none")


class Segment(NamedTuple):
    """Consecutive rows of one sequence; `sequence` is -1 for packed rows that belong to none."""

    sequence: int
    start: int  # position of the first row in its sequence
    stop: int
    row: int  # index of the first row in the unsharded tensor

    @property
    def rows(self) -> int:
        return self.stop - self.start


Segments = tuple[Segment, ...]
Offsets = tuple[int, ...]  # of the unsharded sequences, as in cu_seqlens; then the number of rows of all ranks


def process_groups(group: Group) -> tuple[dist.ProcessGroup, ...]:
    """Return the process group of each dimension: one, or two for a two-dimensional DeviceMesh.

    Raises:
        TypeError, ValueError: `group` is of another type, a mesh of more dimensions, or lacks this process.
    """
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"group must be a DeviceMesh of one or two dimensions, got {group.ndim}: name those meant")
        groups = tuple(group.get_group(dim) for dim in range(group.ndim))
    elif isinstance(group, dist.ProcessGroup):
        groups = (group,)
    else:
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None (all processes, once "
            f"torch.distributed.init_process_group has run), got {type(group).__name__}"
        )
    if any(dist.get_rank(each) < 0 for each in groups):
        raise ValueError(f"rank {dist.get_rank()} is no part of the given group")
    return groups


def rank_in(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """Return (number of ranks, own rank). Ranks are numbered with the last dimension fastest."""
    ranks, rank = 1, 0
    for group in groups:
        size = dist.get_world_size(group)
        ranks, rank = ranks * size, rank * size + dist.get_rank(group)
    return ranks, rank


def gather_shards(shard: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension. `shard` is contiguous."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    for group in reversed(groups):  # ranks are numbered with the last dimension fastest
        gathered = shard.new_empty((dist.get_world_size(group) * shard.shape[0], *shard.shape[1:]))
        gather(gathered, shard, group=group)
        shard = gathered
    return shard


def sequence_offsets(rows: int, cu_seqlens: torch.Tensor | None) -> Offsets:
    """Return the offsets of the unsharded sequences: of one that has all rows, or of the packed ones.

    Raises:
        TypeError, ValueError: cu_seqlens is no int32 vector that ascends within `rows`.
    """
    if cu_seqlens is None:
        return 0, rows, rows
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be an int32 tensor, got {getattr(cu_seqlens, 'dtype', type(cu_seqlens))}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be a vector of B + 1 offsets, got shape {tuple(cu_seqlens.shape)}")
    offsets = cu_seqlens.tolist()
    if offsets[0] < 0 or any(a > b for a, b in pairwise((*offsets, rows))):
        raise ValueError(f"cu_seqlens must ascend from 0 or more to at most {rows} rows (of all ranks), got {offsets}")
    return (*offsets, rows)


@lru_cache(maxsize=64)
def rank_segments(offsets: Offsets, ranks: int, load_balance: str) -> tuple[Segments, ...]:
    """Return each rank's segments, in the order of its rows.

    Raises:
        ValueError: the rows cannot be divided evenly, or there is no such rule.
    """
    *starts, rows = offsets
    if load_balance not in LOAD_BALANCES:
        raise ValueError(f"load_balance must be one of {', '.join(LOAD_BALANCES)}, got {load_balance!r}")
    if rows % ranks:
        raise ValueError(f"{rows} rows cannot be divided evenly between {ranks} ranks: pad them to a multiple")
    full_segments = [Segment(b, 0, stop - start, start) for b, (start, stop) in enumerate(pairwise(starts))]
    full_segments = [Segment(-1, 0, starts[0], 0), *full_segments, Segment(-1, 0, rows - starts[-1], starts[-1])]
    full_segments = [segment for segment in full_segments if segment.rows]
    cut = _zigzag if load_balance == "zigzag" else _in_order
    return tuple(tuple(segments) for segments in cut(full_segments, ranks, rows))


def _sub_segment(segment: Segment, start: int, stop: int) -> Segment:
    """Return rows [start, stop) of a segment that begins at position 0 of its sequence."""
    return Segment(segment.sequence, start, stop, segment.row + start)


def _in_order(full_segments: list[Segment], ranks: int, rows: int) -> list[list[Segment]]:
    """Return each rank's segments by the rule "none"."""
    size = rows // ranks
    by_rank: list[list[Segment]] = []
    for rank in range(ranks):
        begin, end = rank * size, (rank + 1) * size
        segments = [_sub_segment(x, max(0, begin - x.row), min(x.rows, end - x.row)) for x in full_segments]
        by_rank.append([segment for segment in segments if segment.rows > 0])
    return by_rank


def _zigzag(full_segments: list[Segment], ranks: int, rows: int) -> list[list[Segment]]:
    """Return each rank's segments by the rule "zigzag"."""
    by_rank: list[list[Segment]] = [[] for _ in range(ranks)]
    rows_per_rank = [0] * ranks
    for segment in full_segments:
        size, remainder = divmod(segment.rows, 2 * ranks)
        longer = [0] * ranks  # chunks with an extra row, 0 to 2; the ranks' totals differ by one row at most
        fewest_first = sorted(range(ranks), key=rows_per_rank.__getitem__)
        for n in range(remainder):
            longer[fewest_first[n % ranks]] += 1
        start = 0
        for chunk in range(2 * ranks):
            rank = min(chunk, 2 * ranks - 1 - chunk)
            stop = start + size + (longer[rank] > (0 if chunk < ranks else 1))
            if stop > start:
                by_rank[rank].append(_sub_segment(segment, start, stop))
            start = stop
        rows_per_rank = [h + 2 * size + extra for h, extra in zip(rows_per_rank, longer, strict=True)]
    return by_rank


def joined(several: Sequence[Segments]) -> Segments:
    """Return the segments of several ranks, sorted by row, with adjacent ones joined."""
    joined_segments: list[Segment] = []
    for segment in sorted((s for segments in several for s in segments), key=lambda s: s.row):
        last = joined_segments[-1] if joined_segments else None
        if last and last.row + last.rows == segment.row and last.sequence == segment.sequence:
            joined_segments[-1] = last._replace(stop=segment.stop)
        else:
            joined_segments.append(segment)
    return tuple(joined_segments)


def ranges(bounds: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return the integers of some ranges [first, last) one after another, int64 on the CPU."""
    return torch.cat([torch.arange(0, device="cpu"), *(torch.arange(*pair, device="cpu") for pair in bounds)])


def _local_segments(rows: int, group: Group, load_balance: str, cu_seqlens: torch.Tensor | None) -> Segments:
    ranks, rank = rank_in(process_groups(group))
    return rank_segments(sequence_offsets(rows, cu_seqlens), ranks, load_balance)[rank]


def shard_sequence(
    x: torch.Tensor,
    group: Group = None,
    dim: int = 0,
    *,
    load_balance: str = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's rows of a tensor that every rank has in full. Differentiable.

    Args:
        x: any tensor: tokens, labels, embeddings, q.
        group: a process group, a DeviceMesh of one or two dimensions, or None: all processes.
        dim: the dimension of the sequence.
        load_balance: "zigzag" or "none" (see the module). Pass the same to `context_parallel_attention`.
        cu_seqlens: (B + 1,) int32 offsets of packed sequences, over the whole tensor.

    Returns:
        This rank's rows, contiguous; every rank gets the same number.

    Raises:
        ValueError, TypeError: the rows cannot be divided evenly, or an argument does not fit.
    """
    segments = _local_segments(x.shape[dim], group, load_balance, cu_seqlens)
    return torch.cat([x.narrow(dim, s.row, s.rows) for s in segments] or [x.narrow(dim, 0, 0)], dim)


def unshard_sequence(
    x: torch.Tensor,
    group: Group = None,
    dim: int = 0,
    *,
    load_balance: str = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the full tensor, on every rank, from each rank's rows; the inverse of `shard_sequence`.

    All ranks must call it. It is no part of the autograd graph.

    Raises:
        ValueError: x requires a gradient; else as for `shard_sequence`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("unshard_sequence is no part of the autograd graph: detach x, or compute on what a rank holds")
    groups = process_groups(group)
    ranks, _ = rank_in(groups)
    layout = rank_segments(sequence_offsets(x.shape[dim] * ranks, cu_seqlens), ranks, load_balance)
    shards = gather_shards(x.movedim(dim, 0).contiguous(), groups)
    full = torch.empty_like(shards)
    full[ranges((s.row, s.row + s.rows) for segments in layout for s in segments).to(x.device)] = shards
    return full.movedim(0, dim)


def shard_positions(
    rows: int,
    group: Group = None,
    *,
    load_balance: str = "zigzag",
    cu_seqlens: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the position in its sequence of each of this rank's rows, (rows / ranks,) int64: for rotary embedding.

    `rows` is the number of rows of all ranks. Rows before the first and after the last packed sequence count from 0
    each. Raises as `shard_sequence`.
    """
    segments = _local_segments(rows, group, load_balance, cu_seqlens)
    return ranges((s.start, s.stop) for s in segments).to(device)
