"""Backward attention for Ascend: FlashAttention-2 (arXiv:2307.08691, algorithm 2) as separate kernels without atomics.

1. bwd_delta.py: delta = rowsum(dout * out) - dlse;
2. bwd_dkdv.py: dk and dv;
3. bwd_dq.py: dq;
4. bwd_dbias.py: the gradient of attn_bias, when it wants one; bwd_dbias_rows.py where it is the same for all keys;
5. bwd_dsinks.py: the gradient of the sinks, when there are any;

Here are their launches. What the kernels with matrix products have in common with fwd.py (the persistent grid, the one
loop, the padding) is said there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from diyfa.backends.npu.attention.bias import as_read, as_written
from diyfa.backends.npu.attention.bwd_dbias import _bwd_dbias_kernel
from diyfa.backends.npu.attention.bwd_dbias_rows import _bwd_dbias_rows_kernel
from diyfa.backends.npu.attention.bwd_delta import _bwd_preprocess_kernel
from diyfa.backends.npu.attention.bwd_dkdv import _bwd_dkdv_kernel
from diyfa.backends.npu.attention.bwd_dq import _bwd_dq_kernel
from diyfa.backends.npu.attention.bwd_dsinks import _bwd_dsinks_kernel
from diyfa.backends.npu.attention.launch import attention_launch, head_dims, readable
from diyfa.backends.npu.runtime.compat import INTERPRETED
from diyfa.backends.npu.runtime.launch import addressed, described, device_guard, distinct_rows, run, vector_programs
from diyfa.backends.npu.tables.configs import (
    PREPROCESS_ROWS,
    AttentionTile,
    attention_flags,
    attention_sizes,
    attention_tile,
    preprocess_rows,
)
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, Launch


def _dbias_launch(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    dbias: torch.Tensor,
    by_row: dict[str, Any],
    read: dict[str, Any],
    tile: AttentionTile | None,
) -> tuple[str, Launch]:
    """(name, launch) of the gradient of the bias: into `dbias` or, where no kernel can write that, a buffer like it."""
    written = as_written(dbias)
    assert written.tensor is not None and tensors.attn_bias is not None
    own_batch, own_heads = ((1,) * (4 - dbias.dim()) + tuple(dbias.shape))[:2]
    own = {
        "dbias_ptr": written.tensor,
        **written.named_strides("dbias"),
        "own_batch": own_batch,
        "own_heads": own_heads,
    }
    tasks = own_batch * own_heads
    if "k" not in written.dims:
        tasks *= triton.cdiv(problem.seqlen_q, PREPROCESS_ROWS) if "q" in written.dims else 1
        constants = {
            **attention_flags(problem, "dbias"), "BLOCK_M": PREPROCESS_ROWS, "DBIAS": written.dims,
            "HAS_DLSE": by_row["dlse_ptr"] is not None, "HAS_RIGHT": problem.window_right >= 0,
            "INTERPRET": INTERPRETED,
        }  # fmt: skip
        grid = vector_programs(problem.arch, dbias.device, tasks)
        return "dbias_rows", described(_bwd_dbias_rows_kernel, grid, by_row | own, constants)
    if as_read(tensors.attn_bias).dims != written.dims:
        # An expanded bias has a gradient for each of the values that it repeats.
        tensors = tensors._replace(attn_bias=tensors.attn_bias.expand(dbias.shape).contiguous())
    tile = tile or attention_tile(problem, "dbias")
    tasks *= triton.cdiv(problem.seqlen_q, tile.block_m) if "q" in written.dims else 1
    tasks *= triton.cdiv(problem.seqlen_k, tile.block_n)
    return "dbias", attention_launch(_bwd_dbias_kernel, "dbias", problem, tensors, tile, tasks, read | own)


def launches_of(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: AttentionGradients,
    tiles: Mapping[str, AttentionTile] | None = None,
) -> dict[str, Launch]:
    """The launches that fill the gradients, by name, in the order in which they run; `tiles`: other ones than the
    table's, by the names of kernels there."""
    tiles = tiles or {}
    layout, arch, device = problem.layout, problem.arch, lse.device
    tensors = readable(tensors, layout)
    dout = distinct_rows(dout, layout)
    delta = torch.empty_like(lse) if gradients.delta is None else gradients.delta
    read = {**addressed(layout, dout=dout), "lse_ptr": lse, "delta_ptr": delta}
    # Kernels that treat each row for itself see packed sequences as one sample.
    batch, rows = (1, problem.total_q) if problem.varlen else (problem.batch, problem.seqlen_q)
    by_row = {
        **read,
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "seq_lens_ptr": tensors.seq_lens,
        "sinks_ptr": tensors.sinks,
        **attention_sizes(problem),
        "batch": batch,
        "seqlen_q": rows,
    }
    launches = {}

    block = preprocess_rows(problem)
    flags = attention_flags(problem, "dq")
    constants = {**head_dims(problem), **flags, "BLOCK_M": block, "HAS_DLSE": dlse is not None}
    grid = vector_programs(arch, device, triton.cdiv(rows, block) * batch * problem.heads_q)
    own = {**by_row, **addressed(layout, out=out), "cu_seqlens_q_ptr": tensors.cu_seqlens_q, "batch": problem.batch}
    launches["preprocess"] = described(_bwd_preprocess_kernel, grid, own, constants)

    tile = tiles.get("dkdv") or attention_tile(problem, "dkdv")
    tasks = triton.cdiv(problem.seqlen_k, tile.block_n) * problem.batch * problem.heads_kv
    own = read | addressed(layout, dk=gradients.dk, dv=gradients.dv)
    launches["dkdv"] = attention_launch(_bwd_dkdv_kernel, "dkdv", problem, tensors, tile, tasks, own)

    tile = tiles.get("dq") or attention_tile(problem, "dq")
    tasks = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.batch * problem.heads_q
    own = read | addressed(layout, dq=gradients.dq)
    launches["dq"] = attention_launch(_bwd_dq_kernel, "dq", problem, tensors, tile, tasks, own)

    if gradients.dbias is not None:
        name, launch = _dbias_launch(problem, tensors, gradients.dbias, by_row, read, tiles.get("dbias"))
        launches[name] = launch
    if gradients.dsinks is not None:
        grid = vector_programs(arch, device, problem.heads_q)
        own = by_row | {"dsinks_ptr": gradients.dsinks}
        launches["dsinks"] = described(_bwd_dsinks_kernel, grid, own, {"BLOCK_M": PREPROCESS_ROWS})
    return launches


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
    dbias = gradients.dbias
    with device_guard(tensors.q):
        for launch in launches_of(problem, tensors, out, lse, dout, dlse, gradients).values():
            run(launch)
            written = launch.arguments.get("dbias_ptr")
            if dbias is not None and written is not None and written is not dbias:
                dbias.copy_(written)
