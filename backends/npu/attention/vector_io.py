"""Loads and stores of the kernels without matrix products, by pointers and masks.

Block pointers, which primitives.py uses for the operands of the cube core, compile to the same code here, but Triton
3.9 has none. Masks only cut off the end of rows and columns, which the compiler turns into shorter copies. A vector
that is stored has at least two values: triton-ascend's interpreter ignores the mask of a store of one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_pointers(
    base_ptr, rows, stride, row0, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Return (pointers, mask) of [BLOCK_ROWS, BLOCK_COLUMNS] from row `row0` on.

    The matrix has `rows` contiguous rows of COLUMNS columns, `stride` elements apart. The mask is False beyond it."""
    offs_m = tl.arange(0, BLOCK_ROWS) + row0
    offs_d = tl.arange(0, BLOCK_COLUMNS)
    pointers = base_ptr + offs_m[:, None].to(tl.int64) * stride + offs_d[None, :]
    mask = (offs_m < rows)[:, None]
    if COLUMNS != BLOCK_COLUMNS:
        mask = mask & (offs_d < COLUMNS)[None, :]
    return pointers, mask


@triton.jit
def load_block(
    base_ptr, rows, stride, row0, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Load [BLOCK_ROWS, BLOCK_COLUMNS] of a matrix, zero beyond it; see `block_pointers`."""
    pointers, mask = block_pointers(base_ptr, rows, stride, row0, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_block(
    base_ptr, block, rows, stride, row0, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Store `block` [BLOCK_ROWS, BLOCK_COLUMNS] in a matrix, except beyond it; see `block_pointers`."""
    pointers, mask = block_pointers(base_ptr, rows, stride, row0, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    tl.store(pointers, block, mask=mask)


@triton.jit
def load_values(base_ptr, row0, rows, BLOCK: tl.constexpr):
    """Load [BLOCK] values of a vector of length `rows` from `row0` on; zero beyond its end."""
    offs = tl.arange(0, BLOCK) + row0
    return tl.load(base_ptr + offs, mask=offs < rows, other=0.0)


@triton.jit
def store_values(base_ptr, values, row0, rows, BLOCK: tl.constexpr):
    """Store [BLOCK] values of a vector of length `rows` from `row0` on."""
    offs = tl.arange(0, BLOCK) + row0
    tl.store(base_ptr + offs, values, mask=offs < rows)
