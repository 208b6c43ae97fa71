"""What every launch needs: the size of the persistent grid, arguments by name, and the device to launch on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from diyfa.arch import ELEMENT_BYTES, npu_spec
from diyfa.backends.npu.runtime.compat import INTERPRETED, INTERPRETER_PROGRAMS, Constants
from diyfa.problem import AttentionProblem, Launch, bhsd_strides

# How much of what all cores share before device memory the operands of one part of the work may take: an assumption,
# far below the size of that cache, since its replacement is not known and other tensors pass through it.
CACHE_BYTES = 48 * 2**20


@cache
def _core_counts(arch: str, index: int) -> tuple[int, int]:
    """(cube, vector) cores of device `index`: from the driver, or few of both in the interpreter."""
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
    """Programs of a kernel with matrix products: one for each cube core, fewer when there is less to do."""
    return max(1, min(tasks, _cores(arch, device)[0]))


def vector_programs(arch: str, device: torch.device, tasks: int) -> int:
    """Programs of a kernel without matrix products: one for each vector core, fewer when there is less to do."""
    return max(1, min(tasks, _cores(arch, device)[1]))


def heads_together(problem: AttentionProblem, kernel: str) -> int:
    """How many heads (of q for "fwd" and "dq", of k for "dkdv") are worked on at a time.

    What a program walks over, keys and values or queries and dout, is read again for every block, and should still be
    in the cache then. Parts are of equal size as far as that goes.
    """
    group = problem.heads_q // problem.heads_kv
    rows = problem.seqlen_q * group if kernel == "dkdv" else problem.seqlen_k
    row_bytes = (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES[problem.dtype]
    by_sample = problem.varlen or problem.seq_lens
    heads = problem.heads_kv * (1 if by_sample else problem.batch)
    parts = -(-heads * rows * row_bytes // CACHE_BYTES)
    together = -(-heads // max(1, min(parts, heads)))
    return together if kernel == "dkdv" else together * group


def device_guard(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of `x` current: Triton launches on the current device, whatever the tensors'."""
    return getattr(torch, "npu").device(x.device) if x.device.type == "npu" else nullcontext()  # noqa: B009


def distinct_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x`, or a copy where all rows are one (an expanded gradient): the compiler divides by the stride between rows."""
    return x.contiguous() if bhsd_strides(x, layout)[2] == 0 else x


def addressed(layout: str, **tensors: torch.Tensor) -> dict[str, Any]:
    """Each tensor and its strides of batch, head and row under the kernels' names of them: `out_ptr`, `stride_ob`,
    `stride_oh`, `stride_om` for `out`, with an n for rows of keys and values."""
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        x = distinct_rows(x, layout)
        b, h, m, _ = bhsd_strides(x, layout)
        stride, row = "stride_" + name.replace("out", "o"), "n" if name[-1] in "kv" else "m"
        # The stride of rows is still 0 where there is only one.
        arguments |= {f"{name}_ptr": x, f"{stride}b": b, f"{stride}h": h, f"{stride}{row}": max(m, 1)}
    return arguments


def described(
    kernel: Any, constants: type[Constants], grid: int, values: dict[str, Any], options: dict[str, Any] | None = None
) -> Launch:
    """The launch of `kernel` with what it and its `constants` take of `values`, which related kernels share. There
    constants are in capitals."""
    arguments = {name: values[name] for name in kernel.arg_names if name != "c"}
    own = constants(*(values[field.name.upper()] for field in fields(constants)))
    return Launch(kernel, grid, arguments, {"c": own}, options or {})


recorder: Callable[[Launch], None] | None = None  # gets launches instead of the device: see recording.py


def run(launch: Launch) -> None:
    """Launch it on the current device. The interpreter knows no compiler options."""
    if recorder is not None:
        recorder(launch)
        return
    options = {} if INTERPRETED else launch.options
    launch.kernel[(launch.grid,)](**launch.arguments, **launch.constants, **options)
