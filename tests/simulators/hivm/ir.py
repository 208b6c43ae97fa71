"""A parser of MLIR's generic form, as `bishengir-opt --mlir-print-op-generic --mlir-print-local-scope` prints it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

DYNAMIC = -(2**63)  # MLIR's number for a size, offset or stride that an operand gives


@dataclass
class Block:
    """Operations in order, and the names and types of the block's arguments."""

    arguments: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Operation:
    """One operation. `results` and `operands` are names of values; `attributes` are still text."""

    name: str
    results: list[str]
    operands: list[str]
    attributes: dict[str, str]
    regions: list[Block] = field(default_factory=list)
    operand_types: list[str] = field(default_factory=list)
    result_types: list[str] = field(default_factory=list)
    line: int = 0
    cache: Any = None  # prepared once by an interpreter


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    text = text.replace("->", "\x00")  # no bracket
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip().replace("\x00", "->") for part in parts if part.strip()]


def _dictionary(text: str) -> dict[str, str]:
    pairs = (item.partition(" = ") for item in split(text))
    return {name: value for name, _, value in pairs}


_RESULTS = re.compile(r"^(%\w+)(?::(\d+))? = ")
_HEAD = re.compile(r'^"([\w.]+)"\(([^()]*)\)')
_BLOCK = re.compile(r"^\^\w+\((.*)\):$")


def _closing(text: str, opening: int) -> int:
    """Return the index after the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(f"unbalanced: {text[:100]}")


def _tail(operation: Operation, text: str) -> None:
    """Parse the text after the regions: `{attributes} : (operand types) -> result types`."""
    text = text.strip()
    if text.startswith("{"):
        end = _closing(text, 0)
        operation.attributes.update(_dictionary(text[1 : end - 1]))
        text = text[end:].strip()
    if not text.startswith(": ("):
        raise ValueError(f"line {operation.line}: no types in {text[:100]!r}")
    end = _closing(text, 2)
    operation.operand_types = split(text[3 : end - 1])
    results = text[end:].strip().removeprefix("-> ")
    operation.result_types = split(results[1:-1]) if results.startswith("(") else [results]


def parse(text: str) -> dict[str, Operation]:
    """Return {name: function} of a module."""
    functions: dict[str, Operation] = {}
    open_operations: list[Operation] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line:
            continue
        if line.startswith("}, {"):
            open_operations[-1].regions.append(Block())
        elif line.startswith("})"):
            operation = open_operations.pop()
            _tail(operation, line[2:])
            if operation.name == "func.func":
                functions[operation.attributes["sym_name"].strip('"')] = operation
        elif line.startswith("^"):
            header = _BLOCK.match(line)
            block = open_operations[-1].regions[-1]
            if header is None or block.operations or block.arguments:
                raise ValueError(f"line {number}: a region of several blocks")
            for argument in split(header[1]):
                name, _, kind = argument.partition(": ")
                block.arguments.append(name)
                block.types.append(kind)
        else:
            operation, opens = _operation(line, number)
            if open_operations:
                open_operations[-1].regions[-1].operations.append(operation)
            if opens:
                operation.regions.append(Block())
                open_operations.append(operation)
    if open_operations:
        raise ValueError(f"{open_operations[-1].name} does not end")
    return functions


def _operation(line: str, number: int) -> tuple[Operation, bool]:
    """Return one operation, and whether its regions follow."""
    results: list[str] = []
    if found := _RESULTS.match(line):
        count = int(found[2] or 1)
        results = [found[1]] if count == 1 else [f"{found[1]}#{i}" for i in range(count)]
        line = line[found.end() :]
    head = _HEAD.match(line)
    if head is None:
        raise ValueError(f"line {number}: not an operation: {line[:100]}")
    operation = Operation(head[1], results, split(head[2]), {}, line=number)
    rest = line[head.end() :].strip()
    if rest.startswith("<{"):
        end = _closing(rest, 1)
        operation.attributes = _dictionary(rest[2 : end - 1])
        rest = rest[end + 1 :].strip()
    if rest == "({":
        return operation, True
    _tail(operation, rest)
    return operation, False


# ---- attributes and types ---------------------------------------------------------------------------------------


@cache
def integers(attribute: str) -> list[int]:
    """Parse `array<i64: 1, 2>`."""
    return [int(x) for x in attribute.removesuffix(">").partition(":")[2].split(",") if x.strip()]


@cache
def name_in(attribute: str) -> str:
    """Return the text in the innermost angle brackets: `#hivm.pipe<PIPE_V>` -> `PIPE_V`."""
    return attribute.rpartition("<")[2].rstrip(">")


@cache
def groups(attribute: str) -> list[list[int]]:
    """Parse `[[0, 1], [2]]`."""
    return [list(group) for group in ast.literal_eval(attribute)]


_MEMREF = re.compile(
    r"^memref<((?:[\d?]+x)*)(\w+)(?:, strided<\[[^\]]*\](?:, offset: [\d?]+)?>)?, #hivm.address_space<(\w+)>>$"
)


@cache
def memref(kind: str) -> tuple[tuple[int, ...], str, str]:
    """Parse a memref type into (sizes, DYNAMIC if an operand gives them; type of the elements; address space)."""
    found = _MEMREF.match(kind)
    if found is None:
        raise ValueError(f"not a memref in a known memory: {kind}")
    sizes = tuple(DYNAMIC if size == "?" else int(size) for size in found[1].split("x") if size)
    return sizes, found[2], found[3]


class _CeilDiv(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        negative = ast.UnaryOp(ast.USub(), node.left)
        return ast.UnaryOp(ast.USub(), ast.BinOp(negative, ast.FloorDiv(), node.right))


_MAP = re.compile(r"^affine_map<\(([^()]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$")


@cache
def affine(attribute: str) -> Callable[..., tuple[int, ...]]:
    """Return an affine map as a function of its dimensions and symbols. `mod` and `floordiv` round down."""
    found = _MAP.match(attribute)
    if found is None:
        raise ValueError(f"not an affine map: {attribute}")
    names = [name.strip() for part in (found[1], found[2] or "") for name in part.split(",") if name.strip()]
    body = found[3].replace("floordiv", "//").replace("ceildiv", "@").replace("mod", "%")
    tree = ast.parse(f"lambda {', '.join(names)}: ({body},)", mode="eval")
    function: Callable[..., tuple[int, ...]] = eval(
        compile(ast.fix_missing_locations(_CeilDiv().visit(tree)), "", "eval")
    )
    return function
