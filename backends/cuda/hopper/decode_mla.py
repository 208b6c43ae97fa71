"""Decoding over a latent cache (MLA with absorbed projections) for Hopper (sm_90), in Gluon.

All query heads share one head of keys of 576 features, and its first 512 are the values (DeepSeek-AI 2024,
arXiv:2405.04434). So a block of keys is copied once and multiplied twice. With 128 heads that is more work for the
tensor cores than for the memory: 64 queries need two warpgroups, for 64 x 512 sums are more registers than one has.

A tile is 64 rows, token * group + head, as in the portable kernel, whose split of the work and whose `_combine_kernel`
serve here, too. More than 64 heads are groups, each as if it had keys of its own: their tiles are walked at the same
time, so that keys come from global memory once. As a part of a tile leaves 128 KB of sums, programs have whole tiles
where that takes few more blocks of keys.

One warp copies blocks of 64 keys through TMA, the last of a part first. The first consumer forms the scores and weights
of a block, and the left half of the sums; it leaves the weights in shared memory for the second one, which forms the
right half while the first is at its exponentials. The first waits for its scores and its half of the block before at
once: to let that half run on under the exponentials was up to 5 % slower, and to have both form scores in turns was not
faster (docs/log/decode.md).

The queries and two blocks of keys fill the shared memory. A block is therefore handed over in three parts, each with
barriers of its own: the features without values are free as soon as there are scores, the right half once the second
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
from diyfa.backends.cuda.attention.decode import LONG_SHARE, TILE_COST
from diyfa.backends.cuda.attention.fwd import LOWEST
from diyfa.backends.cuda.attention.launch import positive_scale
from diyfa.backends.cuda.attention.tile_io import SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, order_lanes, release, wait_full
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, optimisation_barrier, ptxas_options
from diyfa.backends.cuda.gluon.tma import ragged_descriptor, steps_of
from diyfa.backends.cuda.hopper import decode_mla_configs as configs
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, mma_operand, rescaled, unpaired, zero_output
from diyfa.backends.cuda.hopper.softmax import LN2, Rows, Score, softmax_step
from diyfa.backends.cuda.hopper.tiles import BOUND, end_of
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launcher import Box, Tiles, box_of
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import KVCacheProblem, KVCacheTensors, Launch

BLOCK_N = gl.constexpr(configs.BLOCK_N)
STAGES = gl.constexpr(configs.STAGES)
COLUMNS = gl.constexpr(configs.HEAD_DIM_V)
HALF = gl.constexpr(configs.HEAD_DIM_V // 2)  # columns of a consumer
REST = gl.constexpr(configs.HEAD_DIM - configs.HEAD_DIM_V)
LEFT, RIGHT, KEYS_ONLY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # parts of a block of keys
PARTS = gl.constexpr(3)
# The first consumer has what they leave, 240.
SECOND_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(56)
SCAN = gl.constexpr(128)  # tiles whose work is added up at once


@dataclass(frozen=True, eq=False)
class Sm90MlaConstants(Constants):
    """What the kernel is compiled for."""

    page_size: int  # 0: no pages
    causal: bool
    negate: bool
    split_cost: int  # `DecodeConfig`'s


@aggregate
class Mask:
    """What `softmax_step` asks of a mask: here each row has a last key that it sees."""

    CAUSAL: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr


@aggregate
class Sizes:
    """Sizes of a call and where its sequences lie. A pointer that nobody needs is None."""

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
    groups: gl.tensor  # of heads that share their keys: so many of heads_kv are the same
    blocks_m: gl.tensor
    seqlen_q: gl.tensor
    entries: gl.tensor
    stride_table: gl.tensor

    @gluon.jit
    def keys_of(self, b, inside):
        """Sequences b, as far as they are `inside` of the batch -> (keys, padding before them)."""
        n_keys = b * 0 + self.length
        if self.seqlens_ptr is not None:
            n_keys = gl.minimum(gl.load(self.seqlens_ptr + b, mask=inside, other=0), self.capacity)
        n_keys = gl.minimum(gl.maximum(n_keys + self.added, 0), self.capacity)
        pad = b * 0
        if self.leftpad_ptr is not None:
            pad = gl.load(self.leftpad_ptr + b, mask=inside, other=0)
            pad = gl.minimum(gl.maximum(pad, 0), self.capacity)
        return n_keys, pad

    @gluon.jit
    def blocks_of(self, tile, inside):
        """Tiles of rows -> (blocks of keys that each sees, one at least; keys; padding before them)."""
        n_keys, pad = self.keys_of(tile // self.blocks_m, inside)
        end = n_keys
        if self.config.CAUSAL:
            rows = gl.minimum((tile % self.blocks_m + 1) * ROWS, self.seqlen_q * self.group)
            end = gl.minimum(n_keys, (rows - 1) // self.group + n_keys - self.seqlen_q + 1)
        return gl.maximum(gl.cdiv(gl.maximum(end - pad, 0), BLOCK_N), 1), n_keys, pad


@aggregate
class Part:
    """Blocks [begin, end) of the keys of a tile of rows, counted from `pad` on; no blocks: there is no part left."""

    tile: gl.tensor
    hk: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    count: gl.tensor  # of the tile
    n_keys: gl.tensor
    pad: gl.tensor

    @gluon.jit
    def is_whole(self):
        return self.end - self.begin == self.count

    @gluon.jit
    def slot(self):
        """Where its sums go: if the tile goes on here the first of the program's two places, if it begins the other."""
        return 2 * (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) + (self.begin == 0).to(gl.int32)

    @gluon.jit
    def keys_end(self, sizes):
        """The keys that may be read: none of a sequence whose entry the cache does not have."""
        n_keys = self.n_keys
        if sizes.cache_batch_idx_ptr is not None:
            entry = gl.load(sizes.cache_batch_idx_ptr + self.tile // sizes.blocks_m)
            n_keys = gl.where((entry >= 0) & (entry < sizes.entries), n_keys, 0)
        return n_keys


@aggregate
class Line:
    """A program's share of the line of work, on which all blocks of all tiles lie (`attention/decode.py`).

    What is left of it fits 32 bits: as many blocks would take a program an hour.
    """

    tile: gl.tensor
    done: gl.tensor  # work of the tile that is behind
    left: gl.tensor  # work of the share that is ahead
    tile_cost: gl.tensor
    least: gl.tensor  # work of the smallest tile

    @gluon.jit
    def next_part(self, sizes):
        """The next part, and what is left behind it."""
        tile = self.tile
        done = self.done
        left = self.left
        hk = 0
        begin = 0
        end = 0
        count = 0
        n_keys = 0
        pad = 0
        while (begin >= end) & (left > 0):
            count, n_keys, pad = sizes.blocks_of(tile, True)
            work = gl.maximum(count + self.tile_cost, self.least)
            turns = sizes.heads_kv // gl.num_programs(0)
            if done < work * turns:
                hk = done // work * gl.num_programs(0) + gl.program_id(0)
                from_work = done % work
                to_work = gl.minimum(work, from_work + left)
                begin = gl.maximum(from_work - self.tile_cost, 0)
                end = gl.minimum(gl.maximum(to_work - self.tile_cost, 0), count)
                done += to_work - from_work
                left -= to_work - from_work
            else:
                done = 0
                tile += 1
        end = gl.where(begin < end, end, 0)
        return (
            Part(tile, hk, begin, end, count, n_keys, pad),
            Line(tile, done, left, self.tile_cost, self.least),
        )


@gluon.jit
def _share_of_line(sizes):
    """This program's part of the line of work: all have as much. The same rule as the portable kernel's."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sharers = gl.num_programs(1)
    turns = sizes.heads_kv // gl.num_programs(0)
    tiles = sizes.batch * sizes.blocks_m
    blocks = gl.full([], 0, gl.int64)
    most = 0
    for start in range(0, tiles, SCAN):
        tile = start + gl.arange(0, SCAN, layout=LANES)
        count, _, _ = sizes.blocks_of(tile, tile < tiles)
        count = gl.where(tile < tiles, count, 0)
        blocks += gl.sum(count.to(gl.int64), 0)
        most = gl.maximum(most, gl.max(count, 0))
    tile_cost = gl.where(blocks * turns >= LONG_SHARE * sharers, TILE_COST, 0).to(gl.int32)
    total = (blocks + tile_cost * tiles) * turns
    share = gl.maximum(gl.cdiv(total, sharers), 1)
    least = 0
    if sizes.config.SPLIT_COST > 0:
        whole = gl.cdiv(tiles * turns, sharers)  # tiles of a program
        if whole * (most + tile_cost).to(gl.int64) <= share + sizes.config.SPLIT_COST:
            least = most + tile_cost
            share = whole.to(gl.int64) * least
            total = (tiles * turns).to(gl.int64) * least
    at = gl.minimum(gl.program_id(1) * share, total)
    # The tile that it begins in: those that end before are counted. Their ends are sums over pairs of tiles.
    PAIRS: gl.constexpr = gl.BlockedLayout([SCAN, 1], [1, 32], [1, 4], [1, 0])
    earlier = gl.arange(0, SCAN, layout=gl.SliceLayout(1, PAIRS))[:, None]
    later = gl.arange(0, SCAN, layout=gl.SliceLayout(0, PAIRS))
    passed = 0
    before = gl.full([], 0, gl.int64)
    ahead = gl.full([], 0, gl.int64)
    for start in range(0, tiles, SCAN):
        tile = start + gl.arange(0, SCAN, layout=LANES)
        count, _, _ = sizes.blocks_of(tile, tile < tiles)
        work = gl.where(tile < tiles, gl.maximum(count + tile_cost, least), 0)  # of so many tiles below 2^31
        work = gl.convert_layout(work, gl.SliceLayout(1, PAIRS))
        ends = gl.sum(gl.where(earlier <= later[None, :], work[:, None], 0), 0)
        ends = ahead + ends.to(gl.int64) * turns
        is_passed = (ends <= at) & (start + later < tiles)
        passed += gl.sum(is_passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(is_passed, ends, 0), 0))
        ahead = gl.max(ends, 0)
    left = gl.minimum(share, total - at)
    return Line(passed, (at - before).to(gl.int32), left.to(gl.int32), tile_cost, least)


@aggregate
class Shared:
    """The queries, the ring of blocks of keys, and the weights that one consumer leaves for the other.

    Barriers count phases (`gluon/ring.py`): item n is the n-th block that the program reads.
    """

    q_halves: gl.shared_memory_descriptor  # [2, 1, tokens, heads, HALF]
    q_rest: gl.shared_memory_descriptor  # [1, 1, tokens, heads, REST]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    halves: gl.shared_memory_descriptor  # [2 * STAGES, 1, 1, 1, BLOCK_N, HALF]
    rest: gl.shared_memory_descriptor  # [STAGES, 1, 1, 1, BLOCK_N, REST]
    full: gl.shared_memory_descriptor  # of a part's stages
    empty: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor  # [ROWS, BLOCK_N]
    statistics: gl.shared_memory_descriptor  # [2, ROWS]: factors of the sums before, sums of weights
    weights_full: gl.shared_memory_descriptor
    weights_empty: gl.shared_memory_descriptor

    @gluon.jit
    def init(self):
        for i in gl.static_range(PARTS * STAGES):
            mbarrier.init(self.full.index(i), count=1)
            mbarrier.init(self.empty.index(i), count=WARPS)
        mbarrier.init(self.q_full, count=1)
        mbarrier.init(self.q_empty, count=WARPS)
        mbarrier.init(self.weights_full, count=WARPS)
        mbarrier.init(self.weights_empty, count=WARPS)

    @gluon.jit
    def queries(self, zero, PART: gl.constexpr):
        if PART == KEYS_ONLY:
            q = self.q_rest.index(zero).reshape([ROWS, REST])
        else:
            q = self.q_halves.index(PART + zero).reshape([ROWS, HALF])
        return q

    @gluon.jit
    def keys(self, item, PART: gl.constexpr):
        if PART == KEYS_ONLY:
            k = self.rest.index(item % STAGES).reshape([BLOCK_N, REST])
        else:
            k = self.halves.index(item % STAGES * 2 + PART).reshape([BLOCK_N, HALF])
        return k

    @gluon.jit
    def wait_full(self, item, PART: gl.constexpr):
        """A consumer waits until a part of the item is there."""
        wait_full(self.full.index(PART * STAGES + item % STAGES), (item // STAGES) & 1)

    @gluon.jit
    def release(self, item, PART: gl.constexpr):
        """The one consumer that has to say so has done with a part of the item."""
        release(self.empty.index(PART * STAGES + item % STAGES))

    @gluon.jit
    def hand_weights(self, weights, alpha, l_i, item):
        """The first consumer leaves the item's weights for the second one."""
        wait_full(self.weights_empty, (item & 1) ^ 1)
        self.weights.store(weights.to(self.weights.dtype))
        self.statistics.index(0).store(alpha)
        self.statistics.index(1).store(l_i)
        fence_async_shared()
        order_lanes()
        release(self.weights_full)


@aggregate
class Outputs:
    """What consumers write."""

    o_ptr: gl.tensor
    lse_ptr: gl.tensor
    sums_ptr: gl.tensor  # these two of `_decode_kernel`
    statistics_ptr: gl.tensor
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor


@gluon.jit
def _load_part(tensor, coordinates, shared, item, buffer, PART: gl.constexpr):
    """Copy a part of a block of keys as soon as its buffer is free."""
    barrier = PART * STAGES + item % STAGES
    mbarrier.wait(shared.empty.index(barrier), ((item // STAGES) & 1) ^ 1)
    mbarrier.expect(shared.full.index(barrier), tensor.block_type.nbytes)
    async_load(tensor, coordinates, shared.full.index(barrier), buffer)


@gluon.jit
def _producer(line, sizes, shared, q_tensor, q_rest_tensor, k_tensor, k_rest_tensor, steps_kb, steps_kn):
    """One warp: copy the queries of part after part, and their keys block by block."""
    config: gl.constexpr = sizes.config
    item = 0
    turn = 0
    part, line = line.next_part(sizes)
    while part.end > 0:
        b = part.tile // sizes.blocks_m
        row = part.tile % sizes.blocks_m * ROWS
        token = row // sizes.group
        h = part.hk * sizes.group + row % sizes.group
        mbarrier.wait(shared.q_empty, (turn & 1) ^ 1)
        mbarrier.expect(shared.q_full, 2 * q_tensor.block_type.nbytes + q_rest_tensor.block_type.nbytes)
        async_load(q_rest_tensor, [b, token, h, COLUMNS], shared.q_full, shared.q_rest.index(0))
        async_load(q_tensor, [b, token, h, HALF], shared.q_full, shared.q_halves.index(RIGHT))
        async_load(q_tensor, [b, token, h, 0], shared.q_full, shared.q_halves.index(LEFT))
        n_keys = part.keys_end(sizes)
        entry = b
        if sizes.cache_batch_idx_ptr is not None:
            entry = gl.load(sizes.cache_batch_idx_ptr + b)
        table = 0
        if config.PAGE_SIZE > 0:
            table = sizes.block_table_ptr + b.to(gl.int64) * sizes.stride_table
            entry = gl.load(table + (part.end - 1) * BLOCK_N // config.PAGE_SIZE)
        for i in range(part.end - part.begin):
            block = part.end - 1 - i
            key = part.pad + block * BLOCK_N
            here = gl.where((entry >= 0) & (entry < sizes.entries), entry, 0)
            row = key
            length = n_keys
            if config.PAGE_SIZE > 0:  # each page is an entry of its own
                page = key // config.PAGE_SIZE
                row = key - page * config.PAGE_SIZE
                length = gl.minimum(n_keys - page * config.PAGE_SIZE, config.PAGE_SIZE)
                length = gl.where(here == entry, length, 0)
                # A block ahead: copies wait for no load.
                entry = gl.load(table + gl.maximum(key - BLOCK_N, 0) // config.PAGE_SIZE)
            length = gl.maximum(length, 0)
            end = end_of(here, 0, length, steps_kb, steps_kn, SEQ_LENS)
            first = BOUND - length + row
            _load_part(
                k_rest_tensor, [BOUND, end, part.hk // sizes.groups, first, COLUMNS], shared, item,
                shared.rest.index(item % STAGES), KEYS_ONLY,
            )  # fmt: skip
            _load_part(
                k_tensor, [BOUND, end, part.hk // sizes.groups, first, HALF], shared, item,
                shared.halves.index(item % STAGES * 2 + RIGHT), RIGHT,
            )  # fmt: skip
            _load_part(
                k_tensor, [BOUND, end, part.hk // sizes.groups, first, 0], shared, item,
                shared.halves.index(item % STAGES * 2 + LEFT), LEFT,
            )  # fmt: skip
            item += 1
        turn += 1
        part, line = line.next_part(sizes)


@gluon.jit
def _start_scores(shared, item):
    """Start q kᵀ, [64, BLOCK_N], part by part as they come."""
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    # The compiler would form the descriptors of the queries once, and keep them in registers that there are not.
    zero = optimisation_barrier(item * 0)
    for i in gl.static_range(PARTS):
        shared.wait_full(item, 2 - i)
        k = shared.keys(item, 2 - i).permute((1, 0))
        s = warpgroup_mma(shared.queries(zero, 2 - i), k, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _start_values(p, shared, item, o):
    """Start adding the left half of p v; p is a `mma_operand` of pairs."""
    p = unpaired(p, shared.halves.dtype, gl.DotOperandLayout(0, accumulator_layout(HALF), 2))
    return warpgroup_mma(p, shared.keys(item, LEFT), o, is_async=True)


@gluon.jit
def _attend_blocks(
    shared, part, rows, score, item, start, end,
    o,  # [64, HALF] fp32, one in a tuple
    p,  # weights of the block before, a `mma_operand`
    m_i, l_i, MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of a part, from its last one on: scores of each together with the values of the one
    before."""
    for i in range(start, end):
        sums = _start_values(p, shared, item + i - 1, o[0])
        s = _start_scores(shared, item + i)
        s, sums = warpgroup_mma_wait(0, deps=[s, sums])
        o = (sums,)
        shared.release(item + i - 1, LEFT)
        shared.release(item + i, KEYS_ONLY)
        weights, m_i, alpha = softmax_step(
            s, m_i, part.pad + (part.end - 1 - i) * BLOCK_N, rows, score, Mask(True, False, True), MASKED
        )  # fmt: skip
        l_i = l_i * alpha + gl.sum(weights, 1)
        shared.hand_weights(weights, alpha, l_i, item + i)
        p = mma_operand(weights, o, shared.halves.dtype, True)
        o = rescaled(o, alpha)
    return o, p, m_i, l_i


@gluon.jit
def _store_half(o, l_i, part, sizes, outputs, COLUMN0: gl.constexpr):
    """Write a consumer's sums: normalised as rows of out, or where programs share the tile as they are."""
    LAYOUT: gl.constexpr = o.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = COLUMN0 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if part.is_whole():
        b = part.tile // sizes.blocks_m
        row = part.tile % sizes.blocks_m * ROWS + rows
        token = row // sizes.group
        h = part.hk * sizes.group + row % sizes.group
        total = gl.convert_layout(l_i, gl.SliceLayout(1, LAYOUT))
        factor = gl.where(total != 0.0, 1.0 / gl.where(total != 0.0, total, 1.0), 0.0)[:, None]
        out = gl.where(factor == 0.0, 0.0, o * factor).to(outputs.o_ptr.dtype.element_ty)
        at = token.to(gl.int64) * outputs.stride_om + h.to(gl.int64) * outputs.stride_oh
        base = outputs.o_ptr + b.to(gl.int64) * outputs.stride_ob
        gl.store(base + at[:, None] + columns, out, mask=(token < sizes.seqlen_q)[:, None])
    else:
        slot = part.slot()
        sums = outputs.sums_ptr + slot.to(gl.int64) * (ROWS * COLUMNS)
        gl.store(sums + rows[:, None] * COLUMNS + columns, o)


@gluon.jit
def _store_statistics(m_i, l_i, part, sizes, outputs):
    """Write lse, or where programs share the tile each row's maximum and sum."""
    rows = gl.arange(0, ROWS, layout=m_i.type.layout)
    if part.is_whole():
        row = part.tile % sizes.blocks_m * ROWS + rows
        token = row // sizes.group
        h = part.hk * sizes.group + row % sizes.group
        lse = gl.where(l_i != 0.0, (m_i + gl.log2(gl.where(l_i != 0.0, l_i, 1.0))) * LN2, float("inf"))
        b = (part.tile // sizes.blocks_m).to(gl.int64)
        at = (b * sizes.heads_kv * sizes.group + h) * sizes.seqlen_q + token
        gl.store(outputs.lse_ptr + at, lse, mask=token < sizes.seqlen_q)
    else:
        slot = part.slot()
        statistics = outputs.statistics_ptr + slot * (2 * ROWS) + rows
        gl.store(statistics, gl.where(l_i != 0.0, m_i, LOWEST))
        gl.store(statistics + ROWS, l_i)


@gluon.jit
def _first_consumer(line, sizes, shared, outputs, score):
    """One warpgroup: scores, weights and the left half of the sums."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    score = score.in_log2()
    item = 0
    turn = 0
    part, line = line.next_part(sizes)
    while part.end > 0:
        # The last key that each row sees; rows beyond the last token see what that does.
        row = part.tile % sizes.blocks_m * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
        token = gl.minimum(row // sizes.group, sizes.seqlen_q - 1)
        n_keys = part.keys_end(sizes)
        position = token * 0 + n_keys - 1
        least = n_keys - 1
        if sizes.config.CAUSAL:
            position = gl.minimum(token + part.n_keys - sizes.seqlen_q, position)
            first_token = part.tile % sizes.blocks_m * ROWS // sizes.group
            least = gl.minimum(first_token + part.n_keys - sizes.seqlen_q, least)
        slope = 0.0
        rows = Rows(position, n_keys, slope)
        # The first blocks, which not all rows see whole; one at least.
        n_blocks = part.end - part.begin
        n_masked = part.end - gl.maximum(least + 1 - part.pad, 0) // BLOCK_N
        n_masked = gl.minimum(gl.maximum(n_masked, 1), n_blocks)

        wait_full(shared.q_full, turn & 1)
        s = _start_scores(shared, item)
        s = warpgroup_mma_wait(0, deps=[s])
        shared.release(item, KEYS_ONLY)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
        weights, m_i, alpha = softmax_step(
            s, m_i, part.pad + (part.end - 1) * BLOCK_N, rows, score, Mask(True, False, True), True
        )
        l_i = gl.sum(weights, 1)
        shared.hand_weights(weights, alpha, l_i, item)
        o = zero_output(HALF, 1)
        p = mma_operand(weights, o, shared.halves.dtype, True)
        o, p, m_i, l_i = _attend_blocks(shared, part, rows, score, item, 1, n_masked, o, p, m_i, l_i, True)
        o, p, m_i, l_i = _attend_blocks(shared, part, rows, score, item, n_masked, n_blocks, o, p, m_i, l_i, False)
        release(shared.q_empty)
        item += n_blocks
        turn += 1
        o = _start_values(p, shared, item - 1, o[0])
        _store_statistics(m_i, l_i, part, sizes, outputs)
        o = warpgroup_mma_wait(0, deps=[o])
        shared.release(item - 1, LEFT)
        _store_half(o, l_i, part, sizes, outputs, 0)
        part, line = line.next_part(sizes)


@gluon.jit
def _second_consumer(line, sizes, shared, outputs):
    """One warpgroup: the right half of the sums."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(HALF))
    item = 0
    part, line = line.next_part(sizes)
    while part.end > 0:
        o = zero_output(HALF, 1)
        l_i = gl.full([ROWS], 0.0, gl.float32, BY_ROW)
        for _ in range(part.end - part.begin):
            wait_full(shared.weights_full, item & 1)
            o = rescaled(o, shared.statistics.index(0).load(BY_ROW))
            l_i = shared.statistics.index(1).load(BY_ROW)
            # The keys are there, for the first consumer has waited for them.
            o = (warpgroup_mma(shared.weights, shared.keys(item, RIGHT), o[0], is_async=True),)
            o = (warpgroup_mma_wait(0, deps=[o[0]]),)
            shared.release(item, RIGHT)
            order_lanes()
            release(shared.weights_empty)
            item += 1
        _store_half(o[0], l_i, part, sizes, outputs, HALF)
        part, line = line.next_part(sizes)


_RUNTIME = (
    "length", "batch", "heads_kv", "group", "groups", "blocks_m", "entries", "seqlen_q", "added", "capacity",
    "stride_table", "steps_kb", "steps_kn",
)  # fmt: skip
_UNALIGNED = ("seqlens_ptr", "block_table_ptr", "cache_batch_idx_ptr", "leftpad_ptr")


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_UNALIGNED)
def _decode_mla_kernel(
    q_tensor, q_rest_tensor,  # (B, Sq, H, D)
    k_tensor, k_rest_tensor,  # ragged (`gluon/tma.py`): entries or pages, each with an end of its own
    seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, leftpad_ptr,
    o_ptr, lse_ptr, sums_ptr, statistics_ptr,
    length,
    stride_ob, stride_oh, stride_om, stride_table,
    batch, heads_kv, group, groups, blocks_m, entries, seqlen_q, added, capacity,
    steps_kb, steps_kn,
    scale,
    config: gl.constexpr,  # `Sm90MlaConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the partitions. Arguments are `_decode_kernel`'s."""
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(DTYPE, [2] + q_tensor.block_shape, q_tensor.layout),
        gl.allocate_shared_memory(DTYPE, [1] + q_rest_tensor.block_shape, q_rest_tensor.layout),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(DTYPE, [2 * STAGES] + k_tensor.block_shape, k_tensor.layout),
        gl.allocate_shared_memory(DTYPE, [STAGES] + k_rest_tensor.block_shape, k_rest_tensor.layout),
        gl.allocate_shared_memory(gl.int64, [PARTS * STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [PARTS * STAGES, 1], BARRIER),
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
    line = _share_of_line(sizes)
    gl.warp_specialize(
        [
            (_first_consumer, (line, sizes, shared, outputs, score)),
            (_second_consumer, (line, sizes, shared, outputs)),
            (
                _producer,
                (line, sizes, shared, q_tensor, q_rest_tensor, k_tensor, k_rest_tensor, steps_kb, steps_kn),
            ),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [SECOND_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def _query_descriptor(q: torch.Tensor, group: int, columns: int) -> Tiles:
    """(B, Sq, H, D): a box is the rows of a tile, heads of one token or all heads of several."""
    heads = min(group, configs.ROWS)
    block = 1, configs.ROWS // heads, heads, columns
    return Tiles(q, q.shape, q.stride(), _query_box(q.dtype, block))


@cache
def _query_box(dtype: torch.dtype, block: tuple[int, ...]) -> Box:
    return box_of(dtype, block, gl.NVMMASharedLayout(128, 16, 4))


def launches_of(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: object,
    memory: torch.Tensor | None,
) -> list[Launch]:
    """What fills out and lse, through `portable.workspace`: the portable launches, with this kernel as the first."""
    group = min(problem.heads_q // problem.heads_kv, configs.ROWS)
    # More heads than a tile has rows: groups, walked at the same time as heads of keys are.
    groups = problem.heads_q // problem.heads_kv // group
    problem = problem.replace(heads_kv=problem.heads_kv * groups)
    launches = portable.launches_of(problem, tensors, out, lse, configs.CONFIG, memory)
    if not launches:
        return []
    main, *combine = launches
    q, k = tensors.q, tensors.k_cache
    steps_kb, steps_kn = steps_of(k, "bshd")
    own = {
        "q_tensor": _query_descriptor(q, group, HALF.value),
        "q_rest_tensor": _query_descriptor(q, group, REST.value),
        "k_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, HALF.value),
        "k_rest_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, REST.value),
        "groups": groups,
        "steps_kb": steps_kb,
        "steps_kn": steps_kn,
        "scale": positive_scale(tensors.sm_scale),
    }
    arguments = {x: own[x] if x in own else main.arguments[x] for x in _decode_mla_kernel.arg_names if x != "config"}
    constants = Sm90MlaConstants(problem.page_size, problem.causal, tensors.sm_scale < 0, configs.CONFIG.split_cost)
    options = {"num_warps": 4, **ptxas_options()}
    return [Launch(_decode_mla_kernel, main.grid, arguments, {"config": constants}, options), *combine]


def cache_pass(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Fills out and lse."""
    return portable.cache_pass(problem, tensors, out, lse, configs.CONFIG, launches_of)
