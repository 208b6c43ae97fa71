"""The functions of the module flash_attn_npu: those of flash_attn 2, and scheduler metadata.

MindSpeed imports `flash_attn_func` and `flash_attn_varlen_func` from it.
"""

from __future__ import annotations

from typing import Any

import torch

from diyfa import kvcache
from diyfa.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from diyfa.integrations.flash_attn_npu.metadata import check_metadata, no_metadata
from diyfa.options import UNBOUNDED

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    scheduler_metadata: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`diyfa.flash_attn_with_kvcache`: return out, or (out, softmax_lse).

    Raises:
        ValueError: scheduler_metadata of other kernels, or what `diyfa.flash_attn_with_kvcache` raises.
    """
    check_metadata(scheduler_metadata)
    return kvcache.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_size: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    alibi_slopes_batch_stride: int = 0,
    num_splits: int = 0,
) -> Tensor:
    """Metadata without elements, (0,) int32: diyfa divides the work on the device, in the call itself."""
    return no_metadata(cache_seqlens)
