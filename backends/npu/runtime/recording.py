"""What calls would launch, without launching: the kernels that are compiled before the calls come.

CANN's compiler compiles them, on the machine that has the NPU: Triton asks its driver for which chip. What is compiled
is kept in Triton's own folder, where other processes find it.
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
    """A kernel that calls would launch, with all that it is compiled from. Other processes can be sent one."""

    module: str
    name: str
    launch: Launch  # without the kernel; tensors are their dtypes

    def is_known(self) -> bool:
        """False: only Triton knows. It does not compile again what it has."""
        return False

    def compile(self) -> None:
        """Compile it, and the function that launches it. Raises what the compiler raises."""
        kernel, launch = getattr(import_module(self.module), self.name), self.launch
        values = [launch.arguments[name] for name in kernel.arg_names if name not in launch.constants]
        compiled = kernel.warmup(*values, grid=(1,), **launch.constants, **launch.options)
        # Private: without it the first launch would wait for a C++ compiler.
        load = getattr(compiled, "_init_handles", None)
        if load is not None:
            load()


def recorded(launch: Launch) -> Recorded:
    """Return the kernel of `launch`."""
    function = launch.kernel.fn
    arguments = {name: x.dtype if isinstance(x, torch.Tensor) else x for name, x in launch.arguments.items()}
    return Recorded(function.__module__, function.__name__, launch._replace(kernel=None, grid=1, arguments=arguments))


@contextmanager
def recording(arch: str | None = None) -> Iterator[dict[Hashable, Recorded]]:
    """Inside the block nothing is launched: what would be is in the dictionary. Tensors of the CPU, or without memory,
    are taken for those of the current device."""
    if INTERPRETED:
        raise ValueError("nothing is compiled with TRITON_INTERPRET=1: unset it")
    if arch is not None:
        raise ValueError(
            f"kernels for {arch} are compiled where one is, by CANN's compiler: run this there, and name no "
            f"architecture; `diyfa compile {arch}` checks elsewhere that they compile"
        )
    found: dict[Hashable, Recorded] = {}

    def record(launch: Launch) -> None:
        found.setdefault(variant(launch), recorded(launch))

    before = host.recorder, tuner.recording
    host.recorder, tuner.recording = record, True
    try:
        yield found
    finally:
        host.recorder, tuner.recording = before
