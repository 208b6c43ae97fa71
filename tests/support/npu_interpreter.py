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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


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


def _to_dtype(
    self: torch.Tensor,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return self if dtype == self.dtype and not copy else _to_copy(self, dtype=dtype, memory_format=memory_format)


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


class HostArithmetic(TorchDispatchMode):
    """Inside this block PyTorch's own operators on npu tensors are computed by the host, in place of the device.

    For what surrounds the kernels (a mask turned into a bias, a norm over a gradient), which a real NPU computes.
    Inside diyfa's own operators the block has no effect: one that leans on PyTorch's still fails.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        devices = [x.device if isinstance(x, torch.Tensor) else x for x in leaves]
        on_npu = [x for x in devices if isinstance(x, torch.device) and x.type == "npu"]
        if not on_npu or func.namespace != "aten" or func.is_view or func.__name__ in _BY_THE_DEVICE:
            return func(*args, **kwargs)

        def to_host_argument(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "npu" else to_host(x)

        result = func(*tree_map(to_host_argument, args), **tree_map(to_host_argument, kwargs))
        if func._schema.is_mutable:  # the host wrote into the tensors' own memory
            return args[0] if func._schema.returns else result

        def to_npu(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=on_npu[0])
            host_alias(copy).copy_(x)
            return copy

        return tree_map(to_npu, result)


# What a call without keys leaves to PyTorch: a sum, and where there are sinks arithmetic on them, and on the rows of
# packed sequences. For `on_the_host`.
WITHOUT_KEYS = (
    "sum.dim_IntList", "eq.Scalar", "eq.Tensor", "add.Tensor", "sub.Tensor", "where.self",
    "arange", "ge.Tensor", "lt.Tensor", "bitwise_and.Tensor",
)  # fmt: skip

# Allocation, and the movement of data that is served above.
_BY_THE_DEVICE = frozenset(
    {
        "empty.memory_format", "empty_strided.default", "empty_like.default", "new_empty.default",
        "new_empty_strided.default", "copy_.default", "_to_copy.default", "clone.default", "detach.default",
    }
)  # fmt: skip


@contextmanager
def on_the_host(*operators: str) -> Iterator[None]:
    """Inside this block the named aten operators ("sum.dim_IntList") on npu tensors are computed by the host, inside
    diyfa's operators too. For calls that run no kernel."""
    library = torch.library.Library("aten", "IMPL")

    def serve(operator: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            where = {"device": "cpu"} if "device" in kwargs else {}
            return operator(*tree_map(to_host, args), **(tree_map(to_host, kwargs) | where)).to("npu")

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in operators:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, serve(operator), "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()


def reduce_by_halves(self: Any, input: Any) -> Any:
    """`ReduceOps.generic_reduce` on whole arrays: neighbours are combined until one is left along the axis.

    triton-ascend's own calls the combining function for every element, a second for one tile of scores, and takes this
    way for every `tl.max`. Here as there the function is only assumed to be associative.
    """
    import numpy as np

    arrays = [x.handle.data for x in input]
    axis = 0 if self.axis is None else self.axis
    values = [x.reshape(-1) if self.axis is None else np.moveaxis(x, axis, 0) for x in arrays]
    while (length := len(values[0])) > 1:
        pairs = length // 2 * 2
        left, right = (
            [self.to_tensor(v[i:pairs:2], x.dtype) for v, x in zip(values, input, strict=True)] for i in (0, 1)
        )
        combined = self.combine_fn.fn(*left, *right)
        combined = combined if isinstance(combined, tuple) else (combined,)
        values = [np.concatenate((c.handle.data, v[pairs:])) for c, v in zip(combined, values, strict=True)]
    results = []
    for value, tensor in zip(values, input, strict=True):
        data = value[0]
        if self.keep_dims:
            data = data.reshape([1] * arrays[0].ndim) if self.axis is None else np.expand_dims(data, axis)
        results.append(self.to_tensor(data, tensor.dtype))
    return results[0] if len(results) == 1 else tuple(results)


def patch_once(patch: Any) -> Any:
    """`_patch_lang`, which every call of a helper runs anew although nothing takes the patches back, once a module."""
    patched: set[int] = set()

    def patch_lang(fn: Any) -> None:
        if id(fn.__globals__) not in patched:
            patch(fn)
            patched.add(id(fn.__globals__))

    return patch_lang


@dataclass(frozen=True)
class Launch:
    """One kernel: its name, and what was current when it was launched."""

    kernel: str
    device: int
    stream: int


LAUNCHES: deque[Launch] = deque(maxlen=256)  # the latest, for tests of devices and streams
_launched = 0  # in all


def _count_launches(item: Any) -> Iterator[None]:
    """Tell whoever sums up, in another process perhaps, how many kernels the phase of a test ran on npu tensors."""
    before = _launched
    yield
    if _launched > before:
        item.user_properties.append(("npu_launches", _launched - before))


# Setup counts too: one run of a script may serve all tests of a file.
pytest_runtest_setup = pytest.hookimpl(hookwrapper=True)(lambda item: (yield from _count_launches(item)))
pytest_runtest_call = pytest.hookimpl(hookwrapper=True)(lambda item: (yield from _count_launches(item)))


def _note_launch(kernel: str, arguments: list[Any]) -> None:
    """Triton launches on the current device and stream, whatever the tensors': a tensor elsewhere is an error."""
    devices = {x.device.index for x in arguments if isinstance(x, torch.Tensor) and x.device.type == "npu"}
    if not devices:
        return
    current = torch.npu.current_device()
    if devices != {current}:
        raise RuntimeError(f"{kernel} is launched on npu:{current} with tensors of {sorted(devices)}")
    global _launched
    _launched += 1
    LAUNCHES.append(Launch(kernel, current, torch.npu.current_stream().npu_stream))


def pytest_configure() -> None:
    """Install all of it, unless this process has a real NPU."""
    if os.environ.get("DIYFA_HOST_SHIM") != "1":
        return
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, ReduceOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced, which is the purpose
        for name, function in MOVEMENT.items():
            _library.impl(name, function, "PrivateUse1")
        if torch._C._dispatch_has_kernel_for_dispatch_key("aten::to.dtype", "PrivateUse1"):  # torch_npu 2.7
            _library.impl("to.dtype", _to_dtype, "AutogradPrivateUse1")

    def init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        _note_launch(self.fn.__name__, [*args_dev, *kwargs.values()])
        return [to_host(x) for x in args_dev], {name: to_host(x) for name, x in kwargs.items()}

    ReduceOps.generic_reduce = reduce_by_halves
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    GridExecutor._init_args_hst = init_args_hst
    GridExecutor._restore_args_dev = lambda *_: None  # the kernel has written where it should
