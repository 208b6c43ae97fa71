"""The table of features: a row for each field of a call besides q, k and v, and for each feature that shapes decide.

These read the rows: the checks of optional tensors, the operators' schema and the facts that decisions depend on
(`diyfa.options`), the refusals of backends (`AttentionProblem.features`), the list of gradients, the tensors of calls
that are compiled ahead of time, and the feature tables. `tests/frontend/test_features.py` finds the other code that a
new row must reach.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from diyfa.block_lists import BLOCK_SIZES, WORD, block_of, list_length, n_blocks
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, EIGHT_BITS, PER_BLOCK, PER_HEAD, PER_TENSOR
from diyfa.score_programs import MAX_TENSORS, captured_tensors, single_sample

CAPTURED_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool,
)  # fmt: skip
ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT32, _INT32, _INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
CONTIGUOUS = torch.Tensor.contiguous  # kernels read small vectors by plain index, and strided ones are rare
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in ATTENTION_DTYPES}
# Name -> size of a call, by the names of the documentation: "B" samples, "H" query heads, "Hk" KV heads, "Sq" queries,
# "Sk" keys, "D" features of k, "Dv" features of v.
Sizes = dict[str, int]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: "float16" for `torch.float16`."""
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _is_given(value: torch.Tensor | None) -> bool:
    return value is not None


def _descale_kind(descale: torch.Tensor | None) -> int:
    if descale is None:
        return 0
    return PER_TENSOR if descale.numel() == 1 else PER_HEAD if descale.dim() == 2 else PER_BLOCK


def _size(name: str, sizes: Sizes) -> int:
    """Return a size by its name. "B+1" is one more than B. "Sq/128" is the number of blocks of 128 that Sq has."""
    if name in sizes:
        return sizes[name]
    rows, _, block = name.partition("/")
    if block:
        return -(-sizes[rows] // int(block))
    base, _, more = name.partition("+")
    return sizes[base] + int(more)


class Shape:
    """The shapes that an optional tensor may have: Shape("H", "B H") allows (H,) and (B, H), and usually is (H,)."""

    def __init__(self, *shapes: str) -> None:
        self.shapes = [tuple(shape.split()) for shape in shapes]

    def allowed_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """Return all shapes that are allowed, the usual one first."""
        return [tuple(_size(name, sizes) for name in shape) for shape in self.shapes]

    def example(self, sizes: Sizes, value: Any) -> tuple[int, ...]:
        """Return the shape of a tensor for which the problem's field has this value."""
        return self.allowed_shapes(sizes)[0]

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        """Return what x must do, as the end of a message, or "" if its shape is allowed."""
        shapes = self.allowed_shapes(sizes)
        return "" if x.shape in shapes else f"have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}"


class Broadcast(Shape):
    """All shapes that broadcast to the one shape."""

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        (full,), shape = self.allowed_shapes(sizes), tuple(x.shape)
        missing = len(full) - len(shape)
        if missing < 0 or any(n not in (1, size) for n, size in zip(shape, full[missing:], strict=True)):
            return f"be broadcastable to {full}, got {shape}"
        return ""


class OneOrAll(Shape):
    """The one shape, or one element that stands for all."""

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        return "" if x.numel() == 1 else super().refuses(x, sizes)


class Descale(OneOrAll):
    """One element, one for each head, or one for each block of rows."""

    def example(self, sizes: Sizes, value: Any) -> tuple[int, ...]:
        return ((1,), *self.allowed_shapes(sizes))[value - PER_TENSOR]


class State(Shape):
    """`rng_state`: a contiguous vector of seed and offset, and optionally four origins of each sample behind them."""

    def allowed_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        return [(2,), (2 + 4 * sizes["B"],)]

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        pair, with_origins = self.allowed_shapes(sizes)
        if x.shape not in (pair, with_origins) or x.stride(0) != 1:
            return (
                "be a contiguous pair (seed, offset), or that and four origins for each sample, "
                f"{with_origins}, got shape {tuple(x.shape)}"
            )
        return ""


class BlockLists(Shape):
    """`mask_blocks` of a block mask: one list or as many as samples and heads. `BlockMask` guarantees its length."""

    def allowed_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        return [(1, 1, list_length(*n_blocks(sizes["Sq"], sizes["Sk"], (BLOCK_SIZES[-1],) * 2)))]

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        full = sizes["B"], sizes["H"]
        if x.dim() == 3 and all(size in (1, n) for size, n in zip(x.shape, full, strict=False)):
            return ""
        return f"be of 1 or {full[0]} samples and 1 or {full[1]} query heads, got {tuple(x.shape[:-1])}"


class BlockBits(Shape):
    """`mask_bits` of a block mask: its partial blocks."""

    def allowed_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        return [(1, BLOCK_SIZES[-1], BLOCK_SIZES[-1] // WORD)]

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        if x.dim() == 3 and all(size in BLOCK_SIZES for size in block_of(x)):
            return ""
        return f"have shape (partial blocks, 64 or 128, 2 or 4), got {tuple(x.shape)}"


class Captured(Shape):
    """A captured tensor of a score function: any shape, in memory without gaps, for the function adds offsets."""

    def allowed_shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        return [(sizes["H"], sizes["Sq"] + sizes["Sk"])]  # an example

    def refuses(self, x: torch.Tensor, sizes: Sizes) -> str:
        return "" if x.is_contiguous() else f"be contiguous, got strides {x.stride()}"


@dataclass(frozen=True)
class Feature:
    """One field of `Lengths` or `AttentionOptions`, or a feature that shapes decide."""

    name: str
    schema: str = ""  # type in the operators' schema; "": no argument
    problem_field: str = ""  # the field of `AttentionProblem` that its value decides
    to_problem_value: Callable[[Any], Hashable] | None = None  # value -> that field; None: the value itself
    # For an optional tensor:
    dtypes: tuple[torch.dtype, ...] = ()
    dtypes_in_words: str = ""
    shape: Shape | None = None
    prepared: Callable[[Any], Any] | None = None  # tensor -> what backends get
    gradient: str = ""  # field of `AttentionGradients`
    gradient_if: str = ""  # option that asks for the gradient; "": no option has to
    # For what kernels may lack:
    refusal_name: str = ""  # kernels that do not implement it refuse calls that have it under this name
    is_present: Callable[[Any], bool] | None = None  # whether an `AttentionProblem` has it; None: by `problem_field`
    adjusts: bool = False  # with it, scores are not just sm_scale * q k (bias, ALiBi, softcap)
    # For tables and trials:
    label: str = ""  # name in the feature tables
    example: dict[str, Any] = field(default_factory=dict)  # changes of a typical problem: a row of the tables
    case: dict[str, Any] = field(default_factory=dict)  # changes of a typical `AttentionCase`: a trial on a new device

    def is_in(self, problem: Any) -> bool:
        """Return whether a call of the `AttentionProblem` has it: by default, if its field is not 0, False or ""."""
        return bool(getattr(problem, self.problem_field)) if self.is_present is None else self.is_present(problem)


def _tensor(name: str, dtypes: tuple[torch.dtype, ...], shape: Shape, in_words: str = "", **others: Any) -> Feature:
    """Return the row of an optional tensor. `in_words`: its dtypes in messages; default: the name of the only one."""
    words = in_words or dtype_name(dtypes[0])
    return Feature(name, "Tensor?", dtypes=dtypes, dtypes_in_words=words, shape=shape, **others)


def _descale(name: str, *shapes: str) -> Feature:
    """Return the row of a descale of float8 or int8. The first of the shapes has a number for each head."""
    return _tensor(
        name, _FLOAT32, Descale(*shapes), problem_field=name, to_problem_value=_descale_kind, prepared=CONTIGUOUS
    )


def _captured_tensor(n: int) -> Feature:
    """Return the row of the n-th captured tensor of a score function."""
    captured = ", ".join(f"t{i}" for i in range(n + 1))
    return _tensor(
        f"score_tensor{n}", CAPTURED_DTYPES, Captured(),
        "a tensor of floating-point numbers, of int8, int32 or int64, or of booleans",
        gradient=f"dscore{n}", gradient_if="score_grad",
        is_present=lambda problem: n < captured_tensors(problem.score_fn),
        example={"score_fn": f"def same(score, b, h, i, j, {captured}):\n    return score"},
    )  # fmt: skip


# score · 0.9 + tanh of a bias (H, 32) by head and distance, -inf for some pairs.
SCORE_EXAMPLE_WIDTH = 32
SCORE_EXAMPLE = """def relative(score, b, h, i, j, t0):
    v0 = mul(h, 32)
    v1 = sub(i, j)
    v2 = bit_and(v1, 31)
    v3 = add(v0, v2)
    v4 = load(t0, v3)
    v5 = mul(score, 0.9)
    v6 = tanh(v4)
    v7 = add(v5, v6)
    v8 = mul(i, 3)
    v9 = add(v8, j)
    v10 = remainder(v9, 7)
    v11 = eq(v10, 2)
    v12 = where(v11, -inf, v7)
    return v12"""
# The order is that of the schema, tensors first.
FEATURES = (
    _tensor(
        "cu_seqlens_q", _INT32, Shape("B+1"), problem_field="batch",
        to_problem_value=lambda x: 0 if x is None else x.shape[0] - 1,
        refusal_name="varlen", is_present=lambda problem: problem.varlen,
        label="packed sequences", example={"layout": "thd", "total_q": 4096, "total_k": 4096},
    ),
    _tensor("cu_seqlens_k", _INT32, Shape("B+1"), is_present=lambda problem: problem.varlen),
    _tensor(
        "seq_lens", _INT32, Shape("B"), problem_field="seq_lens", to_problem_value=_is_given, prepared=CONTIGUOUS,
        refusal_name="seq_lens", label="seq_lens", example={"seq_lens": True},
    ),
    _tensor(
        "alibi_slopes", _FLOAT32, Shape("H", "B H"), problem_field="alibi", to_problem_value=_is_given,
        prepared=CONTIGUOUS, refusal_name="alibi", adjusts=True, label="ALiBi", example={"alibi": True},
        case={"alibi": "h"},
    ),
    _tensor(
        "attn_bias", ATTENTION_DTYPES, Broadcast("B H Sq Sk"), "a floating-point tensor of 16, 32 or 64 bits",
        problem_field="bias", to_problem_value=lambda x: "" if x is None else dtype_name(x.dtype),
        gradient="dbias", gradient_if="bias_grad", refusal_name="attn_bias", adjusts=True, label="attn_bias",
        example={"bias": "float32"}, case={"bias": "1hqk"},
    ),
    _tensor(
        "sinks", _FLOAT32, Shape("H"), problem_field="sinks", to_problem_value=_is_given, prepared=CONTIGUOUS,
        gradient="dsinks", refusal_name="sinks", label="sinks", example={"sinks": True}, case={"sinks": True},
    ),
    _tensor(
        "rng_state", _INT64, State(), problem_field="dropout_origins",
        to_problem_value=lambda x: x is not None and x.shape[0] > 2, is_present=lambda problem: problem.dropout,
    ),
    _descale("q_descale", "B Hk", f"B H Sq/{BLOCK_Q}"),
    _descale("k_descale", "B Hk", f"B Hk Sk/{BLOCK_K}"),
    _descale("v_descale", "B Hk"),
    *[
        _tensor(name, _FLOAT32, Shape(shape), problem_field=name, to_problem_value=_is_given, prepared=CONTIGUOUS)
        for name, shape in (("k_mean", "B Hk D"), ("v_mean", "B Hk Dv"))
    ],
    _tensor(
        "mask_blocks", _INT32, BlockLists(), prepared=CONTIGUOUS, is_present=lambda problem: bool(problem.mask),
    ),
    _tensor(
        "mask_bits", _INT32, BlockBits(), problem_field="mask", to_problem_value=block_of, prepared=CONTIGUOUS,
        refusal_name="mask", label="block mask", example={"mask": (128, 128)},
    ),
    *map(_captured_tensor, range(MAX_TENSORS)),
    Feature("max_seqlen_q", "SymInt", "seqlen_q"),
    Feature("max_seqlen_k", "SymInt", "seqlen_k"),
    Feature("sm_scale", "float"),
    Feature(
        "window_left", "SymInt", "window_left",
        refusal_name="window", is_present=lambda problem: problem.window_left >= 0 or problem.window_right > 0,
        label="window", example={"window_left": 256, "window_right": 0}, case={"window": (9, 4)},
    ),
    Feature(
        "window_right", "SymInt", "window_right",
        refusal_name="causal", is_present=lambda problem: problem.causal, label="causal", example={"window_right": 0},
    ),
    Feature(
        "softcap", "float", "softcap", refusal_name="softcap", adjusts=True, label="softcap", example={"softcap": 30.0},
        case={"softcap": 5.0},
    ),
    Feature(
        "dropout_p", "float", "dropout", lambda p: p > 0, refusal_name="dropout", label="dropout",
        example={"dropout": True}, case={"dropout_p": 0.2},
    ),
    Feature(
        "score_fn", "str", "score_fn", refusal_name="score_fn", adjusts=True, label="score function",
        example={"score_fn": SCORE_EXAMPLE},
    ),
    Feature("layout", "str", "layout"),
    Feature("deterministic", "bool", "deterministic", label="deterministic", example={"deterministic": True}),
    Feature("needs_grad", "bool", "needs_grad"),
    Feature("bias_grad", "bool", "bias_grad"),
    Feature("score_grad", "bool", "score_grad"),
    Feature("backend", "str"),
    Feature("variant", "str"),
    Feature("batch_invariant", "bool", "batch_invariant", refusal_name="batch_invariant"),
    Feature("out_dtype", "str", "out_dtype"),
)  # fmt: skip

# Features that the shapes and dtypes of q, k, v and `rng_state` decide.
SHAPE_FEATURES = (
    Feature(
        "heads_kv", refusal_name="gqa", is_present=lambda problem: problem.heads_q != problem.heads_kv,
        label="grouped-query", example={"heads_kv": 2},
    ),
    Feature(
        "head_dim_v", refusal_name="head_dim_v", is_present=lambda problem: problem.head_dim != problem.head_dim_v,
        label="V of another D", example={"head_dim": 192, "head_dim_v": 128},
    ),
    Feature("dropout_origins", problem_field="dropout_origins", refusal_name="dropout_origins"),
    # It stands for the descales and means, too: `validation.py` refuses them with other dtypes.
    Feature(
        "eight_bits", refusal_name="eight_bits", is_present=lambda problem: problem.dtype in EIGHT_BITS,
        label="float8", example={"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
    ),
)  # fmt: skip

# Features that a backend may refuse.
REFUSABLE = tuple(feature for feature in (*SHAPE_FEATURES, *FEATURES) if feature.refusal_name)
ADJUSTING = frozenset([feature.refusal_name for feature in FEATURES if feature.adjusts])
# COMPOSABLE: features that combine with each other and with any lengths. EVERYTHING and EVERYTHING_CASE: the changes of
# a typical problem and of a typical test case that add all of them.
COMPOSABLE = tuple(feature for feature in REFUSABLE if feature.case)
EVERYTHING = {name: value for feature in COMPOSABLE for name, value in feature.example.items()}
EVERYTHING_CASE = {name: value for feature in COMPOSABLE for name, value in feature.case.items()}
TENSORS = tuple(feature for feature in FEATURES if feature.schema == "Tensor?")
GRADIENTS = tuple(feature for feature in FEATURES if feature.gradient)


Values = TypeVar("Values", bound=NamedTuple)  # options or tensors of a call, whose fields have the names of features


def for_sample(values: Values, b: int) -> Values:
    """Return `values` for a call of sample b alone, with row b of each optional tensor that has a row for each sample,
    and the score function of that sample."""
    rows: dict[str, Any] = {}
    source: Any = getattr(values, "score_fn", None)
    if source:
        rows["score_fn"] = single_sample(source, b)
    for feature in TENSORS:
        x = getattr(values, feature.name, None)
        if x is None or feature.shape is None or isinstance(feature.shape, Broadcast) or x.numel() == 1:
            continue
        if any(shape[0] == "B" and 1 < len(shape) == x.dim() for shape in feature.shape.shapes):
            rows[feature.name] = x[b : b + 1]
    return values._replace(**rows) if rows else values


class CacheTensor(NamedTuple):
    """An optional tensor of a call with a cache. Its shape has more names: "pages", columns of block_table; "Snew", new
    keys; "rows" and "R/2", rows and columns of rotary_cos; "Tq", packed queries."""

    shape: Shape
    dtypes: tuple[torch.dtype | None, ...] = _INT32  # None: q's dtype
    has_rows: bool = False  # the last stride must be 1, others are free; False: any strides, adapted in kvcache.py


_PER_SEQUENCE, _OFFSETS = CacheTensor(Shape("B")), CacheTensor(Shape("B+1"))
_DESCALE = CacheTensor(OneOrAll("B Hk"), _FLOAT32)
_ROTATION = CacheTensor(Shape("rows R/2"), (None, *_FLOAT32), has_rows=True)
CACHE_TENSORS = {
    "cache_seqlens": _PER_SEQUENCE,
    "seqused_k": _PER_SEQUENCE,
    "cu_seqlens_q": _OFFSETS,
    "cu_seqlens_k": _OFFSETS,
    "block_table": CacheTensor(Shape("B pages")),
    "cache_batch_idx": _PER_SEQUENCE,
    "cache_leftpad": _PER_SEQUENCE,
    "alibi_slopes": CacheTensor(Shape("H", "B H"), _FLOAT32),
    "sinks": CacheTensor(Shape("H"), _FLOAT32),
    "k_descale": _DESCALE,
    "v_descale": _DESCALE,
    "k": CacheTensor(Shape("B Snew Hk D"), (None,), True),
    "v": CacheTensor(Shape("B Snew Hk Dv"), (None,), True),
    "rotary_cos": _ROTATION,
    "rotary_sin": _ROTATION,
    "out": CacheTensor(Shape("B Sq H Dv"), (None,), True),
}
PACKED_TENSORS = CACHE_TENSORS | {"out": CacheTensor(Shape("Tq H Dv"), (None,), True)}
