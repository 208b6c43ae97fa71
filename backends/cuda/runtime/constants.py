"""A kernel's compile-time constants as one object: a constexpr, its last argument, which helpers get whole."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import triton.language as tl

from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.score_code import JitSource

_KINDS: dict[Any, type] = {name: kind for kind in (bool, int, str) for name in (kind, kind.__name__)}


@dataclass(frozen=True, eq=False)
class Constants:
    """Base of the frozen dataclasses of constants. They cache their hash: every launch looks its binary up by them.

    The host reads fields in lower case. They are plain values, and all are in Triton's key of a compiled kernel. A
    kernel reads them in capitals, `c.BLOCK_M` for `block_m`. These are constexprs, because before 3.9 Triton takes
    attributes that are numbers or strings only in some positions. There are no properties: their code would not be in
    Triton's key, so kernels derive values themselves.
    """

    __slots__ = ("_hash",)

    @classmethod
    def read_from(cls, *sources: Any, **given: Any) -> Any:
        """Return the constants with these `given`; others are fields of the `sources` (dataclasses) of the same name.

        A flag tells whether its field is not 0, False or ""."""
        kinds = {x.name: _KINDS[x.type] for x in fields(cls) if x.type in _KINDS and x.name not in given}
        names = [(source, x.name) for source in sources for x in fields(source) if x.name in kinds]
        return cls(**{name: kinds[name](getattr(source, name)) for source, name in names}, **given)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((type(self), *self.__dict__.values())))
            return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # without the hash: it holds in one process only, and a frozen object refuses to set it

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        value = getattr(self, name.lower())
        if isinstance(value, JitSource):
            value = value.function()
        return value if is_interpreting() else tl.constexpr(value)
