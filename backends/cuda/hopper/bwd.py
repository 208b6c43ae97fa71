"""Attention backward for Hopper (sm_90): one loop for dQ, dK and dV, in Gluon.

A program takes one block of BLOCK_N = 128 keys of a head after another, and for each goes through the queries of every
head in the group, or in a part of it (`bwd_parts.py`). One warp finds the blocks and copies tiles to shared memory
through TMA, two others add dQ to global memory, and two warpgroups, each with 64 of the keys, do the rest. For each
block of BLOCK_M queries a consumer forms

    Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),  dPᵀ = V dOᵀ,  dSᵀ = Pᵀ * (dPᵀ - delta),  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K

(Dao 2023, arXiv:2307.08691, algorithm 2; Shah et al. 2024, arXiv:2407.08608, for the roles). Scores lie transposed, so
that P and dS are already in registers as the left operands of the products that accumulate. dQ needs the dS of all
128 keys: consumers leave theirs in shared memory and wait for each other, and each forms half of dQ, which is added to
fp32 in global memory.

Before it `_prepare_kernel` forms delta and clears the fp32 dQ, which this kernel converts to 16 bits or one behind it
(`bwd_dq.py`). `docs/hopper-backward.md` explains it all.

Queries lie in global memory in blocks of BLOCK_M of one head, each sequence beginning with a block of its own: the
statistics (lse in units of log2, delta) as two rows, and the fp32 dQ in the order of the consumers' registers.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

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

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED
from diyfa.backends.cuda.gluon.barriers import (
    WARPS,
    idle_warps,
    optimisation_barrier,
    wait_for_previous_kernels,
    wait_for_stores,
)
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_reduce_add, reinterpret
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.semaphore import end_turn, wait_for_turn
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, RollingDq, share_of, to_register_order
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    END,
    KEYS,
    LENGTH_POINTERS,
    SHARE_ONLY,
    SIZES,
    KeyBlock,
    Sizes,
    allocate_key_blocks,
    first_query_block,
    key_block_of,
)
from diyfa.backends.cuda.hopper.epilogue import matrix, offset_of, store_float32
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_of, buffer_of, finish_values, run_of
from diyfa.backends.cuda.hopper.softmax import LOG2E, reciprocal_of_exp2
from diyfa.backends.cuda.hopper.tiles import end_of, start_load, start_store
from diyfa.backends.cuda.runtime.constants import Constants

DS_STAGES = gl.constexpr(2)


@dataclass(frozen=True, eq=False)
class Sm90BwdConstants(Constants):
    """What the kernels are compiled for: the problem's features, tile and schedule (`Sm90BwdConfig`)."""

    block_m: int
    block_n: int
    boxes: int  # of BOX_COLUMNS columns, which make up a tile of Q and K
    boxes_v: int  # the same of V and dO
    used_boxes: int  # of them that head_dim reaches
    used_boxes_v: int
    stages: int
    has_left: bool
    has_right: bool
    lengths: int
    softcap: bool
    deterministic: bool
    consumer_registers: int
    producer_registers: int
    direct: bool = False  # dK and dV leave from registers, in float32, to be added up
    rolling: bool = False  # dQ is converted here (`RollingDq`)
    last_columns: int = 64  # of the last box of a tile, that products use: 16 or 32 where head_dim reaches no further


# ---- the parts of a call


@aggregate
class Gradients:
    """The dS that the consumers exchange, in DS_STAGES stages, and the dQ that each hands to its adder.

    Consumers meet once for each item of dS: one that comes there with item n + 1 has read item n, whose stage is the
    next to be written.
    """

    ds_buffers: gl.shared_memory_descriptor  # dSᵀ in boxes of 64 queries
    dq_boxes: gl.shared_memory_descriptor  # in 16 bits: in them leaves what is converted (`RollingDq`)
    dq_buffers: gl.shared_memory_descriptor  # the same memory: fp32, of each consumer
    dq: Channel  # from each consumer to its adder

    @gluon.jit
    def store_ds(self, ds, item, CONSUMER: gl.constexpr):
        """A consumer leaves its dSᵀ, [64, BLOCK_M]."""
        BOXES: gl.constexpr = ds.shape[1] // ROWS
        first = (item % DS_STAGES) * CONSUMER_COUNT + CONSUMER
        run_of(self.ds_buffers, first, BOXES, 0, BOXES).store(ds)
        fence_async_shared()

    @gluon.jit
    def store_dq(self, dq, item, CONSUMER: gl.constexpr):
        """A consumer hands its half of dQ, an accumulator, to its adder."""
        self.dq.of(CONSUMER).acquire(item)
        in_order = to_register_order(dq)
        self.dq_buffers.index(CONSUMER).slice(0, in_order.shape[0], 0).store(in_order)
        fence_async_shared()
        self.dq.of(CONSUMER).commit(item)


@aggregate
class Shared:
    """What the partitions share: constants, memory and barriers."""

    config: gl.constexpr  # `Sm90BwdConstants`
    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor
    q_buffers: gl.shared_memory_descriptor
    do_buffers: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor  # [2 * STAGES, 1, BLOCK_M]: lse and delta
    keys: Channel  # K of each consumer; `Channel.of` a consumer
    values: Channel  # V of each consumer
    queries: Channel  # Q and the statistics; a stage that is released is free for dO as well
    douts: Channel  # dO
    out_buffers: gl.shared_memory_descriptor | gl.constexpr  # through which a consumer's dV leaves, and then its dK
    gradients: Gradients


@aggregate
class Inputs:
    """What the producer reads."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    do_tensor: tma.tensor_descriptor
    statistics_tensor: tma.tensor_descriptor | gl.constexpr
    steps_qb: gl.tensor
    steps_qm: gl.tensor
    steps_kb: gl.tensor
    steps_kn: gl.tensor
    steps_vb: gl.tensor
    steps_vn: gl.tensor
    steps_dob: gl.tensor
    steps_dom: gl.tensor


@aggregate
class Outputs:
    """What consumers write."""

    dk_tensor: tma.tensor_descriptor
    dv_tensor: tma.tensor_descriptor
    dk_ptr: gl.tensor | gl.constexpr  # for DIRECT
    dv_ptr: gl.tensor | gl.constexpr
    sm_scale: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


# ---- the producer, and the warp that adds dQ


@gluon.jit
def _load_keys(keys, sizes, shared, inputs):
    """Start copying a block of keys: K, then V. Where a group is divided, its parts share a head (`bwd_parts.py`)."""
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    heads = inputs.k_tensor.shape[len(inputs.k_tensor.block_shape) - 3]
    hk = keys.hk // (sizes.heads_q // sizes.group_size // heads.to(gl.int32))
    end_k = end_of(b, keys.first_k, keys.n_keys, inputs.steps_kb, inputs.steps_kn, config.LENGTHS)
    end_v = end_of(b, keys.first_k, keys.n_keys, inputs.steps_vb, inputs.steps_vn, config.LENGTHS)
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.k_tensor, b, hk, keys.col0 + c * ROWS, end_k, keys.n_keys,
            shared.k_buffers, c, shared.keys.of(c).full_barrier(0), config.BOXES, RAGGED,
        )  # fmt: skip
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.v_tensor, b, hk, keys.col0 + c * ROWS, end_v, keys.n_keys,
            shared.v_buffers, c, shared.values.of(c).full_barrier(0), config.BOXES_V, RAGGED,
        )  # fmt: skip


@gluon.jit
def _load_queries(keys, h, i, item, sizes, shared, inputs):
    """Start copying the i-th block of queries of a head, its statistics and dO, as soon as a stage is free."""
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    end_q = end_of(b, keys.first_q, keys.n_queries, inputs.steps_qb, inputs.steps_qm, config.LENGTHS)
    end_do = end_of(b, keys.first_q, keys.n_queries, inputs.steps_dob, inputs.steps_dom, config.LENGTHS)
    first = first_query_block(b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
    block = keys.block(i)
    row = block * config.BLOCK_M
    stage = shared.queries.stage(item)
    full = shared.queries.full_barrier(item)
    shared.queries.acquire(item)
    mbarrier.expect(full, 2 * config.BLOCK_M * 4)
    for j in gl.static_range(2):
        async_load(inputs.statistics_tensor, [2 * (first + block) + j, 0], full, shared.statistics.index(2 * stage + j))
    start_load(inputs.q_tensor, b, h, row, end_q, keys.n_queries, shared.q_buffers, stage, full, config.BOXES, RAGGED)
    start_load(
        inputs.do_tensor, b, h, row, end_do, keys.n_queries,
        shared.do_buffers, stage, shared.douts.full_barrier(item), config.BOXES_V, RAGGED,
    )  # fmt: skip


@gluon.jit
def producer(keys, sizes, shared, inputs):
    """One warp: copy a block of keys, then block after block of queries as soon as a stage is free."""
    _load_keys(keys, sizes, shared, inputs)
    item = 0
    for g in range(sizes.group_size):
        for i in range(keys.end - keys.begin):
            _load_queries(keys, keys.hk * sizes.group_size + g, i, item, sizes, shared, inputs)
            item += 1


@gluon.jit
def _draw(scheduler, WAITS: gl.constexpr):
    """The next block of keys. A program's first one has its own number; but if programs wait for lower numbers it is
    drawn as well: none may hold one that has not started."""
    index = scheduler.next_tile(0, scheduler.draw())
    if WAITS:
        index -= gl.num_programs(0)
    return index


@gluon.jit
def _persistent_producer(sizes, shared, inputs, dq, key_blocks, scheduler):
    """The same for block after block of keys, which it draws and tells the others.

    The first queries of a block come before its keys, whose buffers are free later.
    """
    config: gl.constexpr = shared.config
    blocks_n = gl.cdiv(sizes.seqlen_k, config.BLOCK_N)
    count = blocks_n * sizes.batch * (sizes.heads_q // sizes.group_size)
    WAITS: gl.constexpr = config.DETERMINISTIC or config.ROLLING
    if WAITS:
        index = _draw(scheduler, True)
    else:
        index = gl.program_id(0)
    item = 0
    turn = 0
    while index < count:
        keys = key_block_of(index, sizes, config)
        exists = True
        if config.LENGTHS == PACKED:
            exists = keys.col0 < keys.n_keys
        if exists:
            n = keys.end - keys.begin
            h = keys.hk * sizes.group_size
            if n > 0:
                _load_queries(keys, h, 0, item, sizes, shared, inputs)
            share = -1
            if config.ROLLING:
                share = gl.maximum(index - dq.lag * blocks_n, -1)
            key_blocks.write(turn, keys, share, KEYS)
            _load_keys(keys, sizes, shared, inputs)
            for g in range(sizes.group_size):
                for i in range(gl.where(g == 0, 1, 0), n):
                    _load_queries(keys, h + g, i, item + g * n + i, sizes, shared, inputs)
            if config.ROLLING:
                dq.wait_until_added(share, sizes, config.BLOCK_N)
                key_blocks.added.signal(turn)
            item += sizes.group_size * n
            turn += 1
        index = _draw(scheduler, WAITS)
    none = key_block_of(0, sizes, config)
    if config.ROLLING:
        while index < count + dq.lag * blocks_n:
            share = index - dq.lag * blocks_n
            key_blocks.write(turn, none, share, SHARE_ONLY)
            dq.wait_until_added(share, sizes, config.BLOCK_N)
            key_blocks.added.signal(turn)
            turn += 1
            index = _draw(scheduler, WAITS)
    key_blocks.write(turn, none, -1, END)


@gluon.jit
def _adder(CONSUMER: gl.constexpr, sizes, shared, dq, dq_tensor, semaphores_ptr, key_blocks):
    """One warp: add a consumer's half of dQ, as soon as it lies in shared memory, to what is in global memory.

    DETERMINISTIC: when it is this program's turn.
    """
    config: gl.constexpr = shared.config
    ring = shared.gradients
    PART_ROWS: gl.constexpr = dq_tensor.block_shape[0]  # of a copy; a half has one copy or several
    channel = ring.dq.of(CONSUMER)
    item = 0
    turn = 0
    heads_kv = sizes.heads_q // sizes.group_size
    kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)
    while kind == KEYS:
        key_blocks.channel.release(turn)
        head = keys.b * heads_kv + keys.hk
        if config.ROLLING:
            dq.wait_until_free(head, sizes, config.BLOCK_N)
        for g in range(sizes.group_size):
            h = keys.hk * sizes.group_size + g
            first = first_query_block(keys.b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
            first_of_dq = first
            if config.ROLLING:
                first_of_dq = dq.first_block(head, sizes, config.BLOCK_M) + g * gl.cdiv(sizes.seqlen_q, config.BLOCK_M)
            for i in range(keys.end - keys.begin):
                block = keys.block(i)
                half = (first + block) * CONSUMER_COUNT + CONSUMER
                channel.wait(item)
                if config.DETERMINISTIC:
                    wait_for_turn(semaphores_ptr + half, keys.turn(block, sizes, config))
                row = ((first_of_dq + block) * CONSUMER_COUNT + CONSUMER) * DQ_ROWS
                for part in gl.static_range(
                    _columns_of(CONSUMER, config.BOXES, config.LAST_COLUMNS) // config.LAST_COLUMNS
                ):
                    buffer = ring.dq_buffers.index(CONSUMER).slice(part * PART_ROWS, PART_ROWS, 0)
                    async_reduce_add(dq_tensor, [row + part * PART_ROWS, 0], buffer)
                tma.store_wait(0)
                channel.release(item)
                if config.DETERMINISTIC:
                    wait_for_stores()
                    end_turn(semaphores_ptr + half)
                item += 1
        if config.ROLLING:
            dq.end_adding(head)
            key_blocks.converted.of(CONSUMER).wait(turn)
            share_of(share, sizes, CONSUMER, config).clear(dq, sizes, config)
            dq.end_converting(share, sizes, config.BLOCK_N)
        turn += 1
        kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)
    if config.ROLLING:  # whose shares nobody waits for
        while kind == SHARE_ONLY:
            key_blocks.channel.release(turn)
            turn += 1
            kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)


# ---- the consumers


@constexpr_function
def _columns_of(box, boxes, last_columns):
    """Columns of a box of a tile of so many boxes that products use. A consumer's half of dQ has those of its box, or
    with a single box, of half of the queries, all."""
    return last_columns if box == boxes - 1 else 64


@gluon.jit
def start_product(
    own, others, item_of_others, c, USED: gl.constexpr, BOXES: gl.constexpr, BLOCK_M: gl.constexpr,
    LAST_COLUMNS: gl.constexpr = BOX,
):  # fmt: skip
    """Start own othersᵀ, [64, BLOCK_M]: K Qᵀ or V dOᵀ of a consumer's keys and a stage of queries, from the first USED
    boxes, and the first LAST_COLUMNS columns of the last of them."""
    s = gl.zeros([ROWS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    for j in gl.static_range(USED):
        left = box_of(own, c, j, BOXES).slice(0, _columns_of(j, USED, LAST_COLUMNS), 1)
        right = box_of(others, item_of_others, j, BOXES).slice(0, _columns_of(j, USED, LAST_COLUMNS), 1)
        s = warpgroup_mma(left, right.permute((1, 0)), s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))


@gluon.jit
def _zero_gradient(config: gl.constexpr):
    """Accumulators of dK or dV: one, or one for each of two boxes where the last has fewer columns."""
    if config.LAST_COLUMNS == BOX:
        zeros = (_zeros(config.BOXES * BOX),)
    else:
        zeros = ()
        for j in gl.static_range(config.BOXES):
            zeros += (_zeros(_columns_of(j, config.BOXES, config.LAST_COLUMNS)),)
    return zeros


@gluon.jit
def _start_gradient(weights, buffers, stage, x, config: gl.constexpr):
    """Start adding weights times a stage of queries or dO to accumulators: a product for each."""
    started = ()
    for j in gl.static_range(len(x)):
        if len(x) == 1:
            right = run_of(buffers, stage, config.BOXES, 0, config.BOXES)
        else:
            right = box_of(buffers, stage, j, config.BOXES).slice(
                0, _columns_of(j, config.BOXES, config.LAST_COLUMNS), 1
            )
        left = gl.convert_layout(weights, gl.DotOperandLayout(0, x[j].type.layout, 2))  # costs nothing
        started += (warpgroup_mma(left, right, x[j], is_async=True),)
    return started


@gluon.jit
def _start_dq(shared, item, zero, c: gl.constexpr):
    """Start a consumer's half of dS K, [64, 64]: 64 of the columns, or at head_dim 64 of the queries."""
    config: gl.constexpr = shared.config
    stage = item % DS_STAGES
    COLUMN_BOX: gl.constexpr = c if config.BOXES > 1 else 0
    QUERY_BOX: gl.constexpr = 0 if config.BOXES > 1 else c
    QUERY_BOXES: gl.constexpr = config.BLOCK_M // ROWS
    COLUMNS: gl.constexpr = _columns_of(c, config.BOXES, config.LAST_COLUMNS) if config.BOXES > 1 else BOX
    dq = _zeros(COLUMNS)
    for half in gl.static_range(CONSUMER_COUNT):
        ds = box_of(shared.gradients.ds_buffers, stage * CONSUMER_COUNT + half, QUERY_BOX, QUERY_BOXES).permute((1, 0))
        k = box_of(shared.k_buffers, half + zero, COLUMN_BOX, config.BOXES).slice(0, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=half > 0, is_async=True)
    return dq


@aggregate
class Consumer:
    """One consumer warpgroup: what it knows for all blocks."""

    INDEX: gl.constexpr
    keys: KeyBlock
    sizes: Sizes
    shared: Shared
    outputs: Outputs
    scale: gl.tensor  # of products, in units of log2; with a softcap inside of tanh
    cap: gl.tensor


@gluon.jit
def scale_in_log2(scale, SOFTCAP: gl.constexpr):
    """What `exponents` multiplies products by."""
    return scale * (2.0 * LOG2E) if SOFTCAP else scale * LOG2E


@gluon.jit
def exponents(s, lse, scale, cap, SOFTCAP: gl.constexpr):
    """Products s -> (scores less lse in units of log2, tanh of the softcap)."""
    if SOFTCAP:
        t = 1.0 - 2.0 * reciprocal_of_exp2(s * scale)
        x = t * cap - lse
    else:
        t = 0.0
        x = s * scale - lse
    return x, t


@gluon.jit
def with_derivative(p, t, SOFTCAP: gl.constexpr):
    """Weights times the softcap's derivative."""
    return p * (1.0 - t * t) if SOFTCAP else p


@gluon.jit
def softmax_weights(s, lse, start_m, consumer, MASKED: gl.constexpr):
    """Products s [64, BLOCK_M] and lse [1, BLOCK_M] -> (weights Pᵀ, Pᵀ times the softcap's derivative)."""
    config: gl.constexpr = consumer.shared.config
    keys = consumer.keys
    x, t = exponents(s, lse, consumer.scale, consumer.cap, config.SOFTCAP)
    if MASKED:
        # A thread's columns are those of its lane, 2 * (lane % 4), plus constants (`softmax.py`).
        columns = gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, s.type.layout))[None, :]
        lane = columns & 6
        constant = columns & ~6
        key = keys.col0 + consumer.INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))[:, None]
        own = key - (keys.n_keys - keys.n_queries) - start_m - lane
        seen = (key < keys.n_keys) & (constant >= 0)
        if config.HAS_RIGHT:
            seen = seen & (constant >= own - consumer.sizes.window_right)
        if config.HAS_LEFT:
            seen = seen & (constant <= own + consumer.sizes.window_left)
        x = gl.where(seen, x, float("-inf"))
    p = gl.exp2(x)
    return p, with_derivative(p, t, config.SOFTCAP)


@gluon.jit
def _blocks(
    consumer, start, end,
    dk, dv,  # [64, D] fp32, `_zero_gradient`
    item,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of queries of one head, those that need a mask or the others; `item` counts those of all
    heads.

    While P is computed dP is formed; while dS goes to shared memory, dV; while dQ does, dK.
    """
    config: gl.constexpr = consumer.shared.config
    c: gl.constexpr = consumer.INDEX
    B: gl.constexpr = config.BOXES
    shared = consumer.shared
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(B * BOX), 2)
    for i in range(start, end):
        if MASKED:
            block = consumer.keys.masked_block(i)
        else:
            block = i
        stage = shared.queries.stage(item)
        # The compiler would form the descriptors of K and V once, and keep them in 50 registers.
        zero = optimisation_barrier(item * 0)
        shared.queries.wait(item)
        s = start_product(
            shared.k_buffers, shared.q_buffers, stage, c + zero, B, B, config.BLOCK_M, config.LAST_COLUMNS
        )  # fmt: skip
        shared.douts.wait(item)
        dp = start_product(
            shared.v_buffers, shared.do_buffers, stage, c + zero, B, B, config.BLOCK_M, config.LAST_COLUMNS
        )  # fmt: skip
        s = warpgroup_mma_wait(B, deps=[s])  # dP, a product for each box, runs on
        lse = shared.statistics.index(2 * stage).load(S_LAYOUT)
        p, derivative = softmax_weights(s, lse, block * config.BLOCK_M, consumer, MASKED)
        p = gl.convert_layout(p.to(DTYPE), OPERAND)
        dp = warpgroup_mma_wait(0, deps=[dp])
        # Before dV has started: behind that there are no registers left.
        delta = shared.statistics.index(2 * stage + 1).load(S_LAYOUT)
        dv = _start_gradient(p, shared.do_buffers, stage, dv, config)
        ds = (derivative * (dp - delta)).to(DTYPE)
        shared.gradients.store_ds(ds, item, c)
        ds = gl.convert_layout(ds, OPERAND)
        sync_consumers()
        dq = _start_dq(shared, item, zero, c)
        dk = _start_gradient(ds, shared.q_buffers, stage, dk, config)
        dv, dq = _wait_for(dv, dq, len(dk))  # dK runs on
        shared.gradients.store_dq(dq, item, c)
        dk = finish_values(dk)
        shared.queries.release(item)
        item += 1
    return dk, dv, item


@gluon.jit
def _wait_for(dv, dq, PENDING: gl.constexpr):
    """Wait for dV and dQ, until PENDING products run -> both."""
    if len(dv) == 1:
        first, dq = warpgroup_mma_wait(PENDING, deps=[dv[0], dq])
        done = (first,)
    else:
        first, last, dq = warpgroup_mma_wait(PENDING, deps=[dv[0], dv[1], dq])
        done = (first, last)
    return done, dq


@gluon.jit
def sync_consumers():
    """Wait for the other consumer, on a barrier that Triton itself does not use."""
    gl.inline_asm_elementwise("mov.b32 $0, 0; bar.sync 8, 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _consumer(INDEX: gl.constexpr, sizes, shared, outputs, dq, key_blocks):
    """One warpgroup: dK and dV of its 64 keys of each block, and half of what all 128 add to dQ."""
    config: gl.constexpr = shared.config
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    item = 0
    turn = 0
    kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)
    while kind == KEYS:
        consumer = Consumer(INDEX, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E)
        dk = _zero_gradient(config)
        dv = _zero_gradient(config)
        for j in gl.static_range(CONSUMER_COUNT):
            shared.keys.of(j).wait(turn)
        shared.values.of(INDEX).wait(turn)
        masked = keys.masked_count()
        for _ in range(sizes.group_size):
            dk, dv, item = _blocks(consumer, 0, masked, dk, dv, item, True)
            dk, dv, item = _blocks(consumer, keys.full_begin, keys.full_end, dk, dv, item, False)
        if config.ROLLING:
            key_blocks.added.wait(turn)
        key_blocks.channel.release(turn)
        if config.ROLLING:  # it comes while dV and dK leave
            converted = share_of(share, sizes, INDEX, config)
            of_share = converted.load(converted.start, dq, sizes, config)

        dv = _of_keys(dv, 1.0, keys, INDEX)
        dk = _of_keys(dk, outputs.sm_scale, keys, INDEX)
        if config.DIRECT:
            for j in gl.static_range(len(dk)):
                store_from_registers(
                    dk[j], outputs.dk_ptr, outputs.dk_tensor, keys, sizes, INDEX * ROWS, j * BOX, config
                )
            for j in gl.static_range(len(dv)):
                store_from_registers(
                    dv[j], outputs.dv_ptr, outputs.dv_tensor, keys, sizes, INDEX * ROWS, j * BOX, config
                )
        else:
            _store_rows(dv, outputs.dv_tensor, keys, shared.out_buffers, INDEX, config)
            _store_rows(dk, outputs.dk_tensor, keys, shared.out_buffers, INDEX, config)
        if config.ROLLING:
            shared.gradients.dq.of(INDEX).acquire(item)
            converted.store(of_share, dq, shared.gradients.dq_boxes, outputs.sm_scale, sizes, config)
            key_blocks.converted.of(INDEX).commit(turn)
        turn += 1
        kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)
    if config.ROLLING:
        while kind == SHARE_ONLY:
            key_blocks.added.wait(turn)
            key_blocks.channel.release(turn)
            converted = share_of(share, sizes, INDEX, config)
            of_share = converted.load(converted.start, dq, sizes, config)
            converted.store(of_share, dq, shared.gradients.dq_boxes, outputs.sm_scale, sizes, config)
            turn += 1
            kind, share, keys = key_blocks.read(turn, sizes, config.LENGTHS)
    tma.store_wait(0)


@gluon.jit
def _of_keys(x, factor, keys, c: gl.constexpr):
    """Accumulators of dK or dV times a factor, with zeros for rows behind the last key."""
    result = ()
    for j in gl.static_range(len(x)):
        key = keys.col0 + c * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x[j].type.layout))
        result += (gl.where((key < keys.n_keys)[:, None], x[j] * factor, 0.0),)
    return result


@gluon.jit
def _store_rows(x, tensor, keys, buffers, c: gl.constexpr, config: gl.constexpr):
    """Write a consumer's x [64, D], accumulators, through its buffer, as soon as that is free. It is read later."""
    B: gl.constexpr = config.BOXES
    tma.store_wait(0)
    if len(x) == 1:
        run_of(buffers, c, B, 0, B).store(x[0].to(buffers.dtype))
    else:
        for j in gl.static_range(B):
            box_of(buffers, c, j, B).slice(0, _columns_of(j, config.BOXES, config.LAST_COLUMNS), 1).store(
                x[j].to(buffers.dtype)
            )
    fence_async_shared()
    for j in gl.static_range(B):
        start_store(
            tensor, keys.b, keys.hk, keys.col0 + c * ROWS, j * BOX, keys.first_k + keys.n_keys, keys.n_keys,
            buffer_of(buffers, c, j, B).reshape(tensor.block_shape), config.LENGTHS == PACKED,
        )  # fmt: skip


@gluon.jit
def store_from_registers(
    x, pointer, tensor, keys, sizes, row: gl.constexpr, column: gl.constexpr, config: gl.constexpr
):
    """Write x [64, columns], an accumulator, from a program's key `row` and from `column` on."""
    rows = matrix(pointer, tensor, 0)
    PACKED_OR_EQUAL: gl.constexpr = PACKED if config.LENGTHS == PACKED else EQUAL
    offset = offset_of(rows, keys.b, keys.hk, keys.first_k, PACKED_OR_EQUAL)
    end = keys.n_keys if config.LENGTHS == PACKED else sizes.seqlen_k
    store_float32(x, rows, offset, keys.col0 + row, end, column)


@gluon.jit
def _specialise(sizes, shared, inputs, outputs, dq, dq_tensor, semaphores_ptr, key_blocks, scheduler):
    """Run both consumers, the producer and the adders. The first consumer runs on the warps that the kernel is launched
    with and takes the registers that are left."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, sizes, shared, outputs, dq, key_blocks)),
            (_consumer, (1, sizes, shared, outputs, dq, key_blocks)),
            (_persistent_producer, (sizes, shared, inputs, dq, key_blocks, scheduler)),
            (_adder, (0, sizes, shared, dq, dq_tensor, semaphores_ptr, key_blocks)),
            (_adder, (1, sizes, shared, dq, dq_tensor, semaphores_ptr, key_blocks)),
            (idle_warps, ()),
        ],
        [4, 1, 1, 1, 1],
        [R, P, P, P, P],
    )  # fmt: skip


@gluon.jit(do_not_specialize=(*SIZES, "dq_slots", "dq_lag"), do_not_specialize_on_alignment=LENGTH_POINTERS)
def _bwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # (B, H, S, D) whatever the strides, or ragged (`gluon/tma.py`)
    dk_tensor, dv_tensor,
    dk_ptr, dv_ptr,  # of the same, for DIRECT
    statistics_tensor,  # [2 * blocks of queries, BLOCK_M] fp32
    dq_tensor,  # [2 * DQ_ROWS * blocks of queries, DQ_COLUMNS] fp32
    dq_ptr, counts_ptr, dq_out_tensor,  # of `RollingDq`, the first one the same memory; None unless ROLLING
    semaphores_ptr,  # [2 * blocks of queries] int32, zeros; None unless DETERMINISTIC
    counter_ptr,  # int32, zero: blocks of keys that programs have drawn
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences, or twice seq_lens
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,  # `steps_of` each tensor
    heads_in_turns,  # see `key_block_of`
    dq_slots, dq_lag,  # of `RollingDq`
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the partitions."""
    DTYPE: gl.constexpr = q_tensor.dtype
    B: gl.constexpr = config.BOXES
    QUERY_BOXES: gl.constexpr = config.BLOCK_M // ROWS
    k_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * B] + k_tensor.block_shape, k_tensor.layout)
    v_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * B] + v_tensor.block_shape, v_tensor.layout)
    q_buffers = gl.allocate_shared_memory(DTYPE, [config.STAGES * B] + q_tensor.block_shape, q_tensor.layout)
    do_buffers = gl.allocate_shared_memory(DTYPE, [config.STAGES * B] + do_tensor.block_shape, do_tensor.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_buffers = gl.allocate_shared_memory(DTYPE, [DS_STAGES * CONSUMER_COUNT * QUERY_BOXES, ROWS, ROWS], DS_LAYOUT)
    statistics = gl.allocate_shared_memory(
        gl.float32, [2 * config.STAGES] + statistics_tensor.block_shape, statistics_tensor.layout
    )
    dq_boxes = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * 2] + k_tensor.block_shape, k_tensor.layout)
    dq_buffers = reinterpret(dq_boxes, gl.float32, [CONSUMER_COUNT, DQ_ROWS, DQ_COLUMNS], dq_tensor.layout)
    queries = allocate_channel(config.STAGES, 2, CONSUMER_COUNT * WARPS)
    douts = allocate_channel(config.STAGES, 1, 0)
    keys = allocate_channel(1, 1, 0, CONSUMER_COUNT)
    values = allocate_channel(1, 1, 0, CONSUMER_COUNT)
    dq_halves = allocate_channel(1, WARPS, 1, CONSUMER_COUNT)
    gradients = Gradients(ds_buffers, dq_boxes, dq_buffers, dq_halves)
    key_blocks = allocate_key_blocks()
    if config.DIRECT:
        out_buffers = None
    else:
        out_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * B] + k_tensor.block_shape, k_tensor.layout)
    fence_async_shared()
    wait_for_previous_kernels()

    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr, heads_in_turns,
    )  # fmt: skip
    shared = Shared(
        config,
        k_buffers,
        v_buffers,
        q_buffers,
        do_buffers,
        statistics,
        keys,
        values,
        queries,
        douts,
        out_buffers,
        gradients,
    )
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, dk_ptr, dv_ptr, sm_scale, scale, softcap)
    scheduler = TileScheduler(counter_ptr, "dynamic")
    dq = RollingDq(dq_ptr, counts_ptr, dq_slots, dq_lag, dq_out_tensor)
    _specialise(sizes, shared, inputs, outputs, dq, dq_tensor, semaphores_ptr, key_blocks, scheduler)
