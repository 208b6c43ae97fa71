"""Products of tiles: `tl.dot` with fp32 accumulation, made safe for Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.launch import is_interpreting

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
