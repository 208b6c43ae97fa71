"""What the attention kernels with matrix products are launched with, by the names of their arguments."""

from __future__ import annotations

from typing import Any

from diyfa.backends.npu.attention.bias import as_read
from diyfa.backends.npu.runtime.compat import INTERPRETED, cut_columns, padded_head_dim
from diyfa.backends.npu.runtime.launch import addressed, cube_programs, described, distinct_rows, heads_together
from diyfa.backends.npu.tables.configs import (
    AttentionTile,
    attention_flags,
    attention_scalars,
    attention_sizes,
    widest_product,
)
from diyfa.problem import AttentionProblem, AttentionTensors, Launch


def readable(tensors: AttentionTensors, layout: str) -> AttentionTensors:
    """`tensors` with copies of those that kernels cannot read as they lie."""
    q, k, v = (distinct_rows(x, layout) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v, attn_bias=as_read(tensors.attn_bias).tensor)


def head_dims(problem: AttentionProblem) -> dict[str, int]:
    """Features of a head, and the columns that a tile has for them."""
    d, dv = problem.head_dim, problem.head_dim_v
    return {"HEAD_DIM": d, "HEAD_DIM_V": dv, "BLOCK_D": padded_head_dim(d), "BLOCK_DV": padded_head_dim(dv)}


def attention_launch(
    kernel: Any,
    step: str,
    problem: AttentionProblem,
    tensors: AttentionTensors,
    tile: AttentionTile,
    tasks: int,
    own: dict[str, Any],
) -> Launch:
    """The launch of `kernel`, called `step` in the tile table, for `tasks` tiles of its result. `tensors`: `readable`
    ones; `own`: what it takes besides."""
    slopes = tensors.alibi_slopes
    bias = as_read(tensors.attn_bias)
    arguments = {
        **addressed(problem.layout, q=tensors.q, k=tensors.k, v=tensors.v),
        "seq_lens_ptr": tensors.seq_lens,
        "cu_seqlens_q_ptr": tensors.cu_seqlens_q,
        "cu_seqlens_k_ptr": tensors.cu_seqlens_k,
        "slopes_ptr": slopes,
        "stride_slope_b": 0 if slopes is None or slopes.dim() == 1 else slopes.stride(0),
        "bias_ptr": bias.tensor,
        **bias.named_strides("bias"),
        "rng_state_ptr": tensors.rng_state,
        "sinks_ptr": tensors.sinks,
        **attention_scalars(problem, tensors.sm_scale, tensors.dropout_p),
        **attention_sizes(problem),
        "together": heads_together(problem, step),
    }
    constants = {
        **head_dims(problem),
        **attention_flags(problem, step),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BIAS": bias.dims,
        "INTERPRET": INTERPRETED,
    }
    if step in ("dq", "dkdv"):  # whose results have as many columns as q
        constants |= cut_columns(problem.head_dim, widest_product(problem.dtype))
    grid = cube_programs(problem.arch, tensors.q.device, tasks)
    return described(kernel, grid, arguments | own, constants, tile.compile_options(problem.arch))
