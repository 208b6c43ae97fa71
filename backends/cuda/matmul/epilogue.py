"""The epilogue of a product: descales, bias and activation of a tile of float32 sums, before it is rounded.

The portable kernels and the Hopper kernel call it, so it has no layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normal_below(x):
    """Return the probability that a standard normal number is below x, which is (1 + erf(x / sqrt(2))) / 2.

    By the approximation of erfc in Press et al., Numerical Recipes ("erfcc"), whose relative error is below 1.2e-7
    everywhere. The library's erf has two branches, of which a tile's elements take both: they spill 400 bytes.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    series = -0.82215223 + t * 0.17087277
    series = -1.13520398 + t * (1.48851587 + t * series)
    series = -0.18628806 + t * (0.27886807 + t * series)
    series = 0.37409196 + t * (0.09678418 + t * series)
    series = -1.26551223 + t * (1.00002368 + t * series)
    tail = 0.5 * t * tl.exp(series - z * z)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of x: None, "relu", "gelu" (by the error function) or "silu". NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = x * _normal_below(x)
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _load_vector(ptr, stride, offs, size, COUNT: tl.constexpr):
    """Return elements `offs` of a vector, of which those below `size` exist. `offs`: [COUNT], or the first of COUNT."""
    if not offs.type.is_block():
        offs = offs + tl.arange(0, COUNT)
    return tl.load(ptr + offs.to(tl.int64) * stride, mask=offs < size, other=0.0).to(tl.float32)


@triton.jit
def finish(x, vectors, offs_m, offs_n, M, N, ACTIVATION: tl.constexpr):
    """Return sums x [rows, columns] after the epilogue. Rows `offs_m` below M and columns `offs_n` below N exist.

    `offs_m`, `offs_n`: vectors, which Gluon needs because they have layouts, or the first row and the first column.
    `vectors`: address, or None, and stride of the bias of columns, the descales of rows, and the descales of columns.
    """
    bias_ptr, stride_bias, a_descale_ptr, stride_a_descale, b_descale_ptr, stride_b_descale = vectors
    if a_descale_ptr is not None:
        x = x * _load_vector(a_descale_ptr, stride_a_descale, offs_m, M, x.shape[0])[:, None]
    if b_descale_ptr is not None:
        x = x * _load_vector(b_descale_ptr, stride_b_descale, offs_n, N, x.shape[1])[None, :]
    if bias_ptr is not None:
        x = x + _load_vector(bias_ptr, stride_bias, offs_n, N, x.shape[1])[None, :]
    return activate(x, ACTIVATION)
