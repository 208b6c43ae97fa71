"""float8 and int8 inputs: their dtypes, the kinds of descales, and the numbers that a quantised tensor stands for.

Element i of a tensor x stands for x[i] * descale + mean. There is one descale for the tensor, one for each sample and
KV head, or one for each block of rows of a head. The mean, if there is one, is a vector (D,) for each sample and KV
head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
EIGHT_BITS = (*FLOAT8, "int8")  # dtypes of q and k
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BIT_DTYPES = (*FLOAT8_DTYPES, torch.int8)
VALUE_DTYPES = (*FLOAT8_DTYPES, torch.float16, torch.bfloat16)  # dtypes of v if q and k are int8

BLOCK_Q, BLOCK_K = 128, 64  # rows of q and of k that share a descale
PER_TENSOR, PER_HEAD, PER_BLOCK = 1, 2, 3  # kinds of descales; 0: none

ARGUMENTS = ("q_descale", "k_descale", "v_descale", "k_mean", "v_mean")

# Softmax weights are at most 1. Before they are rounded to float8 they are multiplied by 2**shift, the largest power of
# two that the dtype holds with room for a rounding error: 256 of at most 448, 32768 of at most 57344. So weights down
# to 2**-14 (e4m3) or 2**-29 (e5m2) keep all their digits, and down to 2**-17 or 2**-31 are not 0. Unscaled ones would
# lose digits below 2**-6 or 2**-14, and be 0 below 2**-9 or 2**-16.
WEIGHT_SHIFT = {"float8_e4m3fn": 8, "float8_e5m2": 15}


def per_row(descale: torch.Tensor, heads: int, rows: int, block: int) -> torch.Tensor:
    """Return the descale of each row, broadcastable to (B, heads, rows, 1). `block`: rows of a block that share one."""
    if descale.numel() == 1:
        return descale.reshape(1, 1, 1, 1)
    descale = descale.repeat_interleave(heads // descale.shape[1], dim=1)
    if descale.dim() == 2:
        return descale[:, :, None, None]
    return descale.repeat_interleave(block, dim=2)[:, :, :rows, None]


def dequantised(
    x: torch.Tensor,
    descale: torch.Tensor | None,
    dtype: torch.dtype,
    block: int = 1,
    mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x * descale + mean in `dtype`, for x (B, H, S, D) and mean (B, H, D): the numbers that x stands for."""
    x = x.to(dtype)
    if descale is not None:
        x = x * per_row(descale.to(dtype), x.shape[1], x.shape[2], block)
    return x if mean is None else x + mean.to(dtype)[:, :, None]


SMALLEST_DESCALE = 2.0**-120  # a descale of 0 would make 0 / 0 a NaN; the reciprocal of this one is finite


class Scheme(NamedTuple):
    """How one of q, k and v is quantised."""

    dtype: torch.dtype
    kind: int  # kind of descale: PER_TENSOR, PER_HEAD or PER_BLOCK
    block: int  # with PER_BLOCK, rows that share a descale
    group: int  # with PER_HEAD, heads that share a descale
    smooth: bool = False  # subtract the mean over the sequence
    rotate: bool = False  # multiply by the normalised Hadamard matrix

    @property
    def largest(self) -> float:
        """The largest magnitude of a value."""
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def descale(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Return the descale of numbers of at most this magnitude. A NaN stays."""
        return (magnitude / self.largest).clamp_min(SMALLEST_DESCALE)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return the last dimension of x, a power of two, multiplied by the normalised Hadamard matrix."""
    size = x.shape[-1]
    step = 1
    while step < size:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return x * size**-0.5


class Quantized(NamedTuple):
    """One of q, k and v as `diyfa.quantize` returns it: 8-bit values, with their descale and mean.

    `diyfa.flash_attention`, `flash_attention_v2`, `flash_attention_varlen` and `explain` take it in place of the
    tensor. It is not a tensor, so that no other function can read its values without their descale.
    """

    values: torch.Tensor  # float8 or int8, with the shape of the input
    descale: torch.Tensor | None  # float32; values * descale + mean is the input, up to rounding
    mean: torch.Tensor | None = None  # (B, Hk, D) float32, which was subtracted before rounding
    source: torch.Tensor | None = None  # with straight_through: the tensor, rotated if asked, that gets the gradient


def unwrapped(owners: dict[str, Any], arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Replace each `Quantized` among `owners`, {"q": q, …}, by its values. Return {name: tensor} of descales and means.

    Names are those of ARGUMENTS. `arguments` are the ones that the caller gave. Raises ValueError if one of them is
    given twice, or if q has a mean.
    """
    unwrapped_arguments = {}
    for name, x in owners.items():
        if not isinstance(x, Quantized):
            continue
        owners[name] = x.values
        for part in ("descale", "mean"):
            value, argument = getattr(x, part), f"{name}_{part}"
            if value is None:
                continue
            if argument not in ARGUMENTS:
                raise ValueError(f"{name} may be no Quantized with a {part}")
            if arguments.get(argument) is not None:
                raise ValueError(f"{name} is Quantized and brings its {part}: {argument} must not be given")
            unwrapped_arguments[argument] = value
    return unwrapped_arguments
