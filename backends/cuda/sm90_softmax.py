"""The softmax of the Hopper kernel: one step of the running (online) softmax, and what keeps it beside a product."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def hold_back(l_i):
    """What follows in the machine code comes behind what computes l_i [64], the running sums.

    ptxas moves a wait for a product to the front of the arithmetic that was written before it, and the arithmetic runs
    when the product is over. It does not move it across a branch. This one depends on the sums and is never taken,
    because they are not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.lt.f32 p, $2, 0f00000000; setp.lt.f32 q, $3, 0f00000000; or.pred p, p, q; "
        "@!p bra on; nanosleep.u32 1; on: mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,r,r", [l_i], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def softmax_step(
    s, m_i, l_i, start_n, position, n_keys, window_left, window_right, scale, cap,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """Products s [64, BLOCK_N] -> (weights p, maximum, running sum, factor of what was summed before).

    The maximum is in units of log2, which s * scale are too; with SOFTCAP cap * tanh(s * scale). MASKED: row i stands
    at key position[i] and sees the keys from window_left before to window_right after it, maybe none.
    """
    if NEGATE:
        s = -s
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), whose error of 1e-7 is absolute; beyond the range it is 1 or -1
        s = cap - (2.0 * cap) / (gl.exp2(s * (scale * (2.0 * LOG2E))) + 1.0)
        scale = 1.0
    if MASKED:
        # A thread's columns are those of its lane, 2 * (lane % 4), plus constants. Moving the lane's part to the other
        # side leaves comparisons with constants; else the columns would fill up to 32 registers during the loop.
        columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        own = position[:, None] - (columns & 6) - start_n
        constant = columns & ~6
        if CAUSAL:  # which also keeps inside the keys
            seen = constant <= own
        elif HAS_RIGHT:
            seen = (constant <= own + window_right) & (constant < n_keys - start_n - (columns & 6))
        else:
            seen = constant < n_keys - start_n - (columns & 6)
        if HAS_LEFT:
            seen = seen & (constant >= own - window_left)
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    if MASKED:  # nothing seen so far: measure from 0 to avoid inf - inf
        m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_ref = m_new
    x = s * scale - m_ref[:, None]
    p = gl.exp2(x)
    alpha = gl.exp2(m_i - m_ref)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha
