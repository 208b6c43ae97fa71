"""A compiled kernel launched again: its function in C is called with addresses, past the Python around it.

Triton's launcher asks each tensor for its address, asks the driver whether that address is valid, encodes descriptors
and goes through two functions in Python. A launch whose tensors were checked needs none of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

from diyfa.backends.cuda.runtime.tensor_maps import Box, TensorMaps
from diyfa.backends.cuda.runtime.versions import TRITON

IS_KNOWN = TRITON == (3, 6)  # elsewhere the arguments of the function in C, and who knows it, differ

# (stream, addresses of all tensors, None for one that is not there) -> launched on the current device. What is not read
# through TMA may also be a tensor.
Relaunch = Callable[[int, Sequence[Any]], None]


def _function_and_maps(launcher: Any, boxes: Sequence[Box | None]) -> tuple[Any, list[TensorMaps | None]] | None:
    """The function in C behind `launcher`, and what encodes the tensors that `boxes` describes."""
    launch = launcher.launch
    if not any(boxes):
        return (launch, [None] * len(boxes)) if isinstance(launch, BuiltinFunctionType) else None
    if not inspect.isfunction(launch):
        return None
    inside = inspect.getclosurevars(launch).nonlocals  # of the wrapper that encodes
    metadata = inside.get("tensordesc_meta")
    if "launcher" not in inside or not metadata or any(m is None or m["fp4_padded"] for m in metadata):
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    described = iter(metadata)
    maps: list[TensorMaps | None] = []
    for box in boxes:
        if box is None:
            maps.append(None)
        else:
            one = next(described)
            maps.append(TensorMaps(box, one, TMA_DTYPE_DEVICE_TO_HOST[one["elem_type"]]))
    return inside["launcher"], maps


def relaunch_of(compiled: Any, grid: int, boxes: Sequence[Box | None], tail: tuple[Any, ...]) -> Relaunch | None:
    """How to launch `compiled` again on a grid of one dimension; `tail` are the arguments after the tensors.

    None where this Triton's launcher is not the known one, or the kernel needs memory of its own.
    """
    launcher = compiled.run
    if not IS_KNOWN or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    found = _function_and_maps(launcher, boxes)
    if found is None:
        return None
    function, all_maps = found
    # Cooperative, dependent on the launch before; no scratch memory, twice; metadata; metadata for hooks, two hooks.
    options = (
        launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip

    # Both keep `compiled`: with the last that knows it, Triton may unload the function.
    def by_addresses(stream: int, addresses: Sequence[Any]) -> None:
        function(grid, 1, 1, stream, compiled.function, *options, *addresses, *tail)

    def with_maps(stream: int, addresses: Sequence[Any]) -> None:
        arguments: list[Any] = []
        for address, maps in zip(addresses, all_maps, strict=True):
            if maps is None or address is None:
                arguments.append(address)
            else:
                arguments.extend(maps.arguments(address))
        function(grid, 1, 1, stream, compiled.function, *options, *arguments, *tail)

    return with_maps if any(boxes) else by_addresses
