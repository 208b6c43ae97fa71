"""Checks of the operator's arguments, and refusals of those that diyfa cannot express."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from diyfa import validation
from diyfa.integrations.npu_fusion_band import COMPRESSED_MASK, REFUSED_MODES


class Layout(NamedTuple):
    """The permutations between a layout and (B, N, S, D). `joined`: the last dimension is N·D and is split first."""

    to_bnsd: tuple[int, int, int, int]
    from_bnsd: tuple[int, int, int, int]
    joined: bool


LAYOUTS = {
    "BSH": Layout((0, 2, 1, 3), (0, 2, 1, 3), True),
    "SBH": Layout((1, 2, 0, 3), (2, 0, 1, 3), True),
    "BSND": Layout((0, 2, 1, 3), (0, 2, 1, 3), False),
    "BNSD": Layout((0, 1, 2, 3), (0, 1, 2, 3), False),
}
VARLEN = "TND"


def check_layout(input_layout: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int) -> str:
    """Check that the shapes fit the layout; return its name in capitals."""
    layout = input_layout.upper() if isinstance(input_layout, str) else input_layout
    if layout not in (*LAYOUTS, VARLEN):
        raise ValueError(f"input_layout must be one of {', '.join((*LAYOUTS, VARLEN))}, got {input_layout!r}")
    rank = 3 if layout == VARLEN or LAYOUTS[layout].joined else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions in the layout {layout}, got shape {tuple(x.shape)}")
    if not isinstance(head_num, int) or head_num < 1:
        raise ValueError(f"head_num must be a positive integer, got {head_num!r}")
    dimension = layout.find("N")
    if dimension >= 0 and query.shape[dimension] != head_num:
        raise ValueError(f"query has {query.shape[dimension]} heads in the layout {layout}, but head_num is {head_num}")
    return layout


# Arguments that must be None.
ABSENT = {
    "padding_mask": "the operator itself does not take it; hide keys with atten_mask",
    "dropout_mask": "its mask is a function of seed and offset and is never read from memory",
    **dict.fromkeys(("q_start_idx", "kv_start_idx"), "it counts positions from the start of the tensors"),
}


def check_mode(sparse_mode: int, prefix: object) -> None:
    if sparse_mode in REFUSED_MODES:
        raise ValueError(f"sparse_mode={sparse_mode} is not supported: {REFUSED_MODES[sparse_mode]}")
    if sparse_mode not in range(5):
        raise ValueError(f"sparse_mode must be 0 to 4, got {sparse_mode!r}")
    if prefix is not None:
        raise ValueError(f"prefix belongs to sparse_mode 5 and 6, which are not supported; got {sparse_mode}")


def check_options(scale: float, keep_prob: float, inner_precise: int, softmax_layout: str, varlen: bool) -> None:
    validation.check_scalars(scale, 0.0, 0.0, "scale")
    if not isinstance(keep_prob, (int, float)) or not 0 < keep_prob <= 1:
        raise ValueError(f"keep_prob must be in (0, 1], got {keep_prob!r}")
    if inner_precise not in (0, 1, 2):
        raise ValueError(f"inner_precise must be 0, 1 or 2, got {inner_precise!r}")
    if softmax_layout not in ("", VARLEN) or (softmax_layout and not varlen):
        raise ValueError(f'softmax_layout must be "", or "TND" with input_layout TND, got {softmax_layout!r}')


def as_bool(mask: torch.Tensor) -> torch.Tensor:
    validation.check_tensors(atten_mask=mask)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"atten_mask must be bool or uint8, 1 where a key is hidden; got {mask.dtype}")
    return mask.bool()


def check_compressed(mask: torch.Tensor, sparse_mode: int) -> None:
    if mask.shape[-2:] != (COMPRESSED_MASK, COMPRESSED_MASK) or any(n != 1 for n in mask.shape[:-2]):
        raise ValueError(
            f"sparse_mode={sparse_mode} takes the compressed atten_mask of shape (2048, 2048), an upper triangle of "
            f"ones; got {tuple(mask.shape)} (a mask of your own is sparse_mode 0 or 1)"
        )


def check_mask_shape(mask: torch.Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    sizes = (seqlen_q, seqlen_k)
    fits = mask.dim() == 2 or (mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads))
    if not fits or tuple(mask.shape[-2:]) != sizes:
        raise ValueError(
            f"atten_mask must have shape {sizes}, (1, 1, …), ({batch}, 1, …) or ({batch}, {heads}, …), got "
            f"{tuple(mask.shape)}"
        )


Rows = list[tuple[int, int]]


def _running_sums(name: str, ends: Sequence[int] | None, rows: int) -> list[int]:
    if ends is None:
        raise ValueError(f"the layout TND needs {name}: where each sequence ends, as host integers")
    if isinstance(ends, torch.Tensor):
        raise TypeError(f"{name} must be a list of host integers, got a tensor: pass .tolist()")
    sums = [int(n) for n in ends]
    while len(sums) > 1 and sums[-1] == 0 and any(sums):  # trailing zeros stand for unused samples
        sums.pop()
    if not sums or min(b - a for a, b in pairwise([0, *sums])) < 0 or sums[-1] > rows:
        raise ValueError(f"{name} must be running sums that end at {rows} or before, got {list(ends)}")
    return sums


def sequences(
    query: torch.Tensor, key: torch.Tensor, ends_q: Sequence[int] | None, ends_k: Sequence[int] | None
) -> tuple[Rows, Rows]:
    """Return the rows [first, last) of each sequence's queries and keys."""
    sums_q = _running_sums("actual_seq_qlen", ends_q, query.shape[0])
    sums_k = _running_sums("actual_seq_kvlen", ends_k, key.shape[0])
    if len(sums_q) != len(sums_k):
        raise ValueError(
            f"actual_seq_qlen and actual_seq_kvlen must name as many sequences, got {len(sums_q)} and {len(sums_k)}"
        )
    return list(pairwise([0, *sums_q])), list(pairwise([0, *sums_k]))
