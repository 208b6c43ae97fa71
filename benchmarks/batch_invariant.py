"""Benchmark of `diyfa.batch_invariant()` and of `deterministic=True`: the speed inside divided by the speed outside.

    python benchmarks/batch_invariant.py [--jobs training-64 training-128 training-256 prompts decode backward]

On an H100 or H200, bfloat16. Each job runs in its own process, which only costs its time-out if it hangs or fails. All
jobs first run each call once, side by side, so that their kernels are compiled; then they are measured one after
another. Inside and outside alternate. TFLOP/s count 2·H·pairs·(D + Dv), half of the pairs with a causal mask.

    training  forward of 16384 tokens, H·D = 2048, causal, sequences of 4k and 16k, dense and packed
    prompts   2k and 8k new tokens after 0 and 32k keys, 32 query heads over 8 of 128, pages of 64 tokens
    decode    the six rows of `benchmarks/decode.py`
    backward  forward and backward with `deterministic=True` beside without, as "training"

"bits" is the number of elements that differ and may not: inside the mode those of packed from dense training, those of
the prompt and of one decoded token from training; of decode and backward, those of two runs. Writes a JSON file to
benchmarks/results/; prints one table last. Exit status 1 if bits differ or a job is missing. Less than 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from decode import SIZES, Case, Setup, calls_of, captured

import diyfa
from diyfa.lab.bench.record import default_path, device_name, write_json
from diyfa.lab.bench.timing import compute_quantiles, time_calls

RESULTS = Path(__file__).parent / "results"
TOKENS, HIDDEN = 16384, 2048
COMPILE_LIMIT, JOB_LIMIT = 110, 45  # seconds
ROUNDS, WARMUP, REP = 5, 3, 12
Row = dict[str, Any]
Call = Callable[[], Any]


def in_turns(calls: dict[str, Call], device: torch.device, once: bool, graphs: bool = True) -> dict[str, float]:
    """Return {name: median milliseconds} of calls that alternate; {} if they are only run once."""
    if once:
        for call in calls.values():
            call()
        torch.cuda.synchronize(device)
        return {}
    ready = {name: captured(call, device) if graphs else call for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, call in ready.items():
            times[name].append(compute_quantiles(time_calls(call, device, WARMUP, REP))[0])
    return {name: median(x) for name, x in times.items()}


def inside(call: Call) -> Call:
    def run() -> Any:
        with diyfa.batch_invariant():
            return call()

    return run


def differing(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x.view(torch.int16) != y.view(torch.int16)).sum())


def row(case: str, times: dict[str, float], flops: float, bits: int) -> Row:
    """Return the row of a case that was timed as "outside" and "inside"."""
    result: Row = {"case": case, "implementation": "diyfa", "bits": bits}
    if times:
        result |= {"ms": times["inside"], "outside_ms": times["outside"], "ratio": times["outside"] / times["inside"]}
        result["TFLOP/s"] = flops / times["inside"] / 1e9
    return result


def drawn(d: int, *heads: int) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(d)
    return [torch.randn(TOKENS, h, d, generator=g, device="cuda", dtype=torch.bfloat16) for h in heads]


def training_calls(d: int, n: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return {"dense", "packed": function of options -> out (tokens, heads, d)} of the same sequences of n tokens."""
    heads = HIDDEN // d
    q, k, v = drawn(d, heads, heads, heads)
    offsets = torch.arange(0, TOKENS + 1, n, dtype=torch.int32, device="cuda")

    def dense(**options: Any) -> torch.Tensor:
        rows = [x.unflatten(0, (-1, n)) for x in (q, k, v)]
        out: torch.Tensor = diyfa.flash_attn_func(rows[0], rows[1], rows[2], causal=True, **options)
        return out.flatten(0, 1)

    def packed(**options: Any) -> torch.Tensor:
        out: torch.Tensor = diyfa.flash_attn_varlen_func(q, k, v, offsets, offsets, n, n, causal=True, **options)
        return out

    return {"dense": dense, "packed": packed}


def training(d: int, once: bool) -> Iterator[Row]:
    device = torch.device("cuda")
    for n in (4096, 16384):
        calls = training_calls(d, n)
        wanted = inside(calls["dense"])()
        for name, call in calls.items():
            bits = differing(wanted, inside(call)())
            times = in_turns({"outside": call, "inside": inside(call)}, device, once)
            yield row(f"D={d} S={n} causal {name}", times, 2 * TOKENS * n * HIDDEN, bits)


def prompts(once: bool) -> Iterator[Row]:
    device = torch.device("cuda")
    d, heads, heads_kv, page = 128, 32, 8, 64
    for new in (2048, 8192):
        for before in (0, 32768):
            g = torch.Generator("cuda").manual_seed(new)
            n = before + new
            q, k, v = (
                torch.randn(1, n, h, d, generator=g, device="cuda", dtype=torch.bfloat16)
                for h in (heads, heads_kv, heads_kv)
            )
            pages = n // page
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to("cuda")
            caches = [torch.empty(pages, page, heads_kv, d, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
            for cache, x in zip(caches, (k, v), strict=True):
                cache[order] = x[0].unflatten(0, (pages, page))
            table, lens = order.int()[None], torch.tensor([n], dtype=torch.int32, device="cuda")

            def prompt(first: int, q: Any = q, kv: Any = caches, lens: Any = lens, table: Any = table) -> torch.Tensor:
                out: torch.Tensor = diyfa.flash_attn_with_kvcache(
                    q[:, first:], kv[0], kv[1], cache_seqlens=lens, block_table=table, causal=True
                )
                return out

            call = partial(prompt, before)
            with diyfa.batch_invariant():
                trained: torch.Tensor = diyfa.flash_attn_func(q, k, v, causal=True)
                bits = differing(trained[:, before:], prompt(before)) + differing(trained[:, -1:], prompt(n - 1))
            times = in_turns({"outside": call, "inside": inside(call)}, device, once)
            pairs = new * before + new * new / 2
            yield row(f"{new} new after {before}, pages of {page}", times, 4 * heads * d * pairs, bits)


def decode(once: bool) -> Iterator[Row]:
    setup = Setup(torch.device("cuda"), ROUNDS, WARMUP, REP, 1)
    for batch, n in SIZES:
        case = Case(f"B={batch} S={n}", (n,) * batch)
        call = calls_of(case, setup, peers=False)["diyfa"]
        with diyfa.batch_invariant():
            bits = differing(call.run(), call.run())
        times = in_turns({"outside": call, "inside": inside(call)}, setup.device, once)
        result = row(case.name, times, case.flops, bits)
        if times:
            result["GB/s"] = case.bytes_read / times["inside"] / 1e6
        yield result
        torch.cuda.empty_cache()


def backward(once: bool) -> Iterator[Row]:
    device = torch.device("cuda")
    for d in (64, 128, 256):
        for n in (4096, 16384):
            heads = HIDDEN // d
            q, k, v = (x.requires_grad_() for x in drawn(d, heads, heads, heads))
            dout = torch.randn_like(q)
            for causal in (True, False):
                calls: dict[str, Call] = {}
                for name, deterministic in (("outside", False), ("inside", True)):
                    rows = [x.unflatten(0, (-1, n)) for x in (q, k, v)]
                    out: torch.Tensor = diyfa.flash_attn_func(
                        rows[0], rows[1], rows[2], causal=causal, deterministic=deterministic
                    )
                    out = out.flatten(0, 1)
                    calls[name] = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
                results = [calls["inside"]() for _ in range(2)]
                bits = sum(differing(x, y) for x, y in zip(*results, strict=True))
                times = in_turns(calls, device, once, graphs=False)
                flops = 10 * TOKENS * n * HIDDEN / (2 if causal else 1)
                yield row(f"D={d} S={n} {'causal' if causal else 'full'} backward", times, flops, bits)


JOBS: dict[str, Callable[[bool], Iterator[Row]]] = {
    **{f"training-{d}": partial(training, d) for d in (64, 128, 256)},
    "prompts": prompts,
    "decode": decode,
    "backward": backward,
}


def start(job: str, once: bool) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--job", job, *(["--once"] if once else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[list[Row], str]:
    """Return (rows, what went wrong or "") of a job that may take so many more seconds."""
    wrong = ""
    try:
        out, errors = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        wrong = "time-out"
    if process.returncode and not wrong:
        wrong = (errors.strip().splitlines() or ["no message"])[-1]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", choices=JOBS, nargs="+", default=list(JOBS))
    parser.add_argument("--job", choices=JOBS, help="run this job in this process, and print a JSON line for each row")
    parser.add_argument("--once", action="store_true", help="with --job: run each call once and time nothing")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: benchmarks/results/…")
    options = parser.parse_args()
    if options.job:
        with torch.no_grad() if options.job != "backward" else nullcontext():
            for found in JOBS[options.job](options.once):
                print(
                    json.dumps(
                        {
                            "kind": "feature",
                            "pass": "both" if options.job == "backward" else "forward",
                            "table": options.job,
                            **found,
                        }
                    ),
                    flush=True,
                )
        return 0
    begin = time.time()
    first = {job: start(job, once=True) for job in options.jobs}
    failed = {job: wrong for job, x in first.items() if (wrong := finish(x, begin + COMPILE_LIMIT - time.time())[1])}
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    rows: list[Row] = []
    for job in options.jobs:
        if job in failed:
            continue
        timed, wrong = finish(start(job, once=False), JOB_LIMIT)
        rows += timed
        if wrong:
            failed[job] = wrong
    device = torch.device("cuda")
    path = options.output or default_path("batch-invariant", device, RESULTS)
    write_json(path, "batch-invariant", device, rows)
    print(f"{path}, {time.time() - begin:.0f} s, {device_name(device)}")
    print(f"{'case':<40} {'inside us':>10} {'outside us':>10} {'TFLOP/s':>8} {'ratio':>6} {'bits':>6}")
    for x in rows:
        print(
            f"{x['case']:<40} {x['ms'] * 1e3:>10.1f} {x['outside_ms'] * 1e3:>10.1f} {x['TFLOP/s']:>8.1f} "
            f"{x['ratio']:>6.3f} {x['bits']:>6}"
        )
    for job, wrong in failed.items():
        print(f"{job}: {wrong}")
    return 1 if failed or any(x["bits"] for x in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
