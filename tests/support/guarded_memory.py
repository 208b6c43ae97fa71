"""Triton's interpreter with a look at each address: kernels read and write nothing but the tensors of their launch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from diyfa.problem import Launch


def _byte_range(x: torch.Tensor) -> tuple[int, int]:
    """The bytes from the first element of a tensor to its last one."""
    rows = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + rows * x.element_size()


# Of each backend the functions that launch kernels.
LAUNCHING = {
    "cuda": ("diyfa.backends.cuda.runtime.passes.launch_kernel",),
    "npu": ("diyfa.backends.npu.runtime.tiles.run", "diyfa.backends.npu.attention.bwd.run"),
}


def guard(monkeypatch: pytest.MonkeyPatch, backend: str = "cuda") -> Callable[[], int]:
    """From now on kernels touch no other memory than a launch's; returns how many accesses were looked at."""
    ranges, accesses = np.zeros((0, 2), dtype=np.uint64), 0

    def check(pointers: Any, mask: Any) -> None:
        nonlocal accesses
        first = np.asarray(pointers.data).astype(np.uint64)
        first = first[np.broadcast_to(np.asarray(mask.data), first.shape).astype(bool)]
        end = first + np.uint64(max(pointers.dtype.element_ty.primitive_bitwidth // 8, 1))
        inside = (ranges[:, :1] <= first[None]) & (end[None] <= ranges[:, 1:])
        if not inside.any(0).all():
            raise AssertionError(f"{pointers.dtype} of no tensor of the launch")
        accesses += 1

    def guarded(access: Callable[..., Any], pointer_index: int, mask_index: int) -> Callable[..., Any]:
        def guarded_access(builder: Any, *arguments: Any) -> Any:
            check(arguments[pointer_index], arguments[mask_index])
            return access(builder, *arguments)

        return guarded_access

    for name, *indices in (("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3)):
        access = getattr(interpreter.InterpreterBuilder, name)
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, guarded(access, *indices))

    def guarded_launch(launch_kernel: Callable[[Launch], None]) -> Callable[[Launch], None]:
        def launch(one: Launch) -> None:
            nonlocal ranges
            tensors = [_byte_range(x) for x in one.arguments.values() if isinstance(x, torch.Tensor)]
            ranges = np.array(tensors, dtype=np.uint64)
            launch_kernel(one)

        return launch

    for path in LAUNCHING[backend]:
        module, name = path.rsplit(".", 1)
        monkeypatch.setattr(path, guarded_launch(getattr(import_module(module), name)))
    return lambda: accesses
