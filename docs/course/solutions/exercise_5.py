"""A kernel with a sliding window. Set TRITON_INTERPRET=1 before Triton is imported, to run it on a CPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def windowed_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, seqlen, window,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64) * seqlen * HEAD_DIM
    offs_m = row0 + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q_offsets = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + head + q_offsets, mask=offs_m[:, None] < seqlen, other=0.0)
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)  # finite: a row may see no key of the first block
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    first = tl.maximum(row0 - window, 0) // BLOCK_N * BLOCK_N  # the first row sees the earliest key
    last = tl.minimum(row0 + BLOCK_M, seqlen)
    for start_n in range(first, last, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        kv_offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(k_ptr + head + kv_offsets, mask=offs_n[:, None] < seqlen, other=0.0)
        v = tl.load(v_ptr + head + kv_offsets, mask=offs_n[:, None] < seqlen, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        distance = offs_m[:, None] - offs_n[None, :]
        s = tl.where((distance >= 0) & (distance <= window), s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_new
    out = acc / l_i[:, None]
    tl.store(out_ptr + head + q_offsets, out.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < seqlen)


def windowed_attention(q, k, v, window):
    batch, heads, seqlen, head_dim = q.shape
    out = torch.empty_like(q)
    grid = (triton.cdiv(seqlen, 32), batch * heads)
    windowed_kernel[grid](q, k, v, out, head_dim**-0.5, seqlen, window, HEAD_DIM=head_dim, BLOCK_M=32, BLOCK_N=32)
    return out


solution = windowed_attention
