"""Gradient of the sinks for Ascend, on the vector cores. A task is one head."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from diyfa.backends.npu.attention.vector_io import load_values
from diyfa.backends.npu.runtime.compat import Constants, kernel


@dataclass(frozen=True)
class SinkGradientConstants(Constants):
    """Constants of `_bwd_dsinks_kernel`."""

    block_m: int


@kernel
def _bwd_dsinks_kernel(sinks_ptr, lse_ptr, delta_ptr, dsinks_ptr, batch, heads_q, seqlen_q, c: tl.constexpr):
    """Write dsink = -sum over (b, i) of exp(sink - lse) · delta: a sink takes weight from a row and brings no value.

    Packed sequences are one sample here. Rows in no sequence have lse inf, and their delta may be anything.
    """
    for h in range(tl.program_id(0), heads_q, tl.num_programs(0)):
        sink = tl.load(sinks_ptr + h)
        total = tl.zeros([c.BLOCK_M], tl.float32)
        row_blocks = tl.cdiv(seqlen_q, c.BLOCK_M)
        for step in range(row_blocks * batch):
            b = step // row_blocks
            row0 = (step % row_blocks) * c.BLOCK_M
            base = (b * heads_q + h).to(tl.int64) * seqlen_q
            lse = load_values(lse_ptr + base, row0, seqlen_q, c.BLOCK_M)
            delta = load_values(delta_ptr + base, row0, seqlen_q, c.BLOCK_M)  # zero beyond the rows
            is_row = ((tl.arange(0, c.BLOCK_M) + row0).to(tl.float32) < seqlen_q.to(tl.float32)) & (lse != float("inf"))
            total -= tl.where(is_row, tl.exp(sink - lse) * delta, 0.0)
        tl.store(dsinks_ptr + h, tl.sum(total, 0))
