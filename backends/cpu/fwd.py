"""Attention forward in tiles: FlashAttention-2 ("v2") and FlashAttention ("v1"). O(S) memory besides the output.

For each query row, both update a running maximum m and a running sum l of exp(s - m), and turn the scores of one tile
at a time into weights ("online softmax", Milakov & Gimelshein 2018, arXiv:1805.02867).

* v2: Dao 2023, arXiv:2307.08691, algorithm 1. Query blocks outermost; the accumulator stays unnormalised and is
  divided by l once, at the end.
* v1: Dao et al. 2022, arXiv:2205.14135, algorithm 1. Key/value blocks outermost, so each is read once; the output and
  the statistics of every query live in memory and are renormalised at every step.

Differences from the papers: exponentials are natural, not powers of two; a sink joins the sum at the end; rows that see
no key have output 0 and lse +inf. Dropout removes weights from the product with v, never from the sum l.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from diyfa.backends.cpu.configs import attention_config
from diyfa.backends.cpu.tiles import INF, Call, without_autocast
from diyfa.backends.cpu.varlen import sequences
from diyfa.problem import AttentionProblem, AttentionTensors, as_bhsd


def _rows(call: Call, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse as [B, Hk, G, Sq, ...] views."""
    return call.grouped(as_bhsd(out, call.problem.layout)), call.grouped(lse)


def _initial_statistics(call: Call, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return m and l before the first key, [B, Hk, G * rows, 1] each."""
    shape = (call.problem.batch, call.problem.heads_kv, call.group * rows, 1)
    return torch.full(shape, -INF, dtype=call.dtype, device="cpu"), torch.zeros(shape, dtype=call.dtype, device="cpu")


def _online_softmax_update(s: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights exp(s - m_new), the new maximum, and the factor that rescales earlier sums to it."""
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    finite_m = m_new.masked_fill(m_new == -INF, 0.0)  # no key yet: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    return torch.exp_(s.sub_(finite_m)), m_new, torch.exp(m - finite_m)


def _add_sink(
    call: Call,
    m: torch.Tensor,
    l: torch.Tensor,  # noqa: E741
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return m and l with the sink included, and the factor that rescales earlier sums to them.

    A sink is a key without a value. It joins last, so that the weight of a row's only key is exactly exp(0) until then.
    A sink of -inf changes nothing. A sink of +inf makes its whole head NaN, as a softmax over an infinite score is NaN.
    """
    if call.sink_rows is None:
        return m, l, 1.0
    rows = m.unflatten(2, (call.group, -1))  # [B, Hk, G, rows, 1]
    sink = call.sink_rows.unsqueeze(-1).expand_as(rows).flatten(2, 3).clone()
    weight, m, alpha = _online_softmax_update(sink, m)
    return m, l * alpha + weight, alpha


def _log_sum_exp(m: torch.Tensor, l: torch.Tensor) -> torch.Tensor:  # noqa: E741
    return torch.where(l == 0, INF, m + torch.log(l))


def _end_sequences(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Set out to 0 and lse to +inf beyond each sequence's end. Without a sink they have these values already."""
    if call.sink_rows is not None and call.tensors.seq_lens is not None:
        beyond = torch.arange(call.problem.seqlen_q, device="cpu") >= call.visibility.len_q[:, 0, 0]  # [B, Sq]
        lse.masked_fill_(beyond[:, None], INF)
        as_bhsd(out, call.problem.layout).masked_fill_(beyond[:, None, :, None], 0.0)


def _weighted_values(call: Call, p: torch.Tensor, m0: int, m1: int, n0: int, n1: int) -> torch.Tensor:
    """Return the contribution of a tile to the output: p @ v, with dropout applied to p."""
    keep_mask = call.keep_mask(m0, m1, n0, n1)
    if keep_mask is not None:
        p = p.masked_fill(~keep_mask, 0.0).mul_(call.keep_scale)
    return p @ call.key_rows(call.v, n0, n1)


def _forward_v2(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    problem, config = call.problem, attention_config(call.problem)
    out_rows, lse_rows = _rows(call, out, lse)
    for m0 in range(0, problem.seqlen_q, config.block_m):
        m1 = min(m0 + config.block_m, problem.seqlen_q)
        q_tile = call.scaled_queries(m0, m1)  # [B, Hk, G * BLOCK_M, D]
        m, l = _initial_statistics(call, m1 - m0)  # noqa: E741
        acc = q_tile.new_zeros((*q_tile.shape[:-1], problem.head_dim_v))  # [B, Hk, G * BLOCK_M, Dv]
        start, stop = call.visibility.key_range(m0, m1)
        for n0 in range(start, stop, config.block_n):
            n1 = min(n0 + config.block_n, stop)
            seen = call.visibility.mask(m0, m1, n0, n1)
            if seen is not None and not seen.any():
                continue
            s, _, _ = call.scores(q_tile, call.key_rows(call.k, n0, n1), m0, m1, n0, n1, seen)
            p, m, alpha = _online_softmax_update(s, m)
            l = l * alpha + p.sum(-1, keepdim=True)  # noqa: E741
            acc = acc * alpha + _weighted_values(call, p, m0, m1, n0, n1)
        acc = acc.masked_fill_(l == 0, 0.0)  # a row without a key: 0, even if a hidden value is NaN
        m, l, at_end = _add_sink(call, m, l)  # noqa: E741
        o = torch.where(l == 0, 0.0, acc * at_end / l)
        out_rows[:, :, :, m0:m1] = o.unflatten(2, (call.group, -1))
        lse_rows[:, :, :, m0:m1] = _log_sum_exp(m, l).squeeze(-1).unflatten(2, (call.group, -1))
    _end_sequences(call, out, lse)


def _forward_v1(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    problem, config = call.problem, attention_config(call.problem)
    out_rows, lse_rows = _rows(call, out, lse)
    blocks = [(m0, min(m0 + config.block_m, problem.seqlen_q)) for m0 in range(0, problem.seqlen_q, config.block_m)]
    # For each query block the normalised output so far, m and l; in the paper they lie in HBM.
    state = []
    for m0, m1 in blocks:
        m, l = _initial_statistics(call, m1 - m0)  # noqa: E741
        state.append((l.repeat(1, 1, 1, problem.head_dim_v), m, l))
    for n0 in range(0, call.visibility.max_len_k, config.block_n):
        n1 = min(n0 + config.block_n, call.visibility.max_len_k)
        k_tile = call.key_rows(call.k, n0, n1)  # [B, Hk, BLOCK_N, D]
        for index, (m0, m1) in enumerate(blocks):
            start, stop = call.visibility.key_range(m0, m1)
            if n0 >= stop or n1 <= start:
                continue
            o, m, l = state[index]  # noqa: E741
            q_tile = call.scaled_queries(m0, m1)
            seen = call.visibility.mask(m0, m1, n0, n1)
            if seen is not None and not seen.any():
                continue
            s, _, _ = call.scores(q_tile, k_tile, m0, m1, n0, n1, seen)
            p, m, alpha = _online_softmax_update(s, m)
            l_old = l * alpha
            l = l_old + p.sum(-1, keepdim=True)  # noqa: E741
            o = (o * l_old + _weighted_values(call, p, m0, m1, n0, n1)) / l.masked_fill(l == 0, 1.0)
            state[index] = (o, m, l)
    for (m0, m1), (o, m, l) in zip(blocks, state, strict=True):  # noqa: E741
        o = o.masked_fill_(l == 0, 0.0)
        l_old = l
        m, l, at_end = _add_sink(call, m, l)  # noqa: E741
        o = torch.where(l == 0, 0.0, o * (l_old * at_end / l))
        out_rows[:, :, :, m0:m1] = o.unflatten(2, (call.group, -1))
        lse_rows[:, :, :, m0:m1] = _log_sum_exp(m, l).squeeze(-1).unflatten(2, (call.group, -1))
    _end_sequences(call, out, lse)


def _forward(
    schedule: Callable[[Call, torch.Tensor, torch.Tensor], None],
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if not problem.varlen:
        schedule(Call(problem, tensors), out, lse)
        return
    for sequence in sequences(problem, tensors):
        schedule(sequence.call, sequence.queries(out), sequence.statistics(lse))


@without_autocast
def forward_v2(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill out and lse with query blocks outermost."""
    _forward(_forward_v2, problem, tensors, out, lse)


@without_autocast
def forward_v1(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill out and lse with key/value blocks outermost."""
    _forward(_forward_v1, problem, tensors, out, lse)
