"""`flash_attn_with_kvcache`: attention over a cache of keys and values, flash_attn 2.8's function; and packed queries
over pages, for `flash_attention_varlen`.

Everything is checked before anything is written or launched. Values that lie on a device (lengths, tables) are never
read by the host, so a captured graph may be replayed with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from diyfa import registry, validation
from diyfa.features import ATTENTION_DTYPES
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.kvcache_ops import (
    KVCacheOptions,
    KVCachePlan,
    bucket,
    check_out,
    describe_kvcache,
    needs_grad,
    run,
    run_plan,
    without_backward,
)
from diyfa.options import UNBOUNDED
from diyfa.plan import autocast_dtype, find, is_unseen, remember
from diyfa.problem import VARLEN, KVCacheTensors, NewKeys

KVCacheResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Descale = torch.Tensor | float | None
FLOAT8 = torch.float8_e4m3fn

_IN_MEMORY = (torch.Tensor, torch.nn.Parameter)
_NONE = type(None)
_FLAGS = ("causal", "rotary_interleaved", "return_softmax_lse")


# ---- Checks -----------------------------------------------------------------------------------------------------


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check(name: str, x: object, q: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """A dense tensor on q's device, of this shape and one of these dtypes."""
    validation.check_tensors(**{name: x})
    assert isinstance(x, torch.Tensor), "checked above"
    validation.check_same_device(q, **{name: x})
    if x.dtype not in dtypes:
        expected = " or ".join(validation.dtype_name(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {expected}, got {validation.dtype_name(x.dtype)}")
    if _shape(x) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {_shape(x)}")


def _check_stride(**tensors: torch.Tensor) -> None:
    """The last dimension has stride 1."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel():
            raise ValueError(f"the last dimension of {name} must have stride 1, got strides {x.stride()}")


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, names: tuple[str, str, str]) -> None:
    """q (…, H, D), k (…, Hk, D) and v (…, Hk, Dv) fit; k and v are as q or both float8, of the same leading sizes."""
    q_name, k_name, v_name = names
    validation.check_same_device(q, **{k_name: k_cache, v_name: v_cache})
    if q.dtype not in ATTENTION_DTYPES:
        raise TypeError(
            f"Unsupported dtype {q.dtype} of {q_name}: expected float16, bfloat16 or float32 (float64: backend='cpu')"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, FLOAT8):
        raise TypeError(
            f"{k_name} and {v_name} must both be {q.dtype} as {q_name} is, or {FLOAT8}, got {k_cache.dtype} and "
            f"{v_cache.dtype}"
        )
    if not 1 <= q.shape[-1] <= validation.MAX_HEAD_DIM:
        raise ValueError(f"Unsupported head_dim: expected 1 to {validation.MAX_HEAD_DIM} for q and k, got {_shape(q)}")
    if not 1 <= v_cache.shape[-1] <= validation.MAX_HEAD_DIM_V:
        raise ValueError(
            f"Unsupported head_dim: expected 1 to {validation.MAX_HEAD_DIM_V} for v, got {_shape(v_cache)}"
        )
    if k_cache.shape[-1] != q.shape[-1]:
        raise ValueError(f"{q_name} and {k_name} must have the same head_dim, got {_shape(q)} and {_shape(k_cache)}")
    if v_cache.dim() != k_cache.dim() or v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            f"{k_name} and {v_name} must have the same shape but for the head_dim, got {_shape(k_cache)} and "
            f"{_shape(v_cache)}"
        )
    heads, heads_kv = q.shape[-2], k_cache.shape[-2]
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"the query heads must be a positive multiple of the key/value heads, got {heads} and {heads_kv}"
        )
    _check_stride(**{q_name: q, k_name: k_cache, v_name: v_cache})


def _check_not_expanded(**tensors: torch.Tensor) -> None:
    """What is written has memory for each of its elements."""
    for name, x in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{name} must not be expanded where it is written, got strides {x.stride()}")


def _check_out(out: torch.Tensor, q: torch.Tensor, head_dim_v: int) -> None:
    """What the result is written to."""
    _check("out", out, q, (*q.shape[:-1], head_dim_v), q.dtype)
    _check_stride(out=out)
    _check_not_expanded(out=out)


def _capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """The most keys that a sequence can have."""
    return k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]


def _check_new_keys(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: dict[str, Any], capacity: int
) -> None:
    k, v, cos, sin = given["k"], given["v"], given["rotary_cos"], given["rotary_sin"]
    if k is None:
        if v is not None:
            raise ValueError("v is appended beside k, which is None")
        if cos is not None or sin is not None:
            raise ValueError("rotary_cos and rotary_sin rotate what is appended, but k is None")
        return
    if given["cache_seqlens"] is None:
        raise ValueError("k is appended at cache_seqlens, which is None")
    validation.check_tensors(k=k)
    length = k.shape[1] if k.dim() == 4 else 0
    of_new = (q.shape[0], length, k_cache.shape[2])
    _check("k", k, q, (*of_new, k_cache.shape[3]), q.dtype)
    _check_stride(k=k)
    if v is not None:
        _check("v", v, q, (*of_new, v_cache.shape[3]), q.dtype)
        _check_stride(v=v)
    _check_not_expanded(k_cache=k_cache, v_cache=v_cache)
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin belong together")
    validation.check_tensors(rotary_cos=cos, rotary_sin=sin)
    if cos.dim() != 2 or not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise ValueError(
            f"rotary_cos must have shape (rows, rotary_dim / 2) with rotary_dim at most {q.shape[-1]}, "
            f"got {_shape(cos)}"
        )
    beyond = max(0, q.shape[1] - length)  # query i is rotated by row cache_seqlens + i, be there as many keys or not
    if cos.shape[0] < capacity + beyond:
        more = f", and {beyond} for queries beyond them" if beyond else ""
        raise ValueError(
            f"rotary_cos must have a row for each of the {capacity} keys that there can be{more}, got {cos.shape[0]}"
        )
    _check("rotary_cos", cos, q, _shape(cos), *{q.dtype, torch.float32})
    _check("rotary_sin", sin, q, _shape(cos), cos.dtype)
    _check_stride(rotary_cos=cos, rotary_sin=sin)


def _check_table(q: torch.Tensor, block_table: object, batch: int) -> None:
    """block_table (B, pages of a sequence) int32."""
    validation.check_tensors(block_table=block_table)
    assert isinstance(block_table, torch.Tensor), "checked above"
    columns = block_table.shape[1] if block_table.dim() == 2 else 0
    _check("block_table", block_table, q, (batch, columns), torch.int32)


def _check_pages(tensors: KVCacheTensors, keys: torch.Tensor, queries: torch.Tensor | int, window_left: int) -> None:
    """On the CPU: block_table names pages of the cache wherever a sequence has `keys` (B,) that some query can see, or
    that are appended."""
    block_table, cache = tensors.block_table, tensors.k_cache
    assert block_table is not None, "asked for pages only"
    if validation.is_capturing(block_table) or not block_table.numel() or not cache.shape[1]:
        return
    pages, page_size = cache.shape[:2]
    first = torch.zeros_like(keys) if tensors.leftpad is None else tensors.leftpad
    if window_left >= 0:
        first = torch.maximum(first, keys - queries - window_left)
    if tensors.added:
        first = torch.minimum(first, keys - tensors.added)
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    used = (columns >= (first // page_size)[:, None]) & (columns < ((keys + page_size - 1) // page_size)[:, None])
    outside = used & ((block_table < 0) | (block_table >= pages))
    if bool(outside.any()):
        b, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must name pages from 0 to {pages - 1} where a query can see keys, got "
            f"{int(block_table[b, column])} in column {column} of row {b}"
        )


def _check_lengths(name: str, seqlens: torch.Tensor, added: int, capacity: int, room: str) -> None:
    """On the CPU: no length is negative or, with what is appended, beyond the capacity."""
    if validation.is_capturing(seqlens) or not seqlens.numel():
        return
    low, high = int(seqlens.min()), int(seqlens.max())
    if low < 0 or high + added > capacity:
        more = f" and {added} new keys" if added else ""
        raise ValueError(f"{name} must be from 0 to what {room} holds, {capacity}; got {low} to {high}{more}")


def _check_values(tensors: KVCacheTensors, window_left: int) -> None:
    """What the host may read without waiting: lengths that are an int, and tensors on the CPU."""
    k_cache, table, seqlens, added = tensors.k_cache, tensors.block_table, tensors.seqlens, tensors.added
    capacity = _capacity(k_cache, table)
    room = "the cache" if table is None else "block_table"
    if seqlens is None and not 0 <= tensors.length <= capacity - added:
        more = f" and {added} new keys" if added else ""
        raise ValueError(f"cache_seqlens must be from 0 to what {room} holds, {capacity}; got {tensors.length}{more}")
    if not k_cache.is_cpu:
        return
    if seqlens is not None:
        _check_lengths("cache_seqlens", seqlens, added, capacity, room)
    if table is not None:
        length = table.new_full(table.shape[:1], tensors.length) if seqlens is None else seqlens
        _check_pages(tensors, length + added, tensors.q.shape[1], window_left)
    if tensors.cache_batch_idx is not None:
        _check_lengths("cache_batch_idx", tensors.cache_batch_idx, 1, k_cache.shape[0], "the batch of the cache")
    if tensors.leftpad is not None:
        _check_lengths("cache_leftpad", tensors.leftpad, 0, capacity, room)


def _check_call(q: Any, k_cache: Any, v_cache: Any, given: dict[str, Any]) -> None:
    """All that shapes, strides, dtypes and devices say."""
    validation.check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(
            "q must be (batch, seqlen, heads, head_dim), k_cache (cache batch, rows, heads, head_dim) or (pages, page "
            f"size, heads, head_dim), got {_shape(q)} and {_shape(k_cache)}"
        )
    _check_caches(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    batch, heads = q.shape[0], q.shape[2]
    table, index, seqlens = given["block_table"], given["cache_batch_idx"], given["cache_seqlens"]
    if table is not None:
        if index is not None:
            raise ValueError("cache_batch_idx chooses rows of a contiguous cache; pages are chosen by block_table")
        _check_table(q, table, batch)
    elif index is None and k_cache.shape[0] < batch:
        raise ValueError(f"the cache has {k_cache.shape[0]} rows for a batch of {batch}: name them by cache_batch_idx")
    if isinstance(seqlens, torch.Tensor):
        _check("cache_seqlens", seqlens, q, (batch,), torch.int32)
    for name in ("cache_batch_idx", "cache_leftpad"):
        if given[name] is not None:
            _check(name, given[name], q, (batch,), torch.int32)
    capacity = _capacity(k_cache, table)
    _check_new_keys(q, k_cache, v_cache, given, capacity)
    sizes = {"b": batch, "h": heads, "q": q.shape[1], "k": capacity}
    validation.check_optional_tensors(q, sizes, {name: given[name] for name in ("alibi_slopes", "sinks")})
    validation.check_scalars(given["softmax_scale"], given["softcap"], 0.0, scale_name="softmax_scale")
    validation.check_length("num_splits", given["num_splits"])
    for name in ("k_descale", "v_descale"):
        _check_descale(name, given[name], q, k_cache, batch)
    if given["out"] is not None:
        _check_out(given["out"], q, v_cache.shape[3])


def _check_descale(name: str, x: Descale, q: torch.Tensor, cache: torch.Tensor, batch: int) -> None:
    """None, a number, a float32 tensor of one element or one (B, Hk), for a cache of float8."""
    if x is None:
        return
    if cache.dtype != FLOAT8:
        raise ValueError(f"{name} belongs to a cache of {FLOAT8}, got one of {cache.dtype}")
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return
    validation.check_tensors(**{name: x})
    assert isinstance(x, torch.Tensor), "checked above"
    _check(name, x, q, _shape(x) if x.numel() == 1 else (batch, cache.shape[-2]), torch.float32)


# ---- Inside torch.autocast --------------------------------------------------------------------------------------


def _autocast(cache: Any, q: Any, *others: Any) -> tuple[Any, ...] | None:
    """q and others that are no float64 in the dtype of the cache, of a float8 one in that of autocast. None where
    nothing is cast. The arguments are not checked yet."""
    if not isinstance(q, torch.Tensor) or not isinstance(cache, torch.Tensor):
        return None
    dtype = autocast_dtype(q)
    if dtype is None:
        return None
    if cache.dtype is not FLOAT8:
        dtype = cache.dtype
    return _cast((q, *others), dtype, (torch.float32, torch.float16, torch.bfloat16))


def _autocast_packed(q: Any, k: Any, v: Any, block_table: Any) -> tuple[Any, ...] | None:
    """Cast packed queries over pages to the cache's dtype; without pages q, k and v, if float32, as in training."""
    if block_table is not None:
        cast = _autocast(k, q)
        return None if cast is None else (*cast, k, v)
    dtype = autocast_dtype(q) if isinstance(q, torch.Tensor) else None
    return None if dtype is None else _cast((q, k, v), dtype, (torch.float32,))


def _cast(given: tuple[Any, ...], dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...] | None:
    """Cast tensors that have one of `dtypes` to `dtype`; None if there is nothing to cast."""
    casts = [isinstance(x, torch.Tensor) and x.dtype in dtypes and x.dtype is not dtype for x in given]
    if dtype not in ATTENTION_DTYPES or not any(casts):
        return None
    return tuple(x.to(dtype) if casts_it else x for x, casts_it in zip(given, casts, strict=True))


# ---- The call ---------------------------------------------------------------------------------------------------


def _vector(x: torch.Tensor | None) -> torch.Tensor | None:
    """Small tensors are read by plain index; only odd callers pass strided ones."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _rows_first(table: torch.Tensor | None) -> torch.Tensor | None:
    """A page table with last stride 1, as flash_attn makes it."""
    return table if table is None or table.stride(-1) == 1 else table.contiguous()


def _expanded_descale(x: Descale, q: torch.Tensor, batch: int, heads_kv: int) -> torch.Tensor | None:
    """(B, Hk), without a copy of a tensor."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        x = q.new_full((1, 1), x, dtype=torch.float32)
    return x.reshape(1, 1).expand(batch, heads_kv) if x.numel() == 1 else x


def _length(seqlens: int | torch.Tensor | None, k_cache: torch.Tensor, table: torch.Tensor | None) -> int:
    """The number of keys of each sequence, 0 where a tensor says it."""
    if seqlens is None:
        return _capacity(k_cache, table)
    return 0 if isinstance(seqlens, torch.Tensor) else seqlens


def _bind(tensors: Sequence[Any], softmax_scale: float | None) -> KVCacheTensors:
    """What a backend gets, of the tensors of `flash_attn_with_kvcache`."""
    q, k_cache, v_cache, seqlens, table, index, leftpad, slopes, sinks, k_descale, v_descale, _, k, *_ = tensors
    length = _length(seqlens, k_cache, table)
    if not isinstance(seqlens, torch.Tensor):
        seqlens = None
    if k_descale is not None or v_descale is not None:
        batch, heads_kv = q.shape[0], k_cache.shape[2]
        k_descale, v_descale = (_expanded_descale(x, q, batch, heads_kv) for x in (k_descale, v_descale))
    return KVCacheTensors(
        q,
        k_cache,
        v_cache,
        q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        length,
        0 if k is None else k.shape[1],
        _vector(seqlens),
        None,
        None,
        _rows_first(table),
        _vector(index),
        _vector(leftpad),
        _vector(slopes),
        _vector(sinks),
        k_descale,
        v_descale,
    )


def _key_of(tensors: tuple[Any, ...], *options: Any) -> tuple[Any, list[torch.Tensor], list[int]]:
    """(all that checks and decisions read of a call, the tensors that there are, their addresses).

    The key is None where a tensor is no ordinary one. The second and third tensor are the keys and values. Of numbers
    in place of a tensor (a length, a descale) only the type matters.
    """
    kinds = tuple(map(type, tensors))
    parts: list[Any] = []
    given: list[torch.Tensor] = []
    addresses: list[int] = []
    for kind, x in zip(kinds, tensors, strict=True):
        if kind in _IN_MEMORY:
            if x.layout is not torch.strided or x.is_neg():
                return None, given, addresses
            address = x.data_ptr()
            given.append(x)
            addresses.append(address)
            parts += (x.shape, x.stride(), x.dtype, x.device, address & 15, x.requires_grad)
        elif kind is not _NONE and isinstance(x, torch.Tensor):
            return None, given, addresses
    is_latent = autocast = None
    if kinds[0] in _IN_MEMORY and kinds[1] in _IN_MEMORY and kinds[2] in _IN_MEMORY:
        is_latent = addresses[1] == addresses[2]
        q, k = given[:2]
        if q.dtype is torch.float32 or k.dtype is FLOAT8:  # what autocast may cast
            autocast = autocast_dtype(q)
    return ("kvcache", is_latent, kinds, *parts, *options, autocast), given, addresses


def _find(tensors: tuple[Any, ...], *options: Any) -> tuple[KVCachePlan | None, Any, list[torch.Tensor], list[int]]:
    """The plan of an earlier equal call, or None, and what `_key_of` returns, whose key is None where something looks
    on.

    `tensors` are all that a call can have, None or numbers where it has another.
    """
    if not is_unseen():
        return None, None, [], []
    modes = torch.is_grad_enabled(), registry.forced_backend(), registry.is_batch_invariant()
    key, given, addresses = _key_of(tensors, *modes, *options)
    return find(key), key, given, addresses


def _remember(
    key: Any, plan: KVCachePlan | None, given: Sequence[Any], bound: KVCacheTensors, wants_grad: bool
) -> None:
    """Keep what a call came to, whose tensors were `bound` for a backend."""
    if plan is not None:
        plan.wants_grad = wants_grad
        plan.binds_given = all(any(x is y for y in given) for x in bound.present())
    remember(key, plan)


@without_unknown
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    out: torch.Tensor | None = None,
    **unknown: NoReturn,
) -> KVCacheResult:
    """Attention of new queries over a cache, to which new keys and values are appended first, in place.

    A sequence has n keys: `cache_seqlens` and the new ones. Its last query stands at its last key: query i sees keys
    as in `flash_attn_func` with Sk = n. Nothing waits for the device. There is no backward pass: the result of inputs
    that require a gradient has a grad_fn that raises. Inside torch.autocast q, k and v are cast to the dtype of the
    cache, or to autocast's beside a float8 cache.

    Args:
        q: (B, Sq, H, D); float16, bfloat16 or float32. Last stride 1, others free.
        k_cache, v_cache: (Bc, Sc, Hk, D) and (Bc, Sc, Hk, Dv), or with `block_table` pages (pages, page size, Hk, D)
            of any size; in q's dtype or float8_e4m3fn. v_cache may be the first features of k_cache, a view of the
            same memory (the latent cache of multi-head latent attention).
        k, v: (B, Snew, Hk, D) and (B, Snew, Hk, Dv) in q's dtype: they become keys cache_seqlens, cache_seqlens + 1, …
            of their sequence. Both or none; a latent cache takes k alone. What would land beyond the cache is dropped
            where the host cannot see it.
        rotary_cos, rotary_sin: (rows, R / 2) in q's dtype or float32, R <= D, a row for each key there can be and for
            each query more than new keys. They rotate the first R features of k by row cache_seqlens + i, and those of
            q by row cache_seqlens + i where the mask is causal or a window, else by row cache_seqlens. They need k.
        cache_seqlens: keys in the cache, counted from row 0 of the sequence: an int, (B,) int32, or None: it is full.
        cache_batch_idx: (B,) int32, the row of the contiguous cache that is sequence b's; default b. Of sequences that
            append to one row of the cache, or of a page, some one's keys are there afterwards.
        cache_leftpad: (B,) int32, rows at a sequence's beginning that hold no keys.
        block_table: (B, pages of a sequence) int32: key j lies in row j % page size of page
            block_table[b, j // page size]. Any order; sequences may share pages; entries beyond the last page are
            not read, nor are those of pages that the window or cache_leftpad hides from every query, whatever such
            pages hold. All others must name pages: a table on the CPU is checked for that, one on the device is not,
            and what keys of no page count is undefined there (nothing outside the cache is read).
        softmax_scale: factor of the scores; default 1/sqrt(D).
        causal, window_size, softcap: as for `flash_attn_func`.
        rotary_interleaved: features (0, 1), (2, 3), … make pairs; else i and i + R / 2.
        alibi_slopes: (H,) or (B, H) float32.
        num_splits: parts that the keys are divided into; 0: chosen for the device.
        return_softmax_lse: return the log-sum-exp, too.
        sinks: (H,) float32 logits that join the softmax denominator.
        k_descale, v_descale: factors of what a float8 cache holds: a number, a float32 tensor of one element or
            (B, Hk). What is appended is divided by them.
        out: what the result is written to, (B, Sq, H, Dv) in q's dtype with last stride 1; no memory of the caches, and
            none of q, or exactly q. Where a gradient is wanted and out is a view, a leaf that requires one, or q, the
            result is an alias of it, for that has a grad_fn.

    Returns:
        out (B, Sq, H, Dv), or with `return_softmax_lse` (out, lse (B, H, Sq) float32); a row that sees no key has
        output 0 and lse +inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or no kernel can run the call, before anything is written.
    """
    if unknown:
        refuse_unknown(flash_attn_with_kvcache, unknown)
    if not (type(causal) is type(rotary_interleaved) is type(return_softmax_lse) is bool):
        flags = (causal, rotary_interleaved, return_softmax_lse)
        validation.check_booleans(**dict(zip(_FLAGS, flags, strict=True)))
    window = window_size if window_size is UNBOUNDED else validation.check_window(window_size, "window_size")
    if cache_seqlens is not None and type(cache_seqlens) is not int and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = validation.check_length("cache_seqlens", cache_seqlens)
    if type(num_splits) is not int:
        num_splits = validation.check_length("num_splits", num_splits)
    tensors = (
        q, k_cache, v_cache, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, alibi_slopes, sinks, k_descale,
        v_descale, out, k, v, rotary_cos, rotary_sin,
    )  # fmt: skip
    options = softmax_scale, causal, window, softcap, rotary_interleaved, num_splits
    plan, key, present, addresses = _find(tensors, *options)
    if plan is None and (cast := _autocast(k_cache, q, k, v)) is not None:
        q, k, v = cast
        tensors = (q, *tensors[1:12], k, v, *tensors[14:])
        plan, key, present, addresses = _find(tensors, *options)
    if plan is not None and rotary_cos is None:
        if plan.on_host or isinstance(cache_seqlens, int):
            _check_values(_bind(tensors, softmax_scale), window[0])
        length = 0 if isinstance(cache_seqlens, torch.Tensor) else _length(cache_seqlens, k_cache, block_table)
        appended = 0 if k is None else 1 if v is None else 2
        made = plan.again(present, addresses, length, out, return_softmax_lse, appended)
        if made is not None:
            if plan.wants_grad:
                made = without_backward(made, tensors, out)
            return (made[0], made[1]) if return_softmax_lse else made[0]
    if plan is None:
        given = {
            "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens,
            "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": block_table,
            "softmax_scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "num_splits": num_splits,
            "sinks": sinks, "k_descale": k_descale, "v_descale": v_descale, "out": out,
        }  # fmt: skip
        _check_call(q, k_cache, v_cache, given)
    bound = _bind(tensors, softmax_scale)
    _check_values(bound, window[0])
    new = None if k is None else NewKeys(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    wants_grad = needs_grad(tensors, out) if plan is None else plan.wants_grad
    with torch.no_grad() if wants_grad else nullcontext():
        if plan is not None:
            result, lse = run_plan(plan, bound, new, out, return_softmax_lse)
        else:
            left, right = window
            call_options = KVCacheOptions(
                "bshd", left, 0 if causal else right, float(softcap), num_splits=num_splits,
                batch_invariant=registry.is_batch_invariant(), backend=registry.forced_backend(),
            )  # fmt: skip
            result, lse, plan = run(bound, call_options, new, out, key is not None)
            _remember(key, plan, tensors, bound, wants_grad)
    if wants_grad:
        result, lse = without_backward((result, lse), tensors, out)
    return (result, lse) if return_softmax_lse else result


# ---- Packed queries ---------------------------------------------------------------------------------------------


def _check_packed(q: Any, k: Any, v: Any, given: dict[str, Any]) -> int:
    """All that shapes, strides, dtypes and devices say; returns the number of sequences."""
    validation.check_tensors(q=q, k=k, v=v)
    cu_q, cu_k, used, table = (given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"))
    rank = 3 if table is None else 4
    if q.dim() != 3 or k.dim() != rank:
        of_keys = "(total, heads, head_dim)" if table is None else "(pages, page size, heads, head_dim)"
        raise ValueError(f"q must be (total, heads, head_dim) and k {of_keys}, got {_shape(q)} and {_shape(k)}")
    _check_caches(q, k, v, ("q", "k", "v"))
    if given["dropout_p"]:
        raise ValueError("dropout_p belongs to training; block_table, seqused_k and out to inference")
    if cu_k is None and (used is None or table is None):
        raise ValueError(
            "cu_seqlens_k may be None only where block_table says where the keys are, and seqused_k how many"
        )
    validation.check_tensors(cu_seqlens_q=cu_q)
    if cu_q.dim() != 1 or not cu_q.shape[0]:
        raise ValueError(f"cu_seqlens_q must be a vector of B + 1 offsets, got shape {_shape(cu_q)}")
    batch = cu_q.shape[0] - 1
    for name, x, length in (
        ("cu_seqlens_q", cu_q, batch + 1),
        ("cu_seqlens_k", cu_k, batch + 1),
        ("seqused_k", used, batch),
    ):
        if x is not None:
            _check(name, x, q, (length,), torch.int32)
    if table is not None:
        _check_table(q, table, batch)
    sizes = {"b": batch, "h": q.shape[1], "q": given["max_seqlen_q"], "k": given["max_seqlen_k"]}
    validation.check_optional_tensors(q, sizes, {name: given[name] for name in ("alibi_slopes", "sinks")})
    validation.check_scalars(given["sm_scale"], given["softcap"], 0.0, scale_name=given["scale_name"])
    if given["out"] is not None:
        _check_out(given["out"], q, v.shape[-1])
    return batch


def _check_packed_values(tensors: KVCacheTensors, max_seqlen_q: int, max_seqlen_k: int, window_left: int) -> None:
    """What the host may read without waiting: tensors on the CPU."""
    q, k, cu_q, cu_k = tensors.q, tensors.k_cache, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None, "packed queries come with it"
    if not q.is_cpu or validation.is_capturing(q):
        return
    validation.check_offsets("q", cu_q, max_seqlen_q, q.shape[0])
    table, lengths = tensors.block_table, tensors.seqlens
    if cu_k is not None:
        total = k.shape[0] if table is None else int(cu_k[-1])  # with pages it says lengths only
        validation.check_offsets("k", cu_k, max_seqlen_k, total)
        rows = cu_k.diff()
        if table is None and lengths is not None and bool((lengths > rows).any()):
            raise ValueError(
                f"seqused_k must be at most the rows of each sequence, {rows.tolist()}, got {lengths.tolist()}"
            )
        lengths = rows if lengths is None else lengths
    assert lengths is not None, "one of them says it"
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= max_seqlen_k:
        raise ValueError(f"seqused_k must be from 0 to max_seqlen_k={max_seqlen_k}, got {lengths.tolist()}")
    if table is not None:
        _check_lengths("the number of keys", lengths, 0, _capacity(k, table), "block_table")
        _check_pages(tensors, lengths, cu_q.diff(), window_left)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any], returns_lse: bool = True
) -> tuple[Any, Any]:
    """Attention of packed queries (Tq, H, D) over pages or packed keys -> out and, if it is returned, lse.

    There is no backward pass, as in `flash_attn_with_kvcache`. `given` are the other arguments of
    `flash_attention_varlen`, checked booleans and window among them, and `scale_name`, what the scale is called.
    """
    tensor_names = ("seqused_k", "cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes", "sinks", "out")
    used, cu_q, cu_k, table, slopes, sinks, out = (given[name] for name in tensor_names)
    max_q, max_k = given["max_seqlen_q"], given["max_seqlen_k"]
    backend, variant = given["backend"] or registry.forced_backend(), given["variant"]
    tensors = (q, k, v, used, cu_q, cu_k, table, slopes, sinks, out)
    options = (
        max_q, max_k if table is None else bucket(max_k),
        given["sm_scale"], given["causal"], given["window"], given["softcap"],
        given["dropout_p"], given["num_splits"], backend, variant,
    )  # fmt: skip
    plan, key, present, addresses = _find(tensors, *options)
    if plan is None and (cast := _autocast_packed(q, k, v, table)) is not None:
        q, k, v = cast
        tensors = (*cast, *tensors[3:])
        plan, key, present, addresses = _find(tensors, *options)
    if plan is not None and not plan.on_host:
        made = plan.again(present, addresses, 0, out, returns_lse)
        if made is not None:
            return without_backward(made, tensors, out) if plan.wants_grad else (made[0], made[1])
    if plan is None:
        _check_packed(q, k, v, given)
    scale = q.shape[-1] ** -0.5 if given["sm_scale"] is None else float(given["sm_scale"])
    bound = KVCacheTensors(
        q, k, v, scale, 0, 0, _vector(used), _vector(cu_q), _vector(cu_k), _rows_first(table),
        alibi_slopes=_vector(slopes), sinks=_vector(sinks),
    )  # fmt: skip
    _check_packed_values(bound, max_q, max_k, given["window"][0])
    wants_grad = needs_grad(tensors, out) if plan is None else plan.wants_grad
    with torch.no_grad() if wants_grad else nullcontext():
        if plan is not None:
            result, lse = run_plan(plan, bound, None, out, returns_lse)
        else:
            result, lse, plan = run(bound, _packed_options(given), None, out, key is not None)
            _remember(key, plan, tensors, bound, wants_grad)
    return without_backward((result, lse), tensors, out) if wants_grad else (result, lse)


def _packed_options(given: dict[str, Any]) -> KVCacheOptions:
    left, right = given["window"]
    return KVCacheOptions(
        VARLEN, left, 0 if given["causal"] else right, float(given["softcap"]), given["max_seqlen_q"],
        given["max_seqlen_k"], num_splits=given["num_splits"], batch_invariant=registry.is_batch_invariant(),
        backend=given["backend"] or registry.forced_backend(), variant=given["variant"],
    )  # fmt: skip


def explain_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> registry.Explanation:
    """What `attend_packed` with the same arguments would run, without running it."""
    q, k, v = _autocast_packed(q, k, v, given["block_table"]) or (q, k, v)
    _check_packed(q, k, v, given)
    tensors = KVCacheTensors(
        q, k, v, 1.0, 0, 0, given["seqused_k"], given["cu_seqlens_q"], given["cu_seqlens_k"],
        given["block_table"], alibi_slopes=given["alibi_slopes"], sinks=given["sinks"],
    )  # fmt: skip
    _check_packed_values(tensors, given["max_seqlen_q"], given["max_seqlen_k"], given["window"][0])
    options, out = _packed_options(given), given["out"]
    check_out(out, tensors, options.layout)
    problem = describe_kvcache(registry.resolve_backend(q.device, options.backend), tensors, options, out)
    return registry.explain_choice("kvcache_fwd", problem, q.device, options.backend, options.variant)
