"""Score and mask functions: jit functions of Triton as programs that every backend can run and differentiate.

    @triton.jit
    def relative(score, b, h, i, j, table):
        return score + tl.load(table + h * 1023 + (i - j) + 511)

    out = diyfa.flash_attention(q, k, v, score_fn=relative, score_tensors=(table,))

A program is text with one operation on each line, each argument a name or a number:

    def relative(score, b, h, i, j, t0):
        v0 = mul(h, 1023)
        …
        return v5

The text is the only form in which the function reaches operators, plans and kernels, so nothing depends on an object of
this process. `OPERATIONS` defines each operation once: what PyTorch computes, how Triton spells it, and its partial
derivatives, which are operations again. This module runs programs with PyTorch; backends make kernels of them.

The derivative of a function by the score is called its slope here: the gradient of a score is the gradient of the new
score times the slope.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MAX_TENSORS = 4  # captured tensors of a function
SCORE_PARAMETERS = ("score", "b", "h", "i", "j")
MASK_PARAMETERS = ("b", "h", "i", "j")
_LN2 = math.log(2)


# ---- Operations ----------------------------------------------------------------------------------------------------


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
# Operations that count with booleans. Triton's would wrap: True + True is False.
_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "floordiv", "remainder", "shift_left", "shift_right", "neg", "minimum", "maximum", "abs"}
)
_DIVISIONS = frozenset({"floordiv", "remainder"})  # Triton's take no boolean beside an integer
_OF_INTEGERS = frozenset({"floordiv", "bit_and", "bit_or", "bit_xor", "shift_left", "shift_right", "invert"})

_FROM_SYNTAX: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "remainder",
    ast.BitAnd: "bit_and", ast.BitOr: "bit_or", ast.BitXor: "bit_xor", ast.LShift: "shift_left",
    ast.RShift: "shift_right", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    ast.USub: "neg", ast.Invert: "invert",
}  # fmt: skip
_LIBDEVICE = {"fabs": "abs", "fmin": "minimum", "fmax": "maximum"}
_BUILTINS: dict[Any, str] = {abs: "abs", min: "minimum", max: "maximum"}  # Python's, which Triton compiles
_CALLABLE = frozenset(
    {"where", "minimum", "maximum", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh",
     "sigmoid", "floor", "ceil"}
)  # fmt: skip
_CASTS = {"float32": "to_float32", "int32": "to_int32", "int64": "to_int64"}
_HINTS: dict[type, str] = {
    ast.IfExp: "an if expression: use tl.where",
    ast.If: "an if statement: use tl.where",
    ast.BoolOp: "and, or: use & and | of comparisons in parentheses",
    ast.Not: "not: use ~",
    ast.For: "a loop",
    ast.While: "a loop",
    ast.Pow: "**: multiply, or use tl.exp2 and tl.log2",
    ast.Subscript: "an index: read a captured tensor by tl.load",
    ast.Tuple: "a tuple",
}


# ---- Programs ------------------------------------------------------------------------------------------------------


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


# ---- From a jit function to a program ------------------------------------------------------------------------------


class _Pointer(NamedTuple):
    """A pointer into captured tensor `tensor`."""

    tensor: int
    offset: Operand


class _Compiler:
    """Makes the program of one Python function. Its methods return operands, or pointers into captured tensors."""

    def __init__(self, function: Callable[..., Any], text: str | None, parameters: tuple[str, ...], what: str) -> None:
        self.what, self.function = f"{what} {function.__name__}", function
        try:
            text = text or textwrap.dedent(inspect.getsource(function))
        except OSError:
            raise ValueError(f"{self.what}: its source cannot be read; define it in a file") from None
        self.first_line = function.__code__.co_firstlineno
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef), "a jit function is a function"
        self.definition, self.name = definition, function.__name__
        self.lines: list[Line] = []
        self.constants = set[str]()  # names outside of the function whose numbers it reads
        self.variables = dict[str, Operand | _Pointer]()  # name in the function -> its value so far
        # Name in the program -> int or float. Names that may be booleans are absent: results of comparisons, loads.
        self.kinds: dict[str, type] = {name: float if name == "score" else int for name in parameters}
        self._bind_parameters(parameters)

    def refuse(self, node: ast.AST, text: str) -> ValueError:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        return ValueError(f"{self.what}, line {line}: {text}")

    def unknown(self, node: ast.AST, name: str) -> ValueError:
        known = ", ".join(sorted(_CALLABLE))
        return self.refuse(
            node,
            f"{name} is not supported. A function may use + - * / // % & | ^ ~ << >>, comparisons, tl.load of captured "
            f"tensors, casts to {', '.join(_CASTS)}, and {known}",
        )

    def _bind_parameters(self, parameters: tuple[str, ...]) -> None:
        arguments = self.definition.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            raise self.refuse(self.definition, f"its parameters are {', '.join(parameters)}, then captured tensors")
        names = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
        # Not the expressions in the text: their names belong to the scope around the function, and to that moment.
        defaults = dict(zip(names[::-1], (self.function.__defaults__ or ())[::-1], strict=False))
        if len(names) < len(parameters) or any(name in defaults for name in names[: len(parameters)]):
            text = f"it must take {', '.join(parameters)}, then captured tensors, got {', '.join(names)}"
            raise self.refuse(self.definition, text)
        self.variables.update(zip(names, parameters, strict=False))
        captured = [name for name in names[len(parameters) :] if name not in defaults]
        if len(captured) > MAX_TENSORS:
            text = f"it captures {len(captured)} tensors, at most {MAX_TENSORS} are supported"
            raise self.refuse(self.definition, text)
        self.parameters = (*parameters, *(f"t{n}" for n in range(len(captured))))
        self.variables.update({name: _Pointer(n, 0) for n, name in enumerate(captured)})
        for name, default in defaults.items():  # compile-time constants
            number = default if isinstance(default, (bool, int, float)) else _number(default)
            if number is None:
                text = f"the default of {name} must be a number, got {type(default).__name__}"
                raise self.refuse(self.definition, text)
            self.variables[name] = number

    def program(self) -> Program:
        """Return the program of the function."""
        for statement in self.definition.body:
            if isinstance(statement, ast.Return):
                if statement.value is None:
                    break
                result = self.operand(statement.value)
                return Program(self.name, self.parameters, tuple(self.lines), result)
            self.statement(statement)
        raise self.refuse(self.definition, "it returns nothing")

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.variables[node.targets[0].id] = self.expression(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.variables[node.target.id] = self.expression(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            left = self.expression(ast.Name(node.target.id, ast.Load(), lineno=node.lineno))
            self.variables[node.target.id] = self.binary(node, node.op, left, self.expression(node.value))
        else:
            raise self.unknown(node, _HINTS.get(type(node), f"the statement {ast.unparse(node)!r}"))

    def operand(self, node: ast.expr) -> Operand:
        """Return the value of an expression, which must not be a pointer."""
        value = self.expression(node)
        if isinstance(value, _Pointer):
            raise self.refuse(node, f"{ast.unparse(node)} is the pointer of a captured tensor: read it by tl.load")
        return value

    def expression(self, node: ast.expr) -> Operand | _Pointer:
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            return node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self.named(node)
        if isinstance(node, ast.BinOp):
            return self.binary(node, node.op, self.expression(node.left), self.expression(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self.operand(node.operand)
        if isinstance(node, ast.UnaryOp):
            name = _FROM_SYNTAX.get(type(node.op))
            if name is None:
                raise self.unknown(node, _HINTS[type(node.op)])
            return self.operation(node, name, self.operand(node.operand))
        if isinstance(node, ast.Compare):
            name = _FROM_SYNTAX.get(type(node.ops[0]))
            if len(node.ops) > 1 or name is None:
                raise self.unknown(node, f"the comparison {ast.unparse(node)!r}")
            return self.emit(name, self.operand(node.left), self.operand(node.comparators[0]))
        if isinstance(node, ast.Call):
            return self.call(node)
        raise self.unknown(node, _HINTS.get(type(node), f"the expression {ast.unparse(node)!r}"))

    def named(self, node: ast.Name | ast.Attribute) -> Operand | _Pointer:
        if isinstance(node, ast.Name) and node.id in self.variables:
            return self.variables[node.id]
        value = self.static(node)
        constant = _number(value)
        if constant is not None:
            self.constants.add(ast.unparse(node))
            return constant
        text = f"is neither a parameter nor a tl.constexpr number, got {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            text = "is a tensor: give it as a parameter and in the call's tensors"
        raise self.refuse(node, f"{ast.unparse(node)} {text}")

    def static(self, node: ast.expr) -> Any:
        """Return the Python object that a name outside of the function stands for, None if there is none."""
        return _look_up(self.function, ast.unparse(node)) if isinstance(_root(node), ast.Name) else None

    def binary(self, node: ast.AST, sign: ast.operator, left: Operand | _Pointer, right: Operand | _Pointer) -> Any:
        name = _FROM_SYNTAX.get(type(sign))
        if name is None:
            raise self.unknown(node, _HINTS.get(type(sign), f"the operator {type(sign).__name__}"))
        if isinstance(right, _Pointer) and name == "add" and not isinstance(left, _Pointer):
            left, right = right, left
        if isinstance(left, _Pointer) and name in ("add", "sub") and not isinstance(right, _Pointer):
            return _Pointer(left.tensor, self.emit(name, left.offset, right))
        if isinstance(left, _Pointer) or isinstance(right, _Pointer):
            raise self.refuse(node, "a captured tensor is a pointer: add an offset and read it by tl.load")
        return self.operation(node, name, left, right)

    def operation(self, node: ast.AST, name: str, *operands: Operand) -> Operand:
        """Emit an operator's operation."""
        if name in _OF_INTEGERS and float in map(self.kind, operands):
            raise self.refuse(node, f"{ast.unparse(node)}: the operator takes integers or booleans, as in Triton")
        return self.emit(name, *operands)

    def call(self, node: ast.Call) -> Operand:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "to" and not self.is_of_triton(function.value):
            return self.cast(node, self.operand(function.value), node.args)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        target = self.static(function)
        if isinstance(function, ast.Name) and target is not None:
            name = getattr(target, "__name__", name)  # of an import under another name
        if target is float and len(node.args) == 1:
            (argument,) = node.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, (str, int, float)):
                return float(argument.value)
            raise self.unknown(node, f"{ast.unparse(node)} of something else than a constant")
        if inspect.isbuiltin(target) and target in _BUILTINS:
            name = _BUILTINS[target]
        elif not self.is_of_triton(function):
            raise self.unknown(node, f"the call of {ast.unparse(function)}")
        name = _LIBDEVICE.get(name, name)
        if name == LOAD:
            return self.load(node)
        if name == "cast":
            return self.cast(node, self.operand(node.args[0]), node.args[1:])
        if name not in _CALLABLE:
            raise self.unknown(node, f"the call of {ast.unparse(function)}")
        n_operands = len(re.findall(r"\{\d\}", OPERATIONS[name].triton))
        if node.keywords or len(node.args) != n_operands:
            raise self.refuse(node, f"{ast.unparse(function)} takes {n_operands} positional arguments here")
        return self.emit(name, *[self.operand(x) for x in node.args])

    def cast(self, node: ast.Call, value: Operand, arguments: Sequence[ast.expr]) -> Operand:
        dtype = getattr(arguments[0], "attr", "") if len(arguments) == 1 else ""
        if dtype not in _CASTS or node.keywords:
            raise self.unknown(node, f"the cast {ast.unparse(node)!r}")
        return self.emit(_CASTS[dtype], value)

    def is_of_triton(self, node: ast.expr) -> bool:
        """Return whether the object that a name stands for, or the module that it belongs to, is Triton's."""
        root = _root(node)
        if isinstance(root, ast.Name) and root.id in self.variables:
            return False
        value = self.static(root)
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        return isinstance(module, str) and module.split(".")[0] == "triton"

    def load(self, node: ast.Call) -> Operand:
        keywords = {x.arg: x.value for x in node.keywords}
        if len(node.args) != 1 or not keywords.keys() <= {"mask", "other"}:
            raise self.refuse(node, "tl.load takes a pointer here, and mask= and other=")
        pointer = self.expression(node.args[0])
        if not isinstance(pointer, _Pointer):
            raise self.refuse(node, f"tl.load reads a captured tensor, {ast.unparse(node.args[0])} is no pointer")
        if "mask" not in keywords:
            return self.emit(LOAD, f"t{pointer.tensor}", pointer.offset)
        mask = self.operand(keywords["mask"])
        other = self.operand(keywords["other"]) if "other" in keywords else 0
        value = self.emit(LOAD, f"t{pointer.tensor}", self.emit("where", mask, pointer.offset, 0))
        return self.emit("where", mask, value, other)

    def emit(self, name: str, *operands: Operand) -> Operand:
        """Append a line and return its target. Operations on numbers alone, and additions of 0, need no line."""
        if name in ("add", "sub") and operands[1] == 0 and isinstance(operands[1], int):
            return operands[0]
        if name == "add" and operands[0] == 0 and isinstance(operands[0], int):
            return operands[1]
        kinds = [self.kind(x) for x in operands]
        # Where all operands may be booleans, Triton would compute with booleans. Beside a number it converts them
        # itself, except in divisions.
        if name in _ARITHMETIC and (name in _DIVISIONS or not {int, float} & {*kinds}):
            operands = tuple([self.number(x) for x in operands])
            kinds = [kind or int for kind in kinds]
        if not any(isinstance(x, str) for x in operands):
            return _run(name, operands, torch.float64).item()
        line = Line(f"v{len(self.lines)}", name, operands)
        self.lines.append(line)
        if (kind := _result_kind(name, kinds)) is not None:
            self.kinds[line.target] = kind
        return line.target

    def number(self, operand: Operand) -> Operand:
        """Return an operand as a number if it may be a boolean."""
        if isinstance(operand, str):
            return operand if self.kind(operand) else self.emit("to_number", operand)
        return int(operand) if isinstance(operand, bool) else operand

    def kind(self, operand: Operand) -> type | None:
        """Return int, float, bool (of a number), or None for a name that may be a boolean."""
        return self.kinds.get(operand) if isinstance(operand, str) else type(operand)


def _result_kind(name: str, kinds: Sequence[type | None]) -> type | None:
    """Return int or float if an operation of such operands surely gives no booleans."""
    if name == LOAD or name in ("lt", "le", "gt", "ge", "eq", "ne"):
        return None
    if OPERATIONS[name].is_float or name == "to_float32":
        return float
    if name in ("to_number", "to_int32", "to_int64"):
        return int
    ranked = kinds[1:] if name == "where" else kinds
    return float if float in ranked else int if int in ranked else None


def _root(node: ast.expr) -> ast.expr:
    """Return the first part of a name with attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _look_up(function: Callable[..., Any], name: str) -> Any:
    """Return the object that a name outside of a function, with attributes, stands for now. None: there is none."""
    first, *attributes = name.split(".")
    code = function.__code__
    if first in code.co_freevars:
        value = (function.__closure__ or ())[code.co_freevars.index(first)].cell_contents
    else:
        value = function.__globals__.get(first, getattr(builtins, first, None))
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _number(value: Any) -> bool | int | float | None:
    """Return the number of a tl.constexpr, or None for other objects."""
    number = getattr(value, "value", None) if type(value).__name__ == "constexpr" else None
    return number if isinstance(number, (bool, int, float)) else None


def is_jit_function(function: Any) -> bool:
    """Return whether `function` is a `@triton.jit` function, compiled or interpreted."""
    return hasattr(function, "arg_names") and inspect.isfunction(getattr(function, "fn", None))


@lru_cache(maxsize=256)
def _compiled(
    function: Callable[..., Any], text: str | None, parameters: tuple[str, ...], what: str, numbers: tuple[Any, ...]
) -> tuple[Program, tuple[str, ...]]:
    """Return the program of a function, and the names outside of it whose numbers it contains.

    `numbers` are what these names stand for now. They are part of the cache's key: with other numbers the function is
    compiled again. () if the names are not known yet.
    """
    compiler = _Compiler(function, text, parameters, what)
    return compiler.program(), tuple(sorted(compiler.constants))


def _program(function: Any, parameters: tuple[str, ...], what: str) -> Program:
    """Return the program of a jit function. Its `src` is the source, which Triton's interpreter does not keep."""
    described = function.fn, getattr(function, "src", None), parameters, what
    program, names = _compiled(*described, ())
    if names:  # a constant may be another number than in the call before
        program, _ = _compiled(*described, tuple([repr(_number(_look_up(function.fn, name))) for name in names]))
    return program


def mask_program(function: Any) -> str:
    """Return the program of a jit function of (b, h, i, j, captured tensors) that says which keys a query sees."""
    return _program(function, MASK_PARAMETERS, "mask function").text()


class ScoreFunction(NamedTuple):
    """A score function that `score_function` has read: `score_fn=` takes it in place of the jit function."""

    name: str
    tensors: int  # number of captured tensors
    source: str  # its program, and that of the user's derivative


def score_function(score_fn: Any, score_grad_fn: Any = None) -> ScoreFunction:
    """Read a score function, so that calls that torch.compile traces can take it.

    Args:
        score_fn: a `@triton.jit` function of (score, b, h, i, j, captured tensors), as for `diyfa.flash_attention`.
        score_grad_fn: a jit function of the same parameters that returns the derivative by the score; default: derived.

    Raises:
        TypeError: it is no jit function.
        ValueError: it does what no kernel can, with the line and the name of the operation.
    """
    if isinstance(score_fn, ScoreFunction) and score_grad_fn is None:
        return score_fn
    if torch.compiler.is_compiling():
        raise ValueError(
            "torch.compile cannot read a jit function: give score_fn=diyfa.score_function(…), made outside of the "
            "compiled program"
        )
    functions = {"score_fn": score_fn} | ({} if score_grad_fn is None else {"score_grad_fn": score_grad_fn})
    for name, function in functions.items():
        if not is_jit_function(function):
            hint = "; decorate it with @triton.jit" if inspect.isfunction(function) else ""
            raise TypeError(f"{name} must be a @triton.jit function, got {type(function).__name__}{hint}")
    program = _program(score_fn, SCORE_PARAMETERS, "score function")
    if score_grad_fn is None:
        return ScoreFunction(program.name, program.tensors, program.text())
    derivative = _program(score_grad_fn, SCORE_PARAMETERS, "score gradient function")
    if derivative.tensors != program.tensors:
        raise ValueError(f"score_grad_fn must take the {program.tensors} tensors of score_fn, got {derivative.tensors}")
    return ScoreFunction(program.name, program.tensors, f"{program.text()}\n\n{derivative.text()}")


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
            return _run(name, operands, torch.float64).item()
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


# ---- Running programs with PyTorch ---------------------------------------------------------------------------------


def _tensor(x: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    kind = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else dtype
    return torch.tensor(x, dtype=kind, device=device)


def _run(name: str, operands: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
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
            values[target] = _run(name, [values[x] if isinstance(x, str) else x for x in operands], dtype)


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
