"""Attention as PyTorch operators, with its one autograd function, and the entrances of all calls.

`torch.ops.diyfa.attention_fwd`, `attention_bwd` and `attention_bwd_out` (into given buffers) have one implementation
for every device: it makes or finds the plan of the call, allocates the results and launches the plan's kernel.
`torch.library.Library` defines them, because a call costs a third of one of `custom_op`. Their autograd is a
`torch.autograd.Function`, which eager calls use directly (a sixth of what `register_autograd` costs). It is also the
operators' kernel for the Autograd key. So torch.compile and torch.export record the operator alone, and can still
differentiate it. `kvcache_ops.py` and `matmul_ops.py` have the operators of caches and of products.

The path of a call, from the public functions to `Kernel.launch`:

    eager, with a plan   run_plan -> [_Attention.forward] -> _run_forward
                         _Attention.backward -> _run_backward
    everything else      attend -> [_Attention.forward] -> forward -> [operator] -> _forward_by_look_up -> _run_forward
                         _Attention.backward -> differentiate -> [operator] -> _backward_by_look_up -> _run_backward

A call has the steps in brackets only if it needs them: `_Attention` if a gradient is wanted, the operator if something
(such as tracing) must see it. The file defines the steps from right to left: plans, their runs, the operators,
autograd, the entrances.

"Owners" are the tensors whose memory q, k and v are: q, k, v themselves, or with `packing` the tensors that pack them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from diyfa import registry
from diyfa.eight_bits import PER_BLOCK
from diyfa.features import GRADIENTS, TENSORS
from diyfa.options import (
    DIFFERENTIABLE,
    SCHEMA,
    AttentionOptions,
    Lengths,
    bind,
    optional_tensors,
    pack,
    problem_fields,
    tensors_among,
    unpack,
    with_tensors,
    without_tensors,
)
from diyfa.plan import Plan, attention_key, find, may_be_read, remember, runs_eagerly
from diyfa.problem import (
    LAYOUTS,
    VARLEN,
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    Backend,
    as_bhsd,
    dtype_name,
    empty_output,
    has_few_steps,
    is_aligned,
)
from diyfa.torch_private import below_autograd, differentiates_forward, direct_apply, is_transformed, is_unseen
from diyfa.validation import check_derivatives

Pair = tuple[torch.Tensor, torch.Tensor]
_INF = float("inf")
_FEATURE_GRADIENTS = tuple(feature.gradient for feature in GRADIENTS)
_NO_TENSORS = (None,) * len(TENSORS)
_STATE_INDEX = [feature.name for feature in TENSORS].index("rng_state")  # among the optional tensors
GRADIENT_INDEX = {feature.name: 3 + i for i, feature in enumerate(GRADIENTS)}  # in the result of `differentiate`
# Packing -> function that gets q, k, v from their owners. A packed tensor has a dimension of 2 or 3 before the heads.
UNPACK: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "": lambda q, k, v: (q, k, v),
    "kv": lambda q, kv, _: (q, *kv.unbind(-3)),
    "qkv": lambda qkv, _, __: qkv.unbind(-3),
}


def given_tensors(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [x for x in tensors if x is not None]


def wants_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# ---- From a call to its plan -----------------------------------------------------------------------------------------


def normalised_window(left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Return a window's bounds, -1 for a bound that hides no key. Queries are aligned with keys Sk - Sq to Sk - 1."""
    return -1 if 0 < left >= seqlen_k else left, -1 if 0 < right >= seqlen_q > 0 else right


def new_rng_state(device: torch.device) -> torch.Tensor:
    """Return seed and offset of one call's dropout mask, (2,) int64, drawn from the default generator of `device`.

    They are drawn on the device: nothing waits, and a captured graph draws new ones at every replay. Code that saves
    and restores the generator (`torch.random.fork_rng`, checkpointing) repeats the mask.
    """
    return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device)


def describe_attention(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> AttentionProblem:
    """Return the problem of one call."""
    fields = problem_fields(lengths, options)
    q_shape, k_shape, layout = q.shape, k.shape, options.layout
    if layout == VARLEN:
        total_q, heads_q, head_dim = q_shape
        total_k, heads_kv, _ = k_shape
        # Too large a maximum is correct, but costs programs: no sequence has more than all rows. Descales of blocks are
        # laid out by the given maximum, so it stays.
        seqlen_q, seqlen_k = lengths.max_seqlen_q, lengths.max_seqlen_k
        if fields["q_descale"] != PER_BLOCK:
            seqlen_q = min(seqlen_q, total_q)
        if fields["k_descale"] != PER_BLOCK:
            seqlen_k = min(seqlen_k, total_k)
        fields["total_q"], fields["total_k"] = total_q, total_k
    else:
        b, h, s, d = LAYOUTS[layout]
        heads_q, seqlen_q, head_dim = q_shape[h], q_shape[s], q_shape[d]
        heads_kv, seqlen_k = k_shape[h], k_shape[s]
        fields["batch"] = q_shape[b]
    left, right = normalised_window(options.window_left, options.window_right, seqlen_q, seqlen_k)
    fields.update(
        device_type=backend.device_type,
        arch=backend.arch(q.device),
        dtype=dtype_name(q.dtype),
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        value_dtype="" if v.dtype is q.dtype else dtype_name(v.dtype),
        window_left=left,
        window_right=right,
        aligned=is_aligned(q, k, v),
        few_steps=lengths.seq_lens is None or has_few_steps(layout, q, k, v),
    )
    return AttentionProblem.from_fields(fields)


def _sees_no_key(q: torch.Tensor, k: torch.Tensor, lengths: Lengths, options: AttentionOptions) -> bool:
    """Return whether no query of the call can see a key, so that nothing has to be launched."""
    if q.numel() == 0 or k.numel() == 0:
        return True
    if options.layout != VARLEN:
        return False
    assert lengths.cu_seqlens_q is not None, "a varlen call comes with cu_seqlens"
    return lengths.cu_seqlens_q.shape[0] == 1 or lengths.max_seqlen_q == 0 or lengths.max_seqlen_k == 0


def plan_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    options: AttentionOptions,
    key: Hashable | None = None,
) -> Plan:
    """Make the plan of a checked call and store it under `key`. Raises ValueError if no kernel runs the call."""
    check_derivatives(options)
    backend = registry.resolve_backend(q.device, options.backend)
    problem = describe_attention(backend, q, k, v, lengths, options)
    plan = Plan(backend, problem, _sees_no_key(q, k, lengths, options), lengths, options)
    remember(key, plan)
    return plan


def operator_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> tuple[Plan, list[int]]:
    """Return the plan of a call that comes through an operator, and the addresses of its tensors.

    The addresses may be incomplete if the call has no key. Its plan is then new, and the first run of a plan reads no
    addresses.
    """
    optional = optional_tensors(lengths, options)
    key, addresses = attention_key((q, k, v), lengths, (registry.forced_backend(), *options), optional)
    plan = find(key)
    return plan_of(q, k, v, lengths, options, key) if plan is None else plan, addresses


# ---- The forward pass of a plan --------------------------------------------------------------------------------------


def empty_lse(q: torch.Tensor, layout: str) -> torch.Tensor:
    sizes = q.shape
    if layout == VARLEN:
        shape: tuple[int, ...] = (sizes[1], sizes[0])
    else:
        b, h, s, _ = LAYOUTS[layout]
        shape = (sizes[b], sizes[h], sizes[s])
    return torch.empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def _empty_results(q: torch.Tensor, problem: AttentionProblem) -> Pair:
    return empty_output(q, problem.head_dim_v, problem.out_dtype), empty_lse(q, problem.layout)


def _filled_outside_sequences(x: torch.Tensor, q: torch.Tensor, lengths: Lengths, fill_value: float) -> torch.Tensor:
    """Return x, broadcast to (H, Tq), with `fill_value` in rows of no sequence, or x itself if nothing is packed."""
    ends = lengths.cu_seqlens_q
    if ends is None:
        return x
    rows = torch.arange(q.shape[0], device=x.device)
    return torch.where((rows >= ends[0]) & (rows < ends[-1]), x, fill_value)


def fill_without_keys(
    sinks: torch.Tensor | None, q: torch.Tensor, lengths: Lengths, layout: str, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Fill out and lse of rows that see no key: with 0 and +inf, or with sinks 0 and the sink.

    A sink of -inf is none: lse is +inf. A sink of +inf or NaN makes both NaN, as a softmax over an infinite score is.
    """
    if sinks is None:
        out.zero_()
        lse.fill_(_INF)
        return
    lse_of_sink = torch.where(sinks == -_INF, _INF, sinks - sinks + sinks)  # inf - inf is NaN
    lse.copy_(_filled_outside_sequences(lse_of_sink[:, None], q, lengths, _INF))
    out_of_sink = torch.where(lse_of_sink == lse_of_sink, 0.0, lse_of_sink)
    heads_first = out.transpose(0, 1) if layout == VARLEN else as_bhsd(out, layout)
    heads_first.copy_(_filled_outside_sequences(out_of_sink[:, None], q, lengths, 0.0)[..., None])


def _binds_without_copies(tensors: AttentionTensors, *inputs: torch.Tensor) -> bool:
    """Return whether a backend reads the tensors of a call themselves, and no copies."""
    present = tensors.present()
    return len(present) == len(inputs) and all(x is y for x, y in zip(present, inputs, strict=True))


def _run_forward(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: Sequence[torch.Tensor],
    addresses: Sequence[int],
) -> Pair:
    """Run the forward pass of a plan -> (out, lse). `optional`: the tensors of `plan.names`. `addresses`: those of q,
    k, v and these.

    The first run launches the kernel; from the second on the plan's `repeat` does, if the kernel offers one.
    """
    repeat = plan.repeat  # read once: another thread may replace it
    if repeat is not None:
        pair = repeat(addresses)
        if pair is not None:
            return pair
    problem, kernel = plan.problem, plan.forward
    lengths, options = with_tensors(plan.lengths, plan.options, plan.names, optional)
    if plan.sees_no_key:
        out, lse = _empty_results(q, problem)
        fill_without_keys(options.sinks, q, lengths, options.layout, out, lse)
        return out, lse
    tensors = bind(q, k, v, lengths, options)
    if plan.has_run and kernel.repeat is not None and _binds_without_copies(tensors, q, k, v, *optional):
        repeat = plan.repeat = kernel.repeat(problem, tensors, *_empty_results(q, problem))
        pair = None if repeat is None else repeat(addresses)
        if pair is not None:
            return pair
    out, lse = _empty_results(q, problem)
    if problem.varlen and not kernel.clears:
        out.zero_()
        lse.fill_(_INF)
    kernel.launch(problem, tensors, out, lse)
    plan.has_run = True
    return out, lse


# ---- The backward pass of a plan -------------------------------------------------------------------------------------

_BACKWARD_REPEATS_LIMIT = 16  # strides of dout for which a plan has repeats


def _empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return buffers for dq, dk, dv: (their owners, the three gradients as views of these).

    Packed gradients are laid out like flash_attn's packed inputs, with the 3 or 2 before the heads: (..., 3, H, D).
    """
    packing = options.packing
    dtype = getattr(torch, options.out_dtype) if options.out_dtype else q.dtype
    if packing == "":
        grads = (torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype))
        return list(grads), grads
    first = q if packing == "qkv" else k
    n_packed = len(packing)  # a letter for each packed tensor
    packed = first.new_empty((*first.shape[:-2], n_packed, *first.shape[-2:]), dtype=dtype)
    slices = packed.unbind(-3)
    if packing == "qkv":
        return [packed], (slices[0], slices[1], slices[2])
    dq = torch.empty_like(q, dtype=dtype)
    return [dq, packed], (dq, slices[0], slices[1])


def _empty_feature_gradients(options: AttentionOptions) -> dict[str, torch.Tensor | None]:
    """Return buffers for the gradients of optional tensors by name, None for a gradient that is not wanted."""
    buffers = {}
    for feature in GRADIENTS:
        x = getattr(options, feature.name)
        asked = not feature.gradient_if or getattr(options, feature.gradient_if)
        needs_buffer = x is not None and x.is_floating_point() and asked
        buffers[feature.gradient] = torch.empty_like(x) if needs_buffer else None
    return buffers


def _as_kernels_read(dout: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return dout, or a copy if it is expanded, as from out.sum() or out.sum(2), and its strides.

    All kernels need a last stride of 1. Not all take a stride of 0: Ascend's compiler divides by the stride of rows,
    and no GPU has shown yet that TMA copies rows without a distance.
    """
    stride = dout.stride()
    if stride[-1] != 1 or 0 in stride:
        dout = dout.contiguous()
        stride = dout.stride()
    return dout, stride


def _backward_into(
    plan: Plan,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    grads: AttentionGradients,
    lengths: Lengths,
    options: AttentionOptions,
    aligned: bool = True,
) -> None:
    """Fill the gradients of one call. `dout`: as `_as_kernels_read` returns it. `saved`: (q, k, v, out, lse).
    `aligned`: the problem's `aligned_gradients`."""
    q, k, v, out, lse = saved
    problem, kernel = plan.backward(aligned)
    if plan.sees_no_key or (options.layout == VARLEN and not kernel.clears):
        for x in given_tensors(*grads[:3], grads.delta):
            x.zero_()
    if plan.sees_no_key:
        for x in given_tensors(*(getattr(grads, name) for name in _FEATURE_GRADIENTS)):
            x.zero_()
        if grads.dsinks is not None:  # without keys the log-sum-exp is the sink itself
            all_but_heads = (0, 2) if lse.dim() == 3 else (1,)
            dlse = torch.zeros_like(lse) if dlse is None else _filled_outside_sequences(dlse, q, lengths, 0.0)
            sinks = options.sinks
            assert sinks is not None, "dsinks are asked for where there are sinks"
            grads.dsinks.copy_(torch.where(sinks == -_INF, 0.0, dlse.sum(all_but_heads) + (sinks - sinks)))
        return
    kernel.launch(problem, bind(q, k, v, lengths, options), out, lse, dout, dlse, grads)


def _run_backward(
    plan: Plan,
    saved: Sequence[torch.Tensor],
    addresses: Sequence[int],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:
    """Run the backward pass of a plan. `saved`: q, k, v, out, lse, the tensors of `plan.names`; `addresses`: theirs.

    Returns the owners of dq, dk and dv, filled up to three with None, then the gradients of optional tensors, one for
    each row of `GRADIENTS`, None if it is not wanted.
    """
    dout, stride = _as_kernels_read(dout)
    repeats = plan.backward_repeats
    repeat = repeats.get(stride) if dlse is None else None
    if repeat is not None:
        repeated = repeat([*addresses, dout.data_ptr()], saved)
        if repeated is not None:
            return repeated
    q, k, v, out, lse, *optional = saved
    lengths, options = with_tensors(plan.lengths, plan.options, plan.names, optional)
    owners, qkv = _empty_gradients(q, k, v, options)
    rest = _empty_feature_gradients(options)
    gradients = AttentionGradients(*qkv, **rest)  # type: ignore[arg-type]
    _backward_into(plan, dout, dlse, (q, k, v, out, lse), gradients, lengths, options)
    # Repeats are prepared for aligned tensors alone.
    aligned = not (addresses[0] | addresses[1] | addresses[2] | dout.data_ptr()) & 15
    if dlse is None and aligned and not plan.sees_no_key:
        # The first such call leaves None under its stride, and the second one makes the repeat: most lengths come once.
        if stride in repeats:
            problem, kernel = plan.backward()
            tensors = bind(q, k, v, lengths, options)
            if kernel.repeat is not None and _binds_without_copies(tensors, q, k, v, *optional):
                repeats[stride] = kernel.repeat(problem, tensors, out, lse, dout, gradients, owners)
        else:
            if len(repeats) >= _BACKWARD_REPEATS_LIMIT:
                repeats.clear()
            repeats[stride] = None
    return [*owners, *(None,) * (3 - len(owners)), *rest.values()]


# ---- The operators: here alone a call is flat ------------------------------------------------------------------------

# Behind q, k and v every attention operator takes the rows of `diyfa.features` (SCHEMA). `variant` names a forward
# kernel. The backward pass takes its own kernel of that name, if there is one.
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_lib = torch.library.Library("diyfa", "DEF")
_lib.define(f"attention_fwd(Tensor q, Tensor? k, Tensor? v, str packing, {SCHEMA}) -> (Tensor out, Tensor lse)")
# q, k, v of this operator are views, and `packing` says which of their gradients share one tensor.
_lib.define(
    f"attention_bwd(Tensor dout, Tensor? dlse, {_SAVED}, str packing, {SCHEMA}) "
    f"-> (Tensor dq, Tensor dk, Tensor dv, {', '.join(f'Tensor {name}' for name in _FEATURE_GRADIENTS)})"
)
_lib.define(
    f"attention_bwd_out(Tensor dout, Tensor? dlse, {_SAVED}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
    f"Tensor(d!) delta, {SCHEMA}) -> ()"
)


def _forward_by_look_up(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> Pair:
    """Run the forward pass of a call that comes through an operator, or could have."""
    plan, addresses = operator_plan(q, k, v, lengths, options)
    return _run_forward(plan, q, k, v, given_tensors(*optional_tensors(lengths, options)), addresses)


def _backward_by_look_up(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    lengths: Lengths,
    options: AttentionOptions,
) -> list[torch.Tensor | None]:
    """Run the backward pass of a call that comes through an operator, or could have. Returns as `_run_backward`."""
    q, k, v, _, _ = saved
    plan, _ = operator_plan(q, k, v, lengths, options)
    tensors = (*saved, *given_tensors(*optional_tensors(lengths, options)))
    return _run_backward(plan, tensors, [*map(torch.Tensor.data_ptr, tensors)], dout, dlse)


def _attention_fwd(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Pair:
    return _forward_by_look_up(*UNPACK[packing](q, k, v), *unpack(features, packing))


def _attention_bwd(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
    """Return all gradients. An operator returns tensors only: one without elements stands for no gradient."""
    packing, *features = rest
    gradients = _backward_by_look_up(dout, dlse, (q, k, v, out, lse), *unpack(features, packing))
    return tuple(dout.new_empty(0) if x is None else x for x in gradients)


def _attention_bwd_out(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> None:
    dq, dk, dv, delta, *features = rest
    grads, saved = AttentionGradients(dq, dk, dv, delta=delta), (q, k, v, out, lse)
    lengths, options = unpack(features)
    plan, _ = operator_plan(q, k, v, lengths, options)
    dout, _ = _as_kernels_read(dout)
    _backward_into(plan, dout, dlse, saved, grads, lengths, options, aligned=is_aligned(dq, dk, dv))


def _attention_fwd_fake(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Any:
    q, k, v = UNPACK[packing](q, k, v)
    _, options = unpack(features)
    return empty_output(q, v.shape[-1], options.out_dtype), empty_lse(q, options.layout)


def _attention_bwd_fake(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
    packing, *features = rest
    _, options = unpack(features, packing)
    owners, _ = _empty_gradients(q, k, v, options)
    gradients = (*owners, *(None,) * (3 - len(owners)), *_empty_feature_gradients(options).values())
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


for _name, _implementation, _fake in (
    ("attention_fwd", _attention_fwd, _attention_fwd_fake),
    ("attention_bwd", _attention_bwd, _attention_bwd_fake),
    ("attention_bwd_out", _attention_bwd_out, lambda *arguments: None),  # the gradients are given
):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diyfa::{_name}", _fake, lib=_lib)
_fwd = torch.ops.diyfa.attention_fwd.default
_bwd = torch.ops.diyfa.attention_bwd.default


def forward(q: Any, k: Any, v: Any, lengths: Lengths, options: AttentionOptions) -> Pair:
    """Call the forward operator, or directly its function if nothing has to see the operator. q, k and v are views."""
    if runs_eagerly(q, k, v, *given_tensors(*optional_tensors(lengths, options))):
        return _forward_by_look_up(q, k, v, lengths, options)
    return _fwd(q, k, v, "", *pack(lengths, options))


def differentiate(
    grads: tuple[torch.Tensor | None, ...],
    owners: tuple[Any, ...],
    results: Pair,
    lengths: Lengths,
    options: AttentionOptions,
) -> Any:
    """Return `_backward_by_look_up` of one call, called directly or through the operator. `results`: out and lse."""
    dout, dlse = grads
    if dout is None:
        dout = torch.zeros_like(results[0])
    saved = (*UNPACK[options.packing](*owners), *results)
    if runs_eagerly(*given_tensors(dout, dlse, *owners, *optional_tensors(lengths, options))):
        return _backward_by_look_up(dout, dlse, saved, lengths, options)
    return _bwd(dout, dlse, *saved, options.packing, *pack(lengths, options))


# ---- Autograd --------------------------------------------------------------------------------------------------------


class _Unplanned(NamedTuple):
    """The arguments, without tensors, of a call without a plan. Its operators choose the kernels."""

    lengths: Lengths
    options: AttentionOptions
    names: tuple[str, ...]  # of the optional tensors


class _Attention(torch.autograd.Function):
    """Attention with gradients of q, k, v (or what packs them) and optional tensors from both outputs, out and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        call: Plan | _Unplanned,
        return_lse: bool,
        addresses: Sequence[int],
        *optional: Any,
    ) -> Any:
        """`addresses`: of q, k and v themselves and the optional tensors, for a plan."""
        views = UNPACK[call.options.packing](q, k, v)
        if type(call) is Plan:
            out, lse = _run_forward(call, *views, optional, addresses)
            ctx.addresses = [*addresses[:3], out.data_ptr(), lse.data_ptr(), *addresses[3:]]
        else:
            out, lse = forward(*views, *with_tensors(call.lengths, call.options, call.names, optional))
            ctx.addresses = None
        ctx.save_for_backward(q, k, v, out, lse, *optional)
        ctx.call = call
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)  # an unused lse costs no gradient of zeros
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[torch.Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors  # read once: an unpacking hook may refuse a second time
        if dlse is None and may_be_read(dout) and not torch.is_grad_enabled() and ctx.addresses and is_unseen():
            packing, tensors = call.options.packing, saved
            if packing:
                tensors = (*UNPACK[packing](*saved[:3]), *saved[3:])
            addresses = [*map(torch.Tensor.data_ptr, tensors)]
            # With other addresses, hooks have packed and unpacked the saved tensors.
            if addresses == ctx.addresses and call.is_usable():
                return _by_argument(call, _run_backward(call, tensors, addresses, dout))
        gradients = _by_argument(call, _differentiate(call, dout, dlse, *saved))
        # An operator returns a tensor without elements where there is no gradient.
        return tuple([x if need else None for x, need in zip(gradients, ctx.needs_input_grad, strict=True)])


_apply_unseen = direct_apply(_Attention)


def _by_argument(call: Plan | _Unplanned, results: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the results of a backward pass, one for each argument of `_Attention.forward`."""
    gradients = (*results[:3], None, None, None)  # none of call, return_lse and addresses
    if not call.names:
        return gradients
    feature_gradients = dict(zip(DIFFERENTIABLE, results[3:], strict=True))
    return (*gradients, *map(feature_gradients.get, call.names))


@once_differentiable
def _differentiate(
    call: Plan | _Unplanned, dout: torch.Tensor | None, dlse: torch.Tensor | None, *saved: Any
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward pass of a call that something observes, or that has a gradient of lse, too.

    `saved` are arguments of their own, so that `once_differentiable` sees that the gradients depend on them.
    """
    lengths, options = with_tensors(call.lengths, call.options, call.names, saved[5:])
    return tuple(differentiate((dout, dlse), saved[:3], saved[3:5], lengths, options))


def _apply(q: Any, k: Any, v: Any, lengths: Lengths, options: AttentionOptions) -> Pair:
    """Apply the autograd function without a plan."""
    optional = given_tensors(*optional_tensors(lengths, options))
    return _Attention.apply(q, k, v, _Unplanned(*without_tensors(lengths, options)), True, (), *optional)


def _attention_fwd_autograd(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Pair:
    """Run the operator under autograd, in a traced program.

    The inputs decide whether gradients are wanted, not the options: a program may be traced without gradients and then
    trained, or the other way round.
    """
    if differentiates_forward() or wants_grad(q, k, v, *tensors_among(features)):
        lengths, options = unpack(features, packing)
        asked = [gate for name, gate in DIFFERENTIABLE.items() if gate and wants_grad(getattr(options, name))]
        gates: dict[str, Any] = {gate: gate in asked for gate in DIFFERENTIABLE.values() if gate}
        options = options._replace(needs_grad=True, **gates)
        return _apply(q, k, v, lengths, options)
    if runs_eagerly(*given_tensors(q, k, v, *tensors_among(features))):  # in a compiled program
        return _attention_fwd(q, k, v, packing, *features)
    with below_autograd():
        return _fwd(q, k, v, packing, *features)


def _attention_bwd_autograd(*arguments: Any) -> Any:
    """Run the backward operator. Differentiating its results is an error."""

    @once_differentiable  # it is for methods of autograd functions, whose first argument is their context
    def call(_context: None, *arguments: Any) -> Any:
        with below_autograd():
            return _bwd(*arguments)

    return call(None, *arguments)


_lib.impl("attention_fwd", _attention_fwd_autograd, "Autograd")
_lib.impl("attention_bwd", _attention_bwd_autograd, "Autograd")


# ---- The entrances ---------------------------------------------------------------------------------------------------


def run_plan(
    plan: Plan,
    owners: tuple[Any, ...],
    optional: Sequence[torch.Tensor | None],
    addresses: Sequence[int],
    return_lse: bool,
) -> Any:
    """Run a call that `plan` was made for -> out, or (out, lse). `owners`: three, None where fewer pack q, k and v.

    `optional`: all optional tensors or None, in the order of the table, or () if none is given. `addresses`: those of
    q, k and v, then perhaps others.
    """
    present: Sequence[torch.Tensor] = ()
    if plan.names:
        present = [x for x in optional if x is not None]
        if len(present) != len(plan.names):
            # Only `rng_state` can differ from the plan. With dropout and no state, draw one. Without dropout nothing
            # reads a given state: leave it out.
            tensors = list(optional or _NO_TENSORS)
            tensors[_STATE_INDEX] = new_rng_state(owners[0].device) if tensors[_STATE_INDEX] is None else None
            present = [x for x in tensors if x is not None]
        addresses = [*addresses[:3], *map(torch.Tensor.data_ptr, present)]
    elif optional:  # the state of a call without dropout
        addresses = addresses[:3]
    if plan.problem.needs_grad:
        return _apply_unseen(*owners, plan, return_lse, addresses, *present)
    packing = plan.options.packing
    q, k, v = UNPACK[packing](*owners) if packing else owners
    pair = _run_forward(plan, q, k, v, present, addresses)
    return (pair[0], pair[1]) if return_lse else pair[0]


def sees_operators_only() -> bool:
    """Return whether a graph is traced or torch.func.vmap is active: both must see operators, which then come to the
    operators' own Autograd kernels."""
    return torch.compiler.is_compiling() or (is_transformed() and not differentiates_forward())


def attend(q: Any, k: Any, v: Any, lengths: Lengths, options: AttentionOptions) -> Pair:
    """Compute attention of checked inputs without a plan -> (out, lse), differentiable if `options` say so.

    q, k and v are the owners: with `options.packing` some are None.
    """
    if sees_operators_only():
        return _fwd(q, k, v, options.packing, *pack(lengths, options))
    if differentiates_forward() or options.needs_grad:
        return _apply(q, k, v, lengths, options)
    return forward(*UNPACK[options.packing](q, k, v), lengths, options)
