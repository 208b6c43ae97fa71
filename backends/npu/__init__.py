"""The Ascend backend: Triton-Ascend kernels for the A2 (910B), A3 (910_93) and A5 (950) families.

Importing this package imports neither Triton nor torch_npu. The first launch of a kernel loads its module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from diyfa.arch import ELEMENT_BYTES, npu_spec
from diyfa.backends.npu.tables import configs, configs_v1
from diyfa.eight_bits import FLOAT8
from diyfa.npu_stacks import GET_TRITON_ASCEND, installed_version, launcher_problem, triton_problem
from diyfa.problem import (
    KVCACHE_FEATURES,
    AttentionProblem,
    Kernel,
    KVCacheProblem,
    MatmulProblem,
    Tuning,
    as_kvcache_problem,
    refuse_features,
)

FEATURES = frozenset(
    {
        "causal", "window", "softcap", "seq_lens", "varlen", "alibi", "attn_bias", "sinks", "dropout",
        "dropout_origins", "gqa", "head_dim_v", "batch_invariant", "mask", "score_fn",
    }
)  # fmt: skip
INTERPRETER_ARCH = "Ascend910B3"  # chip of the interpreter, unless DIYFA_ARCH names another

_triton_checked = False


def _check_triton() -> None:
    """Raise ImportError if the package `triton` cannot compile or launch for an NPU. Any Triton can interpret."""
    global _triton_checked
    if not _triton_checked and os.environ.get("TRITON_INTERPRET", "0") != "1":
        problem = triton_problem() or launcher_problem(torch.__version__, installed_version("triton-ascend") or "")
        if problem:
            raise ImportError(f"the npu backend needs triton-ascend: {problem}")
        _triton_checked = True


def _kernel_module(name: str) -> Any:
    """Import a module of kernels. Raise ImportError with a remedy if Triton is missing, foreign or broken."""
    import importlib

    _check_triton()
    try:
        return importlib.import_module(f"diyfa.backends.npu.{name}")
    except ImportError as error:
        if (error.name or "").split(".")[0] == "triton":
            raise ImportError(f"the npu backend needs triton-ascend ({GET_TRITON_ASCEND}): {error}") from error
        raise


def _launcher(module: str, function: str) -> Callable[..., Any]:
    """Return `function` of a module of kernels. The first call imports the module."""
    return lambda *args: getattr(_kernel_module(module), function)(*args)


def _dtype_unsupported(dtype: str) -> str | None:
    """Return why there is no kernel for operands of `dtype`, or None. docs/log/eight-bits.md has what was tried."""
    if dtype in ELEMENT_BYTES:
        return None
    who = "triton-ascend has" if dtype in FLOAT8 else "diyfa has" if dtype == "int8" else "Ascend NPUs have"
    return f"{who} no {dtype} matrix product on NPUs: use one of {', '.join(ELEMENT_BYTES)}"


def _shape_unsupported(problem: AttentionProblem | KVCacheProblem) -> str | None:
    if isinstance(problem, AttentionProblem) and problem.dtype == "int8":
        if problem.value_dtype not in ("float16", "bfloat16"):
            return f"int8 q and k need a v of float16 or bfloat16 on NPUs, got {problem.value_dtype or problem.dtype}"
    elif reason := _dtype_unsupported(problem.dtype):
        return reason
    widest, max_head_dim = max(problem.head_dim, problem.head_dim_v), configs.HEAD_DIM_CLASSES[-1]
    if widest > max_head_dim:
        return f"head_dim {widest} is beyond {max_head_dim}, the most that the tile table covers"
    return configs.always_mask_refusal(problem)


def _attention_unsupported(problem: AttentionProblem, features: frozenset[str] = FEATURES) -> str | None:
    return _shape_unsupported(problem) or refuse_features(problem, features, "v2")


def _bwd_unsupported(problem: AttentionProblem) -> str | None:
    if problem.score_grad and problem.deterministic:
        return (
            "v2 adds the gradients of score_tensors by atomics, in no fixed order, and the call is deterministic: "
            "detach them, or give a bias of each pair as attn_bias"
        )
    return _attention_unsupported(problem)


def _fwd_unsupported(problem: AttentionProblem) -> str | None:
    if problem.batch_invariant:
        return "its tiles follow the shape of the call, so it is not batch invariant: split_kv is"
    return _attention_unsupported(problem, FEATURES | {"eight_bits"})


def _split_kv_unsupported(problem: AttentionProblem) -> str | None:
    if not problem.batch_invariant:
        return "split_kv computes a forward pass in diyfa.batch_invariant() only"
    return _shape_unsupported(problem) or refuse_features(problem, KVCACHE_FEATURES, "split_kv")


def _kvcache_unsupported(problem: KVCacheProblem) -> str | None:
    if problem.cache_dtype != problem.dtype:
        return f"the npu kernels read no cache of {problem.cache_dtype}: 910B and 910_93 have no such type"
    return _shape_unsupported(problem)


def _append_unsupported(problem: KVCacheProblem) -> str | None:
    return "new keys come with queries in (B, Sq, H, D)" if problem.varlen else _kvcache_unsupported(problem)


def _matmul_unsupported(problem: MatmulProblem) -> str | None:
    if reason := _dtype_unsupported(problem.dtype) or _dtype_unsupported(problem.compute_dtype):
        return reason
    if problem.compute_dtype == "float32" and problem.precision == "tf32":
        return 'Ascend NPUs have no tf32; use precision="ieee", or None to compute in float16'
    if problem.block is not None and not configs.matmul_fits(configs.matmul_tile(problem), problem):
        return f"tile {problem.block} does not fit the cube unit's buffers on {problem.arch}"
    return None


def _is_recording() -> bool:
    """Return whether launches are recorded. If so, `runtime.launch` has been imported."""
    launch = sys.modules.get("diyfa.backends.npu.runtime.launch")
    return launch is not None and launch.recorder is not None


class NPUBackend:
    """`diyfa.problem.Backend` for `npu` tensors, and for CPU tensors under TRITON_INTERPRET=1."""

    name = "npu"
    device_type = "npu"
    kernels = (
        Kernel(
            "v2",
            "attention_fwd",
            "FlashAttention-2: query tiles over one loop of keys, persistent on the cube cores",
            _launcher("attention.fwd", "attention_fwd"),
            _fwd_unsupported,
            configs.fwd_tile,
        ),
        Kernel(
            "v1",
            "attention_fwd",
            "FlashAttention: key/value blocks outermost, the running output in memory, whole heads for each cube core",
            _launcher("attention.fwd_v1", "attention_fwd"),
            lambda problem: _fwd_unsupported(problem) or configs_v1.v1_unsupported(problem),
            configs_v1.v1_tile,
        ),
        Kernel(
            "split_kv",
            "attention_fwd",
            "the cache's kernel with all keys in one split: rows bitwise the same whatever the batch",
            _launcher("attention.decode", "attention_fwd"),
            _split_kv_unsupported,
            lambda problem: configs.untuned_tile(as_kvcache_problem(problem), "decode"),
        ),
        Kernel(
            "v2",
            "attention_bwd",
            "separate dk/dv and dq kernels, deterministic; atomics for gradients of score_tensors alone",
            _launcher("attention.bwd", "attention_bwd"),
            _bwd_unsupported,
            configs.bwd_tiles,
        ),
        Kernel(
            "split_kv",
            "kvcache_fwd",
            "the keys of a sequence in splits, persistent on the cube cores, and a kernel that combines them",
            _launcher("attention.decode", "kvcache_fwd"),
            _kvcache_unsupported,
            lambda problem: configs.untuned_tile(problem, "decode"),
        ),
        Kernel(
            "append",
            "kvcache_append",
            "one token at a time on the vector cores, rotated on the way",
            _launcher("attention.append", "kvcache_append"),
            _append_unsupported,
        ),
        Kernel(
            "persistent",
            "matmul",
            "persistent programs over output tiles in grouped order",
            _launcher("matmul", "matmul"),
            _matmul_unsupported,
            configs.matmul_tile,
        ),
    )

    @property
    def tuning(self) -> Tuning:
        """The tuner of this backend's tiles."""
        return _kernel_module("runtime.tune").tuning

    def accepts(self, device: torch.device) -> str | None:
        if device.type == "npu":
            return None
        if device.type in ("cpu", "meta") and _is_recording():
            return None
        if device.type != "cpu":
            return f"it runs npu tensors, got tensors on {device}"
        if os.environ.get("TRITON_INTERPRET", "0") == "1":
            from diyfa.backends.npu.runtime.compat import interpreter_problem  # reads TRITON_INTERPRET

            return interpreter_problem()
        return "it runs CPU tensors only in Triton's interpreter (set TRITON_INTERPRET=1 before Triton is imported)"

    def arch(self, device: torch.device) -> str:
        if device.type == "cpu" and not _is_recording():
            return os.environ.get("DIYFA_ARCH") or INTERPRETER_ARCH
        if device.type == "npu" and device.index is not None:
            return device_name(device.index)
        return device_name(getattr(torch, "npu").current_device())  # noqa: B009

    def unsupported(self, problem: Any) -> str | None:
        if npu_spec(problem.arch) is None:
            return f"unknown Ascend chip {problem.arch!r}: its memory sizes and cores are not in diyfa.arch"
        return None

    def binaries(self, arch: str) -> str | None:
        """Return how kernels are compiled if that is not the usual way."""
        from diyfa.backends.npu.runtime.multibuffer import state

        return state()

    def recording(self, arch: str | None) -> AbstractContextManager[dict[Any, Any]]:
        """Record launches; see `diyfa.backends.npu.runtime.recording`."""
        return _kernel_module("runtime.recording").recording(arch)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        _kernel_module("attention.merge").merge(self.arch(out.device), out, lse, partial_out, partial_lse)


@cache
def device_name(index: int) -> str:
    """Return the model of NPU `index`, such as "Ascend910B3"."""
    return getattr(torch, "npu").get_device_name(index)  # noqa: B009


backend = NPUBackend()
