"""Benchmark of the portable forward, dK/dV and dQ kernels alone, in all tiles of this GPU's table and in further ones.

    python benchmarks/kernel_tiles.py [--head-dims 64 128] [--kinds dkdv] [--features plain bias] [--more 64x64x4x4]

16 heads, bf16. Cases are batches of 64 x 1024, 16 x 4096 and 65 x 1000 tokens and 64 packed sequences of 128 to 1920,
with and without a causal mask; with features only the first two. Tiles of a case are timed alternately. TFLOP/s count
the kernel's products: two, four or three. Writes one JSON file with device, date and versions to benchmarks/results/.
A tile is queries x keys x warps x stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from features import HEADS, RESULTS, ragged_lengths

from diyfa.backends.cuda import backend
from diyfa.backends.cuda.attention import bwd, fwd
from diyfa.backends.cuda.attention.configs import AttentionConfig, candidates, fits
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, time_calls
from diyfa.lab.bench.work import attention_flops, tflops
from diyfa.problem import VARLEN, AttentionProblem, AttentionTensors
from diyfa.validation import dtype_name

CASES: dict[str, list[int]] = {
    "64 x 1024 tokens": [1024] * 64,
    "16 x 4096": [4096] * 16,
    "65 x 1000": [1000] * 65,
    "64 packed sequences of 128 to 1920": ragged_lengths(),
}
PRODUCTS = {"fwd": 2, "dkdv": 4, "dq": 3}  # `attention_flops` counts two
# {feature: fields of the problem}. A bias is (1, H, S, S).
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "bfloat16"},
    "float32 bias": {"bias": "float32"},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout": True},
    "bias + dropout + softcap": {"bias": "bfloat16", "dropout": True, "softcap": 30.0},
}


def call_of(
    lengths: list[int], head_dim: int, causal: bool, dtype: torch.dtype, feature: dict[str, Any], device: torch.device
) -> tuple[AttentionProblem, AttentionTensors]:
    """Return the problem and tensors of a batch of equal lengths, or of packed sequences of other lengths."""
    packed = len(set(lengths)) > 1
    size = (len(lengths), HEADS, HEADS, max(lengths), max(lengths), head_dim, head_dim)
    options: dict[str, Any] = {"window_right": 0 if causal else -1, "needs_grad": True, **feature}
    leading = (sum(lengths),) if packed else (len(lengths), lengths[0])
    q, k, v = (torch.randn(*leading, HEADS, head_dim, device=device, dtype=dtype) for _ in range(3))
    offsets = None
    if packed:
        options |= {"total_q": sum(lengths), "total_k": sum(lengths)}
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    layout = VARLEN if packed else "bshd"
    problem = AttentionProblem("cuda", backend.arch(device), dtype_name(dtype), layout, *size, **options)
    tensors = AttentionTensors(q, k, v, head_dim**-0.5, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    if problem.bias:
        shape = (1, HEADS, problem.seqlen_q, problem.seqlen_k)
        tensors = tensors._replace(attn_bias=torch.randn(shape, device=device, dtype=getattr(torch, problem.bias)))
    if problem.alibi:
        tensors = tensors._replace(alibi_slopes=torch.rand(HEADS, device=device))
    if problem.dropout:
        tensors = tensors._replace(rng_state=torch.tensor([1, 2], device=device), dropout_p=0.1)
    return problem, tensors


def kernels_of(problem: AttentionProblem, tensors: AttentionTensors) -> Callable[[str, AttentionConfig], None]:
    """Return a function that launches one kernel in one tile. Backward kernels use the results of one forward pass."""
    out = torch.empty_like(tensors.q)
    lse = torch.empty(problem.lse_shape, device=out.device)
    launch_each(fwd.forward_pass(problem, tensors, out, lse).launches)
    backward = bwd.Backward(problem, tensors, out, lse, torch.randn_like(out), None)
    launch_kernel(backward.preprocess())
    dq, dk, dv = (torch.empty_like(x) for x in (tensors.q, tensors.k, tensors.v))
    results = {"dkdv": {"dk": dk, "dv": dv}, "dq": {"dq": dq}}

    def launch(kind: str, tile: AttentionConfig) -> None:
        if kind == "fwd":
            with use_config(kind, tile):
                launch_each(fwd.forward_pass(problem, tensors, out, lse).launches)
        else:
            launch_kernel(backward.gradient(kind, tile, results[kind]))

    return launch


def name_of(tile: AttentionConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.num_warps}x{tile.num_stages} {tile.form}"


def rows(head_dim: int, feature: str, options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each tile in each case."""
    dtype = getattr(torch, options.dtype)
    for case, lengths in list(CASES.items())[: 2 if FEATURES[feature] else None]:
        for causal in (False, True):
            problem, tensors = call_of(lengths, head_dim, causal, dtype, FEATURES[feature], device)
            launch = kernels_of(problem, tensors)
            work = sum(attention_flops(1, HEADS, n, n, head_dim, causal) for n in lengths)
            for kind in options.kinds:
                tiles = list(candidates(kind, problem))
                more = (replace(tiles[0], **tile, measured="") for tile in options.more)
                tiles += [tile for tile in more if fits(kind, tile, problem)]
                calls = {name_of(tile): partial(launch, kind, tile) for tile in tiles}
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(options.rounds):
                    for name, call in calls.items():
                        times[name] += time_calls(call, device, options.warmup, options.rep)
                for name, milliseconds in times.items():
                    ms = compute_quantiles(milliseconds)[0]
                    rate = tflops(work * PRODUCTS[kind] / 2, ms)
                    yield {
                        "kind": "tile", "kernel": kind, "table": kind, "case": case, "D": head_dim,
                        "pass": "forward" if kind == "fwd" else "backward", "causal": causal, "feature": feature,
                        "dtype": options.dtype, "tile": name, "ms": ms, "tflops": rate,
                    }  # fmt: skip


def tile_of(text: str) -> dict[str, int]:
    names = ("block_m", "block_n", "num_warps", "num_stages")
    return dict(zip(names, map(int, text.split("x")), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kinds", choices=PRODUCTS, nargs="+", default=["dkdv", "dq"])
    parser.add_argument("--features", choices=FEATURES, nargs="+", default=["plain"])
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
    for head_dim, feature in product(options.head_dims, options.features):
        for row in rows(head_dim, feature, options, device):
            mask = "causal" if row["causal"] else "full"
            print(
                f"{row['table']:5}D={head_dim:<4}{feature:13}{mask:7}{row['case']:36}{row['tile']:20}"
                f"{row['ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s",
                flush=True,
            )
            found.append(row)
    path = options.output or default_path("kernel_tiles", device, RESULTS)
    write_json(path, "kernel_tiles", device, found, purpose="tile search")
    print(path)


if __name__ == "__main__":
    main()
