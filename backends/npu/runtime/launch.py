"""What every launch needs: the size of the persistent grid and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from diyfa.arch import ELEMENT_BYTES, npu_spec
from diyfa.backends.npu.runtime.compat import INTERPRETED, INTERPRETER_PROGRAMS
from diyfa.backends.npu.tables.configs import AttentionTile, MatmulTile
from diyfa.problem import AttentionProblem, bhsd_strides

# How much of what all cores share before device memory the operands of one part of the work may take: an assumption,
# far below the size of that cache, since its replacement is not known and other tensors pass through it.
CACHE_BYTES = 48 * 2**20


@cache
def _core_counts(arch: str, index: int) -> tuple[int, int]:
    """(cube, vector) cores of device `index`: from the driver, or from the table of chips in the interpreter."""
    if INTERPRETED:
        return INTERPRETER_PROGRAMS, INTERPRETER_PROGRAMS
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(index)
    cube, vector = properties.get("num_aicore"), properties.get("num_vectorcore")
    if cube and vector:
        return int(cube), int(vector)
    spec = npu_spec(arch)
    if spec is None:
        raise RuntimeError(f"the driver reports no core counts for {arch} (device {index}): {properties}")
    return spec.cube_cores, spec.vector_cores


def _index(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return device.index if device.index is not None else torch.npu.current_device()


def cube_programs(arch: str, device: torch.device, tasks: int) -> int:
    """Programs of a kernel with matrix products: one for each cube core, fewer when there is less to do."""
    return max(1, min(tasks, cube_cores(arch, device)))


def cube_cores(arch: str, device: torch.device) -> int:
    """Cube cores of `device`."""
    return _core_counts(arch, _index(device))[0]


def vector_programs(arch: str, device: torch.device, tasks: int) -> int:
    """Programs of a kernel without matrix products: one for each vector core, fewer when there is less to do."""
    return max(1, min(tasks, _core_counts(arch, _index(device))[1]))


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
    return nullcontext() if x.device.type == "cpu" else getattr(torch, "npu").device(x.device)  # noqa: B009


def addressed(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """`x` and its strides of batch, head and row; a copy where all rows are one (an expanded gradient): the compiler
    divides by the stride between rows."""
    if bhsd_strides(x, layout)[2] == 0:
        x = x.contiguous()
    b, h, m, _ = bhsd_strides(x, layout)
    return x, (b, h, max(m, 1))  # still 0 where there is only one row


def launch_options(tile: AttentionTile | MatmulTile, arch: str) -> dict[str, Any]:
    """Compiler options of `tile` as keyword arguments of a launch; none in the interpreter, which compiles nothing."""
    return {} if INTERPRETED else tile.compile_options(arch)
