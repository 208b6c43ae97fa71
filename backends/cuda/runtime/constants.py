"""What a kernel is compiled for, as one object: its last argument, a constexpr, which helpers get whole."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import triton.language as tl

from diyfa.backends.cuda.runtime.launch import is_interpreting


@dataclass(frozen=True, eq=False)
class Constants:
    """Base of the frozen dataclasses of constants, which keep their hash: every launch looks its binary up by them.

    The host reads fields in lower case. They are plain values, and Triton keeps a compiled kernel under all of them. A
    kernel reads them in capitals, `c.BLOCK_M` for `block_m`: constexprs, because before 3.9 Triton takes numbers and
    strings that are attributes in some places only. What follows from them kernels derive themselves: the code of a
    property would not be part of what Triton keeps a kernel under.
    """

    __slots__ = ("_hash",)

    def _values(self) -> tuple[Any, ...]:
        return tuple([self.__dict__[each.name] for each in fields(self)])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((type(self), self._values())))
            return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # a hash is that of one process, and a frozen object would not let it be set

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        value = getattr(self, name.lower())
        return value if is_interpreting() else tl.constexpr(value)
