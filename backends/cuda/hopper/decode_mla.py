"""Decoding over a latent cache (MLA with absorbed projections) for Hopper (sm_90), in Gluon.

All query heads share one KV head of 576 features, and its first 512 are the values (DeepSeek-AI 2024,
arXiv:2405.04434). So a block of keys is copied once and multiplied twice. With 128 heads that is more work for the
tensor cores than for the memory.

**Tiles.** A tile has 64 rows, token * group + head, as in the portable kernel. Its 64 x 512 sums are more registers
than one warpgroup has, so each of two consumer warpgroups has half of their columns. More than 64 heads form groups,
and this kernel treats a group as a KV head of its own.

**Schedule.** `decode_schedule.py` divides the work as `attention/stream_k.py` does, and `_combine_kernel` merges
partial results of both kernels. Tiles of the groups of one KV head are walked at the same time, so that keys come from
global memory once. Partial results of a chunk are 128 KB, so programs have whole tiles if that takes few more blocks of
keys (`split_cost`).

**Roles.**

* The producer, one warp, copies the queries of a chunk and its blocks of 64 keys by TMA, the last block first.
* The first consumer forms the scores and weights of a block, and the left half of the sums. It leaves the weights in
  shared memory.
* The second consumer forms the right half of the sums, while the first one computes exponentials.

The first consumer issues the scores of a block and its half of the sums of the block before, and waits for both at
once. The kernel is up to 5 % slower if that half runs on during the exponentials, and not faster if both consumers form
scores (docs/log/decode.md).

**Channels** (`gluon/channel.py`). The queries and two blocks of keys fill the shared memory. So a block is handed over
in three slices, each with a channel of its own, so that each is free early. The tail, which has the features that are
not values, is free as soon as the scores are formed. The right half is free once the second consumer has multiplied it,
and the left half last.

Read `_decode_mla_kernel` first, then `_producer`, `_first_consumer`, `_attend_blocks` and `_second_consumer`.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention import decode as portable
from diyfa.backends.cuda.attention.block_info import end_visible
from diyfa.backends.cuda.attention.launch import positive_scale
from diyfa.backends.cuda.attention.tile_io import LOWEST, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, order_lanes
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, optimisation_barrier, ptxas_options
from diyfa.backends.cuda.gluon.tma import descriptor_steps, ragged_descriptor
from diyfa.backends.cuda.hopper import decode_mla_configs as configs
from diyfa.backends.cuda.hopper.decode_schedule import Sizes, find_share
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    accumulator_layout,
    box_buffer,
    box_matrix,
    mma_operand,
    rescaled,
    unpaired,
    zero_output,
)
from diyfa.backends.cuda.hopper.softmax import LN2, Rows, Score, softmax_step
from diyfa.backends.cuda.hopper.tiles import BOUND, KeyCache, sequence_end
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.backends.cuda.runtime.signature import Tiles, arguments_among, shared_box
from diyfa.problem import KVCacheProblem, KVCacheTensors, Launch

BLOCK_N = gl.constexpr(configs.BLOCK_N)
STAGES = gl.constexpr(configs.STAGES)
COLUMNS = gl.constexpr(configs.HEAD_DIM_V)  # of out
HALF = gl.constexpr(configs.HEAD_DIM_V // 2)  # columns of a consumer
# Registers of a thread. The others leave 240 to the first consumer.
SECOND_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(56)


@dataclass(frozen=True, eq=False)
class Sm90MlaConstants(Constants):
    """Constants of the kernel. All but the last two are those of `DecodeConstants`."""

    block_m: int
    block_n: int
    page_size: int
    packed_keys: bool  # always False; the schedule asks for it
    has_left: bool  # likewise
    has_right: bool
    split_cost: int
    negate: bool  # the scale is negative
    causal: bool = True  # for `softmax_step`: `Rows.position` is the last key that a row sees, with or without a mask


# ---- Shared memory, and the channels between the roles


@aggregate
class Slice:
    """A slice of the features of queries and keys: a TMA box. The slice of a program's n-th block is item n.

    The halves are boxes of the same buffers (`mma.py`), which takes fewer instructions than buffers of their own.
    """

    q_buffers: gl.shared_memory_descriptor  # [BOXES, 1, tokens, heads, features]
    k_buffers: gl.shared_memory_descriptor  # [STAGES * BOXES, 1, 1, 1, BLOCK_N, features]
    channel: Channel  # TMA fills a stage. One consumer releases it: the one that reads it last.
    BOX: gl.constexpr
    BOXES: gl.constexpr
    FIRST: gl.constexpr  # first feature

    @gluon.jit
    def load_queries(self, tensor, b, token, h, full):
        """Start copying the queries of a tile. `full` completes when all slices have arrived."""
        async_load(tensor, [b, token, h, self.FIRST], full, self.q_buffers.index(self.BOX))

    @gluon.jit
    def load_keys(self, tensor, end, hk, row, item):
        """Start copying a block of keys as soon as its stage is free. `end`, `row`: coordinates, as in `tiles.py`."""
        full = self.channel.full_barrier(item)
        buffer = box_buffer(self.k_buffers, self.channel.stage(item), self.BOX, self.BOXES)
        self.channel.acquire(item)
        mbarrier.expect(full, tensor.block_type.nbytes)
        async_load(tensor, [BOUND, end, hk, row, self.FIRST], full, buffer)

    @gluon.jit
    def queries(self, zero):
        """Return the queries, [ROWS, features]. `zero` is 0, and may be hidden from the compiler."""
        return self.q_buffers.index(self.BOX + zero).reshape([ROWS, self.q_buffers.shape[4]])

    @gluon.jit
    def keys(self, item):
        """Return a block of keys, [BLOCK_N, features]."""
        return box_matrix(self.k_buffers, self.channel.stage(item), self.BOX, self.BOXES)


@aggregate
class Weights:
    """The first consumer's weights and statistics, for the second one. Those of a program's n-th block are item n."""

    p: gl.shared_memory_descriptor  # [ROWS, BLOCK_N]: weights
    statistics: gl.shared_memory_descriptor  # [2, ROWS] fp32: factors of the sums so far, sums of weights so far
    channel: Channel

    @gluon.jit
    def store(self, p, alpha, l_i, item):
        """Write the weights p [ROWS, BLOCK_N] and the statistics alpha and l_i [ROWS] of a block."""
        self.channel.acquire(item)
        self.p.store(p.to(self.p.dtype))
        self.statistics.index(0).store(alpha)
        self.statistics.index(1).store(l_i)
        fence_async_shared()
        self.channel.commit(item)


@aggregate
class Shared:
    """Shared memory, and the channels through which the roles hand it over."""

    config: gl.constexpr  # `Sm90MlaConstants`
    tail: Slice  # features that are not values
    right: Slice  # values of the second consumer
    left: Slice  # values of the first consumer
    queries: Channel  # of a program's chunks: all slices of the queries, which the first consumer reads
    weights: Weights


@aggregate
class Inputs:
    """Tensors that the producer reads, and the `descriptor_steps` of the keys (`gluon/tma.py`)."""

    q_tensor: tma.tensor_descriptor  # boxes of HALF features
    q_tail_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    k_tail_tensor: tma.tensor_descriptor
    steps_kb: gl.tensor
    steps_kn: gl.tensor
    groups: gl.tensor  # groups of heads that share a KV head of the cache


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
def _allocate_shared(inputs, config: gl.constexpr):
    """Return `Shared`, with its barriers initialised."""
    DTYPE: gl.constexpr = inputs.q_tensor.dtype
    q_halves = gl.allocate_shared_memory(DTYPE, [2] + inputs.q_tensor.block_shape, inputs.q_tensor.layout)
    q_tail = gl.allocate_shared_memory(DTYPE, [1] + inputs.q_tail_tensor.block_shape, inputs.q_tail_tensor.layout)
    halves = gl.allocate_shared_memory(DTYPE, [2 * STAGES] + inputs.k_tensor.block_shape, inputs.k_tensor.layout)
    tails = gl.allocate_shared_memory(DTYPE, [STAGES] + inputs.k_tail_tensor.block_shape, inputs.k_tail_tensor.layout)
    tail = Slice(q_tail, tails, allocate_channel(STAGES, 1, WARPS), 0, 1, COLUMNS)
    right = Slice(q_halves, halves, allocate_channel(STAGES, 1, WARPS), 1, 2, HALF)
    left = Slice(q_halves, halves, allocate_channel(STAGES, 1, WARPS), 0, 2, 0)
    p = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    statistics = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights = Weights(p, statistics, allocate_channel(1, WARPS, WARPS))
    return Shared(config, tail, right, left, allocate_channel(1, 1, WARPS), weights)


# ---- The producer


@gluon.jit
def _load_queries(chunk, q_loads, sizes, shared, inputs):
    """Start copying the queries of a chunk, as soon as those of the chunk before are read."""
    b = chunk.sequence(sizes)
    token, h = chunk.tokens_and_heads(0, sizes)
    full = shared.queries.full_barrier(q_loads)
    shared.queries.acquire(q_loads)
    mbarrier.expect(full, 2 * inputs.q_tensor.block_type.nbytes + inputs.q_tail_tensor.block_type.nbytes)
    shared.tail.load_queries(inputs.q_tail_tensor, b, token, h, full)
    shared.right.load_queries(inputs.q_tensor, b, token, h, full)
    shared.left.load_queries(inputs.q_tensor, b, token, h, full)


@gluon.jit
def _producer(share, sizes, shared, inputs):
    """One warp: for each chunk copy the queries, then the keys block by block, from the last block to the first."""
    PAGE_SIZE: gl.constexpr = shared.config.PAGE_SIZE
    item = 0  # blocks of keys so far
    q_loads = 0  # chunks so far
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        _load_queries(chunk, q_loads, sizes, shared, inputs)
        hk = chunk.hk // inputs.groups
        entry, n_keys = chunk.entry(sizes)
        # With pages, `entry` is the page of the next block to be copied. There is no padding then.
        if PAGE_SIZE > 0:
            table = sizes.cache.table_row(chunk.sequence(sizes))
            entry = gl.load(table + (chunk.end - 1) * BLOCK_N // PAGE_SIZE)
        for i in range(chunk.end - chunk.begin):
            key = chunk.pad + (chunk.end - 1 - i) * BLOCK_N
            valid_entry = gl.where((entry >= 0) & (entry < sizes.cache.entries), entry, 0)
            row = key  # of the entry
            length = n_keys  # rows of the entry that are keys of the sequence
            if PAGE_SIZE > 0:
                first_key = key // PAGE_SIZE * PAGE_SIZE
                row = key - first_key
                length = gl.minimum(n_keys - first_key, PAGE_SIZE)
                length = gl.where(valid_entry == entry, length, 0)
                # Load the page of the next block now, so that its copies need not wait for the load.
                entry = gl.load(table + gl.maximum(key - BLOCK_N, 0) // PAGE_SIZE)
            length = gl.maximum(length, 0)
            end = sequence_end(valid_entry, 0, length, inputs.steps_kb, inputs.steps_kn, SEQ_LENS)
            row = BOUND - length + row  # in a ragged descriptor the rows of an entry end at BOUND
            shared.tail.load_keys(inputs.k_tail_tensor, end, hk, row, item)
            shared.right.load_keys(inputs.k_tensor, end, hk, row, item)
            shared.left.load_keys(inputs.k_tensor, end, hk, row, item)
            item += 1
        q_loads += 1
        chunk, share = share.next(sizes)


# ---- The consumers


@gluon.jit
def _start_scores(shared, item):
    """Start q kᵀ, [64, BLOCK_N], slice by slice as they are loaded."""
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    # Without the barrier the compiler forms the descriptors of the queries once and keeps them, which spills.
    zero = optimisation_barrier(item * 0)
    slices = (shared.tail, shared.right, shared.left)
    for i in gl.static_range(len(slices)):
        slices[i].channel.wait(item)
        k = slices[i].keys(item).permute((1, 0))
        s = warpgroup_mma(slices[i].queries(zero), k, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _start_values(p, shared, item, o):
    """Start adding the left half of p v to o. p is a `mma_operand` of pairs."""
    p = unpaired(p, shared.weights.p.dtype, gl.DotOperandLayout(0, accumulator_layout(HALF), 2))
    return warpgroup_mma(p, shared.left.keys(item), o, is_async=True)


@gluon.jit
def _attend_blocks(
    shared, chunk, rows, score,
    item,  # number of the chunk's last block, which comes first
    start, end,
    o,  # [64, HALF] fp32, one in a tuple
    p,  # weights of block start - 1, a `mma_operand`
    m_i, l_i, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend to blocks [start, end) of a chunk, counted from its last block backwards -> (o, p, m_i, l_i).

    Each iteration forms the scores of a block together with the products of the block before and its values.
    """
    for i in range(start, end):
        sums = _start_values(p, shared, item + i - 1, o[0])
        s = _start_scores(shared, item + i)
        s, sums = warpgroup_mma_wait(0, deps=[s, sums])
        o = (sums,)
        shared.left.channel.release(item + i - 1)
        shared.tail.channel.release(item + i)
        start_n = chunk.pad + (chunk.end - 1 - i) * BLOCK_N
        weights, m_i, alpha = softmax_step(s, m_i, start_n, rows, score, shared.config, (), MASKED)
        l_i = l_i * alpha + gl.sum(weights, 1)
        shared.weights.store(weights, alpha, l_i, item + i)
        p = mma_operand(weights, o, shared.weights.p.dtype, True)
        o = rescaled(o, alpha)
    return o, p, m_i, l_i


@gluon.jit
def _store_half(o, l_i, chunk, sizes, outputs, COLUMN0: gl.constexpr):
    """Write a consumer's sums: normalised to out if the chunk is a whole tile, else as they are to the workspace."""
    LAYOUT: gl.constexpr = o.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = COLUMN0 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if chunk.is_whole():
        b = chunk.sequence(sizes)
        token, h = chunk.tokens_and_heads(rows, sizes)
        total = gl.convert_layout(l_i, gl.SliceLayout(1, LAYOUT))
        factor = gl.where(total != 0.0, 1.0 / gl.where(total != 0.0, total, 1.0), 0.0)[:, None]
        out = gl.where(factor == 0.0, 0.0, o * factor).to(outputs.o_ptr.dtype.element_ty)
        at = token.to(gl.int64) * outputs.stride_om + h.to(gl.int64) * outputs.stride_oh
        base = outputs.o_ptr + b.to(gl.int64) * outputs.stride_ob
        gl.store(base + at[:, None] + columns, out, mask=(token < sizes.seqlen_q)[:, None])
    else:
        sums = outputs.sums_ptr + chunk.slot().to(gl.int64) * (ROWS * COLUMNS)
        gl.store(sums + rows[:, None] * COLUMNS + columns, o)


@gluon.jit
def _store_statistics(m_i, l_i, chunk, sizes, outputs):
    """Write lse if the chunk is a whole tile, else each row's maximum and sum of weights to the workspace."""
    rows = gl.arange(0, ROWS, layout=m_i.type.layout)
    if chunk.is_whole():
        token, h = chunk.tokens_and_heads(rows, sizes)
        lse = gl.where(l_i != 0.0, (m_i + gl.log2(gl.where(l_i != 0.0, l_i, 1.0))) * LN2, float("inf"))
        b = chunk.sequence(sizes).to(gl.int64)
        at = (b * sizes.heads_kv * sizes.group + h) * sizes.seqlen_q + token
        gl.store(outputs.lse_ptr + at, lse, mask=token < sizes.seqlen_q)
    else:
        statistics = outputs.statistics_ptr + chunk.slot() * (2 * ROWS) + rows
        gl.store(statistics, gl.where(l_i != 0.0, m_i, LOWEST))
        gl.store(statistics + ROWS, l_i)


@gluon.jit
def _visible_keys(chunk, sizes, LAYOUT: gl.constexpr):
    """Return (`Rows` of the tile, how many of the chunk's last blocks need a mask: at least one)."""
    token, _ = chunk.tokens_and_heads(gl.arange(0, ROWS, layout=LAYOUT), sizes)
    token = gl.minimum(token, sizes.seqlen_q - 1)  # rows beyond the last token see what the last token sees
    _, n_keys = chunk.entry(sizes)
    position = token * 0 + n_keys - 1  # [ROWS]: the last key that each row sees
    end = n_keys  # end of the keys that the tile's first row sees
    if sizes.config.HAS_RIGHT:
        offset = chunk.n_keys - sizes.seqlen_q
        position = gl.minimum(token + offset, position)
        first_token, _ = chunk.tokens_and_heads(0, sizes)
        end = end_visible(first_token + offset, 0, n_keys)
    n_masked = chunk.end - gl.maximum(end - chunk.pad, 0) // BLOCK_N
    return Rows(position, n_keys, None), gl.minimum(gl.maximum(n_masked, 1), chunk.end - chunk.begin)


@gluon.jit
def _first_consumer(share, sizes, shared, outputs, score):
    """One warpgroup: scores, weights and the left half of the sums."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    score = score.in_log2()
    item = 0
    q_loads = 0
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        rows, n_masked = _visible_keys(chunk, sizes, S_ROWS)
        n_blocks = chunk.end - chunk.begin
        shared.queries.wait(q_loads)
        s = _start_scores(shared, item)
        s = warpgroup_mma_wait(0, deps=[s])
        shared.tail.channel.release(item)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
        start_n = chunk.pad + (chunk.end - 1) * BLOCK_N
        weights, m_i, alpha = softmax_step(s, m_i, start_n, rows, score, shared.config, (), True)
        l_i = gl.sum(weights, 1)
        shared.weights.store(weights, alpha, l_i, item)
        o = zero_output(HALF, 1)
        p = mma_operand(weights, o, shared.weights.p.dtype, True)
        o, p, m_i, l_i = _attend_blocks(shared, chunk, rows, score, item, 1, n_masked, o, p, m_i, l_i, True)
        o, p, m_i, l_i = _attend_blocks(shared, chunk, rows, score, item, n_masked, n_blocks, o, p, m_i, l_i, False)
        shared.queries.release(q_loads)
        item += n_blocks
        q_loads += 1
        o = _start_values(p, shared, item - 1, o[0])
        _store_statistics(m_i, l_i, chunk, sizes, outputs)
        o = warpgroup_mma_wait(0, deps=[o])
        shared.left.channel.release(item - 1)
        _store_half(o, l_i, chunk, sizes, outputs, 0)
        chunk, share = share.next(sizes)


@gluon.jit
def _second_consumer(share, sizes, shared, outputs):
    """One warpgroup: the right half of the sums."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(HALF))
    weights = shared.weights
    item = 0
    chunk, share = share.next(sizes)
    while chunk.end > 0:
        o = zero_output(HALF, 1)
        l_i = gl.full([ROWS], 0.0, gl.float32, BY_ROW)
        for _ in range(chunk.end - chunk.begin):
            weights.channel.wait(item)
            o = rescaled(o, weights.statistics.index(0).load(BY_ROW))
            l_i = weights.statistics.index(1).load(BY_ROW)
            # The right half is loaded: the first consumer has waited for it before it formed these weights.
            o = (warpgroup_mma(weights.p, shared.right.keys(item), o[0], is_async=True),)
            o = (warpgroup_mma_wait(0, deps=[o[0]]),)
            shared.right.channel.release(item)
            order_lanes()  # all lanes have read the statistics before one of them arrives
            weights.channel.release(item)
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
    q_tensor, q_tail_tensor,  # (B, Sq, H, D): the halves, the tail
    k_tensor, k_tail_tensor,  # ragged (`gluon/tma.py`): entries or pages, each with an end of its own
    seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, leftpad_ptr,
    o_ptr, lse_ptr, sums_ptr, statistics_ptr,
    length,
    stride_ob, stride_oh, stride_om, stride_table,
    batch,
    heads_kv, group,  # groups of heads, query heads of a group
    groups,  # groups that share a KV head of the cache
    blocks_m, entries, seqlen_q, added, capacity,
    steps_kb, steps_kn,
    scale,
    config: gl.constexpr,  # `Sm90MlaConstants`
):  # fmt: skip
    """Attend to the chunks of this program's share: allocate shared memory, find the share, and start the roles.

    The grid, and arguments without a comment, are those of `_decode_kernel`.
    """
    inputs = Inputs(q_tensor, q_tail_tensor, k_tensor, k_tail_tensor, steps_kb, steps_kn, groups)
    shared = _allocate_shared(inputs, config)
    fence_async_shared()
    cache = KeyCache(
        seqlens_ptr, block_table_ptr, cache_batch_idx_ptr, length, added, entries, stride_table, config.PAGE_SIZE
    )
    sizes = Sizes(config, cache, leftpad_ptr, capacity, batch, heads_kv, group, blocks_m, seqlen_q)
    outputs = Outputs(o_ptr, lse_ptr, sums_ptr, statistics_ptr, stride_ob, stride_oh, stride_om)
    score = Score(scale, gl.to_tensor(0.0), False, False, config.NEGATE)  # no softcap, no ALiBi
    share = find_share(sizes)
    gl.warp_specialize(
        [
            (_first_consumer, (share, sizes, shared, outputs, score)),
            (_second_consumer, (share, sizes, shared, outputs)),
            (_producer, (share, sizes, shared, inputs)),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [SECOND_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


_QUERY_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)


def _query_descriptor(q: torch.Tensor, group: int, columns: int) -> Tiles:
    """Describe q (B, Sq, H, D). A box is the rows of a tile: heads of one token, or all heads of several tokens."""
    heads = min(group, configs.ROWS)
    block = 1, configs.ROWS // heads, heads, columns
    return Tiles(q, q.shape, q.stride(), shared_box(q.dtype, block, _QUERY_LAYOUT))


def make_launches(
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor, config: object,
    memory: torch.Tensor | None,
) -> list[Launch]:  # fmt: skip
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
    tail = configs.HEAD_DIM - configs.HEAD_DIM_V
    steps_kb, steps_kn = descriptor_steps(k, "bshd")
    hopper_arguments = {
        "q_tensor": _query_descriptor(q, group, HALF.value),
        "q_tail_tensor": _query_descriptor(q, group, tail),
        "k_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, HALF.value),
        "k_tail_tensor": ragged_descriptor(k, "bshd", configs.BLOCK_N, tail),
        "groups": groups, "steps_kb": steps_kb, "steps_kn": steps_kn, "scale": positive_scale(tensors.sm_scale),
    }  # fmt: skip
    arguments = arguments_among(_decode_mla_kernel, main.arguments | hopper_arguments)
    c = main.constants["c"]
    constants = Sm90MlaConstants(
        c.block_m, c.block_n, c.page_size, c.packed_keys, c.has_left, c.has_right, c.split_cost, tensors.sm_scale < 0
    )
    options = {"num_warps": 4, **ptxas_options()}
    return [Launch(_decode_mla_kernel, main.grid, arguments, {"config": constants}, options), *combine]


def cache_pass(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """The pass that fills out and lse."""
    return portable.cache_pass(problem, tensors, out, lse, configs.CONFIG, make_launches)
