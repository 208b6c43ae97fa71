"""NaN and infinities put into the inputs of a call, and what of its results they may reach."""

from __future__ import annotations

from typing import Any

import torch
from targets import Target

from diyfa.block_lists import visible_pairs
from diyfa.options import AttentionOptions, Lengths
from diyfa.reference import attention_by, visible_keys
from diyfa.testing import (
    AttentionCase,
    Inputs,
    Results,
    assert_within_budget,
    attention_function,
    make_inputs,
    run_case,
)


def poison(inputs: Inputs, case: AttentionCase, name: str, value: float, at: int, feature: int = 3) -> Inputs:
    """`inputs` with `value` in one element of row `at` of the first sample and head of one of its tensors; of the bias
    in its element `at`, of the sinks in one of them."""
    x = inputs.options[name] if name in ("attn_bias", "sinks") else getattr(inputs, name)
    with torch.no_grad():
        if name in ("attn_bias", "sinks"):
            x.view(-1)[at % x.numel()] = value
        else:
            row = x[at, 0] if case.layout == "thd" else x[0, at, 0] if case.layout == "bshd" else x[0, 0, at]
            row[..., feature] = value
    return inputs


def same_nonfinite(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both have NaN, +inf and -inf in the same places."""
    expected = expected.to(got.device)
    equal = (f(got).equal(f(expected)) for f in (torch.isnan, torch.isposinf, torch.isneginf))
    return all(equal)


def others(x: torch.Tensor, field: str, case: AttentionCase, name: str) -> list[torch.Tensor]:
    """What of a result no poison in the tensor `name` may change: other samples or packed sequences than the first,
    and heads of other groups than the first."""
    heads_kv = case.sizes[2]
    axis = 0 if case.layout == "thd" and field == "lse" else 2 if case.layout == "bshd" and field != "lse" else 1
    values = []
    if name in ("q", "k", "v", "dout"):
        values.append(x.narrow(axis, x.shape[axis] // heads_kv, x.shape[axis] - x.shape[axis] // heads_kv))
    if case.lens_q is None:
        return [*values, x[1:]]
    lens = case.key_lens if field in ("dk", "dv") else case.lens_q
    return [*values, x[..., lens[0] :] if field == "lse" else x[lens[0] :]]


class _Dependence(torch.autograd.Function):
    """Attention over (B, H, S, D) in which a value is NaN if it depends on one that is not finite, else 0."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, sees, keep_mask):
        q, k, v, bias, sinks = (~x.isfinite() for x in (q, k, v, bias, sinks))
        row = (sees & (q.any(-1)[..., None] | k.any(-1)[..., None, :] | bias)).any(-1) | sinks
        out = row[..., None] | (keep_mask.float() @ v.float() > 0)
        ctx.save_for_backward(row, out, v.any(-1), sees, keep_mask)
        ctx.head_dim = q.shape[-1]
        return torch.where(out, float("nan"), 0.0), torch.where(row, float("nan"), 0.0)

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        row, out, v, sees, keep_mask = ctx.saved_tensors
        dout = ~dout.isfinite()
        ds_rows = row | (out | dout).any(-1) | ~dlse.isfinite()  # through the weights or delta
        ds = (sees & ds_rows[..., None]) | (keep_mask & (dout.any(-1)[..., None] | v[..., None, :]))
        dq, dk = (ds.any(axis)[..., None].expand(*ds.any(axis).shape, ctx.head_dim) for axis in (-1, -2))
        dv = (keep_mask & row[..., None]).any(-2)[..., None] | (keep_mask.mT.float() @ dout.float() > 0)
        return *(torch.where(x, float("nan"), 0.0) for x in (dq, dk, dv, ds, ds_rows)), None, None


def dependence(inputs: Inputs, case: AttentionCase) -> Results:
    """The results of a case, NaN where they depend on a value that is not finite, else finite."""

    def attend(q, k, v, lengths: Lengths, options: AttentionOptions, keep):
        (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
        window = options.window_left, options.window_right
        sees, valid_q, _ = visible_keys(batch, seqlen_q, seqlen_k, window, lengths.seq_lens)
        valid_k = torch.ones(seqlen_k, 1, dtype=torch.bool)
        if lengths.seq_lens is not None:
            valid_k = torch.arange(seqlen_k)[:, None] < lengths.seq_lens[:, None, None, None]
        k, v = (torch.where(valid_k, x, 0).repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
        bias = torch.zeros(()) if options.attn_bias is None else options.attn_bias
        sinks = torch.zeros(heads) if options.sinks is None else options.sinks
        if options.mask_blocks is not None and options.mask_bits is not None:
            sizes = seqlen_q, seqlen_k
            sees = sees & visible_pairs(
                options.mask_blocks, options.mask_bits, sizes, slice(0, seqlen_q), slice(0, seqlen_k)
            )
        sees = sees.expand(batch, heads, seqlen_q, seqlen_k)
        out, lse = _Dependence.apply(
            torch.where(valid_q, q, 0), k, v, bias.expand(sees.shape), sinks[:, None].expand(sees.shape[:-1]), sees,
            sees if keep is None else sees & keep,
        )  # fmt: skip
        return torch.where(valid_q, out, 0), lse.masked_fill(~valid_q[..., 0], 0)

    def call(*leaves: torch.Tensor, return_lse: bool, **options: Any):
        return attention_by(attend, *leaves, layout="bhsd" if case.layout == "3d" else case.layout, **options)

    return run_case(call, inputs)


def assert_propagates(target: Target, case: AttentionCase, variant: str, name: str, value: float) -> None:
    """What depends on the poison is not finite. Other heads, samples and sequences are as without it. What is finite is
    right. What a mask hides the poison from may be either."""
    poisoned = [poison(make_inputs(case, device), case, name, value, 23) for device in (target.device, "cpu")]
    attend = attention_function(case, backend=target.backend, variant=variant)
    got, clean = run_case(attend, poisoned[0]), run_case(attend, make_inputs(case, target.device))
    rest = []
    for field, x, y, z in zip(Results._fields, got, dependence(poisoned[1], case), clean, strict=True):
        if x is None:
            rest.append(None)
            continue
        assert not bool((y.isnan() & x.isfinite()).any()), f"{field}: hides what it depends on"
        if field in ("out", "lse", "dq", "dk", "dv"):
            for other, before in zip(others(x, field, case, name), others(z, field, case, name), strict=True):
                assert torch.equal(other, before), f"{field}: another head, sample or sequence has changed"
        rest.append(torch.where(x.isfinite(), x, z))
    assert_within_budget(Results(*rest), case, target.oracle_device)
