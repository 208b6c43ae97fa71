"""The launch of the Hopper forward (`fwd.py`): its constants, arguments and memory. Read `forward_pass` first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diyfa.backends.cuda.attention.block_mask import mask_arguments
from diyfa.backends.cuda.attention.decode_configs import chunk_keys
from diyfa.backends.cuda.attention.fixed_order import COMPILE_OPTIONS as FIXED_ORDER_OPTIONS
from diyfa.backends.cuda.attention.launch import forced_config, softmax_scale
from diyfa.backends.cuda.attention.tile_io import EQUAL, lengths_constant
from diyfa.backends.cuda.gluon.tile_counter import launch_counter
from diyfa.backends.cuda.gluon.tma import dense_descriptor, descriptor_steps, ragged_descriptor, smem_box
from diyfa.backends.cuda.hopper.configs import (
    CONSUMER_ROWS,
    E4M3,
    Sm90Config,
    box_layout,
    compile_options,
    finds_ahead,
    grid_size,
    has_fixed_max,
    has_one_ring,
    heads_in_parallel,
    select_config,
    tile_info_count,
    value_boxes,
    value_dtype,
)
from diyfa.backends.cuda.hopper.float8 import transpose_launch, transposed_values
from diyfa.backends.cuda.hopper.fwd import CACHE_ARGUMENTS, SCORE_TENSORS, _fwd_sm90_kernel
from diyfa.backends.cuda.hopper.fwd_common import Sm90Constants
from diyfa.backends.cuda.hopper.score_functions import SPELLING
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.backends.cuda.runtime.signature import Tiles
from diyfa.eight_bits import EIGHT_BITS, WEIGHT_SHIFT
from diyfa.problem import AttentionProblem, AttentionTensors, KVCacheTensors, Launch, cached_per_kind, per_head_stride
from diyfa.score_code import value_source


def constants(problem: AttentionProblem, config: Sm90Config, negate: bool) -> Sm90Constants:
    """Return the constants that the kernel is compiled with."""
    # The only fact that depends on a length. The rest depends on the kind of problem, and is cached by that.
    has_partial_block = problem.window_right < 0 and problem.seqlen_k % config.block_n != 0
    return _constants(problem, config, negate, has_partial_block)


@cached_per_kind
def _constants(problem: AttentionProblem, config: Sm90Config, negate: bool, has_partial_block: bool) -> Sm90Constants:
    ragged = lengths_constant(problem) != EQUAL.value
    boxes = box_layout(problem.head_dim, problem.head_dim_v, config.box_columns)[1]
    has_8_bits, v_has_8_bits = problem.dtype in EIGHT_BITS, value_dtype(problem) == E4M3
    return Sm90Constants.read_from(
        problem,
        config,
        block_m=CONSUMER_ROWS * config.consumers,
        q_in_registers=min(config.q_in_registers, boxes),
        boxes=boxes,
        boxes_v=value_boxes(problem, config)[1],
        one_ring=has_one_ring(problem, config.box_columns) and not has_8_bits,
        causal=problem.causal,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        # With a block mask, a block that extends beyond the keys is partial, and its bits hide what is beyond.
        check_keys=not problem.mask
        and problem.window_right < 0
        and (ragged or problem.window_left >= 0 or has_partial_block),
        lengths=lengths_constant(problem),
        lengths_k=lengths_constant(problem),
        page_size=0,
        mask_q=problem.mask[0] if problem.mask else 0,
        mask_k=problem.mask[1] if problem.mask else 0,
        score_fn=value_source(problem.score_fn, SPELLING),
        negate=negate,
        fixed_max=has_fixed_max(problem, config),
        tile_infos=tile_info_count(config),
        schedule=config.scheduler,
        find_ahead=finds_ahead(problem, config),
        bits=8 if has_8_bits else 16,
        bits_v=8 if v_has_8_bits else 16,
        head_dim=problem.head_dim if has_8_bits else 0,
        head_dim_v=problem.head_dim_v if has_8_bits else 0,
        weight_shift=WEIGHT_SHIFT[E4M3] if v_has_8_bits else 0,
        chunk=chunk_keys(problem) // config.block_n if problem.batch_invariant else 0,
        shared_totals=problem.batch_invariant and config.shared_totals,
        out_in_totals=problem.batch_invariant and config.out_in_totals,
    )


def totals_memory(problem: AttentionProblem, config: Sm90Config, device: torch.device) -> torch.Tensor | None:
    """Return memory for the totals of chunks (`chunks.py`), or None if they need none."""
    if not problem.batch_invariant or config.shared_totals:
        return None
    width, boxes = box_layout(problem.head_dim_v, problem.head_dim, config.box_columns)
    rows = grid_size(problem, config, device) * config.consumers * CONSUMER_ROWS
    return torch.empty(rows * width * boxes, dtype=torch.float32, device=device)


def key_arguments(
    tensors: AttentionTensors | KVCacheTensors, config: Sm90Config, layout: str, ragged: bool, rows: int = 0
) -> dict[str, Any]:
    """Return the kernel arguments of keys and values, the second and third of `tensors`, in this layout.

    `ragged`: sequences have lengths of their own. `rows`: rows of a TMA box; 0: block_n.
    """
    k, v = tensors[1:3]
    make_descriptor = ragged_descriptor if ragged else dense_descriptor
    (kb, kn), (vb, vn) = (descriptor_steps(k, layout), descriptor_steps(v, layout)) if ragged else ((0, 0), (0, 0))
    rows = rows or config.block_n
    d, dv = k.shape[-1], v.shape[-1]
    return {
        "k_tensor": make_descriptor(k, layout, rows, box_layout(d, dv, config.box_columns)[0]),
        "v_tensor": make_descriptor(v, layout, rows, box_layout(dv, d, config.box_columns)[0]),
        "steps_kb": kb,
        "steps_kn": kn,
        "steps_vb": vb,
        "steps_vn": vn,
    }


def transposed_pass(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor, config: Sm90Config
) -> Pass:
    """Return the pass of a V of 8 bits: one launch transposes V (`float8.py`), the next one computes attention."""
    values = transposed_values(problem, tensors.v)
    box = smem_box(value_boxes(problem, config)[0], config.block_n, 4, values.dtype)
    keys = key_arguments(tensors, config, problem.layout, problem.seq_lens or problem.varlen)
    keys |= {"v_tensor": Tiles(values, values.shape, values.stride(), box), "steps_vb": 0, "steps_vn": 0}
    launches = [
        transpose_launch(problem, tensors, values), make_launch(problem, tensors, out, lse, config, keys=keys)
    ]  # fmt: skip
    return Pass(launches, [values], derived_arguments(config))


def make_launch(
    problem: AttentionProblem,
    tensors: AttentionTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Sm90Config,
    totals: torch.Tensor | None = None,
    keys: dict[str, Any] | None = None,
) -> Launch:
    """Return the launch that fills out and lse.

    `totals`: `totals_memory`. `keys`: arguments that replace `key_arguments` of `tensors`: those of a cache, or of a
    transposed V.
    """
    q = tensors.q
    layout, d, dv = problem.layout, problem.head_dim, problem.head_dim_v
    scale, negate = softmax_scale(problem, tensors.sm_scale)
    width, width_v = box_layout(d, dv, config.box_columns)[0], value_boxes(problem, config)[0]
    has_lengths = problem.seq_lens or problem.varlen
    lengths_q, lengths_k = (
        (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if problem.varlen else (tensors.seq_lens, tensors.seq_lens)
    )
    qb, qm = descriptor_steps(q, layout) if has_lengths else (0, 0)
    unit = min(config.block_n, problem.mask[1]) if problem.mask else 0  # keys of one copy, `UNIT` in `block_mask.py`
    arguments = {
        "q_tensor": (ragged_descriptor if has_lengths else dense_descriptor)(q, layout, CONSUMER_ROWS, width),
        # Rows beyond a sample's end are written as zeros. Rows beyond a packed sequence belong to the next one.
        "o_tensor": (ragged_descriptor if problem.varlen else dense_descriptor)(out, layout, CONSUMER_ROWS, width_v),
        "lengths_q_ptr": lengths_q,
        "lengths_k_ptr": lengths_k,
        "lse_ptr": lse,
        "o_ptr": out if config.store_from_registers or problem.varlen else None,
        "slopes_ptr": tensors.alibi_slopes,
        "sinks_ptr": tensors.sinks,
        **{f"{name}_ptr": getattr(tensors, name) for name in SCORE_TENSORS},
        "q_descale_ptr": tensors.q_descale,
        "k_descale_ptr": tensors.k_descale,
        "v_descale_ptr": tensors.v_descale,
        "k_mean_ptr": tensors.k_mean,
        "v_mean_ptr": tensors.v_mean,
        "counter_ptr": launch_counter(q) if config.scheduler == "dynamic" else None,
        "totals_ptr": totals,
        **dict.fromkeys(CACHE_ARGUMENTS),
        **mask_arguments(tensors),
        "heads": problem.batch * problem.heads_q,
        "heads_q": problem.heads_q,
        "heads_in_parallel": heads_in_parallel(problem),
        "batch": problem.batch,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "total_q": problem.total_q,
        "total_k": problem.total_k,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "group_size": problem.heads_q // problem.heads_kv,
        "stride_slopeb": per_head_stride(tensors.alibi_slopes),
        "steps_qb": qb,
        "steps_qm": qm,
        "scale": scale,
        "softcap": problem.softcap,
        **(key_arguments(tensors, config, layout, has_lengths, unit) if keys is None else keys),
    }
    grid = grid_size(problem, config, q.device)
    values = {"config": constants(problem, config, negate)}
    options = compile_options(config) | (FIXED_ORDER_OPTIONS if problem.batch_invariant else {})
    return Launch(_fwd_sm90_kernel, grid, arguments, values, options)


def _config(problem: AttentionProblem) -> Sm90Config:
    return forced_config("sm90", problem) or select_config(problem)


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse."""
    config = _config(problem)
    if value_dtype(problem) == E4M3:
        return transposed_pass(problem, tensors, out, lse, config)
    totals = totals_memory(problem, config, tensors.q.device)
    launch = make_launch(problem, tensors, out, lse, config, totals)
    return Pass([launch], [] if totals is None else [totals], derived_arguments(config))


def derived_arguments(config: Sm90Config) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return `Pass.derived`: the tile counter of a dynamic schedule."""
    return {"counter_ptr": launch_counter} if config.scheduler == "dynamic" else {}
