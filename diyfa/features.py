"""The table of features: a row for each field that a call has besides q, k and v, and for those that shapes decide.

Everything that must know of a feature reads its row: the checks of optional tensors, the operators' schema, the flat
arguments that the schema wants and what decisions depend on (`diyfa.options`), what backends refuse
(`AttentionProblem.features`), which gradients there are, the tensors of calls that are compiled ahead of time, and the
feature tables. `tests/frontend/test_features.py` names the places that a new row has to reach besides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Sizes = dict[str, int]  # of one call: "b", "h", "q", "k"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float16` -> "float16"."""
    return str(dtype).removeprefix("torch.")


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Small vectors are read by plain index; only odd callers pass strided ones."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _sequences(cu_seqlens: torch.Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _is_given(value: torch.Tensor | None) -> bool:
    return value is not None


def _dtype_of(value: torch.Tensor | None) -> str:
    return "" if value is None else dtype_name(value.dtype)


def _has_origins(rng_state: torch.Tensor | None) -> bool:
    return rng_state is not None and rng_state.shape[0] > 2


def _is_positive(value: float) -> bool:
    return value > 0


@dataclass(frozen=True)
class Shape:
    """The shapes that an optional tensor may have, in the letters of `Sizes`; "n" is B + 1, "2" two, "o" 2 + 4 B."""

    letters: tuple[str, ...]

    def every(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """All of them; the first is the usual one."""
        sizes = {**sizes, "n": sizes["b"] + 1, "2": 2, "o": 2 + 4 * sizes["b"]}
        return [tuple(sizes[letter] for letter in letters) for letters in self.letters]

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        """What is wrong with x, or nothing."""
        shapes = self.every(sizes)
        return "" if x.shape in shapes else f"have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}"


class Broadcast(Shape):
    """Whatever broadcasts to the one shape."""

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        (full,), shape = self.every(sizes), tuple(x.shape)
        missing = len(full) - len(shape)
        if missing < 0 or any(size not in (1, whole) for size, whole in zip(shape, full[missing:], strict=True)):
            return f"be broadcastable to {full}, got {shape}"
        return ""


class OneOrAll(Shape):
    """One element, which stands for all, or the one shape."""

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        return "" if x.numel() == 1 else super().refuses(x, sizes)


class State(Shape):
    """Seed and offset, which may be followed by the origins of each sample; side by side."""

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        _, (with_origins,) = self.every(sizes)
        if x.shape not in ((2,), (with_origins,)) or x.stride(0) != 1:
            return (
                "be a contiguous pair (seed, offset), or that and four origins for each sample, "
                f"({with_origins},), got shape {tuple(x.shape)}"
            )
        return ""


@dataclass(frozen=True)
class Feature:
    """One field of `Lengths` or `AttentionOptions`, or a feature that the shapes of q, k and v have.

    `problem` is the field of `AttentionProblem` that it decides, and `fact` says what that field becomes (None: the
    value itself). A kernel that does not implement it refuses it under the name `uses` where `present` says that a
    problem has it (None: where the field of the problem is not 0, False or ""). `label` and `example` (changes of a
    typical problem) make a row of the feature tables, `label` and `case` (changes of a typical
    `diyfa.testing.AttentionCase`) what `diyfa validate` and the first run on a new device try.
    """

    name: str
    schema: str = ""  # type in the operators' schema; "": no argument
    problem: str = ""
    fact: Callable[[Any], Hashable] | None = None
    dtypes: tuple[torch.dtype, ...] = ()  # of an optional tensor
    dtypes_in_words: str = ""
    shape: Shape | None = None
    gradient: str = ""  # its field of `AttentionGradients`
    gradient_if: str = ""  # the option without which there is none; "": there always is
    prepared: Callable[[Any], Any] | None = None  # what backends get instead of it
    uses: str = ""
    present: Callable[[Any], bool] | None = None  # of an `AttentionProblem`
    adjusts: bool = False  # scores are then more than scaled products
    label: str = ""
    example: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)

    def is_in(self, problem: Any) -> bool:
        """Whether a call of the `AttentionProblem` has it."""
        return bool(getattr(problem, self.problem)) if self.present is None else self.present(problem)


_FLOAT32, _INT32, _INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
# In the order of the schema, where tensors come first.
FEATURES = (
    Feature(
        "cu_seqlens_q", "Tensor?", "batch", _sequences, _INT32, "int32", Shape(("n",)),
        uses="varlen", present=lambda problem: problem.varlen,
        label="packed sequences", example={"layout": "thd", "total_q": 4096, "total_k": 4096},
    ),
    Feature(
        "cu_seqlens_k", "Tensor?", "", None, _INT32, "int32", Shape(("n",)), present=lambda problem: problem.varlen,
    ),
    Feature(
        "seq_lens", "Tensor?", "seq_lens", _is_given, _INT32, "int32", Shape(("b",)),
        prepared=_contiguous, uses="seq_lens", label="seq_lens", example={"seq_lens": True},
    ),
    Feature(
        "alibi_slopes", "Tensor?", "alibi", _is_given, _FLOAT32, "float32", Shape(("h", "bh")),
        prepared=_contiguous, uses="alibi", adjusts=True, label="ALiBi", example={"alibi": True}, case={"alibi": "h"},
    ),
    Feature(
        "attn_bias", "Tensor?", "bias", _dtype_of, ATTENTION_DTYPES, "a floating-point tensor of 16, 32 or 64 bits",
        Broadcast(("bhqk",)), gradient="dbias", gradient_if="bias_grad",
        uses="attn_bias", adjusts=True, label="attn_bias", example={"bias": "float32"}, case={"bias": "1hqk"},
    ),
    Feature(
        "sinks", "Tensor?", "sinks", _is_given, _FLOAT32, "float32", Shape(("h",)),
        gradient="dsinks", prepared=_contiguous, uses="sinks", label="sinks", example={"sinks": True},
        case={"sinks": True},
    ),
    Feature(
        "rng_state", "Tensor?", "dropout_origins", _has_origins, _INT64, "int64", State(("2", "o")),
        present=lambda problem: problem.dropout,
    ),
    Feature("max_seqlen_q", "SymInt", "seqlen_q"),
    Feature("max_seqlen_k", "SymInt", "seqlen_k"),
    Feature("sm_scale", "float"),
    Feature(
        "window_left", "SymInt", "window_left",
        uses="window", present=lambda problem: problem.window_left >= 0 or problem.window_right > 0,
        label="window", example={"window_left": 256, "window_right": 0}, case={"window": (9, 4)},
    ),
    Feature(
        "window_right", "SymInt", "window_right",
        uses="causal", present=lambda problem: problem.causal, label="causal", example={"window_right": 0},
    ),
    Feature(
        "softcap", "float", "softcap", uses="softcap", adjusts=True, label="softcap", example={"softcap": 30.0},
        case={"softcap": 5.0},
    ),
    Feature(
        "dropout_p", "float", "dropout", _is_positive, uses="dropout", label="dropout", example={"dropout": True},
        case={"dropout_p": 0.2},
    ),
    Feature("layout", "str", "layout"),
    Feature("deterministic", "bool", "deterministic", label="deterministic", example={"deterministic": True}),
    Feature("needs_grad", "bool", "needs_grad"),
    Feature("bias_grad", "bool", "bias_grad"),
    Feature("backend", "str"),
    Feature("variant", "str"),
    Feature("batch_invariant", "bool", "batch_invariant", uses="batch_invariant"),
    Feature("out_dtype", "str", "out_dtype"),
)  # fmt: skip

# What shapes say: those of q, k and v, and that of `rng_state`.
OF_SHAPES = (
    Feature(
        "heads_kv", uses="gqa", present=lambda problem: problem.heads_q != problem.heads_kv,
        label="grouped-query", example={"heads_kv": 2},
    ),
    Feature(
        "head_dim_v", uses="head_dim_v", present=lambda problem: problem.head_dim != problem.head_dim_v,
        label="V of another D", example={"head_dim": 192, "head_dim_v": 128},
    ),
    Feature("dropout_origins", problem="dropout_origins", uses="dropout_origins"),
)  # fmt: skip

OPTIONAL = tuple(feature for feature in (*OF_SHAPES, *FEATURES) if feature.uses)  # what a backend may refuse
ADJUSTING = frozenset([feature.uses for feature in FEATURES if feature.adjusts])
# Those that go with all others and with any lengths; what a problem with all of them has changed, and a case.
COMPOSABLE = tuple(feature for feature in OPTIONAL if feature.case)
EVERYTHING = {name: value for feature in COMPOSABLE for name, value in feature.example.items()}
EVERYTHING_CASE = {name: value for feature in COMPOSABLE for name, value in feature.case.items()}
TENSORS = tuple(feature for feature in FEATURES if feature.schema == "Tensor?")
GRADIENTS = tuple(feature for feature in FEATURES if feature.gradient)


class CacheTensor(NamedTuple):
    """An optional tensor of a call with a cache. Besides the letters of `Shape` its sizes are "g" heads of keys, "p"
    columns of the page table, "s" new keys, "d" and "e" features of keys and values, "r" and "f" rows and columns of
    the rotation, "t" packed queries."""

    shape: Shape
    dtypes: tuple[torch.dtype | None, ...] = _INT32  # None: that of q
    has_rows: bool = False  # the last stride is 1, the others are free; kernels read other tensors by plain index


_PER_SEQUENCE, _OFFSETS = CacheTensor(Shape(("b",))), CacheTensor(Shape(("n",)))
_DESCALE, _ROTATION = CacheTensor(OneOrAll(("bg",)), _FLOAT32), CacheTensor(Shape(("rf",)), (None, *_FLOAT32), True)
CACHE_TENSORS = {
    "cache_seqlens": _PER_SEQUENCE,
    "seqused_k": _PER_SEQUENCE,
    "cu_seqlens_q": _OFFSETS,
    "cu_seqlens_k": _OFFSETS,
    "block_table": CacheTensor(Shape(("bp",))),
    "cache_batch_idx": _PER_SEQUENCE,
    "cache_leftpad": _PER_SEQUENCE,
    "alibi_slopes": CacheTensor(Shape(("h", "bh")), _FLOAT32),
    "sinks": CacheTensor(Shape(("h",)), _FLOAT32),
    "k_descale": _DESCALE,
    "v_descale": _DESCALE,
    "k": CacheTensor(Shape(("bsgd",)), (None,), True),
    "v": CacheTensor(Shape(("bsge",)), (None,), True),
    "rotary_cos": _ROTATION,
    "rotary_sin": _ROTATION,
    "out": CacheTensor(Shape(("bqhe",)), (None,), True),
}
PACKED_TENSORS = CACHE_TENSORS | {"out": CacheTensor(Shape(("the",)), (None,), True)}
