"""Code that the Hopper backward kernels share: `bwd.py`, `bwd_wide.py`, `bwd_mla.py`, and in part `bwd_wide_dq.py`.

In the first three a program owns a block of keys. Its producer warp copies K and V, and then block after block of
queries, statistics and dO. Two consumer warpgroups form P and dS from them. Each file says how its consumers
divide the work.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_load
from diyfa.backends.cuda.hopper.bwd_mask import MaskWords, allocate_mask_words
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    KeyBlock,
    Sizes,
    first_query_block,
    locate_key_block,
)
from diyfa.backends.cuda.hopper.epilogue import head_rows, store_float32
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_buffer, box_matrix, buffer_count
from diyfa.backends.cuda.hopper.softmax import LOG2E, reciprocal_of_exp2, split_columns
from diyfa.backends.cuda.hopper.tiles import sequence_end, start_load, start_store
from diyfa.backends.cuda.runtime.constants import Constants


@dataclass(frozen=True, eq=False)
class BoxConstants(Constants):
    """Constants of every kernel with products."""

    boxes: int  # TMA boxes of BOX_COLUMNS columns in a tile of Q or K
    boxes_v: int  # boxes in a tile of V or dO
    used_boxes: int  # boxes of Q and K that head_dim reaches
    used_boxes_v: int  # boxes of V and dO that head_dim_v reaches
    stages: int
    has_left: bool
    has_right: bool
    lengths: int
    softcap: bool
    alibi: bool
    consumer_registers: int
    producer_registers: int
    store_from_registers: bool  # gradients are stored in float32, from registers, to be added up later


@dataclass(frozen=True, eq=False)
class Sm90BwdConstants(BoxConstants):
    """Constants of a kernel for blocks of keys: the problem's features, the tile and the schedule (`Sm90BwdConfig`)."""

    block_m: int
    block_n: int
    deterministic: bool
    mask_q: int = 0  # queries of a block of the block mask; 0: none
    rolling: bool = False  # the kernel also converts dQ (`RollingDq`)
    form: str = "keys"  # `Sm90BwdConfig.form`
    last_columns: int = 64  # columns of a tile's last box that products use: 16, 32 or 64


@aggregate
class Shared:
    """Tiles in shared memory, and the channels through which the producer hands them to the consumers."""

    config: gl.constexpr  # `Sm90BwdConstants`
    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor
    q_buffers: gl.shared_memory_descriptor
    do_buffers: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor  # [2 * STAGES, 1, BLOCK_M]: lse in units of log2, delta
    keys: Channel  # K, of each 64 keys (`Channel.pick`)
    values: Channel  # V, of each 64 keys
    queries: Channel  # Q and the statistics. A stage that is released is free for dO as well.
    douts: Channel  # dO, which is needed later than Q
    mask_words: MaskWords | gl.constexpr  # None without a block mask

    @gluon.jit
    def lse(self, stage):
        """The lse of a stage of queries, [1, BLOCK_M]."""
        return self.statistics.index(2 * stage).load(accumulator_layout(self.config.BLOCK_M))

    @gluon.jit
    def delta(self, stage):
        """The delta of a stage of queries, [1, BLOCK_M]."""
        return self.statistics.index(2 * stage + 1).load(accumulator_layout(self.config.BLOCK_M))


@aggregate
class Inputs:
    """Tensors that the producer reads, and their `descriptor_steps` (`gluon/tma.py`)."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    do_tensor: tma.tensor_descriptor
    statistics_tensor: tma.tensor_descriptor | gl.constexpr
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
    """Tensors that the consumers write, or that only they read, and scales."""

    dk_tensor: tma.tensor_descriptor
    dv_tensor: tma.tensor_descriptor
    dk_ptr: gl.tensor | gl.constexpr  # for STORE_FROM_REGISTERS
    dv_ptr: gl.tensor | gl.constexpr
    slopes_ptr: gl.tensor | gl.constexpr  # for ALIBI
    stride_slopeb: gl.tensor | gl.constexpr
    sm_scale: gl.tensor
    scale: gl.tensor  # sm_scale, divided by the softcap if there is one
    softcap: gl.tensor


@aggregate
class Consumer:
    """One consumer warpgroup: what stays the same for all blocks of queries."""

    INDEX: gl.constexpr  # 0 or 1
    ROW: gl.constexpr  # its first key, within the block of keys
    keys: KeyBlock
    sizes: Sizes
    shared: Shared
    outputs: Outputs
    scale: gl.tensor  # `scale_in_log2`
    cap: gl.tensor  # the softcap in units of log2
    slope: gl.tensor | gl.constexpr  # ALiBi's of a query head, times LOG2E (`with_slope`)

    @gluon.jit
    def with_slope(self, g):
        """Return the consumer with ALiBi's slope of query head g of the group."""
        consumer = self
        if self.shared.config.ALIBI:
            h = self.keys.hk * self.sizes.group_size + g
            slope = gl.load(self.outputs.slopes_ptr + self.keys.b * self.outputs.stride_slopeb + h) * LOG2E
            consumer = Consumer(
                self.INDEX, self.ROW, self.keys, self.sizes, self.shared, self.outputs, self.scale, self.cap, slope
            )
        return consumer


# ---- set-up


@gluon.jit
def allocate_tiles(tensor, TILES: gl.constexpr, BOXES: gl.constexpr, BY_RUNS: gl.constexpr):
    """Buffers for TILES tiles of BOXES boxes. BY_RUNS: `run_matrix` reads them."""
    COUNT: gl.constexpr = buffer_count(TILES, BOXES, BY_RUNS)
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)


@gluon.jit
def allocate_shared(q_tensor, k_tensor, v_tensor, do_tensor, statistics_tensor, config: gl.constexpr):
    """`Shared`, with its barriers initialised."""
    KEY_TILES: gl.constexpr = config.BLOCK_N // ROWS
    k_buffers = allocate_tiles(k_tensor, KEY_TILES, config.BOXES, True)
    v_buffers = allocate_tiles(v_tensor, KEY_TILES, config.BOXES_V, True)
    q_buffers = allocate_tiles(q_tensor, config.STAGES, config.BOXES, True)
    do_buffers = allocate_tiles(do_tensor, config.STAGES, config.BOXES_V, True)
    statistics = gl.allocate_shared_memory(
        gl.float32, [2 * config.STAGES] + statistics_tensor.block_shape, statistics_tensor.layout
    )
    keys = allocate_channel(1, 1, 0, KEY_TILES)
    values = allocate_channel(1, 1, 0, KEY_TILES)
    queries = allocate_channel(config.STAGES, 2, CONSUMER_COUNT * WARPS)  # filled by the statistics and by Q
    douts = allocate_channel(config.STAGES, 1, 0)
    if config.MASK_Q > 0:
        mask_words = allocate_mask_words(config)
    else:
        mask_words = None
    return Shared(
        config, k_buffers, v_buffers, q_buffers, do_buffers, statistics, keys, values, queries, douts, mask_words
    )


# ---- the producer, and the roles of a program with one block of keys


@gluon.jit
def load_keys(keys, sizes, shared, inputs):
    """Start copying a block of keys: K, then V.

    If groups of query heads are divided (`bwd_partials.py`), `keys.hk` counts subgroups, several for each head of K.
    """
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    heads_k = inputs.k_tensor.shape[len(inputs.k_tensor.block_shape) - 3].to(gl.int32)  # K is (..., H, S, D)
    subgroups_per_head = sizes.heads_q // sizes.group_size // heads_k
    hk = keys.hk // subgroups_per_head
    end_k = sequence_end(b, keys.first_k, keys.n_keys, inputs.steps_kb, inputs.steps_kn, config.LENGTHS)
    end_v = sequence_end(b, keys.first_k, keys.n_keys, inputs.steps_vb, inputs.steps_vn, config.LENGTHS)
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.k_tensor, b, hk, keys.col0 + c * ROWS, end_k, keys.n_keys,
            shared.k_buffers, c, shared.keys.pick(c).full_barrier(0), config.BOXES, RAGGED,  # one stage, so any item
        )  # fmt: skip
    for c in gl.static_range(config.BLOCK_N // ROWS):
        start_load(
            inputs.v_tensor, b, hk, keys.col0 + c * ROWS, end_v, keys.n_keys,
            shared.v_buffers, c, shared.values.pick(c).full_barrier(0), config.BOXES_V, RAGGED,
        )  # fmt: skip


@gluon.jit
def load_queries(keys, h, i, item, sizes, shared, inputs):
    """Wait for a free stage, and start copying the i-th block of queries of head h, its statistics and its dO."""
    config: gl.constexpr = shared.config
    RAGGED: gl.constexpr = config.LENGTHS != EQUAL
    b = keys.b
    end_q = sequence_end(b, keys.first_q, keys.n_queries, inputs.steps_qb, inputs.steps_qm, config.LENGTHS)
    end_do = sequence_end(b, keys.first_q, keys.n_queries, inputs.steps_dob, inputs.steps_dom, config.LENGTHS)
    first = first_query_block(b, h, keys.first_q, sizes, config.BLOCK_M, config.LENGTHS)
    block = keys.block(i)
    row = block * config.BLOCK_M
    stage = shared.queries.stage(item)
    full = shared.queries.full_barrier(item)
    shared.queries.acquire(item)
    mbarrier.expect(full, 2 * config.BLOCK_M * 4)
    for j in gl.static_range(2):
        async_load(inputs.statistics_tensor, [2 * (first + block) + j, 0], full, shared.statistics.index(2 * stage + j))
    start_load(inputs.q_tensor, b, h, row, end_q, keys.n_queries, shared.q_buffers, stage, full, config.BOXES, RAGGED)
    start_load(
        inputs.do_tensor, b, h, row, end_do, keys.n_queries,
        shared.do_buffers, stage, shared.douts.full_barrier(item), config.BOXES_V, RAGGED,
    )  # fmt: skip


@gluon.jit
def _producer(keys, sizes, shared, inputs):
    """One warp: copy the program's block of keys, then all blocks of queries of all heads of the group."""
    load_keys(keys, sizes, shared, inputs)
    item = 0
    for g in range(sizes.group_size):
        for i in range(keys.end - keys.begin):
            load_queries(keys, keys.hk * sizes.group_size + g, i, item, sizes, shared, inputs)
            item += 1


@gluon.jit
def _consumer(INDEX: gl.constexpr, keys, sizes, shared, exchange, outputs):
    """Run a consumer of the kernel that `exchange` belongs to. A partition is a function, not a method."""
    exchange.consume(INDEX, keys, sizes, shared, outputs)


@gluon.jit
def _run_roles(keys, sizes, shared, exchange, inputs, outputs):
    """Run the producer and both consumers until the block of keys is done."""
    config: gl.constexpr = shared.config
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (0, keys, sizes, shared, exchange, outputs)),
            (_consumer, (1, keys, sizes, shared, exchange, outputs)),
            (_producer, (keys, sizes, shared, inputs)),
            (idle_warps, ()),
            (idle_warps, ()),
        ],
        [4, 1, 1, 2],
        [R, P, P, P],
    )


@gluon.jit
def run_key_block(sizes, shared, exchange, inputs, outputs):
    """Run the producer, and `exchange.consume` on both consumers, for the one block of keys of this program."""
    keys = locate_key_block(gl.program_id(0), sizes, shared.config)
    if shared.config.LENGTHS == PACKED:
        if keys.col0 < keys.n_keys:
            _run_roles(keys, sizes, shared, exchange, inputs, outputs)
    else:
        _run_roles(keys, sizes, shared, exchange, inputs, outputs)


# ---- the consumers


@constexpr_function
def box_width(box, boxes, last_columns):
    """How many columns of a box the products use, in a tile of `boxes` boxes."""
    return last_columns if box == boxes - 1 else 64


@gluon.jit
def used_columns(
    buffers, tile, j: gl.constexpr, USED: gl.constexpr, BOXES: gl.constexpr, LAST_COLUMNS: gl.constexpr
):  # fmt: skip
    """The columns of box j of a tile that products use, where they use USED of BOXES boxes."""
    return box_matrix(buffers, tile, j, BOXES).slice(0, box_width(j, USED, LAST_COLUMNS), 1)


@gluon.jit
def start_product(
    left, left_tile, right, right_tile, USED: gl.constexpr, BOXES: gl.constexpr, COLUMNS: gl.constexpr,
    LAST_COLUMNS: gl.constexpr = BOX,
):  # fmt: skip
    """Start left rightᵀ, [64, COLUMNS], of two tiles of BOXES boxes.

    The sum is over the first USED boxes of columns, and of the last of these over its first LAST_COLUMNS columns.
    """
    s = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    for j in gl.static_range(USED):
        a = used_columns(left, left_tile, j, USED, BOXES, LAST_COLUMNS)
        b = used_columns(right, right_tile, j, USED, BOXES, LAST_COLUMNS)
        s = warpgroup_mma(a, b.permute((1, 0)), s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def scale_in_log2(scale, SOFTCAP: gl.constexpr):
    """Return the `scale` of `exponents`. The 2: with a softcap, `exponents` forms tanh(x) from exp(2x)."""
    return scale * (2.0 * LOG2E) if SOFTCAP else scale * LOG2E


@gluon.jit
def exponents(s, lse, scale, cap, SOFTCAP: gl.constexpr):
    """Return (x, t) of products s: x, the scores minus lse in units of log2; t, the tanh of the softcap, or 0."""
    if SOFTCAP:
        t = 1.0 - 2.0 * reciprocal_of_exp2(s * scale)
        x = t * cap - lse
    else:
        t = 0.0
        x = s * scale - lse
    return x, t


@gluon.jit
def with_derivative(p, t, SOFTCAP: gl.constexpr):
    """Weights p times the derivative of the softcap, whose tanh is t."""
    return p * (1.0 - t * t) if SOFTCAP else p


@gluon.jit
def _positions(s, start_m, consumer):
    """Return (key [64, 1], diagonal [64, 1], column [1, BLOCK_M]) of a block of scores, whose columns are queries.

    A row's key is aligned with the query in its column `diagonal`. A thread's columns are constants plus a summand that
    depends on its lane (`split_columns`). Both results are without the summand: `column` has only the constant, which
    the compiler knows, and the summand is subtracted from `diagonal`. So both compare as the real columns do.
    """
    keys = consumer.keys
    lane, column = split_columns(s)
    key = keys.col0 + consumer.ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))[:, None]
    return key, key - (keys.n_keys - keys.n_queries) - start_m - lane, column


@gluon.jit
def softmax_weights(s, lse, start_m, consumer, MASKED: gl.constexpr, words_item=0):
    """Products s [64, BLOCK_M] and lse [1, BLOCK_M] -> (weights Pᵀ, Pᵀ times the softcap's derivative).

    `start_m`: the first query. `words_item`: with a block mask, the block's item of `MaskWords`.
    """
    config: gl.constexpr = consumer.shared.config
    keys = consumer.keys
    x, t = exponents(s, lse, consumer.scale, consumer.cap, config.SOFTCAP)
    if config.ALIBI:
        _, diagonal, column = _positions(s, start_m, consumer)
        x = x - consumer.slope * gl.abs(diagonal.to(gl.float32) - column.to(gl.float32))
    if MASKED and config.MASK_Q == 0:
        key, diagonal, column = _positions(s, start_m, consumer)
        is_visible = (key < keys.n_keys) & (column >= 0)  # the second is always true: it gives the shape of s
        if config.HAS_RIGHT:
            is_visible = is_visible & (column >= diagonal - consumer.sizes.window_right)
        if config.HAS_LEFT:
            is_visible = is_visible & (column <= diagonal + consumer.sizes.window_left)
        x = gl.where(is_visible, x, float("-inf"))
    p = gl.exp2(x)
    if MASKED and config.MASK_Q > 0:  # not before the exponential: the words would need registers beside x
        p = gl.where(consumer.shared.mask_words.visible_pairs(words_item, s, consumer.INDEX), p, 0.0)
    return p, with_derivative(p, t, config.SOFTCAP)


# ---- dK and dV leave


@gluon.jit
def finished_rows(x, factor, consumer):
    """An accumulator of dK or dV, [64, columns], times a factor, with zeros in rows beyond the last key."""
    keys = consumer.keys
    key = keys.col0 + consumer.ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    return gl.where((key < keys.n_keys)[:, None], x * factor, 0.0)


@gluon.jit
def store_boxes(
    tensor, buffers, tile, consumer, FIRST: gl.constexpr, COUNT: gl.constexpr, BOXES: gl.constexpr, USED: gl.constexpr
):
    """Start writing COUNT boxes, from box FIRST on, of a tile in `buffers` as a consumer's rows of dK or dV.

    Boxes from USED on lie beyond head_dim and are not written.
    """
    keys = consumer.keys
    for j in gl.static_range(FIRST, FIRST + COUNT):
        if j < USED:
            start_store(
                tensor, keys.b, keys.hk, keys.col0 + consumer.ROW, j * BOX, keys.first_k + keys.n_keys, keys.n_keys,
                box_buffer(buffers, tile, j, BOXES).reshape(tensor.block_shape),
                consumer.shared.config.LENGTHS == PACKED,
            )  # fmt: skip


@gluon.jit
def store_from_registers(x, pointer, tensor, consumer, column: gl.constexpr):
    """Write x [64, columns], an accumulator, as a consumer's rows of dK or dV, from `column` on."""
    IS_PACKED: gl.constexpr = consumer.shared.config.LENGTHS == PACKED
    keys = consumer.keys
    rows = head_rows(pointer, tensor, keys.b, keys.hk, keys.first_k, IS_PACKED)
    end = keys.n_keys if IS_PACKED else consumer.sizes.seqlen_k
    store_float32(x, rows, keys.col0 + consumer.ROW, end, column)
