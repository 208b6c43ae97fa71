"""Register diyfa with modules of PyTorch when they are imported, so that `import diyfa` imports none of them.

`torch.ops.diyfa.…` finds the operators after `import diyfa` alone, whichever of torch and diyfa is imported first, and
`FlopCounterMode` counts them. The first look-up of an operator imports the module that defines it, the import of
`torch.utils.flop_counter` that of the FLOP formulas.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing these takes longer than the rest of this module
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _ImportHook:
    """A finder of `sys.meta_path` that calls `register` once somebody has imported the module `name`."""

    def __init__(self, name: str, register: Callable[[], object]) -> None:
        self.name, self.register = name, register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.register()

            loader.exec_module = execute_and_register
        return spec


def when_imported(name: str, register: Callable[[], object]) -> None:
    """Call `register` now if the module `name` has been imported, else as soon as somebody imports it."""
    if name in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _ImportHook(name, register))


def _define_on_look_up() -> None:
    """Let `torch.ops.diyfa` import the module that defines an operator when the operator is looked up."""
    import torch

    namespace: Any = torch.ops.diyfa
    plain = type(namespace)

    def look_up(self: Any, name: str) -> Any:
        try:
            return plain.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__"):  # Python asks every module for these
                raise
        # While the module defines an operator, PyTorch looks it up. Then this finds the half-imported module.
        modules = {"kvcache": "diyfa.kvcache_ops", "matmul": "diyfa.matmul_ops"}
        import_module(modules.get(name.partition("_")[0], "diyfa.ops"))
        return plain.__getattr__(self, name)

    # PyTorch names operators, also in saved programs, after the module of their namespace's class.
    namespace.__class__ = type(plain.__name__, (plain,), {"__getattr__": look_up, "__module__": plain.__module__})


def register() -> None:
    """Register the operators and the FLOP formulas, each once its module of PyTorch has been imported."""
    when_imported("torch", _define_on_look_up)
    when_imported("torch.utils.flop_counter", lambda: import_module("diyfa.flops"))
