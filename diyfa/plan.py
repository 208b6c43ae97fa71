"""Plans: the checks and decisions of a call, made once for all equal calls.

Checks and decisions depend on shapes, strides, dtypes, device, alignment to 16 bytes, wanted gradients, autocast,
determinism and options. These are the key of a call (`call_key`), and `plans` has the plan of the first call with each
key. Equal calls run by it: `ops.py` runs a `Plan`, `kvcache_ops.py` a `KVCachePlan`, and a `ProductPlan` runs itself.
Values of tensors are not in the key, so they are checked besides: `seq_lens` once for each version of its contents,
packed lengths and page tables that lie on the CPU at each call.

A call has a plan if only eager execution sees it: nothing traces, transforms or profiles it, and its tensors are no
subclasses. It then bypasses the operators of `ops.py`, whose schema of two dozen arguments costs as much as the launch.

A recording (`recording`) runs calls on tensors without memory, to learn what they would launch. It has its own plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diyfa import registry
from diyfa.options import AttentionOptions, Lengths, without_tensors
from diyfa.problem import AttentionProblem, Backend, Kernel, MatmulProblem, MatmulTensors, as_backward
from diyfa.torch_private import is_batch_of_gradients, is_deterministic, is_unseen
from diyfa.validation import memory_span

# Result of `Kernel.repeat`: a function that runs a call again with other tensors, by replacing the addresses in
# prepared launches. It returns None if it cannot.
Repeat = Callable[..., Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of other types intercept operations

# Key of a call -> its `Plan`, `KVCachePlan` or `ProductPlan`.
plans: dict[Hashable, Any] = {}
LIMIT = 4096  # plans: with changing lengths they would grow without end, so all are dropped then
_recording = False  # whether a `recording` is open


class Plan:
    """The plan of equal calls: their problem, both kernels, lengths and options. It holds no tensor."""

    __slots__ = (
        "_backward", "backend", "backward_repeats", "forward", "has_run", "is_recorded", "lengths", "names", "options",
        "problem", "repeat", "sees_no_key",
    )  # fmt: skip

    def __init__(
        self,
        backend: Backend,
        problem: AttentionProblem,
        sees_no_key: bool,
        lengths: Lengths,
        options: AttentionOptions,
    ) -> None:
        """Choose the kernels. Raises ValueError if none runs the problem, or its backward pass if one is wanted."""
        self.backend, self.problem = backend, problem
        self.sees_no_key = sees_no_key  # no query can see a key: nothing is launched
        variant = options.variant
        self.forward = registry.choose("attention_fwd", problem, backend, variant)
        # A plan holds the names of the optional tensors only, so that it keeps no memory alive.
        self.lengths, self.options, self.names = without_tensors(lengths, options)
        self.has_run = False  # whether the forward kernel has been launched
        self.is_recorded = _recording
        self.repeat: Repeat | None = None  # of the forward, from the second call on: most plans run once
        self.backward_repeats: dict[Hashable, Repeat | None] = {}  # by strides of dout
        self._backward: tuple[AttentionProblem, Kernel] | None = None
        if problem.needs_grad:  # refuse now rather than in the backward pass
            self.backward()

    def is_usable(self) -> bool:
        """Return whether this plan may run now: a recording may begin or end between the two passes of a call."""
        return self.is_recorded is _recording

    def backward(self, aligned: bool = True) -> tuple[AttentionProblem, Kernel]:
        """Return the problem and the kernel of the backward pass. `aligned` is the problem's `aligned_gradients`."""
        if aligned and self._backward is not None:
            return self._backward
        problem = as_backward(self.problem)
        if not aligned:  # rare: gradients in a caller's buffers
            problem = problem.replace(aligned_gradients=False)
        variant = registry.variant_or_auto("attention_bwd", self.backend, self.options.variant, problem)
        choice = problem, registry.choose("attention_bwd", problem, self.backend, variant)
        if aligned:
            self._backward = choice
        return choice


class ProductPlan:
    """The plan of a matrix product: its problem and its kernel."""

    __slots__ = ("_input_sizes", "_out_size", "has_run", "kernel", "problem", "repeat")

    def __init__(
        self, problem: MatmulProblem, kernel: Kernel, tensors: MatmulTensors, out: torch.Tensor | None
    ) -> None:
        self.problem, self.kernel = problem, kernel
        # Bytes from the beginning to the end of each matrix that is given, and of `out`.
        self._input_sizes, self._out_size = [], 0
        if out is not None:
            *self._input_sizes, self._out_size = [
                memory_span(x) * x.element_size() if x.numel() else 0 for x in (*tensors.present(), out)
            ]
        self.has_run = False  # whether the kernel has been launched
        self.repeat: Repeat | None = None  # from the second call on

    def may_overlap(self, addresses: Sequence[int]) -> bool:
        """Return whether the memory from the beginning to the end of `out`, the last tensor, meets that of an input."""
        out_at, out_size = addresses[-1], self._out_size
        for i, size in enumerate(self._input_sizes):  # noqa: SIM110 (a generator takes twice as long)
            if -size < addresses[i] - out_at < out_size:
                return True
        return False

    def run(self, tensors: Sequence[Any], addresses: Sequence[int], out: torch.Tensor | None) -> torch.Tensor:
        """Return the product of matrices like those that the plan was made for, in `out` if it is given.

        `tensors`: the fields of `MatmulTensors`. `addresses`: those of the tensors that are given, then that of `out`.
        """
        repeat = self.repeat  # read once: another thread may replace it
        if repeat is not None:
            repeated = repeat(addresses if out is None else addresses[:-1], out)
            if repeated is not None:
                return repeated[0]
            self.repeat = None  # it refused: a tile may have been measured since it was made
        problem, kernel, tensors = self.problem, self.kernel, MatmulTensors(*tensors)
        c = out
        if c is None:
            c = tensors.a.new_empty((problem.m, problem.n), dtype=getattr(torch, problem.out_dtype))
        if problem.k == 0:  # no kernel reads an empty matrix
            from diyfa.reference import reference_matmul

            a, b, bias, a_descale, b_descale = tensors
            return c.copy_(reference_matmul(a, b, a_descale, b_descale, bias=bias, activation=problem.activation))
        if problem.m == 0 or problem.n == 0:
            return c
        kernel.launch(problem, tensors, c)
        if self.has_run and kernel.repeat is not None:
            self.repeat = kernel.repeat(problem, tensors, c)
        self.has_run = True
        return c


# ---- Recordings, and calls without a plan


def is_described_only(x: torch.Tensor) -> bool:
    """Return whether calls with this tensor only describe their results: it has no memory, and nothing is recorded."""
    return x.is_meta and not _recording


@contextmanager
def recording() -> Iterator[None]:
    """Run calls with tensors without memory like others inside the block: their launches are recorded. The block begins
    without plans, and its plans are dropped at its end."""
    global plans, _recording
    before = plans, _recording
    plans, _recording = {}, True
    try:
        yield
    finally:
        plans, _recording = before


def runs_eagerly(*tensors: torch.Tensor) -> bool:
    """Return whether a call with these inputs may bypass the operators and autograd.

    It may if nothing sees it (`is_unseen`), no gradient is wanted, no input is of a subclass, and each input's memory
    holds its values.
    """
    if torch.compiler.is_compiling():
        return False
    wants_grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not torch.Tensor or is_described_only(x) or (wants_grad and x.requires_grad):
            return False
        if not may_be_read(x):
            return False
    return is_unseen()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that torch.autocast casts to on x's device, None outside of autocast."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has no autocast to ask about
        return None
    return torch.get_autocast_dtype(device_type)


def may_be_read(x: Any) -> bool:
    """Return whether x is a tensor of no subclass whose memory holds its values."""
    return type(x) in _PLAIN and x.layout is torch.strided and not x.is_neg() and not is_batch_of_gradients(x)


# ---- Keys, and the plans under them


def call_key(tensors: tuple[Any, ...], scalars: Hashable) -> tuple[Hashable | None, list[int]]:
    """Return (all that checks and decisions read of a call, the addresses of its tensors).

    The first is None if no plan may be used or stored for the call. `tensors`: q and k or the matrices of a product,
    then all other tensors of the call, and None for each optional one that is not given. `scalars`: all other
    arguments.
    """
    addresses: list[int] = []
    if not is_unseen():
        return None, addresses
    wants_grad = torch.is_grad_enabled()
    key: list[Hashable] = [scalars, is_deterministic()]
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            elif type(x) in _PLAIN and not x.is_neg():
                address = x.data_ptr()
                addresses.append(address)
                # Kernels are compiled for aligned or any addresses.
                key.append((x.shape, x.stride(), x.dtype, x.device, address & 15, wants_grad and x.requires_grad))
            else:  # a subclass, or memory that does not hold the values themselves
                return None, addresses
    except RuntimeError:  # a tensor without strides or address, such as a sparse one: the checks refuse it
        return None, addresses
    first, second = tensors[0], tensors[1]
    if first is None or second is None:  # the checks refuse it
        return None, addresses
    dtype = first.dtype
    if dtype is torch.float32 or dtype is not second.dtype:  # autocast casts no other tensors
        key.append(autocast_dtype(first))
    return tuple(key), addresses


def attention_key(
    qkv: tuple[Any, ...], lengths: Lengths, scalars: Iterable[Any], optional: tuple[Any, ...]
) -> tuple[Hashable | None, list[int]]:
    """Return the key of a call of attention and the addresses of its tensors, as `call_key` does.

    `optional`: all optional tensors and None, or () if none is given. `scalars` may contain these tensors, too.
    """
    if qkv[2] is None:  # the checks refuse it
        return None, []
    if not optional:
        return call_key(qkv, tuple(scalars))
    # The class stands for a tensor. None would not do, because it is a default: a call with a tensor in place of a
    # number, which the checks refuse, would have the key of a call without it.
    scalars = [torch.Tensor if isinstance(x, torch.Tensor) else x for x in scalars]
    return call_key((*qkv, *optional), (*scalars, lengths.max_seqlen_q, lengths.max_seqlen_k))


def find(key: Hashable | None) -> Any:
    """Return the plan of an earlier equal call, or None."""
    if key is None:  # do not look it up: a graph of torch.compile would depend on all entries of `plans`
        return None
    try:
        return plans.get(key)
    except TypeError:  # a list or another wrong argument has no hash, and is never remembered
        return None


def remember(key: Hashable | None, plan: Any) -> None:
    """Store the plan of a call for equal calls."""
    if key is None or plan is None:
        return
    if len(plans) >= LIMIT:
        plans.clear()
    try:
        plans[key] = plan
    except TypeError:  # no hash, as in `find`: such a call is checked each time
        return
