"""Products of tiles and the casts around them, made right for the interpreter; compiled, they are what they say."""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.runtime.launch import is_interpreting

_INTERPRETING = tl.constexpr(is_interpreting())


@triton.jit
def dot_operand(x):
    """`x` as `tl.dot` may take it: itself, except that the interpreter multiplies bfloat16 by its bit patterns
    (it keeps bfloat16 as uint16), so there, and only there, x is widened to float32 first."""
    if _INTERPRETING and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32; PRECISION is how fp32 operands are multiplied ("ieee", "tf32")."""
    return tl.dot(dot_operand(a), dot_operand(b), input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32."""
    return tl.dot(dot_operand(a), dot_operand(b), acc, input_precision=PRECISION)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 `x` in DTYPE, rounded to nearest even. The interpreter cuts the low half off where DTYPE is bfloat16,
    and loses carries and small numbers where it is float8, so there, and only there, the rounding is done first."""
    if _INTERPRETING and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & ~0xFFFF  # bits left behind would be a number where x is 0
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)  # a NaN keeps its bits
    if _INTERPRETING and DTYPE == tl.float8e4nv:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + (0x7FFFF + ((bits >> 20) & 1))) & ~0xFFFFF).to(tl.float32, bitcast=True)
        # Below 2**-6 there are multiples of 2**-9, which adding 1.5 * 2**14 rounds to; a zero keeps its sign.
        small = ((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | ((bits >> 31) << 31)
        small = small.to(tl.float32, bitcast=True)
        x = tl.where(x == x, tl.where(tl.abs(x) < 0.015625, small, rounded), x)
    return x.to(DTYPE)
