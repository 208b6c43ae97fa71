"""Ahead-of-time compilation of every CUDA kernel, for any architecture, on a machine without a GPU.

`specs.py` and `matmul_specs.py` list what is compiled as `compile_specs(arch) -> Iterator[CompileSpec]`. `compile_jobs`
turns the lists into reports with registers, spills and shared memory, read from the log of the ptxas run that made the
binary. `diyfa compile sm_90` prints them. A kernel passes the gate (`ok`) if all of this holds:

* It compiles and fits the architecture's shared memory.
* It spills no more than its spec's budget (0 unless the spec says why), and nothing in loops with products if the spec
  asks for clean loops.
* ptxas did not serialise its wgmma, if the architecture has wgmma.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triton import knobs
from triton.runtime.jit import JITFunction

from diyfa.arch import GPUSpec, gpu_spec
from diyfa.backends.cuda.runtime.jit import compile_for
from diyfa.backends.cuda.runtime.signature import launch_signature
from diyfa.lab.compile_report import CompileReport, sample_jobs
from diyfa.lab.cuda.sass import disassembled, spills_in_loops
from diyfa.problem import Launch

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Modules of this package that list what to compile.
SPEC_MODULES = ("specs", "matmul_specs")

_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
# ptxas's messages that wgmma instructions were serialised. The number (C7510 to C7517 have been seen) gives the reason:
# a call, too few registers, other instructions that define their accumulators. C7519 only says that a warpgroup.arrive
# was added.
_SERIALISED = re.compile(r"[^\n]*(?:\bC75(?!19)\d\d\b|wgmma[^\n]*serializ)[^\n]*")


@dataclass(frozen=True)
class CompileSpec:
    """The kernel of one launch, whose tensors need no memory. `launch_signature` says for which types it is compiled.

    `spill_budget` is in bytes; a comment beside each budget gives its reason.
    """

    launch: Launch
    kernel: str  # "matmul/tma"
    case: str  # "float16 128x256x64"
    spill_budget: int = 0
    clean_loops: bool = False  # loops with wgmma products may not spill at all


def _limits(arch: str) -> GPUSpec:
    limits = gpu_spec(arch)
    if limits is None:
        raise ValueError(f"unknown CUDA architecture {arch!r}; known are: {', '.join(ARCHS)}")
    return limits


def compile_spec(arch: str, spec: CompileSpec) -> CompileReport:
    """Compile one spec as a call would, and judge the result. The report of a kernel that does not compile is not ok.

    No other thread may print meanwhile, because ptxas's log comes through `sys.stdout`. Raises RuntimeError for a
    kernel of Triton's interpreter, ValueError for an unknown architecture.
    """
    limits = _limits(arch)
    if not isinstance(spec.launch.kernel, JITFunction):
        raise RuntimeError(
            f"{spec.kernel} is a {type(spec.launch.kernel).__name__}, not a JITFunction, and cannot be compiled: "
            "Triton was imported with TRITON_INTERPRET=1; unset it"
        )
    log = io.StringIO()
    start = time.perf_counter()
    # Always compile: a binary from Triton's cache comes without ptxas's log.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        try:
            compiled = compile_for(arch, spec.launch, launch_signature(spec.launch))
        except Exception as error:  # compilers may raise anything; this kernel fails the gate
            seconds = time.perf_counter() - start
            reason = f"{type(error).__name__}: {error}"[:2000]
            cause: BaseException = error
            while inner := cause.__cause__ or cause.__context__:  # one error for each function that calls the next
                cause = inner
            if cause is not error:
                reason += f"\n{type(cause).__name__}: {cause}"[:1000]
            return CompileReport("cuda", arch, spec.kernel, spec.case, False, seconds, notes=(reason,))
    seconds = time.perf_counter() - start
    loops = spills_in_loops(disassembled(compiled.asm["cubin"])) if spec.clean_loops else None
    return judge(arch, limits, spec, log.getvalue(), compiled.metadata.shared, seconds, loops)


def judge(
    arch: str,
    limits: GPUSpec,
    spec: CompileSpec,
    ptxas_log: str,
    shared: int,
    seconds: float,
    loops: list[int] | None = None,
) -> CompileReport:
    """Judge a kernel and return its report. `shared`: bytes of shared memory; `loops`: the result of `spills_in_loops`,
    or None if loops may spill."""
    registers = [int(n) for n in _REGISTERS.findall(ptxas_log)]
    spills = sum(int(stores) + int(loads) for stores, loads in _SPILL.findall(ptxas_log))
    notes = []
    if not registers:
        notes.append("ptxas reported nothing, so the gate cannot judge this kernel")
    if spills > spec.spill_budget:
        notes.append(f"spills {spills} bytes, {spec.spill_budget} allowed")
    if loops is not None and (not loops or any(loops)):
        notes.append(f"spilling instructions in each loop with products: {loops}")
    if shared > limits.shared_per_block:
        notes.append(f"needs {shared} bytes of shared memory, {arch} has {limits.shared_per_block}")
    if limits.has_wgmma:
        notes += _SERIALISED.findall(ptxas_log)
    return CompileReport(
        "cuda",
        arch,
        spec.kernel,
        spec.case,
        not notes,
        seconds,
        max(registers, default=None),
        spills,
        {"shared": shared},
        tuple(notes),
        spill_budget=spec.spill_budget,
    )


def jobs_for(target: str, only: str | None = None, every: int = 1) -> list[CompileSpec]:
    """Return the specs of this package for `target`.

    Args:
        target: architecture, such as "sm_90".
        only: return only specs whose "kernel case" contains this.
        every: return one in so many cases of a kernel.

    Raises:
        ValueError: unknown architecture, or Triton's interpreter is on.
    """
    _limits(target)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("nothing is compiled with TRITON_INTERPRET=1; unset it")
    modules = [importlib.import_module(f"diyfa.lab.cuda.{name}") for name in SPEC_MODULES]
    specs = [spec for module in modules for spec in module.compile_specs(target)]
    return list(sample_jobs(every, specs, target, only))


def compile_jobs(specs: Iterable[CompileSpec], target: str) -> Iterator[CompileReport]:
    """Yield the report of each spec. Raises what `compile_spec` raises."""
    yield from (compile_spec(target, spec) for spec in specs)
