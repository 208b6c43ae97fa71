"""The functions of the module flash_attn_npu_3: those of FlashAttention-3, and scheduler metadata.

vLLM-Ascend's FA3 backend imports `flash_attn_varlen_func`, `flash_attn_with_kvcache` and `get_scheduler_metadata` from
it.
"""

from __future__ import annotations

import torch

from diyfa.integrations.flash_attn_3 import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from diyfa.integrations.flash_attn_npu.metadata import no_metadata
from diyfa.options import UNBOUNDED

__all__ = [
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Metadata without elements, (0,) int32: diyfa divides the work on the device, in the call itself.

    The arguments are those of the 910; the package has others on the 950. Raises ValueError for attention_chunk.
    """
    return no_metadata(cache_seqlens, attention_chunk=attention_chunk)
