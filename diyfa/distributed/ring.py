"""Ring attention: keys and values pass round the ranks, each of which keeps its queries (Liu et al. 2023,
arXiv:2310.01889; the merge by log-sum-exp as in FlashAttention-2, Dao 2023, arXiv:2307.08691).

Forward: while a rank computes with the keys that it has, the next ones arrive. The outputs of the steps, in float32,
are merged by their log-sum-exp (`merge.py`).

Backward: keys and values pass round once more, followed by the float32 sums of their gradients, to which each rank adds
its share; a last hop takes the sums home. Each step is the backend's own backward pass, given the final output and
log-sum-exp: these make its weights p = exp(s - lse) those of the whole row, so that shares of gradients, in float32,
are added and nothing has to be merged.

Steps without work on any rank (a window's) are skipped: keys then hop over the ranks between.

A log-sum-exp of L is known to L·2**-24 only, and so are the weights of a merge. Where the output of float32 inputs is
off by as much, rowsum(dout * out) no longer fits the weights that the backward pass forms, and what is left of a row of
dS, which sums up to nothing, is multiplied by what all keys have in common. Softmax does not depend on that part of the
keys, but L does, so it is taken off first (`common_key`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diyfa import ops
from diyfa.distributed.merge import INF, Merged, as_rows, head_dim, row_dim
from diyfa.distributed.sharding import gather_parts
from diyfa.distributed.steps import Call, Step
from diyfa.dropout import with_origins
from diyfa.options import WHOLE, AttentionOptions, Lengths


class Ring(NamedTuple):
    """What a ring has besides its tensors."""

    group: dist.ProcessGroup
    steps: tuple[Step, ...]
    options: AttentionOptions  # of the whole call, without other optional tensors than dropout's state
    first: tuple[int, int] = (0, 0)  # sample and query head that this rank's are in the whole call


def _let_it_begin(device: torch.device) -> None:
    """Hold what comes next on this stream back for some microseconds.

    NCCL moves messages by a kernel on a stream of its own, which waits for the same work as the attention kernel that
    is launched next. If that one began first it would fill the GPU, and the transfer would begin where it ends.
    """
    stream, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)  # NCCL's have priority 0
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        torch.zeros(1, device=device)
    stream.wait_stream(aside)


class _Transfer:
    """Tensors on their way to the rank `hop` places on, and those that come from as far behind."""

    def __init__(self, group: dist.ProcessGroup, parcels: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.arriving: list[list[torch.Tensor]] = []
        operations = []
        for hop, tensors in parcels:
            to, by = (dist.get_global_rank(group, (rank + n) % ranks) for n in (hop, -hop))
            coming = [torch.empty_like(x) for x in tensors]
            operations += [dist.P2POp(dist.isend, x, to, group) for x in tensors]
            operations += [dist.P2POp(dist.irecv, x, by, group) for x in coming]
            self.arriving.append(coming)
        self.sent = [tensors for _, tensors in parcels]  # alive until they are
        self.requests = dist.batch_isend_irecv(operations) if operations else []
        if operations and operations[0].tensor.device.type == "cuda":
            _let_it_begin(operations[0].tensor.device)

    def wait(self) -> list[list[torch.Tensor]]:
        for request in self.requests:
            request.wait()
        return self.arriving


def _lengths(call: Call, device: torch.device) -> Lengths:
    """Those of one call; offsets go to the device without waiting for it."""
    if not call.offsets_q:
        return WHOLE
    both = call.offsets_q, call.offsets_k
    longest_q, longest_k = (max(b - a for a, b in pairwise(offsets)) for offsets in both)
    offsets_q, offsets_k = (
        torch.tensor(x, dtype=torch.int32, device="cpu").to(device, non_blocking=True) for x in both
    )
    return Lengths(offsets_q, offsets_k, None, longest_q, longest_k)


def _rows(x: torch.Tensor, rows: tuple[int, int], dim: int) -> torch.Tensor:
    return x.narrow(dim, rows[0], rows[1] - rows[0])


def options_of(ring: Ring, call: Call, q: torch.Tensor, sinks: torch.Tensor | None) -> AttentionOptions:
    """Those of one call, whose results are added up in float32."""
    left, right = call.window
    out_dtype = "float32" if q.dtype in (torch.float16, torch.bfloat16) else ""
    state = ring.options.rng_state
    if state is not None:
        state = with_origins(state, _origins(ring, call, q))
    return ring.options._replace(
        window_left=left, window_right=right, sinks=sinks if call.own else None, out_dtype=out_dtype, rng_state=state
    )


def _origins(ring: Ring, call: Call, q: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Where each sample, or packed sequence, of one call stands in the whole."""
    sample, head = ring.first
    if call.offsets_q:
        return [(x.sequence, head, x.query, x.key) for x in call.origins]
    (own,) = call.origins
    return [(sample + b, head, own.query, own.key) for b in range(q.shape[0])]


def has_common_key(ranks: int, k: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> bool:
    """Whether `common_key` is looked for.

    Not where it cannot be taken off (a softcap, which bounds L itself, and sinks, which are no products with keys), or
    need not be: of other dtypes the rounding of the inputs is far larger.
    """
    return k.dtype == torch.float32 and ranks > 1 and not softcap and sinks is None


def common_key(ring: Ring, k: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """What all ranks' keys have in common, the same on every rank, shaped like one row of `k`; None: not looked for.

    Of each feature it is the value nearest to zero, or zero where signs differ, so that no key grows, and none loses
    digits to another that is far larger.
    """
    if not has_common_key(dist.get_world_size(ring.group), k, ring.options.softcap, sinks):
        return None
    dim = row_dim(ring.options.layout)
    ends = [row for call in ring.steps[0].calls for row in call.keys]  # between them no row that belongs to no sequence
    own = _rows(k, (min(ends, default=0), max(ends, default=0)), dim)
    if own.shape[dim]:
        bounds = torch.stack((own.amin(dim, keepdim=True), own.amax(dim, keepdim=True)))
    else:
        row = [1 if n == dim else size for n, size in enumerate(k.shape)]
        bounds = torch.stack((k.new_full(row, INF), k.new_full(row, -INF)))
    least, most = gather_parts(bounds[None], (ring.group,)).unbind(1)
    common = least.amin(0).clamp(min=0) + most.amax(0).clamp(max=0)
    return torch.where(common.isfinite(), common, 0.0)


def _of_query_heads(ring: Ring, common: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    dim = head_dim(ring.options.layout)
    return common.repeat_interleave(q.shape[dim] // common.shape[dim], dim) * ring.options.sm_scale


def _with_common_key(ring: Ring, lse: torch.Tensor, q: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of the keys as they were given; rows that see no key keep theirs."""
    scores = (q * _of_query_heads(ring, common, q)).sum(-1)
    scores = scores if ring.options.layout == "bhsd" else scores.transpose(-1, -2)
    return torch.where(lse.isinf(), lse, lse + scores)


def forward_step(
    ring: Ring, step: Step, q: torch.Tensor, held: Sequence[torch.Tensor], sinks: torch.Tensor | None, merged: Merged
) -> None:
    """Add to `merged` what the keys and values `held` come to."""
    dim = row_dim(ring.options.layout)
    for call in step.calls:
        queries, (keys, values) = _rows(q, call.queries, dim), (_rows(x, call.keys, dim) for x in held)
        options = options_of(ring, call, q, sinks)
        merged.add(call.queries[0], *ops.forward(queries, keys, values, _lengths(call, q.device), options))


def ring_forward(
    ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, the log-sum-exp that `ring_gradients` wants: without the common key) of this rank's queries."""
    common = common_key(ring, k, sinks)
    if common is not None:
        k = k - common
    merged = Merged(q, v.shape[-1], ring.options.layout, ring.options.backend)
    held = [k.contiguous(), v.contiguous()] if len(ring.steps) > 1 else [k, v]
    for step, following in zip(ring.steps, (*ring.steps[1:], None), strict=True):
        transfer = _Transfer(ring.group, [(following.shift - step.shift, held)]) if following else None
        try:
            forward_step(ring, step, q, held, sinks, merged)
        finally:  # of a call that kernels refuse, on every rank, no message is left for the next one
            arrived = transfer.wait() if transfer else [held]
        (held,) = arrived
    out, lse = merged.result()
    return out, lse if common is None else _with_common_key(ring, lse, q, common), lse


class Sum:
    """A gradient in float32 (float64) to which shares are added, each of some of the rows."""

    def __init__(self, like: torch.Tensor, dim: int) -> None:
        self.like, self.dim = like, dim
        self.total: torch.Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.like.dtype, torch.float32)

    def add(self, first: int, share: torch.Tensor) -> None:
        if self.total is None and share.shape == self.like.shape:
            self.total = share.to(self.wide)
        else:
            self.all().narrow(self.dim, first, share.shape[self.dim]).add_(share)

    def all(self) -> torch.Tensor:
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=self.wide)
        return self.total


class Saved(NamedTuple):
    """What the backward pass of a rank's queries reads in every step, and the sums that it adds to."""

    q: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    dq: Sum
    dsinks: torch.Tensor | None


def backward_step(ring: Ring, step: Step, saved: Saved, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add to dq and dsinks, and return this rank's shares of dk and dv, in float32, of the keys and values `held`."""
    dim = row_dim(ring.options.layout)
    shares = [Sum(x, dim) for x in held]
    for call in step.calls:
        q, out, dout = (_rows(x, call.queries, dim) for x in (saved.q, saved.out, saved.dout))
        lse = _rows(saved.lse, call.queries, -1).contiguous()
        dlse = None if saved.dlse is None else _rows(saved.dlse, call.queries, -1).contiguous()
        keys = [_rows(x, call.keys, dim) for x in held]
        options = options_of(ring, call, q, saved.sinks)
        found = ops.differentiate((dout, dlse), (q, *keys), (out, lse), _lengths(call, q.device), options)
        saved.dq.add(call.queries[0], found[0])
        for share, x in zip(shares, found[1:3], strict=True):
            share.add(call.keys[0], x)
        if saved.dsinks is not None and call.own:
            saved.dsinks.add_(found[ops.PLACES["sinks"]])
    return [share.all() for share in shares]


def ring_backward(ring: Ring, saved: Saved, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv, in float32, of what this rank holds; its queries' gradients are added to `saved`."""
    held = [k.contiguous(), v.contiguous()] if len(ring.steps) > 1 else [k, v]
    parcels: list[Any] = []  # the sums of the step before, on their way to the rank that has their keys now
    for step, following in zip(ring.steps, (*ring.steps[1:], None), strict=True):
        if following:
            parcels.append((following.shift - step.shift, held))
        transfer = _Transfer(ring.group, parcels)
        sums = backward_step(ring, step, saved, held)
        arrived = transfer.wait()
        if step.shift:
            for mine, others in zip(sums, arrived[0], strict=True):
                mine += others
        if following:
            held = arrived[-1]
            parcels = [(following.shift - step.shift, sums)]
        elif step.shift:
            (sums,) = _Transfer(ring.group, [(dist.get_world_size(ring.group) - step.shift, sums)]).wait()
    dk, dv = sums
    return dk, dv


def ring_gradients(
    ring: Ring, saved: Sequence[Any], gradients: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv, in float32 (float64), and dsinks or None.

    `saved` are q, k, v, sinks, out and the last that `ring_forward` returns.
    """
    q, k, v, sinks, out, lse = saved
    dout, dlse = gradients
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    dq = Sum(q, row_dim(ring.options.layout))
    common = common_key(ring, k, sinks)
    if common is not None:
        k = k - common
    dk, dv = ring_backward(ring, Saved(q, sinks, out, lse, dout, dlse, dq, dsinks), k, v)
    if common is not None and dlse is not None:  # the rows of dS sum up to dlse
        seen = torch.where(lse.isinf(), 0.0, dlse)
        dq.all().add_(as_rows(seen, ring.options.layout) * _of_query_heads(ring, common, q))
    return dq.all(), dk, dv, dsinks
