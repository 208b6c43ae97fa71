"""Context parallel attention of npu tensors, on torch_npu over host memory, between gloo processes.

What is faked: HCCL. Gloo moves the tensors' bytes, which here lie in the host's memory, through CPU tensors over them.
The rest is as on a device: npu tensors, autograd, diyfa's kernels on the `npu` key (in Triton's interpreter), and
PyTorch's own operators, which the host computes in their place (`npu_interpreter.HostArithmetic`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import npu_interpreter
import torch
import torch.distributed as dist
from context_parallel_cases import Division, run_sharded
from npu_interpreter import LAUNCHES, HostArithmetic, to_host

from diyfa.testing import AttentionCase, Results

_installed = False


def _on_host(collective: Any) -> Any:
    """`collective` of what npu tensors are on the host."""
    return lambda *tensors, **options: collective(*(to_host(x) for x in tensors), **options)


@contextmanager
def _over_gloo() -> Iterator[None]:
    """Inside this block collectives of npu tensors are gloo's."""
    point_to_point = dist.P2POp
    names = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce")
    with (
        mock.patch.multiple(dist, **{name: _on_host(getattr(dist, name)) for name in names if hasattr(dist, name)}),
        mock.patch.object(dist, "P2POp", lambda op, x, *rest: point_to_point(op, to_host(x), *rest)),
    ):
        yield


def run_on_shim(case: AttentionCase, how: Division) -> tuple[Results | None, set[str]]:
    """`run_sharded` of npu tensors, and the kernels that were launched on them."""
    global _installed
    if not _installed:
        npu_interpreter.pytest_configure()
        _installed = True
    LAUNCHES.clear()
    # A mode is seen by the thread alone that entered it.
    with _over_gloo(), HostArithmetic(), torch.autograd.set_multithreading_enabled(False):
        results = run_sharded(case, how._replace(backend="npu", device="npu"))
    return results, {launch.kernel for launch in LAUNCHES}
