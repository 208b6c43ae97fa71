"""Launches of kernels through the CUDA driver, with a function handle and a buffer of parameters.

Triton only compiles, and only kernels that are not stored yet (`binaries.py`). The key of a binary is the kernel, its
constants and the kinds of its arguments (`signature.py`). Triton's own launch binds and specialises each argument anew,
asks the driver about each pointer and encodes each descriptor: with 40 arguments that takes 150 us. Here a launch packs
a struct and calls the driver once.

If a profiler hooks Triton's launches, and in Triton's interpreter, the kernel is launched as Triton's users launch it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs  # an ImportError if Triton is too old, which the registry reports
from triton.runtime.errors import OutOfResources

from diyfa.arch import gpu_arch_name, gpu_spec
from diyfa.backends.cuda.runtime.driver import (
    PROGRAMMATIC_STREAM_SERIALIZATION,
    BinaryRefused,
    LaunchAttribute,
    LaunchConfig,
    aligned_memory,
    driver,
)
from diyfa.backends.cuda.runtime.launch import COMPILE_OPTIONS, may_compile
from diyfa.backends.cuda.runtime.signature import Box, Kinds, Signature, Tiles, launch_signature
from diyfa.backends.cuda.runtime.torch_private import current_device, current_stream
from diyfa.problem import Launch

if TYPE_CHECKING:
    from diyfa.backends.cuda.runtime.binaries import StoredBinary

# ---- A loaded binary ----------------------------------------------------------------------------------------------

_FORMATS = {"i32": (4, "i"), "i64": (8, "q"), "fp32": (4, "f")}


def parameter_layout(kinds: Kinds, scratch: int) -> tuple[str, list[int]]:
    """Return (format of `struct`, offset of each parameter) of a kernel with these arguments.

    A `Tiles` has three kinds of parameters: its tensor map, its shape and its strides. Triton adds `scratch` pointers
    behind the arguments.
    """
    fields: list[tuple[int, str]] = []
    for kind in kinds:
        if isinstance(kind, torch.dtype):
            fields.append((8, "Q"))
        elif isinstance(kind, Box):
            rank = len(kind.shape)
            fields += [(64, "128s"), *[(4, "i")] * rank, *[(8, "q")] * rank]
        elif kind is not None and kind != 1:
            fields.append(_FORMATS[kind])
    fields += [(8, "Q")] * scratch
    text, offset, offsets = "<", 0, []
    for alignment, code in fields:
        gap = -offset % alignment
        text += f"{gap}x{code}" if gap else code
        offsets.append(offset + gap)
        offset += gap + struct.calcsize(f"<{code}")
    return text, offsets


class PreparedLaunch:
    """Memory that the driver reads at a launch of one binary: grid, stream, parameters and pointers to the parameters.

    Only one thread at a time may use it.
    """

    def __init__(self, binary: Binary) -> None:
        stored, self._struct, self._scratch = binary.stored, binary.struct, (0,) * binary.stored.scratch
        self._memory, first = aligned_memory(self._struct.size)
        self._begin = first - ctypes.addressof(self._memory)
        self.pointers = (ctypes.c_void_p * len(binary.offsets))(*[first + x for x in binary.offsets])
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, (1,))
        self.config = LaunchConfig(
            1, 1, 1, 32 * stored.num_warps, 1, 1, stored.shared, None, ctypes.pointer(self._attribute),
            int(stored.launch_pdl),
        )  # fmt: skip
        self.arguments = ctypes.byref(self.config), ctypes.c_void_p(binary.function), self.pointers, None

    def set(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Set grid and parameters. `values`: as `Binary.encoded` returns them."""
        config = self.config
        self._struct.pack_into(self._memory, self._begin, *values, *self._scratch)
        config.grid_x, config.grid_y, config.grid_z = grid


class Binary:
    """A kernel on one device, ready to be launched."""

    def __init__(self, stored: StoredBinary, kinds: Kinds) -> None:
        self.stored = stored._replace(cubin=b"")
        layout, self.offsets = parameter_layout(kinds, stored.scratch)
        self.struct = struct.Struct(layout)
        tile_indices = [i for i, kind in enumerate([x for x in kinds if x not in (None, 1)]) if isinstance(kind, Box)]
        # The last comes first, because each becomes several values and moves those behind it.
        self._tiles = [*enumerate(tile_indices)][::-1]
        self._driver = driver()
        self.function = self._driver.load(stored.cubin, stored.name, stored.shared)
        self._prepared = PreparedLaunch(self)
        self._lock = threading.Lock()  # guards `_prepared`

    def encoded(self, values: Sequence[Any]) -> list[Any]:
        """Return the `values` of a signature with each `Tiles` replaced by its tensor map, shape and strides."""
        arguments, driver, maps = list(values), self._driver, dict[Any, bytes]()
        for number, index in self._tiles:
            base, shape, strides, box = x = arguments[index]
            copy, address = self.stored.boxes[number], base.data_ptr()  # copy: shape and swizzle of one TMA copy
            metadata = shape, strides, box, copy
            if metadata in maps:  # q, k, v and their gradients mostly differ in their addresses only
                encoded = driver.moved(maps[metadata], address)
            else:
                encoded = maps[metadata] = driver.encode(x, address, *copy)
            arguments[index : index + 1] = (encoded, *shape, *strides)
        return arguments

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        """Launch on a stream of the current device. `values`: as `encoded` returns them."""
        prepared = self._prepared
        with self._lock:
            prepared.set(grid, values)
            prepared.config.stream = stream
            result = self._driver.launch_function(*prepared.arguments)
            if result:
                self._driver.launch_again(result, prepared)


_binaries: dict[Any, Binary] = {}  # its size is bounded: lengths and batches are not in the key


def _key(launch: Launch, signature: Signature, device: int) -> Hashable:
    """Return the key of a loaded binary."""
    return (
        launch.kernel.fn,
        device,
        signature.kinds,
        signature.aligned_pointers,
        signature.aligned_strides,
        tuple(launch.constants.values()),
        tuple(launch.options.items()),
        launch.aligned,
    )


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return gpu_arch_name(major, minor)


def loaded_binary(launch: Launch, signature: Signature, device: int, stored: StoredBinary | None = None) -> Binary:
    """Return the binary that runs `launch` on this device. `stored`: what to load, if it was looked up already."""
    key = _key(launch, signature, device)
    binary = _binaries.get(key)
    if binary is None:
        from diyfa.backends.cuda.runtime import binaries

        arch = _arch(device)
        stored = stored or binaries.stored_binary(arch, launch, signature)
        spec, shared = gpu_spec(arch), stored.shared
        if spec is not None and shared > spec.shared_per_block:  # Triton's exception, at which the tuner skips the tile
            raise OutOfResources(shared, spec.shared_per_block, "shared memory")
        try:
            binary = Binary(stored, signature.kinds)
        except BinaryRefused as error:
            from diyfa.backends.cuda.runtime.pack import reject_pack

            if not reject_pack(arch, f"this driver cannot load its kernels ({error})"):
                raise
            return loaded_binary(launch, signature, device)  # without the pack
        _binaries[key] = binary
    return binary


def launches_are_hooked() -> bool:
    """Return whether a profiler hooks Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)  # Triton's chains of hooks
    except AttributeError:  # None, or a function that replaces a chain
        return any(hook is not None and getattr(hook, "calls", True) for hook in (enter, leave))


recorder: Callable[[Launch], None] | None = None  # gets launches instead of the driver: see recording.py


def is_for_triton(launch: Launch) -> bool:
    """Return whether to use Triton's own launch: for profilers that hook launches, and in the interpreter."""
    return launches_are_hooked() or not hasattr(launch.kernel, "params")


def is_missing(launch: Launch) -> bool:
    """Return whether the binary of `launch` has yet to be loaded on the current device."""
    if recorder is not None or is_for_triton(launch):
        return False
    return _key(launch, launch_signature(launch), current_device()) not in _binaries


def load_kernels(launches: Sequence[Launch]) -> None:
    """Load the binaries of several launches on the current device. Those not stored are compiled side by side."""
    described = [(launch, launch_signature(launch)) for launch in launches if is_missing(launch)]
    if not described:
        return
    device = current_device()
    missing = {_key(*each, device): each for each in described}
    stored: Iterable[StoredBinary | None] = [None] * len(missing)
    if len(missing) > 1 and may_compile():
        from concurrent.futures import ThreadPoolExecutor

        from diyfa.backends.cuda.runtime.binaries import stored_binary

        arch = _arch(device)
        with ThreadPoolExecutor(len(missing)) as pool:  # the compiler runs outside of Python's lock most of its time
            stored = list(pool.map(lambda each: stored_binary(arch, *each), missing.values()))
    for each, binary in zip(missing.values(), stored, strict=True):  # here: other threads have other current devices
        loaded_binary(*each, device, binary)


def launch_kernel(launch: Launch) -> None:
    """Launch on the current device and stream."""
    if recorder is not None:
        recorder(launch)
        return
    grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
    if is_for_triton(launch):
        launch_by_triton(launch)
        return
    device = current_device()
    signature = launch_signature(launch)
    binary = loaded_binary(launch, signature, device)
    x, y, z = (*grid, 1, 1)[:3]
    if x * y * z:
        binary.launch((x, y, z), current_stream(device), binary.encoded(signature.values))


def launch_by_triton(launch: Launch) -> None:
    """Launch as Triton's users do: in the interpreter, and for profilers that hook launches.

    Raises RuntimeError if Triton would compile and DIYFA_JIT=never.
    """
    if hasattr(launch.kernel, "params") and not may_compile():
        name = launch.kernel.fn.__name__
        raise RuntimeError(f"DIYFA_JIT=never, and Triton, whose launches a profiler hooks, would compile {name}")
    from diyfa.backends.cuda.gluon.inline_ptx import post_processing

    grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
    arguments = {name: x.for_triton() if type(x) is Tiles else x for name, x in launch.arguments.items()}
    with post_processing():
        launch.kernel[grid](**arguments, **launch.constants, **{**COMPILE_OPTIONS, **launch.options})
