"""Benchmark of the matrix product: every candidate of Hopper's table, diyfa's portable kernels, and cuBLAS.

    python benchmarks/matmul.py [--points 4096x4096x4096 …] [--only pingpong …] [--budget 240]
    python benchmarks/matmul.py --dry

Each implementation runs in its own process; one that hangs or fails costs only its time-out. All compile at the same
time and compare their results with float64, at the measured points and at ragged sizes; a wrong one is not timed. Then
they are measured in turns for several rounds, because the first on a cool GPU looks faster:

* First every candidate, float16, b row-major, as a CUDA graph of one call with a cold L2 cache
  (`triton.testing.do_bench` of its replay).
* Then the fastest two at each point: bfloat16; b column-major, as the weight of a linear layer is; and eager, calls as
  a user makes them, one after another, by the host's clock.
* With --float8 instead float8_e4m3fn with descales of rows and columns and a bfloat16 result, b column-major.
* With --tf32 instead float32 in tf32, b column-major.

"cublas" is torch.mm, of float8 torch._scaled_mm as it is by default (use_fast_accum=False). "portable" is
`triton_matmul` as `auto` chooses it without the Hopper kernel, tiles measured.
Prints a row for each measurement; then the best candidate at each point with its speed relative to cuBLAS; for each
class of `hopper/matmul_configs.py` the candidates by their relative speed; and what to enter in that file. Writes one
JSON file with device, date and versions to benchmarks/results/. Takes less than four minutes on a GPU with 16 cores.

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from datetime import date
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from served import Served, watchdog

from diyfa.backends.cuda.hopper import matmul_configs
from diyfa.backends.cuda.hopper.matmul_configs import TABLE, Sm90MatmulConfig, problem_class
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
    (16, 4096, 4096),
    (16, 1024, 8192),
    (16, 14336, 4096),
    (32, 8192, 8192),
)
RAGGED: tuple[Point, ...] = ((1, 8, 16), (129, 136, 80), (300, 264, 1040), (5, 2056, 336))
DRY_POINTS: tuple[Point, ...] = ((16, 128, 1024), (192, 136, 72))
OTHERS = ("cublas", "portable")
COMPILE_LIMIT = 180  # seconds for compilation and comparison
UNITS = 2.0  # of the dtype's rounding, relative to the largest element: a result off by more is wrong
# Of results, which are bfloat16 of float8; of tf32 that of the factors.
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-8, "float32": 2**-11}


class Case(NamedTuple):
    """One way to measure a point."""

    dtype: str
    layout: str  # "nn": both matrices are row-major; "nt": b is column-major
    mode: str  # "graph" or "eager"

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} {self.layout}"


CASES = (  # the first one is that of all candidates
    Case("float16", "nn", "graph"),
    Case("bfloat16", "nn", "graph"),
    Case("float16", "nt", "graph"),
    Case("float16", "nn", "eager"),
    Case("bfloat16", "nn", "eager"),
)
FLOAT8_CASES = (Case("float8_e4m3fn", "nt", "graph"), Case("float8_e4m3fn", "nt", "eager"))
TF32_CASES = (Case("float32", "nt", "graph"), Case("float32", "nt", "eager"))
OUT = {"float8_e4m3fn": "bfloat16"}


def config_name(config: Sm90MatmulConfig) -> str:
    """Return the name by which rows and processes know a candidate."""
    name = f"sm90 {config.block_m}x{config.block_n}x{config.block_k} s{config.stages} c{config.consumers}"
    return f"{name}{' pingpong' * config.pingpong} group{config.group_m} split{config.split_k}"


def config_code(config: Sm90MatmulConfig) -> str:
    """Return a candidate as `hopper/matmul_configs.py` writes it."""
    values = [(each, getattr(config, each.name)) for each in fields(config)]
    sizes = [str(value) for each, value in values if each.default is MISSING]
    rest = [f"{each.name}={value}" for each, value in values if each.default not in (MISSING, value)]
    return f"_config({', '.join(sizes + rest)})"


def problem_of(point: Point, case: Case) -> MatmulProblem:
    out, k_major = OUT.get(case.dtype, case.dtype), (True, case.layout == "nt")
    precision = "tf32" if case.dtype == "float32" else "ieee"
    return MatmulProblem("cuda", "sm_90", case.dtype, case.dtype, out, *point, precision, aligned=True, k_major=k_major)


ALL_CONFIGS = {config_name(config): config for row in TABLE for config in row.candidates}


def configs_of(point: Point, case: Case) -> list[str]:
    """Return the names of the candidates of a point's class that run it, the default first."""
    problem = problem_of(point, case)
    return [
        config_name(config)
        for config in problem_class(*point).candidates
        if matmul_configs.fits(matmul_configs.for_problem(config, problem), problem)
    ]


# ---- in the implementation's own process


def _simulate() -> None:
    """Run the Hopper kernel in the simulator and Triton's kernels in its interpreter."""
    from simulators.gluon import InterpretedKernel

    from diyfa.backends.cuda.hopper import matmul

    matmul._matmul_sm90_kernel = InterpretedKernel(matmul._matmul_sm90_kernel, 3)
    matmul_configs.environment_refusal = lambda: None


def make_call(
    name: str, a: torch.Tensor, b: torch.Tensor, descales: dict[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Return a call of an implementation."""
    import diyfa
    from diyfa.backends.cuda.hopper import matmul

    if name == "cublas" and descales:
        scales = descales["a_descale"], descales["b_descale"]
        return lambda: torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    if name == "cublas":
        torch.backends.cuda.matmul.allow_tf32 = True
        return lambda: torch.mm(a, b)
    precision = "tf32" if a.dtype == torch.float32 else None
    if name == "portable":
        return lambda: diyfa.triton_matmul(a, b, **descales, precision=precision, backend="cuda")
    config = ALL_CONFIGS[name]
    # Not by `use_config`, in which equal calls are not repeated quickly.
    matmul.select_config = lambda problem: matmul_configs.for_problem(config, problem)
    return lambda: diyfa.triton_matmul(a, b, **descales, precision=precision, variant="sm90", backend="cuda")


def make_inputs(point: Point, case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = point
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    wide = torch.float16 if case.dtype in OUT else dtype
    a = torch.randn((m, k), device=device, dtype=wide).to(dtype)
    b = torch.randn((n, k) if case.layout == "nt" else (k, n), device=device, dtype=wide).to(dtype)
    return a, b.t() if case.layout == "nt" else b


def make_descales(point: Point, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the descales of float8, one for each row and column."""
    if case.dtype not in OUT:
        return {}
    m, n, _ = point
    return {"a_descale": torch.rand((m, 1), device=device) + 0.5, "b_descale": torch.rand((1, n), device=device) + 0.5}


def error_of(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, descales: dict[str, torch.Tensor]) -> float:
    """Return the largest error of 512 rows against float64, over their largest element."""
    rows = torch.arange(0, a.shape[0], max(1, a.shape[0] // 512), device=a.device)
    exact = a[rows].double() @ b.double()
    if descales:
        exact *= descales["a_descale"][rows] * descales["b_descale"]
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


class Server:
    """Answers requests about one implementation."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.device = torch.device("cpu" if options.dry else "cuda")
        self.current: tuple[Any, ...] = ()
        self.call: Callable[[], torch.Tensor] = lambda: torch.empty(0)

    def prepare(self, point: Point, case: Case) -> float:
        """Make the call of a point ready to be measured, compiled and with measured tiles. Return its error."""
        a, b = make_inputs(point, case, self.device)
        descales = make_descales(point, case, self.device)
        self.call = make_call(self.name, a, b, descales)
        for _ in range(1 if self.options.dry else 4):
            c = self.call()
        self.current = point, case.dtype, case.layout
        return error_of(c, a, b, descales)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return {"errors": [of each point and case]} or, of a request with a mode to measure, {"ms": …}."""
        if "prepare" in request:
            jobs = [(tuple(point), Case(*case)) for point, case in request["prepare"]]
            errors = [self.prepare(point, case) / ROUNDING[case.dtype] for point, case in jobs]
            self.current, self.call = (), lambda: torch.empty(0)
            if not self.options.dry:
                torch.cuda.empty_cache()
            return {"errors": errors}
        point, case = tuple(request["point"]), Case(*request["case"])
        if self.current != (point, case.dtype, case.layout):
            self.prepare(point, case)
        return {"ms": _milliseconds(self.call, case.mode, self.options.rep)}


def serve(name: str, options: argparse.Namespace) -> None:
    """Answer each line of stdin, a request as JSON, with a line of JSON."""
    if name == "portable":
        matmul_configs.environment_refusal = lambda: "the portable kernels are measured"
    if options.dry:
        _simulate()
    server = Server(name, options)
    for line in sys.stdin:
        request = json.loads(line)
        with watchdog(COMPILE_LIMIT if "prepare" in request else options.limit):
            answer = server.answer(request)
        print(json.dumps(answer), flush=True)


# ---- the benchmark

Jobs = dict[str, list[tuple[Point, Case]]]  # of each implementation


def _command(name: str, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, "--serve", name, "--limit", str(options.limit), "--rep", str(options.rep)]
    return [*command, "--dry"] if options.dry else command


class Benchmark:
    """The processes of all implementations, and what they have answered."""

    def __init__(self, names: Iterable[str], options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.budget
        self.served = {name: Served(name, _command(name, options)) for name in names}
        self.wrong: dict[tuple[str, Point], str] = {}
        self.rows: list[dict[str, Any]] = []

    def close(self) -> None:
        for each in self.served.values():
            each.close()

    def prepare(self, jobs: Jobs) -> None:
        """Compile and check at the same time, each implementation in its process; and the portable kernels, which
        measure their tiles, when all others are done. A wrong result at a ragged size counts at every point."""

        if time.monotonic() > self.deadline:
            return

        def prepare_one(name: str) -> None:
            answer = self.served[name].ask(json.dumps({"prepare": jobs[name]})) if jobs[name] else None
            for (point, _), error in zip(jobs[name], answer["errors"] if answer else (), strict=False):
                if not error <= UNITS:
                    reason = f"wrong at {point}: off by {error:.1f} units"
                    points = [each for each, _ in jobs[name]] if point in RAGGED else [point]
                    self.wrong.update({(name, each): reason for each in points})

        first = [name for name in jobs if name != "portable"]
        with ThreadPoolExecutor(len(jobs) or 1) as pool:
            list(pool.map(prepare_one, first))
        if "portable" in jobs:
            prepare_one("portable")

    def measure(self, names: list[str], point: Point, cases: Iterable[Case]) -> None:
        """Add a row for each implementation and case of a point. The implementations alternate."""
        m, n, k = point
        head = {"kind": "matmul", "M": m, "N": n, "K": k, "table": problem_class(m, n, k).name}
        times: dict[tuple[str, Case], list[float]] = {}
        for case in cases:
            for turn in range(self.options.rounds):
                for name in names if turn % 2 == 0 else names[::-1]:
                    each = self.served[name]
                    if each.reason or (name, point) in self.wrong:
                        continue
                    if time.monotonic() > self.deadline:
                        self.wrong[name, point] = "no time left"
                        continue
                    answer = each.ask(json.dumps({"point": point, "case": case}))
                    if answer is not None:
                        times.setdefault((name, case), []).append(answer["ms"])
        rows = []
        for (name, case), found in times.items():
            ms = median(found)
            row = {**head, "dtype": case.dtype, "layout": case.layout, "implementation": name, "case": case.mode}
            rows.append({**row, "ms": ms, "tflops": 2 * m * n * k / ms / 1e9, "spread": (max(found) - min(found)) / ms})
        for name in names:
            if reason := self.served[name].reason or self.wrong.get((name, point), ""):
                rows.append({**head, "implementation": name, "unavailable": reason})
        for row in rows:
            print(json.dumps(row), flush=True)
        self.rows += rows

    def fastest(self, point: Point) -> list[str]:
        """Return the fastest two candidates, as far as they are measured, the faster one first."""
        found = [row for row in self.rows if (row["M"], row["N"], row["K"]) == point and "ms" in row]
        found = [row for row in found if row["implementation"] not in OTHERS]
        return [row["implementation"] for row in sorted(found, key=lambda row: row["ms"])[:2]]


def case_of(row: dict[str, Any]) -> Case:
    return Case(row["dtype"], row["layout"], row["case"])


def relative_speeds(rows: list[dict[str, Any]], table: str, first: Case) -> dict[str, float]:
    """Return each implementation's speed relative to cuBLAS in the first case, the geometric mean over a class's
    points. An implementation that has not run at all of them counts with 0 where it has not."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    names: set[str] = set()
    for row in rows:
        if row["table"] == table:
            names.add(row["implementation"])
            if "ms" in row and case_of(row) == first:
                times.setdefault((row["M"], row["N"], row["K"]), {})[row["implementation"]] = row["ms"]
    points = [found for found in times.values() if "cublas" in found]
    if not points:
        return {}
    speeds = {x: prod(found["cublas"] / found.get(x, float("inf")) for found in points) for x in names}
    means = {x: speed ** (1 / len(points)) for x, speed in speeds.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def conclusions(rows: list[dict[str, Any]], first: Case) -> tuple[dict[str, list[str]], list[str]]:
    """Return ({class: its candidates, the fastest first}, the classes whose portable kernels are faster than these)."""
    orders, portable = {}, []
    for row in TABLE:
        speeds = relative_speeds(rows, row.name, first)
        order = [name for name, speed in speeds.items() if name not in OTHERS and speed > 0]
        if order:
            orders[row.name] = order
            if speeds[order[0]] < speeds.get("portable", 0.0):
                portable.append(row.name)
    return orders, portable


def print_points(rows: list[dict[str, Any]], cases: Sequence[Case]) -> None:
    """Print the best candidate of each point and the speeds relative to cuBLAS: its own, and the portable kernel's."""
    points: dict[Point, dict[tuple[str, Case], dict[str, Any]]] = {}
    for row in rows:
        if "ms" in row:
            points.setdefault((row["M"], row["N"], row["K"]), {})[row["implementation"], case_of(row)] = row
    short = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float32": "tf32"}
    columns = [f"{short[case.dtype]} {case.layout}{' eager' * (case.mode == 'eager')}" for case in cases]
    titles = "".join(f"{x:>13}" for x in (*columns, "portable", "TFLOP/s"))
    print(f"\nspeed relative to cuBLAS\n{'M x N x K':18} {'best candidate':44}{titles}")
    for point, found in points.items():
        best = min(
            (row for (name, case), row in found.items() if case == cases[0] and name not in OTHERS),
            key=lambda row: row["ms"],
            default=None,
        )
        if best is None:
            continue

        def ratio(name: str, case: Case) -> str:
            ours, cublas = found.get((name, case)), found.get(("cublas", case))  # noqa: B023
            return f"{cublas['ms'] / ours['ms']:13.3f}" if ours and cublas else f"{'-':>13}"

        name = best["implementation"]
        numbers = "".join(ratio(name, case) for case in cases) + ratio("portable", cases[0])
        print(f"{'x'.join(map(str, point)):18} {name:44}{numbers}{best['tflops']:13.1f}")


def print_summary(rows: list[dict[str, Any]], cases: Sequence[Case], device: str) -> None:
    """Print the speeds of each point and class, and what to enter in the table."""
    for row in TABLE:
        if speeds := relative_speeds(rows, row.name, cases[0]):
            print(f"\n{row.name}: speed relative to cuBLAS")
            for name, speed in speeds.items():
                print(f"  {name:48} {speed:.3f}")
    print_points(rows, cases)
    orders, portable = conclusions(rows, cases[0])
    print("\nfor backends/cuda/hopper/matmul_configs.py: candidates of each class, the fastest first")
    for table, order in orders.items():
        figures = {
            (row["M"], row["N"], row["K"]): row["tflops"]
            for row in rows
            if row["table"] == table and row["implementation"] == order[0] and "ms" in row and case_of(row) == cases[0]
        }
        text = ", ".join(f"{'x'.join(map(str, point))} {tflops:.0f}" for point, tflops in figures.items())
        print(f"  {table}: {', '.join(config_code(ALL_CONFIGS[name]) for name in order if name in ALL_CONFIGS)}")
        print(f'    measured="{device}, {date.today()}, {cases[0].dtype}, TFLOP/s: {text}"')
    print(f"the portable kernels are faster for: {', '.join(portable) or 'no class'}")


def _point(text: str) -> Point:
    m, n, k = map(int, text.split("x"))
    return m, n, k


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything and return the rows."""
    points, (first, *rest) = options.points or (DRY_POINTS if options.dry else POINTS), options.cases
    names = {
        point: [x for x in configs_of(point, first) if not options.only or any(part in x for part in options.only)]
        for point in points
    }
    jobs: Jobs = {name: [(point, first) for point in points] for name in OTHERS}
    for name in dict.fromkeys(name for some in names.values() for name in some):
        ragged = () if options.dry else RAGGED
        jobs[name] = [(point, first) for point in (*ragged, *[point for point in points if name in names[point]])]
    benchmark = Benchmark(jobs, options)
    try:
        benchmark.prepare(jobs)
        for point in points:
            benchmark.measure([*OTHERS, *names[point]], point, (first,))
        best = {point: [*OTHERS[: 1 + options.dry], *benchmark.fastest(point)] for point in points}
        kinds = {case[:2]: case for case in rest if case[:2] != first[:2]}.values()
        later: Jobs = {}
        for point, case in ((point, case) for point in points for case in kinds):
            for name in best[point]:
                later.setdefault(name, []).append((point, case))
        benchmark.prepare(later)
        for point in points:
            benchmark.measure(best[point], point, rest)
    finally:
        benchmark.close()
    return benchmark.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", type=_point, help="MxNxK")
    parser.add_argument("--only", nargs="*", default=[], help="candidates whose name contains one of these")
    parser.add_argument("--budget", type=float, default=240, help="seconds for everything")
    parser.add_argument("--limit", type=float, default=10, help="seconds for one measurement, which hangs beyond them")
    parser.add_argument("--rep", type=int, default=30, help="milliseconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point, whose median counts")
    parser.add_argument("--float8", dest="cases", action="store_const", const=FLOAT8_CASES, default=CASES)
    parser.add_argument("--tf32", dest="cases", action="store_const", const=TF32_CASES)
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
    rows = run(options)
    if options.dry:
        print("dry: the times are those of a simulator, so nothing follows from them")
        return
    device = torch.device("cuda")
    write_json(options.output or default_path("matmul", device, RESULTS), "matmul", device, rows)
    print_summary(rows, options.cases, torch.cuda.get_device_name().removeprefix("NVIDIA "))


if __name__ == "__main__":
    main()
