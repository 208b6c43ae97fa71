"""Which backends the tests run on here, and how: natively, on the device, or in the Triton interpreter."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from diyfa.registry import load_backend
from diyfa.testing import AttentionCase

# Kernels for a few large problems, or for a mode, which refuse most cases of `cases.py`; they have tests of their own.
SPECIALISED = frozenset({"sm90", "split_kv"})


@dataclass(frozen=True)
class Target:
    """A backend and the device its tensors live on. `interpreted`: its kernels run in Triton's interpreter."""

    backend: str
    device: str
    interpreted: bool

    @property
    def computes(self) -> bool:
        """Whether PyTorch's own operators work on the device: the host shim of an NPU only allocates and copies."""
        return not (self.device == "npu" and self.interpreted)

    @property
    def oracle_device(self) -> str:
        """Where references are computed: only a real GPU computes float64 itself."""
        return "cuda" if self.device == "cuda" else "cpu"


def _exists(backend: str) -> bool:
    return importlib.util.find_spec(f"diyfa.backends.{backend}") is not None


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _npu_refusal() -> str | None:
    """Why the NPU kernels do not run on CPU tensors here, or None."""
    if not (_exists("npu") and _has_triton()):
        return "no diyfa.backends.npu, or no Triton"
    return load_backend("npu").accepts(torch.device("cpu"))


def _has_npu() -> bool:
    npu = getattr(torch, "npu", None)
    return npu is not None and npu.is_available()


def available_targets() -> dict[str, Target]:
    """Targets by backend name: DIYFA_TEST_BACKENDS (comma-separated) or, by default, all three, npu only where its
    kernels run in the interpreter on CPU tensors: npu tensors need torch_npu, in an environment of its own."""
    requested = os.environ.get("DIYFA_TEST_BACKENDS", "")
    names = [name.strip() for name in requested.split(",") if name.strip()] if requested else ["cpu", "cuda", "npu"]
    targets = {}
    for name in names:
        if name == "cpu":
            targets[name] = Target("cpu", "cpu", False)
        elif name == "cuda" and (requested or (_exists("cuda") and _has_triton())):
            gpu = torch.cuda.is_available()
            targets[name] = Target("cuda", "cuda" if gpu else "cpu", not gpu)
        elif name == "npu":
            interpreted = os.environ.get("TRITON_INTERPRET") == "1"
            if requested and _has_npu():
                targets[name] = Target("npu", "npu", interpreted)
            elif requested or (interpreted and _npu_refusal() is None):
                targets[name] = Target("npu", "cpu", True)
        elif name not in ("cpu", "cuda"):
            raise ValueError(f"DIYFA_TEST_BACKENDS names an unknown backend: {name!r}")
    return targets


TARGETS = available_targets()


def absent() -> list[str]:
    """What this machine lacks, in words, for the summary."""
    lines = []
    if not torch.cuda.is_available():
        reason = "no CUDA device: cuda kernels run in the Triton interpreter on small cases only"
        if not _has_triton():
            reason = "no CUDA device and no Triton: cuda kernels are not tested"
        elif not _exists("cuda"):
            reason = "no diyfa.backends.cuda: not tested"
        lines.append(reason)
    if not _has_npu():
        manner = "run in the Triton interpreter on CPU tensors"
        if reason := _npu_refusal():
            manner = f"are not tested: {reason}"
        lines.append(f"no NPU (torch_npu finds none): npu kernels {manner}")
    return lines


def by_the_host_without_keys(target: Target, case: AttentionCase) -> AbstractContextManager[object]:
    """Calls without a query or a key run no kernel. Some arithmetic on the sinks is then left to PyTorch, which the
    host shim of an NPU has not got; everywhere else it must fail there."""
    if target.computes or 0 not in case.sizes:
        return nullcontext()
    from npu_interpreter import WITHOUT_KEYS, on_the_host

    return on_the_host(*(WITHOUT_KEYS if case.sinks else WITHOUT_KEYS[:1]))
