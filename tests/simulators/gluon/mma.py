"""Synchronous products (mma.sync): all operands are in registers, in the layouts of the instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from matrix_product import accumulated_product
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import TensorHandle

from .errors import InvalidOperand, location
from .numerics import widen

DTYPES = (tl.float16, tl.bfloat16)
ROWS, COLUMNS = 16, 8  # of one instruction's result


def check_operands(a: Any, b: Any, acc: Any, num_warps: int) -> None:
    """Raise InvalidOperand if the instruction does not accept the operands, which are the kernel's typed values."""
    where = location()

    def need(holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidOperand(f"mma_v2 at {where}: {rule}")

    for name, x in (("a", a), ("b", b), ("the accumulator", acc)):
        need(isinstance(x, tl.tensor) and x.type.is_block(), f"{name} must be a block of registers")
    layout = acc.type.layout
    need(isinstance(layout, gl.NVMMADistributedLayout), f"the accumulator has layout {layout}")
    need(list(layout.version) == [2, 0], f"the accumulator's layout is of version {layout.version}, not [2, 0]")
    need([int(n) for n in layout.instr_shape] == [ROWS, COLUMNS], f"instruction shape {layout.instr_shape}")
    warps_m, warps_n = (int(n) for n in layout.warps_per_cta)
    need(warps_m * warps_n == num_warps, f"the layout is for {warps_m * warps_n} warps, {num_warps} run it")
    need(a.dtype in DTYPES and a.dtype == b.dtype, f"products of {a.dtype} and {b.dtype}")
    need(acc.dtype == tl.float32, f"the accumulator is {acc.dtype}, not float32")
    m, n = (int(size) for size in acc.shape)
    k = int(a.shape[1])
    need(
        [int(size) for size in a.shape] == [m, k] and [int(size) for size in b.shape] == [k, n],
        f"a is {list(a.shape)}, b {list(b.shape)}, the accumulator {[m, n]}",
    )
    bits = a.dtype.primitive_bitwidth
    need(m % (ROWS * warps_m) == 0, f"{m} rows for {warps_m} warps")
    need(n % (COLUMNS * warps_n) == 0, f"{n} columns for {warps_n} warps")
    need(k % (256 // bits) == 0, f"{k} is no multiple of {256 // bits}")
    for index, (name, x) in enumerate((("a", a), ("b", b))):
        wanted = gl.DotOperandLayout(index, layout, 32 // bits)
        need(x.type.layout == wanted, f"{name} needs {wanted}, has {x.type.layout}")


def product(a: TensorHandle, b: TensorHandle, acc: TensorHandle) -> TensorHandle:
    """Return acc + a b, [m, n] fp32."""
    with np.errstate(all="ignore"):
        return TensorHandle(accumulated_product(widen(a.data, a.dtype), widen(b.data, b.dtype), acc.data), acc.dtype)
