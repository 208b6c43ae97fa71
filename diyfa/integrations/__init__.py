"""diyfa inside other software. An import changes nothing; every change of the process can be undone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Module -> its public names.
_NAMES: dict[str, tuple[str, ...]] = {
    "alias": (
        "AliasHandle", "alias_flash_attn", "alias_flash_attn_3", "alias_flash_attn_npu", "alias_flash_attn_npu_v3",
    ),
    "diffusers": ("use_in_diffusers",),
    "overview": ("Status", "status"),
    "pytorch": ("use_in_pytorch",),
    "seams": ("Handle",),
    "transformers": ("use_in_transformers",),
}  # fmt: skip
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from diyfa.integrations.alias import AliasHandle as AliasHandle
    from diyfa.integrations.alias import alias_flash_attn as alias_flash_attn
    from diyfa.integrations.alias import alias_flash_attn_3 as alias_flash_attn_3
    from diyfa.integrations.alias import alias_flash_attn_npu as alias_flash_attn_npu
    from diyfa.integrations.alias import alias_flash_attn_npu_v3 as alias_flash_attn_npu_v3
    from diyfa.integrations.diffusers import use_in_diffusers as use_in_diffusers
    from diyfa.integrations.overview import Status as Status
    from diyfa.integrations.overview import status as status
    from diyfa.integrations.pytorch import use_in_pytorch as use_in_pytorch
    from diyfa.integrations.seams import Handle as Handle
    from diyfa.integrations.transformers import use_in_transformers as use_in_transformers


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'diyfa.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diyfa.integrations.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
