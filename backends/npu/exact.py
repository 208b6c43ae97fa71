"""NaN and infinities reach exactly the results that depend on them: what the kernels that see to it have in common.

The cube core multiplies whole tiles, and 0 * NaN is NaN: a row of V that is not finite reaches every query of a tile
that holds it, also those that a mask hides it from or that dropped it, whose weight is exactly 0. The same holds for
the products that form dq, dk and dv. Nothing but such a product can do this, and what it leaves in an accumulator stays
there: results that are finite are right.

So after the kernels with products, those of exact_out.py, exact_dq.py and exact_dkdv.py, for the vector cores alone,
look at what they wrote, and form each row anew that is not finite: a *line* (one query, or one key) against tiles of
what it sees, elementwise products and sums in fp32. What a line sees is one range of keys (or queries), so a load that
ends there leaves the rest out, and only dropout needs a select. A line is done as soon as all that was not finite has
become NaN again. Elements that were finite stay as they are. Rows that are NaN for a reason of their own, which their
log-sum-exp, delta or key tells, are not looked into, so a call whose inputs are all NaN costs hardly more than another.

A branch inside the kernels with products would cost the ordinary call less, but does not compile (docs/npu.md). Calls
without a mask and without dropout, in which everything depends on everything, launch none of this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.npu.dropout import position_words
from diyfa.backends.npu.primitives import capped_scores, load_row, store_row


@triton.jit
def nonfinite(x):
    """1.0 where x, of any floating-point type, is NaN or infinite, else 0.0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0.0, 1.0)


@triton.jit
def spoiled_rows(x):
    """1.0 for each row of x [ROWS, COLUMNS] fp32 that holds what is not finite, else 0.0: [ROWS].

    A finite number times 0 is 0, anything else NaN: a product and a sum for each element, the rest once for a row.
    """
    return nonfinite(tl.sum(x * 0.0, 1))


@triton.jit
def undecided(old, new):
    """How many elements of a line that were not finite (`old`; both [COLUMNS]) may still become anything."""
    return tl.sum(tl.where(new == new, nonfinite(old), 0.0), 0)


@triton.jit
def replaced(old, new):
    """`old` where it is finite, else `new` fp32."""
    return tl.where(nonfinite(old) > 0.0, new, old.to(tl.float32))


@triton.jit
def range_of(position, count, below, above, HAS_BELOW: tl.constexpr, HAS_ABOVE: tl.constexpr):
    """What of 0 to `count` a line at `position` sees, [lo, hi): as far as `below` below it and `above` above it.

    For a query `position` is i + Sk - Sq, below and above are the window's left and right. For a key it is j - Sk + Sq,
    and they are the right and the left.
    """
    lo = 0
    hi = count
    if HAS_BELOW:
        lo = tl.maximum(0, position - below)
    if HAS_ABOVE:
        hi = tl.minimum(count, position + above + 1)
    return lo, hi


@triton.jit
def sees_nothing(first, count, below, above, ROWS: tl.constexpr, HAS_BELOW: tl.constexpr, HAS_ABOVE: tl.constexpr):
    """Which of the lines at position `first` and the next see nothing, 1.0 or 0.0 [ROWS]; the rest as in `range_of`."""
    position = positions(first, ROWS)
    lo = tl.zeros([ROWS], tl.float32)
    hi = lo + count.to(tl.float32)
    if HAS_BELOW:
        lo = tl.maximum(lo, position - below.to(tl.float32))
    if HAS_ABOVE:
        hi = tl.minimum(hi, position + (above + 1).to(tl.float32))
    return tl.where(lo < hi, 0.0, 1.0)


@triton.jit
def load_line(base, i, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Row `i` of what lies at `base`, [BLOCK] with 0 from DIM on."""
    return load_row(base + stride.to(tl.int64) * i, 0, DIM, BLOCK)


@triton.jit
def store_line(base, i, stride, line, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store `line` [BLOCK] as row `i`."""
    store_row(base + stride.to(tl.int64) * i, line, 0, DIM, BLOCK)


@triton.jit
def load_lines(base, stride, first, end, DIM: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr):
    """Rows `first` to `first + LINES`, fp32 [LINES, BLOCK]; 0 from row `end` and from column DIM on."""
    rows = tl.make_block_ptr(base, (end, DIM), (stride, 1), (first, 0), (LINES, BLOCK), (1, 0))
    return tl.load(rows, boundary_check=(0, 1), padding_option="zero").to(tl.float32)


@triton.jit
def positions(first, LINES: tl.constexpr):
    """first, first + 1, ... as fp32 [LINES]."""
    return (tl.arange(0, LINES) + first).to(tl.float32)


@triton.jit
def line_scores(products, distance, slope, sm_scale, softcap, softcap_minus, softcap_rate, SOFTCAP: tl.constexpr,
                ALIBI: tl.constexpr):  # fmt: skip
    """Scores before the bias from sums of products [LINES] -> (s, capped), both as `primitives.score_tile` has them.

    distance [LINES] fp32: how far query and key are apart.
    """
    s = products * sm_scale
    if SOFTCAP != "":
        s = capped_scores(products, softcap, softcap_minus, softcap_rate, SOFTCAP)
    capped = s
    if ALIBI != "":
        s = s - slope * tl.abs(distance)
    return s, capped


@triton.jit
def key_bias(bias_ptr, b, h, stride_b, stride_h, stride_m, i, n0, end, LINES: tl.constexpr, BIAS: tl.constexpr):
    """The bias between query `i` and the keys from `n0` on, fp32 [LINES]; BIAS as in bias.py."""
    base = bias_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if BIAS == "qk":
        bias = load_row(base + stride_m.to(tl.int64) * i, n0, end, LINES).to(tl.float32)
    elif BIAS == "k":
        bias = load_row(base, n0, end, LINES).to(tl.float32)
    elif BIAS == "q":
        bias = tl.zeros([LINES], tl.float32) + tl.load(base + i).to(tl.float32)
    else:
        bias = tl.zeros([LINES], tl.float32) + tl.load(base).to(tl.float32)
    return bias


@triton.jit
def query_bias(bias_ptr, b, h, stride_b, stride_h, stride_m, j, sk, m0, end, LINES: tl.constexpr,
               BIAS: tl.constexpr):  # fmt: skip
    """The bias between key `j` and the queries from `m0` on, fp32 [LINES]; BIAS as in bias.py.

    A column by itself would be loaded with 32 bytes between its elements, and all that it is added to laid out so.
    """
    base = bias_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if BIAS == "qk":
        first = j // 16 * 16
        columns = tl.make_block_ptr(base, (end, sk), (stride_m, 1), (m0, first), (LINES, 16), (1, 0))
        tile = tl.load(columns, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        own = positions(first - j, 16)[None, :] == 0.0
        bias = tl.sum(tl.where(own, tile, 0.0), 1)
    elif BIAS == "q":
        bias = load_row(base, m0, end, LINES).to(tl.float32)
    elif BIAS == "k":
        bias = tl.zeros([LINES], tl.float32) + tl.load(base + j).to(tl.float32)
    else:
        bias = tl.zeros([LINES], tl.float32) + tl.load(base).to(tl.float32)
    return bias


@triton.jit
def kept_line(line_key0, line_key1, line, key0, key1, first, threshold, LINES: tl.constexpr):
    """Which weights between position `line` and those from `first` on are kept, 1.0 or 0.0 [LINES].

    The line's keys are those of rows where it is a query, and of columns where it is a key (see dropout.py).
    """
    l0, l1 = position_words(line_key0, line_key1, tl.zeros([LINES], tl.int32) + line)
    o0, o1 = position_words(key0, key1, tl.arange(0, LINES) + first)
    x = (l0 + o0) * (l1 + o1)
    return tl.where((x >> 8).to(tl.float32) >= threshold, 1.0, 0.0)
