"""The launches of a call repeated past Triton's launcher, for other tensors that lie in memory alike.

Triton binds and specialises the arguments of each launch, asks each tensor for its address, asks the driver whether the
device can read it, encodes descriptors and goes through two functions in Python. For a call that is equal to an earlier
one but for addresses all that is known, so `replay_of` calls the compiled kernel's function in C with addresses.

This is where private parts of Triton and PyTorch are used. `launch_kernel` in `runtime/launch.py` is the public way to
the same launch; it is taken for a first call, and for each one where Triton's launcher is not the known one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import driver

from diyfa.backends.cuda.runtime.launch import COMPILE_OPTIONS, current_device, on_device
from diyfa.backends.cuda.runtime.versions import TRITON
from diyfa.problem import Launch

IS_KNOWN = TRITON in ((3, 6), (3, 7), (3, 8), (3, 9))  # whose launchers `_call_of` and `_encoded` know

_runtime = triton.knobs.runtime
Address = int | None
Relaunch = Callable[[int, Sequence[Address]], None]  # (stream, addresses) -> launched on the current device
# (addresses, their tensors, the first of what is made or None, all of it?) -> what is made
Replay = Callable[..., list[Any] | None]


class TensorMaps:
    """The arguments that one tensor read through TMA becomes, by its address.

    Encoding a descriptor is a driver call of 3 us. While a tensor keeps its address, shape and strides, so does its
    encoded form, whatever memory was freed and given out again meanwhile.
    """

    LIMIT = 256  # addresses of one argument

    def __init__(self, descriptor: Any, metadata: dict[str, Any]) -> None:
        self._descriptor, self._metadata = _at(descriptor, None), metadata  # without the tensor, which may go
        self._known: dict[Address, Sequence[Any]] = {}

    def arguments(self, address: Address) -> Sequence[Any]:
        """(encoded descriptor, *shape, *strides)"""
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            found = self._known[address] = _encoded(_at(self._descriptor, address), self._metadata)
        return found


def _at(descriptor: Any, address: Address) -> Any:
    """`descriptor` of what lies at `address`, with no tensor behind it."""
    other = copy(descriptor)
    other.base = SimpleNamespace(data_ptr=lambda: address)
    return other


def is_descriptor(x: object) -> bool:
    """Whether an argument describes a tensor to TMA."""
    return hasattr(x, "block_shape")


# ---- what differs between versions of Triton, and what its launchers keep to themselves


def _function_and_metadata(launcher: Any, has_descriptors: bool) -> tuple[Any, list[dict[str, Any]]] | None:
    """The function in C behind `launcher`, and what it encodes each descriptor with. None for an unknown launcher."""
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None  # memory of its own, or of Triton's sanitizer
    launch = launcher.launch
    if not has_descriptors:
        return (launch, []) if isinstance(launch, BuiltinFunctionType) else None
    if not inspect.isfunction(launch):
        return None
    inside = inspect.getclosurevars(launch).nonlocals  # of the wrapper that encodes
    metadata = inside.get("tensordesc_meta")
    if "launcher" not in inside or not metadata or None in metadata:
        return None
    return inside["launcher"], metadata


def _encoded(descriptor: Any, metadata: dict[str, Any]) -> Sequence[Any]:
    """What Triton's launcher makes of a descriptor: (encoded descriptor, *shape, *strides)."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, metadata, *([None] if TRITON >= (3, 8) else []))


def _call_of(
    function: Any, compiled: Any, grid: int | tuple[int, ...], of_tensors: Callable[..., Any], tail: tuple[Any, ...]
) -> Relaunch:
    """`function`, which is in C, called as Triton's launcher calls it: `of_tensors` makes the kernel's first arguments
    of addresses, `tail` are the others.

    Before Triton 3.7 there is a function for each signature, which takes the arguments one by one. Since then there is
    one for all; it takes them as a list, and what each of them is.
    """
    launcher, for_hooks = compiled.run, (None, None, None)  # metadata for them, and two hooks
    of_axes = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
    attributes, scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
    # Both keep `compiled`: with the last that knows it, Triton may unload the function.
    if TRITON < (3, 7):
        given: tuple[Any, ...] = (*attributes, *scratch, compiled.packed_metadata, *for_hooks)

        def call(stream: int, addresses: Sequence[Address]) -> None:
            function(*of_axes, stream, compiled.function, *given, *of_tensors(addresses), *tail)
    else:
        kinds = (launcher.arg_annotations, launcher.kernel_signature)
        given = (*attributes, compiled.packed_metadata, *for_hooks, *scratch, *kinds)

        def call(stream: int, addresses: Sequence[Address]) -> None:
            function(*of_axes, stream, compiled.function, *given, (*of_tensors(addresses), *tail))

    return call


# ---- the same with every version


def relaunch_of(compiled: Any, launch: Launch, slots: Mapping[str, int]) -> Relaunch | None:
    """How to launch `compiled`, which `launch` was compiled to, again with other addresses.

    `slots`: where the address of each tensor argument is found, by name. None where this Triton's launcher is not the
    known one, or the kernel needs memory of its own.
    """
    if not IS_KNOWN:
        return None
    names = launch.kernel.arg_names
    values = launch.arguments | launch.constants
    first = len(slots)  # tensors come first
    if set(names[:first]) != slots.keys():
        return None
    described = [is_descriptor(values[name]) for name in names[:first]]
    found = _function_and_metadata(compiled.run, any(described))
    if found is None:
        return None
    function, metadata = found
    tail = tuple(values[name] for name in names[first:])
    of_tensors = itemgetter(*(slots[name] for name in names[:first]))  # several, so a tuple
    if not metadata:
        return _call_of(function, compiled, launch.grid, of_tensors, tail)
    of_each = iter(metadata)
    maps = [
        TensorMaps(values[name], next(of_each)) if is_one else None
        for name, is_one in zip(names[:first], described, strict=True)
    ]

    def with_maps(addresses: Sequence[Address]) -> list[Any]:
        arguments: list[Any] = []
        for address, map_ in zip(of_tensors(addresses), maps, strict=True):
            if map_ is None:
                arguments.append(address)
            else:
                arguments.extend(map_.arguments(address))
        return arguments

    return _call_of(function, compiled, launch.grid, with_maps, tail)


def allocator_of(device_type: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """(sizes, strides, dtype) -> uninitialised memory on the current device of that type.

    PyTorch has a function for its compiler's programs that goes past the dispatcher, at a third of the time.
    """
    compilers: Any = torch._C._dynamo.guards
    fast = getattr(compilers, f"_empty_strided_{device_type}", None)
    if fast is not None:
        return fast
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)


def launches_are_hooked() -> bool:
    """Whether a profiler wants to be called at each launch of Triton's."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return bool(leave is not None and getattr(leave, "calls", True))


def current_device_of(x: torch.Tensor) -> Callable[[], int]:
    """Asks for the current device of x's type; CPU tensors, which stand in for CUDA's, are always on theirs."""
    return current_device if x.is_cuda else lambda: -1


def replay_of(
    launches: Sequence[Launch],
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    choice: Callable[[], object],
    own: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    numbers: Sequence[str] = (),
    room: int | None = None,
) -> Replay | None:
    """How to run `launches` for other tensors -> a function of the addresses of `given`, or None.

    The function allocates what `made` is, launches and returns it; the first of them may be given to it instead. It
    returns None, having done nothing, where `choice` answers otherwise than now, or a profiler wants to see launches.
    Not asked for all of what is made, it may return None for the second. Tensors are not looked at.

    Args:
        given: tensors of the call, different objects each.
        made: tensors that a call allocates; arguments that are not `given` lie in one of them.
        own: by an argument's name, what makes a tensor for it, from the first of `made`.
        numbers: arguments that are numbers of the call, which it gives behind the addresses. A kernel takes them behind
            its tensors, and is not compiled for their value.
        room: the byte of the third of `made`, and last, from which on there is room for the second where that is not
            asked for: an allocation takes 1 us.
    """
    if not all(hasattr(launch.kernel, "warmup") for launch in launches):  # interpreted
        return None
    # Addresses are kept in one list: those of `given`, `numbers`, None, the addresses of `made`, of `own`, and of what
    # lies inside of one of `made`.
    own = own or {}
    makers, names_of_own = list(own.values()), list(own)
    slots_of_given = {id(x): i for i, x in enumerate(given)}
    owners = [(x.untyped_storage().data_ptr(), x.data_ptr()) for x in made]
    nothing = len(given) + len(numbers)
    first_made = nothing + 1
    first_own, first_inside = first_made + len(made), first_made + len(made) + len(own)
    inside: list[tuple[int, int]] = []  # (index in `made`, bytes from its beginning)

    def slot(name: str, x: torch.Tensor | None) -> int | None:
        if x is None:
            return nothing
        if id(x) in slots_of_given:
            return slots_of_given[id(x)]
        if name in own:
            return first_own + names_of_own.index(name)
        storage = x.untyped_storage().data_ptr()
        for i, (owner, begin) in enumerate(owners):
            if storage == owner:
                place = i, x.data_ptr() - begin
                if not place[1]:
                    return first_made + i
                if place not in inside:
                    inside.append(place)
                return first_inside + inside.index(place)
        return None

    again: list[Relaunch] = []
    device = (*made, *given)[0]
    with on_device(device):  # kernels are compiled and loaded for the current one
        for launch in launches:
            slots: dict[str, int | None] = {}
            for name, x in launch.arguments.items():
                if type(x) is int or type(x) is float:  # most are, and they are asked least
                    continue
                base = x.base if is_descriptor(x) else x
                if base is None or isinstance(base, torch.Tensor):
                    slots[name] = slot(name, base)
            if None in slots.values():
                return None
            slots |= {name: len(given) + i for i, name in enumerate(numbers) if name in launch.arguments}
            options = COMPILE_OPTIONS | launch.options
            compiled = launch.kernel.warmup(**launch.arguments, **launch.constants, **options, grid=(launch.grid,))
            relaunch = None if compiled is None else relaunch_of(compiled, launch, slots)  # type: ignore[arg-type]
            if relaunch is None:
                return None
            again.append(relaunch)
    like = [(tuple(x.shape), x.stride(), x.dtype) for x in made]
    allocate, index, current = allocator_of(device.device.type), device.get_device(), current_device_of(device)
    chosen, stream_of = choice(), driver.active.get_current_stream

    def replay(
        addresses: Sequence[Address],
        present: Sequence[torch.Tensor] = (),
        first: torch.Tensor | None = None,
        whole: bool = True,
    ) -> list[Any] | None:
        if choice() != chosen or launches_are_hooked():
            return None
        if current() != index:
            with torch.cuda.device(index):
                return replay(addresses, present, first, whole)
        new: list[Any]
        if whole or room is None:
            new = [allocate(*x) for x in like] if first is None else [first, *[allocate(*x) for x in like[1:]]]
            every = [*addresses, None, *[x.data_ptr() for x in new]]
        else:
            new = [allocate(*like[0]) if first is None else first, None, allocate(*like[2])]
            begin = new[2].data_ptr()
            every = [*addresses, None, new[0].data_ptr(), begin + room, begin]
        if makers:
            kept = [make(new[0]) for make in makers]  # until all is launched
            every += [x.data_ptr() for x in kept]
        if inside:
            every += [every[first_made + i] + offset for i, offset in inside]
        stream = stream_of(index)
        for relaunch in again:
            relaunch(stream, every)
        return new

    return replay
