"""Attention backward for Hopper where Q and K have 129 to 192 columns and V up to 128, as in training with MLA.

As in `bwd.py` a program owns 128 keys, and each of two consumers 64 of them, all columns of their dK and dV. Those are
160 of 240 registers, so that no more than two blocks of 64 x 64 fp32 numbers can lie beside them: weights are kept in
16 bits, and dQ is formed behind dS of its own block, a box of 64 columns at a time, and added to global memory from
registers (`bwd_wide.py`). Of its three boxes consumers 0 and 1 form boxes 0 and 1, from the dS of all 128 keys; of box
2 each forms what its own keys add.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
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
from diyfa.backends.cuda.gluon.compat import FORMS_DESCRIPTORS_EARLY, aggregate
from diyfa.backends.cuda.hopper.bwd import (
    DS_STAGES,
    Inputs,
    Outputs,
    producer,
    softmax_weights,
    start_product,
    store_from_registers,
    sync_consumers,
)
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, HALF_DQ, to_register_order
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    LENGTH_POINTERS,
    SIZES,
    KeyBlock,
    Sizes,
    first_query_block,
    key_block_of,
)
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_of, buffer_of, paired, run_of, unpaired
from diyfa.backends.cuda.hopper.softmax import LOG2E
from diyfa.backends.cuda.hopper.tiles import start_store

BOXES = gl.constexpr(3)  # of Q and K
BOXES_V = gl.constexpr(2)
# Where it is so 1.9 KB would spill. Elsewhere indices are as they are: hidden, they cost 5 % of a causal pass.
HIDES_INDICES = gl.constexpr(FORMS_DESCRIPTORS_EARLY)


@gluon.jit
def _unknown(index):
    """The index, as a number of which the compiler knows nothing before this place."""
    return optimisation_barrier(index) if HIDES_INDICES else index


@gluon.jit
def _plus(index, zero):
    """The index, as a number that the compiler does not know before the zero."""
    return index + zero if HIDES_INDICES else index


@aggregate
class ScoreGradients:
    """The dS that both consumers leave for each other, in two stages.

    Nobody need say that a stage is free: who writes item n + 2 has waited for all of item n + 1, which each consumer
    writes when it has done with item n.
    """

    buffers: gl.shared_memory_descriptor  # dSᵀ, [64 keys, 64 queries] of each consumer
    channel: Channel  # from each consumer to the other

    @gluon.jit
    def box(self, item, CONSUMER: gl.constexpr):
        """The item's dSᵀ of a consumer."""
        return box_of(self.buffers, self.channel.of(CONSUMER).stage(item), 0, 1)

    @gluon.jit
    def store(self, ds, item, CONSUMER: gl.constexpr):
        """A consumer leaves its dSᵀ."""
        self.box(item, CONSUMER).store(ds)
        fence_async_shared()
        self.channel.of(CONSUMER).commit(item)


@aggregate
class MlaShared:
    """What the partitions share: constants, memory and barriers."""

    config: gl.constexpr  # `Sm90BwdConstants`
    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor
    q_buffers: gl.shared_memory_descriptor
    do_buffers: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor  # [2 * STAGES, 1, BLOCK_M]: lse and delta
    keys: Channel  # K of each consumer
    values: Channel
    queries: Channel
    douts: Channel
    score_gradients: ScoreGradients


@gluon.jit
def _add_in_fours(pointer, x):
    """Add x [16, 256], `to_register_order`, to numbers that follow each other in global memory, four at a time."""
    even, odd = gl.split(x.reshape([DQ_ROWS, DQ_COLUMNS // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    LAYOUT: gl.constexpr = x0.type.layout
    rows = gl.arange(0, DQ_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    fours = gl.arange(0, DQ_COLUMNS // 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # What its lane and warp say is a thread's own; the rest are constants, which need no registers.
    index = rows * DQ_COLUMNS + fours * 4
    own = pointer.to(gl.int64) + optimisation_barrier((index & 511) * 4)
    addresses = own + (index & ~511) * 4
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5};", "=r,l,f,f,f,f",
        [addresses, x0, x1, x2, x3], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@aggregate
class MlaConsumer:
    """One consumer warpgroup: what it knows for all blocks."""

    INDEX: gl.constexpr
    keys: KeyBlock
    sizes: Sizes
    shared: MlaShared
    outputs: Outputs
    dq_ptr: gl.tensor
    scale: gl.tensor  # of products, in units of log2
    cap: gl.constexpr  # for `softmax_weights`: none

    @gluon.jit
    def start_dq(self, item, zero):
        """Start this consumer's box of dS K, [64, 64], from the dS of all keys."""
        dq = gl.zeros([ROWS, BOX], gl.float32, accumulator_layout(BOX))
        for half in gl.static_range(CONSUMER_COUNT):
            ds = self.shared.score_gradients.box(item, half).permute((1, 0))
            k = box_of(self.shared.k_buffers, half + zero, self.INDEX, BOXES)
            dq = warpgroup_mma(ds, k, dq, use_acc=half > 0, is_async=True)
        return dq

    @gluon.jit
    def start_own_dq(self, item, zero):
        """Start what this consumer's keys add to the last box."""
        dq = gl.zeros([ROWS, BOX], gl.float32, accumulator_layout(BOX))
        ds = self.shared.score_gradients.box(item, self.INDEX).permute((1, 0))
        k = box_of(self.shared.k_buffers, self.INDEX + zero, BOXES - 1, BOXES)
        return warpgroup_mma(ds, k, dq, use_acc=False, is_async=True)

    @gluon.jit
    def add_dq(self, dq, block, j: gl.constexpr):
        """Add it to box j of block number `block` of queries."""
        _add_in_fours(self.dq_ptr + (block.to(gl.int64) * BOXES + j) * HALF_DQ, to_register_order(dq))


@gluon.jit
def _blocks(
    consumer, first, start, end,
    dk, dk_last, dv,  # [64, 128], [64, 64], [64, 128] fp32
    item,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of queries of one head, those that need a mask or the others; `item` counts those of all
    heads."""
    config: gl.constexpr = consumer.shared.config
    c: gl.constexpr = consumer.INDEX
    shared = consumer.shared
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(2 * BOX), 2)
    OF_LAST: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BOX), 2)
    for i in range(start, end):
        if MASKED:
            block = consumer.keys.masked_block(i)
        else:
            block = i
        stage = _unknown(shared.queries.stage(item))
        zero = optimisation_barrier(item * 0)  # as in `bwd.py`
        shared.queries.wait(item)
        s = start_product(shared.k_buffers, shared.q_buffers, stage, c + zero, BOXES, BOXES, config.BLOCK_M)
        s = warpgroup_mma_wait(0, deps=[s])
        lse = shared.statistics.index(2 * stage).load(S_LAYOUT)
        p, _ = softmax_weights(s, lse, block * config.BLOCK_M, consumer, MASKED)
        p = paired(p, DTYPE, False)
        shared.douts.wait(item)
        zero = _unknown(zero)
        at = _plus(stage, zero)
        dp = start_product(shared.v_buffers, shared.do_buffers, at, c + zero, BOXES_V, BOXES_V, config.BLOCK_M)
        dp = warpgroup_mma_wait(0, deps=[dp])
        zero = _unknown(zero)
        do = run_of(shared.do_buffers, _plus(stage, zero), BOXES_V, 0, BOXES_V)
        dv = warpgroup_mma(unpaired(p, DTYPE, OPERAND), do, dv, is_async=True)

        delta = shared.statistics.index(2 * stage + 1).load(S_LAYOUT)
        ds = (unpaired(p, DTYPE, S_LAYOUT).to(gl.float32) * (dp - delta)).to(DTYPE)
        shared.score_gradients.store(ds, item, c)
        ds = gl.convert_layout(ds, OPERAND)
        zero = _unknown(zero)
        dk = warpgroup_mma(ds, run_of(shared.q_buffers, _plus(stage, zero), BOXES, 0, BOXES), dk, is_async=True)
        ds = gl.convert_layout(ds, OF_LAST)
        dk_last = warpgroup_mma(ds, box_of(shared.q_buffers, stage, BOXES - 1, BOXES), dk_last, is_async=True)
        dv, dk, dk_last = warpgroup_mma_wait(0, deps=[dv, dk, dk_last])
        shared.queries.release(item)
        dq = consumer.start_own_dq(item, zero)
        dq = warpgroup_mma_wait(0, deps=[dq])
        consumer.add_dq(dq, first + block, BOXES - 1)
        # The additions read their registers for a while: without a wait in between the next product would need others.
        shared.score_gradients.channel.of(1 - c).wait(item)
        dq = consumer.start_dq(item, zero)
        dq = warpgroup_mma_wait(0, deps=[dq])
        consumer.add_dq(dq, first + block, c)
        item += 1
    return dk, dk_last, dv, item


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, outputs, dq_ptr):
    """One warpgroup: dK and dV of its 64 keys, and its part of what all 128 add to dQ."""
    config: gl.constexpr = shared.config
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    consumer = MlaConsumer(INDEX, keys, sizes, shared, outputs, dq_ptr, outputs.scale * LOG2E, 0.0)
    OF_TWO: gl.constexpr = accumulator_layout(2 * BOX)
    OF_ONE: gl.constexpr = accumulator_layout(BOX)
    dk = gl.zeros([ROWS, 2 * BOX], gl.float32, OF_TWO)
    dk_last = gl.zeros([ROWS, BOX], gl.float32, OF_ONE)
    dv = gl.zeros([ROWS, 2 * BOX], gl.float32, OF_TWO)
    item = 0
    for j in gl.static_range(CONSUMER_COUNT):
        shared.keys.of(j).wait(0)
    shared.values.of(INDEX).wait(0)
    masked = keys.masked_count()
    for g in range(sizes.group_size):
        h = keys.hk * sizes.group_size + g
        first = first_query_block(keys.b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
        dk, dk_last, dv, item = _blocks(consumer, first, 0, masked, dk, dk_last, dv, item, True)
        dk, dk_last, dv, item = _blocks(consumer, first, keys.full_begin, keys.full_end, dk, dk_last, dv, item, False)

    key = keys.col0 + INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_TWO))
    exists = (key < keys.n_keys)[:, None]
    of_last = keys.col0 + INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_ONE))
    dk = gl.where(exists, dk * outputs.sm_scale, 0.0)
    dk_last = gl.where((of_last < keys.n_keys)[:, None], dk_last * outputs.sm_scale, 0.0)
    dv = gl.where(exists, dv, 0.0)
    if config.DIRECT:
        store_from_registers(dk, outputs.dk_ptr, outputs.dk_tensor, keys, sizes, INDEX * ROWS, 0, config)
        store_from_registers(dk_last, outputs.dk_ptr, outputs.dk_tensor, keys, sizes, INDEX * ROWS, 2 * BOX, config)
        store_from_registers(dv, outputs.dv_ptr, outputs.dv_tensor, keys, sizes, INDEX * ROWS, 0, config)
    else:
        # They leave through the buffers of K, which both consumers have read, and of V.
        sync_consumers()
        run_of(shared.k_buffers, INDEX, BOXES, 0, BOXES).store(dk.to(DTYPE))
        box_of(shared.k_buffers, INDEX, BOXES - 1, BOXES).store(dk_last.to(DTYPE))
        run_of(shared.v_buffers, INDEX, BOXES_V, 0, BOXES_V).store(dv.to(DTYPE))
        fence_async_shared()
        _store_boxes(outputs.dk_tensor, keys, shared.k_buffers, INDEX, BOXES, config.USED_BOXES, config.LENGTHS)
        _store_boxes(outputs.dv_tensor, keys, shared.v_buffers, INDEX, BOXES_V, config.USED_BOXES_V, config.LENGTHS)
        tma.store_wait(0)


@gluon.jit
def _store_boxes(
    tensor, keys, buffers, INDEX: gl.constexpr, OF: gl.constexpr, USED: gl.constexpr, LENGTHS: gl.constexpr
):
    """Start writing a consumer's rows of dK or dV."""
    for j in gl.static_range(USED):
        start_store(
            tensor, keys.b, keys.hk, keys.col0 + INDEX * ROWS, j * BOX, keys.first_k + keys.n_keys, keys.n_keys,
            buffer_of(buffers, INDEX, j, OF).reshape(tensor.block_shape), LENGTHS == PACKED,
        )  # fmt: skip


@gluon.jit
def _specialise(keys, sizes, shared, inputs, outputs, dq_ptr):
    """Run both consumers and the producer."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, keys, sizes, shared, outputs, dq_ptr)),
            (_consumer, (1, keys, sizes, shared, outputs, dq_ptr)),
            (producer, (keys, sizes, shared, inputs)),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [R, P, P, P],
    )


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _bwd_mla_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # as in `bwd.py`
    dk_tensor, dv_tensor,
    dk_ptr, dv_ptr,
    statistics_tensor,
    dq_ptr,  # fp32: 64 x 64 numbers for each box of each block of queries
    lengths_q_ptr, lengths_k_ptr,
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    heads_in_turns,  # see `key_block_of`
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the partitions."""
    DTYPE: gl.constexpr = q_tensor.dtype
    k_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * BOXES] + k_tensor.block_shape, k_tensor.layout)
    v_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * BOXES_V] + v_tensor.block_shape, v_tensor.layout)
    q_buffers = gl.allocate_shared_memory(DTYPE, [config.STAGES * BOXES] + q_tensor.block_shape, q_tensor.layout)
    do_buffers = gl.allocate_shared_memory(DTYPE, [config.STAGES * BOXES_V] + do_tensor.block_shape, do_tensor.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_buffers = gl.allocate_shared_memory(DTYPE, [DS_STAGES * CONSUMER_COUNT, ROWS, ROWS], DS_LAYOUT)
    statistics = gl.allocate_shared_memory(
        gl.float32, [2 * config.STAGES] + statistics_tensor.block_shape, statistics_tensor.layout
    )
    queries = allocate_channel(config.STAGES, 2, CONSUMER_COUNT * WARPS)
    douts = allocate_channel(config.STAGES, 1, 0)
    k_channel = allocate_channel(1, 1, 0, CONSUMER_COUNT)
    v_channel = allocate_channel(1, 1, 0, CONSUMER_COUNT)
    score_gradients = ScoreGradients(ds_buffers, allocate_channel(DS_STAGES, WARPS, 0, CONSUMER_COUNT))
    fence_async_shared()
    wait_for_previous_kernels()

    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr, heads_in_turns,
    )  # fmt: skip
    keys = key_block_of(gl.program_id(0), sizes, config)
    shared = MlaShared(
        config,
        k_buffers,
        v_buffers,
        q_buffers,
        do_buffers,
        statistics,
        k_channel,
        v_channel,
        queries,
        douts,
        score_gradients,
    )
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, dk_ptr, dv_ptr, sm_scale, scale, softcap)
    if config.LENGTHS == PACKED:
        if keys.col0 < keys.n_keys:
            _specialise(keys, sizes, shared, inputs, outputs, dq_ptr)
    else:
        _specialise(keys, sizes, shared, inputs, outputs, dq_ptr)
