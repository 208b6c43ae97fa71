"""TMA descriptors encoded once for each address, instead of at every launch.

A compiled kernel's launcher encodes the descriptor of each tensor that it is given (a driver call of 3 us each) and
then calls a function in C with the result. While a tensor keeps its address, shape and strides, so does its encoded
form, whatever memory was freed and given out again meanwhile; so `EncodedLaunch` keeps it and calls that function.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.runtime import driver

TRITON = (3, 6)


class Box:
    """How TMA reads a tensor: its (batch, head, sequence, feature) shape and strides, and the box of one tile.

    `layout`: how a tile lies in shared memory, which a Gluon kernel wants to be told.
    """

    __slots__ = ("block", "layout", "shape", "strides")

    def __init__(self, shape: list[int], strides: list[int], block: list[int], layout: Any = None) -> None:
        self.shape, self.strides, self.block, self.layout = shape, strides, block, layout


class _TensorMaps:
    """The arguments that one tensor read through TMA becomes, by its address."""

    LIMIT = 256  # addresses of one argument

    def __init__(self, box: Box, metadata: dict[str, Any], element_type: int) -> None:
        self._box, self._metadata, self._element_type = box, metadata, element_type
        self._known: dict[int, tuple[Any, ...]] = {}

    def arguments(self, x: torch.Tensor) -> tuple[Any, ...]:
        """(encoded descriptor, *shape, *strides)"""
        address = x.data_ptr()
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            box, metadata = self._box, self._metadata
            encoded = driver.active.utils.fill_tma_descriptor(
                address, metadata["swizzle"], metadata["elem_size"], self._element_type, metadata["block_size"],
                box.shape, box.strides, 0,
            )  # fmt: skip
            found = self._known[address] = (encoded, *box.shape, *box.strides)
        return found


class EncodedLaunch:
    """The launch of a compiled kernel some of whose tensors are read through TMA."""

    def __init__(self, launch: Any, options: tuple[bool, bool], maps: Sequence[_TensorMaps | None]) -> None:
        self._launch, self._maps = launch, maps
        self._middle = (*options, None, None)  # cooperative, dependent on the launch before; no scratch memory

    def __call__(
        self, head: tuple[Any, ...], hooks: tuple[Any, ...], tensors: Sequence[Any], tail: tuple[Any, ...]
    ) -> None:
        """`head`: grid, stream and function; `hooks`: metadata and hooks; `tail`: the arguments after the tensors."""
        arguments: list[Any] = []
        for x, maps in zip(tensors, self._maps, strict=True):
            if maps is None:
                arguments.append(x)
            else:
                arguments.extend(maps.arguments(x))
        self._launch(*head, *self._middle, *hooks, *arguments, *tail)


def encoded_launch(launcher: Any, boxes: Sequence[Box | None]) -> EncodedLaunch | None:
    """How to launch with encoded descriptors through a compiled kernel's `launcher`; None where that does not pay.

    Also None where this Triton is not the 3.6 whose launcher is known: in it, only a wrapper knows the function in C.
    """
    if tuple(int(x) for x in triton.__version__.split(".")[:2]) != TRITON or not any(boxes):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    wrapper = launcher.launch
    if not inspect.isfunction(wrapper):
        return None
    inside = inspect.getclosurevars(wrapper).nonlocals
    metadata = inside.get("tensordesc_meta")
    if "launcher" not in inside or not metadata or any(m is None or m["fp4_padded"] for m in metadata):
        return None
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    described = iter(metadata)
    maps = []
    for box in boxes:
        one = None if box is None else next(described)
        maps.append(None if box is None else _TensorMaps(box, one, TMA_DTYPE_DEVICE_TO_HOST[one["elem_type"]]))
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    return EncodedLaunch(inside["launcher"], options, maps)
