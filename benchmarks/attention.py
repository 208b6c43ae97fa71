"""Forward and backward of diyfa, cuDNN, FlashAttention-2, -3 and -4 through their public functions, in turns.

    PYTHONPATH=. python benchmarks/attention.py [--cases 64-full 128-causal 192/128-causal …] [--output FILE]

Each implementation of a case runs in its own process. All have compiled before the first measurement. In every
round each implementation is timed once at each length; the next round has the reverse order. The GPU is at its power
limit. bf16, 16384 tokens, heads * head_dim = 2048; TFLOP/s count 2·B·H·S²·(D + Dv) forward and 2·B·H·S²·(3·D + 2·Dv)
backward, half with a causal mask. Figures are medians over the rounds of medians of `triton.testing.do_bench`. `error`
is the norm of out's error against float64 over the norm of out. FlashAttention-3 from PyPI has no backward pass, and
is left out where it is not installed, as FlashAttention-4 is. Prints rows and a table; writes a result file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hopper_sweep import error_of, sizes
from served import Served, watchdog

from diyfa.lab.bench.record import default_path, write_json

NAMES = ("cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "diyfa")
CASES = tuple(f"{d}-{mask}" for d in ("64", "128", "192/128", "256") for mask in ("full", "causal"))
SEQ_LENS = (1024, 4096, 16384)
COMPILE_LIMIT = 240  # seconds
RESULTS = Path(__file__).parent / "results"

Attention = Callable[..., torch.Tensor]


def _sdpa(name: str) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if name == "cuDNN" else SDPBackend.FLASH_ATTENTION

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def attention_named(name: str) -> tuple[Attention, bool]:
    """Return (f(q, k, v, causal), whether its tensors are (B, S, H, D) instead of (B, H, S, D))."""
    if name == "diyfa":
        from diyfa import flash_attention

        return flash_attention, False
    if name == "FlashAttention-3":
        from fa3_fwd_interface import flash_attn_func

        return flash_attn_func, True
    if name == "FlashAttention-4":
        from flash_attn.cute import flash_attn_func

        return flash_attn_func, True
    return _sdpa(name), False


def head_dims(case: str) -> tuple[int, int, bool]:
    """Return (D, Dv, causal) of a case."""
    dims, mask = case.split("-")
    d, _, dv = dims.partition("/")
    return int(d), int(dv or d), mask == "causal"


def shape(d: int, dv: int, seqlen: int) -> tuple[int, int, int]:
    """Return (B, H, S): 16384 tokens; heads of 192/128 are as many as those of 256, as V and out then lie equally."""
    return sizes(d if d == dv else 256, seqlen)[:3]


# ---- in the implementation's own process


def calls(name: str, case: str, seqlen: int) -> dict[str, Any]:
    """Return {"forward": call, "backward": call, "error": of out} after both have run once; one may be missing."""
    d, dv, causal = head_dims(case)
    attend, rows_first = attention_named(name)
    b, h, s = shape(d, dv, seqlen)
    torch.manual_seed(0)
    inputs = [torch.randn(b, h, s, width, device="cuda", dtype=torch.bfloat16) for width in (d, d, dv)]
    dout = torch.randn(b, h, s, dv, device="cuda", dtype=torch.bfloat16)
    given = [x.transpose(1, 2).contiguous() if rows_first else x for x in (*inputs, dout)]
    leaves = [x.requires_grad_() for x in given[:3]]

    def run() -> torch.Tensor:
        out = attend(*leaves, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run()

    out = forward()
    detached = [x.detach() for x in inputs]
    error = error_of(out.transpose(1, 2) if rows_first else out, *detached, causal)
    found: dict[str, Any] = {"forward": forward, "error": float(f"{error:.2e}")}
    if name != "FlashAttention-3":
        for _ in range(2):
            torch.autograd.grad(run(), leaves, given[3])
        found["backward"] = partial(torch.autograd.grad, run(), leaves, given[3], retain_graph=True)
    return found


def serve(name: str, case: str, options: argparse.Namespace) -> None:
    """Compile all lengths, say so, then measure what each line of stdin names: a pass and a length."""
    from triton.testing import do_bench

    with watchdog(COMPILE_LIMIT):
        try:
            ready = {seqlen: calls(name, case, seqlen) for seqlen in options.seq_lens}
        except (ImportError, RuntimeError, AssertionError) as error:
            print(json.dumps({"unavailable": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            return
        torch.cuda.synchronize()
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        direction, seqlen = line.split()
        found = ready[int(seqlen)]
        if direction not in found:
            print(json.dumps({"ms": None}), flush=True)
            continue
        with watchdog(options.limit):
            ms = do_bench(found[direction], warmup=options.rep, rep=options.rep, return_mode="median")
        print(json.dumps({"ms": ms, "error": found["error"]}), flush=True)


# ---- the benchmark


def _command(name: str, case: str, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--serve", name, "--cases", case, "--rep", str(options.rep)]
    return [*command, "--limit", str(options.limit), "--seq-lens", *map(str, options.seq_lens)]


def measure_case(case: str, served: list[Served], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of a case. `served` have compiled it."""
    d, dv, causal = head_dims(case)
    times: dict[tuple[str, str, int], list[float]] = {}
    errors: dict[tuple[str, int], float] = {}
    for turn in range(options.rounds):
        for direction in ("forward", "backward"):
            for seqlen in options.seq_lens:
                for each in served if turn % 2 == 0 else served[::-1]:
                    found = None if each.reason else each.ask(f"{direction} {seqlen}")
                    if found and found["ms"] is not None:
                        times.setdefault((each.name, direction, seqlen), []).append(found["ms"])
                        errors[each.name, seqlen] = found["error"]
    for (name, direction, seqlen), measured in times.items():
        b, h, s = shape(d, dv, seqlen)
        ms = median(measured)
        widths = d + dv if direction == "forward" else 3 * d + 2 * dv
        work = 2 * b * h * s * s * widths / 1e9 * (0.5 if causal else 1)
        yield {
            "implementation": name, "pass": direction, "D": d, "Dv": dv, "causal": causal, "S": s, "B": b, "H": h,
            "ms": round(ms, 4), "tflops": round(work / ms, 1), "error": errors[name, seqlen], "rounds": len(measured),
            "spread": round((max(measured) - min(measured)) / ms, 3),
        }  # fmt: skip
    for each in served:
        if each.reason:
            yield {"implementation": each.name, "D": d, "Dv": dv, "causal": causal, "unavailable": each.reason}


def print_table(rows: list[dict[str, Any]], seq_lens: list[int]) -> None:
    """Print TFLOP/s of each case and pass at all lengths, and diyfa's share of the fastest peer's."""
    for direction in ("forward", "backward"):
        for case in CASES:
            d, dv, causal = head_dims(case)
            speeds: dict[str, list[float]] = {}
            for row in rows:
                if "tflops" in row and (row["pass"], row["D"], row["Dv"], row["causal"]) == (direction, d, dv, causal):
                    speeds.setdefault(row["implementation"], []).append(row["tflops"])
            if "diyfa" not in speeds:
                continue
            peers = [speed for name, speed in speeds.items() if name != "diyfa" and len(speed) == len(seq_lens)]
            shares = [f"{ours / max(theirs):.2f}" for ours, *theirs in zip(speeds["diyfa"], *peers, strict=True)]
            figures = "  ".join(f"{name} {'/'.join(f'{x:.0f}' for x in speed)}" for name, speed in speeds.items())
            print(f"{direction:8} {case:14} {'/'.join(shares)}  {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(SEQ_LENS))
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rep", type=int, default=60, help="milliseconds of each warm-up and of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=500, help="seconds, after which no other case is begun")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one measurement, which hangs beyond them")
    parser.add_argument("--output", type=Path, default=None, help="result file, written after each case")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.cases[0], options)
        return
    deadline = time.monotonic() + options.budget
    output = options.output or default_path("attention", torch.device("cuda"), RESULTS)
    rows: list[dict[str, Any]] = []
    served = {case: [Served(name, _command(name, case, options)) for name in options.names] for case in options.cases}
    for each in chain(*served.values()):  # all compile at the same time, before the first measurement
        each.answer()
    for case, implementations in served.items():
        if time.monotonic() < deadline:
            rows += measure_case(case, implementations, options)
            found = [{"kind": "attention", "dtype": "bfloat16", **row} for row in rows]
            write_json(output, "attention", torch.device("cuda"), found, "comparison")
    for each in chain(*served.values()):
        each.close()
    print_table(rows, options.seq_lens)


if __name__ == "__main__":
    main()
