"""Attention backward for Hopper (sm_90): one loop for dQ, dK and dV, in Gluon.

A program owns a block of BLOCK_N = 128 keys of one head and goes through the queries of every head in its group. One
warp copies tiles to shared memory through TMA, another adds dQ to global memory, and two warpgroups, each with 64 of
the keys, do the rest. For each block of BLOCK_M queries a consumer forms

    Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),  dPᵀ = V dOᵀ,  dSᵀ = Pᵀ * (dPᵀ - delta),  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K

(Dao 2023, arXiv:2307.08691, algorithm 2; Shah et al. 2024, arXiv:2407.08608, for the roles). Scores lie transposed, so
that P and dS are already in registers as the left operands of the products that accumulate. dQ needs the dS of all
128 keys: consumers leave theirs in shared memory, and each forms half of dQ, which is added to fp32 in global memory.

Three kernels: `_prepare_kernel` forms delta and clears the fp32 dQ, `_bwd_sm90_kernel` is the above, and
`_convert_kernel` scales dQ and writes it in 16 bits. `docs/hopper-backward.md` explains it.

Queries lie in global memory in blocks of BLOCK_M of one head, each sequence beginning with a block of its own: the
statistics (lse in units of log2, delta) as two rows, and the fp32 dQ in the order of the consumers' registers.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import (
    WARPS,
    idle_warps,
    optimisation_barrier,
    order_lanes,
    release,
    wait_for_previous_kernels,
    wait_for_stores,
    wait_full,
)
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_reduce_add
from diyfa.backends.cuda.gluon.semaphore import end_turn, wait_for_turn
from diyfa.backends.cuda.hopper.bwd_configs import BOX_COLUMNS, CONSUMERS
from diyfa.backends.cuda.hopper.epilogue import _by_chunks
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_of, buffer_of, run_of
from diyfa.backends.cuda.hopper.softmax import LOG2E
from diyfa.backends.cuda.hopper.tiles import _clamped, end_of, start_load, start_store
from diyfa.backends.cuda.runtime.constants import Constants

DS_STAGES = gl.constexpr(2)
DQ_ROWS = gl.constexpr(16)  # of the box in which a consumer's half of dQ leaves
DQ_COLUMNS = gl.constexpr(256)
HALF_DQ = gl.constexpr(DQ_ROWS.value * DQ_COLUMNS.value)  # 64 x 64 numbers
CONSUMER_COUNT = gl.constexpr(CONSUMERS)
BOX = gl.constexpr(BOX_COLUMNS)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class QueryConstants(Constants):
    """What `_prepare_kernel` and `_convert_kernel` are compiled for."""

    block_m: int
    block_d: int
    block_dv: int
    lengths: int
    has_dlse: bool
    keep_delta: bool
    deterministic: bool


# ---- the parts of a call


@aggregate
class Sizes:
    """Sizes of a call, lengths of its sequences, and the mask."""

    heads_q: gl.tensor
    group_size: gl.tensor | gl.constexpr
    batch: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    total_k: gl.tensor
    window_left: gl.tensor | gl.constexpr
    window_right: gl.tensor | gl.constexpr
    lengths_q_ptr: gl.tensor | gl.constexpr  # None where all are EQUAL
    lengths_k_ptr: gl.tensor | gl.constexpr


@gluon.jit
def _sequence(b, sizes, LENGTHS: gl.constexpr):
    """Sample b -> (its first row in q, in k, its queries, its keys)."""
    first_q = 0
    first_k = 0
    n_queries = sizes.seqlen_q
    n_keys = sizes.seqlen_k
    if LENGTHS == PACKED:
        first_q = _clamped(sizes.lengths_q_ptr + b, sizes.total_q)
        first_k = _clamped(sizes.lengths_k_ptr + b, sizes.total_k)
        n_queries = gl.maximum(_clamped(sizes.lengths_q_ptr + b + 1, sizes.total_q) - first_q, 0)
        n_keys = gl.maximum(_clamped(sizes.lengths_k_ptr + b + 1, sizes.total_k) - first_k, 0)
    if LENGTHS == SEQ_LENS:
        n_keys = _clamped(sizes.lengths_k_ptr + b, sizes.seqlen_k)
        n_queries = gl.minimum(n_keys, sizes.seqlen_q)
    return first_q, first_k, n_queries, n_keys


@gluon.jit
def _first_block(b, h, first_q, sizes, BLOCK_M: gl.constexpr, LENGTHS: gl.constexpr):
    """The number of a sequence's first block of queries in head h.

    Packed, those of a head's sequence b begin at first_q // BLOCK_M + b, and the next sequence's far enough behind.
    """
    if LENGTHS == PACKED:
        block = h * (sizes.total_q // BLOCK_M + sizes.batch) + first_q // BLOCK_M + b
    else:
        block = (b * sizes.heads_q + h) * gl.cdiv(sizes.seqlen_q, BLOCK_M)
    return block


@aggregate
class KeyBlock:
    """A program's keys, and the blocks of queries that see them: [begin, end), of which [full_begin, full_end) need no
    mask."""

    b: gl.tensor
    hk: gl.tensor
    col0: gl.tensor
    first_q: gl.tensor
    first_k: gl.tensor
    n_queries: gl.tensor
    n_keys: gl.tensor
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor

    @gluon.jit
    def masked_count(self):
        return (self.full_begin - self.begin) + (self.end - self.full_end)

    @gluon.jit
    def masked_block(self, i):
        """The i-th block that needs a mask."""
        block = self.begin + i
        return gl.where(block < self.full_begin, block, block + (self.full_end - self.full_begin))

    @gluon.jit
    def block(self, i):
        """The i-th block of all: those that need a mask come first."""
        masked = self.masked_count()
        return gl.where(i < masked, self.masked_block(i), self.full_begin + i - masked)

    @gluon.jit
    def turn(self, block, sizes, config):
        """How many programs add to dQ of a block of queries before this one: those with later keys that it sees.

        Those programs have lower numbers. Under a causal mask they are also the first to come to it.
        """
        last = gl.cdiv(self.n_keys, config.BLOCK_N) - 1
        if config.HAS_RIGHT:
            last_row = (block + 1) * config.BLOCK_M - 1
            last_key = last_row + self.n_keys - self.n_queries + sizes.window_right
            last = gl.minimum(last, last_key // config.BLOCK_N)
        return last - self.col0 // config.BLOCK_N


@gluon.jit
def _key_block(pid, sizes, config):
    """Program number -> its keys. Under a causal mask the first keys of a head have the most queries: longest first,
    but for DETERMINISTIC, where dQ is added up from the last keys to the first (`KeyBlock.turn`)."""
    blocks_n = gl.cdiv(sizes.seqlen_k, config.BLOCK_N)
    heads_kv = sizes.heads_q // sizes.group_size
    block_n = pid % blocks_n
    if config.DETERMINISTIC:
        block_n = blocks_n - 1 - block_n
    col0 = block_n * config.BLOCK_N
    b = pid // blocks_n // heads_kv
    hk = pid // blocks_n % heads_kv
    first_q, first_k, n_queries, n_keys = _sequence(b, sizes, config.LENGTHS)
    offset = n_keys - n_queries
    begin = 0
    full_begin = 0
    end_row = n_queries
    full_end = gl.cdiv(n_queries, config.BLOCK_M)  # queries that do not exist weigh exp(s - inf) = 0
    if config.HAS_RIGHT:
        first_row = gl.maximum(col0 - offset - sizes.window_right, 0)  # that sees a key
        begin = first_row // config.BLOCK_M
        first_row = gl.maximum(col0 + (config.BLOCK_N - 1) - offset - sizes.window_right, 0)  # that sees all of them
        full_begin = gl.cdiv(first_row, config.BLOCK_M)
    if config.HAS_LEFT:
        end_row = gl.minimum(n_queries, gl.maximum(col0 + config.BLOCK_N + sizes.window_left - offset, 0))
        full_rows = gl.maximum(col0 + sizes.window_left - offset + 1, 0)
        full_end = gl.where(full_rows < n_queries, full_rows // config.BLOCK_M, full_end)
    end = gl.maximum(gl.cdiv(end_row, config.BLOCK_M), begin)
    if config.LENGTHS != EQUAL:
        end = gl.where(col0 < n_keys, end, begin)
    # Keys beyond the end are zeros; their weights may be infinite all the same.
    full_begin = gl.where(col0 + config.BLOCK_N <= n_keys, full_begin, end)
    if config.DETERMINISTIC and config.HAS_LEFT:
        # Blocks in their order, so all with a mask: else each program would wait for most of the one before.
        full_begin = end
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    full_end = gl.minimum(gl.maximum(full_end, full_begin), end)
    return KeyBlock(b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end)


@aggregate
class QueryRing:
    """The stages through which the producer hands blocks of queries, statistics and dO to the consumers.

    Barriers count phases (`gluon/ring.py`). dO has a barrier of its own, as it is needed later.
    """

    full: gl.shared_memory_descriptor  # Q and the statistics are there
    do_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def init(self):
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.full.index(stage), count=2)
            mbarrier.init(self.do_full.index(stage), count=1)
            mbarrier.init(self.empty.index(stage), count=CONSUMER_COUNT * WARPS)

    @gluon.jit
    def stage(self, item):
        return item % self.STAGES

    @gluon.jit
    def parity(self, item):
        return (item // self.STAGES) & 1

    @gluon.jit
    def wait_full(self, item):
        """A consumer waits until Q and the statistics are there."""
        wait_full(self.full.index(self.stage(item)), self.parity(item))

    @gluon.jit
    def wait_do(self, item):
        """A consumer waits until dO is there."""
        wait_full(self.do_full.index(self.stage(item)), self.parity(item))

    @gluon.jit
    def wait_empty(self, item):
        """The producer waits until the item's stage is free."""
        mbarrier.wait(self.empty.index(self.stage(item)), self.parity(item) ^ 1)

    @gluon.jit
    def release(self, item):
        """A consumer has done with the item."""
        release(self.empty.index(self.stage(item)))


@aggregate
class GradientRing:
    """The dS that both consumers leave for each other, in two stages, and the dQ that they hand to the adders.

    Item n of dS belongs to the block before the n-th; item 0 is nothing. Nobody need say that a stage of dS is free:
    who writes item n + 2 has waited for all of item n + 1, which each consumer writes when it has done with item n.
    """

    ds_buffers: gl.shared_memory_descriptor  # dSᵀ in boxes of 64 queries
    dq_buffers: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor  # of each consumer
    dq_empty: gl.shared_memory_descriptor

    @gluon.jit
    def init(self):
        for stage in gl.static_range(DS_STAGES):
            mbarrier.init(self.ds_full.index(stage), count=CONSUMER_COUNT * WARPS)
        for c in gl.static_range(CONSUMER_COUNT):
            mbarrier.init(self.dq_full.index(c), count=WARPS)
            mbarrier.init(self.dq_empty.index(c), count=1)

    @gluon.jit
    def store_ds(self, ds, item, CONSUMER: gl.constexpr):
        """A consumer leaves its dSᵀ, [64, BLOCK_M]."""
        BOXES: gl.constexpr = ds.shape[1] // ROWS
        stage = item % DS_STAGES
        run_of(self.ds_buffers, stage * CONSUMER_COUNT + CONSUMER, BOXES, 0, BOXES).store(ds)
        fence_async_shared()
        order_lanes()
        release(self.ds_full.index(stage))

    @gluon.jit
    def wait_ds(self, item):
        """Wait until the item's dS of both consumers is there."""
        wait_full(self.ds_full.index(item % DS_STAGES), (item // DS_STAGES) & 1)

    @gluon.jit
    def store_dq(self, dq, item, CONSUMER: gl.constexpr):
        """A consumer hands its half of dQ, an accumulator, to its adder."""
        wait_full(self.dq_empty.index(CONSUMER), (item & 1) ^ 1)
        self.dq_buffers.index(CONSUMER).store(_in_register_order(dq))
        fence_async_shared()
        order_lanes()
        release(self.dq_full.index(CONSUMER))


@aggregate
class Shared:
    """What the partitions share: constants, memory and barriers."""

    config: gl.constexpr  # `Sm90BwdConstants`
    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor
    q_buffers: gl.shared_memory_descriptor
    do_buffers: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor  # [2 * STAGES, 1, BLOCK_M]: lse and delta
    k_full: gl.shared_memory_descriptor  # of the keys of each consumer
    v_full: gl.shared_memory_descriptor
    queries: QueryRing
    gradients: GradientRing


@aggregate
class Inputs:
    """What the producer reads."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    do_tensor: tma.tensor_descriptor
    statistics_tensor: tma.tensor_descriptor
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
    sm_scale: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


# ---- the producer, and the warp that adds dQ


@gluon.jit
def _producer(keys, sizes, shared, inputs):
    """One warp: copy the keys once, then block after block of queries as soon as a stage is free."""
    config: gl.constexpr = shared.config
    ring = shared.queries
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    hk = keys.hk
    end_k = end_of(b, keys.first_k, keys.n_keys, inputs.steps_kb, inputs.steps_kn, config.LENGTHS)
    end_v = end_of(b, keys.first_k, keys.n_keys, inputs.steps_vb, inputs.steps_vn, config.LENGTHS)
    end_q = end_of(b, keys.first_q, keys.n_queries, inputs.steps_qb, inputs.steps_qm, config.LENGTHS)
    end_do = end_of(b, keys.first_q, keys.n_queries, inputs.steps_dob, inputs.steps_dom, config.LENGTHS)
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.k_tensor, b, hk, keys.col0 + c * ROWS, end_k, keys.n_keys,
            shared.k_buffers, c, shared.k_full.index(c), config.BOXES, RAGGED,
        )  # fmt: skip
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.v_tensor, b, hk, keys.col0 + c * ROWS, end_v, keys.n_keys,
            shared.v_buffers, c, shared.v_full.index(c), config.BOXES_V, RAGGED,
        )  # fmt: skip
    item = 0
    for g in range(sizes.group_size):
        h = hk * sizes.group_size + g
        first = _first_block(b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
        for i in range(keys.end - keys.begin):
            block = keys.block(i)
            row = block * config.BLOCK_M
            stage = ring.stage(item)
            full = ring.full.index(stage)
            ring.wait_empty(item)
            mbarrier.expect(full, 2 * config.BLOCK_M * 4)
            for j in gl.static_range(2):
                async_load(
                    inputs.statistics_tensor, [2 * (first + block) + j, 0], full, shared.statistics.index(2 * stage + j)
                )
            start_load(
                inputs.q_tensor, b, h, row, end_q, keys.n_queries, shared.q_buffers, stage, full, config.BOXES, RAGGED
            )
            start_load(
                inputs.do_tensor, b, h, row, end_do, keys.n_queries,
                shared.do_buffers, stage, ring.do_full.index(stage), config.BOXES_V, RAGGED,
            )  # fmt: skip
            item += 1


@gluon.jit
def _adder(CONSUMER: gl.constexpr, keys, sizes, shared, dq_tensor, semaphores_ptr):
    """One warp: add a consumer's half of dQ, as soon as it lies in shared memory, to what is in global memory.

    DETERMINISTIC: when it is this program's turn.
    """
    config: gl.constexpr = shared.config
    ring = shared.gradients
    full = ring.dq_full.index(CONSUMER)
    empty = ring.dq_empty.index(CONSUMER)
    # What comes before the first block is nothing.
    mbarrier.wait(full, 0)
    mbarrier.arrive(empty, count=1)
    item = 1
    for g in range(sizes.group_size):
        h = keys.hk * sizes.group_size + g
        first = _first_block(keys.b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
        for i in range(keys.end - keys.begin):
            block = keys.block(i)
            half = (first + block) * CONSUMER_COUNT + CONSUMER
            mbarrier.wait(full, item & 1)
            if config.DETERMINISTIC:
                wait_for_turn(semaphores_ptr + half, keys.turn(block, sizes, config))
            async_reduce_add(dq_tensor, [half * DQ_ROWS, 0], ring.dq_buffers.index(CONSUMER))
            tma.store_wait(0)
            mbarrier.arrive(empty, count=1)
            if config.DETERMINISTIC:
                wait_for_stores()
                end_turn(semaphores_ptr + half)
            item += 1


# ---- the consumers


@gluon.jit
def _start_scores(own, others, item_of_others, c, USED: gl.constexpr, BOXES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Start own othersᵀ, [64, BLOCK_M]: K Qᵀ or V dOᵀ of a consumer's keys and a stage of queries, from the first USED
    boxes."""
    s = gl.zeros([ROWS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    for j in gl.static_range(USED):
        left = box_of(own, c, j, BOXES)
        right = box_of(others, item_of_others, j, BOXES).permute((1, 0))
        s = warpgroup_mma(left, right, s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def _start_dq(shared, item, zero, c: gl.constexpr):
    """Start a consumer's half of dS K, [64, 64]: 64 of the columns, or at head_dim 64 of the queries."""
    config: gl.constexpr = shared.config
    stage = item % DS_STAGES
    COLUMN_BOX: gl.constexpr = c if config.BOXES > 1 else 0
    QUERY_BOX: gl.constexpr = 0 if config.BOXES > 1 else c
    QUERY_BOXES: gl.constexpr = config.BLOCK_M // ROWS
    dq = gl.zeros([ROWS, BOX], gl.float32, accumulator_layout(BOX))
    for half in gl.static_range(CONSUMER_COUNT):
        ds = box_of(shared.gradients.ds_buffers, stage * CONSUMER_COUNT + half, QUERY_BOX, QUERY_BOXES).permute((1, 0))
        k = box_of(shared.k_buffers, half + zero, COLUMN_BOX, config.BOXES)
        dq = warpgroup_mma(ds, k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _in_register_order(dq):
    """[64, 64], an accumulator -> the same numbers so that each thread has four that follow each other, and a warp 128.

    A row is 16 * warp + 8 * half + lane // 4, a column 8 * n + 2 * (lane % 4) + bit.
    """
    parts = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, half, lane // 4, n, lane % 4, bit
    return parts.permute(3, 0, 2, 4, 1, 5).reshape([DQ_ROWS, DQ_COLUMNS])


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
def _weights(s, lse, start_m, consumer, MASKED: gl.constexpr):
    """Products s [64, BLOCK_M] and lse [1, BLOCK_M] -> (weights Pᵀ, Pᵀ times the softcap's derivative)."""
    config: gl.constexpr = consumer.shared.config
    keys = consumer.keys
    if config.SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), whose error of 1e-7 is absolute; beyond the range it is 1 or -1.
        t = 1.0 - 2.0 / (gl.exp2(s * consumer.scale) + 1.0)
        x = t * consumer.cap - lse
    else:
        x = s * consumer.scale - lse
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
    if config.SOFTCAP:
        derivative = p * (1.0 - t * t)
    else:
        derivative = p
    return p, derivative


@gluon.jit
def _blocks(
    consumer, start, end,
    dk, dv,  # [64, D] fp32
    item,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of queries of one head, those that need a mask or the others; `item` counts those of all
    heads.

    dQ of the block before is formed behind the scores of this one: by then the other consumer has left its dS.
    """
    config: gl.constexpr = consumer.shared.config
    c: gl.constexpr = consumer.INDEX
    B: gl.constexpr = config.BOXES
    shared = consumer.shared
    ring = shared.queries
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(B * BOX), 2)
    for i in range(start, end):
        if MASKED:
            block = consumer.keys.masked_block(i)
        else:
            block = i
        stage = ring.stage(item)
        # The compiler would form the descriptors of K and V once, and keep them in 50 registers.
        zero = optimisation_barrier(item * 0)
        ring.wait_full(item)
        s = _start_scores(shared.k_buffers, shared.q_buffers, stage, c + zero, B, B, config.BLOCK_M)
        shared.gradients.wait_ds(item)
        dq = _start_dq(shared, item, zero, c)
        s, dq = warpgroup_mma_wait(0, deps=[s, dq])
        shared.gradients.store_dq(dq, item, c)

        ring.wait_do(item)
        dp = _start_scores(shared.v_buffers, shared.do_buffers, stage, c + zero, B, B, config.BLOCK_M)
        lse = shared.statistics.index(2 * stage).load(S_LAYOUT)
        p, derivative = _weights(s, lse, block * config.BLOCK_M, consumer, MASKED)
        p = gl.convert_layout(p.to(DTYPE), OPERAND)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(p, run_of(shared.do_buffers, stage, B, 0, B), dv, is_async=True)

        delta = shared.statistics.index(2 * stage + 1).load(S_LAYOUT)
        ds = (derivative * (dp - delta)).to(DTYPE)
        shared.gradients.store_ds(ds, item + 1, c)
        ds = gl.convert_layout(ds, OPERAND)
        dk = warpgroup_mma(ds, run_of(shared.q_buffers, stage, B, 0, B), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        ring.release(item)
        item += 1
    return dk, dv, item


@gluon.jit
def _wait_for_other():
    """Wait for the other consumer, on a barrier that Triton itself does not use."""
    gl.inline_asm_elementwise("mov.b32 $0, 0; bar.sync 8, 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, outputs):
    """One warpgroup: dK and dV of its 64 keys, and half of what all 128 add to dQ."""
    config: gl.constexpr = shared.config
    B: gl.constexpr = config.BOXES
    D: gl.constexpr = B * BOX
    DTYPE: gl.constexpr = shared.k_buffers.dtype
    if config.SOFTCAP:
        scale = outputs.scale * (2.0 * LOG2E)
    else:
        scale = outputs.scale * LOG2E
    consumer = Consumer(INDEX, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E)
    dk = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
    item = 0
    nothing = gl.zeros([ROWS, config.BLOCK_M], DTYPE, accumulator_layout(config.BLOCK_M))
    shared.gradients.store_ds(nothing, 0, INDEX)
    for j in gl.static_range(CONSUMER_COUNT):
        wait_full(shared.k_full.index(j), 0)
    wait_full(shared.v_full.index(INDEX), 0)
    masked = keys.masked_count()
    for _ in range(sizes.group_size):
        dk, dv, item = _blocks(consumer, 0, masked, dk, dv, item, True)
        dk, dv, item = _blocks(consumer, keys.full_begin, keys.full_end, dk, dv, item, False)
    shared.gradients.wait_ds(item)
    dq = _start_dq(shared, item, 0, INDEX)
    dq = warpgroup_mma_wait(0, deps=[dq])
    shared.gradients.store_dq(dq, item, INDEX)

    # dK and dV leave through the buffers of K, which both consumers have read, and of V.
    _wait_for_other()
    key = keys.col0 + INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(D)))
    exists = (key < keys.n_keys)[:, None]
    dk = gl.where(exists, dk * outputs.sm_scale, 0.0)
    dv = gl.where(exists, dv, 0.0)
    run_of(shared.k_buffers, INDEX, B, 0, B).store(dk.to(DTYPE))
    run_of(shared.v_buffers, INDEX, B, 0, B).store(dv.to(DTYPE))
    fence_async_shared()
    end = keys.first_k + keys.n_keys
    for j in gl.static_range(B):
        k_box = buffer_of(shared.k_buffers, INDEX, j, B).reshape(outputs.dk_tensor.block_shape)
        v_box = buffer_of(shared.v_buffers, INDEX, j, B).reshape(outputs.dv_tensor.block_shape)
        start_store(
            outputs.dk_tensor, keys.b, keys.hk, keys.col0 + INDEX * ROWS, j * BOX, end, keys.n_keys, k_box,
            config.LENGTHS == PACKED,
        )  # fmt: skip
        start_store(
            outputs.dv_tensor, keys.b, keys.hk, keys.col0 + INDEX * ROWS, j * BOX, end, keys.n_keys, v_box,
            config.LENGTHS == PACKED,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _specialise(keys, sizes, shared, inputs, outputs, dq_tensor, semaphores_ptr):
    """Run both consumers, the producer and the adders. The first consumer runs on the warps that the kernel is launched
    with and takes the registers that are left."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, keys, sizes, shared, outputs)),
            (_consumer, (1, keys, sizes, shared, outputs)),
            (_producer, (keys, sizes, shared, inputs)),
            (_adder, (0, keys, sizes, shared, dq_tensor, semaphores_ptr)),
            (_adder, (1, keys, sizes, shared, dq_tensor, semaphores_ptr)),
            (idle_warps, ()),
        ],
        [4, 1, 1, 1, 1],
        [R, P, P, P, P],
    )


SIZES = (
    "heads_q", "group_size", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn", "steps_dob", "steps_dom",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _bwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # (B, H, S, D) whatever the strides, or ragged (`gluon/tma.py`)
    dk_tensor, dv_tensor,
    statistics_tensor,  # [2 * blocks of queries, BLOCK_M] fp32
    dq_tensor,  # [2 * DQ_ROWS * blocks of queries, DQ_COLUMNS] fp32
    semaphores_ptr,  # [2 * blocks of queries] int32, zeros; None unless DETERMINISTIC
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences, or twice seq_lens
    heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,  # `steps_of` each tensor
    sm_scale, scale, softcap,
    config: gl.constexpr,  # `Sm90BwdConstants`
):  # fmt: skip
    """Set up shared memory and barriers, and run the partitions."""
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
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
    dq_buffers = gl.allocate_shared_memory(gl.float32, [CONSUMER_COUNT] + dq_tensor.block_shape, dq_tensor.layout)
    full = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    queries = QueryRing(full, do_full, empty, config.STAGES)
    gradients = GradientRing(ds_buffers, dq_buffers, ds_full, dq_full, dq_empty)
    queries.init()
    gradients.init()
    for c in gl.static_range(CONSUMER_COUNT):
        mbarrier.init(k_full.index(c), count=1)
        mbarrier.init(v_full.index(c), count=1)
    fence_async_shared()
    wait_for_previous_kernels()

    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr,
    )  # fmt: skip
    keys = _key_block(gl.program_id(0), sizes, config)
    shared = Shared(config, k_buffers, v_buffers, q_buffers, do_buffers, statistics, k_full, v_full, queries, gradients)
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, sm_scale, scale, softcap)
    if config.LENGTHS == PACKED:
        if keys.col0 < keys.n_keys:
            _specialise(keys, sizes, shared, inputs, outputs, dq_tensor, semaphores_ptr)
    else:
        _specialise(keys, sizes, shared, inputs, outputs, dq_tensor, semaphores_ptr)


# ---- before and after


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _prepare_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lengths_q_ptr, lengths_k_ptr,
    statistics_ptr, dq_ptr, semaphores_ptr,
    delta_ptr,  # (B, H, Sq) or (H, Tq) fp32, for KEEP_DELTA
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim_v,
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """A block of queries: delta = rowsum(dO * O) - dLSE, beside lse for the kernel above, and zeros for dQ."""
    D: gl.constexpr = config.BLOCK_D
    DV: gl.constexpr = config.BLOCK_DV
    M: gl.constexpr = config.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    wait_for_previous_kernels()
    sizes = Sizes(heads_q, 1, batch, seqlen_q, seqlen_k, total_q, total_k, -1, -1, lengths_q_ptr, lengths_k_ptr)
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    block = pid % blocks_m
    h = pid // blocks_m % heads_q
    b = pid // blocks_m // heads_q
    first_q, _, n_queries, _ = _sequence(b, sizes, config.LENGTHS)
    row0 = block * M
    rows = row0 + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DV, layout=gl.SliceLayout(0, LAYOUT))
    if row0 < n_queries:
        at = (first_q + rows).to(gl.int64)[:, None]
        inside = (rows < n_queries)[:, None] & (columns < head_dim_v)[None, :]
        o_at = o_ptr + b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
        do_at = do_ptr + b.to(gl.int64) * stride_dob + h.to(gl.int64) * stride_doh
        o = gl.load(o_at + at * stride_om + columns[None, :], mask=inside, other=0.0)
        do = gl.load(do_at + at * stride_dom + columns[None, :], mask=inside, other=0.0)
        delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
        exists = rows < n_queries
        if config.LENGTHS == PACKED:
            of_rows = h.to(gl.int64) * total_q + first_q
        else:
            of_rows = (b * heads_q + h).to(gl.int64) * seqlen_q
        lse = gl.load(lse_ptr + of_rows + rows, mask=exists, other=float("inf"))
        if config.HAS_DLSE:
            dlse_at = dlse_ptr + b.to(gl.int64) * stride_dlb + h.to(gl.int64) * stride_dlh
            delta -= gl.load(dlse_at + (first_q + rows).to(gl.int64) * stride_dlm, mask=exists, other=0.0)
        if config.KEEP_DELTA:
            gl.store(
                delta_ptr + of_rows + rows, delta, mask=rows < (n_queries if config.LENGTHS == PACKED else seqlen_q)
            )
        number = _first_block(b, h, first_q, sizes, M, config.LENGTHS) + block
        statistics = statistics_ptr + number.to(gl.int64) * (2 * M)
        in_block = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        gl.store(statistics + in_block, lse * LOG2E)
        gl.store(statistics + M + in_block, delta)
        zeros = gl.zeros([HALF_DQ], gl.float32, FLAT)
        for part in gl.static_range(M * D // HALF_DQ):
            at = dq_ptr + number.to(gl.int64) * (M * D) + part * HALF_DQ
            gl.store(at + gl.arange(0, HALF_DQ, layout=FLAT), zeros)
        if config.DETERMINISTIC:
            for half in gl.static_range(CONSUMER_COUNT):
                gl.store(semaphores_ptr + number * CONSUMER_COUNT + half, 0)
    elif config.KEEP_DELTA and config.LENGTHS == SEQ_LENS:
        of_sample = (b * heads_q + h).to(gl.int64) * seqlen_q
        gl.store(delta_ptr + of_sample + rows, gl.zeros_like(rows).to(gl.float32), mask=rows < seqlen_q)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _convert_kernel(
    dq_ptr, lengths_q_ptr, lengths_k_ptr,
    out_ptr,
    stride_dqb, stride_dqh, stride_dqm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim,
    sm_scale,
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """Half of a block of queries, what one consumer has added up: scaled, in order, and in 16 bits."""
    M: gl.constexpr = config.BLOCK_M
    D: gl.constexpr = config.BLOCK_D
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    LAYOUT: gl.constexpr = _by_chunks(BOX)
    wait_for_previous_kernels()
    sizes = Sizes(heads_q, 1, batch, seqlen_q, seqlen_k, total_q, total_k, -1, -1, lengths_q_ptr, lengths_k_ptr)
    HALVES: gl.constexpr = M * D // HALF_DQ
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    half = pid % HALVES
    block = pid // HALVES % blocks_m
    h = pid // HALVES // blocks_m % heads_q
    b = pid // HALVES // blocks_m // heads_q
    first_q, _, n_queries, _ = _sequence(b, sizes, config.LENGTHS)
    row0 = block * M
    column0 = 0
    if D > BOX:
        column0 = half * BOX
    else:
        row0 += half * ROWS
    end = n_queries if config.LENGTHS == PACKED else seqlen_q
    number = _first_block(b, h, first_q, sizes, M, config.LENGTHS) + block
    # Behind the end of a sequence there may be no block: what is read instead is not written.
    number = gl.where(row0 < n_queries, number, 0)
    at = dq_ptr + (number.to(gl.int64) * HALVES + half) * HALF_DQ
    x = gl.load(at + gl.arange(0, HALF_DQ, layout=FLAT))
    x = x.reshape([8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([ROWS, BOX])
    x = gl.convert_layout((x * sm_scale).to(out_ptr.dtype.element_ty), LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column0 + gl.arange(0, BOX, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.where((rows < n_queries)[:, None], x, 0.0)
    out = out_ptr + h.to(gl.int64) * stride_dqh
    if config.LENGTHS == PACKED:
        out += first_q.to(gl.int64) * stride_dqm
    else:
        out += b.to(gl.int64) * stride_dqb
    inside = (rows < end)[:, None] & (columns < head_dim)[None, :]
    gl.store(out + rows.to(gl.int64)[:, None] * stride_dqm + columns[None, :], x, mask=inside)
