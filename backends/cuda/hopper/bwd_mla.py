"""Attention backward for Hopper where Q and K have 129 to 192 columns and V up to 128, as in training with MLA.

As in `bwd.py` a program owns 128 keys, and each of two consumers 64 of them, with all columns of their dK and dV. The
accumulators take 160 of 240 registers, so only two blocks of 64 x 64 fp32 numbers fit beside them. Weights are kept in
16 bits. dQ is formed after dS of its own block, a box of 64 columns at a time, and added to global memory from
registers. Of its three boxes consumers 0 and 1 form boxes 0 and 1, from the dS of all 128 keys; of box 2 each forms
what its own keys add.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.gluon.barriers import WARPS, sync_consumers
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, hidden_index, index_behind, optimisation_barrier
from diyfa.backends.cuda.hopper.bwd_common import (
    Consumer,
    finished_rows,
    scale_in_log2,
    softmax_weights,
    start_product,
    store_boxes,
    store_from_registers,
)
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, HALF_DQ, to_register_order
from diyfa.backends.cuda.hopper.bwd_tiles import BOX, CONSUMER_COUNT, first_query_block
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_matrix, paired, run_matrix, unpaired
from diyfa.backends.cuda.hopper.softmax import LOG2E

BOXES = gl.constexpr(3)  # of Q and K
BOXES_V = gl.constexpr(2)
DS_STAGES = gl.constexpr(2)


@aggregate
class MlaExchange:
    """The dS that the consumers leave for each other.

    `ds` needs no `empty` barriers: before a consumer writes item n + 2 it has waited for the other one's item n + 1,
    which the other one writes after reading item n.
    """

    buffers: gl.shared_memory_descriptor  # dSᵀ, [64 keys, 64 queries] of each stage and consumer
    ds: Channel  # from each consumer to the other
    dq_ptr: gl.tensor  # fp32

    @gluon.jit
    def consume(self, INDEX: gl.constexpr, keys, sizes, shared, outputs):
        _consumer(INDEX, keys, sizes, shared, self, outputs)

    @gluon.jit
    def box(self, item, CONSUMER: gl.constexpr):
        """A consumer's dSᵀ."""
        return box_matrix(self.buffers, self.ds.pick(CONSUMER).stage(item), 0, 1)

    @gluon.jit
    def store(self, ds, item, CONSUMER: gl.constexpr):
        """Leave a consumer's dSᵀ."""
        self.box(item, CONSUMER).store(ds)
        fence_async_shared()
        self.ds.pick(CONSUMER).commit(item)


@gluon.jit
def allocate_mla_exchange(dq_ptr, DTYPE: gl.constexpr):
    """`MlaExchange`, with its barriers initialised."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = gl.allocate_shared_memory(DTYPE, [DS_STAGES * CONSUMER_COUNT, ROWS, ROWS], LAYOUT)
    return MlaExchange(buffers, allocate_channel(DS_STAGES, WARPS, 0, CONSUMER_COUNT), dq_ptr)


# ---- dQ


@gluon.jit
def _start_dq(consumer, exchange, item, zero, j: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr):
    """Start box j of dS K, [64, 64], from the dS of the keys of consumers [FIRST, END)."""
    dq = gl.zeros([ROWS, BOX], gl.float32, accumulator_layout(BOX))
    for half in gl.static_range(FIRST, END):
        ds = exchange.box(item, half).permute((1, 0))
        k = box_matrix(consumer.shared.k_buffers, half + zero, j, BOXES)
        dq = warpgroup_mma(ds, k, dq, use_acc=half > FIRST, is_async=True)
    return dq


@gluon.jit
def _add_dq(exchange, dq, block, j: gl.constexpr):
    """Add dq, [64, 64], to box j of block number `block` of queries."""
    _add_in_fours(exchange.dq_ptr + (block.to(gl.int64) * BOXES + j) * HALF_DQ, to_register_order(dq))


@gluon.jit
def _add_in_fours(pointer, x):
    """Add x [16, 256], `to_register_order`, to numbers that follow each other in global memory, four at a time."""
    even, odd = gl.split(x.reshape([DQ_ROWS, DQ_COLUMNS // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    LAYOUT: gl.constexpr = x0.type.layout
    rows = gl.arange(0, DQ_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    fours = gl.arange(0, DQ_COLUMNS // 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # The low bits depend on the thread's lane and warp; the rest are constants, which need no registers.
    index = rows * DQ_COLUMNS + fours * 4
    thread_base = pointer.to(gl.int64) + optimisation_barrier((index & 511) * 4)
    addresses = thread_base + (index & ~511) * 4
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5};", "=r,l,f,f,f,f",
        [addresses, x0, x1, x2, x3], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# ---- the consumers


@gluon.jit
def _add_query_blocks(
    consumer, exchange,
    first,  # number of the head's first block of queries
    start, end,
    dk, dk_last, dv,  # [64, 128], [64, 64], [64, 128] fp32
    item,  # number of the block among those of all heads
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dk, dk_last, dv and dQ what blocks [start, end) of queries of one head contribute.

    These blocks all need a mask (MASKED), or none does. Before each product, its tiles are found behind a
    `hidden_index` of their own: formed earlier, their descriptors would take registers until then.
    """
    c: gl.constexpr = consumer.INDEX
    shared = consumer.shared
    M: gl.constexpr = shared.config.BLOCK_M
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    S_LAYOUT: gl.constexpr = accumulator_layout(M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(2 * BOX), 2)
    LAST_OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BOX), 2)
    for i in range(start, end):
        block = consumer.keys.visited_block(i, MASKED)
        stage = hidden_index(shared.queries.stage(item))
        zero = optimisation_barrier(item * 0)  # as in `bwd.py`
        shared.queries.wait(item)
        s = start_product(shared.k_buffers, c + zero, shared.q_buffers, stage, BOXES, BOXES, M)
        s = warpgroup_mma_wait(0, deps=[s])
        p, _ = softmax_weights(s, shared.lse(stage), block * M, consumer, MASKED)
        p = paired(p, DTYPE, False)
        shared.douts.wait(item)
        zero = hidden_index(zero)
        do_stage = index_behind(stage, zero)
        dp = start_product(shared.v_buffers, c + zero, shared.do_buffers, do_stage, BOXES_V, BOXES_V, M)
        dp = warpgroup_mma_wait(0, deps=[dp])
        zero = hidden_index(zero)
        do = run_matrix(shared.do_buffers, index_behind(stage, zero), BOXES_V, 0, BOXES_V)
        dv = warpgroup_mma(unpaired(p, DTYPE, OPERAND), do, dv, is_async=True)

        ds = (unpaired(p, DTYPE, S_LAYOUT).to(gl.float32) * (dp - shared.delta(stage))).to(DTYPE)
        exchange.store(ds, item, c)
        ds = gl.convert_layout(ds, OPERAND)
        zero = hidden_index(zero)
        q = run_matrix(shared.q_buffers, index_behind(stage, zero), BOXES, 0, BOXES)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        ds = gl.convert_layout(ds, LAST_OPERAND)
        dk_last = warpgroup_mma(ds, box_matrix(shared.q_buffers, stage, BOXES - 1, BOXES), dk_last, is_async=True)
        dv, dk, dk_last = warpgroup_mma_wait(0, deps=[dv, dk, dk_last])
        shared.queries.release(item)
        dq = _start_dq(consumer, exchange, item, zero, BOXES - 1, c, c + 1)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _add_dq(exchange, dq, first + block, BOXES - 1)
        # The additions read their registers for a while. Without a wait in between the next product would need others.
        exchange.ds.pick(1 - c).wait(item)
        dq = _start_dq(consumer, exchange, item, zero, c, 0, CONSUMER_COUNT)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _add_dq(exchange, dq, first + block, c)
        item += 1
    return dk, dk_last, dv, item


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, exchange, outputs):
    """One warpgroup: dK and dV of its 64 keys, and its boxes of dQ."""
    config: gl.constexpr = shared.config
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    consumer = Consumer(INDEX, INDEX * ROWS, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E, 0.0)
    PAIR_LAYOUT: gl.constexpr = accumulator_layout(2 * BOX)
    dk = gl.zeros([ROWS, 2 * BOX], gl.float32, PAIR_LAYOUT)
    dk_last = gl.zeros([ROWS, BOX], gl.float32, accumulator_layout(BOX))
    dv = gl.zeros([ROWS, 2 * BOX], gl.float32, PAIR_LAYOUT)
    item = 0
    for j in gl.static_range(CONSUMER_COUNT):
        shared.keys.pick(j).wait(0)
    shared.values.pick(INDEX).wait(0)
    n_masked = keys.masked_count()
    for g in range(sizes.group_size):
        h = keys.hk * sizes.group_size + g
        first = first_query_block(keys.b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
        dk, dk_last, dv, item = _add_query_blocks(
            consumer, exchange, first, 0, n_masked, dk, dk_last, dv, item, True
        )  # fmt: skip
        dk, dk_last, dv, item = _add_query_blocks(
            consumer, exchange, first, keys.full_begin, keys.full_end, dk, dk_last, dv, item, False
        )  # fmt: skip
    dk = finished_rows(dk, outputs.sm_scale, consumer)
    dk_last = finished_rows(dk_last, outputs.sm_scale, consumer)
    dv = finished_rows(dv, 1.0, consumer)
    if config.STORE_FROM_REGISTERS:
        store_from_registers(dk, outputs.dk_ptr, outputs.dk_tensor, consumer, 0)
        store_from_registers(dk_last, outputs.dk_ptr, outputs.dk_tensor, consumer, 2 * BOX)
        store_from_registers(dv, outputs.dv_ptr, outputs.dv_tensor, consumer, 0)
    else:
        # They leave through the buffers of K, which both consumers must have read, and of V.
        DTYPE: gl.constexpr = shared.k_buffers.dtype
        sync_consumers()
        run_matrix(shared.k_buffers, INDEX, BOXES, 0, BOXES).store(dk.to(DTYPE))
        box_matrix(shared.k_buffers, INDEX, BOXES - 1, BOXES).store(dk_last.to(DTYPE))
        run_matrix(shared.v_buffers, INDEX, BOXES_V, 0, BOXES_V).store(dv.to(DTYPE))
        fence_async_shared()
        store_boxes(outputs.dk_tensor, shared.k_buffers, INDEX, consumer, 0, BOXES, BOXES, config.USED_BOXES)
        store_boxes(outputs.dv_tensor, shared.v_buffers, INDEX, consumer, 0, BOXES_V, BOXES_V, config.USED_BOXES_V)
        tma.store_wait(0)
