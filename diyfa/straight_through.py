"""The gradients of attention of quantised values, straight through the rounding (`diyfa.quantize`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from diyfa.eight_bits import BLOCK_K, BLOCK_Q, dequantised
from diyfa.ops import Pair, differentiate, forward, given_tensors, operator_plan
from diyfa.options import DIFFERENTIABLE, AttentionOptions, Lengths, optional_tensors, with_tensors, without_tensors
from diyfa.plan import runs_eagerly
from diyfa.problem import as_bhsd

_Call = tuple[Lengths, AttentionOptions, tuple[str, ...]]  # what `without_tensors` returns


def options_in_16_bits(options: AttentionOptions) -> AttentionOptions:
    """Return the options of the backward pass of a call of float8 or int8: they say nothing of the quantisation, and
    let any kernel run."""
    bias = options.attn_bias
    return options._replace(
        q_descale=None, k_descale=None, v_descale=None, k_mean=None, v_mean=None, out_dtype="", needs_grad=True,
        bias_grad=bias is not None and bias.requires_grad, variant="auto", batch_invariant=False,
    )  # fmt: skip


def _in_16_bits(
    values: Sequence[torch.Tensor], options: AttentionOptions, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers that quantised q, k and v stand for, in `dtype`."""
    q, k, v = (as_bhsd(x, options.layout) for x in values)
    q = dequantised(q, options.q_descale, torch.float32, BLOCK_Q)
    k = dequantised(k, options.k_descale, torch.float32, BLOCK_K, options.k_mean)
    v = dequantised(v, options.v_descale, torch.float32, mean=options.v_mean)
    q, k, v = (as_bhsd(x.to(dtype), options.layout) for x in (q, k, v))
    return q, k, v


class _StraightThrough(torch.autograd.Function):
    """Attention of quantised values, with gradients of the inputs that they were made from.

    The backward pass is that of attention in 16 bits at the numbers that the values stand for. It computes out and lse
    anew: those of the forward pass belong to rounded weights and unrounded products, and where one key has nearly all
    the weight the difference is larger than the gradient. So the values are all that is saved.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, dtype: torch.dtype, q: Any, k: Any, v: Any, *tensors: Any) -> Pair:
        """`q`, `k`, `v`: the inputs that get gradients, or None. `tensors`: the quantised values, optional tensors."""
        ctx.call, ctx.dtype = call, dtype
        ctx.source_dtypes = [None if x is None else x.dtype for x in (q, k, v)]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        q8, k8, v8, *optional = tensors
        return forward(q8, k8, v8, *with_tensors(*call, optional))

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        # The gradients depend on q, k and v, which are not saved. A tensor that requires a gradient stands for them.
        # A traced program has no second derivatives, and cannot make such a tensor.
        inputs = () if torch.compiler.is_compiling() else (torch.empty(0, device="cpu", requires_grad=True),)
        return _StraightThrough._differentiate(ctx, dout, dlse, *inputs)

    @staticmethod
    @once_differentiable
    def _differentiate(ctx: Any, dout: Any, dlse: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        saved = ctx.saved_tensors
        lengths, options = with_tensors(*call, saved[3:])
        q, k, v = _in_16_bits(saved[:3], options, ctx.dtype)
        options = options_in_16_bits(options)
        out, lse = forward(q, k, v, lengths, options)
        grads = None if dout is None else dout.to(ctx.dtype), dlse
        results = differentiate(grads, (q, k, v), (out, lse), lengths, options)
        gradients = [x.to(dtype) if dtype else None for x, dtype in zip(results[:3], ctx.source_dtypes, strict=True)]
        learned = dict(zip(DIFFERENTIABLE, results[3:], strict=True))
        # One for each argument of `forward`: call, dtype, q, k, v, then the three values and the optional tensors.
        gradients = [None, None, *gradients, None, None, None, *[learned.get(name) for name in call[2]]]
        return tuple([x if need else None for x, need in zip(gradients, ctx.needs_input_grad, strict=True)])


def attend_straight_through(
    sources: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor],
    lengths: Lengths,
    options: AttentionOptions,
    dtype: torch.dtype,
) -> Pair:
    """Compute attention of checked quantised values, differentiable with respect to `sources` and optional tensors.

    `dtype`: of the backward pass. Raises ValueError if the backend has no kernel for one of the passes.
    """
    optional = given_tensors(*optional_tensors(lengths, options))
    with torch.no_grad():
        if runs_eagerly(*values, *optional):  # refuse now rather than in the backward pass
            q, k, v = (torch.empty_like(x, dtype=dtype) for x in values)
            operator_plan(q, k, v, lengths, options_in_16_bits(options))
    return _StraightThrough.apply(without_tensors(lengths, options), dtype, *sources, *values, *optional)
