"""Benchmark of the Hopper kernel for learners (`hopper/tutorial.py`) against the shipped one, on an H100 or H200.

    python benchmarks/hopper_tutorial.py [--seq-lens 4096] [--head-dims 128] [--output FILE]

First out and the log-sum-exp are compared with the reference at odd, causal and grouped shapes. Then both kernels are
timed alternately for several rounds. bf16, 16 heads, 65536 tokens; TFLOP/s count 4·B·H·S²·D, half with a causal mask;
figures are medians over the rounds of medians. Prints a table with the tutorial's fraction of the other's speed, and
writes one JSON file with device, date and versions to benchmarks/results/. A kernel that hangs ends the process after
--limit seconds.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diyfa import flash_attention
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, time_calls
from diyfa.lab.bench.work import attention_flops, tflops

RESULTS = Path(__file__).parent / "results"
TOKENS, HEADS = 65536, 16
TUTORIAL, REAL = "tutorial", "sm90"
# (B, H, Hk, Sq, Sk, causal) of the comparison with the reference.
SHAPES = (
    (2, 4, 2, 1000, 1000, True),
    (1, 2, 2, 257, 513, False),
    (1, 4, 1, 300, 1001, True),
    (1, 2, 2, 700, 130, True),
    (1, 1, 1, 3, 1, False),
)
LARGEST_DIFFERENCE = {"out": 5e-3, "lse": 1e-5}  # norm of the difference over the norm; bf16 rounds to 2e-3


def tutorial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from diyfa.backends.cuda.hopper.tutorial import flash_attention as attend

    return attend(q, k, v, causal)


def real(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attention(q, k, v, causal=causal, return_lse=True, variant="sm90")


IMPLEMENTATIONS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {TUTORIAL: tutorial, REAL: real}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm; infinity if the infinities differ."""
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isinf(), expected.isinf()):
        return float("inf")
    finite = expected.isfinite()
    return ((found - expected)[finite].norm() / expected[finite].norm().clamp(min=1e-30)).item()


def compare(head_dim: int, device: torch.device) -> None:
    """Raise RuntimeError if the tutorial's out or LSE differs from the reference by more than rounding."""
    from diyfa import reference_attention

    for batch, heads, heads_kv, seqlen_q, seqlen_k, causal in SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            q = torch.randn(batch, heads, seqlen_q, head_dim, device=device, dtype=dtype)
            k, v = (torch.randn(batch, heads_kv, seqlen_k, head_dim, device=device, dtype=dtype) for _ in range(2))
            expected = reference_attention(q.double(), k.double(), v.double(), causal, return_lse=True)
            for name, x, y in zip(("out", "lse"), tutorial(q, k, v, causal), expected, strict=True):
                error = difference(x, y)
                if not error <= LARGEST_DIFFERENCE[name]:
                    shape = (batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim)
                    raise RuntimeError(f"{name} of {shape}, causal={causal}, {dtype}: error {error:.1e}")


def rows_of(head_dim: int, seqlen: int, causal: bool, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time both kernels at a point, alternately."""
    batch = max(1, TOKENS // seqlen)
    q, k, v = (torch.randn(batch, HEADS, seqlen, head_dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    flops = attention_flops(batch, HEADS, seqlen, seqlen, head_dim, causal)
    calls = {name: partial(function, q, k, v, causal) for name, function in IMPLEMENTATIONS.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 else reversed(calls):  # the first call after a pause is faster
            times[name] += compute_quantiles(time_calls(calls[name], device, warmup=10, rep=30), [0.5])
    point = {"dtype": "bfloat16", "pass": "forward", "D": head_dim, "causal": causal}
    point |= {"S": seqlen, "B": batch, "H": HEADS, "group": 1}
    for name, found in times.items():
        yield {
            "kind": "attention",
            "implementation": name,
            **point,
            "ms": median(found),
            "tflops": tflops(flops, median(found)),
        }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'D':>4} {'mask':7}{'S':>6}{TUTORIAL:>10}{REAL:>8}  share")
    speeds: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        speeds.setdefault((row["D"], row["causal"], row["S"]), {})[row["implementation"]] = row["tflops"]
    for (head_dim, causal, seqlen), of in speeds.items():
        mask = "causal" if causal else "full"
        share = of[TUTORIAL] / of[REAL]
        print(f"{head_dim:4} {mask:7}{seqlen:6}{of[TUTORIAL]:10.0f}{of[REAL]:8.0f}  {share:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], choices=(64, 128))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit", type=float, default=500, help="seconds after which the process ends")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    watchdog = threading.Timer(options.limit, os._exit, (124,))
    watchdog.daemon = True
    watchdog.start()
    device = torch.device("cuda")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for head_dim in options.head_dims:
            compare(head_dim, device)
            for causal in (False, True):
                for seqlen in options.seq_lens:
                    rows += rows_of(head_dim, seqlen, causal, options.rounds, device)
    print(f"{device_name(device)}, forward, bf16, {HEADS} heads, {TOKENS} tokens, TFLOP/s")
    print_table(rows)
    path = options.output or default_path("hopper_tutorial", device, RESULTS)
    write_json(
        path,
        "The Hopper forward for learners beside the one that calls get, in turns",
        device,
        rows,
        purpose="ablation",
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
