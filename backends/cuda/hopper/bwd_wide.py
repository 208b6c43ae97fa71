"""dK and dV for Hopper where heads have up to 256 columns, or V has others than Q; `bwd_wide_dq.py` forms dQ.

The accumulators of 64 keys, dK and dV, take most registers of two warpgroups. So a program owns 64 keys, and its
consumers divide the columns of both. S and dP are formed once:

    consumer 0:  Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),      dSᵀ = Pᵀ * (dPᵀ - delta)
    consumer 1:  dPᵀ = V dOᵀ, from which it takes delta
    both:        dV += Pᵀ dO,  dK += dSᵀ Q, each half of the columns

dPᵀ - delta goes to consumer 0 in fp32, Pᵀ and dSᵀ come back in 16 bits. dV is formed while dS is computed.

`bwd.py` adds dQ of each block of keys to global memory. Here that would be 64 KB for 64 queries and 64 keys, which
takes longer than the two extra products of a kernel for dQ alone.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.gluon.barriers import WARPS
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, optimisation_barrier
from diyfa.backends.cuda.hopper.bwd_common import (
    Consumer,
    finished_rows,
    scale_in_log2,
    softmax_weights,
    start_product,
    store_boxes,
    store_from_registers,
)
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, to_register_order
from diyfa.backends.cuda.hopper.bwd_tiles import BOX, CONSUMER_COUNT
from diyfa.backends.cuda.hopper.epilogue import from_register_order
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_matrix, run_matrix
from diyfa.backends.cuda.hopper.softmax import LOG2E


@constexpr_function
def half_count(half, boxes):
    """Number of boxes in half 0 or 1 of a tile's columns. Three boxes are divided into one and two.

    Consumer 0 has half 0 of K and Q, but half 1 of V and dO.
    """
    return half + 1 if boxes == 3 else boxes // 2


@constexpr_function
def half_first(half, boxes):
    """The first box of a half."""
    return 2 * (1 - half) if boxes == 3 else half * (boxes // 2)


@gluon.jit
def _half(buffers, tile, half: gl.constexpr, BOXES: gl.constexpr):
    """A half of a tile's columns as one matrix."""
    HALF: gl.constexpr = BOXES // CONSUMER_COUNT
    if BOXES == 3:
        run = run_matrix(buffers, tile, BOXES, 1 - half, BOXES)
    else:
        run = run_matrix(buffers, tile * CONSUMER_COUNT + half, HALF, 0, HALF)
    return run


@aggregate
class HalfExchange:
    """Blocks that the consumers pass to each other: dPᵀ - delta, then Pᵀ, then dSᵀ.

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
    def consume(self, INDEX: gl.constexpr, keys, sizes, shared, outputs):
        _consumer(INDEX, keys, sizes, shared, self, outputs)

    @gluon.jit
    def store_dp(self, dp, item):
        """Consumer 1 leaves dPᵀ - delta."""
        self.dp_buffer.store(to_register_order(dp))
        self.dp.commit(item)

    @gluon.jit
    def load_dp(self, accumulator):
        """Consumer 0 takes it, in the layout of `accumulator`."""
        x = self.dp_buffer.load(to_register_order(accumulator).type.layout)
        return gl.convert_layout(from_register_order(x, BOX), accumulator.type.layout)

    @gluon.jit
    def store(self, x, buffer, channel, item):
        """Consumer 0 leaves Pᵀ or dSᵀ."""
        box_matrix(buffer, 0, 0, 1).store(x)
        fence_async_shared()
        channel.commit(item)


@gluon.jit
def allocate_half_exchange(DTYPE: gl.constexpr, BLOCK_M: gl.constexpr):
    """`HalfExchange`, with its barriers initialised."""
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    p_buffer = gl.allocate_shared_memory(DTYPE, [1, ROWS, BLOCK_M], WEIGHTS)
    ds_buffer = gl.allocate_shared_memory(DTYPE, [1, ROWS, BLOCK_M], WEIGHTS)
    dp_buffer = gl.allocate_shared_memory(gl.float32, [DQ_ROWS, DQ_COLUMNS], gl.NVMMASharedLayout(0, 32, 2))
    dp = allocate_channel(1, CONSUMER_COUNT * WARPS, 0)
    p = allocate_channel(1, WARPS, 0)
    ds = allocate_channel(1, WARPS, 0)
    return HalfExchange(dp_buffer, p_buffer, ds_buffer, dp, p, ds)


@gluon.jit
def _start_dv(consumer, exchange, dv, item, zero):
    """Start adding Pᵀ dO to this consumer's half of the columns. dO is there: consumer 1 has formed dP of it."""
    shared = consumer.shared
    exchange.p.wait(item)
    do = _half(shared.do_buffers, shared.queries.stage(item), 1 - consumer.INDEX, shared.config.BOXES_V)
    return warpgroup_mma(box_matrix(exchange.p_buffer, zero, 0, 1), do, dv, is_async=True)


@gluon.jit
def _finish(consumer, exchange, dk, dv, item, zero):
    """Add dSᵀ Q to this consumer's half of the columns. Wait for dK and dV, and release the stage."""
    shared = consumer.shared
    exchange.ds.wait(item)
    q = _half(shared.q_buffers, shared.queries.stage(item), consumer.INDEX, shared.config.BOXES)
    dk = warpgroup_mma(box_matrix(exchange.ds_buffer, zero, 0, 1), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    shared.queries.release(item)
    return dk, dv


@gluon.jit
def _consumer0_blocks(
    consumer, exchange, start, end,
    dk, dv,  # [64, half of the columns] fp32
    item,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Consumer 0: blocks [start, end) of queries of one head, either those that need a mask or those that need none."""
    shared = consumer.shared
    config: gl.constexpr = shared.config
    M: gl.constexpr = config.BLOCK_M
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    for i in range(start, end):
        block = consumer.keys.visited_block(i, MASKED)
        stage = shared.queries.stage(item)
        zero = optimisation_barrier(item * 0)  # as in `bwd.py`
        shared.queries.wait(item)
        s = start_product(shared.k_buffers, zero, shared.q_buffers, stage, config.USED_BOXES, config.BOXES, M)
        s = warpgroup_mma_wait(0, deps=[s])
        exchange.dp.signal(item)
        p, p_derivative = softmax_weights(s, shared.lse(stage), block * M, consumer, MASKED)
        exchange.dp.wait(item)
        exchange.store(p.to(DTYPE), exchange.p_buffer, exchange.p, item)
        dv = _start_dv(consumer, exchange, dv, item, zero)
        exchange.store((p_derivative * exchange.load_dp(s)).to(DTYPE), exchange.ds_buffer, exchange.ds, item)
        dk, dv = _finish(consumer, exchange, dk, dv, item, zero)
        item += 1
    return dk, dv, item


@gluon.jit
def _consumer1_blocks(consumer, exchange, dk, dv, item):
    """Consumer 1: all blocks of queries of one head. It needs no mask."""
    shared = consumer.shared
    config: gl.constexpr = shared.config
    M: gl.constexpr = config.BLOCK_M
    for _ in range(consumer.keys.end - consumer.keys.begin):
        stage = shared.queries.stage(item)
        zero = optimisation_barrier(item * 0)
        shared.douts.wait(item)
        dp = start_product(shared.v_buffers, zero, shared.do_buffers, stage, config.USED_BOXES_V, config.BOXES_V, M)
        dp = warpgroup_mma_wait(0, deps=[dp])
        shared.queries.wait(item)  # delta is there with Q
        exchange.store_dp(dp - shared.delta(stage), item)
        dv = _start_dv(consumer, exchange, dv, item, zero)
        dk, dv = _finish(consumer, exchange, dk, dv, item, zero)
        item += 1
    return dk, dv, item


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, exchange, outputs):
    """One warpgroup: half of the columns of dK and dV of 64 keys."""
    config: gl.constexpr = shared.config
    D: gl.constexpr = half_count(INDEX, config.BOXES) * BOX
    DV: gl.constexpr = half_count(1 - INDEX, config.BOXES_V) * BOX
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    consumer = Consumer(INDEX, 0, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E, 0.0)
    dk = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([ROWS, DV], gl.float32, accumulator_layout(DV))
    item = 0
    shared.keys.wait(0)
    shared.values.wait(0)
    for g in range(sizes.group_size):
        if INDEX == 0:
            head_consumer = consumer.with_slope(g)
            dk, dv, item = _consumer0_blocks(head_consumer, exchange, 0, keys.masked_count(), dk, dv, item, True)
            dk, dv, item = _consumer0_blocks(
                head_consumer, exchange, keys.full_begin, keys.full_end, dk, dv, item, False
            )
        else:
            dk, dv, item = _consumer1_blocks(consumer, exchange, dk, dv, item)
    dk = finished_rows(dk, outputs.sm_scale, consumer)
    dv = finished_rows(dv, 1.0, consumer)
    FIRST_K: gl.constexpr = half_first(INDEX, config.BOXES)  # first boxes
    FIRST_V: gl.constexpr = half_first(1 - INDEX, config.BOXES_V)
    if config.STORE_FROM_REGISTERS:
        store_from_registers(dk, outputs.dk_ptr, outputs.dk_tensor, consumer, FIRST_K * BOX)
        store_from_registers(dv, outputs.dv_ptr, outputs.dv_tensor, consumer, FIRST_V * BOX)
    else:
        # They leave through the buffers of K and V, which were last read for S and dP of the last block, before its dS.
        _half(shared.k_buffers, 0, INDEX, config.BOXES).store(dk.to(DTYPE))
        _half(shared.v_buffers, 0, 1 - INDEX, config.BOXES_V).store(dv.to(DTYPE))
        fence_async_shared()
        store_boxes(
            outputs.dk_tensor, shared.k_buffers, 0, consumer, FIRST_K, D // BOX, config.BOXES, config.USED_BOXES
        )  # fmt: skip
        store_boxes(
            outputs.dv_tensor, shared.v_buffers, 0, consumer, FIRST_V, DV // BOX, config.BOXES_V, config.USED_BOXES_V
        )  # fmt: skip
        tma.store_wait(0)
