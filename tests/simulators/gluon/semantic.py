"""Triton's own Gluon front end, extended by the compiler's part: layouts of results, and partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.runtime.interpreter import TensorHandle

from .builder import Builder
from .errors import InvalidOperand, location
from .layouts import inference
from .markers import leave_no_marker
from .program import COMPILER_BARRIERS, Program
from .scheduler import Task, current

REGISTERS = 65536  # of a multiprocessor
MAX_WARPS = 32


class Semantic(GluonSemantic):
    def __init__(self, program: Program) -> None:
        super().__init__(Builder(program))
        self.program = program

    def expand_dims(self, input: Any, axis: int) -> Any:
        # Triton's front end asks the builder for the result's layout, and a handle does not know its layout.
        layout = getattr(input.type, "layout", None)
        self._layout_of_result = layout.parent if isinstance(layout, gl.SliceLayout) else layout
        return super().expand_dims(input, axis)

    def _inferred(self, operation: str, x: Any, *arguments: Any) -> None:
        """Store the compiler's layout of the result that the front end wraps next."""
        shape = [int(size) for size in x.type.shape]
        infer = inference(current().num_warps).of_tensor
        self._layout_of_result = infer(operation, x.dtype, shape, x.type.layout, *arguments)

    def reshape(self, input: Any, dst_shape: list[int], can_reorder: bool) -> Any:
        self._inferred("reshape", input, [int(size) for size in dst_shape], False)
        return super().reshape(input, dst_shape, can_reorder)

    def permute(self, input: Any, dims: Any) -> Any:
        self._inferred("trans", input, [int(d) for d in dims])
        return super().permute(input, dims)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        if assert_trivial:
            shape = [int(size) for size in value.type.shape]
            if not inference(current().num_warps).is_trivial(value.dtype, shape, value.type.layout, layout):
                raise InvalidOperand(f"at {location()} {value.type.layout} is not the same as {layout}")
        return super().convert_layout(value, layout)

    def join(self, a: Any, b: Any) -> Any:
        self._inferred("join", a)
        return super().join(a, b)

    def split(self, a: Any) -> Any:
        self._inferred("split", a)
        layout = self._layout_of_result
        lhs, rhs = (TensorHandle(a.handle.data[..., i], a.dtype) for i in (0, 1))
        result = gl.distributed_type(a.dtype, [int(size) for size in a.type.shape[:-1]], layout)
        self._layout_of_result = None
        return self.tensor(lhs, result), self.tensor(rhs, result)

    def _wrap_handle_infer_layout(self, handle: TensorHandle, scalar_ty: tl.dtype, shape: list[int]) -> Any:
        layout, self._layout_of_result = self._layout_of_result, None
        if layout is None:
            raise NotImplementedError(f"the layout of the result at {location()}")
        return self.tensor(handle, gl.distributed_type(scalar_ty, shape, layout) if shape else scalar_ty)

    _layout_of_result: Any = None

    def reduce(self, input: Any, axis: int | None, function: Any, keep_dims: bool) -> Any:
        """Return one of NumPy's reductions along an axis. Its layout is a slice of the input's."""
        if not isinstance(input.type, gl.distributed_type):
            raise InvalidOperand(f"reduction of {input.type} at {location()}")
        data, rank = input.handle.data, len(input.type.shape)
        if axis is None:
            assert not keep_dims
            return self.tensor(TensorHandle(function(data).reshape(1), input.dtype), input.dtype)
        if not 0 <= axis < rank:
            raise InvalidOperand(f"reduction along axis {axis} of {rank} at {location()}")
        data = np.asarray(function(data, axis=axis)).astype(data.dtype)  # NumPy sums int32 in int64
        shape = [int(size) for i, size in enumerate(input.type.shape) if i != axis]
        if not shape:
            return self.tensor(TensorHandle(data.reshape(1), input.dtype), input.dtype)
        result = gl.distributed_type(input.dtype, shape, gl.SliceLayout(axis, input.type.layout))
        reduced = self.tensor(TensorHandle(data, input.dtype), result)
        return self.expand_dims(reduced, axis) if keep_dims else reduced

    def reduction(self, inputs: Sequence[Any], axis: int, region_builder_fn: Any) -> Any:
        raise NotImplementedError(f"reduction with a function of the kernel's own at {location()}")

    associative_scan = reduction

    def num_warps(self, generator: Any) -> Any:
        return tl.constexpr(current().num_warps)

    def num_ctas(self) -> Any:
        return tl.constexpr(1)

    def warp_specialize(
        self, functions_and_args: Any, worker_num_warps: Sequence[int], worker_num_regs: Sequence[int], generator: Any
    ) -> Any:
        """Run the first function in this partition and the others in their own warps, until all have returned."""
        parent, program = current(), self.program
        workers = functions_and_args[1:]
        total = parent.num_warps + sum(worker_num_warps)
        rules = {
            "as many warp counts and register counts as workers": len(workers)
            == len(worker_num_warps)
            == len(worker_num_regs),
            "warps in powers of two": all(n > 0 and n & (n - 1) == 0 for n in worker_num_warps),
            f"at most {MAX_WARPS} warps": total <= MAX_WARPS,
            "registers in multiples of 8 from 24 to 256": all(r % 8 == 0 and 24 <= r <= 256 for r in worker_num_regs),
            "no partitions within partitions": program.reserved_barriers == COMPILER_BARRIERS,
            "no register tensors as arguments of workers": not any(
                isinstance(value, gl.tensor) and value.type.is_block() for _, args in workers for value in _values(args)
            ),
            f"at most {REGISTERS} registers": sum(
                32 * n * r for n, r in zip(worker_num_warps, worker_num_regs, strict=False)
            )
            <= REGISTERS,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InvalidOperand(f"warp_specialize at {location()} needs {'; '.join(broken)}")
        program.reserved_barriers = COMPILER_BARRIERS + len(workers)
        parent.step()
        tasks = []
        for i, ((function, args), num_warps) in enumerate(zip(workers, worker_num_warps, strict=True), 1):
            name = f"partition {i} ({function.__name__}) of program {program.index[0]}"
            body = _call(function, args)
            tasks.append(Task(body, name, program, num_warps, parent.clock.copy()))
        for task in tasks:
            program.scheduler.spawn(task)
        function, args = functions_and_args[0]
        parent.name, name = f"partition 0 ({function.__name__}) of program {program.index[0]}", parent.name
        result = function(*args)
        parent.name = name
        program.scheduler.wait(
            lambda: not any(task.alive for task in tasks),
            lambda: f"the end of {', '.join(task.name for task in tasks if task.alive)}",
        )
        for task in tasks:
            parent.clock.join(task.clock)
        program.reserved_barriers = COMPILER_BARRIERS
        return result


def _values(x: Any) -> Iterator[Any]:
    """Yield the values in tuples and aggregates."""
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from _values(item)
    elif getattr(x, "__triton_aggregate__", False):
        for value in vars(x).values():
            yield from _values(value)
    else:
        yield x


def _call(function: Any, args: Any) -> Any:
    def call() -> None:
        function(*args)
        leave_no_marker()

    return call
