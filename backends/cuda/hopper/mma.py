"""The two products of the Hopper kernel, from tiles in shared memory: Gluon helpers of `hopper/fwd.py`.

A tile of K, V, Q or out lies in PIECES buffers of as many columns each, in TMA's swizzled form. Scores add up over the
pieces in one accumulator. The columns of out are those of V, so they are a tuple of accumulators: one for each piece of
V, or (JOINED) for 4, 2 or 1 pieces that lie one behind another, the largest power of two first. That is how a wider
tile of the same swizzle lies in memory anyway, and the instructions get wider: 96 columns are 64 + 32, 224 are
128 + 64 + 32.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from diyfa.backends.cuda.hopper.configs import CONSUMER_ROWS
from diyfa.backends.cuda.hopper.softmax import any_in_warp

ROWS = gl.constexpr(CONSUMER_ROWS)  # queries of one consumer: the M of one warpgroup instruction


@constexpr_function
def _runs(pieces, joined):
    """How many pieces each accumulator has."""
    found = []
    while sum(found) < pieces:
        found.append(1 << ((pieces - sum(found)).bit_length() - 1) if joined else 1)
    return found


@constexpr_function
def run_count(pieces, joined):
    """How many accumulators `pieces` have."""
    return len(_runs(pieces, joined))


@constexpr_function
def run_start(run, pieces, joined):
    """The first piece of an accumulator."""
    return sum(_runs(pieces, joined)[:run])


@constexpr_function
def run_length(run, pieces, joined):
    """How many pieces an accumulator has."""
    return _runs(pieces, joined)[run]


@constexpr_function
def accumulator_layout(columns):
    """Registers of [64, columns] of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def buffer_of(slot, ONE_RING: gl.constexpr):
    """Which buffer a slot is: K and V have their own, or share them all."""
    if ONE_RING:
        buffer = slot
    else:
        buffer = slot // 2
    return buffer


@gluon.jit
def tile_at(buffers, index, COUNT: gl.constexpr):
    """COUNT buffers from `index` on as one matrix, whatever dimensions of one their descriptor has."""
    RANK: gl.constexpr = len(buffers.shape)
    N_ROWS: gl.constexpr = buffers.shape[RANK - 2]
    COLUMNS: gl.constexpr = buffers.shape[RANK - 1]
    if COUNT == 1:
        tile = buffers.index(index).reshape([N_ROWS, COLUMNS])
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(buffers.layout.swizzle_byte_width, 16, 2)
        tile = buffers.index(index)._reinterpret(buffers.dtype, [N_ROWS, COLUMNS * COUNT], LAYOUT)
    return tile


@gluon.jit
def held_queries(
    q_buffers, CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr, Q_HELD: gl.constexpr
):  # fmt: skip
    """The first Q_HELD pieces of a consumer's queries, each [64, columns of a piece], in registers.

    A product that takes its left operand from shared memory reads 64 rows of it again for every block of keys: at
    head_dim 256 and 64 keys as many bytes as K itself, and both together as many as shared memory delivers meanwhile.

    From here on TMA may write over what was read: without the fence it would do so while reads are still under way,
    for neither a meeting of threads nor an arrival waits for them.
    """
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BLOCK_N), 2)
    q = ()
    for j in gl.static_range(Q_HELD):
        q += (tile_at(q_buffers, CONSUMER * PIECES + j, 1).load(LAYOUT),)
    if Q_HELD > 0:
        fence_async_shared()
    return q


@gluon.jit
def start_scores(
    q,  # `held_queries`
    q_buffers, k_buffers, k_index,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, PIECES: gl.constexpr, Q_HELD: gl.constexpr,
):  # fmt: skip
    """Start q kᵀ, [64, BLOCK_N], from its pieces along the head dim."""
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    for j in gl.static_range(PIECES):
        k = tile_at(k_buffers, k_index * PIECES + j, 1).permute((1, 0))
        if j < Q_HELD:
            s = warpgroup_mma(q[j], k, s, use_acc=j > 0, is_async=True)
        else:
            s = warpgroup_mma(tile_at(q_buffers, CONSUMER * PIECES + j, 1), k, s, use_acc=j > 0, is_async=True)
    return s


@gluon.jit
def no_values(WIDTH: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr):
    """Accumulators of out before the first block."""
    o = ()
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        o += (gl.zeros(
            [ROWS, WIDTH * run_length(run, PIECES_V, JOINED)], gl.float32,
            accumulator_layout(WIDTH * run_length(run, PIECES_V, JOINED)),
        ),)  # fmt: skip
    return o


@gluon.jit
def held(weights, o, DTYPE: gl.constexpr, PAIRS: gl.constexpr):
    """Weights [64, BLOCK_N] fp32 as they wait for the next block: in 16 bits, as the operand that `start_values` takes.

    PAIRS: two of them in an int32, [64, BLOCK_N / 2]. Carried through a loop as 16-bit numbers, ptxas exchanges the
    halves of each register at its end and again at its beginning: 64 of 480 instructions of a block at head_dim 64.
    """
    if PAIRS:
        low, high = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
        if DTYPE == gl.bfloat16:  # noqa: SIM300  a type, not a constant
            p = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1
            )
        else:
            p = gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1
            )
    else:
        p = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, o[0].type.layout, 2))
    return p


@gluon.jit
def _unpaired(p, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, BLOCK_N / 2] pairs -> [64, BLOCK_N]; the instructions that take them again as pairs undo it."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(low, high).reshape([ROWS, p.shape[1] * 2])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(DTYPE, bitcast=True)


@gluon.jit
def start_values(p, v_buffers, v_index, o, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr):
    """Start adding p v to each part of o; p is `held`."""
    started = ()
    if PAIRS:
        p = _unpaired(p, v_buffers.dtype, gl.DotOperandLayout(0, o[0].type.layout, 2))
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        v = tile_at(v_buffers, v_index * PIECES_V + run_start(run, PIECES_V, JOINED), run_length(run, PIECES_V, JOINED))
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, o[run].type.layout, 2))  # costs nothing
        started += (warpgroup_mma(weights, v, o[run], is_async=True),)
    return started


@gluon.jit
def finish_values(o, PIECES_V: gl.constexpr, JOINED: gl.constexpr):
    """Wait for what `start_values` started."""
    if run_count(PIECES_V, JOINED) == 1:
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
def rescaled(o, alpha, PIECES_V: gl.constexpr, JOINED: gl.constexpr, LAZY: gl.constexpr):
    """Each row of o times its alpha.

    LAZY: each warp for itself looks whether one of its rows needs that. All four together would wait for each other.
    """
    if LAZY:
        changed = any_in_warp(alpha)
    result = ()
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        if LAZY:
            result += (_rescaled_unless_zero(o[run], alpha, changed),)
        else:
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, o[run].type.layout))
            result += (o[run] * factor[:, None],)
    return result
