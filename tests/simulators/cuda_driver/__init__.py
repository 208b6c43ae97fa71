"""A libcuda that records launches without a GPU. diyfa and Triton compile kernels for sm_90. See README.md.

    driver = install(folder)  # once in a process that has not loaded libcuda; a C compiler is needed, as for Triton
    kernel[(grid,)](*cpu_tensors, ...)
    driver.launches[-1].parameters  # the bytes of each of the kernel's parameters

`libcuda.c` beside this file replaces libcuda. Over it run diyfa's launcher, and Triton's JIT, ptxas, `driver.py`, and
`driver.c` compiled against it.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

STREAM = 77


@dataclass(frozen=True)
class Recorded:
    """One launch: (grid, block, shared memory), stream, (id, value) of attributes, and the bytes of each parameter."""

    shape: tuple[int, ...]
    stream: int
    attributes: tuple[tuple[int, ...], ...]
    parameters: tuple[bytes, ...]


def parameter_sizes(cubin: bytes) -> list[int]:
    """Return the bytes of each parameter of the one kernel in `cubin`, from its ELF's EIATTR_KPARAM_INFO records."""
    found = {}
    for record in re.finditer(rb"\x04\x17\x0c\x00(.{12})", cubin, re.DOTALL):
        _, ordinal, _, kind = struct.unpack("<IHHI", record[1])
        found[ordinal] = kind >> 18
    assert found.keys() == set(range(len(found)))
    return [found[i] for i in range(len(found))]


def size_of(elf: int) -> int:
    """Return the size in bytes of the ELF file at this address."""
    header = ctypes.string_at(elf, 64)
    programs, sections = struct.unpack_from("<2Q", header, 32)
    program_size, n_programs, section_size, n_sections = struct.unpack_from("<4H", header, 54)
    table = ctypes.string_at(elf + sections, section_size * n_sections)
    ends = [sum(struct.unpack_from("<2Q", table, section_size * i + 24)) for i in range(n_sections)]
    return max(*ends, programs + program_size * n_programs, sections + len(table))


class Simulated(NamedTuple):
    """The driver of this process."""

    libcuda: ctypes.CDLL  # also has the functions of `libcuda.c` that begin with "simulator_"
    launches: list[Recorded]


def _libcuda(folder: Path) -> ctypes.CDLL:
    library = folder / "libcuda.so.1"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).with_name("libcuda.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def install(folder: Path) -> Simulated:
    """Make diyfa and Triton launch to a list, and return the driver. Libraries are built in `folder`."""
    library = _libcuda(folder)
    import triton.knobs
    from triton.runtime import driver

    triton.knobs.nvidia.libcuda_path = str(folder)
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    import diyfa.backends.cuda.runtime.driver as cuda_driver
    import diyfa.backends.cuda.runtime.launcher as launcher
    import diyfa.backends.cuda.runtime.passes as passes

    launches: list[Recorded] = []
    loaded: list[list[int]] = [[]]  # [function's handle]: sizes of its parameters

    def load(cubin: bytes) -> int:
        loaded.append(parameter_sizes(cubin))
        return len(loaded) - 1

    def load_binary(name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        number = load(cubin)
        library.cuFuncSetAttribute(ctypes.c_void_p(number), 8, shared)
        return number, number, 32, 0, 1024  # module, function, registers, spills, threads

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def on_load(image: int) -> int:
        return load(ctypes.string_at(image, size_of(image)))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    def on_launch(config: int, function: int, parameters: Any) -> None:
        *shape, stream, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        ids = (struct.unpack("<I4xI", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count))
        given = tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(loaded[function]))
        launches.append(Recorded(tuple(shape), stream, tuple(ids), given))

    library.simulator_on_load(on_load)
    library.simulator_on_launch(on_launch)

    class Driver(CudaDriver):
        kept = library, on_load, on_launch

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
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    cuda_driver.current_device = lambda: 0
    for module in (launcher, passes):
        module.current_device = lambda: 0
        module.current_stream = lambda device: STREAM
    return Simulated(library, launches)
