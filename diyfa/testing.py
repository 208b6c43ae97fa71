"""Test support: input factory, error budget, and the public `validate_*` functions.

The accuracy contract of every backend holds for the output, the log-sum-exp and every gradient. The error against the
float64 reference is at most `BUDGET_FACTOR` times that of a plain FlashAttention in the same dtype on the same inputs
(`diyfa.yardstick`), plus one unit of the result's rounding. This module needs nothing beyond torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from diyfa.attention import checked_options, flash_attention, flash_attention_v2, flash_attention_varlen
from diyfa.device import present_device
from diyfa.features import GRADIENTS, SCORE_EXAMPLE, SCORE_EXAMPLE_WIDTH
from diyfa.masks import BlockMask
from diyfa.ops import attend
from diyfa.options import LENGTHS, Lengths
from diyfa.problem import VARLEN
from diyfa.reference import reference_attention
from diyfa.score_functions import ScoreFunction
from diyfa.yardstick import largest_scores, plain_flash_attention

BUDGET_FACTOR = 2.0
ABSOLUTE_FLOOR = 1e-20  # for results that are zero by construction, such as gradients of q and k with sm_scale = 0
LSE_UNIT = 2.0**-20  # relative to the largest score of the row
YARDSTICK_DRAWS = 16  # draws of nudged inputs: with few values, the yardstick's error in one draw is a matter of chance


PACKINGS = ("qkv", "kv")


# ---- Cases and inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionCase:
    """The description of one attention call; `make_inputs` turns it into tensors.

    Memory beyond `seq_lens` and beyond the last packed sequence holds NaN. Shapes in letters name full dimensions: "b",
    "h", "q" and "k"; "1" is a broadcast one.
    """

    name: str
    batch: int = 1
    heads: int = 2
    heads_kv: int = 0  #: 0: heads
    seqlen_q: int = 64
    seqlen_k: int = -1  #: -1: seqlen_q
    head_dim: int = 32
    head_dim_v: int = 0  #: 0: head_dim
    dtype: str = "float16"
    layout: str = "bhsd"  #: "bhsd", "bshd", "3d" (B·H, S, D), or "thd": packed sequences
    #: Memory layout: "contiguous"; "transposed" (heads and sequence exchanged); "packed" (slices of one projection);
    #: "sliced" (cut from larger buffers at odd offsets, so that nothing is aligned).
    view: str = "contiguous"
    packing: str = ""  #: "qkv", "kv": the call takes the packed tensor and returns one gradient for it ("bshd", "thd")
    #: Lengths of packed sequences, in place of batch, seqlen_q and seqlen_k.
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None  #: None: lens_q
    slack: int = 0  #: rows behind the last packed sequence, which belong to none; the call's max_seqlen count them
    causal: bool = False
    sm_scale: float | None = None
    seq_lens: tuple[int, ...] | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  #: "h" or "bh"
    slopes: tuple[float, ...] = ()  #: in place of random ones, repeated over the heads
    bias: str = ""  #: shape of attn_bias in letters, such as "11qk" or "qk"
    bias_dtype: str = ""  #: "": dtype
    bias_grad: bool = True
    bias_scale: float = 1.0
    #: A block mask of random bits, "shape:block size:density": the shape of its samples and heads in letters, the block
    #: "64", "128" or "64x128", and the density of blocks and, in partial blocks, of bits.
    mask: str = ""
    score_fn: bool = False  #: `diyfa.features.SCORE_EXAMPLE`, with a captured tensor that has a gradient
    sinks: bool = False
    sink_offset: float = 0.0  #: added to the sinks
    # The next four shape the scores of q and k that are not packed.
    rise: float = 0.0  #: nats that are added to a query's scores: nothing at the first key, all of it at the last
    #: (position, nats) that are added at one key; position 0 is the first key of its sequence, 1 the last.
    peaks: tuple[tuple[float, float], ...] = ()
    peaked_rows: int = 1  #: every so many queries have the rise and the peaks
    spread: float = 1.0  #: factor of all other features of q and k
    lse_gradient: bool = True  #: False: 0, so that delta cancels dout * v in a row with one dominant key
    dropout_p: float = 0.0  #: with an rng_state drawn from `seed`
    dropout_origins: bool = False  #: the mask is that of a block of a larger problem
    all_variants: bool = False  #: to be run on every kernel, not only the preferred one
    large: bool = False  #: left out if kernels run in an interpreter
    seed: int = 0
    nudge: int = 0  #: not 0: changes each drawn number by up to 1/32 of itself, so that rounding errors are drawn anew

    def __post_init__(self) -> None:
        if (self.layout == VARLEN) != (self.lens_q is not None):
            raise ValueError(f"case {self.name}: the layout thd and lens_q belong together")
        if self.packing and (self.packing not in PACKINGS or self.layout not in ("bshd", VARLEN)):
            raise ValueError(f"case {self.name}: packing is qkv or kv, in the layouts bshd and thd")
        if self.packing and (self.rise or self.peaks or self.spread != 1):
            raise ValueError(f"case {self.name}: rise, peaks and spread are for q and k that are not packed")
        _, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = self.sizes
        keys = (heads_kv, seqlen_k, self.key_lens, head_dim)
        same_shapes = head_dim == head_dim_v and (
            self.packing == "kv" or keys == (heads, seqlen_q, self.lens_q, head_dim)
        )
        if (self.packing or self.view == "packed") and not same_shapes:
            raise ValueError(f"case {self.name}: what is packed must be of one shape")

    @property
    def key_lens(self) -> tuple[int, ...] | None:
        """Lengths of the packed key sequences: `lens_k`, by default `lens_q`."""
        return self.lens_q if self.lens_k is None else self.lens_k

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """(B, H, Hk, Sq, Sk, D, Dv) with the defaults filled in; Sq and Sk are the longest of packed sequences."""
        batch, seqlen_q = self.batch, self.seqlen_q
        seqlen_k = self.seqlen_q if self.seqlen_k < 0 else self.seqlen_k
        if self.lens_q is not None:
            batch = len(self.lens_q)
            seqlen_q, seqlen_k = (max(lens or (), default=0) for lens in (self.lens_q, self.key_lens))
        return (
            batch, self.heads, self.heads_kv or self.heads, seqlen_q, seqlen_k, self.head_dim,
            self.head_dim_v or self.head_dim,
        )  # fmt: skip

    @property
    def rows(self) -> tuple[int, int, int]:
        """Samples, query rows and key rows of the tensors. Packed sequences are one sample with all their rows."""
        batch, _, _, seqlen_q, seqlen_k, _, _ = self.sizes
        if self.lens_q is not None:
            return 1, sum(self.lens_q) + self.slack, sum(self.key_lens or ()) + self.slack
        return batch, seqlen_q, seqlen_k


class Inputs(NamedTuple):
    """Tensors of one case. `options` are the keyword arguments of the call, including the optional tensors.

    With `packing`, `packed` are the leaves (qkv,) or (q, kv), and q, k and v are views of them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    options: dict[str, Any]
    packed: tuple[torch.Tensor, ...] = ()

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of the call."""
        return self.packed or (self.q, self.k, self.v)


class Results(NamedTuple):
    """The results of a call, on the CPU. A gradient is None if the case has no such input."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    dscore0: torch.Tensor | None = None
    dscore1: torch.Tensor | None = None
    dscore2: torch.Tensor | None = None
    dscore3: torch.Tensor | None = None


def _unpacked(packed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return q, k, v from (qkv,) or (q, kv), whose packed dimension stands before the heads."""
    return (*packed[:-1], *packed[-1].unbind(-3))


def _buffers(case: AttentionCase, random: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Return q, k, v, or the tensors that pack them, with the memory layout `case.view`.

    q, k and v are (B, H, S, D), packed tensors (B, S, 2 or 3, H, D).
    """
    _, heads, heads_kv, _, _, head_dim, head_dim_v = case.sizes
    batch, seqlen_q, seqlen_k = case.rows
    shapes = [
        (batch, heads, seqlen_q, head_dim),
        (batch, heads_kv, seqlen_k, head_dim),
        (batch, heads_kv, seqlen_k, head_dim_v),
    ]
    heads_outer = case.layout in ("bhsd", "3d")
    if case.packing == "qkv":
        return [random(batch, seqlen_q, 3, heads, head_dim)]
    if case.view == "packed" and not case.packing:
        return list(random(batch, seqlen_q, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0))
    if case.view == "transposed":
        heads_outer = not heads_outer
    tensors = []
    for b, h, s, d in shapes[: 1 if case.packing else 3]:
        pad = 3 if case.view == "sliced" else 0
        outer = (h, s + pad) if heads_outer else (s + pad, h)
        x = random(b, *outer, d + pad)
        x = x if heads_outer else x.transpose(1, 2)
        tensors.append(x[:, :, pad:, pad:])
    if case.packing:
        tensors.append(random(batch, seqlen_k, 2, heads_kv, head_dim))
    return tensors


def _offsets(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cpu")


def _shape_scores(case: AttentionCase, q: torch.Tensor, k: torch.Tensor) -> None:
    """Give q and k, (B, H, S, D), the case's `rise` and `peaks`, through feature 0, which is 1 in peaked queries."""
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    q[..., 0] = 0.0
    q[:, :, :: case.peaked_rows, 0] = 1.0
    k[..., 0] = torch.linspace(0, case.rise / scale, k.shape[2], device="cpu")
    first = 0  # first row of a packed sequence
    for sample, length in enumerate(case.key_lens or case.seq_lens or (k.shape[2],) * len(k)):
        keys = k[sample] if case.lens_q is None else k[0, :, first:]
        for position, nats in case.peaks if length else ():
            keys[:, round(position * (length - 1)), 0] += nats / scale
        first += length


def _random_mask(case: AttentionCase) -> BlockMask:
    """Return the mask of a case: of its blocks a third of the density is full, two thirds are partial."""
    letters, block, density = case.mask.split(":")
    batch, heads, _, seqlen_q, seqlen_k, _, _ = case.sizes
    sizes = {"b": batch, "h": heads, "1": 1}
    block_q, block_k = (int(size) for size in (block.split("x") * 2)[:2])
    generator = torch.Generator().manual_seed(case.seed)
    outer = [sizes[letter] for letter in letters]
    kinds = torch.rand(*outer, -(-seqlen_q // block_q), -(-seqlen_k // block_k), generator=generator, device="cpu")
    kinds = kinds.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)[..., :seqlen_q, :seqlen_k]
    bits = torch.rand(*outer, seqlen_q, seqlen_k, generator=generator, device="cpu") < float(density)
    keep = (kinds < float(density)) & ((kinds < float(density) / 3) | bits)
    return BlockMask.from_dense(keep, (block_q, block_k))


def _options(
    case: AttentionCase,
    random: Callable[..., torch.Tensor],
    generator: torch.Generator,
    to_device: Callable[..., torch.Tensor],
) -> dict[str, Any]:
    """Return the keyword arguments of the case's call. Random numbers are drawn in the order of the code."""
    batch, heads, _, seqlen_q, seqlen_k, _, _ = case.sizes
    options: dict[str, Any] = {"causal": case.causal, "sm_scale": case.sm_scale}
    if case.seq_lens is not None:
        options["seq_lens"] = to_device(torch.tensor(case.seq_lens, dtype=torch.int32, device="cpu"))
    if case.lens_q is not None:
        options["cu_seqlens_q"] = to_device(_offsets(case.lens_q))
        options["cu_seqlens_k"] = to_device(_offsets(case.key_lens or ()))
        options["max_seqlen_q"], options["max_seqlen_k"] = seqlen_q + case.slack, seqlen_k + case.slack
    if case.window != (-1, -1):
        options["window"] = case.window
    if case.softcap:
        options["softcap"] = case.softcap
    if case.alibi:
        shape = (heads,) if case.alibi == "h" else (batch, heads)
        slopes = random(*shape, dtype=torch.float32).abs() * 0.3
        if case.slopes:
            slopes.view(-1).copy_(torch.tensor(case.slopes * slopes.numel(), device="cpu")[: slopes.numel()])
        options["alibi_slopes"] = to_device(slopes)
    if case.bias:
        full = {"b": batch, "h": heads, "q": seqlen_q, "k": seqlen_k, "1": 1}
        bias = random(*(full[letter] for letter in case.bias), dtype=getattr(torch, case.bias_dtype or case.dtype))
        options["attn_bias"] = to_device(bias * case.bias_scale, case.bias_grad)
    if case.mask:
        mask = _random_mask(case)
        options["mask"] = BlockMask(mask.shape, to_device(mask.blocks), to_device(mask.bits))
    if case.score_fn:
        options["score_fn"] = ScoreFunction("relative", 1, SCORE_EXAMPLE)
        options["score_tensors"] = (to_device(random(heads, SCORE_EXAMPLE_WIDTH), True),)
    if case.sinks:
        options["sinks"] = to_device(random(heads, dtype=torch.float32) + case.sink_offset, True)
    if case.dropout_p:
        options["dropout_p"] = case.dropout_p
        state = torch.randint(2**32, (2,), generator=generator, dtype=torch.int64, device="cpu")
        if case.dropout_origins:
            origins = torch.randint(2**31, (batch, 4), generator=generator, dtype=torch.int64, device="cpu")
            state = torch.cat([state, origins.flatten()])
        options["rng_state"] = to_device(state)
    return options


def make_inputs(case: AttentionCase, device: torch.device | str = "cpu") -> Inputs:
    """Make the tensors of `case`: standard normal, with the same values on every device; leaves require gradients.

    Values are drawn on the CPU and only copied and viewed on `device`, so the device need not be able to compute.
    """
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    heads, head_dim_v = case.heads, case.sizes[-1]
    samples, rows_q, _ = case.rows

    nudges = torch.Generator().manual_seed(case.nudge)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        if case.nudge:
            x *= 1 + (2 * torch.rand(shape, generator=nudges, dtype=torch.float64, device="cpu") - 1) / 32
        return x.to(dtype)

    owners = _buffers(case, random)
    if case.spread != 1:
        for x in owners[:2]:
            x *= case.spread
    if case.rise or case.peaks:
        _shape_scores(case, *owners[:2])
    dout = random(samples, heads, rows_q, head_dim_v)
    stat_dtype = torch.promote_types(dtype, torch.float32)
    dlse = random(samples, heads, rows_q, dtype=stat_dtype) * case.lse_gradient
    # Rows beyond a sequence's end are NaN. Packed tensors are (B, S, 2 or 3, H, D), all others have S after the heads.
    by_row = [x if x.dim() == 5 else x.transpose(1, 2) for x in (*owners, dout, dlse)]
    for x in by_row:
        for sample, length in enumerate(case.seq_lens or ()):
            x[sample, length:] = float("nan")
        x[:, x.shape[1] - case.slack :] = float("nan")

    def to_device(x: torch.Tensor, grad: bool = False) -> torch.Tensor:
        if x.device != torch.device(device):
            base = x if x._base is None else x._base  # copy the buffer, then cut the same view from it
            x = base.to(device).as_strided(x.size(), x.stride(), x.storage_offset())
        return x.detach().requires_grad_(grad)

    def arrange(x: torch.Tensor) -> torch.Tensor:
        if case.layout == "3d":
            return x.flatten(0, 1)
        if case.layout == VARLEN:
            return x[0] if x.dim() != 4 else x[0].transpose(0, 1)
        return x.transpose(1, 2) if case.layout == "bshd" and x.dim() == 4 else x

    leaves = tuple(to_device(arrange(x), True) for x in owners)
    q, k, v = _unpacked(leaves) if case.packing else leaves
    dout = to_device(arrange(dout))
    dlse = to_device(dlse.flatten(0, 1) if case.layout == "3d" else dlse[0] if case.layout == VARLEN else dlse)
    options = _options(case, random, generator, to_device)
    return Inputs(q, k, v, dout, dlse, options, leaves if case.packing else ())


def attention_function(case: AttentionCase, **fixed: Any) -> Callable[..., Any]:
    """Return the function of diyfa that takes the case's `leaves` and options. `fixed`: `backend` and `variant`."""
    if not case.packing:
        functions: dict[str, Callable[..., Any]] = {"bshd": flash_attention_v2, VARLEN: flash_attention_varlen}
        return partial(functions.get(case.layout, flash_attention), **fixed)

    def packed(*owners: torch.Tensor, return_lse: bool = False, **options: Any) -> Any:
        lengths = Lengths(**{name: options.pop(name) for name in LENGTHS if name in options})
        q, k, v = _unpacked(owners)
        options |= {"layout": case.layout, "packing": case.packing, **fixed}
        checked = checked_options(q, k, v, lengths, options)
        first, second = (*owners, None)[:2]
        out, lse = attend(first, second, None, lengths, checked)
        return (out, lse) if return_lse else out

    return packed


def run_case(attend: Callable[..., Any], inputs: Inputs) -> Results:
    """Run `attend(*leaves, return_lse=True, **options)` and its backward pass. Return the results on the CPU."""
    out, lse = attend(*inputs.leaves, return_lse=True, **inputs.options)
    captured = {f"score_tensor{n}": x for n, x in enumerate(inputs.options.get("score_tensors", ()))}
    tensors = {**inputs.options, **captured}
    learned = [x for x in GRADIENTS if x.name in tensors and tensors[x.name].requires_grad]
    gradients = torch.autograd.grad(
        (out, lse),
        (*inputs.leaves, *(tensors[feature.name] for feature in learned)),
        (inputs.dout.to(out.dtype), inputs.dlse.to(lse.dtype)),
    )
    gradients = tuple(x.cpu() for x in gradients)
    leaves, rest = gradients[: len(inputs.leaves)], gradients[len(inputs.leaves) :]
    dq, dk, dv = _unpacked(leaves) if inputs.packed else leaves
    feature_gradients = {feature.gradient: x for feature, x in zip(learned, rest, strict=True)}
    return Results(out.detach().cpu(), lse.detach().cpu(), dq, dk, dv, **feature_gradients)


def _upcast(x: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return floating-point tensors, also those in a tuple, as leaves of another dtype, anything else unchanged."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().to(dtype).requires_grad_(x.requires_grad)
    return tuple(_upcast(y, dtype) for y in x) if type(x) is tuple else x


def _run_plain(compute: Callable[..., Any], case: AttentionCase, dtype: torch.dtype | None, device: str) -> Results:
    """Run `compute` on `case` with every tensor in `dtype`, so that gradients have it too. None: dtypes of the case."""
    inputs = make_inputs(case, device)
    options = _plain_options(case, inputs)
    if dtype is not None:
        options = {name: _upcast(x, dtype) for name, x in options.items()}
        packed = tuple(_upcast(x, dtype) for x in inputs.packed)
        q, k, v, dout, dlse = (_upcast(x, dtype) for x in inputs[:5])
        inputs = Inputs(q, k, v, dout, dlse, options, packed)

    def attend(*leaves: torch.Tensor, **options: Any) -> Any:
        q, k, v = _unpacked(leaves) if case.packing else leaves
        return compute(q, k, v, **options)

    return run_case(attend, inputs._replace(options=options))


def _plain_options(case: AttentionCase, inputs: Inputs) -> dict[str, Any]:
    """Return the options of a call of `reference_attention`."""
    options = {name: value for name, value in inputs.options.items() if not name.startswith("max_seqlen")}
    return {**options, "layout": "bhsd" if case.layout == "3d" else case.layout}


@lru_cache(maxsize=64)
def expected_results(case: AttentionCase, device: str = "cpu") -> Results:
    """Return the oracle's results: the reference in float64 on the case's rounded inputs."""
    return _run_plain(reference_attention, case, torch.float64, device)


@lru_cache(maxsize=64)
def yardstick_results(case: AttentionCase, device: str = "cpu") -> Results:
    """Return the results of a plain FlashAttention in the case's dtype."""
    return _run_plain(plain_flash_attention, case, None, device)


# ---- Error budget -----------------------------------------------------------------------------------------------


class Error(NamedTuple):
    """Distance of a tensor from the float64 one: largest and root-mean-square difference."""

    max_abs: float
    rms: float


NO_ERROR, INFINITE_ERROR = Error(0.0, 0.0), Error(float("inf"), float("inf"))


def measure_error(actual: torch.Tensor, expected: torch.Tensor) -> Error:
    """Return the error of `actual`: inf if there is a NaN, or an infinity that the other tensor does not have."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return NO_ERROR
    actual, expected = actual.double(), expected.double()
    same_infinity = actual.isinf() & (actual == expected)
    difference = torch.where(same_infinity, 0.0, (actual - expected).abs())
    if not bool(difference.isfinite().all()):
        return INFINITE_ERROR
    return Error(float(difference.max()), float(difference.square().mean().sqrt()))


def _size(x: torch.Tensor) -> Error:
    """Return the largest and the root-mean-square magnitude of the finite elements."""
    x = x.detach().double()[x.isfinite()].abs()
    return Error(float(x.max()), float(x.square().mean().sqrt())) if x.numel() else NO_ERROR


def rounding_unit(expected: torch.Tensor, dtype: torch.dtype) -> Error:
    """Return the largest error of rounding each element to `dtype`: half a unit in its last place."""
    return _size(0.5 * torch.finfo(dtype).eps * expected)


def error_budget(yardstick: Error, unit: Error) -> Error:
    """Return the error allowed to a kernel: `BUDGET_FACTOR` times the yardstick's, plus one `unit` of rounding."""
    return Error(*(BUDGET_FACTOR * y + u + ABSOLUTE_FLOOR for y, u in zip(yardstick, unit, strict=True)))


@lru_cache(maxsize=64)
def _lse_unit(case: AttentionCase, device: str) -> Error:
    """Return the unit of the log-sum-exp, `LSE_UNIT` times each row's largest score: scores are sums of products."""
    inputs = make_inputs(case, device)
    options = {name: _upcast(x) for name, x in _plain_options(case, inputs).items()}
    return _size(LSE_UNIT * largest_scores(*(_upcast(x) for x in inputs[:3]), **options))


def yardsticks(case: AttentionCase, device: str = "cpu", draws: int = YARDSTICK_DRAWS) -> dict[str, Error]:
    """Return the error of a plain FlashAttention for each result of `case`: the largest of `draws` draws.

    The case's own inputs are the first draw; the others are nudged. In one draw, few values may be exact by luck.

    Raises:
        ValueError: a result is not finite where the float64 one is, so that it cannot serve as a yardstick.
    """
    errors: dict[str, Error] = {}
    for draw in range(draws):
        nudged = replace(case, nudge=draw)
        for name, truth, low in zip(
            Results._fields, expected_results(nudged, device), yardstick_results(nudged, device), strict=True
        ):
            if truth is None or low is None:
                continue
            error = measure_error(low, truth)
            if error.max_abs == float("inf"):
                raise ValueError(f"{case.name}: a plain FlashAttention's {name} in {case.dtype} is not finite")
            worst = errors.get(name, NO_ERROR)
            errors[name] = Error(max(error.max_abs, worst.max_abs), max(error.rms, worst.rms))
    return errors


class Check(NamedTuple):
    """The error of one result and its budget. `problem` says why they cannot be compared (missing, dtype, shape)."""

    error: Error
    budget: Error
    problem: str = ""

    @property
    def share(self) -> float:
        """Error divided by the allowed error: at most 1 if the result is within its budget."""
        pairs = zip(self.error, self.budget, strict=True)
        return float("inf") if self.problem else max(0.0 if e == 0 else e / b if b else float("inf") for e, b in pairs)


def check_budget(
    actual: Results, case: AttentionCase, device: str = "cpu", draws: int = YARDSTICK_DRAWS
) -> dict[str, Check]:
    """Return a check of every result of `case` by name: its error and its budget.

    The yardstick's error on the case's own inputs nearly always suffices. If not, nudged inputs are computed as well.

    `device` computes the reference and the yardstick (any device with float64; big cases are faster on a GPU). `draws`
    is the largest number of inputs on which the yardstick's error is measured.
    """
    expected, yardstick = expected_results(case, device), yardstick_results(case, device)
    checks = {}
    for name, got, truth, low in zip(Results._fields, actual, expected, yardstick, strict=True):
        if truth is None or low is None:
            if got is not None:
                checks[name] = Check(INFINITE_ERROR, NO_ERROR, "computed although the case has no such input")
        elif got is None:
            checks[name] = Check(INFINITE_ERROR, NO_ERROR, "missing")
        elif got.dtype != low.dtype or got.shape != truth.shape:
            problem = f"{got.dtype} {tuple(got.shape)}, expected {low.dtype} {tuple(truth.shape)}"
            checks[name] = Check(INFINITE_ERROR, NO_ERROR, problem)
        else:
            error = measure_error(got, truth)
            unit = _lse_unit(case, device) if name == "lse" else rounding_unit(truth, low.dtype)
            for count in (1, draws):
                check = Check(error, error_budget(yardsticks(case, device, count)[name], unit))
                if check.share <= 1 or error.max_abs == float("inf"):
                    break
            checks[name] = check
    return checks


def assert_within_budget(
    actual: Results, case: AttentionCase, device: str = "cpu", draws: int = YARDSTICK_DRAWS
) -> None:
    """Assert that each result of `case` is within its error budget (`check_budget`). The error lists the others."""
    failures = []
    for name, (error, budget, problem) in check_budget(actual, case, device, draws).items():
        if problem:
            failures.append(f"{name}: {problem}")
        elif not (error.max_abs <= budget.max_abs and error.rms <= budget.rms):
            got = getattr(actual, name)
            failures.append(
                f"{name}: max error {error.max_abs:.3e} (budget {budget.max_abs:.3e}), "
                f"rms {error.rms:.3e} (budget {budget.rms:.3e}), {int(got.isnan().sum())} NaN of {got.numel()}"
            )
    if failures:
        raise AssertionError(f"{case.name}:\n  " + "\n  ".join(failures))


# ---- Public validation ------------------------------------------------------------------------------------------


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return standard normal tensors, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]


def _compare(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerances: tuple[float, float], verbose: bool
) -> tuple[bool, float]:
    """Return (allclose, largest difference) of a result and the float64 one.

    Tolerances are at least one rounding unit of the result's dtype: no implementation can be closer in that dtype."""
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: the function returned shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    eps = torch.finfo(actual.dtype).eps
    rtol, atol = (max(x, eps) for x in tolerances)
    actual = actual.detach().to(expected.device).double()
    passed = torch.allclose(actual, expected, rtol=rtol, atol=atol)
    max_diff = float((actual - expected).abs().max()) if expected.numel() else 0.0
    if verbose:
        verdict = "PASS" if passed else "FAIL"
        print(f"{verdict} {name}: max diff {max_diff:.3e} (rtol {rtol:.1e}, atol {atol:.1e})")
    return passed, max_diff


def _float64(device: torch.device | str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors in float64, on `device` if it is CUDA's, else on the CPU: NPUs have no float64 products."""
    device = torch.device(device)
    return [x.to(device if device.type == "cuda" else "cpu").double() for x in tensors]


def validate_matmul(
    triton_fn: Callable[..., torch.Tensor],
    m: int,
    n: int,
    k: int,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    verbose: bool = False,
) -> tuple[bool, float]:
    """Compare `triton_fn(a, b)` on random (m, k) and (k, n) matrices with PyTorch's product in float64.

    Tolerances are at least one rounding unit of the result's dtype. The default `device` is this machine's accelerator,
    else the CPU. On the CPU pass a function that asks for the CPU backend, as `lambda a, b: triton_matmul(a, b,
    backend="cpu")` does, or call this inside `diyfa.use_backend("cpu")`.

    Returns:
        (whether it agrees, the largest absolute difference).

    Raises:
        ValueError: the function's result has another shape than (m, n).
    """
    device = present_device() if device is None else device
    a, b = _random(dtype, (m, k), (k, n))
    actual = triton_fn(a.to(device), b.to(device))
    # float32 inputs are multiplied in float16 by default, so the expected product is that of the rounded inputs.
    a, b = _float64(device, *(x.to(actual.dtype) if x.dtype == torch.float32 else x for x in (a, b)))
    expected = a @ b
    return _compare(f"matmul {m}x{n}x{k} {dtype} on {device}", actual, expected, (rtol, atol), verbose)


def validate_attention(
    flash_fn: Callable[..., torch.Tensor],
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    causal: bool = False,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str | None = None,
    verbose: bool = False,
) -> tuple[bool, float]:
    """Compare `flash_fn(q, k, v, causal=causal)` on random (B, H, S, D) tensors with PyTorch's attention in float64.

    Tolerances, device, result and errors are as for `validate_matmul`.
    """
    device = present_device() if device is None else device
    qkv = _random(dtype, *[(batch, heads, seq_len, head_dim)] * 3)
    actual = flash_fn(*(x.to(device) for x in qkv), causal=causal)
    q, k, v = _float64(device, *qkv)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    name = f"attention ({batch}, {heads}, {seq_len}, {head_dim}) {'causal ' if causal else ''}{dtype} on {device}"
    return _compare(name, actual, expected, (rtol, atol), verbose)
