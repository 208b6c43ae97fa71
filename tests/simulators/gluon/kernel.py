"""Launches on CPU tensors: `kernel[grid](*args, **kwargs)`, as with Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HostDescriptor
from triton.runtime.interpreter import TensorHandle

from .atomics import Atomics
from .clock import Clock
from .errors import KernelBug
from .global_memory import GlobalMemory
from .language import Function, Tensor, TensorDescriptor, jit_functions_as_values
from .markers import leave_no_marker
from .pristine import language_as_imported
from .program import Program
from .scheduler import Scheduler, Task
from .semantic import Semantic
from .tma import Descriptor

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.bool: tl.int1,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion", "ptx_version")


def _number(x: Any) -> Tensor:
    if isinstance(x, bool):
        return Tensor(TensorHandle(np.array([x]), tl.int1), tl.int1)
    if isinstance(x, int):
        dtype = tl.int32 if -(1 << 31) <= x < 1 << 31 else tl.int64
        return Tensor(TensorHandle(np.array([x], np.int32 if dtype == tl.int32 else np.int64), dtype), dtype)
    return Tensor(TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)


def _argument(name: str, x: Any, memory: GlobalMemory) -> Any:
    """Return a launch argument as the kernel's value."""
    if isinstance(x, HostDescriptor):
        dtype = DTYPES[x.base.dtype]
        shape, strides, block = ([int(n) for n in numbers] for numbers in (x.shape, x.strides, x.block_shape))
        described = Descriptor(name, memory.address_of(x.base, name), shape, strides, block, x.layout, dtype, x.padding)
        return TensorDescriptor(
            described, [_number(n) for n in shape], [_number(n) for n in strides], tl.block_type(dtype, block), x.layout
        )
    if isinstance(x, torch.Tensor):
        ty = tl.pointer_type(DTYPES[x.dtype])
        return Tensor(TensorHandle(np.array([memory.address_of(x, name)], np.uint64), ty), ty)
    if isinstance(x, (bool, int, float)):
        return _number(x)
    return x


class InterpretedKernel:
    """A `@gluon.jit` kernel that this interpreter runs. It can replace the compiled one; `launches` counts the runs.

    Args:
        kernel: the function that `@gluon.jit` made.
        seed: the interleaving. 0: all equally likely; 1: copies and products as late as possible; 2: as early as
            possible; others: random weights for each partition and each operation.
        interleave: run all programs at once instead of one after another.
        fixed_order: reductions in global memory must be ordered, so that sums are the same in every run.
    """

    def __init__(self, kernel: Any, seed: int = 0, interleave: bool = False, fixed_order: bool = False) -> None:
        self._function = Function(kernel.fn)
        self.arg_names = list(kernel.arg_names)
        self.seed, self.interleave, self.fixed_order = seed, interleave, fixed_order
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        sizes = tuple(grid if isinstance(grid, (tuple, list)) else (grid,))
        sizes = (*sizes, 1, 1)[:3]
        return lambda *args, **kwargs: self._launch(sizes, args, kwargs)

    def _launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        missing = set(self.arg_names).symmetric_difference(given)
        if missing:
            raise TypeError(f"{self._function.__name__} got wrong arguments: {sorted(missing)}")
        memory = GlobalMemory(self.fixed_order)
        memory.atomics = Atomics(memory)
        values = {
            name: value if name in self._function.constexprs else _argument(name, value, memory)
            for name, value in given.items()
        }
        indices = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        for number, together in enumerate([indices] if self.interleave else [[index] for index in indices]):
            seed = self.seed if self.seed < 3 else self.seed * 1000003 + number
            scheduler = Scheduler(seed)
            for index in together:
                self._spawn(scheduler, memory, index, grid, values, options)
            try:
                with language_as_imported(), jit_functions_as_values():
                    scheduler.run()
            except KernelBug as bug:
                which = "all programs" if self.interleave else f"program {together[0][0]}"
                raise type(bug)(f"{bug}\n({which}, seed {self.seed})") from bug
        self.launches += 1

    def _spawn(
        self,
        scheduler: Scheduler,
        memory: GlobalMemory,
        index: Any,
        grid: Any,
        values: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        program = Program(scheduler, memory, index, grid)
        program.is_alone = not options.get("launch_pdl", False)

        def body() -> None:
            program.semantic = Semantic(program)
            self._function(**values)
            leave_no_marker()
            program.finish()

        task = Task(body, f"program {index[0]}", program, options.get("num_warps", 4), Clock())
        scheduler.spawn(task)
