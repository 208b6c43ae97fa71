"""Common code of the launchers, in the order in which a call needs it.

1. The arguments of kernels, by name: `strides`, `feature_arguments`, `input_arguments` …; `bind_launch` picks those
   that a kernel takes.
2. Their constants: `AttentionConstants`, `TileConstants`.
3. The tile: `tuned_launches`.
4. `Kernel.launch` and `Kernel.repeat` (`diyfa.problem`): `launching`, `repeating` and their relatives make them of the
   function in a kernel's file that returns the `Pass` of a call, here called `describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch

from diyfa.backends.cuda.attention.block_mask import mask_strides
from diyfa.backends.cuda.attention.configs import (
    AttentionConfig,
    candidates,
    key_columns,
    reads_rows,
    size_facts,
    tile_form,
)
from diyfa.backends.cuda.attention.dropout import keep_threshold
from diyfa.backends.cuda.attention.score_functions import SPELLING
from diyfa.backends.cuda.attention.tile_io import PORTABLE, cdiv, lengths_constant, padded_head_dim
from diyfa.backends.cuda.runtime import tune
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import multiprocessors, on_device
from diyfa.backends.cuda.runtime.passes import Pass, Replay, launch_each, make_replay
from diyfa.backends.cuda.runtime.signature import Tiles, arguments_among, shared_box
from diyfa.features import ADJUSTING, GRADIENTS, TENSORS, Broadcast
from diyfa.problem import (
    LAYOUTS,
    VARLEN,
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    KVCacheProblem,
    KVCacheTensors,
    Launch,
    MatmulTensors,
    NewKeys,
    bhsd_strides,
    cached_per_problem,
    per_head_stride,
)
from diyfa.score_code import JitSource, value_source
from diyfa.tuning import bucket_size

_forced: dict[str, Any] = {}  # kind of kernel -> config, or function of the problem, inside `use_config`
BackwardReplay = Callable[..., list[torch.Tensor | None] | None]
Tensors = TypeVar("Tensors", AttentionTensors, KVCacheTensors, NewKeys, MatmulTensors)

# ---- Arguments ------------------------------------------------------------------------------------------------------

# Sizes and strides with which a bias is read and its gradient written. If all are multiples of 16, kernels are compiled
# for that: their loops have a sixth fewer instructions.
BIAS_SIZES_AND_STRIDES = (
    "seqlen_q", "seqlen_k", "stride_biasb", "stride_biash", "stride_biasm", "stride_outb", "stride_outh", "stride_outm",
)  # fmt: skip
# Numbers for which kernels have no variants: neither for a stride of 1 nor for multiples of 16.
RUNTIME_SIZES = (
    "stride_per_headb", "stride_maskb", "stride_maskh", "total_q", "total_k", "window_left", "window_right",
    "threshold", "interleaved_heads",
    "group",  # a variant for 1 has no loop over heads; ptxas serialises its wgmma in the dK/dV kernel (C7515)
)  # fmt: skip
WARPS_AT_ONCE = 8  # warps whose tiles fill the registers of a multiprocessor
# Pointers for whose alignment kernels have no variants: per-head numbers, and all optional tensors but a bias. These
# are read one number at a time.
UNALIGNED_POINTERS = ("per_head_ptr", *(f"{x.name}_ptr" for x in TENSORS if not isinstance(x.shape, Broadcast)))


def has_adjusted_scores(problem: AttentionProblem) -> bool:
    """Return whether scores are more than scaled products, so that the kernel converts them to units of log2 first."""
    return bool(problem.features & ADJUSTING)


def softmax_scale(problem: AttentionProblem, sm_scale: float) -> tuple[float, bool]:
    """Return (scale, whether to negate products first) of the forward kernel.

    Plain scores are scaled inside the exponential, after the running maximum is taken. That needs a positive scale.
    """
    if has_adjusted_scores(problem):
        return sm_scale / (problem.softcap or 1.0), False
    return positive_scale(sm_scale), sm_scale < 0


def positive_scale(sm_scale: float) -> float:
    """Return |scale|, or 1e-30 if it is too small for float32: -inf still masks, and every exponential is 1."""
    scale = abs(sm_scale)
    return scale if scale > torch.finfo(torch.float32).tiny else 1e-30


def pointers(**tensors: Any) -> dict[str, Any]:
    """Return the arguments `q_ptr`, ... of tensors named q, ..."""
    return {f"{name}_ptr": x for name, x in tensors.items()}


def fields_of(source: Any, *names: str) -> dict[str, Any]:
    """Return the arguments that are the fields of these names of a problem or of its tensors."""
    return {name: getattr(source, name) for name in names}


_BIAS_STRIDES = ("stride_biasb", "stride_biash", "stride_biasm", "stride_biasn")


def bias_strides(problem: AttentionProblem, bias: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of attn_bias over (B, H, Sq, Sk), 0 for dimensions that are broadcast or have size 1.

    The stride of a dimension of size 1 has no meaning, and kernels must not be compiled for its value.
    """
    if bias is None:
        return dict.fromkeys(_BIAS_STRIDES, 0)
    full = bias.expand(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    strides = (0 if size == 1 else stride for size, stride in zip(full.shape, full.stride(), strict=True))
    return dict(zip(_BIAS_STRIDES, strides, strict=True))


def dlse_strides(dlse: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of the gradient of the log-sum-exp, (B, H, Sq) or (H, Tq), 0 for None."""
    b, h, m = (0, 0, 0) if dlse is None else (0, *dlse.stride())[-3:]
    return {"stride_dlb": b, "stride_dlh": h, "stride_dlm": m}


KEYS = frozenset({"k", "v", "dk", "dv", "kc", "vc"})  # names of tensors whose rows are keys


def strides(layout: str, **tensors: torch.Tensor | None) -> dict[str, int]:
    """Return the arguments `stride_qb`, `stride_qh`, `stride_qm` (batch, head, row) of a tensor named q, 0 for None.

    Tensors of `KEYS` have `stride_kn` in place of `stride_km`.
    """
    arguments: dict[str, int] = {}
    for name, x in tensors.items():
        batch, head, row = _stride_names(name)
        arguments[batch], arguments[head], arguments[row], _ = (0, 0, 0, 0) if x is None else bhsd_strides(x, layout)
    return arguments


@cache
def _stride_names(name: str) -> tuple[str, str, str]:
    return f"stride_{name}b", f"stride_{name}h", f"stride_{name}{'n' if name in KEYS else 'm'}"


_POINTERS = [f"{x.name}_ptr" for x in TENSORS]
_optional_tensors = attrgetter(*[x.name for x in TENSORS])


def feature_arguments(problem: AttentionProblem, tensors: AttentionTensors, scale: float) -> dict[str, Any]:
    """Return the arguments of attention kernels for features: optional tensors, their strides, sizes and factors."""
    return {
        **dict(zip(_POINTERS, _optional_tensors(tensors), strict=True)),
        **pointers(per_head=tensors.alibi_slopes),
        "stride_per_headb": per_head_stride(tensors.alibi_slopes),
        **bias_strides(problem, tensors.attn_bias),
        **mask_strides(tensors),
        **fields_of(problem, "heads_q", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right"),
        "group": problem.heads_q // problem.heads_kv,
        "scale": scale,
        "softcap": problem.softcap,
        "threshold": keep_threshold(tensors.dropout_p),
        "keep_scale": 1.0 / (1.0 - tensors.dropout_p),
    }


def programs_at_once(config: AttentionConfig, device: torch.device) -> int:
    """Return about how many programs with this tile run at once, 0 without a GPU."""
    return multiprocessors(device) * max(WARPS_AT_ONCE // config.num_warps, 1)


def interleaved_heads(
    problem: AttentionProblem, config: AttentionConfig, blocks: int, heads: int, device: torch.device
) -> int:
    """Return how many of the last heads alternate their blocks (`head_and_block`); 1 if blocks are equally long.

    These heads have twice as many blocks as programs run at once, because the longest block takes twice the average.
    """
    if problem.window_right < 0 or problem.window_left >= 0:
        return 1
    return min(1 + cdiv(2 * programs_at_once(config, device), blocks), heads)


def cache_arguments(problem: KVCacheProblem, tensors: KVCacheTensors) -> dict[str, Any]:
    """Return the arguments of portable kernels for a KV cache: tables, lengths and sizes, with strides."""
    table, kd, vd = tensors.block_table, tensors.k_descale, tensors.v_descale
    stride_kdb, stride_kdh = (0, 0) if kd is None else kd.stride()
    stride_vdb, stride_vdh = (0, 0) if vd is None else vd.stride()
    return {
        **pointers(**fields_of(tensors, "seqlens", "block_table", "cache_batch_idx", "k_descale", "v_descale")),
        "stride_table": 0 if table is None else table.stride(0),
        "stride_kdb": stride_kdb, "stride_kdh": stride_kdh, "stride_vdb": stride_vdb, "stride_vdh": stride_vdh,
        **fields_of(problem, "heads_kv", "seqlen_q", "capacity"),
        "length": tensors.length,
        "entries": tensors.k_cache.shape[0],
    }  # fmt: skip


def tile_descriptor(x: torch.Tensor, layout: str, block_rows: int, block_d: int) -> Tiles:
    """Return `x` in the order (batch, head, row, feature), for TMA copies of tiles [block_rows, block_d] of a head."""
    sizes, steps, order = tuple(x.shape), x.stride(), LAYOUTS.get(layout, (0, 2, 1, 3))
    if layout == VARLEN:  # all sequences are one sample
        sizes, steps = (1, *sizes), (sizes[0] * steps[0], *steps)
    shape, strides = (tuple([values[i] for i in order]) for values in (sizes, steps))
    return Tiles(x, shape, strides, shared_box(x.dtype, (1, 1, block_rows, block_d)))


def input_arguments(
    problem: AttentionProblem, config: AttentionConfig, **inputs: tuple[torch.Tensor, int, int]
) -> dict[str, Any]:
    """Return the arguments of inputs: descriptors for TMA, else the tensors.

    `inputs`: name -> (tensor, rows of a tile, columns of a tile). If masked blocks are read by address,
    `{name}_rows_ptr` is the tensor, else None.
    """
    masked_by_address = reads_rows(problem, config)
    arguments: dict[str, Any] = {}
    for name, (x, rows, columns) in inputs.items():
        arguments[f"{name}_ptr"] = tile_descriptor(x, problem.layout, rows, columns) if config.form == "tma" else x
        arguments[f"{name}_rows_ptr"] = x if masked_by_address else None
    return arguments


def bind_launch(kernel: Any, grid: int, values: dict[str, Any], constants: Constants, options: Any) -> Launch:
    """Return the launch of `kernel` with those of `values` that it takes. Related kernels have the same `values`."""
    arguments = arguments_among(kernel, values)
    aligned: tuple[str, ...] = ()
    if arguments.get("attn_bias_ptr") is not None:
        aligned = tuple(name for name in BIAS_SIZES_AND_STRIDES if name in arguments)
        if any(arguments[name] & 15 for name in aligned):
            aligned = ()
    return Launch(kernel, grid, arguments, {"c": constants}, options, aligned)


# ---- Constants ------------------------------------------------------------------------------------------------------

# Features of the portable kernels. Those that change scores have a flag below, and scores.py computes them.
FEATURES = frozenset(
    {
        "causal", "window", "softcap", "seq_lens", "varlen", "alibi", "attn_bias", "sinks", "dropout",
        "dropout_origins", "gqa", "head_dim_v", "mask", "score_fn",
    }
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionConstants(Constants):
    """Constants of all attention kernels."""

    has_left: bool  # a window bounds keys on the left
    has_right: bool  # a causal mask or a window bounds them on the right
    lengths: int  # EQUAL, SEQ_LENS or PACKED of tile_io.py
    adjusted: bool  # `has_adjusted_scores`: scores are in units of log2
    softcap: bool
    alibi: bool
    bias: bool
    dropout: bool
    dropout_origins: bool
    score_fn: JitSource | None
    score_slope: JitSource | None  # derivative of score_fn by the score; None in the forward pass
    head_dim: int
    head_dim_v: int
    block_m: int  # queries of a tile
    block_n: int  # keys
    block_d: int  # features of k and of v, padded
    block_dv: int
    precision: str  # how fp32 operands are multiplied: "ieee"
    mask_q: int  # queries and keys of a block of the block mask, 0 without one
    mask_k: int


@dataclass(frozen=True, eq=False)
class TileConstants(AttentionConstants):
    """Constants of kernels that read tiles in a form of tile_io.py."""

    form: int
    edge_form: int  # form for blocks that a mask cuts


def attention_constants(problem: AttentionProblem) -> dict[str, Any]:
    """Return the fields of `AttentionConstants` that are no fields of the problem or the config."""
    mask_q, mask_k = problem.mask or (0, 0)
    return {
        "has_left": problem.window_left >= 0,
        "has_right": problem.window_right >= 0,
        "lengths": lengths_constant(problem),
        "adjusted": has_adjusted_scores(problem),
        "score_fn": value_source(problem.score_fn, SPELLING),
        "score_slope": None,
        "block_d": key_columns(problem),
        "block_dv": padded_head_dim(problem.head_dim_v),
        "precision": "ieee",
        "mask_q": mask_q,
        "mask_k": mask_k,
    }


def tile_constants(problem: AttentionProblem, config: AttentionConfig) -> dict[str, Any]:
    """Return the fields of `TileConstants` that are no fields of the problem or the config."""
    form = tile_form(config)
    edge_form = PORTABLE.value if reads_rows(problem, config) else form
    return attention_constants(problem) | {"form": form, "edge_form": edge_form}


# ---- The tile -------------------------------------------------------------------------------------------------------


@contextmanager
def use_config(kind: str, config: Any) -> Iterator[None]:
    """Launch every kernel of `kind` ("fwd", "dkdv", "dq", "sm90", "sm90_matmul", "decode") with this config inside it.

    For sweeps and tests. The config may be a function of the problem.
    """
    outer = _forced.get(kind)
    _forced[kind] = config
    try:
        yield
    finally:
        if outer is None:
            del _forced[kind]
        else:
            _forced[kind] = outer


def choice() -> object:
    """Return all that decides on a problem's tile besides the problem. Settled tiles are valid while it is equal.

    Inside `use_config` each result differs from every other, so nothing is repeated.
    """
    return tune.state() if not _forced else object()


def forced_config(kind: str, problem: Any) -> Any:
    """Return the config that `use_config` sets, or None."""
    config = _forced.get(kind) if _forced else None
    return config(problem) if callable(config) else config


@cached_per_problem
def _bucket(problem: AttentionProblem) -> tuple[object, ...]:
    """Return the tuner's key: all that the choice of a tile depends on, with size classes of lengths and batch."""
    heads, group, window = problem.batch * problem.heads_q, problem.heads_q // problem.heads_kv, problem.window_left + 1
    sizes = [bucket_size(n) for n in (heads, group, problem.seqlen_q, problem.seqlen_k)]
    return (
        problem.dtype, problem.layout, *sizes, problem.head_dim, problem.head_dim_v, tuple(sorted(problem.features)),
        bucket_size(window), problem.aligned, problem.bias, problem.value_dtype, problem.mask, size_facts(problem),
    )  # fmt: skip


def tuned_launches(
    kind: str, problem: AttentionProblem, make_launches: Callable[[AttentionConfig], list[Launch]],
    before: Sequence[Launch] = (),
) -> list[Launch]:  # fmt: skip
    """Return `make_launches(tile)` with the tile for this problem's bucket.

    The tile is measured once if tuning is possible, else it is the table's. A deterministic problem always has the
    table's, because another tile rounds differently. `before`: launches that fill what the measured ones read. A
    measurement runs them first, because the results that it leaves must be right.
    """
    if (forced := forced_config(kind, problem)) is not None:
        return make_launches(forced)
    tiles = candidates(kind, problem)
    assert tiles, "unsupported() accepted a problem that no tile fits"
    if _has_one_tile(problem, tiles):
        return make_launches(tiles[0])
    pending = list(before)

    def run(config: AttentionConfig) -> None:
        launch_each(pending)
        pending.clear()  # one run fills it for all candidates
        launch_each(make_launches(config))

    return make_launches(tune.best(f"attention_{kind}", _bucket(problem), tiles, run, tiles[0]))


def _has_one_tile(problem: AttentionProblem, tiles: Sequence[AttentionConfig]) -> bool:
    return problem.deterministic or len(tiles) == 1


def is_settled(problem: AttentionProblem, *kinds: str) -> bool:
    """Return whether `tuned_launches` of these kinds measures nothing, and has equal tiles, while `choice` is equal."""
    return all(
        _has_one_tile(problem, candidates(kind, problem)) or tune.is_settled(f"attention_{kind}", _bucket(problem))
        for kind in kinds
    )


# ---- `Kernel.launch` and `Kernel.repeat` of a pass -------------------------------------------------------------------

OUT, LSE = 3, 4  # indices among the tensors of a backward pass: q, k, v, out, lse, the optional ones, dout
SINKS_GRADIENT = [x.name for x in GRADIENTS].index("sinks")


def _distinct_objects(tensors: Tensors) -> Tensors:
    """Return the tensors as different objects, even if the call has one twice: `make_replay` compares by identity."""
    views: Any = {name: x.detach() for name, x in tensors._asdict().items() if isinstance(x, torch.Tensor)}
    return tensors._replace(**views)


def launching(describe: Callable[..., Pass]) -> Callable[..., None]:
    """Return `Kernel.launch` of an operation without a backward pass. `describe` makes its pass."""

    def launch(problem: Any, tensors: Any, *results: Any) -> None:
        with on_device(tensors[0]):
            launch_each(describe(problem, tensors, *results).launches)

    return launch


def repeating(describe: Callable[..., Pass], over_cache: bool = False) -> Callable[..., Replay | None]:
    """Return `Kernel.repeat` of a forward pass, of a pass over a cache, or of a matrix product."""

    def repeat(problem: Any, tensors: Any, *results: torch.Tensor) -> Replay | None:
        tensors, outputs = _distinct_objects(tensors), [x.detach() for x in results]
        with on_device(outputs[0]):
            described = describe(problem, tensors, *outputs)
        inputs = tensors.present() if described.inputs is None else described.inputs
        return make_replay(described, inputs, outputs, choice, ("length",) if over_cache else (), over_cache)

    return repeat


def repeating_append(describe: Callable[..., Pass]) -> Callable[..., Replay | None]:
    """Return `Kernel.repeat` of an append to a cache."""

    def repeat(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> Replay | None:
        tensors, new = _distinct_objects(tensors), _distinct_objects(new)
        inputs = [*tensors.present(), *new.present()]
        return make_replay(describe(problem, tensors, new), inputs, (), choice, ("length",))

    return repeat


def launching_backward(describe: Callable[..., Pass]) -> Callable[..., None]:
    """Return `Kernel.launch` of a backward pass. PyTorch's operators compute the gradient of sinks."""

    def launch(
        problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
        dlse: torch.Tensor | None, gradients: AttentionGradients,
    ) -> None:  # fmt: skip
        with on_device(tensors.q):
            gradients, delta = _with_delta(gradients, lse)
            described = describe(problem, tensors, out, lse, dout, dlse, gradients)
            launch_each(described.launches)
            if described.finish is not None:
                described.finish()
            if gradients.dsinks is not None:
                assert tensors.sinks is not None and delta is not None, "dsinks are asked for where there are sinks"
                _fill_dsinks(tensors.sinks, lse, delta, gradients.dsinks)

    return launch


def repeating_backward(describe: Callable[..., Pass]) -> Callable[..., BackwardReplay | None]:
    """Return `Kernel.repeat` of a backward pass, for calls in which no optional tensor but sinks needs a gradient.

    `diyfa.problem.Kernel` defines its arguments. `owners`: the one to three tensors that contain dq, dk and dv. A
    repetition returns new owners, filled up to three with None, then the gradients of optional tensors: None except for
    sinks.
    """

    def repeat(
        problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
        gradients: AttentionGradients, owners: Sequence[torch.Tensor],
    ) -> BackwardReplay | None:  # fmt: skip
        # `Pass.finish` is not repeated, and the partial sums are large.
        if any(getattr(gradients, x.gradient) is not None for x in GRADIENTS if x.gradient != "dsinks"):
            return None
        tensors = _distinct_objects(tensors)
        gradients, delta = _with_delta(gradients, lse)
        with on_device(out):
            described = describe(problem, tensors, out, lse, dout, None, gradients)
        q, k, v, *optional = tensors.present()
        inputs = [q, k, v, out, lse, *optional, dout]
        outputs = [*owners, *([] if delta is None else [delta])]
        replay = make_replay(described, inputs, outputs, choice)
        if replay is None:
            return None
        first_strides, count = [x.stride() for x in inputs[:-1]], len(owners)
        missing = [None] * (3 - count + len(GRADIENTS))  # what follows the owners in the result
        sinks_index = next((i for i, x in enumerate(inputs) if x is tensors.sinks), None)

        def run_again(addresses: list[int], saved: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
            """Repeat the pass for another call, or return None if its tensors do not allow that.

            `saved`: the call's tensors in the order of `inputs`, without dout. `addresses`: those of `saved`, then of
            dout.
            """
            # The other call must have the strides of the first one, and out, lse and dout (-1) aligned to 16 bytes. q,
            # k and v are aligned as in the first call: that is in the key. Optional tensors are read one number at a
            # time: their alignment does not matter.
            if (addresses[OUT] | addresses[LSE] | addresses[-1]) & 15 or [x.stride() for x in saved] != first_strides:
                return None
            results = replay(addresses)  # the owners, delta if there is one, and the pass's memory
            if results is None:
                return None
            gradients = [*results[:count], *missing]
            if sinks_index is not None:
                dsinks = gradients[3 + SINKS_GRADIENT] = torch.empty_like(saved[sinks_index])
                with on_device(dsinks):
                    _fill_dsinks(saved[sinks_index], saved[LSE], results[count], dsinks)
            return gradients

        return run_again

    return repeat


def _with_delta(gradients: AttentionGradients, lse: torch.Tensor) -> tuple[AttentionGradients, torch.Tensor | None]:
    """Return (gradients with a buffer for delta, delta). Both have None unless the caller or sinks need delta."""
    if gradients.delta is None and gradients.dsinks is not None:
        gradients = gradients._replace(delta=torch.empty_like(lse, memory_format=torch.contiguous_format))
    return gradients, gradients.delta


def _fill_dsinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, dsinks: torch.Tensor) -> None:
    """Compute the gradient of the sinks from lse and delta, (B, H, Sq) or (H, Tq)."""
    weights = torch.exp(sinks[:, None] - lse).masked_fill_(lse == float("inf"), 0.0).mul_(delta)
    dsinks.copy_(-weights.sum((0, 2) if weights.dim() == 3 else (1,)))
