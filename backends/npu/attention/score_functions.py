"""Score functions in the Ascend kernels: from scores and positions of a tile to new scores, and the way back.

`diyfa.score_code` makes jit functions of the user's function and of its derivatives. A kernel has them among its
constants: SCORE_FN, its derivative by the score SCORE_SLOPE, and SCORE_GRADIENTS, which adds to the gradients of
captured tensors. Their text calls the helpers of this file, with the arguments that `_SPELLING` names. A function runs
on the vector cores, on the tile of scores. It comes last, so a kernel masks its result and not its argument: `seen` is
1.0 where a query sees a key, else 0.0.

Parameters, as Triton 3.2 has no tuples:

* t0 to t3: addresses of the captured tensors; g0 to g3: addresses of their gradients, fp32;
* pairs, rows, cols: for which pairs, rows and columns of the tile a function may read captured tensors, booleans that
  broadcast to the tile;
* offset: of the elements to load, one for the tile, or of the shape of the tile, of its rows or of its columns.

Consecutive elements of captured tensors are loaded as a vector, a *line*, others are gathered one by one. The compiler
does not honour the mask of a gather, so hidden pairs have the offset 0 there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.block_mask import keep_visible
from diyfa.backends.npu.attention.primitives import masked
from diyfa.problem import AttentionProblem, AttentionTensors
from diyfa.score_code import Spelling
from diyfa.score_programs import MAX_TENSORS


@triton.jit
def precise_tanh(x):
    """Return the hyperbolic tangent of fp32, with a small relative error near 0: there the polynomial of Cephes."""
    z = x * x
    poly = z * -5.70498872745e-3 + 2.06390887954e-2
    poly = poly * z - 5.37397155531e-2
    poly = poly * z + 1.33314422036e-1
    poly = poly * z - 3.33332819422e-1
    t = 1.0 - 2.0 / (tl.exp(x * 2.0) + 1.0)
    return tl.where(tl.abs(x) < 0.625, poly * z * x + x, t)


@triton.jit
def number(x):
    """Return x, a boolean as an integer."""
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    return x


@triton.jit
def mask_of_offset(offset, pairs, rows, cols):
    """Return the mask of a load at `offset`, which has the shape of the tile, of its rows or of its columns."""
    if offset.shape[0] == pairs.shape[0] and offset.shape[1] == pairs.shape[1]:
        mask = pairs
    elif offset.shape[0] == rows.shape[0] and offset.shape[1] == rows.shape[1]:
        mask = rows
    else:
        mask = cols
    return mask


@triton.jit
def as_number(value):
    """Return loaded values as the function gets them: fp32, integers of 32 or 64 bits, or booleans, stored as uint8."""
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    if value.dtype == tl.int8:  # products would wrap
        value = value.to(tl.int32)
    if value.dtype == tl.uint8:
        value = value.to(tl.float32) > 0.0
    return value


@triton.jit
def load_captured(pointer, offset, pairs, rows, cols):
    """Return an element of a captured tensor for each visible pair, as `as_number` does."""
    if offset.type.is_block():
        value = tl.load(pointer + tl.where(mask_of_offset(offset, pairs, rows, cols), offset, 0))
    else:
        value = tl.load(pointer + offset)
    return as_number(value)


@triton.jit
def load_line(pointer, offset, pairs, rows, cols):
    """Return a line: consecutive elements of a captured tensor, one for each row or for each column of a tile."""
    return as_number(tl.load(pointer + offset, mask=mask_of_offset(offset, pairs, rows, cols), other=0))


@triton.jit
def load_key_line(pointer, offset, pairs, rows, cols):
    """Return elements as `load_line` does for columns, and for rows as `load_captured` does, one by one.

    It is for calls with a block mask. That may hide all keys from any row, so the rows to read for need not be
    consecutive, as those of a line must be."""
    if offset.shape[0] == cols.shape[0] and offset.shape[1] == cols.shape[1]:
        value = load_line(pointer, offset, pairs, rows, cols)
    else:
        value = load_captured(pointer, offset, pairs, rows, cols)
    return value


@triton.jit
def rows_and_keys(pairs, row0, n0, sq, sk, window_right, TRANSPOSED: tl.constexpr, c: tl.constexpr):
    """Return (query rows, keys, which rows to read for, which keys to read for) of a tile, that broadcast to it.

    Nothing is read for rows from which a mask hides all keys. There are such rows even under a causal mask, if there
    are more queries than keys: the first ones have positions below 0. Both masks are integer compares, from which the
    compiler finds the range to load."""
    rows = tl.arange(0, c.BLOCK_M) + row0
    keys = tl.arange(0, c.BLOCK_N) + n0
    read_rows = rows < sq
    read_keys = keys < sk
    if c.HAS_RIGHT:
        read_rows = read_rows & (rows >= sq - sk - window_right)
    if TRANSPOSED:
        rows, keys, read_rows, read_keys = rows[None, :], keys[:, None], read_rows[None, :], read_keys[:, None]
    else:
        rows, keys, read_rows, read_keys = rows[:, None], keys[None, :], read_rows[:, None], read_keys[None, :]
    if c.MASK_K:
        seen = tl.where(pairs, 1.0, 0.0)
        if TRANSPOSED:
            read_rows = tl.max(seen, 0)[None, :] > 0.0
        else:
            read_rows = tl.max(seen, 1)[:, None] > 0.0
    return rows, keys, read_rows, read_keys


@triton.jit
def _visible_pairs(
    is_partial, lists, bits_ptr, row0, n0, sq, sk, seqlen_k, window_left, window_right,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Return `seen` of a tile: 1.0 for each pair of a query and a key that sees it, else 0.0, [BLOCK_M, BLOCK_N].

    `is_partial`, `lists`, `bits_ptr`: as in `block_mask.keep_visible`. MASKED: positions may hide pairs."""
    rows = tl.arange(0, c.BLOCK_M).to(tl.float32)
    keys = tl.arange(0, c.BLOCK_N).to(tl.float32)
    rows_exist = rows < (sq - row0).to(tl.float32)
    keys_exist = keys < (sk - n0).to(tl.float32)
    if TRANSPOSED:
        seen = tl.where(rows_exist[None, :] & keys_exist[:, None], 1.0, 0.0)
    else:
        seen = tl.where(rows_exist[:, None] & keys_exist[None, :], 1.0, 0.0)
    if c.MASK_K:
        seen = keep_visible(seen, 0.0, is_partial, lists, bits_ptr, row0, n0, seqlen_k, TRANSPOSED, c)
    if MASKED:
        seen = masked(seen, 0.0, row0, n0, sq, sk, window_left, window_right, TRANSPOSED, c)
    return seen


@triton.jit
def function_scores(
    s, b, h, is_partial, lists, bits_ptr, row0, n0, sq, sk, seqlen_k, window_left, window_right, t0, t1, t2, t3,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Return (the user's function of scores s, -inf for hidden pairs; 1.0 for each visible pair, else 0.0)."""
    seen = _visible_pairs(
        is_partial, lists, bits_ptr, row0, n0, sq, sk, seqlen_k, window_left, window_right, MASKED, TRANSPOSED, c
    )  # fmt: skip
    pairs = seen > 0.0
    rows, keys, read_rows, read_keys = rows_and_keys(pairs, row0, n0, sq, sk, window_right, TRANSPOSED, c)
    new = c.SCORE_FN(s, b, h, rows + (sk - sq), keys, pairs, read_rows, read_keys, t0, t1, t2, t3)
    return tl.where(pairs, new, float("-inf")), seen


@triton.jit
def function_gradient(
    ds, s, seen, b, h, row0, n0, sq, sk, window_right, t0, t1, t2, t3, TRANSPOSED: tl.constexpr, c: tl.constexpr
):  # fmt: skip
    """Return the gradient of scores s, the function's argument, from `ds`, the gradient of its result."""
    pairs = seen > 0.0
    rows, keys, read_rows, read_keys = rows_and_keys(pairs, row0, n0, sq, sk, window_right, TRANSPOSED, c)
    slope = c.SCORE_SLOPE(s, b, h, rows + (sk - sq), keys, pairs, read_rows, read_keys, t0, t1, t2, t3)
    ds = tl.where(pairs, ds, 0.0)  # products leave anything in hidden pairs
    return tl.where(ds != 0.0, ds * slope, 0.0)  # whose slope may be anything, too


@triton.jit
def add_gradient(pointer, offset, ds, partial, pairs, rows, cols):
    """Add the gradients of loaded values, ds * partial, to the fp32 gradient of their tensor at `offset`.

    `partial`: derivative of the function by the loaded value. If one element was loaded for a whole row or column of
    the tile, its gradients are summed first and added once."""
    gradient = tl.where(ds != 0.0, ds * partial, 0.0)  # hidden pairs may have any derivative
    if offset.type.is_block():
        if offset.shape[0] == pairs.shape[0] and offset.shape[1] == pairs.shape[1]:
            total = gradient
        elif offset.shape[0] == 1:
            total = tl.sum(gradient, 0)[None, :]
        else:
            total = tl.sum(gradient, 1)[:, None]
        tl.atomic_add(pointer + tl.where(total != 0.0, offset, 0), total)  # 0 of hidden pairs is added at offset 0
    else:
        tl.atomic_add(pointer + offset, tl.sum(tl.sum(gradient, 1), 0))


@triton.jit
def add_captured_gradients(
    ds, s, b, h, row0, n0, sq, sk, window_right, t0, t1, t2, t3, g0, g1, g2, g3, c: tl.constexpr
):  # fmt: skip
    """Add the gradients of captured tensors, from `ds`, the gradient of the function's result, 0 for hidden pairs."""
    pairs = ds != 0.0
    rows, keys, read_rows, read_keys = rows_and_keys(pairs, row0, n0, sq, sk, window_right, False, c)
    c.SCORE_GRADIENTS(ds, s, b, h, rows + (sk - sq), keys, pairs, read_rows, read_keys, t0, t1, t2, t3, g0, g1, g2, g3)


_SPELLING = Spelling(
    __name__, "score, b, h, i, j, pairs, rows, cols, t0, t1, t2, t3", "g0, g1, g2, g3", "pairs, rows, cols",
    load_line="load_line",
)  # fmt: skip
_SPELLING_WITH_MASK = replace(_SPELLING, load_line="load_key_line")


def spelling(problem: AttentionProblem) -> Spelling:
    """Return how the kernels of a problem pass arguments to its score function."""
    return _SPELLING_WITH_MASK if problem.mask else _SPELLING


def captured_values(tensors: AttentionTensors) -> dict[str, torch.Tensor | None]:
    """Return the captured tensors by kernel argument, in types that the chip has: float64 is rounded to float32."""
    values = {}
    for n in range(MAX_TENSORS):
        x = getattr(tensors, f"score_tensor{n}")
        if x is not None and x.dtype == torch.float64:
            x = x.to(torch.float32)
        values[f"score_tensor{n}_ptr"] = x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x
    return values
