"""The Hopper forward kernel beside the portable one and PyTorch's cuDNN where each case can be asked of it.

    python benchmarks/hopper_features.py [--only packed scores] [--graph]

GQA, samples and packed sequences of different lengths, windows, softcap, sinks, ALiBi, odd head dims, V of another
width, grids of few tiles, 128k keys, scores that are so far apart that sums of weights overflow. Times are medians of
`triton.testing.do_bench`, with --graph of calls in a CUDA graph, which the host does not delay; TFLOP/s count the
products of visible pairs.
`difference` is the largest between the Hopper kernel's outputs, in the table's config and in others that the case may
gain from, and the portable one's. One line for each case; JSON lines with --output. bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph

from diyfa.attention import flash_attention, flash_attention_varlen
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.hopper import configs as hopper_configs


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    seqlen: int
    head_dim: int = 128
    heads_kv: int = 0
    head_dim_v: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    shares: tuple[int, ...] = ()  # lengths of samples, in 16ths of seqlen, repeated over the batch
    packed: bool = False
    sinks: bool = False
    alibi: bool = False
    nats: float = 0.0  # the standard deviation of the scores; 0: 1, as of normal q and k and sm_scale 1/√D


MIXED = (16, 3, 7, 1, 12, 5, 9, 2)
CASES = {
    "gqa 32/8 S=4k": Case(4, 32, 4096, heads_kv=8),
    "gqa 32/8 S=16k": Case(1, 32, 16384, heads_kv=8),
    "mqa 16/1 S=4k full": Case(4, 16, 4096, heads_kv=1, causal=False),
    "seq_lens, causal": Case(8, 16, 4096, shares=MIXED),
    "seq_lens, full": Case(8, 16, 4096, shares=MIXED, causal=False),
    "packed 8 sequences": Case(8, 16, 4096, shares=MIXED, packed=True),
    "packed 8, full": Case(8, 16, 4096, shares=MIXED, packed=True, causal=False),
    "packed 128 short": Case(128, 16, 512, shares=MIXED, packed=True),
    "packed, D=64 full": Case(16, 32, 2048, 64, shares=MIXED, packed=True, causal=False),
    "window 1024 of 16k": Case(1, 16, 16384, window=(1024, 0)),
    "window 128 of 4k": Case(4, 16, 4096, window=(128, 0)),
    "window 512/512 of 4k": Case(4, 16, 4096, window=(512, 512), causal=False),
    "softcap": Case(4, 16, 4096, softcap=30.0),
    "D=96": Case(4, 20, 4096, 96),
    "D=192": Case(4, 10, 4096, 192),
    "D=192/128": Case(4, 16, 4096, 192, head_dim_v=128),
    "D=192/128 full": Case(4, 16, 4096, 192, head_dim_v=128, causal=False),
    "D=96 full": Case(4, 20, 4096, 96, causal=False),
    "D=72 full": Case(4, 28, 4096, 72, causal=False),
    "1 tile, S=64": Case(1, 1, 64, causal=False),
    "B·H=16, S=128": Case(1, 16, 128, causal=False),
    "B·H=4, S=256": Case(1, 4, 256),
    "B·H=1, S=512": Case(1, 1, 512, causal=False),
    "B·H=8, S=512": Case(1, 8, 512),
    "B·H=16, S=512": Case(1, 16, 512, causal=False),
    "B·H=64, S=512": Case(4, 16, 512),
    "B·H=8, S=2k": Case(1, 8, 2048),
    "B·H=8, S=2k, D=64 full": Case(1, 8, 2048, 64, causal=False),
    "B·H=1, S=512, D=256 full": Case(1, 1, 512, 256, causal=False),
    "B·H=1, S=1k, D=64 full": Case(1, 1, 1024, 64, causal=False),
    "B·H=1, S=1k": Case(1, 1, 1024),
    "B·H=4, S=2k, D=256": Case(1, 4, 2048, 256),
    "S=128k": Case(1, 2, 131072),
    "sinks": Case(4, 16, 4096, sinks=True),
    "sinks, gpt-oss": Case(2, 64, 4096, 64, heads_kv=8, sinks=True),
    "sinks, gpt-oss, window 128": Case(2, 64, 4096, 64, heads_kv=8, window=(127, 0), sinks=True),
    "alibi": Case(4, 16, 4096, alibi=True),
    "alibi, D=64": Case(4, 32, 4096, 64, alibi=True),
    "alibi, full": Case(4, 16, 4096, causal=False, alibi=True),
    **{
        f"scores of {nats} nats, D={d} {'causal' if causal else 'full'}": Case(
            1, 2048 // d, 16384, d, causal=causal, nats=nats
        )
        for d in (64, 128)
        for causal in (True, False)
        for nats in (1, 3, 8, 11.3, 16, 20)
    },
    **{f"S={s} full": Case(16384 // s, 16, s, causal=False) for s in (257, 1024, 1025, 4097)},
}


def visible_pairs(case: Case, lengths: list[int]) -> int:
    """Query-key pairs of one head of all samples that the masks leave."""
    left, right = case.window
    right = 0 if case.causal else right
    total = 0
    for n in lengths:
        i = torch.arange(n, dtype=torch.int64)
        low = (i - left).clamp(min=0) if left >= 0 else torch.zeros_like(i)
        high = (i + right).clamp(max=n - 1) if right >= 0 else torch.full_like(i, n - 1)
        total += int((high - low + 1).sum())
    return total


def changes_of(case: Case) -> dict[str, Callable[[hopper_configs.Sm90Config], hopper_configs.Sm90Config]]:
    """Changes to the table's config that a case may gain from: tiles to whoever comes first, wider products."""
    found: dict[str, Callable[[hopper_configs.Sm90Config], hopper_configs.Sm90Config]] = {}
    if (case.causal or case.shares) and not case.nats and case.batch * case.heads * case.seqlen >= 1 << 17:
        found["dynamic"] = lambda config: replace(config, persistent=True, scheduler="dynamic")
    if case.nats:
        found["running maximum"] = lambda config: replace(config, fixed_max=False)
    return found


def _with_changes(
    case: Case, call: Callable[[str], Callable[[], torch.Tensor]]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> call, of the Hopper kernel in the table's config and in others, and of the portable one."""

    def changed(change: Callable[[hopper_configs.Sm90Config], hopper_configs.Sm90Config]) -> Callable[[], torch.Tensor]:
        inner = call("sm90")

        def run() -> torch.Tensor:
            with use_config("sm90", lambda problem: change(hopper_configs.config_of(problem))):
                return inner()

        return run

    return {
        "sm90": call("sm90"),
        **{f"sm90 {name}": changed(change) for name, change in changes_of(case).items()},
        "v2": call("v2"),
    }


def calls(case: Case) -> tuple[dict[str, Callable[[], torch.Tensor]], float]:
    """Name -> call, and the floating-point operations of one."""
    torch.manual_seed(0)
    heads_kv, dv = case.heads_kv or case.heads, case.head_dim_v or case.head_dim
    shares = case.shares or (16,)
    lengths = [case.seqlen * shares[b % len(shares)] // 16 for b in range(case.batch)]
    flops = 2.0 * case.heads * (case.head_dim + dv) * visible_pairs(case, lengths)
    shapes = ((case.heads, case.head_dim), (heads_kv, case.head_dim), (heads_kv, dv))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    if case.packed:
        q, k, v = (random(sum(lengths), *shape) for shape in shapes)
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        most = max(lengths)
        options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}

        def packed(variant: str) -> Callable[[], torch.Tensor]:
            return lambda: flash_attention_varlen(q, k, v, cu, cu, most, most, variant=variant, **options)

        return _with_changes(case, packed), flops
    q, k, v = (random(case.batch, heads, case.seqlen, width) for heads, width in shapes)
    options = {"causal": case.causal, "softcap": case.softcap, "window": case.window}
    if case.nats:
        options["sm_scale"] = case.nats * case.head_dim**-0.5
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, device="cuda")
    if case.alibi:
        options["alibi_slopes"] = 2.0 ** -torch.linspace(0.5, 8, case.heads, device="cuda")
    if case.shares:
        options["seq_lens"] = torch.tensor(lengths, device="cuda", dtype=torch.int32)

    def dense(variant: str) -> Callable[[], torch.Tensor]:
        return lambda: flash_attention(q, k, v, variant=variant, **options)

    found = _with_changes(case, dense)
    if not (case.shares or case.softcap or case.sinks or case.alibi) and case.window == (-1, -1):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, scale=options.get("sm_scale"), enable_gqa=heads_kv != case.heads
                )

        found["cudnn"] = cudnn
    return found, flops


def measure(name: str, rep: int, graph: bool) -> dict[str, Any]:
    """TFLOP/s of each implementation that takes the case, the reason of each that does not."""
    row: dict[str, Any] = {"case": name}
    outs = {}
    found, flops = calls(CASES[name])
    for who, call in found.items():
        try:
            outs[who] = call().float()
            if graph:
                ms = do_bench_cudagraph(call, rep=rep, return_mode="median")
            else:
                ms = do_bench(call, warmup=10, rep=rep, return_mode="median")
        except (ValueError, RuntimeError) as error:
            row[who] = str(error)[-160:]
            continue
        row[who], row[f"{who}_us"] = round(flops / ms / 1e9, 1), round(ms * 1e3, 1)
    if "v2" in outs:
        differences = [(out - outs["v2"]).abs().max().item() for who, out in outs.items() if who.startswith("sm90")]
        row["difference"] = float(f"{max(differences, default=float('nan')):.1e}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--rep", type=int, default=30, help="milliseconds of each measurement")
    parser.add_argument("--graph", action="store_true", help="time calls in a CUDA graph")
    parser.add_argument("--output", type=Path, default=None, help="JSON lines")
    options = parser.parse_args()
    for name in CASES:
        if not any(part in name for part in options.only):
            continue
        row = measure(name, options.rep, options.graph)
        who = [key.removesuffix("_us") for key in row if key.endswith("_us")]
        figures = ", ".join(f"{name} {row[name]}" for name in who)
        times = "/".join(f"{row[f'{name}_us']:.0f}" for name in who)
        print(f"{name:36} {figures}   {times} us   difference {row.get('difference', '-')}", flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
