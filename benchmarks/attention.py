"""Benchmark of diyfa's forward and backward against PyTorch's FlashAttention-2 and cuDNN attention, in one run.

    python benchmarks/attention.py [--head-dims 64 128 256] [--seq-lens 1024 4096 16384] [--variants auto v2 …]

B·S tokens and H = 2048/D are those of the FlashAttention papers. TFLOP/s count 4·B·H·S·S·D, half for causal, 2.5 times
for backward. Writes one JSON file with device, date and versions to benchmarks/results/ and prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diyfa import flash_attention
from diyfa.device import default_backend
from diyfa.lab.bench.check import WrongResultError, check_attention
from diyfa.lab.bench.peers import PeerUnavailable, attention_peers, check_peer
from diyfa.lab.bench.record import clock, default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, time_calls
from diyfa.lab.bench.work import BACKWARD_FACTOR, attention_flops, tflops
from diyfa.validation import dtype_name

RESULTS = Path(__file__).parent / "results"
HIDDEN = 2048


def implementations(device: torch.device, variants: list[str]) -> dict[str, Callable[..., torch.Tensor]]:
    """Return {name: f(q, k, v, causal)} of the peers, except the one that stores the scores, and diyfa's variants."""
    peers = {name: peer for name, peer in attention_peers(device).items() if name != "SDPA math"}
    backend = "cpu" if device.type == "cpu" else None

    def diyfa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, variant: str) -> Any:
        return flash_attention(q, k, v, causal=causal, variant=variant, backend=backend)

    mine = {"diyfa" if v == "auto" else f"diyfa {v}": partial(diyfa, variant=v) for v in variants}
    return {**peers, **mine}


def measure(
    device: torch.device,
    name: str,
    attend: Callable[..., torch.Tensor],
    size: tuple[int, int, int, int],
    causal: bool,
    dtype: torch.dtype,
    warmup: int,
    rep: int,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the forward and the backward pass of one implementation at (B, H, S, D)."""
    batch, heads, seq_len, head_dim = size
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    case = {
        "kind": "attention",
        "implementation": name,
        "B": batch,
        "H": heads,
        "S": seq_len,
        "D": head_dim,
        "causal": causal,
    }
    try:
        check_peer(name, attend, q.detach(), k.detach(), v.detach(), causal)
        out = attend(q, k, v, causal)
    except (PeerUnavailable, ValueError, RuntimeError) as error:
        yield {**case, "unavailable": str(error).splitlines()[0]}
        return
    try:
        error_found = check_attention(out, q, k, v, causal)
    except WrongResultError as error:
        yield {**case, "unavailable": str(error)}
        return
    case["error"] = error_found
    dout = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, causal)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    flops = attention_flops(batch, heads, seq_len, seq_len, head_dim, causal)
    for direction, fn, work in (("forward", forward, flops), ("backward", backward, BACKWARD_FACTOR * flops)):
        ms, p20, p80 = compute_quantiles(time_calls(fn, device, warmup, rep))
        spread = (p80 - p20) / ms
        yield {**case, "pass": direction, "ms": ms, "spread": spread, "tflops": tflops(work, ms), **clock(device)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line for each size and pass, one column for each implementation (TFLOP/s)."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        for direction in (row["pass"],) if "pass" in row else ("forward", "backward"):
            key = (direction, row["D"], "causal" if row["causal"] else "full", row["S"])
            value = f"{row['tflops']:.1f}" if "pass" in row else "-"
            lines.setdefault(key, {})[row["implementation"]] = value
    print(f"{'pass':9}{'D':>4} {'mask':7}{'S':>6}" + "".join(f"{name:>14}" for name in names) + "   TFLOP/s")
    for (direction, d, mask, s), values in sorted(lines.items(), key=lambda item: (item[0][0] != "forward", item[0])):
        print(f"{direction:9}{d:>4} {mask:7}{s:>6}" + "".join(f"{values.get(name, ''):>14}" for name in names))
    for row in rows:
        if "unavailable" in row:
            mask = "causal" if row["causal"] else "full"
            print(f"{row['implementation']} D={row['D']} {mask} S={row['S']}: {row['unavailable']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="B·S")
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--variants", nargs="+", default=["auto"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rep", type=int, default=30)
    parser.add_argument("--device", default=None, help="cuda, npu or cpu; default: what is here")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or default_backend())
    dtype = getattr(torch, arguments.dtype)
    rows: list[dict[str, Any]] = []
    for head_dim in arguments.head_dims:
        for mask in arguments.masks:
            for seq_len in arguments.seq_lens:
                size = (max(1, arguments.tokens // seq_len), max(1, HIDDEN // head_dim), seq_len, head_dim)
                for name, attend in implementations(device, arguments.variants).items():
                    timing = (arguments.warmup, arguments.rep)
                    for row in measure(device, name, attend, size, mask == "causal", dtype, *timing):
                        rows.append({**row, "dtype": dtype_name(dtype)})
    print(device_name(device))
    print_table(rows)
    path = arguments.output or default_path("attention", device, RESULTS)
    write_json(path, "attention", device, rows)
    print(path)


if __name__ == "__main__":
    main()
