"""`context_parallel_attention`: one attention call over a sequence that is sharded over several devices.

    context_parallel_attention -> _attend -> agreed_call -> plan_of -> _ContextParallel -> forward, backward
    inside a compiled graph    -> `compiled.attend`: an operator that calls agreed_call, plan_of and forward

1. `agreed_call`: each rank checks its arguments (`checked_call`), and all compare them. The first rank's method runs.
2. `plan_of`: the method "ring" is a ring; "ulysses" is one attention call between two exchanges of rows for heads;
   "both" is a ring between these exchanges.
3. `forward` and `backward` run the plan without autograd; `_ContextParallel` is their autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from diyfa import ops, registry, validation
from diyfa.attention import Result, autocast, checked_options
from diyfa.distributed import cost, ulysses
from diyfa.distributed.check import agree
from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.ring import Ring, ring_forward, ring_gradients
from diyfa.distributed.sharding import (
    Group,
    Offsets,
    Segments,
    gather_shards,
    joined,
    process_groups,
    rank_in,
    rank_segments,
    sequence_offsets,
)
from diyfa.distributed.steps import normalised, ring_steps
from diyfa.dropout import with_origins
from diyfa.eight_bits import EIGHT_BIT_DTYPES
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.options import NO_LENGTHS, UNBOUNDED, AttentionOptions, Lengths
from diyfa.problem import LAYOUTS, VARLEN

METHODS = ("auto", "ring", "ulysses", "both")
# Options that users do not give. "gradients": names of inputs that need one, where local tensors no longer say so. For
# dropout, "mask_origin": `_Call.mask_origin`; "was_drawn": each rank drew its own `rng_state`; "state_groups": groups
# whose first rank's state replaces it.
INTERNAL = ("gradients", "mask_origin", "was_drawn", "state_groups")
Sharding = tuple[Offsets, tuple[Segments, ...]]  # offsets of the unsharded sequences, and each rank's segments of them


@without_unknown
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    method: str = "auto",
    load_balance: str = "zigzag",
    layout: str = "bhsd",
    cu_seqlens: torch.Tensor | None = None,
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    variant: str = "auto",
    backend: str | None = None,
    **unknown: NoReturn,
) -> Result:
    """`flash_attention` over a sequence that the ranks of `group` share: each has its rows (`shard_sequence`).

    All ranks must call it with arguments that differ in the values of tensors alone; the first call of each kind
    compares them. q, k and v belong to one sequence (self-attention): they have the same rows.

    q, k and v may be DTensors that are sharded along the sequence, and over heads (a multiple of the shards) or batch
    along other mesh dimensions. The result then is a DTensor.

    Args:
        q: this rank's rows, (B, H, S / ranks, D), in layout "bshd" (B, S / ranks, H, D); packed sequences (T / ranks,
            H, D). float16, bfloat16 or float32.
        k, v: as q, with Hk heads (H a multiple of Hk) and, for v, Dv features.
        group: a process group; a DeviceMesh of one dimension, or of two: (ring, ulysses); None: all processes.
        causal, sm_scale, window, softcap, dropout_p, deterministic, variant, backend: as for `flash_attention`.
            Positions are those in the whole sequence.
        method: "ring" passes keys and values round. "ulysses" exchanges rows for heads; H must be a multiple of the
            ranks. "both" runs Ulysses over the second dimension of a mesh and a ring over the first. "auto" is "both"
            on a mesh of two dimensions, else the method that `diyfa.distributed.cost` predicts to be faster; in
            compiled graphs "ulysses" if the heads can be divided, else "ring".
        load_balance: the rule that cuts the sequence, "zigzag" or "none", the same as for `shard_sequence`.
        cu_seqlens: (B + 1,) int32 offsets of packed sequences in the unsharded tensor, the same as for
            `shard_sequence`. The host reads them; on the CPU that waits for nothing.
        alibi_slopes: (H,) or (B, H) float32, all heads on every rank; method "ulysses" only.
        sinks: (H,) float32, all heads on every rank.
        rng_state: (2,) int64, seed and offset of the dropout mask, the same on all ranks; default: the first rank draws
            it. The mask depends neither on the number of ranks nor on the method.
        return_lse: also return the log-sum-exp, (B, H, S / ranks) or (H, T / ranks) float32.

    Returns:
        What `flash_attention` returns, for this rank's rows. Gradients of q, k and v count all rows of the sequence.
        The gradient of `sinks` is this rank's contribution: sum it over the ranks, as for any replicated weight.

    Raises:
        ValueError, TypeError: an argument does not fit, or cannot run, with the reason; ranks disagree.
    """
    if unknown:
        refuse_unknown(context_parallel_attention, unknown)
    arguments: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "method": method, "load_balance": load_balance, "layout": layout,
        "cu_seqlens": cu_seqlens, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "dropout_p": dropout_p, "rng_state": rng_state, "deterministic": deterministic, "return_lse": return_lse,
        "variant": variant, "backend": backend,
    }  # fmt: skip
    if torch.compiler.is_compiling() and not any(validation.is_dtensor(x) for x in (q, k, v)):
        from diyfa.distributed import compiled

        return compiled.attend(q, k, v, group, arguments)
    return _outside_graphs(q, k, v, group, arguments)


class _OutsideGraphs:
    """A function at whose call torch.compile breaks the graph.

    `torch.compiler.disable` is slow at first, because it imports much; so the first call applies it.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.disabled = run, False

    def __call__(self, *arguments: Any) -> Any:
        if not self.disabled:
            self.run, self.disabled = torch.compiler.disable(self.run), True
        return self.run(*arguments)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, arguments: dict[str, Any]) -> Any:
    """Run `context_parallel_attention` with its options by name."""
    if any(validation.is_dtensor(x) for x in (q, k, v)):
        from diyfa.distributed.dtensor import with_local_tensors

        return with_local_tensors(_attend, (q, k, v), group, kernel_layout(arguments), arguments)
    groups = process_groups(group)
    call = agreed_call(q, k, v, groups, arguments)
    out, lse = _ContextParallel.apply(plan_of(call, groups), arguments["return_lse"], *call.qkv, arguments["sinks"])
    return out if lse is None else (out, lse)


_outside_graphs = _OutsideGraphs(_attend)


# ---- The call: checked, and the same on all ranks --------------------------------------------------------------------


class _Call(NamedTuple):
    """The checked arguments of one rank's call."""

    qkv: tuple[torch.Tensor, ...]
    sharding: Sharding
    options: AttentionOptions
    method: str
    mask_origin: tuple[int, int] = (0, 0)  # index in dropout's mask of this rank's first sample and query head


def kernel_layout(arguments: dict[str, Any]) -> str:
    """Return the layout of the kernels' tensors. Raises ValueError if there is no such layout."""
    if arguments["layout"] not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {arguments['layout']!r}")
    return VARLEN if arguments["cu_seqlens"] is not None else arguments["layout"]


def checked_call(
    qkv: tuple[torch.Tensor, ...], groups: tuple[dist.ProcessGroup, ...], arguments: dict[str, Any]
) -> _Call:
    """Check every argument and return the call. No rank waits for another here."""
    validation.check_booleans(**{name: arguments[name] for name in ("causal", "deterministic", "return_lse")})
    state = arguments["rng_state"]
    if arguments["dropout_p"] and isinstance(state, torch.Tensor) and state.shape != (2,):
        raise ValueError(f"rng_state must have shape (2,), seed and offset, got {tuple(state.shape)}")
    q, k, v = qkv
    packed = arguments["cu_seqlens"] is not None
    layout = kernel_layout(arguments)
    if q.dim() != (3 if packed else 4) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(f"q, k and v must have {3 if packed else 4} dimensions, got {q.dim()}, {k.dim()}, {v.dim()}")
    rows = q.shape[row_dim(layout)]
    if k.shape[row_dim(layout)] != rows:
        raise ValueError(f"q and k must have the same rows (self-attention), got {rows} and {k.shape[row_dim(layout)]}")
    ranks, rank = rank_in(groups)
    offsets = sequence_offsets(rows * ranks, arguments["cu_seqlens"])
    segments = rank_segments(offsets, ranks, arguments["load_balance"])
    lengths = _local_lengths(segments[rank], len(offsets) - 2, q.device) if packed else NO_LENGTHS
    front_end_options = ("method", "load_balance", "cu_seqlens", "return_lse", *INTERNAL)  # no kernel reads them
    kernel_options = {name: x for name, x in arguments.items() if name not in front_end_options}
    if q.dtype in EIGHT_BIT_DTYPES:
        raise ValueError(f"context_parallel_attention takes no {q.dtype}: partial results of float8 are not merged")
    options = checked_options(q, k, v, lengths, kernel_options | {"layout": layout})
    sharding = offsets, segments
    chosen = _chosen_method(arguments["method"], groups, qkv, sharding, options)
    return _Call(qkv, sharding, options, chosen, arguments.get("mask_origin", (0, 0)))


def agreed_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: tuple[dist.ProcessGroup, ...], arguments: dict[str, Any]
) -> _Call:
    """Check every argument, and that all ranks have the same. Return the call."""
    call, refusal = None, None
    try:  # a rank that refuses its arguments must tell the others, or they would wait for it
        validation.check_tensors(q=q, k=k, v=v)
        q, k, v = autocast(q, k, v)
        call = checked_call((q, k, v), groups, arguments)
    except Exception as error:
        refusal = error
    gradients = arguments.get("gradients") or required_gradients(q, k, v, arguments["sinks"])
    modes = {"gradients": gradients, "batch_invariant": registry.is_batch_invariant()}
    compared = {"q": q, "k": k, "v": v} | {name: x for name, x in arguments.items() if name not in INTERNAL} | modes
    if arguments.get("was_drawn"):  # the graph drew the state: it is no argument of the user, so it is not compared
        compared["rng_state"] = None
    choice = agree(groups, compared, refusal, METHODS.index(call.method) if call else 0)
    assert call is not None, "a refusal was raised"
    return with_first_ranks_state(call._replace(method=METHODS[choice]), groups, arguments)


def required_gradients(*learned: torch.Tensor | None) -> str:
    """Return the names of those of q, k, v and sinks that require a gradient, as text."""
    if not torch.is_grad_enabled():
        return "none"
    pairs = zip(("q", "k", "v", "sinks"), learned, strict=True)
    return ", ".join(name for name, x in pairs if isinstance(x, torch.Tensor) and x.requires_grad) or "none"


def with_first_ranks_state(call: _Call, groups: tuple[dist.ProcessGroup, ...], arguments: dict[str, Any]) -> _Call:
    """Return the call with the first rank's dropout state, if each rank drew its own."""
    state = call.options.rng_state
    if state is None or not arguments.get("was_drawn", arguments["rng_state"] is None):
        return call
    state = gather_shards(state, arguments.get("state_groups", groups))[:2]
    return call._replace(options=call.options._replace(rng_state=state))


# ---- The method ------------------------------------------------------------------------------------------------------


def _chosen_method(
    method: str,
    groups: tuple[dist.ProcessGroup, ...],
    qkv: tuple[torch.Tensor, ...],
    sharding: Sharding,
    options: AttentionOptions,
) -> str:
    """Return the method that runs.

    Raises:
        ValueError: there is no such method, or it cannot run on these groups with so many heads.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    is_2d = len(groups) == 2
    if method == "auto":
        method = "both" if is_2d else _fastest_method(qkv, groups[0], sharding, options)
    if is_2d != (method == "both"):
        dimensions = "one dimension" if is_2d else "two dimensions, (ring, ulysses)"
        raise ValueError(f"method {method!r} needs a group of {dimensions}, got a group of {len(groups)}")
    reason = ulysses.refuses(qkv[0].shape[head_dim(options.layout)], dist.get_world_size(groups[-1]))
    if method != "ring" and reason:
        raise ValueError(f"method {method!r} cannot run: {reason}")
    return method


def _fastest_method(
    qkv: tuple[torch.Tensor, ...],
    group: dist.ProcessGroup,
    sharding: Sharding,
    options: AttentionOptions,
) -> str:
    """Return the method that "auto" takes for one group: the one that is predicted to be faster."""
    if options.alibi_slopes is not None or options.batch_invariant:
        return "ulysses"
    q, k, v = qkv
    offsets, segments = sharding
    rows, heads = row_dim(options.layout), head_dim(options.layout)
    window = normalised((options.window_left, options.window_right), offsets[-1])
    work = cost.Work(
        dist.get_world_size(group), 1 if options.layout == VARLEN else q.shape[0], q.shape[heads], k.shape[heads],
        q.shape[rows], q.shape[-1], v.shape[-1], q.element_size(), cost.visible_fraction(offsets, window),
        options.needs_grad, len(ring_steps(segments, dist.get_rank(group), window, options.layout == VARLEN)),
    )  # fmt: skip
    arch = registry.resolve_backend(q.device, options.backend).arch(q.device)
    return cost.cheapest(work, cost.machine_for(arch, group))


# ---- The plan, and both passes ---------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The plan of a call: an optional exchange before and after, and between them a ring or one attention call."""

    exchange: ulysses.Ulysses | None
    ring: Ring | None
    lengths: Lengths  # of the one attention call
    options: AttentionOptions  # with the optional tensors of this rank's heads


def plan_of(call: _Call, groups: tuple[dist.ProcessGroup, ...]) -> _Plan:
    """Return the plan of a call whose method is chosen. Raises ValueError for options that the method lacks."""
    qkv, (offsets, segments), options, method, (sample, head) = call
    if method == "ring":
        return _Plan(None, _ring(groups[0], segments, offsets, options, call.mask_origin), NO_LENGTHS, options)
    size, heads = dist.get_world_size(groups[-1]), head_dim(options.layout)
    head += dist.get_rank(groups[-1]) * (qkv[0].shape[heads] // size)
    exchanging = [segments[n : n + size] for n in range(0, len(segments), size)]  # ranks that exchange rows for heads
    ring_rank = dist.get_rank(groups[0]) if method == "both" else 0
    exchange = None
    if size > 1:
        repeats = ulysses.kv_head_repeats(qkv[1].shape[heads], size)
        exchange = ulysses.Ulysses(groups[-1], exchanging[ring_rank], options.layout, repeats)
        sinks, slopes = (exchange.local_heads(x) for x in (options.sinks, options.alibi_slopes))
        options = options._replace(sinks=sinks, alibi_slopes=slopes)
    if method == "both":
        ring = _ring(groups[0], tuple(joined(ranks) for ranks in exchanging), offsets, options, (sample, head))
        return _Plan(exchange, ring, NO_LENGTHS, options)
    lengths, samples = NO_LENGTHS, qkv[0].shape[0]
    if options.layout == VARLEN:
        samples = len(offsets) - 2
        lengths = _local_lengths(joined(segments), samples, qkv[0].device)
    if options.rng_state is not None:
        state = with_origins(options.rng_state, [(sample + b, head, 0, 0) for b in range(samples)])
        options = options._replace(rng_state=state)
    return _Plan(exchange, None, lengths, options)


def _ring(
    group: dist.ProcessGroup,
    segments: tuple[Segments, ...],
    offsets: Offsets,
    options: AttentionOptions,
    mask_origin: tuple[int, int],
) -> Ring:
    """Return the ring of one call. Raises ValueError for options that need method "ulysses"."""
    if options.alibi_slopes is not None:
        raise ValueError("alibi_slopes need method='ulysses': in a ring a key's distance is not known to the kernels")
    if options.batch_invariant:
        raise ValueError("diyfa.batch_invariant() needs method='ulysses': a ring merges its steps in another order")
    window = normalised((options.window_left, options.window_right), offsets[-1])
    separate_blocks = options.rng_state is not None
    steps = ring_steps(segments, dist.get_rank(group), window, options.layout == VARLEN, separate_blocks)
    return Ring(group, steps, options._replace(sinks=None), mask_origin)


def _local_lengths(segments: Segments, n_sequences: int, device: torch.device) -> Lengths:
    """Return the packed lengths of this rank's rows."""
    lens = [0] * n_sequences
    rows_before = 0  # packed rows before the first sequence
    for segment in segments:
        if segment.sequence >= 0:
            lens[segment.sequence] += segment.rows
        elif not sum(lens):
            rows_before += segment.rows
    offsets = torch.tensor([0, *lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32) + rows_before
    return Lengths(*(offsets.to(device),) * 2, None, *(max(lens, default=0),) * 2)


def forward(plan: _Plan, qkv: Sequence[torch.Tensor], with_lse: bool = True) -> tuple[Any, ...]:
    """Return out, lse or None, and the (q, k, v, out, lse) that `backward` reads. No autograd."""
    exchange, ring, lengths, options = plan
    q, k, v = qkv if exchange is None else exchange.scatter_heads(*qkv)
    if ring is None:
        out, lse = ops.forward(q, k, v, lengths, options)
        saved = q, k, v, out, lse
    else:
        out, lse, saved_lse = ring_forward(ring, q, k, v, options.sinks)
        saved = q, k, v, out, saved_lse
    if exchange is not None:
        return *exchange.gather_heads(out, lse if with_lse else None), saved
    return out, lse if with_lse else None, saved


def backward(
    plan: _Plan, saved: Sequence[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dq, dk, dv and dsinks or None, from the tensors that `forward` returned last and dout, dlse."""
    exchange, ring, lengths, options = plan
    q, k, v, out, lse = saved
    summed = exchange is not None and exchange.repeats > 1  # the repeats' dk and dv are summed: round only the sum
    if exchange is not None:
        dout, dlse = exchange.scatter_results(dout, dlse)
    if ring is None:
        if summed and q.dtype in (torch.float16, torch.bfloat16):
            options = options._replace(out_dtype="float32")
        gradients = ops.differentiate((dout, dlse), (q, k, v), (out, lse), lengths, options)
        dq, dk, dv, dsinks = (gradients[index] for index in (0, 1, 2, ops.GRADIENT_INDEX["sinks"]))
    else:
        dq, dk, dv, dsinks = ring_gradients(ring, (q, k, v, options.sinks, out, lse), (dout, dlse))
    dq = dq.to(q.dtype)
    if not summed:
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    if exchange is not None:
        dq, dk, dv = exchange.gather_gradients(dq, dk, dv)
        dsinks = None if options.sinks is None else exchange.with_zero_heads(dsinks)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


class _ContextParallel(torch.autograd.Function):
    """The autograd function of `forward`: gradients of q, k, v and sinks. Every rank must run both passes."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, with_lse: bool, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse, saved = forward(plan, (q, k, v), with_lse)
        ctx.save_for_backward(*saved)
        ctx.plan = plan
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_differentiate(ctx.plan, dout, dlse, *ctx.saved_tensors)


@once_differentiable
def _differentiate(plan: _Plan, dout: Any, dlse: Any, *saved: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Run `backward`. `once_differentiable` must see that the gradients depend on `saved`, too."""
    return backward(plan, saved, dout, dlse)
