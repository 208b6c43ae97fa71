"""The comparison of all ranks' arguments, once for each kind of call.

A rank with another shape or option than the others would wait for messages that nobody sends, or receive wrong ones. If
one rank refused its arguments, the others would wait for it. So the first call of a kind gathers two numbers from each
rank: the method that it would choose, and a hash of its arguments (all but the values of q, k, v and optional tensors)
and of its refusal, if any. If the hashes differ, the ranks gather the arguments themselves and all raise the same
error. All ranks take the first rank's method.
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
from diyfa.distributed.sharding import gather_shards

Arguments = tuple[tuple[str, Hashable], ...]

# {first group: {names of all groups: {arguments that all ranks agreed on: choice}}}. All ranks of a group have the same
# entries, whatever other groups they are in.
_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, dict[Arguments, int]]] = WeakKeyDictionary()
_LIMIT = 256


def _described(x: object) -> Hashable:
    """Return a description of an argument in which all ranks must agree."""
    if isinstance(x, torch.Tensor):
        return f"{tuple(x.shape)} {validation.dtype_name(x.dtype)} on {x.device.type}"
    return x if isinstance(x, (str, int, float, type(None))) else repr(x)


def _texts(groups: Sequence[dist.ProcessGroup], arguments: Arguments, device: torch.device) -> list[list[str]]:
    """Gather and return the arguments of every rank, each as text."""
    encoded = "\x1f".join(str(value) for _, value in arguments).encode()
    lengths = gather_shards(torch.tensor([len(encoded)], device=device), groups).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = gather_shards(padded.to(device), groups).view(len(lengths), -1).cpu()
    texts = [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
    return [text.split("\x1f") for text in texts]


def _gather_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for the group's gather: the CPU if the group can use it, because then nothing waits for a GPU.

    It does not depend on the arguments, so all ranks choose the same.
    """
    if "cpu:" in dist.get_backend_config(group):  # such as "cpu:gloo,cuda:nccl"
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def agree(
    groups: Sequence[dist.ProcessGroup], named_arguments: dict[str, Any], refusal: Exception | None, choice: int
) -> int:
    """Return the first rank's `choice` if all ranks call with the same arguments and none refuses them.

    Nothing is sent if an equal call was checked before.

    Raises:
        ValueError: the arguments differ. Every rank raises it; it names the ranks that differ from most, and how.
        Exception: `refusal`, if all ranks have the same.
    """
    q, cu_seqlens = named_arguments["q"], named_arguments["cu_seqlens"]
    arguments: Arguments = tuple((name, _described(x)) for name, x in named_arguments.items() if name != "cu_seqlens")
    vector = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() == 1
    arguments += (("cu_seqlens", tuple(cu_seqlens.tolist()) if vector else _described(cu_seqlens)),)
    accepted = (*arguments, ("error", None))
    arguments += (("error", None if refusal is None else f"{type(refusal).__name__}: {refusal}"),)
    agreed = _agreed.setdefault(groups[0], {}).setdefault(tuple(group.group_name for group in groups), {})
    if arguments in agreed:
        return agreed[arguments]
    # The compared arguments were accepted before, so something else is refused, and the other ranks do not gather now.
    if refusal is not None and accepted in agreed:
        raise refusal
    if isinstance(q, torch.Tensor) and validation.is_capturing(q):  # graph capture forbids reads from the device
        if refusal is not None:
            raise refusal
        return choice
    device = _gather_device(groups[0])
    digest = hashlib.sha256(repr(arguments).encode()).digest()
    local_hash = torch.tensor([int.from_bytes(digest[:7], "big"), choice], device=device)
    hashes, choices = gather_shards(local_hash, groups).view(-1, 2).t().tolist()
    if len(set(hashes)) > 1:
        texts = _texts(groups, arguments, device)
        names = [str(int(n)) for n in gather_shards(torch.tensor([dist.get_rank()], device=device), groups)]
        differences = []
        for (name, _), values in zip(arguments, zip(*texts, strict=True), strict=True):
            usual, _ = Counter(values).most_common(1)[0]
            odd = [f"rank {r} has {value}" for r, value in zip(names, values, strict=True) if value != usual]
            if odd:
                differences.append(f"{name}: {', '.join(odd)}, the others {usual}")
        raise ValueError(f"the ranks' calls of context_parallel_attention differ: {'; '.join(differences)}")
    if refusal is not None:
        raise refusal
    if len(agreed) >= _LIMIT:
        agreed.clear()
    agreed[arguments] = choices[0]
    return choices[0]
