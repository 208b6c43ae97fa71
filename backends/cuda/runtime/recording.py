"""Records the kernels that calls would launch, without launching them, to compile them in advance."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import torch
from triton import knobs

from diyfa.arch import gpu_arch_name, gpu_spec
from diyfa.backends.cuda.runtime import launch as host
from diyfa.backends.cuda.runtime import launcher, tune
from diyfa.backends.cuda.runtime.binaries import binary_key, cache_folder, find_binary, why_unknown
from diyfa.backends.cuda.runtime.signature import Signature, launch_signature
from diyfa.problem import Launch, ToolMissing

# Multiprocessors of the usual GPU of an architecture: T4, A100, A10, RTX 4090, H100, B200, RTX 5090.
MULTIPROCESSORS = {
    "sm_75": 40, "sm_80": 108, "sm_86": 72, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
}  # fmt: skip


class Recorded(NamedTuple):
    """A kernel that calls would launch, with all that it is compiled from. It can be sent to other processes."""

    key: str  # key of its binary
    arch: str
    module: str
    name: str
    launch: Launch  # without the kernel, its arguments and its grid
    signature: Signature  # without values

    def is_stored(self) -> bool:
        """Return whether the pack or the cache folder has its binary."""
        return find_binary(self.arch, self.key) is not None

    def compile(self) -> None:
        """Compile it into the cache folder.

        Raises the compiler's errors; ToolMissing if the binary cannot be stored; RuntimeError if it needs too much
        shared memory or the sources have changed.
        """
        from diyfa.backends.cuda.runtime.jit import compile_binary

        launch = self.launch._replace(kernel=getattr(import_module(self.module), self.name))
        if binary_key(self.arch, launch, self.signature) != self.key:
            raise RuntimeError("the sources of diyfa have changed meanwhile")
        with tempfile.TemporaryDirectory(prefix="diyfa-") as temporary, knobs.cache.scope():
            knobs.cache.dir = temporary  # Triton's cache entry is many times as large as the binary
            binary = compile_binary(self.arch, launch, self.signature)
        spec, folder = gpu_spec(self.arch), cache_folder()
        if spec is not None and binary.shared > spec.shared_per_block:
            raise RuntimeError(
                f"it needs {binary.shared} bytes of shared memory, {self.arch} has {spec.shared_per_block}"
            )
        if folder is None or not folder.put(self.key, binary):
            reason = "there is no cache folder" if folder is None else f"{folder.path} cannot be written"
            raise ToolMissing(f"{reason}: DIYFA_CACHE_DIR names another one")


def recorded(arch: str, launch: Launch) -> Recorded:
    """Return a record of the kernel of `launch`, for `arch`."""
    signature, function = launch_signature(launch), launch.kernel.fn
    return Recorded(
        binary_key(arch, launch, signature), arch, function.__module__, function.__name__,
        launch._replace(kernel=None, grid=1, arguments={}), signature._replace(values=[]),
    )  # fmt: skip


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def recording(arch: str | None = None) -> Iterator[dict[str, Recorded]]:
    """Record kernels into the dictionary, by the keys of their binaries. Inside the block nothing is launched.

    Tensors on the CPU or without memory stand for tensors on a GPU. `arch`: it is the usual GPU of that architecture,
    with the tables' tiles. None: it is the current device, with all tiles that the autotuner would measure.
    """
    if host.is_interpreting():
        raise ValueError("nothing is compiled with TRITON_INTERPRET=1: unset it")
    if reason := why_unknown():
        raise ValueError(f"nothing that is compiled now would be found: {reason}")
    if arch is not None and arch not in MULTIPROCESSORS:
        raise ValueError(f"unknown CUDA architecture {arch!r}; known are: {', '.join(MULTIPROCESSORS)}")
    if arch is None and not torch.cuda.is_available():
        raise ValueError("no GPU is usable here: name an architecture, such as sm_90")
    name = arch or gpu_arch_name(*torch.cuda.get_device_capability())
    recordings: dict[str, Recorded] = {}

    def record(launch: Launch) -> None:
        each = recorded(name, launch)
        recordings.setdefault(each.key, each)

    before = launcher.recorder, host.stand_in
    measures, records = tune.set_enabled(False) if arch else None, tune.set_recording(True)
    launcher.recorder = record
    host.stand_in = host.StandIn(name, MULTIPROCESSORS[arch] if arch else host.multiprocessors(_current_device()))
    try:
        yield recordings
    finally:
        launcher.recorder, host.stand_in = before
        tune.set_recording(records)
        if measures is not None:
            tune.set_enabled(measures)
