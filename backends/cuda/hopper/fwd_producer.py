"""The producer warp of the Hopper forward (`fwd.py`). It finds tiles and copies their queries, keys and values by TMA.

Read `run_producer` first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED
from diyfa.backends.cuda.gluon.compat import async_load
from diyfa.backends.cuda.hopper.float8 import first_transposed
from diyfa.backends.cuda.hopper.mma import ROWS
from diyfa.backends.cuda.hopper.tiles import (
    block_order,
    locate_tile,
    right_to_left,
    sequence_end,
    start_load,
    start_load_listed,
    start_load_pages,
)


@gluon.jit
def _find_tile(index, slot, problem, shared, scheduler):
    """Find the next non-empty tile at or after number `index`, write its tile info to `slot`, return its number.

    If no tile is left, write the end marker.
    """
    config: gl.constexpr = shared.config
    # FIND_AHEAD calls this inside the loop over blocks. Without the barrier the compiler would compute numbers of
    # `problem` before the loop and hold them in registers, which the producer does not have.
    if config.FIND_AHEAD:
        problem = problem.behind_barrier()
    tiles = problem.tile_count(config.BLOCK_M)
    searching = True
    while searching:
        exists, tile = locate_tile(gl.minimum(index, tiles - 1), problem, config.BLOCK_M, config.BLOCK_N)
        # `is_last`: the slot before is the last that may have a tile, so this one gets the end marker.
        has_more = (index < tiles) & (shared.tile_infos.is_last(slot - 1, scheduler) == 0)
        searching = has_more & (exists == 0)
        if searching:
            index = scheduler.next_tile(index, scheduler.draw())
        else:
            shared.tile_infos.write(slot, tile.if_any(has_more))
    return index


@gluon.jit
def _load_values(v_tensor, tile, hk, row, end, ring, item, problem, config):
    """Start copying key rows [row, row + BLOCK_N) of V. `row` counts from the sequence's first key.

    V of 8 bits is transposed (`float8.py`): keys are columns, and zeros follow each sequence, so `end` is not read.
    """
    if config.BITS_V == 8:
        b = tile.b
        if problem.LENGTHS_K == PACKED:
            b = 0
            row += first_transposed(tile.first_k, tile.b)
        full = ring.channel.full_barrier(item)
        mbarrier.expect(full, v_tensor.block_type.nbytes)
        async_load(v_tensor, [b, hk, 0, row], full, ring.v_buffers.index(ring.buffer_index(item)))
    else:
        start_load(
            v_tensor, tile.b, hk, row, end, tile.n_keys,
            ring.v_buffers, ring.buffer_index(item), ring.channel.full_barrier(item), config.BOXES_V,
            problem.LENGTHS_K != EQUAL,
        )  # fmt: skip


@gluon.jit
def run_producer(problem, shared, inputs):
    """Run the producer warp.

    1. Find the program's first tile and write its tile info.
    2. Copy the tile's queries, 64 for each consumer.
    3. Copy K and V of each key block, in the order that consumers visit them. Each copy waits until its buffer is free.
    4. Find the next tile, write its tile info, and go on with 2. The end marker ends the loop.

    FIND_AHEAD: find the next tile before the last key block is copied, not after it. With a slow search and few stages,
    consumers then do not idle during the search. But the last block comes later, so other configs leave it off.

    FALLBACK: the tiles are those that consumers flagged in the first pass, whose tile infos still exist. CHUNK:
    blocks come in the order of batch-invariant mode. PAGE_SIZE: they come from pages. MASK_K: from a block mask's list.
    """
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = problem.LENGTHS != EQUAL
    RAGGED_K: gl.constexpr = problem.LENGTHS_K != EQUAL
    ring = shared.ring
    scheduler = inputs.scheduler
    item = 0  # ring item of the next block's K; its V is item + 1
    q_loads = 0  # tiles of queries loaded so far
    slot = 0  # slot of the tile's info: its number among the program's tiles
    if config.FALLBACK:
        slot = shared.flags.next_flagged(slot, 1)
    else:
        index = _find_tile(gl.program_id(0), slot, problem, shared, scheduler)
    tile = shared.tile_infos.reread(slot, problem, 1)
    while tile.end_block > 0:
        b = tile.b
        h = tile.h
        n_keys = tile.n_keys
        end_q = sequence_end(b, tile.first_q, tile.n_queries, inputs.steps_qb, inputs.steps_qm, problem.LENGTHS)
        end_k = sequence_end(b, tile.first_k, n_keys, inputs.steps_kb, inputs.steps_kn, problem.LENGTHS_K)
        end_v = sequence_end(b, tile.first_k, n_keys, inputs.steps_vb, inputs.steps_vn, problem.LENGTHS_K)
        hk = h // inputs.group_size
        for c in gl.static_range(config.CONSUMERS):
            shared.queries.wait_empty(c, q_loads)
            start_load(
                inputs.q_tensor, b, h, tile.row0 + c * ROWS, end_q, tile.n_queries,
                shared.queries.buffers, c, shared.queries.full.index(c), config.BOXES, RAGGED,
            )  # fmt: skip
        if config.CHUNK > 0:
            order = right_to_left(tile)
        else:
            order = block_order(tile, problem, config.BLOCK_M, config.BLOCK_N)
        n_blocks = tile.end_block - tile.first_block
        # Block at which to draw the next tile's number from the scheduler's counter. The number arrives while this warp
        # waits for the block's buffers. If programs drew at the first block, each would hold one tile beyond its
        # current one: with 8 tiles per program they would not end at the same time.
        draw_at_block = n_blocks - 1
        if config.FIND_AHEAD:
            draw_at_block = gl.maximum(n_blocks - 2, 0)
        if shared.tile_infos.is_last(slot, scheduler):  # draw nothing: a number drawn here would be lost
            draw_at_block = n_blocks
        drawn_number = 0
        if config.PAGE_SIZE > 0:
            table = problem.cache.table_row(b)
            pages = problem.pages(tile, table, order.block(0) * config.BLOCK_N, config.BLOCK_N)
        if config.MASK_K > 0:
            keys = problem.tile_list(tile, tile.row0, config.BLOCK_N)
            columns = keys.columns(0)
        for i in range(n_blocks):
            if not config.FALLBACK:
                if i == draw_at_block:
                    drawn_number = scheduler.draw()
                if config.FIND_AHEAD:  # noqa: SIM102 (decided when it is compiled)
                    if i == n_blocks - 1:
                        next_index = scheduler.next_tile(index, drawn_number)
                        index = _find_tile(next_index, slot + 1, problem, shared, scheduler)
            row = order.block(i) * config.BLOCK_N
            ring.channel.acquire(item)
            if config.PAGE_SIZE > 0:
                start_load_pages(
                    inputs.k_tensor, problem.cache, pages, hk, row, n_keys, inputs.steps_kb, inputs.steps_kn,
                    ring.k_buffers, ring.buffer_index(item), ring.channel.full_barrier(item),
                    config.BOXES, config.BLOCK_N,
                )  # fmt: skip
            elif config.MASK_K > 0:
                start_load_listed(
                    inputs.k_tensor, b, hk, keys, i, columns,
                    ring.k_buffers, ring.buffer_index(item), ring.channel.full_barrier(item), config.BOXES,
                )  # fmt: skip
            else:
                start_load(
                    inputs.k_tensor, b, hk, row, end_k, n_keys,
                    ring.k_buffers, ring.buffer_index(item), ring.channel.full_barrier(item), config.BOXES, RAGGED_K,
                )  # fmt: skip
            ring.channel.acquire(item + 1)
            if config.PAGE_SIZE > 0:
                start_load_pages(
                    inputs.v_tensor, problem.cache, pages, hk, row, n_keys, inputs.steps_vb, inputs.steps_vn,
                    ring.v_buffers, ring.buffer_index(item + 1), ring.channel.full_barrier(item + 1), config.BOXES_V,
                    config.BLOCK_N,
                )  # fmt: skip
                # Load the next block's page numbers now: they arrive while this warp waits for buffers.
                row = order.block(gl.minimum(i + 1, n_blocks - 1)) * config.BLOCK_N
                pages = problem.pages(tile, table, row, config.BLOCK_N)
            elif config.MASK_K > 0:
                start_load_listed(
                    inputs.v_tensor, b, hk, keys, i, columns,
                    ring.v_buffers, ring.buffer_index(item + 1), ring.channel.full_barrier(item + 1), config.BOXES_V,
                )  # fmt: skip
                # Load the next block's list entries now, as page numbers above.
                columns = keys.columns(gl.minimum(i + 1, n_blocks - 1))
            else:
                _load_values(inputs.v_tensor, tile, hk, row, end_v, ring, item + 1, problem, config)
            item += 2
        if config.FALLBACK:
            q_loads += 1
            slot = shared.flags.next_flagged(slot + 1, 1)
        else:
            slot += 1
            q_loads = slot
            if not config.FIND_AHEAD:
                index = _find_tile(scheduler.next_tile(index, drawn_number), slot, problem, shared, scheduler)
        tile = shared.tile_infos.reread(slot, problem, 1)
    if scheduler.SCHEDULE == "dynamic" and not config.FALLBACK:
        scheduler.leave()  # the last program clears the counter for the next launch
