"""Layouts of results and views, inferred by Triton's own compiler. No GPU is needed."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl

_TARGET = GPUTarget("cuda", 90, 32)


def num_warps_of(layout: Any) -> int | None:
    """Return the number of warps of a register layout, or None if the layout does not determine it."""
    if isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        return num_warps_of(layout.parent)
    if isinstance(layout, gl.DistributedLinearLayout):
        return 1 << len(layout.warp_bases)
    if isinstance(layout, (gl.BlockedLayout, gl.NVMMADistributedLayout)):
        return math.prod(int(n) for n in layout.warps_per_cta)
    return None


class Inference:
    """A module of the compiler's intermediate language, in which operations are built to read their layouts."""

    def __init__(self, num_warps: int = 4) -> None:
        self._context = ir.context()
        ir.load_dialects(self._context)
        make_backend(_TARGET).load_dialects(self._context)
        builder = self._builder = gluon_ir.GluonOpBuilder(self._context)
        self._module = builder.create_module()
        attributes = {"ttg.num-warps": num_warps, "ttg.num-ctas": 1, "ttg.threads-per-warp": 32}
        for name, value in attributes.items():
            self._module.set_attr(name, builder.get_int32_attr(value))
        self._module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
        function = builder.get_or_insert_function(
            self._module, "layouts", builder.get_function_ty([], []), "public", False
        )
        self._module.push_back(function)
        builder.set_insertion_point_to_start(function.add_entry_block())
        self._known: dict[str, Any] = {}

    def _memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        ty = gl.shared_memory_descriptor_type(dtype, list(shape), layout, list(shape))
        return self._builder.create_local_alloc(ty.to_ir(self._builder))

    def of_tensor(self, operation: str, dtype: Any, shape: list[int], layout: Any, *arguments: Any) -> Any:
        """Return the layout of the first result of `create_<operation>(tensor, *arguments)`.

        Operations: reshape, trans, join, split.
        """
        key = f"{operation} {dtype} {shape} {layout} {arguments}"
        if key not in self._known:
            builder = self._builder
            ty = gl.distributed_type(dtype, list(shape), layout).to_ir(builder)
            tensor = builder.create_splat(ty, builder.get_null_value(dtype.to_ir(builder)))
            operands = [tensor, tensor] if operation == "join" else [tensor, *arguments]
            handle = getattr(builder, f"create_{operation}")(*operands)
            handle = handle[0] if isinstance(handle, (tuple, list)) else handle
            self._known[key] = builder.get_gluon_layout_from_tensor(handle)
        return self._known[key]

    def is_trivial(self, dtype: Any, shape: list[int], source: Any, target: Any) -> bool:
        """Return whether each thread has the same elements in the same order in both layouts."""
        builder = self._builder
        tensor = builder.create_splat(
            gl.distributed_type(dtype, list(shape), source).to_ir(builder), builder.get_null_value(dtype.to_ir(builder))
        )
        return builder.is_convert_layout_trivial(gl.distributed_type(dtype, list(shape), target).to_ir(builder), tensor)

    def of_view(self, operation: str, dtype: Any, shape: list[int], layout: Any, argument: list[int]) -> Any:
        """Return the layout of `create_<operation>(memory, argument)`: memdesc_reshape, memdesc_trans."""
        key = f"{operation} {dtype} {shape} {layout} {argument}"
        if key not in self._known:
            create = getattr(self._builder, f"create_{operation}")
            handle = create(self._memory(dtype, shape, layout), argument)
            self._known[key] = self._builder.get_gluon_layout_from_memdesc(handle)
        return self._known[key]


@cache
def inference(num_warps: int = 4) -> Inference:
    """Return the module for tensors of `num_warps` warps."""
    return Inference(num_warps)
