"""The softmax of the Hopper kernel: one step, with a running maximum (online softmax) or with a fixed one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RISE = gl.constexpr(8.0)  # in units of log2: by how much scores may exceed the maximum that a lazy step measures from


@gluon.jit
def any_in_warp(alpha):
    """[64] factors -> [64] int32: 0 where all rows of the row's warp have the factor 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; mov.b32 $1, $0; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def scores_log2(s, scale, cap, SOFTCAP: gl.constexpr, NEGATE: gl.constexpr):
    """Products -> (scores, their unit): one times the other is in units of log2."""
    if NEGATE:
        s = -s
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), whose error of 1e-7 is absolute; beyond the range it is 1 or -1
        s = cap - (2.0 * cap) / (gl.exp2(s * (scale * (2.0 * LOG2E))) + 1.0)
        scale = 1.0
    return s, scale


@gluon.jit
def _columns(s):
    """The columns [1, BLOCK_N] of a block of scores in two parts: (that of the lane, a constant of the program).

    A thread's columns are those of its lane, 2 * (lane % 4), plus constants. With the lane's part on the rows' side of
    a comparison or difference the other side is a constant; else the columns would fill up to 32 registers.
    """
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    return columns & 6, columns & ~6


@gluon.jit
def _alibi(s, start_n, position, slope):
    """What ALiBi takes off scores [64, BLOCK_N]: slope times the distance of query and key."""
    lane, constant = _columns(s)
    own = (position[:, None] - lane - start_n).to(gl.float32)
    return slope * gl.abs(own - constant.to(gl.float32))


@gluon.jit
def softmax_step(
    s, m_i, l_i, start_n, position, n_keys, window_left, window_right, scale, cap, slope,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, NEGATE: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """Products s [64, BLOCK_N] -> (weights p, maximum, running sum, factor of what was summed before).

    LAZY: a row's old maximum does until scores exceed it by RISE. Weights stay below 2^RISE, which is as exact, and
    the factor is almost always 1 (FlashAttention-4 does this).

    The maximum is in units of log2, which s * scale are too; with SOFTCAP cap * tanh(s * scale). MASKED: row i stands
    at key position[i] and sees the keys from window_left before to window_right after it, maybe none.
    """
    s, scale = scores_log2(s, scale, cap, SOFTCAP, NEGATE)
    if ALIBI:
        s = s * scale - _alibi(s, start_n, position, slope)
        scale = 1.0
    if MASKED:
        lane, constant = _columns(s)
        own = position[:, None] - lane - start_n
        if CAUSAL:  # which also keeps inside the keys
            seen = constant <= own
        elif HAS_RIGHT:
            seen = (constant <= own + window_right) & (constant < n_keys - start_n - lane)
        else:
            seen = constant < n_keys - start_n - lane
        if HAS_LEFT:
            seen = seen & (constant >= own - window_left)
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    if LAZY:
        m_new = gl.where(m_new - m_i > RISE, m_new, m_i)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing but -inf so far: avoid inf - inf
    x = s * scale - m_ref[:, None]
    p = gl.exp2(x)
    alpha = gl.exp2(m_i - m_ref)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def no_sums(ROWS: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """What `fixed_max_step` begins its sums with."""
    return _by_thread(gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT))


@gluon.jit
def _by_thread(p):
    """[64, BLOCK_N] -> [64, 4]: the sum of each thread's own elements of a row."""
    # A column is 8 * n + 2 * (lane % 4) + bit.
    columns = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]).permute(0, 2, 1, 3)
    return gl.sum(columns.reshape([p.shape[0], 4, p.shape[1] // 4]), 2)


@gluon.jit
def fixed_max_step(
    s, m_i, sums, start_n, position, scale, cap, slope,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """Products s [64, BLOCK_N] that no mask cuts -> (weights p, `sums`), measured from the maximum of earlier blocks.

    The weights are exponentials of scores less any number near the row's maximum. As bfloat16 has float32's range, that
    of the first blocks will do for the rest of the walk, whatever it holds, up to a sum that float32 cannot hold.
    """
    s, scale = scores_log2(s, scale, cap, SOFTCAP, NEGATE)
    x = s * scale - m_i[:, None]
    if ALIBI:
        x = x - _alibi(s, start_n, position, slope)
    p = gl.exp2(x)
    return p, sums + _by_thread(p)


@gluon.jit
def add_sink(lse_log2, sink):
    """A row's log-sum-exp [64] once a sink has joined the sum, a key without a value, and the share of the other keys.

    Both in units of log2; -inf where a row saw no key.
    """
    larger = gl.maximum(lse_log2, sink)
    larger = gl.where(larger == float("-inf"), 0.0, larger)
    keys = gl.exp2(lse_log2 - larger)
    total = keys + gl.exp2(sink - larger)
    return larger + gl.log2(total), gl.where(total == 0.0, 0.0, keys / total)
