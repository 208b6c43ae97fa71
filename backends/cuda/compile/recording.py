"""What calls would launch, without launching: the kernels that are to be compiled before the calls come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch

from diyfa.arch import gpu_arch_name
from diyfa.backends.cuda.runtime import launch as host
from diyfa.backends.cuda.runtime import launcher, tune
from diyfa.backends.cuda.runtime.binaries import key_of_binary
from diyfa.backends.cuda.runtime.launcher import Signature
from diyfa.problem import Launch

# Multiprocessors of the usual GPU of an architecture: T4, A100, A10, RTX 4090, H100, B200, RTX 5090.
MULTIPROCESSORS = {
    "sm_75": 40, "sm_80": 108, "sm_86": 72, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
}  # fmt: skip


class Recorded(NamedTuple):
    """A kernel that calls would launch, with all that it is compiled from. It can be sent to another process."""

    key: str  # of its binary
    arch: str
    module: str
    name: str
    launch: Launch  # without the kernel, its arguments and its grid
    signature: Signature  # without values

    def compile(self) -> Any:
        """Return what `compile_binary` makes of it."""
        from diyfa.backends.cuda.runtime.jit import compile_binary

        kernel = getattr(import_module(self.module), self.name)
        return compile_binary(self.arch, self.launch._replace(kernel=kernel), self.signature)


def recorded(arch: str, launch: Launch) -> Recorded:
    signature = launcher.signature_of(launch)
    function = launch.kernel.fn
    return Recorded(
        key_of_binary(arch, launch, signature),
        arch,
        function.__module__,
        function.__name__,
        launch._replace(kernel=None, grid=1, arguments={}),
        signature._replace(values=[]),
    )


@contextmanager
def recording(arch: str | None = None) -> Iterator[dict[str, Recorded]]:
    """Inside the block nothing is launched: what would be is in the dictionary, by the keys of binaries.

    Of a problem whose tiles the autotuner has not measured all of them are. `arch`: tensors of the CPU, or without
    memory, are taken for those of such a GPU; None: calls are recorded for the current device.
    """
    if host.is_interpreting():
        raise ValueError("nothing is compiled with TRITON_INTERPRET=1; unset it")
    if arch is not None and arch not in MULTIPROCESSORS:
        raise ValueError(f"unknown CUDA architecture {arch!r}; known are: {', '.join(MULTIPROCESSORS)}")
    name = arch or gpu_arch_name(*torch.cuda.get_device_capability())
    found: dict[str, Recorded] = {}

    def record(launch: Launch) -> None:
        each = recorded(name, launch)
        found.setdefault(each.key, each)

    before = launcher.recorder, host.stand_in, tune.set_recording(True)
    launcher.recorder = record
    host.stand_in = None if arch is None else host.StandIn(arch, MULTIPROCESSORS[arch])
    try:
        yield found
    finally:
        launcher.recorder, host.stand_in, was_recording = before
        tune.set_recording(was_recording)
