"""The ranks compare what they call with, once for each kind of call.

A rank with another shape or option than the others would wait for messages that nobody sends, or take wrong ones. So
the first call of a kind gathers one number from each rank, a hash of its arguments (all but the values of q, k, v and
optional tensors); only where they differ are the arguments themselves gathered, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from diyfa import validation
from diyfa.distributed.sharding import gather_parts

Arguments = tuple[tuple[str, Hashable], ...]

# What all ranks of a group have called with, by group: each rank has the same entries, whatever other groups it is in.
_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dict[Arguments, None]]] = WeakKeyDictionary()
_LIMIT = 256


def _described(x: object) -> Hashable:
    """All of an argument that the ranks must agree on."""
    if isinstance(x, torch.Tensor):
        return f"{tuple(x.shape)} {validation.dtype_name(x.dtype)} on {x.device.type}"
    return x if isinstance(x, (str, int, float, type(None))) else repr(x)


def _texts(groups: Sequence[dist.ProcessGroup], arguments: Arguments, device: torch.device) -> list[list[str]]:
    """The arguments of every rank, each as text."""
    own = "\x1f".join(str(value) for _, value in arguments).encode()
    lengths = gather_parts(torch.tensor([len(own)], device=device), groups).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = gather_parts(padded.to(device), groups).view(len(lengths), -1).cpu()
    texts = [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
    return [text.split("\x1f") for text in texts]


def check_agreement(groups: Sequence[dist.ProcessGroup], given: dict[str, Any]) -> None:
    """All ranks call with the same arguments; nothing is sent where an equal call was checked before.

    Raises:
        ValueError: on every rank, naming the ranks that differ from most others and in what.
    """
    q, cu_seqlens = given["q"], given["cu_seqlens"]
    if validation.is_capturing(q):
        return
    arguments: Arguments = tuple((name, _described(x)) for name, x in given.items() if name != "cu_seqlens")
    vector = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() == 1
    arguments += (("cu_seqlens", tuple(cu_seqlens.tolist()) if vector else _described(cu_seqlens)),)
    device = q.device
    agreed = _agreed.setdefault(groups[0], {}).setdefault(tuple(group.group_name for group in groups), {})
    if arguments in agreed:
        return
    digest = hashlib.sha256(repr(arguments).encode()).digest()
    hashes = gather_parts(torch.tensor([int.from_bytes(digest[:7], "big")], device=device), groups)
    if len(set(hashes.tolist())) > 1:
        texts = _texts(groups, arguments, device)
        names = [str(int(n)) for n in gather_parts(torch.tensor([dist.get_rank()], device=device), groups)]
        found = []
        for (name, _), values in zip(arguments, zip(*texts, strict=True), strict=True):
            usual, _ = Counter(values).most_common(1)[0]
            odd = [f"rank {r} has {value}" for r, value in zip(names, values, strict=True) if value != usual]
            if odd:
                found.append(f"{name}: {', '.join(odd)}, the others {usual}")
        raise ValueError(f"the ranks call context_parallel_attention with different arguments: {'; '.join(found)}")
    if len(agreed) >= _LIMIT:
        agreed.clear()
    agreed[arguments] = None
