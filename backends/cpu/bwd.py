"""Attention backward in tiles: Dao 2023, arXiv:2307.08691, algorithm 2.

The weights are recomputed from the saved log-sum-exp, p = exp(s - lse). With delta = rowsum(dout * out) - dlse,
ds = p * (dp - delta). The term dlse is the gradient of the log-sum-exp, which the paper leaves out. Dropout masks and
scales p for dv and dp for ds; it does not change delta, which is the sum over the kept weights.

Key/value blocks are outermost, so dk and dv of a block are complete when the block ends; dq accumulates in float32.
There are no atomics, so gradients are bitwise equal from run to run.
"""

from __future__ import annotations

import torch

from diyfa.backends.cpu.configs import attention_config
from diyfa.backends.cpu.tiles import INF, Call, row_products, without_autocast
from diyfa.backends.cpu.varlen import sequences
from diyfa.features import GRADIENTS
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, as_bhsd
from diyfa.score_programs import MAX_TENSORS


def _delta(call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None):
    """Return rowsum(dout * out) - dlse, [B, H, Sq]. It is 0 for rows without a key, even if dout or dlse is NaN."""
    out, dout = as_bhsd(out, call.problem.layout), as_bhsd(dout, call.problem.layout)
    delta = torch.einsum("bhsd,bhsd->bhs", out.to(call.dtype), dout.to(call.dtype))
    if dlse is not None:
        delta = delta - dlse
    return delta.masked_fill(lse == INF, 0.0)


# Names of gradients of tensors that all packed sequences share: they are added up.
ADDED = tuple(x.gradient for x in GRADIENTS if x.gradient != "dbias")


def _add_to_bias_gradient(call: Call, dbias: torch.Tensor, ds: torch.Tensor, m0: int, m1: int, n0: int, n1: int):
    """Add a tile of score gradients to dbias, summed over the dimensions along which the bias is broadcast."""
    target = call.bias_tile(dbias, m0, m1, n0, n1)
    broadcast = [axis for axis in range(4) if dbias.shape[axis] == 1]
    tile = call.per_head(ds)
    target += tile.sum(broadcast, keepdim=True) if broadcast else tile


def _backward(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> dict[str, torch.Tensor]:
    """Fill the gradients of one call, except those in `ADDED`. Return these unrounded."""
    problem, tensors, config = call.problem, call.tensors, attention_config(call.problem)
    dq_rows, dk_rows, dv_rows = (as_bhsd(x, problem.layout) for x in gradients[:3])
    dq_acc = torch.zeros(call.q.shape, dtype=call.dtype, device="cpu")  # [B, Hk, G, Sq, D]
    dbias = None  # in the dtype of the arithmetic
    if gradients.dbias is not None:
        assert call.bias is not None
        dbias = torch.zeros(call.bias.shape, dtype=call.dtype, device="cpu")
    captured = {n: torch.zeros_like(x, dtype=call.dtype) for n, x in gradients.captured().items()}
    learned = tuple([n in captured for n in range(MAX_TENSORS)])
    delta = _delta(call, out, lse, dout, dlse)
    if gradients.delta is not None:
        gradients.delta.copy_(delta)
    dout_rows = call.grouped(as_bhsd(dout, problem.layout))
    lse_rows, delta_rows = call.grouped(lse), call.grouped(delta)

    for n0 in range(0, problem.seqlen_k, config.block_n):
        n1 = min(n0 + config.block_n, problem.seqlen_k)
        k_tile, v_tile = call.key_rows(call.k, n0, n1), call.key_rows(call.v, n0, n1)  # [B, Hk, BLOCK_N, D]
        dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for m0 in range(0, problem.seqlen_q, config.block_m):
            m1 = min(m0 + config.block_m, problem.seqlen_q)
            start, stop = call.visibility.key_range(m0, m1)
            if n0 >= stop or n1 <= start:
                continue
            seen = call.visibility.mask(m0, m1, n0, n1)
            if seen is not None and not seen.any():
                continue
            keep_mask = call.keep_mask(m0, m1, n0, n1)
            q_tile = call.scaled_queries(m0, m1)  # [B, Hk, G * BLOCK_M, D]
            dout_tile = call.query_rows(dout_rows, m0, m1)  # [B, Hk, G * BLOCK_M, Dv]
            s, tanh, before = call.scores(q_tile, k_tile, m0, m1, n0, n1, seen)  # [B, Hk, G * BLOCK_M, BLOCK_N]
            p = torch.exp_(s.sub_(lse_rows[:, :, :, m0:m1].flatten(2, 3).unsqueeze(-1)))
            dp = row_products(dout_tile, v_tile)
            if keep_mask is not None:
                dp.mul_(call.keep_scale).masked_fill_(~keep_mask, 0.0)
            ds = dp.sub_(delta_rows[:, :, :, m0:m1].flatten(2, 3).unsqueeze(-1)).mul_(p)
            if seen is not None:  # p of hidden keys is 0, but NaN in a row whose lse is NaN
                for x in (p, ds):
                    call.per_head(x).masked_fill_(~seen, 0.0)
            if before is not None:
                ds, d_captured = call.function_gradients(before, ds, m0, n0, learned)
                for n, term in enumerate(d_captured):
                    if term is not None:
                        captured[n] += term
            if dbias is not None:
                _add_to_bias_gradient(call, dbias, ds, m0, m1, n0, n1)
            ds = call.product_gradient(ds, tanh)
            if keep_mask is not None:  # the weights that v was multiplied with
                p.masked_fill_(~keep_mask, 0.0).mul_(call.keep_scale)
            dv_tile += p.mT @ dout_tile
            dk_tile += ds.mT @ q_tile
            dq_acc[:, :, :, m0:m1] += (ds @ k_tile).unflatten(2, (call.group, -1))
        dk_rows[:, :, n0:n1] = dk_tile  # q_tile carries sm_scale already
        dv_rows[:, :, n0:n1] = dv_tile

    call.grouped(dq_rows).copy_(dq_acc.mul_(tensors.sm_scale))
    if dbias is not None and gradients.dbias is not None:
        gradients.dbias.copy_(dbias.reshape(gradients.dbias.shape))
    added = {f"dscore{n}": x for n, x in captured.items()}
    if gradients.dsinks is not None:
        assert tensors.sinks is not None
        sink_weight = torch.exp(tensors.sinks.to(call.dtype)[None, :, None] - lse)
        sink_weight.masked_fill_(lse == INF, 0.0)  # rows without a key: an infinite sink gives inf - inf
        added["dsinks"] = -(sink_weight * delta).sum((0, 2))
    return added


@without_autocast
def backward(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> None:
    """Fill the gradients of q, k and v, and the requested ones of optional tensors."""
    totals: dict[str, torch.Tensor] = {}
    if not problem.varlen:
        totals = _backward(Call(problem, tensors), out, lse, dout, dlse, gradients)
    else:
        for sequence in sequences(problem, tensors):
            sequence_gradients = gradients._replace(
                dq=sequence.queries(gradients.dq),
                dk=sequence.keys(gradients.dk),
                dv=sequence.keys(gradients.dv),
                delta=None if gradients.delta is None else sequence.statistics(gradients.delta),
            )
            sequence_dlse = None if dlse is None else sequence.statistics(dlse)
            added = _backward(
                sequence.call, sequence.queries(out), sequence.statistics(lse), sequence.queries(dout),
                sequence_dlse, sequence_gradients,
            )  # fmt: skip
            totals = {name: totals.get(name, 0) + x for name, x in added.items()}
    for name in ADDED:
        buffer = getattr(gradients, name)
        if buffer is not None:  # 0 if no sequence has queries
            buffer.copy_(totals[name] if name in totals else torch.zeros_like(buffer))
