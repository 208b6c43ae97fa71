"""Context parallel attention in a compiled graph: a forward and a backward operator, both opaque to tracing.

A graph cannot hold the group and the options that are no numbers. It names them by one number (`call_number`).

The backward pass reads five tensors, (q, k, v, out, lse), which `attention.forward` returns as `saved`. Some of them
are inputs or results of the forward operator, and an operator may not return these again. It returns the others as
`kept`, always the last ones of the five:

* all five, if Ulysses exchanged them: they are this rank's heads of all rows;
* lse alone, if a ring subtracts a common key: it is the log-sum-exp without that key;
* none in other calls.

A function `…_fake` describes the results of an operator without computing them, for tracing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from diyfa import ops, registry, validation
from diyfa.distributed import attention, ulysses
from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.ring import has_common_key
from diyfa.distributed.sharding import Group, process_groups
from diyfa.problem import empty_output

TENSORS = ("cu_seqlens", "alibi_slopes", "sinks", "rng_state")
SCALARS = ("window_left", "window_right", "sm_scale", "softcap", "dropout_p")  # may be symbols in a graph
_calls: dict[int, tuple[Group, dict[str, Any]]] = {}  # one entry for each kind of call in the program

_lib = torch.library.Library("diyfa_distributed", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state"
_OPTIONS = "SymInt window_left, SymInt window_right, float? sm_scale, float softcap, float dropout_p, int number"
_lib.define(f"attention_fwd({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse, Tensor[] kept)")
_lib.define(
    f"attention_bwd(Tensor dout, Tensor dlse, {_INPUTS}, Tensor out, Tensor lse, Tensor[] kept, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)


@torch.compiler.assume_constant_result
def call_number(group: Group, *options: Any) -> int:
    """Return the number that stands for a group and the options (name, value, name, value …) in a compiled graph.

    It is a hash of the options and of the groups' names and sizes. Compiled graphs are cached on disk by this number,
    among other things: in another run it must not stand for another method or for more ranks.
    """
    group = getattr(group, "real_obj", group)  # torch.compile shows an object that stands for a process group
    sizes = [(x.group_name, dist.get_world_size(x)) for x in process_groups(group)]
    number = int.from_bytes(hashlib.sha256(repr((sizes, options)).encode()).digest()[:7], "big")
    _calls[number] = group, dict(zip(options[::2], options[1::2], strict=True))
    return number


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, arguments: dict[str, Any]) -> Any:
    """Run `context_parallel_attention` with its options by name, as one operator of a graph."""
    validation.check_tensors(q=q, k=k, v=v)
    q, k, v = attention.autocast(q, k, v)
    left, right = (validation.as_integer(x) for x in arguments["window"])  # values are checked by all ranks together
    scale = None if arguments["sm_scale"] is None else float(arguments["sm_scale"])
    softcap, dropout_p = float(arguments["softcap"]), float(arguments["dropout_p"])
    constants = {name: x for name, x in arguments.items() if name not in (*TENSORS, *SCALARS, "window")}
    # The backward pass may run in another thread, which does not see this thread's `use_backend`.
    constants["backend"] = arguments["backend"] or registry.forced_backend() or None
    # Operators do not see requires_grad.
    constants["gradients"] = attention.required_gradients(q, k, v, arguments["sinks"])
    state, constants["was_drawn"] = arguments["rng_state"], False
    if dropout_p != 0 and state is None:  # drawn in the graph, so that both passes get the same state
        state, constants["was_drawn"] = ops.new_rng_state(q.device), True
    number = call_number(group, *[x for pair in constants.items() for x in pair])
    tensors = [state if name == "rng_state" else arguments[name] for name in TENSORS]
    out, lse, _ = torch.ops.diyfa_distributed.attention_fwd(
        q, k, v, *tensors, left, right, scale, softcap, dropout_p, number
    )
    return (out, lse) if arguments["return_lse"] else out


def _unpacked(flat: Any) -> tuple[tuple[dist.ProcessGroup, ...], dict[str, Any]]:
    """Return (groups, options by name) from an operator's arguments after q, k and v."""
    *flat, number = flat
    group, constants = _calls[number]
    named = dict(zip((*TENSORS, *SCALARS), flat, strict=True))
    window = named.pop("window_left"), named.pop("window_right")
    return process_groups(group), {**constants, **named, "window": window}


def _method(q: torch.Tensor, groups: tuple[dist.ProcessGroup, ...], arguments: dict[str, Any]) -> str:
    """Return the method. The sizes alone decide "auto", because a graph has the shapes of one method."""
    if arguments["method"] != "auto":
        return arguments["method"]
    if len(groups) == 2:
        return "both"
    heads = q.shape[head_dim(attention.kernel_layout(arguments))]
    return "ring" if ulysses.refuses(heads, dist.get_world_size(groups[0])) else "ulysses"


def _fwd(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    groups, arguments = _unpacked(rest)
    call = attention.agreed_call(q, k, v, groups, arguments | {"method": _method(q, groups, arguments)})
    out, lse, saved = attention.forward(attention.plan_of(call, groups), call.qkv)
    kept = [x.contiguous() for x in saved if not any(x is known for known in (*call.qkv, out, lse))]
    if len(kept) == len(saved):  # after Ulysses the results may have any strides, but `_fwd_fake` says contiguous
        out, lse = out.contiguous(), lse.contiguous()
    return out, lse, kept


def _fwd_fake(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    groups, arguments = _unpacked(rest)
    layout = attention.kernel_layout(arguments)
    out, lse = empty_output(q, v.shape[-1]), ops.empty_lse(q, layout)
    method, rows, heads = _method(q, groups, arguments), row_dim(layout), head_dim(layout)
    ring_ranks, exchange_ranks = (dist.get_world_size(groups[n]) for n in (0, -1))
    if method == "ring" or exchange_ranks == 1:
        may_subtract = method != "ulysses"
        subtracts = may_subtract and has_common_key(ring_ranks, k, arguments["softcap"], arguments["sinks"])
        return out, lse, [torch.empty_like(lse)] if subtracts else []
    out = q.new_empty(out.shape)

    def exchanged(x: torch.Tensor, rows: int, heads: int, repeats: int = 1) -> torch.Tensor:
        shape = list(x.shape)
        shape[rows], shape[heads] = shape[rows] * exchange_ranks, shape[heads] * repeats // exchange_ranks
        return x.new_empty(shape)

    repeats = ulysses.kv_head_repeats(k.shape[heads], exchange_ranks)
    exchanged_qkv = [exchanged(q, rows, heads), *(exchanged(x, rows, heads, repeats) for x in (k, v))]
    return out, lse, [*exchanged_qkv, exchanged(out, rows, heads), exchanged(lse, lse.dim() - 1, lse.dim() - 2)]


def _bwd(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    tensors, (out, lse, kept, *options) = rest[: len(TENSORS)], rest[len(TENSORS) :]
    groups, arguments = _unpacked((*tensors, *options))
    call = attention.checked_call((q, k, v), groups, arguments | {"method": _method(q, groups, arguments)})
    call = attention.with_first_ranks_state(call, groups, arguments)
    call = call._replace(options=call.options._replace(batch_invariant=False))  # it concerns the forward pass only
    plan = attention.plan_of(call, groups)
    saved = [*call.qkv, out, lse]
    saved[len(saved) - len(kept) :] = kept
    dq, dk, dv, dsinks = attention.backward(plan, saved, dout, dlse)
    return *(x.contiguous() for x in (dq, dk, dv)), q.new_empty(0) if dsinks is None else dsinks


def _bwd_fake(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    sinks = rest[2]
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.options = inputs[: 3 + len(TENSORS)], inputs[3 + len(TENSORS) :]
    out, lse, kept = output
    ctx.save_for_backward(*tensors, out, lse, *kept)


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
    gradients = _gradients(ctx.options, dout, dlse, *ctx.saved_tensors)
    return *gradients, None, *(None for _ in ctx.options)


@once_differentiable
def _gradients(options: Any, dout: Any, dlse: Any, *saved: Any) -> Any:
    """Run the operator. `once_differentiable` must see that the gradients depend on `saved`, too."""
    q, k, v, cu_seqlens, slopes, sinks, state, out, lse, *kept = saved
    dq, dk, dv, dsinks = torch.ops.diyfa_distributed.attention_bwd(
        dout, dlse, q, k, v, cu_seqlens, slopes, sinks, state, out, lse, kept, *options
    )
    return dq, dk, dv, None, None, None if sinks is None else dsinks


for _name, _implementation, _fake in (("attention_fwd", _fwd, _fwd_fake), ("attention_bwd", _bwd, _bwd_fake)):
    _lib.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diyfa_distributed::{_name}", _fake, lib=_lib)
torch.library.register_autograd("diyfa_distributed::attention_fwd", _differentiate, setup_context=_setup, lib=_lib)
