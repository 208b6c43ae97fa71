"""The compiler library's rule for streaming the operands of a matrix product through the memories L0A and L0B.

These two memories do not appear in the compiler's last intermediate form: the library's `mma_tile` takes whole operands
in L1 and cuts them along k. Its rule was read from the bitcode (meta_op.aic.c220.bc of ascendnpu-ir 1.2.0, functions
mma_tile<...> of all operand types). Each memory is used as two alternating halves of 32 KiB. A slice of k is a multiple
of 16, of int8 of 32, the longest for which slice times max(m, n), rounded up to the same multiple, fits a half. If not
even one multiple fits, the library divides by zero.

This bitcode is for the 910B and 910_93. The 950's has a form that LLVM does not read.
"""

from __future__ import annotations

HALF = 32 * 1024  # bytes


def alignment(width: int) -> int:
    """Return the elements of which a slice of k is a multiple: a fractal has 16 rows of 32 bytes."""
    return max(16, 32 // width)


def longest_slice(m: int, n: int, width: int) -> int:
    """Return the longest slice of k for a product [m, k] @ [k, n] of operands of `width` bytes; 0 if none fits."""
    multiple = alignment(width)
    side = -(-max(m, n) // multiple) * multiple
    return HALF // width // side // multiple * multiple
