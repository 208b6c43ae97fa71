"""`flash_attn_with_kvcache`: attention over a cache of keys and values, flash_attn 2.8's function; and packed queries
over pages, for `flash_attention_varlen`.

Everything is checked before anything is written or launched. The host never reads values on a device (lengths, tables),
so a captured graph may be replayed with others.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch

from diyfa import registry, validation
from diyfa.features import ATTENTION_DTYPES, CACHE_TENSORS, PACKED_TENSORS, Sizes
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.kvcache_ops import (
    KVCacheOptions,
    KVCachePlan,
    Operators,
    bucket,
    cache_capacity,
    check_out,
    describe_kvcache,
    needs_grad,
    with_room,
    without_backward,
)
from diyfa.options import UNBOUNDED
from diyfa.plan import autocast_dtype, call_key, find, is_described_only, remember
from diyfa.problem import VARLEN, KVCacheTensors, NewKeys

KVCacheResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Descale = torch.Tensor | float | None
FLOAT8 = torch.float8_e4m3fn

_FLAGS = ("causal", "rotary_interleaved", "return_softmax_lse")
# Names of the optional tensors of a call, which `_Call.optional` holds in this order: first the optional fields of
# `KVCacheTensors` under the caller's names, in the order of the fields (`_N_FIELDS` of them), then k, v, cos and sin of
# `NewKeys`, last `out`. With packed queries the first is called `seqused_k`.
_N_FIELDS = len(KVCacheTensors._fields) - KVCacheTensors._fields.index("seqlens")
_OPTIONAL = (
    "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "block_table", "cache_batch_idx", "cache_leftpad", "alibi_slopes",
    "sinks", "k_descale", "v_descale", "k", "v", "rotary_cos", "rotary_sin", "out",
)  # fmt: skip
_TABLE_INDEX = _OPTIONAL.index("block_table")
_PACKED_OPTIONAL = ("seqused_k", *_OPTIONAL[1:])


class _Call(NamedTuple):
    """The unchecked arguments of a call, without the lengths in which equal calls may differ (see `_attend`).

    The key of a call has all of them, and of each tensor its shape, strides, dtype and device (`call_key`).
    """

    q: Any
    k: Any  # a cache, or packed keys
    v: Any
    optional: tuple[Any, ...]  # in the order of `_OPTIONAL`
    scale: float | None
    scale_name: str
    interleaved: bool
    is_full: bool  # no numbers of keys are given: the cache is full
    # The fields of `KVCacheOptions`; softcap may be any kind of number.
    layout: str
    window_left: int
    window_right: int
    softcap: float
    max_seqlen_q: int
    max_seqlen_k: int
    num_splits: int
    batch_invariant: bool
    backend: str
    variant: str

    @property
    def is_packed(self) -> bool:
        return self.layout == VARLEN

    @property
    def options(self) -> KVCacheOptions:
        return KVCacheOptions._make(self[-len(KVCacheOptions._fields) :])._replace(softcap=float(self.softcap))

    def optional_by_name(self) -> dict[str, Any]:
        """Return the optional tensors that are given, by the caller's names for them."""
        names = _PACKED_OPTIONAL if self.is_packed else _OPTIONAL
        return {name: x for name, x in zip(names, self.optional, strict=True) if x is not None}


# ---- Checks -----------------------------------------------------------------------------------------------------


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, names: tuple[str, str, str]) -> None:
    """Check q (…, H, D), k (…, Hk, D), v (…, Hk, Dv): k and v have q's dtype or float8 and equal other sizes."""
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
    if k_cache.shape[-1] != q.shape[-1]:
        raise ValueError(f"{q_name} and {k_name} must have the same head_dim, got {_shape(q)} and {_shape(k_cache)}")
    if v_cache.dim() != k_cache.dim() or v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            f"{k_name} and {v_name} must have the same shape but for the head_dim, got {_shape(k_cache)} and "
            f"{_shape(v_cache)}"
        )
    validation.check_heads(q.shape[-2], k_cache.shape[-2], q.shape[-1], v_cache.shape[-1])
    validation.check_last_stride(**{q_name: q, k_name: k_cache, v_name: v_cache})


def _check_optional(q: torch.Tensor, sizes: Sizes, optional: dict[str, Any]) -> None:
    """Check device, dtype, shape and strides of the optional tensors by their rows in the table."""
    rows = CACHE_TENSORS if q.dim() == 4 else PACKED_TENSORS
    for name, x in optional.items():
        row = rows[name]
        validation.check_same_device(q, **{name: x})
        dtypes = [dtype or q.dtype for dtype in row.dtypes]
        if x.dtype not in dtypes:
            expected = " or ".join(dict.fromkeys(validation.dtype_name(dtype) for dtype in dtypes))
            raise TypeError(f"{name} must be {expected}, got {validation.dtype_name(x.dtype)}")
        if problem := row.shape.refuses(x, sizes):
            raise ValueError(f"{name} must {problem}")
        if row.has_rows:
            validation.check_last_stride(**{name: x})


def _check_new_keys(call: _Call, optional: dict[str, Any], capacity: int) -> int:
    """Check that new keys and their rotation fit; return the number of new keys."""
    q, k, v, cos, sin = call.q, *(optional.get(name) for name in ("k", "v", "rotary_cos", "rotary_sin"))
    if k is None:
        if v is not None:
            raise ValueError("v is appended beside k, which is None")
        if cos is not None or sin is not None:
            raise ValueError("rotary_cos and rotary_sin rotate what is appended, but k is None")
        return 0
    if call.is_full:
        raise ValueError("k is appended at cache_seqlens, which is None")
    length = k.shape[1] if k.dim() == 4 else 0
    validation.check_not_expanded(k_cache=call.k, v_cache=call.v)
    if cos is None and sin is None:
        return length
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin belong together")
    if cos.dim() != 2 or not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise ValueError(
            f"rotary_cos must have shape (rows, rotary_dim / 2) with rotary_dim at most {q.shape[-1]}, "
            f"got {_shape(cos)}"
        )
    beyond = max(0, q.shape[1] - length)  # row cache_seqlens + i rotates query i, also beyond the keys
    if cos.shape[0] < capacity + beyond:
        more = f", and {beyond} for queries beyond them" if beyond else ""
        raise ValueError(
            f"rotary_cos must have a row for each of the {capacity} keys that there can be{more}, got {cos.shape[0]}"
        )
    if sin.dtype != cos.dtype:
        expected, got = (validation.dtype_name(x.dtype) for x in (cos, sin))
        raise TypeError(f"rotary_sin must be {expected}, got {got}")
    return length


def _check_sequences(call: _Call, optional: dict[str, Any]) -> int:
    """Check the tensors that say where sequences are and how long; return the number of sequences."""
    q, k, table = call.q, call.k, optional.get("block_table")
    if call.is_packed:
        if optional.get("cu_seqlens_k") is None and (optional.get("seqused_k") is None or table is None):
            raise ValueError(
                "cu_seqlens_k may be None only where block_table says where the keys are, and seqused_k how many"
            )
        validation.check_tensors(cu_seqlens_q=optional.get("cu_seqlens_q"))
        cu_q = optional["cu_seqlens_q"]
        if cu_q.dim() != 1 or not cu_q.shape[0]:
            raise ValueError(f"cu_seqlens_q must be a vector of B + 1 offsets, got shape {_shape(cu_q)}")
        return cu_q.shape[0] - 1
    batch, index = q.shape[0], optional.get("cache_batch_idx")
    if table is not None and index is not None:
        raise ValueError("cache_batch_idx chooses rows of a contiguous cache; pages are chosen by block_table")
    if table is None and index is None and k.shape[0] < batch:
        raise ValueError(f"the cache has {k.shape[0]} rows for a batch of {batch}: name them by cache_batch_idx")
    return batch


def _check(call: _Call) -> None:
    """Check all that shapes, strides, dtypes and devices show."""
    q, k, v, optional = call.q, call.k, call.v, call.optional_by_name()
    names = ("q", "k", "v") if call.is_packed else ("q", "k_cache", "v_cache")
    validation.check_tensors(**dict(zip(names, (q, k, v), strict=True)))
    table, cos, out = optional.get("block_table"), optional.get("rotary_cos"), optional.get("out")
    if not call.is_packed and (q.dim() != 4 or k.dim() != 4):
        raise ValueError(
            "q must be (batch, seqlen, heads, head_dim), k_cache (cache batch, rows, heads, head_dim) or (pages, page "
            f"size, heads, head_dim), got {_shape(q)} and {_shape(k)}"
        )
    if call.is_packed and (q.dim() != 3 or k.dim() != (3 if table is None else 4)):
        key_shape = "(total, heads, head_dim)" if table is None else "(pages, page size, heads, head_dim)"
        raise ValueError(f"q must be (total, heads, head_dim) and k {key_shape}, got {_shape(q)} and {_shape(k)}")
    _check_caches(q, k, v, names)
    validation.check_tensors(**optional)
    batch, pages = _check_sequences(call, optional), table.shape[1] if table is not None and table.dim() == 2 else 0
    sizes = {
        "B": batch, "H": q.shape[-2], "Hk": k.shape[-2], "Sq": q.shape[1], "Tq": q.shape[0], "D": q.shape[-1],
        "Dv": v.shape[-1], "pages": pages,
    }  # fmt: skip
    if not call.is_packed:
        sizes["Snew"] = _check_new_keys(call, optional, k.shape[1] if table is None else pages * k.shape[1])
    if cos is not None:
        sizes["rows"], sizes["R/2"] = cos.shape
    _check_optional(q, sizes, optional)
    validation.check_scalars(call.scale, call.softcap, 0.0, scale_name=call.scale_name)
    validation.check_length("num_splits", call.num_splits)
    for name in ("k_descale", "v_descale"):
        if name in optional and k.dtype != FLOAT8:
            raise ValueError(f"{name} belongs to a cache of {FLOAT8}, got one of {k.dtype}")
    if out is not None:
        validation.check_not_expanded(out=out)


def _check_pages(tensors: KVCacheTensors, keys: torch.Tensor, queries: torch.Tensor | int, window_left: int) -> None:
    """Check on the CPU that block_table names pages of the cache for all of the `keys` (B,) of each sequence that some
    query can see or that are appended."""
    block_table, cache = tensors.block_table, tensors.k_cache
    assert block_table is not None, "asked for pages only"
    if validation.is_capturing(block_table) or not block_table.numel() or not cache.shape[1]:
        return
    pages, page_size = cache.shape[:2]
    first = torch.zeros_like(keys) if tensors.leftpad is None else tensors.leftpad
    if 0 <= window_left < cache_capacity(cache, block_table):  # a larger one hides nothing, and may not fit int32
        first = torch.maximum(first, keys - queries - window_left)
    if tensors.added:
        first = torch.minimum(first, keys - tensors.added)
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    is_used = (columns >= (first // page_size)[:, None]) & (columns < ((keys + page_size - 1) // page_size)[:, None])
    outside = is_used & ((block_table < 0) | (block_table >= pages))
    if bool(outside.any()):
        b, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must name pages from 0 to {pages - 1} where a query can see keys, got "
            f"{int(block_table[b, column])} in column {column} of row {b}"
        )


def _check_lengths(name: str, seqlens: torch.Tensor, added: int, capacity: int, room: str) -> None:
    """Check on the CPU that no length is negative or, with the `added` keys, beyond the capacity, that of `room`."""
    if validation.is_capturing(seqlens) or not seqlens.numel():
        return
    low, high = int(seqlens.min()), int(seqlens.max())
    if low < 0 or high + added > capacity:
        more = f" and {added} new keys" if added else ""
        limit = f"what {room} holds, {capacity}" if room else f"{capacity}"
        raise ValueError(f"{name} must be from 0 to {limit}; got {low} to {high}{more}")


def _check_cache_values(tensors: KVCacheTensors, window_left: int) -> None:
    """Check the values that the host can read without waiting: a length that is an int, and tensors on the CPU."""
    k_cache, table, seqlens, added = tensors.k_cache, tensors.block_table, tensors.seqlens, tensors.added
    capacity = cache_capacity(k_cache, table)
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
        _check_lengths("cache_batch_idx", tensors.cache_batch_idx, 0, k_cache.shape[0] - 1, "")
    if tensors.leftpad is not None:
        _check_lengths("cache_leftpad", tensors.leftpad, 0, capacity, room)


def _check_packed_values(tensors: KVCacheTensors, max_seqlen_q: int, max_seqlen_k: int, window_left: int) -> None:
    """Check the values that the host can read without waiting: tensors on the CPU."""
    q, k, cu_q, cu_k = tensors.q, tensors.k_cache, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None, "packed queries come with it"
    if not q.is_cpu or validation.is_capturing(q):
        return
    validation.check_offsets("q", cu_q, max_seqlen_q, q.shape[0])
    table, lengths = tensors.block_table, tensors.seqlens
    if cu_k is not None:
        total = k.shape[0] if table is None else int(cu_k[-1])  # with pages it gives lengths only
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
        _check_lengths("the number of keys", lengths, 0, cache_capacity(k, table), "block_table")
        _check_pages(tensors, lengths, cu_q.diff(), window_left)


def _reads_values(call: _Call, tensors: KVCacheTensors) -> bool:
    """Return whether calls like this one have values to check: tensors on the CPU, or a length that is an int."""
    return tensors.q.is_cpu or not (call.is_packed or tensors.seqlens is not None)


def _check_values(call: _Call, tensors: KVCacheTensors, max_seqlen_k: int) -> None:
    """Check the values that the host can read without waiting."""
    if call.is_packed:
        _check_packed_values(tensors, call.max_seqlen_q, max_seqlen_k, call.window_left)
    else:
        _check_cache_values(tensors, call.window_left)


# ---- The call ---------------------------------------------------------------------------------------------------


def _autocast(call: _Call) -> _Call | None:
    """Return the call with the casts of torch.autocast, or None if nothing is cast.

    * Over a cache or pages: q and new keys and values, unless float64, are cast to the cache's dtype, or to autocast's
      dtype if the cache is float8.
    * Over packed keys: q, k and v are cast from float32 to autocast's dtype, as in training.
    """
    q, k, v, optional = call[:4]
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return None
    dtype = autocast_dtype(q)
    if dtype is None:
        return None
    as_in_training = call.is_packed and optional[_TABLE_INDEX] is None
    if not as_in_training and k.dtype is not FLOAT8:
        dtype = k.dtype
    if dtype not in ATTENTION_DTYPES:
        return None
    dtypes = (torch.float32,) if as_in_training else (torch.float32, torch.float16, torch.bfloat16)
    inputs = (q, k, v) if as_in_training else (q, *optional[_N_FIELDS : _N_FIELDS + 2])
    cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in dtypes else x for x in inputs]
    if all(x is y for x, y in zip(cast, inputs, strict=True)):
        return None
    if as_in_training:
        return call._replace(q=cast[0], k=cast[1], v=cast[2])
    return call._replace(q=cast[0], optional=(*optional[:_N_FIELDS], *cast[1:], *optional[_N_FIELDS + 2 :]))


def _number_as_tensor(name: str, x: Descale, q: torch.Tensor) -> torch.Tensor | None:
    """Return a descale that is a number as a tensor of one element. Anything else is returned, and checked later."""
    if isinstance(x, (int, float)) and not isinstance(x, bool) and isinstance(q, torch.Tensor):
        validation.check_scalars(x, 0.0, 0.0, scale_name=name)
        return q.new_full((1, 1), float(x), dtype=torch.float32)
    return x  # type: ignore[return-value]


def _as_backends_read(index: int, x: torch.Tensor, call: _Call) -> torch.Tensor:
    """Return vectors and slopes contiguous, a page table with last stride 1, descales as (B, Hk) without a copy."""
    name = _OPTIONAL[index]
    if name == "block_table" and x.stride(-1) == 1:
        return x
    if name in ("k_descale", "v_descale"):
        return x.reshape(1, 1).expand(call.q.shape[0], call.k.shape[-2]) if x.numel() == 1 else x
    return x if x.is_contiguous() else x.contiguous()


def _bind(call: _Call, length: int, plan: KVCachePlan | None = None) -> tuple[KVCacheTensors, NewKeys | None]:
    """Return the objects that backends read, made from the tensors of a checked call.

    A tensor that backends could not read as it is becomes a copy or a view. `plan` is that of an earlier equal call: it
    knows whether any do, and the numbers that follow from shapes.
    """
    q, k, v, optional, scale = call[:5]
    fields: Any = optional[:_N_FIELDS]
    new_k, new_v, cos, sin = optional[_N_FIELDS:-1]
    if call.is_full:
        length = cache_capacity(k, optional[_TABLE_INDEX])
    if plan is None or not plan.binds_without_copies:
        fields = [x if x is None else _as_backends_read(i, x, call) for i, x in enumerate(fields)]
    if plan is None:
        scale, added = q.shape[-1] ** -0.5 if scale is None else float(scale), 0 if new_k is None else new_k.shape[1]
    else:
        scale, added = plan.scale, plan.added
    new = None if new_k is None else NewKeys(new_k, new_v, cos, sin, call.interleaved)
    if new is not None and cos is not None:
        new = with_room(new, q)
    return KVCacheTensors(q, k, v, scale, length, added, *fields), new


def _attend(call: _Call, length: int, max_seqlen_k: int, returns_lse: bool) -> Any:
    """Run a call -> (out, lse if `returns_lse`, …).

    1. Look up the plan of earlier equal calls. If such calls only attend, repeat the launch.
    2. Without a plan: if torch.autocast casts tensors, begin again with the cast ones; check shapes, strides, dtypes.
    3. Make the objects that backends read (`_bind`). Check the values that the host can read.
    4. Without a plan: make one and store it. A call that is traced or transformed has no key, and uses the operators.
    5. Append and attend. If a gradient is wanted, give the results a grad_fn that raises.

    Equal calls may differ in `length`, the keys of all sequences if no tensor has lengths, and in `max_seqlen_k`, which
    packed queries have.
    """
    q, k, v, optional = call[:4]
    key, addresses = call_key((q, k, v, *optional), call[4:])
    if key is not None and v is not None:  # the key holds no addresses, but v may be a view of k, and out may be q
        key = key, addresses[1] == addresses[2], optional[-1] is not None and addresses[-1] == addresses[0]
    plan, out = find(key), optional[-1]
    if plan is not None and plan.only_attends:
        check_out(out, (q, k, v), call.layout)
        repeated = plan.repeat(addresses if out is None else addresses[:-1], length, out, returns_lse)
        if repeated is not None:
            return repeated
    if plan is None:
        cast = _autocast(call)
        if cast is not None:
            return _attend(cast, length, max_seqlen_k, returns_lse)
        _check(call)
    tensors, new = _bind(call, length, plan)
    if plan is None or plan.reads_values:
        _check_values(call, tensors, max_seqlen_k)
    if plan is None and (key is None or is_described_only(q)):
        plan = Operators(call.options, needs_grad((q, k, v, *optional), out))
    elif plan is None:
        plan = KVCachePlan(tensors, call.options, new, out)
        plan.binds_without_copies = all(map(is_, tensors[-_N_FIELDS:], optional))
        plan.reads_values = _reads_values(call, tensors)
        plan.wants_grad = needs_grad((q, k, v, *optional), out)
        needs_nothing = plan.binds_without_copies and not plan.reads_values and not plan.wants_grad
        plan.only_attends = needs_nothing and new is None
        remember(key, plan)
    if not plan.wants_grad and (out is None or not out.requires_grad):
        return plan.run(tensors, new, out, returns_lse)
    with torch.no_grad():  # out may be a leaf that requires a gradient
        pair = plan.run(tensors, new, out, returns_lse)
    return without_backward(pair, (q, k, v, *optional), out) if plan.wants_grad else pair


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
    """Attend new queries to a cache, to which new keys and values are appended first, in place.

    A sequence has n keys: `cache_seqlens` and the new ones. Its last query stands at its last key: query i sees keys
    as in `flash_attn_func` with Sk = n. Nothing waits for the device. There is no backward pass: the result of inputs
    that require a gradient has a grad_fn that raises. Inside torch.autocast q, k and v are cast to the dtype of the
    cache, or to autocast's if the cache is float8.

    Args:
        q: (B, Sq, H, D); float16, bfloat16 or float32. Last stride 1, others free.
        k_cache, v_cache: (Bc, Sc, Hk, D) and (Bc, Sc, Hk, Dv), or with `block_table` pages (pages, page size, Hk, D)
            of any size; in q's dtype or float8_e4m3fn. v_cache may be the first features of k_cache, a view of the
            same memory (the latent cache of multi-head latent attention).
        k, v: (B, Snew, Hk, D) and (B, Snew, Hk, Dv) in q's dtype: they become keys cache_seqlens, cache_seqlens + 1, …
            of their sequence. Both or none; a latent cache takes k alone. Keys beyond the cache are dropped if lengths
            are on the device, where the host cannot check them.
        rotary_cos, rotary_sin: (rows, R / 2) in q's dtype or float32, R <= D; a row for each key of a full cache, and
            for each query more than new keys. They rotate the first R features of k by row cache_seqlens + i, and those
            of q by row cache_seqlens + i if the mask is causal or a window, else by row cache_seqlens. They need k.
        cache_seqlens: keys in the cache, counted from row 0 of the sequence: an int, (B,) int32, or None: it is full.
        cache_batch_idx: (B,) int32, the row of the contiguous cache that sequence b has; default b. If several
            sequences append to one row of the cache, or of a page, the keys of an arbitrary one remain.
        cache_leftpad: (B,) int32, rows at a sequence's beginning that hold no keys.
        block_table: (B, pages of a sequence) int32: key j lies in row j % page size of page
            block_table[b, j // page size]. Pages may have any order, and sequences may share them. Entries beyond the
            last page are not read, nor are those of pages that the window or cache_leftpad hides from every query. All
            others must name pages: a table on the CPU is checked for that. One on the device is not, and the effect of
            keys in no page is undefined (nothing outside the cache is read).
        softmax_scale: factor of the scores; default 1/sqrt(D).
        causal, window_size, softcap: as for `flash_attn_func`.
        rotary_interleaved: features (0, 1), (2, 3), … make pairs; else i and i + R / 2.
        alibi_slopes: (H,) or (B, H) float32.
        num_splits: chunks that the keys are divided into; 0: chosen for the device.
        return_softmax_lse: return the log-sum-exp, too.
        sinks: (H,) float32 logits that join the softmax denominator.
        k_descale, v_descale: factors of the values in a float8 cache: a number, a float32 tensor of one element or
            (B, Hk). Appended values are divided by them.
        out: tensor for the result, (B, Sq, H, Dv) in q's dtype with last stride 1; no memory of the caches, and none of
            q, or exactly q's. If a gradient is wanted and out is a view, a leaf that requires one, or q, the result is
            an alias of it, because the result has a grad_fn.

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
    left, right = window_size if window_size is UNBOUNDED else validation.check_window(window_size, "window_size")
    if type(num_splits) is not int:
        num_splits = validation.check_length("num_splits", num_splits)
    length, seqlens = 0, None
    if isinstance(cache_seqlens, torch.Tensor):
        seqlens = cache_seqlens
    elif cache_seqlens is not None:
        is_int = type(cache_seqlens) is int  # a negative one is refused later, as one that does not fit
        length = cache_seqlens if is_int else validation.check_length("cache_seqlens", cache_seqlens)
    if k_descale is not None or v_descale is not None:
        k_descale = _number_as_tensor("k_descale", k_descale, q)
        v_descale = _number_as_tensor("v_descale", v_descale, q)
    optional = (
        seqlens, None, None, block_table, cache_batch_idx, cache_leftpad, alibi_slopes, sinks, k_descale, v_descale, k,
        v, rotary_cos, rotary_sin, out,
    )  # fmt: skip
    call = _Call(
        q, k_cache, v_cache, optional, softmax_scale, "softmax_scale", rotary_interleaved, cache_seqlens is None,
        "bshd", left, 0 if causal else right, softcap, 0, 0, num_splits, registry.is_batch_invariant(),
        registry.forced_backend(), "auto",
    )  # fmt: skip
    pair = _attend(call, length, 0, return_softmax_lse)
    return (pair[0], pair[1]) if return_softmax_lse else pair[0]


# ---- Packed queries ---------------------------------------------------------------------------------------------


def _packed_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> _Call:
    """Return the call of `attend_packed`. Over pages, growing lengths make few different calls."""
    dropout_p = arguments["dropout_p"]
    if type(dropout_p) is not float or dropout_p:
        validation.check_scalars(None, 0.0, dropout_p)
        if dropout_p:
            raise ValueError("dropout_p belongs to training; block_table, seqused_k and out to inference")
    (left, right), longest = arguments["window"], arguments["max_seqlen_k"]
    return _Call(
        q, k, v, tuple(map(arguments.get, _PACKED_OPTIONAL)), arguments["sm_scale"], arguments["scale_name"], True,
        False, VARLEN, left, 0 if arguments["causal"] else right, arguments["softcap"], arguments["max_seqlen_q"],
        longest if arguments["block_table"] is None else bucket(longest), arguments["num_splits"],
        registry.is_batch_invariant(), arguments["backend"] or registry.forced_backend(), arguments["variant"],
    )  # fmt: skip


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any], returns_lse: bool = True
) -> tuple[Any, Any]:
    """Attend packed queries (Tq, H, D) to pages or packed keys -> out and, if `returns_lse`, lse.

    There is no backward pass, as in `flash_attn_with_kvcache`. `arguments` are the other arguments of
    `flash_attention_varlen`, with booleans and window checked, and `scale_name`, the caller's name of the scale.
    """
    pair = _attend(_packed_call(q, k, v, arguments), 0, arguments["max_seqlen_k"], returns_lse)
    return pair[0], pair[1]


def explain_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
) -> registry.Explanation:
    """Explain what `attend_packed` would run with the same arguments, without running it."""
    call = _packed_call(q, k, v, arguments)
    call = _autocast(call) or call
    _check(call)
    tensors, _ = _bind(call, 0)
    _check_values(call, tensors, arguments["max_seqlen_k"])
    out, backend = call.optional[-1], registry.resolve_backend(q.device, call.backend)
    check_out(out, tensors, call.layout)
    problem = describe_kvcache(backend, tensors, call.options, out)
    return registry.explain_choice("kvcache_fwd", problem, q.device, call.backend, call.variant)
