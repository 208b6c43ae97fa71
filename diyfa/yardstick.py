"""`plain_flash_attention`: FlashAttention-2 in plain PyTorch, with the rounding of the inputs' dtype.

It measures the error budget of every kernel (`diyfa.testing`). The algorithms are 1 and 2 of Dao 2023,
arXiv:2307.08691, with the arithmetic of the CUDA kernels that PyTorch ships. Scores, statistics and sums are float32
(float64 for such inputs), exponentials are powers of two, and the maximum runs over blocks of keys. The weights are
rounded to the inputs' dtype before they multiply v; P and dS are rounded before the products of the backward pass. That
pass recomputes P from the saved log-sum-exp and from scores that are summed in another order (transposed in the CUDA
kernels), and delta from the rounded output. Every result is rounded once. The whole score matrix is in memory: this is
for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import e, log, log2
from typing import Any, NamedTuple

import torch

from diyfa.eight_bits import EIGHT_BIT_DTYPES, WEIGHT_SHIFT, Quantized
from diyfa.features import dtype_name
from diyfa.options import AttentionOptions, Lengths
from diyfa.reference import Input, attention_by, captured_among, score_positions, within_sequences
from diyfa.score_programs import apply_score_function

_INF = float("inf")
LOG2E, LN2 = log2(e), log(2)
BLOCK_N = 64


class _Call(NamedTuple):
    """Arguments without a gradient. `visible`, `keep` and `alibi` (in nats) broadcast to (B, H, Sq, Sk)."""

    scale: float
    softcap: float
    visible: torch.Tensor
    alibi: torch.Tensor | None
    keep: torch.Tensor | None
    keep_scale: float
    weight_dtype: torch.dtype | None = None  # of the weights beside v; None: q's
    score_fn: str = ""  # program of the score function
    positions: tuple[torch.Tensor, ...] = ()  # b, h, i and j of the scores


def _scores_log2(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    captured: Sequence[torch.Tensor],
    call: _Call,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return three tensors for q (B, H, Sq, D) and k (B, H, Sk, D).

    1. The scores in units of log2, -inf for pairs that are not visible.
    2. The tanh of the softcap, which its gradient needs, or None.
    3. The scores in nats that the score function got, or None.
    """
    s, tanh = q @ k.mT, None
    if call.softcap:
        tanh = torch.tanh(s * (call.scale / call.softcap))
        s = tanh * (call.softcap * LOG2E)
    else:
        s = s * (call.scale * LOG2E)
    if call.alibi is not None:
        s = s + call.alibi * LOG2E
    if bias is not None:
        s = s + bias.to(s.dtype) * LOG2E
    if call.score_fn:
        s = s * LN2
        new = apply_score_function(call.score_fn, s, call.positions, call.visible, captured)
        return new * LOG2E, tanh, s
    return s.masked_fill(~call.visible, -_INF), tanh, None


def _function_gradients(
    scores_before: torch.Tensor, ds: torch.Tensor, captured: Sequence[torch.Tensor], call: _Call
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradients of the scores before the score function, and of the captured tensors.

    `ds`: the gradient of the scores that the function returned.
    """
    with torch.enable_grad():
        scores = scores_before.detach().requires_grad_()
        tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in captured]
        learned = [x for x in tensors if x.requires_grad]
        visible = call.visible & (ds != 0)
        new = apply_score_function(call.score_fn, scores, call.positions, visible, tensors)
        d_scores, *rest = torch.autograd.grad(new, [scores, *learned], ds, allow_unused=True, materialize_grads=True)
    remaining = iter(rest)
    return d_scores, [next(remaining) if x.requires_grad else None for x in tensors]


def _update(s: torch.Tensor, m: torch.Tensor, l: torch.Tensor, acc: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: E741
    """Take a block of scores `s` into the online softmax. Return (weights of the block, new m, new l, rescaled acc).

    For each row, `m` is the running maximum, `l` the sum of weights relative to it, `acc` the sum of weighted values.
    The caller adds the weighted values of this block to `acc`.
    """
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    finite_m = m_new.masked_fill(m_new == -_INF, 0.0)
    p, alpha = torch.exp2(s - finite_m), torch.exp2(m - finite_m)
    return p, m_new, l * alpha + p.sum(-1, keepdim=True), acc * alpha


def _rounded_weights(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return p rounded to `dtype`, for float8 with the scale that keeps most digits."""
    scale = 2.0 ** WEIGHT_SHIFT.get(dtype_name(dtype), 0)
    return (p * scale).to(dtype).to(p.dtype) / scale


class _FlashAttention(torch.autograd.Function):
    """Algorithms 1 and 2 on (B, H, S, D) tensors; k and v may have fewer heads. Rows without a key: out 0, lse +inf.

    A name that ends in `_w` is an input in float32 or wider, with one KV head for each query head.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sinks, call: _Call, *captured):
        dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        group = q.shape[1] // max(1, k.shape[1])
        q_w, k_w, v_w = (x.to(wide) for x in (q, *(y.repeat_interleave(group, dim=1) for y in (k, v))))
        scores, _, _ = _scores_log2(q_w, k_w, bias, captured, call)
        m = scores.new_full((*scores.shape[:-1], 1), -_INF)
        l, acc = torch.zeros_like(m), scores.new_zeros(*scores.shape[:-1], v.shape[-1])  # noqa: E741
        for n in range(0, k.shape[2], BLOCK_N):
            p, m, l, acc = _update(scores[..., n : n + BLOCK_N], m, l, acc)  # noqa: E741
            if call.keep is not None:
                p = p * call.keep[..., n : n + BLOCK_N]
            acc = acc + _rounded_weights(p, call.weight_dtype or dtype) @ v_w[:, :, n : n + BLOCK_N]
        if sinks is not None:  # a key without a value
            sink = (sinks.to(wide) * LOG2E)[:, None, None].expand_as(m)
            _, m, l, acc = _update(sink, m, l, acc)  # noqa: E741
        empty = l == 0
        out = (acc / l.masked_fill(empty, 1.0) * call.keep_scale).to(dtype)
        lse = ((m + l.log2()) * LN2).masked_fill(empty, _INF).squeeze(-1)
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *captured)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        q, k, v, bias, sinks, out, lse, *captured = ctx.saved_tensors
        call, dtype, wide = ctx.call, q.dtype, lse.dtype
        heads_kv = k.shape[1]
        group = q.shape[1] // max(1, heads_kv)
        q_w, k_w, v_w = (x.to(wide) for x in (q, *(y.repeat_interleave(group, dim=1) for y in (k, v))))
        dout = dout.to(wide)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype).to(wide)

        def sum_over_group(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (heads_kv, group)).sum(2).to(dtype)

        # Reversed features: the sum of a score then has another order than in the forward pass.
        scores, tanh, scores_before = _scores_log2(q_w.flip(-1), k_w.flip(-1), bias, captured, call)
        p = torch.exp2(scores - (lse * LOG2E)[..., None])
        # FlashAttention computes delta in its own pass, where sums have another order than those of dp.
        delta = torch.einsum("bhsd,bhsd->bhs", out.to(wide).flip(-1), dout.flip(-1)) - dlse
        dropped_p, dp = p, dout @ v_w.mT
        if call.keep is not None:
            dropped_p, dp = p * call.keep, dp * call.keep * call.keep_scale
        dv = sum_over_group(rounded(dropped_p).mT @ dout * call.keep_scale)
        ds = p * (dp - delta[..., None])
        d_captured: list[torch.Tensor | None] = []
        if scores_before is not None:
            ds, d_captured = _function_gradients(scores_before, ds, captured, call)
        dbias = None if bias is None else ds.sum_to_size((1,) * (4 - bias.dim()) + bias.shape).to(bias.dtype)
        dsinks = None
        if sinks is not None:
            weight = torch.exp2((sinks.to(wide)[:, None] - lse) * LOG2E)
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        ds = rounded(ds)
        dq, dk = (ds @ k_w * call.scale).to(dtype), sum_over_group(ds.mT @ q_w * call.scale)
        return dq, dk, dv, None if dbias is None else dbias.reshape(bias.shape), dsinks, None, *d_captured


def _prepared(
    q, k, v, lengths: Lengths, options: AttentionOptions, keep: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, _Call]:
    """Return q, k and v with zeros beyond the sequences' ends, the mask of valid queries, and the rest of the call."""
    (q, k, v), (visible, valid_q, distance) = within_sequences(q, k, v, lengths, options)
    (batch, heads), alibi = q.shape[:2], None
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(torch.promote_types(q.dtype, torch.float32))
        alibi = -slopes.expand(batch, heads)[:, :, None, None] * distance.abs()
    positions = score_positions(distance, heads) if options.score_fn else ()
    return q, k, v, valid_q, _Call(
        options.sm_scale, options.softcap, visible, alibi, keep, 1 / (1 - options.dropout_p),
        score_fn=options.score_fn, positions=positions,
    )  # fmt: skip


def _attend(
    q, k, v, lengths: Lengths, options: AttentionOptions, keep: torch.Tensor | None,
    weight_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Return out and lse, as `diyfa.reference._attend` does. `weight_dtype`: of the weights beside v; None: q's."""
    q, k, v, valid_q, call = _prepared(q, k, v, lengths, options, keep)
    out, lse = _FlashAttention.apply(
        q, k, v, options.attn_bias, options.sinks, call._replace(weight_dtype=weight_dtype), *captured_among(options)
    )
    if options.v_mean is not None:  # out lacks the mean, times the sum of the weights: 1, with a sink less
        weight_sum = (lse != _INF).to(out.dtype)
        if options.sinks is not None:
            sink_weight = torch.exp(options.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == _INF, 0.0)
            weight_sum = weight_sum - sink_weight
        mean = options.v_mean.to(out.dtype).repeat_interleave(q.shape[1] // max(1, k.shape[1]), dim=1)
        out = out + weight_sum[..., None] * mean[:, :, None]
    return torch.where(valid_q, out, 0), lse.masked_fill(~valid_q.squeeze(-1), _INF)


def _row_maxima(q, k, v, lengths: Lengths, options: AttentionOptions, keep: torch.Tensor | None):
    """Return, in the form of `_attend`, zeros in place of out, and in place of lse the largest score of each row."""
    q, k, v, _, call = _prepared(q, k, v, lengths, options, keep)
    keys = k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), dim=1)
    scores = _scores_log2(q, keys, options.attn_bias, captured_among(options), call)[0] * LN2
    candidates = [scores, scores.new_full((*scores.shape[:-1], 1), -_INF)]
    if options.sinks is not None:
        candidates.append(options.sinks.to(scores.dtype)[:, None, None].expand_as(candidates[-1]))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.cat(candidates, -1).amax(-1)


def plain_flash_attention(
    q: Input, k: Input, v: Input, *, return_lse: bool = False, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute FlashAttention in q's dtype. Arguments and results are those of `diyfa.reference_attention`."""
    q_dtype, v_dtype = (x.values.dtype if isinstance(x, Quantized) else x.dtype for x in (q, v))
    weight_dtype = v_dtype if q_dtype in EIGHT_BIT_DTYPES else None
    out, lse = attention_by(partial(_attend, weight_dtype=weight_dtype), q, k, v, **options)
    return (out, lse) if return_lse else out


def largest_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the largest score of each row, its sink included, shaped like the lse; not finite if it has neither."""
    return attention_by(_row_maxima, q, k, v, **options)[1]
