"""How a kernel reads and writes a tile of one head: the step all attention kernels share.

A tile is [BLOCK_ROWS, BLOCK_D]: consecutive rows (tokens) of one head, the feature dimension padded to a power of two.
There are three ways to reach it, and this file is the one place that knows them apart:

* POINTER: plain addresses and masks;
* PORTABLE: `tl.make_block_ptr`, readable and checked at the edges by the compiler. Triton has it up to 3.8; from 3.9 on
  the same as POINTER, so that a binary does for all versions;
* DESCRIPTOR: a host-made TMA descriptor of the whole tensor (sm_90 and later); the hardware computes addresses and
  fills what lies outside with zeros, so neither registers nor instructions are spent on them.

PORTABLE also exists WIDENED: the tile becomes float32 as it is read, for GPUs whose products are multiply-adds on
float32. Left to itself Triton 3.6 widens an operand before each product: docs/cuda.md has what that costs.
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

# How long the sequences are: all as long as the tensors, as `seq_lens` says, or packed as cu_seqlens says.
EQUAL = tl.constexpr(0)
SEQ_LENS = tl.constexpr(1)
PACKED = tl.constexpr(2)
# Of keys alone: they lie in a cache, and each sequence has a number of its own (`hopper/tiles.py`).
CACHED = tl.constexpr(3)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST_PRODUCT = tl.constexpr(2.358e38)  # about the largest that float32 holds times LOG2E


def lengths_of(problem: AttentionProblem) -> int:
    """The kernels' LENGTHS constant."""
    return (PACKED if problem.varlen else SEQ_LENS if problem.seq_lens else EQUAL).value


def padded_head_dim(head_dim: int) -> int:
    """Width of a tile: the next power of two, at least 16 (the smallest that a matrix instruction takes)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def cdiv(n: int, block: int) -> int:
    """How many blocks cover n."""
    return -(-n // block)


@triton.jit
def head_of(ref, strides, place, FORM: tl.constexpr, c: tl.constexpr):
    """The rows of a head, as `load_tile` and `store_tile` take them.

    place: (sample, head, first row of its sequence, where sequences are packed, rows). A descriptor covers all heads
    and passes through.
    """
    stride_b, stride_h, stride_row = strides
    b, h, first, n_rows = place
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
    """Rows row0 ... row0 + BLOCK_ROWS - 1 of a head -> [BLOCK_ROWS, BLOCK_D].

    What lies beyond its rows (with CHECK_ROWS) or HEAD_DIM is zero. A descriptor knows the tensor's end only: where
    sequences are shorter (LENGTHS), rows beyond them hold whatever is there.
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
    """Write [BLOCK_ROWS, BLOCK_D] to a head, as far as it has rows and HEAD_DIM, in the destination's dtype.

    Results are always written through addresses: one write at the end of a program gains nothing from TMA.
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
