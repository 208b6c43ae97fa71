"""`BenchmarkRunner`: timings of diyfa's and PyTorch's operations on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from diyfa.lab.bench.check import WrongResultError, check_attention, check_matmul
from diyfa.lab.bench.peers import PeerUnavailable, attention_peers, check_peer
from diyfa.lab.bench.timing import compute_quantiles, peak_memory_mb, time_calls
from diyfa.lab.bench.work import attention_flops, matmul_flops, tflops
from diyfa.validation import MAX_HEAD_DIM_V

SPREAD_LIMIT = 0.1


@dataclass
class BenchmarkResult:
    """One measurement."""

    name: str  # implementation: "FlashAttention", "Triton", "SDPA flash", …
    size: tuple[int, ...]  # (M, N, K), or (batch, heads, seq_len, head_dim)
    time_ms: float  # median
    tflops: float
    memory_mb: float = 0.0  # peak of one call above its inputs, MiB
    block_config: dict[str, Any] | None = None
    spread: float = 0.0  # distance between the 20 % and the 80 % quantile, relative to the median
    error: float = 0.0  # largest error of the part of the result that is checked before the measurement


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Run diyfa's calls on `device` inside the block. For the CPU this forces the CPU backend, unless one is forced."""
    if device.type != "cpu":
        yield
        return
    from diyfa.registry import forced_backend, use_backend

    with nullcontext() if forced_backend() else use_backend("cpu"):
        yield


class BenchmarkRunner:
    """Measures functions and collects the results.

    Args:
        device: where to run; default: "cuda" or "npu", whichever is available, else "cpu".
        warmup: calls before each measurement. rep: calls measured; the median counts.
        on_result: called with each result as soon as it is measured (progress bars).
        is_done: asked with (name, size) before each measurement, which is left out if the answer is true.

    Each implementation's result is checked before it is timed. `results` holds every BenchmarkResult so far,
    `unavailable` a (name, size, reason) for each implementation that could not run or computes something wrong.
    """

    def __init__(
        self,
        device: str | None = None,
        warmup: int = 25,
        rep: int = 100,
        on_result: Callable[[BenchmarkResult], None] | None = None,
        *,
        is_done: Callable[[str, tuple[int, ...]], bool] | None = None,
    ) -> None:
        if device is None:
            from diyfa.device import default_backend

            device = default_backend()
        self.device = torch.device(device)
        self.warmup = warmup
        self.rep = rep
        self.on_result = on_result
        self.is_done = is_done or (lambda name, size: False)
        self.results: list[BenchmarkResult] = []
        self.unavailable: list[tuple[str, tuple[int, ...], str]] = []

    def _measure(
        self,
        name: str,
        size: tuple[int, ...],
        flops: float,
        fn: Callable[[], Any],
        check: Callable[[Any], float],
        block_config: dict[str, Any] | None = None,
    ) -> list[BenchmarkResult]:
        """Check and time `fn`. Return its result, or nothing if it was measured before or is wrong."""
        if self.is_done(name, size):
            return []
        try:
            error = check(fn())
        except WrongResultError as reason:
            self.unavailable.append((name, size, str(reason)))
            return []
        ms, low, high = compute_quantiles(time_calls(fn, self.device, self.warmup, self.rep))
        memory = peak_memory_mb(fn, self.device)
        spread = (high - low) / ms if ms else 0.0
        result = BenchmarkResult(name, size, ms, tflops(flops, ms), memory, block_config, spread, error)
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)
        return [result]

    def _randn(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def benchmark_matmul(
        self,
        triton_fn: Callable[..., torch.Tensor],
        sizes: list[tuple[int, int, int]],
        block_configs: list[dict[str, Any]] | None = None,
        dtype: torch.dtype = torch.float16,
        *,
        name: str = "Triton",
    ) -> list[BenchmarkResult]:
        """Measure `triton_fn(a, b)` and `torch.matmul` for each (M, N, K) of `sizes`. Results name the former `name`.

        With `block_configs`, such as [{"block_m": 128, "block_n": 128, "block_k": 32}], `triton_fn` is measured once
        with each as keyword arguments instead of once without any.
        """
        measured: list[BenchmarkResult] = []
        for m, n, k in sizes:
            a, b = self._randn(m, k, dtype=dtype), self._randn(k, n, dtype=dtype)
            size, flops = (m, n, k), matmul_flops(m, n, k)
            check = partial(check_matmul, a=a, b=b)
            measured += self._measure("PyTorch", size, flops, partial(torch.matmul, a, b), check)
            for config in block_configs or [{}]:
                with _on(self.device):
                    call = partial(triton_fn, a, b, **config)
                    measured += self._measure(name, size, flops, call, check, config or None)
        return measured

    def benchmark_attention(
        self,
        flash_fn: Callable[..., Any],
        seq_lengths: list[int],
        batch_size: int = 4,
        num_heads: int = 8,
        head_dim: int = 64,
        causal: bool = False,
        dtype: torch.dtype = torch.float16,
        *,
        name: str = "FlashAttention",
    ) -> list[BenchmarkResult]:
        """Measure `flash_fn(q, k, v, causal=…)` and each of PyTorch's implementations on (B, H, S, D) tensors.

        Results name the former `name`. V has at most 512 features.
        """
        measured: list[BenchmarkResult] = []
        for seq_len in seq_lengths:
            size = (batch_size, num_heads, seq_len, head_dim)
            head_dim_v = min(head_dim, MAX_HEAD_DIM_V)
            flops = attention_flops(batch_size, num_heads, seq_len, seq_len, (head_dim + head_dim_v) / 2, causal)
            q, k = (self._randn(*size, dtype=dtype) for _ in range(2))
            v = self._randn(*size[:3], head_dim_v, dtype=dtype)
            check = partial(check_attention, q=q, k=k, v=v, causal=causal)
            for peer, run in attention_peers(self.device).items():
                if self.is_done(peer, size):
                    continue
                try:
                    check_peer(peer, run, q, k, v, causal)
                except PeerUnavailable as reason:
                    self.unavailable.append((peer, size, str(reason)))
                    continue
                measured += self._measure(peer, size, flops, partial(run, q, k, v, causal), check)
            with _on(self.device):
                call = partial(flash_fn, q, k, v, causal=causal)
                measured += self._measure(name, size, flops, call, check)
        return measured

    def print_comparison_table(
        self,
        results: list[BenchmarkResult] | None = None,
        title: str = "Benchmark Results",
        *,
        spread_limit: float = SPREAD_LIMIT,
    ) -> None:
        """Print `results` (default: all so far) as a table that marks the fastest of each size.

        Figures whose spread exceeds `spread_limit` are marked.
        """
        from diyfa.lab.bench.comparison import comparison_table

        comparison_table(self.results if results is None else results, title, self.unavailable, spread_limit)

    def clear_results(self) -> None:
        """Remove all results."""
        self.results.clear()
        self.unavailable.clear()
