"""FlashAttention forward (Dao et al. 2022, arXiv:2205.14135, algorithm 1): key/value blocks in the outer loop.

One program has a whole head, as in the paper's CUDA kernel. It loads a block of keys and values once and visits every
block of queries with it. So the running output, sum and maximum of all rows are in global memory, and each visit reads,
rescales, normalises and writes them. Two things differ from the paper. They are in fp32: rounding a running output to
half precision at every visit would break the accuracy contract. Query blocks that a causal mask hides are not visited.
The kernel is meant to be compared with fwd.py, which swaps the loops and has all three in registers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.block_info import query_ranges
from diyfa.backends.cuda.attention.configs import AttentionConfig, portable_config, schedule
from diyfa.backends.cuda.attention.dots import dot, round_to
from diyfa.backends.cuda.attention.fwd import constants
from diyfa.backends.cuda.attention.launch import (
    RUNTIME_SIZES,
    UNALIGNED_POINTERS,
    fields_of,
    pointers,
    softmax_scale,
    strides,
)
from diyfa.backends.cuda.attention.scores import visible_pairs
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import LN2, LOG2E, head_view, load_tile, store_tile
from diyfa.backends.cuda.runtime.passes import Pass
from diyfa.problem import AttentionProblem, AttentionTensors, Launch

V1_SPILL_BUDGET = 896  # bytes; the tile is fwd.py's, for speed does not matter here


@triton.jit(do_not_specialize=RUNTIME_SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _fwd_v1_kernel(
    q_ptr, k_ptr, v_ptr, seq_lens_ptr,
    running_ptr,  # (B, H, Sq, Dv) fp32: the normalised output so far
    o_ptr,
    m_ptr,  # (B, H, Sq) fp32: maximum so far, in units of log2
    lse_ptr,  # (B, H, Sq) fp32: the sum so far, in the end the log-sum-exp
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    heads_q, group, seqlen_q, seqlen_k, window_left, window_right, scale,
    c: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // heads_q
    h = tl.program_id(0) % heads_q
    hk = h // group
    lengths = (None, None, seq_lens_ptr, seqlen_q, seqlen_k, 0, 0)
    _, _, n_queries, n_keys = seq_info(b, lengths, c.LENGTHS)
    mask = (n_queries, n_keys, n_keys - n_queries, window_left, window_right)
    queries = head_view(q_ptr, (stride_qb, stride_qh, stride_qm), (b, h, 0, n_queries), c.FORM, c)
    keys = head_view(k_ptr, (stride_kb, stride_kh, stride_kn), (b, hk, 0, n_keys), c.FORM, c)
    values = head_view(v_ptr, (stride_vb, stride_vh, stride_vn), (b, hk, 0, n_keys), c.FORM, c)
    outputs = head_view(o_ptr, (stride_ob, stride_oh, stride_om), (b, h, 0, seqlen_q), c.FORM, c)
    row = (b.to(tl.int64) * heads_q + h) * seqlen_q
    running_row = running_ptr + row * c.HEAD_DIM_V
    running = (running_row, b, h, 0, n_queries, c.HEAD_DIM_V)
    all_running = (running_row, b, h, 0, seqlen_q, c.HEAD_DIM_V)
    m_row = m_ptr + row
    l_row = lse_ptr + row
    scale_log2 = scale * LOG2E

    for row0 in tl.range(0, seqlen_q, c.BLOCK_M):
        offs_m = row0 + tl.arange(0, c.BLOCK_M)
        zeros = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
        store_tile(all_running, zeros, row0, c.HEAD_DIM_V, c.FORM)
        tl.store(m_row + offs_m, tl.full([c.BLOCK_M], float("-inf"), tl.float32), mask=offs_m < seqlen_q)
        tl.store(l_row + offs_m, tl.zeros([c.BLOCK_M], tl.float32), mask=offs_m < seqlen_q)
    tl.debug_barrier()  # the next loop's threads read what other threads wrote here

    for col0 in tl.range(0, n_keys, c.BLOCK_N):
        offs_n = col0 + tl.arange(0, c.BLOCK_N)
        k = load_tile(keys, col0, c.BLOCK_N, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
        v = load_tile(values, col0, c.BLOCK_N, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
        first, _, _, last = query_ranges(col0, mask, False, False, c)
        for row0 in tl.range(first, last, c.BLOCK_M, num_stages=1):
            offs_m = row0 + tl.arange(0, c.BLOCK_M)
            q = load_tile(queries, row0, c.BLOCK_M, c.HEAD_DIM, c.BLOCK_D, True, c.FORM, c)
            s = dot(q, tl.trans(k), c.PRECISION)  # [BLOCK_M, BLOCK_N]
            if c.NEGATE:
                s = -s
            visible = visible_pairs(offs_m[:, None], offs_n[None, :], mask, True, c)
            s = tl.where(visible, s * scale_log2, float("-inf"))

            m_old = tl.load(m_row + offs_m, mask=offs_m < n_queries, other=float("-inf"))
            l_old = tl.load(l_row + offs_m, mask=offs_m < n_queries, other=0.0)
            m_new = tl.maximum(m_old, tl.max(s, 1))
            m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - m_ref[:, None])  # [BLOCK_M, BLOCK_N]
            l_rescaled = l_old * tl.math.exp2(m_old - m_ref)
            l_new = l_rescaled + tl.sum(p, 1)
            o = load_tile(running, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
            norm = tl.where(l_new != 0.0, l_new, 1.0)
            o = (o * l_rescaled[:, None] + dot(round_to(p, v.dtype), v, c.PRECISION)) / norm[:, None]
            store_tile(running, o, row0, c.HEAD_DIM_V, c.FORM)
            tl.debug_barrier()  # every warp has read the old statistics of all rows
            tl.store(m_row + offs_m, m_new, mask=offs_m < n_queries)
            tl.store(l_row + offs_m, l_new, mask=offs_m < n_queries)
        tl.debug_barrier()

    for row0 in tl.range(0, seqlen_q, c.BLOCK_M):
        offs_m = row0 + tl.arange(0, c.BLOCK_M)
        o = load_tile(all_running, row0, c.BLOCK_M, c.HEAD_DIM_V, c.BLOCK_DV, True, c.FORM, c)
        store_tile(outputs, o, row0, c.HEAD_DIM_V, c.FORM)
        m = tl.load(m_row + offs_m, mask=offs_m < seqlen_q, other=0.0)
        total = tl.load(l_row + offs_m, mask=offs_m < seqlen_q, other=0.0)
        has_keys = total != 0.0  # False for rows that saw no key and rows beyond the sequence
        lse = tl.where(has_keys, (m + tl.math.log2(tl.where(has_keys, total, 1.0))) * LN2, float("inf"))
        tl.store(l_row + offs_m, lse, mask=offs_m < seqlen_q)


def make_launch(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Launch:
    """Return the launch that fills out and lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    rows = (problem.batch, problem.heads_q, problem.seqlen_q)
    scale, negate = softmax_scale(problem, tensors.sm_scale)
    tile = config(problem)
    running = q.new_empty((*rows, problem.head_dim_v), dtype=torch.float32)
    maxima = q.new_empty(rows, dtype=torch.float32)
    arguments = {
        **pointers(q=q, k=k, v=v, seq_lens=tensors.seq_lens, running=running, o=out, m=maxima, lse=lse),
        **strides(problem.layout, q=q, k=k, v=v, o=out),
        **fields_of(problem, "heads_q", "seqlen_q", "seqlen_k", "window_left", "window_right"),
        "group": problem.heads_q // problem.heads_kv,
        "scale": scale,
    }
    c, grid = constants(problem, tile, negate), problem.batch * problem.heads_q
    return Launch(_fwd_v1_kernel, grid, arguments, {"c": c}, schedule(tile))


def forward_pass(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> Pass:
    """Return the pass that fills out and lse."""
    launch = make_launch(problem, tensors, out, lse)
    return Pass([launch], [launch.arguments["running_ptr"], launch.arguments["m_ptr"]])


def config(problem: AttentionProblem) -> AttentionConfig:
    """Return the forward table's portable tile. It fits here, too: this kernel has no loads in flight."""
    tile = portable_config("fwd", problem)
    assert tile is not None, "unsupported() accepted a problem that no tile fits"
    return replace(tile, spill_budget=V1_SPILL_BUDGET)
