"""The hardware's floats in NumPy: bfloat16 and float8 as their bits in uint16 and uint8, rounding, and `.ftz`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from fast_interpreter import round_to_bfloat16
from triton.runtime.interpreter import _get_np_dtype

_STORED = {dtype: _get_np_dtype(dtype) for dtype in map(tl.dtype, tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES + ["int1"])}
_STORED |= {dtype: _get_np_dtype(dtype) for dtype in (tl.float16, tl.bfloat16, tl.float32, tl.float64)}

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_STORED |= dict.fromkeys(FLOAT8, np.dtype(np.uint8))
_FLOAT8_VALUES = {
    dtype: torch.arange(256, dtype=torch.uint8).view(kind).to(torch.float32).numpy() for dtype, kind in FLOAT8.items()
}  # by their bits

NAN_BITS = {tl.float16: 0x7E00, tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return the exact values in float32 (float64 stays)."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in FLOAT8:
        return _FLOAT8_VALUES[dtype][data]
    return data if dtype == tl.float64 else data.astype(np.float32)


def flush(data: np.ndarray) -> np.ndarray:
    """Return `data` with zeros for subnormal numbers, as `.ftz` does with operands and results."""
    return np.where(np.abs(data) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), data), data)


def narrow(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return float32 values rounded to `dtype`, in its stored form."""
    if dtype == tl.bfloat16:
        return round_to_bfloat16(data)
    if dtype in FLOAT8:  # as cvt.rn.satfinite does; a NaN stays
        largest = torch.finfo(FLOAT8[dtype]).max
        rounded = torch.from_numpy(np.array(data, np.float32)).clamp(-largest, largest).to(FLOAT8[dtype])
        return rounded.view(torch.uint8).numpy()
    with np.errstate(over="ignore"):
        return data.astype({tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}[dtype])


def poison(array: np.ndarray, dtype: tl.dtype) -> None:
    """Fill with NaN, or with the largest integer, so that unwritten memory shows in results."""
    if dtype in NAN_BITS:
        array.view(np.uint8 if dtype in FLOAT8 else np.uint16)[...] = NAN_BITS[dtype]
    elif np.issubdtype(array.dtype, np.floating):
        array[...] = np.nan
    else:
        array[...] = np.iinfo(array.dtype).max


def stored(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype that stores values of a type. Pointers are uint64."""
    return np.dtype(np.uint64) if dtype.is_ptr() else _STORED[dtype]
