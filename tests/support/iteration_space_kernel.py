"""The tile of a position in the iteration space, as `stream_k.py` computes it: without keys, so of any length."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention import stream_k
from diyfa.backends.cuda.attention.decode import kernel_constants
from diyfa.backends.cuda.attention.decode_configs import DecodeConfig
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.problem import KVCacheProblem, Launch

divide_iteration_space = stream_k.iteration_space
find_tile_start = stream_k.find_tile_start
tile_at = stream_k.tile_at


@triton.jit
def _positions_kernel(
    positions_ptr, line_ptr, tiles_ptr, cu_seqlens_q_ptr, seqlens_ptr, n_shares, batch, blocks_m, head_rounds, seqlen_q,
    total_q, capacity, group, c: tl.constexpr,
):  # fmt: skip
    lengths = ((cu_seqlens_q_ptr, None, seqlens_ptr, None), (seqlen_q, total_q, 0, 0, 0, capacity))
    mask = (group, -1, -1)
    length, share, cost, first_counts = divide_iteration_space(n_shares, batch, blocks_m, head_rounds, lengths, mask, c)
    tile_cost, min_tile_work = cost
    position = tl.load(positions_ptr + tl.program_id(0)).to(length.dtype)
    tile, begin = tile_at(position, first_counts, cost, batch, blocks_m, head_rounds, lengths, mask, c)
    tl.store(line_ptr, length.to(tl.int64))
    tl.store(line_ptr + 1, share.to(tl.int64))
    tl.store(line_ptr + 2, tile_cost.to(tl.int64))
    tl.store(line_ptr + 3, min_tile_work + tl.zeros([], tl.int64))
    same_begin = begin
    if c.ONE_SCAN:
        same_begin = find_tile_start(tile, first_counts, cost, length, head_rounds, c)
    tl.store(tiles_ptr + 3 * tl.program_id(0), tile.to(tl.int64))
    tl.store(tiles_ptr + 3 * tl.program_id(0) + 1, begin.to(tl.int64))
    tl.store(tiles_ptr + 3 * tl.program_id(0) + 2, same_begin.to(tl.int64))


class Line(NamedTuple):
    """The iteration space of a call, and the tiles at some positions."""

    length: int
    share: int
    tile_cost: int
    min_tile_work: int  # 0 if shares need not have whole tiles
    tiles: list[tuple[int, int, int]]  # for each position: the tile; where it begins, computed in two ways


def iteration_space(
    problem: KVCacheProblem,
    config: DecodeConfig,
    lengths: list[int],
    offsets: list[int] | None,
    n_shares: int,
    positions: list[int],
    device: str,
) -> Line:
    """The line of sequences with these numbers of keys, whose queries begin at `offsets`, one KV head at a time."""
    seqlens, at = torch.tensor(lengths, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
    line, tiles = torch.zeros(4, dtype=torch.int64), torch.zeros(len(positions), 3, dtype=torch.int64)
    cu_seqlens_q = None if offsets is None else torch.tensor(offsets, dtype=torch.int32).to(device)
    line, tiles = line.to(device), tiles.to(device)
    arguments = {
        "positions_ptr": at.to(device), "line_ptr": line, "tiles_ptr": tiles, "cu_seqlens_q_ptr": cu_seqlens_q,
        "seqlens_ptr": seqlens.to(device), "n_shares": n_shares, "batch": problem.batch,
        "blocks_m": stream_k.tiles_per_sequence(problem, config), "head_rounds": problem.heads_kv,
        "seqlen_q": problem.seqlen_q, "total_q": problem.total_q, "capacity": problem.capacity,
        "group": problem.heads_q // problem.heads_kv,
    }  # fmt: skip
    constants = {"c": kernel_constants(problem, config)}
    launch_kernel(Launch(_positions_kernel, len(positions), arguments, constants, {"num_warps": 1}))
    return Line(*line.tolist(), [(tile, begin, same) for tile, begin, same in tiles.tolist()])
