"""The epilogue of a product: bias and activation of a tile of float32 sums, before it is rounded.

The portable kernels and the Hopper kernel call it, so it has no layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of x: None, "relu", "gelu" (by the error function) or "silu". NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def add_bias(x, bias_ptr, stride_bias, offs_n, N):
    """Return x [.., columns] plus the biases of the columns `offs_n`, of which those below N exist."""
    bias = tl.load(bias_ptr + offs_n.to(tl.int64) * stride_bias, mask=offs_n < N, other=0.0).to(tl.float32)
    return x + bias[None, :]
