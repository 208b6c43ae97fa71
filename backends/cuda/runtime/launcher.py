"""Launches of kernels through the CUDA driver, with a function handle and a buffer of parameters.

Triton only compiles, and only kernels that are not stored yet (`binaries.py`). The key of a binary is the kernel, its
constants and the kinds of its arguments. The values of numbers are not in it, so a new length, batch or stride never
compiles. Triton's own launch binds and specialises each argument anew, asks the driver about each pointer and encodes
each descriptor: with 40 arguments that takes 150 us. Here a launch packs a struct and calls the driver once.

If a profiler hooks Triton's launches, and in Triton's interpreter, the kernel is launched as Triton's users launch it.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

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
from diyfa.backends.cuda.runtime.torch_private import current_device, current_stream
from diyfa.problem import Launch

if TYPE_CHECKING:
    from diyfa.backends.cuda.runtime.binaries import StoredBinary

# Kinds of arguments: a dtype, "i32", "i64", "fp32", None, the stride 1, or the `Box` of a `Tiles`.
Kinds = tuple[Any, ...]
_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.float64: "fp64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int8: "i8",
    torch.bool: "i1",
}  # fmt: skip
_INT32 = 2**31
_FLOAT32 = 3.4028234663852886e38  # the largest number
# Strides that depend on lengths: of these, `Launch.aligned` lists those that are compiled as multiples of 16.
_DECLARED = ("stride_bias", "stride_out")


class Box:
    """Dtype and shape of a tile that TMA reads and, for Gluon, its layout in shared memory.

    `shared_box` makes them, so that equal ones are the same object: keys of binaries are compared quickly.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], layout: Any) -> None:
        self.dtype, self.shape, self.layout = dtype, shape, layout

    def __repr__(self) -> str:
        return f"Box({self.dtype}, {self.shape}, {self.layout})"


@cache
def shared_box(dtype: torch.dtype, shape: tuple[int, ...], layout: Any = None) -> Box:
    return Box(dtype, shape, layout)


class Tiles(NamedTuple):
    """Description of a tensor that TMA reads in tiles: a kernel's argument, which Triton calls a tensor descriptor."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]  # elements; the last is 1
    box: Box

    def for_triton(self) -> Any:
        """Return the descriptor that Triton's public launch takes."""
        arguments = self.base, list(self.shape), list(self.strides), list(self.box.shape)
        if self.box.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(*arguments)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*arguments, self.box.layout)


# ---- The key of a binary ------------------------------------------------------------------------------------------


class Signature(NamedTuple):
    """The kinds of a launch's arguments, in the kernel's order, and their values as the driver takes them."""

    kinds: Kinds
    values: list[Any]  # addresses, numbers, `Tiles`; None has no value
    aligned_pointers: bool
    aligned_strides: bool


def launch_signature(launch: Launch) -> Signature:
    """Return the kinds and values of the arguments. Every launch runs this, so Python loops over few of them.

    1. Pick the arguments in the kernel's order, and find where their kinds stand (`_ArgumentIndices`).
    2. Replace tensors by their addresses, and floats beyond float32 by infinity.
    3. Look the kinds up by the dtypes of tensors and the boxes of `Tiles`. Rare numbers change them: strides of 1, and
       numbers of 64 bits.

    Pointers count as aligned only if all of them are, and so do strides: a kernel has few variants.
    """
    arguments = _arguments(launch.kernel)
    all_values = arguments.pick(launch.arguments)
    indices = arguments.indices(tuple(map(type, all_values)))
    values = list(indices.present(all_values))
    memory_kinds: list[Any] = []
    address_bits = stride_bits = 0  # addresses and strides whose alignment counts, joined by or; low bits 0: aligned
    for i, is_read_wide in indices.tensors:
        x = values[i]
        memory_kinds.append(x.dtype)
        address = values[i] = x.data_ptr()
        if is_read_wide:
            address_bits |= address
    for i in indices.tiles:
        memory_kinds.append(values[i].box)
    for i in indices.floats:
        x = values[i]
        if not -_FLOAT32 <= x <= _FLOAT32:
            values[i] = ctypes.c_float(x).value  # inf, as C converts it
    for x in indices.aligned_strides(all_values):
        if x != 1:
            stride_bits |= x
    kinds, numbers = indices.kinds(tuple(memory_kinds)), indices.numbers(all_values)
    if numbers and (1 in indices.strides(all_values) or max(numbers) >= _INT32 or min(numbers) < -_INT32):
        kinds, values = _with_unusual_numbers(arguments.each, kinds, all_values, values)
    return Signature(kinds, values, not address_bits & 15, not stride_bits & 15)


def _with_unusual_numbers(
    arguments: tuple[_Argument, ...], kinds: Kinds, originals: Sequence[Any], values: list[Any]
) -> tuple[Kinds, list[Any]]:
    """Return `kinds` and `values` with the kind "i64" for numbers of 64 bits, and without values for strides of 1.

    Strides of 1 are compiled in. `originals`: the values before None was left out.
    """
    new_kinds: list[Any] = []
    new_values: list[Any] = []
    remaining = iter(values)
    for argument, kind, x in zip(arguments, kinds, originals, strict=True):
        value = None if kind is None else next(remaining)
        if kind == "i32" and argument.is_stride and x == 1:
            new_kinds.append(1)
            continue
        new_kinds.append("i64" if kind == "i32" and not -_INT32 <= x < _INT32 else kind)
        if kind is not None:
            new_values.append(value)
    return tuple(new_kinds), new_values


class _Argument(NamedTuple):
    """An argument of a kernel that is no constant."""

    name: str
    is_read_wide: bool  # a pointer whose alignment changes the kernel
    is_stride: bool  # a stride that may be 1
    is_aligned_stride: bool  # a stride that changes the kernel if it is a multiple of 16


class _Arguments:
    """All arguments of a kernel that are no constants."""

    def __init__(self, kernel: Any) -> None:
        strides = {x.name for x in kernel.params if x.name.startswith("stride_") and not x.do_not_specialize}
        self.each = tuple(
            _Argument(
                x.name,
                not (x.do_not_specialize or x.do_not_specialize_on_alignment),
                x.name in strides,
                x.name in strides and not x.name.startswith(_DECLARED),
            )
            for x in kernel.params
            if not x.is_constexpr
        )
        self.names = tuple([x.name for x in self.each])
        self.pick = _picker(self.names)
        self.indices_by_types: dict[tuple[type, ...], _ArgumentIndices] = {}

    def indices(self, types: tuple[type, ...]) -> _ArgumentIndices:
        """Return where each kind of argument stands in a launch with arguments of these types."""
        indices = self.indices_by_types.get(types)
        if indices is None:
            indices = self.indices_by_types[types] = _ArgumentIndices(self.each, types)
        return indices


class _ArgumentIndices:
    """The indices of tensors, tiles and numbers among a kernel's arguments, for one tuple of their Python types."""

    def __init__(self, arguments: tuple[_Argument, ...], types: tuple[type, ...]) -> None:
        present = [i for i, kind in enumerate(types) if kind is not NoneType]
        value_index = {i: position for position, i in enumerate(present)}  # among the values
        self.present = _picker(present)
        self.numbers = _picker([i for i in present if types[i] is int])
        self.strides = _picker([i for i in present if types[i] is int and arguments[i].is_stride])
        self.aligned_strides = _picker([i for i in present if types[i] is int and arguments[i].is_aligned_stride])
        self.floats = [value_index[i] for i in present if types[i] is float]
        self.tiles = [value_index[i] for i in present if types[i] is Tiles]
        tensors = [i for i in present if types[i] not in (int, float, Tiles)]
        self.tensors = [(value_index[i], arguments[i].is_read_wide) for i in tensors]
        self._order = [*tensors, *[i for i in present if types[i] is Tiles]]
        self._scalar_kinds = [{int: "i32", float: "fp32"}.get(kind) for kind in types]
        self._known: dict[tuple[Any, ...], Kinds] = {}

    def kinds(self, memory_kinds: tuple[Any, ...]) -> Kinds:
        """Return the kinds of all arguments. `memory_kinds`: those of the tensors, then those of the `Tiles`."""
        known_kinds = self._known.get(memory_kinds)
        if known_kinds is None:
            kinds = list(self._scalar_kinds)
            for i, kind in zip(self._order, memory_kinds, strict=True):
                kinds[i] = kind
            known_kinds = self._known[memory_kinds] = tuple(kinds)
        return known_kinds


def _picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks these items from a sequence or a dictionary, at the speed of C."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[i] for i in keys])


_arguments_by_kernel: dict[Any, _Arguments] = {}


def _arguments(kernel: Any) -> _Arguments:
    function = kernel.fn  # Triton's own hash of a kernel reads its source
    arguments = _arguments_by_kernel.get(function)
    if arguments is None:
        arguments = _arguments_by_kernel[function] = _Arguments(kernel)
    return arguments


def arguments_among(kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are a kernel's arguments, by name."""
    if not hasattr(kernel, "params"):  # interpreted
        return {name: values[name] for name in runtime_names(kernel)}
    arguments = _arguments(kernel)
    return dict(zip(arguments.names, arguments.pick(values), strict=True))


def runtime_names(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's arguments that are no constants."""
    if not hasattr(kernel, "params"):  # interpreted
        return tuple(name for name in kernel.arg_names if name not in ("c", "config"))
    return _arguments(kernel).names


def _type_name(kind: Any) -> str:
    """Return the type of an argument of this kind, in Triton's notation."""
    if isinstance(kind, str):
        return kind
    if isinstance(kind, torch.dtype):
        return f"*{_TYPES[kind]}"
    block, layout = ",".join(map(str, kind.shape)), "" if kind.layout is None else f",{kind.layout!r}"
    return f"tensordesc<{_TYPES[kind.dtype]}[{block}]{layout}>"


class Source(NamedTuple):
    """The input of Triton's compiler by name: types, constants, and the multiples of 16 among the arguments."""

    types: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]


def kernel_source(launch: Launch, signature: Signature) -> Source:
    """Return what Triton compiles for a launch with this signature."""
    types: dict[str, str] = {}
    constants = dict(launch.constants)
    aligned = set(launch.aligned)
    for x, kind in zip(_arguments(launch.kernel).each, signature.kinds, strict=True):
        if kind is None or kind == 1:
            constants[x.name] = kind
            continue
        types[x.name] = _type_name(kind)
        if isinstance(kind, torch.dtype):
            is_aligned = x.is_read_wide and signature.aligned_pointers
        else:
            is_aligned = x.is_aligned_stride and signature.aligned_strides
        if is_aligned:
            aligned.add(x.name)
    return Source(types, constants, frozenset(aligned))


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
