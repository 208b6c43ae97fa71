"""The Hopper kernel on random shapes and fresh inputs against the portable kernel, 2,000 calls, on an H100 or H200.

    python tests/manual/hopper_stress.py [--iterations 2000] [--seconds 300] [--seed 0] [--only NAME] [--head-dim 192]

What kernels are compiled for comes from --variants choices; shapes and inputs are new each time. Processes side by side
take every n-th call each, for most of the time goes to compiling. A race shows as an error that moves: each call is
compared with the portable kernel and repeated, which must give the same bits. A process stops at its first difference,
with the options that repeat that call.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from diyfa.backends.cuda.attention import configs, fwd
from diyfa.backends.cuda.attention.launch import use_config
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
from diyfa.backends.cuda.runtime import tune
from diyfa.backends.cuda.runtime.passes import launch_each
from diyfa.problem import LAYOUTS, VARLEN, AttentionProblem, AttentionTensors

DEVICE = "cuda"
KINDS = ("plain", "causal", "seq_lens", "packed", "window", "softcap", "widths", "config", "tiles")
# At most this difference in units of out's largest element: two roundings of the weights and one of the result.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 2e-3
REPEATS = 20  # of each call: most of the time goes to compiling
LIMIT = 90  # seconds for one call, compiling included; what takes longer hangs


def changes_of(head_dim: int, consumers: int) -> list[dict[str, Any]]:
    """Changes to the table's row that other rows and the sweep use."""
    changes: list[dict[str, Any]] = [{}, {"persistent": True}, {"pairs": True}, {"fixed_max": True}]
    changes += [{"persistent": True, "scheduler": "dynamic"}] * 2
    if consumers > 1:
        changes += [{"pingpong": True}, {"persistent": True, "pingpong": True}]
        changes += [{"persistent": True, "pingpong": True, "pairs": True, "scheduler": "dynamic"}] * 2
    if 64 < head_dim <= 128:
        changes += [{"box_columns": 64, "q_in_registers": boxes} for boxes in (1, 2)]
    if 64 < head_dim <= 96:
        changes += [{"box_columns": 32}] * 4
    return changes


def lengths(choose: random.Random, count: int, most: int) -> list[int]:
    return [choose.choice((1, 63, 64, 65, 128, most, choose.randint(1, most))) for _ in range(count)]


def call(
    seed: int, variant: int, kind: str, head_dim: int
) -> tuple[AttentionProblem, AttentionTensors, hopper_configs.Sm90Config]:
    """A random problem of a kind, its tensors, which hold NaN where no sequence reaches, and the config to run it in.

    `head_dim`: 0 for a random one.
    """
    compiled, choose = random.Random(variant), random.Random(seed)
    torch.manual_seed(seed)
    dtype = compiled.choice((torch.float16, torch.bfloat16))
    drawn = compiled.choice((64, 64, 128, 128, 256, 96, 192, 72))
    d = head_dim or drawn
    dv = compiled.choice((64, 128, 192, 256, 40)) if kind == "widths" else d
    layout = VARLEN if kind == "packed" else compiled.choice(("bhsd", "bshd"))
    # With the last, maxima of blocks differ by more than float32 can hold as a power of two.
    scale = compiled.choice((d**-0.5, d**-0.5, 0.3, -0.05, 12.0))
    whole = compiled.random() < 0.3  # lengths that whole blocks make up
    common: dict[str, Any] = {"window_left": -1, "window_right": compiled.choice((-1, 0))}
    if kind == "causal":
        common["window_right"] = 0
    if kind == "softcap":
        common["softcap"] = 8.0
    if kind == "window":
        left, right = compiled.choice(((True, 0), (True, 0), (False, 1), (True, -1), (True, 1)))
        common = {
            "window_left": choose.choice((0, 5, 100, 300)) if left else -1,
            "window_right": right and right * choose.choice((3, 64, 200)) if right > 0 else right,
        }
    # In every third call a program has many tiles.
    batch, heads_kv = choose.randint(1, 3) * choose.choice((1, 1, 8)), choose.randint(1, 3)
    heads = heads_kv * choose.choice((1, 1, 2, 4))
    # Odd lengths otherwise: whether 16 divides one is also something that the portable kernel is compiled for.
    sq = choose.choice((256, 512, 1024)) if whole else choose.choice((193, 200, 511, 777, 1025))
    sk = choose.choice((128, 512, 1024)) if whole else choose.choice((2, 39, 129, 200, 1023, 1500))
    if kind == "tiles":  # some fifteen for each program, half of them short: the producer is ahead of the consumers
        batch, heads, heads_kv, sq, sk = 8, 16, choose.choice((1, 4, 16)), 2048, 2048
        common["window_right"] = 0
    features: dict[str, Any] = {}
    if kind == "packed":
        lens_q, lens_k = lengths(choose, batch * 4, 601), lengths(choose, batch * 4, 701)
        lens_q[0], lens_k[-1], lens_q[choose.randrange(1, len(lens_q))] = 601, 701, 0
        cu = [torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in (lens_q, lens_k)]
        slack = choose.choice((0, 37))
        totals = [sum(n) + slack for n in (lens_q, lens_k)]
        q = torch.randn(totals[0], heads, d, device=DEVICE).to(dtype)
        k, v = (torch.randn(totals[1], heads_kv, n, device=DEVICE).to(dtype) for n in (d, dv))
        for x, used in ((q, sum(lens_q)), (k, sum(lens_k)), (v, sum(lens_k))):
            x[used:] = float("nan")
        features = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        common |= {"total_q": totals[0], "total_k": totals[1]}
        size = (len(lens_q), heads, heads_kv, 601, 701)
    else:
        shapes = ((heads, sq, d), (heads_kv, sk, d), (heads_kv, sk, dv))
        q, k, v = (
            torch.randn([(batch, *shape)[i] for i in LAYOUTS[layout]], device=DEVICE).to(dtype) for shape in shapes
        )
        if kind in ("seq_lens", "tiles"):
            lens = lengths(choose, batch, sk)
            lens = [min(n, sk) for n in lens]
            features = {"seq_lens": torch.tensor(lens, device=DEVICE, dtype=torch.int32)}
            common["seq_lens"] = True
            for b, n in enumerate(lens):
                for x in (q, k, v):
                    (x if layout == "bhsd" else x.transpose(1, 2))[b, :, n:] = float("nan")
        size = (batch, heads, heads_kv, sq, sk)
    problem = AttentionProblem("cuda", "sm_90", str(dtype)[6:], layout, *size, d, dv, **common)
    large = compiled.random() < 0.7  # as if all grids were large: their configs
    hopper_configs.FULL_GPU = 0 if large else 1 << 30
    config = hopper_configs.select_config(problem)
    if kind == "config":
        config = replace(config, **compiled.choice(changes_of(d, config.consumers)))
    elif kind in ("packed", "seq_lens", "window", "causal", "tiles") and compiled.random() < 0.5:
        config = replace(config, persistent=True, scheduler="dynamic")
    return problem, AttentionTensors(q, k, v, scale, **features), config


def results(problem: AttentionProblem, tensors: AttentionTensors, launch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, NaN where nothing was written."""
    shape = (*tensors.q.shape[:-1], problem.head_dim_v)
    out = torch.full(shape, float("nan"), device=DEVICE, dtype=tensors.q.dtype)
    lse = torch.full(problem.lse_shape, float("nan"), device=DEVICE)
    launch(problem, tensors, out, lse)
    return out, lse


def difference(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> str | None:
    """What is wrong, or None."""
    for name, a, b in zip(("out", "lse"), mine, theirs, strict=True):
        a, b = a.float(), b.float()
        if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
            return f"{name}: NaN or inf, or what was not written, in other places"
        kept = b.isfinite()
        if not kept.any():
            continue
        error = (a - b)[kept].abs().max().item()
        allowed = LSE_TOLERANCE
        if name == "out":
            allowed = TOLERANCE[mine[0].dtype] * max(1.0, b[kept].abs().max().item())
        if error > allowed:
            return f"{name}: difference {error:.2e}, allowed {allowed:.2e}"
    return None


def check(seed: int, variant: int, kind: str, head_dim: int) -> str | None:
    """What is wrong with one call, or None."""
    problem, tensors, config = call(seed, variant, kind, head_dim)

    def attend(*arguments: Any) -> None:
        with use_config("sm90", config):
            launch_each(hopper_fwd_launch.forward_pass(*arguments).launches)

    def portable(*arguments: Any) -> None:
        launch_each(fwd.forward_pass(*arguments).launches)

    mine = results(problem, tensors, attend)
    wrong = difference(mine, results(problem, tensors, portable))
    for turn in range(REPEATS if wrong is None else 0):
        again = results(problem, tensors, attend)
        if not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(mine, again, strict=True)):
            wrong = f"other bits when repeated: {turn}, {difference(again, mine)}"
            break
    return None if wrong is None else f"{kind}: {wrong}\n{problem}\n{config}"


@contextmanager
def ending_after(seconds: float, what: str) -> Iterator[None]:
    """End the process, and say what hung, should this take longer: a kernel that waits for ever does not return."""

    def end() -> None:
        print("HANGS:", what, flush=True)
        faulthandler.dump_traceback()  # whether it is the host that does
        os._exit(124)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(options: argparse.Namespace, first: int, step: int) -> tuple[str | None, dict[str, int]]:
    """Every `step`-th call from `first` on -> what is wrong, calls that agree by kind."""
    configs.TMA_MIN_WORK = 0
    tune.set_enabled(False)  # the portable kernel in one tile: measuring others would take most of the time
    counts = dict.fromkeys(KINDS, 0)
    begin = time.monotonic()
    for i in range(options.start + first, options.start + options.iterations, step):
        if time.monotonic() - begin > options.seconds:
            break
        variant = i % options.variants
        kind = options.only or KINDS[variant % len(KINDS)]
        again = f"--seed {options.seed} --start {i} --iterations 1 --variants {options.variants} --jobs 1"
        again += f" --head-dim {options.head_dim} --only {kind}"
        with ending_after(LIMIT, again):
            wrong = check(options.seed * 1_000_003 + i, variant, kind, options.head_dim)
        if wrong is not None:
            return f"{wrong}\n{again}", counts
        counts[kind] += 1
    return None, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="no call begins later")
    parser.add_argument("--variants", type=int, default=60, help="a multiple of --jobs, so that each compiles its own")
    parser.add_argument("--jobs", type=int, default=12, help="processes")
    parser.add_argument("--only", choices=KINDS, default=None)
    parser.add_argument("--head-dim", type=int, default=0, help="of every call, 0: a random one of each variant")
    options = parser.parse_args()
    begin = time.monotonic()
    total: Counter[str] = Counter()
    wrong = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(run, options, i, options.jobs) for i in range(options.jobs)]
        for job in as_completed(jobs):
            found, counts = job.result()
            total.update(counts)
            if found is not None:
                print("FAILED:", found, flush=True)
                wrong.append(found)
            print(f"{total.total()} calls, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{total.total()} calls in {time.monotonic() - begin:.0f} s agree: {dict(total)}")
    return 1 if wrong else 0 if total.total() == options.iterations else 2


if __name__ == "__main__":
    sys.exit(main())
