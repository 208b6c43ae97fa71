"""What a call has besides q, k and v, as two objects, `Lengths` and `AttentionOptions`.

A public function checks its arguments once and makes these two; everything behind it takes them whole. They are named
tuples, because every call makes some. `diyfa.features.FEATURES` has one row for each of their fields, from which come
the operators' schema, the flat arguments that the schema wants (`pack`, `unpack`) and what decisions depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from diyfa.features import FEATURES, GRADIENTS, Feature
from diyfa.features import TENSORS as TENSORS
from diyfa.problem import AttentionTensors

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
    out_dtype: str = ""  # of out, dq, dk and dv, such as "float32"; "": the inputs'
    packing: str = ""


# ---- Read from the table -------------------------------------------------------------------------------------------

SCHEMA = ", ".join(f"{feature.schema} {feature.name}" for feature in FEATURES)
NAMES = tuple(feature.name for feature in FEATURES)
LENGTHS = Lengths._fields
# Tensors that may want a gradient, each with the option that then says so.
DIFFERENTIABLE = {feature.name: feature.gradient_if for feature in GRADIENTS}
CHECKED_TENSORS = {feature.name: feature for feature in TENSORS if feature.shape is not None}
_TENSOR_NAMES = tuple(feature.name for feature in TENSORS)


def _reader(features: Sequence[Feature], rule: str = "", named: bool = False) -> Callable[..., Any]:
    """A function of (lengths, options) that returns these fields as a tuple, or as a dictionary by the names of the
    problem's; where a row has a rule, what it makes of the value.

    Its expression is generated, because a loop over the rows costs five times as much, several times in every call,
    and torch.compile would guard every row.
    """
    rules = {f"{f.name}_rule": getattr(f, rule) for f in features if rule and getattr(f, rule) is not None}
    values = [f"{'lengths' if f.name in LENGTHS else 'options'}.{f.name}" for f in features]
    terms = [f"{f.name}_rule({x})" if f"{f.name}_rule" in rules else x for f, x in zip(features, values, strict=True)]
    if named:
        entries = [f"{f.problem!r}: {term}" for f, term in zip(features, terms, strict=True)]
        return eval(f"lambda lengths, options: {{{', '.join(entries)}}}", rules)
    return eval(f"lambda lengths, options: ({', '.join(terms)},)", rules)


# In the order of the table: the optional tensors, what follows them in the schema, and both.
tensors_of = _reader(TENSORS)
scalars_of = _reader(FEATURES[len(TENSORS) :])
pack = _reader(FEATURES)
# What decisions depend on besides the device, q, k and v: fields of `AttentionProblem` by name. Lengths and the number
# of sequences mean something for packed sequences only.
facts_of = _reader([feature for feature in FEATURES if feature.problem], "fact", named=True)
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
    names = tuple([n for n, x in zip(_TENSOR_NAMES, tensors_of(lengths, options), strict=True) if x is not None])
    if not names:
        return lengths, options, names
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
