"""Plans: what a call comes to, made once for equal calls.

All that is checked and decided about a call depends on shapes, strides, dtypes and options. They are its key, and an
equal call runs at once, by its `Plan`. Values are checked again: those of `seq_lens`, and of lengths on the CPU.

A call has a plan when nothing but eager execution looks at it: nothing is traced, transformed or profiled, and its
tensors are no subclasses. It then bypasses the operators of `ops.py`, whose schema of two dozen arguments costs as much
as the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diyfa import registry
from diyfa.options import AttentionOptions, Lengths, without_tensors
from diyfa.problem import AttentionProblem, Backend, Kernel, MatmulProblem
from diyfa.torch_private import is_unseen

Repeat = Callable[..., Any]
_float32, _Tensor, _strided = torch.float32, torch.Tensor, torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # all other types see what is done with them


class Plan:
    """What a call comes to: its problem, the kernels of both passes, and all else but its tensors."""

    __slots__ = (
        "_backward", "backend", "backward_repeats", "forward", "has_run", "is_recorded", "lengths", "names", "nothing",
        "options", "problem", "repeat",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, problem: AttentionProblem, nothing: bool, lengths: Lengths, options: AttentionOptions
    ) -> None:
        """Raises ValueError when no kernel runs the problem, or its backward pass where a gradient is wanted."""
        self.backend, self.problem = backend, problem
        self.nothing = nothing  # no query can see a key: nothing is launched
        variant = options.variant
        self.forward = registry.choose("attention_fwd", problem, backend, variant)
        self._backward: dict[bool, tuple[AttentionProblem, Kernel]] = {}
        # Without the optional tensors, whose names are kept instead.
        self.lengths, self.options, self.names = without_tensors(lengths, options)
        self.has_run = False
        self.is_recorded = _recording
        self.repeat: Repeat | None = None  # `Kernel.repeat`'s, from the second call on: most lengths never come again
        self.backward_repeats: dict[
            Hashable, Repeat | None
        ] = {}  # the same of the backward kernel, by the gradient's strides
        if problem.needs_grad:  # refuse now rather than in the backward pass
            self.backward()

    def holds(self) -> bool:
        """Whether launches are recorded now exactly if they were when the plan was made: between the forward and the
        backward pass of a call a recording may begin or end, and its kernels are others."""
        return self.is_recorded is _recording

    def backward(self, aligned: bool = True) -> tuple[AttentionProblem, Kernel]:
        """The problem and the kernel of the backward pass; `aligned` as `AttentionProblem.aligned_gradients`."""
        found = self._backward.get(aligned)
        if found is None:
            problem = self.problem
            if problem.batch_invariant:  # the mode is about results: gradients are computed as ever
                problem = problem.replace(batch_invariant=False)
            if not aligned:
                problem = problem.replace(aligned_gradients=False)
            variant = registry.variant_of("attention_bwd", self.backend, self.options.variant, problem)
            kernel = registry.choose("attention_bwd", problem, self.backend, variant)
            found = self._backward[aligned] = problem, kernel
        return found


class ProductPlan:
    """What a matrix product comes to."""

    __slots__ = ("has_run", "kernel", "problem", "repeat")

    def __init__(self, problem: MatmulProblem, kernel: Kernel) -> None:
        self.problem, self.kernel = problem, kernel
        self.has_run = False
        self.repeat: Repeat | None = None  # from the second call on

    def run(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b, of matrices like those it was made for."""
        if self.repeat is None:
            problem, kernel = self.problem, self.kernel
            if a.numel() == 0 or b.numel() == 0:
                return a.new_zeros((problem.m, problem.n), dtype=getattr(torch, problem.out_dtype))
            if self.has_run and kernel.repeat is not None:
                self.repeat = kernel.repeat(problem, a, b)
        repeat = self.repeat
        made = None if repeat is None else repeat([a.data_ptr(), b.data_ptr()], (a, b))
        if made is not None:
            return made[0]
        self.repeat = None  # a tile may have been measured meanwhile
        self.has_run = True
        return self.kernel.launch(self.problem, a, b)


# What was decided about calls, by all that decides: a `Plan`, a `KVCachePlan` or a `ProductPlan`.
plans: dict[Hashable, Any] = {}
LIMIT = 4096  # changing lengths make new entries without end


_recording = False


def is_described_only(x: torch.Tensor) -> bool:
    """Whether a call of such a tensor, which has no memory, only says what its results look like."""
    return x.is_meta and not _recording


@contextmanager
def recording() -> Iterator[None]:
    """Inside the block, where launches are recorded, calls of tensors without memory are run like others; no plan is
    known at its beginning, and none is kept."""
    global plans, _recording
    before = plans, _recording
    plans, _recording = {}, True
    try:
        yield
    finally:
        plans, _recording = before


def runs_at_once(*tensors: torch.Tensor) -> bool:
    """Whether a call with these inputs, which wants no gradient, is executed at once, seen by nobody but the device."""
    if torch.compiler.is_compiling():
        return False
    wants_grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not torch.Tensor or is_described_only(x) or (wants_grad and x.requires_grad):
            return False
        if x.layout is not torch.strided or x.is_neg():  # memory that does not hold the values as they are
            return False
    return is_unseen()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that torch.autocast casts to on x's device, None outside of autocast."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast to ask about
        return None
    return torch.get_autocast_dtype(device_type)


def may_be_read(x: Any) -> bool:
    """Whether this is a tensor that may be read by its address."""
    return type(x) in _PLAIN and x.layout is _strided and not x.is_neg()


def described(x: torch.Tensor) -> Hashable:
    """All that checks and decisions read of an optional tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad


def key_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    scalars: Iterable[Any],
    optional: tuple[torch.Tensor | None, ...],
    over_cache: bool = False,
) -> Hashable | None:
    """All that checks and decisions read of a call with these arguments; `optional` tensors may be among `scalars`.

    () stands for no optional tensors. None where there is no plan: something looks on, or the tensors are no plain
    ones. `over_cache`: k and v are caches, which may have another dtype than q, and of which one may be a part of the
    other. The last of `optional` is out, which may be q; no tensors are among `scalars`, but those that the checks
    refuse.
    """
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and is_unseen()):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():  # their memory does not hold the values as they are
        return None
    dtype, keys_dtype, device = q.dtype, k.dtype, q.device
    if v.dtype is not keys_dtype or (keys_dtype is not dtype and not over_cache):
        return None  # the checks refuse it
    if k.device != device or v.device != device:
        return None
    wants_grad = torch.is_grad_enabled()
    rest: tuple[Hashable, ...] = ()
    try:
        if optional:
            for x in optional:
                if x is not None and not may_be_read(x):
                    return None
            rest = (*[x if x is None else described(x) for x in optional], wants_grad)
            if over_cache:
                out = optional[-1]
                in_place = out is not None and out.data_ptr() == q.data_ptr()
                rest += keys_dtype, k.data_ptr() == v.data_ptr(), in_place
            else:
                # Not None: a tensor in the place of a number is refused, not the default.
                scalars = [_Tensor if isinstance(x, _Tensor) else x for x in scalars]
                rest += lengths.max_seqlen_q, lengths.max_seqlen_k
        return (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            dtype,
            device,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,  # kernels are compiled for whether all are aligned
            (dtype is _float32 or keys_dtype is not dtype)  # autocast casts no other
            and device.type != "meta"
            and torch.is_autocast_enabled(device.type)
            and torch.get_autocast_dtype(device.type),
            wants_grad and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch.are_deterministic_algorithms_enabled(),
            *scalars,
            rest,
        )
    except RuntimeError:  # a sparse tensor, or another without strides and address: the checks say so
        return None


def find(key: Hashable | None) -> Any:
    """The plan of an earlier equal call."""
    if key is None:  # not asked of `plans`: what torch.compile traces would depend on all that is in there
        return None
    try:
        return plans.get(key)
    except TypeError:  # a list or another wrong argument: not hashable, so never remembered
        return None


def remember(key: Hashable | None, plan: Any) -> None:
    """Keep what a call came to, for equal ones."""
    if key is None or plan is None:
        return
    if len(plans) >= LIMIT:
        plans.clear()
    try:
        plans[key] = plan
    except TypeError:  # as in `find`: a window that came as a list is checked at each call
        return
