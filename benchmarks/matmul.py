"""Benchmark of the matrix product: every candidate of Hopper's table, diyfa's portable kernels, and cuBLAS.

    python benchmarks/matmul.py [--points 4096x4096x4096 …] [--dtypes float16] [--modes graph eager] [--budget 1500]
    python benchmarks/matmul.py --dry

Each implementation runs in its own process; one that hangs or fails costs only its time-out. At each point they are
measured in turns for several rounds, because the first on a cool GPU looks faster. Each result is compared with float64
first, and a wrong one is not timed. Modes:

* graph: a CUDA graph of one call, with a cold L2 cache (`triton.testing.do_bench` of its replay).
* eager: calls as a user makes them, one after another, by the host's clock.

"cublas" is torch.mm, "portable" is `triton_matmul` as `auto` chooses it without the Hopper kernel, tiles measured.
Prints a row for each measurement; then for each class of `hopper/matmul_configs.py` the candidates by their speed
relative to cuBLAS, and at the end the two things to enter in that file: the order of each class's candidates, and
AUTOMATIC. Writes one JSON file with device, date and versions to benchmarks/results/.

--dry runs on this machine's CPU, the Hopper kernel in the simulator of tests/simulators/gluon and Triton's kernels in
its interpreter, at small points, each call once. It needs a checkout. It compares results, and shows that the benchmark
works. Its times are the simulator's, so it concludes nothing and writes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from served import Served, watchdog

from diyfa.backends.cuda.hopper import matmul_configs
from diyfa.backends.cuda.hopper.matmul_configs import TABLE, Sm90MatmulConfig, candidates, problem_class
from diyfa.lab.bench.record import default_path, write_json
from diyfa.problem import MatmulProblem

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
Point = tuple[int, int, int]
POINTS: tuple[Point, ...] = (
    *[(n, n, n) for n in (512, 1024, 2048, 4096, 8192)],
    (4096, 11008, 4096),
    (16, 8192, 8192),
    (64, 8192, 8192),
    (8192, 8192, 128),
    (8192, 128, 8192),
    (128, 8192, 8192),
    (64, 8192, 512),
    (65536, 128, 4096),
)
DRY_POINTS: tuple[Point, ...] = ((16, 128, 1024), (192, 136, 72))
MODES = ("graph", "eager")
OTHERS = ("cublas", "portable")
COMPILE_LIMIT = 180  # seconds for the first answer at a point
UNITS = 2.0  # of the dtype's rounding, relative to the largest element: a result off by more is wrong
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}


def config_name(config: Sm90MatmulConfig) -> str:
    """Return the name by which rows and processes know a candidate."""
    name = f"sm90 {config.block_m}x{config.block_n}x{config.block_k} s{config.stages} c{config.consumers}"
    return f"{name}{' pingpong' * config.pingpong} group{config.group_m} split{config.split_k}"


def problem_of(point: Point, dtype: str) -> MatmulProblem:
    return MatmulProblem("cuda", "sm_90", dtype, dtype, dtype, *point, aligned=True)


def configs_of(point: Point, dtype: str) -> dict[str, Sm90MatmulConfig]:
    """Return the candidates of a point's class by name."""
    return {config_name(config): config for config in candidates(problem_of(point, dtype))}


# ---- in the implementation's own process


def _simulate() -> None:
    """Run the Hopper kernel in the simulator and Triton's kernels in its interpreter."""
    from simulators.gluon import InterpretedKernel

    from diyfa.backends.cuda.hopper import matmul

    matmul._matmul_sm90_kernel = InterpretedKernel(matmul._matmul_sm90_kernel, 3)
    matmul_configs.environment_refusal = lambda: None


def make_call(name: str, point: Point, dtype: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of an implementation."""
    import diyfa
    from diyfa.backends.cuda.hopper import matmul

    if name == "cublas":
        return lambda: torch.mm(a, b)
    if name == "portable":
        return lambda: diyfa.triton_matmul(a, b, backend="cuda")
    config = configs_of(point, dtype)[name]
    matmul.select_config = lambda problem: config  # not by `use_config`, in which equal calls are not repeated quickly
    return lambda: diyfa.triton_matmul(a, b, variant="sm90", backend="cuda")


def error_of(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of 512 rows against float64, over their largest element."""
    rows = torch.arange(0, a.shape[0], max(1, a.shape[0] // 512), device=a.device)
    exact = a[rows].double() @ b.double()
    return ((c[rows].double() - exact).abs().max() / exact.abs().max()).item()


def _milliseconds(call: Callable[[], torch.Tensor], mode: str, rep: int) -> float:
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1000
    if mode == "graph":
        from triton.testing import do_bench

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return do_bench(graph.replay, warmup=15, rep=rep, return_mode="median")
    torch.cuda.synchronize()
    calls, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < rep / 1000:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        calls += 20
    return (time.perf_counter() - begin) * 1000 / calls


def serve(name: str, options: argparse.Namespace) -> None:
    """Answer each line of stdin, (point, dtype, mode) as JSON, with milliseconds and the error, as a line of JSON."""
    device = torch.device("cpu" if options.dry else "cuda")
    matmul_configs.AUTOMATIC = frozenset()  # so that "portable" is that
    if options.dry:
        _simulate()
    checked: dict[tuple[Any, ...], tuple[Callable[[], torch.Tensor], float]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        point, dtype = tuple(request["point"]), request["dtype"]
        with watchdog(options.limit if (point, dtype) in checked else COMPILE_LIMIT):
            if (point, dtype) not in checked:
                m, n, k = point
                torch.manual_seed(0)
                a, b = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for shape in ((m, k), (k, n)))
                call = make_call(name, point, dtype, a, b)
                checked.clear()  # one point's matrices at a time
                for _ in range(1 if options.dry else 4):  # compile, measure tiles, make the replay
                    c = call()
                checked[point, dtype] = call, error_of(c, a, b)
            call, error = checked[point, dtype]
            answer = {"error": error}
            if error <= UNITS * ROUNDING[dtype]:
                answer["ms"] = _milliseconds(call, request["mode"], options.rep)
        print(json.dumps(answer), flush=True)


# ---- the benchmark


def _command(name: str, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--serve", name, "--limit", str(options.limit), "--rep", str(options.rep)]
    return [*command, "--dry"] if options.dry else command


def measure_point(
    names: list[str], point: Point, dtype: str, options: argparse.Namespace, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation and mode of a point. The implementations alternate."""
    m, n, k = point
    head = {"kind": "matmul", "dtype": dtype, "M": m, "N": n, "K": k, "table": problem_class(m, n, k).name}
    served = [Served(name, _command(name, options)) for name in names]
    times: dict[tuple[str, str], list[float]] = {}
    wrong: dict[str, float] = {}
    try:
        for turn in range(options.rounds):
            for mode in options.modes:
                for each in served if turn % 2 == 0 else served[::-1]:
                    if each.reason or each.name in wrong:
                        continue
                    if time.monotonic() > deadline:
                        each.reason = "no time left"
                        continue
                    answer = each.ask(json.dumps({"point": point, "dtype": dtype, "mode": mode}))
                    if answer is not None and "ms" in answer:
                        times.setdefault((each.name, mode), []).append(answer["ms"])
                    elif answer is not None:
                        wrong[each.name] = answer["error"]
    finally:
        for each in served:
            each.close()
    for (name, mode), found in times.items():
        ms = median(found)
        row = {"implementation": name, "case": mode, "ms": ms, "tflops": 2 * m * n * k / ms / 1e9}
        yield {**head, **row, "spread": (max(found) - min(found)) / ms}
    for each in served:
        if each.name in wrong:
            each.reason = f"wrong: off by {wrong[each.name]:.2e} of the largest element"
        if each.reason:
            yield {**head, "implementation": each.name, "unavailable": each.reason}


def relative_speeds(rows: list[dict[str, Any]], table: str) -> dict[str, float]:
    """Return each implementation's speed relative to cuBLAS, the geometric mean over a class's points and modes.

    An implementation that has not run at all of them counts with 0 where it has not.
    """
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    names: set[str] = set()
    for row in rows:
        if row["table"] == table:
            names.add(row["implementation"])
            if "ms" in row:
                key = row["dtype"], row["M"], row["N"], row["K"], row["case"]
                times.setdefault(key, {})[row["implementation"]] = row["ms"]
    points = [found for found in times.values() if "cublas" in found]
    if not points:
        return {}
    speeds = {x: prod(found["cublas"] / found.get(x, float("inf")) for found in points) for x in names}
    means = {x: speed ** (1 / len(points)) for x, speed in speeds.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def conclusions(rows: list[dict[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """Return ({class: its candidates, the fastest first}, the classes that belong in AUTOMATIC).

    A class belongs there if its fastest candidate is right and at least as fast as "portable" on the whole.
    """
    orders, automatic = {}, []
    for row in TABLE:
        speeds = relative_speeds(rows, row.name)
        order = [name for name, speed in speeds.items() if name not in OTHERS and speed > 0]
        if order:
            orders[row.name] = order
            if speeds[order[0]] >= speeds.get("portable", 0.0):
                automatic.append(row.name)
    return orders, automatic


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the speeds of each class, and what to enter in the table."""
    for row in TABLE:
        if speeds := relative_speeds(rows, row.name):
            print(f"\n{row.name}: speed relative to cuBLAS")
            for name, speed in speeds.items():
                print(f"  {name:48} {speed:.3f}")
    orders, automatic = conclusions(rows)
    print("\nfor backends/cuda/hopper/matmul_configs.py: candidates of each class, the fastest first, and its choice")
    for table, order in orders.items():
        print(f"  {table}: {'; '.join(order)}")
    print(f"AUTOMATIC: frozenset[str] = frozenset({set(automatic) or ''})")


def _point(text: str) -> Point:
    m, n, k = map(int, text.split("x"))
    return m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", type=_point, help="MxNxK")
    parser.add_argument("--dtypes", nargs="+", choices=ROUNDING, default=["float16", "bfloat16"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--only", nargs="*", default=[], help="candidates whose name contains one of these")
    parser.add_argument("--budget", type=float, default=1500, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one measurement, which hangs beyond them")
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point, whose median counts")
    parser.add_argument("--dry", action="store_true", help="everything but the timing, on the CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry:  # the processes inherit it
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    if options.serve is not None:
        serve(options.serve, options)
        return
    deadline = time.monotonic() + options.budget
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for point in options.points or (DRY_POINTS if options.dry else POINTS):
            names = [x for x in configs_of(point, dtype) if not options.only or any(part in x for part in options.only)]
            for row in measure_point([*OTHERS, *names], point, dtype, options, deadline):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.dry:
        print("dry: the times are those of a simulator, so nothing follows from them")
        return
    print_summary(rows)
    device = torch.device("cuda")
    write_json(options.output or default_path("matmul", device, RESULTS), "matmul", device, rows)


if __name__ == "__main__":
    main()
