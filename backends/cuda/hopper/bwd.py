"""Attention backward for Hopper (sm_90): one loop for dQ, dK and dV, in Gluon.

A program takes one block of BLOCK_N = 128 keys of a head after another, and for each goes through the queries of every
head in the group. One warp finds the blocks and copies tiles to shared memory through TMA, two others add dQ to global
memory, and two warpgroups, each with 64 of the keys, do the rest. For each block of BLOCK_M queries a consumer forms

    Sᵀ = K Qᵀ,  Pᵀ = exp(Sᵀ - LSE),  dPᵀ = V dOᵀ,  dSᵀ = Pᵀ * (dPᵀ - delta),  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K

(Dao 2023, arXiv:2307.08691, algorithm 2; Shah et al. 2024, arXiv:2407.08608, for the roles). Scores lie transposed, so
that P and dS are already in registers as the left operands of the products that accumulate. dQ needs the dS of all
128 keys: consumers leave theirs in shared memory and wait for each other, and each forms half of dQ, which is added to
fp32 in global memory.

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
    LANES,
    WARPS,
    arrive_per_lane,
    idle_warps,
    optimisation_barrier,
    order_lanes,
    release,
    wait_for_previous_kernels,
    wait_for_stores,
    wait_full,
)
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_reduce_add
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.semaphore import end_turn, wait_for_turn
from diyfa.backends.cuda.hopper.bwd_configs import BOX_COLUMNS, CONSUMERS
from diyfa.backends.cuda.hopper.epilogue import _by_chunks, matrix, offset_of, store_float32
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
    direct: bool = False  # dK and dV leave from registers, in float32, to be added up


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


FIELDS = gl.constexpr(12)
WORDS = gl.constexpr(16)  # a power of two


@aggregate
class KeyBlocks:
    """How the producer tells the others which block of keys comes next: one after another in the same words.

    It writes them when all have done with the block before: adders when they have read them, consumers with the keys.
    """

    words: gl.shared_memory_descriptor  # [WORDS]
    written: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor

    @gluon.jit
    def init(self):
        mbarrier.init(self.written, count=LANES)
        mbarrier.init(self.done, count=CONSUMER_COUNT * (WARPS + 1))

    @gluon.jit
    def write(self, turn, keys, exists):
        """The producer leaves the block of this turn; `exists`: 0 behind the last."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
        fields = (
            exists, keys.b, keys.hk, keys.col0, keys.first_q, keys.first_k, keys.n_queries, keys.n_keys,
            keys.begin, keys.full_begin, keys.full_end, keys.end,
        )  # fmt: skip
        field = gl.arange(0, WORDS, layout=LAYOUT)
        words = gl.zeros_like(field)
        for i in gl.static_range(FIELDS):
            words = gl.where(field == i, fields[i], words)
        mbarrier.wait(self.done, (turn & 1) ^ 1)
        self.words.store(words)
        arrive_per_lane(self.written)

    @gluon.jit
    def read(self, turn, sizes, LENGTHS: gl.constexpr, NUM_WARPS: gl.constexpr):
        """The block of this turn, as soon as it is there, for a partition of NUM_WARPS warps -> (exists, block)."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [NUM_WARPS], [0])
        if NUM_WARPS == WARPS:
            wait_full(self.written, turn & 1)
        else:
            mbarrier.wait(self.written, turn & 1)
        words = self.words.load(LAYOUT)
        field = gl.arange(0, WORDS, layout=LAYOUT)
        fields = ()
        for i in gl.static_range(FIELDS):
            fields += (gl.sum(gl.where(field == i, words, 0), 0),)
        exists, b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end = fields
        if LENGTHS == EQUAL:  # what is the same for all blocks takes no registers
            first_q = 0
            first_k = 0
            n_queries = sizes.seqlen_q
            n_keys = sizes.seqlen_k
        keys = KeyBlock(b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end)
        return exists, keys


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

    Consumers meet once for each item of dS: who comes there with item n + 1 has done with item n, whose stage is the
    next to be written.
    """

    ds_buffers: gl.shared_memory_descriptor  # dSᵀ in boxes of 64 queries
    dq_buffers: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor  # of each consumer
    dq_empty: gl.shared_memory_descriptor

    @gluon.jit
    def init(self):
        for c in gl.static_range(CONSUMER_COUNT):
            mbarrier.init(self.dq_full.index(c), count=WARPS)
            mbarrier.init(self.dq_empty.index(c), count=1)

    @gluon.jit
    def store_ds(self, ds, item, CONSUMER: gl.constexpr):
        """A consumer leaves its dSᵀ, [64, BLOCK_M]."""
        BOXES: gl.constexpr = ds.shape[1] // ROWS
        first = (item % DS_STAGES) * CONSUMER_COUNT + CONSUMER
        run_of(self.ds_buffers, first, BOXES, 0, BOXES).store(ds)
        fence_async_shared()

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
    out_buffers: gl.shared_memory_descriptor | gl.constexpr  # through which a consumer's dV leaves, and then its dK
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
    dk_ptr: gl.tensor | gl.constexpr  # for DIRECT
    dv_ptr: gl.tensor | gl.constexpr
    sm_scale: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor


# ---- the producer, and the warp that adds dQ


@gluon.jit
def _load_keys(keys, shared, inputs):
    """Start copying a block of keys: K, then V."""
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    end_k = end_of(b, keys.first_k, keys.n_keys, inputs.steps_kb, inputs.steps_kn, config.LENGTHS)
    end_v = end_of(b, keys.first_k, keys.n_keys, inputs.steps_vb, inputs.steps_vn, config.LENGTHS)
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.k_tensor, b, keys.hk, keys.col0 + c * ROWS, end_k, keys.n_keys,
            shared.k_buffers, c, shared.k_full.index(c), config.BOXES, RAGGED,
        )  # fmt: skip
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.v_tensor, b, keys.hk, keys.col0 + c * ROWS, end_v, keys.n_keys,
            shared.v_buffers, c, shared.v_full.index(c), config.BOXES_V, RAGGED,
        )  # fmt: skip


@gluon.jit
def _load_queries(keys, h, i, item, sizes, shared, inputs):
    """Start copying the i-th block of queries of a head, its statistics and dO, as soon as a stage is free."""
    config: gl.constexpr = shared.config
    ring = shared.queries
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    end_q = end_of(b, keys.first_q, keys.n_queries, inputs.steps_qb, inputs.steps_qm, config.LENGTHS)
    end_do = end_of(b, keys.first_q, keys.n_queries, inputs.steps_dob, inputs.steps_dom, config.LENGTHS)
    first = _first_block(b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
    block = keys.block(i)
    row = block * config.BLOCK_M
    stage = ring.stage(item)
    full = ring.full.index(stage)
    ring.wait_empty(item)
    mbarrier.expect(full, 2 * config.BLOCK_M * 4)
    for j in gl.static_range(2):
        async_load(inputs.statistics_tensor, [2 * (first + block) + j, 0], full, shared.statistics.index(2 * stage + j))
    start_load(inputs.q_tensor, b, h, row, end_q, keys.n_queries, shared.q_buffers, stage, full, config.BOXES, RAGGED)
    start_load(
        inputs.do_tensor, b, h, row, end_do, keys.n_queries,
        shared.do_buffers, stage, ring.do_full.index(stage), config.BOXES_V, RAGGED,
    )  # fmt: skip


@gluon.jit
def _producer(keys, sizes, shared, inputs):
    """One warp: copy a block of keys, then block after block of queries as soon as a stage is free."""
    _load_keys(keys, shared, inputs)
    item = 0
    for g in range(sizes.group_size):
        for i in range(keys.end - keys.begin):
            _load_queries(keys, keys.hk * sizes.group_size + g, i, item, sizes, shared, inputs)
            item += 1


@gluon.jit
def _draw(scheduler, DETERMINISTIC: gl.constexpr):
    """The next block of keys. A program's first one has its own number; but if DETERMINISTIC it is drawn as well:
    programs wait for lower numbers then, which none may hold that has not started."""
    index = scheduler.next_tile(0, scheduler.draw())
    if DETERMINISTIC:
        index -= gl.num_programs(0)
    return index


@gluon.jit
def _persistent_producer(sizes, shared, inputs, key_blocks, scheduler):
    """The same for block after block of keys, which it draws and tells the others.

    The first queries of a block come before its keys, whose buffers are free later.
    """
    config: gl.constexpr = shared.config
    count = gl.cdiv(sizes.seqlen_k, config.BLOCK_N) * sizes.batch * (sizes.heads_q // sizes.group_size)
    if config.DETERMINISTIC:
        index = _draw(scheduler, True)
    else:
        index = gl.program_id(0)
    item = 0
    turn = 0
    while index < count:
        keys = _key_block(index, sizes, config)
        exists = True
        if config.LENGTHS == PACKED:
            exists = keys.col0 < keys.n_keys
        if exists:
            n = keys.end - keys.begin
            h = keys.hk * sizes.group_size
            if n > 0:
                _load_queries(keys, h, 0, item, sizes, shared, inputs)
            key_blocks.write(turn, keys, 1)
            _load_keys(keys, shared, inputs)
            for g in range(sizes.group_size):
                for i in range(gl.where(g == 0, 1, 0), n):
                    _load_queries(keys, h + g, i, item + g * n + i, sizes, shared, inputs)
            item += sizes.group_size * n
            turn += 1
        index = _draw(scheduler, config.DETERMINISTIC)
    key_blocks.write(turn, _key_block(0, sizes, config), 0)


@gluon.jit
def _adder(CONSUMER: gl.constexpr, sizes, shared, dq_tensor, semaphores_ptr, key_blocks):
    """One warp: add a consumer's half of dQ, as soon as it lies in shared memory, to what is in global memory.

    DETERMINISTIC: when it is this program's turn.
    """
    config: gl.constexpr = shared.config
    ring = shared.gradients
    full = ring.dq_full.index(CONSUMER)
    empty = ring.dq_empty.index(CONSUMER)
    item = 0
    turn = 0
    exists, keys = key_blocks.read(turn, sizes, config.LENGTHS, 1)
    while exists != 0:
        mbarrier.arrive(key_blocks.done, count=1)
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
        turn += 1
        exists, keys = key_blocks.read(turn, sizes, config.LENGTHS, 1)


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

    While P is computed dP is formed; while dS goes to shared memory, dV; while dQ does, dK.
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
        ring.wait_do(item)
        dp = _start_scores(shared.v_buffers, shared.do_buffers, stage, c + zero, B, B, config.BLOCK_M)
        s = warpgroup_mma_wait(B, deps=[s])  # dP, a product for each box, runs on
        lse = shared.statistics.index(2 * stage).load(S_LAYOUT)
        p, derivative = _weights(s, lse, block * config.BLOCK_M, consumer, MASKED)
        p = gl.convert_layout(p.to(DTYPE), OPERAND)
        dp = warpgroup_mma_wait(0, deps=[dp])
        # Before dV has started: behind that there are no registers left.
        delta = shared.statistics.index(2 * stage + 1).load(S_LAYOUT)
        dv = warpgroup_mma(p, run_of(shared.do_buffers, stage, B, 0, B), dv, is_async=True)
        ds = (derivative * (dp - delta)).to(DTYPE)
        shared.gradients.store_ds(ds, item, c)
        ds = gl.convert_layout(ds, OPERAND)
        _wait_for_other()
        dq = _start_dq(shared, item, zero, c)
        dk = warpgroup_mma(ds, run_of(shared.q_buffers, stage, B, 0, B), dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])  # dK runs on
        shared.gradients.store_dq(dq, item, c)
        dk = warpgroup_mma_wait(0, deps=[dk])
        ring.release(item)
        item += 1
    return dk, dv, item


@gluon.jit
def _wait_for_other():
    """Wait for the other consumer, on a barrier that Triton itself does not use."""
    gl.inline_asm_elementwise("mov.b32 $0, 0; bar.sync 8, 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _consumer(INDEX: gl.constexpr, sizes, shared, outputs, key_blocks):
    """One warpgroup: dK and dV of its 64 keys of each block, and half of what all 128 add to dQ."""
    config: gl.constexpr = shared.config
    B: gl.constexpr = config.BOXES
    D: gl.constexpr = B * BOX
    if config.SOFTCAP:
        scale = outputs.scale * (2.0 * LOG2E)
    else:
        scale = outputs.scale * LOG2E
    item = 0
    turn = 0
    exists, keys = key_blocks.read(turn, sizes, config.LENGTHS, WARPS)
    while exists != 0:
        consumer = Consumer(INDEX, keys, sizes, shared, outputs, scale, outputs.softcap * LOG2E)
        dk = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
        dv = gl.zeros([ROWS, D], gl.float32, accumulator_layout(D))
        for j in gl.static_range(CONSUMER_COUNT):
            wait_full(shared.k_full.index(j), turn & 1)
        wait_full(shared.v_full.index(INDEX), turn & 1)
        masked = keys.masked_count()
        for _ in range(sizes.group_size):
            dk, dv, item = _blocks(consumer, 0, masked, dk, dv, item, True)
            dk, dv, item = _blocks(consumer, keys.full_begin, keys.full_end, dk, dv, item, False)
        release(key_blocks.done)

        key = keys.col0 + INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, accumulator_layout(D)))
        there = (key < keys.n_keys)[:, None]
        dv = gl.where(there, dv, 0.0)
        dk = gl.where(there, dk * outputs.sm_scale, 0.0)
        if config.DIRECT:
            _store_direct(dk, outputs.dk_ptr, outputs.dk_tensor, keys, sizes, INDEX * ROWS, 0, config)
            _store_direct(dv, outputs.dv_ptr, outputs.dv_tensor, keys, sizes, INDEX * ROWS, 0, config)
        else:
            _store_rows(dv, outputs.dv_tensor, keys, shared.out_buffers, INDEX, config)
            _store_rows(dk, outputs.dk_tensor, keys, shared.out_buffers, INDEX, config)
        turn += 1
        exists, keys = key_blocks.read(turn, sizes, config.LENGTHS, WARPS)
    tma.store_wait(0)


@gluon.jit
def _store_rows(x, tensor, keys, buffers, c: gl.constexpr, config: gl.constexpr):
    """Write a consumer's x [64, D] through its buffer, as soon as that is free. It is read later."""
    B: gl.constexpr = config.BOXES
    tma.store_wait(0)
    run_of(buffers, c, B, 0, B).store(x.to(buffers.dtype))
    fence_async_shared()
    for j in gl.static_range(B):
        start_store(
            tensor, keys.b, keys.hk, keys.col0 + c * ROWS, j * BOX, keys.first_k + keys.n_keys, keys.n_keys,
            buffer_of(buffers, c, j, B).reshape(tensor.block_shape), config.LENGTHS == PACKED,
        )  # fmt: skip


@gluon.jit
def _store_direct(x, pointer, tensor, keys, sizes, row: gl.constexpr, column: gl.constexpr, config: gl.constexpr):
    """Write x [64, columns], an accumulator, from a program's key `row` and from `column` on."""
    rows = matrix(pointer, tensor, 0)
    PACKED_OR_EQUAL: gl.constexpr = PACKED if config.LENGTHS == PACKED else EQUAL
    offset = offset_of(rows, keys.b, keys.hk, keys.first_k, PACKED_OR_EQUAL)
    end = keys.n_keys if config.LENGTHS == PACKED else sizes.seqlen_k
    store_float32(x, rows, offset, keys.col0 + row, end, column)


@gluon.jit
def _specialise(sizes, shared, inputs, outputs, dq_tensor, semaphores_ptr, key_blocks, scheduler):
    """Run both consumers, the producer and the adders. The first consumer runs on the warps that the kernel is launched
    with and takes the registers that are left."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, sizes, shared, outputs, key_blocks)),
            (_consumer, (1, sizes, shared, outputs, key_blocks)),
            (_persistent_producer, (sizes, shared, inputs, key_blocks, scheduler)),
            (_adder, (0, sizes, shared, dq_tensor, semaphores_ptr, key_blocks)),
            (_adder, (1, sizes, shared, dq_tensor, semaphores_ptr, key_blocks)),
            (idle_warps, ()),
        ],
        [4, 1, 1, 1, 1],
        [R, P, P, P, P],
    )  # fmt: skip


SIZES = (
    "heads_q", "group_size", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn", "steps_dob", "steps_dom",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _bwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, do_tensor,  # (B, H, S, D) whatever the strides, or ragged (`gluon/tma.py`)
    dk_tensor, dv_tensor,
    dk_ptr, dv_ptr,  # of the same, for DIRECT
    statistics_tensor,  # [2 * blocks of queries, BLOCK_M] fp32
    dq_tensor,  # [2 * DQ_ROWS * blocks of queries, DQ_COLUMNS] fp32
    semaphores_ptr,  # [2 * blocks of queries] int32, zeros; None unless DETERMINISTIC
    counter_ptr,  # int32, zero: blocks of keys that programs have drawn
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
    dq_full = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [CONSUMER_COUNT, 1], BARRIER)
    queries = QueryRing(full, do_full, empty, config.STAGES)
    gradients = GradientRing(ds_buffers, dq_buffers, dq_full, dq_empty)
    queries.init()
    gradients.init()
    for c in gl.static_range(CONSUMER_COUNT):
        mbarrier.init(k_full.index(c), count=1)
        mbarrier.init(v_full.index(c), count=1)
    written = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    words = gl.allocate_shared_memory(gl.int32, [WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key_blocks = KeyBlocks(words, written, done)
    key_blocks.init()
    if config.DIRECT:
        out_buffers = None
    else:
        out_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMER_COUNT * B] + k_tensor.block_shape, k_tensor.layout)
    fence_async_shared()
    wait_for_previous_kernels()

    sizes = Sizes(
        heads_q, group_size, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
        lengths_q_ptr, lengths_k_ptr,
    )  # fmt: skip
    shared = Shared(
        config, k_buffers, v_buffers, q_buffers, do_buffers, statistics, k_full, v_full, out_buffers, queries, gradients
    )
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor,
        steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn, steps_dob, steps_dom,
    )  # fmt: skip
    outputs = Outputs(dk_tensor, dv_tensor, dk_ptr, dv_ptr, sm_scale, scale, softcap)
    scheduler = TileScheduler(counter_ptr, "dynamic")
    _specialise(sizes, shared, inputs, outputs, dq_tensor, semaphores_ptr, key_blocks, scheduler)


# ---- before and after


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _prepare_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lengths_q_ptr, lengths_k_ptr,
    statistics_ptr, dq_ptr, semaphores_ptr,
    counter_ptr,
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
    if pid == 0:
        gl.store(counter_ptr, 0)
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
    """Half of a block of queries, what one consumer has added up: scaled, in order, and in dq's dtype."""
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
