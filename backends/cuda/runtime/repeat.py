"""What a call repeats: `Kernel.repeat` of the attention kernels is made of these.

An earlier equal call has settled the tile and compiled the kernel. Repeating it means: ask whether that still holds,
allocate, launch by addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime import driver

from diyfa.backends.cuda.attention import launch as attention_launch
from diyfa.backends.cuda.runtime.launch import Launch, current_device, launches_are_hooked

Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


def allocator_of(device_type: str) -> Allocate:
    """(sizes, strides, dtype) -> uninitialised memory on the current device of that type.

    PyTorch has a function for its compiler's programs that goes past the dispatcher, at a third of the time.
    """
    compilers: Any = torch._C._dynamo.guards
    fast = getattr(compilers, f"_empty_strided_{device_type}", None)
    if fast is not None:
        return fast
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)


def like(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What an `Allocate` is called with for a tensor that lies in memory as `x` does."""
    return tuple(x.shape), x.stride(), x.dtype


def holds_as_now() -> Callable[[], bool]:
    """Asks whether all that decides about launches besides the calls themselves is as it is at this moment.

    That is: the tuner's switch and memory, tiles forced in a context, and that no profiler wants to see Triton's
    launches.
    """
    choice = attention_launch.choice()

    def holds() -> bool:
        return attention_launch.choice() == choice and not launches_are_hooked()

    return holds


def current_device_of(x: torch.Tensor) -> Callable[[], int]:
    """Asks for the current device of x's type; CPU tensors, which stand in for CUDA's, are always on theirs."""
    return current_device if x.is_cuda else lambda: -1


def repeat_forward(
    launch: Launch,
    out: torch.Tensor,
    lse: torch.Tensor,
    arguments: Callable[[int, int, int, int, int], Sequence[int | None]],
    scratch: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Callable[..., Pair | None] | None:
    """`Kernel.repeat` of a forward kernel: `arguments` puts the addresses of q, k, v, out, lse in its order; from q
    `scratch` makes the tensor that comes after them, if there is one."""
    again = launch.again
    if again is None:
        return None
    allocate, index, current = allocator_of(out.device.type), out.get_device(), current_device_of(out)
    like_out, like_lse = like(out), like(lse)
    holds, stream_of = holds_as_now(), driver.active.get_current_stream

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair | None:
        if not holds():
            return None
        if current() != index:
            with torch.cuda.device(index):
                return run(q, k, v)
        out, lse = allocate(*like_out), allocate(*like_lse)
        addresses = arguments(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        if scratch is None:
            again(stream_of(index), addresses)
        else:
            own = scratch(q)
            again(stream_of(index), (*addresses, own.data_ptr()))
        return out, lse

    return run
