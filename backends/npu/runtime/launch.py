"""Parts of every launch: the size of the persistent grid, arguments by name, and the device to launch on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from diyfa.arch import npu_spec
from diyfa.backends.npu.runtime.compat import INTERPRETED, INTERPRETER_PROGRAMS, Constants
from diyfa.backends.npu.runtime.compiler import compiling_if_allowed
from diyfa.backends.npu.runtime.multibuffer import options_in_use
from diyfa.backends.npu.tables.configs import operand_bytes
from diyfa.problem import LAYOUTS, VARLEN, AttentionProblem, Launch, bhsd_strides

# Bytes of the cache that all cores share which the operands of one group of heads may take. It is an assumption, far
# below that cache's size: its replacement policy is not known, and other tensors pass through it.
CACHE_BYTES = 48 * 2**20


@cache
def _core_counts(arch: str, index: int) -> tuple[int, int]:
    """Return (cube, vector) cores of device `index`: from the driver, or in the interpreter a few of both."""
    if INTERPRETED:
        return INTERPRETER_PROGRAMS, INTERPRETER_PROGRAMS
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(index)
    cube, vector = properties.get("num_aicore"), properties.get("num_vectorcore")
    return (int(cube), int(vector)) if cube and vector else _listed_cores(arch)


def _listed_cores(arch: str) -> tuple[int, int]:
    spec = npu_spec(arch)
    if spec is None:
        raise RuntimeError(f"neither the driver nor diyfa knows how many cores {arch} has")
    return spec.cube_cores, spec.vector_cores


def _cores(arch: str, device: torch.device) -> tuple[int, int]:
    if device.type == "meta":  # compiled ahead of time
        return _listed_cores(arch)
    index = device.index if device.type == "cpu" or device.index is not None else torch.npu.current_device()
    return _core_counts(arch, index or 0)


def cube_programs(arch: str, device: torch.device, tasks: int) -> int:
    """Return the programs of a kernel with matrix products: one per cube core, at most one per task."""
    return max(1, min(tasks, _cores(arch, device)[0]))


def vector_programs(arch: str, device: torch.device, tasks: int) -> int:
    """Return the programs of a kernel without matrix products: one per vector core, at most one per task."""
    return max(1, min(tasks, _cores(arch, device)[1]))


def heads_per_group(problem: AttentionProblem, kernel: str) -> int:
    """Return the number of heads in a group of tasks: query heads for "fwd" and "dq", KV heads for "dkdv".

    Each block of a head reads all its keys and values ("dkdv": queries and dout) again, so those of a group should fit
    the cache. Groups are as equal in size as possible.
    """
    group = problem.heads_q // problem.heads_kv
    rows = problem.seqlen_q * group if kernel == "dkdv" else problem.seqlen_k
    row_bytes = (problem.head_dim + problem.head_dim_v) * operand_bytes(problem)
    by_sample = problem.varlen or problem.seq_lens
    heads = problem.heads_kv * (1 if by_sample else problem.batch)
    n_groups = -(-heads * rows * row_bytes // CACHE_BYTES)
    kv_heads_per_group = -(-heads // max(1, min(n_groups, heads)))
    return kv_heads_per_group if kernel == "dkdv" else kv_heads_per_group * group


def device_guard(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current. Triton launches on the current device, not on that of the tensors."""
    return getattr(torch, "npu").device(x.device) if x.device.type == "npu" else nullcontext()  # noqa: B009


def distinct_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return `x`, or a copy if it has several rows with a stride of 0 (expanded keys): the compiler divides by it."""
    rows = x.shape[0 if layout == VARLEN else LAYOUTS[layout][2]]
    return x.contiguous() if rows > 1 and bhsd_strides(x, layout)[2] == 0 else x


def tensor_arguments(layout: str, **tensors: torch.Tensor) -> dict[str, Any]:
    """Return tensors and their strides of batch, head and row by kernel argument.

    For `out` these are `out_ptr`, `stride_ob`, `stride_oh`, `stride_om`. Rows of keys and values have n for m."""
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        x = distinct_rows(x, layout)
        b, h, m, _ = bhsd_strides(x, layout)
        stride, row = "stride_" + name.replace("out", "o"), "n" if name[-1] in "kv" else "m"
        # A single row may still have stride 0.
        arguments |= {f"{name}_ptr": x, f"{stride}b": b, f"{stride}h": h, f"{stride}{row}": max(m, 1)}
    return arguments


def bind_launch(
    kernel: Any, constants: type[Constants], grid: int, values: dict[str, Any], options: dict[str, Any]
) -> Launch:
    """Return the launch of `kernel`, with the `values` that it and its `constants` name. Others are ignored.

    Related kernels share `values`, where names of constants are in capitals."""
    arguments = {name: values[name] for name in kernel.arg_names if name != "c"}
    bound_constants = constants(*(values[field.name.upper()] for field in fields(constants)))
    return Launch(kernel, grid, arguments, {"c": bound_constants}, options_in_use(options))


recorder: Callable[[Launch], None] | None = None  # receives launches instead of the device: see recording.py


def run(launch: Launch) -> None:
    """Launch on the current device, or give the launch to `recorder`. The interpreter takes no compiler options.

    Raises RuntimeError if Triton would have to compile the kernel and DIYFA_JIT=never."""
    if recorder is not None:
        recorder(launch)
        return
    if INTERPRETED:
        launch.kernel[(launch.grid,)](**launch.arguments, **launch.constants)
        return
    with compiling_if_allowed(launch.kernel.__name__):
        launch.kernel[(launch.grid,)](**launch.arguments, **launch.constants, **launch.options)
