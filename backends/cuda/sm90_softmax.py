"""The softmax of the Hopper kernel: one step of the running (online) softmax, and exponentials without the MUFU."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
# 2^f for f in [-1/2, 1/2]: the polynomial of third degree with the least relative error, 7.5e-5 (Lawson's iteration).
# That is a sixth of the rounding of a weight to fp16, a 26th of that to bf16.
C0 = gl.constexpr(0.99992807353957)
C1 = gl.constexpr(0.69326098546403)
C2 = gl.constexpr(0.24261112219181)
C3 = gl.constexpr(0.05517166903961)
# 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
ROUNDER = gl.constexpr(12582912.0)


@gluon.jit
def _exp2_polynomial(x):
    """2^x for x <= 128 in multiply-adds: the fraction by a polynomial, the integer part added to the exponent."""
    x = gl.maximum(x, -126.0)  # below, exponents end; a weight of 2^-126 is none
    t = x + ROUNDER
    f = x - (t - ROUNDER)
    y = ((f * C3 + C2) * f + C1) * f + C0
    return (y.to(gl.int32, bitcast=True) + (t.to(gl.int32, bitcast=True) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _exp2_shared(x, POLYNOMIAL: gl.constexpr):
    """2^x for x [64, N]: every second (POLYNOMIAL 2) or fourth (1) column on the FMA units, the others on the MUFU.

    The MUFU has a fourth of the lanes, so that at head_dim 64 it takes longer than the tensor cores. Columns are told
    apart by bits 0 and 3 of their number, which no thread shares with another.
    """
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = x.type.layout
    x0, x1 = gl.split(x.reshape([ROWS, N // 2, 2]))
    if POLYNOMIAL == 2:
        p0 = gl.exp2(x0)
        p1 = _exp2_polynomial(x1)
    else:
        x00, x01 = gl.split(x0.reshape([ROWS, N // 16, 2, 4]).permute((0, 1, 3, 2)))
        x10, x11 = gl.split(x1.reshape([ROWS, N // 16, 2, 4]).permute((0, 1, 3, 2)))
        p0 = gl.join(gl.exp2(x00), gl.exp2(x01)).permute((0, 1, 3, 2)).reshape([ROWS, N // 2])
        p1 = gl.join(gl.exp2(x10), _exp2_polynomial(x11)).permute((0, 1, 3, 2)).reshape([ROWS, N // 2])
    return gl.convert_layout(gl.join(p0, p1).reshape([ROWS, N]), LAYOUT)  # costs nothing


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
    SOFTCAP: gl.constexpr, NEGATE: gl.constexpr, POLYNOMIAL: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """Products s [64, BLOCK_N] -> (weights p, maximum, running sum, factor of what was summed before, is it not 1).

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
    moved = True
    if LAZY:  # the old maximum does while no row has left it far behind: weights stay below 2^LAZY, the result exact
        moved = gl.max((m_new > m_i + LAZY).to(gl.int32), 0) > 0
        m_new = gl.where(moved, m_new, m_i)
    if MASKED:  # nothing seen so far: measure from 0 to avoid inf - inf
        m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_ref = m_new
    x = s * scale - m_ref[:, None]
    if POLYNOMIAL == 0 or MASKED:  # the polynomial does not give 0 for -inf
        p = gl.exp2(x)
    else:
        p = _exp2_shared(x, POLYNOMIAL)
    alpha = gl.exp2(m_i - m_ref)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha, moved
