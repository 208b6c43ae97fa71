"""`diyfa bench`: compare diyfa with PyTorch on this device. Its result file is continued by a later run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from diyfa import flash_attention, triton_matmul, use_backend
from diyfa.cli.devices import DTYPES, device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import figure
from diyfa.lab.bench.peers import attention_peers
from diyfa.lab.bench.record import clock, environment
from diyfa.lab.bench.runner import SPREAD_LIMIT, BenchmarkResult, BenchmarkRunner
from diyfa.lab.bench.timing import compute_quantiles, time_calls
from diyfa.lab.bench.work import matmul_flops, tflops
from diyfa.lab.results import SCHEMA, Row, read_results, write_results
from diyfa.validation import MAX_HEAD_DIM_V

BENCHMARK = "diyfa bench"
OPS = ("attention", "matmul", "ceilings")


@dataclass(frozen=True)
class Defaults:
    """Default sizes and repetitions of a device, which take about a minute."""

    seq_lens: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    warmup: int
    rep: int
    read_mib: int  # bytes read for the ceiling of the bandwidth


ACCELERATOR = Defaults((512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192), "bfloat16", 25, 100, 1024)
DEFAULTS = {"cpu": Defaults((256, 512, 1024), (256, 512), "float32", 1, 5, 64)}


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    op: str = "all"
    seq_lens: list[int] | None = None
    batch: int = 4
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    sizes: list[int] | None = None
    dtype: str | None = None
    warmup: int | None = None
    rep: int | None = None
    backend: str | None = None
    spread_limit: float = SPREAD_LIMIT
    again: bool = False


def _check(request: Request) -> tuple[str, ...]:
    if request.op not in (*OPS, "all"):
        raise typer.BadParameter(f"must be one of {', '.join(OPS)}, all; got {request.op!r}", param_hint="--op")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}; got {request.dtype!r}", param_hint="--dtype")
    return OPS if request.op == "all" else (request.op,)


class File:
    """The result file of a run: rows of an earlier run that need not be measured again, and new ones as they come."""

    def __init__(self, path: Path | None, device: torch.device, again: bool) -> None:
        self.path = path
        self.document = {"benchmark": BENCHMARK, "purpose": "comparison", **environment(device)}
        self.rows: list[Row] = []
        self.facts: Row = {}  # of the new rows, where the file's are those of an earlier run
        if path is not None and path.exists() and not again:
            remedy = "--again starts afresh, --output names another file"
            try:
                earlier = read_results(path)
            except ValueError as error:
                raise ValueError(f"{error}. {remedy}") from None
            found = earlier.benchmark, earlier.device, earlier.versions
            if found != (BENCHMARK, self.document["device"], self.document["versions"]):
                raise ValueError(f"{path} is of another benchmark, device or versions: {remedy}")
            self.rows = list(earlier.rows)
            self.facts = {name: self.document.pop(name) for name in ("date", "clocks") if name in self.document}
            self.document |= {"date": earlier.date, **earlier.facts}
            if earlier.clocks:
                self.document["clocks"] = earlier.clocks

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows and write the file, so that a run that is cut off loses none."""
        self.rows += [{**row, **self.facts} for row in rows]
        if self.path is not None:
            write_results(self.path, {**self.document, "rows": self.rows})

    def find(self, identity: Row) -> Row | None:
        """Return the row with these entries, or None."""
        return next((row for row in self.rows if identity.items() <= row.items()), None)


@dataclass(frozen=True)
class Bench:
    """One run of the command: what is measured, on what, and where rows go."""

    device: torch.device
    dtype: str
    causal: bool
    warmup: int
    rep: int
    file: File

    def identity(self, op: str, name: str, size: tuple[int, ...]) -> Row:
        """Return the entries that tell a row from all others."""
        if op == "matmul":
            return {"kind": op, "implementation": name, "dtype": self.dtype, **dict(zip("MNK", size, strict=True))}
        head_dim_v = min(size[-1], MAX_HEAD_DIM_V)
        sizes = {**dict(zip("BHSD", size, strict=True)), "Dv": head_dim_v, "causal": self.causal}
        return {"kind": op, "implementation": name, "pass": "forward", "dtype": self.dtype, **sizes}

    def runner(self, op: str, advance: Callable[[str, float], None]) -> BenchmarkRunner:
        """Return a runner that leaves out what the file has and adds what it measures."""

        def is_done(name: str, size: tuple[int, ...]) -> bool:
            row = self.file.find(self.identity(op, name, size))
            if row is not None:
                advance(f"{name} {figure(row['ms'])} ms" if "ms" in row else name, 1)
            return row is not None

        def on_result(result: BenchmarkResult) -> None:
            row = self.identity(op, result.name, result.size)
            row |= {"ms": result.time_ms, "spread": round(result.spread, 4), "tflops": result.tflops,
                    "peak_mib": result.memory_mb, "error": result.error}  # fmt: skip
            self.file.add([{**row, **clock(self.device)}])
            advance(f"{result.name} {figure(result.time_ms)} ms", 1)

        return BenchmarkRunner(self.device.type, self.warmup, self.rep, on_result, is_done=is_done)

    def measure_ceilings(self, size: int, mib: int, advance: Callable[[str, float], None]) -> None:
        """Measure what the device reaches at best: PyTorch's matrix product, and reads by its sum."""
        a = torch.randn(size, size, device=self.device, dtype=DTYPES[self.dtype])
        x = torch.zeros(mib * 2**18, device=self.device)
        work = matmul_flops(size, size, size)
        ceilings: dict[str, tuple[str, Callable[[], Any], Callable[[float], float]]] = {
            "matrix product": ("tflops", partial(torch.matmul, a, a), lambda ms: tflops(work, ms)),
            "read": ("GB/s", x.sum, lambda ms: 4 * x.numel() / ms / 1e6),
        }  # fmt: skip
        for case, (unit, run, rate) in ceilings.items():
            identity: Row = {"kind": "ceiling", "implementation": "PyTorch", "case": case, "dtype": self.dtype}
            if case == "matrix product":
                identity |= dict.fromkeys("MNK", size)
            if self.file.find(identity) is None:
                ms, low, high = compute_quantiles(time_calls(run, self.device, self.warmup, self.rep))
                self.file.add([{**identity, "ms": ms, "spread": round((high - low) / ms, 4), unit: rate(ms)}])
            advance(case, 1)


def run(request: Request, output: Path | None, json: bool) -> int:
    """Measure and print, and write to `output` if given. Return the exit status 0."""
    ops = _check(request)
    device, name = device_for(request.backend)
    defaults = DEFAULTS.get(device.type, ACCELERATOR)
    dtype_name = request.dtype or defaults.dtype
    dtype = DTYPES[dtype_name]
    seq_lens = request.seq_lens or list(defaults.seq_lens)
    sizes = request.sizes or list(defaults.sizes)
    warmup = defaults.warmup if request.warmup is None else request.warmup
    file = File(output, device, request.again)
    bench = Bench(device, dtype_name, request.causal, warmup, request.rep or defaults.rep, file)
    resumed = len(file.rows)
    # The default would multiply float32 in float16; PyTorch multiplies it in float32.
    precision = "ieee" if dtype == torch.float32 else None
    totals = {"attention": len(seq_lens) * (len(attention_peers(device)) + 1), "matmul": 2 * len(sizes), "ceilings": 2}
    with progress_bar(not json) as progress, use_backend(name) if request.backend else nullcontext():
        task = progress.add_task(f"bench on {device.type}", total=sum(totals[op] for op in ops), note="")

        def advance(note: str, steps: float) -> None:
            progress.update(task, advance=steps, note=note)

        for op in ops:
            runner = bench.runner(op, advance)
            if op == "attention":
                runner.benchmark_attention(
                    flash_attention, seq_lens, request.batch, request.heads, request.head_dim, request.causal, dtype,
                    name="diyfa",
                )  # fmt: skip
            elif op == "matmul":
                runner.benchmark_matmul(
                    lambda a, b: triton_matmul(a, b, precision=precision), [(n, n, n) for n in sizes], dtype=dtype,
                    name="diyfa",
                )  # fmt: skip
            else:
                bench.measure_ceilings(max(sizes), defaults.read_mib, advance)
            file.add(
                {**bench.identity(op, who, size), "unavailable": reason} for who, size, reason in runner.unavailable
            )
            progress.update(task, advance=len(runner.unavailable))
    if json:
        print_json({"schema": SCHEMA, **file.document, "rows": file.rows})
        return 0
    _print(ops, file, request, dtype_name)
    if output is not None:
        out.print(
            f"written: {output}" + (f", {resumed} rows of an earlier run kept" if resumed else ""), highlight=False
        )
    return 0


def _print(ops: Iterable[str], file: File, request: Request, dtype: str) -> None:
    """Print one table for each operation, from the rows of the file."""
    names = {"attention": "BHSD", "matmul": "MNK"}
    for op in ops:
        kind = op.removesuffix("s")
        rows = [
            row for row in file.rows
            if (row["kind"], row["dtype"]) == (kind, dtype) and row.get("causal", request.causal) == request.causal
        ]  # fmt: skip
        if op not in names:
            for row in rows:
                unit, value = ("TFLOP/s", row["tflops"]) if "tflops" in row else ("GB/s", row["GB/s"])
                mark = "~" if row["spread"] > request.spread_limit else ""
                width = f" of {row['M']}" if "M" in row else ""
                out.print(f"ceiling, {row['case']}{width}: {mark}{figure(value)} {unit}", highlight=False)
            continue
        runner = BenchmarkRunner(device="cpu")
        for row in rows:
            size = tuple(row[name] for name in names[op])
            if "unavailable" in row:
                runner.unavailable.append((row["implementation"], size, row["unavailable"]))
                continue
            result = BenchmarkResult(row["implementation"], size, row["ms"], row["tflops"], row["peak_mib"])
            result.spread, result.error = row["spread"], row["error"]
            runner.results.append(result)
        mask = " causal" if request.causal and op == "attention" else ""
        title = f"{op}{mask}, {dtype}, {file.document['device']}"
        runner.results.sort(key=lambda result: result.size)
        runner.print_comparison_table(title=title, spread_limit=request.spread_limit)
