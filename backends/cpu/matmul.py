"""Blocked matrix product: each output tile accumulates over K in float32 and is rounded once.

float8, float16 and bfloat16 operands are exact in float32, and so is each product of two. Only the rounding of the
inputs (float32 inputs computed in float16) and of the result differs from a float32 product.
"""

from __future__ import annotations

import torch

from diyfa.backends.cpu.configs import matmul_config
from diyfa.backends.cpu.tiles import without_autocast
from diyfa.problem import MatmulProblem, MatmulTensors

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.nn.functional.relu,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),  # PyTorch's own makes NaN of inf on some CPUs
    "silu": torch.nn.functional.silu,
}


@without_autocast
def matmul(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor) -> None:
    """Fill c [M, N] with activation((a @ b) * a_descale * b_descale + bias)."""
    a, b, bias, a_descale, b_descale = tensors
    a_descale = None if a_descale is None else a_descale.reshape(-1, 1).expand(problem.m, 1)
    b_descale = None if b_descale is None else b_descale.reshape(1, -1).expand(1, problem.n)
    config = matmul_config(problem)
    compute_dtype, activate = getattr(torch, problem.compute_dtype), _ACTIVATIONS[problem.activation]
    for m in range(0, problem.m, config.block_m):
        for n in range(0, problem.n, config.block_n):
            rows, columns = slice(m, m + config.block_m), slice(n, n + config.block_n)
            acc = a.new_zeros(c[rows, columns].shape, dtype=torch.float32)  # [BLOCK_M, BLOCK_N]
            for k in range(0, problem.k, config.block_k):
                a_tile = a[rows, k : k + config.block_k].to(compute_dtype).float()  # [BLOCK_M, BLOCK_K]
                b_tile = b[k : k + config.block_k, columns].to(compute_dtype).float()  # [BLOCK_K, BLOCK_N]
                acc.addmm_(a_tile, b_tile)
            if a_descale is not None:
                acc *= a_descale[rows]
            if b_descale is not None:
                acc *= b_descale[:, columns]
            if bias is not None:
                acc += bias[columns].float()
            c[rows, columns] = activate(acc)
