"""The softmax: one step of it, with a running maximum (online softmax) or with a fixed one."""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.compat import aggregate

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LARGEST_PRODUCT = gl.constexpr(2.358e38)  # about the largest that float32 holds times LOG2E


@aggregate
class Score:
    """How products of queries and keys become scores in units of log2, which `exp2` takes."""

    scale: gl.tensor
    cap: gl.tensor  # of a softcap
    SOFTCAP: gl.constexpr
    ALIBI: gl.constexpr
    NEGATE: gl.constexpr

    @gluon.jit
    def in_log2(self):
        """Made from the scale and softcap of the call. With a softcap the inputs' scale stays inside tanh."""
        cap = self.cap * LOG2E
        scale = self.scale
        if not self.SOFTCAP:
            scale = scale * LOG2E
        return Score(scale, cap, self.SOFTCAP, self.ALIBI, self.NEGATE)


@aggregate
class Rows:
    """A consumer's rows of a tile."""

    position: gl.tensor  # [64], the key that each is aligned with
    n_keys: gl.tensor
    slope: gl.tensor | gl.constexpr  # of ALiBi


@gluon.jit
def any_in_warp(alpha):
    """[64] factors -> [64] int32: 0 where all rows of the row's warp have the factor 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def reciprocal_of_exp2(x):
    """1 / (2^x + 1). tanh(x) is 1 - 2 / (exp(2x) + 1), whose error of 1e-7 is absolute; beyond the range 1 or -1.

    The divisor is at least 1, so the reciprocal instruction needs none of what surrounds it in a division: 3 of the 15
    instructions that a score with a softcap takes.
    """
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [gl.exp2(x) + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _scores(s, score):
    """Products -> (scores, their unit): one times the other is in units of log2."""
    scale = score.scale
    if score.NEGATE:
        s = -s
    if score.SOFTCAP:
        s = score.cap - (2.0 * score.cap) * reciprocal_of_exp2(s * (scale * (2.0 * LOG2E)))
        scale = 1.0
    return s, scale


@gluon.jit
def _columns(s):
    """The columns [1, BLOCK_N] of a block of scores as two summands: (that of the lane, a constant of the program).

    A thread's columns are those of its lane, 2 * (lane % 4), plus constants. With the lane's part on the rows' side of
    a comparison or difference the other side is a constant; else the columns would fill up to 32 registers.
    """
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    return columns & 6, columns & ~6


@gluon.jit
def _alibi(s, start_n, rows):
    """What ALiBi takes off scores [64, BLOCK_N]: slope times the distance of query and key."""
    lane, constant = _columns(s)
    own = (rows.position[:, None] - lane - start_n).to(gl.float32)
    return rows.slope * gl.abs(own - constant.to(gl.float32))


@gluon.jit
def mask_scores(s, start_n, rows, problem):
    """Scores [64, BLOCK_N] with -inf for what the rows do not see."""
    lane, constant = _columns(s)
    own = rows.position[:, None] - lane - start_n
    if problem.CAUSAL:  # which also keeps inside the keys
        seen = constant <= own
    elif problem.HAS_RIGHT:
        seen = (constant <= own + problem.window_right) & (constant < rows.n_keys - start_n - lane)
    else:
        seen = constant < rows.n_keys - start_n - lane
    if problem.HAS_LEFT:
        seen = seen & (constant >= own - problem.window_left)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def softmax_step(s, m_i, start_n, rows, score, problem, MASKED: gl.constexpr):
    """Products s [64, BLOCK_N] -> (weights p, running maximum, factor of what was summed before).

    The maximum is in units of log2. MASKED: a mask or the end of the keys cuts the block; a row may see none of it.
    """
    s, scale = _scores(s, score)
    if score.ALIBI:
        s = s * scale - _alibi(s, start_n, rows)
        scale = 1.0
    if MASKED:
        s = mask_scores(s, start_n, rows, problem)
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing but -inf so far: avoid inf - inf
    p = gl.exp2(s * scale - m_ref[:, None])
    return p, m_new, gl.exp2(m_i - m_ref)


@gluon.jit
def fixed_max_step(s, m_i, start_n, rows, score):
    """Products s [64, BLOCK_N] that no mask cuts -> weights p, measured from the maximum of earlier blocks.

    The weights are exponentials of scores less any number near the row's maximum. As bfloat16 has float32's range, that
    of the first blocks will do for the rest of the KV loop, whatever it holds, up to a sum that float32 cannot hold.
    """
    s, scale = _scores(s, score)
    x = s * scale - m_i[:, None]
    if score.ALIBI:
        x = x - _alibi(s, start_n, rows)
    return gl.exp2(x)


@gluon.jit
def sums_by_thread(p):
    """Sum each thread's own elements of each row: weights [64, BLOCK_N] -> [64, 4]."""
    # A column is 8 * n + 2 * (lane % 4) + bit.
    columns = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]).permute(0, 2, 1, 3)
    return gl.sum(columns.reshape([p.shape[0], 4, p.shape[1] // 4]), 2)


@gluon.jit
def add_sink(lse_log2, sink):
    """A row's log-sum-exp [64] once a sink has joined the sum, a key without a value, and the share of the other keys.

    The first comes in units of log2, -inf where a row saw no key, and leaves in those of the sink. As in `add_sink` of
    the portable kernel, the largest sinks have no product in float32, and a sink that is the maximum weighs 1.
    """
    is_largest = (sink > LARGEST_PRODUCT) & (sink < float("inf"))
    product = gl.where(is_largest, LARGEST_PRODUCT, sink) * LOG2E
    larger = gl.maximum(lse_log2, product)
    larger = gl.where(larger == float("-inf"), 0.0, larger)
    keys = gl.exp2(lse_log2 - larger)
    total = keys + gl.exp2(gl.where(product == larger, sink - sink, product - larger))
    lse = gl.where(is_largest, sink, (larger + gl.log2(total)) * LN2)
    return lse, gl.where(total == 0.0, 0.0, keys / total)
