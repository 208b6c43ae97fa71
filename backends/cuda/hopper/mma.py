"""The two products of the Hopper kernel, from tiles in shared memory.

A tile of K, V, Q or out has BOXES buffers, one for each TMA box, with equally many columns in TMA's swizzled layout.
Scores add up over the boxes in one accumulator. Out has the columns of V, so it is a tuple of accumulators. Each
accumulator has a run of consecutive boxes of V: 4, 2 or 1, the largest power of two first. A run has the memory layout
of a wider tile with the same swizzle, so that instructions are wider: 96 columns are 64 + 32, 224 are 128 + 64 + 32.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.gluon.compat import aggregate, reinterpret
from diyfa.backends.cuda.hopper.configs import CONSUMER_ROWS
from diyfa.backends.cuda.hopper.softmax import any_in_warp

ROWS = gl.constexpr(CONSUMER_ROWS)  # queries of one consumer: the M of one warpgroup instruction


@constexpr_function
def _runs(boxes):
    """Return the number of boxes of each accumulator's run."""
    lengths = []
    while sum(lengths) < boxes:
        lengths.append(1 << ((boxes - sum(lengths)).bit_length() - 1))
    return lengths


@constexpr_function
def run_count(boxes):
    """Return the number of accumulators for a tile of `boxes` boxes."""
    return len(_runs(boxes))


@constexpr_function
def run_start(run, boxes):
    """Return the first box of a run."""
    return sum(_runs(boxes)[:run])


@constexpr_function
def run_length(run, boxes):
    """Return the number of boxes of a run."""
    return _runs(boxes)[run]


@constexpr_function
def accumulator_layout(columns, bits=16):
    """Return the register layout of an accumulator [64, columns] of one warpgroup. `bits`: of an operand's element."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@constexpr_function
def operand_layout(accumulator, bits=16):
    """Return the register layout of the left operand of a product whose accumulator has the layout `accumulator`."""
    return gl.DotOperandLayout(0, accumulator, 32 // bits)


@constexpr_function
def buffer_count(tiles, boxes, by_runs):
    """Return the number of buffers for `tiles` tiles of `boxes` boxes. By runs, it is a multiple of the longest run."""
    longest = _runs(boxes)[0] if by_runs else 1
    return -(-tiles * boxes // longest) * longest


@constexpr_function
def _step(box, boxes):
    """Return the distance in buffers from a tile's box to that of the next tile: the length of the box's run."""
    runs = _runs(boxes)
    return next(length for i, length in enumerate(runs) if box < sum(runs[: i + 1]))


@constexpr_function
def _offset(box, boxes, tiles):
    """Return the index of the first tile's buffer for a box."""
    runs = _runs(boxes)
    before = next(sum(runs[:i]) for i in range(len(runs)) if box < sum(runs[: i + 1]))
    return before * tiles + box - before


@gluon.jit
def buffer_index(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Return the index of a box's buffer. `buffers` hold first the first runs of all tiles, then the second runs."""
    TILES: gl.constexpr = buffers.shape[0] // BOXES
    return tile * _step(BOX, BOXES) + _offset(BOX, BOXES, TILES)


@gluon.jit
def box_buffer(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Return the buffer of a box."""
    return buffers.index(buffer_index(buffers, tile, BOX, BOXES))


@gluon.jit
def box_matrix(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Return the buffer of a box as a matrix, without leading dimensions of size 1."""
    RANK: gl.constexpr = len(buffers.shape)
    return box_buffer(buffers, tile, BOX, BOXES).reshape([buffers.shape[RANK - 2], buffers.shape[RANK - 1]])


@gluon.jit
def run_matrix(buffers, tile, BOXES: gl.constexpr, RUN: gl.constexpr, USED_BOXES: gl.constexpr):
    """Return the boxes of a run as one matrix. The tile uses the first USED_BOXES of its BOXES boxes.

    Runs are powers of two, the longest first. So a run of COUNT boxes begins at a multiple of COUNT buffers. Seen as
    tiles COUNT times as wide, the buffers have it as one tile.
    """
    FIRST: gl.constexpr = run_start(RUN, USED_BOXES)
    COUNT: gl.constexpr = run_length(RUN, USED_BOXES)
    if COUNT == 1:
        run = box_matrix(buffers, tile, FIRST, BOXES)
    else:
        RANK: gl.constexpr = len(buffers.shape)
        N_ROWS: gl.constexpr = buffers.shape[RANK - 2]
        COLUMNS: gl.constexpr = buffers.shape[RANK - 1]
        TILES: gl.constexpr = buffers.shape[0] // BOXES
        WIDE: gl.constexpr = buffers.shape[0] // COUNT
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(buffers.layout.swizzle_byte_width, 16, 2)
        wide = reinterpret(buffers, buffers.dtype, [WIDE, N_ROWS, COLUMNS * COUNT], LAYOUT)
        run = wide.index(tile * (_step(FIRST, BOXES) // COUNT) + _offset(FIRST, BOXES, TILES) // COUNT)
    return run


@aggregate
class Queries:
    """The queries of a tile in shared memory. Each consumer has BOXES buffers and two barriers."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    BOXES: gl.constexpr

    @gluon.jit
    def init(self):
        for c in gl.static_range(self.CONSUMERS):
            mbarrier.init(self.full.index(c), count=1)
            mbarrier.init(self.empty.index(c), count=1)

    @gluon.jit
    def invalidate(self):
        for c in gl.static_range(self.CONSUMERS):
            mbarrier.invalidate(self.full.index(c))
            mbarrier.invalidate(self.empty.index(c))

    @gluon.jit
    def box(self, CONSUMER: gl.constexpr, BOX: gl.constexpr):
        """Return a box of a consumer's queries as a matrix [64, columns of a box]."""
        return box_matrix(self.buffers, CONSUMER, BOX, self.BOXES)

    @gluon.jit
    def wait_empty(self, CONSUMER: gl.constexpr, q_loads):
        """In the producer, wait until the consumer's buffers are free. `q_loads`: tiles of queries loaded before."""
        # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
        mbarrier.wait(self.empty.index(CONSUMER), (q_loads & 1) ^ 1)

    @gluon.jit
    def wait_full(self, CONSUMER: gl.constexpr, q_loads):
        mbarrier.wait(self.full.index(CONSUMER), q_loads & 1)

    @gluon.jit
    def release(self, CONSUMER: gl.constexpr):
        """Tell the producer that it may load the next tile's queries."""
        mbarrier.arrive(self.empty.index(CONSUMER), count=1)


@gluon.jit
def queries_in_registers(queries, CONSUMER: gl.constexpr, config):
    """Load the first Q_IN_REGISTERS boxes of a consumer's queries to registers, each [64, columns of a box].

    A product whose left operand is in shared memory reads its 64 rows for every key block. At head_dim 256 and 64 keys
    these are as many bytes as K, and both together take all the bandwidth of shared memory.

    After the return TMA may overwrite these buffers. The fence orders it behind the reads; neither a barrier of threads
    nor an arrival does.
    """
    LAYOUT: gl.constexpr = operand_layout(accumulator_layout(config.BLOCK_N, config.BITS), config.BITS)
    q = ()
    for j in gl.static_range(config.Q_IN_REGISTERS):
        q += (box_matrix(queries.buffers, CONSUMER, j, queries.BOXES).load(LAYOUT),)
    if config.Q_IN_REGISTERS > 0:
        fence_async_shared()
    return q


@gluon.jit
def start_scores(
    q,  # `queries_in_registers`
    queries, ring, item, CONSUMER: gl.constexpr, config,
):  # fmt: skip
    """Start q kᵀ, [64, BLOCK_N], summed over the boxes of the head dim. Products of int8 are int32."""
    TYPE: gl.constexpr = gl.int32 if ring.k_buffers.dtype == gl.int8 else gl.float32
    s = gl.zeros([ROWS, config.BLOCK_N], TYPE, accumulator_layout(config.BLOCK_N, config.BITS))
    for j in gl.static_range(config.BOXES):
        k = box_matrix(ring.k_buffers, ring.buffer_index(item), j, config.BOXES).permute((1, 0))
        if j < config.Q_IN_REGISTERS:
            s = warpgroup_mma(q[j], k, s, use_acc=j > 0, is_async=True)
        else:
            from_shared = box_matrix(queries.buffers, CONSUMER, j, config.BOXES)
            s = warpgroup_mma(from_shared, k, s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def in_layout_of_weights(s, config):
    """Return finished products of `start_scores` in the layout in which weights are computed.

    That is the layout of an accumulator of out. A thread has the same products as before.
    """
    return gl.convert_layout(s, accumulator_layout(config.BLOCK_N, config.BITS_V), assert_trivial=True)


@gluon.jit
def zero_sums():
    """Return zeros [64, 8]: the accumulator of the rounded weights' sums, whose columns are equal."""
    return gl.zeros([ROWS, 8], gl.float32, accumulator_layout(8))


@gluon.jit
def zero_output(WIDTH: gl.constexpr, BOXES_V: gl.constexpr, BITS: gl.constexpr = 16):
    """Return the accumulators of out, filled with zeros. BITS: of the elements of P and V."""
    o = ()
    for run in gl.static_range(run_count(BOXES_V)):
        o += (gl.zeros(
            [ROWS, WIDTH * run_length(run, BOXES_V)], gl.float32,
            accumulator_layout(WIDTH * run_length(run, BOXES_V), BITS),
        ),)  # fmt: skip
    return o


@gluon.jit
def paired(x, DTYPE: gl.constexpr, PURE: gl.constexpr):
    """Return x [64, columns] fp32 rounded to 16 bits, two in an int32: [64, columns / 2].

    Unless PURE, the compiler may not move the conversion, so that the code after it has half as many registers taken.
    """
    low, high = gl.split(x.reshape([ROWS, x.shape[1] // 2, 2]))
    if DTYPE == gl.bfloat16:  # noqa: SIM300  a type, not a constant
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=PURE, pack=1
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=PURE, pack=1
        )
    return pairs


@gluon.jit
def mma_operand(weights, o, DTYPE: gl.constexpr, PAIRS: gl.constexpr):
    """Return weights [64, BLOCK_N] fp32 in 16 bits, as the operand of `start_values` in the next iteration.

    PAIRS: as `paired` integers. If a loop carries 16-bit numbers, ptxas exchanges the halves of each register at its
    end and at its beginning: 64 of 480 instructions of a block at head_dim 64.
    """
    if PAIRS:
        p = paired(weights, DTYPE, True)
    else:
        p = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, o[0].type.layout, 2))
    return p


@gluon.jit
def unpaired(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return `paired` weights [64, BLOCK_N / 2] as [64, BLOCK_N]. Products take them as pairs, which undoes it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(low, high).reshape([ROWS, p.shape[1] * 2])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def allocate_ones(DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Allocate ones [8, BLOCK_N], by which `start_values` multiplies weights. 8 is the smallest N of a product."""
    ones = gl.allocate_shared_memory(DTYPE, [8, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    ones.store(gl.full([8, BLOCK_N], 1.0, gl.float32, LAYOUT).to(DTYPE))
    return ones


@gluon.jit
def start_values(p, o, ring, ones, item, config, use_acc=True):
    """Start adding p v to each accumulator of out; p is a `mma_operand`.

    FIXED_MAX: also start adding p times `ones` to the last one of o. So the tensor cores sum the weights as they are
    multiplied by V, rounded to 16 bits. `use_acc`: False starts the sums of V anew, whatever o holds.
    """
    started = ()
    if config.PAIRS:
        p = unpaired(p, ring.v_buffers.dtype, gl.DotOperandLayout(0, o[0].type.layout, 2))
    for run in gl.static_range(run_count(config.BOXES_V)):
        v = run_matrix(ring.v_buffers, ring.buffer_index(item), config.BOXES_V, run, config.BOXES_V)
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, o[run].type.layout, 2))  # costs nothing
        started += (warpgroup_mma(weights, v, o[run], use_acc=use_acc, is_async=True),)
    if config.FIXED_MAX:
        sums = o[run_count(config.BOXES_V)]
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2))
        started += (warpgroup_mma(weights, ones.permute((1, 0)), sums, is_async=True),)
    return started


@gluon.jit
def finish_values(o):
    """Wait for the products of a tuple of accumulators."""
    if len(o) == 1:
        done = (warpgroup_mma_wait(0, deps=[o[0]]),)
    else:
        done = warpgroup_mma_wait(0, deps=o)
    return done


@constexpr_function
def _products_unless_zero(n):
    """Return PTX that multiplies $0 to $n-1 by $2n to $3n-1, and branches past the products if $3n is 0."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.eq.s32 p, ${3 * n}, 0; @p bra.uni on; {products} on: }}"


@constexpr_function
def _in_place(n):
    """Return constraints: n results, n operands in the results' registers, n float operands, n integer operands."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def _rescaled_unless_zero(o, alpha, changed):
    """Return an accumulator with rows times alpha. A warp branches past its products if its `changed` is 0."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    ELEMENTS: gl.constexpr = o.shape[1] // 2  # elements per thread
    factor = gl.convert_layout(alpha, BY_ROW)[:, None]
    return gl.inline_asm_elementwise(
        _products_unless_zero(ELEMENTS), _in_place(ELEMENTS), [o, factor, gl.convert_layout(changed, BY_ROW)[:, None]],
        dtype=gl.float32, is_pure=True, pack=ELEMENTS,
    )  # fmt: skip


@gluon.jit
def rescaled(o, alpha):
    """Return the accumulators o with each row times its alpha.

    Each warp decides for itself whether one of its rows needs that. A common decision of four warps would make them
    wait for each other.
    """
    changed = any_in_warp(alpha)
    result = ()
    for i in gl.static_range(len(o)):
        result += (_rescaled_unless_zero(o[i], alpha, changed),)
    return result
