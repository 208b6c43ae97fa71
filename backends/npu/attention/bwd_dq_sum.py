"""The end of the fused backward for Ascend: dq, summed over the parts that bwd_dkdv.py left, in their order."""

from __future__ import annotations

import triton.language as tl

from diyfa.backends.npu.attention.primitives import load_tile, narrow, store_tile
from diyfa.backends.npu.runtime.compat import kernel


@kernel
def _bwd_dq_sum_kernel(
    parts_ptr,  # (shares, ...) fp32
    dq_ptr,
    stride_part, stride_pb, stride_ph, stride_pm, stride_dqb, stride_dqh, stride_dqm,
    shares, grad_scale, batch, heads_q, seqlen_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq = grad_scale times the sum of all parts. Packed sequences are one sample here: every row stands for itself."""
    PAD_D: tl.constexpr = HEAD_DIM != BLOCK_D
    row_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    for task in range(tl.program_id(0), row_blocks * batch * heads_q, tl.num_programs(0)):
        b = task // row_blocks // heads_q
        h = task // row_blocks % heads_q
        row0 = task % row_blocks * BLOCK_M
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        part_base = parts_ptr + b.to(tl.int64) * stride_pb + h.to(tl.int64) * stride_ph
        for share in range(shares):
            part_block = tl.make_block_ptr(
                part_base + stride_part.to(tl.int64) * share, (seqlen_q, HEAD_DIM), (stride_pm, 1), (row0, 0),
                (BLOCK_M, BLOCK_D), (1, 0),
            )  # fmt: skip
            total += load_tile(part_block, PAD_D)
        dq_base = dq_ptr + b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh
        dq_block = tl.make_block_ptr(
            dq_base, (seqlen_q, HEAD_DIM), (stride_dqm, 1), (row0, 0), (BLOCK_M, BLOCK_D), (1, 0)
        )
        store_tile(dq_block, narrow(total * grad_scale, dq_ptr.dtype.element_ty, INTERPRET), PAD_D)
