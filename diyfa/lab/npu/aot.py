"""Compile the NPU kernels ahead of time, without a device and without CANN, and report on the results.

Two real compilers do this, both from PyPI: triton-ascend's front half (Triton IR to linalg) and AscendNPU IR's
`bishengir-compile` (linalg to HIVM for a named chip: memory planning, the split over cube and vector cores,
synchronisation). The second stops where CANN's `hivmc` would write machine code; here that is the expected end. If the
last intermediate form exists, the kernel is legal and its tiles fit. hivm.py reads the rest from it, and metrics.py
makes the numbers of a report. specs.py lists the jobs.

On a device CANN's own `bishengir-compile` compiles, mostly an older release. DIYFA_ASCENDNPU_IR names folders with
other releases, made by `pip install --no-deps --target FOLDER ascendnpu-ir==1.1.0`. Every kernel and tile must pass the
gate with each of them, except 1.0.0, which refuses most tiles of the table. Conservative tiles replace refused ones, so
they must compile with the oldest known release.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from diyfa.arch import NPUArch, npu_spec
from diyfa.backends.npu.runtime.compiler import first_error
from diyfa.backends.npu.tables import configs
from diyfa.lab.compile_report import CompileReport, sample_jobs
from diyfa.lab.npu import gate, hivm, l0
from diyfa.lab.npu.metrics import limits, metrics
from diyfa.lab.npu.selection import selected_jobs
from diyfa.lab.npu.specs import Job, conservative_jobs, shipped_jobs
from diyfa.npu_stacks import TRITON_ASCEND, installed_version, triton_problem
from diyfa.problem import ToolMissing

JOBS = os.cpu_count() or 2  # back-half processes at a time
TIMEOUT_S = 300

# The option of a job that stands for TRITON_ALL_BLOCKS_PARALLEL=1. triton-ascend then starts at most as many blocks as
# the chip has cores, and the compiled kernel loops over the blocks of the grid.
ALL_BLOCKS_PARALLEL = "all_blocks_parallel"
# triton-ascend's option name -> flag of bishengir-compile, as triton-ascend itself passes them.
_FLAGS = {
    ALL_BLOCKS_PARALLEL: "--enable-auto-blockify-loop",
    "multibuffer": "--enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "--enable-auto-bind-sub-block",
    "limit_auto_multi_buffer_only_for_local_buffer": "--limit-auto-multi-buffer-only-for-local-buffer",
    "set_workspace_multibuffer": "--set-workspace-multibuffer",
    "tile_mix_vector_loop": "--tile-mix-vector-loop",
    "tile_mix_cube_loop": "--tile-mix-cube-loop",
}


class CompilerMissing(ToolMissing):
    """One of the two compilers is not installed or not usable."""


@dataclass(frozen=True)
class Compiled:
    """The back half's result for one kernel."""

    error: str = ""
    mixed: bool = False  # uses cube and vector cores
    bound: bool = False
    pipelined: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    module: hivm.Module | None = None


@dataclass(frozen=True)
class BackHalf:
    """One release of the back half. `folder`: its package `ascendnpuir`."""

    version: str
    folder: Path

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(digits) for digits in self.version.split(".")[:2])

    @property
    def shows(self) -> bool:
        """Return whether it prints the last intermediate form. 1.0.0 only shows whether it accepts a kernel."""
        return self.number >= (1, 1)

    def program(self, target: str) -> Path:
        """Return the compiler for the chip `target`. Raises CompilerMissing if this release has none."""
        name = "bishengir-compile-a5" if configs.family(target) is NPUArch.A5 else "bishengir-compile"
        program = self.folder / "bin" / name
        if not program.is_file():
            raise CompilerMissing(f"ascendnpu-ir {self.version} holds no {name}: expected {program}")
        return program


def back_half() -> BackHalf:
    """Return the installed release, whose numbers reports use. Raises CompilerMissing with the package to install."""
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise CompilerMissing("the Ascend compiler's back half is missing: pip install ascendnpu-ir==1.2.0")
    return BackHalf(metadata.version("ascendnpu-ir"), Path(spec.origin).parent)


def back_halves(target: str) -> tuple[BackHalf, ...]:
    """Return the releases that compile every shipped kernel for `target`.

    These are the installed one, then those of DIYFA_ASCENDNPU_IR (folders separated as in PATH) that print the last
    intermediate form. For the 950 it is the installed one alone: 1.1.0's compiler for that chip fails one of its own
    assertions on every attention kernel.
    """
    releases = [compiler for compiler in _known_releases() if compiler.shows]
    return tuple(releases[:1] if configs.family(target) is NPUArch.A5 else releases)


def oldest_back_half(target: str) -> BackHalf:
    """Return the release that compiles conservative tiles for `target`."""
    releases = back_halves(target) if configs.family(target) is NPUArch.A5 else _known_releases()
    return min(releases, key=lambda compiler: compiler.number)


def _known_releases() -> list[BackHalf]:
    """Return the installed release, then those of DIYFA_ASCENDNPU_IR."""
    releases = [back_half()]
    for folder in filter(None, os.environ.get("DIYFA_ASCENDNPU_IR", "").split(os.pathsep)):
        named = [d.version for d in metadata.distributions(path=[folder]) if d.name == "ascendnpu-ir"]
        if not named:
            raise CompilerMissing(
                f"DIYFA_ASCENDNPU_IR names {folder}, which holds no ascendnpu-ir: make it with pip install --no-deps "
                f"--target {folder} ascendnpu-ir==1.1.0"
            )
        releases.append(BackHalf(named[0], Path(folder, "ascendnpuir").absolute()))
    return releases


def check_front_half() -> None:
    """Raise CompilerMissing unless `triton` is triton-ascend, and compiles instead of interpreting."""
    if installed_version("triton-ascend") is None:
        raise CompilerMissing(
            f"the Ascend compiler's front half is missing: pip install triton-ascend=={TRITON_ASCEND}, in an "
            "environment without mainline Triton (both install a package named triton)"
        )
    if problem := triton_problem():
        raise CompilerMissing(f"the Ascend compiler's front half does not run: {problem}")
    from diyfa.backends.npu.runtime.compat import INTERPRETED

    if INTERPRETED:
        raise CompilerMissing("TRITON_INTERPRET=1 turns every kernel into Python: unset it to compile")


def versions(target: str) -> str:
    """Return the versions of both compilers, for tables."""
    releases = " and ".join(compiler.version for compiler in back_halves(target))
    return f"triton-ascend {metadata.version('triton-ascend')}, ascendnpu-ir {releases}"


def to_linalg(job: Job, target: str) -> tuple[str, bool]:
    """Run the front half. Returns (linalg module, whether it uses both kinds of core). Raises as triton-ascend does."""
    import triton.backends.ascend.compiler as ascend
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = ascend.AscendBackend(GPUTarget("npu", target, 0))
    options = backend.parse_options(dict(job.options))
    signature = {name: "constexpr" if name in job.constants else job.signature[name] for name in job.function.arg_names}
    source = ASTSource(job.function, signature, job.constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    details = {"hash": "aot", "target": backend.target, **options.__dict__}
    module = ascend.make_ttir(module, details, options)
    linalg = ascend.ttir_to_linalg(module, details, options, named_ops=True)
    linalg, details = ascend._parse_linalg_metadata(linalg, details)
    return linalg, details["mix_mode"] == "mix"


def _first_error(log: str, code: int) -> str:
    error = first_error(log)
    return error if " overflow: needs " in error else f"exit {code}: {error}"


def run_back_half(
    linalg: str, mixed: bool, target: str, options: dict[str, Any], compiler: BackHalf | None = None
) -> Compiled:
    """Run the back half for `target` and read its result. `compiler`: the installed one by default."""
    text, error, notes = lower(linalg, target, options, compiler)
    if compiler is not None and not compiler.shows:
        return Compiled(error=error)
    if text is None:
        return Compiled(error=error, mixed=mixed, notes=notes)
    try:
        module = hivm.read(text)
    except ValueError as unread:  # the gate does not need the module
        module = None
        notes = (*notes, f"not read: {unread}")
    bound, depth = hivm.is_bound(text), hivm.pipeline_depth(text)
    return Compiled("", mixed, bound, depth, hivm.peak_memory(text), notes, module)


def compiled_hivm(job: Job, target: str) -> str:
    """Return the last intermediate form of one kernel, for people. Raises RuntimeError if it does not compile."""
    check_front_half()
    linalg, _ = to_linalg(job, target)
    text, error, _ = lower(linalg, target, job.options)
    if text is None:
        raise RuntimeError(error)
    return text


# The last pass before `hivmc`; the 950's compiler has another one. With --save-temps, 1.1.0 would crash, so its form is
# printed after this pass.
_LAST_PASS = "convert-hivm-to-std"
_DUMP = re.compile(rf"^// -----// IR Dump After \w+ \({_LAST_PASS}\)[^\n]*\n(.*?^}}$)", re.MULTILINE | re.DOTALL)


def lower(
    linalg: str, target: str, options: dict[str, Any], compiler: BackHalf | None = None
) -> tuple[str | None, str, tuple[str, ...]]:
    """Run the back half. Returns (last intermediate form or None, error, the compiler's notes).

    A release that does not print the form gives no error if the kernel compiled as far as `hivmc`."""
    compiler = compiler or back_half()
    program = compiler.program(target)
    flags = [f"{_FLAGS[name]}={value}" for name, value in options.items() if name in _FLAGS]
    with tempfile.TemporaryDirectory(prefix="diyfa-aot-") as folder:
        source = Path(folder, "kernel.ttadapter.mlir")
        source.write_text(linalg)
        saved = Path(folder, "module.hivm.opt.mlir")
        printing = [f"--mlir-print-ir-after={_LAST_PASS}", "--mlir-print-ir-module-scope", "--mlir-disable-threading"]
        if configs.family(target) is NPUArch.A5:
            printing = [f"--save-temps={folder}"]
        command = [
            str(program),
            str(source),
            f"--target={target}",
            *flags,
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            *(printing if compiler.shows else []),
            "-o",
            str(Path(folder, "kernel")),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None, f"the compiler did not end within {TIMEOUT_S} s", ()
        text = saved.read_text() if saved.is_file() else None
    log = done.stdout + done.stderr
    if dumped := _DUMP.search(log):
        text, log = dumped[1], log[: dumped.start()] + log[dumped.end() :]
    if not compiler.shows and done.returncode == 0 and "Failed to run BiShengIR pipeline" not in log:
        return None, "", ()
    notes = tuple(dict.fromkeys(line.split("[NOTE]")[1].strip()[:160] for line in log.splitlines() if "[NOTE]" in line))
    return text, _first_error(log, done.returncode) if text is None else "", notes


def _report(job: Job, target: str, compiler: BackHalf, compiled: Compiled, seconds: float) -> CompileReport:
    failures = []
    notes = list(compiled.notes)
    if compiled.error:
        failures.append(compiled.error)
    elif compiled.mixed:
        notes.insert(0, f"{'bound' if compiled.bound else 'unbound'}, pipeline {compiled.pipelined}")
        if job.gated:
            multibuffer = job.options.get("multibuffer", True)
            failures += gate.failures(
                target, job.kernel, job.case, compiled.bound, compiled.pipelined, compiler.version, multibuffer
            )
    memory = dict(compiled.memory)
    if compiled.module:
        try:
            memory |= l0.use(compiled.module, target)
        except ValueError as unfit:
            failures.append(str(unfit))
    return CompileReport(
        backend="npu",
        target=target,
        kernel=job.kernel,
        case=job.case,
        ok=not failures,
        seconds=round(seconds, 2),
        memory=memory,
        notes=(*failures, *notes),
        limits=limits(target),
        metrics=metrics(compiled.module, target, job.problem, job.step, job.tile) if compiled.module else {},
        compiler=f"ascendnpu-ir {compiler.version}",
    )


def compile_jobs(
    jobs: Iterable[Job], target: str, compilers: Sequence[BackHalf] | None = None
) -> Iterator[CompileReport]:
    """Yield reports in the order of `jobs`: of each job with every release of `compilers`, if `newest_only` the first.

    `compilers`: by default `back_halves`, the installed one first. The front half runs in this thread, once per job,
    and up to JOBS back halves beside it. Each release compiles a module once, even if several jobs share it.
    """
    check_front_half()
    compilers = back_halves(target) if compilers is None else compilers
    for compiler in compilers:
        compiler.program(target)
    in_progress: dict[tuple[str, BackHalf], Future[tuple[Compiled, float]]] = {}

    def timed(linalg: str, mixed: bool, options: dict[str, Any], compiler: BackHalf) -> tuple[Compiled, float]:
        started = time.perf_counter()
        return run_back_half(linalg, mixed, target, options, compiler), time.perf_counter() - started

    def report(job: Job, compiler: BackHalf, before: float, compiled: Compiled | str) -> CompileReport:
        if isinstance(compiled, str):
            done, seconds = in_progress[compiled, compiler].result()
            return _report(job, target, compiler, done, before + seconds)
        return _report(job, target, compiler, compiled, before)

    with ThreadPoolExecutor(JOBS) as pool:
        pending: list[tuple[Job, BackHalf, float, Compiled | str]] = []
        for job in jobs:
            started = time.perf_counter()
            chosen = compilers[:1] if job.newest_only else compilers
            compiled: Compiled | str  # a failure, or the key of a compilation in `in_progress`
            try:
                linalg, mixed = to_linalg(job, target)
            except subprocess.CalledProcessError as error:
                text = (error.stderr or b"").decode(errors="replace")
                compiled = Compiled(error="front half: " + _first_error(text, error.returncode))
            except Exception as error:  # front ends have no common base class for their errors
                compiled = Compiled(error=f"front half: {type(error).__name__}: {' '.join(str(error).split())[-400:]}")
            else:
                module = f"{linalg}{sorted(job.options.items())}"
                compiled = hashlib.sha256(module.encode()).hexdigest()
                for compiler in chosen:
                    if (compiled, compiler) not in in_progress:
                        in_progress[compiled, compiler] = pool.submit(timed, linalg, mixed, job.options, compiler)
            pending += [(job, compiler, time.perf_counter() - started, compiled) for compiler in chosen]
            while len(pending) > 2 * JOBS:
                yield report(*pending.pop(0))
        for waiting in pending:
            yield report(*waiting)


def jobs_for(
    target: str, only: str | None = None, every: int = 1, select: Mapping[str, Any] | None = None, full: bool = False
) -> Iterator[Job]:
    """Yield the jobs of every shipped kernel and tile for the chip `target`.

    `only` keeps jobs whose "kernel case" contains it. `every` keeps one in so many cases of a kernel. `select` names
    other kernels instead (see selection.py). `full`: as for `shipped_jobs`. Raises ValueError for an unknown chip or an
    invalid selection.
    """
    if npu_spec(target) is None:
        raise ValueError(f"unknown Ascend chip {target!r}: expected a name such as 'Ascend910B3' or 'Ascend950PR_9589'")
    source = shipped_jobs(target, full) if select is None else selected_jobs(target, select)
    return sample_jobs(every, source, target, only)


def gate_jobs(target: str, every: int) -> Iterator[Job]:
    """Yield fewer of the shipped jobs, for changes of neither kernels nor tiles.

    Of the attention jobs for the newest release alone these are each tile once, and one in `every`. Older releases get
    the first case of each kernel and one in `every`.
    """
    jobs = list(jobs_for(target))
    older = {id(job) for job in sample_jobs(every, (job for job in jobs if not job.newest_only), target)}
    sample = {id(job) for job in sample_jobs(every, jobs, target)}
    tiles = set()
    for job in jobs:
        words = job.case.split()
        tile = (job.kernel, *words[:2], words[-1])
        if not job.newest_only or id(job) in sample or tile not in tiles or job.kernel.startswith("kvcache"):
            yield replace(job, newest_only=id(job) not in older)
        tiles.add(tile)


def compile_conservative(target: str, only: str | None = None, every: int = 1) -> Iterator[CompileReport]:
    """Compile conservative tiles for `target` with the oldest release. `only`, `every`: as in `jobs_for`."""
    jobs = sample_jobs(every, conservative_jobs(target), target, only)
    yield from compile_jobs(jobs, target, [oldest_back_half(target)])


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object for each kernel; the status is 1 when one fails the gate."""
    parser = argparse.ArgumentParser(prog="python -m diyfa.lab.npu.aot", description=main.__doc__)
    parser.add_argument("target", help="chip, such as Ascend910B3 or Ascend950PR_9589")
    parser.add_argument("--only", help='keep kernels whose "kernel case" contains this')
    parser.add_argument("--every", type=int, default=1, help="of each kernel one in so many cases")
    parser.add_argument("--full", action="store_true", help="every feature in every dtype and head-dim class")
    parser.add_argument("--conservative", action="store_true", help="the conservative tiles, with the oldest release")
    parser.add_argument("--every-tile", action="store_true", help="`--every` keeps every tile: see gate_jobs")
    options = parser.parse_args(arguments)
    failed = False
    if options.conservative:
        reports = compile_conservative(options.target, options.only, options.every)
    elif options.every_tile:
        reports = compile_jobs(gate_jobs(options.target, options.every), options.target)
    else:
        jobs = jobs_for(options.target, options.only, options.every, full=options.full)
        reports = compile_jobs(jobs, options.target)
    for report in reports:
        failed |= not report.ok
        print(json.dumps(asdict(report)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
