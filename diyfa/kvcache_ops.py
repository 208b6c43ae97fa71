"""The operators `diyfa::kvcache_append` and `diyfa::kvcache_fwd` (and `_out`), and the plans of calls with a cache.

They have no backward pass: results of inputs that require a gradient have a grad_fn that raises. Their flat schema is
made from the fields of `KVCacheTensors`, `KVCacheOptions` and `NewKeys`, and calls are packed and unpacked by name.

A `KVCachePlan` has one `_Step` that attends and, if there are new keys, one that appends them. As in `diyfa.ops`, a
call that nothing traces or transforms runs its plan directly, and equal calls share it (`diyfa.kvcache`). All other
calls go through `Operators`, which calls the PyTorch operators; each operator makes a plan for that one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from diyfa import registry
from diyfa.ops import empty_lse, fill_without_keys
from diyfa.options import Lengths
from diyfa.problem import (
    VARLEN,
    Backend,
    KVCacheProblem,
    KVCacheTensors,
    NewKeys,
    dtype_name,
    empty_output,
    has_few_steps,
    is_aligned,
)
from diyfa.validation import have_equal_strides, memory_span, share_memory

Pair = tuple[torch.Tensor, torch.Tensor]


class KVCacheOptions(NamedTuple):
    """The options of one call with a cache, checked, with the defaults filled in."""

    layout: str  # of q: "bshd" or "thd"
    window_left: int = -1  # -1: unbounded
    window_right: int = -1  # 0: causal
    softcap: float = 0.0
    max_seqlen_q: int = 0  # at least the queries of the longest packed sequence
    max_seqlen_k: int = 0  # at least the most keys of a sequence; 0: as many as the cache holds
    num_splits: int = 0
    batch_invariant: bool = False
    backend: str = ""
    variant: str = "auto"


# ---- The schema -------------------------------------------------------------------------------------------------

_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
}


def _types(fields: type) -> dict[str, str]:
    """Return {field: its type in the schema} of a named tuple."""
    return {name: _TYPES[annotation.__forward_arg__] for name, annotation in fields.__annotations__.items()}


_CALL = {**_types(KVCacheTensors), **_types(KVCacheOptions)}
_APPEND = {**_CALL, **_types(NewKeys)}
del _APPEND["rotated_q"]  # the operator returns it


def _schema(types: dict[str, str], **mutated: str) -> str:
    return ", ".join(f"{mutated.get(name, type_name)} {name}" for name, type_name in types.items())


_lib = torch.library.Library("diyfa", "FRAGMENT")
_lib.define(f"kvcache_fwd({_schema(_CALL)}) -> (Tensor out, Tensor lse)")
_lib.define(f"kvcache_fwd_out(Tensor(a!) out, {_schema(_CALL)}) -> Tensor lse")
_lib.define(
    f"kvcache_append(Tensor? out, {_schema(_APPEND, k_cache='Tensor(a!)', v_cache='Tensor(b!)')}) -> Tensor"
)  # the rotated queries, without elements if nothing is rotated; out is checked before anything is written
_lib.define("kvcache_bwd(SymInt[] shape, ScalarType dtype, Device device) -> Tensor")  # raises


def _pack(*named_tuples: Any) -> list[Any]:
    """Return the fields of a call's named tuples in the order of the schema."""
    return [value for named_tuple in named_tuples for name, value in named_tuple._asdict().items() if name in _APPEND]


def _unpack(names: dict[str, str], values: tuple[Any, ...]) -> list[Any]:
    """Return the named tuples of a call from flat arguments: the inverse of `_pack`."""
    named = dict(zip(names, values, strict=True))
    classes: list[Any] = [KVCacheTensors, KVCacheOptions, NewKeys] if "interleaved" in names else [
        KVCacheTensors, KVCacheOptions,
    ]  # fmt: skip
    return [cls(**{name: named[name] for name in cls._fields if name in named}) for cls in classes]


def unpack_call(values: tuple[Any, ...]) -> tuple[KVCacheTensors, KVCacheOptions]:
    """Return the flat arguments of `kvcache_fwd` as the two objects of a call."""
    tensors, options = _unpack(_CALL, values)
    return tensors, options


# ---- A call described -------------------------------------------------------------------------------------------


def is_latent(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether the values are the first features of the keys, in the same memory."""
    return (
        v_cache.data_ptr() == k_cache.data_ptr()
        and v_cache.stride() == k_cache.stride()
        and v_cache.shape[-1] <= k_cache.shape[-1]
        and k_cache.numel() > 0
    )


def check_new_values(k_cache: torch.Tensor, v_cache: torch.Tensor, v: torch.Tensor | None) -> None:
    """Check that new values come with new keys, except for a latent cache, and that other caches do not overlap."""
    latent = is_latent(k_cache, v_cache)
    if v is None and not latent:
        raise ValueError("k comes without v, but v_cache is not the first features of k_cache in the same memory")
    if v is not None and latent:
        raise ValueError("v must be None where v_cache is a view of k_cache: k brings the values, too")
    if v is not None and share_memory(k_cache, v_cache):
        raise ValueError("v_cache must not overlap k_cache, unless it is the first features of the same memory")


def check_out(out: torch.Tensor | None, tensors: Sequence[Any], layout: str) -> None:
    """Check that out shares no memory with `tensors` (q, k_cache, v_cache …), unless it is exactly q, not packed."""
    if out is None:
        return
    for name, x in zip(("q", "k_cache", "v_cache"), tensors, strict=False):
        is_q = name == "q" and out.data_ptr() == x.data_ptr() and out.shape == x.shape and have_equal_strides(out, x)
        if is_q and layout != VARLEN:
            continue
        if share_memory(out, x):
            why = ": it is cleared before packed queries are read" if is_q else ""
            raise ValueError(f"out must not share memory with {name}{why}")


def bucket(length: int) -> int:
    """Return the next power of two, so that growing lengths make few different calls."""
    return 1 << (length - 1).bit_length() if length > 0 else 0


def cache_capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Return the most keys of a sequence for which a cache, or its row of `block_table`, has room."""
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def sequence_capacity(tensors: KVCacheTensors, max_seqlen_k: int) -> int:
    """Return the most keys that a sequence can have."""
    k_cache = tensors.k_cache
    if k_cache.dim() == 3:
        return min(max_seqlen_k, k_cache.shape[0])
    rows = cache_capacity(k_cache, tensors.block_table)
    return min(rows, bucket(max_seqlen_k)) if max_seqlen_k else rows


def describe_kvcache(
    backend: Backend, tensors: KVCacheTensors, options: KVCacheOptions, out: torch.Tensor | None = None
) -> KVCacheProblem:
    """Return the problem of one call. `out` is the caller's tensor for the result."""
    q, k_cache, v_cache = tensors.q, tensors.k_cache, tensors.v_cache
    packed, capacity = options.layout == VARLEN, sequence_capacity(tensors, options.max_seqlen_k)
    offsets = tensors.cu_seqlens_q
    left, right = options.window_left, options.window_right
    seqlen_q = min(options.max_seqlen_q, q.shape[0]) if packed else q.shape[1]
    return KVCacheProblem.from_fields({
        "device_type": backend.device_type,
        "arch": backend.arch(q.device),
        "dtype": dtype_name(q.dtype),
        "cache_dtype": dtype_name(k_cache.dtype),
        "layout": options.layout,
        "batch": q.shape[0] if offsets is None else offsets.shape[0] - 1,
        "heads_q": q.shape[-2],
        "heads_kv": k_cache.shape[-2],
        "seqlen_q": seqlen_q,
        "capacity": capacity,
        "head_dim": q.shape[-1],
        "head_dim_v": v_cache.shape[-1],
        "page_size": 0 if tensors.block_table is None else k_cache.shape[1],
        "packed_keys": k_cache.dim() == 3,
        # Bounds beyond every key count as none, for the rotation of queries, too. The first query stands seqlen_q - 1
        # before the last key: with more queries than keys, a right bound beyond the capacity still hides keys.
        "window_left": -1 if left >= capacity else left,
        "window_right": -1 if right >= max(capacity, seqlen_q) > 0 else right,
        "softcap": options.softcap,
        "alibi": tensors.alibi_slopes is not None,
        "sinks": tensors.sinks is not None,
        "lengths": tensors.seqlens is not None or tensors.cu_seqlens_k is not None,
        "leftpad": tensors.leftpad is not None,
        "cache_batch_idx": tensors.cache_batch_idx is not None,
        "descales": tensors.k_descale is not None or tensors.v_descale is not None,
        "latent": is_latent(k_cache, v_cache),
        "total_q": q.shape[0] if packed else 0,
        "num_splits": options.num_splits,
        "batch_invariant": options.batch_invariant,
        "aligned": is_aligned(q, k_cache, v_cache),
        "aligned_out": out is None or is_aligned(out),
        "in_place": out is not None and out.data_ptr() == q.data_ptr(),
        "few_steps": has_few_steps(VARLEN if k_cache.dim() == 3 else "bshd", k_cache, v_cache),
    })  # fmt: skip


def _computes_nothing(tensors: KVCacheTensors, options: KVCacheOptions) -> bool:
    """Return whether no query can see a key, so that nothing has to be launched."""
    if tensors.q.numel() == 0 or tensors.k_cache.numel() == 0 or tensors.v_cache.shape[-1] == 0:
        return True
    offsets, table = tensors.cu_seqlens_q, tensors.block_table
    if offsets is not None and (offsets.shape[0] == 1 or options.max_seqlen_q == 0):
        return True
    return (table is not None and table.shape[1] == 0) or (tensors.k_cache.dim() == 3 and options.max_seqlen_k == 0)


# ---- Running it -------------------------------------------------------------------------------------------------


class _Step:
    """One kernel of a call. The first run launches it. The second one asks `Kernel.repeat` for a cheaper launch, which
    all later runs use: many calls come once, but layers make equal calls."""

    __slots__ = ("_present", "has_run", "kernel", "problem", "repeat")

    def __init__(self, op: str, backend: Backend, problem: KVCacheProblem, variant: str = "auto") -> None:
        """Choose the kernel. Raises ValueError if none runs the problem."""
        self.problem, self.kernel = problem, registry.choose(op, problem, backend, variant)
        self.has_run = False
        self.repeat: Callable[..., Any] | None = None
        self._present: Callable[[Any], Any] = tuple  # selects the tensors among a call's fields

    def _relaunch(self, length: int, inputs: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        if self.repeat is None:
            return None
        present = self._present(inputs)
        return self.repeat([*map(torch.Tensor.data_ptr, present), length], *arguments)

    def run(
        self, tensors: KVCacheTensors, inputs: tuple[Any, ...], outputs: Callable[[], tuple[Any, ...]], *arguments: Any
    ) -> Any:
        """Run the kernel and return what it has filled, or what a repeated launch returns.

        Args:
            inputs: all tensors that the kernel reads, in the order of the fields, among other values.
            outputs: makes the arguments of `Kernel.launch` behind `tensors`. A repeated launch makes its own.
            arguments: those of a repeated launch, behind the addresses and the length.
        """
        repeated = self._relaunch(tensors.length, inputs, arguments)
        if repeated is not None:
            return repeated
        problem, kernel, filled = self.problem, self.kernel, outputs()
        if self.has_run and kernel.repeat is not None:
            self._present = itemgetter(*[i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)])
            self.repeat = kernel.repeat(problem, tensors, *filled)
            repeated = self._relaunch(tensors.length, inputs, arguments)
            if repeated is not None:
                return repeated
        if problem.varlen and not kernel.clears:
            out, lse = filled
            out.zero_()
            lse.fill_(float("inf"))
        kernel.launch(problem, tensors, *filled)
        self.has_run = True
        return filled


class KVCachePlan:
    """The plan of a call: the steps that append new keys and attend, and all else that equal calls have in common."""

    __slots__ = (
        "_append", "_attend", "_computes_nothing", "_reach", "added", "binds_without_copies", "only_attends", "problem",
        "reads_values", "scale", "wants_grad",
    )  # fmt: skip

    def __init__(
        self,
        tensors: KVCacheTensors,
        options: KVCacheOptions,
        new: NewKeys | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        """Choose the kernels. Raises ValueError if none attends or appends, before anything is written."""
        backend = registry.resolve_backend(tensors.q.device, options.backend)
        rotated = None if new is None else new.rotated_q
        attending = tensors if rotated is None else tensors._replace(q=rotated)
        problem = self.problem = describe_kvcache(backend, attending, options, out)
        self._attend = _Step("kvcache_fwd", backend, problem, options.variant)
        self._append: _Step | None = None
        if new is not None:
            caches = tensors.k_cache, tensors.v_cache
            # Bytes of the larger cache. Caches whose addresses are further apart do not overlap.
            self._reach = max(memory_span(x) * x.element_size() for x in caches)
            appended = problem if rotated is None else describe_kvcache(backend, tensors, options, out)
            step = _Step("kvcache_append", backend, appended)
            if tensors.q.shape[0] and (rotated is not None or (new.k.numel() and tensors.k_cache.numel())):
                self._append = step
        self._computes_nothing = _computes_nothing(tensors, options)
        self.scale, self.added = tensors.sm_scale, tensors.added
        # `kvcache._attend` sets these four after it has made the plan:
        # binds_without_copies  kernels read the caller's tensors themselves, no copies or views of them
        # reads_values          the host can read lengths or tables, and checks them in each call
        # wants_grad            an input requires a gradient in grad mode, so the results get a grad_fn
        # only_attends          none of this applies and no keys are appended: a call may be repeated at once
        self.binds_without_copies = self.reads_values = self.wants_grad = self.only_attends = False

    def repeat(
        self, addresses: Sequence[int], length: int, out: torch.Tensor | None, returns_lse: bool
    ) -> Sequence[Any] | None:
        """Repeat a call that `only_attends` -> what `run` returns, or None if it cannot be repeated. `addresses`: those
        of all tensors but `out`."""
        repeat = self._attend.repeat
        return None if repeat is None else repeat([*addresses, length], out, returns_lse)

    def run(
        self, tensors: KVCacheTensors, new: NewKeys | None, out: torch.Tensor | None, returns_lse: bool = True
    ) -> Sequence[Any]:
        """Append `new` and attend -> (out, lse if `returns_lse`, …)."""
        if out is not None:
            check_out(out, tensors, self.problem.layout)
        if new is not None:
            self.append(tensors, new)
            if new.rotated_q is not None:
                tensors = tensors._replace(q=new.rotated_q)

        def outputs() -> Pair:
            out_buffer = empty_output(tensors.q, self.problem.head_dim_v) if out is None else out
            return out_buffer, empty_lse(tensors.q, self.problem.layout)

        if self._computes_nothing:
            pair = outputs()
            offsets = Lengths(tensors.cu_seqlens_q)
            fill_without_keys(tensors.sinks, tensors.q, offsets, self.problem.layout, *pair)
            return pair
        return self._attend.run(tensors, tensors, outputs, out, returns_lse)

    def append(self, tensors: KVCacheTensors, new: NewKeys) -> None:
        """Write new keys to the caches. Whether the caches overlap depends on addresses, so each call checks it."""
        distance = tensors.v_cache.data_ptr() - tensors.k_cache.data_ptr()
        if -self._reach < distance < self._reach or new.v is None:
            check_new_values(tensors.k_cache, tensors.v_cache, new.v)
        if self._append is not None:
            self._append.run(tensors, (*tensors, *new), lambda: (new,))


def with_room(new: NewKeys, q: torch.Tensor) -> NewKeys:
    """Return `new` with memory for the rotated queries, if queries are rotated."""
    return new if new.cos is None else new._replace(rotated_q=torch.empty_like(q))


class Operators:
    """A stand-in for the plan of a call that something traces or transforms: it calls the operators."""

    def __init__(self, options: KVCacheOptions, wants_grad: bool) -> None:
        self.options, self.wants_grad = options, wants_grad

    def run(self, tensors: KVCacheTensors, new: NewKeys | None, out: torch.Tensor | None, returns_lse: bool) -> Pair:
        """Append `new` and attend, as `KVCachePlan.run` does."""
        options = self.options
        if new is not None:
            rotated = torch.ops.diyfa.kvcache_append(out, *_pack(tensors, options, new))
            if new.cos is not None:
                tensors = tensors._replace(q=rotated)
        if out is not None:
            return out, torch.ops.diyfa.kvcache_fwd_out(out, *_pack(tensors, options))
        return torch.ops.diyfa.kvcache_fwd(*_pack(tensors, options))


# ---- No backward pass -------------------------------------------------------------------------------------------


def _differentiable(tensors: Sequence[torch.Tensor | None], out: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the `tensors` (q first) that require a gradient, without `out`, which the call overwrites."""
    requiring_grad = [x for x in tensors if x is not None and x.requires_grad]
    return [x for x in requiring_grad if x is not out or x is tensors[0]]


def needs_grad(tensors: Sequence[Any], out: torch.Tensor | None) -> bool:
    """Return whether a gradient of one of a call's `tensors` is wanted."""
    return torch.is_grad_enabled() and bool(_differentiable(tensors, out))


class _NoBackward(torch.autograd.Function):
    """The grad_fn of results whose inputs require a gradient. It raises when it is called."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, *inputs: torch.Tensor) -> Pair:
        """Return `pair`. Autograd does not see its tensors as inputs, as they are in a tuple: they get the grad_fn."""
        ctx.inputs = [(x.shape, x.dtype, x.device) for x in inputs]
        return pair

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return (None, *(torch.ops.diyfa.kvcache_bwd(*x) for x in ctx.inputs))  # an operator: tracing must not raise


def _can_get_grad_fn(x: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a result can get a grad_fn: it is no view, no leaf that requires a gradient, and no input."""
    is_leaf = x.is_leaf and x.requires_grad
    return not (torch.compiler.is_compiling() or x._is_view() or is_leaf or any(x is y for y in inputs))


def without_backward(pair: Sequence[Any], tensors: Sequence[Any], out: torch.Tensor | None) -> Pair:
    """Return out and lse of a call whose `tensors` require a gradient, or aliases, with a grad_fn that raises."""
    inputs = _differentiable(tensors, out)
    results = tuple(x if _can_get_grad_fn(x, inputs) else x.detach() for x in pair[:2])
    return _NoBackward.apply(results, *inputs)


# ---- The operators ----------------------------------------------------------------------------------------------


def _kvcache_fwd(*flat: Any) -> Pair:
    tensors, options = unpack_call(flat)
    out, lse = KVCachePlan(tensors, options).run(tensors, None, None)
    return out, lse


def _kvcache_fwd_out(out: torch.Tensor, *flat: Any) -> torch.Tensor:
    tensors, options = unpack_call(flat)
    return KVCachePlan(tensors, options, None, out).run(tensors, None, out)[1]


def _kvcache_append(out: torch.Tensor | None, *flat: Any) -> torch.Tensor:
    """Append new keys and return the rotated queries, or a tensor without elements if none are rotated."""
    tensors, options, new = _unpack(_APPEND, flat)
    check_out(out, tensors, options.layout)
    new = with_room(new, tensors.q)
    KVCachePlan(tensors, options, new, out).append(tensors, new)
    return tensors.q.new_empty(0) if new.rotated_q is None else new.rotated_q


def _kvcache_fwd_fake(*flat: Any) -> Pair:
    tensors, options = unpack_call(flat)
    return empty_output(tensors.q, tensors.v_cache.shape[-1]), empty_lse(tensors.q, options.layout)


def _kvcache_fwd_out_fake(out: torch.Tensor, *flat: Any) -> torch.Tensor:
    tensors, options = unpack_call(flat)
    return empty_lse(tensors.q, options.layout)


def _kvcache_append_fake(out: torch.Tensor | None, *flat: Any) -> torch.Tensor:
    tensors, _, new = _unpack(_APPEND, flat)
    return tensors.q.new_empty(0) if new.cos is None else torch.empty_like(tensors.q)


def _kvcache_bwd(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    raise NotImplementedError(
        "attention over a cache has no backward pass: detach its result or its inputs, or call it inside "
        "torch.no_grad(); to train, call flash_attn_func, or flash_attn_varlen_func without a block_table"
    )


def _kvcache_bwd_fake(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


for _name, _implementation, _fake in (
    ("kvcache_fwd", _kvcache_fwd, _kvcache_fwd_fake),
    ("kvcache_fwd_out", _kvcache_fwd_out, _kvcache_fwd_out_fake),
    ("kvcache_append", _kvcache_append, _kvcache_append_fake),
    ("kvcache_bwd", _kvcache_bwd, _kvcache_bwd_fake),
):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diyfa::{_name}", _fake, lib=_lib)
