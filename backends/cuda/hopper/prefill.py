"""The Hopper forward over a KV cache, contiguous or paged: prompts, in chunks or whole.

The kernel is that of calls without a cache (`fwd.py`). This file describes its launch: queries are as in such a call,
while keys have lengths of their own on the device, and lie in entries or pages (`tiles.py`). Read `cache_pass` first.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diyfa.backends.cuda.attention.launch import forced_config
from diyfa.backends.cuda.attention.tile_io import CACHED, PACKED
from diyfa.backends.cuda.hopper import fwd_launch
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.backends.cuda.hopper.prefill_configs import as_forward, select_config
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import VARLEN, AttentionTensors, KVCacheProblem, KVCacheTensors, Launch


def _keys_layout(problem: KVCacheProblem) -> str:
    return VARLEN if problem.packed_keys else "bshd"


def make_launch(
    problem: KVCacheProblem,
    tensors: KVCacheTensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Sm90Config,
    totals: torch.Tensor | None = None,
) -> Launch:
    """Return the launch that fills out and lse: that of `fwd_launch.py`, with arguments and constants of a cache.

    `totals`: `fwd_launch.totals_memory`.
    """
    table, page = tensors.block_table, problem.page_size
    keys = {
        **fwd_launch.key_arguments(tensors, config, _keys_layout(problem), True, min(page, config.block_n)),
        "lengths_k_ptr": tensors.cu_seqlens_k,
        "total_k": tensors.k_cache.shape[0],
        "seqused_ptr": tensors.seqlens,
        "block_table_ptr": table,
        "cache_batch_idx_ptr": tensors.cache_batch_idx,
        "length": tensors.length,
        "added": tensors.added,
        "entries": tensors.k_cache.shape[0],
        "stride_table": 0 if table is None else table.stride(0),
    }
    queries = AttentionTensors(
        *tensors[:3], tensors.sm_scale, cu_seqlens_q=tensors.cu_seqlens_q, alibi_slopes=tensors.alibi_slopes,
        sinks=tensors.sinks,
    )  # fmt: skip
    # `as_forward` says that sequences end early. That holds for the keys, and their constants are set below.
    launch = fwd_launch.make_launch(
        as_forward(problem).replace(seq_lens=False), queries, out, lse, config, totals, keys
    )
    constants = replace(
        launch.constants["config"],
        lengths_k=(PACKED if problem.packed_keys else CACHED).value,
        page_size=page,
        check_keys=problem.window_right < 0,
    )
    return launch._replace(constants={"config": constants})


def _config(problem: KVCacheProblem) -> Sm90Config:
    return forced_config("sm90", as_forward(problem)) or select_config(problem)


def cache_pass(problem: KVCacheProblem, tensors: KVCacheTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse."""
    config = _config(problem)
    if problem.in_place:  # out overwrites the queries, and the overflow fallback would read them once more
        config = replace(config, fixed_max=False)
    totals = fwd_launch.totals_memory(as_forward(problem), config, tensors.q.device)
    launch = make_launch(problem, tensors, out, lse, config, totals)
    return Pass([launch], [] if totals is None else [totals], fwd_launch.derived_arguments(config))
