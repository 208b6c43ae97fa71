"""Gradients that follow from another forward pass: the yardstick's backward, as exact as kernels, from its out and lse.

With a kernel's forward pass alone, on a machine that cannot run its backward in reasonable time, this shows whether its
out and lse fit together: delta = rowsum(dout * out) must cancel dout * v where one key has all the weight.
"""

from __future__ import annotations

from typing import Any

import torch

from diyfa.options import AttentionOptions, Lengths
from diyfa.problem import VARLEN
from diyfa.reference import as_bhsd, attention_by
from diyfa.testing import AttentionCase, Inputs, Results, _plain_options, make_inputs, run_case
from diyfa.yardstick import _FlashAttention, _prepared


class _FixedForward(torch.autograd.Function):
    """The yardstick but for out and lse, which are given."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, call, out, lse):
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.call = call
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        return (*_FlashAttention.backward(ctx, dout, dlse), None, None)


def results_from_forward(case: AttentionCase, out: torch.Tensor, lse: torch.Tensor) -> Results:
    """`out` and `lse`, which a forward pass of `case` gave, and the gradients that follow from them."""
    inputs = make_inputs(case)
    return results_on(inputs._replace(options=_plain_options(case, inputs)), case.layout, out, lse)


def results_on(inputs: Inputs, layout: str, out: torch.Tensor, lse: torch.Tensor) -> Results:
    """The same on inputs that are no case's; their options are those of a call of `reference_attention`."""
    first = 0  # row of the next packed sequence

    def attend(q, k, v, lengths: Lengths, options: AttentionOptions, keep):
        nonlocal first
        rows = slice(first, first + q.shape[2])
        q, k, v, valid_q, call = _prepared(q, k, v, lengths, options, keep)
        if layout == VARLEN:
            fixed_out, fixed_lse = out[rows].transpose(0, 1)[None], lse[:, rows][None]
            first = rows.stop
        else:
            fixed_out = as_bhsd(out, layout) if out.dim() == 4 else out
            fixed_out, fixed_lse = fixed_out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])
        fixed_out, fixed_lse = _FixedForward.apply(
            q, k, v, options.attn_bias, options.sinks, call, fixed_out, fixed_lse
        )
        return torch.where(valid_q, fixed_out, 0), fixed_lse.masked_fill(~valid_q.squeeze(-1), float("inf"))

    def plain(q, k, v, return_lse: bool, **options: Any):
        return attention_by(attend, q, k, v, **options)

    return run_case(plain, inputs)
