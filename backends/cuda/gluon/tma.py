"""TMA descriptors of tensors, made on the host (`hopper/tiles.py` uses them)."""

from __future__ import annotations

from functools import cache
from operator import itemgetter

import torch
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.hopper.configs import ROW_BOUND
from diyfa.backends.cuda.runtime.signature import Box, Tiles, shared_box
from diyfa.problem import LAYOUTS, MAX_STEPS, VARLEN, bhsd_strides, row_steps

# Layout -> function that picks (batch, head, sequence, feature).
_IN_ORDER = {layout: itemgetter(*dimensions) for layout, dimensions in LAYOUTS.items()}
_WRAP = 1 << 34  # elements: ROW_BOUND times this is 2^64


@cache
def smem_box(rows: int, columns: int, rank: int, dtype: torch.dtype) -> Box:
    """Return the box of a tile in the swizzled layout that TMA writes and wgmma reads."""
    shape = (1,) * (rank - 2) + (rows, columns)
    words = {1: gl.int8, 2: gl.float16, 4: gl.float32}[dtype.itemsize]  # the layout depends on the size alone
    return shared_box(dtype, shape, gl.NVMMASharedLayout.get_default_for(list(shape), words))


@cache
def rows_box(rows: int, columns: int) -> Box:
    """Return the box of a tile of float32 numbers whose rows follow each other in shared memory, without swizzle."""
    return shared_box(torch.float32, (rows, columns), gl.NVMMASharedLayout(0, 32, 2))


def dense_descriptor(x: torch.Tensor, layout: str, rows: int, columns: int) -> Tiles:
    """Return a descriptor (B, H, S, D). Rows beyond the end of the tensor are read as zeros and not written.

    Strides of samples and heads are 0 if q, k or v is expanded. They are multiples of 16 bytes, which is all that the
    driver asks for; products by CUTLASS read expanded batches so. A gradient has none (`_as_kernels_read` of `ops.py`).
    """
    in_order = _IN_ORDER[layout]
    return Tiles(x, in_order(x.shape), in_order(x.stride()), smem_box(rows, columns, 4, x.dtype))


def ragged_descriptor(x: torch.Tensor, layout: str, rows: int, columns: int) -> Tiles:
    """Return a descriptor (wrap, steps, H, rows, D) in which the rows of each sequence end at ROW_BOUND.

    Rows beyond the end of a sequence are read as zeros and not written. `hopper/tiles.py` explains the coordinates.
    """
    _, stride_h, stride_row, _ = bhsd_strides(x, layout)
    heads, head_dim = x.shape[1 if layout == VARLEN else LAYOUTS[layout][1]], x.shape[-1]
    shape = (MAX_STEPS, MAX_STEPS, heads, ROW_BOUND, head_dim)  # the first two only move the address
    strides = (_WRAP - stride_row, row_steps(x, layout).step, stride_h, stride_row, 1)
    return Tiles(x, shape, strides, smem_box(rows, columns, 5, x.dtype))


def descriptor_steps(x: torch.Tensor, layout: str) -> tuple[int, int]:
    """Return (steps from one sample to the next, steps from one row to the next) of a ragged descriptor."""
    _, per_sample, per_row, total = row_steps(x, layout)
    assert total < MAX_STEPS, "a problem without few_steps is refused"
    return per_sample, per_row
