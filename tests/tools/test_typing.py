"""Type checkers and editors read of diyfa what there is.

`make lint` runs mypy on a user's file, tests/support/typed_user.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from stubs import FILE, stub

import diyfa

ROOT = Path(__file__).parents[2]


def test_the_stub_is_what_the_signatures_say() -> None:
    assert FILE.read_text(encoding="utf-8") == stub(), "run `make stubs`"


@pytest.mark.parametrize("file", ["diyfa/__init__.py", "diyfa/__init__.pyi"])
def test_every_public_name_is_visible(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported = {alias.asname or alias.name for alias in aliases}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(diyfa._PUBLIC) <= imported | defined
