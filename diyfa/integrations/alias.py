"""Make `import flash_attn` mean diyfa, for programs and libraries that cannot be edited.

A finder at the head of `sys.meta_path` (Python's import protocol, PEP 451) answers for the modules of flash_attn that
diyfa has, and for the metadata of a distribution called flash-attn. So everything that asks Python gets a consistent
answer: import statements, `importlib.util.find_spec`, `importlib.metadata.version` and `packages_distributions`. The
modules it makes hold no code; they pass every name on to a module of diyfa.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from email.message import Message
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = "flash_attn"
# Module of flash_attn -> the module of diyfa that has its names; None for packages that only hold others.
MODULES: dict[str, str | None] = {
    ROOT: "diyfa.flash_attn_interface",
    f"{ROOT}.flash_attn_interface": "diyfa.flash_attn_interface",
    f"{ROOT}.bert_padding": "diyfa.bert_padding",
    f"{ROOT}.layers": None,
    f"{ROOT}.layers.rotary": "diyfa.layers.rotary",
    f"{ROOT}.ops": None,
    f"{ROOT}.ops.triton": None,
    f"{ROOT}.ops.triton.rotary": "diyfa.layers.rotary",
}
# What flash_attn's modules pass on from packages it depends on, because programs take it from there.
PASSED_ON: dict[str, dict[str, str]] = {f"{ROOT}.bert_padding": {"rearrange": "einops", "repeat": "einops"}}


class _AliasLoader(Loader):
    """Fills a module with nothing but the way to diyfa's."""

    def __init__(self, target: str | None, version: str) -> None:
        self.target = target
        self.version = version

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # an ordinary new module

    def exec_module(self, module: ModuleType) -> None:
        target = None if self.target is None else importlib.import_module(self.target)
        name = module.__name__

        names = [] if target is None else list(target.__all__)

        def lookup(attribute: str) -> Any:
            if target is not None and not attribute.startswith("__"):
                value = getattr(target, attribute, None)
                # What diyfa's module has imported for itself stays there: its `ops` is not flash_attn.ops.
                if attribute in names or getattr(value, "__module__", None) == target.__name__:
                    return value
            package = PASSED_ON.get(name, {}).get(attribute)
            if package is not None and importlib.util.find_spec(package) is not None:
                return getattr(importlib.import_module(package), attribute)
            raise AttributeError(f"module {name!r} (diyfa in place of flash_attn) has no attribute {attribute!r}")

        module.__doc__ = f"{name}, served by {self.target or 'diyfa'}."
        module.__dict__["__getattr__"] = lookup
        module.__dict__["__all__"] = names
        module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *names})
        if name == ROOT:
            module.__dict__["__version__"] = self.version


class _FlashAttnDistribution(Distribution):
    """Metadata of an installed package flash_attn."""

    def __init__(self, version: str) -> None:
        message = Message()
        message["Metadata-Version"] = "2.1"
        message["Name"] = ROOT
        message["Version"] = version
        message["Summary"] = "diyfa, in place of flash_attn"
        self._files = {"METADATA": str(message), "top_level.txt": f"{ROOT}\n"}

    def read_text(self, filename: str) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parents[1] / path


def _normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class _AliasFinder(MetaPathFinder):
    """Answers for `flash_attn`, its submodules and its distribution; for nothing else."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.handle = AliasHandle(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        # The search path of a package stays empty: what diyfa does not have is not found in a real flash_attn either.
        return ModuleSpec(
            fullname,
            _AliasLoader(MODULES[fullname], self.version),
            origin=f"diyfa in place of {fullname}",
            is_package=is_package,
        )

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        if context.name is None or _normalised(context.name) == _normalised(ROOT):
            yield _FlashAttnDistribution(self.version)


class AliasHandle:
    """What `alias_flash_attn` did; `remove()` takes it back."""

    def __init__(self, finder: _AliasFinder) -> None:
        self._finder = finder

    @property
    def version(self) -> str:
        """The version of flash_attn that is claimed."""
        return self._finder.version

    @property
    def active(self) -> bool:
        return self._finder in sys.meta_path

    def remove(self) -> None:
        """Forget the alias and the modules made through it; a second time does nothing.

        Names that a program has imported meanwhile stay what they are.
        """
        if self.active:
            sys.meta_path.remove(self._finder)
            for name in [n for n, module in sys.modules.items() if _is_ours(n, module)]:
                del sys.modules[name]


def _is_ours(name: str, module: ModuleType) -> bool:
    return name in MODULES and isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _AliasLoader)


def alias_flash_attn(version: str = "2.8.3") -> AliasHandle:
    """Make `import flash_attn` in this process mean diyfa, whether or not flash_attn is installed.

    Call it before anything imports flash_attn or looks for it: libraries ask once and remember (transformers does when
    it is imported). A second call returns the same handle.

    Args:
        version: what `flash_attn.__version__` and the distribution's metadata say, for programs that compare it.

    Returns:
        A handle whose `remove()` takes everything back.

    Raises:
        TypeError: the version is no str.
        RuntimeError: another flash_attn is imported already, or the alias exists with another version.
        ValueError: the version is not one or more numbers with dots, and optionally a suffix.
    """
    if not isinstance(version, str):
        raise TypeError(f"version must be a str such as '2.8.3', got {version!r}")
    if not re.fullmatch(r"\d+(\.\d+)*([.+-]?\w+)*", version):
        raise ValueError(f"version must look like 2.8.3, got {version!r}")
    for finder in sys.meta_path:
        if isinstance(finder, _AliasFinder):
            if finder.version != version:
                raise RuntimeError(f"flash_attn is diyfa already, as version {finder.version}; remove that alias first")
            return finder.handle
    taken = [n for n, m in sys.modules.items() if n.split(".")[0] == ROOT and not _is_ours(n, m)]
    if taken:
        raise RuntimeError(f"flash_attn is imported already ({min(taken)}): call alias_flash_attn before that")
    finder = _AliasFinder(version)
    sys.meta_path.insert(0, finder)
    return finder.handle
