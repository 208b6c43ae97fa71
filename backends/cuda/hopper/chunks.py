"""The KV loop of the Hopper forward in batch-invariant mode: chunks of fixed keys, each with sums of its own.

`attention/fixed_order.py` has the order of operations, which the decoding kernels share. One loop visits the blocks of
all chunks, so copies and products go on where chunks meet. There the sums of a chunk are folded into the totals of the
chunks to its right. Registers hold the sums of one chunk only. Meanwhile the totals of out lie in shared or global
memory, where each thread reads what it wrote itself.

Read `attend_chunks` first, then `_attend_blocks_in_order`. `first`, `end`, `end_block`, `unmasked_first` and
`unmasked_end` are numbers of key blocks, counted from the sequence's first key.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from diyfa.backends.cuda.attention.fixed_order import chunk_factors, fold, next_sum, sums_by_lane, weights
from diyfa.backends.cuda.attention.tile_io import LOWEST
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.epilogue import from_register_order, in_register_order
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    accumulator_layout,
    finish_values,
    mma_operand,
    rescaled,
    run_count,
    run_start,
    start_scores,
    start_values,
    zero_output,
)
from diyfa.backends.cuda.hopper.softmax import mask_scores


@aggregate
class Totals:
    """Memory for the totals of out: [64 * columns] fp32 for each consumer, `in_register_order`."""

    buffers: gl.shared_memory_descriptor | gl.constexpr  # None: in global memory
    pointer: gl.tensor | gl.constexpr  # None: in shared memory
    CONSUMERS: gl.constexpr
    SIZE: gl.constexpr  # elements of a consumer: 64 * columns

    @gluon.jit
    def address(self, CONSUMER: gl.constexpr, START: gl.constexpr, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
        """Return the addresses of COUNT elements in global memory, from a consumer's element START on."""
        row = gl.program_id(0).to(gl.int64) * self.CONSUMERS + CONSUMER
        return self.pointer + row * self.SIZE + START + gl.arange(0, COUNT, layout=LAYOUT)


@gluon.jit
def _flat(x):
    """Return an accumulator [64, columns] as [64 * columns] `in_register_order`: a thread stores 16 bytes at once."""
    return in_register_order(x, [ROWS * x.shape[1]])


@gluon.jit
def _store_total(totals, x, CONSUMER: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """Write the totals x [64, columns] of one accumulator of out, which begins at column FIRST_COLUMN of out."""
    x = _flat(x)
    FLAT: gl.constexpr = x.type.layout
    if totals.pointer is None:
        totals.buffers.index(CONSUMER).slice(ROWS * FIRST_COLUMN, x.shape[0]).store(x)
    else:
        gl.store(totals.address(CONSUMER, ROWS * FIRST_COLUMN, FLAT, x.shape[0]), x)


@gluon.jit
def _fold_total(totals, x, alpha, beta, CONSUMER: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """Return the totals of one accumulator times alpha [64] plus a chunk's sums x [64, columns] times beta [64]."""
    LAYOUT: gl.constexpr = x.type.layout
    FLAT: gl.constexpr = _flat(x).type.layout
    SIZE: gl.constexpr = ROWS * x.shape[1]
    if totals.pointer is None:
        total = totals.buffers.index(CONSUMER).slice(ROWS * FIRST_COLUMN, SIZE).load(FLAT)
    else:
        total = gl.load(totals.address(CONSUMER, ROWS * FIRST_COLUMN, FLAT, SIZE))
    total = gl.convert_layout(from_register_order(total, x.shape[1]), LAYOUT)
    total_factor = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT))[:, None]
    chunk_factor = gl.convert_layout(beta, gl.SliceLayout(1, LAYOUT))[:, None]
    return fold(total, total_factor, x, chunk_factor)


@gluon.jit
def _store_totals(totals, o, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, BOXES_V: gl.constexpr):
    """Write the totals of out."""
    for run in gl.static_range(run_count(BOXES_V)):
        _store_total(totals, o[run], CONSUMER, run_start(run, BOXES_V) * WIDTH)


@gluon.jit
def _fold_totals(totals, o, alpha, beta, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, BOXES_V: gl.constexpr):
    """Return the totals in memory times alpha plus the sums o of a chunk times beta."""
    folded = ()
    for run in gl.static_range(run_count(BOXES_V)):
        folded += (_fold_total(totals, o[run], alpha, beta, CONSUMER, run_start(run, BOXES_V) * WIDTH),)
    return folded


@gluon.jit
def _softmax_in_order(s, m_i, start_n, rows, score, problem, MASKED: gl.constexpr):
    """Return (weights, running maximum, factor of earlier sums) of products s [64, BLOCK_N].

    It is `softmax_step` of `softmax.py` in the operations of `attention/fixed_order.py`.
    """
    if score.NEGATE:
        s = -s
    if MASKED:
        s = mask_scores(s, start_n, rows, problem)
    m_new = gl.maximum(m_i, gl.max(s, 1) * score.scale)
    return weights(s, score.scale, m_new), m_new, gl.exp2(m_i - m_new)


@gluon.jit
def _row_sums(l_i, LAYOUT: gl.constexpr):
    """Return the sums of weights [64] of `sums_by_lane` l_i [64, 4]."""
    # It is `sum_of_lanes`: lanes (0 + 2) + (1 + 3). Here the lanes exchange their sums.
    return gl.convert_layout(gl.sum(gl.sum(l_i.reshape([ROWS, 2, 2]), 1), 1), LAYOUT)


@gluon.jit
def _fold_chunk(consumer, o, m_i, l_i, m_total, l_total, has_totals):
    """Fold the sums o, l_i [64, 4] and the maximum m_i [64] of a chunk into the totals; those of out are in memory.

    `has_totals`: the tile has chunks to the right. Returns (totals of out, their maximum, sums of weights [64]).
    """
    config: gl.constexpr = consumer.shared.config
    WIDTH: gl.constexpr = consumer.outputs.o_tensor.block_shape[-1]
    S_ROWS: gl.constexpr = m_i.type.layout
    m_total, alpha, beta = chunk_factors(m_total, m_i)
    l_total = fold(l_total, alpha, _row_sums(l_i, S_ROWS), beta)
    if has_totals:
        o = _fold_totals(consumer.shared.totals, o, alpha, beta, consumer.INDEX, WIDTH, config.BOXES_V)
    return o, m_total, l_total


@gluon.jit
def _attend_blocks_in_order(
    consumer, q, rows, first, end, end_block, o, p, m_i, l_i, m_total, l_total, item, MASKED: gl.constexpr
):  # fmt: skip
    """Run the KV loop over blocks [first, end) from right to left, as `_attend_blocks` of `fwd_consumer.py`.

    An iteration issues the scores of its block and adds the values of the previous block, its right neighbour. If its
    block is the rightmost of a chunk, the previous block was the last one of the previous chunk. Then the maximum and
    the sums of weights start anew, and the sums of out, which are complete, are folded into the totals instead of
    rescaled. The next iteration starts new sums of out. `item`: ring item of the previous block's K.
    """
    config: gl.constexpr = consumer.shared.config
    ring = consumer.shared.ring
    WIDTH: gl.constexpr = consumer.outputs.o_tensor.block_shape[-1]
    for i in range(end - first):
        item += 2  # this block's K; item - 1 is the previous block's V
        ring.channel.wait(item)
        consumer.wait_turn()
        s = start_scores(q, consumer.shared.queries, ring, item, consumer.INDEX, config)
        ring.channel.wait(item - 1)
        block = end - 1 - i
        # If block + 1 is the rightmost of a chunk, its values start new sums.
        o = start_values(p, o, ring, consumer.shared.ones, item - 1, config, (block + 2) % config.CHUNK != 0)
        consumer.hand_over()
        s = warpgroup_mma_wait(len(o), deps=[s])  # the values may still run
        ring.channel.release(item)
        begins_chunk = (block + 1) % config.CHUNK == 0
        m_chunk = m_i
        l_chunk = l_i
        m_i = gl.where(begins_chunk, LOWEST, m_i)
        l_i = gl.where(begins_chunk, 0.0, l_i)
        start_n = block * config.BLOCK_N
        p_block, m_i, alpha = _softmax_in_order(s, m_i, start_n, rows, consumer.score, consumer.problem, MASKED)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i = next_sum(l_i, factor, sums_by_lane(p_block))
        o = finish_values(o)
        ring.channel.release(item - 1)
        p = mma_operand(p_block, o, ring.v_buffers.dtype, config.PAIRS)
        if begins_chunk:
            has_totals = block + 1 + config.CHUNK < end_block  # not for the tile's rightmost chunk
            o, m_total, l_total = _fold_chunk(consumer, o, m_chunk, l_chunk, m_total, l_total, has_totals)
            if config.OUT_IN_TOTALS:
                tma.store_wait(0)  # the previous tile's out may still leave from this memory
            _store_totals(consumer.shared.totals, o, consumer.INDEX, WIDTH, config.BOXES_V)
        else:
            o = rescaled(o, alpha)
    return o, p, m_i, l_i, m_total, l_total, item


@gluon.jit
def attend_chunks(consumer, q, rows, key0, tile, end_block, item):
    """Attend to key blocks [tile.first_block, end_block) of a tile from right to left.

    The last block is the prologue. Then follow [unmasked_end, end_block - 1) with a mask, [unmasked_first,
    unmasked_end) without one, and [tile.first_block, unmasked_first) with one. As outside of the mode, a consumer takes
    a ping-pong turn for each block that it computes or skips, except for the prologue.

    `key0`: the key that the consumer's first row is aligned with. `item`: ring item of K of block end_block - 1.
    Returns (accumulators of out, sums of weights [64], maximum [64], ring item after the tile's last).
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    ring = consumer.shared.ring
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N))
    MASKED: gl.constexpr = problem.HAS_RIGHT or problem.CHECK_KEYS
    _, full_begin, full_end, _ = problem.keys_of_rows(key0, ROWS, tile.n_keys)
    first = tile.first_block
    m_total = gl.full([ROWS], LOWEST, gl.float32, S_ROWS)
    l_total = gl.zeros([ROWS], gl.float32, S_ROWS)
    ring.channel.wait(item)
    s = start_scores(q, consumer.shared.queries, ring, item, consumer.INDEX, config)
    s = warpgroup_mma_wait(0, deps=[s])
    ring.channel.release(item)
    # `m_total` is LOWEST, as each chunk's first maximum.
    p_block, m_i, _ = _softmax_in_order(
        s, m_total, (end_block - 1) * config.BLOCK_N, rows, consumer.score, problem, MASKED
    )  # fmt: skip
    l_i = sums_by_lane(p_block)
    o = zero_output(consumer.outputs.o_tensor.block_shape[-1], config.BOXES_V)
    p = mma_operand(p_block, o, ring.v_buffers.dtype, config.PAIRS)
    unmasked_end = end_block - 1
    if problem.HAS_RIGHT:
        unmasked_end = gl.maximum(first, gl.minimum(unmasked_end, full_end // config.BLOCK_N))
        o, p, m_i, l_i, m_total, l_total, item = _attend_blocks_in_order(
            consumer, q, rows, unmasked_end, end_block - 1, end_block, o, p, m_i, l_i, m_total, l_total, item, True
        )  # fmt: skip
    unmasked_first = first
    if problem.HAS_LEFT:
        unmasked_first = gl.maximum(first, gl.minimum(unmasked_end, gl.cdiv(full_begin, config.BLOCK_N)))
    o, p, m_i, l_i, m_total, l_total, item = _attend_blocks_in_order(
        consumer, q, rows, unmasked_first, unmasked_end, end_block, o, p, m_i, l_i, m_total, l_total, item, False
    )  # fmt: skip
    if problem.HAS_LEFT:
        o, p, m_i, l_i, m_total, l_total, item = _attend_blocks_in_order(
            consumer, q, rows, first, unmasked_first, end_block, o, p, m_i, l_i, m_total, l_total, item, True
        )  # fmt: skip
    ring.channel.wait(item + 1)
    o = start_values(p, o, ring, consumer.shared.ones, item + 1, config, (first + 1) % config.CHUNK != 0)
    o = finish_values(o)
    ring.channel.release(item + 1)
    has_totals = first // config.CHUNK < (end_block - 1) // config.CHUNK
    o, m_total, l_total = _fold_chunk(consumer, o, m_i, l_i, m_total, l_total, has_totals)
    return o, l_total, m_total, item + 2
