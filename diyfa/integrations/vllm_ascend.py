"""The metadata of vllm-ascend's attention backend as arguments of `diyfa.flash_attention_varlen`.

vllm-ascend builds one `AscendMetadata` for each step and hands it to the attention of every layer. This module reads
its fields by name and imports neither vllm nor vllm_ascend. docs/vllm-ascend.md has the design around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# `AscendAttentionState`: the keys of PREFILL_NO_CACHE are those of the call, the others read the cache.
PREFILL_NO_CACHE = "PrefillNoCache"
STATES = (PREFILL_NO_CACHE, "PrefillCacheHit", "DecodeOnly", "ChunkedPrefill", "SpecDecoding")
CACHE_DTYPES = ("auto", "float16", "bfloat16", "half")
UNBOUNDED = (-1, -1)


def attention_arguments(
    metadata: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor | Sequence[torch.Tensor] | None,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    attn_type: str = "decoder",
    max_seqlen_k: int | None = None,
) -> dict[str, Any]:
    """Return the arguments with which `diyfa.flash_attention_varlen` computes what `AscendAttentionBackendImpl` does.

    The step's keys must be in the cache already, as `reshape_and_cache` writes them. Rows of `query` from
    `metadata.actual_seq_lengths_q[-1]` on are padding: the result has no rows for them.

    Args:
        metadata: `AscendMetadata`. Read are attn_state, query_start_loc, actual_seq_lengths_q, seq_lens, seq_lens_list,
            block_tables, causal and model_runner_type. `seq_lens` may be on the CPU.
        query: (tokens, H, D). key, value: (tokens, Hk, D) of this step, or None; read without a cache only.
        kv_cache: (2, blocks, block size, Hk, D), or keys and values apart; read with a cache only.
        scale, sliding_window, logits_soft_cap, alibi_slopes, sinks, kv_cache_dtype, attn_type: as the constructor of
            vllm's attention implementations takes them. sliding_window: keys that a query sees, its own included.
        max_seqlen_k: for a call that a graph replays, the longest sequence that it will see. Default: the longest now.

    Raises:
        ValueError: an unknown attn_state, metadata that contradict each other or the tensors, and what is not
            translated: cross attention, context parallelism, quantised caches, a window without a causal mask.
            Lengths on a device are not read, since that would synchronise: only those on the host are compared.
    """
    state = _state(metadata)
    is_encoder = metadata.model_runner_type == "pooling" and not metadata.causal
    if attn_type not in ("decoder", "encoder_only", "encoder"):
        raise ValueError(f"attention of type {attn_type!r} is not translated: decoder, encoder and encoder_only are")
    if getattr(metadata, "pcp_local_num_input_tokens", 0):
        raise ValueError("metadata of context parallelism are not translated")
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    if sliding_window is not None and not metadata.causal:
        raise ValueError("a sliding window without a causal mask is not translated")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")

    _check_rows(query=query)
    ends = _numbers(metadata, "actual_seq_lengths_q")
    starts = [0, *ends][:-1]
    batch, n_tokens = len(ends), ends[-1] if ends else 0
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        raise ValueError(f"actual_seq_lengths_q must not decrease, got {ends}")
    query_start_loc = _integers(metadata, "query_start_loc", 1)
    if query_start_loc.numel() != batch + 1:
        raise ValueError(f"query_start_loc must have {batch + 1} entries, got {query_start_loc.numel()}")
    if n_tokens > query.shape[0]:
        raise ValueError(f"actual_seq_lengths_q ends with {n_tokens}, and query has {query.shape[0]} rows")
    if _differs(query_start_loc, [0, *ends]):
        got = query_start_loc.tolist()
        raise ValueError(f"query_start_loc must be [0, *actual_seq_lengths_q], which is {[0, *ends]}, got {got}")
    cu_seqlens_q = query_start_loc.to(query.device, torch.int32)
    max_seqlen_q = max((end - start for start, end in zip(starts, ends, strict=True)), default=0)
    arguments: dict[str, Any] = {
        "q": query[:n_tokens], "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q,
        "causal": bool(metadata.causal), "sm_scale": float(scale),
        "window": UNBOUNDED if sliding_window is None else (sliding_window - 1, 0),
        "softcap": float(logits_soft_cap or 0.0), "alibi_slopes": alibi_slopes, "sinks": sinks,
    }  # fmt: skip
    if state == PREFILL_NO_CACHE or is_encoder:
        if key is None or value is None:
            raise ValueError(f"{state} reads the step's own keys and values, and got none")
        _check_rows(key=key, value=value)
        if min(key.shape[0], value.shape[0]) < n_tokens:
            raise ValueError(f"key and value must have {n_tokens} rows, got {key.shape[0]} and {value.shape[0]}")
        if not is_encoder:
            _check_uncached_lengths(metadata, starts, ends)
        return arguments | {
            "k": key[:n_tokens], "v": value[:n_tokens], "cu_seqlens_k": cu_seqlens_q, "max_seqlen_k": max_seqlen_q,
        }  # fmt: skip
    key_cache, value_cache = _caches(kv_cache, state)
    lengths, seq_lens = _numbers(metadata, "seq_lens_list"), _integers(metadata, "seq_lens", 1)
    if len(lengths) < batch or seq_lens.numel() < batch:
        raise ValueError(
            f"{batch} sequences need as many lengths: seq_lens_list has {len(lengths)}, seq_lens {seq_lens.numel()}"
        )
    block_tables = _integers(metadata, "block_tables", 2)
    _check_cached_lengths(block_tables, starts, ends, lengths, key_cache.shape[1])
    if _differs(seq_lens[:batch], lengths[:batch]):
        raise ValueError(f"seq_lens and seq_lens_list must be equal, got {seq_lens.tolist()} and {lengths}")
    longest = max(lengths[:batch], default=0)
    if max_seqlen_k is not None and max_seqlen_k < longest:
        raise ValueError(f"max_seqlen_k must be at least {longest}, the longest sequence, got {max_seqlen_k}")
    return arguments | {
        "k": key_cache, "v": value_cache, "cu_seqlens_k": None,
        "max_seqlen_k": longest if max_seqlen_k is None else max_seqlen_k,
        "block_table": block_tables[:batch].to(torch.int32),
        "seqused_k": seq_lens[:batch].to(query.device, torch.int32),
    }  # fmt: skip


def _state(metadata: Any) -> str:
    state = getattr(metadata.attn_state, "name", metadata.attn_state)
    if state not in STATES:
        raise ValueError(f"attn_state must be one of {', '.join(STATES)}, got {state!r}")
    return state


def _caches(kv_cache: Any, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    is_tensor = isinstance(kv_cache, torch.Tensor) and kv_cache.dim() > 0
    caches = list(kv_cache) if is_tensor or isinstance(kv_cache, (list, tuple)) else []
    if len(caches) != 2 or not all(isinstance(x, torch.Tensor) for x in caches):
        raise ValueError(f"{state} reads a cache: expected keys and values, got {_described(kv_cache)}")
    key_cache, value_cache = caches
    if key_cache.dim() != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"a cache must be (blocks, block size, Hk, D) each, got {_described(key_cache)} and "
            f"{_described(value_cache)}"
        )
    return key_cache, value_cache


def _described(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{type(x).__name__}"


def _check_rows(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            raise ValueError(f"{name} must be (tokens, heads, head_dim), got {_described(x)}")


def _numbers(metadata: Any, name: str) -> list[int]:
    """Return a list of the metadata. Raises ValueError if it is none."""
    values = getattr(metadata, name)
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a list of integers, got {_described(values)}")
    return [int(value) for value in values]


def _integers(metadata: Any, name: str, dim: int) -> torch.Tensor:
    """Return a tensor of the metadata. Raises ValueError if it is none of int32 or int64 with `dim` dimensions."""
    x = getattr(metadata, name)
    if not isinstance(x, torch.Tensor) or x.dim() != dim or x.dtype not in (torch.int32, torch.int64):
        dtype = f" of {x.dtype}" if isinstance(x, torch.Tensor) else ""
        raise ValueError(f"{name} must be a {dim}-dimensional tensor of integers, got {_described(x)}{dtype}")
    return x


def _differs(x: torch.Tensor, values: list[int]) -> bool:
    """Return whether a tensor on the host has other values. Those on a device are not read: that would synchronise."""
    return x.device.type == "cpu" and x.tolist() != values


def _check_uncached_lengths(metadata: Any, starts: list[int], ends: list[int]) -> None:
    """Raise ValueError if a sequence has keys in the cache, which PrefillNoCache does not read."""
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    got = _numbers(metadata, "seq_lens_list")
    if got[: len(lengths)] != lengths:
        raise ValueError(f"{PREFILL_NO_CACHE} has no keys but its own, {lengths} of each sequence, got {got}")


def _check_cached_lengths(
    block_tables: torch.Tensor, starts: list[int], ends: list[int], lengths: list[int], block_size: int
) -> None:
    """Raise ValueError if a sequence is shorter than its queries, or its keys have no room in `block_tables`."""
    if block_tables.shape[0] < len(ends):
        raise ValueError(f"block_tables must have {len(ends)} rows, one for each sequence, got {block_tables.shape[0]}")
    room = block_tables.shape[1] * block_size
    for b, (start, end, length) in enumerate(zip(starts, ends, lengths, strict=False)):
        if length < end - start:
            raise ValueError(f"sequence {b} has {end - start} queries and {length} keys: seq_lens counts both")
        if length > room:
            raise ValueError(f"sequence {b} has {length} keys, and its row of block_tables room for {room}")
