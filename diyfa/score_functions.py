"""Score and mask functions: jit functions of Triton, read as programs (`diyfa.score_programs`).

    @triton.jit
    def relative(score, b, h, i, j, table):
        return score + tl.load(table + h * 1023 + (i - j) + 511)

    out = diyfa.flash_attention(q, k, v, score_fn=relative, score_tensors=(table,))

`_Compiler` walks over the syntax tree of the function and writes one line for each operation. It refuses what no kernel
can do, with the line and the name of the operation.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from diyfa.score_programs import (
    LOAD,
    MASK_PARAMETERS,
    MAX_TENSORS,
    OPERATIONS,
    SCORE_PARAMETERS,
    Line,
    Operand,
    Program,
    run_operation,
)

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
            return run_operation(name, operands, torch.float64).item()
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
