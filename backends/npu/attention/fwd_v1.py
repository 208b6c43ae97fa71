"""FlashAttention forward (Dao et al. 2022, arXiv:2205.14135, algorithm 1) on Ascend: key/value blocks outermost.

A task is one whole head. Its program loads each block of keys and values once. One pass then visits every block of
queries that can see it. The output, sum and maximum of all rows are in global memory, and each visit reads,
renormalises and writes them. They are fp32, the output too: rounding it at every visit would break the accuracy
contract. Read this kernel beside fwd.py, which exchanges the loops and keeps all three on the chip.

* The running output, sum and maximum are passed twice, as pointers to read and pointers to write the same memory. If
  the compiler sees one tensor both loaded and stored in a loop, it neither splits the loop over the two vector cores
  nor pipelines it. A pass visits each row once, so within a pass the order does not matter.
* A barrier ends each pass, because the next pass reads what it wrote. Each vector core always holds the same half of a
  tile's rows. So it reads only what it wrote itself, and a barrier of its own pipes is enough.
* Separate launches set zeros before the passes, and round the output and form lse after them. They divide the rows
  differently, and only the end of a launch makes one core wait for another core's writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.launch import AttentionConstants, call_values
from diyfa.backends.npu.attention.primitives import (
    block_at,
    dot,
    effective_lengths,
    load_row,
    load_tile,
    mask_tile,
    narrow,
    row_range,
    running_max,
    store_row,
    store_tile,
    tile_needs_mask,
)
from diyfa.backends.npu.attention.vector_io import load_block, load_values, store_block, store_values
from diyfa.backends.npu.runtime.compat import Constants, kernel
from diyfa.backends.npu.runtime.launch import (
    bind_launch,
    cube_programs,
    device_guard,
    run,
    tensor_arguments,
    vector_programs,
)
from diyfa.backends.npu.tables.configs import family_options, preprocess_rows
from diyfa.backends.npu.tables.configs_v1 import v1_tile
from diyfa.problem import AttentionProblem, AttentionTensors, Launch

# Maximum of a row that has seen no key. It is finite, so that exp(-inf - m) is 0 and not NaN.
LOWEST = tl.constexpr(-3.0e38)


@kernel
def _fwd_v1_kernel(
    q_ptr, k_ptr, v_ptr, seq_lens_ptr,
    running_ptr,  # (B, H, Sq, Dv) fp32: the normalised output so far, 0 at first
    m_ptr,  # (B, H, Sq) fp32: the maximum so far, unset at first
    l_ptr,  # (B, H, Sq) fp32: the sum so far, 0 at first
    new_running_ptr, new_m_ptr, new_l_ptr,  # the same memory, to write
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    sm_scale, batch, heads_q, heads_kv, seqlen_q, seqlen_k, window_left, window_right,
    c: tl.constexpr,
):  # fmt: skip
    PAD_D: tl.constexpr = c.HEAD_DIM != c.BLOCK_D
    PAD_DV: tl.constexpr = c.HEAD_DIM_V != c.BLOCK_DV
    group = heads_q // heads_kv
    for bh in range(tl.program_id(0), batch * heads_q, tl.num_programs(0)):
        b = bh // heads_q
        h = bh % heads_q
        hk = h // group
        sq, sk = effective_lengths(seq_lens_ptr, b, seqlen_q, seqlen_k, c.SEQ_LENS)
        q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        k_base = k_ptr + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
        v_base = v_ptr + b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh
        row_base = (b * heads_q + h).to(tl.int64) * seqlen_q
        running_base = row_base * c.HEAD_DIM_V
        for n0 in range(0, sk, c.BLOCK_N):
            k_block = block_at(k_base, sk, stride_kn, n0, 0, c.HEAD_DIM, c.BLOCK_N, c.BLOCK_D)
            v_block = block_at(v_base, sk, stride_vn, n0, 0, c.HEAD_DIM_V, c.BLOCK_N, c.BLOCK_DV)
            k = load_tile(k_block, PAD_D)  # [BLOCK_N, BLOCK_D]
            v = load_tile(v_block, PAD_DV)  # [BLOCK_N, BLOCK_DV]
            lo, hi = row_range(n0, sq, sk, window_left, window_right, c)
            for row0 in range(lo, hi, c.BLOCK_M):
                q_block = block_at(q_base, sq, stride_qm, row0, 0, c.HEAD_DIM, c.BLOCK_M, c.BLOCK_D)
                q = load_tile(q_block, PAD_D)  # [BLOCK_M, BLOCK_D]
                s = dot(q, tl.trans(k), c.INTERPRET) * sm_scale  # [BLOCK_M, BLOCK_N]
                if tile_needs_mask(row0, n0, sq, sk, window_left, window_right, c):
                    # Not `apply_mask`: with it the 950's compiler does not finish at D = 256.
                    rel = (tl.arange(0, c.BLOCK_M)[:, None] - tl.arange(0, c.BLOCK_N)[None, :]).to(tl.float32)
                    rows = tl.arange(0, c.BLOCK_M)[:, None].to(tl.float32)
                    s = mask_tile(s, rel, rows, float("-inf"), row0, n0, sq, sk, window_left, window_right, c)
                l_old = load_row(l_ptr + row_base, row0, sq, c.BLOCK_M)
                m_old = tl.where(l_old == 0.0, LOWEST, load_row(m_ptr + row_base, row0, sq, c.BLOCK_M))
                m_new = running_max(m_old, tl.max(s, 1), c.INTERPRET)
                p = tl.exp(s - m_new[:, None])
                l_rescaled = l_old * tl.exp(m_old - m_new)
                l_new = l_rescaled + tl.sum(p, 1)
                running_block = block_at(
                    running_ptr + running_base, sq, c.HEAD_DIM_V, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV
                )
                new_running_block = block_at(
                    new_running_ptr + running_base, sq, c.HEAD_DIM_V, row0, 0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV
                )
                o = load_tile(running_block, PAD_DV)  # [BLOCK_M, BLOCK_DV]
                norm = tl.where(l_new == 0.0, 1.0, l_new)
                pv = dot(narrow(p, v.dtype, c.INTERPRET), v, c.INTERPRET)  # [BLOCK_M, BLOCK_DV]
                store_tile(new_running_block, (o * l_rescaled[:, None] + pv) / norm[:, None], PAD_DV)
                store_row(new_m_ptr + row_base, m_new, row0, sq, c.BLOCK_M)
                store_row(new_l_ptr + row_base, l_new, row0, sq, c.BLOCK_M)
            tl.debug_barrier()


@dataclass(frozen=True)
class FinishConstants(Constants):
    """Constants of `_fwd_v1_finish_kernel`."""

    head_dim_v: int
    block_dv: int
    block_m: int
    interpret: bool


@kernel
def _fwd_v1_finish_kernel(
    running_ptr, out_ptr, m_ptr,
    lse_ptr,  # (B, H, Sq) fp32: the sums; the kernel replaces them by the log-sum-exp
    stride_ob, stride_oh, stride_om,
    batch, heads_q, seqlen_q,
    c: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(seqlen_q, c.BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * batch * heads_q, tl.num_programs(0)):
        row0 = (task % row_blocks) * c.BLOCK_M
        bh = task // row_blocks
        row_base = bh.to(tl.int64) * seqlen_q
        o = load_block(  # [BLOCK_M, BLOCK_DV]
            running_ptr + row_base * c.HEAD_DIM_V, seqlen_q, c.HEAD_DIM_V, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV
        )
        out_base = out_ptr + (bh // heads_q).to(tl.int64) * stride_ob + (bh % heads_q).to(tl.int64) * stride_oh
        out = narrow(o, out_ptr.dtype.element_ty, c.INTERPRET)
        store_block(out_base, out, seqlen_q, stride_om, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
        total = load_values(lse_ptr + row_base, row0, seqlen_q, c.BLOCK_M)
        m = load_values(m_ptr + row_base, row0, seqlen_q, c.BLOCK_M)
        # Rows that saw no key and rows beyond the sequence keep output 0, its initial value, and get lse +inf.
        empty = total == 0.0
        lse = tl.where(empty, float("inf"), m + tl.log(tl.where(empty, 1.0, total)))
        store_values(lse_ptr + row_base, lse, row0, seqlen_q, c.BLOCK_M)


def make_launches(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor
) -> tuple[Launch, Launch]:
    """Return the launch of the passes, which needs zeros in lse, and the launch that finishes out and lse."""
    tile, rows, heads = v1_tile(problem), preprocess_rows(problem), problem.batch * problem.heads_q
    running = lse.new_zeros((*lse.shape, problem.head_dim_v))
    state = {"running_ptr": running, "m_ptr": torch.empty_like(lse), "l_ptr": lse}
    values = {
        **call_values(problem, tensors, "fwd"),
        **tensor_arguments(problem.layout, out=out),
        **state,
        **{f"new_{name}": x for name, x in state.items()},
        "lse_ptr": lse,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    cores = cube_programs(problem.arch, lse.device, heads)
    passes = bind_launch(_fwd_v1_kernel, AttentionConstants, cores, values, tile.compile_options(problem.arch))
    cores = vector_programs(problem.arch, lse.device, triton.cdiv(problem.seqlen_q, rows) * heads)
    options = family_options(problem.arch)
    return passes, bind_launch(_fwd_v1_finish_kernel, FinishConstants, cores, values | {"BLOCK_M": rows}, options)


def attention_fwd(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch the kernels, which fill out (q's shape with v's head dim) and lse (B, H, Sq), fp32."""
    lse.zero_()
    with device_guard(tensors.q):
        for launch in make_launches(problem, tensors, out, lse):
            run(launch)
