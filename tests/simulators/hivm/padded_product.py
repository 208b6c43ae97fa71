"""The smallest kernel that shows a product whose padded columns are not written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def padded_product(
    q_ptr, k_ptr, s_ptr, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Compute s [BLOCK_M, BLOCK_N] = q [BLOCK_M, HEAD_DIM] @ k [keys, HEAD_DIM]^T, keys <= BLOCK_N."""
    q_block = tl.make_block_ptr(q_ptr, (BLOCK_M, HEAD_DIM), (HEAD_DIM, 1), (0, 0), (BLOCK_M, HEAD_DIM), (1, 0))
    k_block = tl.make_block_ptr(k_ptr, (keys, HEAD_DIM), (HEAD_DIM, 1), (0, 0), (BLOCK_N, HEAD_DIM), (1, 0))
    s_block = tl.make_block_ptr(s_ptr, (BLOCK_M, BLOCK_N), (BLOCK_N, 1), (0, 0), (BLOCK_M, BLOCK_N), (1, 0))
    q = tl.load(q_block)
    k = tl.load(k_block, boundary_check=(0,), padding_option="zero")
    tl.store(s_block, tl.dot(q, tl.trans(k)))
