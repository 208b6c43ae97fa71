"""Private functions of PyTorch that a launch calls because they are faster, each with a public fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# The private function skips the check that CUDA is initialised: a tensor on the device proves it.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # (device) -> handle; None without CUDA


def make_allocator(device_type: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Return a function (sizes, strides, dtype) -> uninitialised tensor on the current device of that type.

    PyTorch's compiler has one for its programs. It skips the dispatcher and takes a third of the time.
    """
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)
    if fast is not None:
        return fast
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)
