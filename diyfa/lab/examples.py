"""Tensors of a described call without memory, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from diyfa.features import FEATURES, GRADIENTS
from diyfa.problem import (
    AttentionGradients,
    AttentionProblem,
    AttentionTensors,
    KVCacheProblem,
    KVCacheTensors,
    MatmulProblem,
    MatmulTensors,
    empty_output,
)


def example_tensors(problem: AttentionProblem, device: str = "meta") -> dict[str, torch.Tensor]:
    """Return the optional tensors of a call of `problem` by name, uninitialised, for compilation ahead of time."""
    sizes = {
        "B": problem.batch, "H": problem.heads_q, "Hk": problem.heads_kv, "Sq": problem.seqlen_q,
        "Sk": problem.seqlen_k, "D": problem.head_dim, "Dv": problem.head_dim_v,
    }  # fmt: skip
    tensors = {}
    for feature in FEATURES:
        if feature.shape is not None and feature.is_in(problem):
            value = getattr(problem, feature.problem_field, None)
            dtype = getattr(torch, value) if isinstance(value, str) else feature.dtypes[0]
            tensors[feature.name] = torch.empty(feature.shape.example(sizes, value), dtype=dtype, device=device)
    return tensors


def example_attention(problem: AttentionProblem) -> tuple[AttentionTensors, torch.Tensor, torch.Tensor]:
    """Return (inputs, out, lse) of a call of `problem`, without memory."""
    batch, odd = problem.batch, not problem.aligned

    def empty(heads: int, rows: int, total: int, columns: int, dtype: str = problem.dtype) -> torch.Tensor:
        *outer, inner = (total or batch * rows, heads) if problem.varlen else (batch, heads, rows)
        x = torch.empty(*outer, inner + odd, columns + odd, dtype=getattr(torch, dtype), device="meta")
        return x[..., int(odd) :, int(odd) :]  # unaligned: odd strides and address

    q = empty(problem.heads_q, problem.seqlen_q, problem.total_q, problem.head_dim)
    k = empty(problem.heads_kv, problem.seqlen_k, problem.total_k, problem.head_dim)
    value_dtype = problem.value_dtype or problem.dtype
    v = empty(problem.heads_kv, problem.seqlen_k, problem.total_k, problem.head_dim_v, value_dtype)
    dropout_p = 0.1 if problem.dropout else 0.0
    tensors = AttentionTensors(q, k, v, problem.head_dim**-0.5, dropout_p=dropout_p, **example_tensors(problem))
    out = empty_output(q, problem.head_dim_v, problem.out_dtype)
    return tensors, out, torch.empty(problem.lse_shape, dtype=torch.float32, device="meta")


def example_kvcache(problem: KVCacheProblem) -> tuple[KVCacheTensors, torch.Tensor, torch.Tensor]:
    """Return (inputs, out, lse) of a call of `problem`, without memory."""

    def empty(*shape: int, dtype: str = "int32") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    batch, heads_kv, capacity, page_size = problem.batch, problem.heads_kv, problem.capacity, problem.page_size
    pages = -(-capacity // page_size) if problem.paged else 0
    rows = (problem.total_q,) if problem.varlen else (batch, problem.seqlen_q)
    cache: tuple[int, ...] = (batch * pages, page_size) if problem.paged else (batch, capacity)
    if problem.packed_keys:
        cache = (batch * capacity,)
    q = empty(*rows, problem.heads_q, problem.head_dim, dtype=problem.dtype)
    k = empty(*cache, heads_kv, problem.head_dim, dtype=problem.cache_dtype)
    v = empty(*cache, heads_kv, problem.head_dim_v, dtype=problem.cache_dtype)
    v = k[..., : problem.head_dim_v] if problem.latent else v
    descale = empty(batch, heads_kv, dtype="float32") if problem.descales else None
    tensors = KVCacheTensors(
        q, k, v, problem.head_dim**-0.5, length=capacity,
        seqlens=empty(batch) if problem.lengths and not problem.packed_keys else None,
        cu_seqlens_q=empty(batch + 1) if problem.varlen else None,
        cu_seqlens_k=empty(batch + 1) if problem.packed_keys else None,
        block_table=empty(batch, pages) if problem.paged else None,
        cache_batch_idx=empty(batch) if problem.cache_batch_idx else None,
        leftpad=empty(batch) if problem.leftpad else None,
        alibi_slopes=empty(problem.heads_q, dtype="float32") if problem.alibi else None,
        sinks=empty(problem.heads_q, dtype="float32") if problem.sinks else None,
        k_descale=descale, v_descale=descale,
    )  # fmt: skip
    return tensors, empty_output(q, problem.head_dim_v), empty(*problem.lse_shape, dtype="float32")


def example_gradients(tensors: AttentionTensors, out_dtype: str = "") -> AttentionGradients:
    """Return buffers for all gradients of a call with these tensors."""
    dtype = getattr(torch, out_dtype) if out_dtype else tensors.q.dtype
    tensors_by_name = {feature.gradient: getattr(tensors, feature.name) for feature in GRADIENTS}
    buffers: dict[str, Any] = {name: None if x is None else torch.empty_like(x) for name, x in tensors_by_name.items()}
    return AttentionGradients(*(torch.empty_like(x, dtype=dtype) for x in tensors[:3]), **buffers)


def example_matmul(
    problem: MatmulProblem, a_transposed: bool = False, b_transposed: bool = False
) -> tuple[MatmulTensors, torch.Tensor]:
    """Return (inputs, result) of a product of `problem`, without memory; float8 has descales of rows and columns."""

    def empty(*shape: int, dtype: str = "float32") -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    a = empty(k, m, dtype=dtype).t() if a_transposed else empty(m, k, dtype=dtype)
    b = empty(n, k, dtype=dtype).t() if b_transposed else empty(k, n, dtype=dtype)
    bias = empty(n, dtype=problem.out_dtype) if problem.bias else None
    descales = (empty(m), empty(n)) if dtype.startswith("float8") else ()
    return MatmulTensors(a, b, bias, *descales), empty(m, n, dtype=problem.out_dtype)
