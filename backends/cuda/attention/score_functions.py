"""Score functions in the portable kernels: Triton code of the user's function and of its derivatives.

`diyfa.score_functions` defines programs. Three jit functions are made of one:

* the function itself, which reads captured tensors only where a query sees a key;
* its derivative by the score;
* the gradients of captured tensors: the derivative by each value that the function loads, times the gradient of the
  score, is added at the offset of the load, by atomics.

Kernels find the functions in their constants, as `JitSource`: text, which is in the key of the binary.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import triton
import triton.language as tl

from diyfa.backends.cuda.attention.scores import tanh
from diyfa.backends.cuda.runtime.jit_source import JitSource
from diyfa.score_functions import (
    LOAD,
    OPERATIONS,
    Line,
    Operand,
    Program,
    load_gradients,
    programs,
    slope_program,
)


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
    """Return an element of a captured tensor for each visible pair, as fp32 if it is a floating-point number."""
    if offset.type.is_block():
        value = tl.load(pointer + offset, mask=mask_of_offset(offset, seen), other=0)
    else:
        value = tl.load(pointer + offset)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    return value


@triton.jit
def add_gradient(pointer, offset, ds, partial, seen):
    """Add ds times a partial derivative, the gradient of a loaded value, to that of its tensor at `offset`, fp32.

    An offset that is equal for all rows or columns of the tile is added to once.
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


def _spelled(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    text = repr(operand)
    return text if isinstance(operand, bool) or text.lstrip("-")[0].isdigit() else f'float("{text}")'


def _code(line: Line) -> str:
    """Return the code of a line."""
    if line.operation == LOAD:
        return f"{line.target} = load_captured({line.operands[0]}, {_offset(line.operands[1])}, seen)"
    operation = OPERATIONS[line.operation]
    texts = [x if isinstance(x, str) else f"({_spelled(x)})" for x in line.operands]
    if operation.is_float:
        texts = [
            f"tl.cast({x}, tl.float32)" if isinstance(y, str) else x for x, y in zip(texts, line.operands, strict=True)
        ]
    return f"{line.target} = {operation.triton.format(*texts)}"


def _offset(operand: Operand) -> str:
    """Return the code of a load's offset, which is never a Python number."""
    return operand if isinstance(operand, str) else f"h * 0 + {operand}"


def _named(program: Program, kind: str, arguments: str, body: list[str]) -> JitSource:
    code = [*[f"t{n} = captured[{n}]" for n in range(program.tensors)], *body]
    text = "\n".join(f"    {line}" for line in code)
    name = f"{program.name}_{kind}_{blake2b(text.encode(), digest_size=16).hexdigest()}"
    return JitSource(name, f"def {name}({arguments}):\n{text}\n", __name__)


_ARGUMENTS = "score, b, h, i, j, seen, captured"


def _function(program: Program) -> JitSource:
    return _named(program, "value", _ARGUMENTS, [*map(_code, program.lines), f"return {_spelled(program.result)}"])


@lru_cache(maxsize=256)
def value_source(source: str) -> JitSource | None:
    """Return the function, or None if a call has none."""
    return _function(programs(source)[0]) if source else None


@lru_cache(maxsize=256)
def slope_source(source: str) -> JitSource | None:
    """Return the derivative by the score, or None if a call has no function."""
    return _function(slope_program(source)) if source else None


@lru_cache(maxsize=256)
def gradients_source(source: str, learned: tuple[bool, ...]) -> JitSource:
    """Return the function that adds the gradients of the `learned` captured tensors to `gradients`."""
    program = programs(source)[0]
    body = [*map(_code, program.lines)]
    for index, offset, lines, result in load_gradients(source, learned):
        if result != 0.0:
            body += map(_code, lines)
            body.append(f"add_gradient(gradients[{index}], {_offset(offset)}, ds, {_spelled(result)}, seen)")
    return _named(program, "gradients", f"ds, {_ARGUMENTS}, gradients", body)
