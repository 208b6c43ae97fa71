"""Triton code of score functions, for backends whose kernels contain them.

`diyfa.score_programs` defines programs. Three jit functions are made of one:

* the function itself;
* its derivative by the score;
* the gradients of captured tensors: the derivative by each value that the function loads, times the gradient of the
  score, is added at the offset of the load.

This module makes their text. For `score + tl.load(table + h * 255 + (i - j))` the CUDA backend gets

    def relative_value_…(score, b, h, i, j, seen, captured):
        t0 = captured[0]
        v0 = h * (255)
        v1 = i - j
        v2 = v0 + v1
        v3 = load_captured(t0, v2, seen)
        v4 = score + v3
        return v4

and, for the gradient of the table, the same lines and `add_gradient(gradients[0], v2, ds, 1.0, seen)` in place of the
last. Arguments are tiles: scores [rows, columns], i [rows, 1], j [1, columns], b and h scalars. `seen` is three masks:
the visible pairs, the rows that exist, the columns that exist.

A backend's `Spelling` says how its kernels pass arguments. Its module has the functions that the text calls:
`load_captured`, `add_gradient`, `number`, `precise_tanh`. If the module has a `JIT`, that makes the jit function in
place of `triton.jit`. Kernels have the functions among their constants, as `JitSource`: text, which is in the key of
the binary.

How a load is spelled depends on its offset, whose growth from pair to pair is called its step (`_steps`):

    offset        step    the load reads                      spelled
    h * 255 + 3   (0, 0)  one element for the tile            load_captured
    i + 5         (1, 0)  consecutive elements, one a row     `Spelling.load_line`
    j             (0, 1)  consecutive elements, one a column  `Spelling.load_line`
    any other, such as    any element for each pair: it       load_captured
    i - j or 2 * i        *gathers*, which is slow on NPUs
"""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from typing import Any

from diyfa.score_programs import LOAD, OPERATIONS, Line, Operand, Program, load_gradients, programs, slope_program


@dataclass(frozen=True)
class JitSource:
    """The source of a jit function. `module` has the names that the text uses.

    `name` contains a hash of the text and of the functions that it calls."""

    name: str
    text: str
    module: str

    def __repr__(self) -> str:
        return self.name  # in Triton's names of specialised functions, and in the key of its cache

    def function(self) -> Any:
        """Return the jit function."""
        return _jit_function(self)


@lru_cache(maxsize=256)
def _jit_function(source: JitSource) -> Any:
    import triton

    # Triton reads the source of a function from its file, and Python looks for that in linecache.
    file = f"<diyfa {source.name}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names = dict(vars(import_module(source.module)))
    exec(compile(source.text, file, "exec"), names)
    return names.get("JIT", triton.jit)(names[source.name])


@dataclass(frozen=True)
class Spelling:
    """How the kernels of a backend pass arguments to the functions, as text. {n}: the number of a captured tensor."""

    module: str
    arguments: str  # of the function and of its derivative
    gradient_arguments: str  # those of the gradients besides ds and `arguments`, behind them
    seen: str  # expression of the three masks
    load_line: str = "load_captured"  # function that reads consecutive elements, one for each row or for each column
    captured: str = ""  # expression of a captured tensor's pointer; "": the argument t{n} is the pointer
    gradient: str = "g{n}"  # expression of the pointer to its gradient


Step = tuple[int, int]  # growth of a number from one query to the next, and from one key to the next
_CONSTANT: Step = (0, 0)  # equal for all pairs of a tile
# Steps of offsets that read a line, consecutive elements: one for each row, one for each column.
_LINES: tuple[Step, ...] = ((1, 0), (0, 1))


def _steps(program: Program) -> dict[str, Step | None]:
    """Return {name: its step} for the parameters and lines of a program: i has (1, 0), i + 5 too, h * 255 has (0, 0).

    None: the number depends on both i and j, its growth is not constant, or it is equal for all pairs but has the shape
    of rows or columns, as i - i does."""
    steps: dict[str, Step | None] = {"b": _CONSTANT, "h": _CONSTANT, "i": (1, 0), "j": (0, 1), "score": None}
    for target, name, operands in program.lines:
        values = operands[1:] if name == LOAD else operands
        operand_steps = [steps[x] if isinstance(x, str) else _CONSTANT for x in values]
        linear = [x for x in operand_steps if x is not None]
        step: Step | None = None
        if all(x == _CONSTANT for x in operand_steps):
            step = _CONSTANT
        elif len(linear) == len(operand_steps):
            if name in ("add", "sub"):
                (i, j), (other_i, other_j) = linear
                sign = 1 if name == "add" else -1
                mixed = (i or other_i) and (j or other_j)
                total = (i + sign * other_i, j + sign * other_j)
                step = None if mixed or total == _CONSTANT else total
            elif name in ("to_int32", "to_int64"):
                (step,) = linear
        steps[target] = step
    return steps


def _step(program: Program, offset: Operand) -> Step | None:
    return _steps(program)[offset] if isinstance(offset, str) else _CONSTANT


@lru_cache(maxsize=256)
def gathered_loads(source: str, has_mask: bool = False) -> int:
    """Return how many loads gather: they read an element for each pair of a query and a key, at any offset.

    The number is that of the function or of its derivative, whichever has more. `has_mask`: a block mask may leave any
    rows of a tile, so a load of an element for each row gathers, too.
    """
    lines = _LINES[1:] if has_mask else _LINES
    return max(
        sum(
            line.operation == LOAD and _step(program, line.operands[1]) not in (_CONSTANT, *lines)
            for line in program.lines
        )
        for program in programs(source)
    )


@lru_cache(maxsize=256)
def value_source(source: str, spelling: Spelling) -> JitSource | None:
    """Return the function, or None if a call has none."""
    return _function(programs(source)[0], spelling) if source else None


@lru_cache(maxsize=256)
def slope_source(source: str, spelling: Spelling) -> JitSource | None:
    """Return the derivative by the score, or None if a call has no function."""
    return _function(slope_program(source), spelling) if source else None


@lru_cache(maxsize=256)
def gradients_source(source: str, learned: tuple[bool, ...], spelling: Spelling) -> JitSource:
    """Return the function that adds the gradients of the captured tensors: of tensor n if `learned[n]`.

    Its lines are those of the program, which form the offsets, then for each load the lines of its derivative and one
    `add_gradient`.
    """
    program = programs(source)[0]
    body = [_code(line, program, spelling) for line in program.lines]
    for index, offset, lines, result in load_gradients(source, learned):
        if result != 0.0:
            body += [_code(line, program, spelling) for line in lines]
            target = spelling.gradient.format(n=index)
            body.append(f"add_gradient({target}, {_offset(offset)}, ds, {_spelled(result)}, {spelling.seen})")
    return _named(program, "gradients", f"ds, {spelling.arguments}, {spelling.gradient_arguments}", body, spelling)


def _function(program: Program, spelling: Spelling) -> JitSource:
    body = [*[_code(line, program, spelling) for line in program.lines], f"return {_spelled(program.result)}"]
    return _named(program, "value", spelling.arguments, body, spelling)


def _named(program: Program, kind: str, arguments: str, body: list[str], spelling: Spelling) -> JitSource:
    """Return the source of a function that first gives pointers their names. `kind`: a word for its name."""
    pointers = [f"t{n} = {spelling.captured.format(n=n)}" for n in range(program.tensors)] if spelling.captured else []
    text = "\n".join(f"    {line}" for line in (*pointers, *body))
    digest = blake2b(f"{text}\n{_keys_of_called(spelling)}".encode(), digest_size=16).hexdigest()
    name = f"{program.name}_{kind}_{digest}"
    return JitSource(name, f"def {name}({arguments}):\n{text}\n", spelling.module)


@lru_cache
def _keys_of_called(spelling: Spelling) -> str:
    """Return Triton's keys of the functions that texts call, "" if Triton's interpreter runs them.

    Triton's key of a kernel has only the name of a text's function. Without these keys its cache would return a kernel
    with an older version of what the text calls.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    names = vars(import_module(spelling.module))
    called = sorted({"load_captured", spelling.load_line, "add_gradient", "number", "precise_tanh"})
    return " ".join(getattr(names.get(name), "cache_key", "") for name in called)


def _code(line: Line, program: Program, spelling: Spelling) -> str:
    """Return the Triton code of a program's line."""
    if line.operation == LOAD:
        tensor, offset = line.operands
        load = spelling.load_line if _step(program, offset) in _LINES else "load_captured"
        return f"{line.target} = {load}({tensor}, {_offset(offset)}, {spelling.seen})"
    operation = OPERATIONS[line.operation]
    texts = [x if isinstance(x, str) else f"({_spelled(x)})" for x in line.operands]
    if operation.is_float:
        texts = [
            f"tl.cast({x}, tl.float32)" if isinstance(y, str) else x for x, y in zip(texts, line.operands, strict=True)
        ]
    return f"{line.target} = {operation.triton.format(*texts)}"


def _spelled(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    text = repr(operand)
    return text if isinstance(operand, bool) or text.lstrip("-")[0].isdigit() else f'float("{text}")'


def _offset(operand: Operand) -> str:
    """Return the code of a load's offset. A plain number is added to h * 0, because the helpers take a tensor."""
    return operand if isinstance(operand, str) else f"h * 0 + {operand}"
