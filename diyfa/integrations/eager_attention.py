"""Translation of PyTorch's attention arguments (a mask, `is_causal` from the top left) to calls of diyfa."""

from __future__ import annotations

from typing import Any

import torch

from diyfa.attention import autocast, flash_attention, flash_attention_v2
from diyfa.integrations.seams import Handle
from diyfa.options import UNBOUNDED
from diyfa.quantization import DTYPES, quantize


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


def attend_in_eight_bits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dtype: str,
    *,
    straight_through: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`attend` of (B, S, H, D) tensors that are quantised to `dtype` first. The output has q's dtype, or autocast's."""
    q, k, v = autocast(q, k, v)
    parts = quantize(q, k, v, "block", dtype, smooth=True, layout="bshd", straight_through=straight_through)
    out = flash_attention_v2(*parts, attn_bias=mask_as_bias(mask, q.dtype), out_dtype=q.dtype, **options)
    assert isinstance(out, torch.Tensor), "nobody asks for the log-sum-exp"
    return out


def checked_quantize(dtype: str | None, handle: Handle | None, library: str) -> str:
    """Check the argument `quantize` of a seam, also against the handle if the seam is on. Return the handle's detail.

    Raises ValueError if it is unknown, or another than that of the handle.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"quantize must be None or one of {', '.join(DTYPES)}, got {dtype!r}")
    if handle is not None and handle.detail != (dtype or ""):
        raise ValueError(
            f"diyfa is in {library} with quantize={handle.detail or None!r}: remove that handle first, then ask for "
            f"{dtype!r}"
        )
    return dtype or ""


def visible_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    layout: str = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Return k, v and the window of PyTorch's `is_causal`: query i sees the keys j <= i, for any lengths of q and k.

    Raises ValueError if a mask is given, too.
    """
    if not is_causal:
        return k, v, UNBOUNDED
    if mask is not None:
        raise ValueError("is_causal=True and attn_mask exclude each other")
    dim = layout.index("s")
    seqlen_q, seqlen_k = q.shape[dim], k.shape[dim]
    if seqlen_k > seqlen_q:  # no query sees the keys after seqlen_q
        k, v = k.narrow(dim, 0, seqlen_q), v.narrow(dim, 0, seqlen_q)
        seqlen_k = seqlen_q
    return k, v, (UNBOUNDED[0], seqlen_q - seqlen_k)
