"""Library functions of the cube core: copies into L1, the matrix product, and copies out of its accumulator.

L1 and L0C store matrices as fractals, blocks of 16 rows: [column blocks, row blocks, rows, columns].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matrix_product import matrix_product
from simulators.hivm.library import Function
from simulators.hivm.memory import Ref, contiguous

FRACTAL = 16
INT8_FRACTAL = 32  # columns of a fractal of int8, and the fewest columns of a product


def _dense(x: Ref) -> Ref:
    if x.strides != contiguous(x.sizes):
        raise NotImplementedError(f"a matrix with gaps: {x} strides {x.strides}")
    return x


def _nd2nz(source: Ref, target: Ref) -> None:
    """Copy global memory [rows, columns] to fractals. The rest of the last fractal keeps its values."""
    columns, width = source.sizes[1], target.sizes[3]
    values = source.read()
    for block in range(-(-columns // width)):
        part = values[:, block * width : (block + 1) * width]
        start = target.offset + block * target.strides[0]
        # The library assumes that the distance between rows is the fractal's width.
        target.with_layout(offset=start, sizes=part.shape, strides=(target.strides[2], 1)).write(part)


def _nz2nd(source: Ref, target: Ref, quantise: Any, relu: Any, split: Any, unit_flag: Any) -> None:
    """Copy the accumulator to global memory [rows, columns], rounded to its dtype."""
    if relu or split or unit_flag:
        raise NotImplementedError(f"fixpipe with relu {relu}, channel split {split}, unit flag {unit_flag}")
    rows, columns = target.sizes
    if rows <= 0 or columns <= 0:
        return
    target.write(_matrix(source, (1, 2, 0, 3))[:rows, :columns])


def _matrix(x: Ref, order: tuple[int, int, int, int]) -> np.ndarray:
    """Return fractals as a matrix. `order` has the two dimensions of the rows, then the two of the columns."""
    values = np.transpose(x.read(), order)
    return values.reshape(values.shape[0] * values.shape[1], -1)


FILL = Function("PIPE_MTE2", "sw", lambda value, target: target.write(np.asarray(value)), whole=True)
ND2NZ = Function("PIPE_MTE2", "rw", _nd2nz, whole=True)
FIXPIPE = Function("PIPE_FIX", "rwssss", _nz2nd, whole=True)

FUNCTIONS = {"set_l1_2d": FILL, "nd2nz": ND2NZ, "fixpipe_nz2nd": FIXPIPE}


def multiply(a: Ref, b: Ref, transposed_a: bool, transposed_b: bool, init: bool, k: int, n: int, c: Ref) -> None:
    """Compute c (+)= a @ b for all rows of c, k terms each, and n columns rounded up to whole fractals.

    Fractals of int8 have 32 columns. The library loads whole ones, and tells the cube core the k that there are. What
    the core does with the rest is not known, so here it counts: kernels must have filled it with zeros."""
    for x in (a, b, c):
        _dense(x)
    left = _matrix(a, (0, 3, 1, 2) if transposed_a else (1, 2, 0, 3))  # [m, k]
    right = _matrix(b, (0, 3, 1, 2) if transposed_b else (1, 2, 0, 3))  # [k, n]
    rows = c.sizes[1] * c.sizes[2]
    columns = -(-n // FRACTAL) * FRACTAL
    if a.dtype == "i8":
        k, columns = -(-k // INT8_FRACTAL) * INT8_FRACTAL, max(columns, INT8_FRACTAL)
    with np.errstate(all="ignore"):
        kind = np.int32 if c.dtype == "i32" else np.float32
        product = matrix_product(left[:rows, :k], right[:k, :columns], kind)
        accumulator = c.view()  # [n1, m1, 16, 16]
        blocks = product.reshape(rows // FRACTAL, FRACTAL, columns // FRACTAL, FRACTAL).transpose(2, 0, 1, 3)
        if init:
            accumulator[: columns // FRACTAL] = blocks
        else:
            accumulator[: columns // FRACTAL] += blocks
