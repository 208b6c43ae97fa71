"""Makes Triton's interpreter faster, right where it converts bfloat16, the same on every machine, and able to run with
every NumPy.

Faster: for each call of a kernel and of each of its helpers it looks for the builtins of `triton.language` among all
names there are, to replace them, which takes a third of the time. Their names are fixed.

Right: Triton cuts float32 off where it becomes bfloat16, so that some NaN become infinite, and subnormal numbers of
either type become others, and a NaN of e4m3 a number. And it leaves a float argument a float64 of Python, where a
kernel gets a float32.

The same: `tl.dot` does not use BLAS, see `matrix_product.py`.

Every NumPy: up to Triton 3.6 it makes an index of an array of one element with `int`, which NumPy has deprecated.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from matrix_product import accumulated_product
from triton.runtime import interpreter


def _builtins(owner: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


_NAMES = {owner: _builtins(owner) for owner in (tl, tl.core, tl.math, tl.tensor)}


def _patch_builtin(owner: Any, *how: Any) -> None:
    if owner not in _NAMES:
        _NAMES[owner] = _builtins(owner)
    names = _NAMES[owner]
    if names and tl.core.is_builtin(getattr(owner, names[0])):  # not so in a helper: its caller has replaced them all
        for name in names:
            interpreter._patch_attr(owner, name, getattr(owner, name), *how)


def round_to_bfloat16(data: np.ndarray) -> np.ndarray:
    """float32 -> bits, to nearest even, as cvt.rn.bf16 does."""
    bits = np.asarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


_convert_other = interpreter._convert_float


def _convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """`input` as the bits of `output_dtype`; to bfloat16 rounded to nearest even, as the hardware does."""
    if (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):
        return input.view(np.uint16).astype(np.uint32) << 16
    if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
        return round_to_bfloat16(input)
    output = _convert_other(input, input_dtype, output_dtype, rounding_mode)
    if output_dtype == tl.float8e4nv and input_dtype in (tl.float16, tl.float32):
        output = np.where(np.isnan(input), np.uint8(0x7F), output)
    return output


_convert_argument = interpreter._implicit_cvt


def _implicit_cvt(arg: Any) -> Any:
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
    return _convert_argument(arg)


def _dot_operand(x: Any) -> np.ndarray:
    """Its numbers. float8 is widened; bfloat16 must have been (`dot_operand` of the kernels), its data are bits."""
    if x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8:
        return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
    return x.data


def _create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    return interpreter.TensorHandle(accumulated_product(_dot_operand(a), _dot_operand(b), d.data), d.dtype.scalar)


def _patch_lang_tensor(patch: Any, tensor: Any, *scope: Any) -> None:
    patch(tensor, *scope)
    set_attr = scope[0].set_attr if scope else setattr
    set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def install() -> None:
    """The faster search is for Triton since 3.6; that of triton-ascend never takes its replacements back, see
    `npu_interpreter.py`."""
    interpreter._convert_float = _convert_float
    interpreter._implicit_cvt = _implicit_cvt
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang_tensor = partial(_patch_lang_tensor, interpreter._patch_lang_tensor)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_builtin = _patch_builtin
