"""The fast path: calls that need no dispatcher, and repeated calls that need no second check of the same arguments.

A call takes the fast path when nothing but eager execution looks at it: nothing is traced, transformed or profiled, and
its tensors are no subclasses. It then bypasses the operators of `ops.py`, whose schema of two dozen arguments costs as
much as the launch. All that was checked and decided about a call depends on shapes, strides, dtypes and options, so an
equal call runs at once, by its `Plan`. Values are checked again: those of `seq_lens`, and of lengths on the CPU.

An equal call is found by its key, or without making one: where its options are those of a `Recent` call, and PyTorch's
comparison in C++ finds its tensors like those. That comparison is private. It is used in this file alone, for calls of
every backend, and where it is not the known one, keys find what it would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from diyfa.options import LENGTHS, TENSORS, AttentionOptions, Lengths, without_tensors
from diyfa.problem import AttentionProblem, Kernel

Repeat = Callable[..., Any]
_c: Any = torch._C
_float32, _Tensor, _Parameter, _strided = torch.float32, torch.Tensor, torch.nn.Parameter, torch.strided


class Plan:
    """What an earlier equal call came to: which kernel is launched, and with what besides the tensors."""

    __slots__ = (
        "backward_repeats", "has_run", "kernel", "lengths", "names", "options", "problem", "reads_values", "repeat",
        "repeat_takes",
    )  # fmt: skip

    def __init__(self, problem: AttentionProblem, kernel: Kernel, lengths: Lengths, options: AttentionOptions) -> None:
        self.problem, self.kernel = problem, kernel
        offsets = lengths.cu_seqlens_q
        self.reads_values = lengths.seq_lens is not None or (offsets is not None and offsets.is_cpu)
        # Without the optional tensors, whose names are kept instead.
        self.lengths, self.options, self.names = without_tensors(lengths, options)
        self.has_run = False
        self.repeat: Repeat | None = None  # `Kernel.repeat`'s, from the second call on: most lengths never come again
        # How many tensors that takes; -1: with gradients autograd calls it.
        self.repeat_takes = -1 if problem.needs_grad else 3 + len(self.names)
        self.backward_repeats: dict[Hashable, Repeat] = {}  # the same of the backward kernel, by the gradient's strides


class Recent:
    """A recent call and its plan, which is also that of a call with the same options where all tensors are alike.

    Nothing of a tensor is kept but what it is like.
    """

    __slots__ = ("again", "distinct", "is_like", "misses", "plan", "present", "twins")

    def __init__(self, tensors: Sequence[Any], plan: Any) -> None:
        given = [i for i, x in enumerate(tensors) if isinstance(x, _Tensor)]
        first = {id(tensors[i]): i for i in reversed(given)}
        self.twins = [(i, j) for j in given if (i := first[id(tensors[j])]) != j]  # one tensor in two places
        self.present = _getter(given)
        self.distinct = _getter(sorted(first.values())) if self.twins else self.present
        self.is_like = _likeness(self.distinct(tensors))
        self.plan, self.misses = plan, 0
        self.again: Any = None  # what a `KVCachePlan` runs such calls by


def _getter(places: list[int]) -> Callable[[Sequence[Any]], Sequence[torch.Tensor]]:
    """What is in these places of a sequence, as a sequence."""
    return itemgetter(*places) if len(places) > 1 else lambda tensors: (tensors[places[0]],)


# What was decided about calls, by all that decides: a `Plan`, a `KVCachePlan`, or of a product (problem, kernel); and a
# `Recent` for each set of options.
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


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that torch.autocast casts to on x's device, None outside of autocast."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast to ask about
        return None
    return torch.get_autocast_dtype(device_type)


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


def _compares_tensors() -> Any:
    """PyTorch's comparison, in C++, of tensors with earlier ones, or None where it has none that is known.

    Compiled graphs check their inputs by it, and it is private. It tells apart types, dtypes, devices, sizes, strides,
    who requires a gradient, and keys of the dispatcher (layout, negative views, inference tensors, autocast on or off);
    no addresses. The same tensor twice it refuses.
    """
    guards: Any = getattr(getattr(getattr(_c, "_dynamo", None), "guards", None), "TensorGuards", None)
    try:
        x = torch.empty(2, 4, device="cpu")
        compare = guards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = (x[:1], x.t(), x[:, ::2], x.double(), x.t().contiguous().t(), x.clone().requires_grad_(), x[0])
        return guards if compare(x) and not any(compare(other) for other in others) else None
    except (TypeError, RuntimeError):
        return None


_TensorGuards = _compares_tensors()


def _likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether others are like these, all of them different objects, and all aligned as `find_recent` asks."""
    q = tensors[0]
    # Whether autocast is on is compared, what it casts to is not.
    is_cast = q.dtype is _float32 and torch.is_autocast_enabled(q.device.type)
    if is_cast or any(x.data_ptr() & 15 for x in tensors):
        return lambda *tensors: False
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


Found = tuple[Recent, Sequence[torch.Tensor], list[int]]


def find_recent(options: Hashable, tensors: Sequence[Any]) -> Found | None:
    """(an earlier call with these `options`, those of `tensors` that there are, their addresses), or None where its
    tensors were not like these.

    `tensors` are all that a call can have, q first, None or a number where it has another; `options` all else that its
    key holds, and the types of all of them that are not known. It takes a third of the time of a key.
    """
    try:
        recent = plans.get(options)
    except TypeError:  # as in `find`
        return None
    if recent is None:
        return None
    given, addresses, bits = recent.present(tensors), [], 0
    try:
        for x in given:
            if x.is_nested:  # has no sizes: the comparison would end the process
                return None
            address = x.data_ptr()
            addresses.append(address)
            bits |= address
    except RuntimeError:  # a sparse tensor, or another without an address
        return None
    distinct = recent.distinct(tensors) if recent.twins else given
    if bits & 15 or not recent.is_like(*distinct):
        return None
    for i, j in recent.twins:
        if tensors[i] is not tensors[j]:
            return None
    return recent, given, addresses


PATIENCE = 8  # calls that a recent one is kept through without serving them


def keep_recent(options: Hashable, tensors: Sequence[Any], plan: Any) -> None:
    """Let `find_recent` answer `plan`, which was found for this call by its key."""
    if _TensorGuards is None or plan is None:
        return
    recent = plans.get(options)
    if recent is not None and recent.misses < PATIENCE:  # calls of several kinds may come in turns
        recent.misses += 1
        return
    remember(options, Recent(tensors, plan))


def find(key: Hashable | None) -> Any:
    """The plan of an earlier equal call."""
    try:
        return plans.get(key)
    except TypeError:  # a list or another wrong argument: not hashable, so never remembered
        return None


_OF_LENGTHS = sum(feature.name in LENGTHS for feature in TENSORS)  # optional tensors, which come first
_NO_FEATURES = (type(None),) * (len(TENSORS) - _OF_LENGTHS)


def find_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    given: dict[str, Any],
    optional: tuple[torch.Tensor | None, ...],
) -> tuple[Plan | None, Found | tuple[()], Hashable | None]:
    """What earlier calls say of one with `key_of`'s arguments:

    (the plan of an equal call or None; what `find_recent` found, else (); what to remember it by).
    """
    q, k, v = qkv
    if type(q) is not _Tensor or type(k) is not _Tensor or type(v) is not _Tensor or not is_unseen():
        return None, (), None
    tensors: tuple[Any, ...] = qkv
    options: tuple[Hashable, ...] = (
        "attention",
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *given.values(),
    )
    if optional:
        kinds = tuple(map(type, optional))
        if kinds[_OF_LENGTHS:] != _NO_FEATURES:
            options = tuple([_Tensor if isinstance(x, _Tensor) else x for x in options])
        options = options, kinds, lengths.max_seqlen_q, lengths.max_seqlen_k
        tensors = (*qkv, *optional)
    found = find_recent(options, tensors)
    if found is not None:
        return found[0].plan, found, None
    key = key_of(qkv, lengths, given, optional)
    plan = None if key is None else find(key)
    keep_recent(options, tensors, plan)
    return plan, (), key


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
