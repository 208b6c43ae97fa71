"""Launches of the CUDA backend without a GPU: all is diyfa's own but Triton's compiler and the driver.

CPU tensors stand in for CUDA's. What the driver would be handed is read from memory, and has the arguments' names.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from diyfa.backends.cuda import attention, matmul
from diyfa.backends.cuda.runtime import binaries, driver, launcher, passes
from diyfa.backends.cuda.runtime.signature import Box, Signature, Tiles, runtime_names
from diyfa.problem import Launch

STREAM = 77
SCRATCH = 2  # pointers of Triton's behind a kernel's arguments
_TYPES: dict[Any, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


@dataclass(frozen=True)
class Map:
    """A tensor map as the driver was asked for it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """One launch; `arguments` are what the kernel gets of those that are no constants."""

    kernel: str
    grid: tuple[int, ...]
    stream: int | str
    arguments: dict[str, Any]
    constants: Any
    binary: tuple[Any, ...]  # what it was compiled for besides constants


class Kernel:
    """What the launcher asks of a kernel, which may be an interpreted one."""

    def __init__(self, kernel: Any, launches: list[Recorded]) -> None:
        jit = kernel if hasattr(kernel, "params") else JITFunction(kernel.fn, **kernel.kwargs)
        self.fn, self.arg_names, self.params, self.__name__ = kernel.fn, kernel.arg_names, jit.params, kernel.__name__
        self._launches = launches

    def __getitem__(self, grid: Any) -> Any:
        """A launch of Triton's own."""
        names = runtime_names(self)

        def launch(**arguments: Any) -> None:
            kernel_arguments = {name: arguments[name] for name in names}
            self._launches.append(Recorded(self.__name__, grid, "triton", kernel_arguments, None, ()))

        return launch


def parameter_count(signature: Signature) -> int:
    """How many a compiled kernel has; a tensor map comes with its shape and strides."""
    kinds = [x for x in signature.kinds if x not in (None, 1)]
    return SCRATCH + sum(1 + 2 * len(x.shape) if isinstance(x, Box) else 1 for x in kinds)


class Recorder:
    """The driver, and the compiler."""

    def __init__(self) -> None:
        self.launches: list[Recorded] = []
        self.compiled: list[tuple[Launch, Signature]] = []
        self.maps: list[Map] = []
        self._map_numbers: dict[Map, int] = {}

    def stored_binary(self, arch: str, launch: Launch, signature: Signature) -> binaries.StoredBinary:
        self.compiled.append((launch, signature))
        return binaries.StoredBinary(
            cubin=str(len(self.compiled)).encode(), name=launch.kernel.__name__, shared=0,
            num_warps=launch.options.get("num_warps", 4), launch_pdl=launch.options.get("launch_pdl", False),
            boxes=tuple((x.shape, 3) for x in signature.kinds if isinstance(x, Box)), scratch=SCRATCH,
        )  # fmt: skip

    def load(self, cubin: bytes, name: str, shared: int) -> int:
        return int(cubin)

    def encode(self, tiles: Tiles, address: int, box: list[int], swizzle: int) -> bytes:
        new_map = Map(address, tuple(tiles.shape), tuple(tiles.strides), tuple(box))
        self.maps.append(new_map)
        return struct.pack("<Q120x", len(self.maps) - 1)

    def moved(self, encoded: bytes, address: int) -> bytes:
        self.maps.append(replace(self.maps[struct.unpack_from("<Q", encoded)[0]], address=address))
        return struct.pack("<Q120x", len(self.maps) - 1)

    def launch_function(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        launch, signature = self.compiled[function.value - 1]
        settings, addresses = config._obj, iter(parameters)
        assert len(parameters) == parameter_count(signature)

        def read(kind: Any) -> Any:
            return kind.from_address(next(addresses)).value

        arguments: dict[str, Any] = {}
        for name, kind in zip(runtime_names(launch.kernel), signature.kinds, strict=True):
            if kind is None or kind == 1:
                arguments[name] = kind
            elif isinstance(kind, Box):
                expected_map, rank = self.maps[read(ctypes.c_uint64)], len(kind.shape)
                shape, strides = ([read(ctype) for _ in range(rank)] for ctype in (ctypes.c_int32, ctypes.c_int64))
                assert (tuple(shape), tuple(strides)) == (expected_map.shape, expected_map.strides)
                arguments[name] = expected_map
            else:
                arguments[name] = read(_TYPES.get(kind, ctypes.c_uint64))
        assert [read(ctypes.c_uint64) for _ in range(SCRATCH)] == [0] * SCRATCH
        grid = settings.grid_x, settings.grid_y, settings.grid_z
        binary = (signature.kinds, signature.aligned_pointers, signature.aligned_strides, launch.aligned)
        constants = next(iter(launch.constants.values()), None)
        self.launches.append(Recorded(launch.kernel.__name__, grid, settings.stream or 0, arguments, constants, binary))
        return 0


def install(patch: pytest.MonkeyPatch) -> Recorder:
    """Record the launches of the portable kernels, and of all others whose modules are loaded."""
    for package in (attention, matmul):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    recorder = Recorder()
    fakes: dict[int, Kernel] = {}

    def fake(kernel: Any) -> Kernel:
        return fakes.setdefault(id(kernel), Kernel(kernel, recorder.launches))

    for name, module in list(sys.modules.items()):
        if name.startswith("diyfa.backends.cuda."):
            for attribute, x in list(vars(module).items()):
                if attribute.endswith("_kernel") and hasattr(x, "arg_names"):
                    patch.setattr(module, attribute, fake(x))
                elif attribute == "_GRADIENT_KERNELS":
                    patch.setattr(module, attribute, {kind: fake(kernel) for kind, kernel in x.items()})
    patch.setattr(binaries, "stored_binary", recorder.stored_binary)
    patch.setattr(driver, "_driver", [recorder])
    patch.setattr(launcher, "_binaries", {})
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (launcher, passes):
        patch.setattr(module, "current_device", lambda: 0)
        patch.setattr(module, "current_stream", lambda device: STREAM)
    return recorder
