"""Host time of one call on a problem so small that the device never limits: what Python and the launch cost.

python benchmarks/host_overhead.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from diyfa import flash_attention, flash_attention_varlen
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import quantiles_of, synchronize
from diyfa.device import default_backend

RESULTS = Path(__file__).parent / "results"
SIZE = (1, 8, 128, 64)  # (B, H, S, D)
FORWARD, BOTH, ONE_THREAD = "forward", "forward and backward", "forward and backward, one thread"
MEASURED = {"empty operator": (FORWARD,), "empty Function": (BOTH, ONE_THREAD), "diyfa, packed": (FORWARD,)}


def host_microseconds(fn: Callable[[], Any], device: torch.device, calls: int, rounds: int) -> float:
    """Median over `rounds` of the host time of one of `calls` calls issued back to back, without waiting for any."""
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
    return quantiles_of(times, [0.5])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls queued in one round")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    backend = "cpu" if device.type == "cpu" else None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(SIZE, device=device, dtype=dtype) for _ in range(3))
    gq, gk, gv = (x.clone().requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(q)

    def train(attend: Callable[..., Any]) -> None:
        torch.autograd.grad(attend(gq, gk, gv), (gq, gk, gv), dout)

    class Empty(torch.autograd.Function):
        """What autograd costs for three gradients."""

        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    def diyfa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention(q, k, v, causal=True, backend=backend)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    library = torch.library.Library("diyfa_benchmark", "DEF")  # what one operator written in Python costs
    library.define("empty(Tensor x) -> Tensor")
    library.impl("empty", lambda x: x.new_empty(x.shape), "CompositeExplicitAutograd")

    def empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.ops.diyfa_benchmark.empty.default(q)

    packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    ends = torch.arange(0, SIZE[0] * SIZE[2] + 1, SIZE[2], dtype=torch.int32, device=device)

    def diyfa_packed(*_: torch.Tensor) -> Any:
        return flash_attention_varlen(*packed, ends, ends, SIZE[2], SIZE[2], causal=True, backend=backend)

    rows = []
    print(f"{device_name(device)}, (B, H, S, D) = {SIZE}, causal")
    for name, attend in (
        ("empty operator", empty),
        ("empty Function", Empty.apply),
        ("PyTorch SDPA", sdpa),
        ("diyfa", diyfa),
        ("diyfa, packed", diyfa_packed),
    ):
        for what, call in (
            (FORWARD, lambda attend=attend: attend(q, k, v)),
            (BOTH, lambda attend=attend: train(attend)),
            (ONE_THREAD, lambda attend=attend: train(attend)),
        ):
            if what not in MEASURED.get(name, (what,)):
                continue
            # Autograd runs the backward of a GPU's tensors in a thread of its own, unless it is told not to.
            with torch.autograd.set_multithreading_enabled(what != ONE_THREAD):
                microseconds = host_microseconds(call, device, arguments.calls, arguments.rounds)
            rows.append({"implementation": name, "pass": what, "host_us": microseconds})
            print(f"{name:14} {what:34} {microseconds:8.1f} µs")
    path = arguments.output or default_path("host-overhead", device, RESULTS)
    write_json(path, "host_overhead", device, rows)
    print(path)


if __name__ == "__main__":
    main()
