"""First step of the backward pass for Ascend: delta = rowsum(dout * out) - dlse (FlashAttention-2, section 3.1).

With dlse taken off, the log-sum-exp has a gradient too and the other kernels need not know.
"""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.attention.primitives import load_row, load_tile, packed_rows, store_row
from diyfa.backends.npu.runtime.compat import kernel


@kernel
def _bwd_preprocess_kernel(
    out_ptr, dout_ptr, dlse_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    delta_ptr,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    batch, heads_q, seqlen_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SEQ_LENS: tl.constexpr, VARLEN: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse. Packed sequences (VARLEN, `seqlen_q` rows in all) are one sample here: every
    row stands for itself. Rows before the first sequence and after the last one are neither read nor written."""
    PAD_DV: tl.constexpr = HEAD_DIM_V != BLOCK_DV
    samples = batch
    rows = seqlen_q
    if VARLEN:
        samples = 1
        start, _ = packed_rows(cu_seqlens_q_ptr, 0, seqlen_q)
        last, length = packed_rows(cu_seqlens_q_ptr, batch - 1, seqlen_q)
        rows = last + length - start
    row_blocks = tl.cdiv(rows, BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * samples * heads_q, tl.num_programs(0)):
        b = task // row_blocks // heads_q
        h = task // row_blocks % heads_q
        row0 = task % row_blocks * BLOCK_M
        sq = rows
        if SEQ_LENS:
            sq = tl.minimum(tl.load(seq_lens_ptr + b), rows)
        row_base = (b * heads_q + h).to(tl.int64) * seqlen_q
        out_base = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        dout_base = dout_ptr + b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh
        if VARLEN:
            row_base += start
            out_base += start.to(tl.int64) * stride_om
            dout_base += start.to(tl.int64) * stride_dom
        out_block = tl.make_block_ptr(
            out_base, (sq, HEAD_DIM_V), (stride_om, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
        )
        dout_block = tl.make_block_ptr(
            dout_base, (sq, HEAD_DIM_V), (stride_dom, 1), (row0, 0), (BLOCK_M, BLOCK_DV), (1, 0)
        )
        out = load_tile(out_block, PAD_DV).to(tl.float32)  # [BLOCK_M, BLOCK_DV]
        dout = load_tile(dout_block, PAD_DV).to(tl.float32)
        delta = tl.sum(out * dout, 1)
        if HAS_DLSE:
            delta = delta - load_row(dlse_ptr + row_base, row0, sq, BLOCK_M)
        store_row(delta_ptr + row_base, delta, row0, rows, BLOCK_M)
