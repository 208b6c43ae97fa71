"""`reference_attention`: the oracle. Plain PyTorch on any device, every feature, differentiable, O(Sq · Sk) memory.

It defines the contract that the kernels are tested against, so it favours clarity. It forms, masks, normalises and
multiplies the whole score matrix, as in Vaswani et al. 2017, section 3.2.1. Memory beyond a sequence's end may hold
NaN, and 0 · NaN is NaN, so those rows are replaced by 0 before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch

from diyfa.block_lists import visible_pairs
from diyfa.dropout import keys_from_state, mask_from_keys
from diyfa.eight_bits import BLOCK_K, BLOCK_Q, EIGHT_BIT_DTYPES, Quantized, dequantised, unwrapped
from diyfa.features import for_sample
from diyfa.keywords import refuse_unknown, without_unknown
from diyfa.masks import BlockMask
from diyfa.options import LENGTHS, NO_LENGTHS, UNBOUNDED, AttentionOptions, Lengths
from diyfa.problem import LAYOUTS, VARLEN, KVCacheTensors, NewKeys, as_bhsd
from diyfa.score_functions import score_function
from diyfa.score_programs import apply_score_function, captured_tensors

_INF = float("inf")
Input = torch.Tensor | Quantized

# (q, k, v, lengths, options, keep) -> out, lse, as `_attend`.
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def visible_keys(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int] = (-1, -1),
    seq_lens: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mask of the keys that each query sees.

    Sample b has sk = seq_lens[b] keys (default Sk) and sq = min(sk, Sq) queries. Its query i has position i + sk - sq
    among the keys and sees keys from `left` before to `right` after that position (-1: no bound).

    Returns:
        visible (B, 1, Sq, Sk) bool, valid_q (B, 1, Sq, 1) bool, distance (B, 1, Sq, Sk) int64: j minus the position.
    """
    if seq_lens is None:
        len_k = torch.full((batch,), seqlen_k, device=device)
        len_q = torch.full((batch,), seqlen_q, device=device)
    else:
        len_k = seq_lens.to(device=device, dtype=torch.int64)
        len_q = len_k.clamp(max=seqlen_q)
    return visible_keys_of_lengths(len_q, len_k, seqlen_q, seqlen_k, window)


def visible_keys_of_lengths(
    len_q: torch.Tensor, len_k: torch.Tensor, seqlen_q: int, seqlen_k: int, window: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of `visible_keys` for samples with len_q (B,) queries and len_k (B,) keys."""
    len_q, len_k = len_q[:, None, None, None], len_k[:, None, None, None]
    i = torch.arange(seqlen_q, device=len_q.device)[:, None]
    j = torch.arange(seqlen_k, device=len_q.device)
    distance = j - (i + len_k - len_q)
    valid_q = i < len_q
    visible = valid_q & (j < len_k)
    left, right = window
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible, valid_q, distance


def within_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return q, k, v (B, H, S, D) with zeros beyond the sequences' ends, and `visible_keys` with the block mask."""
    sizes, seq_lens = (q.shape[2], k.shape[2]), lengths.seq_lens
    window = options.window_left, options.window_right
    visible, valid_q, distance = visible_keys(q.shape[0], *sizes, window, seq_lens, q.device)
    if options.mask_blocks is not None and options.mask_bits is not None:
        rows, columns = (slice(0, size) for size in sizes)
        visible = visible & visible_pairs(options.mask_blocks, options.mask_bits, sizes, rows, columns)
    if seq_lens is not None:
        valid_k = torch.arange(sizes[1], device=q.device)[:, None] < seq_lens.to(q.device)[:, None, None, None]
        q, k, v = torch.where(valid_q, q, 0), torch.where(valid_k, k, 0), torch.where(valid_k, v, 0)
    return (q, k, v), (visible, valid_q, distance)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, summed in float32 or wider and rounded once. PyTorch may sum float16 products in float16."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def masked_scores(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, distance: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Return the scores of q (B, H, Sq, D) and k (B, H, Sk, D), -inf where a query does not see a key.

    They have the dtype of the softmax statistics, float32 or wider. `visible`, `distance`: those of `visible_keys`."""
    dtype, (batch, heads) = q.dtype, q.shape[:2]
    stat_dtype = torch.promote_types(dtype, torch.float32)
    scores = _product(q * options.sm_scale, k.transpose(-1, -2))
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(stat_dtype).expand(batch, heads)[:, :, None, None]
        scores = (scores - slopes * distance.abs()).to(dtype)
    if options.attn_bias is not None:
        scores = scores + options.attn_bias.to(dtype)
    scores = scores.to(stat_dtype)
    if options.score_fn:
        positions = score_positions(distance, heads)
        return apply_score_function(options.score_fn, scores, positions, visible, captured_among(options))
    return scores.masked_fill(~visible, -_INF)


def captured_among(options: Any) -> list[torch.Tensor]:
    """Return the captured tensors of a score function among options or tensors of a call."""
    return [getattr(options, f"score_tensor{n}") for n in range(captured_tensors(options.score_fn))]


def score_positions(distance: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Return the index tensors b, h, i and j of scores (B, H, Sq, Sk). `distance`: that of `visible_keys`."""
    batch, _, _, seqlen_k = distance.shape
    device = distance.device
    b = torch.arange(batch, device=device)[:, None, None, None]
    h, j = torch.arange(heads, device=device)[:, None, None], torch.arange(seqlen_k, device=device)
    return b, h, j - distance, j


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    options: AttentionOptions,
    keep: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv). `keep`: dropout's mask."""
    dtype, sinks = q.dtype, options.sinks
    stat_dtype = torch.promote_types(dtype, torch.float32)  # dtype of the softmax statistics
    if options.v_mean is not None:
        v = v + options.v_mean.to(dtype)[:, :, None]
    (q, k, v), (visible, valid_q, distance) = within_sequences(q, k, v, lengths, options)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = masked_scores(q, k, visible, distance, options)

    # torch.softmax would give NaN for rows without a key, which must give 0, and the sink joins the denominator only.
    sink = None if sinks is None else sinks.to(stat_dtype)[:, None, None]
    row_max = scores.new_full((*scores.shape[:-1], 1), -_INF)
    if k.shape[2]:
        row_max = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        row_max = torch.maximum(row_max, sink.detach())
    row_max = row_max.masked_fill(row_max == -_INF, 0.0)
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - row_max)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    weights = weights / total
    lse = (row_max + total.log()).masked_fill(empty | ~valid_q, _INF).squeeze(-1)
    if keep is not None:
        weights = torch.where(keep, weights / (1 - options.dropout_p), 0)
    out = _product(weights.to(dtype), v)
    out = torch.where((scores != -_INF).any(-1, keepdim=True), out, 0)  # a row that sees no key: 0, even if v has NaN
    out = torch.where(total.isnan(), float("nan"), out)  # even if dropout drops all keys of the row
    return torch.where(valid_q, out, 0), lse


def _dequantised(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions]:
    """Return the numbers that q, k and v (B, H, S, D) stand for, and the options with only `v_mean` of what says so."""
    o, dtype = options, q.dtype
    if o.q_descale is o.k_descale is o.v_descale is o.k_mean is None:
        return q, k, v, o
    q = dequantised(q, o.q_descale, dtype, BLOCK_Q)
    k = dequantised(k, o.k_descale, dtype, BLOCK_K, o.k_mean)
    v = dequantised(v, o.v_descale, dtype)
    return q, k, v, o._replace(q_descale=None, k_descale=None, v_descale=None, k_mean=None)


def _with_gradient(x: torch.Tensor, given: torch.Tensor | Quantized, layout: str) -> torch.Tensor:
    """Return x (B, H, S, D), the numbers of q, k or v. If `given` has a source, it gets their gradient."""
    if not isinstance(given, Quantized) or given.source is None:
        return x
    source = given.source.to(x.dtype)
    source = source.view(x.shape) if layout == "bhsd" else as_bhsd(source, layout)
    return x.detach() + (source - source.detach())


def _attend_sequences(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute packed sequences one by one. Return out and lse."""
    assert lengths.cu_seqlens_q is not None and lengths.cu_seqlens_k is not None, "packed sequences come with both"
    ends = list(zip(pairwise(lengths.cu_seqlens_q.tolist()), pairwise(lengths.cu_seqlens_k.tolist()), strict=True))
    heads, stat_dtype = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.full((heads, q.shape[0]), _INF, dtype=stat_dtype, device=q.device)
    keys = None
    if options.rng_state is not None:
        keys = keys_from_state(options.rng_state.to(q.device), len(ends), heads)
    for b, ((q0, q1), (k0, k1)) in enumerate(ends):
        q_b, k_b, v_b = (x[None].transpose(1, 2) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        sequence = for_sample(options, b)
        q_b, k_b, v_b, sequence = _dequantised(q_b, k_b, v_b, sequence)
        keep = None
        if keys is not None:
            r0, r1, c0, c1 = (key[b : b + 1] for key in keys)
            keep = mask_from_keys((r0, r1, c0, c1), q1 - q0, k1 - k0, options.dropout_p)
        sequence_out, sequence_lse = attend(q_b, k_b, v_b, NO_LENGTHS, sequence, keep)
        out[q0:q1], lse[:, q0:q1] = sequence_out[0].transpose(0, 1), sequence_lse[0]
    return out, lse


@without_unknown
def reference_attention(
    q: Input,
    k: Input,
    v: Input,
    causal: bool = False,
    sm_scale: float | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    mask: BlockMask | None = None,
    score_fn: Any = None,
    score_tensors: Sequence[torch.Tensor] = (),
    score_grad_fn: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    dtype: torch.dtype | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(q kᵀ · sm_scale) v by forming the whole score matrix.

    Args:
        q, k, v: as for `diyfa.flash_attention` ("bhsd", also 3-D; here also 2-D and with more leading dimensions),
            `diyfa.flash_attention_v2` ("bshd") or `diyfa.flash_attention_varlen` ("thd").
        causal, sm_scale, seq_lens, window, softcap, alibi_slopes, attn_bias, mask, sinks, dropout_p: as for these
            functions; here a mask may come with causal and window.
        score_fn, score_tensors, score_grad_fn: likewise. PyTorch's operators run the function, and autograd derives it.
        rng_state: int64, the seed and offset of the dropout mask, with or without origins; required when dropout_p > 0.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, for the layout "thd" only: the offsets of its sequences.
        layout: "bhsd", "bshd" or "thd".
        return_lse: also return the log-sum-exp of the scores.
        dtype: compute and return in this dtype (torch.float64 for an oracle); default: q's. float8 and int8 compute in
            float32 and return `out_dtype`.
        q_descale, k_descale, v_descale, k_mean, v_mean, out_dtype: as for `diyfa.flash_attention`.

    Returns:
        The output in q's layout; with `return_lse` also the natural log-sum-exp (B, H, Sq), for "thd" (H, Tq), float32
        (float64 when computed in float64). A row that sees no key has output 0, and as its lse the sink or, without
        one, +inf. A row that belongs to no sequence has output 0 and lse +inf.

    Raises:
        ValueError: unknown layout, ranks that do not fit it, a layout without an argument it needs or with one it does
            not take, dropout without rng_state. For shapes that do not fit, PyTorch raises its own errors.
    """
    if unknown:
        refuse_unknown(reference_attention, unknown)
    out, lse = attention_by(
        _attend, q, k, v, causal=causal, sm_scale=sm_scale, seq_lens=seq_lens, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, attn_bias=attn_bias, sinks=sinks, dropout_p=dropout_p, rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, layout=layout, dtype=dtype, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, k_mean=k_mean, v_mean=v_mean, out_dtype=out_dtype, mask=mask,
        score_fn=score_fn, score_tensors=score_tensors, score_grad_fn=score_grad_fn,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_by(
    attend: Attend,
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    window: tuple[int, int] = UNBOUNDED,
    sm_scale: float | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attend` on (B, H, S, D) views of q, k, v of any layout, or on each packed sequence. Return out and lse.

    Arguments and errors are those of `reference_attention`; `fields` holds the arguments that are not listed here.
    """
    if layout not in (*LAYOUTS, VARLEN):
        raise ValueError(f"layout must be one of {', '.join((*LAYOUTS, VARLEN))}, got {layout!r}")
    owners = {"q": q, "k": k, "v": v}
    given, named = owners.copy(), fields.copy()
    fields |= unwrapped(owners, fields)
    q, k, v = owners.values()
    if q.dtype in EIGHT_BIT_DTYPES and dtype is None:
        if out_dtype is None:
            out_dtype = v.dtype if v.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        out, lse = attention_by(
            attend, **given, layout=layout, causal=causal, window=window, sm_scale=sm_scale, dtype=torch.float32,
            **named,
        )  # fmt: skip
        return out.to(out_dtype), lse
    lengths = Lengths(**{name: fields.pop(name) for name in LENGTHS if name in fields})
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    left, right = window
    mask: BlockMask | None = fields.pop("mask", None)
    if mask is not None:
        fields["mask_blocks"], fields["mask_bits"] = mask.blocks, mask.bits
    score_fn, tensors = fields.pop("score_fn", None), fields.pop("score_tensors", ())
    score_grad_fn = fields.pop("score_grad_fn", None)
    if score_fn is not None:
        fields["score_fn"] = score_function(score_fn, score_grad_fn).source
        fields |= {f"score_tensor{n}": x for n, x in enumerate(tensors)}
    options = AttentionOptions(layout, scale, left, 0 if causal else right, **fields)
    dtype, seq_lens = dtype or q.dtype, lengths.seq_lens
    if options.dropout_p and options.rng_state is None:
        raise ValueError("dropout_p > 0 needs rng_state, a (2,) int64 tensor of seed and offset")
    if not options.dropout_p:
        options = options._replace(rng_state=None)
    elif not isinstance(options.rng_state, torch.Tensor):
        raise TypeError(f"rng_state must be a torch.Tensor, got {type(options.rng_state).__name__}")
    keep, packed = None, lengths.cu_seqlens_q is not None and lengths.cu_seqlens_k is not None
    if layout == VARLEN:
        if not packed:
            raise ValueError("layout 'thd' needs cu_seqlens_q and cu_seqlens_k")
        if seq_lens is not None or options.attn_bias is not None or mask is not None:
            raise ValueError("layout 'thd' takes no seq_lens, no attn_bias and no mask")
        return _attend_sequences(attend, q.to(dtype), k.to(dtype), v.to(dtype), lengths, options)
    if lengths.cu_seqlens_q is not None or lengths.cu_seqlens_k is not None:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k belong to the layout 'thd', got {layout!r}")
    leading = q.shape[:-2]
    if not (q.dim() == k.dim() == v.dim() >= 2) or (layout != "bhsd" and q.dim() != 4):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"expected q, k, v of one rank, 4 for 'bshd' and at least 2 for 'bhsd', got {shapes}")
    if q.dim() == 2:
        q, k, v = (x[None, None] for x in (q, k, v))
    elif q.dim() == 3:
        batch = 1 if seq_lens is None else max(1, seq_lens.numel())
        q, k, v = (x.unflatten(0, (batch, x.shape[0] // batch)) for x in (q, k, v))
    elif q.dim() > 4:
        q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    q, k, v = (as_bhsd(x, layout).to(dtype) for x in (q, k, v))
    if options.rng_state is not None:
        keys = keys_from_state(options.rng_state.to(q.device), q.shape[0], q.shape[1])
        keep = mask_from_keys(keys, q.shape[2], k.shape[2], options.dropout_p)
    q, k, v, options = _dequantised(q, k, v, options)
    q, k, v = (_with_gradient(x, y, layout) for x, y in zip((q, k, v), given.values(), strict=True))
    out, lse = attend(q, k, v, lengths, options, keep)
    out = as_bhsd(out, layout)  # the exchange of heads and sequence is its own inverse
    if len(leading) != 2:
        out, lse = out.reshape(*leading, *out.shape[-2:]), lse.reshape(*leading, lse.shape[-1])
    return out, lse


# ---- Attention over a cache -------------------------------------------------------------------------------------


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Return x (S, heads, D) with its first features rotated in pairs by the angles in rows `position` of cos and sin.

    Products are float32 or wider and not rounded. A position without a row in the tables is not rotated."""
    wide = torch.promote_types(x.dtype, torch.float32)
    inside = ((position >= 0) & (position < len(cos)))[:, None]
    row = position.clamp(0, len(cos) - 1)
    c = torch.where(inside, cos[row].to(wide), 1.0)[:, None]
    s = torch.where(inside, sin[row].to(wide), 0.0)[:, None]
    rotated, half = x.to(wide, copy=True), cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = rotated[..., first].clone(), rotated[..., second].clone()
    rotated[..., first], rotated[..., second] = a * c - b * s, b * c + a * s
    return rotated


def _cache_position(tensors: KVCacheTensors, b: int, j: int) -> tuple[int, int]:
    """Return where key j of sequence b lies in the cache: (batch entry or page, row)."""
    table, index = tensors.block_table, tensors.cache_batch_idx
    if table is not None:
        page_size = tensors.k_cache.shape[1]
        return int(table[b, j // page_size]), j % page_size
    return b if index is None else int(index[b]), j


def _capacity(tensors: KVCacheTensors) -> int:
    table = tensors.block_table
    return tensors.k_cache.shape[1] * (1 if table is None else table.shape[1])


def _quantised(x: torch.Tensor, descale: torch.Tensor | None, b: int, dtype: torch.dtype) -> torch.Tensor:
    """Return x (Hk, …) in the `dtype` of a cache. For float8 it is divided by `descale` and clamped."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    x = x.float() if descale is None else x.float() / descale[b][:, None]
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def reference_append(tensors: KVCacheTensors, new: NewKeys, rotates_per_query: bool = False) -> KVCacheTensors:
    """Return `tensors` with q rotated, and with copies of the caches to which the new keys and values are appended.

    With `rotates_per_query`, row `seqlens[b] + i` rotates query i, as with a causal mask or a window. Else row
    `seqlens[b]` rotates all. Without new.v only k is written, and v_cache becomes the new k_cache's first features.
    """
    q, k_cache, v_cache = tensors.q.clone(), tensors.k_cache.clone(), tensors.v_cache.clone()
    for b in range(q.shape[0]):
        first = tensors.length if tensors.seqlens is None else int(tensors.seqlens[b])
        k = new.k[b]
        if new.cos is not None and new.sin is not None:
            query_positions = first + torch.arange(q.shape[1], device=q.device) * rotates_per_query
            q[b] = _rotated(q[b], new.cos, new.sin, query_positions, new.interleaved).to(q.dtype)
            key_positions = first + torch.arange(k.shape[0], device=q.device)
            k = _rotated(k, new.cos, new.sin, key_positions, new.interleaved)
        for i in range(k.shape[0]):
            if not 0 <= first + i < _capacity(tensors):
                continue
            entry, row = _cache_position(tensors, b, first + i)
            if 0 <= entry < k_cache.shape[0]:
                k_cache[entry, row] = _quantised(k[i], tensors.k_descale, b, k_cache.dtype)
                if new.v is not None:
                    v_cache[entry, row] = _quantised(new.v[b, i], tensors.v_descale, b, v_cache.dtype)
    if new.v is None:
        v_cache = k_cache[..., : v_cache.shape[-1]]
    return tensors._replace(q=q, k_cache=k_cache, v_cache=v_cache)


def _sequence_keys_and_values(
    tensors: KVCacheTensors, b: int, start: int, stop: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Gather keys `start` to `stop` of sequence b and their values, (1, keys, Hk, …), times their descales."""
    positions = [_cache_position(tensors, b, j) for j in range(start, stop)]
    gathered = []
    for cache, descale in ((tensors.k_cache, tensors.k_descale), (tensors.v_cache, tensors.v_descale)):
        rows = [cache[position] for position in positions]
        x = (torch.stack(rows) if rows else cache.new_empty(0, *cache.shape[2:])).to(dtype)
        gathered.append((x if descale is None else x * descale[b][:, None])[None])
    return gathered


def _expanded_descale(x: torch.Tensor | float | None, batch: int, k_cache: torch.Tensor) -> torch.Tensor | None:
    """Return a descale as float32 (batch, Hk)."""
    if x is None:
        return None
    return torch.as_tensor(x, dtype=torch.float32, device=k_cache.device).expand(batch, k_cache.shape[2])


@without_unknown
def reference_kvcache(
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
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    attend: Callable[..., Any] | None = None,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `diyfa.flash_attn_with_kvcache`: gather the keys of each sequence and call `reference_attention`.

    The caches do not change: new keys are appended to copies. Arguments are those of the function, and

        cu_seqlens_q: (B + 1,) int32: q is packed, (Tq, H, D), and nothing is appended.
        dtype: compute and return in this dtype (torch.float64 for an oracle); default: q's.
        attend: function that computes one sequence, called with the arguments of `reference_attention`; default: that.

    Returns:
        out (B, Sq, H, Dv) or (Tq, H, Dv); with `return_softmax_lse` also lse (B, H, Sq) or (H, Tq).
    """
    if unknown:
        refuse_unknown(reference_kvcache, unknown)
    compute: Callable[..., Any] = attend or reference_attention
    dtype = dtype or q.dtype
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    seqlens = cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None
    tensors = KVCacheTensors(
        q, k_cache, v_cache, 1.0, seqlens=seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table,
        k_descale=_expanded_descale(k_descale, batch, k_cache), v_descale=_expanded_descale(v_descale, batch, k_cache),
    )  # fmt: skip
    capacity = _capacity(tensors)
    if seqlens is None:
        tensors = tensors._replace(length=capacity if cache_seqlens is None else int(cache_seqlens))
    if k is not None:
        left, right = window_size
        is_local = causal or 0 <= left < capacity or 0 <= right < max(capacity, q.shape[1])
        tensors = reference_append(tensors, NewKeys(k, v, rotary_cos, rotary_sin, rotary_interleaved), is_local)
    lengths = [tensors.length] * batch if seqlens is None else seqlens.tolist()
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    ends = [b * q.shape[1] for b in range(batch + 1)] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    rows = tensors.q.flatten(0, 1) if cu_seqlens_q is None else tensors.q
    out = torch.zeros((len(rows), q.shape[-2], v_cache.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((q.shape[-2], len(rows)), _INF, dtype=torch.promote_types(dtype, torch.float32), device=q.device)
    for b, (q0, q1) in enumerate(pairwise(ends)):
        if q0 == q1:
            continue
        stop = min(lengths[b] + (0 if k is None else k.shape[1]), capacity)
        keys_and_values = _sequence_keys_and_values(tensors, b, pads[b], stop, dtype)
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        result, result_lse = compute(
            rows[q0:q1][None].to(dtype), *keys_and_values, causal=causal, window=window_size, sm_scale=softmax_scale,
            softcap=softcap, alibi_slopes=slopes, sinks=sinks, layout="bshd", return_lse=True,
        )  # fmt: skip
        out[q0:q1], lse[:, q0:q1] = result[0], result_lse[0]
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": torch.nn.functional.relu,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def reference_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor | None = None,
    b_descale: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return activation((a @ b) * a_descale * b_descale + bias): the oracle of `triton_matmul`.

    It is computed in float32, or in float64 if a is.

    Args:
        a: (M, K) of any dtype.
        b: (K, N) of a's dtype.
        a_descale: one number, or one for each row of a; default: 1.
        b_descale: one number, or one for each column of b; default: 1.
        bias: (N,) of any dtype.
        activation: None, "relu", "gelu" (by the error function) or "silu".
        out_dtype: dtype of the result; default: that of the computation.

    Returns:
        (M, N).
    """
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    product = a.to(dtype) @ b.to(dtype)
    if a_descale is not None:
        product = product * a_descale.to(dtype).reshape(-1, 1)
    if b_descale is not None:
        product = product * b_descale.to(dtype).reshape(1, -1)
    if bias is not None:
        product = product + bias.to(dtype)
    return _ACTIVATIONS[activation](product).to(out_dtype or dtype)
