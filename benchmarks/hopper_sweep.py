"""Forms of the Hopper forward kernel beside each other and beside cuDNN, FlashAttention-3 and -4, on an H100 or H200.

    python benchmarks/hopper_sweep.py [--cases 64-causal 64-full 128-causal …] [--only pingpong] [--budget 440]

Each form runs in a process of its own: several import and compile at the same time, one at a time holds the GPU, and
one that hangs or fails costs its time-out and nothing else. bf16, 16384 tokens, heads * head_dim = 2048, TFLOP/s of
4·B·H·S²·D (half with a causal mask), medians of `triton.testing.do_bench`; `error` is that of the norm of out against
float64. Prints a row as soon as it is there, then a table for each case, then for each length the best form with its
share of the best peer, and the rows that `backends/cuda/sm90.py` would have; writes JSON rows to --output as it goes.
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
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from diyfa.backends.cuda.sm90 import Sm90Config

TOKENS, HIDDEN = 16384, 2048
PEERS = ("cudnn", "fa3", "fa4", "portable")
SEQ_LENS = (1024, 4096, 16384)

# A form is named by its tile and what changes it; what the changes mean is said in `Sm90Config`.
TILES: dict[int, dict[str, Sm90Config]] = {
    64: {
        "3x64": Sm90Config(3, 128, 6, True, 160, 32),
        "3x64s8": Sm90Config(3, 128, 8, True, 160, 32),
        "2x64": Sm90Config(2, 128, 8, True, 240, 24),
        "3x64x64": Sm90Config(3, 64, 12, True, 160, 32),
    },
    96: {"2x64": Sm90Config(2, 128, 4, True, 240, 24), "native": Sm90Config(2, 128, 6, True, 240, 24, piece=32)},
    128: {"2x64": Sm90Config(2, 128, 4, True, 240, 24), "3x64x64": Sm90Config(3, 64, 6, True, 160, 32)},
    192: {"2x64": Sm90Config(2, 128, 3, False, 240, 24)},
    256: {"2x64": Sm90Config(2, 64, 4, False, 240, 24), "2x64r232": Sm90Config(2, 64, 4, False, 232, 40)},
}
CHANGES: dict[str, dict[str, Any]] = {
    "persistent": {"persistent": True},
    "balanced": {"persistent": True, "deal": "balanced"},
    "dynamic": {"persistent": True, "deal": "dynamic"},
    "pingpong": {"pingpong": True},
    "own-walk": {"own_walk": True},
    "lazy": {"lazy": 8},
    "poly4": {"polynomial": 1},
    "poly2": {"polynomial": 2},
    "joined": {"joined": True},
    "pairs": {"pairs": True},
    "by-head": {"together": 1},
}
# By case, the most promising first: what is named first is measured first, of all cases in turn.
FORMS: dict[tuple[int, bool], tuple[str, ...]] = {
    (64, True): (
        "3x64 dynamic pingpong own-walk pairs",
        "3x64 dynamic own-walk pairs",
        "3x64 dynamic pingpong own-walk",
        "2x64 dynamic pingpong pairs",
        "3x64s8 dynamic pingpong own-walk pairs",
        "3x64 balanced pingpong own-walk pairs",
        "3x64 dynamic pingpong own-walk pairs poly4",
        "3x64 dynamic pingpong own-walk pairs lazy",
        "3x64 pingpong own-walk pairs",
        "3x64",
        "3x64 balanced own-walk pairs",
        "3x64x64 dynamic pingpong own-walk pairs",
        "2x64 dynamic pairs",
        "3x64 dynamic pingpong",
        "2x64 balanced pingpong pairs",
        "3x64 dynamic pingpong own-walk by-head",
    ),
    (128, True): (
        "2x64 dynamic pairs",
        "2x64 balanced pairs",
        "2x64 dynamic",
        "2x64 dynamic pingpong pairs",
        "2x64",
        "2x64 pairs",
        "2x64 balanced pingpong pairs",
        "2x64 dynamic pairs lazy",
        "2x64 persistent pingpong",
        "2x64 dynamic pairs by-head",
        "2x64 dynamic pingpong pairs lazy",
        "2x64 dynamic pairs poly4",
        "3x64x64 dynamic pingpong own-walk pairs",
    ),
    (256, True): (
        "2x64 dynamic pairs",
        "2x64r232 balanced own-walk pairs",
        "2x64 dynamic own-walk",
        "2x64 balanced pairs",
        "2x64",
        "2x64 own-walk pairs",
        "2x64 pairs",
        "2x64 dynamic lazy",
        "2x64 dynamic pingpong own-walk",
    ),
    (64, False): (
        "3x64 persistent pingpong pairs",
        "3x64 pingpong pairs",
        "3x64s8 persistent pingpong pairs",
        "3x64 persistent pingpong",
        "3x64 pairs",
        "3x64",
        "2x64 persistent pingpong pairs",
        "3x64 persistent pingpong pairs poly4",
        "3x64 persistent pingpong pairs lazy",
        "3x64 dynamic pingpong pairs",
        "3x64 pingpong pairs poly4",
    ),
    (128, False): (
        "2x64 pairs",
        "2x64 persistent pairs",
        "2x64",
        "2x64 dynamic pairs",
        "2x64 persistent",
        "2x64 pairs lazy",
        "2x64 persistent pingpong pairs",
        "2x64 pingpong pairs",
    ),
    (256, False): (
        "2x64 pairs",
        "2x64",
        "2x64 persistent pairs",
        "2x64 lazy",
        "2x64 dynamic pairs",
        "2x64 pingpong pairs",
    ),
    (96, True): ("native joined pairs", "2x64", "native joined dynamic pairs", "native"),
    (96, False): ("native joined pairs", "2x64", "native"),
    (192, True): ("2x64 joined", "2x64", "2x64 pairs", "2x64 balanced"),
    (192, False): ("2x64 joined pairs", "2x64"),
}
GRID = tuple(case for case in FORMS if case[0] in (64, 128, 256))  # the cases of the 18 points


def candidates(head_dim: int, causal: bool) -> dict[str, Sm90Config]:
    """Name -> form, the most promising first."""
    found = {}
    for name in FORMS[head_dim, causal]:
        tile, *changes = name.split()
        values: dict[str, Any] = {}
        for change in changes:
            values |= CHANGES[change]
        found[name] = replace(TILES[head_dim][tile], **values)
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
    config = candidates(head_dim, causal).get(name)
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


# ---- what the figures say

CLOSE = 0.98  # of the best: not told apart from it
NOISE = 2.0  # times the peers' error against float64, beyond which a form is wrong


def _right(rows: list[dict]) -> list[dict]:
    """Rows of forms whose error is like the peers'."""
    peers = [row["error"] for row in rows if row["implementation"] in PEERS]
    allowed = NOISE * max(peers) if peers else 1e-2
    return [row for row in rows if row["implementation"] not in PEERS and row["error"] <= allowed]


def _table_rows(figures: dict[int, dict[str, float]]) -> list[tuple[list[int], str]]:
    """Length -> form -> TFLOP/s: (lengths, form), in as few rows as leave every length within CLOSE of its best."""
    lengths = sorted(figures)
    for cuts in sorted(range(1 << (len(lengths) - 1)), key=lambda bits: bits.bit_count()):
        parts: list[list[int]] = [[lengths[0]]]
        for i, length in enumerate(lengths[1:]):
            if cuts >> i & 1:
                parts.append([length])
            else:
                parts[-1].append(length)
        rows = []
        for part in parts:
            worst = {
                name: min(figures[s].get(name, 0.0) / max(figures[s].values()) for s in part)
                for name in figures[part[0]]
            }
            name = max(worst, key=lambda form: worst[form])
            if worst[name] < CLOSE and len(part) > 1:
                break
            rows.append((part, name))
        else:
            return rows
    raise AssertionError("one row for each length always does")


def _as_source(config: Sm90Config, measured: str) -> str:
    """The config as a row of `sm90.py` has it."""
    always = fields(config)[:6]
    changed = [f for f in fields(config)[6:] if f.name != "measured" and getattr(config, f.name) != f.default]
    arguments = [repr(getattr(config, f.name)) for f in always]
    arguments += [f"{f.name}={getattr(config, f.name)!r}".replace("'", '"') for f in changed]
    return f"C({', '.join(arguments)}, measured={measured})"


def print_summary(rows: list[dict]) -> None:
    """For each point of the grid the best form and its share of the best peer, then the rows of the table."""
    measured = [row for row in rows if "tflops" in row]
    source = []
    print("\nbest form at each point: TFLOP/s, share of the best peer")
    shares = []
    for head_dim, causal in FORMS:
        figures: dict[int, dict[str, float]] = {}
        for seqlen in sorted({row["S"] for row in measured}):
            here = [r for r in measured if (r["D"], r["causal"], r["S"]) == (head_dim, causal, seqlen)]
            mine = {row["implementation"]: row["tflops"] for row in _right(here)}
            if not mine:
                continue
            figures[seqlen] = mine
            name = max(mine, key=lambda form: mine[form])
            peers = {r["implementation"]: r["tflops"] for r in here if r["implementation"] in PEERS}
            line = f"  D={head_dim:3} {'causal' if causal else 'full  '} S={seqlen:5}  {mine[name]:6.1f}  {name:38}"
            if peers:
                best = max(peers, key=lambda peer: peers[peer])
                line += f" {mine[name] / peers[best]:.3f} of {best} {peers[best]:.1f}"
                shares += [mine[name] / peers[best]] if (head_dim, causal) in GRID else []
            print(line)
        if not figures:
            continue
        forms = candidates(head_dim, causal)
        parts = _table_rows(figures)
        source.append(f"    ({head_dim}, {causal}): (")
        for part, name in parts:
            most = "_ANY" if part is parts[-1][0] else 2 * part[-1]
            figure = "/".join(f"{figures[s][name]:.0f}" for s in part)
            source.append(f"        ({most}, {_as_source(forms[name], f'_H200 + {json.dumps(figure)}')}),")
        source.append("    ),")
    if shares:
        ahead = sum(share >= 1 for share in shares)
        print(f"  {ahead} of {len(shares)} points at or ahead of the best peer, the worst at {min(shares):.3f}")
    if source:
        print("\nrows for backends/cuda/sm90.py:", *source, sep="\n")


def ordered(cases: list[tuple[int, bool]], peers: list[str], only: list[str]) -> list[tuple[str, tuple[int, bool]]]:
    """What to measure: peers of the grid, then the forms of all cases in turn, the most promising of each first."""
    grid = [case for case in cases if case in GRID]
    work = [(peer, case) for peer in peers if peer != "portable" for case in grid]
    most = max(len(FORMS[case]) for case in cases)
    for rank in range(most):
        for case in grid:
            work += [(name, case) for name in FORMS[case][rank : rank + 1]]
        if rank == 1:  # other head dims and the portable kernel after the two best of each case
            others = [case for case in cases if case not in GRID]
            work += [("portable", case) for case in cases if "portable" in peers]
            work += [(name, case) for case in others for name in (*(p for p in peers if p == "cudnn"), *FORMS[case])]
    return [(name, case) for name, case in work if name in peers or not only or any(part in name for part in only)]


def main() -> None:
    every_case = [f"{d}-{'causal' if causal else 'full'}" for d, causal in FORMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=every_case, choices=every_case)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(SEQ_LENS))
    parser.add_argument("--only", nargs="*", default=[], help="forms whose name contains one of these")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--budget", type=float, default=440, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=20, help="seconds on the GPU for one form")
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of each measurement")
    parser.add_argument("--jobs", type=int, default=6, help="processes that import and compile at once")
    parser.add_argument("--output", type=Path, default=None, help="JSON lines")
    parser.add_argument("--summary", type=Path, default=None, help="JSON lines of an earlier run: only sum them up")
    parser.add_argument("--list", action="store_true", help="print the forms and stop")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lock", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [(int(case.split("-")[0]), case.endswith("causal")) for case in options.cases]
    if options.one is not None:
        one(options.one, *cases[0], options.seq_lens, options.lock, options.limit, options.rep)
        return
    if options.summary is not None:
        print_summary([json.loads(line) for line in options.summary.read_text().splitlines()])
        return
    work = ordered(cases, options.peers, options.only)
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
    print_summary(rows)


if __name__ == "__main__":
    main()
