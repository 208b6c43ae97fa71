"""What differs between the Ascend compiler, Triton's interpreter and mainline Triton: decided here and nowhere else.

Triton reads `TRITON_INTERPRET` when a kernel is decorated, so this module does the same when it is imported.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import metadata

# In the interpreter the kernels run on CPU memory. Its `tl.dot` of bfloat16 multiplies bit patterns, so the kernels
# widen bfloat16 operands there (the INTERPRET flag); float32 products of bfloat16 values are what the cube unit forms.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Programs of the persistent grid in the interpreter: few, so that each one walks over several tiles.
INTERPRETER_PROGRAMS = 3


@lru_cache(maxsize=1)
def has_ascend_compiler() -> bool:
    """Whether the installed package `triton` is triton-ascend."""
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        return False
    return True


def padded_head_dim(head_dim: int) -> int:
    """Feature columns of a tile: the next multiple of 16, the cube unit's fractal; a power of two in mainline Triton,
    whose block shapes allow nothing else."""
    if has_ascend_compiler():
        return -(-head_dim // 16) * 16
    return max(16, 1 << (head_dim - 1).bit_length())
