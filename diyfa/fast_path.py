"""The fast path: calls that need no dispatcher, and repeated calls that need no second check of the same arguments.

A call takes the fast path when nothing but eager execution looks at it: nothing is traced, transformed or profiled, and
its tensors are no subclasses. It then bypasses the operators of `ops.py`, whose schema of two dozen arguments costs as
much as the launch. All that was checked and decided about a call depends on shapes, strides, dtypes and options, so an
equal call runs at once, by its `Plan`. Values are checked again: those of `seq_lens`, and of lengths on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

from diyfa.options import AttentionOptions, Lengths, without_tensors
from diyfa.problem import AttentionProblem, Kernel

Repeat = Callable[..., Any]
_c: Any = torch._C
_float32, _Tensor, _Parameter, _strided = torch.float32, torch.Tensor, torch.nn.Parameter, torch.strided


class Plan:
    """What an earlier equal call came to: which kernel is launched, and with what besides the tensors."""

    __slots__ = ("backward_repeats", "has_run", "kernel", "lengths", "names", "options", "problem", "repeat")

    def __init__(self, problem: AttentionProblem, kernel: Kernel, lengths: Lengths, options: AttentionOptions) -> None:
        self.problem, self.kernel = problem, kernel
        # Without the optional tensors, whose names are kept instead.
        self.lengths, self.options, self.names = without_tensors(lengths, options)
        self.has_run = False
        self.repeat: Repeat | None = None  # `Kernel.repeat`'s, from the second call on: most lengths never come again
        self.backward_repeats: dict[Hashable, Repeat] = {}  # the same of the backward kernel, by the gradient's strides


# What was decided about calls, by all that decides: a `Plan`, a `KVCachePlan`, or of a product (problem, kernel).
plans: dict[Hashable, Any] = {}
LIMIT = 4096  # changing lengths make new entries without end


def is_unseen() -> bool:
    """Whether what runs now is executed at once, seen by nobody but the device."""
    return not (
        torch.compiler.is_compiling()
        or _c._len_torch_dispatch_stack()  # FakeTensorMode, make_fx, and users' modes
        or _c._is_torch_function_mode_enabled()
        or _c._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp of torch.func
        or forward_ad._current_level >= 0
        or _c._get_tracing_state() is not None
        or _c._autograd._profiler_enabled()  # shows the operators
    )


def takes_fast_path(*tensors: torch.Tensor) -> bool:
    """Whether a call with these inputs, which wants no gradient, is executed at once, seen by nobody but the device."""
    if torch.compiler.is_compiling():
        return False
    wants_grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not torch.Tensor or x.is_meta or (wants_grad and x.requires_grad):
            return False
        if x.layout is not torch.strided or x.is_neg():  # memory that does not hold the values as they are
            return False
    return is_unseen()


def may_be_read(x: Any, other: type[torch.Tensor] = _Tensor) -> bool:
    """Whether this is a tensor, or one of the `other` type, that may be read by its address."""
    kind = type(x)
    return (kind is _Tensor or kind is other) and x.layout is _strided and not x.is_neg()


def described(x: torch.Tensor) -> Hashable:
    """All that checks and decisions read of an optional tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad


def key_of(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    given: dict[str, Any],
    optional: tuple[torch.Tensor | None, ...],
) -> Hashable | None:
    """All that checks and decisions read of a call with the options `given` and the `optional` tensors among them, ()
    where there are none.

    None where there is no fast path: something looks on, or the tensors are no plain ones.
    """
    q, k, v = qkv
    if type(q) is not _Tensor or type(k) is not _Tensor or type(v) is not _Tensor or not is_unseen():
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():  # their memory does not hold the values as they are
        return None
    dtype, device = q.dtype, q.device
    scalars: tuple[Hashable, ...] = tuple(given.values())
    of_optional: tuple[Hashable, ...] = ()
    wants_grad = torch.is_grad_enabled()
    try:
        if optional:
            for x in optional:
                if x is not None and not may_be_read(x, _Parameter):
                    return None
            # Not None: a tensor in the place of a number is refused, not the default.
            scalars = tuple([_Tensor if isinstance(x, _Tensor) else x for x in scalars])
            of_optional = (
                *[x if x is None else described(x) for x in optional],
                wants_grad,
                lengths.max_seqlen_q,
                lengths.max_seqlen_k,
            )
        return (
            q.shape,
            k.shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            dtype,
            k.dtype,
            v.dtype,
            device,
            k.device,
            v.device,
            q.data_ptr() & 15,  # of each: kernels are compiled for which of them are aligned
            k.data_ptr() & 15,
            v.data_ptr() & 15,
            dtype is _float32  # autocast casts no other
            and device.type != "meta"
            and torch.is_autocast_enabled(device.type)
            and torch.get_autocast_dtype(device.type),
            wants_grad and (q.requires_grad or k.requires_grad or v.requires_grad),
            torch.are_deterministic_algorithms_enabled(),
            scalars,
            of_optional,
        )
    except RuntimeError:  # a sparse tensor, or another without strides and address: the checks say so
        return None


def find(key: Hashable | None) -> Any:
    """The plan of an earlier equal call."""
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
