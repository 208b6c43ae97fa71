"""The schedule of the kernels over a KV cache: which program attends to which blocks of keys, and the workspace.

**Stream-K** (Osama et al. 2023, arXiv:2301.03598). A tile is BLOCK_M rows of one sequence. The blocks of keys of all
tiles form one linear iteration space, the line, tile after tile:

    line      |        tile 0        | tile 1 |           tile 2            |
    shares    |     share 0     |     share 1     |     share 2     | share 3 |

The line is cut into `n_shares` equal shares, so ragged lengths are as balanced as equal ones. Lengths lie on the
device, so each program adds up the line itself. Positions and lengths on the line count blocks, plus TILE_COST for each
tile if shares are long; short tiles may be lengthened to min_tile_work (`divide_work`). A share belongs to
`heads_in_parallel` programs, one for each of as many KV heads. If there are more KV heads, a tile lies on the line
`head_rounds` times in a row, each time for the next `heads_in_parallel` heads.

The blocks of one tile and one head that a share contains are a chunk. If a chunk is the whole tile, its program writes
the output. Else it leaves partial results (unnormalised sums, row maxima, sums of weights) in the workspace, and
`_combine_kernel` merges those of a tile. It recomputes the line to find them. That needs no output of the main kernel,
so under programmatic dependent launch it overlaps with it. A share leaves at most two chunks: one of a tile that an
earlier share began, and one of a tile that it begins and does not finish. So there are two slots for each program.

**Without the line**, each tile and head has a program of its own: with `num_splits=1` and in batch-invariant mode. In
that mode the tile's keys form fixed chunks of `chunk_keys`, counted from the first key that is not padding. Their sums
are folded from the last chunk to the first (`fixed_order.py`). If `chunks_per_tile` > 1, each fixed chunk has a program
and a slot of its own, and `_combine_in_order_kernel` folds.

Gluon kernels call the functions of scalars, too (`hopper/decode_schedule.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import cached_blocks
from diyfa.backends.cuda.attention.decode_configs import FULL_GPU, DecodeConfig, chunk_keys
from diyfa.backends.cuda.attention.seq_info import cache_seq_info
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.runtime.launch import multiprocessors
from diyfa.problem import KVCacheProblem

# Starting a tile takes as long as TILE_COST blocks. That counts if a share has at least LONG_SHARE blocks: with shorter
# shares all programs are done sooner if the blocks alone are divided evenly.
TILE_COST = tl.constexpr(2)
LONG_SHARE = tl.constexpr(8)
SCANS = (1, 32, 128)  # numbers of tiles whose work a program can add up at once; up to 32 take one warp
INTERPRETED = 2  # multiprocessors that are assumed in the interpreter, which runs programs one after another
MAX_CHUNK_SUMS = 1 << 25  # float32 numbers: the most that fixed chunks may leave in the workspace
MAX_WAVES = 16  # `num_splits` may ask for so many times the programs that run at once; this bounds the workspace
COMBINED_ELEMENTS = 4096  # sums that a program of `_combine_kernel` reads at once
COMBINED_COLUMNS = 128  # the fewest columns of a row that such a program has, if it does not have all
COMBINED_PROGRAMS = 1024  # the fewest programs of `_combine_kernel`, if each has several rows


# ---- The rule: functions of scalars, for Triton and for Gluon


@triton.jit
def divide_work(n_blocks, n_tiles, max_blocks, head_rounds, n_shares, SPLIT_COST: tl.constexpr):
    """Divide the iteration space of `n_tiles` tiles that have blocks: `n_blocks` in all, `max_blocks` in the longest.

    Returns (length of the line, length of a share, `cost`). `cost` is (tile_cost, min_tile_work): what starting a tile
    adds to its blocks, and the least that a tile takes on the line.

    If giving each share equally many whole tiles is at most SPLIT_COST longer than an even cut, the line does that: all
    tiles take as much as the longest one, no tile is shared, and nothing is combined.
    """
    tile_cost = tl.where(n_blocks * head_rounds >= LONG_SHARE * n_shares, TILE_COST, 0)
    length = (n_blocks + tile_cost * n_tiles) * head_rounds
    share = tl.maximum(tl.cdiv(length, n_shares), 1)
    min_tile_work = 0
    if SPLIT_COST > 0:
        tiles_per_share = tl.cdiv(n_tiles * head_rounds, n_shares)
        if tiles_per_share * (max_blocks + tile_cost).to(n_blocks.dtype) <= share + SPLIT_COST:
            min_tile_work = max_blocks + tile_cost
            share = tl.maximum(tiles_per_share.to(n_blocks.dtype) * min_tile_work, 1)
            length = (n_tiles * head_rounds).to(n_blocks.dtype) * min_tile_work
    return length, share, (tile_cost, min_tile_work)


@triton.jit
def tile_work(n_blocks, cost, SPLIT_COST: tl.constexpr):
    """Return what a tile with `n_blocks` blocks takes on the line in one head round: nothing if it has no blocks."""
    tile_cost, min_tile_work = cost
    work = n_blocks + tile_cost
    if SPLIT_COST > 0:
        work = tl.maximum(work, min_tile_work)
    return tl.where(n_blocks > 0, work, 0)


@triton.jit
def next_chunk(
    position, tile_start, share_end, n_blocks, work, cost, ONE_ROUND: tl.constexpr, SPLIT_COST: tl.constexpr
):
    """Cut the next chunk of a share from a tile of `n_blocks` blocks, which takes `work` in each head round.

    The tile begins at `tile_start`. Everything before `position`, inside the tile, is done.

    Returns (head round, begin, end, length on the line). The chunk is blocks [begin, end), counted from the first that
    the tile sees. It is empty (end <= begin) if the share has no block of the tile: only the cost of the tile's start,
    or the filling up to min_tile_work.
    """
    tile_cost, _ = cost
    from_work = (position - tile_start).to(tl.int32)
    head_round = 0
    if not ONE_ROUND:
        head_round = from_work // work
        from_work = from_work % work
    to_work = tl.minimum(work, from_work + (share_end - position)).to(tl.int32)
    begin = tl.maximum(from_work - tile_cost, 0)
    end = tl.maximum(to_work - tile_cost, 0)
    if SPLIT_COST > 0:
        end = tl.minimum(end, n_blocks)
    return head_round, begin, end, to_work - from_work


@triton.jit
def partials_slot(program, begins_tile):
    """Return the slot for the partial results of a chunk of program `share * heads_in_parallel + head`.

    A program has two: the first for a tile that an earlier share began, the second for a tile that begins in its share
    and does not end there.
    """
    return 2 * program + begins_tile


# ---- The iteration space, from lengths on the device


@triton.jit
def _count_blocks(start, batch, blocks_m, lengths, tile_mask, c: tl.constexpr):
    """Return the blocks of keys that each of the SCAN tiles from `start` on sees, [SCAN]: 0 beyond the last tile."""
    tiles = start + tl.arange(0, c.SCAN)
    is_tile = tiles < batch * blocks_m
    _, n_queries, _, n_keys, pad = cache_seq_info(tiles // blocks_m, lengths, c, is_tile)
    _, n_blocks = cached_blocks(tiles % blocks_m, n_queries, n_keys, pad, tile_mask, c)
    return tl.where(is_tile, n_blocks, 0)


@triton.jit
def iteration_space(n_shares, batch, blocks_m, head_rounds, lengths, tile_mask, c: tl.constexpr):
    """Add up the work of all tiles and divide it.

    Returns (length of the line, length of a share, `cost` of `divide_work`, blocks of the first SCAN tiles). Positions
    have the type of the length: int64 if WIDE_POSITIONS, else int32.
    """
    POSITION_TYPE: tl.constexpr = tl.int64 if c.WIDE_POSITIONS else tl.int32
    first_counts = _count_blocks(0, batch, blocks_m, lengths, tile_mask, c)
    n_blocks = tl.sum(first_counts.to(POSITION_TYPE), 0)
    n_tiles = tl.sum((first_counts > 0).to(tl.int32), 0)
    max_blocks = 0
    if c.SPLIT_COST > 0:
        max_blocks = tl.max(first_counts, 0)
    if not c.ONE_SCAN:
        for start in range(c.SCAN, batch * blocks_m, c.SCAN):
            counts = _count_blocks(start, batch, blocks_m, lengths, tile_mask, c)
            n_blocks += tl.sum(counts.to(POSITION_TYPE), 0)
            n_tiles += tl.sum((counts > 0).to(tl.int32), 0)
            if c.SPLIT_COST > 0:
                max_blocks = tl.maximum(max_blocks, tl.max(counts, 0))
    length, share, cost = divide_work(n_blocks, n_tiles, max_blocks, head_rounds, n_shares, c.SPLIT_COST)
    return length, share, cost, first_counts


@triton.jit
def _count_tiles_before(position, counts, scan_start, head_rounds, cost, c: tl.constexpr):
    """Count the tiles that end at or before a position, among SCAN tiles, the first of which begins at `scan_start`.

    `counts`: their blocks. Returns (number of these tiles, end of the last of them or 0, end of the last of all SCAN).
    """
    work = tile_work(counts, cost, c.SPLIT_COST).to(scan_start.dtype) * head_rounds
    ends = scan_start + (work if c.SCAN == 1 else tl.cumsum(work, 0))
    is_before = ends <= position
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, ends, 0), 0), tl.max(ends, 0)


@triton.jit
def tile_at(position, first_counts, cost, batch, blocks_m, head_rounds, lengths, tile_mask, c: tl.constexpr):
    """Return (the tile that contains a position of the line, the position where this tile begins)."""
    origin = position * 0  # a zero of position's type
    tile, tile_start, scan_end = _count_tiles_before(position, first_counts, origin, head_rounds, cost, c)
    if not c.ONE_SCAN:
        for start in range(c.SCAN, batch * blocks_m, c.SCAN):
            counts = _count_blocks(start, batch, blocks_m, lengths, tile_mask, c)
            n_before, last_end, scan_end = _count_tiles_before(position, counts, scan_end, head_rounds, cost, c)
            tile += n_before
            tile_start = tl.maximum(tile_start, last_end)
    return tile, tile_start


@triton.jit
def begin_share(batch, blocks_m, head_rounds, lengths, tile_mask, c: tl.constexpr):
    """Find the share of this program of `_decode_kernel`: share `tl.program_id(1)` of `tl.num_programs(1)`.

    Returns (position where the share begins, where it ends, the tile at its beginning, position where this tile begins,
    `cost` of `divide_work`).
    """
    n_shares = tl.num_programs(1)
    length, share, cost, first_counts = iteration_space(n_shares, batch, blocks_m, head_rounds, lengths, tile_mask, c)
    position = tl.minimum(tl.program_id(1) * share, length)
    share_end = tl.minimum(position + share, length)
    tile, tile_start = tile_at(position, first_counts, cost, batch, blocks_m, head_rounds, lengths, tile_mask, c)
    return position, share_end, tile, tile_start, cost


@triton.jit
def find_tile_start(tile, first_counts, cost, length, head_rounds, c: tl.constexpr):
    """Return the position where one of the first SCAN tiles begins on a line of this length."""
    work = tile_work(first_counts, cost, c.SPLIT_COST).to(length.dtype)
    return tl.sum(tl.where(tl.arange(0, c.SCAN) < tile, work, 0), 0) * head_rounds


@triton.jit
def find_shared_tile(n_shares, heads_kv, batch, blocks_m, lengths, tile_mask, c: tl.constexpr):
    """Find the tile whose partial results this program of `_combine_kernel` merges.

    `tl.program_id(1)` is the head within a round. If BY_TILE, which implies ONE_SCAN, `tl.program_id(2)` is tile *
    head_rounds + head round. Else it is a share, and the tile is the one at the share's end.

    Returns (tile, KV head, `cache_seq_info` of its sequence, the share with its first block, the share with its last
    block, is_unfinished). Unless is_unfinished this program merges nothing: the tile's results are complete, or the
    program of another share merges them.
    """
    hk = tl.program_id(1)
    heads_in_parallel = tl.num_programs(1)
    head_rounds = 1 if c.ONE_ROUND else heads_kv // heads_in_parallel
    length, share, cost, first_counts = iteration_space(n_shares, batch, blocks_m, head_rounds, lengths, tile_mask, c)
    tile_cost, _ = cost
    if c.BY_TILE:
        tile = tl.program_id(2) // head_rounds
        tile_start = find_tile_start(tile, first_counts, cost, length, head_rounds, c)
    else:
        first_share = tl.program_id(2)
        last_position = tl.maximum(tl.minimum(first_share * share + share, length) - 1, 0)
        tile, tile_start = tile_at(
            last_position, first_counts, cost, batch, blocks_m, head_rounds, lengths, tile_mask, c
        )
    b = tile // blocks_m
    sequence = cache_seq_info(b, lengths, c, b < batch)
    _, n_queries, _, n_keys, pad = sequence
    _, n_blocks = cached_blocks(tile % blocks_m, n_queries, n_keys, pad, tile_mask, c)
    work = tl.maximum(tile_work(n_blocks, cost, c.SPLIT_COST), 1)  # it is a divisor, and a tile may have no blocks
    first_block = tile_start + tile_cost  # position of the tile's first block
    if not c.ONE_ROUND:
        if c.BY_TILE:
            head_round = tl.program_id(2) % head_rounds
        else:
            head_round = ((last_position - tile_start) // work).to(tl.int32)
        first_block += head_round * work
        hk += head_round * heads_in_parallel
    if c.BY_TILE:
        first_share = (first_block // share).to(tl.int32)
    share_end = tl.minimum(first_share * share + share, length)
    end = first_block + n_blocks
    # The share has the tile's first block, and ends before the tile's last block. (A share that has only the cost of
    # the tile's start has no chunk of the tile.)
    is_unfinished = (first_share * share <= first_block) & (first_block < share_end) & (share_end < end)
    last_share = ((end - 1) // share).to(tl.int32)
    return tile, hk, sequence, first_share, last_share, is_unfinished


# ---- Fixed chunks


@triton.jit
def fixed_chunk(chunks_per_tile, heads_kv, blocks_m, lengths, tile_mask, c: tl.constexpr):
    """Find the tile of program `tl.program_id(0)` of `_decode_kernel`, and with CHUNKS_APART its fixed chunk.

    Programs are numbered by tile, KV head, and with CHUNKS_APART by chunk.

    Returns (sequence, KV head, tile of the sequence, `cache_seq_info`, first block, end, (number of tile and KV head,
    chunk)). There are no blocks (end <= first) if the tile has no rows, or sees no key of the chunk.
    """
    tile_and_head = tl.program_id(0)
    chunk = 0
    if c.CHUNKS_APART:
        chunk = tile_and_head % chunks_per_tile
        tile_and_head = tile_and_head // chunks_per_tile
    tile = tile_and_head // heads_kv
    hk = tile_and_head % heads_kv
    b = tile // blocks_m
    block_m = tile % blocks_m
    sequence = cache_seq_info(b, lengths, c)
    _, n_queries, _, n_keys, pad = sequence
    first, n_blocks = cached_blocks(block_m, n_queries, n_keys, pad, tile_mask, c)
    end = first + n_blocks
    if c.CHUNKS_APART:
        first = tl.maximum(first, chunk * c.CHUNK)
        end = tl.minimum(end, (chunk + 1) * c.CHUNK)
    return b, hk, block_m, sequence, first, end, (tile_and_head, chunk)


# ---- Partial results in the workspace


@triton.jit
def store_partials(acc, l_i, m_i, slot, memory, c: tl.constexpr):
    """Write the sums [BLOCK_M, BLOCK_DV], sums of weights and maxima [BLOCK_M] of a chunk to its slot."""
    sums_ptr, statistics_ptr = memory
    offs_m = tl.arange(0, c.BLOCK_M)
    offs_d = tl.arange(0, c.BLOCK_DV)
    sums = sums_ptr + slot.to(tl.int64) * (c.BLOCK_M * c.BLOCK_DV)
    tl.store(sums + offs_m[:, None] * c.BLOCK_DV + offs_d[None, :], acc)
    tl.store(statistics_ptr + slot * (2 * c.BLOCK_M) + offs_m, m_i)
    tl.store(statistics_ptr + slot * (2 * c.BLOCK_M) + c.BLOCK_M + offs_m, l_i)


@triton.jit
def store_fixed_chunk(acc, l_i, m_i, chunk, chunks_per_tile, rows_per_tile, memory, c: tl.constexpr):
    """Write the partial results of a fixed chunk to its slot, which has only `rows_per_tile` of BLOCK_M rows.

    `chunk`: the last result of `fixed_chunk`.
    """
    sums_ptr, statistics_ptr = memory
    tile_and_head, chunk_in_tile = chunk
    slot = tile_and_head.to(tl.int64) * chunks_per_tile + chunk_in_tile
    offs_m = tl.arange(0, c.BLOCK_M)
    sums = sums_ptr + (slot * rows_per_tile + offs_m[:, None]) * c.BLOCK_DV
    statistics = statistics_ptr + slot * (2 * rows_per_tile) + offs_m
    is_row = offs_m < rows_per_tile
    tl.store(sums + tl.arange(0, c.BLOCK_DV)[None, :], acc, mask=is_row[:, None])
    tl.store(statistics, m_i, mask=is_row)
    tl.store(statistics + rows_per_tile, l_i, mask=is_row)


# ---- Sizes, on the host


def is_split(problem: KVCacheProblem) -> bool:
    """Return whether programs share the iteration space. Otherwise each has a whole tile or a fixed chunk."""
    return not problem.batch_invariant and problem.num_splits != 1


def tiles_per_sequence(problem: KVCacheProblem, config: DecodeConfig) -> int:
    """Tiles of the longest sequence, for one KV head."""
    return cdiv(problem.seqlen_q * (problem.heads_q // problem.heads_kv), config.block_m)


def rows_per_tile(problem: KVCacheProblem, config: DecodeConfig) -> int:
    """Rows of a tile that exist in the longest sequence, at most block_m."""
    return min(config.block_m, problem.seqlen_q * (problem.heads_q // problem.heads_kv))


def count_tiles(problem: KVCacheProblem, config: DecodeConfig) -> int:
    """Tiles of all sequences for one KV head, if all have the most queries."""
    return problem.batch * tiles_per_sequence(problem, config)


def has_wide_positions(problem: KVCacheProblem, config: DecodeConfig) -> bool:
    """Return whether positions on the line may need more than 32 bits."""
    blocks = cdiv(problem.capacity, config.block_n)
    return count_tiles(problem, config) * problem.heads_kv * (blocks + 1) >= 1 << 28


def _programs_at_once(config: DecodeConfig, device: torch.device) -> int:
    """Programs that a GPU runs at once. A meta device stands for a full GPU."""
    default = FULL_GPU if device.type == "meta" else INTERPRETED
    return config.programs_per_sm * (multiprocessors(device) or default)


def chunks_per_tile(problem: KVCacheProblem, config: DecodeConfig, device: torch.device) -> int:
    """Fixed chunks of a tile that have programs of their own. 1: one program has all chunks of a tile."""
    if not problem.batch_invariant or problem.num_splits == 1:
        return 1
    tiles = count_tiles(problem, config) * problem.heads_kv
    chunks = max(1, cdiv(problem.capacity, chunk_keys(problem)))
    sums = tiles * chunks * rows_per_tile(problem, config) * padded_head_dim(problem.head_dim_v)
    return chunks if tiles < _programs_at_once(config, device) and sums <= MAX_CHUNK_SUMS else 1


def programs(problem: KVCacheProblem, config: DecodeConfig, device: torch.device) -> int:
    """Programs to launch. Lengths on the device do not change their number: a graph may be replayed with others."""
    tiles = count_tiles(problem, config) * problem.heads_kv
    if not is_split(problem):
        return tiles * chunks_per_tile(problem, config, device)
    blocks = max(1, cdiv(problem.capacity, config.block_n))
    at_once = _programs_at_once(config, device)
    if problem.num_splits > 1:
        return min(tiles * min(problem.num_splits, blocks), MAX_WAVES * at_once)
    return min(tiles * blocks, at_once)


def combined_columns(problem: KVCacheProblem, config: DecodeConfig, programs: int) -> int:
    """Columns of a row that one program of `_combine_kernel` has.

    Fewer than all if tiles have so many chunks that a program with whole rows could not read them at once.
    """
    columns = padded_head_dim(problem.head_dim_v)
    chunks = programs // (count_tiles(problem, config) * problem.heads_kv)
    while columns > COMBINED_COLUMNS and chunks * columns > COMBINED_ELEMENTS:
        columns //= 2
    return columns


def combined_rows(programs: int) -> int:
    """Rows that one program of `_combine_kernel` has, where `programs` would have one row each.

    Each program recomputes the line to find its tile, and most tiles are not shared. More programs than run at once
    would repeat that in every wave; if the main kernel leaves no registers free, none of it would overlap. So a program
    takes several rows: a power of two, as `block_m` is, so that all lie in one tile.
    """
    rows = 1
    while programs >= 2 * rows * COMBINED_PROGRAMS:
        rows *= 2
    return rows


def workspace(problem: KVCacheProblem, config: DecodeConfig, device: torch.device) -> torch.Tensor | None:
    """Memory for partial results, or None if every program has whole tiles.

    Each program has two slots of block_m rows; or each fixed chunk has a slot of `rows_per_tile` rows. A row has
    BLOCK_DV sums, a maximum and a sum of weights, all float32. All sums come first (`workspace_parts`).
    """
    rows = programs(problem, config, device)
    if chunks_per_tile(problem, config, device) > 1:
        rows *= rows_per_tile(problem, config)
    elif is_split(problem):
        rows *= 2 * config.block_m
    else:
        return None
    return torch.empty(rows * (padded_head_dim(problem.head_dim_v) + 2), dtype=torch.float32, device=device)


def workspace_parts(
    memory: torch.Tensor | None, problem: KVCacheProblem
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (sums, statistics) of a `workspace`."""
    if memory is None:
        return None, None
    columns = padded_head_dim(problem.head_dim_v)
    return memory, memory[memory.numel() // (columns + 2) * columns :]
