"""The CPU backend: the tiled algorithms of the other backends in plain PyTorch. It runs when named.

It is the executable description of the schedules (read `fwd.py` and `bwd.py` beside a Triton kernel). It works
everywhere, and with O(S) memory it can train a small model on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diyfa.backends.cpu import bwd, fwd, kvcache, matmul
from diyfa.backends.cpu.configs import attention_config, matmul_config
from diyfa.eight_bits import EIGHT_BITS
from diyfa.problem import (
    KVCACHE_FEATURES,
    AttentionProblem,
    Kernel,
    KVCacheProblem,
    MatmulProblem,
    refuse_features,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _backward_unsupported(problem: AttentionProblem) -> str | None:
    return f"{problem.dtype} has no backward pass" if problem.dtype in EIGHT_BITS else None


def _forward_unsupported(problem: AttentionProblem) -> str | None:
    return "inside diyfa.batch_invariant() split_kv runs a forward pass" if problem.batch_invariant else None


def _split_kv_unsupported(problem: AttentionProblem) -> str | None:
    if not problem.batch_invariant:
        return "split_kv runs a forward pass inside diyfa.batch_invariant() only"
    return refuse_features(problem, KVCACHE_FEATURES, "split_kv")


def _kvcache_unsupported(problem: KVCacheProblem) -> str | None:
    return None


def _matmul_unsupported(problem: MatmulProblem) -> str | None:
    if problem.compute_dtype == "float32" and problem.precision != "ieee":
        return f"the cpu backend multiplies float32 in IEEE precision only, not {problem.precision}"
    return None


class CpuBackend:
    """Tiled PyTorch on CPU tensors."""

    name = "cpu"
    device_type = "cpu"
    kernels: Sequence[Kernel] = (
        Kernel(
            "v2",
            "attention_fwd",
            "FlashAttention-2 schedule: query blocks outermost, normalised once at the end",
            fwd.forward_v2,
            _forward_unsupported,
            attention_config,
        ),
        Kernel(
            "v1",
            "attention_fwd",
            "FlashAttention schedule: key/value blocks outermost, the output renormalised at each step",
            fwd.forward_v1,
            _forward_unsupported,
            attention_config,
        ),
        Kernel(
            "split_kv",
            "attention_fwd",
            "row by row over fixed chunks of keys, which makes it bitwise equal to the cache's",
            kvcache.attention_fwd,
            _split_kv_unsupported,
        ),
        Kernel(
            "v2",
            "attention_bwd",
            "recomputation from the log-sum-exp, key/value blocks outermost",
            bwd.backward,
            _backward_unsupported,
            attention_config,
        ),
        Kernel(
            "split_kv",
            "kvcache_fwd",
            "the keys in splits, each in chunks with an online softmax; the splits merged",
            kvcache.kvcache_fwd,
            _kvcache_unsupported,
        ),
        Kernel(
            "append",
            "kvcache_append",
            "one sequence at a time, rotated on the way",
            kvcache.kvcache_append,
            _kvcache_unsupported,
        ),
        Kernel(
            "tiled",
            "matmul",
            "one output tile at a time, accumulated over K in float32",
            matmul.matmul,
            _matmul_unsupported,
            matmul_config,
        ),
    )

    def accepts(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it takes CPU tensors, got tensors on {device}"

    def arch(self, device: torch.device) -> str:
        return "cpu"

    def unsupported(self, problem: Any) -> str | None:
        if isinstance(problem, AttentionProblem) and problem.dtype in EIGHT_BITS:
            return None
        if isinstance(problem, MatmulProblem) and problem.dtype == "float8_e4m3fn":
            return None
        if problem.dtype not in DTYPES:
            return f"the cpu backend computes {', '.join(DTYPES)}, not {problem.dtype}"
        return None


backend = CpuBackend()
