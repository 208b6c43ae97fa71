"""`diyfa compile`: compile the kernels of one chip ahead of time, and show the registers and memory they use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from diyfa.arch import GPU_SPECS, NPU_SPECS, gpu_spec, npu_spec
from diyfa.cli.output import err, out, print_json, progress_bar
from diyfa.cli.table import figure, table
from diyfa.lab import compile_npu
from diyfa.lab.compile_report import CompileReport
from diyfa.registry import load_backend

TARGETS: dict[str, dict[str, Any]] = {"cuda": GPU_SPECS, "npu": NPU_SPECS}
SPEC_LOOKUPS = {"cuda": gpu_spec, "npu": npu_spec}


def list_known(json: bool) -> None:
    """Print every target by backend."""
    if json:
        print_json({backend: list(specs) for backend, specs in TARGETS.items()})
        return
    rows = [
        [backend, name, f"{spec.arch.name} ({spec.arch.value})"]
        for backend, specs in TARGETS.items()
        for name, spec in specs.items()
    ]
    out.print(table("targets", ["backend", "target", "family"], rows))


def backend_for(target: str) -> str:
    """Return the name of the backend that compiles for `target`. Raises typer.BadParameter for an unknown target."""
    for name, look_up in SPEC_LOOKUPS.items():
        if look_up(target) is not None:
            return name
    near = nearest(target)
    suggestion = f"did you mean {' or '.join(near)}? " if near else ""
    raise typer.BadParameter(
        f"no such target: {target!r}; {suggestion}`diyfa compile --list` lists them", param_hint="TARGET"
    )


def nearest(target: str) -> list[str]:
    """Return the targets that begin with `target`, or else are similar. Ascend chips come without "Ascend"."""
    names = [name.removeprefix(compile_npu.FAMILY) for specs in TARGETS.values() for name in specs]
    name_part = target.removeprefix(compile_npu.FAMILY)
    return [name for name in names if name_part and name.startswith(name_part)] or difflib.get_close_matches(
        name_part, names
    )


def resolve(target: str) -> str:
    """Return the target's full name: "910B3" -> "Ascend910B3". Unknown names do not change."""
    if gpu_spec(target) is not None:
        return target
    return compile_npu.chip_name(target) or target


def load_compiler(name: str) -> Any:
    """Return the module that compiles ahead of time for the backend `name`. Raises what loading the backend raises."""
    load_backend(name)
    return import_module(f"diyfa.lab.{name}.aot")


def _jobs(target: str, only: str | None, select: Mapping[str, Any] | None, every: int) -> tuple[Any, list[Any]]:
    """Return the module that compiles for `target`, and its jobs.

    Raises typer.BadParameter if `target` is unknown or takes no `select`.
    """
    name = backend_for(target)
    if select is not None and name != "npu":
        raise typer.BadParameter("--kernel, --dtype, --head-dim, --mode and --tile are for Ascend chips; use --only")
    compiler = load_compiler(name)
    selected = {} if select is None else {"select": select}
    return compiler, list(compiler.jobs_for(target, only, every, **selected))


def list_cases(
    target: str, only: str | None, json: bool, select: Mapping[str, Any] | None = None, every: int = 1
) -> int:
    """Print the kernels and cases that `run` would compile. Return the exit status, 2 if there are none."""
    target = resolve(target)
    _, jobs = _jobs(target, only, select, every)
    if json:
        print_json({"target": target, "cases": [{"kernel": job.kernel, "case": job.case} for job in jobs]})
    else:
        for job in jobs:
            out.print(f"{job.kernel} {job.case}", markup=False, highlight=False, soft_wrap=True)
    return 0 if jobs else 2


def _spills(report: CompileReport) -> str:
    """Return the bytes of spills, and after "/" the allowed bytes if the gate has a budget."""
    if report.spill_bytes is None:
        return ""
    return str(report.spill_bytes) + ("" if report.spill_budget is None else f"/{report.spill_budget}")


def _table(target: str, reports: list[CompileReport]) -> Table:
    memories = list(dict.fromkeys(name for r in reports for name in r.memory))
    rows = [
        [
            escape(f"{r.kernel} {r.case}"),
            "" if r.registers is None else str(r.registers),
            _spills(r),
            *(figure(r.memory[name] / 1024) if name in r.memory else "" for name in memories),
            f"{r.seconds:.1f}",
            "ok" if r.ok else "FAILED",
        ]
        for r in reports
    ]
    headings = ["kernel and case", "regs", "spills/ allowed", *(f"{name} KiB" for name in memories), "s", "result"]
    styles = [None if r.ok else "bold red" for r in reports]
    return table(f"{target}: {len(reports)} compilations; spills in bytes", headings, rows, styles)


def run(target: str, only: str | None, json: bool, select: Mapping[str, Any] | None = None, every: int = 1) -> int:
    """Compile and print. Return the exit status: 0 if every report is ok, 1 if one is not, 2 if there is none.

    With `select` (Ascend chips only), compile the cases it describes instead of the shipped ones. `every`: compile one
    in so many cases of a kernel.
    """
    target = resolve(target)
    reports: list[CompileReport] = []
    compiler, jobs = _jobs(target, only, select, every)
    with progress_bar(not json) as progress:
        cases = {(job.kernel, job.case) for job in jobs}
        task = progress.add_task(f"compiling for {target}", total=len(cases), note="")
        for report in compiler.compile_jobs(jobs, target):
            reports.append(report)
            done = len({(each.kernel, each.case) for each in reports})  # several compilers may compile one case
            n_failed = sum(not each.ok for each in reports)
            note = f"{report.kernel} {report.case}" + (f", {n_failed} failed" if n_failed else "")
            progress.update(task, completed=done, note=note)
    failed = [r for r in reports if not r.ok]
    if json:
        print_json({"target": target, "ok": not failed and bool(reports), "reports": [asdict(r) for r in reports]})
    elif reports:
        on_npu = reports[0].backend == "npu"
        out.print(compile_npu.shown(target, reports, out) if on_npu else _table(target, reports))
        for r in failed:
            by = f" ({r.compiler})" if r.compiler else ""
            out.print(f"FAILED {r.kernel} {r.case}{by}: {'; '.join(r.notes)}", markup=False, highlight=False)
        out.print(f"{len(reports) - len(failed)} passed, {len(failed)} failed", highlight=False)
    if not reports:
        err.print(f"Nothing was compiled: no kernel or case matches {only!r}." if only else "Nothing was compiled.")
        return 2
    return 1 if failed else 0
