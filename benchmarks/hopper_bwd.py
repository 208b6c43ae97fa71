"""Benchmark of the Hopper backward's configs against each other, cuDNN and FlashAttention-4, on an H100 or H200.

    PYTHONPATH=. python benchmarks/hopper_bwd.py [--only 128] [--budget 145] [--rounds 1]

diyfa, cuDNN and FlashAttention-4 (if `flash_attn.cute` can be imported) are timed through their public functions,
forward and backward each. Configs are timed by their kernels alone. First each config is checked against float64 at
odd, ragged, causal and grouped shapes, in its own process with a time-out. Those that pass are timed alternately. A
config that hangs or fails costs one line. The speed is sustained: the GPU is at its power limit. bf16, 16384 tokens,
2048 features in all heads; TFLOP/s count 2·B·H·S²·(3·D + 2·Dv) backward and 2·B·H·S²·(D + Dv) forward, half with a
causal mask; figures are medians over the rounds of medians of `triton.testing.do_bench`. Prints one table at the end,
and writes a result file if OUT is set: $OUT/hopper_bwd.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diyfa.backends.cuda.hopper.bwd_configs import CONFIGS, Sm90BwdConfig
from diyfa.lab.bench.record import write_json
from diyfa.versions import device_name

TOKENS, HIDDEN = 16384, 2048
SEQ_LENS = (1024, 4096, 16384)
HEAD_DIMS = {64: 64, 128: 128, 192: 128, 256: 256}  # {head dim of Q and K: head dim of V}
# (S, causal, head_dim, query heads for each KV head). The portable backward runs at grouped and wide heads, too.
LENGTHS_AND_MASKS = ((4096, True), (4096, False), (1024, True), (1024, False), (16384, False), (16384, True))
POINTS = [(s, causal, d, 1) for s, causal in LENGTHS_AND_MASKS for d in HEAD_DIMS]
POINTS[8:8] = [(4096, True, 128, 4), (4096, True, 64, 4)]
CHECK_LIMIT = 60  # seconds for one config
RUNS = 100  # all must give the same bits
# At S = 16k each kernel takes the GPU to its power limit. The first one after a pause is up to a tenth faster. So each
# warms up for long enough, and every other round has the reverse order.
WARMUP_MS, TIMED_MS = 150, 150
# {name: (changes of the head dim's config, changes of the problem)}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "table": ({}, {}),
    "deterministic": ({}, {"deterministic": True}),
}
# batch, heads, heads_kv, Sq, Sk, causal, window_left
SHAPES = (
    (2, 4, 2, 1000, 1000, True, -1),
    (1, 2, 2, 257, 513, False, -1),
    (1, 2, 2, 3000, 2049, False, -1),
    (1, 4, 1, 2000, 2500, True, 600),
    (1, 4, 4, 4096, 4096, True, -1),
)
LARGEST_ERROR = 6e-3  # of bfloat16 gradients; the portable backward's are around 3e-3


def candidates(only: str) -> dict[str, tuple[int, Sm90BwdConfig, dict[str, Any]]]:
    """Return {name: (head dim, config, changes of the problem)}."""
    found = {}
    for d in HEAD_DIMS:
        tile = CONFIGS[d]
        for name, (of_config, of_problem) in CHANGES.items():
            if d == 192 and of_problem:
                continue  # another kernel runs this problem
            if any(part in f"{d}-{name}" for part in only.split(",")):
                found[f"{d}-{name}"] = (d, replace(tile, **of_config), of_problem)
    return found


def problem_and_tensors(
    b: int, h: int, hk: int, sq: int, sk: int, d: int, causal: bool, left: int
) -> tuple[Any, Any, torch.Tensor]:
    from diyfa.problem import AttentionProblem, AttentionTensors

    torch.manual_seed(0)
    dv = HEAD_DIMS[d]
    shapes = (b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, h, sq, dv)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", b, h, hk, sq, sk, d, dv, left, 0 if causal else -1)
    return problem, AttentionTensors(q, k, v, d**-0.5), do


def runner(config: Sm90BwdConfig, problem: Any, tensors: Any, out: Any, lse: Any, do: Any) -> Any:
    """Return (function that runs a config, its gradients)."""
    from diyfa.backends.cuda.gluon.inline_ptx import post_processing
    from diyfa.backends.cuda.hopper.bwd_launch import Sm90Backward
    from diyfa.backends.cuda.runtime.launcher import launch_kernel
    from diyfa.problem import AttentionGradients

    gradients = AttentionGradients(*(torch.full_like(x, float("nan")) for x in tensors[:3]))
    backward = Sm90Backward(problem, tensors, config, lse, gradients.dq)
    if backward.dq_acc is not None:
        backward.dq_acc.fill_(float("nan"))
    launches = backward.launches(out, do, None, None, gradients)

    def run() -> None:
        with post_processing():
            for launch in launches:
                launch_kernel(launch)

    return run, gradients[:3]


def reference(problem: Any, tensors: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (out, lse, dq, dk, dv), computed in float64."""
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    group = problem.heads_q // problem.heads_kv
    s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * tensors.sm_scale
    i = torch.arange(problem.seqlen_q, device="cuda")[:, None] + problem.seqlen_k - problem.seqlen_q
    j = torch.arange(problem.seqlen_k, device="cuda")[None]
    seen = torch.ones_like(i + j, dtype=torch.bool)
    if problem.window_right >= 0:
        seen &= j <= i + problem.window_right
    if problem.window_left >= 0:
        seen &= j >= i - problem.window_left
    s = s.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(s, -1)
    base = torch.where(lse == float("-inf"), 0.0, lse)
    out = torch.exp(s - base[..., None]) @ v.repeat_interleave(group, 1)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do.double())
    return out.detach(), torch.where(lse == float("-inf"), float("inf"), lse).detach(), dq, dk, dv


def check(name: str) -> str:
    """Check a config; return what is wrong with it, or ""."""
    d, config, changes = candidates(name)[name]
    worst = 0.0
    for b, h, hk, sq, sk, causal, left in SHAPES:
        problem, tensors, do = problem_and_tensors(b, h, hk, sq, sk, d, causal, left)
        problem = problem.replace(**changes)
        out, lse, *expected = reference(problem, tensors, do)
        out, lse = out.bfloat16(), lse.float()
        run, got = runner(config, problem, tensors, out, lse, do)
        run()
        torch.cuda.synchronize()
        for label, x, want in zip(("dq", "dk", "dv"), got, expected, strict=True):
            error = (x.double() - want).norm().item() / want.norm().item()
            worst = max(worst, error)
            if not error <= LARGEST_ERROR:
                return f"{label} of {(b, h, hk, sq, sk, causal, left)}: error {error:.2e}"
        first = [x.clone() for x in got]
        same = slice(0 if problem.deterministic else 1, 3)  # else the order of dQ's sum differs from run to run
        for _ in range(RUNS):
            run()
            if not all(torch.equal(x, y) for x, y in zip(got[same], first[same], strict=True)):
                return f"gradients of {(b, h, hk, sq, sk, causal, left)} differ from run to run"
    print(f"{name}: errors up to {worst:.2e}")
    return ""


def of_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def of_flash_attention_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def of_diyfa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from diyfa import flash_attention

    return flash_attention(q, k, v, causal=causal)


ATTENTION = {"cudnn": of_cudnn, "fa4": of_flash_attention_4, "diyfa": of_diyfa}


def add_attention(
    functions: dict[str, Any], name: str, inputs: tuple[torch.Tensor, ...], do: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Add the forward and backward of an implementation to `functions`, after a first run. Return out (B, H, S, D)."""
    attention = ATTENTION[name]
    if name == "fa4":  # it reads (B, S, H, D): lay the inputs out so that it copies nothing
        inputs = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs)
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):  # the graph of a first call is not representative: diyfa makes its plan in its backward
        torch.autograd.grad(attention(*inputs, causal), inputs, do)
    backward = partial(torch.autograd.grad, attention(*inputs, causal), inputs, do, retain_graph=True)
    backward()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*inputs, causal)

    functions[f"{name} forward"], functions[name] = forward, backward
    return forward()


def measure(names: list[str], rounds: int, until: float, to: str) -> None:
    """Time the configs and their peers alternately; write each row to `to` at once."""
    import triton

    from diyfa.backends.cuda.attention.bwd import backward_pass
    from diyfa.backends.cuda.attention.launch import launching_backward
    from diyfa.backends.cuda.runtime import tune
    from diyfa.problem import AttentionGradients

    tune.set_enabled(False)  # the portable backward with its table's tile
    every = candidates("")
    with Path(to).open("w") as file:
        for s, causal, d, group in POINTS:
            if all(every[name][0] != d for name in names):
                continue
            dv = HEAD_DIMS[d]
            h, b = HIDDEN // (d if d == dv else 256), TOKENS // s
            problem, tensors, do = problem_and_tensors(b, h, h // group, s, s, d, causal, -1)
            q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
            functions: dict[str, Any] = {}
            out = torch.randn_like(do)
            for name in ATTENTION:
                try:
                    out = add_attention(functions, name, (q, k, v), do, causal)
                except (ImportError, RuntimeError, AssertionError) as error:
                    print(f"no {name} at {d}, group {group}: {error}"[:200])
            # An approximate log-sum-exp of such tensors; our forward pass would have to be compiled.
            keys = torch.arange(1, s + 1, device="cuda") if causal else torch.full((s,), s, device="cuda")
            lse = (keys.float().log() + 0.5).expand(b, h, s).contiguous()
            if group > 1 or (d > 128 and s > 1024):
                gradients = AttentionGradients(*(torch.empty_like(x) for x in tensors[:3]))
                functions["portable"] = partial(
                    launching_backward(backward_pass), problem, tensors, out, lse, do, None, gradients
                )
            for name in names:
                head_dim, config, changes = every[name]
                if head_dim == d:
                    functions[name] = runner(config, problem.replace(**changes), tensors, out, lse, do)[0]
            times: dict[str, list[float]] = {name: [] for name in functions}
            turn = list(functions.items())
            for _ in range(rounds):
                for name, function in turn:
                    if time.time() < until:
                        ms = triton.testing.do_bench(function, warmup=WARMUP_MS, rep=TIMED_MS, return_mode="median")
                        times[name].append(ms)
                turn.reverse()
            for name, found in times.items():
                if found:
                    row = {"d": d, "causal": causal, "s": s, "group": group, "name": name, "ms": median(found)}
                    widths = d + dv if name.endswith(" forward") else 3 * d + 2 * dv
                    row["tflops"] = 2 * TOKENS * s * h * widths / (2 if causal else 1) / row["ms"] / 1e9
                    file.write(json.dumps(row) + "\n")
            file.flush()
            del functions


def table(rows: list[dict[str, Any]]) -> None:
    """Print one line for each head dim and config."""
    points = [(causal, s, 1) for causal in (False, True) for s in SEQ_LENS] + [(True, 4096, 4)]
    heads = " ".join(
        f"{'c' if causal else 'f'}{s // 1024}k{'g' if group > 1 else ''}".rjust(7) for causal, s, group in points
    )
    print(f"{'TFLOP/s':28}{heads}")
    for name in dict.fromkeys((row["d"], row["name"]) for row in rows):
        found = {(row["causal"], row["s"], row["group"]): row for row in rows if (row["d"], row["name"]) == name}
        cells = []
        for point in points:
            row = found.get(point)
            if row is None:
                cells.append("      -")
            else:
                cells.append(f"{row['tflops']:7.0f}")
        print(f"{name[0]:4} {name[1]:23}{' '.join(cells)}")


def result_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a measured row as result files have it."""
    d, s, group, name = row["d"], row["s"], row["group"], row["name"]
    dv = HEAD_DIMS[d]
    passed = "forward" if name.endswith(" forward") else "backward"
    sizes = {"B": TOKENS // s, "H": HIDDEN // (d if d == dv else 256), "S": s, "D": d, "Dv": dv, "group": group}
    return {
        "kind": "attention", "implementation": name.removesuffix(" forward"), "pass": passed, "dtype": "bfloat16",
        "causal": row["causal"], **sizes, "ms": row["ms"], "tflops": row["tflops"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configs with one of these in their names, and their head dims")
    parser.add_argument("--budget", type=float, default=145, help="seconds for all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        problem = check(options.check)
        if problem:
            print(f"{options.check}: WRONG: {problem}")
        sys.exit(bool(problem))
    if options.measure:
        measure(options.measure.split(","), options.rounds, time.time() + options.budget, options.to)
        return

    begin = time.time()
    chosen = candidates(options.only)

    def passes(name: str) -> bool:
        left = min(CHECK_LIMIT, begin + options.budget * 0.42 - time.time())
        command = [sys.executable, __file__, "--check", name]
        if left < 5:
            print(f"{name}: not checked, out of time", flush=True)
            return False
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{name}: HANGS or too slow: {left:.0f} s", flush=True)
            return False
        lines = (done.stdout + done.stderr).strip().splitlines()
        print(lines[-1][:300] if lines else f"{name}: {'ok' if done.returncode == 0 else 'failed'}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(options.jobs) as pool:
        good = [name for name, ok in zip(chosen, pool.map(passes, chosen), strict=True) if ok]
    print(f"{len(good)} of {len(chosen)} configs passed after {time.time() - begin:.0f} s", flush=True)
    folder = Path(os.environ.get("OUT", "."))
    rows_path = folder / "hopper_bwd_rows.jsonl"
    left = begin + options.budget - time.time()
    command = [sys.executable, __file__, "--measure", ",".join(good), "--to", str(rows_path)]
    command += ["--rounds", str(options.rounds), "--budget", str(left - 15)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        if done.returncode:
            print("measuring failed:", done.stderr[-1500:])
    except subprocess.TimeoutExpired:
        print("measuring hung; what there was:")
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()] if rows_path.exists() else []
    if "OUT" in os.environ:
        configs = {name: asdict(config) for name, (_, config, _) in chosen.items()}
        results = [result_row(row) for row in rows]
        write_json(
            folder / "hopper_bwd.json", "hopper_bwd", torch.device("cuda"), results, "tile search", configs=configs
        )
    print(f"{device_name(torch.device('cuda'))}, torch {torch.__version__}, {time.time() - begin:.0f} s")
    table(rows)


if __name__ == "__main__":
    main()
