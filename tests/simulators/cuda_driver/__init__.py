"""Triton's own CUDA launcher without a GPU: kernels are compiled for sm_90, and launches recorded instead of run.

    launches = install(folder)  # once in a process that has not loaded libcuda; a C compiler is needed, as for Triton
    kernel[(grid,)](*cpu_tensors, ...)
    launches[-1].parameters  # the bytes of each of the kernel's parameters

What runs is Triton's: the JIT, ptxas, `driver.py`, and `driver.c` compiled against `libcuda.c` beside this file.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STREAM = 77


@dataclass(frozen=True)
class Recorded:
    """One launch: (grid, block, shared memory), stream, ids of attributes, and the bytes of each parameter."""

    shape: tuple[int, ...]
    stream: int
    attributes: tuple[int, ...]
    kernel: str
    parameters: tuple[bytes, ...]


def parameter_sizes(cubin: bytes) -> list[int]:
    """Bytes of each parameter of the one kernel in `cubin`, from the records (EIATTR_KPARAM_INFO) in its ELF."""
    found = {}
    for record in re.finditer(rb"\x04\x17\x0c\x00(.{12})", cubin, re.DOTALL):
        _, ordinal, _, kind = struct.unpack("<IHHI", record[1])
        found[ordinal] = kind >> 18
    assert found.keys() == set(range(len(found)))
    return [found[i] for i in range(len(found))]


def _libcuda(folder: Path) -> ctypes.CDLL:
    library = folder / "libcuda.so.1"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).with_name("libcuda.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def install(folder: Path) -> list[Recorded]:
    """Make Triton launch to a list, which is returned. Libraries are built in `folder`."""
    library = _libcuda(folder)
    import triton.knobs
    from triton.runtime import driver

    triton.knobs.nvidia.libcuda_path = str(folder)
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    launches: list[Recorded] = []
    loaded: list[tuple[str, list[int]]] = []

    def load_binary(name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        loaded.append((name, parameter_sizes(cubin)))
        return len(loaded), len(loaded), 32, 0, 1024  # module, function, registers, spills, threads

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    def on_launch(config: int, function: int, parameters: Any) -> None:
        *shape, stream, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        ids = (struct.unpack("<I", ctypes.string_at(attributes + 72 * i, 4))[0] for i in range(count))
        name, sizes = loaded[function - 1]
        given = tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes))
        launches.append(Recorded(tuple(shape), stream, tuple(ids), name, given))

    library.simulator_on_launch(on_launch)

    class Driver(CudaDriver):
        kept = library, on_launch

        def __init__(self) -> None:
            self.utils = CudaUtils()
            self.utils.load_binary = load_binary
            self.utils.unload_module = lambda module: None
            self.utils.get_device_properties = lambda device: {"max_shared_mem": 232448}
            self.launcher_cls = CudaLauncher
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = lambda device: STREAM
            self.get_current_device = lambda: 0

    driver.set_active(Driver())
    return launches
