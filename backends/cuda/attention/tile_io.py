"""Loads and stores of tiles of one head, for all attention kernels.

A tile is [BLOCK_ROWS, BLOCK_D]: consecutive rows (tokens) of one head, the feature dimension padded to a power of two.
It has one of these forms, which only this file distinguishes:

* POINTER: plain addresses and masks.
* PORTABLE: `tl.make_block_ptr`, which is readable and whose edges the compiler checks. Triton has it up to 3.8. From
  3.9 on it is POINTER, so that one binary serves all versions.
* DESCRIPTOR: a TMA descriptor of the whole tensor, made on the host (sm_90 and later). The hardware computes addresses
  and fills what is outside with zeros, which takes neither registers nor instructions.
* WIDENED: PORTABLE, and the tile becomes float32 as it is read, for GPUs whose products are multiply-adds on float32.
  Otherwise Triton 3.6 widens an operand before each product. docs/cuda.md says what that costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import round_to
from diyfa.backends.cuda.runtime.versions import TRITON
from diyfa.problem import AttentionProblem

POINTER = tl.constexpr(0)
PORTABLE = tl.constexpr(1)  # for every GPU without TMA, and for tensors that TMA cannot describe
DESCRIPTOR = tl.constexpr(2)
WIDENED = tl.constexpr(3)
# Triton 3.9 still has the name but raises when it is used.
_HAS_BLOCK_POINTERS = tl.constexpr(TRITON < (3, 9) and hasattr(tl, "make_block_ptr"))

# Lengths of the sequences: those of the tensors, those of `seq_lens`, or packed with cu_seqlens.
EQUAL = tl.constexpr(0)
SEQ_LENS = tl.constexpr(1)
PACKED = tl.constexpr(2)
# For keys only: they are in a cache, with a number of keys for each sequence (`hopper/tiles.py`).
CACHED = tl.constexpr(3)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Start of the running maximum. It is finite: exp2(-inf - m) is 0 and not NaN if all scores of a row so far are -inf. No
# finite score is lower.
LOWEST = tl.constexpr(-3.4028234663852886e38)
LARGEST_PRODUCT = tl.constexpr(2.358e38)  # about the largest number whose product with LOG2E float32 holds


def lengths_constant(problem: AttentionProblem) -> int:
    """Return the kernels' LENGTHS constant."""
    return (PACKED if problem.varlen else SEQ_LENS if problem.seq_lens else EQUAL).value


def padded_head_dim(head_dim: int) -> int:
    """Return the width of a tile: the next power of two, at least 16 (the smallest that a matrix instruction takes)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def cdiv(n: int, block: int) -> int:
    """Return the number of blocks that cover n."""
    return -(-n // block)


@triton.jit
def head_view(ref, strides, position, FORM: tl.constexpr, c: tl.constexpr):
    """Return the `head` that `load_tile` and `store_tile` take.

    `position`: (sample, head, first row of the sequence if packed, number of rows). A descriptor covers all heads and
    is not changed.
    """
    stride_b, stride_h, stride_row = strides
    b, h, first, n_rows = position
    if FORM != DESCRIPTOR:
        ref = ref + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        if c.LENGTHS == PACKED:
            ref = ref + first.to(tl.int64) * stride_row
    return ref, b, h, first, n_rows, stride_row


@triton.jit
def load_tile(
    head, row0, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr, FORM: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Load rows [row0, row0 + BLOCK_ROWS) of a head: [BLOCK_ROWS, BLOCK_D].

    Elements beyond the head's rows (with CHECK_ROWS) or HEAD_DIM are zero. A descriptor knows only the tensor's end: if
    sequences are shorter (LENGTHS), it also loads the memory's rows beyond them.
    """
    ref, b, h, first, n_rows, stride_row = head
    if FORM == DESCRIPTOR:
        if c.LENGTHS == PACKED:
            tile = ref.load([0, h, first + row0, 0]).reshape(BLOCK_ROWS, BLOCK_D)
        else:
            tile = ref.load([b, h, row0, 0]).reshape(BLOCK_ROWS, BLOCK_D)
    elif _HAS_BLOCK_POINTERS and FORM != POINTER:
        block = tl.make_block_ptr(ref, (n_rows, HEAD_DIM), (stride_row, 1), (row0, 0), (BLOCK_ROWS, BLOCK_D), (1, 0))
        if CHECK_ROWS and HEAD_DIM != BLOCK_D:
            tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
        elif CHECK_ROWS:
            tile = tl.load(block, boundary_check=(0,), padding_option="zero")
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(block, boundary_check=(1,), padding_option="zero")
        else:
            tile = tl.load(block)
    else:
        rows = row0 + tl.arange(0, BLOCK_ROWS)
        cols = tl.arange(0, BLOCK_D)
        addresses = ref + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
        if CHECK_ROWS and HEAD_DIM != BLOCK_D:
            tile = tl.load(addresses, mask=(rows[:, None] < n_rows) & (cols[None, :] < HEAD_DIM), other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(addresses, mask=rows[:, None] < n_rows, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(addresses, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            tile = tl.load(addresses)
    if FORM == WIDENED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_tile(head, tile, row0, HEAD_DIM: tl.constexpr, FORM: tl.constexpr):
    """Write [BLOCK_ROWS, BLOCK_D] to a head, within its rows and HEAD_DIM, in the destination's dtype.

    Results are always written through addresses: for one write at the end of a program TMA does not pay.
    """
    base, _, _, _, n_rows, stride_row = head
    BLOCK_ROWS: tl.constexpr = tile.shape[0]
    BLOCK_D: tl.constexpr = tile.shape[1]
    if _HAS_BLOCK_POINTERS and (FORM == PORTABLE or FORM == WIDENED):  # noqa: SIM109 (Triton has no `in`)
        target = tl.make_block_ptr(base, (n_rows, HEAD_DIM), (stride_row, 1), (row0, 0), (BLOCK_ROWS, BLOCK_D), (1, 0))
        tl.store(target, round_to(tile, base.dtype.element_ty), boundary_check=(0, 1))
    else:
        rows = row0 + tl.arange(0, BLOCK_ROWS)
        cols = tl.arange(0, BLOCK_D)
        addresses = base + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
        mask = (rows[:, None] < n_rows) & (cols[None, :] < HEAD_DIM)
        tl.store(addresses, round_to(tile, base.dtype.element_ty), mask=mask)
