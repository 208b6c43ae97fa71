"""Compile the NPU kernels ahead of time, without a device and without CANN, and read from the result what matters.

Two real compilers, both from PyPI: triton-ascend's front half (Triton IR to linalg) and AscendNPU IR's
`bishengir-compile` (linalg to HIVM for a named chip: memory planning, the split over cube and vector cores,
synchronisation). It stops where CANN's `hivmc` would write machine code, which is the expected end here. That the last
intermediate form exists shows that the kernel is legal and its tiles fit; hivm.py reads the rest from it, and
metrics.py makes the numbers of a report.

On a device it is CANN's own `bishengir-compile` that compiles, mostly an older one. DIYFA_ASCENDNPU_IR names folders
with other releases, as `pip install --no-deps --target FOLDER ascendnpu-ir==1.1.0` makes them; every kernel must pass
the gate with each of them too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from diyfa.arch import ELEMENT_BYTES, NPUArch, npu_spec
from diyfa.backends.npu.compiler import gate, hivm, l0
from diyfa.backends.npu.compiler.metrics import limits, metrics
from diyfa.backends.npu.tables import configs, configs_v1
from diyfa.problem import VARLEN, AttentionProblem, CompileReport, MatmulProblem, ToolMissing

JOBS = os.cpu_count() or 2  # back-half processes at a time
TIMEOUT_S = 300

# triton-ascend's option name -> flag of bishengir-compile, as triton-ascend itself passes them.
_FLAGS = {
    "multibuffer": "--enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "--enable-auto-bind-sub-block",
    "limit_auto_multi_buffer_only_for_local_buffer": "--limit-auto-multi-buffer-only-for-local-buffer",
    "set_workspace_multibuffer": "--set-workspace-multibuffer",
    "tile_mix_vector_loop": "--tile-mix-vector-loop",
    "tile_mix_cube_loop": "--tile-mix-cube-loop",
}
_TRITON_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class CompilerMissing(ToolMissing):
    """One of the two compilers is not installed, or cannot be used as things are."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile: its jit function, the argument types and constants, and the compiler's options."""

    kernel: str
    case: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    problem: AttentionProblem | None = None  # what the tile was chosen for, where it is attention
    step: str = ""  # "fwd", "dq", "dkdv", "dbias": the kernel by its name in the tile table
    tile: configs.AttentionTile | None = None
    gated: bool = True  # shipped: must be bound and pipelined, or among the gate's exceptions


@dataclass(frozen=True)
class Compiled:
    """What the back half said about one kernel."""

    error: str = ""
    mixed: bool = False  # uses cube and vector cores
    bound: bool = False
    pipelined: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    module: hivm.Module | None = None


@dataclass(frozen=True)
class BackHalf:
    """One release of the back half: `folder` is that of its package `ascendnpuir`."""

    version: str
    folder: Path

    def program(self, target: str) -> Path:
        """The compiler for the chip `target`. Raises CompilerMissing where this release has none."""
        name = "bishengir-compile-a5" if configs.family(target) is NPUArch.A5 else "bishengir-compile"
        program = self.folder / "bin" / name
        if not program.is_file():
            raise CompilerMissing(f"ascendnpu-ir {self.version} holds no {name}: expected {program}")
        return program


def back_half() -> BackHalf:
    """The installed release, from which the numbers of reports are. Raises CompilerMissing saying what to install."""
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise CompilerMissing("the Ascend compiler's back half is missing: pip install ascendnpu-ir==1.2.0")
    return BackHalf(metadata.version("ascendnpu-ir"), Path(spec.origin).parent)


def back_halves(target: str) -> tuple[BackHalf, ...]:
    """The releases that `target` is compiled with: the installed one, then those of DIYFA_ASCENDNPU_IR (folders with a
    separator between them, as in PATH).

    For the 950 the installed one alone: in 1.1.0 that compiler fails an assertion of its own on every attention kernel.
    """
    found = [back_half()]
    for folder in filter(None, os.environ.get("DIYFA_ASCENDNPU_IR", "").split(os.pathsep)):
        named = [d.version for d in metadata.distributions(path=[folder]) if d.name == "ascendnpu-ir"]
        if not named:
            raise CompilerMissing(
                f"DIYFA_ASCENDNPU_IR names {folder}, which holds no ascendnpu-ir: make it with pip install --no-deps "
                f"--target {folder} ascendnpu-ir==1.1.0"
            )
        found.append(BackHalf(named[0], Path(folder, "ascendnpuir").absolute()))
    return tuple(found[:1] if configs.family(target) is NPUArch.A5 else found)


def check_front_half() -> None:
    """Raises CompilerMissing unless `triton` is triton-ascend and compiles rather than interprets."""
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        raise CompilerMissing(
            "the Ascend compiler's front half is missing: pip install triton-ascend==3.2.0, in an environment without "
            "mainline Triton (both install a package named triton)"
        ) from None
    from diyfa.backends.npu.runtime.compat import INTERPRETED

    if INTERPRETED:
        raise CompilerMissing("TRITON_INTERPRET=1 turns every kernel into Python: unset it to compile")


def versions(target: str) -> str:
    """Versions of both compilers, for tables."""
    releases = " and ".join(compiler.version for compiler in back_halves(target))
    return f"triton-ascend {metadata.version('triton-ascend')}, ascendnpu-ir {releases}"


def to_linalg(job: Job, target: str) -> tuple[str, bool]:
    """Front half: (linalg module, whether it uses cube and vector cores). Raises what triton-ascend raises."""
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
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits", log)
    if overflow:
        memory, needed, there = overflow[1], int(overflow[2]) // 8192, int(overflow[3]) // 8192
        return f"{memory} overflow: needs {needed} KiB of {there}"
    lines = [line for line in log.splitlines() if "error" in line.lower() and "Failed to run" not in line]
    line = lines[0] if lines else (log.strip().splitlines() or ["no output"])[-1]
    return f"exit {code}: {' '.join(line.split())[:300]}"


def run_back_half(
    linalg: str, mixed: bool, target: str, options: dict[str, Any], compiler: BackHalf | None = None
) -> Compiled:
    """Back half: plan memory and cores for `target` and read the result. `compiler`: the installed one by default."""
    text, error, notes = lower(linalg, target, options, compiler)
    if text is None:
        return Compiled(error=error, mixed=mixed, notes=notes)
    try:
        module = hivm.read(text)
    except ValueError as unread:  # what the gate looks at does not depend on it
        module = None
        notes = (*notes, f"not read: {unread}")
    return Compiled(
        mixed=mixed,
        bound=hivm.is_bound(text),
        pipelined=hivm.pipeline_depth(text),
        memory=hivm.peak_memory(text),
        notes=notes,
        module=module,
    )


def hivm_of(job: Job, target: str) -> str:
    """The last intermediate form of one kernel, to be read. Raises RuntimeError when it does not compile."""
    check_front_half()
    linalg, _ = to_linalg(job, target)
    text, error, _ = lower(linalg, target, job.options)
    if text is None:
        raise RuntimeError(error)
    return text


# The last pass before `hivmc`; the 950's compiler has another one. 1.1.0 crashes when it is asked for this form with
# --save-temps.
_LAST_PASS = "convert-hivm-to-std"
_DUMP = re.compile(rf"^// -----// IR Dump After \w+ \({_LAST_PASS}\)[^\n]*\n(.*?^}}$)", re.MULTILINE | re.DOTALL)


def lower(
    linalg: str, target: str, options: dict[str, Any], compiler: BackHalf | None = None
) -> tuple[str | None, str, tuple[str, ...]]:
    """Run the back half -> (last intermediate form or None, error, the compiler's notes)."""
    program = (compiler or back_half()).program(target)
    flags = [f"{_FLAGS[name]}={value}" for name, value in options.items() if name in _FLAGS]
    with tempfile.TemporaryDirectory(prefix="diyfa-aot-") as folder:
        source = Path(folder, "kernel.ttadapter.mlir")
        source.write_text(linalg)
        saved = Path(folder, "module.hivm.opt.mlir")
        printing = [f"--mlir-print-ir-after={_LAST_PASS}", "--mlir-print-ir-module-scope", "--mlir-disable-threading"]
        command = [
            str(program),
            str(source),
            f"--target={target}",
            *flags,
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            *([f"--save-temps={folder}"] if configs.family(target) is NPUArch.A5 else printing),
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
            failures += gate.failures(
                target, job.kernel, job.case, compiled.bound, compiled.pipelined, compiler.version
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


def compile_job(job: Job, target: str) -> CompileReport:
    """Both halves for one job, with the installed release."""
    return next(compile_jobs([job], target))


def compile_jobs(jobs: Iterable[Job], target: str) -> Iterator[CompileReport]:
    """Reports in the order of `jobs`, of each one for every release of `back_halves`, the installed one first.

    The front half, the same for all, runs here, up to JOBS back halves beside it; each compiles a module once,
    however many jobs share it.
    """
    check_front_half()
    compilers = back_halves(target)
    for compiler in compilers:
        compiler.program(target)
    begun: dict[tuple[str, BackHalf], Future[tuple[Compiled, float]]] = {}

    def timed(linalg: str, mixed: bool, options: dict[str, Any], compiler: BackHalf) -> tuple[Compiled, float]:
        started = time.perf_counter()
        return run_back_half(linalg, mixed, target, options, compiler), time.perf_counter() - started

    def report(job: Job, compiler: BackHalf, before: float, compiled: Compiled | str) -> CompileReport:
        if isinstance(compiled, str):
            done, seconds = begun[compiled, compiler].result()
            return _report(job, target, compiler, done, before + seconds)
        return _report(job, target, compiler, compiled, before)

    with ThreadPoolExecutor(JOBS) as pool:
        pending: list[tuple[Job, BackHalf, float, Compiled | str]] = []
        for job in jobs:
            started = time.perf_counter()
            compiled: Compiled | str  # a failure, or the key of what is being compiled
            try:
                linalg, mixed = to_linalg(job, target)
            except subprocess.CalledProcessError as error:
                text = (error.stderr or b"").decode(errors="replace")
                compiled = Compiled(error="front half: " + _first_error(text, error.returncode))
            except Exception as error:  # what a front end raises for an illegal kernel has no common base
                compiled = Compiled(error=f"front half: {type(error).__name__}: {' '.join(str(error).split())[-400:]}")
            else:
                module = f"{linalg}{sorted(job.options.items())}"
                compiled = hashlib.sha256(module.encode()).hexdigest()
                for compiler in compilers:
                    if (compiled, compiler) not in begun:
                        begun[compiled, compiler] = pool.submit(timed, linalg, mixed, job.options, compiler)
            pending += [(job, compiler, time.perf_counter() - started, compiled) for compiler in compilers]
            while len(pending) > 2 * JOBS:
                yield report(*pending.pop(0))
        for waiting in pending:
            yield report(*waiting)


# ---- what to compile ------------------------------------------------------------------------------------------------


def example(target: str, **changes: Any) -> AttentionProblem:
    """A problem whose compiled kernel stands for all sizes: nothing is compiled for a sequence length."""
    base = AttentionProblem("npu", target, "float16", "bhsd", 2, 8, 2, 4096, 4096, 128, 128, needs_grad=True)
    problem = base.replace(**changes)
    return problem.replace(head_dim_v=problem.head_dim) if "head_dim_v" not in changes else problem


def _features(problem: AttentionProblem, bias: str) -> str:
    features = " ".join(sorted(problem.features - {"gqa"})) or "full"
    return features.replace("attn_bias", f"attn_bias[{bias}]") if problem.bias else features


def _case(problem: AttentionProblem, tile: configs.AttentionTile, bias: str = "", always_mask: bool = False) -> str:
    features = _features(problem, bias) + " always_mask" * always_mask
    return f"{problem.dtype} D={problem.head_dim} {features} {tile.block_m}x{tile.block_n}"


def _absent(problem: AttentionProblem) -> dict[str, None]:
    """The pointers that a call without these features passes as None."""
    used = {
        "seq_lens_ptr": problem.seq_lens,
        "cu_seqlens_q_ptr": problem.varlen,
        "cu_seqlens_k_ptr": problem.varlen,
        "slopes_ptr": problem.alibi,
        "bias_ptr": problem.bias != "",
        "rng_state_ptr": problem.dropout,
        "sinks_ptr": problem.sinks,
    }
    return dict.fromkeys(name for name, is_used in used.items() if not is_used)


def attention_job(
    problem: AttentionProblem,
    kernel: str,
    tile: configs.AttentionTile | None = None,
    bias: str = "qk",
    bias_dtype: str = "float32",
    always_mask: bool = configs.ALWAYS_MASK,
) -> Job:
    """The job of `kernel` for `problem`, with the table's tile unless one is given.

    `kernel`: "fwd", "dq", "dkdv" or "dbias". `always_mask`: as DIYFA_NPU_ALWAYS_MASK=1 has it.
    `bias`: which dimensions attn_bias has, where there is one (`bias.Bias.dims`); float32 needs the most memory.
    """
    from diyfa.backends.npu.attention import bwd, fwd
    from diyfa.backends.npu.runtime.compat import cut_columns, padded_head_dim

    tile = tile or configs.attention_tile(problem, kernel, always_mask)
    function = {
        "fwd": fwd._fwd_kernel,
        "dq": bwd._bwd_dq_kernel,
        "dkdv": bwd._bwd_dkdv_kernel,
        "dbias": bwd._bwd_dbias_kernel,
    }[kernel]
    flags = configs.attention_flags(problem, kernel)
    constants: dict[str, Any] = {
        **flags,
        "ALWAYS_MASK": always_mask,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BIAS": bias if problem.bias else "",
        "INTERPRET": False,
    }
    if kernel in ("dq", "dkdv"):
        constants |= cut_columns(problem.head_dim, configs.widest_product(problem.dtype))
    constants |= _absent(problem)
    signature = _signature(function, _TRITON_DTYPES[problem.dtype])
    signature |= {name: "*" + _TRITON_DTYPES[bias_dtype] for name in ("bias_ptr", "dbias_ptr") if name in signature}
    return Job(
        kernel="attention_fwd/v2" if kernel == "fwd" else f"attention_bwd/v2/{kernel}",
        case=_case(problem, tile, bias, always_mask),
        function=function,
        signature=signature,
        constants={name: value for name, value in constants.items() if name in function.arg_names},
        options=tile.compile_options(problem.arch),
        problem=problem,
        step=kernel,
        tile=tile,
    )


def v1_job(problem: AttentionProblem) -> Job:
    """The job of the "v1" forward kernel for `problem`."""
    from diyfa.backends.npu.attention import fwd_v1
    from diyfa.backends.npu.runtime.compat import padded_head_dim

    tile = configs_v1.v1_tile(problem)
    function = fwd_v1._fwd_v1_kernel
    constants: dict[str, Any] = {
        **configs_v1.v1_flags(problem),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "INTERPRET": False,
    }
    constants |= {} if problem.seq_lens else {"seq_lens_ptr": None}
    return Job(
        "attention_fwd/v1", _case(problem, tile), function,
        _signature(function, _TRITON_DTYPES[problem.dtype]), constants,
        tile.compile_options(problem.arch),
    )  # fmt: skip


def v1_finish_job(problem: AttentionProblem) -> Job:
    """The job of what follows the "v1" kernel: rounding the output, forming lse."""
    from diyfa.backends.npu.attention import fwd_v1
    from diyfa.backends.npu.runtime.compat import padded_head_dim

    function = fwd_v1._fwd_v1_finish_kernel
    return Job(
        "attention_fwd/v1/finish", f"{problem.dtype} D={problem.head_dim_v}", function,
        _signature(function, _TRITON_DTYPES[problem.dtype]),
        {
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_DV": padded_head_dim(problem.head_dim_v),
            "BLOCK_M": configs.preprocess_rows(problem),
            "INTERPRET": False,
        },
    )  # fmt: skip


def preprocess_job(problem: AttentionProblem, has_dlse: bool) -> Job:
    """The job of delta = rowsum(dout * out) - dlse."""
    from diyfa.backends.npu.attention import bwd
    from diyfa.backends.npu.runtime.compat import padded_head_dim

    function = bwd._bwd_preprocess_kernel
    constants: dict[str, Any] = {
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": configs.preprocess_rows(problem),
        "SEQ_LENS": problem.seq_lens,
        "HAS_DLSE": has_dlse,
    }
    constants |= {} if problem.seq_lens else {"seq_lens_ptr": None}
    constants |= {} if has_dlse else {"dlse_ptr": None}
    return Job(
        "attention_bwd/v2/preprocess",
        f"{problem.dtype} D={problem.head_dim_v}{' seq_lens' if problem.seq_lens else ''}{' dlse' if has_dlse else ''}",
        function,
        _signature(function, _TRITON_DTYPES[problem.dtype]),
        constants,
    )


def dbias_rows_job(dims: str, sinks: bool, has_dlse: bool, bias_dtype: str = "float32", masked: bool = False) -> Job:
    """The job of the gradient of an attn_bias that is the same for all keys: `dims` "q" or "1"; `masked`: with a window
    on both sides and seq_lens."""
    from diyfa.backends.npu.attention import bwd

    function = bwd._bwd_dbias_rows_kernel
    constants: dict[str, Any] = {
        "BLOCK_M": configs.PREPROCESS_ROWS,
        "DBIAS": dims,
        "SINKS": sinks,
        "HAS_DLSE": has_dlse,
        "HAS_LEFT": masked,
        "HAS_RIGHT": masked,
        "SEQ_LENS": masked,
        "INTERPRET": False,
    }
    constants |= {} if masked else {"seq_lens_ptr": None}
    constants |= {} if sinks else {"sinks_ptr": None}
    constants |= {} if has_dlse else {"dlse_ptr": None}
    return Job(
        "attention_bwd/v2/dbias_rows",
        f"{bias_dtype} attn_bias[{dims}]{' masked' * masked}{' sinks' * sinks}{' dlse' * has_dlse}",
        function,
        _signature(function, _TRITON_DTYPES[bias_dtype]),
        constants,
    )


def dsinks_job() -> Job:
    """The job of the gradient of the sinks."""
    from diyfa.backends.npu.attention import bwd

    function = bwd._bwd_dsinks_kernel
    return Job(
        "attention_bwd/v2/dsinks", "float32", function, _signature(function, "fp32"),
        {"BLOCK_M": configs.PREPROCESS_ROWS},
    )  # fmt: skip


def matmul_job(problem: MatmulProblem, a_transposed: bool = False, b_transposed: bool = False) -> Job:
    """The job of the matrix product for `problem`."""
    import triton.language as tl

    from diyfa.backends.npu import matmul

    tile = configs.matmul_tile(problem)
    function = matmul._matmul_kernel
    signature = _signature(function, _TRITON_DTYPES[problem.dtype])
    signature["c_ptr"] = "*" + _TRITON_DTYPES[problem.out_dtype]
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "A_TRANSPOSED": a_transposed,
        "B_TRANSPOSED": b_transposed,
        "COMPUTE": getattr(tl, problem.compute_dtype),
        "INTERPRET": False,
    }
    layout = "nt"[a_transposed] + "nt"[b_transposed]
    return Job(
        "matmul/persistent",
        f"{problem.dtype}->{problem.compute_dtype} {layout} {tile.block_m}x{tile.block_n}x{tile.block_k}",
        function, signature, constants, tile.compile_options(problem.arch),
    )  # fmt: skip


_FP32_POINTERS = {"lse_ptr", "delta_ptr", "dlse_ptr", "slopes_ptr", "sinks_ptr", "dsinks_ptr"} | {
    f"{new}{name}_ptr"
    for new in ("", "new_")
    for name in ("running", "m", "l")  # the state that "v1" keeps in memory
}
_INT32_POINTERS = {"seq_lens_ptr", "cu_seqlens_q_ptr", "cu_seqlens_k_ptr"}
_FP32_SCALARS = {
    "sm_scale", "softcap", "softcap_minus", "softcap_inverse", "softcap_rate", "keep_threshold", "keep_prob",
    "keep_scale", "grad_scale",
}  # fmt: skip


def _signature(function: Any, dtype: str) -> dict[str, str]:
    """Types of the run-time arguments by their names: pointers of the inputs' dtype unless listed, integers else."""

    def of(name: str) -> str:
        if name in _INT32_POINTERS:
            return "*i32"
        if name == "rng_state_ptr":
            return "*i64"
        if name.endswith("_ptr"):
            return "*fp32" if name in _FP32_POINTERS else f"*{dtype}"
        return "fp32" if name in _FP32_SCALARS else "i32"

    return {name: of(name) for name in function.arg_names}


# A problem of each mode of the tile table, with as much of what belongs to it as there is: that needs the most memory.
_EXTRAS = {"sinks": True, "seq_lens": True}
MODE_CASES: dict[str, dict[str, Any]] = {
    "even": {},
    "tail": {"seq_lens": True},
    "causal": {"window_right": 0},
    "biased": {"window_right": 0, "bias": "qk", **_EXTRAS},
    "featured": {"window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, **_EXTRAS},
    "crowded": {
        "window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, "bias": "qk", "dropout": True,
        **_EXTRAS,
    },
}  # fmt: skip


def mode_case(kernel: str, mode: str) -> dict[str, Any]:
    """What belongs to `mode` at its most demanding. The gradient of a bias ("dbias") is asked for with a bias only."""
    if kernel == "dbias" and mode == "featured":
        return MODE_CASES["biased"] | {"dropout": True}
    return MODE_CASES[mode]


# Each feature by itself or as it is mostly used, and head dims that do not fill a tile. "bias" names the dimensions of
# attn_bias.
FEATURE_CASES: tuple[dict[str, Any], ...] = (
    {"seqlen_k": 4000},
    {"seq_lens": True, "window_right": 0},
    {"seq_lens": True, "sinks": True},
    {"window_left": 256, "window_right": 0},
    {"window_left": 256, "window_right": 128},
    {"window_left": 256},
    {"softcap": 30.0},
    {"softcap": 30.0, "window_right": 0},
    {"alibi": True},
    {"alibi": True, "window_right": 0},
    {"sinks": True},
    {"sinks": True, "window_right": 0},
    {"layout": VARLEN},
    {"layout": VARLEN, "window_right": 0},
    {"layout": VARLEN, "window_left": 256, "window_right": 0, "softcap": 30.0, "alibi": True, "sinks": True},
    {"layout": VARLEN, "window_left": 256, "window_right": 128, "softcap": 30.0, "alibi": True, "sinks": True,
     "dropout": True},
    {"dropout": True},
    {"dropout": True, "window_right": 0},
    {"dropout": True, "layout": VARLEN, "window_right": 0},
    {"bias": "qk"},
    {"bias": "k"},
    {"bias": "q", "window_right": 0},
    {"bias": "1"},
    {"bias": "qk", "dropout": True},
    {"bias": "k", "dropout": True, "seq_lens": True},
    {"bias": "q", "dropout": True},
)  # fmt: skip
HEAD_DIM_CASES: tuple[dict[str, Any], ...] = (
    {"head_dim": 1},
    {"head_dim": 16},
    {"head_dim": 40, "window_right": 0},
    {"head_dim": 80},
    {"head_dim": 96, "window_right": 0},
    {"head_dim": 160, "seq_lens": True},
    {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
    {"head_dim": 250, "window_right": 0},
    {"head_dim": 320, "layout": VARLEN},
    {"head_dim": 64, "head_dim_v": 512},
    {"head_dim": 512, "window_right": 0},
    {"head_dim": 576, "head_dim_v": 64},
)


def attention_jobs(target: str, changes: dict[str, Any], kernels: tuple[str, ...] = ()) -> Iterator[Job]:
    """The jobs of one call: `changes` as for `example`, with the dimensions of a bias in "bias". By default of every
    kernel."""
    dims = changes.get("bias", "")
    width = changes.get("head_dim", 128)
    problem = example(target, **{"head_dim_v": min(width, 512), **changes, "bias": "float32" if dims else ""})
    for kernel in kernels or ("fwd", "dkdv", "dq", *(("dbias",) if "k" in dims else ())):
        yield attention_job(problem, kernel, bias=dims)


# The head dims that a chip is tried with that does not get everything: padded, a multiple of 16, and two of them.
_LEAN_HEAD_DIMS = (40, 80, 192)


def shipped_jobs(target: str, full: bool = False) -> Iterator[Job]:
    """What is compiled for `target`.

    910B: every row of the tile tables, every feature (float16, D = 128) and every kind of head dim. A3, which has the
    same memories and gets the same kernels from the front half, and 950, whose compiler takes four times as long: every
    kernel and tile once, with most of what runs in it. `full`: every feature in every dtype with every head-dim class.
    """
    lean = configs.family(target) is not NPUArch.A2 and not full
    yield from tile_jobs(target) if lean else every_job(target, full)
    yield from narrower_jobs(target)
    yield from always_masked_jobs(target)
    yield from v1_jobs(target, [dtype for dtype in ELEMENT_BYTES if not (lean and dtype == "bfloat16")])
    yield from helper_jobs(target)
    yield from matmul_jobs(target)


def tile_jobs(target: str) -> Iterator[Job]:
    """Every attention kernel with every tile that it has in the table, in the most demanding mode that uses it."""
    for dtype, head_dim in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES):
        changes = {"dtype": dtype, "head_dim": head_dim}
        cases = [{**changes, **case} for case in reversed(MODE_CASES.values())]  # the most demanding first
        every = [job for case in cases for job in attention_jobs(target, case)]
        own = attention_jobs(target, {**changes, **mode_case("dbias", "featured")}, ("dbias",))
        yield from each_tile_once(itertools.chain(every, own))
    for case in HEAD_DIM_CASES:
        if case["head_dim"] in _LEAN_HEAD_DIMS:
            yield from attention_jobs(target, case)


def narrower_jobs(target: str) -> Iterator[Job]:
    """Every tile whose row is not for the widest head of its class, with the widest that it is for."""
    for dtype, kernel in itertools.product(("float16", "float32"), ("fwd", "dkdv", "dq", "dbias")):
        cases = [{"dtype": dtype, **mode_case(kernel, mode)} for mode in reversed(configs.modes(kernel))]
        for head_dim in configs.HEAD_DIM_CLASSES:
            key = configs.attention_key(example(target, dtype=dtype, head_dim=head_dim), kernel)
            widest = configs.widest_head_dim(key)
            if widest < head_dim:
                jobs = [attention_jobs(target, {**case, "head_dim": widest}, (kernel,)) for case in cases]
                yield from each_tile_once(itertools.chain(*jobs))


def each_tile_once(jobs: Iterable[Job]) -> Iterator[Job]:
    """The first job of each kernel with each tile."""
    seen: set[tuple[str, int, int]] = set()
    for job in jobs:
        shape = (job.kernel, job.constants["BLOCK_M"], job.constants["BLOCK_N"])
        if shape not in seen:
            seen.add(shape)
            yield job


def always_masked_jobs(target: str) -> Iterator[Job]:
    """Every tile that is another one with a mask in every tile, with what needs the most memory."""
    for dtype, head_dim, mode in itertools.product(("float16", "float32"), configs.HEAD_DIM_CLASSES, configs.MODES):
        case = MODE_CASES[mode]
        dims = case.get("bias", "")
        width = {"head_dim": head_dim, "head_dim_v": min(head_dim, 512)}
        problem = example(target, **{**case, "dtype": dtype, **width, "bias": "float32" if dims else ""})
        for kernel in ("fwd", "dkdv", "dq"):
            job, other = (attention_job(problem, kernel, bias=dims, always_mask=always) for always in (True, False))
            if job.tile != other.tile:
                yield job


def every_job(target: str, full: bool) -> Iterator[Job]:
    """Every mode of the table and every feature of the attention kernels."""
    head_dims = configs.HEAD_DIM_CLASSES
    changes: list[dict[str, Any]] = []
    for dtype in ELEMENT_BYTES:
        cases = dict(MODE_CASES)
        if dtype == "bfloat16" and not full:  # the rows are float16's
            cases = {mode: cases[mode] for mode in ("even", "causal", "crowded")}
        changes += [{"dtype": dtype, "head_dim": d, **case} for d in head_dims for case in cases.values()]
        if dtype != "bfloat16" or full:
            own = mode_case("dbias", "featured")
            for d, case in itertools.product(head_dims, (own, {**mode_case("dbias", "crowded"), "bias": "k"})):
                yield from attention_jobs(target, {"dtype": dtype, "head_dim": d, **case}, ("dbias",))
    for dtype in ELEMENT_BYTES if full else ("float16",):
        changes += [{"dtype": dtype, **case} for case in HEAD_DIM_CASES]
        changes += [
            {"dtype": dtype, "head_dim": head_dim, **case}
            for head_dim in (head_dims if full else (128,))
            for case in FEATURE_CASES
        ]
    for change in changes:
        yield from attention_jobs(target, change)


def v1_jobs(target: str, dtypes: Iterable[str]) -> Iterator[Job]:
    """The "v1" forward: every row of its table, without and with all its features, and head dims that leave padding."""
    features: tuple[dict[str, Any], ...] = (
        {},
        {"window_right": 0},
        {"window_left": 256, "window_right": 128, "seq_lens": True},
    )
    for dtype in dtypes:
        for head_dim in (64, 128, 256):
            yield from (v1_job(example(target, dtype=dtype, head_dim=head_dim, **case)) for case in features)
            yield v1_finish_job(example(target, dtype=dtype, head_dim=head_dim))
    yield v1_job(example(target, head_dim=40, head_dim_v=80, window_right=0))
    yield v1_finish_job(example(target, head_dim=40, head_dim_v=80))


def helper_jobs(target: str) -> Iterator[Job]:
    """The kernels without matrix products."""
    for dtype in ELEMENT_BYTES:
        for head_dim in (64, 256, 512):
            yield preprocess_job(example(target, dtype=dtype, head_dim=head_dim), has_dlse=True)
    yield preprocess_job(example(target, seq_lens=True, head_dim=80), has_dlse=False)
    yield dsinks_job()
    for dims, sinks, has_dlse in itertools.product("q1", (False, True), (False, True)):
        yield dbias_rows_job(dims, sinks, has_dlse)
    for dtype, dims in itertools.product(("float16", "bfloat16"), "q1"):
        yield dbias_rows_job(dims, True, True, dtype)
    yield from (dbias_rows_job(dims, True, True, masked=True) for dims in "q1")


def matmul_jobs(target: str) -> Iterator[Job]:
    """The matrix product in every combination of dtypes and of row-major and column-major operands."""
    for dtype, compute, out in (
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("float32", "float16", "float16"),
        ("float32", "float16", "float32"),
    ):
        problem = MatmulProblem("npu", target, dtype, compute, out, 4096, 4096, 4096)
        for layout in ((False, False), (True, False), (False, True), (True, True)):
            yield matmul_job(problem, *layout)


def compile_all(
    target: str, only: str | None = None, full: bool = False, select: Mapping[str, Any] | None = None
) -> Iterator[CompileReport]:
    """Reports of every shipped kernel for the chip `target`; `only` keeps jobs whose "kernel case" contains it.

    `select` compiles what it names instead (see selection.py). Raises ValueError for an unknown chip or a selection
    that names nothing, CompilerMissing when a compiler is not installed.
    """
    from diyfa.backends.npu.compiler.selection import selected_jobs

    if npu_spec(target) is None:
        raise ValueError(f"unknown Ascend chip {target!r}: expected a name such as 'Ascend910B3' or 'Ascend950PR_9589'")
    source = shipped_jobs(target, full) if select is None else selected_jobs(target, select)
    jobs = (job for job in source if only is None or only in f"{job.kernel} {job.case}")
    yield from compile_jobs(jobs, target)


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object for each kernel; the status is 1 when one fails the gate."""
    parser = argparse.ArgumentParser(prog="python -m diyfa.backends.npu.compiler.aot", description=main.__doc__)
    parser.add_argument("target", help="chip, such as Ascend910B3 or Ascend950PR_9589")
    parser.add_argument("--only", help='keep kernels whose "kernel case" contains this')
    parser.add_argument("--full", action="store_true", help="every feature in every dtype and head-dim class")
    asked = parser.parse_args(arguments)
    failed = False
    for report in compile_all(asked.target, asked.only, asked.full):
        failed |= not report.ok
        print(json.dumps(asdict(report)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
