"""The dK/dV and the dQ kernel alone, in each tile of the table for the GPU that is here and in others.

    python benchmarks/backward_tiles.py [--head-dims 64 128] [--kinds dkdv] [--more 64x64x4x4,128x64x8x2]

16 heads, bf16: batches of 64 x 1024, 16 x 4096 and 65 x 1000 tokens and 64 packed sequences of 128 to 1920, with and
without a causal mask. Tiles of a case are timed in turns; TFLOP/s count the kernel's products, four or three. Writes
one JSON file with device, date and versions to benchmarks/results/. A tile is queries x keys x warps x stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from features import HEADS, RESULTS, ragged_lengths

from diyfa.backends.cuda import backend, bwd, fwd
from diyfa.backends.cuda.configs import AttentionConfig, candidates
from diyfa.bench.record import default_path, device_name, write_json
from diyfa.bench.timing import quantiles_of, time_calls
from diyfa.bench.work import attention_flops, tflops
from diyfa.problem import VARLEN, AttentionProblem, AttentionTensors
from diyfa.validation import dtype_name

CASES: dict[str, list[int]] = {
    "64 x 1024 tokens": [1024] * 64,
    "16 x 4096": [4096] * 16,
    "65 x 1000": [1000] * 65,
    "64 packed sequences of 128 to 1920": ragged_lengths(),
}
PRODUCTS = {"dkdv": 4, "dq": 3}  # the forward pass, whose work `attention_flops` counts, has two


def call_of(
    lengths: list[int], head_dim: int, causal: bool, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionProblem, AttentionTensors]:
    """A batch of equal lengths, or others packed."""
    packed = len(set(lengths)) > 1
    size = (len(lengths), HEADS, HEADS, max(lengths), max(lengths), head_dim, head_dim)
    options: dict[str, Any] = {"window_right": 0 if causal else -1, "needs_grad": True}
    leading = (sum(lengths),) if packed else (len(lengths), lengths[0])
    q, k, v = (torch.randn(*leading, HEADS, head_dim, device=device, dtype=dtype) for _ in range(3))
    offsets = None
    if packed:
        options |= {"total_q": sum(lengths), "total_k": sum(lengths)}
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    layout = VARLEN if packed else "bshd"
    problem = AttentionProblem("cuda", backend.arch(device), dtype_name(dtype), layout, *size, **options)
    return problem, AttentionTensors(q, k, v, head_dim**-0.5, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def backward_of(problem: AttentionProblem, tensors: AttentionTensors) -> Callable[[str, AttentionConfig], None]:
    """Launches one kernel in one tile on what a forward pass has left."""
    out = torch.empty_like(tensors.q)
    lse = torch.empty(problem.lse_shape, device=out.device)
    fwd.attention_forward(problem, tensors, out, lse)
    backward = bwd._Backward(problem, tensors, out, lse, torch.randn_like(out), None)
    backward.preprocess()
    dq, dk, dv = (torch.empty_like(x) for x in (tensors.q, tensors.k, tensors.v))
    results = {"dkdv": (dk, dv), "dq": (dq,)}
    return lambda kind, tile: backward.gradient(kind, tile, results[kind])


def name_of(tile: AttentionConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.num_warps}x{tile.num_stages} {tile.form}"


def rows(head_dim: int, options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each tile in each case."""
    dtype = getattr(torch, options.dtype)
    for case, lengths in CASES.items():
        for causal in (False, True):
            problem, tensors = call_of(lengths, head_dim, causal, dtype, device)
            launch = backward_of(problem, tensors)
            work = sum(attention_flops(1, HEADS, n, n, head_dim, causal) for n in lengths)
            for kind in options.kinds:
                tiles = list(candidates(kind, problem))
                tiles += [replace(tiles[0], **tile, measured="") for tile in options.more]
                calls = {name_of(tile): partial(launch, kind, tile) for tile in tiles}
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(options.rounds):
                    for name, call in calls.items():
                        times[name] += time_calls(call, device, options.warmup, options.rep)
                for name, milliseconds in times.items():
                    ms = quantiles_of(milliseconds)[0]
                    rate = tflops(work * PRODUCTS[kind] / 2, ms)
                    yield {
                        "table": kind, "pass": "backward", "case": case, "D": head_dim, "causal": causal,
                        "dtype": options.dtype, "tile": name, "ms": ms, "tflops": rate,
                    }  # fmt: skip


def tile_of(text: str) -> dict[str, int]:
    names = ("block_m", "block_n", "num_warps", "num_stages")
    return dict(zip(names, map(int, text.split("x")), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kinds", choices=PRODUCTS, nargs="+", default=list(PRODUCTS))
    parser.add_argument("--more", type=lambda text: [tile_of(x) for x in text.split(",")], default=[])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3, help="calls before each round's measurement")
    parser.add_argument("--rep", type=int, default=10, help="calls of each round")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    options = parser.parse_args()
    device = torch.device("cuda")
    print(device_name(device))
    found = []
    for head_dim in options.head_dims:
        for row in rows(head_dim, options, device):
            mask = "causal" if row["causal"] else "full"
            print(
                f"{row['table']:5}D={head_dim:<4}{mask:7}{row['case']:36}{row['tile']:20}{row['ms']:9.3f} ms "
                f"{row['tflops']:7.1f} TFLOP/s",
                flush=True,
            )
            found.append(row)
    path = options.output or default_path("backward_tiles", device, RESULTS)
    write_json(path, "backward_tiles", device, found)
    print(path)


if __name__ == "__main__":
    main()
