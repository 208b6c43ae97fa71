"""DIYFA_NPU_TILE: tiles that the user asks for. They replace tuned tiles and those of the table.

    DIYFA_NPU_TILE=64x128                  every attention kernel: 64 query rows by 128 keys; for "decode", over a
                                           cache, at most that many
    DIYFA_NPU_TILE=fwd=64x128,dq=64x64     these kernels; the others keep their tiles
    DIYFA_NPU_TILE=fwd=64x128x2            with two workspace buffers between cube and vector cores

Every call reads it. A tile that does not compile raises an error, since no other tile replaces one that was asked for.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

VARIABLE = "DIYFA_NPU_TILE"
KERNELS = ("fwd", "dq", "dkdv", "dbias", "decode")
MAX_SIZE = 1024  # rows or keys: more fit no memory of any chip
_SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


class Shape(NamedTuple):
    """The tile that is asked for, for one kernel."""

    block_m: int
    block_n: int
    workspace_buffers: int | None  # None: the number in the table's row


def requested_shape(kernel: str) -> Shape | None:
    """Return the tile that DIYFA_NPU_TILE asks for, for `kernel`, or None. Raises ValueError if it names no tile."""
    text = os.environ.get(VARIABLE)
    return parse(text).get(kernel) if text else None


def parse(text: str) -> dict[str, Shape]:
    """Parse the value of DIYFA_NPU_TILE into shapes by kernel. Raises ValueError."""
    shapes: dict[str, Shape] = {}
    for entry in text.split(","):
        name, equals, shape = (x.strip() for x in entry.rpartition("="))
        if equals and name not in KERNELS:
            raise _wrong(text, f"there is no kernel {name!r}, but {', '.join(KERNELS)}")
        tile = _shape(text, shape)
        named = (name,) if equals else KERNELS
        if repeated := [kernel for kernel in named if kernel in shapes]:
            raise _wrong(text, f"{repeated[0]} is named twice")
        shapes |= dict.fromkeys(named, tile)
    return shapes


def _shape(text: str, shape: str) -> Shape:
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise _wrong(text, f"{shape!r} is no tile")
    rows, keys, buffers = (None if x is None else int(x) for x in match.groups())
    assert rows is not None and keys is not None
    for name, size in (("rows", rows), ("keys", keys)):
        if size % 16 or not 16 <= size <= MAX_SIZE:
            raise _wrong(text, f"{size} {name}: the cube unit takes multiples of 16, at most {MAX_SIZE}")
    if buffers is not None and not 1 <= buffers <= 8:
        raise _wrong(text, f"{buffers} workspace buffers: expected 1 to 8")
    return Shape(rows, keys, buffers)


def _wrong(text: str, why: str) -> ValueError:
    expected = f"expected ROWSxKEYS or ROWSxKEYSxBUFFERS for all, such as {VARIABLE}=64x128, or by kernel"
    return ValueError(f"{VARIABLE}={text!r}: {why}; {expected}, such as fwd=64x128,dq=64x64")
