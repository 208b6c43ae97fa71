"""What every CUDA launcher needs: the right current device, whether Triton interprets, and a cheap repeated launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diyfa.backends.cuda.runtime.replay import Relaunch, relaunch_of
from diyfa.backends.cuda.runtime.tensor_maps import Box


@triton.jit
def _probe():
    pass


# Asked of Triton itself, at the time the kernels are decorated: the environment may change later, they do not.
_INTERPRETING = not isinstance(_probe, JITFunction)
# Before 3.4 Triton keeps its hooks elsewhere and its compiled kernels take other arguments: they are launched its way.
_IS_DIRECT = hasattr(triton, "knobs")
_NOTHING: AbstractContextManager[None] = nullcontext()


def is_interpreting() -> bool:
    """Whether `@triton.jit` functions run in Triton's interpreter (on CPU tensors) instead of being compiled."""
    return _INTERPRETING


# Past a check that CUDA is initialised: there is a tensor on it. PyTorch without CUDA has no such function.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which the current CUDA device is that of `x`; it does nothing when it already is, or on the CPU."""
    index = x.get_device()
    if index < 0 or index == current_device():
        return _NOTHING
    return torch.cuda.device(index)


class Launch:
    """One kernel with everything fixed but its tensors.

    The first call goes through Triton, which binds, specialises and compiles. Where the tensors of later calls cannot
    change what it specialised on (`fixed`: same strides, addresses aligned alike, same device), they go straight to
    the compiled kernel; that takes a third of the host time. Profilers that hook launches get the ordinary way.
    """

    def __init__(
        self,
        fn: Any,
        grid: int,
        boxes: tuple[Box | None, ...],
        scalars: tuple[float, ...],
        constants: dict[str, object],
        schedule: dict[str, int],
        fixed: bool,
    ) -> None:
        self._fn, self._grid, self._boxes, self._scalars = fn, grid, boxes, scalars
        self._has_boxes = any(boxes)
        self._constants, self._schedule = constants, schedule
        self._fixed = fixed and _IS_DIRECT and not _INTERPRETING
        self._compiled: Any = None
        self.again: Relaunch | None = None  # once it is compiled, with this launch's grid and scalars
        names = fn.arg_names
        self._tail = (*scalars, *(constants[name] for name in names[len(boxes) + len(scalars) :]))

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device, the first tensor's, and stream; `boxes` says what is read through TMA."""
        compiled = self._compiled
        if compiled is None or launches_are_hooked():
            arguments = [x if box is None else _descriptor(x, box) for x, box in zip(tensors, self._boxes, strict=True)]
            compiled = self._fn[(self._grid,)](*arguments, *self._scalars, **self._constants, **self._schedule)
            if self._fixed and compiled is not None:  # None: a hook of Triton's kept it from compiling
                self._compiled = compiled
                self.again = relaunch_of(compiled, self._grid, self._boxes, self._tail)
            return
        stream = driver.active.get_current_stream(tensors[0].get_device())
        if self.again is not None:
            # Tensors, not addresses, where the kernel takes them: Triton then asks whether the device can read them.
            if self._has_boxes:
                tensors = tuple(x if box is None else x.data_ptr() for x, box in zip(tensors, self._boxes, strict=True))
            self.again(stream, tensors)
            return
        # The last three before the arguments: metadata for hooks, the hooks at entry and exit.
        hooks = (compiled.packed_metadata, None, None, None)
        arguments = [x if box is None else _descriptor(x, box) for x, box in zip(tensors, self._boxes, strict=True)]
        compiled.run(self._grid, 1, 1, stream, compiled.function, *hooks, *arguments, *self._tail)


def _descriptor(x: torch.Tensor, box: Box) -> Any:
    if box.layout is not None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(x, box.shape, box.strides, box.block, box.layout)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, box.shape, box.strides, box.block)


def launches_are_hooked() -> bool:
    """Whether a profiler wants to be called at each launch of Triton's."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return bool(leave is not None and getattr(leave, "calls", True))


class Launches:
    """Launch objects by key, made when first asked for. Bounded: changing lengths make new keys without end."""

    LIMIT = 4096

    def __init__(self) -> None:
        self._known: dict[Hashable, Launch] = {}

    def get(self, key: Hashable, make: Callable[[], Launch]) -> Launch:
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            found = self._known[key] = make()
        return found
