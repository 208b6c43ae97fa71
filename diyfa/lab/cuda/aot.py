"""Ahead-of-time compilation of every CUDA kernel, for any architecture, on a machine without a GPU.

`specs.py` and `matmul_specs.py` list what is compiled as `compile_specs(arch) -> Iterator[CompileSpec]`. `compile_all`
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diyfa.arch import GPUSpec, gpu_spec
from diyfa.backends.cuda.gluon.inline_ptx import post_processing
from diyfa.backends.cuda.runtime.jit import triton_source
from diyfa.backends.cuda.runtime.launch import COMPILE_OPTIONS
from diyfa.backends.cuda.runtime.launcher import Source, kernel_source, launch_signature
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
    """One kernel with the types and constants of one case, as the launcher would launch it.

    `signature` gives the type of each argument that is not a constexpr, in Triton's notation: "*fp16", "i32", "fp32",
    "tensordesc<fp16[128,64]>" for a host-side tensor descriptor with that block. `aligned` names the pointers and
    integers divisible by 16. `spill_budget` is in bytes; a comment beside each budget gives its reason.
    """

    kernel: str  # "matmul/tma"
    case: str  # "float16 128x256x64"
    fn: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    spill_budget: int = 0
    clean_loops: bool = False  # loops with wgmma products may not spill at all


def launch_spec(
    launch: Launch, kernel: str, case: str, spill_budget: int = 0, clean_loops: bool = False
) -> CompileSpec:
    """Return the spec of the kernel that `launch` runs."""
    source = kernel_source(launch, launch_signature(launch))
    options = dict(launch.options)
    warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 1)
    return CompileSpec(
        kernel, case, launch.kernel, source.types, source.constants, warps, stages, options, source.aligned,
        spill_budget, clean_loops,
    )  # fmt: skip


SpecSource = Callable[[str], Iterator[CompileSpec]]


def target(arch: str) -> GPUTarget:
    """Return Triton's target for `arch` ("sm_90"). Raises ValueError for an architecture that diyfa does not know."""
    if gpu_spec(arch) is None:
        raise ValueError(f"unknown CUDA architecture {arch!r}; known are: {', '.join(ARCHS)}")
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _source(spec: CompileSpec) -> Any:
    if not isinstance(spec.fn, JITFunction):
        raise RuntimeError(
            f"{spec.kernel} is a {type(spec.fn).__name__}, not a JITFunction, and cannot be compiled: "
            "Triton was imported with TRITON_INTERPRET=1; unset it"
        )
    names = spec.fn.arg_names
    known_names = spec.signature.keys() | spec.constexprs.keys()
    if wrong := known_names ^ set(names):
        raise ValueError(f"{spec.kernel}: arguments missing from the spec or unknown to the kernel: {sorted(wrong)}")
    if unknown := spec.aligned - spec.signature.keys():
        raise ValueError(f"{spec.kernel}: aligned names what is not in the signature: {sorted(unknown)}")
    return triton_source(spec.fn, Source(spec.signature, spec.constexprs, spec.aligned))


def compile_spec(arch: str, spec: CompileSpec) -> CompileReport:
    """Compile one spec and judge the result. A kernel that does not compile gives a report that is not ok.

    No other thread may print meanwhile, because ptxas's log comes through `sys.stdout`.
    """
    limits = gpu_spec(arch)
    if limits is None:
        raise ValueError(f"unknown architecture {arch!r}")
    gpu, source = target(arch), _source(spec)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **COMPILE_OPTIONS, **spec.options}
    log = io.StringIO()
    start = time.perf_counter()
    # Always compile: a binary from Triton's cache comes without ptxas's log.
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log), post_processing():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        try:
            compiled = triton.compile(source, target=gpu, options=options)
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


def matches(spec: CompileSpec, only: str | None) -> bool:
    """Return whether `only` is a substring of the spec's "kernel case"."""
    return only is None or only in f"{spec.kernel} {spec.case}"


def specs_for(
    arch: str, spec_sources: Sequence[SpecSource] | None = None, only: str | None = None, every: int = 1
) -> list[CompileSpec]:
    """Return the specs that `compile_all` compiles with these arguments. The errors are those of `compile_all`."""
    target(arch)
    if spec_sources is None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError("nothing is compiled with TRITON_INTERPRET=1; unset it")
        modules = [importlib.import_module(f"diyfa.lab.cuda.{name}") for name in SPEC_MODULES]
        spec_sources = [module.compile_specs for module in modules]
    specs = [spec for source in spec_sources for spec in source(arch)]
    return list(sample_jobs(every, [spec for spec in specs if matches(spec, only)], arch))


def compile_all(
    arch: str, spec_sources: Sequence[SpecSource] | None = None, only: str | None = None, every: int = 1
) -> Iterator[CompileReport]:
    """Compile for `arch` all specs that `spec_sources` list, in their order. Default: the sources of this package.

    Args:
        arch: such as "sm_90".
        spec_sources: functions `compile_specs(arch)`.
        only: compile only specs whose "kernel case" contains this.
        every: compile one in so many cases of a kernel.

    Raises:
        ValueError: unknown architecture, a spec that does not fit its kernel, or Triton's interpreter is on.
        RuntimeError: a kernel of `spec_sources` was made by Triton's interpreter.
    """
    yield from (compile_spec(arch, spec) for spec in specs_for(arch, spec_sources, only, every))


def compile_kernels(target: str, only: str | None = None, every: int = 1) -> Iterator[CompileReport]:
    """Compile every kernel of this package for `target`; see `compile_all`."""
    return compile_all(target, only=only, every=every)


def cases(target: str, only: str | None = None, every: int = 1) -> list[tuple[str, str]]:
    """Return (kernel, case) of all that `compile_kernels` compiles."""
    return [(spec.kernel, spec.case) for spec in specs_for(target, only=only, every=every)]
