"""Attention forward in the form of Ascend's Triton tutorials. Read it before fwd.py; diyfa itself never calls it.

q, k, v are contiguous and of one shape (B, H, S, D), in float16 or bfloat16; D is a multiple of 16 up to 128.

An AI core has one cube core, which multiplies matrices, and two vector cores, which do everything else. The compiler
splits the kernel between them, and the cube core runs ahead by a few tiles. Differences from a GPU kernel:

1. There is at most one program per cube core, and each loops over tasks: one block of query rows of one head. More
   programs would run in waves, and each would need its own memory between cube and vector cores.
2. A block pointer loads a tile, a rectangle of memory, in one transfer. K is loaded as stored and transposed in
   `tl.dot` at no cost. A block pointer with exchanged strides would compile, but to a wrong product.
3. Positions are compared in fp32, because the vector unit does not compare integers.

The rest is FlashAttention-2 (arXiv:2307.08691). Scores are never written to memory. Online softmax updates three values
per row from tile to tile: the maximum score m_i, the sum of exponentials l_i, and the output acc. When the maximum
grows, alpha = exp(old maximum - new maximum) rescales l_i and acc. After the last tile the output is acc / l_i.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import dot, dot_add, narrow
from diyfa.backends.npu.runtime.compat import INTERPRETED, kernel
from diyfa.backends.npu.runtime.launch import cube_programs
from diyfa.backends.npu.runtime.multibuffer import options_in_use
from diyfa.backends.npu.tables.configs import AttentionTile
from diyfa.problem import Launch

TILE = AttentionTile(64, 128)  # query rows, keys


@triton.jit
def tile_at(ptr, row0, seqlen, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return a block pointer to rows [row0, row0 + ROWS) of a head, [ROWS, HEAD_DIM]."""
    return tl.make_block_ptr(ptr, (seqlen, HEAD_DIM), (HEAD_DIM, 1), (row0, 0), (ROWS, HEAD_DIM), (1, 0))


@kernel
def _fwd_tutorial_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sm_scale, heads, seqlen,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(seqlen, BLOCK_M)
    for task in range(tl.program_id(0), heads * blocks, tl.num_programs(0)):
        row0 = task % blocks * BLOCK_M
        head = (task // blocks).to(tl.int64) * seqlen * HEAD_DIM
        q_block = tile_at(q_ptr + head, row0, seqlen, BLOCK_M, HEAD_DIM)
        k_block = tile_at(k_ptr + head, 0, seqlen, BLOCK_N, HEAD_DIM)
        v_block = tile_at(v_ptr + head, 0, seqlen, BLOCK_N, HEAD_DIM)
        q = tl.load(q_block, boundary_check=(0,), padding_option="zero")  # [BLOCK_M, HEAD_DIM]
        m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)  # finite: -inf minus -inf would be NaN
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        end = tl.minimum(seqlen, row0 + BLOCK_M) if CAUSAL else seqlen
        for n0 in range(0, end, BLOCK_N):
            k = tl.load(k_block, boundary_check=(0,), padding_option="zero")  # [BLOCK_N, HEAD_DIM]
            s = dot(q, tl.trans(k), INTERPRET) * sm_scale  # [BLOCK_M, BLOCK_N]
            cols = (tl.arange(0, BLOCK_N) + n0).to(tl.float32)[None, :]
            s = tl.where(cols < seqlen.to(tl.float32), s, float("-inf"))
            if CAUSAL:
                rows = (tl.arange(0, BLOCK_M) + row0).to(tl.float32)[:, None]
                s = tl.where(cols <= rows, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp(s - m_new[:, None])
            alpha = tl.exp(m_i - m_new)  # rescales sums that used the old maximum
            l_i = l_i * alpha + tl.sum(p, 1)
            v = tl.load(v_block, boundary_check=(0,), padding_option="zero")  # [BLOCK_N, HEAD_DIM]
            acc = dot_add(narrow(p, v.dtype, INTERPRET), v, acc * alpha[:, None], INTERPRET)
            m_i = m_new
            k_block = tl.advance(k_block, (BLOCK_N, 0))
            v_block = tl.advance(v_block, (BLOCK_N, 0))
        out = narrow(acc / l_i[:, None], out_ptr.dtype.element_ty, INTERPRET)
        tl.store(tile_at(out_ptr + head, row0, seqlen, BLOCK_M, HEAD_DIM), out, boundary_check=(0,))


def make_launch(
    arch: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, causal: bool
) -> Launch:
    """Return the launch on chip `arch` that fills `out`."""
    batch, heads, seqlen, head_dim = q.shape
    grid = cube_programs(arch, q.device, triton.cdiv(seqlen, TILE.block_m) * batch * heads)
    arguments: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out}
    arguments |= {"sm_scale": head_dim**-0.5, "heads": batch * heads, "seqlen": seqlen}
    constants = {"HEAD_DIM": head_dim, "BLOCK_M": TILE.block_m, "BLOCK_N": TILE.block_n, "CAUSAL": causal}
    constants["INTERPRET"] = INTERPRETED
    return Launch(_fwd_tutorial_kernel, grid, arguments, constants, options_in_use(TILE.compile_options(arch)))
