"""Products of tiles and casts, with corrections for Triton's interpreter. Compiled, they are `tl.dot` and `.to`."""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.runtime.launch import is_interpreting

_INTERPRETING = tl.constexpr(is_interpreting())


@triton.jit
def dot_operand(x):
    """Return `x` as an operand of `tl.dot`.

    The interpreter stores bfloat16 as uint16 and multiplies the bit patterns, and takes NaN of e4m3 for 480. There, and
    only there, x becomes float32.
    """
    if _INTERPRETING and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    if _INTERPRETING and x.dtype == tl.float8e4nv:
        is_nan = (x.to(tl.int8, bitcast=True) & 0x7F) == 0x7F
        x = tl.where(is_nan, float("nan"), x.to(tl.float32))
    return x


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a @ b in fp32. PRECISION: how fp32 operands are multiplied ("ieee", "tf32")."""
    return tl.dot(dot_operand(a), dot_operand(b), input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b in fp32."""
    return tl.dot(dot_operand(a), dot_operand(b), acc, input_precision=PRECISION)


@triton.jit
def dot_float8(a, b):
    """Return a @ b of float8 in fp32, to be added to a sum.

    Tensor cores add products of float8 with about 14 bits. So a long sum is made of short ones: the compiler must not
    take the sum as the accumulator of the product, which it does not if the number of imprecise sums is limited.
    """
    return tl.dot(dot_operand(a), dot_operand(b), max_num_imprecise_acc=a.shape[1])


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Return float32 `x` in DTYPE, rounded to nearest even.

    The interpreter truncates to bfloat16, and loses carries and small numbers in float8. There, and only there, x is
    rounded before the cast.
    """
    if _INTERPRETING and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & ~0xFFFF  # a 0 must not become the number of its low bits
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)  # a NaN keeps its bits
    if _INTERPRETING and DTYPE == tl.float8e4nv:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + (0x7FFFF + ((bits >> 20) & 1))) & ~0xFFFFF).to(tl.float32, bitcast=True)
        # Below 2**-6, float8 has multiples of 2**-9. Adding 1.5 * 2**14 rounds to these. A zero keeps its sign.
        small = ((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | ((bits >> 31) << 31)
        small = small.to(tl.float32, bitcast=True)
        x = tl.where(x == x, tl.where(tl.abs(x) < 0.015625, small, rounded), x)
    if _INTERPRETING and DTYPE == tl.float8e5:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + (0xFFFFF + ((bits >> 21) & 1))) & ~0x1FFFFF).to(tl.float32, bitcast=True)
        # Below 2**-14 there are multiples of 2**-16.
        small = ((x + 192.0) - 192.0).to(tl.int32, bitcast=True) | ((bits >> 31) << 31)
        small = small.to(tl.float32, bitcast=True)
        x = tl.where(x == x, tl.where(tl.abs(x) < 0.00006103515625, small, rounded), x)
    return x.to(DTYPE)
