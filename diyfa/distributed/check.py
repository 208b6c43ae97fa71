"""The ranks compare what they call with, once for each kind of call.

A rank with another shape or option than the others would wait for messages that nobody sends, or take wrong ones, and
so would all others where one rank refuses its arguments. So the first call of a kind gathers two numbers from each
rank: a hash of its arguments (all but the values of q, k, v and optional tensors) and of why it refuses them, and the
method that it would choose. Only where the hashes differ are the arguments themselves gathered, and every rank raises
the same error. The first rank's choice is that of all.
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

# What all ranks of a group have called with, and the choice of all, by group: each rank has the same entries, whatever
# other groups it is in.
_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dict[Arguments, int]]] = WeakKeyDictionary()
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
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = gather_parts(padded.to(device), groups).view(len(lengths), -1).cpu()
    texts = [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
    return [text.split("\x1f") for text in texts]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group can gather, the same on every rank whatever it was given; on the CPU, if it can, nothing waits
    for a device."""
    if "cpu:" in dist.get_backend_config(group):  # such as "cpu:gloo,cuda:nccl"
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def agree(groups: Sequence[dist.ProcessGroup], given: dict[str, Any], refusal: Exception | None, choice: int) -> int:
    """The first rank's `choice`, where all ranks call with the same arguments and none refuses them.

    Nothing is sent where an equal call was checked before.

    Raises:
        ValueError: on every rank, naming the ranks that differ from most others and in what.
        Exception: `refusal`, where all ranks have the same.
    """
    q, cu_seqlens = given["q"], given["cu_seqlens"]
    arguments: Arguments = tuple((name, _described(x)) for name, x in given.items() if name != "cu_seqlens")
    vector = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() == 1
    arguments += (("cu_seqlens", tuple(cu_seqlens.tolist()) if vector else _described(cu_seqlens)),)
    accepted = (*arguments, ("error", None))
    arguments += (("error", None if refusal is None else f"{type(refusal).__name__}: {refusal}"),)
    agreed = _agreed.setdefault(groups[0], {}).setdefault(tuple(group.group_name for group in groups), {})
    if arguments in agreed:
        return agreed[arguments]
    if refusal is not None and accepted in agreed:  # of something that is not compared: the others do not listen
        raise refusal
    if isinstance(q, torch.Tensor) and validation.is_capturing(q):  # nothing may be read from the device
        if refusal is not None:
            raise refusal
        return choice
    device = _device_of(groups[0])
    digest = hashlib.sha256(repr(arguments).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7], "big"), choice], device=device)
    hashes, choices = gather_parts(own, groups).view(-1, 2).t().tolist()
    if len(set(hashes)) > 1:
        texts = _texts(groups, arguments, device)
        names = [str(int(n)) for n in gather_parts(torch.tensor([dist.get_rank()], device=device), groups)]
        found = []
        for (name, _), values in zip(arguments, zip(*texts, strict=True), strict=True):
            usual, _ = Counter(values).most_common(1)[0]
            odd = [f"rank {r} has {value}" for r, value in zip(names, values, strict=True) if value != usual]
            if odd:
                found.append(f"{name}: {', '.join(odd)}, the others {usual}")
        raise ValueError(f"the ranks call context_parallel_attention with different arguments: {'; '.join(found)}")
    if refusal is not None:
        raise refusal
    if len(agreed) >= _LIMIT:
        agreed.clear()
    agreed[arguments] = choices[0]
    return choices[0]
