"""Forms of the Hopper forward kernel beside each other and beside cuDNN, FlashAttention-3 and -4, on an H100 or H200.

    python benchmarks/hopper_sweep.py [--cases 64-causal 64-full 128-causal …] [--only pingpong] [--budget 440]

Each form runs in a process of its own: several import and compile at the same time, one at a time holds the GPU, and
one that hangs or fails costs its time-out and nothing else. bf16, 16384 tokens, heads * head_dim = 2048, TFLOP/s of
4·B·H·S²·D (half with a causal mask), medians of `triton.testing.do_bench`; `error` is that of the norm of out against
float64. Prints a row as soon as it is there, then a table for each case; writes JSON rows to --output as it goes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diyfa.backends.cuda.sm90 import Sm90Config

TOKENS, HIDDEN = 16384, 2048
PEERS = ("cudnn", "fa3", "fa4", "portable")

TWO64 = Sm90Config(2, 128, 8, True, 240, 24)
THREE64 = Sm90Config(3, 128, 6, True, 160, 32)
TWO128 = Sm90Config(2, 128, 4, True, 240, 24)
THREE128 = Sm90Config(3, 64, 6, True, 160, 32)
TWO192 = Sm90Config(2, 128, 3, False, 240, 24)
TWO256 = Sm90Config(2, 64, 4, False, 240, 24)
TURNS, STAYS = {"pingpong": True}, {"persistent": True}

# Changes to a form, by name; each is one question. What 0, 1 and 2 mean is said in `Sm90Config`.
QUESTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "pingpong": TURNS,
    "persistent": STAYS,
    "pingpong persistent": TURNS | STAYS,
    "lazy": {"lazy": 8},
    "poly4": {"polynomial": 1},
    "poly2": {"polynomial": 2},
    "pingpong lazy": TURNS | {"lazy": 8},
    "pingpong poly4": TURNS | {"polynomial": 1},
    "pingpong poly4 persistent": TURNS | STAYS | {"polynomial": 1},
    "pingpong poly4 lazy": TURNS | {"polynomial": 1, "lazy": 8},
    "head by head": {"together": 1},
}
FEW = ("", "pingpong", "lazy", "pingpong lazy", "poly4")
FORMS: dict[int, dict[str, tuple[Sm90Config, tuple[str, ...]]]] = {
    64: {
        "3x64": (THREE64, tuple(QUESTIONS)),
        "2x64": (TWO64, ("", "pingpong", "pingpong persistent", "pingpong poly4")),
    },
    128: {"2x64": (TWO128, (*FEW, "pingpong persistent")), "3x64": (THREE128, ("", "pingpong"))},
    192: {"2x64": (TWO192, FEW[:2]), "2x64 64 keys": (replace(TWO192, block_n=64, slots=6), ("", "pingpong"))},
    256: {"2x64": (TWO256, FEW[:4])},
}


def candidates(head_dim: int) -> dict[str, Sm90Config]:
    """Name -> form, for a head dim of the table."""
    found = {}
    for base, (config, questions) in FORMS[head_dim].items():
        for question in questions:
            found[f"{base} {question}".strip()] = replace(config, **QUESTIONS[question])
    return found


def sizes(head_dim: int, seqlen: int) -> tuple[int, int, int, int]:
    return max(1, TOKENS // seqlen), max(1, HIDDEN // head_dim), seqlen, head_dim


# ---- in a process of its own


def _peer(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """A call of a peer; q, k, v are (B, H, S, D), the result too."""
    if name == "portable":
        from diyfa import flash_attention

        return lambda: flash_attention(q, k, v, causal=causal, variant="v2")
    if name == "cudnn":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return cudnn
    if name == "fa3":
        from fa3_fwd_interface import flash_attn_func
    else:
        from flash_attn.cute import flash_attn_func
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def flash() -> torch.Tensor:
        out = flash_attn_func(*rows, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return flash


def _ours(
    config: Sm90Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    """A call of the Hopper kernel's launcher with `config`; compiled, not run."""
    from diyfa.backends.cuda import fwd_sm90
    from diyfa.backends.cuda.launch import Launches
    from diyfa.problem import AttentionProblem, AttentionTensors

    b, h, s, d = q.shape
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", b, h, h, s, s, d, d, -1, 0 if causal else -1)
    out, lse = torch.empty_like(q), q.new_empty((b, h, s), dtype=torch.float32)
    tensors = AttentionTensors(q, k, v, d**-0.5)
    fwd_sm90.config_of = lambda problem: config

    def call() -> torch.Tensor:
        fwd_sm90.attention_forward(problem, tensors, out, lse)
        return out

    kernel = fwd_sm90._fwd_sm90_kernel

    class Compiling:
        """In the kernel's place: compiles instead of launching, so that only measuring needs the GPU."""

        arg_names = kernel.arg_names

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: kernel.warmup(*args, grid=grid, **kwargs)

    fwd_sm90._fwd_sm90_kernel, fwd_sm90._launches = Compiling(), Launches()
    call()
    fwd_sm90._fwd_sm90_kernel, fwd_sm90._launches = kernel, Launches()
    return call


def _error(call: Callable[[], torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Norm of the error against float64 over the norm, of the first sample's first heads and rows, and of its last."""
    out = call()[:1, :2].double()
    q, k, v = (x[:1, :2].double() for x in (q, k, v))
    worst = 0.0
    for rows in (slice(0, 256), slice(q.shape[2] - 256, q.shape[2])):
        scores = q[:, :, rows] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            i = torch.arange(q.shape[2], device=q.device)
            scores.masked_fill_(i[rows, None] < i, float("-inf"))
        expected = scores.softmax(-1) @ v
        worst = max(worst, ((out[:, :, rows] - expected).norm() / expected.norm()).item())
    return worst


def one(name: str, head_dim: int, causal: bool, seqlens: list[int], lock: str, limit: float, rep: int) -> None:
    """Measure one implementation at every length and print a JSON line for each."""
    from triton.testing import do_bench

    case = {"implementation": name, "D": head_dim, "causal": causal}
    config = candidates(head_dim).get(name)
    if config is None and name not in PEERS:
        raise ValueError(f"unknown implementation {name!r}")
    calls = {}
    for seqlen in seqlens:
        torch.manual_seed(0)
        inputs = [torch.randn(sizes(head_dim, seqlen), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        try:
            call = _peer(name, *inputs, causal) if config is None else _ours(config, *inputs, causal)
            if config is None:
                call()  # some compile when they are called first
        except (ImportError, RuntimeError) as error:
            print(json.dumps(case | {"S": seqlen, "unavailable": str(error)[:300]}), flush=True)
            return
        calls[seqlen] = call, inputs
    torch.cuda.synchronize()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one at a time holds the GPU
        watchdog = threading.Timer(limit, os._exit, (124,))  # a kernel that waits for ever does not return
        watchdog.daemon = True
        watchdog.start()
        for seqlen, (call, inputs) in calls.items():
            b, h, s, d = sizes(head_dim, seqlen)
            error = _error(call, *inputs, causal)
            ms = do_bench(call, warmup=15, rep=rep, return_mode="median")
            tflops = 4 * b * h * s * s * d / ms / 1e9 * (0.5 if causal else 1)
            row = case | {"S": s, "B": b, "H": h, "ms": round(ms, 4), "tflops": round(tflops, 1)}
            print(json.dumps(row | {"error": float(f"{error:.2e}")}), flush=True)
        watchdog.cancel()


# ---- the sweep


def _run(name: str, case: tuple[int, bool], options: argparse.Namespace, lock: str, deadline: float) -> Iterator[dict]:
    head_dim, causal = case
    left = deadline - time.monotonic()
    failed = {"implementation": name, "D": head_dim, "causal": causal}
    if left < 5:
        yield failed | {"unavailable": "no time left"}
        return
    command = [sys.executable, __file__, "--one", name, "--cases", f"{head_dim}-{'causal' if causal else 'full'}"]
    command += ["--lock", lock, "--limit", str(options.limit), "--rep", str(options.rep)]
    command += ["--seq-lens", *map(str, options.seq_lens)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        yield failed | {"unavailable": "the budget ended"}
        return
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield from rows
    if done.returncode:
        reason = f"hung for {options.limit} s" if done.returncode == 124 else (done.stderr.strip() or "?")[-300:]
        yield failed | {"unavailable": reason}


def print_table(rows: list[dict], case: tuple[int, bool], seqlens: list[int]) -> None:
    """Best first at the longest length; the last columns: share of the best peer."""
    head_dim, causal = case
    mine = [row for row in rows if (row["D"], row["causal"]) == case and "tflops" in row]
    by_name: dict[str, dict[int, dict]] = {}
    for row in mine:
        by_name.setdefault(row["implementation"], {})[row["S"]] = row
    best = {
        s: max((r["tflops"] for r in mine if r["S"] == s and r["implementation"] in PEERS), default=0) for s in seqlens
    }
    print(f"\nD={head_dim} {'causal' if causal else 'full'}: TFLOP/s at S = {seqlens}, share of the best peer, error")
    for name, found in sorted(by_name.items(), key=lambda item: -sum(r["tflops"] for r in item[1].values())):
        figures = " ".join(f"{found[s]['tflops']:7.1f}" if s in found else "      -" for s in seqlens)
        shares = " ".join(
            f"{found[s]['tflops'] / best[s]:5.2f}" if s in found and best[s] else "    -" for s in seqlens
        )
        print(f"  {name:34} {figures}   {shares}   {max(r['error'] for r in found.values()):.1e}")


def main() -> None:
    every_case = [f"{d}-{mask}" for d in FORMS for mask in ("causal", "full")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=every_case, choices=every_case)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--only", nargs="*", default=[], help="forms whose name contains one of these")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--budget", type=float, default=440, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=20, help="seconds on the GPU for one form")
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of each measurement")
    parser.add_argument("--jobs", type=int, default=6, help="processes that import and compile at once")
    parser.add_argument("--output", type=Path, default=None, help="JSON lines")
    parser.add_argument("--list", action="store_true", help="print the forms and stop")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [(int(case.split("-")[0]), case.endswith("causal")) for case in options.cases]
    if options.one is not None:
        one(options.one, *cases[0], options.seq_lens, options.lock, options.limit, options.rep)
        return
    work = [
        (name, case)
        for case in cases
        for name in (*options.peers, *candidates(case[0]))
        if name in options.peers or not options.only or any(part in name for part in options.only)
    ]
    if options.list:
        print("\n".join(f"{d}-{'causal' if causal else 'full':7} {name}" for name, (d, causal) in work))
        return
    deadline = time.monotonic() + options.budget
    rows: list[dict] = []
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda job: list(_run(*job, options, lock.name, deadline)), work):
            for row in found:
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.output is not None:
                    with options.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    for case in cases:
        print_table(rows, case, options.seq_lens)


if __name__ == "__main__":
    main()
