"""The compiler library's rule for streaming the operands of a matrix product through the memories L0A and L0B.

These two memories do not appear in the compiler's last intermediate form: the library's `mma_tile` takes whole operands
in L1 and cuts them along k. Its rule was read from the bitcode (meta_op.aic.c220.bc of ascendnpu-ir 1.2.0, functions
mma_tile<...> of all operand types). Each memory is used as two alternating halves of 32 KiB. A slice of k is a multiple
of 16, the longest for which slice times max(m, n), rounded up to 16, fits a half. If not even 16 fit, the library
divides by zero.

This bitcode is for the 910B and 910_93. The 950's has a form that LLVM does not read.
"""

from __future__ import annotations

HALF = 32 * 1024  # bytes
ALIGNMENT = 16  # elements; a slice of k is a multiple


def longest_slice(m: int, n: int, width: int) -> int:
    """Return the longest slice of k for a product [m, k] @ [k, n] of operands of `width` bytes; 0 if none fits."""
    side = -(-max(m, n) // ALIGNMENT) * ALIGNMENT
    return HALF // width // side // ALIGNMENT * ALIGNMENT
