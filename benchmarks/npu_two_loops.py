"""Attention for Ascend in the form that tutorials teach, to compare ours with: never launched, only compiled.

What makes the form: one program for each block of query rows, which walks over every batch and head; two loops over
the keys in the causal case, one over the blocks before the diagonal without a mask, one over the diagonal block with an
additive mask; scores in powers of two; sizes that fill whole tiles, so nothing is masked at the ends. It follows the
description in the Triton-Ascend tutorial "Fused Attention" (after the Triton tutorial of that name), written anew, with
the sizes as run-time arguments so that its loops are as general as ours.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from diyfa.backends.npu.compiler import specs

LOG2_E = tl.constexpr(1.4426950408889634)
# Query rows x keys for each mask and head dim. Full attention: the largest of the tutorial, whose keys never outnumber
# the head dim; npu_tiles.py adds ours. Causal: the diagonal loop needs rows to be a multiple of keys, so the largest
# square and the largest 2:1 tile that compile.
TILES = {
    "full": {64: ((32, 64),), 128: ((64, 128),), 256: ((32, 256),)},
    "causal": {64: ((64, 64), (128, 64)), 128: ((64, 64), (128, 64)), 256: ((32, 32), (64, 32))},
}


@triton.jit
def _walk(
    acc, m_i, l_i, q, k_block, v_block, row0, lo, hi, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """One of the two loops: keys [lo, hi) in tiles of BLOCK_N."""
    k_block = tl.advance(k_block, (lo, 0))
    v_block = tl.advance(v_block, (lo, 0))
    rows = row0 + tl.arange(0, BLOCK_M)
    for n0 in range(lo, hi, BLOCK_N):
        s = tl.dot(q, tl.trans(tl.load(k_block))) * scale  # [BLOCK_M, BLOCK_N]
        if DIAGONAL:
            visible = rows[:, None] >= (n0 + tl.arange(0, BLOCK_N))[None, :]
            s = s + tl.where(visible, 0.0, -1.0e6)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_block)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
        k_block = tl.advance(k_block, (BLOCK_N, 0))
        v_block = tl.advance(v_block, (BLOCK_N, 0))
    return acc, m_i, l_i


@triton.jit(do_not_specialize=["stride_b", "stride_h", "stride_m", "batch", "heads", "seqlen"])
def _two_loops_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sm_scale, stride_b, stride_h, stride_m, batch, heads, seqlen,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0) * BLOCK_M
    for task in range(batch * heads):
        start = (task // heads).to(tl.int64) * stride_b + (task % heads).to(tl.int64) * stride_h
        q_block = tl.make_block_ptr(
            q_ptr + start, (seqlen, HEAD_DIM), (stride_m, 1), (row0, 0), (BLOCK_M, HEAD_DIM), (1, 0)
        )
        k_block = tl.make_block_ptr(
            k_ptr + start, (seqlen, HEAD_DIM), (stride_m, 1), (0, 0), (BLOCK_N, HEAD_DIM), (1, 0)
        )
        v_block = tl.make_block_ptr(
            v_ptr + start, (seqlen, HEAD_DIM), (stride_m, 1), (0, 0), (BLOCK_N, HEAD_DIM), (1, 0)
        )
        out_block = tl.make_block_ptr(
            out_ptr + start, (seqlen, HEAD_DIM), (stride_m, 1), (row0, 0), (BLOCK_M, HEAD_DIM), (1, 0)
        )
        m_i = tl.zeros([BLOCK_M], tl.float32) - float("inf")
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        scale = sm_scale * LOG2_E
        q = tl.load(q_block)  # [BLOCK_M, HEAD_DIM]
        if CAUSAL:
            acc, m_i, l_i = _walk(acc, m_i, l_i, q, k_block, v_block, row0, 0, row0, scale, BLOCK_M, BLOCK_N, False)
            acc, m_i, l_i = _walk(
                acc, m_i, l_i, q, k_block, v_block, row0, row0, row0 + BLOCK_M, scale, BLOCK_M, BLOCK_N, True
            )
        else:
            acc, m_i, l_i = _walk(acc, m_i, l_i, q, k_block, v_block, row0, 0, seqlen, scale, BLOCK_M, BLOCK_N, False)
        lse = m_i + tl.math.log2(l_i)
        tl.store(lse_ptr + task * seqlen + row0 + tl.arange(0, BLOCK_M), lse)
        tl.store(out_block, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty))


def job(head_dim: int, causal: bool, tile: tuple[int, int], options: dict[str, Any]) -> specs.Job:
    """The kernel as a job of the ahead-of-time compiler, float16."""
    names = _two_loops_kernel.arg_names
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp16")
    signature = {**dict.fromkeys(names, "i32"), **tensors, "lse_ptr": "*fp32", "sm_scale": "fp32"}
    constants = {"HEAD_DIM": head_dim, "BLOCK_M": tile[0], "BLOCK_N": tile[1], "CAUSAL": causal}
    mask = "causal" if causal else "full"
    return specs.Job(
        "two loops", f"float16 D={head_dim} {mask} {tile[0]}x{tile[1]}", _two_loops_kernel, signature, constants,
        options, gated=False,
    )  # fmt: skip
