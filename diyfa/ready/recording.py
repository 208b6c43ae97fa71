"""Recording: run calls and record the kernels that they would launch, without launching them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch

from diyfa import plan as planning
from diyfa.device import present_device
from diyfa.problem import AttentionGradients, Kernel
from diyfa.registry import forced_backend, load_backend, use_backend


class Recorded(Protocol):
    """A kernel to be compiled, as a backend describes it. It can be pickled and sent to another process.

    A true attribute `shares_a_header` says that the first compilation writes a file that all others read without
    waiting for it."""

    @property
    def name(self) -> str: ...

    def is_stored(self) -> bool:
        """Return whether a process would find the compiled kernel."""
        ...

    def compile(self) -> None:
        """Compile the kernel and store it where processes look for it."""
        ...


class Recording(NamedTuple):
    kernels: dict[Any, Recorded]  # by a key of the backend, so that each kernel is recorded once
    refused: list[str]  # calls that the architecture does not run, with the reason


def backend_for_arch(arch: str) -> str:
    """Return the backend of an architecture: `"sm_90"` -> `"cuda"`, `"Ascend910B3"` -> `"npu"`."""
    return "npu" if arch.startswith("Ascend") else "cuda"


def backend_here() -> str:
    """Return the backend of this machine's device. Raises ValueError if none is usable.

    This imports torch_npu if that works: the command line switches off that `import torch` does so."""
    name = forced_backend() or present_device().type
    if name == "cpu":
        raise ValueError("no GPU or NPU is usable here (`diyfa info` says why): name an architecture, such as sm_90")
    return name


def _results(op: str, rest: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors that `Kernel.launch` fills. `rest`: its arguments from the third on."""
    if op in ("attention_fwd", "kvcache_fwd"):
        yield from rest
    elif op == "attention_bwd":
        yield from [x for x in cast(AttentionGradients, rest[-1]) if x is not None]
    elif op == "kvcache_append":
        yield from [] if rest[0].rotated_q is None else [rest[0].rotated_q]
    else:
        yield rest[-1]


def _recorded(kernel: Kernel) -> Kernel:
    """Return `kernel` for recording. It has no `repeat`, so that every call describes its launches; results are 0."""

    def launch(problem: Any, tensors: Any, *rest: Any) -> None:
        kernel.launch(problem, tensors, *rest)
        for x in _results(kernel.op, rest):
            x.zero_()

    return replace(kernel, launch=launch, repeat=None)


@contextmanager
def recording(name: str, arch: str | None) -> Iterator[dict[Any, Recorded]]:
    """Record, inside the block, what calls of the backend would launch, into the dictionary that is yielded.

    The calls launch nothing, and their results are 0. No other thread may call diyfa meanwhile. CPU and meta tensors
    are treated as tensors of a device of the architecture `arch`, None being that of the current device.

    Raises ValueError for a backend that cannot do this, or an architecture that it does not know.
    """
    backend: Any = load_backend(name)
    if not hasattr(backend, "recording"):
        raise ValueError(f"the {name} backend compiles nothing beforehand")
    kernels = backend.kernels
    with planning.recording(), use_backend(name), backend.recording(arch) as recorded:
        backend.kernels = tuple(map(_recorded, kernels))
        try:
            yield recorded
        finally:
            backend.kernels = kernels


def _is_refusal(error: ValueError) -> bool:
    """Return whether a function of diyfa has raised the error, and not other code that a recorded call runs."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "diyfa"


def record(name: str, arch: str | None, calls: Iterable[tuple[str, Callable[[], object]]]) -> Recording:
    """Return what `calls`, (name, function), would launch. Calls that no kernel runs are listed with the reason.

    Raises what a function raises, a ValueError of diyfa's excepted: that is the reason.
    """
    refused = []
    with recording(name, arch) as recorded, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call_name, call in calls:
            try:
                call()
            except ValueError as error:
                if not _is_refusal(error):
                    raise
                refused.append(f"{call_name}: {error}")
    return Recording(recorded, refused)
