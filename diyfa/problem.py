"""One call, described: what every decision (backend, kernel, tile) is made from, and what a backend must offer.

This module is all that a backend may import of diyfa besides the plain data of `diyfa.arch`. It holds

* `AttentionProblem`, `KVCacheProblem` and `MatmulProblem`: descriptions without tensors, so a decision is a pure
  function and can be remembered, explained and tested without a device;
* `AttentionTensors` and `KVCacheTensors`: the tensors of one call, in the layout that the problem names;
* `Launch`: one kernel with all that it is launched with;
* `Kernel` and `Backend`: the protocol between the front end and an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property, wraps
from math import gcd
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch

from diyfa.features import FEATURES, GRADIENTS, OPTIONAL, TENSORS
from diyfa.features import dtype_name as dtype_name

# Index of the (batch, head, sequence, feature) dimensions in each 4-D layout.
LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "bhsd": (0, 1, 2, 3),  # flash_attention, PyTorch SDPA
    "bshd": (0, 2, 1, 3),  # flash_attention_v2, flash_attn
}
# Sequences packed one after another, (T, H, D): no batch dimension, cu_seqlens says where each begins (flash_attn).
VARLEN = "thd"
MAX_STEPS = 0x7FFF0000  # as many as 32 bits count, in the box of a TMA descriptor
Function = TypeVar("Function", bound=Callable[..., Any])
P = TypeVar("P", bound="_Problem")


def kept(function: Function) -> Function:
    """`function` of a problem, and of few other things, which answers each problem once: the answer is kept in it.

    Equal calls have one problem, that of their plan, so what is decided about them lives as long as the plan.
    """

    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(problem: Any, *rest: Any) -> Any:
        known = problem.__dict__.get("_kept")
        if known is None:
            known = problem.__dict__["_kept"] = {}
        try:
            return known[name, rest]
        except KeyError:
            found = known[name, rest] = function(problem, *rest)
            return found

    return cast(Function, answer)


def by_kind(function: Function) -> Function:
    """`function` of a problem that reads none of its sizes: it gets the problem's kind, and answers each kind once."""

    @wraps(function)
    def answer(problem: Any, *rest: Any) -> Any:
        known = problem.kind.answers
        try:
            return known[function, rest]
        except KeyError:
            found = known[function, rest] = function(problem.kind, *rest)
            return found

    return cast(Function, answer)


_kinds: dict[Any, Any] = {}
KINDS = 4096  # that are kept


@dataclass(frozen=True)
class _Problem:
    """What every problem begins with."""

    SIZES: ClassVar[tuple[str, ...]] = ()

    device_type: str
    arch: str  # "sm_90", "Ascend910B3", "cpu"
    dtype: str  # of the inputs

    @classmethod
    def of(cls: type[P], facts: dict[str, Any]) -> P:
        """The problem with these fields, and defaults for the others; at a third of the constructor's time."""
        problem = object.__new__(cls)
        values = problem.__dict__
        values.update(_fields_of(cast(Any, cls)).defaults)
        values.update(facts)
        return problem

    def replace(self: P, **changes: Any) -> P:
        """A copy with some fields changed."""
        return type(self).of({name: self.__dict__[name] for name in _fields_of(cast(Any, type(self))).names} | changes)

    @cached_property
    def kind(self: P) -> P:
        """The problem without its sizes, which are None there, and of a window's bounds only their signs. Equal kinds
        are one object. Most decisions depend on it alone, and are made once (`by_kind`)."""
        values = self.__dict__
        left, right = values.get("window_left", 0), values.get("window_right", 0)
        key = type(self), left >= 0, right >= 0, right > 0, *_fields_of(cast(Any, type(self))).facts(values)
        kind = _kinds.get(key)
        if kind is None:
            if len(_kinds) >= KINDS:
                _kinds.clear()
            kind = self.replace(**dict.fromkeys(self.SIZES))
            if "window_left" in values:
                kind.__dict__.update(window_left=-1 if left < 0 else 0, window_right=min(right, 1))
            kind.__dict__.update(kind=kind, answers={})
            _kinds[key] = kind
        return kind

    def __getstate__(self) -> dict[str, Any]:
        """The fields: a copy, or another process, decides for itself."""
        return {name: self.__dict__[name] for name in _fields_of(cast(Any, type(self))).names}

    def described_as(self, kind: type[P], **others: Any) -> P:
        """The same call as a problem of another kind: the fields that both have, and `others`."""
        shared = {each.name for each in fields(kind)} & {each.name for each in fields(self)}
        return kind(**{name: getattr(self, name) for name in shared} | others)


class _Fields(NamedTuple):
    """The fields of a class of problems."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    facts: Callable[[dict[str, Any]], tuple[Any, ...]]  # the values of those that are no sizes and no window's bounds


@cache
def _fields_of(kind: Any) -> _Fields:
    every = fields(kind)
    facts = [each.name for each in every if each.name not in {*kind.SIZES, "window_left", "window_right"}]
    defaults = {each.name: each.default for each in every if each.default is not MISSING}
    return _Fields(tuple(each.name for each in every), defaults, itemgetter(*facts))


class _AttentionShape:
    """What follows from the fields that both problems of attention have."""

    layout: str
    batch: int
    heads_q: int
    seqlen_q: int
    total_q: int
    window_right: int

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def varlen(self) -> bool:
        return self.layout == VARLEN

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (B, H, Sq), or (H, Tq) for packed queries."""
        return (self.heads_q, self.total_q) if self.varlen else (self.batch, self.heads_q, self.seqlen_q)


@dataclass(frozen=True)
class AttentionProblem(_AttentionShape, _Problem):
    """One attention call without its tensors.

    `window_left` and `window_right` are normalised: -1 is unbounded, causal is `window_right == 0`. `dtype` is the
    short name ("float16"). `aligned` says that every base address and every stride but the last of q, k and v is a
    multiple of 16 bytes (what TMA needs), `aligned_gradients` the same of the buffers of dq, dk and dv; `few_steps`
    what `has_few_steps` says of q, k and v where there are `seq_lens`. In the layout "thd" `batch` counts the
    sequences, `seqlen_q` and `seqlen_k` are the longest lengths, `total_q` and `total_k` the rows of the packed tensors
    (0 in other layouts).
    """

    SIZES = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k")

    layout: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    seq_lens: bool = False
    alibi: bool = False
    bias: str = ""  # dtype of attn_bias ("bfloat16"), "" without one
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    aligned: bool = True
    total_q: int = 0
    total_k: int = 0
    bias_grad: bool = False  # attn_bias itself wants a gradient
    batch_invariant: bool = False  # see `diyfa.batch_invariant`
    dropout_origins: bool = False  # the mask is that of a part of a larger problem
    # Of out and, in the backward pass, of dq, dk and dv; "": `dtype`. Results that are still to be added up are
    # "float32". A kernel writes its buffers in their dtype.
    out_dtype: str = ""
    few_steps: bool = True
    aligned_gradients: bool = True

    @property
    def masked(self) -> bool:
        """Whether a query may not see all keys of its sequence."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional features this call uses; a backend refuses those it does not list."""
        return _features(self)


@by_kind
def _features(problem: AttentionProblem) -> frozenset[str]:
    return frozenset([feature.uses for feature in OPTIONAL if feature.is_in(problem)])


@dataclass(frozen=True)
class KVCacheProblem(_AttentionShape, _Problem):
    """Attention of new queries over a cache of keys and values, without its tensors. It has no backward pass.

    The queries are (B, Sq, H, D) ("bshd") or packed ("thd"). The keys of a sequence lie in one of three ways: in one
    row of a contiguous cache (Bc, Sc, Hk, D); in pages (pages, page_size, Hk, D), which `block_table` names; or packed,
    (Tk, Hk, D), from `cu_seqlens_k` on. `capacity` is the most keys that a sequence can have there.

    A query at i sees keys of its sequence as in `AttentionProblem`, aligned to the bottom right.
    """

    SIZES = ("batch", "seqlen_q", "capacity", "total_q", "num_splits")

    cache_dtype: str  # of keys and values: as q's, or "float8_e4m3fn"
    layout: str
    batch: int  # sequences
    heads_q: int
    heads_kv: int
    seqlen_q: int  # queries of each sequence; packed: at least the longest
    capacity: int
    head_dim: int
    head_dim_v: int
    page_size: int = 0  # 0: no pages
    packed_keys: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lengths: bool = False  # how many keys there are is on the device (cache_seqlens, or cu_seqlens_k)
    leftpad: bool = False
    cache_batch_idx: bool = False
    descales: bool = False  # of keys or values, for a cache of float8
    latent: bool = False  # the values are the first features of the keys, in the same memory
    total_q: int = 0
    num_splits: int = 0  # 0: the kernel chooses
    batch_invariant: bool = False  # see `diyfa.batch_invariant`
    aligned: bool = True  # base addresses and all strides but the last of q and both caches are multiples of 16 bytes
    aligned_out: bool = True  # the same of out, where the caller gives it
    in_place: bool = False  # out replaces the queries
    few_steps: bool = True  # `has_few_steps` of both caches

    @property
    def paged(self) -> bool:
        return self.page_size > 0


# What `as_kvcache_problem` can say of a forward pass: the features that decide a field of both problems.
KVCACHE_FEATURES = frozenset(
    [x.uses for x in OPTIONAL if (x.problem or x.name) in {each.name for each in fields(KVCacheProblem)}]
)


@dataclass(frozen=True)
class MatmulProblem(_Problem):
    """One matrix product (M, K) @ (K, N) without its tensors. `precision` is how the products are formed.

    `aligned` says that each input has a dimension of stride 1, while its other stride and its base address are
    multiples of 16 bytes (what TMA needs).
    """

    SIZES = ("m", "n", "k")

    compute_dtype: str  # of the operands of each product: "float16", "bfloat16", "float32"
    out_dtype: str
    m: int
    n: int
    k: int
    precision: str = "ieee"  # for float32 operands: "ieee" or "tf32"
    block: tuple[int, int, int] | None = None  # tile asked for by the caller
    autotune: bool = True
    aligned: bool = False


class AttentionTensors(NamedTuple):
    """The tensors and scalars of one call; q, k, v have the dimension order of `problem.layout`.

    `rng_state` and `dropout_p` are what `diyfa.dropout` defines the mask from.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32: sequence b is rows cu_seqlens_q[b] to [b + 1] of q
    cu_seqlens_k: torch.Tensor | None = None  # the same for k and v; both or none
    seq_lens: torch.Tensor | None = None  # (B,) int32
    alibi_slopes: torch.Tensor | None = None  # (H,) or (B, H) fp32
    attn_bias: torch.Tensor | None = None  # broadcastable to (B, H, Sq, Sk)
    sinks: torch.Tensor | None = None  # (H,) fp32
    rng_state: torch.Tensor | None = None  # int64 [seed, offset], with `dropout_origins` and four words for each sample
    dropout_p: float = 0.0

    def present(self) -> list[torch.Tensor]:
        """q, k, v and the optional tensors that there are, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


class KVCacheTensors(NamedTuple):
    """The tensors and numbers of one call with a cache.

    Sequence b has `n` keys: `seqlens[b] + added`, or without `seqlens` `cu_seqlens_k[b + 1] - cu_seqlens_k[b]`, or
    without either `length + added`; no more than `problem.capacity`. The first `leftpad[b]` of them are skipped: they
    are never read and count for no position, so that the last query still stands at the last key. What lies beyond `n`,
    in pages that no sequence uses or in entries of `block_table` beyond its last page is never read into a result.

    Key j of sequence b is row j of batch entry `cache_batch_idx[b]` (b without it) of a contiguous cache, row
    `j % page_size` of page `block_table[b, j // page_size]`, or row `cu_seqlens_k[b] + j` of packed keys.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    sm_scale: float
    length: int = 0
    added: int = 0  # keys that this call has appended to each sequence
    seqlens: torch.Tensor | None = None  # (B,) int32
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32, packed queries
    cu_seqlens_k: torch.Tensor | None = None  # (B + 1,) int32: packed keys; with pages it says lengths only
    block_table: torch.Tensor | None = None  # (B, pages of a sequence) int32, last stride 1
    cache_batch_idx: torch.Tensor | None = None  # (B,) int32
    leftpad: torch.Tensor | None = None  # (B,) int32
    alibi_slopes: torch.Tensor | None = None  # (H,) or (B, H) fp32
    sinks: torch.Tensor | None = None  # (H,) fp32
    k_descale: torch.Tensor | None = None  # (B, Hk) fp32, any strides: factor of the keys of a float8 cache
    v_descale: torch.Tensor | None = None

    def present(self) -> list[torch.Tensor]:
        """q, both caches and the optional tensors that there are, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


class NewKeys(NamedTuple):
    """What a call appends to a cache, and rotary embedding on the way.

    Row i of k and v becomes key `seqlens[b] + i` (`length + i`) of sequence b; what would land at `problem.capacity` or
    beyond, in a page below 0 or beyond the cache, is dropped; nothing else in the cache changes. cos and sin rotate the
    first `2 * cos.shape[1]` features of k by row `seqlens[b] + i`. They rotate q into `rotated_q`: query i by row
    `seqlens[b] + i` where the mask is causal or a window, else by row `seqlens[b]`. Rows beyond cos rotate by nothing.
    Products are formed in fp32 and rounded once. What goes to a float8 cache is divided by its descale (1 without one)
    and saturates.
    """

    k: torch.Tensor  # (B, Snew, Hk, D), q's dtype
    v: torch.Tensor | None  # (B, Snew, Hk, Dv); None for a latent cache
    cos: torch.Tensor | None = None  # (rows, rotated features / 2), q's dtype or fp32
    sin: torch.Tensor | None = None
    interleaved: bool = True  # features (0, 1), (2, 3), … make pairs; else feature i and i + half
    rotated_q: torch.Tensor | None = None  # shaped like q; None without cos

    def present(self) -> list[torch.Tensor]:
        """The tensors that there are, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


@kept
def as_kvcache_problem(problem: AttentionProblem) -> KVCacheProblem:
    """A forward pass as a call with a cache that holds all its keys; of its features, for those that both have."""
    return problem.described_as(
        KVCacheProblem,
        cache_dtype=problem.dtype,
        layout=VARLEN if problem.varlen else "bshd",
        capacity=problem.seqlen_k,
        packed_keys=problem.varlen,
        lengths=problem.varlen,
    )


def as_kvcache(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[KVCacheProblem, KVCacheTensors]:
    """`as_kvcache_problem` with its tensors: q, k, v become views in "bshd", as out must; packed ones stay packed."""
    q, k, v = (x if problem.varlen else as_bhsd(x, problem.layout).transpose(1, 2) for x in tensors[:3])
    optional = {x.name: getattr(tensors, x.name) for x in TENSORS if x.name in KVCacheTensors._fields}
    return as_kvcache_problem(problem), KVCacheTensors(q, k, v, tensors.sm_scale, problem.seqlen_k, **optional)


def example_tensors(problem: AttentionProblem, device: str = "meta") -> dict[str, torch.Tensor]:
    """The optional tensors of a call of `problem`, uninitialised: what a call is made of that is only compiled."""
    sizes = {"b": problem.batch, "h": problem.heads_q, "q": problem.seqlen_q, "k": problem.seqlen_k}
    found = {}
    for feature in FEATURES:
        if feature.shape is not None and feature.is_in(problem):
            fact = getattr(problem, feature.problem, None)
            dtype = getattr(torch, fact) if isinstance(fact, str) else feature.dtypes[0]
            found[feature.name] = torch.empty(feature.shape.every(sizes)[0], dtype=dtype, device=device)
    return found


def example_kvcache(problem: KVCacheProblem) -> tuple[KVCacheTensors, torch.Tensor, torch.Tensor]:
    """(inputs, out, lse) of a call of `problem`, without memory."""

    def empty(*shape: int, dtype: str = "int32") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    batch, heads_kv, capacity, page_size = problem.batch, problem.heads_kv, problem.capacity, problem.page_size
    pages = -(-capacity // page_size) if problem.paged else 0
    rows = (problem.total_q,) if problem.varlen else (batch, problem.seqlen_q)
    cache: tuple[int, ...] = (batch * pages, page_size) if problem.paged else (batch, capacity)
    if problem.packed_keys:
        cache = (batch * capacity,)
    q = empty(*rows, problem.heads_q, problem.head_dim, dtype=problem.dtype)
    k = empty(*cache, heads_kv, problem.head_dim, dtype=problem.cache_dtype)
    v = empty(*cache, heads_kv, problem.head_dim_v, dtype=problem.cache_dtype)
    descale = empty(batch, heads_kv, dtype="float32") if problem.descales else None
    tensors = KVCacheTensors(
        q,
        k,
        k[..., : problem.head_dim_v] if problem.latent else v,
        problem.head_dim**-0.5,
        length=capacity,
        seqlens=empty(batch) if problem.lengths and not problem.packed_keys else None,
        cu_seqlens_q=empty(batch + 1) if problem.varlen else None,
        cu_seqlens_k=empty(batch + 1) if problem.packed_keys else None,
        block_table=empty(batch, pages) if problem.paged else None,
        cache_batch_idx=empty(batch) if problem.cache_batch_idx else None,
        leftpad=empty(batch) if problem.leftpad else None,
        alibi_slopes=empty(problem.heads_q, dtype="float32") if problem.alibi else None,
        sinks=empty(problem.heads_q, dtype="float32") if problem.sinks else None,
        k_descale=descale,
        v_descale=descale,
    )
    return tensors, empty_output(q, problem.head_dim_v), empty(*problem.lse_shape, dtype="float32")


class AttentionGradients(NamedTuple):
    """Buffers that a backward kernel fills; last stride 1, any other strides (packed gradients are slices).

    Those of optional tensors are None where there is no such tensor, or it wants none. `delta`, where it is given, is
    to hold rowsum(dout * out), less dlse if there is one: contiguous, shaped and typed like the log-sum-exp, zero where
    no sequence is. Every algorithm forms it on the way.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    delta: torch.Tensor | None = None


def example_gradients(tensors: AttentionTensors, out_dtype: str = "") -> AttentionGradients:
    """Buffers for all gradients of such a call."""
    dtype = getattr(torch, out_dtype) if out_dtype else tensors.q.dtype
    found = {feature.gradient: getattr(tensors, feature.name) for feature in GRADIENTS}
    buffers: dict[str, Any] = {name: None if x is None else torch.empty_like(x) for name, x in found.items()}
    return AttentionGradients(*(torch.empty_like(x, dtype=dtype) for x in tensors[:3]), **buffers)


def bhsd_strides(x: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """Strides in (batch, head, sequence, feature) order whatever the layout; packed sequences have no batch stride."""
    s = x.stride()
    if layout == VARLEN:
        return 0, s[1], s[0], s[2]
    b, h, m, d = LAYOUTS[layout]
    return s[b], s[h], s[m], s[d]


def per_head_stride(x: torch.Tensor | None) -> int:
    """Between the samples of an optional (H,) or (B, H); 0 where one row is for all."""
    return 0 if x is None or x.dim() == 1 else x.stride(0)


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Base addresses and all strides but the last are multiples of 16 bytes: what TMA can read."""
    bits = 0
    for x in tensors:
        steps = 0
        for stride in x.stride()[:-1]:
            steps |= stride
        bits |= x.data_ptr() | steps * x.element_size()
    return not bits & 15


class RowSteps(NamedTuple):
    """How a tensor's rows are counted in steps, the elements that the strides of samples and of rows both divide by."""

    step: int  # elements; 16 bytes at least, if the tensor is aligned
    per_sample: int  # steps from one sample to the next
    per_row: int  # steps from one row to the next
    total: int  # steps from the first row to the end of the last


def row_steps(x: torch.Tensor, layout: str) -> RowSteps:
    """The steps of a tensor. Packed sequences are read from the first row of all: they have no bound to keep."""
    stride_b, _, stride_row, _ = bhsd_strides(x, layout)
    if layout == VARLEN:
        return RowSteps(stride_row, 0, 1, 0)
    batch, rows = x.shape[0], x.shape[LAYOUTS[layout][2]]
    if batch == 1:
        stride_b = 0
    step = gcd(stride_b, stride_row) or 16 // x.element_size()  # with strides of 0 all rows are one
    per_sample, per_row = stride_b // step, stride_row // step
    return RowSteps(step, per_sample, per_row, (batch - 1) * per_sample + rows * per_row)


def has_few_steps(layout: str, *tensors: torch.Tensor) -> bool:
    """Whether 32 bits count the steps to every row, which TMA needs where samples end at lengths of their own."""
    return all(row_steps(x, layout).total < MAX_STEPS for x in tensors)


def as_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """View of a 4-D tensor in (batch, head, sequence, feature) order."""
    return x if layout == "bhsd" else x.permute(LAYOUTS[layout])


def empty_output(q: torch.Tensor, head_dim_v: int, out_dtype: str = "") -> torch.Tensor:
    """Uninitialised attention output for `q`: its dtype or another one, its shape with `head_dim_v`, and its dimension
    order in memory."""
    dtype = getattr(torch, out_dtype) if out_dtype else q.dtype
    if q.shape[-1] == head_dim_v:
        return torch.empty_like(q, dtype=dtype)
    outer = sorted(range(q.dim() - 1), key=lambda i: q.stride(i), reverse=True)
    dense = q.new_empty([q.shape[i] for i in outer] + [head_dim_v], dtype=dtype)
    inverse = sorted(range(q.dim() - 1), key=lambda i: outer[i])
    return dense.permute([*inverse, q.dim() - 1])


@by_kind
def refuse_features(problem: AttentionProblem, supported: frozenset[str], who: str) -> str | None:
    """Reason why `who` cannot run `problem` when it uses a feature outside `supported`, else None."""
    missing = sorted(problem.features - supported)
    return f"{who} does not implement {', '.join(missing)}" if missing else None


class Launch(NamedTuple):
    """One kernel with all that it is launched with: what a launcher returns.

    The same description is run, repeated for equal calls and, made from tensors without memory, compiled ahead of time.
    """

    kernel: Any  # a jit function
    grid: int | tuple[int, ...]  # programs
    arguments: dict[str, Any]  # by name: tensors, what describes them to the device, None, numbers
    constants: dict[str, Any]  # by name: mostly one, a frozen dataclass of all that the kernel is compiled for
    options: dict[str, Any]  # the compiler's: num_warps …
    aligned: tuple[str, ...] = ()  # numbers that are multiples of 16, for which the kernel may be compiled


@dataclass(frozen=True)
class Kernel:
    """One way of computing an operation on a backend.

    `op` is one of `diyfa.registry.OPS`. `unsupported(problem)` returns a reason or None; `by_name_only(problem)` why it
    runs what it could run only where `variant` names it, or None;
    `config(problem)` the tile it would use without tuning (a frozen dataclass, or None where there is none); `clears`
    whether it fills rows that no packed sequence covers, too, out, gradients and delta with 0 and lse with +inf: else
    the caller has done that.
    `launch` has, by `op`, the signature

    * attention_fwd: `(problem, tensors, out, lse) -> None`, filling out (q's layout, in `problem.out_dtype`) and lse
      (`problem.lse_shape`)
    * attention_bwd: `(problem, tensors, out, lse, dout, dlse | None, gradients) -> None`, filling `AttentionGradients`
    * kvcache_fwd: `(problem, tensors, out, lse) -> None`, with `KVCacheProblem` and `KVCacheTensors`
    * kvcache_append: `(problem, tensors, new) -> None`, writing `NewKeys` to the caches, and the rotated q
    * matmul: `(problem, a, b) -> c`

    An attention kernel may offer a cheaper way to run a call that is equal to one it ran, besides its tensors'
    addresses: `repeat`, asked once it has run one, with its tensors and results or with those of an equal call, returns
    a function or, where there is no such way now, None. The function takes the tensors of the new call,
    `tensors.present()`, and their addresses, allocates and returns the results, or returns None without having launched
    anything where what was decided no longer holds.

    * attention_fwd: `repeat(problem, tensors, out, lse)` returns `(addresses, present) -> (out, lse)`
    * attention_bwd: `repeat(problem, tensors, out, lse, dout, gradients, owners)`, for calls without dlse, where
      `owners` are the one to three tensors that dq, dk, dv lie in, returns `(out, lse, dout, *present) -> [new owners,
      None for those of three that there are not, the gradients of optional tensors]`; it compares strides, not dtypes
      and shapes
    * kvcache_fwd: `repeat(problem, tensors, out, lse)` returns `(numbers, present, out | None, returns_lse) -> (out,
      lse, …)`, where `numbers` are the addresses and behind them `tensors.length` of the new call, and `out` what it is
      to fill, or None: it allocates one; what lse is does not matter where it is not returned
    * matmul: `repeat(problem, a, b)` returns `(addresses, (a, b)) -> [c, …]`
    * kvcache_append: `repeat(problem, tensors, new)` returns `(numbers, present) -> not None`, where the tensors of
      `new` stand behind the others
    """

    name: str
    op: str
    summary: str
    launch: Callable[..., Any] = field(repr=False)
    unsupported: Callable[[Any], str | None] = field(repr=False)
    config: Callable[[Any], Any] = field(repr=False, default=lambda problem: None)
    repeat: Callable[..., Callable[..., Any] | None] | None = field(repr=False, default=None)
    by_name_only: Callable[[Any], str | None] = field(repr=False, default=lambda problem: None)
    clears: bool = False


class ToolMissing(RuntimeError):
    """A program or package that a command needs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class TunedTile:
    """The tile that an autotuner chose for one bucket of problems: what `diyfa tune` shows."""

    kernel: str  # "attention_fwd"
    bucket: str  # what the choice depends on besides the device
    config: dict[str, Any]
    milliseconds: float
    measured: str  # date


@dataclass(frozen=True)
class TriedTile:
    """A candidate before it is run (no time, no reason), and after."""

    kernel: str
    config: dict[str, Any]
    default: bool  # what would be used untuned
    milliseconds: float | None = None
    reason: str = ""  # why it cannot run


class Tuning(Protocol):
    """The autotuner of a backend, for the current device."""

    enabled: bool  # whether calls use anything but the tables

    def unavailable(self) -> str | None:
        """Why nothing is measured now, or None."""
        ...

    def measuring(
        self, watch: Callable[[TriedTile], None] | None = None, without: Sequence[dict[str, Any]] = ()
    ) -> AbstractContextManager[None]:
        """Inside this block a problem is measured when it first comes, also where calls do not do that by
        themselves. `watch` is told before each run of a candidate and after it; candidates whose config is among
        `without` are left out, for instance because they crashed another process."""
        ...

    def stored(self) -> list[TunedTile]:
        """What is kept for this device and these versions."""
        ...

    def clear(self) -> int:
        """Forget it, in this process and for all others; returns how many rows there were."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What an accelerator offers: the object called `backend` in its package, or behind an entry point.

    Optional members: `tuning`, a `Tuning`, of a backend that measures its tiles; `merge(out, lse, part, part_lse)` of
    one with a kernel for it (`diyfa.distributed.merge` has PyTorch's operators otherwise); `binaries(arch) -> str`,
    which says where compiled kernels are kept; `recording(arch)` of one whose kernels can be compiled before they are
    called (`diyfa.ready.recording`).
    """

    name: str
    device_type: str  # torch device type of the tensors it takes

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Every kernel, the preferred one of each operation first."""
        ...

    def accepts(self, device: torch.device) -> str | None:
        """None if tensors on `device` can be used, else the reason."""
        ...

    def arch(self, device: torch.device) -> str:
        """Name of the architecture of `device` as the backend's tables know it."""
        ...

    def unsupported(self, problem: Any) -> str | None:
        """Reason why no kernel of this backend runs `problem`, or None."""
        ...
