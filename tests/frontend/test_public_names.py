"""Public names of the package."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import pytest

import diyfa


@pytest.mark.parametrize("name", diyfa.__all__)
def test_no_module_hides_a_public_name(name: str) -> None:
    """Python sets a submodule's name in its package when it is imported, whatever the name stood for before."""
    if find_spec(f"diyfa.{name}") is not None:
        assert isinstance(getattr(diyfa, name), ModuleType)
