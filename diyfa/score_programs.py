"""Programs of score and mask functions: a text that every backend can run and differentiate.

A program has one operation on each line, and each argument is a name or a number:

    def relative(score, b, h, i, j, t0):
        v0 = mul(h, 1023)
        …
        return v5

The text is the only form in which a function reaches operators, plans and kernels, so nothing depends on an object of
this process. `diyfa.score_functions` makes it of a jit function. `OPERATIONS` defines each operation once: what PyTorch
computes, how Triton spells it, and its partial derivatives, which are operations again. This module runs programs with
PyTorch; backends make kernels of them (`diyfa.score_code`).

The derivative of a function by the score is called its slope: the gradient of a score is the gradient of the new score
times the slope.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MAX_TENSORS = 4  # captured tensors of a function
SCORE_PARAMETERS = ("score", "b", "h", "i", "j")
MASK_PARAMETERS = ("b", "h", "i", "j")
_LN2 = math.log(2)


# ---- Operations ------------------------------------------------------------------------------------------------------


Operand = str | bool | int | float  # a name or a number
Emit = Callable[..., Operand]  # (operation, *operands) -> name of its result
Partial = Callable[..., Operand]  # (emit, result of an operation, *its operands) -> one of its partial derivatives


class Operation(NamedTuple):
    """An operation of programs.

    `triton` is its spelling, with {0}, {1}, … for the operands. `partials`: one partial derivative for each operand, as
    operations. (): all are 0. None: the operation has no derivative. `is_float`: operands that are integers become
    float32.
    """

    torch: Callable[..., Any]
    triton: str
    partials: tuple[Partial, ...] | None = None
    is_float: bool = False


def _binary(function: Callable[..., Any], sign: str, *partials: Partial, **rest: Any) -> Operation:
    return Operation(function, f"{{0}} {sign} {{1}}", partials or None, **rest)


def _comparison(function: Callable[..., Any], sign: str) -> Operation:
    return Operation(function, f"{{0}} {sign} {{1}}", ())


def _function(function: Callable[..., Any], spelling: str, partial: Partial) -> Operation:
    return Operation(function, f"{spelling}({{0}})", (partial,), is_float=True)


def _extremum_partials(comparison: str) -> tuple[Partial, Partial]:
    """Return the partial derivatives of a minimum ("lt") or maximum ("gt"). Equal operands have one half each."""

    def chosen(e: Emit, first: Operand, second: Operand) -> Operand:
        return e("where", e("eq", first, second), 0.5, e("where", e(comparison, first, second), 1.0, 0.0))

    return lambda e, out, x, y: chosen(e, x, y), lambda e, out, x, y: chosen(e, y, x)


def _to_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)  # the oracle computes in float64


def _as_number(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64) if x.dtype == torch.bool else x


def _subtract(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _as_number(x) - _as_number(y)  # PyTorch subtracts no booleans


def _divide_integers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


OPERATIONS = {
    "add": _binary(operator.add, "+", lambda e, out, x, y: 1.0, lambda e, out, x, y: 1.0),
    "sub": _binary(_subtract, "-", lambda e, out, x, y: 1.0, lambda e, out, x, y: -1.0),
    # A factor may be a comparison or an integer, but tangents are added as floating-point numbers.
    "mul": _binary(
        operator.mul, "*", lambda e, out, x, y: e("to_float32", y), lambda e, out, x, y: e("to_float32", x)
    ),
    "div": _binary(
        torch.div, "/", lambda e, out, x, y: e("div", 1.0, y), lambda e, out, x, y: e("neg", e("div", out, y)),
        is_float=True,
    ),
    "floordiv": _binary(_divide_integers, "//"),
    "remainder": _binary(torch.fmod, "%"),
    "bit_and": _binary(operator.and_, "&"),
    "bit_or": _binary(operator.or_, "|"),
    "bit_xor": _binary(operator.xor, "^"),
    "shift_left": _binary(operator.lshift, "<<"),
    "shift_right": _binary(operator.rshift, ">>"),
    "lt": _comparison(operator.lt, "<"),
    "le": _comparison(operator.le, "<="),
    "gt": _comparison(operator.gt, ">"),
    "ge": _comparison(operator.ge, ">="),
    "eq": _comparison(operator.eq, "=="),
    "ne": _comparison(operator.ne, "!="),
    "neg": Operation(operator.neg, "-{0}", (lambda e, out, x: -1.0,)),
    "invert": Operation(operator.invert, "~{0}"),
    # Its tangent is a choice between tangents: see `_Derivation._tangent`.
    "where": Operation(lambda c, x, y: torch.where(c.bool(), x, y), "tl.where(tl.cast({0}, tl.int1), {1}, {2})"),
    "minimum": Operation(torch.minimum, "tl.minimum({0}, {1})", _extremum_partials("lt")),
    "maximum": Operation(torch.maximum, "tl.maximum({0}, {1})", _extremum_partials("gt")),
    "abs": Operation(
        torch.abs, "tl.abs({0})",
        (lambda e, out, x: e("where", e("gt", x, 0), 1.0, e("where", e("lt", x, 0), -1.0, 0.0)),),
    ),
    "exp": _function(torch.exp, "tl.exp", lambda e, out, x: out),
    "exp2": _function(torch.exp2, "tl.exp2", lambda e, out, x: e("mul", out, _LN2)),
    "log": _function(torch.log, "tl.log", lambda e, out, x: e("div", 1.0, x)),
    "log2": _function(torch.log2, "tl.log2", lambda e, out, x: e("div", 1 / _LN2, x)),
    "sqrt": _function(torch.sqrt, "tl.sqrt", lambda e, out, x: e("div", 0.5, out)),
    "rsqrt": _function(torch.rsqrt, "tl.rsqrt", lambda e, out, x: e("div", e("mul", out, -0.5), x)),
    "sin": _function(torch.sin, "tl.sin", lambda e, out, x: e("cos", x)),
    "cos": _function(torch.cos, "tl.cos", lambda e, out, x: e("neg", e("sin", x))),
    "tanh": _function(torch.tanh, "precise_tanh", lambda e, out, x: e("sub", 1.0, e("mul", out, out))),
    "sigmoid": Operation(  # Gluon lacks tl.sigmoid
        torch.sigmoid, "1.0 / (1.0 + tl.exp(-({0})))", (lambda e, out, x: e("mul", out, e("sub", 1.0, out)),),
        is_float=True,
    ),
    "floor": Operation(torch.floor, "tl.floor({0})", (), is_float=True),
    "ceil": Operation(torch.ceil, "tl.ceil({0})", (), is_float=True),
    "to_number": Operation(_as_number, "number({0})", (lambda e, out, x: 1.0,)),
    "to_float32": Operation(_to_float32, "tl.cast({0}, tl.float32)", (lambda e, out, x: 1.0,)),
    "to_int32": Operation(lambda x: x.to(torch.int64), "tl.cast({0}, tl.int32)", ()),
    "to_int64": Operation(lambda x: x.to(torch.int64), "tl.cast({0}, tl.int64)", ()),
}  # fmt: skip
LOAD = "load"  # load(t0, offset): an element of a captured tensor


# ---- Programs --------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """An operation of a program: target = operation(operands)."""

    target: str
    operation: str
    operands: tuple[Operand, ...]


class Program(NamedTuple):
    """A parsed function: its name, its parameters (captured tensors are t0, t1, …), its lines and its result."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]
    result: Operand

    @property
    def tensors(self) -> int:
        """Number of captured tensors."""
        return sum(name[0] == "t" and name[1:].isdigit() for name in self.parameters)

    def text(self) -> str:
        """Return the program as text."""
        body = [f"    {x.target} = {x.operation}({', '.join(map(_number_text, x.operands))})" for x in self.lines]
        head = f"def {self.name}({', '.join(self.parameters)}):"
        return "\n".join([head, *body, f"    return {_number_text(self.result)}"])


def _number_text(operand: Operand) -> str:
    return operand if isinstance(operand, str) else repr(operand)


def _operand(text: str) -> Operand:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@lru_cache(maxsize=256)
def programs(source: str) -> tuple[Program, ...]:
    """Return the one or two programs of a text: the function, and its derivative by the score if the user gave it."""
    parsed = []
    for block in source.split("\n\n"):
        head, *body, end = block.split("\n")
        match = re.fullmatch(r"def (\w+)\((.*)\):", head)
        assert match, f"no program: {head}"
        lines = []
        for text in body:
            line = re.fullmatch(r"    (\w+) = (\w+)\((.*)\)", text)
            assert line, f"no operation: {text}"
            lines.append(Line(line[1], line[2], tuple(map(_operand, line[3].split(", ")))))
        result = _operand(end.removeprefix("    return "))
        parsed.append(Program(match[1], tuple(match[2].split(", ")), tuple(lines), result))
    return tuple(parsed)


def captured_tensors(source: str) -> int:
    """Return the number of captured tensors of a function, 0 without one."""
    return programs(source)[0].tensors if source else 0


def function_name(source: str) -> str:
    """Return the user's name of a function."""
    return programs(source)[0].name


def single_sample(source: str, b: int) -> str:
    """Return the program for a call of sample b alone: its first line adds b to the sample's index, 0 there."""
    return re.sub(r"^(def .*)$", rf"\1\n    b = add(b, {b})", source, flags=re.M) if source and b else source


# ---- Derivatives -----------------------------------------------------------------------------------------------------


class _Derivation:
    """Forward-mode differentiation of a program by `seed`, one of its names.

    The tangent of a name is its derivative by the seed. A name without a tangent does not depend on the seed.

    Attributes:
        lines: the operations that compute tangents, to be run behind those of the program.
        result: the tangent of the program's result.
    """

    def __init__(self, program: Program, seed: str, prefix: str) -> None:
        """Differentiate. Raises ValueError, with the operation, if one has no derivative."""
        self.lines: list[Line] = []
        self._prefix = prefix
        tangents: dict[str, Operand] = {seed: 1.0}
        for line in program.lines:
            if line.operation != LOAD and line.target != seed:
                tangent = self._tangent(line, tangents)
                if tangent != 0.0:
                    tangents[line.target] = tangent
        self.result = tangents.get(str(program.result), 0.0)

    def _tangent(self, line: Line, tangents: dict[str, Operand]) -> Operand:
        partials = OPERATIONS[line.operation].partials
        active = [(n, tangents[x]) for n, x in enumerate(line.operands) if isinstance(x, str) and x in tangents]
        if line.operation == "where":
            condition, *branches = line.operands
            chosen = [tangents.get(x, 0.0) if isinstance(x, str) else 0.0 for x in branches]
            return 0.0 if chosen == [0.0, 0.0] else self.emit("where", condition, *chosen)
        if active and partials is None:
            raise ValueError(OPERATIONS[line.operation].triton.format("x", "y"))
        total: Operand = 0.0
        for n, tangent in active if partials else ():
            assert partials, "checked"
            term = self.emit("mul", partials[n](self.emit, line.target, *line.operands), tangent)
            total = term if total == 0.0 else self.emit("add", total, term)
        return total

    def emit(self, name: str, *operands: Operand) -> Operand:
        """Append a line and return its target. Products with 1 or -1, and operations on numbers alone, need no line."""
        for factor, other in (operands, operands[::-1]) if name == "mul" else ():
            if factor in (1.0, -1.0):
                return other if factor == 1.0 else self.emit("neg", other)
        if not any(isinstance(x, str) for x in operands):
            return run_operation(name, operands, torch.float64).item()
        self.lines.append(Line(f"{self._prefix}{len(self.lines)}", name, operands))
        return self.lines[-1].target


@lru_cache(maxsize=256)
def slope_program(source: str) -> Program:
    """Return the program of the slope: the user's, else the function's with the lines that compute its tangent."""
    program, *slopes = programs(source)
    if slopes:
        return slopes[0]
    derivation = _Derivation(program, "score", "d")
    return Program(f"{program.name}_slope", program.parameters, (*program.lines, *derivation.lines), derivation.result)


class LoadGradient(NamedTuple):
    """The derivative of a function by one of the values that it loads, from captured tensor `tensor` at `offset`.

    `lines` are to be run behind those of the program. `result` is the derivative, or 0.0 if the function does not
    depend on the value."""

    tensor: int
    offset: Operand
    lines: tuple[Line, ...]
    result: Operand


@lru_cache(maxsize=256)
def load_gradients(source: str, learned: tuple[bool, ...]) -> tuple[LoadGradient, ...]:
    """Return the derivatives by all values that are loaded from captured tensors. `learned[n]`: tensor n has one."""
    program = programs(source)[0]
    gradients = []
    for n, line in enumerate(program.lines):
        if line.operation == LOAD and learned[index := int(str(line.operands[0])[1:])]:
            derivation = _Derivation(program, line.target, f"d{n}_")
            gradients.append(LoadGradient(index, line.operands[1], tuple(derivation.lines), derivation.result))
    return tuple(gradients)


def why_not_differentiable(source: str, learned: tuple[bool, ...]) -> str | None:
    """Return why no derivative by the score, unless the user gave it, and by the `learned` tensors exists, or None."""
    try:
        slope_program(source)
        load_gradients(source, learned)
    except ValueError as error:
        hint = "" if len(programs(source)) > 1 else "; score_grad_fn may give the derivative by the score"
        return f"score function {function_name(source)}: {error} has no derivative{hint}"
    return None


# ---- Running programs with PyTorch -----------------------------------------------------------------------------------


def _tensor(x: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    kind = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else dtype
    return torch.tensor(x, dtype=kind, device=device)


def run_operation(name: str, operands: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """Compute one operation of tensors and numbers. Floating-point numbers have `dtype`."""
    device = next((x.device for x in operands if isinstance(x, torch.Tensor)), "cpu")
    values = [_tensor(x, dtype, device) for x in operands]
    operation = OPERATIONS[name]
    if operation.is_float:
        values = [x if x.is_floating_point() else x.to(dtype) for x in values]
    return operation.torch(*values)


def run_program(
    program: Program, values: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Run a program on PyTorch tensors: `values` of its parameters by name, and the captured tensors.

    Autograd sees each operation. Floating-point elements of captured tensors are read as numbers of `dtype`, int8 as
    int32.
    """
    values = dict(values)
    _run_lines(program.lines, values, tensors, dtype)
    return _value(program.result, values, dtype)


def _value(operand: Operand, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return values[operand] if isinstance(operand, str) else _tensor(operand, dtype, values["b"].device)


def _run_lines(
    lines: Sequence[Line], values: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> None:
    """Add the targets of the lines to `values`."""
    flat = {f"t{n}": x.reshape(-1) for n, x in enumerate(tensors)}
    for target, name, operands in lines:
        if name == LOAD:
            x, offset = flat[str(operands[0])], operands[1]
            index = _value(offset, values, dtype)
            element = x.index_select(0, index.reshape(-1)).reshape(index.shape)  # refuses negative indices
            read_as = {torch.int8: torch.int32}.get(x.dtype, x.dtype)
            values[target] = element.to(dtype if x.is_floating_point() else read_as)
        else:
            values[target] = run_operation(name, [values[x] if isinstance(x, str) else x for x in operands], dtype)


def apply_score_function(
    source: str,
    scores: torch.Tensor,
    positions: Sequence[torch.Tensor],
    visible: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return new scores (B, H, Sq, Sk), -inf where a query does not see a key. It runs the function for visible pairs.

    `positions`: integer tensors b, h, i and j that broadcast to the scores. The result is differentiable by autograd,
    which uses the user's derivative by the score if there is one.
    """
    program, *derivative = programs(source)
    pairs = visible.expand(scores.shape)
    visible_scores = scores[pairs]
    values = {name: x.expand(scores.shape)[pairs] for name, x in zip(MASK_PARAMETERS, positions, strict=True)}
    if derivative and visible_scores.requires_grad:
        constant = visible_scores.detach()
        new = run_program(program, {"score": constant, **values}, tensors, scores.dtype)
        with torch.no_grad():
            slope = run_program(derivative[0], {"score": constant, **values}, tensors, scores.dtype)
        # Adds 0, whose derivative is the slope.
        new = new + (visible_scores - constant) * slope.expand(visible_scores.shape).to(scores.dtype)
    else:
        new = run_program(program, {"score": visible_scores, **values}, tensors, scores.dtype)
    result = torch.full_like(scores, -math.inf)
    return result.index_put((pairs,), new.to(scores.dtype).expand(visible_scores.shape))


def score_function_gradients(
    source: str,
    scores: torch.Tensor,
    ds: torch.Tensor,
    positions: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    learned: tuple[bool, ...],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradients of the scores and of the `learned` captured tensors from `ds`, that of the new scores.

    Derived as kernels do it, without autograd. Pairs whose ds is 0 may have any slope.
    """
    pairs, dtype = ds != 0, scores.dtype
    seen_scores, d_new = scores[pairs], ds[pairs]
    values = {name: x.expand(scores.shape)[pairs] for name, x in zip(MASK_PARAMETERS, positions, strict=True)}
    values["score"] = seen_scores
    slope = run_program(slope_program(source), values, tensors, dtype)
    d_scores = torch.zeros_like(ds).index_put((pairs,), d_new * slope)
    totals = [torch.zeros_like(x, dtype=dtype) if learned[n] else None for n, x in enumerate(tensors)]
    _run_lines(programs(source)[0].lines, values, tensors, dtype)
    for index, offset, lines, result in load_gradients(source, learned):
        _run_lines(lines, values, tensors, dtype)
        gradient = (d_new * _value(result, values, dtype)).expand(seen_scores.shape)
        total = totals[index]
        assert total is not None, "of a learned tensor"
        total.view(-1).index_add_(0, _value(offset, values, dtype).expand(seen_scores.shape), gradient)
    return d_scores, totals


@lru_cache(maxsize=256)
def mask_dtype(source: str, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype of `run_mask` with captured tensors of `dtypes`."""
    position = torch.empty(1, dtype=torch.int64, device="meta")
    return run_mask(source, (position,) * 4, [torch.empty(1, dtype=x, device="meta") for x in dtypes]).dtype


def run_mask(source: str, positions: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what the program of a mask function says of index tensors b, h, i and j that broadcast to each other."""
    (program,) = programs(source)
    return run_program(program, dict(zip(MASK_PARAMETERS, positions, strict=True)), tensors, torch.float32)
