"""Loop-carried numbers with the compiler's types.

A Python number that a loop changes becomes a number of the kernel when the loop begins: int32 or float32, with that
type's range, and with division that rounds towards zero. So code before each loop passes every name that the loop
assigns through `CARRIED`. Loops over `static_range` are unrolled and carry nothing. The compiler refuses a constexpr
that is defined in such a loop, because each iteration would define it once more.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType

from .errors import InvalidOperand

CARRIED = "__carried"


def _is_static(loop: ast.AST) -> bool:
    called = loop.iter.func if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) else None
    return isinstance(called, (ast.Name, ast.Attribute)) and ast.unparse(called).endswith("static_range")


def _assigned(nodes: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a loop's body assigns, except constexprs."""
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
            continue
        targets = []
        if isinstance(node, (ast.For, ast.While)) and _is_static(node):
            pass  # its variable is a constant in each iteration
        elif isinstance(node, ast.For):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
        for field in ("body", "orelse"):
            yield from _assigned(getattr(node, field, []))


class _Carry(ast.NodeTransformer):
    def _visit_loop(self, loop: ast.For | ast.While) -> list[ast.stmt] | ast.stmt:
        self.generic_visit(loop)
        if _is_static(loop):
            for node in ast.walk(loop):
                if isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
                    name = ast.unparse(node.target)
                    raise InvalidOperand(
                        f"line {node.lineno} defines the constant {name} in each round of a static_range"
                    )
            return loop
        lines = [
            f"try:\n    {name} = {CARRIED}({name})\nexcept NameError:\n    pass"
            for name in sorted(set(_assigned(loop.body)))
        ]
        before = ast.parse("\n".join(lines)).body
        for statement in before:
            for node in ast.walk(statement):
                if hasattr(node, "lineno"):
                    ast.copy_location(node, loop)
        return [*before, loop]

    visit_For = visit_While = _visit_loop


def carrying_code(function: Callable[..., object]) -> CodeType:
    """Return the function's code with `CARRIED` calls before each loop. File, lines and arguments stay."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    module = compile(ast.fix_missing_locations(_Carry().visit(tree)), function.__code__.co_filename, "exec")
    return next(
        const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == function.__name__
    )
