"""Attention over a cache of keys: append, split-KV forward, and the merge of partial results.

Split-KV (Flash-Decoding, Dao et al. 2023): few queries meet many keys, so the keys of a sequence are divided into
splits that can be computed in parallel. Each split runs FlashAttention-2's online softmax over its chunks of keys and
ends with a maximum m, a sum l of exp(s - m) and an unnormalised accumulator. To merge two such partial results, both
are rescaled to the larger maximum. A sink is a partial result with one score and no value. Only the end divides and
takes a logarithm.

Chunks always begin at multiples of `CHUNK` keys. In the mode `batch_invariant`, the result of a row depends on that row
alone: each chunk is a split, and each row is computed by itself, with operations whose shapes are always the same. A
matrix product cannot be used, because its order of summation depends on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from diyfa.backends.cpu.tiles import INF, row_products, without_autocast
from diyfa.problem import AttentionProblem, AttentionTensors, KVCacheProblem, KVCacheTensors, NewKeys, as_kvcache

CHUNK = 64  # keys
FLOAT8_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class _Partial(NamedTuple):
    """The partial result of some keys, [Hk, G, R, ...]. If m is -inf, merging it changes nothing."""

    m: torch.Tensor  # the largest score, [Hk, G, R, 1]
    l: torch.Tensor  # noqa: E741 - sum of exp(s - m)
    acc: torch.Tensor  # sum of exp(s - m) v, [Hk, G, R, Dv]


def _merged(a: _Partial, b: _Partial) -> _Partial:
    m = torch.maximum(a.m, b.m)
    finite_m = m.masked_fill(m == -INF, 0.0)  # no key yet: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    weight_a, weight_b = torch.exp(a.m - finite_m), torch.exp(b.m - finite_m)
    return _Partial(m, a.l * weight_a + b.l * weight_b, a.acc * weight_a + b.acc * weight_b)


def _nothing(rows: torch.Tensor, head_dim_v: int) -> _Partial:
    """Return the partial result of no keys, for queries [Hk, G, R, D]."""
    m = rows.new_full((*rows.shape[:-1], 1), -INF)
    return _Partial(m, torch.zeros_like(m), rows.new_zeros((*rows.shape[:-1], head_dim_v)))


class _Sequence(NamedTuple):
    """One sequence of a call: views of its queries and results, its gathered keys and values, its lengths."""

    q: torch.Tensor  # [Sq, H, D], a view
    out: torch.Tensor  # [Sq, H, Dv], a view
    lse: torch.Tensor  # [H, Sq], a view
    k: torch.Tensor  # [Hk, n rounded up to CHUNK, D], 0 in rows without a key
    v: torch.Tensor
    start: int  # first key: those before it are padding
    n: int
    slopes: torch.Tensor | None  # [Hk, G, 1, 1]


def cache_indices(problem: KVCacheProblem, tensors: KVCacheTensors, b: int, start: int, stop: int) -> tuple:
    """Return the indices of keys `start` to `stop` of sequence b in a cache: (page or batch entry, row), or (row,)."""
    j = torch.arange(start, max(start, stop), device=tensors.q.device)
    if problem.packed_keys:
        assert tensors.cu_seqlens_k is not None, "packed keys come with it"
        return (int(tensors.cu_seqlens_k[b]) + j,)
    if tensors.block_table is not None:
        return tensors.block_table[b].long()[j // problem.page_size], j % problem.page_size
    index = tensors.cache_batch_idx
    return torch.full_like(j, b if index is None else int(index[b])), j


def _n_keys(problem: KVCacheProblem, tensors: KVCacheTensors, b: int) -> int:
    if tensors.seqlens is not None:
        n = int(tensors.seqlens[b]) + tensors.added
    elif tensors.cu_seqlens_k is not None:
        n = int(tensors.cu_seqlens_k[b + 1] - tensors.cu_seqlens_k[b])
    else:
        n = tensors.length + tensors.added
    return max(0, min(n, problem.capacity))


def _gathered(problem: KVCacheProblem, tensors: KVCacheTensors, b: int, start: int, n: int) -> list[torch.Tensor]:
    """Return keys and values of sequence b in the dtype of all arithmetic, [Hk, n rounded up to CHUNK, …]. They are 0
    before `start` and from `n` on."""
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    rows = cache_indices(problem, tensors, b, start, n)
    keys_and_values = []
    for cache, descale in ((tensors.k_cache, tensors.k_descale), (tensors.v_cache, tensors.v_descale)):
        x = cache[rows].to(dtype)  # [n - start, Hk, …]
        if descale is not None:
            x = x * descale[b][:, None]
        padded = x.new_zeros((x.shape[1], -(-n // CHUNK) * CHUNK, x.shape[2]))
        padded[:, start:n] = x.transpose(0, 1)
        keys_and_values.append(padded)
    return keys_and_values


def _sequences(
    problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor
) -> Iterator[_Sequence]:
    ends = None if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.clamp(0, problem.total_q).tolist()
    for b in range(problem.batch):
        rows = slice(ends[b], max(ends[b], ends[b + 1])) if ends is not None else None
        q = tensors.q[b] if rows is None else tensors.q[rows]
        if not q.shape[0]:
            continue
        n = _n_keys(problem, tensors, b)
        start = 0 if tensors.leftpad is None else max(0, min(int(tensors.leftpad[b]), n))
        seen = start  # the first key that a query can see; pages before it may hold anything, or not exist
        if problem.window_left >= 0:
            seen = max(start, min(n, n - q.shape[0] - problem.window_left))
        k, v = _gathered(problem, tensors, b, seen, n)
        slopes = tensors.alibi_slopes
        if slopes is not None:
            slopes = (slopes[b] if slopes.dim() == 2 else slopes).to(k.dtype).reshape(problem.heads_kv, -1, 1, 1)
        yield _Sequence(
            q, out[b] if rows is None else out[rows], lse[b] if rows is None else lse[:, rows], k, v, start, n, slopes
        )


def _scores(problem: KVCacheProblem, sequence: _Sequence, rows: torch.Tensor, m0: int, n0: int) -> torch.Tensor:
    """Return the scores [Hk, G, R, CHUNK] of scaled queries from m0 on with the keys from n0 on, -inf where unseen."""
    k = sequence.k[:, None, n0 : n0 + CHUNK]  # [Hk, 1, CHUNK, D]
    if problem.batch_invariant:
        s = (rows * k.contiguous()).sum(-1).unsqueeze(-2)
    else:
        s = row_products(rows, k)
    if problem.softcap:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    i = torch.arange(m0, m0 + rows.shape[2], device=rows.device)[:, None]
    j = torch.arange(n0, n0 + CHUNK, device=rows.device)
    distance = j - (i + sequence.n - sequence.q.shape[0])
    if sequence.slopes is not None:
        s = s - sequence.slopes * distance.abs()
    seen = (j >= sequence.start) & (j < sequence.n)
    if problem.window_left >= 0:
        seen = seen & (distance >= -problem.window_left)
    if problem.window_right >= 0:
        seen = seen & (distance <= problem.window_right)
    return s.masked_fill(~seen, -INF)


def _attend_chunk(problem: KVCacheProblem, sequence: _Sequence, rows: torch.Tensor, m0: int, n0: int) -> _Partial:
    """Return the partial result of the chunk from key n0 on."""
    s = _scores(problem, sequence, rows, m0, n0)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m.masked_fill(m == -INF, 0.0))  # [Hk, G, R, CHUNK]
    v = sequence.v[:, None, n0 : n0 + CHUNK]  # [Hk, 1, CHUNK, Dv]
    if problem.batch_invariant:
        acc = (p.transpose(-1, -2) * v.contiguous()).sum(-2, keepdim=True)
    else:
        acc = p @ v
    return _Partial(m, p.sum(-1, keepdim=True), acc)


def _chunks_seen(problem: KVCacheProblem, sequence: _Sequence, m0: int, m1: int) -> range:
    """Return the first keys of the chunks in which queries m0 to m1 can see a key."""
    shift = sequence.n - sequence.q.shape[0]
    start, stop = sequence.start, sequence.n
    if problem.window_left >= 0:
        start = max(start, m0 + shift - problem.window_left)
    if problem.window_right >= 0:
        stop = min(stop, m1 + shift + problem.window_right)
    return range(start // CHUNK * CHUNK, max(stop, 0), CHUNK) if start < stop else range(0)


def _splits(problem: KVCacheProblem, sequence: _Sequence) -> list[range]:
    """Return for each split the first keys of its chunks."""
    chunks = range(0, sequence.n, CHUNK)
    count = len(chunks) if problem.batch_invariant else max(1, problem.num_splits)
    length = max(1, -(-len(chunks) // max(1, count)))
    return [chunks[at : at + length] for at in range(0, len(chunks), length)]


def _attend_rows(
    problem: KVCacheProblem, sequence: _Sequence, sinks: torch.Tensor | None, scale: float, m0: int, m1: int
) -> None:
    """Fill queries m0 to m1 of out and lse."""
    rows = sequence.q[m0:m1].to(sequence.k.dtype).transpose(0, 1) * scale  # [H, R, D]
    rows = rows.unflatten(0, (problem.heads_kv, -1))
    seen = _chunks_seen(problem, sequence, m0, m1)
    total = _nothing(rows, problem.head_dim_v)
    for split in _splits(problem, sequence):
        split_result = _nothing(rows, problem.head_dim_v)
        for n0 in split:
            if n0 in seen:
                split_result = _merged(split_result, _attend_chunk(problem, sequence, rows, m0, n0))
        total = _merged(total, split_result)
    if sinks is not None:
        sink = sinks.to(rows.dtype).reshape(problem.heads_kv, -1, 1, 1).expand_as(total.m)
        total = _merged(total, _Partial(sink, (sink != -INF).to(rows.dtype), torch.zeros_like(total.acc)))
    none = total.l == 0
    out = total.acc / total.l.masked_fill(none, 1.0)
    lse = (total.m + total.l.log()).masked_fill(none, INF)
    sequence.out[m0:m1] = out.flatten(0, 1).transpose(0, 1).to(sequence.out.dtype)
    sequence.lse[:, m0:m1] = lse.flatten(0, 1).squeeze(-1)


@without_autocast
def kvcache_fwd(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill out and lse, with all queries of a sequence at once, or one by one in the mode `batch_invariant`."""
    for sequence in _sequences(problem, tensors, out, lse):
        length = sequence.q.shape[0]
        step = 1 if problem.batch_invariant else length
        for m0 in range(0, length, step):
            _attend_rows(problem, sequence, tensors.sinks, tensors.sm_scale, m0, m0 + step)


def attention_fwd(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Run a forward pass without a cache as a call with one."""
    kvcache_fwd(*as_kvcache(problem, tensors), out.transpose(1, 2) if problem.layout == "bhsd" else out, lse)


def _rotated(x: torch.Tensor, new: NewKeys, position: torch.Tensor) -> torch.Tensor:
    """Return x [S, heads, D] with its first features rotated by the angles of `position` [S], in float32 or wider."""
    assert new.cos is not None and new.sin is not None, "or nothing is rotated"
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    inside = ((position >= 0) & (position < new.cos.shape[0]))[:, None, None]
    row = position.clamp(0, new.cos.shape[0] - 1)
    cos = torch.where(inside, new.cos[row].to(x.dtype).unsqueeze(1), 1.0)  # [S, 1, R / 2]
    sin = torch.where(inside, new.sin[row].to(x.dtype).unsqueeze(1), 0.0)
    half = new.cos.shape[1]
    rotated = x.clone()
    if new.interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        rotated[..., 0 : 2 * half : 2], rotated[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        rotated[..., :half], rotated[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return rotated


def _stored(x: torch.Tensor, descale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return x [S, Hk, …] as a cache of `dtype` stores it; `descale` [Hk] is for float8."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    x = x.float()
    if descale is not None:
        x = x / descale[:, None]
    return x.clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(dtype)


@without_autocast
def kvcache_append(problem: KVCacheProblem, tensors: KVCacheTensors, new: NewKeys) -> None:
    """Write the new keys, rotated, the new values, and the rotated queries."""
    rotates_per_query = problem.window_left >= 0 or problem.window_right >= 0
    for b in range(problem.batch):
        first = tensors.length if tensors.seqlens is None else int(tensors.seqlens[b])
        if new.rotated_q is not None:
            i = torch.arange(problem.seqlen_q, device=tensors.q.device)
            position = first + (i if rotates_per_query else torch.zeros_like(i))
            new.rotated_q[b] = _rotated(tensors.q[b], new, position).to(new.rotated_q.dtype)
        # Rows i0 to i1 of k fit the capacity; those whose page does not exist are not written.
        i0, i1 = max(0, -first), max(0, min(new.k.shape[1], problem.capacity - first))
        if i0 >= i1:
            continue
        rows = cache_indices(problem, tensors, b, first + i0, first + i1)
        is_in_cache = (rows[0] >= 0) & (rows[0] < tensors.k_cache.shape[0])
        rows = tuple(x[is_in_cache] for x in rows)
        k = new.k[b, i0:i1]
        if new.cos is not None:
            k = _rotated(k, new, torch.arange(first + i0, first + i1, device=k.device))
        for cache, x, descale in ((tensors.k_cache, k, tensors.k_descale), (tensors.v_cache, new.v, tensors.v_descale)):
            if x is not None:
                x = x if x is k else x[b, i0:i1]
                cache[rows] = _stored(x[is_in_cache], None if descale is None else descale[b], cache.dtype)
