"""Softmax of a key block, with a running maximum (online softmax) or a fixed one."""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa import eight_bits
from diyfa.backends.cuda.gluon.compat import aggregate

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_K = gl.constexpr(eight_bits.BLOCK_K)
LN2 = gl.constexpr(0.6931471805599453)
SMALLEST_SCALE = gl.constexpr(2.0**-126)  # the smallest normal number; descales of blocks may still multiply it
LARGEST_PRODUCT = gl.constexpr(2.358e38)  # about the largest number whose product with LOG2E float32 holds


@aggregate
class Score:
    """Constants that turn products of queries and keys into scores in units of log2, which `exp2` takes."""

    scale: gl.tensor
    cap: gl.tensor  # softcap
    SOFTCAP: gl.constexpr
    ALIBI: gl.constexpr
    NEGATE: gl.constexpr

    @gluon.jit
    def in_log2(self):
        """Convert the scale and softcap of the call to units of log2. With a softcap the scale stays inside tanh."""
        cap = self.cap * LOG2E
        scale = self.scale
        if not self.SOFTCAP:
            scale = scale * LOG2E
        return Score(scale, cap, self.SOFTCAP, self.ALIBI, self.NEGATE)

    @gluon.jit
    def scaled(self, factor):
        """Return these constants for products that still lack a factor, which is positive or NaN."""
        scale = self.scale * factor
        if not (self.SOFTCAP or self.ALIBI):  # keep it large enough that -inf remains a mask. A NaN stays.
            scale = gl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
        return Score(scale, self.cap, self.SOFTCAP, self.ALIBI, self.NEGATE)


@aggregate
class Rows:
    """The 64 rows of a consumer in a tile."""

    position: gl.tensor  # [64], the key that each row is aligned with
    n_keys: gl.tensor
    slope: gl.tensor | gl.constexpr  # ALiBi's, times LOG2E


@gluon.jit
def any_in_warp(alpha):
    """Return [64] int32 of factors [64]: 0 if all rows of the row's warp have the factor 1, else 1.

    A warp whose factors are all 1 need not rescale its accumulators (`rescaled` in `mma.py`).
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def reciprocal_of_exp2(x):
    """Return 1 / (2^x + 1). With it, tanh(x) = 1 - 2 / (exp(2x) + 1) has an absolute error of 1e-7, and saturates.

    The divisor is at least 1, so the bare reciprocal instruction is enough. A division has 3 more, of 15 instructions
    for a score with a softcap.
    """
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [gl.exp2(x) + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _scores(s, score):
    """Return (scores, scale) of products. Scores times this scale are in units of log2."""
    scale = score.scale
    if score.NEGATE:
        s = -s
    if score.SOFTCAP:
        s = score.cap - (2.0 * score.cap) * reciprocal_of_exp2(s * (scale * (2.0 * LOG2E)))
        scale = 1.0
    return s, scale


@gluon.jit
def split_columns(s):
    """Return the columns [1, BLOCK_N] of a block of scores as two summands: (lane's summand, compile-time constant).

    A thread's columns are 2 * (lane % 4) plus constants. A comparison or difference takes the lane's summand on the
    side of the rows, so that its other side is constant. Otherwise the columns would fill up to 32 registers.
    """
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    return columns & 6, columns & ~6


@gluon.jit
def alibi_penalty(s, start_n, rows):
    """Return what ALiBi subtracts from scores [64, BLOCK_N]: slope times the distance of query and key."""
    lane, constant = split_columns(s)
    distance = (rows.position[:, None] - lane - start_n).to(gl.float32)
    return rows.slope * gl.abs(distance - constant.to(gl.float32))


@gluon.jit
def visible_pairs(s, start_n, rows, problem):
    """Return which keys of a block of scores [64, BLOCK_N] the row sees."""
    lane, constant = split_columns(s)
    diagonal = rows.position[:, None] - lane - start_n
    if problem.CAUSAL:  # the last row is aligned with the last key, so this also excludes keys beyond the end
        is_visible = constant <= diagonal
    elif problem.HAS_RIGHT:
        is_visible = (constant <= diagonal + problem.window_right) & (constant < rows.n_keys - start_n - lane)
    else:
        is_visible = constant < rows.n_keys - start_n - lane
    if problem.HAS_LEFT:
        is_visible = is_visible & (constant >= diagonal - problem.window_left)
    return is_visible


@gluon.jit
def mask_scores(s, start_n, rows, problem):
    """Return scores [64, BLOCK_N] with -inf at keys that the row does not see."""
    return gl.where(visible_pairs(s, start_n, rows, problem), s, float("-inf"))


@gluon.jit
def _bits(s, words):
    """Return (word, bit) of each of scores [64, BLOCK_N]: the row sees the key if the word has the bit.

    `words`: [64] int32 for each 32 columns.
    """
    lane, constant = split_columns(s)
    word = words[0][:, None] >> lane
    for i in gl.static_range(1, len(words)):
        word = gl.where(constant < i * 32, word, words[i][:, None] >> lane)
    return word, 1 << (constant & 31)


@gluon.jit
def kept_pairs(s, words):
    """Return for scores [64, BLOCK_N] which bits of `words` are 1."""
    word, bit = _bits(s, words)
    return (word & bit) != 0


@gluon.jit
def kept_scores(s, words):
    """Return scores [64, BLOCK_N] with -inf where the bit of `words` is 0.

    LLVM collects the comparisons of `kept_pairs` in vectors of bits, which takes 150 instructions more for a block.
    """
    word, bit = _bits(s, words)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 b; and.b32 b, $2, $3; setp.ne.s32 p, b, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def by_column(s, factors):
    """Return the factor of each column of s [64, BLOCK_N], a number or [1, BLOCK_N]: one of `factors` each 64 columns.

    The columns of a register are known to the compiler, so choosing its factor costs nothing.
    """
    factor = factors[0]
    if len(factors) > 1:
        _, constant = split_columns(s)
        for i in gl.static_range(1, len(factors)):
            factor = gl.where(constant < i * BLOCK_K, factor, factors[i])
    return factor


@gluon.jit
def _largest_by_block(s, scales):
    """Return the maxima [64] of products s [64, BLOCK_N] times `by_column(s, scales)`, float32, for positive scales.

    Each thread finds the maximum of its products with each scale, and multiplies only that.
    """
    BLOCKS: gl.constexpr = len(scales)
    # A column is 8 * n + 2 * (lane % 4) + bit.
    columns = s.reshape([s.shape[0], BLOCKS, s.shape[1] // BLOCKS // 8, 4, 2]).permute(0, 3, 1, 2, 4)
    largest = gl.max(columns.reshape([s.shape[0], 4, BLOCKS, s.shape[1] // BLOCKS // 4]), 3)
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(1, largest.type.layout)))[None, None, :]
    scale = scales[0]
    for i in gl.static_range(1, BLOCKS):
        scale = gl.where(block < i, scale, scales[i])
    return gl.convert_layout(gl.max(gl.max(largest.to(gl.float32) * scale, 2), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def softmax_step(
    s, m_i, start_n, rows, score, problem, factors, MASKED: gl.constexpr, words=None, function=None,
    SHIFT: gl.constexpr = 0,
):  # fmt: skip
    """Return (weights p, running maximum, factor alpha of earlier sums) of products s [64, BLOCK_N], float32 or int32.

    The maximum is in units of log2. `factors`: those that products still lack, one for each 64 columns, or (). MASKED:
    a mask or the end of the keys may cut the block, so a row may see none of it. `words`: the bits of a block mask,
    which then is the only mask. `function`: a `ScoreFunction`. SHIFT: keep the maximum SHIFT lower, so that weights are
    up to 2**SHIFT.
    """
    # Factors join the scale unless a softcap or ALiBi changes scores first, or a mask does: a factor of NaN times -inf
    # would be NaN in rows that do not see the factor's keys.
    ONLY_SCALED: gl.constexpr = not (MASKED or score.SOFTCAP or score.ALIBI)
    IN_SCALE: gl.constexpr = len(factors) > 0 and ONLY_SCALED
    # Integers have an instruction for the maximum of three numbers, so their maxima take half as many instructions.
    OF_INTEGERS: gl.constexpr = s.dtype == gl.int32 and ONLY_SCALED and not score.NEGATE
    products = s
    s = s.to(gl.float32)
    if len(factors) > 0 and not IN_SCALE:
        s = s * by_column(s, factors)
    s, scale = _scores(s, score)
    if score.ALIBI:
        s = s * scale - alibi_penalty(s, start_n, rows)
        scale = 1.0
    if function is not None:
        visible = None
        if words is not None:
            visible = kept_pairs(s, words)
        elif MASKED:
            visible = visible_pairs(s, start_n, rows, problem)
        s = function.scores(s * scale, visible, start_n, rows, problem) * LOG2E
        scale = 1.0
    elif words is not None:
        s = kept_scores(s, words)
    elif MASKED:
        s = mask_scores(s, start_n, rows, problem)
    if not OF_INTEGERS:
        products = s
    if IN_SCALE:
        scales = ()
        for i in gl.static_range(len(factors)):
            scales += (scale * factors[i],)
        largest = _largest_by_block(products, scales)
        scale = by_column(s, scales)
    else:
        largest = gl.max(products, 1).to(gl.float32) * scale
    if SHIFT:
        largest -= SHIFT
    m_new = gl.maximum(m_i, largest)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)  # all scores so far are -inf: avoid inf - inf
    p = gl.exp2(s * scale - m_ref[:, None])
    return p, m_new, gl.exp2(m_i - m_ref)


@gluon.jit
def fixed_max_step(s, m_i, start_n, rows, score, factors):
    """Return weights p of products s [64, BLOCK_N] that no mask cuts, relative to the fixed maximum m_i.

    Softmax allows any reference near the row's maximum. bfloat16 weights have the range of float32, so the maximum of
    the first blocks serves for the rest of the KV loop, until a sum exceeds what float32 holds. `factors`: as in
    `softmax_step`.
    """
    s = s.to(gl.float32)
    if len(factors) > 0:
        s = s * by_column(s, factors)
    s, scale = _scores(s, score)
    x = s * scale - m_i[:, None]
    if score.ALIBI:
        x = x - alibi_penalty(s, start_n, rows)
    return gl.exp2(x)


@gluon.jit
def sums_by_thread(p):
    """Return the sums [64, 4] of weights [64, BLOCK_N] over the elements that each thread has of a row."""
    # A column is 8 * n + 2 * (lane % 4) + bit.
    columns = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]).permute(0, 2, 1, 3)
    return gl.sum(columns.reshape([p.shape[0], 4, p.shape[1] // 4]), 2)


@gluon.jit
def add_sink(lse_log2, sink):
    """Return (LSE with a sink, weight of all keys beside it), each [64]. A sink is the score of a key without a value.

    `lse_log2` is in units of log2, -inf if a row saw no key. The returned LSE has the sink's unit, natural logarithms.
    A sink that is the maximum weighs exactly 1. LOG2E times the largest sinks overflows float32: the LSE is then the
    sink itself.
    """
    is_largest = (sink > LARGEST_PRODUCT) & (sink < float("inf"))
    product = gl.where(is_largest, LARGEST_PRODUCT, sink) * LOG2E
    larger = gl.maximum(lse_log2, product)
    larger = gl.where(larger == float("-inf"), 0.0, larger)
    keys = gl.exp2(lse_log2 - larger)
    total = keys + gl.exp2(gl.where(product == larger, sink - sink, product - larger))
    lse = gl.where(is_largest, sink, (larger + gl.log2(total)) * LN2)
    return lse, gl.where(total == 0.0, 0.0, keys / total)
