"""Arithmetic work of operations, as the attention papers count it."""

from __future__ import annotations

BACKWARD_FACTOR = 2.5  # five products of the forward's size against two


def attention_flops(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: float, causal: bool = False
) -> float:
    """Return the floating-point operations of the forward pass: 4·B·H·Sq·Sk·D, half of that if causal.

    The count is that of Dao 2023, arXiv:2307.08691, 4.1. If V has another head dim than Q and K, D is the mean of both.
    """
    flops = 4.0 * batch * heads * seqlen_q * seqlen_k * head_dim
    return flops / 2 if causal else flops


def matmul_flops(m: int, n: int, k: int) -> float:
    """Return the floating-point operations of (M, K) @ (K, N)."""
    return 2.0 * m * n * k


def tflops(flops: float, ms: float) -> float:
    """Return the TFLOP/s of `flops` operations in `ms` milliseconds."""
    return flops / ms / 1e9
