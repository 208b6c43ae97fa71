"""Which kernels calls would launch: the calls are made, and what they would launch is recorded instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch

from diyfa import plan as planning
from diyfa.device import default_backend
from diyfa.problem import AttentionGradients, Kernel
from diyfa.registry import forced_backend, load_backend, use_backend


class Recorded(Protocol):
    """A kernel that is to be compiled, as a backend describes it. Other processes can be sent one."""

    @property
    def name(self) -> str: ...

    def is_known(self) -> bool:
        """Whether a process would find it compiled."""
        ...

    def compile(self) -> None:
        """Compile it to where processes find it."""
        ...


class Recording(NamedTuple):
    kernels: dict[Any, Recorded]  # by what tells them apart
    refused: list[str]  # calls that the architecture does not run, with the reason


def backend_of(arch: str) -> str:
    """`"sm_90"` -> `"cuda"`, `"Ascend910B3"` -> `"npu"`."""
    return "npu" if arch.startswith("Ascend") else "cuda"


def backend_here() -> str:
    """The backend of this process. Raises ValueError where no device is usable."""
    name = forced_backend() or default_backend()
    if name == "cpu":
        raise ValueError("no GPU or NPU is usable here (`diyfa info` says why): name an architecture, such as sm_90")
    return name


def _results(op: str, rest: tuple[Any, ...], returned: Any) -> Iterator[torch.Tensor]:
    """The tensors that `Kernel.launch` has filled."""
    if op in ("attention_fwd", "kvcache_fwd"):
        yield from rest
    elif op == "attention_bwd":
        yield from [x for x in cast(AttentionGradients, rest[-1]) if x is not None]
    elif op == "kvcache_append":
        yield from [] if rest[0].rotated_q is None else [rest[0].rotated_q]
    else:
        yield returned


def _recorded(kernel: Kernel) -> Kernel:
    """`kernel` as it is while launches are recorded: no call is repeated without being described, and as nothing is
    computed, results are 0."""

    def launch(problem: Any, tensors: Any, *rest: Any) -> Any:
        returned = kernel.launch(problem, tensors, *rest)
        for x in _results(kernel.op, rest, returned):
            x.zero_()
        return returned

    return replace(kernel, launch=launch, repeat=None)


@contextmanager
def recording(name: str, arch: str | None) -> Iterator[dict[Any, Recorded]]:
    """Inside the block calls of the backend launch nothing, and their results are 0: what they would launch is in the
    dictionary. No other thread may call diyfa meanwhile.

    Tensors of the CPU, or without memory, are taken for those of a device: of the architecture `arch`, or None of the
    current one.

    Raises ValueError for a backend that cannot do this, or an architecture that it does not know.
    """
    backend: Any = load_backend(name)
    if not hasattr(backend, "recording"):
        raise ValueError(f"the {name} backend compiles nothing beforehand")
    kernels = backend.kernels
    with planning.recording(), use_backend(name), backend.recording(arch) as found:
        backend.kernels = tuple(map(_recorded, kernels))
        try:
            yield found
        finally:
            backend.kernels = kernels


def record(name: str, arch: str | None, calls: Iterable[tuple[str, Callable[[], object]]]) -> Recording:
    """Return what `calls`, which have names, would launch; calls that no kernel runs are listed with the reason."""
    refused = []
    with recording(name, arch) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, call in calls:
            try:
                call()
            except ValueError as error:
                refused.append(f"{what}: {error}")
    return Recording(found, refused)
