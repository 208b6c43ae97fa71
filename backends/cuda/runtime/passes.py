"""A pass: all launches of one operation, and their replay for other tensors of equal shapes and strides.

A replay replaces only the tensors' addresses. Its launches have memory of their own, which the driver reads, with all
that stays the same.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from diyfa.backends.cuda.runtime.driver import TensorMaps, driver
from diyfa.backends.cuda.runtime.launch import may_compile, on_device
from diyfa.backends.cuda.runtime.launcher import (
    Binary,
    PreparedLaunch,
    is_missing,
    launch_kernel,
    launches_are_hooked,
    load_kernels,
    loaded_binary,
)
from diyfa.backends.cuda.runtime.signature import Tiles, launch_signature, runtime_names
from diyfa.backends.cuda.runtime.torch_private import current_device, current_stream, make_allocator
from diyfa.problem import Launch


class Pass(NamedTuple):
    """All launches of an operation, described before any of them is launched."""

    launches: Sequence[Launch]
    memory: Sequence[torch.Tensor] = ()  # uninitialised tensors that the launches write besides the results
    # Name of an argument -> function that makes its tensor from the first result.
    derived: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None
    finish: Callable[[], None] | None = None  # what PyTorch's operators do after the launches
    # The tensors that the launches read, in the order of the call's tensors; None: those are the call's tensors.
    inputs: Sequence[torch.Tensor] | None = None
    # Returns whether no tile has yet to be measured, so that equal calls get the same tiles while `choice` of
    # `attention/launch.py` returns the same; None: no tile is measured.
    is_settled: Callable[[], bool] | None = None


def launch_each(launches: Sequence[Launch]) -> None:
    """Launch on the current device and stream. If a binary is missing, launch none before all are compiled."""
    if len(launches) > 1 and (not may_compile() or is_missing(launches[0])):
        load_kernels(launches)
    for launch in launches:
        launch_kernel(launch)


# (addresses and numbers, the first result or None, whether all results are wanted) -> results
Replay = Callable[..., list[Any] | None]


class RepeatedLaunch(NamedTuple):
    """A launch that is repeated with other addresses and numbers, the values of the pass.

    `parameters` are those of an earlier launch, as `Binary.encoded` returns them. `pointers` and `tensor_maps`: (index
    of a parameter, index of the value that is its address, or the number itself).
    """

    binary: Binary
    grid: tuple[int, int, int]
    parameters: list[Any]
    pointers: list[tuple[int, int]]
    tensor_maps: list[tuple[int, int]]


def make_repeated(launch: Launch, value_indices: Mapping[str, int]) -> RepeatedLaunch:
    """Describe how `launch` is repeated on the current device. `value_indices`: argument name -> index of its value."""
    signature = launch_signature(launch)
    binary = loaded_binary(launch, signature, current_device())
    pointers: list[tuple[int, int]] = []
    tensor_maps: list[tuple[int, int]] = []
    index = 0
    for name, kind in zip(runtime_names(launch.kernel), signature.kinds, strict=True):
        if kind is None or kind == 1:
            continue
        x = launch.arguments[name]
        if type(x) is Tiles:
            tensor_maps.append((index, value_indices[name]))
            index += 1 + 2 * len(x.shape)
            continue
        if name in value_indices:
            pointers.append((index, value_indices[name]))
        index += 1
    x, y, z = (*(launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)), 1, 1)[:3]
    return RepeatedLaunch(binary, (x, y, z), binary.encoded(signature.values), pointers, tensor_maps)


Relaunch = Callable[[int, list[int]], None]  # (stream, values): launches on the current device
RELAUNCHES = 512  # kept at most: with changing lengths there are thousands of plans, and each holds tensor maps
_idle_lists: deque[list[Relaunch]] = deque()  # for each relaunch that was made, its replay's `idle`; the oldest first


def make_relaunch(launches: Sequence[RepeatedLaunch], n_values: int) -> Relaunch:
    """Return a function that repeats the launches of a pass. Only one thread at a time may call it.

    Its memory, which the driver reads, has all parameters. A call writes only what changes: the values, and the
    pointers to tensor maps. The driver reads parameters that are among the values there.
    """
    memory = (ctypes.c_uint64 * n_values)()
    prepared_launches: list[tuple[Any, ...]] = []
    for launch in launches:
        prepared = PreparedLaunch(launch.binary)
        prepared.set(launch.grid, launch.parameters)
        for index, value_index in launch.pointers:
            prepared.pointers[index] = ctypes.addressof(memory) + 8 * value_index
        maps = [(index, i, TensorMaps(launch.parameters[index])) for index, i in launch.tensor_maps]
        prepared_launches.append((prepared, prepared.pointers, maps, prepared.config, prepared.arguments))
    launch_function = driver().launch_function

    def relaunch(stream: int, values: list[int]) -> None:
        memory[:] = values  # type: ignore[assignment]
        for prepared, pointers, maps, config, arguments in prepared_launches:
            for index, value_index, tensor_maps in maps:
                pointers[index] = tensor_maps[values[value_index]]
            config.stream = stream
            result = launch_function(*arguments)
            if result:
                driver().launch_again(result, prepared)

    return relaunch


class _ValueIndices:
    """The indices of launches' arguments in the list of a replay's values, which is one for all launches.

    The list has the addresses of inputs, the numbers, then the addresses of outputs (with the pass's memory), of
    derived tensors, and of views inside of outputs. `of_arguments` finds these views.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[str],
        outputs: Sequence[torch.Tensor],
        derived: Sequence[str],
    ) -> None:
        self._inputs = {id(x): i for i, x in enumerate(inputs)}
        self._numbers = {name: len(inputs) + i for i, name in enumerate(numbers)}
        self._first_output = len(inputs) + len(numbers)
        self._outputs = [(x.untyped_storage().data_ptr(), x.data_ptr()) for x in outputs]
        self._derived = {name: self._first_output + len(outputs) + i for i, name in enumerate(derived)}
        self._first_view = self._first_output + len(outputs) + len(derived)
        self.views: list[tuple[int, int]] = []  # (index of the output's address, bytes behind it)

    def __len__(self) -> int:
        return self._first_view + len(self.views)

    def of_arguments(self, launch: Launch) -> dict[str, int] | None:
        """Return argument name -> index, for arguments that change, or None if a tensor's memory is unknown."""
        indices = {name: i for name, i in self._numbers.items() if name in launch.arguments}
        for name, x in launch.arguments.items():
            base = x.base if type(x) is Tiles else x
            if isinstance(base, torch.Tensor):
                index = self._inputs.get(id(base), self._derived.get(name))
                if index is None:
                    index = self._of_output(base)
                if index is None:
                    return None
                indices[name] = index
        return indices

    def _of_output(self, x: torch.Tensor) -> int | None:
        storage = x.untyped_storage().data_ptr()
        for i, (output_storage, begin) in enumerate(self._outputs, self._first_output):
            if storage == output_storage:
                view = i, x.data_ptr() - begin
                if not view[1]:
                    return i
                if view not in self.views:
                    self.views.append(view)
                return self._first_view + self.views.index(view)
        return None


def device_getter(x: torch.Tensor) -> Callable[[], int]:
    """Return a function that returns the current device of x's type. CPU tensors, stand-ins for CUDA's, are on -1."""
    return current_device if x.is_cuda else lambda: -1


def make_replay(
    operation: Pass, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], choice: Callable[[], object],
    numbers: Sequence[str] = (), lse_is_optional: bool = False,
) -> Replay | None:  # fmt: skip
    """Return a function that repeats the launches of a pass with other addresses of `inputs`, or None if it cannot.

    The function allocates tensors like `outputs` and the pass's memory, launches, and returns them. The caller may pass
    the first of them. If `choice` returns something else than now, or a profiler hooks launches, the function does
    nothing and returns None. If the caller does not want all results, the second may be None. The function inspects no
    tensor.

    Args:
        inputs: tensors of the call, all different objects.
        outputs: tensors that a call allocates. Arguments that are not `inputs` are in their memory, or in the pass's.
        numbers: names of arguments that are numbers of the call. Their values follow the addresses. The kernel has them
            behind its tensors, and is not compiled for their values.
        lse_is_optional: `outputs` is out and lse. If lse is not wanted and the pass has memory, one allocation has
            both, because an allocation takes 1 us.
    """
    launches, derived = operation.launches, operation.derived or {}
    if not launches or operation.finish is not None:
        return None
    if not all(hasattr(launch.kernel, "params") for launch in launches):  # interpreted
        return None
    outputs = [*outputs, *operation.memory]
    indices, repeated = _ValueIndices(inputs, numbers, outputs, list(derived)), list[RepeatedLaunch]()
    device = (*outputs, *inputs)[0]
    with on_device(device):  # kernels are tuned, compiled and loaded for the current device
        if operation.is_settled is not None and not operation.is_settled():
            return None
        for launch in launches:
            value_indices = indices.of_arguments(launch)
            if value_indices is None:
                return None
            repeated.append(make_repeated(launch, value_indices))
    makers, views, n_values = list(derived.values()), indices.views, len(indices)
    layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in outputs]
    lse_offset = None  # offset in bytes of lse in the pass's memory, if lse may lie there
    if lse_is_optional and len(outputs) == 3:
        elements = -(-outputs[2].numel() // 4) * 4  # a multiple of 4, so that lse is aligned
        lse_offset = elements * outputs[2].element_size()
        layouts[2] = (elements + outputs[1].numel(),), (1,), outputs[2].dtype
    allocate, index, current = make_allocator(device.device.type), device.get_device(), device_getter(device)
    chosen, get_stream = choice(), current_stream
    idle: list[Relaunch] = []  # each call takes one from the list, as several threads may launch at once

    def replay(
        addresses: Sequence[int],
        first: torch.Tensor | None = None,
        returns_all: bool = True,
    ) -> list[Any] | None:
        if choice() != chosen or launches_are_hooked():
            return None
        if current() != index:
            with torch.cuda.device(index):
                return replay(addresses, first, returns_all)
        new: list[Any]
        if returns_all or lse_offset is None:
            new = [*starmap(allocate, layouts)] if first is None else [first, *starmap(allocate, layouts[1:])]
            values = [*addresses, *map(torch.Tensor.data_ptr, new)]
        else:
            new = [allocate(*layouts[0]) if first is None else first, None, allocate(*layouts[2])]
            begin = new[2].data_ptr()
            values = [*addresses, new[0].data_ptr(), begin + lse_offset, begin]
        if makers:
            derived_tensors = [make(new[0]) for make in makers]  # referenced until all is launched
            values += map(torch.Tensor.data_ptr, derived_tensors)
        if views:
            values += [values[i] + offset for i, offset in views]
        try:
            relaunch = idle.pop()
        except IndexError:
            relaunch = make_relaunch(repeated, n_values)
            _idle_lists.append(idle)
            if len(_idle_lists) > RELAUNCHES:
                _idle_lists.popleft().clear()  # its replay makes another when it needs one
        relaunch(get_stream(index), values)
        idle.append(relaunch)
        return new

    return replay
