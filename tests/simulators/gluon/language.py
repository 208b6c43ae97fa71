"""The Gluon language in Python: rebuilds a kernel's function so that its names refer to interpreted objects."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import triton.language.core as tl_core
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .errors import InvalidOperand, Race, location
from .loops import CARRIED, carrying_code
from .scheduler import current
from .wgmma import check_operands

unwrap = tl_core._unwrap_if_constexpr


def _semantic() -> Any:
    return current().program.semantic


def _with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of Triton's builtins as a function that kernels can call."""

    @wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        return lift(member(*args, **kwargs, _semantic=_semantic()))

    return call


def _is_builtin(member: Any) -> bool:
    """Return whether `member` is a builtin. Some methods are not marked as such (`slice` in Triton 3.9)."""
    return tl_core.is_builtin(member) or (
        inspect.isfunction(member) and "_semantic" in inspect.signature(member).parameters
    )


def _interpreted_members(cls: type) -> dict[str, Any]:
    return {name: _with_semantic(m) for name, m in vars(cls).items() if _is_builtin(m)}


class Tensor(tl_core.tensor):
    """A scalar, or a block of registers. `type.layout` is the block's layout."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        if self.type.is_block():
            raise InvalidOperand(f"a block as a condition at {location()}")
        return bool(self.handle.data.reshape(-1)[0])

    def __index__(self) -> int:
        if self.type.is_block() or not self.dtype.is_int():
            raise InvalidOperand(f"{self.type} as a number at {location()}")
        return int(self.handle.data.reshape(-1)[0])

    def __repr__(self) -> str:
        return f"{self.type}: {self.handle.data}"


class SharedMemory(gl.shared_memory_descriptor):
    """A view of shared memory."""


class Accumulator(hopper.warpgroup_mma_accumulator):
    """The result of an asynchronous product. warpgroup_mma_wait makes it a tensor."""


class TensorDescriptor(hopper.tma.tensor_descriptor):
    """A host-made tensor map."""

    @property
    def block_shape(self) -> list[int]:  # the compiler joins lists and tuples alike
        return list(self.type.block_type.shape)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any) -> Any:
        raise Race(f"{location()} computes with ({name}) the accumulator of {self.handle.product.what} without a wait")

    return refuse


for _name, _member in _interpreted_members(tl_core.tensor).items():
    setattr(Tensor, _name, _member)
    if _name.startswith("__"):
        setattr(Accumulator, _name, _refuse(_name))
for _name in ("to", "reshape", "permute"):
    setattr(Accumulator, _name, _refuse(_name))
for _name, _member in _interpreted_members(gl.shared_memory_descriptor).items():
    setattr(SharedMemory, _name, _member)


_INTERPRETED = {
    tl_core.tensor: Tensor,
    gl.shared_memory_descriptor: SharedMemory,
    hopper.warpgroup_mma_accumulator: Accumulator,
}


def lift(x: Any) -> Any:
    """Turn Triton's values into the classes above, whose operators work outside of its compiler."""
    interpreted = _INTERPRETED.get(type(x))
    if interpreted is not None:
        x.__class__ = interpreted  # the fields are equal, and a new object would cost a quarter of all time
    if isinstance(x, (tuple, tl_core.tuple)):
        return tuple(lift(item) for item in x)
    return x


# ---- replacements of Triton's functions


def _reduction(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(input: Any, axis: Any = None, keep_dims: bool = False) -> Any:
        if isinstance(input, Accumulator):
            _refuse(name)(input)
        if input.dtype == gl.bfloat16:  # Triton reduces it in float32, too
            input = input.to(gl.float32)
        return lift(_semantic().reduce(input, unwrap(axis), function, unwrap(keep_dims)))

    return reduce


def _warpgroup_mma(a: Any, b: Any, acc: Any, **kwargs: Any) -> Any:
    check_operands(a, b, acc, current().num_warps)
    return lift(hopper.warpgroup_mma(a, b, acc, **kwargs, _semantic=_semantic()))


def _range(*bounds: Any, **hints: Any) -> Iterator[Any]:
    """Yield the loop variable as a number of the kernel, whose division rounds towards zero."""
    for i in builtins.range(*(int(unwrap(bound)) for bound in bounds)):
        yield lift(_semantic().to_tensor(i))


def _carried(value: Any) -> Any:
    """Return a value as a number of the kernel, before a loop that changes it."""
    value = unwrap(value)
    return lift(_semantic().to_tensor(value)) if isinstance(value, (bool, int, float)) else value


def _static_range(*bounds: Any) -> Iterator[int]:
    if any(isinstance(bound, tl_core.tensor) for bound in bounds):
        raise InvalidOperand(f"static_range at {location()} over a number that is not known when compiling")
    return iter(builtins.range(*(int(unwrap(bound)) for bound in bounds)))


_REPLACED = {
    id(gl.max): _reduction("max", np.fmax.reduce),
    id(gl.min): _reduction("min", np.fmin.reduce),
    id(gl.sum): _reduction("sum", np.sum),
    id(hopper.warpgroup_mma): _warpgroup_mma,
    id(gl.static_range): _static_range,
}


class _Module:
    """A module of Triton whose members are interpreted."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = translate(getattr(self._module, name))
        setattr(self, name, value)
        return value


_functions: dict[int, Any] = {}
_aggregates: dict[int, Any] = {}


def translate(value: Any) -> Any:
    """Return the interpreted object for a value of a kernel's namespace."""
    if id(value) in _REPLACED:
        return _REPLACED[id(value)]
    if isinstance(value, (JITFunction, InterpretedFunction)):
        if id(value) not in _functions:
            _functions[id(value)] = Function(value.fn)
        return _functions[id(value)]
    if getattr(value, "__triton_aggregate__", False):
        if id(value) not in _aggregates:
            _aggregates[id(value)] = _interpreted_aggregate(value)
        return _aggregates[id(value)]
    if isinstance(value, types.ModuleType) and value.__name__.startswith("triton."):
        return _Module(value)
    if tl_core.is_builtin(value):
        return _with_semantic(value)
    if isinstance(value, tl_core.constexpr) and type(value.value) in (int, float):
        return value.value  # a constexpr lacks some operations of a number
    return value


def _interpreted_aggregate(cls: type) -> type:
    """Return an aggregate class with interpreted methods, whose constants are plain values."""
    constructor = next(c.cell_contents for c in cls.__new__.__closure__ if isinstance(c.cell_contents, type))
    fields = constructor.__annotations__
    methods = {name: translate(member) for name, member in vars(cls).items() if isinstance(member, JITFunction)}

    class Aggregate(cls):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            if fields.get(name) is gl.tensor and isinstance(value, tl_core.constexpr):
                value = lift(_semantic().to_tensor(value))  # a number of the kernel
            super().__setattr__(name, value)

        def __getattribute__(self, name: str) -> Any:
            if name in methods:
                return types.MethodType(methods[name], self)
            value = super().__getattribute__(name)
            return value.value if name in fields and isinstance(value, tl_core.constexpr) else value

        def __eq__(self, other: object) -> Any:
            raise InvalidOperand(f"aggregates compared at {location()}")

        __hash__ = None  # type: ignore[assignment]

    Aggregate.__name__ = cls.__name__
    return Aggregate


class Function:
    """A `@gluon.jit` function as a callable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._original = function
        self.__name__ = function.__name__
        self._rebuilt: Callable[..., Any] | None = None
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        notes = getattr(function, "__annotations__", {})
        self.arg_names = list(names)
        self.constexprs = [name for name in names if "constexpr" in str(notes.get(name, ""))]
        defaults = function.__defaults__ or ()
        with_default = names[len(names) - len(defaults) :]
        self.tuple_defaults = {n for n, x in zip(with_default, defaults, strict=True) if isinstance(x, tuple)}

    def _rebuild(self) -> Callable[..., Any]:
        fn = self._original
        wanted = _names(fn.__code__)
        names = {name: translate(value) for name, value in fn.__globals__.items() if name in wanted}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            names[name] = translate(cell.cell_contents)  # in the new code it is a global
        names.update({"range": _range, CARRIED: _carried, "__builtins__": builtins})
        return types.FunctionType(carrying_code(fn), names, fn.__name__, fn.__defaults__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rebuilt is None:
            self._rebuilt = self._rebuild()
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for name in self.constexprs:
            if name in given:
                given[name] = unwrap(given[name])
                if isinstance(given[name], tl_core.tensor):
                    raise InvalidOperand(f"{self.__name__}: {name} is a constexpr, got {given[name].type}")
        if len(args) > len(self.arg_names):
            raise TypeError(f"{self.__name__} takes {len(self.arg_names)} arguments, got {len(args)}")
        for name in self.tuple_defaults - given.keys():
            raise InvalidOperand(f"{self.__name__}: a default cannot be a tuple, pass {name}")
        return self._rebuilt(**given)


@contextmanager
def jit_functions_as_values() -> Iterator[None]:
    """Interpret calls of jit functions that a kernel finds in a constant and not by name."""
    refusal = JITFunction.__call__
    JITFunction.__call__ = lambda self, *args, **kwargs: translate(self)(*args, **kwargs)
    try:
        yield
    finally:
        JITFunction.__call__ = refusal


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))
