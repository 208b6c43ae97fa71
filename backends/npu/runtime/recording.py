"""Record the kernels that calls would launch, without launching them, so that they can be compiled ahead of the calls.

CANN's compiler compiles them on the machine that has the NPU, because Triton asks its driver for the chip. Triton's
cache folder stores the results, where other processes find them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import torch

from diyfa.backends.npu.runtime import launch as host
from diyfa.backends.npu.runtime.compat import INTERPRETED
from diyfa.backends.npu.runtime.tiles import variant
from diyfa.backends.npu.runtime.tune import tuner
from diyfa.problem import Launch


class Recorded(NamedTuple):
    """A kernel that calls would launch, with everything it is compiled from. It can be sent to other processes."""

    module: str
    name: str
    launch: Launch  # kernel is None; dtypes replace tensors

    def is_stored(self) -> bool:
        """Return False: only Triton knows. It does not compile a kernel a second time."""
        return False

    def compile(self) -> None:
        """Compile the kernel and the function that launches it. Raises what the compiler raises."""
        kernel, launch = getattr(import_module(self.module), self.name), self.launch
        values = [launch.arguments[name] for name in kernel.arg_names if name not in launch.constants]
        compiled = kernel.warmup(*values, grid=(1,), **launch.constants, **launch.options)
        # Private in Triton. Without this call the first launch would wait for a C++ compiler.
        load = getattr(compiled, "_init_handles", None)
        if load is not None:
            load()


def recorded(launch: Launch) -> Recorded:
    """Return `launch` as a `Recorded` kernel."""
    function = launch.kernel.fn
    arguments = {name: x.dtype if isinstance(x, torch.Tensor) else x for name, x in launch.arguments.items()}
    return Recorded(function.__module__, function.__name__, launch._replace(kernel=None, grid=1, arguments=arguments))


@contextmanager
def recording(arch: str | None = None) -> Iterator[dict[Hashable, Recorded]]:
    """Record launches in the yielded dictionary instead of launching, inside the block.

    Tensors on the CPU or on the meta device count as tensors on the current device."""
    if INTERPRETED:
        raise ValueError("nothing is compiled with TRITON_INTERPRET=1: unset it")
    if arch is not None:
        raise ValueError(
            f"kernels for {arch} are compiled where one is, by CANN's compiler: run this there, and name no "
            f"architecture; `diyfa compile {arch}` checks elsewhere that they compile"
        )
    recordings: dict[Hashable, Recorded] = {}

    def record(launch: Launch) -> None:
        recordings.setdefault(variant(launch), recorded(launch))

    previous = host.recorder, tuner.recording
    host.recorder, tuner.recording = record, True
    try:
        yield recordings
    finally:
        host.recorder, tuner.recording = previous
