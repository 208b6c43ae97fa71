"""Importing diyfa is cheap and touches nothing."""

from __future__ import annotations

import json

from subprocesses import run_python

MEASURE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import diyfa
seconds = time.perf_counter() - start
new = set(sys.modules) - before
print(json.dumps({
    "seconds": seconds,
    "kernel_languages": sorted(n for n in new if n.split(".")[0] in ("triton", "torch_npu")),
    "backends": sorted(n for n in new if n.startswith("diyfa.backends.")),
    "cuda": torch.cuda.is_initialized(),
}))
"""

EVERYTHING_BUT_KERNELS = """
import sys
import torch
before = set(sys.modules)
import diyfa.attention, diyfa.matmul, diyfa.ops, diyfa.reference, diyfa.testing, diyfa.registry
q = torch.zeros(1, 1, 4, 8)
diyfa.flash_attention(q, q, q, backend="cpu")
print(sorted(n for n in set(sys.modules) - before if n.split(".")[0] in ("triton", "torch_npu")))
print(torch.cuda.is_initialized())
"""


def test_import_is_fast_and_touches_no_device() -> None:
    runs = [json.loads(run_python(MEASURE)) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 0.05
    assert runs[0]["kernel_languages"] == []
    assert runs[0]["backends"] == []
    assert runs[0]["cuda"] is False


def test_cpu_call_loads_no_kernel_language() -> None:
    assert run_python(EVERYTHING_BUT_KERNELS).split("\n")[:2] == ["[]", "False"]


def test_unknown_attribute() -> None:
    assert run_python("import diyfa\ntry: diyfa.flash\nexcept AttributeError as e: print(e)").strip() == (
        "module 'diyfa' has no attribute 'flash'"
    )
