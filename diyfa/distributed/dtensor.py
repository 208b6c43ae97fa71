"""Attention of DTensors, which returns DTensors.

Context parallel attention: the mesh dimensions that shard the sequence are the group of the call. `flash_attention` and
its relatives: each rank computes its own samples and heads, and nothing is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.sharding import Group, gather_shards
from diyfa.dropout import with_origins
from diyfa.eight_bits import EIGHT_BIT_DTYPES
from diyfa.features import TENSORS, Feature, Sizes
from diyfa.ops import new_rng_state
from diyfa.options import LENGTHS, Lengths
from diyfa.problem import LAYOUTS, VARLEN


def _sequence_dims(q: DTensor, layout: str) -> list[int]:
    """Return the mesh dimensions that shard the sequence.

    Raises:
        ValueError: there is none, or q is sharded over its features or a partial sum.
    """
    rows = row_dim(layout)
    allowed = (Replicate(), *(Shard(dim) for dim in range(q.dim() - 1)))
    if any(placement not in allowed for placement in q.placements) or Shard(rows) not in q.placements:
        raise ValueError(
            f"q must be sharded along its sequence, Shard({rows}), and be no partial sum nor sharded by features, got "
            f"placements {q.placements}"
        )
    return [n for n, placement in enumerate(q.placements) if placement == Shard(rows)]


def _local_head_values(x: torch.Tensor | None, q: DTensor, layout: str) -> torch.Tensor | None:
    """Return the local tensor of x, whose last dimension is the heads. Its gradient is Partial where x is a replica."""
    if not isinstance(x, DTensor):
        return x
    placements = [Shard(x.dim() - 1) if p == Shard(head_dim(layout)) else Replicate() for p in q.placements]
    if x.device_mesh != q.device_mesh or list(x.placements) != placements:
        raise ValueError(f"sinks and alibi_slopes must have placements {placements} on q's mesh, got {x.placements}")
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in placements])


def _first_index(q: DTensor, dim: int) -> int:
    """Return the index of this rank's first element along `dim`. DTensors are cut like `torch.chunk`."""
    first, size = 0, q.shape[dim]
    for n, placement in enumerate(q.placements):
        if placement == Shard(dim):
            size_per_rank, coordinate = -(-size // q.device_mesh.size(n)), q.device_mesh.get_local_rank(n)
            start = min(coordinate * size_per_rank, size)
            first, size = first + start, min(size_per_rank, size - start)
    return first


def _placed(local: torch.Tensor, q: DTensor, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """Return the DTensor of this global shape on q's mesh. The caller gives the shape, as shards may be uneven."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def with_local_tensors(
    attend: Callable[..., Any], qkv: Sequence[torch.Tensor], group: Group, layout: str, options: dict[str, Any]
) -> Any:
    """Run `attend(q, k, v, group, options)` on the local tensors of DTensors; return results placed like q.

    Raises:
        TypeError, ValueError: some of q, k, v are no DTensors, or placed otherwise; `group` is another mesh.
    """
    q, k, v = qkv
    if not isinstance(q, DTensor) or not isinstance(k, DTensor) or not isinstance(v, DTensor):
        raise TypeError(f"q, k and v must all be DTensors or none, got {', '.join(type(x).__name__ for x in qkv)}")
    mesh, placements = q.device_mesh, q.placements
    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != mesh or x.placements != placements:
            raise ValueError(f"q, k and v must be placed alike, got q {placements} and {name} {x.placements}")
    dims = _sequence_dims(q, layout)
    heads = head_dim(layout)
    shards = math.prod(mesh.size(n) for n, placement in enumerate(placements) if placement == Shard(heads))
    if q.shape[heads] % shards or k.shape[heads] % shards:  # uneven shards would pair query heads with wrong KV heads
        raise ValueError(f"{q.shape[heads]} query and {k.shape[heads]} KV heads must be multiples of {shards} shards")
    sub_mesh: Any = mesh
    if len(dims) < mesh.ndim:
        if mesh.mesh_dim_names is None:
            raise ValueError("a mesh with other dimensions than the sequence's needs mesh_dim_names")
        sub_mesh = mesh[tuple(mesh.mesh_dim_names[n] for n in dims)]
    if group is not None and group != sub_mesh:
        raise ValueError(f"group must be None or the dimensions of q's mesh that shard the sequence, got {group}")
    options = options | {name: _local_head_values(options[name], q, layout) for name in ("sinks", "alibi_slopes")}
    options["mask_origin"] = (
        0 if layout == VARLEN else _first_index(q, LAYOUTS[layout][0]),
        _first_index(q, head_dim(layout)),
    )
    options["state_groups"] = tuple(mesh.get_group(n) for n in range(mesh.ndim))  # the whole mesh has one dropout state
    result = attend(q.to_local(), k.to_local(), v.to_local(), sub_mesh, options)
    shape = (*q.shape[:-1], v.shape[-1])
    if isinstance(result, torch.Tensor):
        return _placed(result, q, placements, shape)
    out, lse = result
    lse_dims = {row_dim(layout): lse.dim() - 1, heads: lse.dim() - 2}
    lse_placements = [Shard(lse_dims.get(p.dim, p.dim)) if isinstance(p, Shard) else p for p in placements]
    sizes = *q.shape[: lse.dim() - 2], q.shape[heads], q.shape[row_dim(layout)]
    return _placed(out, q, placements, shape), _placed(lse, q, lse_placements, sizes)


# ---- Sharded over batch or heads ------------------------------------------------------------------------------------

BATCH, HEADS, REPLICATED = "batch", "heads", "replicated"  # the dimension of a call that a mesh dimension shards


def _dims(x: torch.Tensor, layout: str) -> dict[int, str]:
    """Return {dimension: BATCH or HEADS} of x: q, k, v or a tensor that packs them. Others may not be sharded.

    A tensor that packs q, k and v (or k and v) has a dimension of 3 (or 2) before its heads.
    """
    heads = {_heads_dim(x, layout): HEADS}
    return heads if layout == VARLEN else {0: BATCH, **heads}


def _heads_dim(x: torch.Tensor, layout: str) -> int:
    return 1 if layout == "bhsd" else x.dim() - 2


def _sharded_axes(name: str, x: DTensor, layout: str) -> list[str]:
    """Return BATCH, HEADS or REPLICATED for each mesh dimension, from the placements of one of the call's tensors.

    Raises:
        ValueError: the tensor is sharded in another way, or a partial sum.
    """
    dims = _dims(x, layout)
    axes = []
    for placement in x.placements:
        if placement == Replicate():
            axes.append(REPLICATED)
        elif type(placement) is Shard and placement.dim in dims:
            axes.append(dims[placement.dim])
        elif placement == Shard(row_dim(layout)):
            raise ValueError(
                f"{name} is sharded along its sequence, {placement}: call "
                "diyfa.distributed.context_parallel_attention, or redistribute it over batch or heads"
            )
        else:
            allowed = ", ".join(f"Shard({dim}) ({axis})" for dim, axis in dims.items())
            raise ValueError(f"{name} must be replicated or {allowed}, got placements {x.placements}: redistribute it")
    return axes


def _needed_placements(feature: Feature, x: torch.Tensor, axes: Sequence[str], sizes: Sizes) -> list[Any]:
    """Return the placements in which a rank needs an optional tensor, from the letters of its shape rule.

    Raises:
        TypeError, ValueError: x is no tensor, or its global shape does not fit.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{feature.name} must be a torch.Tensor, got {type(x).__name__}")
    assert feature.shape is not None, "every optional tensor has a shape"
    if problem := feature.shape.refuses(x, sizes):
        raise ValueError(f"{feature.name} must {problem}")
    letters = max(feature.shape.letters, key=len)
    missing = len(letters) - x.dim()  # leading dimensions that x lacks: it is broadcast over them
    placements: list[Any] = []
    for axis in axes:
        dim = letters.find(axis[0]) - missing if axis[0] in letters else -1
        placements.append(Shard(dim) if dim >= 0 and x.shape[dim] == sizes[axis[0]] else Replicate())
    return placements


def _local_tensor(
    feature: Feature, x: torch.Tensor | None, q: DTensor, axes: Sequence[str], sizes: Sizes
) -> torch.Tensor | None:
    """Return the local tensor of an optional tensor. Its gradient is Partial over mesh dimensions that shard only q."""
    if x is None:
        return None
    placements = _needed_placements(feature, x, axes, sizes)
    if not isinstance(x, DTensor):
        if any(placement != Replicate() for placement in placements):
            raise TypeError(f"{feature.name} must be a DTensor beside q, k and v, got {type(x).__name__}")
        return x
    if x.device_mesh != q.device_mesh:
        raise ValueError(f"all tensors must be on one mesh: q is on {q.device_mesh}, {feature.name} {x.device_mesh}")
    grad_placements = [
        Partial() if p == Replicate() and axis != REPLICATED else p for p, axis in zip(placements, axes, strict=True)
    ]
    return x.redistribute(placements=placements).to_local(grad_placements=grad_placements)


def _dropout_state(q: DTensor, state: torch.Tensor | None, samples: int, layout: str) -> torch.Tensor:
    """Return the global dropout state with the origins of this rank's samples and heads; the first rank draws it."""
    if state is not None and state.shape != (2,):
        raise ValueError(f"rng_state must have shape (2,), seed and offset, got {tuple(state.shape)}")
    if state is None:
        mesh = q.device_mesh
        state = gather_shards(new_rng_state(q.device), [mesh.get_group(n) for n in range(mesh.ndim)])[:2]
    begins = dict.fromkeys((BATCH, HEADS), 0) | {axis: _first_index(q, dim) for dim, axis in _dims(q, layout).items()}
    return with_origins(state, [(begins[BATCH] + b, begins[HEADS], 0, 0) for b in range(samples)])


def attend_with_shards(
    attend: Callable[[tuple[Any, ...], Lengths, dict[str, Any]], Any],
    owners: dict[str, Any],
    lengths: Lengths,
    arguments: dict[str, Any],
) -> Any:
    """Run `attend(owners, lengths, arguments)` on this rank's samples and heads; return results sharded like `owners`.

    `owners` are q, k and v by name, or the tensors that pack them.

    Raises:
        TypeError, ValueError: some are no DTensors, sharded otherwise than over batch or heads, or placed differently.
    """
    layout, names = arguments["layout"], list(owners)
    if not all(isinstance(x, DTensor) for x in owners.values()):
        kinds = ", ".join(type(x).__name__ for x in owners.values())
        raise TypeError(f"{', '.join(names)} must all be DTensors or none, got {kinds}")
    tensors = list(owners.values())
    q = tensors[0]  # or what packs it
    if q.dtype in EIGHT_BIT_DTYPES:
        raise ValueError(f"DTensors of {q.dtype} have no rule for descales: give each rank's part, to_local()")
    if layout != VARLEN and min(x.dim() for x in tensors) < 4:
        raise ValueError(f"DTensors must have 4 dimensions, got {[tuple(x.shape) for x in tensors]}")
    axes = _sharded_axes(names[0], q, layout)
    for name, x in owners.items():
        if x.device_mesh != q.device_mesh or _sharded_axes(name, x, layout) != axes:
            placed = f"{names[0]} {q.placements} and {name} {x.placements}"
            raise ValueError(f"{', '.join(names)} must be placed alike on one mesh, got {placed}")
    shards = math.prod([q.device_mesh.size(n) for n, axis in enumerate(axes) if axis == HEADS])
    for name, x in owners.items():
        heads = x.shape[_heads_dim(x, layout)]
        if heads % shards:  # uneven shards would pair query heads with wrong KV heads
            raise ValueError(
                f"the {heads} heads of {name} must be a multiple of {shards} shards: shard fewer mesh dimensions over "
                "heads, or repeat k and v"
            )
    optional = {feature.name: feature for feature in TENSORS}
    all_arguments = {**lengths._asdict(), **arguments}
    keys, offsets = tensors[-1], lengths.cu_seqlens_q
    if layout == VARLEN:
        batch, rows = 0 if offsets is None else offsets.shape[0] - 1, (lengths.max_seqlen_q, lengths.max_seqlen_k)
    else:
        batch, rows = q.shape[0], (q.shape[row_dim(layout)], keys.shape[row_dim(layout)])
    sizes = {"b": batch, "h": q.shape[_heads_dim(q, layout)], "q": rows[0], "k": rows[1]}
    local: dict[str, Any] = {
        name: _local_tensor(optional[name], all_arguments[name], q, axes, sizes)
        for name in optional
        if name in all_arguments
    }
    local_tensors = tuple(x.to_local() for x in tensors)
    if arguments["dropout_p"]:
        samples = batch if layout == VARLEN else local_tensors[0].shape[0]
        local["rng_state"] = _dropout_state(q, local.get("rng_state"), samples, layout)
    lengths = lengths._replace(**{name: local.pop(name) for name in LENGTHS if name in local})
    result = attend(local_tensors, lengths, {**arguments, **local})
    results = (result,) if isinstance(result, torch.Tensor) else result
    wholes = tuple(_placed_result(x, n == 0, q, axes, layout) for n, x in enumerate(results))
    return wholes[0] if isinstance(result, torch.Tensor) else wholes


def _placed_result(x: torch.Tensor, is_out: bool, q: DTensor, axes: Sequence[str], layout: str) -> DTensor:
    """Return the DTensor of a result: out, a tensor (batch, heads, …) such as the log-sum-exp, or an empty one."""
    sizes = {axis: q.shape[dim] for dim, axis in _dims(q, layout).items()}
    dims = {HEADS: 0} if layout == VARLEN else {BATCH: 0, HEADS: 1}
    if is_out:
        dims = {axis: dim for dim, axis in _dims(x, layout).items()}
    elif x.dim() == 1:
        dims = {}
    shape = list(x.shape)
    for axis, dim in dims.items():
        shape[dim] = sizes[axis]
    return _placed(x, q, [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes], tuple(shape))
