"""The CUDA driver's functions that launches need, through ctypes. All of them are documented.

`Driver` has these functions: it loads binaries, launches them, and encodes tensor maps, the descriptors that TMA reads.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diyfa.backends.cuda.runtime.torch_private import current_device

if TYPE_CHECKING:
    from diyfa.backends.cuda.runtime.launcher import PreparedLaunch
    from diyfa.backends.cuda.runtime.signature import Tiles

_TMA_TYPES = {  # CUtensorMapDataType
    torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.int8: 0, torch.int32: 3, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.bfloat16: 9,
}  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID: the kernel may begin before the one before it ends
_MAX_DYNAMIC_SHARED_SIZE = 8  # CUfunction_attribute
_PREFER_SHARED = 1  # CUfunc_cache: the multiprocessor's memory serves as shared memory, so that more programs fit
_INVALID_CONTEXT = 201
_REFUSED = 200, 209, 222, 223  # an invalid image, none for this GPU, PTX or a compiler's version that is not supported
_L2_PROMOTION_128B = 2
# Rank -> struct of the arrays that cuTensorMapEncodeTiled reads: shape, strides in bytes, box, element strides.
_MAP_ARRAYS = {rank: struct.Struct(f"<{rank}Q{rank - 1}Q8x{rank}I{rank}I") for rank in range(2, 6)}
_ONES = (1,) * 5
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel may have without a request


class BinaryRefused(RuntimeError):
    """The driver cannot load a binary: it is damaged, for other GPUs, or for a newer driver."""


class Driver:
    """The functions of the CUDA driver that a launch needs. They raise RuntimeError with the driver's reason."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        # These three get arguments of C's types: conversions would take as long as the calls.
        self.launch_function = library.cuLaunchKernelEx
        self._encode = library.cuTensorMapEncodeTiled
        self._replace_address = library.cuTensorMapReplaceAddress
        # Memory in which tensor maps are encoded: the map, then `_MAP_ARRAYS` of up to five dimensions.
        self._memory = ctypes.create_string_buffer(64 + 128 + _MAP_ARRAYS[5].size)
        self._bytes = memoryview(self._memory).cast("B")
        self._begin = -ctypes.addressof(self._memory) % 64  # the driver requires this alignment of the map
        at = ctypes.addressof(self._memory) + self._begin
        self._map = ctypes.c_void_p(at)
        self._arrays = {  # rank -> shape, strides, box, element strides
            rank: [ctypes.c_void_p(at + 128 + x) for x in (0, 8 * rank, 16 * rank, 20 * rank)] for rank in _MAP_ARRAYS
        }
        self._lock = threading.Lock()  # guards this memory
        version = ctypes.c_int()
        self.check(library.cuDriverGetVersion(ctypes.byref(version)))
        self._sets_wrong_bit = version.value <= 13010  # in maps of small tensors

    def check(self, result: int) -> None:
        """Raise RuntimeError, or `BinaryRefused`, unless a function's result is 0."""
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(text))
            kind = BinaryRefused if result in _REFUSED else RuntimeError
            raise kind(f"CUDA driver: {(text.value or b'unknown error').decode()} ({result})")

    def load(self, cubin: bytes, name: str, shared: int) -> int:
        """Load a binary on the current device and return the handle of its function `name`."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        result = self._library.cuModuleLoadData(ctypes.byref(module), cubin)
        if result == _INVALID_CONTEXT:
            self.set_context()
            result = self._library.cuModuleLoadData(ctypes.byref(module), cubin)
        self.check(result)
        self.check(self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        if shared > STATIC_SHARED:
            self.check(self._library.cuFuncSetCacheConfig(function, _PREFER_SHARED))
            self.check(self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, shared))
        assert function.value is not None
        return function.value

    def set_context(self) -> None:
        """Give this thread the context of the current device: its primary context, which PyTorch uses."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self._library.cuDeviceGet(ctypes.byref(device), current_device()))
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self._library.cuCtxSetCurrent(context))

    def launch_again(self, result: int, prepared: PreparedLaunch) -> None:
        """Launch once more if `result` says that this thread has no context yet. Raises RuntimeError otherwise."""
        if result == _INVALID_CONTEXT:
            self.set_context()
            result = self.launch_function(*prepared.arguments)
        self.check(result)

    def encode(self, tiles: Tiles, address: int, box: Sequence[int], swizzle: int) -> bytes:
        """Return the tensor map of a tensor at `address` with the metadata of `tiles`. `box`: shape of one copy."""
        base, shape, strides, _ = tiles
        dtype, rank, begin = base.dtype, len(box), self._begin
        size = dtype.itemsize
        steps = [size * x for x in strides[-2::-1]]
        with self._lock:
            _MAP_ARRAYS[rank].pack_into(self._memory, begin + 128, *shape[::-1], *steps, *box[::-1], *_ONES[:rank])
            # The zeros: no interleave, and zeros beyond the bounds.
            result = self._encode(
                self._map, _TMA_TYPES[dtype], rank, ctypes.c_void_p(address), *self._arrays[rank], 0, swizzle,
                _L2_PROMOTION_128B, 0,
            )  # fmt: skip
            if self._sets_wrong_bit and not result and _elements_between_ends(shape, strides) * size < 128 * 1024 - 1:
                # CUTLASS and Triton clear this bit, too.
                self._bytes[begin + 10] &= ~(1 << 5)
            encoded = bytes(self._bytes[begin : begin + 128])
        if result:
            self.check(result)
        return encoded

    def moved(self, encoded: bytes, address: int) -> bytes:
        """Return the tensor map `encoded` with another address, in less time than `encode` takes."""
        begin = self._begin
        with self._lock:
            self._bytes[begin : begin + 128] = encoded
            result = self._replace_address(self._map, ctypes.c_void_p(address))
            moved = bytes(self._bytes[begin : begin + 128])
        if result:
            self.check(result)
        return moved


def _elements_between_ends(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])


_driver: list[Driver] = []


def driver() -> Driver:
    if not _driver:
        _driver.append(Driver())
    return _driver[0]


def aligned_memory(size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Return new memory and the address of `size` bytes in it, a multiple of 64: tensor maps are aligned so."""
    memory = (ctypes.c_char * (size + 63))()
    return memory, ctypes.addressof(memory) + -ctypes.addressof(memory) % 64


class TensorMaps(dict[int, int]):
    """Address of a tensor -> address of its tensor map, for one descriptor of a kernel.

    All maps are `encoded` with other addresses. A map stays valid if the tensor's memory is freed and allocated anew.
    """

    MAX_SIZE = 256  # a model has one or a few addresses for each layer

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self._encoded = encoded
        self._memory: list[ctypes.Array[ctypes.c_char]] = []

    def __missing__(self, address: int) -> int:
        if len(self) >= self.MAX_SIZE:
            self.clear()
            self._memory.clear()
        memory, begin = aligned_memory(128)
        ctypes.memmove(begin, driver().moved(self._encoded, address), 128)
        self._memory.append(memory)
        self[address] = begin
        return begin
