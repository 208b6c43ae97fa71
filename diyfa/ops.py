"""The PyTorch operators `torch.ops.diyfa.*`: schemas, fake kernels and the one autograd of the project.

Backend-neutral operators: `attention_fwd`, `attention_bwd`, `attention_bwd_out` (into given buffers), `matmul`. Their
implementation is the same Python function for every device; it describes the call as a problem, lets the registry
choose a kernel, allocates the results and launches it. They are defined with `torch.library.Library` because that costs
a third of `custom_op` for each call. Their autograd is a `torch.autograd.Function`, which eager calls use directly (a
sixth of what `register_autograd` costs). It is also the operators' kernel for the Autograd key, so that whatever traces
a call (torch.compile, torch.export) records the operator alone and can still differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from diyfa import registry
from diyfa.plain import Plan, is_plain, is_plain_gradient, is_unseen
from diyfa.problem import (
    LAYOUTS,
    VARLEN,
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    Backend,
    Kernel,
    MatmulProblem,
    as_bhsd,
    empty_output,
)
from diyfa.validation import dtype_name

Pair = tuple[torch.Tensor, torch.Tensor]
_INF = float("inf")

# What every attention operator takes after q, k and v. `variant` names a forward kernel; the backward takes its
# own of that name, where there is one.
_FEATURES = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seq_lens, Tensor? alibi_slopes, Tensor? attn_bias, "
    "Tensor? sinks, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, float sm_scale, SymInt window_left, "
    "SymInt window_right, float softcap, float dropout_p, str layout, bool deterministic, bool needs_grad, "
    "bool bias_grad, str backend, str variant"
)
_FEATURE_NAMES = tuple(declared.split()[-1] for declared in _FEATURES.split(", "))
_TENSOR_FEATURES = _FEATURES.count("Tensor?")  # the first of them
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_lib = torch.library.Library("diyfa", "DEF")
# `packing` says which of q, k, v share one tensor: "" none, "kv" (k is both, v None) or "qkv" (q is all, k, v None).
_lib.define(f"attention_fwd(Tensor q, Tensor? k, Tensor? v, str packing, {_FEATURES}) -> (Tensor out, Tensor lse)")
# Here q, k, v are views, and `packing` says which of their gradients share one tensor.
_lib.define(
    f"attention_bwd(Tensor dout, Tensor? dlse, {_SAVED}, str packing, {_FEATURES}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_lib.define(
    f"attention_bwd_out(Tensor dout, Tensor? dlse, {_SAVED}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
    f"Tensor(d!) delta, {_FEATURES}) -> ()"
)
_lib.define(
    "matmul(Tensor a, Tensor b, int[]? block, bool autotune, str precision, ScalarType compute_dtype, "
    "ScalarType out_dtype, str backend) -> Tensor"
)


class Scalars(NamedTuple):
    """The arguments of a call that decide, besides the tensors' shapes, which kernel runs it."""

    max_seqlen_q: int
    max_seqlen_k: int
    window_left: int
    window_right: int
    softcap: float
    dropout: bool
    layout: str
    deterministic: bool
    needs_grad: bool
    bias_grad: bool


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Base addresses and all strides but the last are multiples of 16 bytes."""
    for x in tensors:
        step = 16 // x.element_size()
        if x.data_ptr() % 16 or any(s % step for s in x.stride()[:-1]):
            return False
    return True


def bounds_that_exclude(left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """A window's bounds, -1 for those beyond every key: the last query stands at key Sk - 1, the first at Sk - Sq."""
    return -1 if 0 < left >= seqlen_k else left, -1 if 0 < right >= seqlen_q > 0 else right


def describe_attention(backend: Backend, tensors: AttentionTensors, scalars: Scalars) -> AttentionProblem:
    """The problem of one call."""
    q, k, v = tensors.q, tensors.k, tensors.v
    q_shape, k_shape, layout = q.shape, k.shape, scalars.layout
    if layout == VARLEN:
        assert tensors.cu_seqlens_q is not None, "a varlen call comes with cu_seqlens"
        batch = tensors.cu_seqlens_q.shape[0] - 1
        total_q, heads_q, head_dim = q_shape
        total_k, heads_kv, _ = k_shape
        # Bounded by the rows there are: a too large maximum costs programs, not correctness.
        seqlen_q, seqlen_k = min(scalars.max_seqlen_q, total_q), min(scalars.max_seqlen_k, total_k)
    else:
        b, h, s, d = LAYOUTS[layout]
        batch, heads_q, seqlen_q, head_dim = q_shape[b], q_shape[h], q_shape[s], q_shape[d]
        heads_kv, seqlen_k = k_shape[h], k_shape[s]
        total_q = total_k = 0
    left, right = bounds_that_exclude(scalars.window_left, scalars.window_right, seqlen_q, seqlen_k)
    return AttentionProblem(
        backend.device_type,
        backend.arch(q.device),
        dtype_name(q.dtype),
        layout,
        batch,
        heads_q,
        heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        v.shape[-1],
        left,
        right,
        scalars.softcap,
        tensors.seq_lens is not None,
        tensors.alibi_slopes is not None,
        "" if tensors.attn_bias is None else dtype_name(tensors.attn_bias.dtype),
        tensors.sinks is not None,
        scalars.dropout,
        scalars.deterministic,
        scalars.needs_grad,
        _is_aligned(q, k, v),
        total_q,
        total_k,
        scalars.bias_grad,
    )


# What a call's shapes, strides and options decided, so that a repeated call decides nothing.
_decided: dict[tuple[Any, ...], tuple[AttentionProblem, Kernel]] = {}
_DECIDED_LIMIT = 4096  # changing lengths make new entries without end


def _decide(
    op: str, tensors: AttentionTensors, scalars: Scalars, backend: str, variant: str
) -> tuple[AttentionProblem, Kernel]:
    """The problem of a call and the kernel that runs it. Raises ValueError when none does."""
    q, k, v = tensors.q, tensors.k, tensors.v
    key = (
        op,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        q.dtype,
        q.device,
        None if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0],
        tensors.seq_lens is None,
        tensors.alibi_slopes is None,
        None if tensors.attn_bias is None else tensors.attn_bias.dtype,
        tensors.sinks is None,
        scalars,
        backend or registry.forced_backend(),
        variant,
    )
    decided = _decided.get(key)
    if decided is None:
        chosen = registry.resolve_backend(q.device, backend)
        problem = describe_attention(chosen, tensors, scalars)
        decided = problem, registry.choose(op, problem, chosen, registry.variant_of(op, chosen, variant))
        if op == "attention_fwd" and problem.needs_grad:  # refuse now rather than in the backward pass
            registry.choose("attention_bwd", problem, chosen, registry.variant_of("attention_bwd", chosen, variant))
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        _decided[key] = decided
    return decided


def _bind(q: Any, k: Any, v: Any, features: tuple[Any, ...]) -> tuple[AttentionTensors, Scalars, str, str]:
    """The operators' positional arguments after q, k, v -> what they mean; the order is that of `_FEATURES`."""
    (
        cu_seqlens_q, cu_seqlens_k, seq_lens, alibi_slopes, attn_bias, sinks, rng_state, max_seqlen_q, max_seqlen_k,
        sm_scale, window_left, window_right, softcap, dropout_p, layout, deterministic, needs_grad, bias_grad, backend,
        variant,
    ) = features  # fmt: skip
    # Small vectors are read by plain index; only odd callers pass strided ones.
    if alibi_slopes is not None and not alibi_slopes.is_contiguous():
        alibi_slopes = alibi_slopes.contiguous()
    if sinks is not None and not sinks.is_contiguous():
        sinks = sinks.contiguous()
    if seq_lens is not None and not seq_lens.is_contiguous():
        seq_lens = seq_lens.contiguous()
    if cu_seqlens_k is None:  # the same offsets on both sides
        cu_seqlens_k = cu_seqlens_q
    tensors = AttentionTensors(
        q, k, v, sm_scale, seq_lens, alibi_slopes, attn_bias, sinks, cu_seqlens_q, cu_seqlens_k, rng_state, dropout_p
    )
    scalars = Scalars(
        max_seqlen_q, max_seqlen_k, window_left, window_right, softcap, dropout_p > 0.0, layout, deterministic,
        needs_grad, bias_grad,
    )  # fmt: skip
    return tensors, scalars, backend, variant


def _empty_lse(q: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == VARLEN:
        shape: tuple[int, ...] = (q.shape[1], q.shape[0])
    else:
        b, h, s, _ = LAYOUTS[layout]
        shape = (q.shape[b], q.shape[h], q.shape[s])
    return q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _computes_nothing(tensors: AttentionTensors, scalars: Scalars) -> bool:
    """Whether no query of the call can see a key, so that there is nothing to launch."""
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        return True
    if scalars.layout != VARLEN:
        return False
    assert tensors.cu_seqlens_q is not None, "a varlen call comes with cu_seqlens"
    return tensors.cu_seqlens_q.shape[0] == 1 or scalars.max_seqlen_q == 0 or scalars.max_seqlen_k == 0


def _only_rows_of_sequences(x: torch.Tensor, tensors: AttentionTensors, other: float) -> torch.Tensor:
    """x (H, Tq), or any x that belongs to no packed sequences, with `other` in rows that no sequence covers."""
    ends = tensors.cu_seqlens_q
    if ends is None:
        return x
    rows = torch.arange(tensors.q.shape[0], device=x.device)
    return torch.where((rows >= ends[0]) & (rows < ends[-1]), x, other)


def _fill_from_sinks(
    sinks: torch.Tensor, tensors: AttentionTensors, layout: str, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """out and lse of rows that see a sink and no key: 0 and the sink. A sink of -inf is none, so there lse is +inf; one
    of +inf (or NaN) makes both NaN, as a softmax over an infinite score is."""
    alone = torch.where(sinks == -_INF, _INF, sinks - sinks + sinks)
    lse.copy_(_only_rows_of_sequences(alone[:, None], tensors, _INF))
    nothing = torch.where(alone == alone, 0.0, alone)
    heads_first = out.transpose(0, 1) if layout == VARLEN else as_bhsd(out, layout)
    heads_first.copy_(_only_rows_of_sequences(nothing[:, None], tensors, 0.0)[..., None])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *features: Any) -> Pair:
    tensors, scalars, backend, variant = _bind(q, k, v, features)
    problem, kernel = _decide("attention_fwd", tensors, scalars, backend, variant)
    out, lse = empty_output(q, v.shape[-1]), _empty_lse(q, scalars.layout)
    nothing = _computes_nothing(tensors, scalars)
    if nothing or problem.varlen:  # rows that no sequence covers are written by no kernel
        out.zero_()
        lse.fill_(float("inf"))
    if nothing and tensors.sinks is not None:
        _fill_from_sinks(tensors.sinks, tensors, scalars.layout, out, lse)
    if not nothing:
        kernel.launch(problem, tensors, out, lse)
    return out, lse


def _attention_fwd(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Pair:
    return _attend(*_UNPACK[packing](q, k, v), *features)


def plan_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    sm_scale: float,
    window: tuple[int, int],
    softcap: float,
    deterministic: bool,
    backend: str,
    variant: str,
    packing: str = "",
) -> Plan | None:
    """How checked inputs without optional tensors are run; None if there is nothing to launch."""
    backend = backend or registry.forced_backend()
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    features = (
        *(None,) * _TENSOR_FEATURES, 0, 0, sm_scale, *window, float(softcap), 0.0, layout, deterministic, needs_grad,
        False, backend, variant,
    )  # fmt: skip
    tensors, scalars, _, _ = _bind(q, k, v, features)
    if q.is_meta or _computes_nothing(tensors, scalars):
        return None
    problem, kernel = _decide("attention_fwd", tensors, scalars, backend, variant)
    return Plan(problem, kernel, features, sm_scale, packing)


def _run_forward(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    if plan.repeat is not None:
        pair = plan.repeat(q, k, v)
        if pair is not None:
            return pair
    problem, kernel = plan.problem, plan.kernel
    tensors = AttentionTensors(q, k, v, plan.sm_scale)
    out, lse = empty_output(q, problem.head_dim_v), _empty_lse(q, problem.layout)
    kernel.launch(problem, tensors, out, lse)
    if kernel.repeat is not None:
        plan.repeat = kernel.repeat(problem, tensors, out, lse)
    return out, lse


_BACKWARD_REPEATS_LIMIT = 16  # ways in which a gradient lies in memory


def _run_backward(
    plan: Plan, saved: tuple[torch.Tensor, ...], addresses: tuple[int, ...], dout: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """What owns dq, dk, dv of a plain call, three tensors or None; `saved`: its (q, k, v, out, lse), unchanged."""
    key = (dout.stride(), registry.forced_backend())
    repeat = plan.backward_repeats.get(key)
    if repeat is not None:
        grads = repeat(saved, addresses, dout)
        if grads is not None:
            return grads
    q, k, v, out, lse = saved
    owners = _gradients(dout, None, *saved, plan.packing, *plan.features)[:3]
    tensors, scalars, backend, variant = _bind(q, k, v, plan.features)
    problem, kernel = _decide("attention_bwd", tensors, scalars, backend, variant)
    if kernel.repeat is not None and dout.stride(-1) == 1:  # else it was copied first
        gradients = AttentionGradients(*_UNPACK[plan.packing](*owners))
        repeat = kernel.repeat(problem, tensors, out, lse, dout, gradients, _given(*owners))
        if repeat is not None:
            if len(plan.backward_repeats) >= _BACKWARD_REPEATS_LIMIT:
                plan.backward_repeats.clear()
            plan.backward_repeats[key] = repeat
    return tuple(owners)


def _empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: str
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Buffers for dq, dk, dv -> (the tensors that own memory, the three gradients in them).

    Packed ones lie like flash_attn's packed inputs, with the 3 or 2 before the heads: (..., 3, H, D).
    """
    if packing == "":
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        return list(grads), grads
    first = q if packing == "qkv" else k
    parts = len(packing)
    packed = first.new_empty((*first.shape[:-2], parts, *first.shape[-2:]))
    slices = packed.unbind(-3)
    if packing == "qkv":
        return [packed], (slices[0], slices[1], slices[2])
    dq = torch.empty_like(q)
    return [dq, packed], (dq, slices[0], slices[1])


def _backward_into(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    grads: AttentionGradients,
    features: tuple[Any, ...],
) -> None:
    """Fill the gradients of one call; `saved` is (q, k, v, out, lse)."""
    q, k, v, out, lse = saved
    tensors, scalars, backend, variant = _bind(q, k, v, features)
    nothing = _computes_nothing(tensors, scalars)
    if nothing or scalars.layout == VARLEN:
        for x in _given(*grads[:3], grads.delta):
            x.zero_()
    if nothing:
        if grads.dbias is not None:
            grads.dbias.zero_()
        if grads.dsinks is not None:  # all that is left of the log-sum-exp is the sink itself
            rest = (0, 2) if lse.dim() == 3 else (1,)
            dlse = torch.zeros_like(lse) if dlse is None else _only_rows_of_sequences(dlse, tensors, 0.0)
            assert tensors.sinks is not None, "dsinks are asked for where there are sinks"
            sinks = tensors.sinks
            grads.dsinks.copy_(torch.where(sinks == -_INF, 0.0, dlse.sum(rest) + (sinks - sinks)))
        return
    if dout.stride(-1) != 1:  # an expanded gradient, as from out.sum()
        dout = dout.contiguous()
    problem, kernel = _decide("attention_bwd", tensors, scalars, backend, variant)
    kernel.launch(problem, tensors, out, lse, dout, dlse, grads)


def _gradients(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> list[torch.Tensor | None]:
    """[what owns dq, dk, dv: three tensors, two or one and None for the rest, dbias, dsinks]; the operator's inputs."""
    saved, packing, features = rest[:5], rest[5], rest[6:]
    q, k, v = saved[:3]
    tensors, scalars, _, _ = _bind(q, k, v, features)
    owners, (dq, dk, dv) = _empty_gradients(q, k, v, packing)
    dbias = torch.empty_like(tensors.attn_bias) if tensors.attn_bias is not None and scalars.bias_grad else None
    dsinks = None if tensors.sinks is None else torch.empty_like(tensors.sinks)
    _backward_into(dout, dlse, saved, AttentionGradients(dq, dk, dv, dbias, dsinks), features)
    return [*owners, *(None,) * (3 - len(owners)), dbias, dsinks]


def _attention_bwd(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
    """An operator returns tensors only: where there is no gradient, one without elements."""
    return tuple(dout.new_empty(0) if x is None else x for x in _gradients(dout, dlse, *rest))


def _attention_bwd_out(dout: torch.Tensor, dlse: torch.Tensor | None, *rest: Any) -> None:
    saved, (dq, dk, dv, delta), features = rest[:5], rest[5:9], rest[9:]
    _backward_into(dout, dlse, saved, AttentionGradients(dq, dk, dv, delta=delta), features)


def _attention_fwd_fake(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Any:
    q, k, v = _UNPACK[packing](q, k, v)
    _, scalars, _, _ = _bind(q, k, v, features)
    return empty_output(q, v.shape[-1]), _empty_lse(q, scalars.layout)


def _attention_bwd_fake(dout: Any, dlse: Any, *rest: Any) -> Any:
    (q, k, v), packing, features = rest[:3], rest[5], rest[6:]
    tensors, scalars, _, _ = _bind(q, k, v, features)
    owners, _ = _empty_gradients(q, k, v, packing)
    owners += [q.new_empty(0) for _ in range(3 - len(owners))]
    dbias = tensors.attn_bias if scalars.bias_grad else None
    return (
        *owners,
        q.new_empty(0) if dbias is None else torch.empty_like(dbias),
        q.new_empty(0) if tensors.sinks is None else torch.empty_like(tensors.sinks),
    )


def _attention_bwd_out_fake(*arguments: Any) -> None:
    """Nothing to describe: the gradients are given."""


for _name, _implementation, _fake in (
    ("attention_fwd", _attention_fwd, _attention_fwd_fake),
    ("attention_bwd", _attention_bwd, _attention_bwd_fake),
    ("attention_bwd_out", _attention_bwd_out, _attention_bwd_out_fake),
):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diyfa::{_name}", _fake, lib=_lib)
_fwd = torch.ops.diyfa.attention_fwd.default
_bwd = torch.ops.diyfa.attention_bwd.default
_bwd_out = torch.ops.diyfa.attention_bwd_out.default

# How q, k, v come out of the tensors that own them; the packed ones have 3 or 2 before the heads.
_UNPACK: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "": lambda q, k, v: (q, k, v),
    "kv": lambda q, kv, _: (q, *kv.unbind(-3)),
    "qkv": lambda qkv, _, __: qkv.unbind(-3),
}


def _given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [x for x in tensors if x is not None]


def _forward(q: Any, k: Any, v: Any, *features: Any) -> Pair:
    """The forward operator, or at once what it would call."""
    if is_plain(q, k, v, *_given(*features[:_TENSOR_FEATURES])):
        return _attend(q, k, v, *features)
    return _fwd(q, k, v, "", *features)


class _Attention(torch.autograd.Function):
    """Attention with gradients of q, k, v (or what packs them), attn_bias and sinks from both outputs, out and lse."""

    @staticmethod
    def forward(ctx: Any, packing: str, q: Any, k: Any, v: Any, *features: Any) -> Pair:
        out, lse = _forward(*_UNPACK[packing](q, k, v), *features)
        ctx.set_materialize_grads(False)  # an unused lse costs no gradient of zeros
        ctx.save_for_backward(q, k, v, out, lse, *features[:_TENSOR_FEATURES])
        ctx.packing = packing
        ctx.scalars = features[_TENSOR_FEATURES:]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *optional = ctx.saved_tensors
        attn_bias, sinks = optional[4:6]
        dq, dk, dv, dbias, dsinks = _differentiate(grads, (q, k, v), out, lse, ctx.packing, optional, ctx.scalars)
        owners = (dq, None if k is None else dk, None if v is None else dv)
        dbias = None if attn_bias is None or not ctx.needs_input_grad[8] else dbias
        dsinks = None if sinks is None else dsinks
        return (None, *owners, *(None,) * 4, dbias, dsinks, None, *(None,) * len(ctx.scalars))


def _differentiate(
    grads: tuple[torch.Tensor | None, ...],
    owners: tuple[Any, ...],
    out: torch.Tensor,
    lse: torch.Tensor,
    packing: str,
    optional: Sequence[torch.Tensor | None],
    scalars: tuple[Any, ...],
) -> Sequence[torch.Tensor | None]:
    """`_gradients` of one call; `owners` are what packs q, k, v, `optional` the tensors among the features."""
    dout, dlse = grads
    if dout is None:
        dout = torch.zeros_like(out)
    backward = _gradients if is_plain(*_given(dout, dlse, *owners, *optional)) else _bwd
    return backward(dout, dlse, *_UNPACK[packing](*owners), out, lse, packing, *optional, *scalars)


def _wants_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attention_fwd_autograd(q: Any, k: Any, v: Any, packing: str, *features: Any) -> Pair:
    """The operator as autograd sees it: called from a traced program, which may be trained though it was traced not to
    be, or the other way round."""
    if _differentiates_forward() or _wants_grad(q, k, v, *features[:_TENSOR_FEATURES]):
        now = dict(zip(_FEATURE_NAMES, features, strict=True))
        now.update(needs_grad=True, bias_grad=_wants_grad(now["attn_bias"]))
        return _Attention.apply(packing, q, k, v, *now.values())
    with torch._C._AutoDispatchBelowAutograd():
        return _fwd(q, k, v, packing, *features)


def _attention_bwd_autograd(*arguments: Any) -> Any:
    """Differentiating its results is an error."""

    @once_differentiable
    def below(_: None, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _bwd(*arguments)

    return below(None, *arguments)


_lib.impl("attention_fwd", _attention_fwd_autograd, "Autograd")
_lib.impl("attention_bwd", _attention_bwd_autograd, "Autograd")


@once_differentiable
def _backward_of_planned(
    context: tuple[Plan, tuple[torch.Tensor, ...]], *grads: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    plan, (*owners, out, lse) = context
    optional, scalars = plan.features[:_TENSOR_FEATURES], plan.features[_TENSOR_FEATURES:]
    grads = tuple(_differentiate(grads, tuple(owners), out, lse, plan.packing, optional, scalars)[:3])
    # An operator returns a tensor without elements where there is no gradient.
    return *(None if x is None else grad for x, grad in zip(owners, grads, strict=True)), None, None


class _PlannedAttention(torch.autograd.Function):
    """`_Attention` of plain calls by their plan: what is not looked at needs few arguments and few saved tensors."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, plan: Plan, return_lse: bool) -> Any:
        owners = q, k, v
        if plan.packing:
            q, k, v = _UNPACK[plan.packing](q, k, v)
        out, lse = _run_forward(plan, q, k, v)
        ctx.save_for_backward(*owners, out, lse)
        ctx.plan = plan
        ctx.addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[torch.Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors  # asked for once: an unpacking hook may refuse a second time
        if dlse is None and is_plain_gradient(dout) and not torch.is_grad_enabled() and is_unseen():
            q, k, v, out, lse = inputs = saved
            if plan.packing:
                q, k, v = _UNPACK[plan.packing](q, k, v)
                inputs = q, k, v, out, lse
            addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
            if addresses == ctx.addresses:  # not packed and unpacked elsewhere meanwhile
                return *_run_backward(plan, inputs, addresses, dout), None, None
        return _backward_of_planned((plan, saved), dout, dlse)


# What `Function.apply` comes to for tensors that no transform of torch.func has seen.
_apply_planned = super(torch.autograd.Function, _PlannedAttention).apply


def run_plan(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    owners: tuple[torch.Tensor | None, ...] | None = None,
) -> Any:
    """Run a plain call equal to the one that `plan` was made of -> out, or (out, lse); `owners` packs q, k and v."""
    if plan.problem.needs_grad:
        return _apply_planned(*(owners or (q, k, v)), plan, return_lse)
    pair = _run_forward(plan, q, k, v)
    return pair if return_lse else pair[0]


def _is_transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def _differentiates_forward() -> bool:
    """Whether forward-mode differentiation is on; `autograd.Function` then refuses tangents, an operator drops them.

    Raises RuntimeError inside a transform of torch.func that differentiates: neither of the two can follow it.
    """
    if _is_transformed():
        functorch: Any = torch._C._functorch
        kinds = functorch.TransformType
        if any(level.key() in (kinds.Grad, kinds.Jvp) for level in functorch.get_interpreter_stack()):
            raise RuntimeError(
                "diyfa cannot be differentiated by torch.func (grad, vjp, jvp, jacrev, …): use torch.autograd, that is "
                "backward() or torch.autograd.grad, also of what torch.func.vmap returns"
            )
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()  # not inside a Function


def _sees_operators_only() -> bool:
    """Whether a graph is traced or torch.func.vmap is at work; the operators' own Autograd kernels serve both."""
    return torch.compiler.is_compiling() or (_is_transformed() and not _differentiates_forward())


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    layout: str,
    sm_scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seq_lens: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str = "",
    variant: str = "auto",
    packing: str = "",
) -> Pair:
    """Attention of checked inputs -> (out, lse), differentiable when an input requires a gradient.

    With `packing` "qkv", `q` is the packed tensor and k, v are None; with "kv", `k` packs keys and values.
    """
    needs_grad = bias_grad = False
    if torch.is_grad_enabled():
        bias_grad = attn_bias is not None and attn_bias.requires_grad
        needs_grad = (
            q.requires_grad
            or (k is not None and k.requires_grad)
            or (v is not None and v.requires_grad)
            or bias_grad
            or (sinks is not None and sinks.requires_grad)
        )
    backend = backend or registry.forced_backend()
    features = (
        cu_seqlens_q, cu_seqlens_k, seq_lens, alibi_slopes, attn_bias, sinks, rng_state, max_seqlen_q, max_seqlen_k,
        sm_scale, window[0], window[1], softcap, dropout_p, layout, deterministic, needs_grad, bias_grad, backend,
        variant,
    )  # fmt: skip
    if _sees_operators_only():
        return _fwd(q, k, v, packing, *features)
    if _differentiates_forward() or needs_grad:
        return _Attention.apply(packing, q, k, v, *features)
    return _forward(*_UNPACK[packing](q, k, v), *features)


def _is_matrix_aligned(x: torch.Tensor) -> bool:
    """One dimension has stride 1; the other stride (not 0) and the base address are multiples of 16 bytes."""
    step = 16 // x.element_size()
    rows, columns = x.stride()
    major = rows if columns == 1 and rows % step == 0 else columns if rows == 1 else 0
    return major > 0 and major % step == 0 and x.data_ptr() % 16 == 0


def _matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    block: list[int] | None,
    autotune: bool,
    precision: str,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    chosen = registry.resolve_backend(a.device, backend)
    problem = MatmulProblem(
        chosen.device_type,
        chosen.arch(a.device),
        dtype_name(a.dtype),
        dtype_name(compute_dtype),
        dtype_name(out_dtype),
        a.shape[0],
        b.shape[1],
        a.shape[1],
        precision,
        None if block is None else (block[0], block[1], block[2]),
        autotune,
        _is_matrix_aligned(a) and _is_matrix_aligned(b),
    )
    kernel = registry.choose("matmul", problem, chosen)
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros((problem.m, problem.n), dtype=out_dtype)
    return kernel.launch(problem, a, b)


def _matmul_fake(
    a: Any, b: Any, block: Any, autotune: Any, precision: Any, compute_dtype: Any, out_dtype: Any, backend: Any
) -> Any:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _matmul_autograd(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if _differentiates_forward() or _wants_grad(a, b):
        return _Matmul.apply(a, b, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _mm(a, b, *arguments)


_lib.impl("matmul", _matmul, "CompositeExplicitAutograd")
_lib.impl("matmul", _matmul_autograd, "Autograd")
torch.library.register_fake("diyfa::matmul", _matmul_fake, lib=_lib)
_mm = torch.ops.diyfa.matmul.default


def _multiply(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The operator, or at once what it would call."""
    return (_matmul if is_plain(a, b) else _mm)(a, b, *arguments)


class _Matmul(torch.autograd.Function):
    """c = a @ b; da = dc @ bᵀ and db = aᵀ @ dc by the same operator, in the inputs' dtype."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.arguments = arguments
        return _multiply(a, b, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, autotune, precision, compute_dtype, _, backend = ctx.arguments
        dc = grads[0].to(a.dtype)
        rest = (None, autotune, precision, compute_dtype, a.dtype, backend)
        da = matmul(dc, b.t(), *rest) if ctx.needs_input_grad[0] else None
        db = matmul(a.t(), dc, *rest) if ctx.needs_input_grad[1] else None
        return (da, db, *(None,) * len(ctx.arguments))


def matmul(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Matrix product of checked inputs; `arguments` in the order of the operator's schema."""
    if _sees_operators_only():
        return _mm(a, b, *arguments)
    if _differentiates_forward() or _wants_grad(a, b):
        return _Matmul.apply(a, b, *arguments)
    return _multiply(a, b, *arguments)
