"""First step of the backward pass for Ascend: delta = rowsum(dout * out) - dlse (FlashAttention-2, section 3.1).

Subtracting dlse accounts for the gradient of the log-sum-exp, so the other kernels do not need dlse.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.primitives import packed_rows
from diyfa.backends.npu.attention.vector_io import load_block, load_values, store_values
from diyfa.backends.npu.runtime.compat import Constants, kernel


@dataclass(frozen=True)
class PreprocessConstants(Constants):
    """Constants of `_bwd_preprocess_kernel`."""

    head_dim_v: int
    block_dv: int
    block_m: int
    seq_lens: bool
    varlen: bool
    has_dlse: bool


@kernel
def _bwd_preprocess_kernel(
    out_ptr, dout_ptr, dlse_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    delta_ptr,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    batch, heads_q, seqlen_q,
    c: tl.constexpr,
):  # fmt: skip
    """Write delta = rowsum(dout * out) - dlse.

    Rows are independent, so packed sequences (VARLEN, `seqlen_q` rows in all) are one sample here. Rows before the
    first sequence and after the last one are neither read nor written."""
    samples = batch
    rows = seqlen_q
    if c.VARLEN:
        samples = 1
        start, _ = packed_rows(cu_seqlens_q_ptr, 0, seqlen_q)
        last, length = packed_rows(cu_seqlens_q_ptr, batch - 1, seqlen_q)
        rows = last + length - start
    row_blocks = tl.cdiv(rows, c.BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * samples * heads_q, tl.num_programs(0)):
        b = task // row_blocks // heads_q
        h = task // row_blocks % heads_q
        row0 = task % row_blocks * c.BLOCK_M
        sq = rows
        if c.SEQ_LENS:
            sq = tl.minimum(tl.load(seq_lens_ptr + b), rows)
        row_base = (b * heads_q + h).to(tl.int64) * seqlen_q
        out_base = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        dout_base = dout_ptr + b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh
        if c.VARLEN:
            row_base += start
            out_base += start.to(tl.int64) * stride_om
            dout_base += start.to(tl.int64) * stride_dom
        out = load_block(out_base, sq, stride_om, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
        dout = load_block(dout_base, sq, stride_dom, row0, c.HEAD_DIM_V, c.BLOCK_M, c.BLOCK_DV)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        if c.HAS_DLSE:
            delta = delta - load_values(dlse_ptr + row_base, row0, sq, c.BLOCK_M)
        store_values(delta_ptr + row_base, delta, row0, rows, c.BLOCK_M)
