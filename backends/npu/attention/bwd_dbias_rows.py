"""Gradient of an attn_bias that is the same for all keys, for Ascend. It uses the vector cores and one value per row.

Such a bias is added to all scores of a row, so it cancels in the softmax. Two things depend on it: the weight of a
sink, to which it is not added, and the log-sum-exp, which grows with it. With delta = rowsum(dout * out) - dlse the sum
of p · (dp - delta) over keys is

    rowsum(dout * out) - (1 - p_sink) · delta  =  p_sink · delta + dlse

so no matrix product is needed. A sum over tiles of scores would use only one of the two vector cores: the compiler
keeps a kernel that reduces a whole tile to one value on one of them.

Rows that see no key, but a sink, need care. Their sum over keys is 0. If the sink is not finite, their log-sum-exp is
NaN, and the right side of the equation would be NaN, too. Such rows are left out. The kernel finds them, whatever the
mask, by their dq: it is 0 in a row that sees no key, while in a row that sees keys a log-sum-exp of NaN makes it NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.primitives import load_lse, narrow
from diyfa.backends.npu.attention.vector_io import load_block, load_values, store_values
from diyfa.backends.npu.runtime.compat import Constants, kernel

DQ_WIDTH = tl.constexpr(16)  # columns of dq that a program reads


@dataclass(frozen=True)
class BiasRowsConstants(Constants):
    """Constants of `_bwd_dbias_rows_kernel`."""

    block_m: int
    dbias: str  # "q": a value for each row; "1": one for all
    sinks: bool
    has_dlse: bool
    dq_columns: int  # columns of dq that are read, at most DQ_WIDTH: enough to tell 0 from NaN
    interpret: bool


@kernel
def _bwd_dbias_rows_kernel(
    sinks_ptr, lse_ptr, delta_ptr, dlse_ptr, dq_ptr,
    dbias_ptr,
    stride_dqb, stride_dqh, stride_dqm, stride_dbias_b, stride_dbias_h,
    batch, heads_q, seqlen_q, bias_batch, bias_heads,
    c: tl.constexpr,
):  # fmt: skip
    """Write dbias: the sum of exp(sink - lse) · delta + dlse over the dimensions, besides keys, that were broadcast.

    A task is BLOCK_M values of dbias (DBIAS "q") or one value ("1"). It loops over the blocks of BLOCK_M rows that
    these values were broadcast to. `bias_batch`, `bias_heads`: number of samples and heads of the bias. Rows that see
    neither key nor sink have lse inf, and their dlse may be anything: they add 0. A NaN in delta or lse of one row does
    not reach the values of others.
    """
    row_blocks = tl.cdiv(seqlen_q, c.BLOCK_M)
    bias_row_blocks = row_blocks if c.DBIAS == "q" else 1
    samples_per_bias = batch // bias_batch
    heads_per_bias = heads_q // bias_heads
    row_blocks_per_bias = row_blocks // bias_row_blocks  # blocks of rows that one task adds up, in one head
    for task in range(tl.program_id(0), bias_batch * bias_heads * bias_row_blocks, tl.num_programs(0)):
        bias_m = task % bias_row_blocks
        bias_h = task // bias_row_blocks % bias_heads
        bias_b = task // bias_row_blocks // bias_heads
        total = tl.zeros([c.BLOCK_M], tl.float32)
        for step in range(samples_per_bias * heads_per_bias * row_blocks_per_bias):
            row0 = (bias_m + step % row_blocks_per_bias) * c.BLOCK_M
            h = bias_h + step // row_blocks_per_bias % heads_per_bias
            b = bias_b + step // row_blocks_per_bias // heads_per_bias
            base = (b * heads_q + h).to(tl.int64) * seqlen_q
            lse = load_lse(lse_ptr + base, row0, seqlen_q, c.BLOCK_M)  # inf beyond the rows
            delta = load_values(delta_ptr + base, row0, seqlen_q, c.BLOCK_M)
            sink = float("-inf")
            if c.SINKS:
                sink = tl.load(sinks_ptr + h)
            summand = tl.exp(sink - lse) * delta
            if c.HAS_DLSE:
                summand += load_values(dlse_ptr + base, row0, seqlen_q, c.BLOCK_M)
            if c.SINKS:
                dq_base = dq_ptr + b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
                dq = load_block(dq_base, seqlen_q, stride_dqm, row0, c.DQ_COLUMNS, c.BLOCK_M, DQ_WIDTH)
                sees_only_sink = (tl.sum(dq.to(tl.float32), 1) == 0.0) & (lse != lse)
                summand = tl.where(sees_only_sink, 0.0, summand)
            total += tl.where(lse != float("inf"), summand, 0.0)
        out_base = dbias_ptr + bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h
        dtype = dbias_ptr.dtype.element_ty
        if c.DBIAS == "q":
            store_values(out_base, narrow(total, dtype, c.INTERPRET), bias_m * c.BLOCK_M, seqlen_q, c.BLOCK_M)
        else:
            tl.store(out_base, narrow(tl.sum(total, 0), dtype, c.INTERPRET))
