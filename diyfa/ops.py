"""The PyTorch operators `torch.ops.diyfa.*`: schemas, fake kernels and the one autograd of the project.

Three operators, each backend-neutral: `attention_fwd`, `attention_bwd`, `matmul`. Their implementation is the same
Python function for every dispatch key; it describes the call as a problem, lets the registry choose a kernel and
launches it. They are defined with `torch.library.Library` because that costs a third of `custom_op` for each call, and
the autograd is a `torch.autograd.Function` around them (a sixth of `register_autograd` when gradients are needed), so
`torch.compile` traces through it to the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from diyfa import registry
from diyfa.problem import (
    LAYOUTS,
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    Backend,
    Kernel,
    MatmulProblem,
    empty_output,
)
from diyfa.validation import dtype_name

_FEATURES = (
    "Tensor? seq_lens, Tensor? alibi_slopes, Tensor? attn_bias, Tensor? sinks, float sm_scale, int window_left, "
    "int window_right, float softcap, float dropout_p, str layout, bool deterministic, bool needs_grad, str backend"
)
_lib = torch.library.Library("diyfa", "DEF")
_lib.define(f"attention_fwd(Tensor q, Tensor k, Tensor v, {_FEATURES}, str variant) -> (Tensor out, Tensor lse)")
_lib.define(
    f"attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_FEATURES}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_lib.define(
    "matmul(Tensor a, Tensor b, int[]? block, bool autotune, str precision, ScalarType compute_dtype, "
    "ScalarType out_dtype, str backend) -> Tensor"
)


def _is_aligned(*tensors: torch.Tensor) -> bool:
    """Base addresses and all strides but the last are multiples of 16 bytes."""
    for x in tensors:
        step = 16 // x.element_size()
        if x.data_ptr() % 16 or any(s % step for s in x.stride()[:-1]):
            return False
    return True


def describe_attention(
    backend: Backend, tensors: AttentionTensors, scalars: tuple[int, int, float, float, str, bool, bool]
) -> AttentionProblem:
    """The problem of one call; `scalars` are (window_left, window_right, softcap, dropout_p, layout, deterministic,
    needs_grad)."""
    window_left, window_right, softcap, dropout_p, layout, deterministic, needs_grad = scalars
    q, k, v = tensors.q, tensors.k, tensors.v
    b, h, s, d = LAYOUTS[layout]
    q_shape, k_shape = q.shape, k.shape
    seqlen_k = k_shape[s]
    return AttentionProblem(
        backend.device_type,
        backend.arch(q.device),
        dtype_name(q.dtype),
        layout,
        q_shape[b],
        q_shape[h],
        k_shape[h],
        q_shape[s],
        seqlen_k,
        q_shape[d],
        v.shape[d],
        window_left,
        window_right,
        softcap,
        tensors.seq_lens is not None,
        tensors.alibi_slopes is not None,
        tensors.attn_bias is not None,
        tensors.sinks is not None,
        dropout_p > 0.0,
        deterministic,
        needs_grad,
        _is_aligned(q, k, v),
    )


# What a call's shapes, strides and options decided, so that a repeated call decides nothing.
_decided: dict[tuple[Any, ...], tuple[AttentionProblem, Kernel]] = {}
_DECIDED_LIMIT = 4096  # changing lengths make new entries without end


def _decide(
    op: str,
    tensors: AttentionTensors,
    scalars: tuple[int, int, float, float, str, bool, bool],
    backend: str,
    variant: str,
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
        tensors.seq_lens is None,
        tensors.alibi_slopes is None,
        tensors.attn_bias is None,
        tensors.sinks is None,
        scalars,
        backend or registry.forced_backend(),
        variant,
    )
    decided = _decided.get(key)
    if decided is None:
        chosen = registry.resolve_backend(q.device, backend)
        problem = describe_attention(chosen, tensors, scalars)
        decided = problem, registry.choose(op, problem, chosen, variant)
        if op == "attention_fwd" and problem.needs_grad:  # refuse now rather than in the backward pass
            registry.choose("attention_bwd", problem, chosen)
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        _decided[key] = decided
    return decided


def _empty_lse(q: torch.Tensor, layout: str) -> torch.Tensor:
    b, h, s, _ = LAYOUTS[layout]
    return q.new_empty(
        (q.shape[b], q.shape[h], q.shape[s]), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


def _forward_without_keys(tensors: AttentionTensors, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to attend to (Sk = 0) or nothing to compute: out 0, lse +inf, or the sink where there is one."""
    out = empty_output(tensors.q, tensors.v.shape[-1]).zero_()
    lse = _empty_lse(tensors.q, layout).fill_(float("inf"))
    if tensors.sinks is not None:
        lse.copy_(tensors.sinks[None, :, None])
    return out, lse


def _attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    sm_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    layout: str,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = AttentionTensors(q, k, v, sm_scale, seq_lens, alibi_slopes, attn_bias, sinks)
    scalars = (window_left, window_right, softcap, dropout_p, layout, deterministic, needs_grad)
    problem, kernel = _decide("attention_fwd", tensors, scalars, backend, variant)
    if q.numel() == 0 or k.numel() == 0:
        return _forward_without_keys(tensors, layout)
    return kernel.launch(problem, tensors)


def _attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seq_lens: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    sm_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    layout: str,
    deterministic: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = AttentionTensors(q, k, v, sm_scale, seq_lens, alibi_slopes, attn_bias, sinks)
    scalars = (window_left, window_right, softcap, dropout_p, layout, deterministic, needs_grad)
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dbias = q.new_empty(0) if attn_bias is None else torch.zeros_like(attn_bias)
        dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
        if sinks is not None and dlse is not None and q.numel():
            dsinks = dlse.sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dbias, dsinks
    if dout.stride(-1) != 1:  # an expanded gradient, as from out.sum()
        dout = dout.contiguous()
    problem, kernel = _decide("attention_bwd", tensors, scalars, backend, "auto")
    grads: AttentionGradients = kernel.launch(problem, tensors, out, lse, dout, dlse)
    return (
        grads.dq,
        grads.dk,
        grads.dv,
        q.new_empty(0) if grads.dbias is None else grads.dbias,  # one each: outputs must not alias
        q.new_empty(0) if grads.dsinks is None else grads.dsinks,
    )


def _attention_fwd_fake(q: Any, k: Any, v: Any, *features: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v.shape[-1]), _empty_lse(q, features[9])


def _attention_bwd_fake(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *features: Any) -> Any:
    bias, sinks = features[2], features[3]
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        q.new_empty(0) if bias is None else torch.empty_like(bias),
        q.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


_lib.impl("attention_fwd", _attention_fwd, "CompositeExplicitAutograd")
_lib.impl("attention_bwd", _attention_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("diyfa::attention_fwd", _attention_fwd_fake, lib=_lib)
torch.library.register_fake("diyfa::attention_bwd", _attention_bwd_fake, lib=_lib)
_fwd = torch.ops.diyfa.attention_fwd.default
_bwd = torch.ops.diyfa.attention_bwd.default


class _Attention(torch.autograd.Function):
    """Attention with gradients of q, k, v, attn_bias and sinks from both outputs, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _fwd(q, k, v, *arguments)
        ctx.save_for_backward(q, k, v, out, lse, *arguments[:4])
        ctx.scalars = arguments[4:-1]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grads
        q, k, v, out, lse, seq_lens, alibi_slopes, attn_bias, sinks = ctx.saved_tensors
        dq, dk, dv, dbias, dsinks = _bwd(
            dout, dlse, q, k, v, out, lse, seq_lens, alibi_slopes, attn_bias, sinks, *ctx.scalars
        )
        dbias = None if attn_bias is None else dbias
        dsinks = None if sinks is None else dsinks
        return (dq, dk, dv, None, None, dbias, dsinks, *(None,) * (len(ctx.scalars) + 1))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str,
    sm_scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seq_lens: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    backend: str = "",
    variant: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of checked inputs -> (out, lse), differentiable when an input requires a gradient."""
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (attn_bias is not None and attn_bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )
    backend = backend or registry.forced_backend()
    arguments = (
        q, k, v, seq_lens, alibi_slopes, attn_bias, sinks, sm_scale, window[0], window[1], softcap, dropout_p, layout,
        deterministic, needs_grad, backend, variant,
    )  # fmt: skip
    if needs_grad:
        return _Attention.apply(*arguments)
    return _fwd(*arguments)


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


_lib.impl("matmul", _matmul, "CompositeExplicitAutograd")
torch.library.register_fake("diyfa::matmul", _matmul_fake, lib=_lib)
_mm = torch.ops.diyfa.matmul.default


class _Matmul(torch.autograd.Function):
    """c = a @ b; da = dc @ bᵀ and db = aᵀ @ dc by the same operator, in the inputs' dtype."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.arguments = arguments
        return _mm(a, b, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, autotune, precision, compute_dtype, _, backend = ctx.arguments
        dc = grads[0].to(a.dtype)
        rest = (None, autotune, precision, compute_dtype, a.dtype, backend)
        da = _mm(dc, b.t(), *rest) if ctx.needs_input_grad[0] else None
        db = _mm(a.t(), dc, *rest) if ctx.needs_input_grad[1] else None
        return (da, db, *(None,) * len(ctx.arguments))


def matmul(a: torch.Tensor, b: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Matrix product of checked inputs; `arguments` in the order of the operator's schema."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Matmul.apply(a, b, *arguments)
    return _mm(a, b, *arguments)
