"""The arguments of a call besides q, k and v, as two objects: `Lengths` and `AttentionOptions`.

A public function checks its arguments once and makes both objects. Every later function takes them whole. They are
named tuples, because every call makes some. `diyfa.features.FEATURES`, the table, has one row for each of their fields
but `packing`, in the order of the operators' schema. From these rows come that schema and the fields of
`AttentionProblem`, on which backends decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from diyfa.features import FEATURES, GRADIENTS
from diyfa.features import TENSORS as TENSORS
from diyfa.problem import AttentionTensors

UNBOUNDED = (-1, -1)  # a window that hides nothing


class Lengths(NamedTuple):
    """The lengths of a call's sequences. Without tensors, these are as long as q and k."""

    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32: packed sequence b is rows [b] to [b + 1] of q
    cu_seqlens_k: torch.Tensor | None = None  # (B + 1,) int32: offsets of packed sequences in k and v
    seq_lens: torch.Tensor | None = None  # (B,) int32: real lengths of padded sequences
    max_seqlen_q: int = 0  # at least the longest packed sequence
    max_seqlen_k: int = 0


NO_LENGTHS = Lengths()


class AttentionOptions(NamedTuple):
    """The options and optional tensors of one call, checked, with the defaults filled in.

    `packing` says which of q, k, v share one tensor: "" none, "kv" (k has both, v is None) or "qkv" (q has all three).
    """

    layout: str
    sm_scale: float
    window_left: int = -1  # -1: unbounded
    window_right: int = -1  # 0: causal
    softcap: float = 0.0
    dropout_p: float = 0.0
    score_fn: str = ""  # program of the score function (`diyfa.score_programs`)
    alibi_slopes: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None  # None without dropout
    q_descale: torch.Tensor | None = None  # of float8 or int8, as the next four: `diyfa.eight_bits`
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None  # both tensors of a block mask (`diyfa.block_lists`), or none
    mask_bits: torch.Tensor | None = None
    score_tensor0: torch.Tensor | None = None  # captured tensors of the score function
    score_tensor1: torch.Tensor | None = None
    score_tensor2: torch.Tensor | None = None
    score_tensor3: torch.Tensor | None = None
    deterministic: bool = False
    needs_grad: bool = False
    bias_grad: bool = False  # attn_bias itself wants a gradient
    score_grad: bool = False  # a captured tensor wants a gradient
    backend: str = ""  # "": the one made for the device
    variant: str = "auto"
    batch_invariant: bool = False
    out_dtype: str = ""  # of out, dq, dk and dv, such as "float32"; "": the inputs'
    packing: str = ""


ACTIVATIONS = ("relu", "gelu", "silu")


class MatmulOptions(NamedTuple):
    """The options of one matrix product, in the order of the operators' schema (`MATMUL_SCHEMA`)."""

    block: tuple[int, int, int] | None  # the caller's tile
    autotune: bool
    precision: str  # of products of float32 operands: "ieee" or "tf32"
    compute_dtype: torch.dtype
    out_dtype: torch.dtype
    activation: str | None = None  # one of ACTIVATIONS
    variant: str = "auto"
    is_backward: bool = False  # a product of a backward pass: another kernel may run it if `variant` cannot
    backend: str = ""


MATMUL_SCHEMA = (
    "int[]? block, bool autotune, str precision, ScalarType compute_dtype, ScalarType out_dtype, str? activation, "
    "str variant, bool is_backward, str backend"
)

# ---- Read from the table -------------------------------------------------------------------------------------------

SCHEMA = ", ".join(f"{feature.schema} {feature.name}" for feature in FEATURES)
NAMES = tuple(feature.name for feature in FEATURES)
LENGTHS = Lengths._fields
# Name of each tensor that may want a gradient -> the option that asks for it, "" if none has to.
DIFFERENTIABLE = {feature.name: feature.gradient_if for feature in GRADIENTS}
CHECKED_TENSORS = {feature.name: feature for feature in TENSORS if feature.shape is not None}
_TENSOR_NAMES = tuple(feature.name for feature in TENSORS)
_FIELDS = (*LENGTHS, *AttentionOptions._fields)


_PROBLEM_FEATURES = [feature for feature in FEATURES if feature.problem_field]
_option_values = itemgetter(*[_FIELDS.index(feature.name) for feature in _PROBLEM_FEATURES])
_problem_names = [feature.problem_field for feature in _PROBLEM_FEATURES]
_problem_rules = [  # (field, rule, value of the field without a tensor)
    (feature.problem_field, feature.to_problem_value, feature.to_problem_value(None) if feature.dtypes else None)
    for feature in _PROBLEM_FEATURES
    if feature.to_problem_value is not None
]
_preparations = [feature.prepared for feature in TENSORS]


# The next four functions name each field, in the order of the table: torch.compile does not trace loops over the table.


def optional_tensors(lengths: Lengths, options: AttentionOptions) -> tuple[torch.Tensor | None, ...]:
    """Return all optional tensors or None, in the order of the table."""
    return (
        lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seq_lens, options.alibi_slopes, options.attn_bias,
        options.sinks, options.rng_state, options.q_descale, options.k_descale, options.v_descale, options.k_mean,
        options.v_mean, options.mask_blocks, options.mask_bits, options.score_tensor0, options.score_tensor1,
        options.score_tensor2, options.score_tensor3,
    )  # fmt: skip


def optional_from_arguments(lengths: Lengths, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return all optional tensors of lengths and named arguments, in the order of the table, or () if none is given.

    `arguments`: those of a public function, which may lack some names.
    """
    slopes, bias, sinks, state, blocks = (
        arguments.get("alibi_slopes"), arguments.get("attn_bias"), arguments.get("sinks"), arguments.get("rng_state"),
        arguments.get("mask_blocks"),
    )  # fmt: skip
    q_descale, k_descale, v_descale = arguments.get("q_descale"), arguments.get("k_descale"), arguments.get("v_descale")
    k_mean, v_mean = arguments.get("k_mean"), arguments.get("v_mean")
    has_none = slopes is bias is sinks is state is q_descale is k_descale is v_descale is k_mean is v_mean is None
    if lengths is NO_LENGTHS and has_none and blocks is None and not arguments.get("score_fn"):
        return ()
    return (
        lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seq_lens, slopes, bias, sinks, state, q_descale, k_descale,
        v_descale, k_mean, v_mean, blocks, arguments.get("mask_bits"), arguments.get("score_tensor0"),
        arguments.get("score_tensor1"), arguments.get("score_tensor2"), arguments.get("score_tensor3"),
    )  # fmt: skip


def pack(lengths: Lengths, options: AttentionOptions) -> tuple[Any, ...]:
    """Return the flat arguments of `SCHEMA`."""
    o = options
    return (
        *optional_tensors(lengths, options), lengths.max_seqlen_q, lengths.max_seqlen_k, o.sm_scale, o.window_left,
        o.window_right, o.softcap, o.dropout_p, o.score_fn, o.layout, o.deterministic, o.needs_grad, o.bias_grad,
        o.score_grad, o.backend, o.variant, o.batch_invariant, o.out_dtype,
    )  # fmt: skip


def unpack(arguments: Sequence[Any], packing: str = "") -> tuple[Lengths, AttentionOptions]:
    """Return the lengths and options of the flat arguments of `SCHEMA`, which has no `packing`."""
    (
        cu_seqlens_q, cu_seqlens_k, seq_lens, alibi_slopes, attn_bias, sinks, rng_state, q_descale, k_descale,
        v_descale, k_mean, v_mean, mask_blocks, mask_bits, score_tensor0, score_tensor1, score_tensor2, score_tensor3,
        max_seqlen_q, max_seqlen_k, sm_scale, window_left, window_right, softcap, dropout_p, score_fn, layout,
        deterministic, needs_grad, bias_grad, score_grad, backend, variant, batch_invariant, out_dtype,
    ) = arguments  # fmt: skip
    return Lengths(cu_seqlens_q, cu_seqlens_k, seq_lens, max_seqlen_q, max_seqlen_k), AttentionOptions(
        layout, sm_scale, window_left, window_right, softcap, dropout_p, score_fn, alibi_slopes, attn_bias, sinks,
        rng_state, q_descale, k_descale, v_descale, k_mean, v_mean, mask_blocks, mask_bits, score_tensor0,
        score_tensor1, score_tensor2, score_tensor3, deterministic, needs_grad, bias_grad, score_grad, backend, variant,
        batch_invariant, out_dtype, packing,
    )  # fmt: skip


def problem_fields(lengths: Lengths, options: AttentionOptions) -> dict[str, Any]:
    """Return the fields of `AttentionProblem` that lengths and options decide, by name.

    `batch`, `seqlen_q` and `seqlen_k` are valid for packed sequences only: otherwise q and k have them.
    """
    fields = dict(zip(_problem_names, _option_values((*lengths, *options)), strict=True))
    for name, rule, absent in _problem_rules:
        value = fields[name]
        fields[name] = absent if value is None else rule(value)
    return fields


def tensors_among(arguments: Sequence[Any]) -> Sequence[torch.Tensor | None]:
    """Return the optional tensors among flat arguments: `SCHEMA` begins with them."""
    return arguments[: len(TENSORS)]


def without_tensors(lengths: Lengths, options: AttentionOptions) -> tuple[Lengths, AttentionOptions, tuple[str, ...]]:
    """Return lengths and options with None for each optional tensor, and the names of the tensors that were given."""
    names = tuple([n for n, x in zip(_TENSOR_NAMES, optional_tensors(lengths, options), strict=True) if x is not None])
    if not names:
        return lengths, options, names
    none: Any = dict.fromkeys(names)
    lengths_changes = {name: none.pop(name) for name in names if name in LENGTHS}
    return lengths._replace(**lengths_changes), options._replace(**none), names


def with_tensors(
    lengths: Lengths, options: AttentionOptions, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> tuple[Lengths, AttentionOptions]:
    """Return lengths and options with `tensors` under these names, as they were before `without_tensors`."""
    if not names:
        return lengths, options
    changes: Any = dict(zip(names, tensors, strict=True))
    lengths_changes = {name: changes.pop(name) for name in names if name in LENGTHS}
    return lengths._replace(**lengths_changes), options._replace(**changes)


def bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> AttentionTensors:
    """Return the tensors of a call as backends read them: some of them as contiguous copies (`Feature.prepared`)."""
    given: Any = {}
    for name, prepared, x in zip(_TENSOR_NAMES, _preparations, optional_tensors(lengths, options), strict=True):
        if x is not None:
            given[name] = x if prepared is None else prepared(x)
    if "cu_seqlens_q" in given:  # queries and keys may have the same offsets
        given.setdefault("cu_seqlens_k", given["cu_seqlens_q"])
    return AttentionTensors(q, k, v, options.sm_scale, dropout_p=options.dropout_p, **given)
