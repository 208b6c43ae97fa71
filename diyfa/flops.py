"""FLOP formulas of the operators for `torch.utils.flop_counter`, counted as PyTorch counts its own attention.

The forward pass has two matrix products, the backward pass five, over all pairs of a query and a key of one sequence.
Only products count. Causal masks and windows do not reduce them; empty blocks of a block mask do not count. Packed and
padded sequences count with their real lengths, which waits for the device. If only shapes are known (fake tensors),
each sequence counts with the largest length.

`diyfa.import_hooks` imports this module once PyTorch's counter has been imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from diyfa.block_lists import block_of, visible_area
from diyfa.kvcache_ops import sequence_capacity, unpack_call
from diyfa.options import NAMES, AttentionOptions, Lengths, unpack
from diyfa.problem import LAYOUTS, VARLEN


def _is_known(x: Any) -> bool:
    """Return whether the host can know the values of a tensor."""
    return type(x) is torch.Tensor and not x.is_meta


def _values(x: torch.Tensor, otherwise: int) -> list[int]:
    """Return the values of a vector of lengths, or as many of `otherwise` if the host cannot know them."""
    return x.tolist() if _is_known(x) else [otherwise] * x.shape[0]


def _lengths_between(offsets: torch.Tensor, longest: int) -> list[int]:
    """Return the lengths of the sequences between these offsets, `longest` for each if the host cannot know them."""
    return offsets.diff().tolist() if _is_known(offsets) else [longest] * (offsets.shape[0] - 1)


def _pairs(q_shape: Sequence[int], k_shape: Sequence[int], lengths: Lengths, layout: str) -> int:
    """Count the pairs of a query and a key of one sequence, for one head."""
    if layout == VARLEN:
        assert lengths.cu_seqlens_q is not None, "a varlen call comes with cu_seqlens"
        queries = _lengths_between(lengths.cu_seqlens_q, lengths.max_seqlen_q)
        offsets_k = lengths.cu_seqlens_k
        keys = queries if offsets_k is None else _lengths_between(offsets_k, lengths.max_seqlen_k)
        return sum(q * k for q, k in zip(queries, keys, strict=True))
    batch, _, seqlen, _ = LAYOUTS[layout]
    if lengths.seq_lens is None:
        return q_shape[batch] * q_shape[seqlen] * k_shape[seqlen]
    return sum(min(n, q_shape[seqlen]) * n for n in _values(lengths.seq_lens, k_shape[seqlen]))


def _all_pairs(q_shape: Sequence[int], k_shape: Sequence[int], lengths: Lengths, options: AttentionOptions) -> int:
    """Count the pairs of all heads, those in empty blocks of a block mask left out if the host can know them."""
    layout, blocks = options.layout, options.mask_blocks
    heads = q_shape[-2] if layout == VARLEN else q_shape[LAYOUTS[layout][1]]
    if blocks is None or not _is_known(blocks) or lengths.seq_lens is not None:
        return heads * _pairs(q_shape, k_shape, lengths, layout)
    batch, _, seqlen, _ = LAYOUTS[layout]
    area = visible_area(blocks, block_of(options.mask_bits), q_shape[seqlen], k_shape[seqlen])
    return int(area.expand(q_shape[batch], heads).sum())


@register_flop_formula(torch.ops.diyfa.attention_fwd, get_raw=True)
def attention_fwd_flop(q: Any, k: Any, v: Any, packing: str, *features: Any, out_val: Any = None) -> int:
    """Count q kᵀ and p v."""
    lengths, options = unpack(features, packing)
    first = q if packing == "qkv" else k  # the packed tensor; the next line drops its dimension of 3 or 2
    k_shape = (*first.shape[:-3], *first.shape[-2:]) if packing else k.shape
    q_shape = k_shape if packing == "qkv" else q.shape
    dims = q_shape[-1] + (k_shape if packing else v.shape)[-1]
    return 2 * _all_pairs(q_shape, k_shape, lengths, options) * dims


@register_flop_formula([torch.ops.diyfa.attention_bwd, torch.ops.diyfa.attention_bwd_out], get_raw=True)
def attention_bwd_flop(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None) -> int:
    """Count q kᵀ, dout vᵀ, and the products for dq, dk and dv. q, k and v are views if the caller packed them."""
    lengths, options = unpack(rest[-len(NAMES) :])
    dims = 3 * q.shape[-1] + 2 * v.shape[-1]
    return 2 * _all_pairs(q.shape, k.shape, lengths, options) * dims


@register_flop_formula(torch.ops.diyfa.kvcache_fwd, get_raw=True)
def kvcache_fwd_flop(*call: Any, out_val: Any = None) -> int:
    """Count q kᵀ and p v over the keys that each sequence has."""
    tensors, options = unpack_call(call)
    q, dims = tensors.q, tensors.q.shape[-1] + tensors.v_cache.shape[-1]
    capacity = sequence_capacity(tensors, options.max_seqlen_k)
    offsets = tensors.cu_seqlens_q
    queries = [q.shape[1]] * q.shape[0] if offsets is None else _lengths_between(offsets, options.max_seqlen_q)
    if tensors.seqlens is not None:
        keys = [n + tensors.added for n in _values(tensors.seqlens, capacity - tensors.added)]
    elif tensors.cu_seqlens_k is not None:
        keys = _lengths_between(tensors.cu_seqlens_k, capacity)
    else:
        keys = [tensors.length + tensors.added] * len(queries)
    skipped = [0] * len(queries) if tensors.leftpad is None else _values(tensors.leftpad, 0)
    pairs = sum(m * max(0, min(n, capacity) - left) for m, n, left in zip(queries, keys, skipped, strict=True))
    return 2 * q.shape[-2] * pairs * dims


@register_flop_formula(torch.ops.diyfa.kvcache_fwd_out, get_raw=True)
def kvcache_fwd_out_flop(out: Any, *call: Any, out_val: Any = None) -> int:
    return kvcache_fwd_flop(*call)


@register_flop_formula([torch.ops.diyfa.kvcache_append, torch.ops.diyfa.kvcache_bwd], get_raw=True)
def no_flop(*call: Any, out_val: Any = None) -> int:
    """Return 0: the first operator writes and rotates, without products. The second raises an error."""
    return 0


@register_flop_formula([torch.ops.diyfa.matmul, torch.ops.diyfa.matmul_out], get_raw=True)
def matmul_flop(a: Any, b: Any, *rest: Any, out_val: Any = None) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]
