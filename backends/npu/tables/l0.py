"""How the compiler's library streams the operands of a matrix product through the memories L0A and L0B.

These two memories do not appear in the compiler's last intermediate form: the library's `mma_tile` takes whole operands
in L1 and cuts them along k. How it does so was read from its bitcode (meta_op.aic.c220.bc of ascendnpu-ir 1.2.0, the
functions mma_tile<...> of all operand types): each memory is used as two halves in turn, and a slice of k is the
longest multiple of 16 of which the longer of the operands' other sides, rounded up to 16, fits half of 64 KiB. Where
not even 16 fit, the library divides by zero.

That bitcode is of the 910B and 910_93. The 950's is of a form that LLVM does not read.
"""

from __future__ import annotations

HALF = 32 * 1024  # bytes
ALIGNMENT = 16  # of a slice of k


def longest_slice(m: int, n: int, width: int) -> int:
    """Return how much of k goes at a time through a product [m, k] @ [k, n] of operands of `width` bytes; 0: none."""
    side = -(-max(m, n) // ALIGNMENT) * ALIGNMENT
    return HALF // width // side // ALIGNMENT * ALIGNMENT
