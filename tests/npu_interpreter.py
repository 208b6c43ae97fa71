"""pytest plugin: lets Triton's interpreter work in place on npu tensors of the host shim.

triton-ascend's interpreter copies each argument to the host with `.cpu()` and back. That asks the device for an
operator when a tensor has gaps between its rows, and forgets its strides. On the shim device memory is host memory, so
the interpreter can be given the tensor itself: a CPU tensor over the same bytes. What a kernel does out of bounds then
really happens in the caller's buffer.
"""

from __future__ import annotations

import ctypes
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


def pytest_configure() -> None:
    from triton.runtime.interpreter import GridExecutor

    def to_host(value: Any) -> Any:
        return host_alias(value) if isinstance(value, torch.Tensor) and value.device.type == "npu" else value

    def init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return [to_host(x) for x in args_dev], {name: to_host(x) for name, x in kwargs.items()}

    GridExecutor._init_args_hst = init_args_hst
    GridExecutor._restore_args_dev = lambda *_: None  # the kernel has written where it should
