"""Backward attention for Ascend: FlashAttention-2 (arXiv:2307.08691, algorithm 2) as separate kernels without atomics.

1. bwd_delta.py: delta = rowsum(dout * out) - dlse;
2. bwd_dkdv.py: dk and dv;
3. bwd_dq.py: dq;
4. bwd_dbias.py: the gradient of attn_bias, when it wants one; bwd_dbias_rows.py where it is the same for all keys;
5. bwd_dsinks.py: the gradient of the sinks, when there are any;

Here they are launched. What the kernels with matrix products have in common with fwd.py (the persistent grid, the one
loop, the padding) is said there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from diyfa.backends.npu.attention.bias import Bias, as_read, as_written
from diyfa.backends.npu.attention.bwd_dbias import _bwd_dbias_kernel
from diyfa.backends.npu.attention.bwd_dbias_rows import _bwd_dbias_rows_kernel
from diyfa.backends.npu.attention.bwd_delta import _bwd_preprocess_kernel
from diyfa.backends.npu.attention.bwd_dkdv import _bwd_dkdv_kernel
from diyfa.backends.npu.attention.bwd_dq import _bwd_dq_kernel
from diyfa.backends.npu.attention.bwd_dsinks import _bwd_dsinks_kernel
from diyfa.backends.npu.runtime.compat import INTERPRETED, cut_columns, padded_head_dim
from diyfa.backends.npu.runtime.launch import (
    addressed,
    cube_programs,
    device_guard,
    heads_together,
    launch_options,
    vector_programs,
)
from diyfa.backends.npu.tables.configs import (
    PREPROCESS_ROWS,
    attention_flags,
    attention_scalars,
    attention_sizes,
    attention_tile,
    bwd_tiles,
    preprocess_rows,
    widest_product,
)
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors


def _flags(problem: AttentionProblem, kernel: str) -> dict[str, bool | str]:
    """The forward's flags but the sinks: a sink changes lse, and nothing else that the backward kernels read."""
    flags = attention_flags(problem, kernel)
    del flags["SINKS"]
    return flags


def _slope_stride(tensors: AttentionTensors) -> int:
    """From one sample's slopes to the next one's."""
    slopes = tensors.alibi_slopes
    return 0 if slopes is None or slopes.dim() == 1 else slopes.stride(0)


def _sizes(problem: AttentionProblem, tensors: AttentionTensors) -> tuple[float, ...]:
    """The scalars and sizes that all kernels with matrix products take."""
    return (*attention_scalars(problem, tensors.sm_scale, tensors.dropout_p), *attention_sizes(problem))


def _launch_dbias(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    lse: torch.Tensor,
    dout: torch.Tensor,
    delta: torch.Tensor,
    dlse: torch.Tensor | None,
    bias: Bias,
    dbias: torch.Tensor,
    stride: Mapping[str, tuple[int, ...]],
    shared: dict[str, object],
) -> None:
    """Fill the gradient of the bias."""
    q, k, v = tensors.q, tensors.k, tensors.v
    written = as_written(dbias)
    assert written.tensor is not None and tensors.attn_bias is not None
    shape = (1,) * (4 - dbias.dim()) + tuple(dbias.shape)
    own_batch, own_heads = shape[:2]
    tasks = own_batch * own_heads
    if "k" not in written.dims:
        tasks *= triton.cdiv(problem.seqlen_q, PREPROCESS_ROWS) if "q" in written.dims else 1
        _bwd_dbias_rows_kernel[(vector_programs(problem.arch, q.device, tasks),)](
            tensors.sinks, lse, delta, dlse, tensors.seq_lens,
            written.tensor,
            *written.strides[:2],
            problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, problem.window_left,
            problem.window_right, own_batch, own_heads,
            BLOCK_M=PREPROCESS_ROWS, DBIAS=written.dims, SINKS=problem.sinks, HAS_DLSE=dlse is not None,
            HAS_LEFT=problem.window_left >= 0, HAS_RIGHT=problem.window_right >= 0, SEQ_LENS=problem.seq_lens,
            INTERPRET=INTERPRETED,
        )  # fmt: skip
    else:
        if bias.dims != written.dims:  # an expanded bias has a gradient for each of the values that it repeats
            bias = as_read(tensors.attn_bias.contiguous())
        tile = attention_tile(problem, "dbias")
        tasks *= triton.cdiv(problem.seqlen_q, tile.block_m) if "q" in written.dims else 1
        tasks *= triton.cdiv(problem.seqlen_k, tile.block_n)
        flags = _flags(problem, "dbias")
        # Packed sequences have no bias, and the last tile of keys is always masked.
        del flags["VARLEN"], flags["MASKED"]
        _bwd_dbias_kernel[(cube_programs(problem.arch, q.device, tasks),)](
            q, k, v, dout, lse, delta, tensors.seq_lens, tensors.alibi_slopes, bias.tensor, tensors.rng_state,
            written.tensor,
            *stride["q"], *stride["k"], *stride["v"], *stride["dout"],
            *written.strides, _slope_stride(tensors), *bias.strides,
            *_sizes(problem, tensors), own_batch, own_heads,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, **shared, **flags,
            **launch_options(tile, problem.arch),
        )  # fmt: skip
    if written.tensor is not dbias:
        dbias.copy_(written.tensor)


def attention_bwd(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
) -> None:
    """Launch the backward kernels, which fill the gradients.

    `dout` is shaped like `out`, `dlse` like `lse`; any strides but the last of `dout`.
    """
    batch, heads_q, seqlen_q = problem.batch, problem.heads_q, problem.seqlen_q
    # Kernels that treat each row for itself see packed sequences as one sample.
    row_sizes = (1, heads_q, problem.total_q) if problem.varlen else (batch, heads_q, seqlen_q)
    dq, dk, dv, dbias, dsinks, delta = gradients
    tiles = bwd_tiles(problem)
    delta = torch.empty_like(lse) if delta is None else delta
    dlse = None if dlse is None else dlse.contiguous()
    slopes = tensors.alibi_slopes
    stride = {name: addressed(x, problem.layout)[1] for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    q, stride["q"] = addressed(tensors.q, problem.layout)
    k, stride["k"] = addressed(tensors.k, problem.layout)
    v, stride["v"] = addressed(tensors.v, problem.layout)
    dout, stride["dout"] = addressed(dout, problem.layout)
    bias = as_read(tensors.attn_bias)
    feature_strides = (_slope_stride(tensors), *bias.strides)
    shared: dict[str, object] = {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "INTERPRET": INTERPRETED,
    }
    cut = {**shared, **cut_columns(problem.head_dim, widest_product(problem.dtype))}
    lengths = (tensors.seq_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    sizes = _sizes(problem, tensors)
    rows = preprocess_rows(problem)
    with device_guard(q):
        tasks = triton.cdiv(row_sizes[2], rows) * row_sizes[0] * heads_q
        _bwd_preprocess_kernel[(vector_programs(problem.arch, q.device, tasks),)](
            out, dout, dlse, tensors.seq_lens,
            delta,
            *stride["out"], *stride["dout"],
            *row_sizes,
            HEAD_DIM_V=problem.head_dim_v, BLOCK_DV=padded_head_dim(problem.head_dim_v), BLOCK_M=rows,
            SEQ_LENS=problem.seq_lens, HAS_DLSE=dlse is not None,
        )  # fmt: skip
        tile = tiles["dkdv"]
        tasks = triton.cdiv(problem.seqlen_k, tile.block_n) * batch * problem.heads_kv
        flags = _flags(problem, "dkdv")
        del flags["MASKED"]  # each of its tiles is asked about a mask
        _bwd_dkdv_kernel[(cube_programs(problem.arch, q.device, tasks),)](
            q, k, v, dout, lse, delta, *lengths, slopes, bias.tensor, tensors.rng_state,
            dk, dv,
            *stride["q"], *stride["k"], *stride["v"], *stride["dout"], *stride["dk"], *stride["dv"],
            *feature_strides,
            *sizes, heads_together(problem, "dkdv"),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, **cut, **flags,
            **launch_options(tile, problem.arch),
        )  # fmt: skip
        tile = tiles["dq"]
        tasks = triton.cdiv(seqlen_q, tile.block_m) * batch * heads_q
        _bwd_dq_kernel[(cube_programs(problem.arch, q.device, tasks),)](
            q, k, v, dout, lse, delta, *lengths, slopes, bias.tensor, tensors.rng_state,
            dq,
            *stride["q"], *stride["k"], *stride["v"], *stride["dout"], *stride["dq"],
            *feature_strides,
            *sizes, heads_together(problem, "dq"),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BIAS=bias.dims, **cut, **_flags(problem, "dq"),
            **launch_options(tile, problem.arch),
        )  # fmt: skip
        tensors = tensors._replace(q=q, k=k, v=v)
        if dbias is not None:
            _launch_dbias(problem, tensors, lse, dout, delta, dlse, bias, dbias, stride, shared)
        if dsinks is not None:
            _bwd_dsinks_kernel[(vector_programs(problem.arch, q.device, heads_q),)](
                tensors.sinks, lse, delta, dsinks, *row_sizes, BLOCK_M=PREPROCESS_ROWS
            )
