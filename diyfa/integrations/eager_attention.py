"""Translation of PyTorch's attention arguments (a mask, `is_causal` from the top left) to calls of diyfa."""

from __future__ import annotations

from typing import Any

import torch

from diyfa.attention import flash_attention, flash_attention_v2
from diyfa.options import UNBOUNDED


def mask_as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the bias that a mask adds to the scores: 0 and -inf for a boolean mask (True: seen), else the mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layout: str = "bhsd", **options: Any
) -> torch.Tensor:
    """`flash_attention` ("bhsd") or `flash_attention_v2` ("bshd") with a boolean or an additive mask."""
    call = flash_attention if layout == "bhsd" else flash_attention_v2
    out = call(q, k, v, attn_bias=mask_as_bias(mask, q.dtype), **options)
    assert isinstance(out, torch.Tensor), "nobody asks for the log-sum-exp"
    return out


def top_left_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "bhsd"
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Return k, v and the window with which query i sees the keys j <= i, for any lengths of q and k."""
    dim = layout.index("s")
    seqlen_q, seqlen_k = q.shape[dim], k.shape[dim]
    if seqlen_k > seqlen_q:  # no query sees the keys after seqlen_q
        k, v = k.narrow(dim, 0, seqlen_q), v.narrow(dim, 0, seqlen_q)
        seqlen_k = seqlen_q
    return k, v, (UNBOUNDED[0], seqlen_q - seqlen_k)
