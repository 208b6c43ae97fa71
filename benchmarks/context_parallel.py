"""Benchmark of context parallel attention: measured on several devices, or predicted from kernel times on one.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --tokens 1048576
    python benchmarks/context_parallel.py --predict 8 --tokens 1048576
    python benchmarks/context_parallel.py --predict 8 --tokens 1048576 --kernel-tflops 699 435     # no device at all

Efficiency is t1 / ranks / tn: t1 is the time of the call on one device, tn on all ranks. Its bound assumes that the
longer of kernels and transfers, each measured alone, hides the other (for Ulysses: one after the other). First the
results are compared with the float64 reference. `--predict` runs each rank's computation step by step on one device and
puts the steps on a timeline with the stated link speeds; it prints its assumptions. Prints one JSON line after the
tables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diyfa import flash_attention, ops
from diyfa.attention import checked_options
from diyfa.device import default_backend
from diyfa.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from diyfa.distributed.cost import BACKWARD_WORK, BETWEEN_HOSTS, MACHINES, Work, ring_timeline
from diyfa.distributed.merge import Merged
from diyfa.distributed.ring import (
    Ring,
    Saved,
    Sum,
    backward_step,
    call_options,
    forward_step,
    ring_backward,
    ring_forward,
)
from diyfa.distributed.sharding import rank_segments
from diyfa.distributed.steps import Step, ring_steps
from diyfa.distributed.ulysses import Ulysses, kv_head_repeats
from diyfa.lab.bench.record import write_json
from diyfa.lab.bench.timing import synchronize, time_calls
from diyfa.options import NO_LENGTHS
from diyfa.testing import AttentionCase, Results, check_budget, make_inputs

SPEEDS = dict(MACHINES)
ADAPTER = replace(SPEEDS["sm_90"], peer=BETWEEN_HOSTS, exchange=BETWEEN_HOSTS)
LINKS = {
    "NVLink 4": SPEEDS["sm_90"],
    "400 Gb/s": ADAPTER,
    "HCCS 910B": SPEEDS["Ascend910B"],
    "HCCS 910_93": SPEEDS["Ascend910_93"],
}
LATENCY = 20e-6
ASSUMED = """Assumed: all ranks run at this device's speed and start together; a transfer begins with the step before
it, runs at the stated speed whatever else the chip does, and slows down no kernel; 20 us for each transfer besides;
links at 0.8 of what vendors state. Ulysses' exchanges hide nothing, and the copies beside them cost nothing."""


LONG = 200_000  # a longer call on one device is timed once, after a warm-up call of SHORT rows
SHORT = 32_768


def seconds_of(run: Callable[[], Any], device: torch.device, reps: int, warmup: int = 1) -> float:
    return min(time_calls(run, device, warmup, reps)) / 1e3


class Sizes:
    """The sizes of a run; makes its tensors."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.heads, self.heads_kv, self.head_dim = arguments.heads, arguments.heads_kv, arguments.head_dim
        self.dtype, self.device, self.causal = getattr(torch, arguments.dtype), device, not arguments.full
        self.backend = "cpu" if device.type == "cpu" else None

    def random(self, rows: int, heads: int = 0, heads_kv: int = 0) -> list[torch.Tensor]:
        counts = (heads or self.heads, heads_kv or self.heads_kv, heads_kv or self.heads_kv)
        return [torch.randn(1, h, rows, self.head_dim, device=self.device, dtype=self.dtype) for h in counts]

    def whole(self, rows: int, reps: int, heads: int = 0, heads_kv: int = 0) -> tuple[float, float]:
        """Return the seconds of forward and backward of one call on this device."""
        warmup = 1
        if rows > LONG:
            self.whole(SHORT, 1, heads, heads_kv)
            reps, warmup = 1, 0
        q, k, v = (x.requires_grad_() for x in self.random(rows, heads, heads_kv))
        attend = partial(flash_attention, causal=self.causal, backend=self.backend)
        with torch.no_grad():
            forward = seconds_of(lambda: attend(q, k, v), self.device, reps, warmup)
        out = attend(q, k, v)
        dout = torch.randn_like(out)
        differentiate = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
        backward = seconds_of(differentiate, self.device, reps, warmup)
        return forward, backward

    def work(self, ranks: int, rows: int) -> Work:
        share = 0.5 if self.causal else 1.0
        return Work(
            ranks, 1, self.heads, self.heads_kv, rows // ranks, self.head_dim, self.head_dim, self.dtype.itemsize, share
        )

    def ring(self, group: Any, steps: tuple[Step, ...], qkv: list[torch.Tensor]) -> Ring:
        options = checked_options(*qkv, NO_LENGTHS, {"layout": "bhsd", "causal": self.causal, "backend": self.backend})
        return Ring(group, steps, options)


def time_steps(sizes: Sizes, ranks: int, rows: int, reps: int) -> dict[str, list[list[float]]]:
    """Return seconds [rank][step] of the kernels ("partial"), of kernels and merges ("forward"), and of "backward"."""
    layout = rank_segments((0, rows, rows), ranks, "zigzag")
    q, k, v = sizes.random(rows // ranks)
    q.requires_grad_()
    window = (-1, 0 if sizes.causal else -1)
    every = [ring_steps(layout, rank, window, False) for rank in range(ranks)]
    ring = sizes.ring(None, every[0], [q, k, v])
    q = q.detach()
    merged = Merged(q, v.shape[-1], "bhsd", sizes.backend or "")
    for step in every[0][:2]:  # make an accumulator, so that every timed step merges
        forward_step(ring, step, q, [k, v], None, merged)
    out, lse = merged.result()
    saved = Saved(q, None, out, lse, torch.randn_like(out), None, Sum(q, 2), None)
    saved.dq.total_or_zeros()
    known: dict[Any, list[float]] = {}
    found: dict[str, list[list[float]]] = {"partial": [], "forward": [], "backward": []}
    for own in every:
        times = []
        for step in own:
            first = step.shift == 0
            if (first, step.calls) not in known:
                kernels, merges = step_seconds(sizes, ring, step, (q, k, v), merged, reps)
                backward = seconds_of(partial(backward_step, ring, step, saved, [k, v]), sizes.device, reps)
                known[first, step.calls] = [kernels, kernels if first else kernels + merges, backward]
            times.append(known[first, step.calls])
        for name, values in zip(found, zip(*times, strict=True), strict=True):
            found[name].append(list(values))
    return found


def step_seconds(
    sizes: Sizes, ring: Ring, step: Step, qkv: tuple[torch.Tensor, ...], merged: Merged, reps: int
) -> tuple[float, float]:
    """Return the seconds of a step's attention calls and of their merges."""
    kernels, merges = 0.0, 0.0
    for call in step.calls:
        rows = [x[:, :, slice(*at)] for x, at in zip(qkv, (call.queries, call.keys, call.keys), strict=True)]
        attend = partial(ops.forward, *rows, NO_LENGTHS, call_options(ring, call, qkv[0], None))
        kernels += seconds_of(attend, sizes.device, reps)
        merges += seconds_of(partial(merged.add, call.queries[0], *attend()), sizes.device, reps)
    return kernels, merges


def predict(sizes: Sizes, ranks: int, rows: int, reps: int, kernel_tflops: list[float]) -> list[dict[str, Any]]:
    """Return one row for each method and kind of links."""
    work = sizes.work(ranks, rows)
    if kernel_tflops:
        speeds = [1e12 * x for x in (kernel_tflops[0], kernel_tflops[-1])]
        whole = (work.flops * ranks / speeds[0], BACKWARD_WORK * work.flops * ranks / speeds[1])
        steps = {
            name: [[x / ranks / ranks] * ranks] * ranks for name, x in zip(("forward", "backward"), whole, strict=True)
        }
        of_heads = None if sizes.heads % ranks else tuple(x / ranks for x in whole)
        print(f"kernels: {kernel_tflops} TFLOP/s assumed, partial calls as fast; merges as fast as memory")
    else:
        whole = sizes.whole(rows, reps)
        steps = time_steps(sizes, ranks, rows, reps)
        of_heads = None
        if sizes.heads % ranks == 0:
            of_heads = sizes.whole(rows, reps, sizes.heads // ranks, max(1, sizes.heads_kv // ranks))
        kernels, joined = (sum(map(sum, steps[name])) for name in ("partial", "forward"))
        print(f"one device: forward {whole[0]:.4f} s, backward {whole[1]:.4f} s")
        print(
            f"partial calls: {whole[0] / kernels:.3f} of the speed of the whole one; merges {joined / kernels - 1:.2%}"
        )
    rows_found = []
    for links, machine in LINKS.items():
        peer, exchange = machine.peer, machine.exchange
        home = work.gradient_bytes / peer + LATENCY
        keys = work.kv_bytes / peer + LATENCY
        moved = work.exchanged_bytes / exchange + 2 * LATENCY
        merge = work.merged_bytes / machine.memory if kernel_tflops else 0.0  # measured steps include it
        forward = [[own[0], *(x + merge for x in own[1:])] for own in steps["forward"]]
        ahead, back = ring_timeline(forward, keys), ring_timeline(steps["backward"], keys + home) + home
        times = {"ring": (ahead, back)}
        if of_heads:
            times["ulysses"] = (of_heads[0] + moved, of_heads[1] + moved)
        for method, (forward, backward) in times.items():
            ring = method == "ring"
            rows_found.append({
                "method": method, "tokens": rows, "links": links, "GB/s": (peer if ring else exchange) / 1e9,
                "forward_s": forward, "backward_s": backward,
                "forward_efficiency": whole[0] / ranks / forward,
                "efficiency": sum(whole) / ranks / (forward + backward),
                "sent_GB_forward": (work.kv_bytes * (ranks - 1) if ring else work.exchanged_bytes) / 1e9,
                "links_alone_s": keys * (ranks - 1) if ring else moved,
            })  # fmt: skip
    print(ASSUMED)
    return rows_found


def check(sizes: Sizes, rows: int, methods: list[str]) -> None:
    """Print which fraction of its error budget each result uses, on a sequence short enough for the float64 reference.

    Raises:
        AssertionError: a result exceeds its budget; rank 0 raises it.
    """
    dtype = str(sizes.dtype).removeprefix("torch.")
    counts = {"heads": sizes.heads, "heads_kv": sizes.heads_kv, "head_dim": sizes.head_dim}
    case = AttentionCase("check", seqlen_q=rows, dtype=dtype, causal=sizes.causal, **counts)
    inputs = make_inputs(case, sizes.device)
    q, k, v, dout, dlse = (shard_sequence(x.detach(), dim=2) for x in inputs[:5])
    qkv = [x.requires_grad_() for x in (q, k, v)]
    for method in methods:
        out, lse = context_parallel_attention(
            *qkv, causal=sizes.causal, method=method, backend=sizes.backend, return_lse=True
        )
        parts = out, lse, *torch.autograd.grad((out, lse), qkv, (dout, dlse))
        results = Results(*(unshard_sequence(x.detach(), dim=2).cpu() for x in parts))
        if dist.get_rank() == 0:
            shares = {
                name: found.share for name, found in check_budget(results, case, str(sizes.device), draws=1).items()
            }
            told = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
            print(f"{method}, {rows} tokens: share of the error budget  {told}", flush=True)
            assert max(shares.values()) <= 1, f"{method}: outside the error budget"


class Apart(NamedTuple):
    """Seconds of one pass of a call: its transfers without kernels, and its kernels without transfers."""

    links: float
    kernels: float

    def overlap(self, together: float) -> float:
        """Return the fraction of the shorter one that the other hides, 0 to 1."""
        return max(0.0, min(1.0, (self.links + self.kernels - together) / min(self)))


def measure(sizes: Sizes, rows: int, reps: int, methods: list[str]) -> list[dict[str, Any]]:
    """Return one row for each method, measured on all ranks of torchrun."""
    ranks = dist.get_world_size()
    work = sizes.work(ranks, rows)
    alone = [reduced(x, sizes.device) for x in sizes.whole(rows, reps)]  # every rank by itself, all at a time
    qkv = [x.requires_grad_() for x in sizes.random(rows // ranks)]
    found = []
    for method in methods:
        attend = partial(context_parallel_attention, *qkv, causal=sizes.causal, method=method, backend=sizes.backend)
        dout = torch.randn_like(attend())
        runs = partial(_without_gradient, attend), partial(_with_gradients, attend, qkv, dout)
        forward, total = (reduced(seconds_of(run, sizes.device, reps), sizes.device) for run in runs)
        ring = method == "ring"
        ahead, back = (_ring_apart if ring else _ulysses_apart)(sizes, rows, [x.detach() for x in qkv], reps)
        sent = work.kv_bytes * (ranks - 1) if ring else work.exchanged_bytes
        bounds = [max(x) if ring else sum(x) for x in (ahead, back)]
        row = {
            "method": method, "tokens": rows, "ranks": ranks, "one_device_s": sum(alone),
            "forward_s": forward, "backward_s": total - forward,
            "forward_efficiency": alone[0] / ranks / forward, "efficiency": sum(alone) / ranks / total,
            "forward_bound": alone[0] / ranks / bounds[0], "bound": sum(alone) / ranks / sum(bounds),
            "sent_GB_forward": sent / 1e9, "links_GB/s": sent / 1e9 / ahead.links,
            "links_alone_s": ahead.links, "kernels_alone_s": ahead.kernels,
            "backward_links_alone_s": back.links, "backward_kernels_alone_s": back.kernels,
        }  # fmt: skip
        if ring:
            row |= {"overlap": ahead.overlap(forward), "backward_overlap": back.overlap(total - forward)}
        found.append(row)
    return found


def _without_gradient(attend: Callable[[], Any]) -> None:
    with torch.no_grad():
        attend()


def _with_gradients(attend: Callable[[], Any], qkv: list[torch.Tensor], dout: torch.Tensor) -> None:
    torch.autograd.grad(attend(), qkv, dout)


def _ring_apart(sizes: Sizes, rows: int, qkv: list[torch.Tensor], reps: int) -> tuple[Apart, Apart]:
    """Time forward and backward of a ring: transfers with steps that compute nothing, and steps without transfers."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    steps = ring_steps(rank_segments((0, rows, rows), ranks, "zigzag"), rank, (-1, 0 if sizes.causal else -1), False)
    idle = sizes.ring(dist.group.WORLD, tuple(Step(step.shift, ()) for step in steps), qkv)
    busy = sizes.ring(dist.group.WORLD, steps, qkv)
    q, *keys = qkv
    out, _, lse = ring_forward(busy, *qkv, None)
    dout = torch.randn_like(out)

    def saved() -> Saved:
        return Saved(q, None, out, lse, dout, None, Sum(q, 2), None)

    def compute() -> None:
        merged = Merged(q, sizes.head_dim, "bhsd", sizes.backend or "")
        for step in steps:
            forward_step(busy, step, q, keys, None, merged)

    def compute_gradients() -> None:
        own = saved()
        for step in steps:
            backward_step(busy, step, own, keys)

    runs = (
        partial(ring_forward, idle, *qkv, None), compute,
        lambda: ring_backward(idle, saved(), *keys), compute_gradients,
    )  # fmt: skip
    times = [reduced(seconds_of(run, sizes.device, reps), sizes.device) for run in runs]
    return Apart(*times[:2]), Apart(*times[2:])


def _ulysses_apart(sizes: Sizes, rows: int, qkv: list[torch.Tensor], reps: int) -> tuple[Apart, Apart]:
    """Time forward and backward of Ulysses: its exchanges, and attention of a rank's heads over all rows."""
    ranks = dist.get_world_size()
    segments = rank_segments((0, rows, rows), ranks, "zigzag")
    exchange = Ulysses(dist.group.WORLD, segments, "bhsd", kv_head_repeats(sizes.heads_kv, ranks))
    q, k, v = exchange.scatter_heads(*qkv)
    lse = ops.empty_lse(qkv[0], "bhsd").zero_()

    def there_and_back() -> None:
        exchange.scatter_heads(*qkv)
        exchange.gather_heads(q, None)

    def gradients_there_and_back() -> None:
        exchange.scatter_results(qkv[0], lse)
        exchange.gather_gradients(q, k, v)

    exchanges = there_and_back, gradients_there_and_back
    links = [reduced(seconds_of(run, sizes.device, reps), sizes.device) for run in exchanges]
    counts = q.shape[1], k.shape[1]
    kernels = [reduced(x, sizes.device) for x in sizes.whole(rows, reps, *counts)]
    return Apart(links[0], kernels[0]), Apart(links[1], kernels[1])


def reduced(x: float, device: torch.device) -> float:
    """Return the largest of all ranks' numbers."""
    value = torch.tensor([x], device=device, dtype=torch.float32)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def result_rows(sizes: Sizes, ranks: int, row: dict[str, Any], predicted: bool) -> list[dict[str, Any]]:
    """Return one row of a result file for each pass of a run, with the speed of all ranks together."""
    tokens = row["tokens"]
    shape = {"B": 1, "H": sizes.heads, "group": sizes.heads // sizes.heads_kv, "S": tokens, "D": sizes.head_dim}
    common = {
        "kind": "packed", "implementation": "diyfa", "case": f"context parallel, {row['method']}, {ranks} ranks",
        "dtype": str(sizes.dtype).removeprefix("torch."), "causal": sizes.causal, **shape, "facts": row,
    }  # fmt: skip
    if predicted:
        common |= {"source": "predicted", "device": f"{ranks} chips, {row['links']}"}
    forward = sizes.work(ranks, tokens).flops * ranks
    results = []
    for name, flops in (("forward", forward), ("backward", BACKWARD_WORK * forward)):
        seconds = row[f"{name}_s"]
        results.append({**common, "pass": name, "ms": 1e3 * seconds, "tflops": flops / seconds / 1e12})
    return results


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows that may have different columns."""
    for row in rows:
        words = (f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items())
        print("  ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072], help="of the whole sequence, or of several")
    parser.add_argument("--check", type=int, default=2048, metavar="TOKENS", help="of a check first; 0: none")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--methods", nargs="+", default=["ring", "ulysses"], choices=["ring", "ulysses"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--device", help="cuda, npu or cpu; default: what is there")
    parser.add_argument("--predict", type=int, metavar="RANKS", help="from this one device")
    parser.add_argument(
        "--kernel-tflops", type=float, nargs="+", default=[], metavar="TFLOPS",
        help="with --predict: measure nothing; forward, and backward where it differs",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="result file")
    arguments = parser.parse_args()
    kind = arguments.device or ("cpu" if arguments.kernel_tflops else default_backend())
    if arguments.predict:
        sizes = Sizes(arguments, torch.device(kind))
        settings = arguments.reps, arguments.kernel_tflops
        rows = [row for tokens in arguments.tokens for row in predict(sizes, arguments.predict, tokens, *settings)]
    else:
        local = int(os.environ["LOCAL_RANK"])  # torchrun's
        device = torch.device(kind) if kind == "cpu" else torch.device(kind, local)
        if kind != "cpu":
            getattr(torch, kind).set_device(device)
        dist.init_process_group(
            {"cuda": "nccl", "npu": "hccl"}.get(kind, "gloo"), device_id=device if kind == "cuda" else None
        )
        sizes = Sizes(arguments, device)
        if arguments.check:
            check(sizes, arguments.check, arguments.methods)
        rows = []
        for tokens in arguments.tokens:
            found = measure(sizes, tokens, arguments.reps, arguments.methods)
            if dist.get_rank() == 0:  # print at once, because a later length may not fit into memory
                show(found)
            rows += found
        synchronize(device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if arguments.predict:
            show(rows)
        if arguments.output is not None:
            ranks = arguments.predict or dist.get_world_size()
            results = [result for row in rows for result in result_rows(sizes, ranks, row, bool(arguments.predict))]
            options = {name: x for name, x in vars(arguments).items() if name != "output"}
            write_json(arguments.output, "context_parallel", sizes.device, results, options=options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
