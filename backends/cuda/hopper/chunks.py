"""The KV loop of the Hopper forward in batch-invariant mode: chunks of fixed keys, each with sums of its own.

`attention/fixed_order.py` has the order of operations, which the decoding kernels share. A chunk is computed like a
tile: a first block, a loop that adds the values of each block one iteration later, the values of the last block. Then
its sums are folded into the totals of the chunks to its right. Registers hold the sums of one chunk only. Meanwhile the
totals of out lie in shared or global memory, where each thread reads what it wrote itself.

Read `attend_chunks` first, then `_attend_chunk` and `_attend_blocks_in_order`. `first`, `end`, `unmasked_first` and
`unmasked_end` are numbers of key blocks, counted from the sequence's first key.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from diyfa.backends.cuda.attention.fixed_order import (
    chunk_factors,
    fold,
    next_sum,
    sum_of_lanes,
    sums_by_lane,
    weights,
)
from diyfa.backends.cuda.attention.fwd import LOWEST
from diyfa.backends.cuda.gluon.compat import aggregate
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

# Layout of `sums_by_lane` [64, 4] in which a thread has all four sums of a row, so that it adds them alone.
LANES_IN_THREAD = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))


@aggregate
class Totals:
    """Memory for the totals of out: [64 * columns] fp32 for each consumer, in the order of `_by_thread`."""

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
def _by_thread(x):
    """Return an accumulator [64, columns] as [64 * columns], so that a thread stores 16 bytes at once.

    Four elements of a thread follow each other, and the four elements of the next lane follow them.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5)  # column // 8, warp, lane, element
    return x.reshape([ROWS * COLUMNS])


@gluon.jit
def _from_thread(x, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the accumulator [64, COLUMNS] that `_by_thread` made x [64 * COLUMNS] of."""
    x = x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5)
    return gl.convert_layout(x.reshape([ROWS, COLUMNS]), LAYOUT)


@gluon.jit
def _store_total(totals, x, CONSUMER: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """Write the totals x [64, columns] of one accumulator of out, which begins at column FIRST_COLUMN of out."""
    x = _by_thread(x)
    FLAT: gl.constexpr = x.type.layout
    if totals.pointer is None:
        totals.buffers.index(CONSUMER).slice(ROWS * FIRST_COLUMN, x.shape[0]).store(x)
    else:
        gl.store(totals.address(CONSUMER, ROWS * FIRST_COLUMN, FLAT, x.shape[0]), x)


@gluon.jit
def _fold_total(totals, x, alpha, beta, CONSUMER: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """Return the totals of one accumulator times alpha [64] plus a chunk's sums x [64, columns] times beta [64]."""
    LAYOUT: gl.constexpr = x.type.layout
    FLAT: gl.constexpr = _by_thread(x).type.layout
    SIZE: gl.constexpr = ROWS * x.shape[1]
    if totals.pointer is None:
        total = totals.buffers.index(CONSUMER).slice(ROWS * FIRST_COLUMN, SIZE).load(FLAT)
    else:
        total = gl.load(totals.address(CONSUMER, ROWS * FIRST_COLUMN, FLAT, SIZE))
    total = _from_thread(total, LAYOUT, x.shape[1])
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
def _attend_blocks_in_order(consumer, q, rows, first, end, o, p, m_i, l_i, item, MASKED: gl.constexpr):
    """Run the KV loop over blocks [first, end) from right to left, as `_attend_blocks` of `fwd_consumer.py`.

    `item`: ring item of the previous block's K.
    """
    config: gl.constexpr = consumer.shared.config
    ring = consumer.shared.ring
    for i in range(end - first):
        item += 2  # this block's K; item - 1 is the previous block's V
        ring.channel.wait(item)
        consumer.wait_turn()
        s = start_scores(q, consumer.shared.queries, ring, item, consumer.INDEX, config)
        ring.channel.wait(item - 1)
        o = start_values(p, o, ring, consumer.shared.ones, item - 1, config)
        consumer.hand_over()
        s = warpgroup_mma_wait(len(o), deps=[s])  # the values may still run
        ring.channel.release(item)
        start_n = (end - 1 - i) * config.BLOCK_N
        p_block, m_i, alpha = _softmax_in_order(s, m_i, start_n, rows, consumer.score, consumer.problem, MASKED)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i = next_sum(l_i, factor, sums_by_lane(p_block))
        o = finish_values(o)
        ring.channel.release(item - 1)
        p = mma_operand(p_block, o, ring.v_buffers.dtype, config.PAIRS)
        o = rescaled(o, alpha)
    return o, p, m_i, l_i, item


@gluon.jit
def _attend_chunk(consumer, q, rows, first, end, full_first, full_end, item):
    """Attend to blocks [first, end) of a chunk from right to left, of which [full_first, full_end) need no mask.

    The last block is the prologue. Then follow [unmasked_end, end - 1) with a mask, [unmasked_first, unmasked_end)
    without one, and [first, unmasked_first) with one. `item`: ring item of the last block's K.

    Returns (accumulators of out, sums of weights [64], maximum [64], item of the next block's K).
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    ring = consumer.shared.ring
    queries = consumer.shared.queries
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N))
    MASKED: gl.constexpr = problem.HAS_RIGHT or problem.CHECK_KEYS
    # The prologue takes a ping-pong turn, as each block does. So all consumers of a tile take equally many turns: one
    # for each block that they compute or skip, into however many chunks these fall.
    ring.channel.wait(item)
    consumer.wait_turn()
    s = start_scores(q, queries, ring, item, consumer.INDEX, config)
    consumer.hand_over()
    s = warpgroup_mma_wait(0, deps=[s])
    ring.channel.release(item)
    m_i = gl.full([ROWS], LOWEST, gl.float32, S_ROWS)
    p_block, m_i, _ = _softmax_in_order(
        s, m_i, (end - 1) * config.BLOCK_N, rows, consumer.score, problem, MASKED
    )  # fmt: skip
    l_i = sums_by_lane(p_block)
    o = zero_output(consumer.outputs.o_tensor.block_shape[-1], config.BOXES_V)
    p = mma_operand(p_block, o, queries.buffers.dtype, config.PAIRS)
    unmasked_end = gl.maximum(first, gl.minimum(end - 1, full_end))
    if problem.HAS_RIGHT:
        o, p, m_i, l_i, item = _attend_blocks_in_order(
            consumer, q, rows, unmasked_end, end - 1, o, p, m_i, l_i, item, True
        )  # fmt: skip
    else:
        unmasked_end = end - 1
    unmasked_first = first
    if problem.HAS_LEFT:
        unmasked_first = gl.maximum(first, gl.minimum(unmasked_end, full_first))
    o, p, m_i, l_i, item = _attend_blocks_in_order(
        consumer, q, rows, unmasked_first, unmasked_end, o, p, m_i, l_i, item, False
    )  # fmt: skip
    if problem.HAS_LEFT:
        o, p, m_i, l_i, item = _attend_blocks_in_order(
            consumer, q, rows, first, unmasked_first, o, p, m_i, l_i, item, True
        )  # fmt: skip
    ring.channel.wait(item + 1)
    o = start_values(p, o, ring, consumer.shared.ones, item + 1, config)
    o = finish_values(o)
    ring.channel.release(item + 1)
    l_i = gl.convert_layout(sum_of_lanes(gl.convert_layout(l_i, LANES_IN_THREAD)), S_ROWS)
    return o, l_i, m_i, item + 2


@gluon.jit
def attend_chunks(consumer, q, rows, key0, tile, end_block, item):
    """Attend to key blocks [tile.first_block, end_block) of a tile, chunk after chunk from the last to the first.

    `key0`: the key that the consumer's first row is aligned with. `item`: ring item of K of block end_block - 1.
    Returns (accumulators of out, sums of weights [64], maximum [64], ring item after the tile's last).
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    totals = consumer.shared.totals
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N))
    WIDTH: gl.constexpr = consumer.outputs.o_tensor.block_shape[-1]
    _, full_begin, full_end, _ = problem.keys_of_rows(key0, ROWS, tile.n_keys)
    full_first = gl.cdiv(full_begin, config.BLOCK_N)
    full_last = full_end // config.BLOCK_N
    last_chunk = (end_block - 1) // config.CHUNK
    n_chunks = last_chunk - tile.first_block // config.CHUNK + 1
    m_i = gl.full([ROWS], LOWEST, gl.float32, S_ROWS)
    l_i = gl.zeros([ROWS], gl.float32, S_ROWS)
    o = zero_output(WIDTH, config.BOXES_V)
    for i in range(n_chunks):
        start = (last_chunk - i) * config.CHUNK
        first = gl.maximum(start, tile.first_block)
        end = gl.minimum(start + config.CHUNK, end_block)
        o, l_chunk, m_chunk, item = _attend_chunk(consumer, q, rows, first, end, full_first, full_last, item)
        m_i, alpha, beta = chunk_factors(m_i, m_chunk)
        l_i = fold(l_i, alpha, l_chunk, beta)
        if i > 0:
            o = _fold_totals(totals, o, alpha, beta, consumer.INDEX, WIDTH, config.BOXES_V)
        if i < n_chunks - 1:
            _store_totals(totals, o, consumer.INDEX, WIDTH, config.BOXES_V)
    return o, l_i, m_i, item
