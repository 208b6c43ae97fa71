"""The choice of the backend and the kernel that run a call, and the reasons for it.

Backends are named here as strings and loaded when first needed. A package installed beside diyfa adds one through the
entry-point group `diyfa.backends`. Nothing falls back: a backend or kernel that the caller names either runs the call
or raises with the reason.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from diyfa.imports import import_quickly
from diyfa.npu_stacks import GET_TRITON_ASCEND
from diyfa.problem import Backend, Kernel

ENTRY_POINT_GROUP = "diyfa.backends"
BUILTIN_BACKENDS: dict[str, str] = {
    "cuda": "diyfa.backends.cuda",
    "npu": "diyfa.backends.npu",
    "cpu": "diyfa.backends.cpu",
}
OPS = ("attention_fwd", "attention_bwd", "kvcache_fwd", "kvcache_append", "matmul")
BATCH_INVARIANT_KERNEL = "split_kv"  # the forward kernel that every backend has for `batch_invariant`
# Backends that run only if the caller names them: correct everywhere, fast nowhere.
EXPLICIT_ONLY = frozenset({"cpu"})

_loaded: dict[str, Backend] = {}
_default_backend: str = os.environ.get("DIYFA_BACKEND", "")


class _Forced(threading.local):
    """The open blocks of this thread. They are in no ContextVar: torch.compile cannot trace those."""

    def __init__(self) -> None:
        # [name] of each `use_backend`, innermost last. Lists, because equal names must differ by identity.
        self.blocks: tuple[list[str], ...] = ()
        self.invariant = 0  # number of open `batch_invariant` blocks


_forced = _Forced()


@lru_cache(maxsize=1)
def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def backend_names() -> list[str]:
    """Return the names of all backends, built-in first, loaded or not."""
    return [*BUILTIN_BACKENDS, *(name for name in _plugins() if name not in BUILTIN_BACKENDS)]


def load_backend(name: str) -> Backend:
    """Return the backend called `name`.

    Raises ValueError for a name that nobody registered, ModuleNotFoundError when what the backend needs (Triton) is
    not installed, ImportError with the reason when a plug-in does not load, TypeError when its object does not follow
    the protocol.
    """
    if name in _loaded:
        return _loaded[name]
    if name in BUILTIN_BACKENDS:
        if name != "cpu" and importlib.util.find_spec("triton") is None:
            how = GET_TRITON_ASCEND if name == "npu" else "pip install triton"
            raise ModuleNotFoundError(f"triton is required by the {name} backend: {how}")
        backend = import_quickly(BUILTIN_BACKENDS[name]).backend
        follows = isinstance(backend, Backend)
    elif name in _plugins():
        try:
            backend = _plugins()[name].load()
            follows = isinstance(backend, Backend) and all(isinstance(x, Kernel) for x in backend.kernels)
        except (Exception, SystemExit) as error:  # a plug-in may raise anything, and all of it is reported
            raise ImportError(f"backend {name!r} does not load: {type(error).__name__}: {error}") from error
    else:
        raise ValueError(f"no backend called {name!r}; there are: {', '.join(backend_names())}")
    if not follows:
        raise TypeError(f"backend {name!r} does not follow diyfa.problem.Backend: {backend!r}")
    _loaded[name] = backend
    return backend


def forced_backend() -> str:
    """Return the name set by `use_backend` or the environment variable DIYFA_BACKEND, or "" if none is set."""
    return _forced.blocks[-1][0] if _forced.blocks else _default_backend


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every diyfa call inside the block on the backend called `name`, whatever the tensors' device suggests.

    Each thread has its own setting, as with `torch.autocast`. Blocks may end in any order: each undoes its own setting
    only. Raises ValueError at once for an unknown name.
    """
    if name not in BUILTIN_BACKENDS and name not in _plugins():
        raise ValueError(f"no backend called {name!r}; there are: {', '.join(backend_names())}")
    block = [name]
    _forced.blocks = (*_forced.blocks, block)
    try:
        yield
    finally:
        _forced.blocks = tuple(other for other in _forced.blocks if other is not block)


def is_batch_invariant() -> bool:
    """Return whether this thread is inside a block of `batch_invariant`."""
    return _forced.invariant > 0


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Make the result of each query row bitwise the same inside the block, whatever else is in its batch.

    The result does not depend on the batch, on the number of queries of its sequence in the same call, on the pages of
    the cache, nor on `num_splits`. It is the same from a cache as from a training forward in the same mode. Gradients
    with `deterministic=True` do not depend on the batch either; others are computed as outside. The kernels called
    "split_kv" and on Hopper "sm90" compute all results. They take no attn_bias, dropout_p, seq_lens, mask, score_fn or
    8-bit inputs (ValueError); a float8 cache works. Each thread has its own setting.
    """
    _forced.invariant += 1
    try:
        yield
    finally:
        _forced.invariant -= 1


def resolve_backend(device: torch.device, name: str = "") -> Backend:
    """Return the backend for tensors on `device`: the named one, the forced one, or the one for that device type.

    Raises ValueError if the named backend cannot use the device or no backend exists for it.
    """
    name = name or forced_backend()
    if name:
        backend = load_backend(name)
        if reason := backend.accepts(device):
            raise ValueError(f"backend {name!r} cannot run this call: {reason}")
        return backend
    if device.type == "cpu":
        raise ValueError(
            'CUDA tensors required (or NPU tensors), got CPU tensors: move them with .to("cuda") or .to("npu"), '
            'or ask for the CPU implementation with backend="cpu"'
        )
    if device.type in BUILTIN_BACKENDS:
        return load_backend(device.type)
    broken = []
    for plugin in _plugins():
        try:
            backend = load_backend(plugin)
        except (ImportError, TypeError) as error:
            broken.append(f"; {error}")
            continue
        if backend.device_type == device.type:
            return backend
    raise ValueError(
        f"CUDA tensors required (or NPU tensors), got tensors on {device}; no backend is made for them{''.join(broken)}"
    )


def optional_member(device: torch.device, name: str, backend: str = "") -> Any:
    """Return a function that backends may have, of the backend for tensors on `device`, or None.

    CPU tensors have none unless a `backend` is named or forced, and neither has a traced program.
    """
    named = backend or forced_backend()
    if torch.compiler.is_compiling() or device.type == "meta" or (device.type == "cpu" and not named):
        return None
    return getattr(resolve_backend(device, backend), name, None)


def refusal(backend: Backend, kernel: Kernel, problem: Any) -> str | None:
    """Return why `kernel` of `backend` does not run `problem`, or None."""
    return backend.unsupported(problem) or kernel.unsupported(problem)


def _kernels_for_op(backend: Backend, op: str) -> list[Kernel]:
    return [k for k in backend.kernels if k.op == op]


def choose(op: str, problem: Any, backend: Backend, variant: str = "auto") -> Kernel:
    """Return the kernel of `backend` that runs `problem`: the one called `variant`, or the first that does not refuse.

    Raises ValueError with every reason if there is none.
    """
    refused = backend.unsupported(problem)
    reasons = []
    for kernel in backend.kernels:
        if kernel.op != op or variant not in ("auto", kernel.name):
            continue
        reason = refused or kernel.unsupported(problem)
        if reason is None and variant == "auto":
            reason = kernel.by_name_only(problem)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    if variant != "auto" and not reasons:
        names = ", ".join(k.name for k in _kernels_for_op(backend, op)) or "none"
        raise ValueError(f"backend {backend.name!r} has no {op} kernel called {variant!r}; it has: {names}")
    raise ValueError(f"backend {backend.name!r} cannot run this {op}: " + ("; ".join(reasons) or "it has no kernel"))


def variant_or_auto(op: str, backend: Backend, variant: str, problem: Any) -> str:
    """Return `variant` if the kernel of that name runs the problem, else "auto": for a backward pass, whose call's
    `variant` names a forward kernel."""
    named = [k for k in _kernels_for_op(backend, op) if k.name == variant]
    return variant if any(refusal(backend, k, problem) is None for k in named) else "auto"


@dataclass(frozen=True)
class Alternative:
    """A kernel that was not chosen, with the reason."""

    backend: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call would run, and why: the result of `diyfa.explain`."""

    op: str
    backend: str
    kernel: str
    summary: str
    config: Any
    why: str
    problem: Any
    alternatives: tuple[Alternative, ...] = field(default=())
    backward: Explanation | None = None  # of the call's backward pass, if a gradient is wanted
    mask: str = ""  # density of the block mask and its blocks by kind

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend}/{self.kernel} ({self.summary})", f"  why: {self.why}"]
        if self.config is not None:
            lines.append(f"  tile: {self.config}")
        if self.mask:
            lines.append(f"  mask: {self.mask}")
        lines += [f"  not {a.backend}/{a.kernel}: {a.reason}" for a in self.alternatives]
        if self.backward is not None:
            lines.append(str(self.backward))
        return "\n".join(lines)


def _reason_against(other: Backend, device: torch.device) -> str | None:
    """Return why another backend takes no tensors on `device`, or None. What its code raises counts as a reason."""
    try:
        return other.accepts(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def explain_choice(
    op: str, problem: Any, device: torch.device, backend: str = "", variant: str = "auto"
) -> Explanation:
    """Explain `choose` for one problem, other backends included. Raises what the call itself would raise."""
    chosen_backend = resolve_backend(device, backend)
    chosen = choose(op, problem, chosen_backend, variant)
    if variant != "auto":
        why = f"variant={variant!r} was asked for"
    elif backend or forced_backend():
        why = f"backend={chosen_backend.name!r} was asked for; {chosen.name} is its preferred kernel that can run this"
    else:
        why = f"tensors are on {device.type}; {chosen.name} is the preferred kernel that can run this"
    alternatives = []
    for name in backend_names():
        try:
            other = load_backend(name)
        except (ImportError, TypeError) as error:
            alternatives.append(Alternative(name, "*", str(error)))
            continue
        if other is not chosen_backend and (reason := _reason_against(other, device)):
            alternatives.append(Alternative(name, "*", reason))
            continue
        for kernel in _kernels_for_op(other, op):
            if kernel is chosen:
                continue
            if other is not chosen_backend:
                reason = f"runs only when asked for: backend={name!r}"
            elif variant != "auto":
                reason = refusal(other, kernel, problem) or "not the variant asked for"
            else:
                reason = refusal(other, kernel, problem) or kernel.by_name_only(problem)
            reason = reason or f"could run; {chosen.name} is preferred"
            alternatives.append(Alternative(name, kernel.name, reason))
    config = chosen.config(problem)
    return Explanation(op, chosen_backend.name, chosen.name, chosen.summary, config, why, problem, tuple(alternatives))


def kernels_for(device: str | torch.device | None = None, op: str = "attention_fwd") -> list[str]:
    """Return the names that `variant=` takes on `device`: a device, a device type or a backend name.

    The default is the current machine's backend. `op` is one of `OPS`. Raises ValueError for an unknown device or op.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if device is None:
        from diyfa.device import default_backend

        name = forced_backend() or default_backend()
    else:
        name = device.type if isinstance(device, torch.device) else device
        if name not in backend_names():
            name = str(name).partition(":")[0]  # "cuda:1"
    return [k.name for k in _kernels_for_op(load_backend(name), op)]
