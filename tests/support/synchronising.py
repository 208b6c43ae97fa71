"""The statements of a kernel that synchronise, for tests that take one out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Container


class Synchronising:
    """A kernel's source and its statements that call one of `functions`, or a method called like one of `methods`.

    `harmless` are statements, as `ast.unparse` writes them, that do not count.
    """

    def __init__(
        self, source: str, functions: Container[str], methods: Container[str], harmless: Container[str] = ()
    ) -> None:
        self.tree = ast.parse(source)
        self._functions, self._methods, self._harmless = functions, methods, harmless
        self.lines = [ast.unparse(x) for x in self._statements(self.tree)]

    def _statements(self, tree: ast.AST) -> list[ast.Expr]:
        """Those that synchronise and do nothing else, in the order of the source."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
        return sorted((call for call in calls if self._counts(call)), key=lambda call: call.lineno)

    def _counts(self, call: ast.Expr) -> bool:
        assert isinstance(call.value, ast.Call)
        function = call.value.func
        method = isinstance(function, ast.Attribute) and function.attr in self._methods
        return (method or ast.unparse(function) in self._functions) and ast.unparse(call) not in self._harmless

    def source(self) -> str:
        """The source as it is."""
        return ast.unparse(self.tree)

    def without(self, number: int) -> str:
        """The source without one of `lines`."""
        tree = copy.deepcopy(self.tree)
        self._statements(tree)[number].value = ast.Constant(None)
        return ast.unparse(tree)
