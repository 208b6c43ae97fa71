"""Dropout's random numbers: a pure function of (seed, offset, b, h, i, j) says whether a softmax weight is kept.

Every backend, tile size and device drops the same weights, and the backward pass recomputes the mask instead of storing
it. This file is the definition, in integer arithmetic on torch tensors; kernels compute the same bits inside their
tiles. A generator such as Philox in every element would cost over a hundred operations for each score, and on Ascend
all of its wide products would leave the vector unit. So the strong generator runs once for each head, a short hash once
for each row and column, and an element costs two additions, one product and one comparison.

Definition. All words have 32 bits, `+` and `*` are taken mod 2**32, `>>` shifts zeros in, `^` is exclusive or.

1. Head keys: four words from ten rounds of Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
   3", section 3.3) with key = (seed mod 2**32, seed >> 32) and
   counter = (h, b, offset mod 2**32, offset >> 32), where h is the *query* head and b the sample:

       (R0, R1, C0, C1) = philox4x32_10(counter, key)

2. Position words: a Weyl sequence and one xor-shift-multiply step, for query position i and key position j, both
   counted from the start of their sequence:

       mix(x):  x = (x ^ (x >> 15)) * 0x846CA68B;  return x ^ (x >> 16)
       r0 = mix(i * 0x9E3779B9 + R0)        r1 = mix(i * 0x9E3779B9 + R1)
       c0 = mix(j * 0x9E3779B9 + C0)        c1 = mix(j * 0x9E3779B9 + C1)

3. Element: one product joins row and column,

       x = (r0 + c0) * (r1 + c1)

   and its upper 24 bits, read as a signed number, decide. With x as a signed 32-bit integer and an arithmetic shift,

       keep  =  (x >> 8) >= drop_threshold(p),    drop_threshold(p) = min(round(p * 2**24), 2**24 - 1) - 2**23

   Both sides are integers of 24 bits, exact in float32, so a kernel may compare them in float32. In int32,
   `x >= threshold * 256` is the same comparison without a shift.

4. Origins: a call may compute one block of a larger problem and then drops the same weights as that problem. Behind
   seed and offset, its state has four numbers for each sample, or packed sequence, of the call: its index in the larger
   problem (b0), and the index there of its first query head (h0), query (i0) and key (j0). The mask of the call is that
   of (b0, h0 + h, i0 + i, j0 + j). Only head keys change: step 1 runs at (b0, h0 + h), and the keys become

       R0 + i0 * 0x9E3779B9        R1 + i0 * 0x9E3779B9        C0 + j0 * 0x9E3779B9        C1 + j0 * 0x9E3779B9

The dropping probability is p to 2**-25. Step 3 is symmetric in rows and columns: a kernel that holds transposed scores
exchanges the arguments. It is the NH hash of (r0, r1) under the key (c0, c1) (Black et al. 1999, "UMAC", section 4.2).
For any two rows with different words, the pairs of elements over random columns are all but independent. Unlike sums of
a row and a column word, the product leaves no bias in the four corners of a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WEYL = 0x9E3779B9  # 2**32 / golden ratio, odd
MIX_MULTIPLIER = 0x846CA68B
LEVELS = 2**24  # a probability is rounded to this many steps

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Number = int | torch.Tensor  # a tensor is () int64, so that the number need not leave its device


def _mul_hi_lo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of the 64-bit product of two 32-bit unsigned words.

    The int64 product may wrap to a negative number; its bits are still those of the unsigned product.
    """
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(counter: Words, key: tuple[Number, Number]) -> Words:
    """Run ten rounds of Philox4x32.

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


def head_keys(
    batch: int,
    heads: int,
    seed: Number,
    offset: Number,
    device: torch.device | str = "cpu",
    origins: torch.Tensor | None = None,
) -> Words:
    """Run steps 1 and 4 for every (sample, query head). Return (R0, R1, C0, C1), (B, H) int64 in [0, 2**32) each.

    `origins`: (B, 4) int64, (b0, h0, i0, j0) of each sample.
    """
    h = torch.arange(heads, device=device)
    b = torch.arange(batch, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    low, high = zero + (offset & _MASK), zero + ((offset >> 32) & _MASK)
    key = seed & _MASK, (seed >> 32) & _MASK
    if origins is None:
        return philox4x32((h, b, low, high), key)
    b0, h0, i0, j0 = (x[:, None] for x in origins.unbind(1))
    r0, r1, c0, c1 = philox4x32(((h0 + h) & _MASK, b0 & _MASK, low, high), key)
    row, column = i0 * WEYL, j0 * WEYL
    return (r0 + row) & _MASK, (r1 + row) & _MASK, (c0 + column) & _MASK, (c1 + column) & _MASK


def keys_from_state(rng_state: torch.Tensor, batch: int, heads: int) -> Words:
    """Return the `head_keys` of a call's state, on its device. The state is [seed, offset], origins may follow."""
    if rng_state.dtype != torch.int64:
        raise TypeError(f"rng_state must be int64, got {rng_state.dtype}")
    if rng_state.shape not in ((2,), (2 + 4 * batch,)):
        raise ValueError(
            f"rng_state must have shape (2,), or ({2 + 4 * batch},) with four origins for each sample, got "
            f"{tuple(rng_state.shape)}"
        )
    seed, offset = rng_state[:2].unbind()
    origins = rng_state[2:].view(batch, 4) if rng_state.shape[0] > 2 else None
    return head_keys(batch, heads, seed, offset, rng_state.device, origins)


def with_origins(rng_state: torch.Tensor, origins: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the state of a call that computes one block of a problem, without waiting for the device.

    `rng_state` is the problem's state, `origins` is (b0, h0, i0, j0) for each sample of the call.
    """
    flat = torch.tensor(origins, dtype=torch.int64, device="cpu").flatten()
    return torch.cat([rng_state[:2], flat.to(rng_state.device, non_blocking=True)])


def position_words(key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run step 2: return the words of `positions` (S,) under head keys (...), as (..., S) int64 in [0, 2**32)."""
    x = (positions * WEYL + key[..., None]) & _MASK
    x = ((x ^ (x >> 15)) * MIX_MULTIPLIER) & _MASK
    return x ^ (x >> 16)


def element_levels(r0: torch.Tensor, r1: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor) -> torch.Tensor:
    """Run step 3 but the comparison: row words (..., M), column words (..., N) -> (..., M, N) in [-2**23, 2**23)."""
    x = (r0[..., :, None] + c0[..., None, :]) * (r1[..., :, None] + c1[..., None, :])
    sign = LEVELS // 2
    return (((x >> 8) & (LEVELS - 1)) ^ sign) - sign


def drop_threshold(dropout_p: float) -> int:
    """Return the lowest level that is kept, in [-2**23, 2**23). Below it lie round(p * 2**24) of the 2**24 levels."""
    return min(round(dropout_p * LEVELS), LEVELS - 1) - LEVELS // 2


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    seed: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask of one call, (B, H, Sq, Sk) bool: True for weights that are kept (and scaled by 1/(1 - p)).

    Args:
        batch, heads, seqlen_q, seqlen_k: sizes; `heads` counts query heads.
        dropout_p: probability of dropping, in [0, 1).
        seed, offset: 64 bits each, as unsigned numbers or as the int64 that hold the same bits.
        device: where to compute it.
        origins: (B, 4) int64, if the call is one block of a larger problem: for each sample its index in that problem
            and the index of its first query head, query and key. `flash_attention` takes them in `rng_state`.

    Raises:
        ValueError: a negative size; dropout_p outside [0, 1); seed or offset of more than 64 bits.
        TypeError: a size is no integer; origins are no int64 tensor.
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if origins is not None:
        if not isinstance(origins, torch.Tensor):
            raise TypeError(f"origins must be a torch.Tensor, got {type(origins).__name__}")
        if origins.dtype != torch.int64:
            raise TypeError(f"origins must be int64, got {origins.dtype}")
        if origins.shape != (batch, 4):
            raise ValueError(f"origins must have shape {(batch, 4)}, got {tuple(origins.shape)}")
    for name, value in (("seed", seed), ("offset", offset)):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"dropout needs a {name} of 64 bits, got {value}")
    origins = None if origins is None else origins.to(device)
    return mask_from_keys(head_keys(batch, heads, seed, offset, device, origins), seqlen_q, seqlen_k, dropout_p)


def mask_from_keys(keys: Words, seqlen_q: int, seqlen_k: int, dropout_p: float) -> torch.Tensor:
    """Return the mask of `dropout_mask` from head keys (B, H)."""
    (batch, heads), device = keys[0].shape, keys[0].device
    axes = [torch.arange(size, device=device) for size in (seqlen_q, seqlen_q, seqlen_k, seqlen_k)]
    words = [position_words(key, positions) for key, positions in zip(keys, axes, strict=True)]
    keep = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    for b in range(batch):  # one sample at a time, because the integers take 8 bytes for each element
        keep[b] = element_levels(*(w[b] for w in words)) >= drop_threshold(dropout_p)
    return keep
