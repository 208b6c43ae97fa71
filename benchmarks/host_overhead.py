"""Benchmark of the host time of one call, Python and launch, on a problem so small that the device never limits.

python benchmarks/host_overhead.py

It times calls without gradients, forward and backward, and one token over a cache whose lengths are on the device.
Peers are an operator and an autograd function that do nothing, and PyTorch's SDPA, on a GPU with its flash and its
cuDNN kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diyfa import flash_attention, use_backend
from diyfa.device import default_backend
from diyfa.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, synchronize

RESULTS = Path(__file__).parent / "results"
SIZE = (1, 8, 128, 64)  # (B, H, S, D)
FORWARD, BOTH, ONE_THREAD = "forward", "forward and backward", "forward and backward, one thread"
OVER_CACHE = "one token over a cache"
CACHE = (8, 1024, 8, 128)  # (B, S, Hk, D), for one token with four times the heads
PAGE = 16


def host_microseconds(fn: Callable[[], Any], device: torch.device, calls: int, rounds: int) -> float:
    """Return the median over `rounds` of the host time of one call, of `calls` issued back to back without a wait."""
    for _ in range(20):
        fn()
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return compute_quantiles(times, [0.5])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls queued in one round")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(SIZE, device=device, dtype=dtype) for _ in range(3))
    gq, gk, gv = (x.clone().requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(q)

    class Empty(torch.autograd.Function):
        """An autograd function that does nothing: the cost of autograd for three gradients."""

        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    def diyfa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention(q, k, v, causal=True)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    library = torch.library.Library("diyfa_benchmark", "DEF")  # shows the cost of one operator written in Python
    library.define("empty(Tensor x) -> Tensor")
    library.impl("empty", lambda x: x.new_empty(x.shape), "CompositeExplicitAutograd")

    packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    ends = torch.arange(0, SIZE[0] * SIZE[2] + 1, SIZE[2], dtype=torch.int32, device=device)

    batch, rows, heads, features = CACHE
    token = torch.randn(batch, 1, 4 * heads, features, device=device, dtype=dtype)
    caches = [torch.randn(CACHE, device=device, dtype=dtype) for _ in range(2)]
    new = [torch.randn(batch, 1, heads, features, device=device, dtype=dtype) for _ in range(2)]
    pages = [x.view(-1, PAGE, heads, features) for x in caches]
    table = torch.arange(batch * rows // PAGE, dtype=torch.int32, device=device).view(batch, -1)
    seqlens = torch.full((batch,), rows - 24, dtype=torch.int32, device=device)
    of_heads = [x.transpose(1, 2) for x in (token, *caches)]

    def train(attend: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(gq, gk, gv), (gq, gk, gv), dout)

    def sdpa_over_cache() -> Any:
        return F.scaled_dot_product_attention(*of_heads, enable_gqa=True)

    kernels: dict[str, Any] = {"SDPA": nullcontext}
    if device.type == "cuda":
        flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        kernels = {"SDPA flash": lambda: sdpa_kernel(flash), "SDPA cuDNN": lambda: sdpa_kernel(cudnn)}
    calls: list[tuple[str, str, Callable[[], Any]]] = [
        ("empty operator", FORWARD, lambda: torch.ops.diyfa_benchmark.empty.default(q)),
        *[("empty Function", what, train(Empty.apply)) for what in (BOTH, ONE_THREAD)],
    ]
    for name in kernels:
        calls.append((name, FORWARD, lambda: sdpa(q, k, v)))
        calls += [(name, what, train(sdpa)) for what in (BOTH, ONE_THREAD)]
        calls.append((name, OVER_CACHE, sdpa_over_cache))
    calls += [
        ("diyfa", FORWARD, lambda: diyfa(q, k, v)),
        *[("diyfa", what, train(diyfa)) for what in (BOTH, ONE_THREAD)],
        ("diyfa, packed", FORWARD, lambda: flash_attn_varlen_func(*packed, ends, ends, SIZE[2], SIZE[2], causal=True)),
        ("diyfa", OVER_CACHE, lambda: flash_attn_with_kvcache(token, *caches, cache_seqlens=seqlens)),
        (f"diyfa, pages of {PAGE}", OVER_CACHE, lambda: flash_attn_with_kvcache(
            token, *pages, cache_seqlens=seqlens, block_table=table
        )),
        ("diyfa, a new key", OVER_CACHE, lambda: flash_attn_with_kvcache(token, *caches, *new, cache_seqlens=seqlens)),
    ]  # fmt: skip
    found = []
    print(f"{device_name(device)}, (B, H, S, D) = {SIZE}, causal; a cache of (B, S, Hk, D) = {CACHE}")
    for name, what, call in calls:
        # Autograd runs the backward pass of GPU tensors in another thread by default.
        with (
            kernels.get(name, nullcontext)(),
            use_backend("cpu") if device.type == "cpu" else nullcontext(),
            torch.autograd.set_multithreading_enabled(what != ONE_THREAD),
        ):
            try:
                microseconds = host_microseconds(call, device, arguments.calls, arguments.rounds)
            except RuntimeError as error:  # PyTorch's kernels refuse some problems
                print(f"{name:20} {what:34} {str(error).splitlines()[0][:60]}")
                continue
        found.append({"kind": "host", "implementation": name, "pass": what, "host_us": microseconds})
        print(f"{name:20} {what:34} {microseconds:8.1f} µs")
    path = arguments.output or default_path("host-overhead", device, RESULTS)
    write_json(path, "host_overhead", device, found)
    print(path)


if __name__ == "__main__":
    main()
