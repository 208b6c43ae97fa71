"""A kernel with constants: run by itself, without the interpreter, it prints what it compiles to with other values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from diyfa.backends.cuda.runtime.constants import Constants


@dataclass(frozen=True, eq=False)
class Values(Constants):
    size: int
    flag: bool
    form: str = "plain"
    dtype: tl.dtype = tl.float16


VALUES = Values(16, True)
OTHER_VALUES = {"size": 32, "flag": False, "form": "other", "dtype": tl.bfloat16}


@triton.jit
def _inner(x, TWICE: tl.constexpr, c: tl.constexpr):
    if c.FLAG and c.FORM == "plain":
        x = x + c.SIZE * 2
    if TWICE:
        x = x * 2
    return x


@triton.jit
def _kernel(ptr, c: tl.constexpr):
    x = tl.zeros([c.SIZE], tl.float32) + tl.arange(0, c.SIZE)
    tl.store(ptr + tl.arange(0, c.SIZE), _inner(x, not c.FLAG, c).to(c.DTYPE).to(tl.float32))


def main() -> None:
    """(hash, code) with VALUES, with the same values again, and with each of OTHER_VALUES."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    equal_values = Values(VALUES.size, VALUES.flag)
    hashes = []
    for constants in (
        VALUES,
        equal_values,
        *(replace(VALUES, **{name: other}) for name, other in OTHER_VALUES.items()),
    ):
        source = ASTSource(_kernel, {"ptr": "*fp32", "c": "constexpr"}, constexprs={(1,): constants})
        hashes.append((source.hash(), triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ttir"]))
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
