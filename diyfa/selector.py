"""The DIY FlashAttention selectors: they tell which kernel and which tile this device gets.

Nothing is decided here. A selector describes a problem, the registry chooses the kernel, and the kernel's `config`
returns the tile. So the answers are those of a real call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import torch

from diyfa import registry
from diyfa.attention import flash_attention
from diyfa.matmul import triton_matmul
from diyfa.problem import AttentionProblem, Backend, Kernel, MatmulProblem, dtype_name
from diyfa.validation import MAX_HEAD_DIM_V, check_booleans, check_named_sizes


def _resolve(backend: str | None) -> tuple[Backend, torch.device]:
    from diyfa.device import default_backend

    name = backend or registry.forced_backend() or default_backend()
    chosen = registry.load_backend(name)
    # PyTorch knows a device type only if the package that defines it has been imported.
    module = getattr(torch, chosen.device_type, None)
    if chosen.device_type == "cpu" or (module is not None and module.is_available()):
        device = torch.device(chosen.device_type)
        if reason := chosen.accepts(device):
            raise ValueError(f"backend {name!r} cannot run here: {reason}")
        return chosen, device
    host = torch.device("cpu")
    if chosen.accepts(host) is None:  # Triton's interpreter takes CPU tensors instead of the device's
        return chosen, host
    raise ValueError(f"backend {name!r} cannot run here: PyTorch finds no {chosen.device_type} device")


def _as_dict(kernel: Kernel, problem: Any) -> dict[str, Any]:
    config = kernel.config(problem)
    if config is None:
        return {}
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    if hasattr(config, "_asdict"):
        return dict(config._asdict())
    raise TypeError(f"the configuration of {kernel.name} is neither a dataclass nor a named tuple: {config!r}")


class BackendSelector:
    """A selector of a backend's kernels for given sizes.

    Args:
        backend: name of the backend; default: that of this machine's accelerator, else "cpu".

    Raises ValueError when the named backend cannot run here.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend, self._device = _resolve(backend)

    @property
    def backend(self) -> str:
        """Name of the backend that the selected functions run on."""
        return self._backend.name

    def _attention(
        self,
        batch: int,
        heads: int,
        seq_len: int,
        head_dim: int,
        causal: bool,
        dtype: torch.dtype,
        heads_kv: int | None,
        needs_grad: bool,
    ) -> tuple[Kernel, AttentionProblem]:
        heads_kv = heads if heads_kv is None else heads_kv
        check_named_sizes(batch=batch, heads=heads, heads_kv=heads_kv, seq_len=seq_len, head_dim=head_dim)
        check_booleans(causal=causal, needs_grad=needs_grad)
        if not 1 <= head_dim <= MAX_HEAD_DIM_V:
            raise ValueError(f"Unsupported head_dim: expected 1 to {MAX_HEAD_DIM_V}, got {head_dim}")
        if heads % heads_kv:
            raise ValueError(f"heads must be a multiple of heads_kv, got {heads} and {heads_kv}")
        problem = AttentionProblem(
            self._backend.device_type, self._backend.arch(self._device), dtype_name(dtype), "bhsd", batch, heads,
            heads_kv, seq_len, seq_len, head_dim, head_dim, window_right=0 if causal else -1, needs_grad=needs_grad,
        )  # fmt: skip
        return registry.choose("attention_fwd", problem, self._backend), problem

    def _matmul(self, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Kernel, MatmulProblem]:
        check_named_sizes(m=m, n=n, k=k)
        # `triton_matmul` computes float32 in float16 unless a precision is given.
        compute = dtype_name(torch.float16 if dtype == torch.float32 else dtype)
        arch = self._backend.arch(self._device)
        step = 16 // dtype.itemsize  # contiguous matrices whose rows begin at multiples of 16 bytes
        aligned = k % step == 0 and n % step == 0
        device_type = self._backend.device_type
        problem = MatmulProblem(device_type, arch, dtype_name(dtype), compute, compute, m, n, k, aligned=aligned)
        return registry.choose("matmul", problem, self._backend), problem

    def select_attention(
        self,
        batch: int,
        heads: int,
        seq_len: int,
        head_dim: int,
        causal: bool = False,
        dtype: torch.dtype = torch.float16,
        heads_kv: int | None = None,
        needs_grad: bool = False,
    ) -> Callable[..., Any]:
        """Return `flash_attention` bound to the kernel for these sizes. Call it with (B, H, S, D) q, k, v.

        The choice depends on the mask, so `causal` becomes the function's default. Raises ValueError for impossible
        sizes, and with every kernel's reason if no kernel runs the problem.
        """
        kernel, _ = self._attention(batch, heads, seq_len, head_dim, causal, dtype, heads_kv, needs_grad)
        return partial(flash_attention, causal=causal, variant=kernel.name, backend=self._backend.name)

    def select_matmul(self, m: int, n: int, k: int, dtype: torch.dtype = torch.float16) -> Callable[..., Any]:
        """Return `triton_matmul` on this backend, for (M, K) @ (K, N). Raises ValueError if no kernel runs this."""
        self._matmul(m, n, k, dtype)
        return partial(triton_matmul, backend=self._backend.name)


class AdaptiveKernelSelector(BackendSelector):
    """A selector of kernels and tiles for this device. Default sizes: a layer of a 7-billion-parameter model."""

    def get_matmul_config(
        self, m: int = 4096, n: int = 4096, k: int = 4096, dtype: torch.dtype = torch.float16
    ) -> dict[str, Any]:
        """Return the kernel's name and its tile without tuning: {"kernel": …, "block_m": …, …}."""
        kernel, problem = self._matmul(m, n, k, dtype)
        return {"kernel": kernel.name, **_as_dict(kernel, problem)}

    def get_attention_config(
        self,
        batch: int = 1,
        heads: int = 32,
        seq_len: int = 4096,
        head_dim: int = 128,
        causal: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> dict[str, Any]:
        """Return the kernel's name and its tile without tuning: {"kernel": …, "block_m": …, …}."""
        kernel, problem = self._attention(batch, heads, seq_len, head_dim, causal, dtype, None, False)
        return {"kernel": kernel.name, **_as_dict(kernel, problem)}

    def select_matmul_kernel(self) -> Callable[..., Any]:
        """Return `triton_matmul` on this device's backend. Each call chooses a kernel for its sizes."""
        return self.select_matmul(4096, 4096, 4096)

    def select_attention_kernel(self) -> Callable[..., Any]:
        """Return `flash_attention` on this device's backend. Each call chooses a kernel for its sizes."""
        return partial(flash_attention, backend=self._backend.name)


def get_matmul_config(**sizes: Any) -> dict[str, Any]:
    """Return `AdaptiveKernelSelector().get_matmul_config(**sizes)`."""
    return AdaptiveKernelSelector().get_matmul_config(**sizes)


def get_attention_config(**sizes: Any) -> dict[str, Any]:
    """Return `AdaptiveKernelSelector().get_attention_config(**sizes)`."""
    return AdaptiveKernelSelector().get_attention_config(**sizes)


def get_optimal_matmul() -> Callable[..., Any]:
    """Return `AdaptiveKernelSelector().select_matmul_kernel()`."""
    return AdaptiveKernelSelector().select_matmul_kernel()


def get_optimal_attention() -> Callable[..., Any]:
    """Return `AdaptiveKernelSelector().select_attention_kernel()`."""
    return AdaptiveKernelSelector().select_attention_kernel()
