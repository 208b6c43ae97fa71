"""The call in a compiled graph: two operators, forward and backward, of which nothing is traced.

What a graph cannot hold, the group and the options, has a number. The forward operator returns what Ulysses exchanged
besides its results, because the backward one reads it; with a ring that is nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from diyfa import ops
from diyfa.distributed import attention, ulysses
from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.sharding import Group, groups_of
from diyfa.problem import empty_output

TENSORS = ("cu_seqlens", "alibi_slopes", "sinks")
_calls: list[tuple[Group, dict[str, Any]]] = []  # as many as there are kinds of calls in a program

_lib = torch.library.Library("diyfa_distributed", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? alibi_slopes, Tensor? sinks"
_lib.define(f"attention_fwd({_INPUTS}, int number) -> (Tensor out, Tensor lse, Tensor[] exchanged)")
_lib.define(
    f"attention_bwd(Tensor dout, Tensor dlse, {_INPUTS}, Tensor out, Tensor lse, Tensor[] exchanged, int number) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)


@torch.compiler.assume_constant_result
def number_of(group: Group, *options: Any) -> int:
    """The number of a call: of its group and of what else is no tensor, as (name, value, name, value …)."""
    group = getattr(group, "real_obj", group)  # torch.compile shows an object that stands for a process group
    call = group, dict(zip(options[::2], options[1::2], strict=True))
    if call not in _calls:
        _calls.append(call)
    return _calls.index(call)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, given: dict[str, Any]) -> Any:
    """`context_parallel_attention` with its options by name, as a graph sees it."""
    q, k, v = attention.autocast(q, k, v)
    options = [x for name, value in given.items() if name not in TENSORS for x in (name, value)]
    number = number_of(group, *options)
    tensors = [given[name] for name in TENSORS]
    out, lse, _ = torch.ops.diyfa_distributed.attention_fwd(q, k, v, *tensors, number)
    return (out, lse) if given["return_lse"] else out


def _given(tensors: Any, number: int) -> tuple[tuple[dist.ProcessGroup, ...], dict[str, Any]]:
    """(groups, options by name); "auto" is what the sizes decide, because a graph has the shapes of one method."""
    group, options = _calls[number]
    return groups_of(group), options | dict(zip(TENSORS, tensors, strict=True))


def _method(q: torch.Tensor, groups: tuple[dist.ProcessGroup, ...], given: dict[str, Any]) -> str:
    if given["method"] != "auto":
        return given["method"]
    if len(groups) == 2:
        return "both"
    heads = q.shape[head_dim(attention.layout_of(given))]
    return "ring" if ulysses.refuses(heads, dist.get_world_size(groups[0])) else "ulysses"


def _fwd(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    *tensors, number = rest
    groups, given = _given(tensors, number)
    call = attention.agreed_call(q, k, v, groups, given | {"method": _method(q, groups, given)})
    out, lse, exchanged = attention.forward(call, groups)
    if exchanged:  # in whatever order they came
        out, lse = out.contiguous(), lse.contiguous()
    return out, lse, [x.contiguous() for x in exchanged]


def _fwd_fake(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    *tensors, number = rest
    groups, given = _given(tensors, number)
    layout = attention.layout_of(given)
    out, lse = empty_output(q, v.shape[-1]), ops.empty_lse(q, layout)
    if _method(q, groups, given) == "ring":
        return out, lse, []
    out = q.new_empty(out.shape)
    size, rows, heads = dist.get_world_size(groups[-1]), row_dim(layout), head_dim(layout)

    def exchanged(x: torch.Tensor, rows: int, heads: int, repeats: int = 1) -> torch.Tensor:
        shape = list(x.shape)
        shape[rows], shape[heads] = shape[rows] * size, shape[heads] * repeats // size
        return x.new_empty(shape)

    repeats = ulysses.repeats_of(k.shape[heads], size)
    found = [exchanged(q, rows, heads), *(exchanged(x, rows, heads, repeats) for x in (k, v))]
    return out, lse, [*found, exchanged(out, rows, heads), exchanged(lse, lse.dim() - 1, lse.dim() - 2)]


def _bwd(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    *tensors, out, lse, exchanged, number = rest
    groups, given = _given(tensors, number)
    call = attention.described_call((q, k, v), groups, given | {"method": _method(q, groups, given)})
    dq, dk, dv, dsinks = attention.backward(call, groups, (out, lse, exchanged), (dout, dlse))
    return *(x.contiguous() for x in (dq, dk, dv)), q.new_empty(0) if dsinks is None else dsinks


def _bwd_fake(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    sinks = rest[2]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.number = inputs
    out, lse, exchanged = output
    ctx.save_for_backward(*tensors, out, lse, *exchanged)


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
    q, k, v, cu_seqlens, slopes, sinks, out, lse, *exchanged = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.diyfa_distributed.attention_bwd(
        dout, dlse, q, k, v, cu_seqlens, slopes, sinks, out, lse, exchanged, ctx.number
    )
    return dq, dk, dv, None, None, None if sinks is None else dsinks, None


for _name, _implementation, _fake in (("attention_fwd", _fwd, _fwd_fake), ("attention_bwd", _bwd, _bwd_fake)):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diyfa_distributed::{_name}", _fake, lib=_lib)
torch.library.register_autograd("diyfa_distributed::attention_fwd", _differentiate, setup_context=_setup, lib=_lib)
