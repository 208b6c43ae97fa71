"""Repeated plain calls: the kernel's launch without the dispatcher and without a second check of the same arguments.

A call is plain when nothing but eager execution looks at it: no gradient is wanted, nothing is traced, transformed or
profiled, and its tensors are no subclasses. Such a call need not go through the operators of `ops.py`, whose schema of
two dozen arguments costs as much as the launch. Where it also has no optional tensors, everything that was checked and
decided about it depends on shapes, strides and options only, so an equal call is launched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from diyfa.problem import AttentionProblem


class Plan(NamedTuple):
    """What an earlier equal call came to: which kernel is launched, and with what besides the tensors."""

    problem: AttentionProblem
    launch: Callable[..., Any]
    sm_scale: float


plans: dict[Hashable, Plan] = {}
LIMIT = 4096  # changing lengths make new entries without end


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether a call with these inputs is executed at once, seen by nobody but the device."""
    if torch.compiler.is_compiling():
        return False
    wants_grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not torch.Tensor or x.is_meta or (wants_grad and x.requires_grad):
            return False
        if x.layout is not torch.strided or x.is_neg():  # memory that does not hold the values as they are
            return False
    c: Any = torch._C
    return not (
        c._len_torch_dispatch_stack()  # FakeTensorMode, make_fx, and users' modes
        or c._is_torch_function_mode_enabled()
        or c._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp of torch.func
        or forward_ad._current_level >= 0
        or c._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()  # shows the operators
    )


def key_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Hashable) -> Hashable:
    """All that checks and decisions read of a call without optional tensors."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        torch.is_autocast_enabled(q.device.type),
        options,
    )


def find(key: Hashable) -> Plan | None:
    """The plan of an earlier equal call."""
    try:
        return plans.get(key)
    except TypeError:  # a list or another wrong argument: not hashable, so never remembered
        return None


def remember(key: Hashable, plan: Plan) -> None:
    """Keep what a call came to, for equal ones."""
    if len(plans) >= LIMIT:
        plans.clear()
    try:
        plans[key] = plan
    except TypeError:  # as in `find`: a window that came as a list is checked at each call
        return
