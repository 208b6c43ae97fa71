"""Attention backward for Hopper (sm_90): one loop for dQ, dK and dV, in Gluon.

A persistent program takes one block of BLOCK_N = 128 keys of a head after another. For each it goes through the queries
of all heads of the group, or of a subgroup (`bwd_partials.py`). Its roles are a producer warp, which finds
the blocks and copies tiles to shared memory through TMA; two consumer warpgroups with 64 of the keys each; and two
adder warps, one for each consumer. For each block of BLOCK_M queries a consumer forms

    Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),  dPᵀ = V dOᵀ,  dSᵀ = Pᵀ * (dPᵀ - delta),  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K

(Dao 2023, arXiv:2307.08691, algorithm 2; Shah et al. 2024, arXiv:2407.08608, for the roles). Scores are transposed, so
P and dS are in registers as the left operands of the products that accumulate dV and dK. dQ needs the dS of all 128
keys. So consumers exchange dS through shared memory, and each forms half of dQ. Its adder adds that half to an fp32 dQ
in global memory.

Before this kernel, `_prepare_kernel` forms delta and clears the fp32 dQ. This kernel converts it to 16 bits, and then
clears it for later heads (`bwd_rolling_dq.py`), or `_convert_kernel` converts it afterwards (`bwd_dq.py`).
`docs/hopper-backward.md` explains it all.

In global memory, queries lie in blocks of BLOCK_M of one head. Each sequence begins with a block of its own. The
statistics of a block are two rows: lse in units of log2, and delta. The fp32 dQ of a block is in the order of the
consumers' registers.

For wider heads the kernel has other consumers, those of `bwd_wide.py` or `bwd_mla.py`, and no adders.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.attention.tile_io import PACKED
from diyfa.backends.cuda.gluon.barriers import (
    WARPS,
    idle_warps,
    sync_consumers,
    wait_for_previous_kernels,
    wait_for_stores,
)
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_reduce_add, optimisation_barrier, reinterpret
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.semaphore import increment_semaphore, wait_until_equal
from diyfa.backends.cuda.hopper.bwd_common import (
    Consumer,
    Inputs,
    Outputs,
    allocate_shared,
    box_width,
    finished_rows,
    load_keys,
    load_queries,
    run_key_block,
    scale_in_log2,
    softmax_weights,
    start_product,
    store_boxes,
    store_from_registers,
    used_columns,
)
from diyfa.backends.cuda.hopper.bwd_dq import DQ_COLUMNS, DQ_ROWS, to_register_order
from diyfa.backends.cuda.hopper.bwd_mla import allocate_mla_exchange
from diyfa.backends.cuda.hopper.bwd_rolling_dq import make_rolling_dq
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    END,
    KEYS,
    LENGTH_POINTERS,
    SIZES,
    Sizes,
    allocate_key_blocks,
    draw_key_block,
    first_query_block,
    locate_key_block,
)
from diyfa.backends.cuda.hopper.bwd_wide import allocate_half_exchange
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_matrix, finish_values, run_matrix
from diyfa.backends.cuda.hopper.softmax import LOG2E

DS_STAGES = gl.constexpr(2)


@aggregate
class Gradients:
    """Shared memory through which dS goes to both consumers, dQ to the adders, and dV and dK to global memory.

    dS has DS_STAGES stages and needs no barriers of its own: consumers meet once for each item of dS. When they meet at
    item n + 1 both have read item n, whose stage is written next.
    """

    ds_buffers: gl.shared_memory_descriptor  # dSᵀ in boxes of 64 queries
    dq_boxes: gl.shared_memory_descriptor  # in 16 bits, for `RollingDq`
    dq_buffers: gl.shared_memory_descriptor  # the same memory in fp32: each consumer's half of dQ
    dq: Channel  # from each consumer to its adder
    # Each consumer's dV, and then its dK; None if STORE_FROM_REGISTERS.
    out_buffers: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def store_ds(self, ds, item, CONSUMER: gl.constexpr):
        """Write a consumer's dSᵀ, [64, BLOCK_M], to the item's stage. Consumers meet before either reads it."""
        BOXES: gl.constexpr = ds.shape[1] // ROWS
        first = (item % DS_STAGES) * CONSUMER_COUNT + CONSUMER
        run_matrix(self.ds_buffers, first, BOXES, 0, BOXES).store(ds)
        fence_async_shared()

    @gluon.jit
    def store_dq(self, dq, item, CONSUMER: gl.constexpr):
        """Hand a consumer's half of dQ, an accumulator, to its adder."""
        self.dq.pick(CONSUMER).acquire(item)
        in_order = to_register_order(dq)
        self.dq_buffers.index(CONSUMER).slice(0, in_order.shape[0], 0).store(in_order)
        fence_async_shared()
        self.dq.pick(CONSUMER).commit(item)


@gluon.jit
def _allocate_gradients(k_tensor, dq_tensor, config: gl.constexpr):
    DTYPE: gl.constexpr = k_tensor.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DS_BOXES: gl.constexpr = DS_STAGES * CONSUMER_COUNT * (config.BLOCK_M // ROWS)
    ds_buffers = gl.allocate_shared_memory(DTYPE, [DS_BOXES, ROWS, ROWS], DS_LAYOUT)
    dq_boxes = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * 2] + k_tensor.block_shape, k_tensor.layout)
    dq_buffers = reinterpret(dq_boxes, gl.float32, [CONSUMER_COUNT, DQ_ROWS, DQ_COLUMNS], dq_tensor.layout)
    dq = allocate_channel(1, WARPS, 1, CONSUMER_COUNT)
    if config.STORE_FROM_REGISTERS:
        out_buffers = None
    else:
        OUT_BOXES: gl.constexpr = CONSUMER_COUNT * config.BOXES
        out_buffers = gl.allocate_shared_memory(DTYPE, [OUT_BOXES] + k_tensor.block_shape, k_tensor.layout)
    return Gradients(ds_buffers, dq_boxes, dq_buffers, dq, out_buffers)


# ---- the producer, and the warps that add dQ


@gluon.jit
def _load_block(keys, h, i, item, words_item, sizes, shared, inputs):
    """Start copying the i-th block of queries of head h. With a block mask, copy the words of a partial block.

    `words_item`: item of `MaskWords` of the head's first block. Blocks with words come first.
    """
    config: gl.constexpr = shared.config
    load_queries(keys, h, i, item, sizes, shared, inputs)
    if config.MASK_Q > 0:  # noqa: SIM102 (decided when it is compiled)
        if i < keys.masked_count():
            shared.mask_words.copy(words_item + i, keys.listed.words(keys.block(i), config.BLOCK_M))


@gluon.jit
def _persistent_producer(sizes, shared, inputs, rolling_dq, key_blocks, scheduler, long_blocks_ptr):
    """One warp: draw block after block of keys, tell the other roles, and copy what they read.

    For each block of keys

    1. copy the first block of queries, whose stage is free early;
    2. wait until the consumers have finished the previous block of keys, and tell all roles the new one (`KeyBlocks`);
    3. copy K and V, whose buffers are free since then, and the other blocks of queries of all heads of the group;
    4. announce the chunk of dQ that comes with the block (`RollingDq`).

    The drawn `index` is the number of a block of keys (`locate_key_block`). With a block mask, which excludes ROLLING,
    the long blocks of keys (`attention/long_blocks.py`) come first, then all other blocks.
    """
    config: gl.constexpr = shared.config
    n_blocks = gl.cdiv(sizes.seqlen_k, config.BLOCK_N) * sizes.batch * (sizes.heads_q // sizes.group_size)
    n_long = 0
    if config.MASK_Q > 0:
        n_long = gl.load(long_blocks_ptr)
    count = n_long + n_blocks
    WAITS: gl.constexpr = config.DETERMINISTIC or config.ROLLING  # programs wait for blocks of keys drawn before theirs
    if WAITS:
        index = draw_key_block(scheduler, True)
    else:
        index = gl.program_id(0)
    item = 0  # blocks of queries so far, of all heads and keys
    iteration = 0  # blocks of keys so far
    words_item = 0  # blocks of queries with words so far
    while index < count:
        number = index - n_long  # of the block of keys, in `locate_key_block`
        is_visited = True
        if config.MASK_Q > 0:
            if index < n_long:
                number = gl.load(long_blocks_ptr + 1 + index)
            else:
                is_visited = gl.load(long_blocks_ptr + 1 + n_blocks + number) == 0  # not if it is long
        keys = locate_key_block(number, sizes, config)
        if config.LENGTHS == PACKED:
            is_visited = keys.col0 < keys.n_keys  # a packed sequence may be shorter than the longest
        if is_visited:
            h = keys.hk * sizes.group_size
            seen = keys.seen_by(h, sizes, config)
            n = seen.end - seen.begin  # blocks of queries that see these keys
            if n > 0:
                _load_block(seen, h, 0, item, words_item, sizes, shared, inputs)
            chunk = rolling_dq.chunk_with(index)
            key_blocks.write(iteration, keys, chunk, KEYS)
            load_keys(keys, sizes, shared, inputs)
            for g in range(sizes.group_size):
                seen = keys.seen_by(h + g, sizes, config)
                n = seen.end - seen.begin
                # Without a block mask all heads have n blocks, so `item` need not change in this loop.
                first_item = item if config.MASK_Q > 0 else item + g * n
                for i in range(gl.where(g == 0, 1, 0), n):
                    _load_block(seen, h + g, i, first_item + i, words_item, sizes, shared, inputs)
                if config.MASK_Q > 0:
                    item += n
                    words_item += seen.masked_count()
            rolling_dq.announce(chunk, iteration)
            if config.MASK_Q == 0:
                item += sizes.group_size * n
            iteration += 1
        index = draw_key_block(scheduler, WAITS)
    no_keys = locate_key_block(0, sizes, config)  # never read: messages without a block of keys have its fields, too
    iteration = rolling_dq.produce_last_chunks(index, count, iteration, no_keys, key_blocks, scheduler)
    key_blocks.write(iteration, no_keys, -1, END)


@gluon.jit
def _adder(CONSUMER: gl.constexpr, sizes, shared, gradients, rolling_dq, dq_tensor, semaphores_ptr, key_blocks):
    """One warp: add each half of dQ that a consumer leaves in shared memory to the fp32 dQ in global memory.

    DETERMINISTIC: for each block of queries, wait until the programs with later keys have added their halves.
    """
    config: gl.constexpr = shared.config
    COPY_ROWS: gl.constexpr = dq_tensor.block_shape[0]  # a half is added by one copy or several
    COPIES: gl.constexpr = box_width(CONSUMER, config.BOXES, config.LAST_COLUMNS) // config.LAST_COLUMNS
    item = 0
    iteration = 0
    heads_kv = sizes.heads_q // sizes.group_size
    kind, chunk, keys = key_blocks.read(iteration, sizes, config.LENGTHS)
    while kind == KEYS:
        key_blocks.channel.release(iteration)
        head = keys.b * heads_kv + keys.hk
        rolling_dq.wait_until_free(head)
        for g in range(sizes.group_size):
            h = keys.hk * sizes.group_size + g
            seen = keys.seen_by(h, sizes, config)
            first = first_query_block(keys.b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
            first_dq_block = first
            if config.ROLLING:
                first_dq_block = rolling_dq.first_dq_block(head, g)
            for i in range(seen.end - seen.begin):
                block = seen.block(i)
                half = (first + block) * CONSUMER_COUNT + CONSUMER
                gradients.dq.pick(CONSUMER).wait(item)
                if config.DETERMINISTIC:
                    wait_until_equal(semaphores_ptr + half, keys.adders_before(block, sizes, config))
                row = ((first_dq_block + block) * CONSUMER_COUNT + CONSUMER) * DQ_ROWS
                for j in gl.static_range(COPIES):
                    buffer = gradients.dq_buffers.index(CONSUMER).slice(j * COPY_ROWS, COPY_ROWS, 0)
                    async_reduce_add(dq_tensor, [row + j * COPY_ROWS, 0], buffer)
                tma.store_wait(0)
                gradients.dq.pick(CONSUMER).release(item)
                if config.DETERMINISTIC:
                    wait_for_stores()
                    increment_semaphore(semaphores_ptr + half)
                item += 1
        rolling_dq.finish_block(head, chunk, iteration, CONSUMER)
        iteration += 1
        kind, chunk, keys = key_blocks.read(iteration, sizes, config.LENGTHS)
    rolling_dq.skip_last_chunks(kind, iteration, key_blocks)


# ---- the consumers


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
            zeros += (_zeros(box_width(j, config.BOXES, config.LAST_COLUMNS)),)
    return zeros


@gluon.jit
def _start_gradient(weights, buffers, stage, x, config: gl.constexpr):
    """Start adding weights times a stage of Q or dO to accumulators, one product for each."""
    started = ()
    for j in gl.static_range(len(x)):
        if len(x) == 1:
            right = run_matrix(buffers, stage, config.BOXES, 0, config.BOXES)
        else:
            right = used_columns(buffers, stage, j, config.BOXES, config.BOXES, config.LAST_COLUMNS)
        left = gl.convert_layout(weights, gl.DotOperandLayout(0, x[j].type.layout, 2))  # costs nothing
        started += (warpgroup_mma(left, right, x[j], is_async=True),)
    return started


@gluon.jit
def _start_dq(shared, gradients, item, zero, c: gl.constexpr):
    """Start consumer c's half of dQ = dS K, [64, COLUMNS], from the dS and the keys of both consumers.

    With several boxes BLOCK_M is 64, and the half is box c of the columns of all queries. With one box BLOCK_M is 128,
    and the half is 64 queries, of all columns.
    """
    config: gl.constexpr = shared.config
    stage = item % DS_STAGES
    COLUMN_BOX: gl.constexpr = c if config.BOXES > 1 else 0
    QUERY_BOX: gl.constexpr = 0 if config.BOXES > 1 else c
    QUERY_BOXES: gl.constexpr = config.BLOCK_M // ROWS
    COLUMNS: gl.constexpr = box_width(c, config.BOXES, config.LAST_COLUMNS) if config.BOXES > 1 else BOX
    dq = _zeros(COLUMNS)
    for i in gl.static_range(CONSUMER_COUNT):
        ds = box_matrix(gradients.ds_buffers, stage * CONSUMER_COUNT + i, QUERY_BOX, QUERY_BOXES).permute((1, 0))
        k = box_matrix(shared.k_buffers, i + zero, COLUMN_BOX, config.BOXES).slice(0, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _add_query_blocks(
    consumer, gradients, start, end,
    dk, dv,  # [64, D] fp32, `_zero_gradient`
    item,  # of block `start`: blocks of queries before it, of all heads and of all blocks of keys
    words_item,  # as in `_load_block`
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dk and dv, and hand to the adder as dQ, what blocks [start, end) of queries of one head contribute.

    These blocks all need a mask (MASKED), or none does. Items are numbered as in `queries` and `douts`, which have the
    same blocks of queries in the same order. Releasing an item of `queries` frees its Q, its statistics and also its
    dO: the producer waits for it before it overwrites either. dP is formed while P is computed, dV while dS goes to
    shared memory, and dK while dQ does.
    """
    config: gl.constexpr = consumer.shared.config
    c: gl.constexpr = consumer.INDEX
    B: gl.constexpr = config.BOXES
    M: gl.constexpr = config.BLOCK_M
    shared = consumer.shared
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(B * BOX), 2)
    for i in range(start, end):
        block = consumer.keys.visited_block(i, MASKED)
        stage = shared.queries.stage(item)
        # An opaque zero: with a known one the compiler would form the descriptors of K and V once, and keep them in 50
        # registers.
        zero = optimisation_barrier(item * 0)
        shared.queries.wait(item)
        s = start_product(shared.k_buffers, c + zero, shared.q_buffers, stage, B, B, M, config.LAST_COLUMNS)
        shared.douts.wait(item)
        dp = start_product(shared.v_buffers, c + zero, shared.do_buffers, stage, B, B, M, config.LAST_COLUMNS)
        s = warpgroup_mma_wait(B, deps=[s])  # dP, a product for each box, runs on
        p, p_derivative = softmax_weights(s, shared.lse(stage), block * M, consumer, MASKED, words_item + i)
        p = gl.convert_layout(p.to(DTYPE), OPERAND)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = shared.delta(stage)  # before dV starts: after that no registers are left
        dv = _start_gradient(p, shared.do_buffers, stage, dv, config)
        ds = (p_derivative * (dp - delta)).to(DTYPE)
        gradients.store_ds(ds, item, c)
        ds = gl.convert_layout(ds, OPERAND)
        sync_consumers()
        dq = _start_dq(shared, gradients, item, zero, c)
        dk = _start_gradient(ds, shared.q_buffers, stage, dk, config)
        done = warpgroup_mma_wait(len(dk), deps=dv + (dq,))  # dK runs on
        dv = done[:-1]
        dq = done[-1]
        gradients.store_dq(dq, item, c)
        dk = finish_values(dk)
        shared.queries.release(item)
        item += 1
    return dk, dv, item


@gluon.jit
def _consumer(INDEX: gl.constexpr, sizes, shared, gradients, outputs, rolling_dq, key_blocks):
    """One warpgroup: dK and dV of its 64 keys of each block, and half of the dQ of all 128."""
    config: gl.constexpr = shared.config
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    item = 0
    words_item = 0
    iteration = 0
    kind, chunk, keys = key_blocks.read(iteration, sizes, config.LENGTHS)
    while kind == KEYS:
        consumer = Consumer(INDEX, INDEX * ROWS, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E, 0.0)
        dk = _zero_gradient(config)
        dv = _zero_gradient(config)
        for j in gl.static_range(CONSUMER_COUNT):
            shared.keys.pick(j).wait(iteration)
        shared.values.pick(INDEX).wait(iteration)
        for g in range(sizes.group_size):
            seen = keys.seen_by(keys.hk * sizes.group_size + g, sizes, config)
            n_masked = seen.masked_count()
            head_consumer = consumer.with_slope(g)
            dk, dv, item = _add_query_blocks(head_consumer, gradients, 0, n_masked, dk, dv, item, words_item, True)
            dk, dv, item = _add_query_blocks(
                head_consumer, gradients, seen.full_begin, seen.full_end, dk, dv, item, words_item, False
            )
            if config.MASK_Q > 0:
                words_item += n_masked
        rolling_dq.wait_until_added(iteration)
        key_blocks.channel.release(iteration)
        first_dq = rolling_dq.load_first(chunk, INDEX)
        _store_rows(dv, 1.0, outputs.dv_ptr, outputs.dv_tensor, gradients.out_buffers, consumer)
        _store_rows(dk, outputs.sm_scale, outputs.dk_ptr, outputs.dk_tensor, gradients.out_buffers, consumer)
        rolling_dq.convert(chunk, first_dq, iteration, INDEX, item, gradients, outputs.sm_scale)
        iteration += 1
        kind, chunk, keys = key_blocks.read(iteration, sizes, config.LENGTHS)
    rolling_dq.convert_last_chunks(kind, chunk, iteration, INDEX, key_blocks, gradients, outputs.sm_scale)
    tma.store_wait(0)


@gluon.jit
def _store_rows(x, factor, pointer, tensor, buffers, consumer):
    """Write x [64, D], accumulators of dV or dK, times a factor: from registers, or through a consumer's buffer."""
    config: gl.constexpr = consumer.shared.config
    B: gl.constexpr = config.BOXES
    c: gl.constexpr = consumer.INDEX
    if not config.STORE_FROM_REGISTERS:
        tma.store_wait(0)  # the buffer is free
    for j in gl.static_range(len(x)):
        rows = finished_rows(x[j], factor, consumer)
        if config.STORE_FROM_REGISTERS:
            store_from_registers(rows, pointer, tensor, consumer, j * BOX)
        elif len(x) == 1:
            run_matrix(buffers, c, B, 0, B).store(rows.to(buffers.dtype))
        else:
            used_columns(buffers, c, j, B, B, config.LAST_COLUMNS).store(rows.to(buffers.dtype))
    if not config.STORE_FROM_REGISTERS:
        fence_async_shared()
        store_boxes(tensor, buffers, c, consumer, 0, B, B, B)


@gluon.jit(
    do_not_specialize=(*SIZES, "dq_slots", "dq_delay", "stride_maskb", "stride_maskh"),
    do_not_specialize_on_alignment=(*LENGTH_POINTERS, "mask_blocks_ptr", "slopes_ptr"),
)
def _bwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # (B, H, S, D) whatever the strides, or ragged (`gluon/tma.py`)
    dk_tensor, dv_tensor,
    dk_ptr, dv_ptr,  # the same tensors, for STORE_FROM_REGISTERS
    statistics_tensor,  # [2 * blocks of queries, BLOCK_M] fp32
    dq_tensor,  # [2 * DQ_ROWS * blocks of queries, DQ_COLUMNS] fp32; None unless FORM is "keys"
    dq_ptr,  # the fp32 dQ of `RollingDq` or `MlaExchange`, or None
    counts_ptr, dq_out_tensor,  # of `RollingDq`; None unless ROLLING
    semaphores_ptr,  # [2 * blocks of queries] int32, zeros; None unless DETERMINISTIC
    counter_ptr,  # int32, zero: blocks of keys that programs have drawn
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences, or twice seq_lens
    slopes_ptr,  # (H,) or (B, H) fp32, for ALIBI, or None
    long_blocks_ptr,  # of `attention/long_blocks.py`; None without a block mask
    mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh,  # `BlockMask`
    stride_slopeb,
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,  # of `descriptor_steps`
    interleaved_heads,  # see `locate_key_block`
    dq_slots, dq_delay,  # of `RollingDq`
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the roles of this file, or of the FORM "columns" or "mla"."""
    shared = allocate_shared(q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor, config)
    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr, interleaved_heads,
        BlockMask(mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh, config.MASK_Q, config.BLOCK_N),
    )  # fmt: skip
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, dk_ptr, dv_ptr, slopes_ptr, stride_slopeb, sm_scale, scale, softcap)
    if config.FORM == "keys":
        gradients = _allocate_gradients(k_tensor, dq_tensor, config)
        key_blocks = allocate_key_blocks()
        rolling_dq = make_rolling_dq(dq_ptr, counts_ptr, dq_slots, dq_delay, dq_out_tensor, sizes, config)
    elif config.FORM == "columns":
        exchange = allocate_half_exchange(q_tensor.dtype, config.BLOCK_M)
    else:
        exchange = allocate_mla_exchange(dq_ptr, q_tensor.dtype)
    fence_async_shared()
    wait_for_previous_kernels()

    if config.FORM == "keys":
        scheduler = TileScheduler(counter_ptr, "dynamic")
        R: gl.constexpr = config.CONSUMER_REGISTERS
        P: gl.constexpr = config.PRODUCER_REGISTERS
        # The first consumer runs on the warps that the kernel is launched with, and gets the registers that others
        # leave.
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, shared, gradients, outputs, rolling_dq, key_blocks)),
                (_consumer, (1, sizes, shared, gradients, outputs, rolling_dq, key_blocks)),
                (_persistent_producer, (sizes, shared, inputs, rolling_dq, key_blocks, scheduler, long_blocks_ptr)),
                (_adder, (0, sizes, shared, gradients, rolling_dq, dq_tensor, semaphores_ptr, key_blocks)),
                (_adder, (1, sizes, shared, gradients, rolling_dq, dq_tensor, semaphores_ptr, key_blocks)),
                (idle_warps, ()),
            ],
            [4, 1, 1, 1, 1],
            [R, P, P, P, P],
        )  # fmt: skip
    else:
        run_key_block(sizes, shared, exchange, inputs, outputs)
