"""The functions of the module flash_attn_npu_4: FlashAttention-4's arguments.

`num_splits` and `pack_gqa` are hints for other kernels; they change no result and are not used. Masks and score
functions are written in another language there. diyfa's own are `flash_attention(…, mask=, score_fn=)`.
"""

from __future__ import annotations

from typing import Any

import torch

from diyfa.attention import flash_attention_v2, flash_attention_varlen
from diyfa.integrations.flash_attn_npu.metadata import check_metadata, no_metadata
from diyfa.integrations.seams import refuse
from diyfa.options import UNBOUNDED

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

Tensor = torch.Tensor
Window = tuple[int, int]
_MASK = "diyfa's own masks are an argument of diyfa.flash_attention: mask=, a diyfa.BlockMask"
_SCORE = "diyfa's own score functions are an argument of diyfa.flash_attention: score_fn=, a Triton jit function"
_ABSENT = {
    "qv": "concatenate it to q, and the latent cache to k",
    "gather_kv_indices": "give pages of one key with page_table",
    "min_seqlen_k": "leave it out",
    "seqused_q": "cut the queries with cu_seqlens_q",
    "seqlen_k_per_split": "the length of a split follows from the device",
    **dict.fromkeys(("score_mod", "score_mod_bwd", "aux_tensors", "aux_scalars"), _SCORE),
    **dict.fromkeys(("mask_mod", "block_sparse_tensors", "block_sparse_tensors_bwd"), _MASK),
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Any:
    """`diyfa.flash_attention_v2` of (B, S, H, D) tensors: return out, or (out, lse (B, H, S)).

    `learnable_sink` is diyfa's `sinks`: (H,) float32.

    Raises:
        ValueError: an argument that diyfa lacks, or what `diyfa.flash_attention_v2` raises.
    """
    refuse(_ABSENT, **{name: x for name, x in locals().items() if name in _ABSENT})
    return flash_attention_v2(
        q, k, v, causal, softmax_scale, window=window_size, softcap=softcap, sinks=learnable_sink,
        deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Any:
    """`diyfa.flash_attention_varlen` of packed (T, H, D) tensors or pages: return out, or (out, lse (H, T)).

    max_seqlen_q defaults to all rows of q, max_seqlen_k to all rows of k, or to what the page table holds.

    Raises:
        ValueError: an argument that diyfa lacks, no cu_seqlens_q, or what `diyfa.flash_attention_varlen` raises.
    """
    refuse(_ABSENT, **{name: x for name, x in locals().items() if name in _ABSENT})
    check_metadata(scheduler_metadata)
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q is needed: q must be packed (T, H, D), for (B, S, H, D) use flash_attn_func")
    if max_seqlen_k is None:
        max_seqlen_k = k.shape[0] if page_table is None else page_table.shape[1] * k.shape[1]
    return flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, q.shape[0] if max_seqlen_q is None else max_seqlen_q, max_seqlen_k, causal,
        softmax_scale, window=window_size, softcap=softcap, sinks=learnable_sink, deterministic=deterministic,
        block_table=page_table, seqused_k=seqused_k, return_lse=return_lse,
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
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    softmax_scale: float | None = None,
) -> Tensor:
    """Metadata without elements, (0,) int32: diyfa divides the work on the device, in the call itself."""
    return no_metadata(cache_seqlens)
