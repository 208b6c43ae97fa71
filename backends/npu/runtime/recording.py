"""Record the kernels that calls would launch, without launching them, so that they can be compiled ahead of the calls.

CANN's compiler compiles them on the machine that has the NPU, because Triton asks its driver for the chip. Triton's
cache folder stores the results, where other processes find them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import NamedTuple

import torch

from diyfa.backends.npu.runtime import compiler
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

    @property
    def shares_a_header(self) -> bool:
        """Return True: the launchers share a precompiled header. Triton writes it in place, so another process may
        read half of it, on which GCC fails."""
        return True

    def is_stored(self) -> bool:
        """Return False: only Triton knows. It does not compile a kernel a second time."""
        return False

    def compile(self) -> None:
        """Compile the kernel and the function that launches it. Raises RuntimeError if one does not compile."""
        kernel, launch = getattr(import_module(self.module), self.name), self.launch
        values = [launch.arguments[name] for name in kernel.arg_names if name not in launch.constants]
        try:
            compiled = kernel.warmup(*values, grid=(1,), **launch.constants, **launch.options)
            # Private in Triton. Without this call the first launch would wait for a C++ compiler.
            load = getattr(compiled, "_init_handles", None)
            if load is not None:
                load()
        except Exception as error:  # compilers may raise anything
            reason = compiler.first_error(str(error)) if compiler.is_compile_failure(error) else str(error)
            raise RuntimeError(f"{self._constants()}: {reason}") from error

    def _constants(self) -> str:
        """Return what distinguishes this kernel from others of its name, for messages."""
        dtypes = [str(x).removeprefix("torch.") for x in self.launch.arguments.values() if isinstance(x, torch.dtype)]
        constants = [
            f"{field.name}={value}"
            for constants in self.launch.constants.values()
            for field in fields(constants)
            if (value := getattr(constants, field.name))
        ]
        return ", ".join([*dtypes[:1], *constants])


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
