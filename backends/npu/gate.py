"""The compile gate: which kernels need not be bound or pipelined, each with its reason.

A kernel with matrix products must be *bound* (both vector cores of an AI core share its work) and *pipelined* four deep
(while the vector cores work on one tile of scores the cube core is ahead with the next). `EXCEPTIONS` is what this
compiler does not do so for. The table may only shrink: the gate also fails for an exception that is no longer needed,
and a test knows how many there are.

Kernels for the vector cores alone (delta, sums) have nothing to share or to wait for: of them the gate asks that they
compile and fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diyfa.arch import NPUArch, npu_spec

DEPTH = 4  # of the pipeline between cube and vector cores


@dataclass(frozen=True)
class GateException:
    """What is accepted of kernels of `families` instead: of those whose report's "kernel case" matches `pattern`."""

    families: frozenset[NPUArch]
    pattern: str
    bound: bool
    pipelined: int
    reason: str


_A2_A3 = frozenset({NPUArch.A2, NPUArch.A3})
_A5 = frozenset({NPUArch.A5})

EXCEPTIONS: tuple[GateException, ...] = (
    GateException(
        _A2_A3,
        r"^attention_bwd/(v2/dkdv|fused) float32 .* 16x16$",
        True,
        2,
        "the accumulators of dk and dv in fp32 leave room for a workspace of two tiles of 16x16 only",
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
        r"^(attention|matmul)",
        False,
        0,
        "bishengir-compile-a5 of ascendnpu-ir 1.2.0 binds and pipelines no kernel with matrix products",
    ),
)


def exception_for(target: str, kernel: str, case: str) -> GateException | None:
    """The exception that holds for a kernel, if any."""
    spec = npu_spec(target)
    name = f"{kernel} {case}"
    return next((e for e in EXCEPTIONS if spec and spec.arch in e.families and re.search(e.pattern, name)), None)


def failures(target: str, kernel: str, case: str, bound: bool, pipelined: int) -> list[str]:
    """What the gate says against a compiled kernel with matrix products; empty where it passes."""
    exception = exception_for(target, kernel, case)
    if exception is None:
        found = [] if bound else ["gate: not split over both vector cores"]
        return found if pipelined >= DEPTH else [*found, f"gate: pipeline depth {pipelined}, expected {DEPTH}"]
    if (bound, pipelined) == (exception.bound, exception.pipelined):
        return []
    if bound >= exception.bound and pipelined >= exception.pipelined:
        return [f"gate: better than its exception, which has to go: {exception.reason}"]
    return [f"gate: {'bound' if bound else 'unbound'}, pipeline {pipelined}: worse than its exception allows"]
