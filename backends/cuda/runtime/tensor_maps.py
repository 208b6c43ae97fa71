"""TMA descriptors encoded once for each address, instead of at every launch.

A compiled kernel's launcher encodes the descriptor of each tensor that it is given (a driver call of 3 us each) and
then calls a function in C with the result. While a tensor keeps its address, shape and strides, so does its encoded
form, whatever memory was freed and given out again meanwhile; so `runtime/replay.py` keeps it and calls that function.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import driver


class Box:
    """How TMA reads a tensor: its (batch, head, sequence, feature) shape and strides, and the box of one tile.

    `layout`: how a tile lies in shared memory, which a Gluon kernel wants to be told.
    """

    __slots__ = ("block", "layout", "shape", "strides")

    def __init__(self, shape: list[int], strides: list[int], block: list[int], layout: Any = None) -> None:
        self.shape, self.strides, self.block, self.layout = shape, strides, block, layout


class TensorMaps:
    """The arguments that one tensor read through TMA becomes, by its address."""

    LIMIT = 256  # addresses of one argument

    def __init__(self, box: Box, metadata: dict[str, Any], element_type: int) -> None:
        self._box, self._metadata, self._element_type = box, metadata, element_type
        self._known: dict[int, tuple[Any, ...]] = {}

    def arguments(self, address: int) -> tuple[Any, ...]:
        """(encoded descriptor, *shape, *strides)"""
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
