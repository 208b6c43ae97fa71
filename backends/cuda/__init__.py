"""The CUDA backend: Triton kernels for sm_75 and later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from diyfa.arch import gpu_arch_name, gpu_spec
from diyfa.backends.cuda.attention.launch import (
    FEATURES,
    launching,
    launching_backward,
    repeating,
    repeating_append,
    repeating_backward,
)
from diyfa.backends.cuda.runtime import launch as runtime_launch
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.eight_bits import EIGHT_BITS
from diyfa.eight_bits import FLOAT8 as FLOAT8_NAMES
from diyfa.imports import import_quickly
from diyfa.problem import (
    AttentionProblem,
    Kernel,
    KVCacheProblem,
    MatmulProblem,
    Tuning,
    as_kvcache_problem,
    cached_per_kind,
    refuse_features,
)

# split_kv and sm90 are the forward kernels whose results need not depend on the batch.
ALL_FEATURES = FEATURES | {"batch_invariant", "eight_bits"}
V2_FEATURES = FEATURES | {"eight_bits"}
V1_FEATURES = frozenset({"causal", "window", "gqa", "seq_lens", "head_dim_v"})
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512
DTYPES = ("float16", "bfloat16", "float32")
FLOAT8 = "float8_e4m3fn"


def _needs_tile(problem: AttentionProblem, *kinds: str) -> str | None:
    """Return why a kernel's tables have no tile that fits the GPU, or None."""
    from diyfa.backends.cuda.attention.configs import default_config

    if all(default_config(kind, problem) for kind in kinds):
        return None
    return f"no tile for {problem.dtype} and head_dim {problem.head_dim} fits the shared memory of {problem.arch}"


def _v2_refuses(problem: AttentionProblem) -> str | None:
    """Return why the portable forward kernel does not take `problem`, or None."""
    if (problem.mask or problem.score_fn) and problem.dtype in EIGHT_BITS:
        return f"v2 does not implement {'mask' if problem.mask else 'score_fn'} for {problem.dtype}"
    return refuse_features(problem, V2_FEATURES, "v2") or _needs_tile(problem, "fwd")


def _short_refuses(problem: AttentionProblem) -> str | None:
    """Return why the backward kernel for short sequences does not take `problem`, or None."""
    from diyfa.backends.cuda.attention.configs import default_config

    if reason := refuse_features(problem, FEATURES - {"gqa", "mask", "score_fn"}, "short"):
        return reason  # batch_invariant among them: the longest sequence decides whether this kernel runs
    if default_config("short", problem) is None:
        return (
            f"no tile of {problem.dtype} and head_dim {problem.head_dim} on {problem.arch} holds {problem.seqlen_q} "
            f"queries and {problem.seqlen_k} keys"
        )
    return _needs_tile(problem, "dbias") if problem.bias_grad else None


def _split_refuses(problem: AttentionProblem) -> str | None:
    if problem.score_grad and problem.deterministic:
        return (
            "split adds the gradients of score_tensors by atomics, in no fixed order, and the call is deterministic: "
            "detach them, or give a bias of each pair as attn_bias"
        )
    kinds = ("dkdv", "dq", *(("dbias",) if problem.bias_grad or problem.score_grad else ()))
    return refuse_features(problem, FEATURES | {"batch_invariant"}, "split") or _needs_tile(problem, *kinds)


def _later(file: str, function: str, **bound: Any) -> Callable[..., Any]:
    """Return a function of a file with kernels. The file is imported at the first call.

    Triton takes a millisecond for each function of a kernel, and not every Triton has the Gluon of `hopper`.
    """
    loaded: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if not loaded:
            loaded.append(getattr(import_quickly(f"diyfa.backends.cuda.{file}"), function))
        return loaded[0](*arguments, **bound)

    return call


def _forward(describe: Callable[..., Pass]) -> dict[str, Any]:
    return {"op": "attention_fwd", "launch": launching(describe), "repeat": repeating(describe)}


def _over_cache(describe: Callable[..., Pass]) -> dict[str, Any]:
    return {"op": "kvcache_fwd", "launch": launching(describe), "repeat": repeating(describe, over_cache=True)}


def _backward(describe: Callable[..., Pass]) -> dict[str, Any]:
    return {"op": "attention_bwd", "launch": launching_backward(describe), "repeat": repeating_backward(describe)}


def _hopper_runs_the_mode(problem: AttentionProblem) -> str | None:
    """Return why split_kv is not chosen in batch-invariant mode, or None."""
    from diyfa.backends.cuda.hopper import configs

    if problem.batch_invariant and configs.unsupported(problem) is None:
        return "sm90 computes the same bits, faster"
    return None


def _forward_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of the forward pass, the preferred one first."""
    from diyfa.backends.cuda.attention import configs, decode_configs
    from diyfa.backends.cuda.hopper import configs as hopper_configs

    return (
        Kernel(
            name="split_kv",
            clears=True,
            summary="few queries of many keys; in batch_invariant() all calls, bitwise as from a cache",
            **_forward(_later("attention.decode", "forward_pass")),
            unsupported=decode_configs.attention_unsupported,
            config=lambda problem: decode_configs.decode_config(as_kvcache_problem(problem)),
            by_name_only=_hopper_runs_the_mode,
        ),
        Kernel(
            name="sm90",
            clears=True,
            summary="Hopper: a producer warp with TMA, consumer warpgroups that overlap softmax and products",
            **_forward(_later("hopper.fwd_launch", "forward_pass")),
            unsupported=hopper_configs.unsupported,
            config=hopper_configs.select_config,
        ),
        Kernel(
            name="v2",
            clears=True,
            summary="FlashAttention-2: query blocks outermost, block pointers or TMA",
            **_forward(_later("attention.fwd", "forward_pass")),
            unsupported=_v2_refuses,
            config=lambda problem: configs.default_config("fwd", problem),
        ),
        Kernel(
            name="v1",
            summary="FlashAttention: key/value blocks outermost, one program for each head",
            **_forward(_later("attention.fwd_v1", "forward_pass")),
            unsupported=lambda problem: refuse_features(problem, V1_FEATURES, "v1") or _needs_tile(problem, "fwd"),
            config=_later("attention.fwd_v1", "config"),
        ),
    )


def _backward_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of the backward pass, the preferred one first."""
    from diyfa.backends.cuda.attention import configs
    from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd_configs

    return (
        Kernel(
            name="sm90",
            clears=True,
            summary="Hopper: dQ, dK and dV in one loop; a producer warp with TMA, dQ added up in fp32; a dout that TMA "
            "cannot read is copied first",
            **_backward(_later("hopper.bwd_launch", "backward_pass")),
            unsupported=hopper_bwd_configs.unsupported,
            config=hopper_bwd_configs.select_config,
            by_name_only=hopper_bwd_configs.by_name_only,
        ),
        Kernel(
            name="short",
            clears=True,
            summary="sequences that one tile holds: delta, dQ, dK and dV in one launch; no atomics",
            **_backward(_later("attention.bwd", "backward_pass", kinds=configs.SHORT)),
            unsupported=_short_refuses,
            config=lambda problem: configs.default_config("short", problem),
        ),
        Kernel(
            name="split",
            clears=True,
            summary="preprocess, dK/dV by key blocks, dQ by query blocks; no atomics",
            **_backward(_later("attention.bwd", "backward_pass")),
            unsupported=_split_refuses,
            config=lambda problem: configs.default_config("dkdv", problem),
        ),
    )


def _cache_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of attention over a cache, the preferred one first, and of appending to it."""
    from diyfa.backends.cuda.attention import decode_configs
    from diyfa.backends.cuda.hopper import decode_mla_configs, prefill_configs

    return (
        Kernel(
            name="sm90",
            clears=True,
            summary="Hopper, a latent cache: its keys in shared memory once, both products by wgmma in two warpgroups",
            **_over_cache(_later("hopper.decode_mla", "cache_pass")),
            unsupported=decode_mla_configs.unsupported,
            config=lambda problem: decode_mla_configs.CONFIG,
        ),
        Kernel(
            name="sm90_prefill",
            clears=True,
            summary="Hopper, many queries: the forward pass, with keys that lie in pages or rows of a cache",
            **_over_cache(_later("hopper.prefill", "cache_pass")),
            unsupported=prefill_configs.unsupported,
            config=prefill_configs.select_config,
        ),
        Kernel(
            name="split_kv",
            clears=True,
            summary="flash-decoding: programs take equal parts of all keys of all sequences; a second launch combines",
            **_over_cache(_later("attention.decode", "cache_pass")),
            unsupported=decode_configs.unsupported,
            config=decode_configs.decode_config,
        ),
        Kernel(
            name="append",
            op="kvcache_append",
            summary="new keys and values, and the queries, rotated on the way, in one launch",
            launch=launching(_later("attention.append", "append_pass")),
            unsupported=_later("attention.append", "unsupported"),
            repeat=repeating_append(_later("attention.append", "append_pass")),
        ),
    )


def _matmul_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of the matrix product, the preferred one first."""
    from diyfa.backends.cuda.hopper import matmul_configs as hopper_matmul_configs
    from diyfa.backends.cuda.matmul import configs as matmul_configs

    return (
        Kernel(
            name="sm90",
            op="matmul",
            summary="Hopper: a producer warp with TMA, consumer warpgroups with wgmma, persistent",
            launch=_later("hopper.matmul", "matmul"),
            repeat=_later("hopper.matmul", "repeat"),
            unsupported=hopper_matmul_configs.unsupported,
            config=hopper_matmul_configs.select_config,
        ),
        Kernel(
            name="tma",
            op="matmul",
            summary="Triton, tiles read through host-side tensor descriptors (TMA)",
            launch=_later("matmul.kernel", "matmul_tma"),
            repeat=_later("matmul.kernel", "repeat_tma"),
            unsupported=matmul_configs.unsupported_tma,
            config=lambda problem: matmul_configs.default_config(problem, "tma"),
        ),
        Kernel(
            name="pointers",
            op="matmul",
            summary="Triton, tiles read through masked pointers: any strides, dtypes and architecture",
            launch=_later("matmul.kernel", "matmul_pointers"),
            repeat=_later("matmul.kernel", "repeat_pointers"),
            unsupported=matmul_configs.unsupported_pointers,
            config=lambda problem: matmul_configs.default_config(problem, "pointers"),
        ),
    )


@cache
def _arch_of_gpu(device: torch.device) -> str:
    return gpu_arch_name(*torch.cuda.get_device_capability(device))


@cached_per_kind
def _unsupported(problem: AttentionProblem | KVCacheProblem | MatmulProblem) -> str | None:
    spec = gpu_spec(problem.arch)
    if spec is None or int(problem.arch[3:]) < 75:
        return f"{problem.arch} is not supported: Triton's kernels need sm_75 or later"
    if isinstance(problem, AttentionProblem) and problem.dtype in EIGHT_BITS:
        has_float8 = problem.dtype in FLOAT8_NAMES or problem.value_dtype in FLOAT8_NAMES
        if not (spec.has_fp8 if has_float8 else spec.has_bf16):
            kind, oldest = ("float8", "sm_89") if has_float8 else ("int8", "sm_80")
            return f"{kind} needs {oldest} or later, this is {problem.arch}"
    elif problem.dtype not in DTYPES and not (isinstance(problem, MatmulProblem) and problem.dtype == FLOAT8):
        return f"dtype {problem.dtype} is not supported: float16, bfloat16 or float32"
    if problem.dtype == "bfloat16" and not spec.has_bf16:
        return f"bfloat16 needs sm_80 or later, this is {problem.arch}"
    if isinstance(problem, KVCacheProblem) and problem.cache_dtype == FLOAT8 and not spec.has_fp8:
        return f"a cache of float8 needs sm_89 or later, this is {problem.arch}"
    if isinstance(problem, MatmulProblem):
        return None
    if problem.head_dim > MAX_HEAD_DIM or problem.head_dim_v > MAX_HEAD_DIM_V:
        return (
            f"Unsupported head_dim: up to {MAX_HEAD_DIM} for q and k and {MAX_HEAD_DIM_V} for v, got "
            f"{problem.head_dim} and {problem.head_dim_v}"
        )
    if isinstance(problem, AttentionProblem):
        return refuse_features(problem, ALL_FEATURES, "the cuda backend")
    return None


class CudaBackend:
    """Backend of NVIDIA GPUs. In Triton's interpreter (TRITON_INTERPRET=1) it takes CPU tensors."""

    name = "cuda"
    device_type = "cuda"

    def __init__(self) -> None:
        self.kernels = (*_forward_kernels(), *_backward_kernels(), *_cache_kernels(), *_matmul_kernels())

    def accepts(self, device: torch.device) -> str | None:
        if device.type == "cuda" or (device.type == "cpu" and runtime_launch.is_interpreting()):
            return None
        if runtime_launch.stand_in is not None and device.type in ("cpu", "meta"):
            return None
        return f"it takes cuda tensors, got tensors on {device}"

    def arch(self, device: torch.device) -> str:
        if runtime_launch.stand_in is not None:
            return runtime_launch.stand_in.arch
        return _arch_of_gpu(device) if device.type == "cuda" else os.environ.get("DIYFA_ARCH", "sm_90")

    def unsupported(self, problem: AttentionProblem | KVCacheProblem | MatmulProblem) -> str | None:
        return _unsupported(problem)

    @property
    def tuning(self) -> Tuning:
        """The autotuner."""
        from diyfa.backends.cuda.runtime import tune

        return tune.tuning

    def binaries(self, arch: str) -> str:
        """Return where the first call of a process finds compiled kernels, as text for users."""
        from diyfa.backends.cuda.runtime.binaries import cache_folder
        from diyfa.backends.cuda.runtime.pack import installed

        pack, folder = installed(arch), cache_folder()
        pack_text = pack.reason if pack.pack is None else f"{len(pack.pack)} kernels in {pack.pack.path}"
        return f"{pack_text}; " + ("no cache folder" if folder is None else f"cache folder {folder.path}")

    def write_pack(self, arch: str, kernels: Iterable[Any], folder: Path) -> Path:
        """Write the pack of `arch` as a module, with those of `kernels` that are compiled. Return its folder."""
        from diyfa.backends.cuda.runtime import pack
        from diyfa.backends.cuda.runtime.binaries import find_binary

        stored = {kernel.key: find_binary(arch, kernel.key) for kernel in kernels}
        module = folder / pack.module_name(arch)
        module.mkdir()
        (module / "__init__.py").write_text(f'"""Compiled kernels of diyfa for {arch}."""\n')
        pack.write_pack(module / pack.FILE_NAME, arch, {key: x for key, x in stored.items() if x is not None})
        return module

    merge = staticmethod(_later("attention.merge", "merge"))
    build_mask = staticmethod(_later("attention.build_mask", "build_mask"))
    select_blocks = staticmethod(_later("attention.select_blocks", "select_blocks"))
    quantize = staticmethod(_later("attention.quantize", "quantize"))
    recording = staticmethod(_later("runtime.recording", "recording"))


backend = CudaBackend()
