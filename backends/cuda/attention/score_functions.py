"""Score functions in the portable kernels: what the code of `diyfa.score_code` calls.

The function reads captured tensors only where a query sees a key. Gradients of captured tensors are added by atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.scores import tanh
from diyfa.score_code import Spelling


@triton.jit
def precise_tanh(x):
    """Return the hyperbolic tangent of fp32, with a small relative error near 0."""
    return tanh(x, True)


@triton.jit
def number(x):
    """Return x, a boolean as an integer."""
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    return x


@triton.jit
def mask_of_offset(offset, seen):
    """Return the mask of a load at `offset`, which has the shape of the tile, of its rows, of its columns, or none.

    `seen` = (which pairs are visible, which rows exist, which columns exist).
    """
    pairs, rows, cols = seen
    if offset.shape[0] == pairs.shape[0] and offset.shape[1] == pairs.shape[1]:
        mask = pairs
    elif offset.shape[0] == rows.shape[0] and offset.shape[1] == rows.shape[1]:
        mask = rows
    else:
        mask = cols
    return mask


@triton.jit
def load_captured(pointer, offset, seen):
    """Return an element of a captured tensor for each visible pair: fp32, an integer of 32 or 64 bits, or a boolean."""
    if offset.type.is_block():
        value = tl.load(pointer + offset, mask=mask_of_offset(offset, seen), other=0)
    else:
        value = tl.load(pointer + offset)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    if value.dtype == tl.int8:  # products would wrap
        value = value.to(tl.int32)
    return value


@triton.jit
def add_gradient(pointer, offset, ds, partial, seen):
    """Add ds * partial, the gradient of a loaded value, to the fp32 gradient of its tensor at `offset`.

    If the offset is equal for all rows or columns of the tile, their gradients are summed first and added once.
    """
    pairs, _, _ = seen
    gradient = tl.where(pairs & (ds != 0.0), ds * partial, 0.0)  # hidden pairs may have any derivative
    if not offset.type.is_block():
        tl.atomic_add(pointer + offset, tl.sum(tl.sum(gradient, 1), 0), sem="relaxed")
    elif offset.shape[0] == pairs.shape[0] and offset.shape[1] == pairs.shape[1]:
        tl.atomic_add(pointer + offset, gradient, mask=gradient != 0, sem="relaxed")
    elif offset.shape[0] == 1:
        total = tl.sum(gradient, 0)[None, :]
        tl.atomic_add(pointer + offset, total, mask=mask_of_offset(offset, seen), sem="relaxed")
    else:
        total = tl.sum(gradient, 1)[:, None]
        tl.atomic_add(pointer + offset, total, mask=mask_of_offset(offset, seen), sem="relaxed")


SPELLING = Spelling(
    __name__, "score, b, h, i, j, seen, captured", "gradients", "seen", captured="captured[{n}]",
    gradient="gradients[{n}]",
)  # fmt: skip
