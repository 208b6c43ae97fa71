"""pytest plugin for torch_npu on the host shim: the interpreter works in place, and data can be moved.

On the shim device memory is host memory, so a CPU tensor over the same bytes stands for an npu tensor wherever work is
done on the host: in Triton's interpreter, and in copies with gaps, casts and fills, which torch_npu would ask CANN for.
Arithmetic stays refused: a kernel that needs torch operators on the device fails here.

By itself triton-ascend's interpreter copies each argument to the host with `.cpu()` and back. That asks the device for
an operator when a tensor has gaps between its rows, and forgets its strides. Here what a kernel does out of bounds
really happens in the caller's buffer.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from typing import Any

import torch


def host_alias(x: torch.Tensor) -> torch.Tensor:
    """CPU tensor over the memory of the npu tensor `x`, with its shape, strides and dtype."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    alias = torch.empty(0, dtype=x.dtype)
    return alias.set_(flat.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def to_host(value: Any) -> Any:
    """`value`, or a CPU tensor over its memory where it is an npu tensor."""
    return host_alias(value) if isinstance(value, torch.Tensor) and value.device.type == "npu" else value


def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to_host(self).copy_(to_host(source))
    return self


def _fill_(self: torch.Tensor, value: Any) -> torch.Tensor:
    to_host(self).fill_(value)
    return self


def _random_(self: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
    to_host(self).random_(low, high)
    return self


def _to_copy(self: torch.Tensor, **options: Any) -> torch.Tensor:
    memory_format = options.pop("memory_format", None) or torch.preserve_format
    options = {name: value for name, value in options.items() if name in ("dtype", "device") and value is not None}
    return torch.empty_like(self, memory_format=memory_format, **options).copy_(self)


def _clone(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return torch.empty_like(self, memory_format=memory_format or torch.preserve_format).copy_(self)


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    joined = torch.cat([to_host(x) for x in tensors], dim)
    return torch.empty_like(joined, device=tensors[0].device).copy_(joined)


MOVEMENT = {
    "cat": _cat,
    "copy_": _copy_,
    "fill_.Scalar": _fill_,
    "random_.from": _random_,
    "zero_": lambda self: _fill_(self, 0),
    "_to_copy": _to_copy,
    "clone": _clone,
    "contiguous": lambda self, *, memory_format=torch.contiguous_format: (
        self if self.is_contiguous(memory_format=memory_format) else _clone(self, memory_format=memory_format)
    ),
}
_library = torch.library.Library("aten", "IMPL")


def pytest_configure() -> None:
    """Install both, unless this process has a real NPU."""
    if os.environ.get("DIYFA_HOST_SHIM") != "1":
        return
    from triton.runtime.interpreter import GridExecutor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced, which is the purpose
        for name, function in MOVEMENT.items():
            _library.impl(name, function, "PrivateUse1")

    def init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return [to_host(x) for x in args_dev], {name: to_host(x) for name, x in kwargs.items()}

    GridExecutor._init_args_hst = init_args_hst
    GridExecutor._restore_args_dev = lambda *_: None  # the kernel has written where it should
