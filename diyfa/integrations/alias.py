"""Aliases that make `import flash_attn`, FlashAttention-3's module or flash_attn_npu mean diyfa, for programs and
libraries that cannot be edited.

A finder at the head of `sys.meta_path` (Python's import protocol, PEP 451) finds those modules of the package that
diyfa has, and the metadata of its distribution. So import statements, `importlib.util.find_spec`,
`importlib.metadata.version` and `packages_distributions` give consistent answers. The modules that the finder makes
hold no code; they forward every name to a module of diyfa.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from email.message import Message
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Package:
    """A package that diyfa can replace.

    `modules`: {module: module of diyfa with the same names}; None for a package that only contains other modules.
    `passed_on`: {module: {name: package}} of names that a module imports from its dependencies and programs import
    from the module.
    """

    distribution: str
    function: str  # name of the function below that makes the alias
    modules: dict[str, str | None]
    passed_on: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def roots(self) -> list[str]:
        return [name for name in self.modules if "." not in name]


_FA2, _FA3 = "diyfa.flash_attn_interface", "diyfa.integrations.flash_attn_3"
FLASH_ATTN = Package(
    "flash_attn",
    "alias_flash_attn",
    {
        "flash_attn": _FA2,
        "flash_attn.flash_attn_interface": _FA2,
        "flash_attn.bert_padding": "diyfa.bert_padding",
        "flash_attn.layers": None,
        "flash_attn.layers.rotary": "diyfa.layers.rotary",
        "flash_attn.ops": None,
        "flash_attn.ops.triton": None,
        "flash_attn.ops.triton.rotary": "diyfa.layers.rotary",
    },
    {"flash_attn.bert_padding": {"rearrange": "einops", "repeat": "einops"}},
)
FLASH_ATTN_3 = Package(
    "flash_attn_3",
    "alias_flash_attn_3",
    {"flash_attn_interface": _FA3, "flash_attn_3": None, "flash_attn_3.flash_attn_interface": _FA3},
)
_NPU = "diyfa.integrations.flash_attn_npu"
FLASH_ATTN_NPU = Package(
    "flash_attn_npu",
    "alias_flash_attn_npu",
    {
        "flash_attn_npu": f"{_NPU}.v2",
        "flash_attn_npu.flash_attn_npu_interface": f"{_NPU}.v2",
        "flash_attn_npu_3": f"{_NPU}.v3",
        "flash_attn_npu_3.flash_attn_npu_interface": f"{_NPU}.v3",
        "flash_attn_npu_4": f"{_NPU}.v4",
        "flash_attn_npu_4.flash_attn_npu_interface": f"{_NPU}.v4",
        "flash_attn_npu_v3": _FA3,  # until 0.2 in place of flash_attn_npu_3
        "flash_attn_npu_v3.flash_attn_interface": _FA3,
    },
)
PACKAGES = (FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_NPU)


class _AliasLoader(Loader):
    """Loads an empty module that looks its names up in a module of diyfa."""

    def __init__(self, package: Package, target: str | None, version: str) -> None:
        self.package = package
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
                # Names that diyfa's module imported for its own use are not forwarded: its `ops` is not flash_attn.ops.
                if attribute in names or getattr(value, "__module__", None) == target.__name__:
                    return value
            source = self.package.passed_on.get(name, {}).get(attribute)
            if source is not None and importlib.util.find_spec(source) is not None:
                return getattr(importlib.import_module(source), attribute)
            raise AttributeError(f"module {name!r} (diyfa in its place) has no attribute {attribute!r}")

        module.__doc__ = f"{name}, served by {self.target or 'diyfa'}."
        module.__dict__["__getattr__"] = lookup
        module.__dict__["__all__"] = names
        module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *names})
        if "." not in name:
            module.__dict__["__version__"] = self.version


class _AliasDistribution(Distribution):
    """The metadata of the replaced package, as if it were installed."""

    def __init__(self, package: Package, version: str) -> None:
        message = Message()
        message["Metadata-Version"] = "2.1"
        message["Name"] = package.distribution
        message["Version"] = version
        message["Summary"] = f"diyfa, in place of {package.distribution}"
        self._files = {"METADATA": str(message), "top_level.txt": "\n".join([*package.roots, ""])}

    def read_text(self, filename: str) -> str | None:
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parents[1] / path


def _normalised(name: str) -> str:
    """Return a distribution's name in PEP 503's normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


class AliasHandle(MetaPathFinder):
    """The handle of an alias; `remove()` undoes it. It finds the package's modules and its distribution only."""

    def __init__(self, package: Package, version: str) -> None:
        self.package = package
        self.version = version  #: the version that the alias reports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        modules = self.package.modules
        if fullname not in modules:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in modules)
        # The search path of a package stays empty, so a module that diyfa lacks is not found in the real package.
        return ModuleSpec(
            fullname,
            _AliasLoader(self.package, modules[fullname], self.version),
            origin=f"diyfa in place of {fullname}",
            is_package=is_package,
        )

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        if context.name is None or _normalised(context.name) == _normalised(self.package.distribution):
            yield _AliasDistribution(self.package, self.version)

    @property
    def active(self) -> bool:
        return self in sys.meta_path

    @property
    def imported(self) -> list[str]:
        """The modules that were imported through the alias."""
        return [n for n, module in sys.modules.items() if _is_ours(self.package, n, module)]

    def remove(self) -> None:
        """Remove the alias and the modules made through it. A second call does nothing.

        Names that a program has imported from these modules stay bound.
        """
        if self.active:
            sys.meta_path.remove(self)
            for name in self.imported:
                del sys.modules[name]


def _is_ours(package: Package, name: str, module: ModuleType) -> bool:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return name in package.modules and isinstance(loader, _AliasLoader)


def active_alias(package: Package) -> AliasHandle | None:
    """Return the handle of the package's alias if it is on, else None."""
    handles = (finder for finder in sys.meta_path if isinstance(finder, AliasHandle))
    return next((handle for handle in handles if handle.package is package), None)


def _alias(package: Package, version: str) -> AliasHandle:
    if not isinstance(version, str):
        raise TypeError(f"version must be a str such as '2.8.3', got {version!r}")
    if not re.fullmatch(r"\d\w*([.+-]\w+)*", version):
        raise ValueError(f"version must look like 2.8.3, got {version!r}")
    handle, name = active_alias(package), package.distribution
    if handle is not None:
        if handle.version != version:
            raise RuntimeError(f"{name} is diyfa already, as version {handle.version}; remove that alias first")
        return handle
    imported = [
        n for n, m in sys.modules.items() if n.split(".")[0] in package.roots and not _is_ours(package, n, m)
    ]  # fmt: skip
    if imported:
        raise RuntimeError(f"{name} is imported already ({min(imported)}): call {package.function} before that")
    handle = AliasHandle(package, version)
    sys.meta_path.insert(0, handle)
    return handle


def alias_flash_attn(version: str = "2.8.3") -> AliasHandle:
    """Make `import flash_attn` in this process mean diyfa, whether or not flash_attn is installed.

    Call it before anything imports flash_attn or looks for it: libraries look once and remember (transformers does so
    at its import). A second call returns the same handle.

    Args:
        version: the value of `flash_attn.__version__` and of the distribution's metadata, for programs that compare it.

    Returns:
        A handle whose `remove()` undoes everything.

    Raises:
        TypeError: the version is no str.
        RuntimeError: another flash_attn is imported already, or the alias exists with another version.
        ValueError: the version is not one or more numbers with dots, and optionally a suffix.
    """
    return _alias(FLASH_ATTN, version)


def alias_flash_attn_3(version: str = "3.0.0") -> AliasHandle:
    """`alias_flash_attn` for FlashAttention-3: `import flash_attn_interface` and `flash_attn_3.flash_attn_interface`.

    The functions are those of `diyfa.integrations.flash_attn_3`; the private ones and `flash_attn_combine` are absent.
    """
    return _alias(FLASH_ATTN_3, version)


def alias_flash_attn_npu(version: str = "0.4.2") -> AliasHandle:
    """`alias_flash_attn` for the package flash-attn-npu: its modules of all releases.

    * `flash_attn_npu` has the functions of flash_attn 2; MindSpeed imports it.
    * `flash_attn_npu_3` has those of FlashAttention-3 and `get_scheduler_metadata`; vLLM-Ascend imports it.
    * `flash_attn_npu_4` has FlashAttention-4's arguments. Masks and score functions are refused.
    * `flash_attn_npu_v3` is the older name of the second. With `num_splits=1` its `flash_attn_with_kvcache` runs inside
      `diyfa.batch_invariant()`, as vLLM-Ascend expects if inference must give the results of training.

    diyfa needs no scheduler metadata: `get_scheduler_metadata` returns a tensor without elements, and the functions
    refuse any other.
    """
    return _alias(FLASH_ATTN_NPU, version)


def alias_flash_attn_npu_v3(version: str = "0.1.1") -> AliasHandle:
    """`alias_flash_attn_npu` with the version of a release that has `flash_attn_npu_v3`."""
    return _alias(FLASH_ATTN_NPU, version)
