"""Dropout's random numbers: Philox4x32-10 keyed by (seed, offset) and addressed by (b, h, i, j).

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) makes the
mask a pure function of the position, so every backend, tile size and device drops the same weights and the backward
pass regenerates the mask instead of storing it. This file is the definition: integer arithmetic on torch tensors,
materialised for tests and inspection. Kernels compute the same words inside their tiles.

Addressing: key = (low, high) words of `seed`; counter = (j // 4, i, b * 2**16 + h, offset); output word j % 4 decides
position j. A weight is kept when its word is at least `drop_threshold(p)`.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _mul_hi_lo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the 64-bit product of two 32-bit unsigned words.

    The int64 product may wrap to a negative number; its bits are still those of the unsigned product.
    """
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32.

    Args:
        counter: four int64 tensors that broadcast together, values in [0, 2**32).
        key: two integers in [0, 2**32).

    Returns:
        Four int64 tensors of values in [0, 2**32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        high1, low1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def drop_threshold(dropout_p: float) -> int:
    """Words below this are dropped: p of the 2**32 values."""
    return round(dropout_p * 2**32)


def keep_tile(
    batches: tuple[int, int],
    heads: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    dropout_p: float,
    seed: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Part of the mask of one call: samples, queries and keys from the first to before the second of each pair.

    Returns (samples, heads, queries, keys) bool, True where the weight is kept. Raises as `dropout_mask` does.
    """
    if not 0 <= seed < 2**64 or not 0 <= offset < 2**32:
        raise ValueError(f"dropout needs 0 <= seed < 2**64 and 0 <= offset < 2**32, got {seed} and {offset}")
    if batches[1] > 2**16 or heads > 2**16:
        raise ValueError(f"dropout needs batch and heads of at most 65536, got {batches[1]} and {heads}")
    first, last = columns[0] // 4, -(-columns[1] // 4)
    j4 = torch.arange(first, last, device=device)
    i = torch.arange(*rows, device=device)[:, None]
    head = torch.arange(heads, device=device)[:, None, None]
    b = torch.arange(*batches, device=device)[:, None, None, None]
    constant = torch.full((), offset, dtype=torch.int64, device=device)
    words = philox4x32((j4, i, b * 2**16 + head, constant), (seed & _MASK, seed >> 32))
    inside = slice(columns[0] - 4 * first, columns[1] - 4 * first)
    return torch.stack(words, dim=-1).flatten(-2)[..., inside] >= drop_threshold(dropout_p)


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    seed: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The mask of one call, (B, H, Sq, Sk) bool, True where the weight is kept.

    Raises ValueError when a number does not fit its place in the counter: seed below 2**64, offset below 2**32,
    batch and heads at most 2**16.
    """
    return keep_tile((0, batch), heads, (0, seqlen_q), (0, seqlen_k), dropout_p, seed, offset, device)
