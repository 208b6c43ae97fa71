"""Attention of DTensors, which returns DTensors.

Each mesh dimension shards one axis of the call, the batch, the heads or the sequence, or it replicates the tensors.

* `flash_attention` and its relatives (`attend_with_shards`): each rank computes its own samples and heads, and nothing
  is exchanged.
* Context parallel attention (`with_local_tensors`): the mesh dimensions that shard the sequence are the group of the
  call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from diyfa.distributed.merge import row_dim
from diyfa.distributed.sharding import Group, gather_shards
from diyfa.dropout import with_origins
from diyfa.eight_bits import EIGHT_BIT_DTYPES
from diyfa.features import TENSORS, Feature, Sizes
from diyfa.ops import new_rng_state
from diyfa.options import LENGTHS, Lengths
from diyfa.problem import VARLEN

BATCH, HEADS, SEQUENCE, REPLICATED = "batch", "heads", "sequence", "replicated"
SIZES = {BATCH: "B", HEADS: "H"}  # axis -> name of its size in the shapes of optional tensors
_OPTIONAL = {feature.name: feature for feature in TENSORS}


def _dims(x: torch.Tensor, layout: str) -> dict[str, int]:
    """Return {axis: dimension} of x: q, k, v, the output, or a tensor that packs q, k and v before its heads."""
    heads = 1 if layout == "bhsd" else x.dim() - 2
    dims = {HEADS: heads, SEQUENCE: row_dim(layout)}
    return dims if layout == VARLEN else {BATCH: 0, **dims}


def _sharded_axes(name: str, x: DTensor, layout: str, allowed: Sequence[str]) -> list[str]:
    """Return the axis of each mesh dimension, from the placements of one of the call's tensors.

    Raises:
        ValueError: the tensor is a partial sum, or sharded over another axis than those `allowed`.
    """
    dims = _dims(x, layout)
    axis_by_placement: dict[Any, str] = {Shard(dim): axis for axis, dim in dims.items()} | {Replicate(): REPLICATED}
    axes = [axis_by_placement.get(placement, "") for placement in x.placements]
    if SEQUENCE in axes and SEQUENCE not in allowed:
        raise ValueError(
            f"{name} is sharded along its sequence, {Shard(dims[SEQUENCE])}: call "
            "diyfa.distributed.context_parallel_attention, or redistribute it over batch or heads"
        )
    if "" in axes:
        choices = ", ".join(f"Shard({dims[axis]}) ({axis})" for axis in allowed if axis in dims)
        raise ValueError(f"{name} must be replicated or {choices}, got placements {x.placements}: redistribute it")
    return axes


def _common_axes(owners: dict[str, Any], layout: str, allowed: Sequence[str]) -> list[str]:
    """Check that `owners` are DTensors with equal placements, and that the shards of heads are even. Return the axes.

    Raises:
        TypeError, ValueError: some are no DTensors, or sharded otherwise.
    """
    names = ", ".join(owners)
    if not all(isinstance(x, DTensor) for x in owners.values()):
        kinds = ", ".join(type(x).__name__ for x in owners.values())
        raise TypeError(f"{names} must all be DTensors or none, got {kinds}")
    if layout != VARLEN and min(x.dim() for x in owners.values()) < 4:
        raise ValueError(f"DTensors must have 4 dimensions, got {[tuple(x.shape) for x in owners.values()]}")
    first, q = next(iter(owners.items()))
    axes = _sharded_axes(first, q, layout, allowed)
    for name, x in owners.items():
        if x.device_mesh != q.device_mesh or _sharded_axes(name, x, layout, allowed) != axes:
            placed = f"{first} {q.placements} and {name} {x.placements}"
            raise ValueError(f"{names} must have equal placements on one mesh, got {placed}")
    shards = math.prod([q.device_mesh.size(n) for n, axis in enumerate(axes) if axis == HEADS])
    for name, x in owners.items():
        heads = x.shape[_dims(x, layout)[HEADS]]
        if heads % shards:  # uneven shards would pair query heads with wrong KV heads
            raise ValueError(
                f"the {heads} heads of {name} must be a multiple of {shards} shards: shard fewer mesh dimensions over "
                "heads, or repeat k and v"
            )
    return axes


def _first_index(q: DTensor, dim: int) -> int:
    """Return the index of this rank's first element along `dim`. DTensors are cut like `torch.chunk`."""
    first, size = 0, q.shape[dim]
    for n, placement in enumerate(q.placements):
        if placement == Shard(dim):
            size_per_rank, coordinate = -(-size // q.device_mesh.size(n)), q.device_mesh.get_local_rank(n)
            start = min(coordinate * size_per_rank, size)
            first, size = first + start, min(size_per_rank, size - start)
    return first


def _mask_origin(q: DTensor, layout: str) -> tuple[int, int]:
    """Return the index of this rank's first sample and first query head in the dropout mask of the whole call."""
    dims = _dims(q, layout)
    return _first_index(q, dims[BATCH]) if BATCH in dims else 0, _first_index(q, dims[HEADS])


def _mesh_groups(q: DTensor) -> tuple[dist.ProcessGroup, ...]:
    return tuple(q.device_mesh.get_group(n) for n in range(q.device_mesh.ndim))


# ---- Optional tensors and results ------------------------------------------------------------------------------------


def _needed_placements(feature: Feature, x: torch.Tensor, axes: Sequence[str], sizes: Sizes) -> list[Any]:
    """Return the placements in which a rank needs an optional tensor, from the names in its shape rule.

    Raises:
        TypeError, ValueError: x is no tensor, or its global shape does not fit.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{feature.name} must be a torch.Tensor, got {type(x).__name__}")
    assert feature.shape is not None, "every optional tensor has a shape"
    if problem := feature.shape.refuses(x, sizes):
        raise ValueError(f"{feature.name} must {problem}")
    longest = max(feature.shape.shapes, key=len, default=())
    missing = len(longest) - x.dim()  # leading dimensions that x lacks: it is broadcast over them
    placements: list[Any] = []
    for size in map(SIZES.get, axes):
        dim = longest.index(size) - missing if size in longest else -1
        placements.append(Shard(dim) if size and dim >= 0 and x.shape[dim] == sizes[size] else Replicate())
    return placements


def _local_tensors(
    tensors: dict[str, Any], q: DTensor, axes: Sequence[str], sizes: Sizes, redistributes: bool
) -> dict[str, torch.Tensor | None]:
    """Return the local tensors of optional tensors, by name. Their gradients are Partial where only q is sharded.

    `redistributes`: tensors that are placed otherwise are redistributed, and gradients are brought back, which adds up
    Partial ones.

    Raises:
        TypeError, ValueError: a shape or a placement does not fit, or a plain tensor would have to be sharded.
    """
    local: dict[str, torch.Tensor | None] = {}
    for name, x in tensors.items():
        local[name] = x
        if x is None:
            continue
        placements = _needed_placements(_OPTIONAL[name], x, axes, sizes)
        if not isinstance(x, DTensor):
            if any(placement != Replicate() for placement in placements):
                raise TypeError(f"{name} must be a DTensor beside q, k and v, got {type(x).__name__}")
            continue
        if x.device_mesh != q.device_mesh:
            raise ValueError(f"all tensors must be on one mesh: q is on {q.device_mesh}, {name} {x.device_mesh}")
        grad_placements = [
            Partial() if p == Replicate() and axis != REPLICATED else p
            for p, axis in zip(placements, axes, strict=True)
        ]
        if redistributes:
            x = x.redistribute(placements=placements)
        elif list(x.placements) != placements:
            raise ValueError(f"{name} must have placements {placements}, got {x.placements}")
        local[name] = x.to_local(grad_placements=grad_placements)
    return local


def _placed(x: torch.Tensor, dims: dict[str, int], q: DTensor, axes: Sequence[str], layout: str) -> DTensor:
    """Return the DTensor of a local result whose axes are `dims`. Its shape is given, because shards may be uneven."""
    shape = list(x.shape)
    for axis in {*axes} & dims.keys():
        shape[dims[axis]] = q.shape[_dims(q, layout)[axis]]
    placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _placed_results(result: Any, q: DTensor, axes: Sequence[str], layout: str) -> Any:
    """Return the DTensors of out, or of (out, lse, …): tensors (batch, heads, rows …), or without elements (0,)."""
    if isinstance(result, torch.Tensor):
        return _placed(result, _dims(result, layout), q, axes, layout)
    statistics = {HEADS: 0, SEQUENCE: 1} if layout == VARLEN else {BATCH: 0, HEADS: 1, SEQUENCE: 2}
    out, *others = result
    others = [_placed(x, statistics if x.dim() > 1 else {}, q, axes, layout) for x in others]
    return (_placed(out, _dims(out, layout), q, axes, layout), *others)


# ---- The two kinds of calls ------------------------------------------------------------------------------------------


def with_local_tensors(
    attend: Callable[..., Any], qkv: Iterable[torch.Tensor], group: Group, layout: str, options: dict[str, Any]
) -> Any:
    """Run `attend(q, k, v, group, options)` on the local tensors of DTensors that are sharded along the sequence, and
    return results placed like q.

    Raises:
        TypeError, ValueError: some of q, k, v are no DTensors, or placed otherwise; `group` is another mesh.
    """
    owners: dict[str, Any] = dict(zip("qkv", qkv, strict=True))
    axes = _common_axes(owners, layout, (BATCH, HEADS, SEQUENCE))
    q = owners["q"]
    mesh, dims = q.device_mesh, [n for n, axis in enumerate(axes) if axis == SEQUENCE]
    if not dims:
        raise ValueError(
            f"q must be sharded along its sequence, Shard({row_dim(layout)}), got placements {q.placements}"
        )
    sub_mesh: Any = mesh
    if len(dims) < mesh.ndim:
        if mesh.mesh_dim_names is None:
            raise ValueError("a mesh with other dimensions than the sequence's needs mesh_dim_names")
        sub_mesh = mesh[tuple(mesh.mesh_dim_names[n] for n in dims)]
    if group is not None and group != sub_mesh:
        raise ValueError(f"group must be None or the dimensions of q's mesh that shard the sequence, got {group}")
    offsets = options["cu_seqlens"]
    batch = q.shape[0] if layout != VARLEN else offsets.numel() - 1 if isinstance(offsets, torch.Tensor) else 0
    sizes = {"B": batch, "H": q.shape[_dims(q, layout)[HEADS]]}
    optional = {name: options[name] for name in ("sinks", "alibi_slopes")}
    options = options | _local_tensors(optional, q, axes, sizes, redistributes=False)
    options["mask_origin"] = _mask_origin(q, layout)
    options["state_groups"] = _mesh_groups(q)  # the whole mesh has one dropout state
    return _placed_results(attend(*(x.to_local() for x in owners.values()), sub_mesh, options), q, axes, layout)


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
    layout, tensors = arguments["layout"], list(owners.values())
    axes = _common_axes(owners, layout, (BATCH, HEADS))
    q, keys = tensors[0], tensors[-1]  # or what packs them
    if q.dtype in EIGHT_BIT_DTYPES:
        raise ValueError(f"DTensors of {q.dtype} have no rule for descales: give each rank's part, to_local()")
    if layout == VARLEN:
        batch = 0 if lengths.cu_seqlens_q is None else lengths.cu_seqlens_q.shape[0] - 1
        rows = lengths.max_seqlen_q, lengths.max_seqlen_k
    else:
        batch, rows = q.shape[0], (q.shape[row_dim(layout)], keys.shape[row_dim(layout)])
    sizes = {"B": batch, "H": q.shape[_dims(q, layout)[HEADS]], "Sq": rows[0], "Sk": rows[1]}
    optional = {name: x for name, x in {**lengths._asdict(), **arguments}.items() if name in _OPTIONAL}
    local: dict[str, Any] = _local_tensors(optional, q, axes, sizes, redistributes=True)
    local_owners = tuple(x.to_local() for x in tensors)
    if arguments["dropout_p"]:
        state = local.get("rng_state")
        if state is not None and state.shape != (2,):
            raise ValueError(f"rng_state must have shape (2,), seed and offset, got {tuple(state.shape)}")
        if state is None:  # the first rank draws it
            state = gather_shards(new_rng_state(q.device), _mesh_groups(q))[:2]
        samples = batch if layout == VARLEN else local_owners[0].shape[0]
        sample, head = _mask_origin(q, layout)
        local["rng_state"] = with_origins(state, [(sample + b, head, 0, 0) for b in range(samples)])
    lengths = lengths._replace(**{name: local.pop(name) for name in LENGTHS if name in local})
    return _placed_results(attend(local_owners, lengths, {**arguments, **local}), q, axes, layout)
