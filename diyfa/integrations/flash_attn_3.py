"""The functions of FlashAttention-3 and flash_attn_npu_v3, with the same names, arguments, order, defaults and results.

They translate their arguments to diyfa's functions, and refuse arguments without a counterpart. `num_splits`,
`pack_gqa` and `sm_margin` are hints for FlashAttention-3's own kernels; they change no result and are not used. One
exception: `flash_attn_with_kvcache` with `num_splits=1` runs inside `diyfa.batch_invariant()`, because callers ask for
one split to get that.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from diyfa import kvcache, registry, validation
from diyfa.attention import attend, flash_attention_varlen
from diyfa.eight_bits import BLOCK_Q, FLOAT8_DTYPES, dequantised
from diyfa.flash_attn_interface import WORDS
from diyfa.integrations.flash_attn_npu.metadata import check_metadata
from diyfa.integrations.seams import refuse
from diyfa.options import NO_LENGTHS, UNBOUNDED

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Window = tuple[int, int]
Tensor = torch.Tensor
_ABSENT = {
    "qv": "a second part of the queries that meets the values: concatenate it to q, and the latent cache to k",
    "seqused_q": "cut the queries with cu_seqlens_q",
    "cu_seqlens_k_new": "pad what is appended, or append it before the call",
    "rotary_seqlens": "positions begin at cache_seqlens",
}


def _refuse(attention_chunk: int, **arguments: Any) -> None:
    """Raise ValueError for an argument of FlashAttention-3 that diyfa lacks."""
    refuse(_ABSENT, **arguments)
    if attention_chunk:
        raise ValueError(f"attention_chunk must be 0, got {attention_chunk}: diyfa has windows, but no chunks")


def _attend(owners: dict[str, Tensor], return_attn_probs: bool, **arguments: Any) -> Any:
    """Return out, or (out, softmax_lse), of q, k and v (B, S, H, D), or of the tensor that packs them."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return attend(owners, NO_LENGTHS, return_attn_probs, {"layout": "bshd", "dropout_p": 0.0, **given}, WORDS)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`diyfa.flash_attn_func` of (B, S, H, D) tensors: return out, or (out, softmax_lse (B, H, S)).

    Inputs may be float8, without a gradient: q stands for q · q_descale, k and v likewise. A descale is float32,
    (B, Hk) or one number, and 1 by default. The output is bfloat16.

    Raises:
        ValueError: qv or attention_chunk is given, or what `diyfa.flash_attention_v2` raises.
    """
    _refuse(attention_chunk, qv=qv)
    return _attend(
        {"q": q, "k": k, "v": v}, return_attn_probs, sm_scale=softmax_scale, causal=causal, window=window_size,
        softcap=softcap, deterministic=deterministic, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (B, S, 3, H, D), or, with num_heads_q, (B, S, num_heads_q + 2 · Hk, D)."""
    _refuse(attention_chunk)
    options: dict[str, Any] = {
        "sm_scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap,
        "deterministic": deterministic, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    if qkv.dim() == 5:
        return _attend({"qkv": qkv}, return_attn_probs, **options)
    heads_kv, rest = divmod(qkv.shape[2] - (num_heads_q or 0), 2) if qkv.dim() == 4 else (0, 0)
    if not num_heads_q or heads_kv < 1 or rest:
        raise ValueError(
            "qkv must be (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) "
            f"with num_heads_q, got {tuple(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    return _attend({"q": q, "k": k, "v": v}, return_attn_probs, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`diyfa.flash_attention_varlen` of packed (T, H, D) tensors: return out, or (out, softmax_lse (H, T)).

    float8 and descales are as for `flash_attn_func`.

    Raises:
        ValueError: as `flash_attn_func`; seqused_q is given; seqused_k is given with float8 or if a gradient is wanted.
    """
    _refuse(attention_chunk, qv=qv, seqused_q=seqused_q)
    return flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window=window_size,
        softcap=softcap, deterministic=deterministic, seqused_k=seqused_k, return_lse=return_attn_probs,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip


def _attend_packed(q: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attend with packed queries to a cache. A contiguous cache becomes a paged one with one page for each sequence."""
    table, rows, seqused_k = (arguments[name] for name in ("page_table", "cache_batch_idx", "cache_seqlens"))
    batch, room = arguments["cu_seqlens_q"].shape[0] - 1, "the cache" if table is None else "page_table"
    if table is not None and rows is not None:
        raise ValueError("cache_batch_idx chooses rows of a contiguous cache; pages are chosen by page_table")
    if table is None:
        if rows is None and k_cache.shape[0] < batch:
            raise ValueError(
                f"the cache has {k_cache.shape[0]} rows for a batch of {batch}: name them by cache_batch_idx"
            )
        rows = torch.arange(batch, dtype=torch.int32, device=q.device) if rows is None else rows
        table = rows[:, None]
    capacity = table.shape[1] * k_cache.shape[1]
    if not isinstance(seqused_k, Tensor):
        length = capacity if seqused_k is None else validation.check_length("cache_seqlens", seqused_k)
        if length > capacity:
            raise ValueError(f"cache_seqlens must be from 0 to what {room} holds, {capacity}; got {length}")
        seqused_k = q.new_full((batch,), length, dtype=torch.int32)
    longest = q.shape[0] if arguments["max_seqlen_q"] is None else arguments["max_seqlen_q"]
    results = flash_attention_varlen(
        q, k_cache, v_cache, arguments["cu_seqlens_q"], None, validation.check_length("max_seqlen_q", longest),
        capacity,
        arguments["causal"], arguments["softmax_scale"], window=arguments["window_size"], softcap=arguments["softcap"],
        block_table=table, seqused_k=seqused_k, return_lse=True,
    )  # fmt: skip
    assert isinstance(results, tuple), "the log-sum-exp was asked for"
    return results


def _dequantised_queries(q: Tensor, q_descale: Tensor | None, heads_kv: int) -> Tensor:
    """Return float8 queries (B, S, H, D) times their descale, in bfloat16."""
    if q.dtype not in FLOAT8_DTYPES:
        raise ValueError(f"q_descale belongs to q of float8, q is {q.dtype}")
    if q_descale is not None:
        sizes = {"B": q.shape[0], "Sq": q.shape[1], "H": q.shape[2], "Hk": heads_kv}
        validation.check_optional_tensors(q, sizes, {"q_descale": q_descale})
    return dequantised(q.transpose(1, 2), q_descale, torch.float32, BLOCK_Q).transpose(1, 2).to(torch.bfloat16)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`diyfa.flash_attn_with_kvcache`. With cu_seqlens_q the queries are packed (T, H, D), over pages or whole rows.

    Queries of float8, times q_descale, are computed in bfloat16. k_descale and v_descale belong to a float8 cache.

    Returns:
        out, or with return_softmax_lse (out, lse, out_accum, lse_accum), the last two without elements.

    Raises:
        ValueError: qv, attention_chunk, cu_seqlens_k_new or rotary_seqlens is given; scheduler_metadata has elements;
            packed queries come with new keys, rotary tables, cache_leftpad or descales; else as
            `diyfa.flash_attn_with_kvcache`.
    """
    _refuse(attention_chunk, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
    check_metadata(scheduler_metadata)
    validation.check_booleans(causal=causal, return_softmax_lse=return_softmax_lse)
    with registry.batch_invariant() if num_splits == 1 else nullcontext():
        if cu_seqlens_q is None:
            if q_descale is not None or q.dtype in FLOAT8_DTYPES:
                q = _dequantised_queries(q, q_descale, k_cache.shape[2])
            results = kvcache.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
                page_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, True,
                k_descale=k_descale, v_descale=v_descale,
            )  # fmt: skip
        else:
            refused = {
                "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad,
                "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale,
            }  # fmt: skip
            for name, value in refused.items():
                if value is not None:
                    raise ValueError(f"{name} cannot go with packed queries (cu_seqlens_q)")
            results = _attend_packed(q, k_cache, v_cache, {
                "page_table": page_table, "cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx,
                "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "causal": causal,
                "softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap,
            })  # fmt: skip
    empty = q.new_empty(0, dtype=torch.float32)
    return (*results, empty, empty) if return_softmax_lse else results[0]
