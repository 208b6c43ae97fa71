"""The two products of the Hopper kernel, from tiles in shared memory.

A tile of K, V, Q or out lies in BOXES buffers of as many columns each, one for each TMA box, in TMA's swizzled form.
Scores add up over the boxes in one accumulator. The columns of out are those of V, so they are a tuple of accumulators:
each for 4, 2 or 1 boxes of V that lie one behind another, the largest power of two first. That is how a wider tile of
the same swizzle lies in memory anyway, and the instructions get wider: 96 columns are 64 + 32, 224 are 128 + 64 + 32.
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
    """How many boxes each accumulator has."""
    found = []
    while sum(found) < boxes:
        found.append(1 << ((boxes - sum(found)).bit_length() - 1))
    return found


@constexpr_function
def run_count(boxes):
    """How many accumulators `boxes` have."""
    return len(_runs(boxes))


@constexpr_function
def run_start(run, boxes):
    """The first box of an accumulator."""
    return sum(_runs(boxes)[:run])


@constexpr_function
def run_length(run, boxes):
    """How many boxes an accumulator has."""
    return _runs(boxes)[run]


@constexpr_function
def accumulator_layout(columns):
    """Registers of [64, columns] of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def buffer_count(tiles, boxes, by_runs):
    """How many buffers tiles of so many boxes take: where they are read by runs, a multiple of the longest one."""
    longest = _runs(boxes)[0] if by_runs else 1
    return -(-tiles * boxes // longest) * longest


@constexpr_function
def _step(box, boxes):
    """Buffers from one tile's box to the next one's: as many as the run has that the box is in."""
    runs = _runs(boxes)
    return next(length for i, length in enumerate(runs) if box < sum(runs[: i + 1]))


@constexpr_function
def _offset(box, boxes, tiles):
    """The buffer of the first tile's box."""
    runs = _runs(boxes)
    before = next(sum(runs[:i]) for i in range(len(runs)) if box < sum(runs[: i + 1]))
    return before * tiles + box - before


@gluon.jit
def buffer_index(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The number of a box's buffer. `buffers` hold tiles of BOXES boxes: first runs of all tiles, then second ones."""
    TILES: gl.constexpr = buffers.shape[0] // BOXES
    return tile * _step(BOX, BOXES) + _offset(BOX, BOXES, TILES)


@gluon.jit
def buffer_of(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The buffer of a box."""
    return buffers.index(buffer_index(buffers, tile, BOX, BOXES))


@gluon.jit
def box_of(buffers, tile, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The same as a matrix, whatever dimensions of one the buffers have."""
    RANK: gl.constexpr = len(buffers.shape)
    return buffer_of(buffers, tile, BOX, BOXES).reshape([buffers.shape[RANK - 2], buffers.shape[RANK - 1]])


@gluon.jit
def run_of(buffers, tile, BOXES: gl.constexpr, RUN: gl.constexpr, OF: gl.constexpr):
    """The boxes of an accumulator as one matrix, of a tile of which the first OF of BOXES boxes are in use.

    Runs are powers of two, the longest first. So one of COUNT boxes begins at a multiple of COUNT buffers, and is one
    tile among all buffers seen as tiles COUNT times as wide.
    """
    FIRST: gl.constexpr = run_start(RUN, OF)
    COUNT: gl.constexpr = run_length(RUN, OF)
    if COUNT == 1:
        run = box_of(buffers, tile, FIRST, BOXES)
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
    """The queries of a tile in shared memory: BOXES buffers for each consumer, and its two barriers."""

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
    def wait_empty(self, CONSUMER: gl.constexpr, used):
        """The producer waits until a consumer has done with its queries; `used`: how many have been loaded."""
        # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
        mbarrier.wait(self.empty.index(CONSUMER), (used & 1) ^ 1)

    @gluon.jit
    def wait_full(self, CONSUMER: gl.constexpr, used):
        mbarrier.wait(self.full.index(CONSUMER), used & 1)

    @gluon.jit
    def release(self, CONSUMER: gl.constexpr):
        """The next tile's queries may come."""
        mbarrier.arrive(self.empty.index(CONSUMER), count=1)


@gluon.jit
def queries_in_registers(queries, CONSUMER: gl.constexpr, config):
    """The first Q_IN_REGISTERS boxes of a consumer's queries, each [64, columns of a box].

    A product that takes its left operand from shared memory reads 64 rows of it again for every block of keys: at
    head_dim 256 and 64 keys as many bytes as K itself, and both together as many as shared memory delivers meanwhile.

    From here on TMA may write over what was read. Without the fence it would do so while reads are still under way,
    for neither a barrier of threads nor an arrival waits for them.
    """
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(config.BLOCK_N), 2)
    q = ()
    for j in gl.static_range(config.Q_IN_REGISTERS):
        q += (box_of(queries.buffers, CONSUMER, j, queries.BOXES).load(LAYOUT),)
    if config.Q_IN_REGISTERS > 0:
        fence_async_shared()
    return q


@gluon.jit
def start_scores(
    q,  # `queries_in_registers`
    queries, ring, item, CONSUMER: gl.constexpr, config,
):  # fmt: skip
    """Start q kᵀ, [64, BLOCK_N], from its boxes along the head dim."""
    s = gl.zeros([ROWS, config.BLOCK_N], gl.float32, accumulator_layout(config.BLOCK_N))
    for j in gl.static_range(config.BOXES):
        k = box_of(ring.k_buffers, ring.buffer_of(item), j, config.BOXES).permute((1, 0))
        if j < config.Q_IN_REGISTERS:
            s = warpgroup_mma(q[j], k, s, use_acc=j > 0, is_async=True)
        else:
            from_shared = box_of(queries.buffers, CONSUMER, j, config.BOXES)
            s = warpgroup_mma(from_shared, k, s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def zero_sums():
    """The accumulator of the rounded weights' sums before the first block: [64, 8], whose columns are equal."""
    return gl.zeros([ROWS, 8], gl.float32, accumulator_layout(8))


@gluon.jit
def zero_output(WIDTH: gl.constexpr, BOXES_V: gl.constexpr):
    """Accumulators of out before the first block."""
    o = ()
    for run in gl.static_range(run_count(BOXES_V)):
        o += (gl.zeros(
            [ROWS, WIDTH * run_length(run, BOXES_V)], gl.float32,
            accumulator_layout(WIDTH * run_length(run, BOXES_V)),
        ),)  # fmt: skip
    return o


@gluon.jit
def paired(x, DTYPE: gl.constexpr, PURE: gl.constexpr):
    """x [64, columns] fp32 in 16 bits, two in an int32, [64, columns / 2]. Unless PURE at this place of the program, so
    that what follows finds half as many registers taken."""
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
    """Weights [64, BLOCK_N] fp32 in 16 bits, as the operand that `start_values` takes in the next round of the KV loop.

    PAIRS: `paired`. Carried through a loop as 16-bit numbers, ptxas exchanges the
    halves of each register at its end and again at its beginning: 64 of 480 instructions of a block at head_dim 64.
    """
    if PAIRS:
        p = paired(weights, DTYPE, True)
    else:
        p = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, o[0].type.layout, 2))
    return p


@gluon.jit
def unpaired(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, BLOCK_N / 2] pairs -> [64, BLOCK_N]; the instructions that take them again as pairs undo it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(low, high).reshape([ROWS, p.shape[1] * 2])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def allocate_ones(DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Make the columns of ones [8, BLOCK_N] that `start_values` multiplies weights by, as few as a product can have."""
    ones = gl.allocate_shared_memory(DTYPE, [8, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    ones.store(gl.full([8, BLOCK_N], 1.0, gl.float32, LAYOUT).to(DTYPE))
    return ones


@gluon.jit
def start_values(p, o, ring, ones, item, config):
    """Start adding p v to each accumulator of out; p is a `mma_operand`.

    FIXED_MAX: p times `ones` is added to the last one of o. So the tensor cores sum the weights as they multiply V,
    rounded to 16 bits.
    """
    started = ()
    if config.PAIRS:
        p = unpaired(p, ring.v_buffers.dtype, gl.DotOperandLayout(0, o[0].type.layout, 2))
    for run in gl.static_range(run_count(config.BOXES_V)):
        v = run_of(ring.v_buffers, ring.buffer_of(item), config.BOXES_V, run, config.BOXES_V)
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, o[run].type.layout, 2))  # costs nothing
        started += (warpgroup_mma(weights, v, o[run], is_async=True),)
    if config.FIXED_MAX:
        sums = o[run_count(config.BOXES_V)]
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2))
        started += (warpgroup_mma(weights, ones.permute((1, 0)), sums, is_async=True),)
    return started


@gluon.jit
def finish_values(o):
    """Wait for what was started in a tuple of accumulators."""
    if len(o) == 1:
        done = (warpgroup_mma_wait(0, deps=[o[0]]),)
    else:
        done = warpgroup_mma_wait(0, deps=o)
    return done


@constexpr_function
def _products_unless_zero(n):
    """$0 to $n-1 times $2n to $3n-1, past which a branch goes where $3n is 0."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.eq.s32 p, ${3 * n}, 0; @p bra.uni on; {products} on: }}"


@constexpr_function
def _in_place(n):
    """Constraints of n results that begin as the first n operands, n floating-point and n integer operands."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def _rescaled_unless_zero(o, alpha, changed):
    """One accumulator of out, its rows times alpha; a warp branches past its products where `changed` is 0."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    OWN: gl.constexpr = o.shape[1] // 2  # elements of a thread
    factor = gl.convert_layout(alpha, BY_ROW)[:, None]
    return gl.inline_asm_elementwise(
        _products_unless_zero(OWN), _in_place(OWN), [o, factor, gl.convert_layout(changed, BY_ROW)[:, None]],
        dtype=gl.float32, is_pure=True, pack=OWN,
    )  # fmt: skip


@gluon.jit
def rescaled(o, alpha):
    """Each row of the accumulators o times its alpha.

    Each warp looks for itself whether one of its rows needs that. All four together would have to wait for each other.
    """
    changed = any_in_warp(alpha)
    result = ()
    for i in gl.static_range(len(o)):
        result += (_rescaled_unless_zero(o[i], alpha, changed),)
    return result
