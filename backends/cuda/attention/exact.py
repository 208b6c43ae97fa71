"""NaN and infinities reach exactly the results that depend on them.

A tensor core multiplies whole tiles, and 0 * NaN is NaN: a row of V that is not finite reaches every query of a tile
that holds it, also those that a mask hides it from or that dropped it, whose weight is exactly 0. The same holds for
every product of the backward pass. Nothing but such a product can do this, and what it leaves in an accumulator stays
there: results that are finite are right. So a kernel looks at its finished accumulator once, and where a row is not
finite for no reason of its own it computes its rows again, from the log-sum-exp that it knows by then, in small
blocks whose products are `exact_dot_add`. Ordinary calls pay for the look alone, and calls without a mask and without
dropout, in which everything depends on everything, not even for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import dot, dot_add, round_to

EXACT_ROWS = tl.constexpr(16)  # rows of what is computed again: few registers
SIGN = tl.constexpr(2.0**-6)  # up to 31 pairs of one block, the signs sum up to less than half a pair


@triton.jit
def is_finite(x):
    """Elementwise; `x` of any floating-point type."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def holds_nonfinite(x):
    """Which rows of x [ROWS, COLUMNS] fp32 hold a NaN or an infinity -> bool [ROWS]."""
    return tl.sum(x * 0.0, 1) != 0.0  # a finite number times 0 is 0, anything else NaN: one multiply-add for each


@triton.jit
def any_of(flags):
    """Whether one of `flags` [ROWS] is set, a scalar.

    Where the flags of an accumulator in tensor memory (sm_100) come straight from `holds_nonfinite`, Triton 3.6 follows
    the accumulator's uses down to this scalar, asks for its layout and aborts. It does not follow the result of an
    `if`, so kernels that look at an accumulator do it inside of one: a program that visited nothing has nothing to see.
    """
    return tl.max(flags.to(tl.int32), 0) != 0


@triton.jit
def row_products(a, b, PRECISION: tl.constexpr):
    """a @ b.T in fp32, a [ROWS, D] and b [N, D]; N = 1 is a sum of products, without matrix instructions."""
    if b.shape[0] == 1:
        products = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[:, None]
    else:
        products = dot(a, tl.trans(b), PRECISION)
    return products


@triton.jit
def exact_dot_add(weights, reaches, x, acc, PRECISION: tl.constexpr):
    """acc + weights @ x over the pairs that `reaches` names, whatever x holds elsewhere.

    weights [ROWS, N] fp32, 0 where `reaches` (bool, which broadcasts to that shape) is False; x [N, COLUMNS]; acc
    [ROWS, COLUMNS] fp32. With N = 1 that is elementwise. Else the finite part is a product, and of the rest the pairs
    are counted, beside that with the sign of weight * x, in one accumulator: infinities of one sign make that infinity;
    both signs, a weight of 0 or a NaN make NaN.
    """
    if x.shape[0] == 1:
        acc += tl.where(reaches, weights * x.to(tl.float32), 0.0)
    else:
        wide = x.to(tl.float32)
        finite = is_finite(x)
        acc = dot_add(round_to(weights, x.dtype), tl.where(finite, wide, 0.0).to(x.dtype), acc, PRECISION)
        pair = tl.where(tl.broadcast_to(reaches, weights.shape), 1.0, 0.0)
        found = dot(pair.to(x.dtype), tl.where(finite, 0.0, 1.0).to(x.dtype), PRECISION)
        weight_sign = tl.where(weights > 0.0, SIGN, tl.where(weights < 0.0, -SIGN, 0.0)).to(x.dtype)
        x_sign = tl.where(finite | (wide != wide), 0.0, tl.where(wide > 0.0, 1.0, -1.0)).to(x.dtype)
        found = dot_add(weight_sign, x_sign, found, PRECISION)  # pairs + SIGN * (those of sign + less those of sign -)
        pairs = tl.floor(found + 0.5)
        infinity = tl.where(
            found == pairs * (1.0 + SIGN),
            float("inf"),
            tl.where(found == pairs * (1.0 - SIGN), float("-inf"), float("nan")),
        )
        acc += tl.where(found == 0.0, 0.0, infinity)
    return acc
