"""The signature of a launch: the kinds of its arguments, which its binary is compiled for, and their values.

Values of numbers are not among the kinds, so a new length, batch or stride never compiles. Exceptions are strides of 1
and alignment to 16 bytes.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, NamedTuple

import torch

from diyfa.problem import Launch

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
