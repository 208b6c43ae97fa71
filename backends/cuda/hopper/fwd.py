"""Attention forward for Hopper (sm_90): a producer warp and consumer warpgroups, in Gluon.

The schedule is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, algorithm 2 with its section 3.2). One producer
warp copies tiles to shared memory through TMA. One to three consumer warpgroups of 64 queries each compute. A consumer
issues the scores of the next key block before the values of this one, so the tensor cores work while it computes
exponentials. `docs/hopper.md` explains it; `hopper/configs.py` decides which problems come here.

A tile is BLOCK_M = 64 * CONSUMERS queries of one head. It visits its keys in blocks of BLOCK_N: first the blocks at the
right end, then those at the left end, then the rest from right to left (`BlockOrder` in `hopper/tiles.py`). So blocks
that a mask cuts come first. K and V share one ring of STAGES buffers (`gluon/ring.py`). If their tiles differ in shape,
even stages have buffers for K and odd ones for V. Tiles are powers of two wide, with zeros beyond the head dim. A tile
of 129 to 192 columns consists of three TMA boxes of 64.

Keys may be in a cache, contiguous or in pages (`hopper/prefill.py`). With a block mask a tile visits the listed blocks
only, partial ones first (`gluon/block_mask.py`).
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention.block_info import last_block
from diyfa.backends.cuda.attention.block_mask import mask_strides
from diyfa.backends.cuda.attention.decode_configs import chunk_keys
from diyfa.backends.cuda.attention.fixed_order import COMPILE_OPTIONS as FIXED_ORDER_OPTIONS
from diyfa.backends.cuda.attention.fixed_order import with_sink, without_sign_of_zero
from diyfa.backends.cuda.attention.fwd import row_lse
from diyfa.backends.cuda.attention.launch import forced_config, softmax_scale
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, SEQ_LENS, lengths_constant
from diyfa.backends.cuda.gluon.barriers import idle_warps, wait_for_previous_kernels, wait_for_stores
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.gluon.compat import aggregate, async_load
from diyfa.backends.cuda.gluon.ring import KVRing
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.tile_counter import launch_counter
from diyfa.backends.cuda.gluon.tile_info import TileInfos, allocate_tile_infos
from diyfa.backends.cuda.gluon.tma import dense_descriptor, descriptor_steps, ragged_descriptor, smem_box
from diyfa.backends.cuda.hopper.chunks import Totals, attend_chunks
from diyfa.backends.cuda.hopper.configs import (
    CONSUMER_ROWS,
    Sm90Config,
    box_layout,
    compile_options,
    finds_ahead,
    grid_size,
    has_fixed_max,
    has_one_ring,
    heads_in_parallel,
    select_config,
    tile_info_count,
    value_boxes,
)
from diyfa.backends.cuda.hopper.epilogue import clear_others, head_offset, matrix, store_rows
from diyfa.backends.cuda.hopper.float8 import (
    Factors,
    block_factors,
    first_transposed,
    packed_weights,
    scaled_by_block,
    transpose_launch,
    transposed_values,
    unpacked_weights,
)
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    Queries,
    accumulator_layout,
    allocate_ones,
    box_buffer,
    box_matrix,
    buffer_count,
    finish_values,
    mma_operand,
    operand_layout,
    queries_in_registers,
    rescaled,
    run_count,
    run_matrix,
    run_start,
    start_scores,
    start_values,
    zero_output,
    zero_sums,
)
from diyfa.backends.cuda.hopper.overflow import OverflowFlags, allocate_flags, overflown_rows
from diyfa.backends.cuda.hopper.softmax import (
    LN2,
    LOG2E,
    Rows,
    Score,
    add_sink,
    fixed_max_step,
    softmax_step,
    sums_by_thread,
)
from diyfa.backends.cuda.hopper.tiles import (
    KeyCache,
    Problem,
    block_order,
    locate_tile,
    right_to_left,
    sequence_end,
    start_load,
    start_load_listed,
    start_load_pages,
    start_store,
)
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launcher import Tiles
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.eight_bits import FLOAT8, WEIGHT_SHIFT
from diyfa.problem import AttentionProblem, AttentionTensors, KVCacheTensors, Launch, cached_per_kind, per_head_stride


@dataclass(frozen=True, eq=False)
class Sm90Constants(Constants):
    """The kernel's compile-time constants: features, tile and schedule. `Sm90Config` explains most of them."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    separate_o_buffer: bool
    store_from_registers: bool
    pingpong: bool
    q_in_registers: int
    boxes: int
    boxes_v: int
    pairs: bool
    one_ring: bool
    causal: bool
    has_left: bool
    has_right: bool
    check_keys: bool  # see `Problem`
    lengths: int
    lengths_k: int
    page_size: int  # 0: no pages
    mask_q: int  # queries of a block of the block mask; 0: none
    mask_k: int  # keys of one
    softcap: bool
    alibi: bool
    sinks: bool
    negate: bool
    fixed_max: bool  # the maximum of the edge blocks is used for all others (`fixed_max_step`, `overflow.py`)
    tile_infos: int
    schedule: str
    find_ahead: bool
    consumer_registers: int
    producer_registers: int
    chunk: int = 0  # key blocks of a chunk in batch-invariant mode (`chunks.py`); else 0
    shared_totals: bool = False  # the totals of chunks lie in shared memory; else in global memory
    fallback: bool = False  # compute only the flagged tiles (`overflow.py`)
    # For float8 (`float8.py`): kinds of descales, whether there are means, the exponent that weights are scaled by.
    bits: int = 16  # of an element of q, k, v and of the weights
    head_dim: int = 0
    head_dim_v: int = 0
    q_descale: int = 0
    k_descale: int = 0
    v_descale: int = 0
    k_mean: bool = False
    v_mean: bool = False
    weight_shift: int = 0


@constexpr_function
def for_fallback(config):
    """Return the constants of the fallback: `config` with a running maximum."""
    return type(config)(**vars(config) | {"fixed_max": False, "fallback": True})


@aggregate
class Shared:
    """Constants, shared memory and barriers that the producer and the consumers use."""

    config: gl.constexpr  # `Sm90Constants`
    queries: Queries
    ring: KVRing
    tile_infos: TileInfos
    flags: OverflowFlags
    ones: gl.shared_memory_descriptor  # see `start_values`
    totals: Totals


@aggregate
class Inputs:
    """Tensors that the producer reads, with their strides, and the scheduler that it asks for tiles."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    group_size: gl.tensor
    steps_qb: gl.tensor
    steps_qm: gl.tensor
    steps_kb: gl.tensor
    steps_kn: gl.tensor
    steps_vb: gl.tensor
    steps_vn: gl.tensor
    scheduler: TileScheduler


@aggregate
class Outputs:
    """Tensors that consumers write, and inputs that only they read. An unused pointer is None."""

    o_tensor: tma.tensor_descriptor
    lse_ptr: gl.tensor
    o_ptr: gl.tensor | gl.constexpr
    slopes_ptr: gl.tensor | gl.constexpr
    stride_slopeb: gl.tensor
    sinks_ptr: gl.tensor | gl.constexpr
    factors: Factors
    o_buffers: gl.shared_memory_descriptor
    score: Score
    SINKS: gl.constexpr


@gluon.jit
def _find_tile(index, slot, problem, shared, scheduler):
    """Find the next non-empty tile at or after number `index`, write its tile info to `slot`, return its number.

    If no tile is left, the tile info says so.
    """
    config: gl.constexpr = shared.config
    if config.FIND_AHEAD:  # this call is inside the loop over blocks, where registers are short
        problem = problem.behind_barrier()
    tiles = problem.tile_count(config.BLOCK_M)
    searching = True
    while searching:
        exists, tile = locate_tile(gl.minimum(index, tiles - 1), problem, config.BLOCK_M, config.BLOCK_N)
        has_more = (index < tiles) & (shared.tile_infos.is_last(slot - 1, scheduler) == 0)
        searching = has_more & (exists == 0)
        if searching:
            index = scheduler.next_tile(index, scheduler.draw())
        else:
            shared.tile_infos.write(slot, tile.if_any(has_more))
    return index


@gluon.jit
def _load_values(v_tensor, tile, hk, row, end, ring, item, problem, config):
    """Start copying a block of V. One of 8 bits is a box of the transposed V, in which no sequence needs an end."""
    if config.BITS == 8:
        b = tile.b
        if problem.LENGTHS_K == PACKED:
            b = 0
            row += first_transposed(tile.first_k, tile.b)
        full = ring.full_barrier(item)
        mbarrier.expect(full, v_tensor.block_type.nbytes)
        async_load(v_tensor, [b, hk, 0, row], full, ring.v_buffers.index(ring.buffer_index(item)))
    else:
        start_load(
            v_tensor, tile.b, hk, row, end, tile.n_keys,
            ring.v_buffers, ring.buffer_index(item), ring.full_barrier(item), config.BOXES_V,
            problem.LENGTHS_K != EQUAL,
        )  # fmt: skip


@gluon.jit
def _producer(problem, shared, inputs):
    """Run the producer warp. For each tile: write its tile info, copy its Q, then K and V of its blocks.

    Each copy waits until its buffer is free.

    FIND_AHEAD: find the next tile before the last key block is copied, not after it. With a slow search and few stages,
    consumers then do not idle during the search. But the last block comes later, so other configs leave it off.
    """
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = problem.LENGTHS != EQUAL
    RAGGED_K: gl.constexpr = problem.LENGTHS_K != EQUAL
    ring = shared.ring
    scheduler = inputs.scheduler
    item = 0
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
        # Block at which to draw the next tile's number. The answer arrives while that block waits for its buffers.
        # If programs drew at the first block, each would own one tile beyond its current one: with 8 tiles per program
        # they would not end at the same time.
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
            ring.wait_empty(item)
            if config.PAGE_SIZE > 0:
                start_load_pages(
                    inputs.k_tensor, problem.cache, pages, hk, row, n_keys, inputs.steps_kb, inputs.steps_kn,
                    ring.k_buffers, ring.buffer_index(item), ring.full_barrier(item), config.BOXES, config.BLOCK_N,
                )  # fmt: skip
            elif config.MASK_K > 0:
                start_load_listed(
                    inputs.k_tensor, b, hk, keys, i, columns,
                    ring.k_buffers, ring.buffer_index(item), ring.full_barrier(item), config.BOXES,
                )  # fmt: skip
            else:
                start_load(
                    inputs.k_tensor, b, hk, row, end_k, n_keys,
                    ring.k_buffers, ring.buffer_index(item), ring.full_barrier(item), config.BOXES, RAGGED_K,
                )  # fmt: skip
            ring.wait_empty(item + 1)
            if config.PAGE_SIZE > 0:
                start_load_pages(
                    inputs.v_tensor, problem.cache, pages, hk, row, n_keys, inputs.steps_vb, inputs.steps_vn,
                    ring.v_buffers, ring.buffer_index(item + 1), ring.full_barrier(item + 1), config.BOXES_V,
                    config.BLOCK_N,
                )  # fmt: skip
                # Load the next block's page numbers now: they arrive while this warp waits for buffers.
                row = order.block(gl.minimum(i + 1, n_blocks - 1)) * config.BLOCK_N
                pages = problem.pages(tile, table, row, config.BLOCK_N)
            elif config.MASK_K > 0:
                start_load_listed(
                    inputs.v_tensor, b, hk, keys, i, columns,
                    ring.v_buffers, ring.buffer_index(item + 1), ring.full_barrier(item + 1), config.BOXES_V,
                )  # fmt: skip
                columns = keys.columns(gl.minimum(i + 1, n_blocks - 1))  # early, as page numbers
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
        scheduler.leave()


@gluon.jit
def _named_barrier(action: gl.constexpr, number: gl.constexpr):
    """Execute `bar.sync` or `bar.arrive` on a barrier of two warpgroups. Triton itself uses only numbers below 8."""
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; bar." + action + " " + number + ", 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr):
    """Wait for the ping-pong turn: until the previous consumer has handed over."""
    if CONSUMER == 0:
        _named_barrier("sync", "8")
    elif CONSUMER == 1:
        _named_barrier("sync", "9")
    else:
        _named_barrier("sync", "10")


@gluon.jit
def _hand_over(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Give the ping-pong turn to the next consumer; the first follows the last. Does not block."""
    if CONSUMER == CONSUMERS - 1:
        _named_barrier("arrive", "8")
    elif CONSUMER == 0:
        _named_barrier("arrive", "9")
    else:
        _named_barrier("arrive", "10")


@aggregate
class Consumer:
    """State of a consumer warpgroup that is valid for all tiles."""

    INDEX: gl.constexpr
    problem: Problem
    shared: Shared
    outputs: Outputs
    score: Score
    key_blocks: gl.tensor | gl.constexpr  # of a tile: `Factors.key_blocks`

    @gluon.jit
    def with_factors(self, score, key_blocks):
        """Return the state with what float8 has for each tile."""
        return Consumer(self.INDEX, self.problem, self.shared, self.outputs, score, key_blocks)

    @gluon.jit
    def weights_operand(self, weights, o):
        """Return weights [64, BLOCK_N] as the operand that `start_block_values` takes in the next iteration."""
        config: gl.constexpr = self.shared.config
        if config.BITS == 8:
            p = packed_weights(weights, self.shared.ring.v_buffers.dtype)
        else:
            p = mma_operand(weights, o, self.shared.ring.v_buffers.dtype, config.PAIRS)
        return p

    @gluon.jit
    def start_block_values(self, p, o, item):
        """Start adding the product of weights and values to each accumulator of out."""
        config: gl.constexpr = self.shared.config
        ring = self.shared.ring
        if config.BITS == 8:
            V_TYPE: gl.constexpr = ring.v_buffers.dtype
            weights = unpacked_weights(p, V_TYPE, operand_layout(o[0].type.layout, 8))
            v = box_matrix(ring.v_buffers, ring.buffer_index(item), 0, 1).permute((1, 0))
            started = (warpgroup_mma(weights, v, o[0], is_async=True),)
        else:
            started = start_values(p, o, ring, self.shared.ones, item, config)
        return started

    @gluon.jit
    def wait_turn(self):
        if self.shared.config.PINGPONG:
            _wait_turn(self.INDEX)

    @gluon.jit
    def hand_over(self):
        if self.shared.config.PINGPONG:
            _hand_over(self.INDEX, self.shared.config.CONSUMERS)


@gluon.jit
def _attend_blocks(
    consumer, q, rows, order, start, end,
    o,  # accumulators [64, Dv] fp32; in a kernel with a fixed maximum, also the rounded weights' sums [64, 8]
    p,  # weights of the previous block, a `mma_operand`
    m_i,  # [64] fp32, in units of log2
    l_i,  # [64, 4] fp32, `sums_by_thread`
    item,  # ring item of the previous block's K
    keys, upcoming,  # for a block mask: `TileList`, and its codes at `start` and columns at start + 1
    MASKED: gl.constexpr, FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """Run the KV loop over positions [start, end) of the order.

    An iteration issues the scores of its block and the values of the previous block, then computes the softmax of its
    block while the tensor cores add the values. The values of the last block are left to the caller.

    FIXED_MAX: m_i does not change.
    """
    config: gl.constexpr = consumer.shared.config
    ring = consumer.shared.ring
    LISTED: gl.constexpr = MASKED and config.MASK_K > 0
    if LISTED:  # numbers that lead to words are read one or two blocks early, so that nobody waits for them
        codes, columns = upcoming
    for i in range(start, end):
        item += 2  # this block's K; item - 1 is the previous block's V
        ring.wait_full(item)
        consumer.wait_turn()
        s = start_scores(q, consumer.shared.queries, ring, item, consumer.INDEX, config)
        ring.wait_full(item - 1)
        o = consumer.start_block_values(p, o, item - 1)
        consumer.hand_over()
        start_n = order.block(i) * config.BLOCK_N
        factors = block_factors(consumer.key_blocks, start_n, consumer.problem.seqlen_k, config)
        words = None
        if LISTED:  # while the products run
            words = keys.keep_words(i, codes, gl.arange(0, ROWS, layout=m_i.type.layout))
            codes = keys.codes(columns)
            columns = keys.masked_columns(i + 2)
        s = warpgroup_mma_wait(len(o), deps=[s])  # the values may still run
        ring.release(item)
        s = scaled_by_block(s, factors)
        if FIXED_MAX:
            weights = fixed_max_step(s, m_i, start_n, rows, consumer.score)
        else:
            weights, m_i, alpha = softmax_step(
                s, m_i, start_n, rows, consumer.score, consumer.problem, MASKED, words, config.WEIGHT_SHIFT
            )
            l_i *= gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i += sums_by_thread(weights)
        o = finish_values(o)
        ring.release(item - 1)
        p = consumer.weights_operand(weights, o)
        if not FIXED_MAX:
            o = rescaled(o, alpha)
    return o, p, m_i, l_i, item


@gluon.jit
def _skip_masked(consumer, tile, key0, item):
    """Skip the blocks at the tile's end that the right mask hides from all rows of this consumer. Return the next item.

    Wait for each stage, then release it unread. An earlier release could count for the item that the stage held
    before, which other consumers may still read. `key0`: the key that row 0 is aligned with. At least one block
    remains.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    ring = consumer.shared.ring
    _, _, _, end = problem.keys_of_rows(key0, ROWS, tile.n_keys)
    consumer_end = gl.maximum(gl.cdiv(end, config.BLOCK_N), tile.first_block + 1)
    for _ in range(consumer_end, tile.end_block):
        # Consumers must take equally many ping-pong turns.
        consumer.wait_turn()
        consumer.hand_over()
        for j in gl.static_range(2):
            ring.wait_full(item + j)
            ring.release(item + j)
        item += 2
    return item


@gluon.jit
def _attend_tile(consumer, tile, item, q_loads):
    """Compute and write the rows of out and lse of this consumer's 64 queries of a tile.

    1. Skip the blocks that the right mask hides from all 64 rows. A lone consumer has none: the tile ends at its rows.
    2. Prologue: scores and softmax of the first block of the order (`block_order`).
    3. KV loop (`_attend_blocks`), which adds the values of each block one iteration later. Positions [1, n_masked) of
       the order are masked, later ones are not. FIXED_MAX: positions [1, n_edge_blocks) update the maximum, and
       [n_edge_blocks, n_blocks) use it unchanged. With a block mask, the order is that of the tile's list.
    4. Epilogue: values of the last block, division by the sum of weights, lse, stores.

    `item`: ring item of the first block's K; its V is item + 1. `q_loads`: tiles of queries that were loaded before.
    Returns (item of the next tile, overflown rows [64] int32, or 0 without FIXED_MAX).
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    ring = consumer.shared.ring
    queries = consumer.shared.queries
    CONSUMER: gl.constexpr = consumer.INDEX
    WIDTH: gl.constexpr = outputs.o_tensor.block_shape[-1]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N, config.BITS))
    # HAS_LEFT need not be asked: it implies HAS_RIGHT or CHECK_KEYS.
    MASKED: gl.constexpr = problem.HAS_RIGHT or problem.CHECK_KEYS
    LISTED: gl.constexpr = config.MASK_K > 0

    row0 = tile.row0 + CONSUMER * ROWS
    order = block_order(tile, problem, config.BLOCK_M, config.BLOCK_N)
    key0 = row0 + (tile.n_keys - tile.n_queries)
    if problem.HAS_RIGHT and config.CONSUMERS > 1:
        first_item = item
        item = _skip_masked(consumer, tile, key0, item)
        order = order.without_last((item - first_item) // 2)
    offs_m = row0 + gl.arange(0, ROWS, layout=S_ROWS)
    # Positions in the order. A mask or the end of the keys may cut only blocks [0, n_masked). Every row sees all keys
    # of blocks [n_edge_blocks, n_blocks), and has seen a key before them.
    n_blocks = order.end_block - order.first_block
    n_edge_blocks = order.n_right + order.n_left
    n_masked = 1
    if problem.HAS_LEFT:
        n_masked = n_edge_blocks
    elif problem.HAS_RIGHT:
        _, _, full_end, _ = problem.keys_of_rows(key0, ROWS, tile.n_keys)
        n_masked = order.end_block - last_block(full_end, config.BLOCK_N)
        n_masked = gl.maximum(gl.minimum(n_masked, order.n_right), 1)
    keys = None
    if LISTED:
        keys = problem.tile_list(tile, row0, config.BLOCK_N)
        n_masked = keys.masked_count()
        n_edge_blocks = gl.minimum(n_masked + 1, n_blocks)  # all rows see all keys of the next one
    slope = 0.0
    if consumer.score.ALIBI:
        slope = gl.load(outputs.slopes_ptr + tile.b * outputs.stride_slopeb + tile.h) * LOG2E
    rows = Rows(offs_m + (tile.n_keys - tile.n_queries), tile.n_keys, slope)
    words = None
    if LISTED:
        words = keys.keep_words(0, (tile.listed.code, tile.listed.next_code), gl.arange(0, ROWS, layout=S_ROWS))

    # Prologue: no block comes before the first one, so there are no values to add.
    scale = consumer.score.scale
    if config.BITS == 8:
        factor = outputs.factors.query_factor(tile, row0, problem, config)
        score = consumer.score.scaled(factor * outputs.factors.key_factor(tile, problem, config))
        consumer = consumer.with_factors(score, outputs.factors.key_blocks(tile, problem, config))
    queries.wait_full(CONSUMER, q_loads)
    if config.K_MEAN:
        offset = factor * outputs.factors.key_mean_products(tile, problem, queries, CONSUMER, S_ROWS, config)
    q = queries_in_registers(queries, CONSUMER, config)
    # Out goes elsewhere and the queries are in registers, so nobody reads their buffers any more.
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS == config.BOXES:
        queries.release(CONSUMER)
    ring.wait_full(item)
    s = start_scores(q, queries, ring, item, CONSUMER, config)
    upcoming = ()
    if LISTED:
        columns = keys.masked_columns(1)
        next_columns = keys.masked_columns(2)
    s = warpgroup_mma_wait(0, deps=[s])
    ring.release(item)
    if LISTED:
        upcoming = (keys.codes(columns), next_columns)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    start_n = (order.end_block - 1) * config.BLOCK_N
    s = scaled_by_block(s, block_factors(consumer.key_blocks, start_n, problem.seqlen_k, config))
    weights, m_i, _ = softmax_step(s, m_i, start_n, rows, consumer.score, problem, MASKED, words, config.WEIGHT_SHIFT)
    l_i = sums_by_thread(weights)
    o = zero_output(WIDTH, config.BOXES_V, config.BITS)
    if config.FIXED_MAX:
        o += (zero_sums(),)
    p = consumer.weights_operand(weights, o)

    # KV loop.
    if problem.HAS_LEFT or problem.HAS_RIGHT or LISTED:
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, 1, n_masked, o, p, m_i, l_i, item, keys, upcoming, True, False
        )  # fmt: skip
    if config.FIXED_MAX:
        if not problem.HAS_LEFT:
            o, p, m_i, l_i, item = _attend_blocks(
                consumer, q, rows, order, n_masked, n_edge_blocks, o, p, m_i, l_i, item, keys, upcoming, False, False
            )  # fmt: skip
        # The maximum is still -inf although the row sees the next blocks: its scores overflowed or its inputs are
        # infinite. Flag it for the fallback.
        is_lost = (m_i == float("-inf")) & (n_edge_blocks < n_blocks)
        m_i = gl.where(m_i == float("-inf"), 0.0, m_i)
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, n_edge_blocks, n_blocks, o, p, m_i, l_i, item, keys, upcoming, False, True
        )  # fmt: skip
    else:
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, n_masked, n_blocks, o, p, m_i, l_i, item, keys, upcoming, False, False
        )  # fmt: skip

    # Epilogue.
    # The last scores have read the queries.
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS < config.BOXES:
        queries.release(CONSUMER)
    ring.wait_full(item + 1)
    o = finish_values(consumer.start_block_values(p, o, item + 1))
    ring.release(item + 1)
    l_i = gl.convert_layout(gl.sum(l_i, 1), S_ROWS)
    l_rounded = l_i
    if config.FIXED_MAX:  # a running maximum makes a dominant weight exactly 1, so that l_i serves for out as well
        # Out is divided by the sum of the rounded weights. So it stays a mean of the values, in which the rounding of a
        # dominant weight cancels. It also agrees with the weights of the backward pass: delta is rowsum(dout * out).
        l_rounded = gl.convert_layout(gl.max(o[run_count(config.BOXES_V)], 1), S_ROWS)
    # A row that saw no key or is beyond its sample's end has out 0 and lse +inf.
    has_keys = l_i != 0.0
    if config.K_MEAN:  # the softmax does not see what all keys of a row have in common
        m_i += (-offset if consumer.score.NEGATE else offset) * scale
        l_rounded = gl.where(offset - offset == 0.0, l_rounded, float("nan"))
    total = gl.where(has_keys, l_i, 1.0)
    factor = gl.where(has_keys, 1.0 / gl.where(has_keys, l_rounded, 1.0), 0.0)
    lse_log2 = gl.where(has_keys, m_i + gl.log2(total), float("-inf"))
    keys_weight = factor
    if outputs.SINKS:
        lse, keys_weight = add_sink(lse_log2, gl.load(outputs.sinks_ptr + tile.h))
    else:
        lse = lse_log2 * LN2
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    if problem.LENGTHS == SEQ_LENS:
        factor = gl.where(offs_m < tile.n_queries, factor, 0.0)
        lse = gl.where(offs_m < tile.n_queries, lse, float("inf"))
    if problem.LENGTHS == PACKED:
        lse_ptr = outputs.lse_ptr + tile.h.to(gl.int64) * problem.total_q + tile.first_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < tile.n_queries)
    else:
        lse_ptr = outputs.lse_ptr + (tile.b * problem.heads_q + tile.h).to(gl.int64) * problem.seqlen_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < problem.seqlen_q)
    overflown = 0
    if config.FIXED_MAX:
        overflown = (is_lost | overflown_rows(l_i, o, config.BOXES_V)).to(gl.int32)
    _store_output(consumer, tile, row0, o, factor, keys_weight)
    return item + 2, overflown


@gluon.jit
def _attend_tile_in_chunks(consumer, tile, item, q_loads):
    """Compute and write the rows of this consumer as `_attend_tile`, in the order of `attention/fixed_order.py`."""
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    queries = consumer.shared.queries
    CONSUMER: gl.constexpr = consumer.INDEX
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N))
    row0 = tile.row0 + CONSUMER * ROWS
    key0 = row0 + (tile.n_keys - tile.n_queries)
    end_block = tile.end_block
    if problem.HAS_RIGHT and config.CONSUMERS > 1:
        first_item = item
        item = _skip_masked(consumer, tile, key0, item)
        end_block -= (item - first_item) // 2
    offs_m = row0 + gl.arange(0, ROWS, layout=S_ROWS)
    rows = Rows(offs_m + (tile.n_keys - tile.n_queries), tile.n_keys, 0.0)
    queries.wait_full(CONSUMER, q_loads)
    q = queries_in_registers(queries, CONSUMER, config)
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS == config.BOXES:
        queries.release(CONSUMER)
    o, l_i, m_i, item = attend_chunks(consumer, q, rows, key0, tile, end_block, item)
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS < config.BOXES:
        queries.release(CONSUMER)
    sink = gl.zeros([ROWS], gl.float32, S_ROWS)
    alpha = 1.0
    if outputs.SINKS:
        sink += gl.load(outputs.sinks_ptr + tile.h)
        m_i, l_i, alpha = with_sink(sink, m_i, l_i)
    # A row that saw no key has out 0 and lse +inf.
    has_keys = l_i != 0.0
    factor = gl.where(has_keys, 1.0 / gl.where(has_keys, l_i, 1.0), 0.0)
    lse = gl.where(has_keys, row_lse(sink, m_i, gl.where(has_keys, l_i, 1.0)), float("inf"))
    if problem.LENGTHS == PACKED:
        lse_ptr = outputs.lse_ptr + tile.h.to(gl.int64) * problem.total_q + tile.first_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < tile.n_queries)
    else:
        lse_ptr = outputs.lse_ptr + (tile.b * problem.heads_q + tile.h).to(gl.int64) * problem.seqlen_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < problem.seqlen_q)
    if outputs.SINKS:  # the sink's factor first, as in `store_rows` of `attention/decode_combine.py`
        _store_output(consumer, tile, row0, o, alpha, factor)
    else:
        _store_output(consumer, tile, row0, o, factor, factor)
    return item


@gluon.jit
def _store_output(consumer, tile, row0, o, factor, keys_weight):
    """Write rows of out: the accumulators o times `factor`, and with sinks times `keys_weight`.

    Out leaves through shared memory and TMA, which drops rows beyond the end. With SEPARATE_O_BUFFER that copy may go
    on during the next tile. STORE_FROM_REGISTERS: out leaves from registers.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    CONSUMER: gl.constexpr = consumer.INDEX
    DTYPE: gl.constexpr = outputs.o_tensor.dtype
    WIDTH: gl.constexpr = outputs.o_tensor.block_shape[-1]
    # Boxes per tile of `o_buffers`.
    O_BOXES: gl.constexpr = config.BOXES_V if config.SEPARATE_O_BUFFER else config.BOXES
    if config.STORE_FROM_REGISTERS:
        o_matrix = matrix(outputs.o_ptr, outputs.o_tensor, 0)
        offset = head_offset(o_matrix, tile.b, tile.h, tile.first_q, PACKED if problem.LENGTHS == PACKED else EQUAL)
        end = tile.n_queries if problem.LENGTHS == PACKED else problem.seqlen_q
    else:
        tma.store_wait(0)
    for run in gl.static_range(run_count(config.BOXES_V)):
        by_row = gl.convert_layout(factor, gl.SliceLayout(1, o[run].type.layout))[:, None]
        # Rows without keys become 0 even if o is NaN. A row with a NaN score has a factor of NaN and remains NaN.
        if config.BITS == 8:
            values = outputs.factors.dequantised(o[run] * by_row, tile, problem, config)
            out = gl.where(by_row == 0.0, 0.0, values)
        else:
            out = gl.where(by_row == 0.0, 0.0, o[run] * by_row)
        if outputs.SINKS:  # a second product: float32 may hold both factors and not their product
            out *= gl.convert_layout(keys_weight, gl.SliceLayout(1, o[run].type.layout))[:, None]
        if config.CHUNK > 0:
            out = without_sign_of_zero(out)
        out = out.to(DTYPE)
        if config.STORE_FROM_REGISTERS:
            store_rows(out, o_matrix, offset, row0, end, run_start(run, config.BOXES_V) * WIDTH)
        else:
            run_matrix(outputs.o_buffers, CONSUMER, O_BOXES, run, config.BOXES_V).store(out)
    if not config.STORE_FROM_REGISTERS:
        fence_async_shared()
        for j in gl.static_range(config.BOXES_V):
            o_buffer = box_buffer(outputs.o_buffers, CONSUMER, j, O_BOXES)
            o_buffer = o_buffer.reshape(outputs.o_tensor.block_shape)
            start_store(
                outputs.o_tensor, tile.b, tile.h, row0, j * WIDTH, tile.first_q + tile.n_queries, tile.n_queries,
                o_buffer, problem.LENGTHS == PACKED,
            )  # fmt: skip
        if not config.SEPARATE_O_BUFFER:  # out leaves through the buffers that the next queries are loaded to
            tma.store_wait(0)
            consumer.shared.queries.release(CONSUMER)


@gluon.jit
def _consumer(INDEX: gl.constexpr, problem, shared, outputs):
    """Run a consumer warpgroup: its 64 queries of each tile."""
    config: gl.constexpr = shared.config
    score = outputs.score.in_log2()
    consumer = Consumer(INDEX, problem, shared, outputs, score, None)
    item = 0
    q_loads = 0  # tiles of queries loaded so far
    slot = 0  # slot of the tile's info
    if config.FALLBACK:
        slot = shared.flags.next_flagged(slot, 4)
        tile = shared.tile_infos.reread(slot, problem, 4)
    else:
        # Give consumer 0 the first ping-pong turn; otherwise all would wait forever. The fallback needs no such start:
        # the last hand-over of the first pass is still pending on consumer 0's barrier.
        if INDEX == config.CONSUMERS - 1:
            consumer.hand_over()
        tile = shared.tile_infos.read(slot, problem)
    if config.FIXED_MAX:
        all_overflown = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, accumulator_layout(config.BLOCK_N)))
    while tile.end_block > 0:
        if config.CHUNK > 0:
            item = _attend_tile_in_chunks(consumer, tile, item, q_loads)
        else:
            item, overflown = _attend_tile(consumer, tile, item, q_loads)
        if config.FALLBACK:
            q_loads += 1
            slot = shared.flags.next_flagged(slot + 1, 4)
            tile = shared.tile_infos.reread(slot, problem, 4)
        else:
            if config.FIXED_MAX:
                shared.flags.flag(slot, overflown, INDEX)
                all_overflown = all_overflown | overflown
            slot += 1
            q_loads = slot
            tile = shared.tile_infos.read(slot, problem)
    if config.FIXED_MAX:
        shared.flags.finish(slot, all_overflown, INDEX)
        wait_for_stores()  # the fallback may write the same rows
    else:
        tma.store_wait(0)


@gluon.jit
def _attend(problem, shared, inputs, outputs):
    """Run the consumers and the producer until all tiles are done.

    The first consumer runs on the warps that the kernel is launched with and takes the remaining registers. Idle warps
    fill up the producer's warpgroup, which has registers for four warps anyway. With one consumer there are no idle
    warps: it has no registers to give away.
    """
    config: gl.constexpr = shared.config
    OTHERS: gl.constexpr = config.CONSUMERS - 1
    PRODUCERS: gl.constexpr = 3 if OTHERS else 1  # partitions of the producer's warpgroup
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [(_consumer, (i, problem, shared, outputs)) for i in (0, 1, 2)[: OTHERS + 1]]
        + [(_producer, (problem, shared, inputs)), (idle_warps, ()), (idle_warps, ())][:PRODUCERS],
        [4, 4][:OTHERS] + [1, 1, 2][:PRODUCERS],
        [R, R][:OTHERS] + [P, P, P][:PRODUCERS],
    )  # fmt: skip


SIZES = (
    "length", "added", "entries", "stride_table", "stride_maskb", "stride_maskh",
    "heads", "heads_q", "heads_in_parallel", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k",
    "window_left", "window_right", "group_size", "stride_slopeb",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn",
)  # fmt: skip
MASK_ARGUMENTS = ("mask_blocks_ptr", "mask_bits_ptr", "stride_maskb", "stride_maskh")
CACHE_ARGUMENTS = (
    "seqused_ptr", "block_table_ptr", "cache_batch_idx_ptr", "length", "added", "entries", "stride_table",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")
FACTORS = ("q_descale_ptr", "k_descale_ptr", "v_descale_ptr", "k_mean_ptr", "v_mean_ptr")
UNALIGNED_POINTERS = (
    *FACTORS,
    *LENGTH_POINTERS, "slopes_ptr", "sinks_ptr", "seqused_ptr", "block_table_ptr", "cache_batch_idx_ptr",
    "mask_blocks_ptr", "mask_bits_ptr",
)  # fmt: skip


@constexpr_function
def _with_rows(block, rows):
    """Return the shape of a box, with this number of rows."""
    return [*block[:-2], rows, block[-1]]


@gluon.jit
def _key_buffers(tensor, COUNT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Allocate buffers for tiles of keys or values. BLOCK_N rows are one TMA box, or several that are stacked."""
    SHAPE: gl.constexpr = _with_rows(tensor.block_shape, BLOCK_N)
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + SHAPE, tensor.layout)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _fwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, o_tensor,  # (B, H, S, D) with any strides, or ragged (`gluon/tma.py`)
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences; or both are seq_lens
    lse_ptr,  # (B, H, Sq) fp32, packed (H, Tq)
    o_ptr,  # for STORE_FROM_REGISTERS and packed sequences
    slopes_ptr,  # (H,) or (B, H) fp32, for ALIBI
    sinks_ptr,  # (H,) fp32, for SINKS
    q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr,  # `Factors`
    counter_ptr,  # int32, [next tile, programs that left]: for a dynamic schedule
    totals_ptr,  # [programs, consumers, 64 * columns] fp32, for CHUNK without SHARED_TOTALS
    seqused_ptr, block_table_ptr, cache_batch_idx_ptr, length, added, entries, stride_table,  # `KeyCache`
    mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh,  # `BlockMask`
    heads,  # batch * heads_q
    heads_q, heads_in_parallel, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    group_size,  # query heads per KV head
    stride_slopeb,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,  # of `descriptor_steps`
    scale, softcap,
    config: gl.constexpr,  # `Sm90Constants`
):  # fmt: skip
    """Compute out and lse of all tiles.

    1. Allocate shared memory, initialise barriers, wait for previous kernels on the stream.
    2. Run the producer and the consumers until all tiles of the program are done (`_attend`).
    3. FIXED_MAX: if consumers flagged tiles whose sums overflowed, run both for these with a running maximum.
    4. Packed: clear the rows that belong to no sequence.
    """
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Products read Q and K box by box, and V in several adjacent boxes (`run_matrix`). Out is stored like V, and may
    # leave through Q's buffers.
    Q_BUFFERS: gl.constexpr = buffer_count(
        config.CONSUMERS, config.BOXES, not config.SEPARATE_O_BUFFER and not config.STORE_FROM_REGISTERS
    )
    q_buffers = gl.allocate_shared_memory(DTYPE, [Q_BUFFERS] + q_tensor.block_shape, q_tensor.layout)
    K_STAGES: gl.constexpr = config.STAGES if config.ONE_RING else config.STAGES // 2
    K_BUFFERS: gl.constexpr = buffer_count(K_STAGES, config.BOXES, config.ONE_RING)
    k_buffers = _key_buffers(k_tensor, K_BUFFERS, config.BLOCK_N)
    if config.ONE_RING:
        v_buffers = k_buffers
    else:
        V_BUFFERS: gl.constexpr = buffer_count(K_STAGES, config.BOXES_V, True)
        V_ROWS: gl.constexpr = config.BLOCK_N if config.BITS == 16 else v_tensor.block_shape[2]
        v_buffers = _key_buffers(v_tensor, V_BUFFERS, V_ROWS)
    if config.SEPARATE_O_BUFFER:
        O_BUFFERS: gl.constexpr = buffer_count(config.CONSUMERS, config.BOXES_V, True)
        o_buffers = gl.allocate_shared_memory(o_tensor.dtype, [O_BUFFERS] + o_tensor.block_shape, o_tensor.layout)
    else:
        o_buffers = q_buffers
    q_full = gl.allocate_shared_memory(gl.int64, [config.CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [config.CONSUMERS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], BARRIER)
    queries = Queries(q_buffers, q_full, q_empty, config.CONSUMERS, config.BOXES)
    ring = KVRing(k_buffers, v_buffers, kv_full, kv_empty, config.STAGES, config.ONE_RING, config.CONSUMERS)
    queries.init()
    ring.init()
    tile_infos = allocate_tile_infos(config.TILE_INFOS)
    if config.FIXED_MAX:
        flags = allocate_flags(config.CONSUMERS, config.TILE_INFOS)
    else:
        flags = OverflowFlags(None, config.CONSUMERS, config.TILE_INFOS)
    ones = q_buffers
    if config.FIXED_MAX:
        ones = allocate_ones(DTYPE, config.BLOCK_N)
    TOTAL: gl.constexpr = ROWS * o_tensor.block_shape[-1] * config.BOXES_V
    if config.SHARED_TOTALS:
        TOTALS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        totals_buffers = gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, TOTAL], TOTALS_LAYOUT)
        totals = Totals(totals_buffers, None, config.CONSUMERS, TOTAL)
    else:
        totals = Totals(None, totals_ptr, config.CONSUMERS, TOTAL)
    fence_async_shared()
    wait_for_previous_kernels()

    problem = Problem(
        window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q, total_k, heads, heads_in_parallel, batch,
        lengths_q_ptr, lengths_k_ptr,
        KeyCache(
            seqused_ptr, block_table_ptr, cache_batch_idx_ptr, length, added, entries, stride_table, config.PAGE_SIZE
        ),
        BlockMask(mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh, config.MASK_Q, config.MASK_K),
        config.LENGTHS, config.LENGTHS_K, config.CAUSAL, config.HAS_LEFT, config.HAS_RIGHT, config.CHECK_KEYS,
    )  # fmt: skip
    shared = Shared(config, queries, ring, tile_infos, flags, ones, totals)
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, group_size, steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,
        TileScheduler(counter_ptr, config.SCHEDULE),
    )  # fmt: skip
    score = Score(scale, softcap, config.SOFTCAP, config.ALIBI, config.NEGATE)
    factors = Factors(q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr, group_size)
    outputs = Outputs(
        o_tensor, lse_ptr, o_ptr, slopes_ptr, stride_slopeb, sinks_ptr, factors, o_buffers, score, config.SINKS
    )  # fmt: skip
    _attend(problem, shared, inputs, outputs)
    if config.FIXED_MAX:  # noqa: SIM102 (decided when it is compiled)
        if flags.any_flagged() != 0:
            queries.invalidate()
            ring.invalidate()
            queries.init()
            ring.init()
            fence_async_shared()
            fallback_shared = Shared(for_fallback(config), queries, ring, tile_infos, flags, ones, totals)
            _attend(problem, fallback_shared, inputs, outputs)
    if config.LENGTHS == PACKED:
        clear_others(lengths_q_ptr, batch, total_q, heads_q, matrix(o_ptr, o_tensor, 0), lse_ptr)


def constants(problem: AttentionProblem, config: Sm90Config, negate: bool) -> Sm90Constants:
    """Return the constants that the kernel is compiled with."""
    has_partial_block = problem.window_right < 0 and problem.seqlen_k % config.block_n != 0
    return _constants(problem, config, negate, has_partial_block)


@cached_per_kind
def _constants(problem: AttentionProblem, config: Sm90Config, negate: bool, has_partial_block: bool) -> Sm90Constants:
    ragged = lengths_constant(problem) != EQUAL.value
    boxes = box_layout(problem.head_dim, problem.head_dim_v, config.box_columns)[1]
    is_float8 = problem.dtype in FLOAT8
    return Sm90Constants.read_from(
        problem,
        config,
        block_m=CONSUMER_ROWS * config.consumers,
        q_in_registers=min(config.q_in_registers, boxes),
        boxes=boxes,
        boxes_v=value_boxes(problem, config)[1],
        one_ring=has_one_ring(problem, config.box_columns) and not is_float8,
        causal=problem.causal,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        # With a block mask, bits hide what is beyond the keys.
        check_keys=not problem.mask
        and problem.window_right < 0
        and (ragged or problem.window_left >= 0 or has_partial_block),
        lengths=lengths_constant(problem),
        lengths_k=lengths_constant(problem),
        page_size=0,
        mask_q=problem.mask[0] if problem.mask else 0,
        mask_k=problem.mask[1] if problem.mask else 0,
        negate=negate,
        fixed_max=has_fixed_max(problem, config),
        tile_infos=tile_info_count(config),
        schedule=config.scheduler,
        find_ahead=finds_ahead(problem, config),
        bits=8 if is_float8 else 16,
        head_dim=problem.head_dim if is_float8 else 0,
        head_dim_v=problem.head_dim_v if is_float8 else 0,
        weight_shift=WEIGHT_SHIFT[problem.dtype] if is_float8 else 0,
        chunk=chunk_keys(problem) // config.block_n if problem.batch_invariant else 0,
        shared_totals=problem.batch_invariant and config.shared_totals,
    )


def totals_memory(problem: AttentionProblem, config: Sm90Config, device: torch.device) -> torch.Tensor | None:
    """Return memory for the totals of chunks (`chunks.py`), or None if they need none."""
    if not problem.batch_invariant or config.shared_totals:
        return None
    width, boxes = box_layout(problem.head_dim_v, problem.head_dim, config.box_columns)
    rows = grid_size(problem, config, device) * config.consumers * CONSUMER_ROWS
    return torch.empty(rows * width * boxes, dtype=torch.float32, device=device)


def key_arguments(
    tensors: AttentionTensors | KVCacheTensors, config: Sm90Config, layout: str, ragged: bool, rows: int = 0
) -> dict[str, Any]:
    """Return the kernel arguments of keys and values, two tensors of this layout.

    `ragged`: sequences have lengths of their own. `rows`: rows of a TMA box; 0: block_n.
    """
    k, v = tensors[1:3]
    make_descriptor = ragged_descriptor if ragged else dense_descriptor
    (kb, kn), (vb, vn) = (descriptor_steps(k, layout), descriptor_steps(v, layout)) if ragged else ((0, 0), (0, 0))
    rows = rows or config.block_n
    d, dv = k.shape[-1], v.shape[-1]
    return {
        "k_tensor": make_descriptor(k, layout, rows, box_layout(d, dv, config.box_columns)[0]),
        "v_tensor": make_descriptor(v, layout, rows, box_layout(dv, d, config.box_columns)[0]),
        "steps_kb": kb,
        "steps_kn": kn,
        "steps_vb": vb,
        "steps_vn": vn,
    }


def float8_pass(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, config: Sm90Config
) -> Pass:
    """Return the pass of float8: it transposes V before the attention (`float8.py`)."""
    values = transposed_values(problem, tensors.v)
    box = smem_box(value_boxes(problem, config)[0], config.block_n, 4, values.dtype)
    keys = key_arguments(tensors, config, problem.layout, problem.seq_lens or problem.varlen)
    keys |= {"v_tensor": Tiles(values, values.shape, values.stride(), box), "steps_vb": 0, "steps_vn": 0}
    launches = [
        transpose_launch(problem, tensors, values), make_launch(problem, tensors, out, lse, config, keys=keys)
    ]  # fmt: skip
    return Pass(launches, [values], derived_arguments(config))


def mask_arguments(tensors: AttentionTensors) -> dict[str, Any]:
    """Return the kernel arguments of a block mask. Without one all are None, and the kernel has none of them."""
    if tensors.mask_blocks is None:
        return dict.fromkeys(MASK_ARGUMENTS)
    return {"mask_blocks_ptr": tensors.mask_blocks, "mask_bits_ptr": tensors.mask_bits, **mask_strides(tensors)}


def make_launch(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Sm90Config,
    totals: torch.Tensor | None = None,
    keys: dict[str, Any] | None = None,
) -> Launch:
    """Return the launch that fills out and lse.

    `totals`: `totals_memory`. `keys`: arguments of keys in a cache; None: they are in `tensors`.
    """
    q = tensors.q
    layout, d, dv = problem.layout, problem.head_dim, problem.head_dim_v
    scale, negate = softmax_scale(problem, tensors.sm_scale)
    width, width_v = box_layout(d, dv, config.box_columns)[0], value_boxes(problem, config)[0]
    has_lengths = problem.seq_lens or problem.varlen
    lengths_q, lengths_k = (
        (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if problem.varlen else (tensors.seq_lens, tensors.seq_lens)
    )
    qb, qm = descriptor_steps(q, layout) if has_lengths else (0, 0)
    unit = min(config.block_n, problem.mask[1]) if problem.mask else 0
    arguments = {
        "q_tensor": (ragged_descriptor if has_lengths else dense_descriptor)(q, layout, CONSUMER_ROWS, width),
        # Rows beyond a sample's end are written as zeros. Rows beyond a packed sequence belong to the next one.
        "o_tensor": (ragged_descriptor if problem.varlen else dense_descriptor)(out, layout, CONSUMER_ROWS, width_v),
        "lengths_q_ptr": lengths_q,
        "lengths_k_ptr": lengths_k,
        "lse_ptr": lse,
        "o_ptr": out if config.store_from_registers or problem.varlen else None,
        "slopes_ptr": tensors.alibi_slopes,
        "sinks_ptr": tensors.sinks,
        "q_descale_ptr": tensors.q_descale,
        "k_descale_ptr": tensors.k_descale,
        "v_descale_ptr": tensors.v_descale,
        "k_mean_ptr": tensors.k_mean,
        "v_mean_ptr": tensors.v_mean,
        "counter_ptr": launch_counter(q) if config.scheduler == "dynamic" else None,
        "totals_ptr": totals,
        **dict.fromkeys(CACHE_ARGUMENTS),
        **mask_arguments(tensors),
        "heads": problem.batch * problem.heads_q,
        "heads_q": problem.heads_q,
        "heads_in_parallel": heads_in_parallel(problem),
        "batch": problem.batch,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "total_q": problem.total_q,
        "total_k": problem.total_k,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "group_size": problem.heads_q // problem.heads_kv,
        "stride_slopeb": per_head_stride(tensors.alibi_slopes),
        "steps_qb": qb,
        "steps_qm": qm,
        "scale": scale,
        "softcap": problem.softcap,
        **(key_arguments(tensors, config, layout, has_lengths, unit) if keys is None else keys),
    }
    grid = grid_size(problem, config, q.device)
    values = {"config": constants(problem, config, negate)}
    options = compile_options(config) | (FIXED_ORDER_OPTIONS if problem.batch_invariant else {})
    return Launch(_fwd_sm90_kernel, grid, arguments, values, options)


def _config(problem: AttentionProblem) -> Sm90Config:
    return forced_config("sm90", problem) or select_config(problem)


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse."""
    config = _config(problem)
    if problem.dtype in FLOAT8:
        return float8_pass(problem, tensors, out, lse, config)
    totals = totals_memory(problem, config, tensors.q.device)
    launch = make_launch(problem, tensors, out, lse, config, totals)
    return Pass([launch], [] if totals is None else [totals], derived_arguments(config))


def derived_arguments(config: Sm90Config) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return `Pass.derived`: the tile counter of a dynamic schedule."""
    return {"counter_ptr": launch_counter} if config.scheduler == "dynamic" else {}
