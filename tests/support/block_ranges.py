"""Which keys a query sees, by definition, and small configurations that block ranges are checked on."""

from __future__ import annotations

from itertools import product

import torch

LENGTHS = [0, 1, 31, 33, 64, 70]
BOUNDS = [0, 1, 2, 13, 14, 15, 16, 17, 29, 30, 31, 32, 33, 46, 62, 65, 94]
FOREVER = 10**6


def sees(queries: torch.Tensor, keys: torch.Tensor, offset: torch.Tensor, left, right) -> torch.Tensor:
    """The definition: query i sees keys from i + offset - left to i + offset + right."""
    distance = keys - (queries + offset)
    return (distance >= -left) & (distance <= right)


def configurations(block_m: int, block_n: int, has_left: bool, has_right: bool, of_keys: bool) -> torch.Tensor:
    """Rows of (first row or column of the block, queries, keys, left, right), int32."""
    lefts, rights = (BOUNDS if has else [FOREVER] for has in (has_left, has_right))
    if has_left and has_right:
        lefts = BOUNDS[::3]
    block = block_n if of_keys else block_m
    found = [
        (start, sq, sk, left, right)
        for sq, sk in product(LENGTHS, LENGTHS)
        for start in range(0, sk if of_keys else sq, block)
        for left, right in product(lefts, rights)
    ]
    return torch.tensor(found, dtype=torch.int32)
