"""Ring attention: K/V shards travel round the ranks, queries stay (Liu et al. 2023, arXiv:2310.01889).

A rank's shard is its rows of the sequence. In step `shift` every rank attends with its own queries to the K/V shard of
rank `rank - shift`. Steps that have no work on any rank (sliding windows) are left out; shards then hop over the ranks
between. `steps.py` says which attention calls make up a step.

Forward, in every step: start the transfer that brings the next K/V shard, attend to the current one, merge the float32
output into the result by its log-sum-exp (`merge.py`), wait for the transfer.

Backward: the K/V shards travel once more. The float32 sums of dk and dv follow their shard one step behind. Each rank
adds its contribution to them, and a last hop brings them to the shard's owner. A step is the backend's own backward
pass, given the final output and log-sum-exp. With these p = exp(s - lse) are the weights of the whole row, so the
gradients of the steps are just added.

Common key, for float32 inputs: keys may have a large vector in common.

1. Softmax does not depend on this vector, but each log-sum-exp L grows with it, and L has an error of L·2**-24.
2. The merge weights exp(L - lse) and the output get this error, so delta = rowsum(dout * out) does not fit the weights
   p of the backward pass: a row of dS sums to a small number instead of zero.
3. dq = dS k contains that small number times the large vector.

So the ring subtracts the vector from the keys (`common_key`), and adds its scores to the returned log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diyfa import ops
from diyfa.distributed.merge import INF, Merged, as_rows, head_dim, row_dim
from diyfa.distributed.sharding import gather_shards
from diyfa.distributed.steps import Call, Range, Step
from diyfa.dropout import with_origins
from diyfa.options import NO_LENGTHS, AttentionOptions, Lengths


class Ring(NamedTuple):
    """The schedule and the options of one ring attention call."""

    group: dist.ProcessGroup
    steps: tuple[Step, ...]
    options: AttentionOptions  # of the whole call; dropout's state is the only optional tensor in it
    mask_origin: tuple[int, int] = (0, 0)  # index in dropout's mask of this rank's first sample and query head


def _let_nccl_start(device: torch.device) -> None:
    """Delay the next kernel of this stream by some microseconds, so that NCCL's kernel starts before it.

    NCCL moves messages by a kernel on its own stream. That kernel waits for the same work as the attention kernel that
    is launched next. If attention started first, it would fill the GPU and the transfer would start after it.
    """
    stream, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)  # NCCL's have priority 0
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        torch.zeros(1, device=device)
    stream.wait_stream(aside)


class _Transfer:
    """Messages in flight: tensors sent to rank + hop, and tensors of the same shapes received from rank - hop."""

    def __init__(self, group: dist.ProcessGroup, messages: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.arriving: list[list[torch.Tensor]] = []
        operations = []
        for hop, tensors in messages:
            to, by = (dist.get_global_rank(group, (rank + n) % ranks) for n in (hop, -hop))
            received = [torch.empty_like(x) for x in tensors]
            operations += [dist.P2POp(dist.isend, x, to, group) for x in tensors]
            operations += [dist.P2POp(dist.irecv, x, by, group) for x in received]
            self.arriving.append(received)
        self.sent = [tensors for _, tensors in messages]  # keeps their memory until the transfer is done
        self.requests = dist.batch_isend_irecv(operations) if operations else []
        if operations and operations[0].tensor.device.type == "cuda":
            _let_nccl_start(operations[0].tensor.device)

    def wait(self) -> list[list[torch.Tensor]]:
        """Return the received tensors of each message."""
        for request in self.requests:
            request.wait()
        return self.arriving


def _lengths(call: Call, device: torch.device) -> Lengths:
    """Return the packed lengths of one call, or NO_LENGTHS. The copy of the offsets to `device` is asynchronous."""
    if not call.offsets_q:
        return NO_LENGTHS
    both = call.offsets_q, call.offsets_k
    longest_q, longest_k = (max(b - a for a, b in pairwise(offsets)) for offsets in both)
    on_cpu = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in both)
    offsets_q, offsets_k = (x.to(device, non_blocking=True) for x in on_cpu)
    return Lengths(offsets_q, offsets_k, None, longest_q, longest_k)


def _rows(x: torch.Tensor, rows: Range, dim: int) -> torch.Tensor:
    """Return a view of rows [rows[0], rows[1]) along `dim`."""
    return x.narrow(dim, rows[0], rows[1] - rows[0])


def call_options(ring: Ring, call: Call, q: torch.Tensor, sinks: torch.Tensor | None) -> AttentionOptions:
    """Return the options of one call. Its results are float32 at least, because they are summed."""
    (left, right), state = call.window, ring.options.rng_state
    return ring.options._replace(
        window_left=left, window_right=right, sinks=sinks if call.has_diagonal else None,
        out_dtype="float32" if q.dtype in (torch.float16, torch.bfloat16) else "",
        rng_state=None if state is None else with_origins(state, _origins(ring, call, q)),
    )  # fmt: skip


def _origins(ring: Ring, call: Call, q: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return (sample, query head, query, key) of the first element of each sample or packed sequence of one call."""
    sample, head = ring.mask_origin
    if call.offsets_q:
        return [(x.sequence, head, x.query, x.key) for x in call.origins]
    (origin,) = call.origins
    return [(sample + b, head, origin.query, origin.key) for b in range(q.shape[0])]


def has_common_key(ranks: int, k: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> bool:
    """Return whether the ring subtracts a `common_key`.

    Not with a softcap, which bounds L itself, nor with sinks, which are no product with a key. Not for other dtypes
    than float32: the rounding of their inputs is far larger.
    """
    return k.dtype == torch.float32 and ranks > 1 and not softcap and sinks is None


def common_key(ring: Ring, k: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return the vector that all ranks' keys have in common, shaped like one row of `k`, or None (`has_common_key`).

    All ranks return the same. Each feature is the keys' value nearest to zero, or zero where signs differ: no key grows
    in magnitude, and none loses digits to a far larger one.
    """
    if not has_common_key(dist.get_world_size(ring.group), k, ring.options.softcap, sinks):
        return None
    dim = row_dim(ring.options.layout)
    # Packed rows before the first or after the last sequence belong to none and may hold anything: leave them out.
    ends = [row for call in ring.steps[0].calls for row in call.keys]
    keys = _rows(k, (min(ends, default=0), max(ends, default=0)), dim)
    if keys.shape[dim]:
        bounds = torch.stack((keys.amin(dim, keepdim=True), keys.amax(dim, keepdim=True)))
    else:
        row = [1 if n == dim else size for n, size in enumerate(k.shape)]
        bounds = torch.stack((k.new_full(row, INF), k.new_full(row, -INF)))
    lower, upper = gather_shards(bounds[None], (ring.group,)).unbind(1)
    common = lower.amin(0).clamp(min=0) + upper.amax(0).clamp(max=0)
    return torch.where(common.isfinite(), common, 0.0)


def _per_query_head(ring: Ring, common: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the common key of each query head's KV head, times the scale of the scores."""
    dim = head_dim(ring.options.layout)
    return common.repeat_interleave(q.shape[dim] // common.shape[dim], dim) * ring.options.sm_scale


def _with_common_key(ring: Ring, lse: torch.Tensor, q: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp over the original keys; rows that see no key keep their infinity."""
    scores = (q * _per_query_head(ring, common, q)).sum(-1)
    scores = scores if ring.options.layout == "bhsd" else scores.transpose(-1, -2)
    return torch.where(lse.isinf(), lse, lse + scores)


def forward_step(
    ring: Ring,
    step: Step,
    q: torch.Tensor,
    current_kv: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    merged: Merged,
) -> None:
    """Attend to the K/V shard `current_kv` and merge the result into `merged`."""
    dim = row_dim(ring.options.layout)
    for call in step.calls:
        queries, (keys, values) = _rows(q, call.queries, dim), (_rows(x, call.keys, dim) for x in current_kv)
        options = call_options(ring, call, q, sinks)
        merged.add(call.queries[0], *ops.forward(queries, keys, values, _lengths(call, q.device), options))


def ring_forward(
    ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and the lse without the common key, which `ring_gradients` needs, of this rank's queries."""
    common = common_key(ring, k, sinks)
    if common is not None:
        k = k - common
    merged = Merged(q, v.shape[-1], ring.options.layout, ring.options.backend)
    current_kv = [k.contiguous(), v.contiguous()] if len(ring.steps) > 1 else [k, v]
    for step, following in zip(ring.steps, (*ring.steps[1:], None), strict=True):
        transfer = _Transfer(ring.group, [(following.shift - step.shift, current_kv)]) if following else None
        try:
            forward_step(ring, step, q, current_kv, sinks, merged)
        finally:  # also if a kernel refuses the call, as it does on all ranks: no message may be left for the next call
            if transfer:
                (current_kv,) = transfer.wait()
    out, lse = merged.result()
    return out, lse if common is None else _with_common_key(ring, lse, q, common), lse


class Sum:
    """A gradient in float32 (float64 for float64 inputs) that adds up contributions to ranges of its rows."""

    def __init__(self, template: torch.Tensor, dim: int) -> None:
        self.template, self.dim = template, dim
        self.total: torch.Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.template.dtype, torch.float32)

    def add(self, first_row: int, contribution: torch.Tensor) -> None:
        """Add a contribution to the rows from `first_row` on."""
        if self.total is None and contribution.shape == self.template.shape:
            self.total = contribution.to(self.wide)
        else:
            self.total_or_zeros().narrow(self.dim, first_row, contribution.shape[self.dim]).add_(contribution)

    def total_or_zeros(self) -> torch.Tensor:
        if self.total is None:
            self.total = torch.zeros_like(self.template, dtype=self.wide)
        return self.total


class Saved(NamedTuple):
    """The tensors of a rank's queries that each backward step reads, and the sums dq and dsinks that it adds to."""

    q: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    dq: Sum
    dsinks: torch.Tensor | None


def backward_step(ring: Ring, step: Step, saved: Saved, current_kv: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add to dq and dsinks. Return this rank's contributions to dk and dv of the K/V shard `current_kv`, in float32."""
    dim = row_dim(ring.options.layout)
    sums = [Sum(x, dim) for x in current_kv]
    for call in step.calls:
        q, out, dout = (_rows(x, call.queries, dim) for x in (saved.q, saved.out, saved.dout))
        lse = _rows(saved.lse, call.queries, -1).contiguous()
        dlse = None if saved.dlse is None else _rows(saved.dlse, call.queries, -1).contiguous()
        keys = [_rows(x, call.keys, dim) for x in current_kv]
        options = call_options(ring, call, q, saved.sinks)
        gradients = ops.differentiate((dout, dlse), (q, *keys), (out, lse), _lengths(call, q.device), options)
        saved.dq.add(call.queries[0], gradients[0])
        for total, x in zip(sums, gradients[1:3], strict=True):
            total.add(call.keys[0], x)
        if saved.dsinks is not None and call.has_diagonal:
            saved.dsinks.add_(gradients[ops.GRADIENT_INDEX["sinks"]])
    return [total.total_or_zeros() for total in sums]


def ring_backward(ring: Ring, saved: Saved, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv of this rank's own K/V shard, in float32. Add the gradients of its queries to `saved`."""
    current_kv = [k.contiguous(), v.contiguous()] if len(ring.steps) > 1 else [k, v]
    # Messages of a transfer: the sums of dk and dv of the step before, to the rank that holds their K/V shard in this
    # step; then this step's K/V shard, to the rank that holds it in the next.
    messages: list[Any] = []
    for step, following in zip(ring.steps, (*ring.steps[1:], None), strict=True):
        if following:
            messages.append((following.shift - step.shift, current_kv))
        transfer = _Transfer(ring.group, messages)
        sums = backward_step(ring, step, saved, current_kv)
        arrived = transfer.wait()
        if step.shift:
            for local, received in zip(sums, arrived[0], strict=True):
                local += received
        if following:
            current_kv = arrived[-1]
            messages = [(following.shift - step.shift, sums)]
        elif step.shift:  # the last hop, to the owner of the shard
            (sums,) = _Transfer(ring.group, [(dist.get_world_size(ring.group) - step.shift, sums)]).wait()
    dk, dv = sums
    return dk, dv


def ring_gradients(
    ring: Ring, saved: Sequence[Any], gradients: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dq, dk and dv in float32 (float64 for float64 inputs), and dsinks or None.

    `saved` holds q, k, v, sinks, out and the last result of `ring_forward`.
    """
    q, k, v, sinks, out, lse = saved
    dout, dlse = gradients
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    dq = Sum(q, row_dim(ring.options.layout))
    common = common_key(ring, k, sinks)
    if common is not None:
        k = k - common
    dk, dv = ring_backward(ring, Saved(q, sinks, out, lse, dout, dlse, dq, dsinks), k, v)
    if common is not None and dlse is not None:  # a row of dS sums to its dlse, so dq lacks dlse times the common key
        dlse_or_zero = torch.where(lse.isinf(), 0.0, dlse)
        dq.total_or_zeros().add_(as_rows(dlse_or_zero, ring.options.layout) * _per_query_head(ring, common, q))
    return dq.total_or_zeros(), dk, dv, dsinks
