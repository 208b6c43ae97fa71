"""dQ for Hopper, for heads of up to 256 columns or with different head dims of Q and V. `bwd_wide.py` has dK and dV.

A program has 128 queries of a head, 64 for each of two consumer warpgroups, and goes through the keys that they see, as
the forward does (`fwd_consumer.py`). For each block of 64 keys a consumer forms

    dP = dO Vᵀ,  S = Q Kᵀ,  P = exp(S - LSE),  dS = P * (dP - delta),  dQ += dS K

P and dS stay in registers, and nothing is added up in memory, so dQ is the same in every run. The consumers read the
same blocks of keys and exchange nothing. So one of them computes exponentials while the tensor cores work for the
other.

V comes before K in the ring of stages, so the stage of V is free again before the exponentials. Three stages, as many
as fit at 256 columns, then keep copies a block ahead.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, wait_for_previous_kernels
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, optimisation_barrier
from diyfa.backends.cuda.gluon.ring import KVRing
from diyfa.backends.cuda.gluon.tile_info import TileInfos, allocate_tile_infos
from diyfa.backends.cuda.hopper.bwd_common import (
    BoxConstants,
    Inputs,
    allocate_tiles,
    exponents,
    scale_in_log2,
    start_product,
    with_derivative,
)
from diyfa.backends.cuda.hopper.bwd_tiles import BOX, CONSUMER_COUNT, LENGTH_POINTERS, SIZES, first_query_block
from diyfa.backends.cuda.hopper.epilogue import head_rows, store_float32
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    accumulator_layout,
    box_buffer,
    finish_values,
    run_count,
    run_matrix,
    run_start,
    zero_output,
)
from diyfa.backends.cuda.hopper.softmax import LOG2E, Rows, alibi_penalty, mask_scores
from diyfa.backends.cuda.hopper.tiles import (
    KeyCache,
    Problem,
    block_order,
    locate_tile,
    sequence_end,
    start_load,
    start_store,
)

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(64)


@dataclass(frozen=True, eq=False)
class Sm90BwdDqConstants(BoxConstants):
    """Constants of the kernel. STAGES are those of `DqShared.ring`."""

    causal: bool


@aggregate
class DqShared:
    """Tiles in shared memory, and how the producer hands them to the consumers."""

    config: gl.constexpr  # `Sm90BwdDqConstants`
    q_buffers: gl.shared_memory_descriptor  # Q of each consumer, and then its dQ on the way out
    do_buffers: gl.shared_memory_descriptor
    queries: Channel  # Q and dO of each consumer
    ring: KVRing  # V of the n-th block is item 2n, its K item 2n + 1
    tile_infos: TileInfos


@aggregate
class DqOutputs:
    """Tensors that the consumers write, or that only they read, and scales."""

    dq_tensor: tma.tensor_descriptor
    dq_ptr: gl.tensor | gl.constexpr  # for STORE_FROM_REGISTERS
    statistics_ptr: gl.tensor
    slopes_ptr: gl.tensor | gl.constexpr  # for ALIBI
    stride_slopeb: gl.tensor | gl.constexpr
    sm_scale: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


@gluon.jit
def _producer(problem, shared, inputs, group_size):
    """One warp: find the program's tile, tell the consumers, and copy its tiles to shared memory."""
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = problem.LENGTHS != EQUAL
    ring = shared.ring
    exists, tile = locate_tile(gl.program_id(0), problem, BLOCK_M, BLOCK_N)
    shared.tile_infos.write(0, tile.if_any(exists))
    if exists:
        b = tile.b
        h = tile.h
        hk = h // group_size
        n_queries = tile.n_queries
        n_keys = tile.n_keys
        end_q = sequence_end(b, tile.first_q, n_queries, inputs.steps_qb, inputs.steps_qm, problem.LENGTHS)
        end_do = sequence_end(b, tile.first_q, n_queries, inputs.steps_dob, inputs.steps_dom, problem.LENGTHS)
        end_k = sequence_end(b, tile.first_k, n_keys, inputs.steps_kb, inputs.steps_kn, problem.LENGTHS)
        end_v = sequence_end(b, tile.first_k, n_keys, inputs.steps_vb, inputs.steps_vn, problem.LENGTHS)
        order = block_order(tile, problem, BLOCK_M, BLOCK_N)
        n_blocks = tile.end_block - tile.first_block
        for c in gl.static_range(CONSUMER_COUNT):
            row = tile.row0 + c * ROWS
            full = shared.queries.pick(c).full_barrier(0)
            start_load(
                inputs.do_tensor, b, h, row, end_do, n_queries, shared.do_buffers, c, full, config.BOXES_V, RAGGED
            )
            start_load(inputs.q_tensor, b, h, row, end_q, n_queries, shared.q_buffers, c, full, config.BOXES, RAGGED)
        for i in range(n_blocks):
            row = order.block(i) * BLOCK_N
            item = 2 * i
            ring.channel.acquire(item)
            start_load(
                inputs.v_tensor, b, hk, row, end_v, n_keys,
                ring.v_buffers, ring.buffer_index(item), ring.channel.full_barrier(item), config.BOXES_V, RAGGED,
            )  # fmt: skip
            ring.channel.acquire(item + 1)
            start_load(
                inputs.k_tensor, b, hk, row, end_k, n_keys,
                ring.k_buffers, ring.buffer_index(item + 1), ring.channel.full_barrier(item + 1), config.BOXES, RAGGED,
            )  # fmt: skip


@gluon.jit
def _add_key_blocks(
    shared, outputs, problem, rows, lse, delta, order, start, end,
    dq,  # [64, D] fp32, a tuple of accumulators (`mma.py`)
    INDEX: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dq what blocks of keys [start, end) of `order` contribute. All need a mask (MASKED), or none does."""
    config: gl.constexpr = shared.config
    ring = shared.ring
    scale = scale_in_log2(outputs.scale, config.SOFTCAP)
    for i in range(start, end):
        item = 2 * i
        q_tile = INDEX + optimisation_barrier(i * 0)  # as in `bwd.py`
        v = ring.buffer_index(item)
        k = ring.buffer_index(item + 1)
        ring.channel.wait(item)
        dp = start_product(shared.do_buffers, q_tile, ring.v_buffers, v, config.USED_BOXES_V, config.BOXES_V, BLOCK_N)
        ring.channel.wait(item + 1)
        s = start_product(shared.q_buffers, q_tile, ring.k_buffers, k, config.USED_BOXES, config.BOXES, BLOCK_N)
        dp = warpgroup_mma_wait(config.USED_BOXES, deps=[dp])  # S, a product for each box, runs on
        ring.channel.release(item)
        s = warpgroup_mma_wait(0, deps=[s])
        x, t = exponents(s, lse[:, None], scale, outputs.softcap * LOG2E, config.SOFTCAP)
        if config.ALIBI:
            x = x - alibi_penalty(x, order.block(i) * BLOCK_N, rows)
        if MASKED:
            x = mask_scores(x, order.block(i) * BLOCK_N, rows, problem)
        p = gl.exp2(x)
        ds = (with_derivative(p, t, config.SOFTCAP) * (dp - delta[:, None])).to(ring.k_buffers.dtype)
        started = ()
        for run in gl.static_range(run_count(config.BOXES)):
            operand = gl.convert_layout(ds, gl.DotOperandLayout(0, dq[run].type.layout, 2))  # costs nothing
            k_run = run_matrix(ring.k_buffers, k, config.BOXES, run, config.BOXES)
            started += (warpgroup_mma(operand, k_run, dq[run], is_async=True),)
        dq = finish_values(started)
        ring.channel.release(item + 1)
    return dq


@gluon.jit
def _consumer(INDEX: gl.constexpr, problem, shared, outputs):
    """One warpgroup: dQ of its 64 queries."""
    config: gl.constexpr = shared.config
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    tile = shared.tile_infos.read(0, problem)
    if tile.end_block > 0:
        row0 = tile.row0 + INDEX * ROWS
        offs_m = row0 + gl.arange(0, ROWS, layout=S_ROWS)
        # The statistics of a sequence lie in blocks of 64 rows, one for lse and one for delta.
        block = first_query_block(tile.b, tile.h, tile.first_q, problem, ROWS, problem.LENGTHS) + row0 // ROWS
        statistics = outputs.statistics_ptr + block.to(gl.int64) * (2 * ROWS)
        in_block = gl.arange(0, ROWS, layout=S_ROWS)
        exists = offs_m < tile.n_queries
        lse = gl.load(statistics + in_block, mask=exists, other=float("inf"))
        delta = gl.load(statistics + ROWS + in_block, mask=exists, other=0.0)
        slope = 0.0
        if config.ALIBI:
            slope = gl.load(outputs.slopes_ptr + tile.b * outputs.stride_slopeb + tile.h) * LOG2E
        rows = Rows(offs_m + (tile.n_keys - tile.n_queries), tile.n_keys, slope)
        order = block_order(tile, problem, BLOCK_M, BLOCK_N)
        # Keys end in the first block of the order. So n_right is at least 1, and this block always gets the mask.
        n_masked = order.n_right
        if problem.HAS_LEFT:
            n_masked += order.n_left
        dq = zero_output(BOX, config.BOXES)
        shared.queries.pick(INDEX).wait(0)
        dq = _add_key_blocks(shared, outputs, problem, rows, lse, delta, order, 0, n_masked, dq, INDEX, True)
        n_blocks = tile.end_block - tile.first_block
        dq = _add_key_blocks(shared, outputs, problem, rows, lse, delta, order, n_masked, n_blocks, dq, INDEX, False)
        _store(shared, outputs, problem, tile, row0, dq, INDEX)


@gluon.jit
def _store(shared, outputs, problem, tile, row0, dq, INDEX: gl.constexpr):
    """Write a consumer's rows of dQ, with zeros beyond the end of a sample."""
    config: gl.constexpr = shared.config
    if config.STORE_FROM_REGISTERS:
        dq_rows = head_rows(
            outputs.dq_ptr, outputs.dq_tensor, tile.b, tile.h, tile.first_q, problem.LENGTHS == PACKED
        )  # fmt: skip
        end = tile.n_queries if problem.LENGTHS == PACKED else problem.seqlen_q
    for run in gl.static_range(run_count(config.BOXES)):
        x = dq[run] * outputs.sm_scale
        if problem.LENGTHS == SEQ_LENS:
            rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, dq[run].type.layout))
            x = gl.where((rows < tile.n_queries)[:, None], x, 0.0)
        if config.STORE_FROM_REGISTERS:
            store_float32(x, dq_rows, row0, end, run_start(run, config.BOXES) * BOX)
        else:
            run_matrix(shared.q_buffers, INDEX, config.BOXES, run, config.BOXES).store(x.to(shared.q_buffers.dtype))
    if not config.STORE_FROM_REGISTERS:
        fence_async_shared()
        for j in gl.static_range(config.USED_BOXES):
            start_store(
                outputs.dq_tensor, tile.b, tile.h, row0, j * BOX, tile.first_q + tile.n_queries, tile.n_queries,
                box_buffer(shared.q_buffers, INDEX, j, config.BOXES).reshape(outputs.dq_tensor.block_shape),
                problem.LENGTHS == PACKED,
            )  # fmt: skip
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=(*SIZES, "heads", "heads_in_parallel"),
    do_not_specialize_on_alignment=(*LENGTH_POINTERS, "slopes_ptr"),
)
def _bwd_wide_dq_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # as in `bwd.py`
    dq_tensor, dq_ptr,
    statistics_ptr,  # [blocks of 64 queries, 2, 64] fp32: lse in units of log2, delta
    lengths_q_ptr, lengths_k_ptr,
    slopes_ptr, stride_slopeb,  # as in `bwd.py`
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    heads,  # of all samples
    heads_in_parallel,  # heads whose tiles alternate, see `locate_tile`
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdDqConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the roles."""
    ONE_RING: gl.constexpr = config.BOXES == config.BOXES_V
    q_buffers = allocate_tiles(q_tensor, CONSUMER_COUNT, config.BOXES, True)
    do_buffers = allocate_tiles(do_tensor, CONSUMER_COUNT, config.BOXES_V, False)
    STAGES_PER_RING: gl.constexpr = config.STAGES if ONE_RING else config.STAGES // 2
    k_buffers = allocate_tiles(k_tensor, STAGES_PER_RING, config.BOXES, True)
    if ONE_RING:
        v_buffers = k_buffers
    else:
        v_buffers = allocate_tiles(v_tensor, STAGES_PER_RING, config.BOXES_V, False)
    queries = allocate_channel(1, 2, 0, CONSUMER_COUNT)
    ring = KVRing(k_buffers, v_buffers, allocate_channel(config.STAGES, 1, CONSUMER_COUNT * WARPS), ONE_RING)
    tile_infos = allocate_tile_infos(1)
    fence_async_shared()
    wait_for_previous_kernels()

    problem = Problem(
        window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q, total_k, heads, heads_in_parallel, batch,
        lengths_q_ptr, lengths_k_ptr, KeyCache(None, None, None, None, None, None, None, 0),
        BlockMask(None, None, None, None, 0, 0),
        config.LENGTHS, config.LENGTHS, config.CAUSAL, config.HAS_LEFT, config.HAS_RIGHT, False,
    )  # fmt: skip
    shared = DqShared(config, q_buffers, do_buffers, queries, ring, tile_infos)
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, None,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = DqOutputs(dq_tensor, dq_ptr, statistics_ptr, slopes_ptr, stride_slopeb, sm_scale, scale, softcap)
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, problem, shared, outputs)),
            (_consumer, (1, problem, shared, outputs)),
            (_producer, (problem, shared, inputs, group_size)),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [R, P, P, P],
    )
