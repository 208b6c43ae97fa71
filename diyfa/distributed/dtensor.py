"""DTensors in, DTensors out: the mesh dimensions along which the sequence is sharded are the group of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from diyfa.distributed.merge import head_dim, row_dim
from diyfa.distributed.sharding import Group
from diyfa.problem import LAYOUTS, VARLEN


def _sequence_dims(q: DTensor, layout: str) -> list[int]:
    """Mesh dimensions that shard the sequence.

    Raises:
        ValueError: there is none, or q is sharded in a way that attention cannot follow.
    """
    rows = row_dim(layout)
    allowed = (Replicate(), *(Shard(dim) for dim in range(q.dim() - 1)))
    if any(placement not in allowed for placement in q.placements) or Shard(rows) not in q.placements:
        raise ValueError(
            f"q must be sharded along its sequence, Shard({rows}), and be no partial sum nor sharded by features, got "
            f"placements {q.placements}"
        )
    return [n for n, placement in enumerate(q.placements) if placement == Shard(rows)]


def _local_of_heads(x: torch.Tensor | None, q: DTensor, layout: str) -> torch.Tensor | None:
    """This rank's part of what has an entry for each head in its last dimension; its gradient is a share."""
    if not isinstance(x, DTensor):
        return x
    wanted = [Shard(x.dim() - 1) if p == Shard(head_dim(layout)) else Replicate() for p in q.placements]
    if x.device_mesh != q.device_mesh or list(x.placements) != wanted:
        raise ValueError(f"sinks and alibi_slopes must have placements {wanted} on q's mesh, got {x.placements}")
    return x.to_local(grad_placements=[Partial() if p == Replicate() else p for p in wanted])


def _first(q: DTensor, dim: int) -> int:
    """Where what this rank holds begins along `dim`: DTensors are cut as `torch.chunk` does."""
    first, size = 0, q.shape[dim]
    for n, placement in enumerate(q.placements):
        if placement == Shard(dim):
            part, mine = -(-size // q.device_mesh.size(n)), q.device_mesh.get_local_rank(n)
            start = min(mine * part, size)
            first, size = first + start, min(part, size - start)
    return first


def _placed(local: torch.Tensor, q: DTensor, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """The whole, of this shape, on q's mesh: uneven parts do not tell."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, q.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def with_local_tensors(
    attend: Callable[..., Any], qkv: Sequence[torch.Tensor], group: Group, layout: str, options: dict[str, Any]
) -> Any:
    """`attend(q, k, v, group, options)` of what this rank holds of DTensors; results are placed as q is.

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
    cuts = math.prod(mesh.size(n) for n, placement in enumerate(placements) if placement == Shard(heads))
    if q.shape[heads] % cuts or k.shape[heads] % cuts:  # uneven parts would pair query heads with others' keys
        raise ValueError(
            f"{q.shape[heads]} query and {k.shape[heads]} key/value heads must be multiples of {cuts} shards"
        )
    own: Any = mesh
    if len(dims) < mesh.ndim:
        if mesh.mesh_dim_names is None:
            raise ValueError("a mesh with other dimensions than the sequence's needs mesh_dim_names")
        own = mesh[tuple(mesh.mesh_dim_names[n] for n in dims)]
    if group is not None and group != own:
        raise ValueError(f"group must be None or the dimensions of q's mesh that shard the sequence, got {group}")
    options = options | {name: _local_of_heads(options[name], q, layout) for name in ("sinks", "alibi_slopes")}
    options["first"] = 0 if layout == VARLEN else _first(q, LAYOUTS[layout][0]), _first(q, head_dim(layout))
    options["drawn_in"] = tuple(mesh.get_group(n) for n in range(mesh.ndim))  # dropout's state is that of all
    result = attend(q.to_local(), k.to_local(), v.to_local(), own, options)
    shape = (*q.shape[:-1], v.shape[-1])
    if isinstance(result, torch.Tensor):
        return _placed(result, q, placements, shape)
    out, lse = result
    where = {row_dim(layout): lse.dim() - 1, heads: lse.dim() - 2}
    of_lse = [Shard(where.get(p.dim, p.dim)) if isinstance(p, Shard) else p for p in placements]
    sizes = *q.shape[: lse.dim() - 2], q.shape[heads], q.shape[row_dim(layout)]
    return _placed(out, q, placements, shape), _placed(lse, q, of_lse, sizes)
