"""The consumer warpgroups of the Hopper forward (`fwd.py`): 64 queries each.

Read `run_consumer` first, which goes from tile to tile, then `_attend_tile`, which computes a tile, and
`_attend_blocks`, its KV loop. Batch-invariant mode has `_attend_tile_in_chunks` instead, with the loop of `chunks.py`.

Three terms come from other files. The order (`block_order`) is that in which a tile visits its key blocks; a position
is an index in it. A box is what one TMA copy of a tile brings, and a run is the consecutive boxes of one accumulator
(`mma.py`).
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.attention.block_info import last_block
from diyfa.backends.cuda.attention.fixed_order import with_sink, without_sign_of_zero
from diyfa.backends.cuda.attention.fwd import row_lse
from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import turn, wait_for_stores
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.hopper.chunks import attend_chunks
from diyfa.backends.cuda.hopper.epilogue import head_rows, store_rows
from diyfa.backends.cuda.hopper.float8 import block_factors, packed_weights, unpacked_weights
from diyfa.backends.cuda.hopper.fwd_common import Outputs, Shared
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    accumulator_layout,
    box_buffer,
    box_matrix,
    finish_values,
    in_layout_of_weights,
    mma_operand,
    operand_layout,
    queries_in_registers,
    rescaled,
    run_count,
    run_matrix,
    run_start,
    start_scores,
    start_values,
    zero_output,
    zero_sums,
)
from diyfa.backends.cuda.hopper.overflow import overflown_rows
from diyfa.backends.cuda.hopper.score_functions import ScoreFunction
from diyfa.backends.cuda.hopper.softmax import (
    LN2,
    LOG2E,
    Rows,
    Score,
    add_sink,
    fixed_max_step,
    softmax_step,
    sums_by_thread,
)
from diyfa.backends.cuda.hopper.tiles import Problem, block_order, start_store


@aggregate
class Consumer:
    """State of a consumer warpgroup that is valid for all tiles."""

    INDEX: gl.constexpr
    problem: Problem
    shared: Shared
    outputs: Outputs
    score: Score
    block_factors_ptr: gl.tensor | gl.constexpr  # 8 bits, of a tile's KV head: `Factors.block_factors_ptr`
    function: ScoreFunction | gl.constexpr  # the user's, of a tile's query head, or None

    @gluon.jit
    def with_factors(self, score, block_factors_ptr):
        """Return the state for a tile of 8 bits, whose factors are in `score` and at `block_factors_ptr`."""
        return Consumer(self.INDEX, self.problem, self.shared, self.outputs, score, block_factors_ptr, None)

    @gluon.jit
    def with_function(self, tile):
        """Return the state for a tile: the score function gets its sample and head."""
        function = self.outputs.function.with_head(tile.b, tile.h)
        return Consumer(self.INDEX, self.problem, self.shared, self.outputs, self.score, None, function)

    @gluon.jit
    def weights_operand(self, weights, o):
        """Return weights [64, BLOCK_N] as the operand that `start_block_values` takes in the next iteration."""
        config: gl.constexpr = self.shared.config
        if config.BITS_V == 8:
            p = packed_weights(weights, self.shared.ring.v_buffers.dtype)
        else:
            p = mma_operand(weights, o, self.shared.ring.v_buffers.dtype, config.PAIRS)
        return p

    @gluon.jit
    def start_block_values(self, p, o, item):
        """Start adding weights times V of ring item `item` to each accumulator of out. p: `weights_operand`."""
        config: gl.constexpr = self.shared.config
        ring = self.shared.ring
        if config.BITS_V == 8:
            V_TYPE: gl.constexpr = ring.v_buffers.dtype
            weights = unpacked_weights(p, V_TYPE, operand_layout(o[0].type.layout, 8))
            v = box_matrix(ring.v_buffers, ring.buffer_index(item), 0, 1).permute((1, 0))
            started = (warpgroup_mma(weights, v, o[0], is_async=True),)
        else:
            started = start_values(p, o, ring, self.shared.ones, item, config)
        return started

    @gluon.jit
    def wait_turn(self):
        """With ping-pong, wait until this consumer may issue its products."""
        if self.shared.config.PINGPONG:
            turn("sync", self.INDEX)

    @gluon.jit
    def hand_over(self):
        """With ping-pong, let the next consumer issue its products: the first one follows the last."""
        if self.shared.config.PINGPONG:
            turn("arrive", (self.INDEX + 1) % self.shared.config.CONSUMERS)


@gluon.jit
def _attend_blocks(
    consumer, q, rows, order, start, end,
    o,  # accumulators [64, Dv] fp32; in a kernel with a fixed maximum, also the rounded weights' sums [64, 8]
    p,  # weights of the previous block, a `weights_operand`
    m_i,  # [64] fp32, in units of log2
    l_i,  # [64, 4] fp32, `sums_by_thread`
    item,  # ring item of the previous block's K
    keys,  # with a block mask, the tile's `TileList`; else None
    upcoming,  # with a block mask, (codes of position `start`, columns of position start + 1)
    MASKED: gl.constexpr, FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """Run the KV loop over positions [start, end) of the order.

    An iteration issues the scores of its block and the values of the previous block, then computes the softmax of its
    block while the tensor cores add the values. The values of the last block are left to the caller.

    FIXED_MAX: m_i does not change.
    """
    config: gl.constexpr = consumer.shared.config
    ring = consumer.shared.ring
    HAS_WORDS: gl.constexpr = MASKED and config.MASK_K > 0
    # Three loads find the bits of a block: its columns, then with these its codes, then with those its words. Columns
    # are read two blocks early and codes one block early, so that no load waits for another.
    if HAS_WORDS:
        codes, columns = upcoming
    for i in range(start, end):
        item += 2  # this block's K; item - 1 is the previous block's V
        ring.channel.wait(item)
        consumer.wait_turn()
        s = start_scores(q, consumer.shared.queries, ring, item, consumer.INDEX, config)
        ring.channel.wait(item - 1)
        o = consumer.start_block_values(p, o, item - 1)
        consumer.hand_over()
        start_n = order.block(i) * config.BLOCK_N  # with a block mask only a score function reads it
        if config.SCORE_FN is not None and config.MASK_K > 0:
            start_n = keys.first_key(i, keys.columns(i), 0)
        factors = block_factors(consumer.block_factors_ptr, start_n, consumer.problem.seqlen_k, config)
        words = None
        if HAS_WORDS:  # while the products run
            words = keys.keep_words(i, codes, gl.arange(0, ROWS, layout=m_i.type.layout))
            codes = keys.codes(columns)
            columns = keys.masked_columns(i + 2)
        s = warpgroup_mma_wait(len(o), deps=[s])  # the values may still run
        ring.channel.release(item)
        s = in_layout_of_weights(s, config)
        if FIXED_MAX:
            weights = fixed_max_step(s, m_i, start_n, rows, consumer.score, factors)
        else:
            weights, m_i, alpha = softmax_step(
                s, m_i, start_n, rows, consumer.score, consumer.problem, factors, MASKED, words, consumer.function,
                config.WEIGHT_SHIFT,
            )  # fmt: skip
            l_i *= gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i += sums_by_thread(weights)
        o = finish_values(o)
        ring.channel.release(item - 1)
        # With words, rescale first. The branches of `rescaled` keep ptxas from converting the weights while earlier
        # products run. Early converted weights lie in other registers than those of the loop over full blocks, which
        # would then have to move its weights.
        if HAS_WORDS:
            o = rescaled(o, alpha)
        p = consumer.weights_operand(weights, o)
        if not FIXED_MAX and not HAS_WORDS:
            o = rescaled(o, alpha)
    return o, p, m_i, l_i, item


@gluon.jit
def _skip_masked(consumer, tile, key0, item):
    """Skip the blocks at the tile's end that the right mask hides from all rows of this consumer. Return the next item.

    Wait for each stage, then release it unread. A release before the wait could count for the stage's previous item,
    which other consumers may still read. `key0`: the key that row 0 is aligned with. At least one block remains.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    ring = consumer.shared.ring
    _, _, _, end = problem.keys_of_rows(key0, ROWS, tile.n_keys)
    consumer_end = gl.maximum(gl.cdiv(end, config.BLOCK_N), tile.first_block + 1)
    for _ in range(consumer_end, tile.end_block):
        # Consumers must take equally many ping-pong turns.
        consumer.wait_turn()
        consumer.hand_over()
        for j in gl.static_range(2):
            ring.channel.wait(item + j)
            ring.channel.release(item + j)
        item += 2
    return item


@gluon.jit
def _loop_bounds(consumer, tile, order, key0, keys):
    """Return (n_masked, n_edge_blocks, n_blocks), positions in the order of a tile's key blocks.

    A mask or the end of the keys may cut only blocks [0, n_masked). Every row sees all keys of blocks [n_edge_blocks,
    n_blocks), and has seen a key before them. `key0`: as in `_skip_masked`. `keys`: with a block mask, the `TileList`.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    n_blocks = order.end_block - order.first_block
    n_edge_blocks = order.n_right + order.n_left
    n_masked = 1
    if problem.HAS_LEFT:
        n_masked = n_edge_blocks
    elif problem.HAS_RIGHT:
        _, _, full_end, _ = problem.keys_of_rows(key0, ROWS, tile.n_keys)
        n_masked = order.end_block - last_block(full_end, config.BLOCK_N)
        n_masked = gl.maximum(gl.minimum(n_masked, order.n_right), 1)
    if config.MASK_K > 0:
        n_masked = keys.masked_count()
        # Block n_masked is full, so every row has seen a key after it.
        n_edge_blocks = gl.minimum(n_masked + 1, n_blocks)
    return n_masked, n_edge_blocks, n_blocks


@gluon.jit
def _finish_rows(consumer, tile, rows, offs_m, o, m_i, l_i, scale, mean_products):
    """Return (factor of out, keys_weight, lse) of rows [64] after the KV loop.

    Out is `o` times the factor, and with SINKS also times keys_weight, the softmax weight of all keys beside the sink.
    `mean_products` [64]: with K_MEAN, the products of the queries with the mean of k. `scale`: that of the scores,
    without the factors.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    l_rounded = l_i
    if config.FIXED_MAX:
        # Divide out by the sum of the rounded weights. Then the rounding of a dominant weight cancels, and out agrees
        # with the weights of the backward pass (delta is rowsum(dout * out)). With a running maximum a dominant weight
        # is exactly 1, so l_i serves for out as well.
        l_rounded = gl.convert_layout(gl.max(o[run_count(config.BOXES_V)], 1), l_i.type.layout)
    # A row that saw no key or is beyond its sample's end has out 0 and lse +inf.
    has_keys = l_i != 0.0
    if config.BITS == 8:  # a NaN factor makes l_i NaN even if all keys are hidden
        if problem.HAS_RIGHT:
            right = 0 if problem.CAUSAL else problem.window_right
            has_keys = has_keys & (rows.position + right >= 0)
        if problem.LENGTHS == PACKED:
            has_keys = has_keys & (tile.n_keys > 0)
    if config.K_MEAN:  # q times the mean of k is a summand of all scores of a row: it moves the lse, not the weights
        m_i += (-mean_products if consumer.score.NEGATE else mean_products) * scale
        # NaN if the product is not finite.
        l_rounded = gl.where(mean_products - mean_products == 0.0, l_rounded, float("nan"))
    total = gl.where(has_keys, l_i, 1.0)
    factor = gl.where(has_keys, 1.0 / gl.where(has_keys, l_rounded, 1.0), 0.0)
    lse_log2 = gl.where(has_keys, m_i + gl.log2(total), float("-inf"))
    keys_weight = factor
    if outputs.SINKS:
        lse, keys_weight = add_sink(lse_log2, gl.load(outputs.sinks_ptr + tile.h))
    else:
        lse = lse_log2 * LN2
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    if problem.LENGTHS == SEQ_LENS:
        factor = gl.where(offs_m < tile.n_queries, factor, 0.0)
        lse = gl.where(offs_m < tile.n_queries, lse, float("inf"))
    return factor, keys_weight, lse


@gluon.jit
def _attend_tile(consumer, tile, item, q_loads):
    """Compute and write the rows of out and lse of this consumer's 64 queries of a tile.

    1. Skip the blocks that the right mask hides from all 64 rows. A lone consumer has none: the tile ends at its rows.
    2. Prologue: scores and softmax of the block at position 0 of the order.
    3. KV loop (`_attend_blocks`), which adds the values of each block one iteration later. A mask may cut only the
       blocks at positions [0, n_masked) of the order. FIXED_MAX: positions [1, n_edge_blocks) update the maximum, and
       [n_edge_blocks, n_blocks) use it unchanged. With a block mask, the order is that of the tile's list
       (`gluon/block_mask.py`), which begins with the masked blocks; a block mask excludes causal masks and windows.
    4. Epilogue: values of the last block, division by the sum of weights, lse, stores.

    8 bits: factors of q and k join the scale of the scores, those of key blocks multiply columns of products, that of v
    multiplies finished rows. The mean of k adds the same number to all scores of a row, so it joins the lse only.

    `item`: ring item of the first block's K; its V is item + 1. `q_loads`: tiles of queries that were loaded before.
    Returns (item of the next tile, overflown rows [64] int32, or 0 without FIXED_MAX).
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    ring = consumer.shared.ring
    queries = consumer.shared.queries
    CONSUMER: gl.constexpr = consumer.INDEX
    WIDTH: gl.constexpr = outputs.o_tensor.block_shape[-1]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N, config.BITS_V))
    # HAS_LEFT is not needed here: it implies HAS_RIGHT or CHECK_KEYS.
    MASKED: gl.constexpr = problem.HAS_RIGHT or problem.CHECK_KEYS
    LISTED: gl.constexpr = config.MASK_K > 0  # key blocks come from the list of a block mask

    row0 = tile.row0 + CONSUMER * ROWS
    order = block_order(tile, problem, config.BLOCK_M, config.BLOCK_N)
    key0 = row0 + (tile.n_keys - tile.n_queries)
    if problem.HAS_RIGHT and config.CONSUMERS > 1:
        first_item = item
        item = _skip_masked(consumer, tile, key0, item)
        order = order.without_last((item - first_item) // 2)  # a block has two items, K and V
    offs_m = row0 + gl.arange(0, ROWS, layout=S_ROWS)
    keys = None
    if LISTED:
        keys = problem.tile_list(tile, row0, config.BLOCK_N)
    n_masked, n_edge_blocks, n_blocks = _loop_bounds(consumer, tile, order, key0, keys)
    slope = 0.0
    if consumer.score.ALIBI:
        slope = gl.load(outputs.slopes_ptr + tile.b * outputs.stride_slopeb + tile.h) * LOG2E
    rows = Rows(offs_m + (tile.n_keys - tile.n_queries), tile.n_keys, slope)
    words = None
    if LISTED:
        words = keys.keep_words(0, (tile.listed.code, tile.listed.next_code), gl.arange(0, ROWS, layout=S_ROWS))

    # Prologue: no block comes before the first one, so there are no values to add.
    scale = consumer.score.scale  # without the factors
    if config.BITS == 8:
        q_factor = outputs.factors.query_factor(tile, row0, problem, config)
        score = consumer.score.scaled(q_factor * outputs.factors.key_factor(tile, problem, config))
        consumer = consumer.with_factors(score, outputs.factors.block_factors_ptr(tile, problem, config))
    if config.SCORE_FN is not None:
        consumer = consumer.with_function(tile)
    queries.wait_full(CONSUMER, q_loads)
    mean_products = None
    if config.K_MEAN:
        mean_products = q_factor * outputs.factors.key_mean_products(tile, problem, queries, CONSUMER, S_ROWS, config)
    q = queries_in_registers(queries, CONSUMER, config)
    # All queries are in registers, and out does not leave through their buffers: these are free.
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS == config.BOXES:
        queries.release(CONSUMER)
    ring.channel.wait(item)
    s = start_scores(q, queries, ring, item, CONSUMER, config)
    upcoming = ()
    if LISTED:
        columns = keys.masked_columns(1)
        next_columns = keys.masked_columns(2)
    s = warpgroup_mma_wait(0, deps=[s])
    ring.channel.release(item)
    s = in_layout_of_weights(s, config)
    if LISTED:
        upcoming = (keys.codes(columns), next_columns)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    start_n = (order.end_block - 1) * config.BLOCK_N
    if config.SCORE_FN is not None and LISTED:
        start_n = keys.first_key(0, keys.columns(0), 0)
    factors = block_factors(consumer.block_factors_ptr, start_n, problem.seqlen_k, config)
    weights, m_i, _ = softmax_step(
        s, m_i, start_n, rows, consumer.score, problem, factors, MASKED, words, consumer.function, config.WEIGHT_SHIFT
    )
    l_i = sums_by_thread(weights)
    o = zero_output(WIDTH, config.BOXES_V, config.BITS_V)
    if config.FIXED_MAX:
        o += (zero_sums(),)
    p = consumer.weights_operand(weights, o)

    # KV loop. Each copy of `_attend_blocks` takes seconds to compile. So with WINDOWED one copy masks more blocks than
    # it must: in the fallback, and before a fixed maximum. Positions that the copies loop over:
    #
    #                              MASKED                unmasked                    FIXED_MAX
    #     running maximum          [1, n_masked)         [n_masked, n_blocks)        -
    #     fixed maximum            [1, n_masked)         [n_masked, n_edge_blocks)   [n_edge_blocks, n_blocks)
    #     the same, WINDOWED       [1, n_edge_blocks)    -                           [n_edge_blocks, n_blocks)
    #     fallback, WINDOWED       [1, n_blocks)         -                           -
    #
    # Without WINDOWED and LISTED n_masked is 1, and there is no masked copy.
    WINDOWED: gl.constexpr = problem.HAS_LEFT or problem.HAS_RIGHT  # a causal mask or a window
    MASKS_ALL: gl.constexpr = WINDOWED and config.FALLBACK
    masked_end = n_masked
    if MASKS_ALL:
        masked_end = n_blocks
    elif WINDOWED and config.FIXED_MAX:
        masked_end = n_edge_blocks
    if WINDOWED or LISTED:
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, 1, masked_end, o, p, m_i, l_i, item, keys, upcoming, True, False
        )  # fmt: skip
    if config.FIXED_MAX:
        if not WINDOWED:
            o, p, m_i, l_i, item = _attend_blocks(
                consumer, q, rows, order, n_masked, n_edge_blocks, o, p, m_i, l_i, item, keys, upcoming, False, False
            )  # fmt: skip
        # The maximum is still -inf although the row sees the next blocks: its scores overflowed or its inputs are
        # infinite. Flag it for the fallback.
        is_lost = (m_i == float("-inf")) & (n_edge_blocks < n_blocks)
        m_i = gl.where(m_i == float("-inf"), 0.0, m_i)
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, n_edge_blocks, n_blocks, o, p, m_i, l_i, item, keys, upcoming, False, True
        )  # fmt: skip
    elif not MASKS_ALL:
        o, p, m_i, l_i, item = _attend_blocks(
            consumer, q, rows, order, n_masked, n_blocks, o, p, m_i, l_i, item, keys, upcoming, False, False
        )  # fmt: skip

    # Epilogue. The last scores have read the queries.
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS < config.BOXES:
        queries.release(CONSUMER)
    ring.channel.wait(item + 1)
    o = finish_values(consumer.start_block_values(p, o, item + 1))
    ring.channel.release(item + 1)
    l_i = gl.convert_layout(gl.sum(l_i, 1), S_ROWS)
    factor, keys_weight, lse = _finish_rows(consumer, tile, rows, offs_m, o, m_i, l_i, scale, mean_products)
    _store_lse(consumer, tile, offs_m, lse)
    overflown = 0
    if config.FIXED_MAX:
        overflown = (is_lost | overflown_rows(l_i, o, config.BOXES_V)).to(gl.int32)
    _store_output(consumer, tile, row0, o, factor, keys_weight)
    return item + 2, overflown


@gluon.jit
def _attend_tile_in_chunks(consumer, tile, item, q_loads):
    """Do what `_attend_tile` does in batch-invariant mode, with the order of operations of `attention/fixed_order.py`.

    That mode has no softcap, ALiBi, block mask, float8 or fixed maximum. Returns the item of the next tile.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    queries = consumer.shared.queries
    CONSUMER: gl.constexpr = consumer.INDEX
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(config.BLOCK_N))
    row0 = tile.row0 + CONSUMER * ROWS
    key0 = row0 + (tile.n_keys - tile.n_queries)
    end_block = tile.end_block
    if problem.HAS_RIGHT and config.CONSUMERS > 1:
        first_item = item
        item = _skip_masked(consumer, tile, key0, item)
        end_block -= (item - first_item) // 2
    offs_m = row0 + gl.arange(0, ROWS, layout=S_ROWS)
    rows = Rows(offs_m + (tile.n_keys - tile.n_queries), tile.n_keys, 0.0)
    queries.wait_full(CONSUMER, q_loads)
    q = queries_in_registers(queries, CONSUMER, config)
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS == config.BOXES:
        queries.release(CONSUMER)
    o, l_i, m_i, item = attend_chunks(consumer, q, rows, key0, tile, end_block, item)
    if (config.SEPARATE_O_BUFFER or config.STORE_FROM_REGISTERS) and config.Q_IN_REGISTERS < config.BOXES:
        queries.release(CONSUMER)
    sink = gl.zeros([ROWS], gl.float32, S_ROWS)
    alpha = 1.0
    if outputs.SINKS:
        sink += gl.load(outputs.sinks_ptr + tile.h)
        m_i, l_i, alpha = with_sink(sink, m_i, l_i)
    # A row that saw no key has out 0 and lse +inf.
    has_keys = l_i != 0.0
    factor = gl.where(has_keys, 1.0 / gl.where(has_keys, l_i, 1.0), 0.0)
    lse = gl.where(has_keys, row_lse(sink, m_i, gl.where(has_keys, l_i, 1.0)), float("inf"))
    _store_lse(consumer, tile, offs_m, lse)
    if outputs.SINKS:  # the sink's factor first, as in `store_rows` of `attention/decode_combine.py`
        _store_output(consumer, tile, row0, o, alpha, factor)
    else:
        _store_output(consumer, tile, row0, o, factor, factor)
    return item


@gluon.jit
def _store_lse(consumer, tile, offs_m, lse):
    """Write lse [64] of the rows at positions `offs_m` [64] of the sequence."""
    problem = consumer.problem
    if problem.LENGTHS == PACKED:
        lse_ptr = consumer.outputs.lse_ptr + tile.h.to(gl.int64) * problem.total_q + tile.first_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < tile.n_queries)
    else:
        lse_ptr = consumer.outputs.lse_ptr + (tile.b * problem.heads_q + tile.h).to(gl.int64) * problem.seqlen_q
        gl.store(lse_ptr + offs_m, lse, mask=offs_m < problem.seqlen_q)


@gluon.jit
def _store_output(consumer, tile, row0, o, factor, keys_weight):
    """Write rows of out: the accumulators o times `factor` [64], and with sinks then times `keys_weight` [64].

    Out leaves through shared memory and TMA, which drops rows beyond the end. With SEPARATE_O_BUFFER that copy may go
    on during the next tile. STORE_FROM_REGISTERS: out leaves from registers, without TMA.
    """
    config: gl.constexpr = consumer.shared.config
    problem = consumer.problem
    outputs = consumer.outputs
    CONSUMER: gl.constexpr = consumer.INDEX
    DTYPE: gl.constexpr = outputs.o_tensor.dtype
    WIDTH: gl.constexpr = outputs.o_tensor.block_shape[-1]
    # Boxes per tile of `o_buffers`.
    O_BOXES: gl.constexpr = config.BOXES_V if config.SEPARATE_O_BUFFER else config.BOXES
    # With OUT_IN_TOTALS out lies in the first half of a consumer's totals (`chunks.py`), which are twice as large.
    O_TILE: gl.constexpr = 2 * CONSUMER if config.OUT_IN_TOTALS else CONSUMER
    if config.STORE_FROM_REGISTERS:
        rows = head_rows(
            outputs.o_ptr, outputs.o_tensor, tile.b, tile.h, tile.first_q, problem.LENGTHS == PACKED
        )  # fmt: skip
        end = tile.n_queries if problem.LENGTHS == PACKED else problem.seqlen_q
    else:
        tma.store_wait(0)
    for run in gl.static_range(run_count(config.BOXES_V)):
        by_row = gl.convert_layout(factor, gl.SliceLayout(1, o[run].type.layout))[:, None]
        # Rows without keys become 0 even if o is NaN. A row with a NaN score has a factor of NaN and remains NaN.
        if config.BITS == 8:
            column = run_start(run, config.BOXES_V) * WIDTH
            values = outputs.factors.dequantised(o[run] * by_row, column, tile, problem, config)
            out = gl.where(by_row == 0.0, 0.0, values)
        else:
            out = gl.where(by_row == 0.0, 0.0, o[run] * by_row)
        if outputs.SINKS:  # a second product: float32 holds both factors, but perhaps not their product
            out *= gl.convert_layout(keys_weight, gl.SliceLayout(1, o[run].type.layout))[:, None]
        if config.CHUNK > 0:
            out = without_sign_of_zero(out)
        out = out.to(DTYPE)
        if config.STORE_FROM_REGISTERS:
            store_rows(out, rows, row0, end, run_start(run, config.BOXES_V) * WIDTH)
        else:
            run_matrix(outputs.o_buffers, O_TILE, O_BOXES, run, config.BOXES_V).store(out)
    if not config.STORE_FROM_REGISTERS:
        fence_async_shared()
        for j in gl.static_range(config.BOXES_V):
            o_buffer = box_buffer(outputs.o_buffers, O_TILE, j, O_BOXES)
            o_buffer = o_buffer.reshape(outputs.o_tensor.block_shape)
            start_store(
                outputs.o_tensor, tile.b, tile.h, row0, j * WIDTH, tile.first_q + tile.n_queries, tile.n_queries,
                o_buffer, problem.LENGTHS == PACKED,
            )  # fmt: skip
        if not config.SEPARATE_O_BUFFER:  # out leaves through the buffers that the next queries are loaded to
            tma.store_wait(0)
            consumer.shared.queries.release(CONSUMER)


@gluon.jit
def run_consumer(INDEX: gl.constexpr, problem, shared, outputs):
    """Run consumer warpgroup INDEX: compute its 64 queries of each tile of the program."""
    config: gl.constexpr = shared.config
    score = outputs.score
    if config.SCORE_FN is None:  # a score function gets natural units
        score = score.in_log2()
    consumer = Consumer(INDEX, problem, shared, outputs, score, None, None)
    item = 0  # ring item of the tile's first K
    q_loads = 0  # tiles of queries loaded so far
    slot = 0  # slot of the tile's info
    if config.FALLBACK:
        slot = shared.flags.next_flagged(slot, 4)  # 4: warps of this partition
        tile = shared.tile_infos.reread(slot, problem, 4)
    else:
        # Give consumer 0 the first ping-pong turn; otherwise all would wait forever. The fallback needs no such start:
        # the last hand-over of the first pass is still pending on consumer 0's barrier.
        if INDEX == config.CONSUMERS - 1:
            consumer.hand_over()
        tile = shared.tile_infos.read(slot, problem)
    if config.FIXED_MAX:
        all_overflown = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, accumulator_layout(config.BLOCK_N)))
    while tile.end_block > 0:
        if config.CHUNK > 0:
            item = _attend_tile_in_chunks(consumer, tile, item, q_loads)
        else:
            item, overflown = _attend_tile(consumer, tile, item, q_loads)
        if config.FALLBACK:
            q_loads += 1
            slot = shared.flags.next_flagged(slot + 1, 4)
            tile = shared.tile_infos.reread(slot, problem, 4)
        else:
            if config.FIXED_MAX:
                shared.flags.flag(slot, overflown, INDEX)
                all_overflown = all_overflown | overflown
            slot += 1
            q_loads = slot
            tile = shared.tile_infos.read(slot, problem)
    if config.FIXED_MAX:
        shared.flags.finish(slot, all_overflown, INDEX)
        wait_for_stores()  # the fallback may write the same rows
    else:
        tma.store_wait(0)
