"""The Hopper kernels on random problems against float64 under the error budget, on an H100 or H200.

    PYTHONPATH=. python tests/manual/hopper_stress.py forward [--cases 2000] [--seconds 150] [--seed 0] [--only FEATURE]
    PYTHONPATH=. python tests/manual/hopper_stress.py backward --deterministic-runs 100
    TRITON_INTERPRET=1 PYTHONPATH=.:tests:tests/support python tests/manual/hopper_stress.py backward --cpu --cases 8

What kernels are compiled for comes from --variants choices; shapes and inputs are new each time. Calls go through the
public functions with `variant="sm90"`, whatever their size. `forward` also takes configs that the table does not have
for the problem. In `backward`, out and LSE come from a plain FlashAttention, so that an error is the backward's own and
no forward need be compiled; `both` takes the Hopper one. Allocations are poisoned. A race shows as an error that moves,
so each call is repeated: out, LSE, dK and dV must be the same bits, with `deterministic` all gradients.

Processes side by side take every n-th case each. A case that takes longer than --limit seconds hangs, and ends them.
Each failure comes with the options that repeat it; the summary is printed last.
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
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from poison import poisoned_allocations

from diyfa.plan import plans
from diyfa.testing import (
    YARDSTICK_DRAWS,
    AttentionCase,
    Inputs,
    Results,
    attention_function,
    check_budget,
    expected_results,
    make_inputs,
    run_case,
    yardstick_results,
)

FEATURES = (
    "causal", "window", "softcap", "alibi", "gqa", "seq_lens", "packed", "sinks", "dlse", "deterministic", "wide",
    "widths", "hostile", "mask", "config", "tiles",
)  # fmt: skip
NO_MASK = {"causal", "window", "alibi", "seq_lens", "packed", "deterministic", "wide", "widths"}  # refused beside one
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dsinks")}
RESULTS["both"] = (*RESULTS["forward"], *RESULTS["backward"])
SAME_BITS = ("out", "lse", "dk", "dv")  # in each run, also without `deterministic`
REPEATS = {"forward": 20, "backward": 3, "both": 3}  # of each call: most of the time goes to compiling
MORE_DRAWS = 4 * YARDSTICK_DRAWS  # of the yardstick, before a case counts as a failure
MOST_SCORES = 1 << 24  # of a case: float64 scores of 16 processes have to fit
MOST_FAILURES = 6  # of a process


# ---- cases


def lengths(choose: random.Random, count: int, most: int, least: int) -> tuple[int, ...]:
    """Of sequences: short, at the edges of blocks, or any."""
    edges = [n for n in (least, 1, 2, 63, 64, 65, 127, 128, 129, most) if least <= n <= most]
    return tuple(
        choose.choice((*edges, choose.randint(least, most), choose.randint(least, most))) for _ in range(count)
    )


def features_of(compiled: random.Random, what: str, only: str | None) -> set[str]:
    """What a variant is compiled for, in words."""
    chosen = {
        name
        for name, share in (
            ("softcap", 0.2), ("gqa", 0.5), ("sinks", 0.3), ("dlse", 0.5), ("deterministic", 0.35), ("hostile", 0.3),
            ("alibi", 0.25),
        )
        if compiled.random() < share
    }  # fmt: skip
    if what == "forward":
        chosen -= {"dlse", "deterministic"}
        chosen.add(compiled.choice(("", "", "config", "tiles")))
    for names in (("causal", "causal", "window", ""), ("seq_lens", "packed", ""), ("", "", "wide", "widths")):
        chosen.add(compiled.choice(names))
    if only:
        chosen -= next((names for names in ({"causal", "window"}, {"seq_lens", "packed"}) if only in names), set())
        chosen.add(only)
    if only in ("wide", "widths"):
        chosen.discard("deterministic")
    if "deterministic" in chosen:  # refused for these
        chosen -= {"wide", "widths"}
    if only == "mask":
        chosen -= NO_MASK
    return chosen - {""}


def draw(options: argparse.Namespace, number: int) -> tuple[AttentionCase, set[str]]:
    """Case `number` -> (the case, its features)."""
    variant = number % options.variants
    compiled, choose = random.Random(f"{options.seed} {variant}"), random.Random(f"{options.seed} {number}")
    chosen = features_of(compiled, options.what, options.only)
    d = compiled.choice((64, 64, 128, 128, 40, 56, 72, 80, 96, 112))
    if "wide" in chosen:
        d = compiled.choice((256, 192, 136, 160, 200, 248))
    dv = d
    if "widths" in chosen:
        d, dv = compiled.choice(((192, 128), (192, 128), (64, 128), (128, 64), (256, 72), (40, 256), (96, 200)))
    if options.what != "forward" and d == dv <= 64 and chosen & {"alibi", "mask"}:  # refused for these
        chosen.discard("softcap")
    sizes: dict[str, Any] = {}
    if "alibi" in chosen:
        sizes["alibi"] = compiled.choice(("h", "bh"))
        if "hostile" in chosen:  # published models have slopes from 2^-8 to 1
            sizes["slopes"] = choose.choice(((1.0, 0.5, 2.0**-8), (0.0, 64.0, -0.1), (-2.0, 1000.0), ()))
    most = 160 if options.cpu else 900
    heads_kv = choose.choice((1, 1, 2, 3))
    group = choose.choice((2, 3, 4, 8)) if "gqa" in chosen else 1
    batch = choose.choice((1, 1, 2, 3, 8))
    if options.cpu:
        heads_kv, group, batch = 1, min(group, 2), min(batch, 2)
    sq, sk = (choose.choice((64, 128, 256, choose.randint(1, most), choose.randint(1, most))) for _ in range(2))
    if choose.random() < 0.3:
        sq = sk
    if choose.random() < 0.15 and not options.cpu:  # more programs than multiprocessors
        batch, heads_kv, sq, sk = 12, 4, choose.randint(64, 200), choose.randint(128, 520)
    if options.deterministic_runs and not options.cpu:  # which wait for each other
        batch, heads_kv, sq, sk = 2, 8, choose.randint(500, 1100), choose.randint(500, 1400)
    if "tiles" in chosen and not options.cpu:  # several for each program, half of them short
        batch, heads_kv, group, sq, sk = 16, choose.choice((1, 4, 16)), 1, 190, 130
        group = 32 // heads_kv
        chosen -= {"packed", "window"}
        chosen |= {"causal", "seq_lens"}
    while batch * heads_kv * group * sq * sk > MOST_SCORES:
        sq, sk = sq - sq // 3, sk - sk // 3
    if options.what != "backward":
        sq, sk = max(sq, 128), max(sk, 129)  # what that one takes
    layout = compiled.choice(("bhsd", "bshd"))
    if "packed" in chosen:
        lens_q, lens_k = list(lengths(choose, batch + 2, sq, 0)), list(lengths(choose, batch + 2, sk, 0))
        # The longest comes anywhere but last; one sequence has no queries, another no keys.
        lens_q[choose.randrange(batch + 1)], lens_k[choose.randrange(batch + 1)] = sq, sk
        lens_q[choose.randrange(batch + 2)], lens_k[choose.randrange(batch + 2)] = 0, 0
        layout, slack = "thd", choose.choice((0, 0, 37))
        sizes = {"lens_q": tuple(lens_q), "lens_k": tuple(lens_k), "slack": slack}
    else:
        sizes = {"batch": batch, "seqlen_q": sq, "seqlen_k": sk}
        sizes["view"] = compiled.choice(("contiguous", "contiguous", "transposed"))
        if "seq_lens" in chosen:
            sizes["seq_lens"] = lengths(choose, batch, sk, 1)
    if "window" in chosen:
        left, right = compiled.choice(((True, True), (True, True), (True, False), (False, True)))
        edge = choose.choice((0, 1, 63, 64, 65, 128, choose.randint(0, most)))
        other = choose.choice((0, edge, choose.randint(0, most)))
        sizes["window"] = (edge if left else -1, other if right else -1)
    if "mask" in chosen:
        blocks = ("128",) if d <= 64 else ("128", "64x128")
        shape, density = compiled.choice(("11", "1h", "bh")), choose.choice((0.0, 0.1, 0.5, 0.5, 0.8, 1.0))
        sizes["mask"] = f"{shape}:{compiled.choice(blocks)}:{density}"
    scales: tuple[float | None, ...] = (None, None, None, 0.3)
    if "hostile" in chosen:
        sizes["sink_offset"] = choose.choice((0.0, 12.0, -12.0))
        scales = (None, 1.0, 4.0, -0.2, 0.0)
    scale = choose.choice(scales)
    if "hostile" in chosen and scale != 0.0:
        sizes["rise"] = choose.choice((0.0, 20.0, 60.0))
    case = AttentionCase(
        f"case {number}", heads=heads_kv * group, heads_kv=heads_kv, head_dim=d, head_dim_v=dv, layout=layout,
        dtype=compiled.choice(("float16", "bfloat16", "bfloat16")), causal="causal" in chosen, sinks="sinks" in chosen,
        softcap=compiled.choice((3.0, 20.0)) if "softcap" in chosen else 0.0, sm_scale=scale,
        seed=choose.randrange(1 << 30), **sizes,
    )  # fmt: skip
    return case, chosen


# ---- one case


def changes_of(head_dim: int, consumers: int) -> list[dict[str, Any]]:
    """Changes to the table's config that other rows and the sweep use."""
    changes: list[dict[str, Any]] = [{"persistent": True}, {"pairs": True}, {"fixed_max": True}]
    changes += [{"persistent": True, "scheduler": "dynamic"}] * 2
    if consumers > 1:
        changes += [{"pingpong": True}, {"persistent": True, "pingpong": True}]
        changes += [{"persistent": True, "pingpong": True, "pairs": True, "scheduler": "dynamic"}] * 2
    if 64 < head_dim <= 128:
        changes += [{"box_columns": 64, "q_in_registers": boxes} for boxes in (1, 2)]
    if 64 < head_dim <= 96:
        changes += [{"box_columns": 32}] * 4
    return changes


class Kernel:
    """Runs the Hopper kernels; `given`: out and lse that the forward returns if only the backward is tested."""

    def __init__(self, options: argparse.Namespace) -> None:
        from diyfa.backends.cuda.attention import configs
        from diyfa.backends.cuda.hopper import bwd_launch
        from diyfa.backends.cuda.hopper import configs as hopper_configs
        from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch

        self.what, self.device, self.launches = options.what, "cpu" if options.cpu else "cuda", 0
        self.given: Results
        if options.cpu:
            import pytest
            from hopper_interpreted import interpret, interpret_backward

            (interpret if self.what == "forward" else interpret_backward)(pytest.MonkeyPatch(), seed=options.seed)
        else:
            configs.TMA_MIN_WORK = hopper_configs.TMA_MIN_WORK = 0
            hopper_configs.FULL_GPU = hopper_configs.SHORT_KV_LOOP = 0
        if self.what == "backward":
            hopper_configs.refuses = lambda problem: None
            hopper_fwd_launch.forward_pass = self._forward
        module, name = (hopper_fwd_launch, "forward_pass") if self.what == "forward" else (bwd_launch, "backward_pass")
        describe = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            self.launches += 1
            return describe(*arguments)

        setattr(module, name, counted)

    def _forward(self, problem: Any, tensors: Any, out: torch.Tensor, lse: torch.Tensor) -> Any:
        from diyfa.backends.cuda.runtime.passes import Pass

        out.copy_(self.given.out)
        lse.copy_(self.given.lse)
        return Pass([])  # which is never repeated

    def config(self, case: AttentionCase, features: set[str]) -> Any:
        """A context in which the forward has a config that the table does not choose."""
        from diyfa.backends.cuda.attention.launch import use_config
        from diyfa.backends.cuda.hopper.configs import select_config

        if not features & {"config", "tiles"}:
            return nullcontext()

        def changed(problem: Any) -> Any:
            config, changes = select_config(problem), {"persistent": True, "scheduler": "dynamic"}
            if "config" in features:
                changes = random.Random(case.seed).choice(changes_of(problem.head_dim, config.consumers))
            return replace(config, **changes)

        return use_config("sm90", changed)

    def __call__(self, case: AttentionCase, inputs: Inputs, features: set[str]) -> Results:
        function = attention_function(case, backend="cuda", variant="sm90", deterministic="deterministic" in features)

        def attend(*leaves: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = function(*leaves, **options)
            return out, lse if case.lse_gradient else lse.detach().requires_grad_()  # the kernel gets no gradient of it

        plans.clear()  # each call is described, and counted
        with poisoned_allocations(), self.config(case, features):
            if self.what != "forward":
                return run_case(attend, inputs)
            with torch.no_grad():
                out, lse = function(*inputs.leaves, return_lse=True, **inputs.options)
        return Results(out.cpu(), lse.cpu(), *[None] * (len(Results._fields) - 2))


def check(run: Kernel, case: AttentionCase, features: set[str], repeats: int) -> tuple[str | None, float]:
    """(what is wrong or None, the largest share of the error budget)."""
    expected_results.cache_clear()
    yardstick_results.cache_clear()
    case = replace(case, lse_gradient="dlse" in features)
    inputs = make_inputs(case, run.device)
    run.given = yardstick_results(case, run.device)
    before = run.launches
    got = run(case, inputs, features)
    if inputs.q.numel() and inputs.k.numel() and run.launches == before:
        return "the Hopper kernel did not run", 0.0
    every = check_budget(got, case, run.device, MORE_DRAWS)
    checks = {name: every[name] for name in RESULTS[run.what] if name in every}
    wrong = [f"{name}: {x.problem or x.error}, allowed {x.budget}" for name, x in checks.items() if not x.share <= 1]
    promised = RESULTS["both"] if "deterministic" in features else SAME_BITS
    for turn in range(1, 1 if wrong else repeats):
        again = run(case, inputs, features)
        for name, x in checks.items():
            now, first = getattr(again, name), getattr(got, name)
            if torch.equal(now.nan_to_num(7.0), first.nan_to_num(7.0)):
                continue
            difference = (now.double() - first.double()).abs().max().item()
            if name in promised:
                wrong.append(f"{name} has other bits in run {turn + 1}: by up to {difference:.2e}")
            elif not difference <= 2 * x.budget.max_abs:  # both are within it
                wrong.append(f"{name} moved by {difference:.2e} in run {turn + 1}")
        if wrong:
            break
    return "; ".join(wrong) or None, max(x.share for x in checks.values())


# ---- processes


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


class Totals(NamedTuple):
    """What a process has found of its cases."""

    passed: int
    by_feature: Counter[str]
    failures: list[str]
    worst: tuple[float, int]  # share of the error budget, case
    slowest: tuple[float, int]  # seconds, case


def again(options: argparse.Namespace, number: int) -> str:
    """The options that repeat a case."""
    words = f"{options.what} --seed {options.seed} --variants {options.variants} --start {number} --cases 1 --jobs 1"
    if options.deterministic_runs:
        words += f" --deterministic-runs {options.deterministic_runs}"
    elif options.only:
        words += f" --only {options.only}"
    return words + " --cpu" * options.cpu


def work(options: argparse.Namespace, first: int) -> Totals:
    """Every n-th case from `first` on, one after another, up to one that raises."""
    torch.set_num_threads(1)
    run = Kernel(options)
    passed, by_feature, failures, worst, slowest = 0, Counter[str](), [], (0.0, -1), (0.0, -1)
    for number in range(first, options.end, options.jobs):
        if time.time() > options.until:
            break
        case, features = draw(options, number)
        begin, repeat = time.monotonic(), again(options, number)
        wrong: str | None
        with ending_after(options.limit, repeat):
            try:
                wrong, share = check(run, case, features, options.deterministic_runs or REPEATS[options.what])
            except Exception:  # the CUDA context may be lost
                wrong, share = traceback.format_exc(), 0.0
        if wrong is not None:
            failures.append(f"FAILED {wrong}\n  {sorted(features)} {case}\n  {repeat}")
            print(failures[-1], flush=True)
            if "Traceback" in wrong or len(failures) == MOST_FAILURES:
                break
            continue
        passed += 1
        by_feature.update(features)
        worst, slowest = max(worst, (share, number)), max(slowest, (time.monotonic() - begin, number))
    return Totals(passed, by_feature, failures, worst, slowest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=RESULTS)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150, help="no case begins later")
    parser.add_argument("--variants", type=int, default=96, help="a multiple of --jobs, so that each compiles its own")
    parser.add_argument("--jobs", type=int, default=16, help="processes")
    parser.add_argument("--limit", type=float, default=75, help="seconds for one case, compiling included")
    parser.add_argument("--only", choices=FEATURES, default=None)
    parser.add_argument("--deterministic-runs", type=int, default=0, help="run eight long cases so often instead")
    parser.add_argument("--cpu", action="store_true", help="in the Gluon interpreter, smaller cases")
    options = parser.parse_args()
    if options.deterministic_runs:
        options.cases, options.only = min(options.cases, 8), "deterministic"
    options.jobs = min(options.jobs, options.cases)
    options.end = options.start + options.cases
    options.until = time.time() + options.seconds
    begin = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(work, [options] * options.jobs, range(options.start, options.start + options.jobs)))
    passed, failures = sum(x.passed for x in found), [failure for x in found for failure in x.failures]
    worst, slowest = max(x.worst for x in found), max(x.slowest for x in found)
    by_feature = sum((x.by_feature for x in found), Counter())
    where = "the interpreter" if options.cpu else torch.cuda.get_device_name()
    print(f"{where}: {passed} of {options.cases} cases agree, {len(failures)} fail, {time.monotonic() - begin:.0f} s")
    print(f"largest share of the error budget {worst[0]:.2f} (case {worst[1]}), "
          f"slowest {slowest[0]:.1f} s (case {slowest[1]})")  # fmt: skip
    print(", ".join(f"{name} {count}" for name, count in sorted(by_feature.items())))
    return 1 if failures else 0 if passed == options.cases else 2


if __name__ == "__main__":
    sys.exit(main())
