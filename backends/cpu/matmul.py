"""Blocked matrix product: each output tile accumulates over K in float32 and is rounded once.

float16 and bfloat16 operands are exact in float32, and so is each product of two. Only the rounding of the inputs
(float32 inputs computed in float16) and of the result differs from a float32 product.
"""

from __future__ import annotations

import torch

from diyfa.backends.cpu.configs import matmul_config
from diyfa.backends.cpu.tiles import without_autocast
from diyfa.problem import MatmulProblem


@without_autocast
def matmul(problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return c = a @ b, [M, N], of a [M, K] and b [K, N]."""
    config = matmul_config(problem)
    compute_dtype, out_dtype = getattr(torch, problem.compute_dtype), getattr(torch, problem.out_dtype)
    c = a.new_empty((problem.m, problem.n), dtype=out_dtype)
    for m in range(0, problem.m, config.block_m):
        for n in range(0, problem.n, config.block_n):
            rows, columns = slice(m, m + config.block_m), slice(n, n + config.block_n)
            acc = a.new_zeros(c[rows, columns].shape, dtype=torch.float32)  # [BLOCK_M, BLOCK_N]
            for k in range(0, problem.k, config.block_k):
                a_tile = a[rows, k : k + config.block_k].to(compute_dtype).float()  # [BLOCK_M, BLOCK_K]
                b_tile = b[k : k + config.block_k, columns].to(compute_dtype).float()  # [BLOCK_K, BLOCK_N]
                acc.addmm_(a_tile, b_tile)
            c[rows, columns] = acc
    return c
