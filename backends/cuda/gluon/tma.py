"""How TMA reads and writes tensors: descriptions made on the host (`hopper/tiles.py` uses them)."""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diyfa.backends.cuda.hopper.configs import ROW_BOUND
from diyfa.problem import LAYOUTS, VARLEN, bhsd_strides

_STEPS = 0x7FFF0000  # of the dimensions that only move the address: as many as 32 bits count
_WRAP = 1 << 34  # elements: ROW_BOUND times this is 2^64


@cache
def smem_layout(rows: int, columns: int, rank: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: in the swizzle that TMA writes and wgmma reads."""
    words = gl.float32 if dtype == torch.float32 else gl.float16  # or bfloat16
    return gl.NVMMASharedLayout.get_default_for([1] * (rank - 2) + [rows, columns], words)


def dense_descriptor(x: torch.Tensor, layout: str, rows: int, columns: int) -> TensorDescriptor:
    """(B, H, S, D): what lies beyond the end of the tensor is read as zeros and not written."""
    shape = [x.shape[i] for i in LAYOUTS[layout]]
    return TensorDescriptor(
        x, shape, list(bhsd_strides(x, layout)), [1, 1, rows, columns], smem_layout(rows, columns, 4, x.dtype)
    )


def ragged_descriptor(x: torch.Tensor, layout: str, rows: int, columns: int) -> TensorDescriptor:
    """(wrap, steps, H, rows, D): the same for what lies beyond the end of a sequence, whose rows end at ROW_BOUND."""
    _, stride_h, stride_row, _ = bhsd_strides(x, layout)
    heads, head_dim = x.shape[1 if layout == VARLEN else LAYOUTS[layout][1]], x.shape[-1]
    shape = [_STEPS, _STEPS, heads, ROW_BOUND, head_dim]
    strides = [_WRAP - stride_row, _step(x, layout), stride_h, stride_row, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, columns], smem_layout(rows, columns, 5, x.dtype))


def _step(x: torch.Tensor, layout: str) -> int:
    """Elements that the strides of both a sample and a row are a multiple of; 16 bytes at least, if TMA can read x."""
    stride_b, _, stride_row, _ = bhsd_strides(x, layout)
    if layout == VARLEN or x.shape[0] == 1:
        return stride_row
    return gcd(stride_b, stride_row)


def _counted_steps(x: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """`steps_of`, and how many steps away the end of the last row lies."""
    if layout == VARLEN:
        return 0, 1, 0
    stride_b, _, stride_row, _ = bhsd_strides(x, layout)
    step, batch, rows = _step(x, layout), x.shape[0], x.shape[LAYOUTS[layout][2]]
    per_sample, per_row = (0 if batch == 1 else stride_b // step), stride_row // step
    return per_sample, per_row, (batch - 1) * per_sample + rows * per_row


def has_few_steps(layout: str, *tensors: torch.Tensor) -> bool:
    """Whether ragged descriptors reach all rows: where not, `steps_of` raises."""
    return all(_counted_steps(x, layout)[2] < _STEPS for x in tensors)


def steps_of(x: torch.Tensor, layout: str) -> tuple[int, int]:
    """(steps from one sample to the next, steps from one row to the next) in a ragged descriptor.

    Raises:
        ValueError: the last row lies more steps away than 32 bits count.
    """
    per_sample, per_row, count = _counted_steps(x, layout)
    if count >= _STEPS:
        raise ValueError(
            f"sm90 counts {_STEPS} steps through a tensor with seq_lens; shape {tuple(x.shape)} with strides "
            f'{x.stride()} takes {count}. Pass variant="v2"'
        )
    return per_sample, per_row
