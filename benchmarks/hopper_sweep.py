"""Benchmark of the Hopper forward's configs against each other, cuDNN, FlashAttention-3 and -4, on an H100 or H200.

    python benchmarks/hopper_sweep.py [--cases 64-causal 64-full 128-causal …] [--only pingpong] [--budget 440]

Each implementation runs in its own process; one that hangs or fails costs only its time-out. All implementations of a
case compile first. Then they are measured alternately for several rounds, because the first on a cool GPU looks faster.
bf16, 16384 tokens, heads * head_dim = 2048; TFLOP/s count 2·B·H·S²·(D + Dv), half with a causal mask; figures are
medians over the rounds of medians of `triton.testing.do_bench`. `error` is the norm of out's error against float64 over
the norm of out. `spread` is the range of the rounds over their median. Prints rows, then a table for each case, then
for each length the best config and its fraction of the best peer's speed; writes JSON lines to --output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from served import Served, watchdog

from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.lab.bench.record import write_json

TOKENS, HIDDEN = 16384, 2048
PEERS = ("cudnn", "fa3", "fa4")
OTHERS_PEERS = ("cudnn",)  # peers at head dims outside of GRID
COMPILE_LIMIT = 180  # seconds
SEQ_LENS = (1024, 4096, 16384)

# A config's name is a tile and CHANGES. `Sm90Config` explains the fields that they set.
TILES: dict[int, dict[str, Sm90Config]] = {
    64: {"3x64": Sm90Config(3, 128, 6, True, 160, 32), "2x64": Sm90Config(2, 128, 8, True, 240, 24)},
    96: {"2x64": Sm90Config(2, 128, 4, True, 240, 24), "native": Sm90Config(2, 128, 6, True, 240, 24, box_columns=32)},
    128: {"2x64": Sm90Config(2, 128, 4, True, 240, 24)},
    192: {
        "2x64": Sm90Config(2, 128, 3, False, 240, 24),
        "narrow": Sm90Config(2, 64, 6, False, 240, 24),
    },
    256: {"2x64": Sm90Config(2, 64, 4, False, 240, 24)},
}
CHANGES: dict[str, dict[str, Any]] = {
    "persistent": {"persistent": True},
    "dynamic": {"persistent": True, "scheduler": "dynamic"},
    "pingpong": {"pingpong": True},
    "pairs": {"pairs": True},
    "direct": {"store_from_registers": True, "separate_o_buffer": False},
    "fixed-max": {"fixed_max": True},
    "boxes": {"box_columns": 64},
    "q-registers-1": {"q_in_registers": 1},
    "q-registers-2": {"q_in_registers": 2},
}
# {case: names of configs}, the most promising first: they are measured in this order.
CONFIG_NAMES: dict[tuple[int, bool], tuple[str, ...]] = {
    (64, True): (
        "2x64 dynamic pingpong pairs q-registers-1 fixed-max",
        "3x64 dynamic pingpong pairs fixed-max",
        "3x64 dynamic pingpong pairs",
    ),
    (128, True): (
        "2x64 dynamic pingpong pairs boxes q-registers-2 fixed-max",
        "2x64 dynamic pairs boxes q-registers-2 fixed-max",
        "2x64 dynamic pingpong pairs boxes q-registers-2",
    ),
    (256, True): (
        "2x64 dynamic pingpong direct",
        "2x64 dynamic pingpong direct fixed-max",
        "2x64 dynamic pingpong pairs direct",
    ),
    (64, False): (
        "2x64 persistent pingpong pairs q-registers-1 fixed-max",
        "3x64 persistent pingpong pairs fixed-max",
        "3x64 persistent pingpong pairs",
    ),
    (128, False): (
        "2x64 persistent pingpong pairs boxes q-registers-2 fixed-max",
        "2x64 persistent pingpong pairs boxes q-registers-2",
    ),
    (256, False): (
        "2x64 persistent pairs direct fixed-max",
        "2x64 persistent pairs boxes q-registers-1 direct fixed-max",
        "2x64 persistent pairs direct",
    ),
    (96, True): (
        "native dynamic pingpong pairs fixed-max",
        "native dynamic pairs fixed-max",
        "2x64 dynamic pingpong pairs boxes q-registers-2 fixed-max",
    ),
    (96, False): (
        "2x64 persistent pingpong pairs boxes q-registers-2 fixed-max",
        "2x64 persistent pingpong pairs boxes q-registers-2",
    ),
    (192, True): (
        "narrow dynamic pingpong pairs direct fixed-max",
        "narrow dynamic q-registers-2 pingpong pairs direct fixed-max",
        "2x64 dynamic pingpong pairs direct fixed-max",
        "narrow dynamic pairs direct fixed-max",
        "narrow dynamic pingpong pairs direct",
    ),
    (192, False): (
        "narrow persistent pingpong pairs direct fixed-max",
        "narrow persistent q-registers-2 pingpong pairs direct fixed-max",
        "2x64 persistent pingpong pairs direct fixed-max",
        "narrow persistent pairs direct fixed-max",
        "narrow persistent pingpong pairs direct",
    ),
}
GRID = tuple(case for case in CONFIG_NAMES if case[0] in (64, 128, 256))  # the cases of the 18 points


def config_named(head_dim: int, name: str) -> Sm90Config:
    """Return the config of a name: a tile, then changes."""
    tile, *changes = name.split()
    unknown = {tile} - TILES[head_dim].keys() | set(changes) - CHANGES.keys()
    if unknown:
        raise ValueError(f"unknown implementation {name!r}: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    for change in changes:
        values |= CHANGES[change]
    return replace(TILES[head_dim][tile], **values)


def candidates(head_dim: int, causal: bool) -> dict[str, Sm90Config]:
    """Return {name: config}, the most promising first."""
    return {name: config_named(head_dim, name) for name in CONFIG_NAMES[head_dim, causal]}


def sizes(head_dim: int, seqlen: int) -> tuple[int, int, int, int]:
    """Return (B, H, S, D) of a point."""
    return max(1, TOKENS // seqlen), max(1, HIDDEN // head_dim), seqlen, head_dim


# ---- in the implementation's own process


def _peer(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """Return a call of a peer. q, k, v and the result are (B, H, S, D)."""
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
    """Return a call of the Hopper kernel's launcher with `config`."""
    from diyfa.backends.cuda.attention.launch import use_config
    from diyfa.backends.cuda.hopper import configs as hopper_configs
    from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
    from diyfa.backends.cuda.runtime.passes import launch_each
    from diyfa.problem import AttentionProblem, AttentionTensors

    b, h, s, d = q.shape
    dv = v.shape[-1]
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", b, h, h, s, s, d, dv, -1, 0 if causal else -1)
    out, lse = torch.empty_like(v), q.new_empty((b, h, s), dtype=torch.float32)
    tensors = AttentionTensors(q, k, v, d**-0.5)

    def call() -> torch.Tensor:
        with use_config("sm90", lambda problem: hopper_configs.fitted(problem, config)):
            launch_each(hopper_fwd_launch.forward_pass(problem, tensors, out, lse).launches)
        return out

    return call


def error_of(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Return the larger error of the first and the last 256 rows of two heads: its norm over the norm in float64."""
    out, q, k, v = (x[:1, :2].double() for x in (out, q, k, v))
    worst = 0.0
    for rows in (slice(0, 256), slice(q.shape[2] - 256, q.shape[2])):
        scores = q[:, :, rows] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            i = torch.arange(q.shape[2], device=q.device)
            scores.masked_fill_(i[rows, None] < i, float("-inf"))
        expected = scores.softmax(-1) @ v
        worst = max(worst, ((out[:, :, rows] - expected).norm() / expected.norm()).item())
    return worst


def serve(name: str, case: tuple[int, bool], options: argparse.Namespace) -> None:
    """Compile one implementation at every length, report it, then measure at the length in each line of stdin.

    Answers are JSON lines. The first answer of a length has the error against float64, too.
    """
    from triton.testing import do_bench

    head_dim, causal = case
    config = None if name in PEERS else config_named(head_dim, name)
    calls = {}
    with watchdog(COMPILE_LIMIT):
        for seqlen in options.seq_lens:
            torch.manual_seed(0)
            *shape, d = sizes(head_dim, seqlen)
            widths = (d, d, options.head_dim_v or d)
            inputs = [torch.randn(*shape, width, device="cuda", dtype=torch.bfloat16) for width in widths]
            try:
                call = _peer(name, *inputs, causal) if config is None else _ours(config, *inputs, causal)
                if config is None:
                    call()  # some implementations compile at the first call
            except (ImportError, RuntimeError) as error:
                print(json.dumps({"unavailable": str(error)[:300]}), flush=True)
                return
            calls[seqlen] = call, inputs
        torch.cuda.synchronize()
    print(json.dumps({"ready": name}), flush=True)
    errors: dict[int, float] = {}
    for line in sys.stdin:
        seqlen = int(line)
        call, inputs = calls[seqlen]
        with watchdog(options.limit):
            if seqlen not in errors:
                errors[seqlen] = float(f"{error_of(call(), *inputs, causal):.2e}")
            ms = do_bench(call, warmup=15, rep=options.rep, return_mode="median")
        print(json.dumps({"ms": ms, "error": errors[seqlen]}), flush=True)


# ---- the sweep


def _command(name: str, case: tuple[int, bool], options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--serve", name, "--cases", f"{case[0]}-{'causal' if case[1] else 'full'}"]
    command += ["--limit", str(options.limit), "--rep", str(options.rep)]
    command += ["--head-dim-v", str(options.head_dim_v)]
    return [*command, "--seq-lens", *map(str, options.seq_lens)]


def measure_case(
    names: list[str], case: tuple[int, bool], options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all implementations of a case. They alternate at every length, so that a hot GPU slows all."""
    head_dim, causal = case
    served: list[Served] = []
    try:
        waiting = list(names)
        alive: list[Served] = []
        while waiting and time.monotonic() < deadline:  # all compile before the first measurement
            some = [Served(name, _command(name, case, options)) for name in waiting[: options.jobs]]
            waiting = waiting[options.jobs :]
            served += some
            alive += [each for each in some if each.answer() is not None]
        figures: dict[tuple[str, int], list[float]] = {}
        errors: dict[tuple[str, int], float] = {}
        for turn in range(options.rounds):
            for seqlen in options.seq_lens:
                for each in alive if turn % 2 == 0 else alive[::-1]:
                    if each.reason or time.monotonic() > deadline:
                        continue
                    found = each.ask(seqlen)
                    if found is not None:
                        figures.setdefault((each.name, seqlen), []).append(found["ms"])
                        errors[each.name, seqlen] = found["error"]
        for (name, seqlen), times in figures.items():
            b, h, s, d = sizes(head_dim, seqlen)
            ms = median(times)
            dv = options.head_dim_v or d
            work = 2 * b * h * s * s * (d + dv) / 1e9 * (0.5 if causal else 1)
            row = {"implementation": name, "D": head_dim, "Dv": dv, "causal": causal, "S": s, "B": b, "H": h}
            row |= {"ms": round(ms, 4), "tflops": round(work / ms, 1), "error": errors[name, seqlen]}
            row |= {"spread": round((max(times) - min(times)) / ms, 3), "rounds": len(times)}
            yield row
        for each in served:
            if each.reason:
                yield {"implementation": each.name, "D": head_dim, "causal": causal, "unavailable": each.reason}
        for name in waiting:
            yield {"implementation": name, "D": head_dim, "causal": causal, "unavailable": "no time left"}
    finally:
        for each in served:
            each.close()


def print_table(rows: list[dict], case: tuple[int, bool], seqlens: list[int]) -> None:
    """Print a case's rows, the best at the longest length first; the last columns are fractions of the best peer."""
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


# ---- the summary

NOISE = 2.0  # a config is wrong if its error against float64 exceeds the largest of the peers' this many times


def _right(rows: list[dict]) -> list[dict]:
    """Return the rows of configs whose error is at most NOISE times the peers'."""
    peers = [row["error"] for row in rows if row["implementation"] in PEERS]
    allowed = NOISE * max(peers) if peers else 1e-2
    return [row for row in rows if row["implementation"] not in PEERS and row["error"] <= allowed]


def print_summary(rows: list[dict]) -> None:
    """Print the best config of each point of the grid, and its fraction of the best peer's speed."""
    measured = [row for row in rows if "tflops" in row]
    print("\nbest config at each point: TFLOP/s, share of the best peer")
    shares = []
    for head_dim, causal in CONFIG_NAMES:
        for seqlen in sorted({row["S"] for row in measured}):
            here = [r for r in measured if (r["D"], r["causal"], r["S"]) == (head_dim, causal, seqlen)]
            mine = {row["implementation"]: row["tflops"] for row in _right(here)}
            if not mine:
                continue
            name = max(mine, key=lambda config: mine[config])
            peers = {r["implementation"]: r["tflops"] for r in here if r["implementation"] in PEERS}
            line = f"  D={head_dim:3} {'causal' if causal else 'full  '} S={seqlen:5}  {mine[name]:6.1f}  {name:38}"
            if peers:
                best = max(peers, key=lambda peer: peers[peer])
                line += f" {mine[name] / peers[best]:.3f} of {best} {peers[best]:.1f}"
                shares += [mine[name] / peers[best]] if (head_dim, causal) in GRID else []
            print(line)
    if shares:
        ahead = sum(share >= 1 for share in shares)
        print(f"  {ahead} of {len(shares)} points at or ahead of the best peer, the worst at {min(shares):.3f}")


def names_of(case: tuple[int, bool], peers: list[str], only: list[str]) -> list[str]:
    """Return the names to measure in a case: its peers, then our configs, the most promising first."""
    mine = [name for name in CONFIG_NAMES[case] if not only or any(part in name for part in only)]
    return [peer for peer in peers if case in GRID or peer in OTHERS_PEERS] + mine


def main() -> None:
    every_case = [f"{d}-{'causal' if causal else 'full'}" for d, causal in CONFIG_NAMES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=every_case, choices=every_case)
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(SEQ_LENS))
    parser.add_argument("--head-dim-v", type=int, default=0, help="columns of V and out, 0: as many as of Q and K")
    parser.add_argument("--only", nargs="*", default=[], help="configs whose name contains one of these")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--budget", type=float, default=440, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one measurement, which hangs beyond them")
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point, whose median counts")
    parser.add_argument("--jobs", type=int, default=14, help="processes that import and compile at once")
    parser.add_argument("--output", type=Path, default=None, help="result file, written after each case")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [(int(case.split("-")[0]), case.endswith("causal")) for case in options.cases]
    if options.serve is not None:
        serve(options.serve, cases[0], options)
        return
    work = {case: names_of(case, options.peers, options.only) for case in cases}
    deadline = time.monotonic() + options.budget
    rows: list[dict] = []
    for case, names in work.items():
        for row in measure_case(names, case, options, deadline):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.output is not None:
            results = [{"kind": "attention", "pass": "forward", "dtype": "bfloat16", **each} for each in rows]
            write_json(options.output, "hopper_sweep", torch.device("cuda"), results, "tile search")
    for case in cases:
        print_table(rows, case, options.seq_lens)
    print_summary(rows)


if __name__ == "__main__":
    main()
