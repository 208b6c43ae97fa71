"""Asynchronous warpgroup products. They read operands and write the accumulator at some time before the wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from matrix_product import accumulated_product
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import TensorHandle

from .errors import InvalidOperand, Race, location
from .numerics import stored, widen
from .scheduler import Event, Task
from .shared_memory import SharedView

WARPS = 4  # of a warpgroup
ROWS = 64  # of one instruction
MAX_COLUMNS = 256
# float32 is multiplied as tf32.
DTYPES = (tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv, tl.float8e5, tl.int8)


def _multiplied(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return the numbers that the tensor cores multiply: of float32 the first 10 bits of the mantissa.

    Integers stay integers, so that their products and sums are exact.
    """
    if dtype == tl.int8:
        return data
    if dtype == tl.float32:
        return (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return widen(data, dtype)


class Accumulator(TensorHandle):
    """Registers that a product writes. A kernel may not use them before a wait has proven that the product is done."""

    def __init__(self, product: Product) -> None:
        self.dtype, self.attr = product.acc.dtype, {}
        self.product = product
        self.registers: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        if not self.product.retired:
            raise Race(f"{location()} uses the accumulator of the {self.product.what} before a wait proved it complete")
        assert self.registers is not None
        return self.registers


class Product:
    """One warpgroup_mma."""

    def __init__(self, a: Any, b: SharedView, acc: Any, use_acc: bool, what: str) -> None:
        self.a, self.b, self.acc, self.use_acc, self.what = a, b, acc, use_acc, what
        self.executed = self.retired = False
        self.result = Accumulator(self)

    def execute(self) -> None:
        a = _multiplied(self.a.values(), self.a.dtype) if isinstance(self.a, SharedView) else self.a
        with np.errstate(all="ignore"):
            b = _multiplied(self.b.values(), self.b.dtype)
            acc = np.zeros((a.shape[0], b.shape[1]), stored(self.acc.dtype))
            if self.use_acc:
                # A product may continue the accumulator of an unfinished one, because they execute in order.
                acc = self.acc.registers if isinstance(self.acc, Accumulator) else self.acc.data
            self.result.registers = accumulated_product(a, b, acc)
        self.executed = True


class Products:
    """The products that one partition has issued. They execute in order."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.agent = ("wgmma", task)
        self.issued: list[Product] = []

    def issue(self, a: Any, b: SharedView, acc: Any, use_acc: bool) -> Accumulator:
        what = f"wgmma at {location()}"
        clock, number = self.task.clock, len(self.issued) + 1
        for operand in (a, b):
            if isinstance(operand, SharedView):
                operand.access(what, clock, self.agent, number, write=False, asynchronous=True)
        if not isinstance(a, SharedView):
            a = _multiplied(a.data, a.dtype)
        if not isinstance(acc, Accumulator) or acc.product not in self.issued:
            acc.data  # noqa: B018  raises when another partition's product is still writing it
        product = Product(a, b, acc, use_acc, what)
        before = self.issued[-1] if self.issued else None
        self.issued.append(product)
        self.task.program.scheduler.later(
            Event(product.execute, what, lambda: before is None or before.executed)  # in order
        )
        return product.result

    def wait(self, pending: int) -> None:
        """Wait until all but the last `pending` are done."""
        done = self.issued[: len(self.issued) - pending] if pending else self.issued
        where = location()
        self.task.program.scheduler.wait(lambda: all(p.executed for p in done), lambda: f"wgmma at {where}")
        for product in done:
            product.retired = True
        self.task.clock.learn(self.agent, len(done))

    def running(self) -> list[str]:
        return [p.what for p in self.issued if not p.retired]


def check_operands(a: Any, b: Any, acc: Any, num_warps: int) -> None:
    """Raise InvalidOperand if the instruction does not accept the operands, which are the kernel's typed values."""
    acc_type = getattr(acc.type, "tensor_type", acc.type)
    layout = acc_type.layout
    where = location()

    def need(holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidOperand(f"warpgroup_mma at {where}: {rule}")

    need(isinstance(layout, gl.NVMMADistributedLayout), f"the accumulator has layout {layout}")
    need(list(layout.version) == [3, 0], f"the accumulator's layout is of version {layout.version}, not [3, 0]")
    m, n = acc_type.shape
    warps_m, warps_n = layout.warps_per_cta
    need(warps_m % WARPS == 0, f"{warps_m} warps along the rows are no whole warpgroups")
    need(warps_m * warps_n == num_warps, f"the layout is for {warps_m * warps_n} warps, {num_warps} run it")
    need(isinstance(b, gl.shared_memory_descriptor), "b must lie in shared memory")
    acc_dtype = tl.int32 if a.dtype == tl.int8 else tl.float32
    need(acc_type.scalar == acc_dtype, f"the accumulator is {acc_type.scalar}, not {acc_dtype}")
    need(a.dtype in DTYPES and a.dtype == b.dtype, f"products of {a.dtype} and {b.dtype}")
    need(list(a.shape) == [m, b.shape[0]], f"a is {list(a.shape)}, b {list(b.shape)}, the accumulator {[m, n]}")
    need(list(b.shape) == [b.shape[0], n], f"b is {list(b.shape)}, the accumulator {[m, n]}")
    bits = a.dtype.primitive_bitwidth
    instr_m, instr_n, instr_k = (int(size) for size in layout.instr_shape)
    need(instr_m == ROWS // WARPS and instr_k == 256 // bits, f"instruction shape {layout.instr_shape}")
    need(instr_n % 8 == 0 and 8 <= instr_n <= MAX_COLUMNS and n % instr_n == 0, f"{n} columns by {instr_n}")
    need(m % (instr_m * warps_m) == 0, f"{m} rows for {warps_m} warps")
    need(int(a.shape[1]) % instr_k == 0, f"{a.shape[1]} is no multiple of {instr_k}")
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, gl.shared_memory_descriptor):
            need(
                isinstance(operand.layout, gl.NVMMASharedLayout) and operand.layout.rank == 2,
                f"{name} lies in shared memory as {operand.layout}",
            )
            along_k = operand.layout.transposed == (name == "b")
            need(bits == 16 or along_k, f"{name} of {bits} bits must be contiguous along K")
    if not isinstance(a, gl.shared_memory_descriptor):
        wanted = gl.DotOperandLayout(0, layout, 32 // bits)
        need(a.type.layout == wanted, f"a in registers needs {wanted}, has {a.type.layout}")
