"""What keeping NaN and infinities apart by rows costs the CUDA kernels, and what a call pays that holds some.

    python benchmarks/nonfinite_cost.py [--head-dims 64 128 256] [--seq-lens 1024 4096 16384] [--dtype bfloat16]

Causal attention on 16384 tokens, heads * D = 2048, forward and backward: milliseconds without (kernels that keep them
apart by tiles) and with, on the same inputs, and the ratio; then the ratio of a call whose v (forward) or dout
(backward) holds one NaN, and of one in which every row of it holds one. Both forms are timed in turns, so that a
drifting clock hits both alike. Writes one JSON file to benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diyfa import flash_attention
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import time_calls
from diyfa.problem import use_exact_nonfinite
from diyfa.validation import dtype_name

RESULTS = Path(__file__).parent / "results"
TURNS = (False, True, True, False) * 2


def passes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """One causal call and its gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, True, backend="cuda")

    def forward() -> None:
        with torch.no_grad():
            flash_attention(*leaves, True, backend="cuda")

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)}


def milliseconds(fn: Callable[[], Any], exact: bool, device: torch.device, timing: tuple[int, int]) -> float:
    """Median of a call with or without the exact form."""
    with use_exact_nonfinite(exact):
        return median(time_calls(fn, device, *timing))


def with_nan(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """`x` with NaN in the first feature of `rows` of its first head (one row) or of all heads (every row)."""
    x = x.clone()
    heads = x if rows == slice(None) else x[:1, :1]
    heads[:, :, rows, 0] = float("nan")
    return x


def rows_of(
    size: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, timing: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """Both passes at one size (B, H, S, D)."""
    _, _, seq_len, head_dim = size
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    places = {"one NaN": slice(seq_len // 2, seq_len // 2 + 1), "every row": slice(None)}
    for name, fn in passes(q, k, v, dout).items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for exact in TURNS:
            times[exact].append(milliseconds(fn, exact, device, timing))
        off, on = (min(times[exact]) for exact in (False, True))
        ratios = {}
        for what, where in places.items():
            poisoned = (with_nan(v, where), dout) if name == "forward" else (v, with_nan(dout, where))
            ratios[what] = milliseconds(passes(q, k, *poisoned)[name], True, device, timing) / off
        yield {"D": head_dim, "S": seq_len, "pass": name, "off_ms": off, "on_ms": on, "ratio": on / off, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rep", type=int, default=20)
    parser.add_argument("--device", default="cuda", help="cpu runs in Triton's interpreter, to try the script")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    print(device_name(device))
    rows: list[dict[str, Any]] = []
    for head_dim in arguments.head_dims:
        for seq_len in arguments.seq_lens:
            size = (arguments.tokens // seq_len, arguments.width // head_dim, seq_len, head_dim)
            for row in rows_of(size, device, dtype, (arguments.warmup, arguments.rep)):
                rows.append({**row, "dtype": dtype_name(dtype)})
                print(
                    f"D {row['D']:>3} S {row['S']:>6} {row['pass']:9} off {row['off_ms']:8.3f} ms  on "
                    f"{row['on_ms']:8.3f} ms  ratio {row['ratio']:.4f}  one NaN {row['one NaN']:7.2f}  "
                    f"every row {row['every row']:7.2f}",
                    flush=True,
                )
    path = arguments.output or default_path("nonfinite", device, RESULTS)
    write_json(path, "nonfinite", device, rows)
    print(path)


if __name__ == "__main__":
    main()
