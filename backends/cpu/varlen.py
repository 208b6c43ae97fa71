"""Packed sequences: one call for each sequence, over views of its rows. Nothing is copied or padded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from diyfa.backends.cpu.tiles import Call, dropout_keys
from diyfa.features import for_sample
from diyfa.problem import AttentionProblem, AttentionTensors
from diyfa.score_programs import single_sample


class Sequence(NamedTuple):
    """One sequence of a packed batch: a call with a batch of one, and the ranges of its rows."""

    call: Call
    rows_q: slice
    rows_k: slice

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sequence's rows of a tensor shaped like q, as (1, S, H, D)."""
        return x[self.rows_q].unsqueeze(0)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sequence's rows of a tensor shaped like k, as (1, S, Hk, D)."""
        return x[self.rows_k].unsqueeze(0)

    def statistics(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sequence's rows of a tensor shaped like the log-sum-exp (H, Tq), as (1, H, S)."""
        return x[:, self.rows_q].unsqueeze(0)


def _ends(cu_seqlens: torch.Tensor, total: int) -> list[tuple[int, int]]:
    """Return (first row, end) of each sequence, clamped to the tensor because a traced call did not check them."""
    return [(start, max(start, end)) for start, end in pairwise(cu_seqlens.clamp(0, total).tolist())]


def sequences(problem: AttentionProblem, tensors: AttentionTensors) -> Iterator[Sequence]:
    """Yield the sequences of a packed batch that have queries. Gradients of the others stay zero."""
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    ends_q, ends_k = _ends(tensors.cu_seqlens_q, problem.total_q), _ends(tensors.cu_seqlens_k, problem.total_k)
    keys = dropout_keys(problem, tensors)
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(ends_q, ends_k, strict=True)):
        if q0 == q1:
            continue
        sequence_tensors = for_sample(tensors, b)._replace(
            q=tensors.q[q0:q1].unsqueeze(0),
            k=tensors.k[k0:k1].unsqueeze(0),
            v=tensors.v[k0:k1].unsqueeze(0),
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )
        sequence_problem = problem.replace(
            layout="bshd", batch=1, seqlen_q=q1 - q0, seqlen_k=k1 - k0, total_q=0, total_k=0,
            score_fn=single_sample(problem.score_fn, b),
        )  # fmt: skip
        sequence_keys: Any = None if keys is None else tuple(key[b : b + 1] for key in keys)
        yield Sequence(Call(sequence_problem, sequence_tensors, sequence_keys), slice(q0, q1), slice(k0, k1))
