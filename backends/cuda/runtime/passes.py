"""A pass: all launches of one operation, and their replay for other tensors of equal shapes and strides.

A replay replaces only the tensors' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from diyfa.backends.cuda.runtime.launch import may_compile, on_device
from diyfa.backends.cuda.runtime.launcher import (
    Tiles,
    binary_of,
    launch_kernel,
    launches_are_hooked,
    load_kernel,
    runtime_names,
    signature_of,
)
from diyfa.backends.cuda.runtime.torch_private import allocator_of, current_device, current_stream
from diyfa.problem import Launch


class Pass(NamedTuple):
    """All launches of an operation, described before any of them is launched.

    `memory`: uninitialised tensors that the launches write besides the results. `own`: functions that make the tensor
    of an argument from the first result. `finish`: what PyTorch's operators do after the launches. `given`: the tensors
    that the launches read, in the order of the call's tensors, if they are views of these. `is_settled` returns whether
    an equal call takes the same tile as long as `choice` of its launcher returns the same; None: it does.
    """

    launches: Sequence[Launch]
    memory: Sequence[torch.Tensor] = ()
    own: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None
    finish: Callable[[], None] | None = None
    given: Sequence[torch.Tensor] | None = None
    is_settled: Callable[[], bool] | None = None


def launch_each(launches: Sequence[Launch]) -> None:
    """Launch on the current device and stream. If a binary is missing and must not be compiled, launch none of them."""
    if len(launches) > 1 and not may_compile():
        for launch in launches:
            load_kernel(launch)
    for launch in launches:
        launch_kernel(launch)


Relaunch = Callable[[int, Sequence[int]], None]  # (stream, addresses): launches on the current device
# (addresses, their tensors, the first result or None, whether all results are wanted) -> results
Replay = Callable[..., list[Any] | None]


def relaunch_of(launch: Launch, slots: Mapping[str, int]) -> Relaunch:
    """Return a function that repeats `launch` on the current device with other addresses and numbers.

    `slots`: argument name -> index of its value in the addresses.
    """
    signature = signature_of(launch)
    binary = binary_of(launch, signature, current_device())
    template = binary.encoded(signature.values)
    places: list[tuple[int, int]] = []  # (index in the template, slot)
    maps: list[tuple[int, int, int, Tiles, Hashable]] = []
    index = number = 0
    for name, kind in zip(runtime_names(launch.kernel), signature.kinds, strict=True):
        if kind is None or kind == 1:
            continue
        x = launch.arguments[name]
        if type(x) is Tiles:
            like = x._replace(base=x.base.new_empty(0))  # only for its dtype: this holds no tensor of the call
            maps.append((index, slots[name], number, like, binary.place_of(number, x)))
            number += 1
            index += 1 + 2 * len(x.shape)
            continue
        if name in slots:
            places.append((index, slots[name]))
        index += 1
    grid: Any = (*(launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)), 1, 1)[:3]

    def relaunch(stream: int, addresses: Sequence[int]) -> None:
        values = template[:]  # a copy: other threads launch, too
        for place, slot in places:
            values[place] = addresses[slot]
        for place, slot, number, like, where in maps:
            values[place] = binary.tensor_map(number, like, addresses[slot], where)
        binary.launch(grid, stream, values)

    return relaunch


class _Slots:
    """The indices of a replay's values in one list.

    The list has the addresses of `given`, `numbers`, the addresses of `made`, of the tensors that `Pass.own` makes, and
    of views inside of `made`.
    """

    def __init__(
        self, given: Sequence[torch.Tensor], numbers: Sequence[str], made: Sequence[torch.Tensor], own: Sequence[str]
    ) -> None:
        self._given = {id(x): i for i, x in enumerate(given)}
        self._numbers = {name: len(given) + i for i, name in enumerate(numbers)}
        self.first_made = len(given) + len(numbers)
        self._made = [(x.untyped_storage().data_ptr(), x.data_ptr()) for x in made]
        self._own = {name: self.first_made + len(made) + i for i, name in enumerate(own)}
        self.inside: list[tuple[int, int]] = []  # views: (index in `made`, bytes from its beginning)

    def of_launch(self, launch: Launch) -> dict[str, int] | None:
        """Return the indices by argument name, or None if a tensor's memory is unknown."""
        found = {name: i for name, i in self._numbers.items() if name in launch.arguments}
        for name, x in launch.arguments.items():
            base = x.base if type(x) is Tiles else x
            if isinstance(base, torch.Tensor):
                index = self._given.get(id(base), self._own.get(name))
                if index is None:
                    index = self._within_made(base)
                if index is None:
                    return None
                found[name] = index
        return found

    def _within_made(self, x: torch.Tensor) -> int | None:
        storage = x.untyped_storage().data_ptr()
        for i, (owner, begin) in enumerate(self._made):
            if storage == owner:
                place = i, x.data_ptr() - begin
                if not place[1]:
                    return self.first_made + i
                if place not in self.inside:
                    self.inside.append(place)
                return self.first_made + len(self._made) + len(self._own) + self.inside.index(place)
        return None


def current_device_of(x: torch.Tensor) -> Callable[[], int]:
    """Return a function that returns the current device of x's type. CPU tensors, stand-ins for CUDA's, are on -1."""
    return current_device if x.is_cuda else lambda: -1


def replay_of(
    found: Pass,
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    choice: Callable[[], object],
    numbers: Sequence[str] = (),
    lse_is_optional: bool = False,
) -> Replay | None:
    """Return a function that repeats the launches of a pass with other addresses of `given`, or None if it cannot.

    The function allocates tensors like `made` and the pass's memory, launches, and returns them. The caller may pass
    the first of them. If `choice` returns something else than now, or a profiler hooks launches, the function does
    nothing and returns None. If the caller does not want all results, the second may be None. No tensor is inspected.

    Args:
        given: tensors of the call, all different objects.
        made: tensors that a call allocates. Arguments that are not `given` are in their memory, or in the pass's.
        numbers: names of arguments that are numbers of the call. Their values follow the addresses. The kernel has them
            behind its tensors, and is not compiled for their values.
        lse_is_optional: `made` is out and lse. If lse is not wanted and the pass has memory, lse is put behind it, for
            an allocation takes 1 us.
    """
    launches, own = found.launches, found.own or {}
    if not launches or found.finish is not None:
        return None
    if not all(hasattr(launch.kernel, "params") for launch in launches):  # interpreted
        return None
    made = [*made, *found.memory]
    slots, again = _Slots(given, numbers, made, list(own)), list[Relaunch]()
    device = (*made, *given)[0]
    with on_device(device):  # kernels are tuned, compiled and loaded for the current device
        if found.is_settled is not None and not found.is_settled():
            return None
        for launch in launches:
            of_launch = slots.of_launch(launch)
            if of_launch is None:
                return None
            again.append(relaunch_of(launch, of_launch))
    makers, inside, first_made = list(own.values()), slots.inside, slots.first_made
    like = [(tuple(x.shape), x.stride(), x.dtype) for x in made]
    room = None  # offset in bytes of lse in the memory, if lse may be put there
    if lse_is_optional and len(made) == 3:
        elements = -(-made[2].numel() // 4) * 4  # a multiple of 4, so that lse is aligned
        room = elements * made[2].element_size()
        like[2] = (elements + made[1].numel(),), (1,), made[2].dtype
    allocate, index, current = allocator_of(device.device.type), device.get_device(), current_device_of(device)
    chosen, stream_of = choice(), current_stream

    def replay(
        addresses: Sequence[int],
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
            every = [*addresses, *[x.data_ptr() for x in new]]
        else:
            new = [allocate(*like[0]) if first is None else first, None, allocate(*like[2])]
            begin = new[2].data_ptr()
            every = [*addresses, new[0].data_ptr(), begin + room, begin]
        if makers:
            kept = [make(new[0]) for make in makers]  # referenced until all is launched
            every += [x.data_ptr() for x in kept]
        if inside:
            every += [every[first_made + i] + offset for i, offset in inside]
        stream = stream_of(index)
        for relaunch in again:
            relaunch(stream, every)
        return new

    return replay
