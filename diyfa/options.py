"""What a call has besides q, k and v, as two objects, `Lengths` and `AttentionOptions`, and the table of their fields.

A public function checks its arguments once and makes these two; everything behind it takes them whole. They are named
tuples, because every call makes some. `FEATURES` has one row for each of their fields. From the rows come the checks of
optional tensors, the operators' schema, the flat arguments that the schema wants (`pack`, `unpack`), what decisions
depend on, which gradients there are, and the rows of the feature tables. A new feature is a field and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from diyfa.problem import AttentionTensors, dtype_name

ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNBOUNDED = (-1, -1)  # a window that hides nothing


class Lengths(NamedTuple):
    """How long the sequences of one call are. Without tensors: as long as q and k."""

    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32: packed sequence b is rows [b] to [b + 1] of q
    cu_seqlens_k: torch.Tensor | None = None  # the same of k and v
    seq_lens: torch.Tensor | None = None  # (B,) int32: how much of a padded sequence there is
    max_seqlen_q: int = 0  # at least the longest packed sequence
    max_seqlen_k: int = 0


WHOLE = Lengths()


class AttentionOptions(NamedTuple):
    """The options and optional tensors of one call, checked, with the defaults filled in.

    `packing` says which of q, k, v share one tensor: "" none, "kv" (k is both, v None) or "qkv" (q is all, k, v None).
    """

    layout: str
    sm_scale: float
    window_left: int = -1  # -1: unbounded
    window_right: int = -1  # 0: causal
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    attn_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None  # None without dropout
    deterministic: bool = False
    needs_grad: bool = False
    bias_grad: bool = False  # attn_bias itself wants a gradient
    backend: str = ""  # "": the one made for the device
    variant: str = "auto"
    batch_invariant: bool = False
    packing: str = ""


# ---- The table --------------------------------------------------------------------------------------------------

Sizes = dict[str, int]  # of one call: "b", "h", "q", "k"


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Small vectors are read by plain index; only odd callers pass strided ones."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _sequences(cu_seqlens: torch.Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _is_given(value: torch.Tensor | None) -> bool:
    return value is not None


def _dtype_of(value: torch.Tensor | None) -> str:
    return "" if value is None else dtype_name(value.dtype)


def _is_positive(value: float) -> bool:
    return value > 0


def shaped(*allowed: str) -> Callable[[torch.Tensor, Sizes], str]:
    """A rule: one of these shapes, in the letters of `Sizes`. It returns what is wrong, or nothing."""

    def rule(x: torch.Tensor, sizes: Sizes) -> str:
        shapes = [tuple(sizes[letter] for letter in letters) for letters in allowed]
        return "" if x.shape in shapes else f"have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}"

    return rule


def _broadcasts(x: torch.Tensor, sizes: Sizes) -> str:
    full, shape = tuple(sizes[letter] for letter in "bhqk"), tuple(x.shape)
    missing = len(full) - len(shape)
    if missing < 0 or any(size not in (1, whole) for size, whole in zip(shape, full[missing:], strict=True)):
        return f"be broadcastable to {full}, got {shape}"
    return ""


def _is_pair(x: torch.Tensor, sizes: Sizes) -> str:
    if x.shape != (2,) or x.stride(0) != 1:
        return f"be a contiguous pair (seed, offset), got shape {tuple(x.shape)}"
    return ""


@dataclass(frozen=True)
class Feature:
    """One field of `Lengths` or `AttentionOptions`.

    `problem` is the field of `AttentionProblem` that it decides, and `fact` says what that field becomes (None: the
    value itself). Optional tensors with a `shape` rule are checked by it. `label` and `example` (changes of a typical
    problem) make a row of the feature tables.
    """

    name: str
    schema: str  # type in the operators' schema
    problem: str = ""
    fact: Callable[[Any], Hashable] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    dtypes_in_words: str = ""
    shape: Callable[[torch.Tensor, Sizes], str] | None = None
    differentiable: bool = False
    prepared: Callable[[Any], Any] | None = None  # what backends get instead of it
    label: str = ""
    example: dict[str, Any] = field(default_factory=dict)


_FLOAT32, _INT32, _INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
# In the order of the schema, where tensors come first.
FEATURES = (
    Feature(
        "cu_seqlens_q", "Tensor?", "batch", _sequences,
        label="packed sequences", example={"layout": "thd", "total_q": 4096, "total_k": 4096},
    ),
    Feature("cu_seqlens_k", "Tensor?"),
    Feature(
        "seq_lens", "Tensor?", "seq_lens", _is_given, _INT32, "int32", shaped("b"),
        prepared=_contiguous, label="seq_lens", example={"seq_lens": True},
    ),
    Feature(
        "alibi_slopes", "Tensor?", "alibi", _is_given, _FLOAT32, "float32", shaped("h", "bh"),
        prepared=_contiguous, label="ALiBi", example={"alibi": True},
    ),
    Feature(
        "attn_bias", "Tensor?", "bias", _dtype_of, ATTENTION_DTYPES, "a floating-point tensor of 16, 32 or 64 bits",
        _broadcasts, differentiable=True, label="attn_bias", example={"bias": "float32"},
    ),
    Feature(
        "sinks", "Tensor?", "sinks", _is_given, _FLOAT32, "float32", shaped("h"),
        differentiable=True, prepared=_contiguous, label="sinks", example={"sinks": True},
    ),
    Feature("rng_state", "Tensor?", "", None, _INT64, "int64", _is_pair),
    Feature("max_seqlen_q", "SymInt", "seqlen_q"),
    Feature("max_seqlen_k", "SymInt", "seqlen_k"),
    Feature("sm_scale", "float"),
    Feature("window_left", "SymInt", "window_left", label="window", example={"window_left": 256, "window_right": 0}),
    Feature("window_right", "SymInt", "window_right", label="causal", example={"window_right": 0}),
    Feature("softcap", "float", "softcap", label="softcap", example={"softcap": 30.0}),
    Feature("dropout_p", "float", "dropout", _is_positive, label="dropout", example={"dropout": True}),
    Feature("layout", "str", "layout"),
    Feature("deterministic", "bool", "deterministic", label="deterministic", example={"deterministic": True}),
    Feature("needs_grad", "bool", "needs_grad"),
    Feature("bias_grad", "bool", "bias_grad"),
    Feature("backend", "str"),
    Feature("variant", "str"),
    Feature("batch_invariant", "bool", "batch_invariant"),
)  # fmt: skip

SCHEMA = ", ".join(f"{feature.schema} {feature.name}" for feature in FEATURES)
NAMES = tuple(feature.name for feature in FEATURES)
LENGTHS = Lengths._fields
TENSORS = tuple(feature for feature in FEATURES if feature.schema == "Tensor?")
OPTIONAL_TENSORS = tuple(feature.name for feature in TENSORS if feature.name not in LENGTHS)
DIFFERENTIABLE = tuple(feature.name for feature in TENSORS if feature.differentiable)
CHECKED_TENSORS = {feature.name: feature for feature in TENSORS if feature.shape is not None}
_TENSOR_NAMES = tuple(feature.name for feature in TENSORS)
FACTS = tuple(feature.problem for feature in FEATURES if feature.problem)  # fields of AttentionProblem


def _reader(features: Sequence[Feature], rule: str = "") -> Callable[[Lengths, AttentionOptions], tuple[Any, ...]]:
    """A function of (lengths, options) that returns these fields; where a row has a rule, what it makes of the value.

    Its expression is generated, because a loop over the rows costs five times as much, several times in every call,
    and torch.compile would guard every row.
    """
    rules = {f"{f.name}_rule": getattr(f, rule) for f in features if rule and getattr(f, rule) is not None}
    values = [f"{'lengths' if f.name in LENGTHS else 'options'}.{f.name}" for f in features]
    terms = [f"{f.name}_rule({x})" if f"{f.name}_rule" in rules else x for f, x in zip(features, values, strict=True)]
    return eval(f"lambda lengths, options: ({', '.join(terms)},)", rules)


# In the order of the table: the optional tensors, what follows them in the schema, and both.
tensors_of = _reader(TENSORS)
scalars_of = _reader(FEATURES[len(TENSORS) :])
pack = _reader(FEATURES)
# What decisions depend on besides the device, q, k and v: the fields of `AttentionProblem` that `FACTS` names. Lengths
# and the number of sequences mean something for packed sequences only.
facts_of = _reader([feature for feature in FEATURES if feature.problem], "fact")
_as_backends_read = _reader(TENSORS, "prepared")


# Of arguments by name, those that are optional tensors; of lengths and
# arguments, all optional tensors or None, () if there are none.
checked_tensors_in: Callable[[dict[str, Any]], dict[str, Any]] = eval(
    f"lambda given: {{{', '.join(f'{name!r}: given.get({name!r})' for name in CHECKED_TENSORS)}}}"
)
_given = [f"lengths.{name}" if name in LENGTHS else f"given.get({name!r})" for name in _TENSOR_NAMES]
tensors_given: Callable[[Lengths, dict[str, Any]], tuple[Any, ...]] = eval(
    f"lambda lengths, given: ({', '.join(_given)}) if {' or '.join(f'{x} is not None' for x in _given)} else ()"
)


def _by_name(names: Sequence[str]) -> str:
    return ", ".join(f"{name}={name}" for name in names)


_OPTIONS = [feature.name for feature in FEATURES if feature.name not in LENGTHS]
_make: Callable[..., tuple[Lengths, AttentionOptions]] = eval(
    f"lambda packing, {', '.join(NAMES)}: "
    f"(Lengths({_by_name(LENGTHS)}), AttentionOptions(packing=packing, {_by_name(_OPTIONS)}))",
    {"Lengths": Lengths, "AttentionOptions": AttentionOptions},
)


def tensors_among(arguments: Sequence[Any]) -> Sequence[torch.Tensor | None]:
    """The optional tensors, which come first in `SCHEMA`."""
    return arguments[: len(TENSORS)]


def unpack(arguments: Sequence[Any], packing: str = "") -> tuple[Lengths, AttentionOptions]:
    """The opposite of `pack`; `packing` is no part of `SCHEMA`."""
    return _make(packing, *arguments)


def without_tensors(lengths: Lengths, options: AttentionOptions) -> tuple[Lengths, AttentionOptions, tuple[str, ...]]:
    """Lengths and options with None for each optional tensor, and the names of those that there are."""
    names = tuple(n for n, x in zip(_TENSOR_NAMES, tensors_of(lengths, options), strict=True) if x is not None)
    nothing: Any = dict.fromkeys(names)
    of_lengths = {name: nothing.pop(name) for name in names if name in LENGTHS}
    return lengths._replace(**of_lengths), options._replace(**nothing), names


def with_tensors(
    lengths: Lengths, options: AttentionOptions, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> tuple[Lengths, AttentionOptions]:
    """The opposite: lengths and options with `tensors` under these names."""
    if not names:
        return lengths, options
    given: Any = dict(zip(names, tensors, strict=True))
    of_lengths = {name: given.pop(name) for name in names if name in LENGTHS}
    return lengths._replace(**of_lengths), options._replace(**given)


def bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> AttentionTensors:
    """What a backend gets."""
    optional = dict(zip(_TENSOR_NAMES, _as_backends_read(lengths, options), strict=True))
    if optional["cu_seqlens_k"] is None:  # the same offsets on both sides
        optional["cu_seqlens_k"] = optional["cu_seqlens_q"]
    return AttentionTensors(q, k, v, options.sm_scale, dropout_p=options.dropout_p, **optional)
