"""The compile gate: every kernel with matrix products must be bound and pipelined, except those listed with a reason.

*Bound*: both vector cores of an AI core share the work. *Pipelined* four deep: while the vector cores work on one tile
of scores, the cube core already works on the next ones. `EXCEPTIONS` lists the kernels for which the compiler does
less. The table may only shrink: the gate also fails if an exception is no longer needed, and a test counts them.

Kernels for the vector cores alone (delta, sums) cannot be bound or pipelined. They must compile and fit. Without
multibuffering (`runtime/multibuffer.py`) nothing is pipelined, so only the first demand holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diyfa.arch import NPUArch, npu_spec
from diyfa.backends.npu.tables.configs import HEAD_DIM_CLASSES

DEPTH = 4  # required depth of the pipeline between cube and vector cores


@dataclass(frozen=True)
class GateException:
    """The gate's weaker demand on `families`, for kernels whose report's "kernel case" matches `pattern`."""

    families: frozenset[NPUArch]
    pattern: str
    bound: bool
    pipelined: int
    reason: str
    compiler: str = ""  # beginning of the AscendNPU IR version it is for; "": every version


_A2_A3 = frozenset({NPUArch.A2, NPUArch.A3})
_A5 = frozenset({NPUArch.A5})

EXCEPTIONS: tuple[GateException, ...] = (
    GateException(
        _A2_A3,
        r"^attention_bwd/v2/dkdv float32 (?!D=256 ).* 16x16$",
        True,
        2,
        "the accumulators of dk and dv in fp32 leave room for a workspace of two tiles of 16x16 only beyond D = 256",
    ),
    GateException(
        _A2_A3,
        r"^matmul/persistent (\w+)->\1 ",
        False,
        0,
        "a product in its operands' own dtype gives the vector cores nothing to do: nothing to share or to wait for",
    ),
    GateException(
        _A5,
        r"^(attention|matmul|kvcache)",
        False,
        0,
        "bishengir-compile-a5 of ascendnpu-ir 1.2.0 binds and pipelines no kernel with matrix products",
    ),
    GateException(
        _A2_A3,
        r"^(attention_fwd/v1|matmul/persistent epilogue) ",
        True,
        0,
        "1.1.0 pipelines no loop that stores to a tensor, but under an `if`; there 1.2.0 does not",
        compiler="1.1.",
    ),
    GateException(
        _A2_A3,
        r"^matmul/persistent float32->float16 ",
        False,
        0,
        "1.1.0 leaves a kernel that only converts operands on the vector cores to one of them, on every tile",
        compiler="1.1.",
    ),
)

# Conservative tiles that the oldest release refuses, by the beginning of the report's "kernel case". With that release
# such calls fail, and the error has both reasons.
NOT_CONSERVATIVE = {
    "attention_bwd/v2/dkdv float16 D=576 ": "the columns of dk and dv overflow 1.0.0's unified buffer beyond D = 512",
    **{
        f"kvcache_fwd/split_kv {dtype} D={head_dim} page=1 ": "1.0.0 crashes on keys that are gathered"
        for dtype in ("float16", "float32")
        for head_dim in HEAD_DIM_CLASSES
    },
}


def exception_for(target: str, kernel: str, case: str, compiler: str) -> GateException | None:
    """Return the exception for a kernel compiled by AscendNPU IR `compiler`, or None. The last match counts."""
    spec = npu_spec(target)
    name = f"{kernel} {case}"
    holding = [
        e
        for e in EXCEPTIONS
        if spec and spec.arch in e.families and re.search(e.pattern, name) and compiler.startswith(e.compiler)
    ]
    return holding[-1] if holding else None


def failures(
    target: str, kernel: str, case: str, bound: bool, pipelined: int, compiler: str, multibuffer: bool = True
) -> list[str]:
    """Return the gate's objections to a compiled kernel with matrix products; [] if it passes.

    `multibuffer`: whether it was compiled with multibuffering."""
    exception = exception_for(target, kernel, case, compiler)
    if not multibuffer:
        return [] if bound or (exception and not exception.bound) else ["gate: not split over both vector cores"]
    if exception is None:
        problems = [] if bound else ["gate: not split over both vector cores"]
        return problems if pipelined >= DEPTH else [*problems, f"gate: pipeline depth {pipelined}, expected {DEPTH}"]
    if (bound, pipelined) == (exception.bound, exception.pipelined):
        return []
    if bound >= exception.bound and pipelined >= exception.pipelined:
        return [f"gate: better than its exception, which has to go: {exception.reason}"]
    return [f"gate: {'bound' if bound else 'unbound'}, pipeline {pipelined}: worse than its exception allows"]
