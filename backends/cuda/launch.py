"""What every CUDA launcher needs: the right current device, and whether kernels run in Triton's interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from triton.runtime.jit import JITFunction


@triton.jit
def _probe():
    pass


# Asked of Triton itself, at the time the kernels are decorated: the environment may change later, they do not.
_INTERPRETING = not isinstance(_probe, JITFunction)
_NOTHING: AbstractContextManager[None] = nullcontext()


def is_interpreting() -> bool:
    """Whether `@triton.jit` functions run in Triton's interpreter (on CPU tensors) instead of being compiled."""
    return _INTERPRETING


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which the current CUDA device is that of `x`; it does nothing when it already is, or on the CPU."""
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(index)
