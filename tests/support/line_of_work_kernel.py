"""Where a place of the line of work lies, as the kernels over a KV cache see it: without keys, and so of any length."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.decode import _line_of_work, _place_of, _tile_at, constants_of
from diyfa.backends.cuda.attention.decode_configs import DecodeConfig, row_blocks
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.problem import KVCacheProblem, Launch


@triton.jit
def _places_kernel(
    places_ptr, line_ptr, tiles_ptr, cu_seqlens_q_ptr, seqlens_ptr, sharers, batch, blocks_m, turns, seqlen_q, total_q,
    capacity, group, c: tl.constexpr,
):  # fmt: skip
    lengths = ((cu_seqlens_q_ptr, None, seqlens_ptr, None), (seqlen_q, total_q, 0, 0, 0, capacity))
    mask = (group, -1, -1)
    total, share, cost, first_counts = _line_of_work(sharers, batch, blocks_m, turns, lengths, mask, c)
    tile_cost, least = cost
    place = tl.load(places_ptr + tl.program_id(0)).to(total.dtype)
    tile, before = _tile_at(place, first_counts, cost, batch, blocks_m, turns, lengths, mask, c)
    tl.store(line_ptr, total.to(tl.int64))
    tl.store(line_ptr + 1, share.to(tl.int64))
    tl.store(line_ptr + 2, tile_cost.to(tl.int64))
    tl.store(line_ptr + 3, least + tl.zeros([], tl.int64))
    begins = before
    if c.ONE_SCAN:
        begins = _place_of(tile, first_counts, cost, total, turns, c)
    tl.store(tiles_ptr + 3 * tl.program_id(0), tile.to(tl.int64))
    tl.store(tiles_ptr + 3 * tl.program_id(0) + 1, before.to(tl.int64))
    tl.store(tiles_ptr + 3 * tl.program_id(0) + 2, begins.to(tl.int64))


class Line(NamedTuple):
    """The line of work of a call."""

    length: int
    share: int
    tile_cost: int
    least: int  # of a tile, where programs have whole ones
    tiles: list[tuple[int, int, int]]  # that each of the places lies in, and where that begins, found in two ways


def line_of_work(
    problem: KVCacheProblem,
    config: DecodeConfig,
    lengths: list[int],
    offsets: list[int] | None,
    sharers: int,
    places: list[int],
    device: str,
) -> Line:
    """What the kernels make of sequences with so many keys and of queries that begin at `offsets`; heads take turns."""
    seqlens, at = torch.tensor(lengths, dtype=torch.int32), torch.tensor(places, dtype=torch.int64)
    line, tiles = torch.zeros(4, dtype=torch.int64), torch.zeros(len(places), 3, dtype=torch.int64)
    cu_seqlens_q = None if offsets is None else torch.tensor(offsets, dtype=torch.int32).to(device)
    line, tiles = line.to(device), tiles.to(device)
    arguments = {
        "places_ptr": at.to(device),
        "line_ptr": line,
        "tiles_ptr": tiles,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "seqlens_ptr": seqlens.to(device),
        "sharers": sharers,
        "batch": problem.batch,
        "blocks_m": row_blocks(problem, config),
        "turns": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "total_q": problem.total_q,
        "capacity": problem.capacity,
        "group": problem.heads_q // problem.heads_kv,
    }
    constants = {"c": constants_of(problem, config)}
    launch_kernel(Launch(_places_kernel, len(places), arguments, constants, {"num_warps": 1}))
    return Line(*line.tolist(), [(tile, before, begins) for tile, before, begins in tiles.tolist()])
