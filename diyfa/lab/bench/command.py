"""`diyfa bench`: compare diyfa with PyTorch on this device, as a table and as JSON."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from diyfa import flash_attention, triton_matmul, use_backend
from diyfa.cli.devices import DTYPES, device_for
from diyfa.cli.output import out, print_json, progress_bar
from diyfa.cli.table import figure
from diyfa.lab.bench import BenchmarkResult, BenchmarkRunner
from diyfa.lab.bench.peers import attention_peers
from diyfa.lab.bench.record import environment, write_json

OPS = ("attention", "matmul")


@dataclass(frozen=True)
class Defaults:
    """Default sizes and repetitions of a device, which take about a minute."""

    seq_lens: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    warmup: int
    rep: int


ACCELERATOR = Defaults((512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192), "bfloat16", 25, 100)
DEFAULTS = {"cpu": Defaults((256, 512, 1024), (256, 512), "float32", 1, 5)}


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


def _check(request: Request) -> tuple[str, ...]:
    if request.op not in (*OPS, "all"):
        raise typer.BadParameter(f"must be one of {', '.join(OPS)}, all; got {request.op!r}", param_hint="--op")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}; got {request.dtype!r}", param_hint="--dtype")
    return OPS if request.op == "all" else (request.op,)


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
    rep = request.rep or defaults.rep
    # The default would multiply float32 in float16; PyTorch multiplies it in float32.
    precision = "ieee" if dtype == torch.float32 else None
    runners: dict[str, BenchmarkRunner] = {}
    totals = {"attention": len(seq_lens) * (len(attention_peers(device)) + 1), "matmul": 2 * len(sizes)}
    with progress_bar(not json) as progress, use_backend(name) if request.backend else nullcontext():
        for op in ops:
            task = progress.add_task(f"{op} on {device.type}", total=totals[op], note="")

            def advance(result: BenchmarkResult, task: Any = task) -> None:
                progress.update(task, advance=1, note=f"{result.name} {figure(result.time_ms)} ms")

            runner = runners[op] = BenchmarkRunner(device.type, warmup, rep, advance)
            if op == "attention":
                runner.benchmark_attention(
                    flash_attention, seq_lens, request.batch, request.heads, request.head_dim, request.causal, dtype,
                    name="diyfa",
                )  # fmt: skip
            else:
                runner.benchmark_matmul(
                    lambda a, b: triton_matmul(a, b, precision=precision), [(n, n, n) for n in sizes], dtype=dtype,
                    name="diyfa",
                )  # fmt: skip
            progress.update(task, total=len(runner.results), completed=len(runner.results))
    rows = [
        {"op": op, "dtype": dtype_name, "causal": request.causal and op == "attention", **asdict(result)}
        for op, runner in runners.items()
        for result in runner.results
    ]
    rows += [
        {"op": op, "dtype": dtype_name, "name": who, "size": size, "unavailable": reason}
        for op, runner in runners.items()
        for who, size, reason in runner.unavailable
    ]
    if output is not None:
        write_json(output, "diyfa bench", device, rows)
    if json:
        print_json({"benchmark": "diyfa bench", **environment(device), "rows": rows})
        return 0
    for op, runner in runners.items():
        mask = " causal" if request.causal and op == "attention" else ""
        runner.print_comparison_table(title=f"{op}{mask}, {dtype_name}, {environment(device)['device']}")
    if output is not None:
        out.print(f"written: {output}", highlight=False)
    return 0
