"""Backward attention for Ascend: FlashAttention-2 (arXiv:2307.08691, algorithm 2) as separate kernels without atomics.

1. bwd_delta.py: delta = rowsum(dout * out) - dlse;
2. bwd_dkdv.py: dk and dv;
3. bwd_dq.py: dq;
4. bwd_dbias.py: the gradient of attn_bias, if required; bwd_dbias_rows.py if the bias is the same for all keys;
5. bwd_dsinks.py: the gradient of the sinks, if there are any;
6. bwd_captured.py: the gradients of a score function's captured tensors, by atomics, if required.

This module builds their launches. fwd.py explains what all kernels with matrix products share: the persistent grid, the
single loop, the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import triton

from diyfa.backends.npu.attention.bias import as_read, as_written
from diyfa.backends.npu.attention.bwd_captured import captured_launches
from diyfa.backends.npu.attention.bwd_dbias import _bwd_dbias_kernel
from diyfa.backends.npu.attention.bwd_dbias_rows import DQ_WIDTH, BiasRowsConstants, _bwd_dbias_rows_kernel
from diyfa.backends.npu.attention.bwd_delta import PreprocessConstants, _bwd_preprocess_kernel
from diyfa.backends.npu.attention.bwd_dkdv import KeyGradientConstants, _bwd_dkdv_kernel
from diyfa.backends.npu.attention.bwd_dq import QueryGradientConstants, _bwd_dq_kernel
from diyfa.backends.npu.attention.bwd_dsinks import SinkGradientConstants, _bwd_dsinks_kernel
from diyfa.backends.npu.attention.launch import AttentionConstants, attention_launch, bias_keys, call_values
from diyfa.backends.npu.runtime.launch import bind_launch, device_guard, run, tensor_arguments, vector_programs
from diyfa.backends.npu.runtime.tiles import chosen_tile, run_tiled
from diyfa.backends.npu.tables.configs import (
    PREPROCESS_ROWS,
    AttentionTile,
    attention_tile,
    conservative_tile,
    family_options,
    preprocess_rows,
)
from diyfa.problem import AttentionGradients, AttentionProblem, AttentionTensors, Launch


def _dbias_launch(
    problem: AttentionProblem, tensors: AttentionTensors, dbias: torch.Tensor, values: dict[str, Any],
    tile: AttentionTile | None,
) -> tuple[str, Launch]:  # fmt: skip
    """Return (name, launch) for the gradient of the bias. It writes `dbias`, or the buffer of `as_written`.

    "dbias_rows" is the kernel for a bias without keys, "dbias" that for all others, with `tile` or the table's tile.
    """
    keys = bias_keys(problem)
    buffer = as_written(dbias, keys)
    bias_batch, bias_heads = ((1,) * (4 - dbias.dim()) + tuple(dbias.shape))[:2]
    values = {**values, **buffer.values("dbias"), "bias_batch": bias_batch, "bias_heads": bias_heads}
    tasks = bias_batch * bias_heads
    if "k" not in buffer.dims:
        tasks *= triton.cdiv(problem.seqlen_q, PREPROCESS_ROWS) if "q" in buffer.dims else 1
        dq_columns = min(problem.head_dim, DQ_WIDTH.value)
        values |= {"BLOCK_M": PREPROCESS_ROWS, "DBIAS": buffer.dims, "DQ_COLUMNS": dq_columns}
        return "dbias_rows", bind_launch(
            _bwd_dbias_rows_kernel, BiasRowsConstants, vector_programs(problem.arch, dbias.device, tasks), values,
            family_options(problem.arch),
        )  # fmt: skip
    # attn_bias may be an expanded tensor, whose repeated values kernels read as broadcast. dbias has a gradient for
    # each of them, so this kernel reads a copy of the bias that has them all.
    if values["BIAS"] != buffer.dims:
        assert tensors.attn_bias is not None
        bias = as_read(tensors.attn_bias.contiguous(), keys)
        values |= {**bias.values("bias"), "BIAS": bias.dims}
    tile = tile or attention_tile(problem, "dbias")
    tasks *= triton.cdiv(problem.seqlen_q, tile.block_m) if "q" in buffer.dims else 1
    tasks *= triton.cdiv(problem.seqlen_k, tile.block_n)
    return "dbias", attention_launch(_bwd_dbias_kernel, AttentionConstants, "dbias", problem, values, tile, tasks)


def make_launches(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, gradients: AttentionGradients, tiles: Mapping[str, AttentionTile] | None = None,
) -> dict[str, Launch]:  # fmt: skip
    """Return the launches that fill the gradients, by name, in the order in which they must run.

    `tiles` replaces tiles of the table, by kernel name. Gradients of captured tensors are zeros in float32, to which
    the launches add.
    """
    tiles = tiles or {}
    layout, arch, device, heads_q = problem.layout, problem.arch, lse.device, problem.heads_q
    values = {
        **call_values(problem, tensors, "dq"),
        **tensor_arguments(layout, out=out, dout=dout, dq=gradients.dq, dk=gradients.dk, dv=gradients.dv),
        "lse_ptr": lse,
        "delta_ptr": torch.empty_like(lse) if gradients.delta is None else gradients.delta,
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "dsinks_ptr": gradients.dsinks,
        "HAS_DLSE": dlse is not None,
    }
    # Kernels that treat rows independently take packed sequences as one sample.
    batch, rows = (1, problem.total_q) if problem.varlen else (problem.batch, problem.seqlen_q)
    launches = {}

    block = preprocess_rows(problem)
    grid = vector_programs(arch, device, triton.cdiv(rows, block) * batch * heads_q)
    row_values = values | {"seqlen_q": rows, "BLOCK_M": block}
    options = family_options(arch)
    launches["preprocess"] = bind_launch(_bwd_preprocess_kernel, PreprocessConstants, grid, row_values, options)

    tile = tiles.get("dkdv") or attention_tile(problem, "dkdv")
    tasks = triton.cdiv(problem.seqlen_k, tile.block_n) * problem.batch * problem.heads_kv
    launches["dkdv"] = attention_launch(_bwd_dkdv_kernel, KeyGradientConstants, "dkdv", problem, values, tile, tasks)

    tile = tiles.get("dq") or attention_tile(problem, "dq")
    tasks = triton.cdiv(problem.seqlen_q, tile.block_m) * problem.batch * heads_q
    launches["dq"] = attention_launch(_bwd_dq_kernel, QueryGradientConstants, "dq", problem, values, tile, tasks)

    if gradients.dbias is not None:
        name, launch = _dbias_launch(problem, tensors, gradients.dbias, values, tiles.get("dbias"))
        launches[name] = launch
    if totals := gradients.captured():
        captured = captured_launches(problem, values, totals, conservative_tile(problem, "dbias"))
        launches |= {f"captured{n}": launch for n, launch in enumerate(captured)}
    if gradients.dsinks is not None:
        grid = vector_programs(arch, device, heads_q)
        row_values = values | {"batch": batch, "seqlen_q": rows, "BLOCK_M": PREPROCESS_ROWS}
        launches["dsinks"] = bind_launch(_bwd_dsinks_kernel, SinkGradientConstants, grid, row_values, options)
    return launches


def attention_bwd(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, gradients: AttentionGradients,
) -> None:  # fmt: skip
    """Launch the backward kernels, which fill the gradients.

    1. Choose the tile of each kernel that has tiles. That may measure candidates, with launches of their own.
    2. Make all launches with these tiles, and run them in order.
    3. Copy what kernels could not write in the caller's form: a bias gradient in a buffer, float32 totals of captured
       tensors.

    `dout` has the shape of `out`, `dlse` that of `lse`. Strides are free, except the last one of `dout`.
    """
    dbias, captured = gradients.dbias, gradients.captured()
    totals = {f"dscore{n}": torch.zeros_like(x, dtype=torch.float32) for n, x in captured.items()}
    gradients = gradients._replace(**totals)
    if gradients.delta is None:  # one delta for all kernels, whatever their tiles
        gradients = gradients._replace(delta=torch.empty_like(lse))

    def new_launch(kernel: str, tile: AttentionTile) -> list[Launch]:
        """Return one kernel's launch with `tile`."""
        return [make_launches(problem, tensors, out, lse, dout, dlse, gradients, {kernel: tile})[kernel]]

    def launch_with(kernel: str, tile: AttentionTile) -> list[Launch]:
        """Return one kernel's launch with `tile`: that of `launches`, unless its chosen tile did not compile."""
        return [launches[kernel]] if tile is tiles[kernel] else new_launch(kernel, tile)

    with device_guard(tensors.q):
        dbias_has_keys = dbias is not None and "k" in as_written(dbias, bias_keys(problem)).dims
        tiled_kernels = ("dkdv", "dq", "dbias") if dbias_has_keys else ("dkdv", "dq")
        tiles = {kernel: chosen_tile(problem, kernel, partial(new_launch, kernel)) for kernel in tiled_kernels}
        launches = make_launches(problem, tensors, out, lse, dout, dlse, gradients, tiles)
        for kernel, launch in launches.items():
            if kernel in tiles:
                (launch,) = run_tiled(problem, kernel, tiles[kernel], partial(launch_with, kernel))
            else:
                run(launch)
            dbias_buffer = launch.arguments.get("dbias_ptr")
            if dbias is not None and dbias_buffer is not None and dbias_buffer is not dbias:
                buffer_has_more_keys = dbias.shape[-1] != dbias_buffer.shape[-1]
                dbias.copy_(dbias_buffer.sum(-1, keepdim=True) if buffer_has_more_keys else dbias_buffer)
        for n, x in captured.items():
            x.copy_(totals[f"dscore{n}"])
