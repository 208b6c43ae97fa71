"""The description of a call, from which backend, kernel and tile are chosen, and the protocol of a backend.

Besides plain data and helpers (`tests/frontend/test_layering.py` lists them), a backend imports only this module of
diyfa. It contains

* `AttentionProblem`, `KVCacheProblem` and `MatmulProblem`: descriptions without tensors, so a decision is a pure
  function and can be remembered, explained and tested without a device;
* `AttentionTensors`, `KVCacheTensors` and `MatmulTensors`: the tensors of one call, in the layout that the problem
  names;
* `Launch`: one kernel with its grid, arguments, constants and options;
* `Kernel` and `Backend`: the protocol between the front end and an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, wraps
from math import gcd
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch

from diyfa.features import REFUSABLE, TENSORS
from diyfa.features import dtype_name as dtype_name

# Index of the (batch, head, sequence, feature) dimensions in each 4-D layout.
LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "bhsd": (0, 1, 2, 3),  # flash_attention, PyTorch SDPA
    "bshd": (0, 2, 1, 3),  # flash_attention_v2, flash_attn
}
# Sequences packed one after another, (T, H, D), without a batch dimension: cu_seqlens has their offsets (flash_attn).
VARLEN = "thd"
MAX_STEPS = 0x7FFF0000  # the most steps (`RowSteps`) that 32-bit coordinates of a TMA descriptor count
Function = TypeVar("Function", bound=Callable[..., Any])
P = TypeVar("P", bound="_Problem")


def cached_per_problem(function: Function) -> Function:
    """Make `function` compute its result once for each problem and other arguments, and store it in the problem.

    Equal calls have one problem, that of their plan, so decisions about them live as long as the plan.
    """

    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def cached(problem: Any, *arguments: Any) -> Any:
        results = problem.__dict__.get("_cached")
        if results is None:
            results = problem.__dict__["_cached"] = {}
        try:
            return results[name, arguments]
        except KeyError:
            result = results[name, arguments] = function(problem, *arguments)
            return result

    return cast(Function, cached)


def cached_per_kind(function: Function) -> Function:
    """Make `function`, which reads no sizes of a problem, get the problem's `kind` and compute once for each kind."""

    @wraps(function)
    def cached(problem: Any, *arguments: Any) -> Any:
        results = problem.kind.cached_results
        try:
            return results[function, arguments]
        except KeyError:
            result = results[function, arguments] = function(problem.kind, *arguments)
            return result

    return cast(Function, cached)


class _Fields(NamedTuple):
    """The fields of a class of problems."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    key_values: Callable[[dict[str, Any]], tuple[Any, ...]]  # all values but sizes and a window's bounds


_kinds: dict[Any, Any] = {}
KINDS = 4096  # entries of `_kinds`, at most


@dataclass(frozen=True)
class _Problem:
    """The fields and methods that every problem has."""

    SIZES: ClassVar[tuple[str, ...]] = ()  # fields that `kind` leaves out, such as lengths
    FIELDS: ClassVar[_Fields]  # by `_set_fields`

    device_type: str
    arch: str  # "sm_90", "Ascend910B3", "cpu"
    dtype: str  # of the inputs

    @classmethod
    def from_fields(cls: type[P], fields: dict[str, Any]) -> P:
        """Return the problem with these fields and defaults for the others, in a third of the constructor's time."""
        problem = object.__new__(cls)
        values = problem.__dict__
        values.update(cls.FIELDS.defaults)
        values.update(fields)
        return problem

    def replace(self: P, **changes: Any) -> P:
        """Return a copy with some fields changed."""
        return type(self).from_fields({name: self.__dict__[name] for name in self.FIELDS.names} | changes)

    @cached_property
    def kind(self: P) -> P:
        """The problem with None for its sizes and only the signs of a window's bounds. Equal kinds are one object. Most
        decisions depend on the kind alone, and are made once for it (`cached_per_kind`)."""
        values = self.__dict__
        left, right = values.get("window_left", 0), values.get("window_right", 0)
        key = type(self), left >= 0, right >= 0, right > 0, *self.FIELDS.key_values(values)
        kind = _kinds.get(key)
        if kind is None:
            if len(_kinds) >= KINDS:
                _kinds.clear()
            kind = self.replace(**dict.fromkeys(self.SIZES))
            if "window_left" in values:
                kind.__dict__.update(window_left=-1 if left < 0 else 0, window_right=min(right, 1))
            kind.__dict__.update(kind=kind, cached_results={})
            _kinds[key] = kind
        return kind

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields only: a copy, or another process, makes its own decisions."""
        return {name: self.__dict__[name] for name in self.FIELDS.names}

    def described_as(self, problem_class: type[P], **others: Any) -> P:
        """Return this call as a problem of another class: the fields that both have, and `others`."""
        shared = {each.name for each in fields(problem_class)} & {each.name for each in fields(self)}
        return problem_class(**{name: getattr(self, name) for name in shared} | others)


class _AttentionShape:
    """Properties that follow from the fields of both attention problems."""

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
    """One attention call without its tensors. dtypes are short names ("float16").

    In the layout "thd" `batch` counts the sequences, `seqlen_q` and `seqlen_k` are the longest lengths, `total_q` and
    `total_k` the rows of the packed tensors (0 in other layouts).
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
    window_left: int = -1  # keys; -1: unbounded
    window_right: int = -1  # causal: 0
    softcap: float = 0.0
    seq_lens: bool = False
    alibi: bool = False
    bias: str = ""  # dtype of attn_bias ("bfloat16"), "" without one
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    needs_grad: bool = False
    aligned: bool = True  # base addresses and all strides but the last of q, k and v are multiples of 16 bytes (TMA)
    total_q: int = 0
    total_k: int = 0
    bias_grad: bool = False  # attn_bias itself wants a gradient
    batch_invariant: bool = False  # see `diyfa.batch_invariant`
    dropout_origins: bool = False  # the mask is that of a block of a larger problem
    # Dtype of out and, in the backward pass, of dq, dk and dv; "": `dtype`. It is "float32" if results are added up
    # later. A kernel writes its buffers in their dtype.
    out_dtype: str = ""
    few_steps: bool = True  # with `seq_lens`, `has_few_steps` of q, k and v; else True
    aligned_gradients: bool = True  # `aligned`, of the buffers of dq, dk and dv
    # For float8 and int8 (`diyfa.eight_bits`): the kind of each descale, 0 without one; whether means were taken off.
    q_descale: int = 0
    k_descale: int = 0
    v_descale: int = 0
    k_mean: bool = False
    v_mean: bool = False
    value_dtype: str = ""  # v's, if it differs from `dtype`
    mask: tuple[int, ...] = ()  # (queries, keys) of a block of the block mask, () without one
    score_fn: str = ""  # program of the score function (`diyfa.score_programs`)
    score_grad: bool = False  # a captured tensor of it wants a gradient

    @property
    def masked(self) -> bool:
        """Return whether a causal mask or a window may hide keys of its sequence from a query."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    @cached_per_kind
    def features(self) -> frozenset[str]:
        """Names of the optional features that this call uses. A backend refuses those that it does not list."""
        return frozenset([feature.refusal_name for feature in REFUSABLE if feature.is_in(self)])


@dataclass(frozen=True)
class KVCacheProblem(_AttentionShape, _Problem):
    """Attention of new queries over a cache of keys and values, without its tensors. It has no backward pass.

    The queries are (B, Sq, H, D) ("bshd") or packed ("thd"). The keys of a sequence lie in one of three ways: in one
    row of a contiguous cache (Bc, Sc, Hk, D); in pages (pages, page_size, Hk, D), which `block_table` names; or packed,
    (Tk, Hk, D), at the offsets `cu_seqlens_k`. `capacity` is the most keys that a sequence can have.

    Query i sees keys of its sequence as in `AttentionProblem`, aligned to the bottom right.
    """

    SIZES = ("batch", "seqlen_q", "capacity", "total_q", "num_splits")

    cache_dtype: str  # of keys and values: q's, or "float8_e4m3fn"
    layout: str
    batch: int  # sequences
    heads_q: int
    heads_kv: int
    seqlen_q: int  # queries of each sequence; packed: at least those of the longest
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
    lengths: bool = False  # numbers of keys are on the device (cache_seqlens or cu_seqlens_k)
    leftpad: bool = False
    cache_batch_idx: bool = False
    descales: bool = False  # of keys or values, for a cache of float8
    latent: bool = False  # the values are the first features of the keys, in the same memory
    total_q: int = 0
    num_splits: int = 0  # 0: the kernel chooses
    batch_invariant: bool = False  # see `diyfa.batch_invariant`
    aligned: bool = True  # base addresses and all strides but the last of q and both caches are multiples of 16 bytes
    aligned_out: bool = True  # and those of out, if the caller gives it
    in_place: bool = False  # out overwrites the queries
    few_steps: bool = True  # `has_few_steps` of both caches

    @property
    def paged(self) -> bool:
        return self.page_size > 0


# Features that `as_kvcache_problem` preserves: those that decide a field of both problems.
KVCACHE_FEATURES = frozenset(
    [x.refusal_name for x in REFUSABLE if (x.problem_field or x.name) in {each.name for each in fields(KVCacheProblem)}]
)


@dataclass(frozen=True)
class MatmulProblem(_Problem):
    """One matrix product (M, K) @ (K, N), with its epilogue, without its tensors.

    `aligned` says that each input has a dimension of stride 1, and that its other stride and its base address are
    multiples of 16 bytes, as TMA needs. `k_major` says of a and of b whether that dimension is K.
    """

    SIZES = ("m", "n", "k")

    compute_dtype: str  # of the operands of each product: "float16", "bfloat16", "float32", "float8_e4m3fn"
    out_dtype: str
    m: int
    n: int
    k: int
    precision: str = "ieee"  # of products of float32 operands: "ieee" or "tf32"
    block: tuple[int, int, int] | None = None  # tile asked for by the caller
    autotune: bool = True
    aligned: bool = False
    k_major: tuple[bool, bool] = (True, False)
    aligned_out: bool | None = None  # a given `out` has rows that TMA can write; None: a new, contiguous result
    bias: bool = False  # (N,), added in float32
    activation: str | None = None  # one of `diyfa.options.ACTIVATIONS`


def _set_fields(problem_class: type[_Problem]) -> None:
    every = fields(problem_class)
    key_names = [each.name for each in every if each.name not in {*problem_class.SIZES, "window_left", "window_right"}]
    defaults = {each.name: each.default for each in every if each.default is not MISSING}
    problem_class.FIELDS = _Fields(tuple(each.name for each in every), defaults, itemgetter(*key_names))


for _problem_class in (AttentionProblem, KVCacheProblem, MatmulProblem):
    _set_fields(_problem_class)


class AttentionTensors(NamedTuple):
    """The tensors and scalars of one call; q, k, v have the dimension order of `problem.layout`.

    `rng_state` and `dropout_p` define the dropout mask (`diyfa.dropout`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32: sequence b is rows cu_seqlens_q[b] to [b + 1] of q
    cu_seqlens_k: torch.Tensor | None = None  # (B + 1,) int32: offsets in k and v; both or none
    seq_lens: torch.Tensor | None = None  # (B,) int32
    alibi_slopes: torch.Tensor | None = None  # (H,) or (B, H) fp32
    attn_bias: torch.Tensor | None = None  # broadcastable to (B, H, Sq, Sk)
    sinks: torch.Tensor | None = None  # (H,) fp32
    rng_state: torch.Tensor | None = None  # int64 [seed, offset], with `dropout_origins` also 4 numbers for each sample
    q_descale: torch.Tensor | None = None  # fp32, contiguous: one number, (B, Hk) or (B, H, blocks)
    k_descale: torch.Tensor | None = None  # fp32: one number, (B, Hk) or (B, Hk, blocks)
    v_descale: torch.Tensor | None = None  # fp32: one number or (B, Hk)
    k_mean: torch.Tensor | None = None  # (B, Hk, D) fp32
    v_mean: torch.Tensor | None = None  # (B, Hk, Dv) fp32
    mask_blocks: torch.Tensor | None = None  # (B or 1, H or 1, L) int32, lists of blocks (`diyfa.block_lists`)
    mask_bits: torch.Tensor | None = None  # (P, BLOCK_Q, BLOCK_K / 32) int32: partial blocks; both or none
    score_tensor0: torch.Tensor | None = None  # captured tensors of the score function, contiguous
    score_tensor1: torch.Tensor | None = None
    score_tensor2: torch.Tensor | None = None
    score_tensor3: torch.Tensor | None = None
    dropout_p: float = 0.0

    def present(self) -> list[torch.Tensor]:
        """Return q, k, v and the optional tensors that are given, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


class MatmulTensors(NamedTuple):
    """The tensors of one matrix product, activation((a @ b) * a_descale * b_descale + bias)."""

    a: torch.Tensor  # (M, K)
    b: torch.Tensor  # (K, N)
    bias: torch.Tensor | None = None  # (N,)
    # For float8, in fp32: one number, or one for each row of a, (M, 1) or (M,), and each column of b, (1, N) or (N,)
    a_descale: torch.Tensor | None = None
    b_descale: torch.Tensor | None = None

    def present(self) -> list[torch.Tensor]:
        """Return a, b and the optional tensors that are given, in the order of the fields."""
        return [x for x in self if x is not None]


class KVCacheTensors(NamedTuple):
    """The tensors and numbers of one call with a cache.

    Sequence b has `n` keys: `seqlens[b] + added`, or without `seqlens` `cu_seqlens_k[b + 1] - cu_seqlens_k[b]`, or
    without either `length + added`; no more than `problem.capacity`. The first `leftpad[b]` of them are padding: they
    are never read and count for no position, so that the last query still stands at the last key. No result depends on
    keys beyond `n`, on pages that no sequence uses, or on entries of `block_table` beyond a sequence's last page.

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
    cu_seqlens_k: torch.Tensor | None = None  # (B + 1,) int32: offsets of packed keys; with pages only lengths
    block_table: torch.Tensor | None = None  # (B, pages of a sequence) int32, last stride 1
    cache_batch_idx: torch.Tensor | None = None  # (B,) int32
    leftpad: torch.Tensor | None = None  # (B,) int32
    alibi_slopes: torch.Tensor | None = None  # (H,) or (B, H) fp32
    sinks: torch.Tensor | None = None  # (H,) fp32
    k_descale: torch.Tensor | None = None  # (B, Hk) fp32, any strides: factor of the keys of a float8 cache
    v_descale: torch.Tensor | None = None

    def present(self) -> list[torch.Tensor]:
        """Return q, both caches and the optional tensors that are given, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


class NewKeys(NamedTuple):
    """The keys and values that a call appends to a cache, and their rotary embedding.

    Row i of k and v becomes key `seqlens[b] + i` of sequence b (without `seqlens`, `length + i`). It is dropped at
    `problem.capacity` or beyond, and in a page below 0 or beyond the cache. Nothing else in the cache changes. cos and
    sin rotate the first `2 * cos.shape[1]` features of k by row `seqlens[b] + i`. They rotate q into `rotated_q`, query
    i by row `seqlens[b] + i` if the mask is causal or a window, else by row `seqlens[b]`. Rows beyond cos rotate by 0.
    Products are formed in fp32 and rounded once. Values for a float8 cache are divided by its descale (1 without one)
    and saturate.
    """

    k: torch.Tensor  # (B, Snew, Hk, D), q's dtype
    v: torch.Tensor | None  # (B, Snew, Hk, Dv); None for a latent cache
    cos: torch.Tensor | None = None  # (rows, rotated features / 2), q's dtype or fp32
    sin: torch.Tensor | None = None
    interleaved: bool = True  # features (0, 1), (2, 3), … make pairs; else feature i and i + half
    rotated_q: torch.Tensor | None = None  # shaped like q; None without cos

    def present(self) -> list[torch.Tensor]:
        """Return the tensors that are given, in the order of the fields."""
        return [x for x in self if isinstance(x, torch.Tensor)]


@cached_per_problem
def as_backward(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem of a call's backward pass: batch-invariant if gradients are to be deterministic, else not.

    Without `deterministic` the sums of gradients have no fixed order, so the mode could promise nothing: the backward
    pass is as fast as outside of the mode.
    """
    return problem if problem.deterministic else problem.replace(batch_invariant=False)


def as_kvcache_problem(problem: AttentionProblem) -> KVCacheProblem:
    """Return a forward pass as a call with a cache of all its keys. Only features of both problems carry over."""
    return problem.described_as(
        KVCacheProblem, cache_dtype=problem.dtype, layout=VARLEN if problem.varlen else "bshd",
        capacity=problem.seqlen_k, packed_keys=problem.varlen, lengths=problem.varlen,
    )  # fmt: skip


def as_kvcache(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[KVCacheProblem, KVCacheTensors]:
    """Return `as_kvcache_problem` and its tensors. q, k, v become views in "bshd", as out must; packed ones stay so."""
    q, k, v = (x if problem.varlen else as_bhsd(x, problem.layout).transpose(1, 2) for x in tensors[:3])
    optional = {x.name: getattr(tensors, x.name) for x in TENSORS if x.name in KVCacheTensors._fields}
    return as_kvcache_problem(problem), KVCacheTensors(q, k, v, tensors.sm_scale, problem.seqlen_k, **optional)


# Index of a score function's captured tensor -> its gradient.
Captured = dict[int, torch.Tensor]


class AttentionGradients(NamedTuple):
    """Buffers that a backward kernel fills; last stride 1, any other strides (packed gradients are slices).

    The gradient of an optional tensor is None if the tensor is not given or wants none. `delta`, if given, becomes
    rowsum(dout * out), minus dlse if there is one: contiguous, shaped and typed like the log-sum-exp, 0 in rows of no
    sequence. Every algorithm computes it anyway.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    dscore0: torch.Tensor | None = None  # of the captured tensors of a score function
    dscore1: torch.Tensor | None = None
    dscore2: torch.Tensor | None = None
    dscore3: torch.Tensor | None = None
    delta: torch.Tensor | None = None

    def captured(self) -> Captured:
        """Return the gradients of captured tensors that are wanted."""
        buffers = (self.dscore0, self.dscore1, self.dscore2, self.dscore3)
        return {n: x for n, x in enumerate(buffers) if x is not None}


def bhsd_strides(x: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """Return the strides in (batch, head, sequence, feature) order; the batch stride of packed sequences is 0."""
    s = x.stride()
    if layout == VARLEN:
        return 0, s[1], s[0], s[2]
    b, h, m, d = LAYOUTS[layout]
    return s[b], s[h], s[m], s[d]


def per_head_stride(x: torch.Tensor | None) -> int:
    """Return the stride between the samples of an optional (H,) or (B, H) tensor, 0 if all have one row."""
    return 0 if x is None or x.dim() == 1 else x.stride(0)


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Return whether base addresses and all strides but the last are multiples of 16 bytes, as TMA needs."""
    bits = 0
    for x in tensors:
        steps = 0
        for stride in x.stride()[:-1]:
            steps |= stride
        bits |= x.data_ptr() | steps * x.element_size()
    return not bits & 15


class RowSteps(NamedTuple):
    """Rows of a tensor in steps. A step is the largest number that divides the strides of samples and of rows."""

    step: int  # elements; 16 bytes at least, if the tensor is aligned
    per_sample: int  # steps from one sample to the next
    per_row: int  # steps from one row to the next
    total: int  # steps from the first row to the end of the last


def row_steps(x: torch.Tensor, layout: str) -> RowSteps:
    """Return the steps of a tensor. Packed sequences are addressed by rows alone: total is 0, as no bound applies."""
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
    """Return whether 32 bits count the steps to every row. TMA needs that if each sample ends at its own length."""
    return all(row_steps(x, layout).total < MAX_STEPS for x in tensors)


def as_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view of a 4-D tensor in (batch, head, sequence, feature) order."""
    return x if layout == "bhsd" else x.permute(LAYOUTS[layout])


def empty_output(q: torch.Tensor, head_dim_v: int, out_dtype: str = "") -> torch.Tensor:
    """Return an uninitialised attention output for `q`: its dtype or `out_dtype`, its shape with `head_dim_v`, and its
    dimension order in memory."""
    dtype = getattr(torch, out_dtype) if out_dtype else q.dtype
    if q.shape[-1] == head_dim_v:
        return torch.empty_like(q, dtype=dtype)
    outer = sorted(range(q.dim() - 1), key=lambda i: q.stride(i), reverse=True)
    dense = q.new_empty([q.shape[i] for i in outer] + [head_dim_v], dtype=dtype)
    inverse = sorted(range(q.dim() - 1), key=lambda i: outer[i])
    return dense.permute([*inverse, q.dim() - 1])


@cached_per_kind
def refuse_features(problem: AttentionProblem, supported: frozenset[str], who: str) -> str | None:
    """Return why `who` cannot run `problem` if it uses a feature outside `supported`, else None."""
    missing = sorted(problem.features - supported)
    return f"{who} does not implement {', '.join(missing)}" if missing else None


class Launch(NamedTuple):
    """One kernel with its grid, arguments, constants and options: the result of a launcher.

    It is run, and repeated for equal calls. If it is made from tensors without memory, it is compiled ahead of time.
    """

    kernel: Any  # a jit function
    grid: int | tuple[int, ...]  # programs
    arguments: dict[str, Any]  # by name: tensors, their TMA descriptors, None, numbers
    constants: dict[str, Any]  # by name: mostly one, a frozen dataclass of all that the kernel is compiled for
    options: dict[str, Any]  # the compiler's: num_warps …
    aligned: tuple[str, ...] = ()  # names of multiples of 16: the kernel may be compiled for that


@dataclass(frozen=True)
class Kernel:
    """One way of computing an operation on a backend.

    `op` is one of `diyfa.registry.OPS`. `unsupported(problem)` returns why it cannot run a problem, or None.
    `by_name_only(problem)` returns why it runs a problem only if `variant` names it, or None. `config(problem)` returns
    its tile without tuning: a frozen dataclass, or None if it has none. `clears` says that it also fills rows of no
    packed sequence, out, gradients and delta with 0 and lse with +inf; else the caller has done that. The signature of
    `launch` depends on `op`:

    * attention_fwd: `(problem, tensors, out, lse) -> None`, filling out (q's layout, in `problem.out_dtype`) and lse
      (`problem.lse_shape`)
    * attention_bwd: `(problem, tensors, out, lse, dout, dlse | None, gradients) -> None`, filling `AttentionGradients`
    * kvcache_fwd: `(problem, tensors, out, lse) -> None`, with `KVCacheProblem` and `KVCacheTensors`
    * kvcache_append: `(problem, tensors, new) -> None`, writing `NewKeys` to the caches, and the rotated q
    * matmul: `(problem, tensors, c) -> None`, with `MatmulTensors`, filling c (M, N) of `problem.out_dtype`, of any
      strides

    A kernel may offer a cheaper way to run a call that differs from an earlier one only in its tensors' addresses.
    `repeat`, called when such a call has run, takes tensors and results of it or of an equal call. It returns a
    function, or None if there is no cheaper way now. The function takes the addresses of a new call's tensors, those
    of `tensors.present()` in that order. It allocates and returns the results. If a decision no longer holds, it
    launches nothing and returns None.

    * attention_fwd: `repeat(problem, tensors, out, lse)` returns `(addresses) -> (out, lse)`
    * attention_bwd: `repeat(problem, tensors, out, lse, dout, gradients, owners)`, for calls without dlse, returns
      `(addresses, saved) -> [*owners, *gradients of optional tensors]`. `saved` are q, k, v, out, lse and the optional
      tensors, and `addresses` theirs, then that of dout. `owners` are the one to three tensors that contain dq, dk, dv;
      in the result None fills them up to three. The function is for one stride of dout and compares the strides of
      `saved`, but not dtypes and shapes
    * kvcache_fwd: `repeat(problem, tensors, out, lse)` returns `(numbers, out | None, returns_lse) -> (out, lse, …)`.
      `numbers` are the addresses, then `tensors.length` of the new call. `out` is the tensor to fill; without one the
      function allocates it. lse may be anything if it is not returned
    * matmul: `repeat(problem, tensors, c)` returns `(addresses, out | None) -> [c, …]`. `out` is the tensor to fill;
      without one the function allocates it
    * kvcache_append: `repeat(problem, tensors, new)` returns `(numbers) -> not None`; the addresses of the tensors of
      `new` come behind the others
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
    """The tile that an autotuner chose for one bucket of problems, as `diyfa tune` shows it."""

    kernel: str  # "attention_fwd"
    bucket: str  # all that the choice depends on besides the device
    config: dict[str, Any]
    milliseconds: float
    measured: str  # date


@dataclass(frozen=True)
class TriedTile:
    """A candidate of an autotuner before its run (no time, no reason) or after it."""

    kernel: str
    config: dict[str, Any]
    default: bool  # whether calls use it without tuning
    milliseconds: float | None = None
    reason: str = ""  # why it cannot run


class Tuning(Protocol):
    """The autotuner of a backend, for the current device."""

    enabled: bool  # whether calls use anything but the tables

    def unavailable(self) -> str | None:
        """Return why nothing is measured now, or None."""
        ...

    def measuring(
        self, watch: Callable[[TriedTile], None] | None = None, without: Sequence[dict[str, Any]] = ()
    ) -> AbstractContextManager[None]:
        """Measure each problem at its first call inside the block, even if calls do not measure by themselves. `watch`
        is called before each run of a candidate and after it. Candidates whose config is in `without` are left out, for
        instance because they crashed another process."""
        ...

    def stored(self) -> list[TunedTile]:
        """Return the tiles that are stored for this device and these versions."""
        ...

    def clear(self) -> int:
        """Delete the stored tiles, for this process and all others. Return how many there were."""
        ...


@runtime_checkable
class Backend(Protocol):
    """The interface of an accelerator: the object called `backend` in its package, or behind an entry point.

    Optional members: `tuning`, a `Tuning`, if the backend measures its tiles; `merge(out, lse, partial_out,
    partial_lse)`, if it has a kernel for that (else `diyfa.distributed.merge` uses PyTorch's operators); `quantize(x,
    values, scheme) -> (descale, mean)`, likewise (`diyfa.quantize`); `build_mask(terms, shape, block, device) ->
    (mask_blocks, mask_bits)`, likewise (`diyfa.block_mask`); `select_blocks(q, k, how) -> (mask_blocks, mask_bits)`
    or None, likewise (`diyfa.select_blocks`);
    `binaries(arch) -> str`, which says where compiled kernels are stored; `recording(arch)`, if its kernels can be
    compiled before they are called (`diyfa.ready.recording`).
    """

    name: str
    device_type: str  # torch device type of the tensors it takes

    @property
    def kernels(self) -> Sequence[Kernel]:
        """All kernels, the preferred one of each operation first."""
        ...

    def accepts(self, device: torch.device) -> str | None:
        """Return None if tensors on `device` can be used, else the reason."""
        ...

    def arch(self, device: torch.device) -> str:
        """Return the name of the architecture of `device` in the backend's tables."""
        ...

    def unsupported(self, problem: Any) -> str | None:
        """Return why no kernel of this backend runs `problem`, or None."""
        ...
