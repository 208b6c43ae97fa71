"""diyfa inside other software. Nothing here acts on import; every change of the process can be taken back."""

from __future__ import annotations

from diyfa.integrations.alias import AliasHandle as AliasHandle
from diyfa.integrations.alias import alias_flash_attn as alias_flash_attn

__all__ = ["AliasHandle", "alias_flash_attn"]
