"""Decoding over a latent cache (MLA with absorbed projections) for Hopper (sm_90), in Gluon.

All query heads share one KV head of 576 features, and its first 512 are the values (DeepSeek-AI 2024,
arXiv:2405.04434). So a block of keys is copied once and multiplied twice. With 128 heads that is more work for the
tensor cores than for the memory. A tile has 64 queries, and needs two warpgroups: 64 x 512 sums are more registers than
one warpgroup has.

Rows of a tile are token * group + head, as in the portable kernel. `attention/stream_k.py` divides the work for both,
and `_combine_kernel` merges partial results of both. More than 64 heads form groups, each treated as a KV head of its
own. The groups' tiles are walked at the same time, so that keys come from global memory once. The partial results of
one chunk are 128 KB, so programs have whole tiles if that takes few more blocks of keys (`split_cost`).

* The producer, one warp, copies blocks of 64 keys through TMA, the last block of a chunk first.
* The first consumer forms the scores and weights of a block, and the left half of the sums. It leaves the weights in
  shared memory.
* The second consumer forms the right half of the sums, while the first one computes exponentials.

The first consumer waits for its scores and for its half of the block before at once. To let that half run on under the
exponentials was up to 5 % slower. To have both consumers form scores in turns was not faster (docs/log/decode.md).

The queries and two blocks of keys fill the shared memory. So a block is handed over in three slices, each with barriers
of its own: the features that are not values are free as soon as the scores are formed, the right half once the second
consumer has read it, the left half last.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention import decode as portable
from diyfa.backends.cuda.attention.block_info import end_visible
from diyfa.backends.cuda.attention.launch import positive_scale
from diyfa.backends.cuda.attention.seq_info import cache_entry, cached_keys, left_padding
from diyfa.backends.cuda.attention.stream_k import divide_work, next_chunk, partials_slot, tile_work
from diyfa.backends.cuda.attention.tile_io import LOWEST, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, order_lanes, release, wait_full
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, optimisation_barrier, ptxas_options
from diyfa.backends.cuda.gluon.tma import descriptor_steps, ragged_descriptor
from diyfa.backends.cuda.hopper import decode_mla_configs as configs
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, mma_operand, rescaled, unpaired, zero_output
from diyfa.backends.cuda.hopper.softmax import LN2, Rows, Score, softmax_step
from diyfa.backends.cuda.hopper.tiles import BOUND, sequence_end
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launcher import Box, Tiles, shared_box
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import KVCacheProblem, KVCacheTensors, Launch

BLOCK_N = gl.constexpr(configs.BLOCK_N)
STAGES = gl.constexpr(configs.STAGES)
COLUMNS = gl.constexpr(configs.HEAD_DIM_V)
HALF = gl.constexpr(configs.HEAD_DIM_V // 2)  # columns of a consumer
TAIL = gl.constexpr(configs.HEAD_DIM - configs.HEAD_DIM_V)  # features of keys that are not values
LEFT, RIGHT, KEYS_ONLY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # slices of a block
SLICES = gl.constexpr(3)
# Registers of a thread. The first consumer has 240, which the others leave.
SECOND_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(56)
SCAN = gl.constexpr(128)  # tiles whose work is added up at once


@dataclass(frozen=True, eq=False)
class Sm90MlaConstants(Constants):
    """Constants of the kernel."""

    page_size: int  # 0: no pages
    causal: bool
    negate: bool
    split_cost: int  # `DecodeConfig`'s


@aggregate
class Mask:
    """The mask, for `softmax_step`: each row has a last key that it sees."""

    CAUSAL: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr


@aggregate
class Sizes:
    """Sizes of a call, and pointers to where its sequences lie. A pointer is None if the call does not need it."""

    config: gl.constexpr  # `Sm90MlaConstants`
    seqlens_ptr: gl.tensor | gl.constexpr
    block_table_ptr: gl.tensor | gl.constexpr
    cache_batch_idx_ptr: gl.tensor | gl.constexpr
    leftpad_ptr: gl.tensor | gl.constexpr
    length: gl.tensor
    added: gl.tensor
    capacity: gl.tensor
    batch: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    groups: gl.tensor  # so many of the heads_kv groups of heads share a KV head
    blocks_m: gl.tensor
    seqlen_q: gl.tensor
    entries: gl.tensor
    stride_table: gl.tensor

    @gluon.jit
    def count_blocks(self, tile, inside=None):
        """Look up tiles -> (blocks of keys that each sees, at least one; keys; padding before them).

        `inside`: as in seq_info.py.
        """
        b = tile // self.blocks_m
        n_keys = cached_keys(None, self.seqlens_ptr, b, self.length, self.added, self.capacity, inside)
        pad = left_padding(self.leftpad_ptr, b, self.capacity, inside)
        end = n_keys
        if self.config.CAUSAL:
            rows = gl.minimum((tile % self.blocks_m + 1) * ROWS, self.seqlen_q * self.group)
            end = end_visible((rows - 1) // self.group + n_keys - self.seqlen_q, 0, n_keys)
        n_blocks = gl.maximum(gl.cdiv(gl.maximum(end - pad, 0), BLOCK_N), 1)
        return n_blocks, n_keys, pad


@aggregate
class Chunk:
    """Blocks [begin, end) of the keys of a tile, counted from `pad`. end = 0: the share has no chunk left."""

    tile: gl.tensor
    hk: gl.tensor  # the group of heads: `groups` of them share a KV head
    begin: gl.tensor
    end: gl.tensor
    n_blocks: gl.tensor  # of the tile
    n_keys: gl.tensor
    pad: gl.tensor

    @gluon.jit
    def is_whole(self):
        return self.end - self.begin == self.n_blocks

    @gluon.jit
    def slot(self):
        """Where its partial results go."""
        return partials_slot(gl.program_id(1) * gl.num_programs(0) + gl.program_id(0), (self.begin == 0).to(gl.int32))

    @gluon.jit
    def entry(self, sizes):
        """Return the `cache_entry` of the chunk's sequence."""
        return cache_entry(sizes.cache_batch_idx_ptr, self.tile // sizes.blocks_m, sizes.entries, self.n_keys)


@aggregate
class Share:
    """The rest of a program's share of the iteration space (`attention/stream_k.py`).

    It fits 32 bits: more blocks would take a program hours.
    """

    tile: gl.tensor
    done_in_tile: gl.tensor  # work of the tile that is behind
    remaining: gl.tensor  # work of the share that is ahead
    tile_cost: gl.tensor
    min_tile_work: gl.tensor

    @gluon.jit
    def next(self, sizes):
        """Skip what has no blocks. Return the next chunk, and the share behind it."""
        SPLIT_COST: gl.constexpr = sizes.config.SPLIT_COST
        tile = self.tile
        done_in_tile = self.done_in_tile
        remaining = self.remaining
        cost = (self.tile_cost, self.min_tile_work)
        hk = 0
        begin = 0
        end = 0
        n_blocks = 0
        n_keys = 0
        pad = 0
        while (begin >= end) & (remaining > 0):
            n_blocks, n_keys, pad = sizes.count_blocks(tile)
            work = tile_work(n_blocks, cost, SPLIT_COST)
            if done_in_tile < work * (sizes.heads_kv // gl.num_programs(0)):
                head_round, begin, end, taken = next_chunk(
                    done_in_tile, 0, done_in_tile + remaining, n_blocks, work, cost, False, SPLIT_COST
                )
                hk = head_round * gl.num_programs(0) + gl.program_id(0)
                done_in_tile += taken
                remaining -= taken
            else:
                done_in_tile = gl.to_tensor(0)
                tile += 1
        end = gl.where(begin < end, end, 0)
        return (
            Chunk(tile, hk, begin, end, n_blocks, n_keys, pad),
            Share(tile, done_in_tile, remaining, self.tile_cost, self.min_tile_work),
        )


@gluon.jit
def _find_share(sizes):
    """Find this program's share of the iteration space.

    The scalar rule comes from `stream_k.py`. This function forms only the vectors, which need layouts in Gluon.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    head_rounds = sizes.heads_kv // gl.num_programs(0)
    n_tiles = sizes.batch * sizes.blocks_m
    total_blocks = gl.full([], 0, gl.int64)
    max_blocks = 0
    for start in range(0, n_tiles, SCAN):
        tile = start + gl.arange(0, SCAN, layout=LANES)
        n_blocks, _, _ = sizes.count_blocks(tile, tile < n_tiles)
        n_blocks = gl.where(tile < n_tiles, n_blocks, 0)
        total_blocks += gl.sum(n_blocks.to(gl.int64), 0)
        max_blocks = gl.maximum(max_blocks, gl.max(n_blocks, 0))
    length, share, cost = divide_work(
        total_blocks, n_tiles, max_blocks, head_rounds, gl.num_programs(1), sizes.config.SPLIT_COST
    )
    position = gl.minimum(gl.program_id(1) * share, length)
    # The tile that the share begins in follows those that end before it. Their ends are sums over pairs of tiles.
    PAIRS: gl.constexpr = gl.BlockedLayout([SCAN, 1], [1, 32], [1, 4], [1, 0])
    earlier = gl.arange(0, SCAN, layout=gl.SliceLayout(1, PAIRS))[:, None]
    later = gl.arange(0, SCAN, layout=gl.SliceLayout(0, PAIRS))
    first_tile = 0
    tile_start = gl.full([], 0, gl.int64)
    ahead = gl.full([], 0, gl.int64)
    for start in range(0, n_tiles, SCAN):
        tile = start + gl.arange(0, SCAN, layout=LANES)
        n_blocks, _, _ = sizes.count_blocks(tile, tile < n_tiles)
        # The work of SCAN tiles fits 32 bits.
        work = gl.where(tile < n_tiles, tile_work(n_blocks, cost, sizes.config.SPLIT_COST), 0)
        work = gl.convert_layout(work, gl.SliceLayout(1, PAIRS))
        ends = gl.sum(gl.where(earlier <= later[None, :], work[:, None], 0), 0)
        ends = ahead + ends.to(gl.int64) * head_rounds
        is_before = (ends <= position) & (start + later < n_tiles)
        first_tile += gl.sum(is_before.to(gl.int32), 0)
        tile_start = gl.maximum(tile_start, gl.max(gl.where(is_before, ends, 0), 0))
        ahead = gl.max(ends, 0)
    remaining = gl.minimum(share, length - position)
    tile_cost, min_tile_work = cost
    return Share(first_tile, (position - tile_start).to(gl.int32), remaining.to(gl.int32), tile_cost, min_tile_work)


@aggregate
class Shared:
    """The queries, the ring of blocks of keys, and the weights that the first consumer leaves for the second one.

    Barriers count phases (`gluon/channel.py`). Item n is the n-th block that the program reads.
    """

    q_halves: gl.shared_memory_descriptor  # [2, 1, tokens, heads, HALF]
    q_tail: gl.shared_memory_descriptor  # [1, 1, tokens, heads, TAIL]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    halves: gl.shared_memory_descriptor  # [2 * STAGES, 1, 1, 1, BLOCK_N, HALF]
    tails: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_N, TAIL]
    full: gl.shared_memory_descriptor  # [SLICES * STAGES, 1]
    empty: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor  # [ROWS, BLOCK_N]
    statistics: gl.shared_memory_descriptor  # [2, ROWS]: factors that rescale the sums, sums of weights
    weights_full: gl.shared_memory_descriptor
    weights_empty: gl.shared_memory_descriptor

    @gluon.jit
    def init(self):
        for i in gl.static_range(SLICES * STAGES):
            mbarrier.init(self.full.index(i), count=1)
            mbarrier.init(self.empty.index(i), count=WARPS)
        mbarrier.init(self.q_full, count=1)
        mbarrier.init(self.q_empty, count=WARPS)
        mbarrier.init(self.weights_full, count=WARPS)
        mbarrier.init(self.weights_empty, count=WARPS)

    @gluon.jit
    def queries(self, zero, SLICE: gl.constexpr):
        if SLICE == KEYS_ONLY:
            q = self.q_tail.index(zero).reshape([ROWS, TAIL])
        else:
            q = self.q_halves.index(SLICE + zero).reshape([ROWS, HALF])
        return q

    @gluon.jit
    def keys(self, item, SLICE: gl.constexpr):
        if SLICE == KEYS_ONLY:
            k = self.tails.index(item % STAGES).reshape([BLOCK_N, TAIL])
        else:
            k = self.halves.index(item % STAGES * 2 + SLICE).reshape([BLOCK_N, HALF])
        return k

    @gluon.jit
    def wait_full(self, item, SLICE: gl.constexpr):
        """A consumer waits until a slice of the item is loaded."""
        wait_full(self.full.index(SLICE * STAGES + item % STAGES), (item // STAGES) & 1)

    @gluon.jit
    def release(self, item, SLICE: gl.constexpr):
        """Free a slice of the item. One consumer calls it: the one that reads the slice last."""
        release(self.empty.index(SLICE * STAGES + item % STAGES))

    @gluon.jit
    def hand_weights(self, weights, alpha, l_i, item):
        """The first consumer leaves the item's weights, factors and sums of weights for the second one."""
        wait_full(self.weights_empty, (item & 1) ^ 1)
        self.weights.store(weights.to(self.weights.dtype))
        self.statistics.index(0).store(alpha)
        self.statistics.index(1).store(l_i)
        fence_async_shared()
        order_lanes()
        release(self.weights_full)


@aggregate
class Outputs:
    """Pointers and strides of what consumers write."""

    o_ptr: gl.tensor
    lse_ptr: gl.tensor
    sums_ptr: gl.tensor  # partial results, as in `_decode_kernel`
    statistics_ptr: gl.tensor
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor


@gluon.jit
def _load_slice(tensor, coordinates, shared, item, buffer, SLICE: gl.constexpr):
    """Copy a slice of a block of keys as soon as its buffer is free."""
    barrier = SLICE * STAGES + item % STAGES
    mbarrier.wait(shared.empty.index(barrier), ((item // STAGES) & 1) ^ 1)
    mbarrier.expect(shared.full.index(barrier), tensor.block_type.nbytes)
    async_load(tensor, coordinates, shared.full.index(barrier), buffer)


@gluon.jit
def _producer(share, sizes, shared, q_tensor, q_tail_tensor, k_tensor, k_tail_tensor, steps_kb, steps_kn):
    """One warp: for each chunk copy the queries, then the keys block by block, from the last block to the first."""
    config: gl.constexpr = sizes.config
    item = 0
    q_loads = 0
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        b = chunk.tile // sizes.blocks_m
        row = chunk.tile % sizes.blocks_m * ROWS
        token = row // sizes.group
        h = chunk.hk * sizes.group + row % sizes.group
        mbarrier.wait(shared.q_empty, (q_loads & 1) ^ 1)
        mbarrier.expect(shared.q_full, 2 * q_tensor.block_type.nbytes + q_tail_tensor.block_type.nbytes)
        async_load(q_tail_tensor, [b, token, h, COLUMNS], shared.q_full, shared.q_tail.index(0))
        async_load(q_tensor, [b, token, h, HALF], shared.q_full, shared.q_halves.index(RIGHT))
        async_load(q_tensor, [b, token, h, 0], shared.q_full, shared.q_halves.index(LEFT))
        entry, n_keys = chunk.entry(sizes)
        table = 0
        if config.PAGE_SIZE > 0:
            table = sizes.block_table_ptr + b.to(gl.int64) * sizes.stride_table
            entry = gl.load(table + (chunk.end - 1) * BLOCK_N // config.PAGE_SIZE)
        for i in range(chunk.end - chunk.begin):
            block = chunk.end - 1 - i
            key = chunk.pad + block * BLOCK_N
            valid_entry = gl.where((entry >= 0) & (entry < sizes.entries), entry, 0)
            row = key
            length = n_keys
            if config.PAGE_SIZE > 0:  # each page is an entry of its own
                page = key // config.PAGE_SIZE
                row = key - page * config.PAGE_SIZE
                length = gl.minimum(n_keys - page * config.PAGE_SIZE, config.PAGE_SIZE)
                length = gl.where(valid_entry == entry, length, 0)
                # Load the page of the next block now, so that its copies need not wait for the load.
                entry = gl.load(table + gl.maximum(key - BLOCK_N, 0) // config.PAGE_SIZE)
            length = gl.maximum(length, 0)
            end = sequence_end(valid_entry, 0, length, steps_kb, steps_kn, SEQ_LENS)
            first = BOUND - length + row
            _load_slice(
                k_tail_tensor, [BOUND, end, chunk.hk // sizes.groups, first, COLUMNS], shared, item,
                shared.tails.index(item % STAGES), KEYS_ONLY,
            )  # fmt: skip
            _load_slice(
                k_tensor, [BOUND, end, chunk.hk // sizes.groups, first, HALF], shared, item,
                shared.halves.index(item % STAGES * 2 + RIGHT), RIGHT,
            )  # fmt: skip
            _load_slice(
                k_tensor, [BOUND, end, chunk.hk // sizes.groups, first, 0], shared, item,
                shared.halves.index(item % STAGES * 2 + LEFT), LEFT,
            )  # fmt: skip
            item += 1
        q_loads += 1
        chunk, share = share.next(sizes)


@gluon.jit
def _start_scores(shared, item):
    """Start q kᵀ, [64, BLOCK_N], slice by slice as they are loaded."""
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    # Without the barrier the compiler forms the descriptors of the queries once and keeps them, which spills.
    zero = optimisation_barrier(item * 0)
    for i in gl.static_range(SLICES):
        shared.wait_full(item, 2 - i)
        k = shared.keys(item, 2 - i).permute((1, 0))
        s = warpgroup_mma(shared.queries(zero, 2 - i), k, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _start_values(p, shared, item, o):
    """Start adding the left half of p v to o. p is a `mma_operand` of pairs."""
    p = unpaired(p, shared.halves.dtype, gl.DotOperandLayout(0, accumulator_layout(HALF), 2))
    return warpgroup_mma(p, shared.keys(item, LEFT), o, is_async=True)


@gluon.jit
def _attend_blocks(
    shared, chunk, rows, score, item, start, end,
    o,  # [64, HALF] fp32, one in a tuple
    p,  # weights of block start - 1, a `mma_operand`
    m_i, l_i, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend to blocks [start, end) of a chunk, counted from its last block backwards.

    Each step forms the scores of a block together with the products of the block before and its values.
    """
    for i in range(start, end):
        sums = _start_values(p, shared, item + i - 1, o[0])
        s = _start_scores(shared, item + i)
        s, sums = warpgroup_mma_wait(0, deps=[s, sums])
        o = (sums,)
        shared.release(item + i - 1, LEFT)
        shared.release(item + i, KEYS_ONLY)
        weights, m_i, alpha = softmax_step(
            s, m_i, chunk.pad + (chunk.end - 1 - i) * BLOCK_N, rows, score, Mask(True, False, True), MASKED
        )  # fmt: skip
        l_i = l_i * alpha + gl.sum(weights, 1)
        shared.hand_weights(weights, alpha, l_i, item + i)
        p = mma_operand(weights, o, shared.halves.dtype, True)
        o = rescaled(o, alpha)
    return o, p, m_i, l_i


@gluon.jit
def _store_half(o, l_i, chunk, sizes, outputs, COLUMN0: gl.constexpr):
    """Write a consumer's sums: normalised to out if the chunk is a whole tile, else as they are to the workspace."""
    LAYOUT: gl.constexpr = o.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = COLUMN0 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if chunk.is_whole():
        b = chunk.tile // sizes.blocks_m
        row = chunk.tile % sizes.blocks_m * ROWS + rows
        token = row // sizes.group
        h = chunk.hk * sizes.group + row % sizes.group
        total = gl.convert_layout(l_i, gl.SliceLayout(1, LAYOUT))
        factor = gl.where(total != 0.0, 1.0 / gl.where(total != 0.0, total, 1.0), 0.0)[:, None]
        out = gl.where(factor == 0.0, 0.0, o * factor).to(outputs.o_ptr.dtype.element_ty)
        at = token.to(gl.int64) * outputs.stride_om + h.to(gl.int64) * outputs.stride_oh
        base = outputs.o_ptr + b.to(gl.int64) * outputs.stride_ob
        gl.store(base + at[:, None] + columns, out, mask=(token < sizes.seqlen_q)[:, None])
    else:
        slot = chunk.slot()
        sums = outputs.sums_ptr + slot.to(gl.int64) * (ROWS * COLUMNS)
        gl.store(sums + rows[:, None] * COLUMNS + columns, o)


@gluon.jit
def _store_statistics(m_i, l_i, chunk, sizes, outputs):
    """Write lse if the chunk is a whole tile, else each row's maximum and sum of weights to the workspace."""
    rows = gl.arange(0, ROWS, layout=m_i.type.layout)
    if chunk.is_whole():
        row = chunk.tile % sizes.blocks_m * ROWS + rows
        token = row // sizes.group
        h = chunk.hk * sizes.group + row % sizes.group
        lse = gl.where(l_i != 0.0, (m_i + gl.log2(gl.where(l_i != 0.0, l_i, 1.0))) * LN2, float("inf"))
        b = (chunk.tile // sizes.blocks_m).to(gl.int64)
        at = (b * sizes.heads_kv * sizes.group + h) * sizes.seqlen_q + token
        gl.store(outputs.lse_ptr + at, lse, mask=token < sizes.seqlen_q)
    else:
        slot = chunk.slot()
        statistics = outputs.statistics_ptr + slot * (2 * ROWS) + rows
        gl.store(statistics, gl.where(l_i != 0.0, m_i, LOWEST))
        gl.store(statistics + ROWS, l_i)


@gluon.jit
def _first_consumer(share, sizes, shared, outputs, score):
    """One warpgroup: scores, weights and the left half of the sums."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    score = score.in_log2()
    item = 0
    q_loads = 0
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        # Position of the last key that each row sees. Rows beyond the last token see what the last token sees.
        row = chunk.tile % sizes.blocks_m * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
        token = gl.minimum(row // sizes.group, sizes.seqlen_q - 1)
        _, n_keys = chunk.entry(sizes)
        position = token * 0 + n_keys - 1
        end = n_keys  # end of the keys that the tile's first row sees
        if sizes.config.CAUSAL:
            offset = chunk.n_keys - sizes.seqlen_q
            position = gl.minimum(token + offset, position)
            end = end_visible(chunk.tile % sizes.blocks_m * ROWS // sizes.group + offset, 0, n_keys)
        slope = 0.0
        rows = Rows(position, n_keys, slope)
        # Blocks at the chunk's end that some row does not see whole. At least one block is masked.
        n_blocks = chunk.end - chunk.begin
        n_masked = chunk.end - gl.maximum(end - chunk.pad, 0) // BLOCK_N
        n_masked = gl.minimum(gl.maximum(n_masked, 1), n_blocks)

        wait_full(shared.q_full, q_loads & 1)
        s = _start_scores(shared, item)
        s = warpgroup_mma_wait(0, deps=[s])
        shared.release(item, KEYS_ONLY)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
        weights, m_i, alpha = softmax_step(
            s, m_i, chunk.pad + (chunk.end - 1) * BLOCK_N, rows, score, Mask(True, False, True), True
        )
        l_i = gl.sum(weights, 1)
        shared.hand_weights(weights, alpha, l_i, item)
        o = zero_output(HALF, 1)
        p = mma_operand(weights, o, shared.halves.dtype, True)
        o, p, m_i, l_i = _attend_blocks(shared, chunk, rows, score, item, 1, n_masked, o, p, m_i, l_i, True)
        o, p, m_i, l_i = _attend_blocks(shared, chunk, rows, score, item, n_masked, n_blocks, o, p, m_i, l_i, False)
        release(shared.q_empty)
        item += n_blocks
        q_loads += 1
        o = _start_values(p, shared, item - 1, o[0])
        _store_statistics(m_i, l_i, chunk, sizes, outputs)
        o = warpgroup_mma_wait(0, deps=[o])
        shared.release(item - 1, LEFT)
        _store_half(o, l_i, chunk, sizes, outputs, 0)
        chunk, share = share.next(sizes)


@gluon.jit
def _second_consumer(share, sizes, shared, outputs):
    """One warpgroup: the right half of the sums."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(HALF))
    item = 0
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        o = zero_output(HALF, 1)
        l_i = gl.full([ROWS], 0.0, gl.float32, BY_ROW)
        for _ in range(chunk.end - chunk.begin):
            wait_full(shared.weights_full, item & 1)
            o = rescaled(o, shared.statistics.index(0).load(BY_ROW))
            l_i = shared.statistics.index(1).load(BY_ROW)
            # The right half is loaded: the first consumer has waited for it before it formed these weights.
            o = (warpgroup_mma(shared.weights, shared.keys(item, RIGHT), o[0], is_async=True),)
            o = (warpgroup_mma_wait(0, deps=[o[0]]),)
            shared.release(item, RIGHT)
            order_lanes()
            release(shared.weights_empty)
            item += 1
        _store_half(o[0], l_i, chunk, sizes, outputs, HALF)
        chunk, share = share.next(sizes)


_RUNTIME = (
    "length", "batch", "heads_kv", "group", "groups", "blocks_m", "entries", "seqlen_q", "added", "capacity",
    "stride_table", "steps_kb", "steps_kn",
)  # fmt: skip
_UNALIGNED = ("seqlens_ptr", "block_table_ptr", "cache_batch_idx_ptr", "leftpad_ptr")


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _decode_mla_kernel(
    q_tensor, q_tail_tensor,  # (B, Sq, H, D)
    k_tensor, k_tail_tensor,  # ragged (`gluon/tma.py`): entries or pages, each with an end of its own
    seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, leftpad_ptr,
    o_ptr, lse_ptr, sums_ptr, statistics_ptr,
    length,
    stride_ob, stride_oh, stride_om, stride_table,
    batch, heads_kv, group, groups, blocks_m, entries, seqlen_q, added, capacity,
    steps_kb, steps_kn,
    scale,
    config: gl.constexpr,  # `Sm90MlaConstants`
):  # fmt: skip
    """Set up shared memory and barriers, find the program's share, and run the partitions.

    Arguments are those of `_decode_kernel`.
    """
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(DTYPE, [2] + q_tensor.block_shape, q_tensor.layout),
        gl.allocate_shared_memory(DTYPE, [1] + q_tail_tensor.block_shape, q_tail_tensor.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(DTYPE, [2 * STAGES] + k_tensor.block_shape, k_tensor.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES] + k_tail_tensor.block_shape, k_tail_tensor.layout),
        gl.allocate_shared_memory(gl.int64, [SLICES * STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLICES * STAGES, 1], BARRIER),
        gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    shared.init()
    fence_async_shared()
    sizes = Sizes(
        config, seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, leftpad_ptr, length, added, capacity, batch,
        heads_kv, group, groups, blocks_m, seqlen_q, entries, stride_table,
    )  # fmt: skip
    outputs = Outputs(o_ptr, lse_ptr, sums_ptr, statistics_ptr, stride_ob, stride_oh, stride_om)
    no_cap = 0.0
    score = Score(scale, no_cap, False, False, config.NEGATE)
    share = _find_share(sizes)
    gl.warp_specialize(
        [
            (_first_consumer, (share, sizes, shared, outputs, score)),
            (_second_consumer, (share, sizes, shared, outputs)),
            (
                _producer,
                (share, sizes, shared, q_tensor, q_tail_tensor, k_tensor, k_tail_tensor, steps_kb, steps_kn),
            ),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [SECOND_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def _query_descriptor(q: torch.Tensor, group: int, columns: int) -> Tiles:
    """Describe q (B, Sq, H, D). A box is the rows of a tile: heads of one token, or all heads of several tokens."""
    heads = min(group, configs.ROWS)
    block = 1, configs.ROWS // heads, heads, columns
    return Tiles(q, q.shape, q.stride(), _query_box(q.dtype, block))


@cache
def _query_box(dtype: torch.dtype, block: tuple[int, ...]) -> Box:
    return shared_box(dtype, block, gl.NVMMASharedLayout(128, 16, 4))


def make_launches(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: object,
    memory: torch.Tensor | None,
) -> list[Launch]:
    """The launches that fill out and lse: those of the portable kernel, with this kernel in place of the first."""
    group = min(problem.heads_q // problem.heads_kv, configs.ROWS)
    # More heads than a tile has rows form groups, which the schedule treats as KV heads.
    groups = problem.heads_q // problem.heads_kv // group
    problem = problem.replace(heads_kv=problem.heads_kv * groups)
    launches = portable.make_launches(problem, tensors, out, lse, configs.CONFIG, memory)
    if not launches:
        return []
    main, *combine = launches
    q, k = tensors.q, tensors.k_cache
    steps_kb, steps_kn = descriptor_steps(k, "bshd")
    hopper_arguments = {
        "q_tensor": _query_descriptor(q, group, HALF.value),
        "q_tail_tensor": _query_descriptor(q, group, TAIL.value),
        "k_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, HALF.value),
        "k_tail_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, TAIL.value),
        "groups": groups,
        "steps_kb": steps_kb,
        "steps_kn": steps_kn,
        "scale": positive_scale(tensors.sm_scale),
    }
    arguments = {
        x: hopper_arguments[x] if x in hopper_arguments else main.arguments[x]
        for x in _decode_mla_kernel.arg_names
        if x != "config"
    }
    is_masked = problem.causal and problem.seqlen_q > 1  # a single query is at the last key
    constants = Sm90MlaConstants(problem.page_size, is_masked, tensors.sm_scale < 0, configs.CONFIG.split_cost)
    options = {"num_warps": 4, **ptxas_options()}
    return [Launch(_decode_mla_kernel, main.grid, arguments, {"config": constants}, options), *combine]


def cache_pass(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """The pass that fills out and lse."""
    return portable.cache_pass(problem, tensors, out, lse, configs.CONFIG, make_launches)
