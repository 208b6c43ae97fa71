"""Launches of Triton kernels that compile for an Ascend chip and execute the compiled programs on this CPU."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from simulators.hivm.cores import Cluster, Core, Deadlock, FlagError
from simulators.hivm.ir import Operation, parse
from simulators.hivm.memory import GLOBAL_GRANULE, Memory, Ref
from simulators.hivm.order import Blocks
from triton.runtime.jit import JITFunction

from diyfa.arch import npu_spec
from diyfa.backends.npu import NPUBackend
from diyfa.backends.npu.runtime import launch
from diyfa.lab.npu import aot, specs

_DTYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int64: "i64",
    torch.int8: "i8", torch.uint8: "i8",
}  # fmt: skip


_CUBE = "#hivm.func_core_type<AIC>"


@dataclass
class Program:
    """A compiled kernel: its functions, some of which return constants for the launcher."""

    name: str
    functions: dict[str, Operation]

    @property
    def mixed(self) -> bool:
        return f"{self.name}_mix_aic" in self.functions

    @property
    def is_cube(self) -> bool:
        """Return whether its blocks occupy cube cores."""
        return self.mixed or self.functions[self.name].attributes["hivm.func_core_type"] == _CUBE

    def constant(self, suffix: str) -> int | None:
        """Return the constant that one of the compiler's functions for the launcher returns, or None."""
        function = self.functions.get(self.name + suffix)
        if function is None:
            return None
        constant, _ = function.regions[0].operations
        return int(constant.attributes["value"].partition(" ")[0])


@dataclass
class Log:
    """The record of a run: names of launches, number of executed library calls, races."""

    launches: list[str] = field(default_factory=list)
    instructions: int = 0
    races: list[str] = field(default_factory=list)
    stale: float | None = None  # the accumulators' value before a kernel; None: NaN
    grids: list[tuple[int, int]] = field(default_factory=list)  # of each launch: size of its grid, blocks executed


_programs: dict[str, Program] = {}


def compile_kernel(
    function: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any], target: str
) -> Program:
    """Compile with both halves of the compiler, print the generic form with its own printer, and parse that."""
    name = function.fn.__name__
    key = json.dumps([name, function.src, signature, sorted(constants.items()), options, target], default=str)
    if key not in _programs:
        job = specs.Job(name, "", function, signature, constants, options)
        hivm = aot.compiled_hivm(job, target)
        _programs[key] = Program(name, parse(generic(hivm, target)))
    return _programs[key]


def generic(hivm: str, target: str) -> str:
    """Return the compiler's text in MLIR's generic form."""
    program = aot.back_half().program(target)
    printer = program.with_name(program.name.replace("compile", "opt"))
    with tempfile.TemporaryDirectory(prefix="diyfa-hivm-") as folder:
        source = Path(folder, "kernel.mlir")
        source.write_text(hivm)
        command = [str(printer), str(source), "--mlir-print-op-generic", "--mlir-print-local-scope"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def execute(program: Program, arguments: list[Any], grid: int, log: Log, blocks_started: int | None = None) -> None:
    """Run `blocks_started` blocks of `program`, by default `grid`, on tensors and numbers."""
    memories: dict[int, Memory] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return np.float32(value) if isinstance(value, float) else value
        storage = value.untyped_storage()
        if storage.data_ptr() not in memories:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            memories[storage.data_ptr()] = Memory("global memory", data.size, GLOBAL_GRANULE, data)
        dtype = _DTYPES[value.dtype]
        return Ref(memories[storage.data_ptr()], dtype, value.storage_offset() * value.element_size(), 0, (-1,), (1,))

    placed = [place(value) for value in arguments]
    size = program.constant("_infer_workspace_shape_function") or 0
    workspace = Memory("workspace", size * grid, GLOBAL_GRANULE)
    lock = Memory("sync block lock", 0, GLOBAL_GRANULE)
    hidden = [0, *(Ref(memory, "i8", 0, 0, (-1,), (1,)) for memory in (lock, workspace))]
    blocks = Blocks()
    started = grid if blocks_started is None else blocks_started
    log.grids.append((grid, started))
    for block in range(started):
        _run_block(program, [*hidden, *placed, grid, 1, 1], block, grid, blocks, log)


def _run_block(program: Program, arguments: list[Any], block: int, grid: int, blocks: Blocks, log: Log) -> None:
    if program.mixed:
        names = ["cube", "vector 0", "vector 1"]
        kinds = [("_mix_aic", True, 0), ("_mix_aiv", False, 0), ("_mix_aiv", False, 1)]
    else:
        names, kinds = ["cube" if program.is_cube else "vector"], [("", program.is_cube, 0)]
    cluster = Cluster(names, block, grid, blocks, log.stale)
    running = []
    for index, (suffix, is_cube, vector) in enumerate(kinds):
        core = Core(cluster, index, is_cube, vector, names[index])
        running.append(core.run(program.functions[program.name + suffix], arguments))
    while running:
        before = cluster.instructions, sum(map(len, cluster.flags.values())), len(running)
        for each in tuple(running):
            if next(each, "ended") == "ended":
                running.remove(each)
        if running and before == (cluster.instructions, sum(map(len, cluster.flags.values())), len(running)):
            raise Deadlock(f"{program.name}: every core waits for another")
    left = {key: len(queue) for key, queue in cluster.flags.items() if queue}
    if left:
        raise FlagError(f"{program.name}: flags between cores are set and never waited for: {left}")
    log.instructions += cluster.instructions
    log.races += [f"{program.name}: {race}" for race in cluster.order.races.values()]


@contextmanager
def compiled_on_cpu(
    target: str = "Ascend910B3", programs: int = 2, stale: float | None = None, all_blocks_parallel: bool = False
) -> Iterator[Log]:
    """Run kernels, compiled for `target`, on CPU tensors inside this context. The npu backend sees `programs` cores.

    `all_blocks_parallel`: as with TRITON_ALL_BLOCKS_PARALLEL=1 at most as many blocks run as the chip has cores."""
    log, spec = Log(stale=stale), npu_spec(target)
    assert spec is not None

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        names = function.arg_names
        values = dict(zip(names, args, strict=False))
        values |= {name: keywords.pop(name) for name in names if name in keywords}
        constexpr = {p.name for p in function.params if p.is_constexpr}
        constants = {name: x for name, x in values.items() if name in constexpr or x is None}
        signature = {name: "constexpr" if name in constants else specs.type_name(x) for name, x in values.items()}
        options = {name: x for name, x in keywords.items() if name not in ("debug",)}
        if all_blocks_parallel:
            options[aot.ALL_BLOCKS_PARALLEL] = True
        program = compile_kernel(function, signature, constants, options, target)
        log.launches.append(program.name)
        (size,) = grid
        cores = spec.cube_cores if program.is_cube else spec.vector_cores
        started = min(size, cores) if all_blocks_parallel else size
        execute(program, [values[name] for name in names if name not in constants], size, log, started)

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(NPUBackend, "accepts", lambda self, device: None))
        stack.enter_context(patch.object(NPUBackend, "arch", lambda self, device: target))
        stack.enter_context(patch.object(launch, "_core_counts", lambda arch, index: (programs, programs)))
        yield log
