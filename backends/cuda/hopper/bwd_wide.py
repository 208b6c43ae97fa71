"""dK and dV for Hopper where heads have up to 256 columns, or V has others than Q; dQ is `bwd_wide_dq.py`'s.

The accumulators of 64 keys, dK and dV, take most registers of two warpgroups. So a program owns 64 keys, and consumers
divide the columns of both. Scores and dP are formed once:

    consumer 0:  Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),      dSᵀ = Pᵀ * (dPᵀ - delta)
    consumer 1:  dPᵀ = V dOᵀ, from which it takes delta
    both:        dV += Pᵀ dO,  dK += dSᵀ Q, each half of the columns

dPᵀ - delta goes to consumer 0 in fp32, Pᵀ and dSᵀ come back in 16 bits. dV is formed while dS is computed.

`bwd.py` adds dQ of each block of keys to global memory as it goes. Here that would be 64 KB for 64 queries and 64 keys,
which takes longer than the two products more that a kernel for dQ alone has to form.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention.tile_io import PACKED
from diyfa.backends.cuda.gluon.barriers import (
    WARPS,
    idle_warps,
    optimisation_barrier,
    wait_for_previous_kernels,
)
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.bwd import (
    Inputs,
    Outputs,
    producer,
    scale_in_log2,
    softmax_weights,
    start_product,
    store_from_registers,
)
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, from_register_order, to_register_order
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    LENGTH_POINTERS,
    SIZES,
    KeyBlock,
    Sizes,
    key_block_of,
)
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_of, buffer_count, buffer_of, run_of
from diyfa.backends.cuda.hopper.softmax import LOG2E
from diyfa.backends.cuda.hopper.tiles import start_store


@constexpr_function
def count_of(part, boxes):
    """How many boxes one of the two parts of a tile has. Of three the first part, one box, is consumer 0's of Q and K,
    consumer 1's of V."""
    return part + 1 if boxes == 3 else boxes // 2


@constexpr_function
def first_of(part, boxes):
    """The first box of a part."""
    return 2 * (1 - part) if boxes == 3 else part * (boxes // 2)


@aggregate
class Exchange:
    """What the consumers leave for each other in each block: dPᵀ - delta, then Pᵀ, then dSᵀ.

    A phase of `dp` also says that both consumers have read Pᵀ and dSᵀ of the block before, one of `ds` that dPᵀ has
    been read. So none needs `empty` barriers.
    """

    dp_buffer: gl.shared_memory_descriptor  # fp32, in the order of registers
    p_buffer: gl.shared_memory_descriptor
    ds_buffer: gl.shared_memory_descriptor
    dp: Channel
    p: Channel
    ds: Channel

    @gluon.jit
    def store_dp(self, dp, item):
        """Consumer 1 leaves dPᵀ - delta."""
        self.dp_buffer.store(to_register_order(dp))
        self.dp.commit(item)

    @gluon.jit
    def load_dp(self, like):
        """Consumer 0 takes them, in the layout of `like`, an accumulator."""
        x = self.dp_buffer.load(to_register_order(like).type.layout)
        return gl.convert_layout(from_register_order(x), like.type.layout)

    @gluon.jit
    def store_p(self, p, item):
        """Consumer 0 leaves Pᵀ."""
        box_of(self.p_buffer, 0, 0, 1).store(p)
        fence_async_shared()
        self.p.commit(item)

    @gluon.jit
    def store_ds(self, ds, item):
        """Consumer 0 leaves dSᵀ."""
        box_of(self.ds_buffer, 0, 0, 1).store(ds)
        fence_async_shared()
        self.ds.commit(item)


@aggregate
class WideShared:
    """What the partitions share: constants, memory and barriers."""

    config: gl.constexpr  # `Sm90BwdConstants`
    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor
    q_buffers: gl.shared_memory_descriptor
    do_buffers: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor  # [2 * STAGES, 1, BLOCK_M]: lse and delta
    keys: Channel
    values: Channel
    queries: Channel
    douts: Channel
    exchange: Exchange


@aggregate
class WideConsumer:
    """One consumer warpgroup: what it knows for all blocks."""

    INDEX: gl.constexpr
    keys: KeyBlock
    sizes: Sizes
    shared: WideShared
    outputs: Outputs
    scale: gl.tensor  # of products, in units of log2; with a softcap inside of tanh
    cap: gl.tensor

    @gluon.jit
    def start_dv(self, dv, item, zero):
        """Start adding Pᵀ dO to this consumer's half of the columns. dO is there: consumer 1 has formed dP of it."""
        config: gl.constexpr = self.shared.config
        self.shared.exchange.p.wait(item)
        p = box_of(self.shared.exchange.p_buffer, zero, 0, 1)
        do = _part(self.shared.do_buffers, self.shared.queries.stage(item), 1 - self.INDEX, config.BOXES_V)
        return warpgroup_mma(p, do, dv, is_async=True)

    @gluon.jit
    def finish(self, dk, dv, item, zero):
        """Add dSᵀ Q to this consumer's half of the columns, and wait until dV, too, has all of the block."""
        config: gl.constexpr = self.shared.config
        self.shared.exchange.ds.wait(item)
        ds = box_of(self.shared.exchange.ds_buffer, zero, 0, 1)
        q = _part(self.shared.q_buffers, self.shared.queries.stage(item), self.INDEX, config.BOXES)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        self.shared.queries.release(item)
        return dk, dv


@gluon.jit
def _part(buffers, tile, part: gl.constexpr, BOXES: gl.constexpr):
    """One of two parts of the columns of a tile, as one matrix: half, or of three boxes the last one and the others."""
    HALF: gl.constexpr = BOXES // CONSUMER_COUNT
    if BOXES == 3:
        run = run_of(buffers, tile, BOXES, 1 - part, BOXES)
    else:
        run = run_of(buffers, tile * CONSUMER_COUNT + part, HALF, 0, HALF)
    return run


@gluon.jit
def _blocks_of_first(
    consumer, start, end,
    dk, dv,  # [64, half of the columns] fp32
    item,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Consumer 0: blocks `start` to `end` of queries of one head, those that need a mask or the others."""
    config: gl.constexpr = consumer.shared.config
    shared = consumer.shared
    exchange = shared.exchange
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_M)
    for i in range(start, end):
        if MASKED:
            block = consumer.keys.masked_block(i)
        else:
            block = i
        stage = shared.queries.stage(item)
        zero = optimisation_barrier(item * 0)  # as in `bwd.py`
        shared.queries.wait(item)
        s = start_product(
            shared.k_buffers, shared.q_buffers, stage, zero, config.USED_BOXES, config.BOXES, config.BLOCK_M
        )
        s = warpgroup_mma_wait(0, deps=[s])
        exchange.dp.signal(item)
        lse = shared.statistics.index(2 * stage).load(S_LAYOUT)
        p, derivative = softmax_weights(s, lse, block * config.BLOCK_M, consumer, MASKED)
        exchange.dp.wait(item)
        exchange.store_p(p.to(DTYPE), item)
        dv = consumer.start_dv(dv, item, zero)
        exchange.store_ds((derivative * exchange.load_dp(s)).to(DTYPE), item)
        dk, dv = consumer.finish(dk, dv, item, zero)
        item += 1
    return dk, dv, item


@gluon.jit
def _blocks_of_second(consumer, dk, dv, item):
    """Consumer 1: all blocks of queries of one head. It knows of no mask."""
    config: gl.constexpr = consumer.shared.config
    shared = consumer.shared
    for _ in range(consumer.keys.end - consumer.keys.begin):
        stage = shared.queries.stage(item)
        zero = optimisation_barrier(item * 0)
        shared.douts.wait(item)
        dp = start_product(
            shared.v_buffers, shared.do_buffers, stage, zero, config.USED_BOXES_V, config.BOXES_V, config.BLOCK_M
        )
        dp = warpgroup_mma_wait(0, deps=[dp])
        shared.queries.wait(item)  # delta is there with Q
        delta = shared.statistics.index(2 * stage + 1).load(accumulator_layout(config.BLOCK_M))
        shared.exchange.store_dp(dp - delta, item)
        dv = consumer.start_dv(dv, item, zero)
        dk, dv = consumer.finish(dk, dv, item, zero)
        item += 1
    return dk, dv, item


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, outputs):
    """One warpgroup: half of the columns of dK and dV of 64 keys."""
    config: gl.constexpr = shared.config
    D: gl.constexpr = count_of(INDEX, config.BOXES) * BOX
    DV: gl.constexpr = count_of(1 - INDEX, config.BOXES_V) * BOX
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    consumer = WideConsumer(INDEX, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E)
    dk = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([ROWS, DV], gl.float32, accumulator_layout(DV))
    item = 0
    shared.keys.wait(0)
    shared.values.wait(0)
    for _ in range(sizes.group_size):
        if INDEX == 0:
            dk, dv, item = _blocks_of_first(consumer, 0, keys.masked_count(), dk, dv, item, True)
            dk, dv, item = _blocks_of_first(consumer, keys.full_begin, keys.full_end, dk, dv, item, False)
        else:
            dk, dv, item = _blocks_of_second(consumer, dk, dv, item)

    # dK and dV leave through the buffers of K and V, which were last read for the scores and dP of the last block:
    # before the last dS was there.
    OF_K: gl.constexpr = gl.SliceLayout(1, accumulator_layout(D))
    OF_V: gl.constexpr = gl.SliceLayout(1, accumulator_layout(DV))
    dk = gl.where((keys.col0 + gl.arange(0, ROWS, layout=OF_K) < keys.n_keys)[:, None], dk * outputs.sm_scale, 0.0)
    dv = gl.where((keys.col0 + gl.arange(0, ROWS, layout=OF_V) < keys.n_keys)[:, None], dv, 0.0)
    if config.DIRECT:
        FIRST_K: gl.constexpr = first_of(INDEX, config.BOXES) * BOX
        FIRST_V: gl.constexpr = first_of(1 - INDEX, config.BOXES_V) * BOX
        store_from_registers(dk, outputs.dk_ptr, outputs.dk_tensor, keys, sizes, 0, FIRST_K, config)
        store_from_registers(dv, outputs.dv_ptr, outputs.dv_tensor, keys, sizes, 0, FIRST_V, config)
    else:
        _part(shared.k_buffers, 0, INDEX, config.BOXES).store(dk.to(DTYPE))
        _part(shared.v_buffers, 0, 1 - INDEX, config.BOXES_V).store(dv.to(DTYPE))
        fence_async_shared()
        _store_part(outputs.dk_tensor, keys, shared.k_buffers, INDEX, config.BOXES, config.USED_BOXES, config.LENGTHS)
        _store_part(
            outputs.dv_tensor, keys, shared.v_buffers, 1 - INDEX, config.BOXES_V, config.USED_BOXES_V, config.LENGTHS
        )
        tma.store_wait(0)


@gluon.jit
def _store_part(
    tensor, keys, buffers, part: gl.constexpr, BOXES: gl.constexpr, USED: gl.constexpr, LENGTHS: gl.constexpr
):
    """Start writing a `_part` of dK or dV."""
    FIRST: gl.constexpr = first_of(part, BOXES)
    for j in gl.static_range(FIRST, FIRST + count_of(part, BOXES)):
        if j < USED:
            start_store(
                tensor, keys.b, keys.hk, keys.col0, j * BOX, keys.first_k + keys.n_keys, keys.n_keys,
                buffer_of(buffers, 0, j, BOXES).reshape(tensor.block_shape), LENGTHS == PACKED,
            )  # fmt: skip


@gluon.jit
def _specialise(keys, sizes, shared, inputs, outputs):
    """Run both consumers and the producer."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, keys, sizes, shared, outputs)),
            (_consumer, (1, keys, sizes, shared, outputs)),
            (producer, (keys, sizes, shared, inputs)),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [R, P, P, P],
    )


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _bwd_wide_dkdv_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # as in `bwd.py`
    dk_tensor, dv_tensor,
    dk_ptr, dv_ptr,
    statistics_tensor,
    lengths_q_ptr, lengths_k_ptr,
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    heads_in_turns,  # see `key_block_of`
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the partitions."""
    DTYPE: gl.constexpr = q_tensor.dtype
    OF_K: gl.constexpr = buffer_count(1, config.BOXES, True)
    OF_V: gl.constexpr = buffer_count(1, config.BOXES_V, True)
    k_buffers = gl.allocate_shared_memory(DTYPE, [OF_K] + k_tensor.block_shape, k_tensor.layout)
    v_buffers = gl.allocate_shared_memory(DTYPE, [OF_V] + v_tensor.block_shape, v_tensor.layout)
    OF_Q: gl.constexpr = buffer_count(config.STAGES, config.BOXES, True)
    OF_DO: gl.constexpr = buffer_count(config.STAGES, config.BOXES_V, True)
    q_buffers = gl.allocate_shared_memory(DTYPE, [OF_Q] + q_tensor.block_shape, q_tensor.layout)
    do_buffers = gl.allocate_shared_memory(DTYPE, [OF_DO] + do_tensor.block_shape, do_tensor.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    p_buffer = gl.allocate_shared_memory(DTYPE, [1, ROWS, config.BLOCK_M], WEIGHTS)
    ds_buffer = gl.allocate_shared_memory(DTYPE, [1, ROWS, config.BLOCK_M], WEIGHTS)
    dp_buffer = gl.allocate_shared_memory(gl.float32, [DQ_ROWS, DQ_COLUMNS], gl.NVMMASharedLayout(0, 32, 2))
    statistics = gl.allocate_shared_memory(
        gl.float32, [2 * config.STAGES] + statistics_tensor.block_shape, statistics_tensor.layout
    )
    queries = allocate_channel(config.STAGES, 2, CONSUMER_COUNT * WARPS)
    douts = allocate_channel(config.STAGES, 1, 0)
    k_channel = allocate_channel(1, 1, 0)
    v_channel = allocate_channel(1, 1, 0)
    dp = allocate_channel(1, CONSUMER_COUNT * WARPS, 0)
    p = allocate_channel(1, WARPS, 0)
    ds = allocate_channel(1, WARPS, 0)
    exchange = Exchange(dp_buffer, p_buffer, ds_buffer, dp, p, ds)
    fence_async_shared()
    wait_for_previous_kernels()

    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr, heads_in_turns,
    )  # fmt: skip
    keys = key_block_of(gl.program_id(0), sizes, config)
    shared = WideShared(
        config, k_buffers, v_buffers, q_buffers, do_buffers, statistics, k_channel, v_channel, queries, douts, exchange
    )
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, dk_ptr, dv_ptr, sm_scale, scale, softcap)
    if config.LENGTHS == PACKED:
        if keys.col0 < keys.n_keys:
            _specialise(keys, sizes, shared, inputs, outputs)
    else:
        _specialise(keys, sizes, shared, inputs, outputs)
