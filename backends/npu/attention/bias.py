"""The form in which kernels take attn_bias: its dimensions that are not broadcast, and their strides.

Kernels are compiled for the dimensions that a bias has. A bias that is the same for all keys needs no tile: the forward
pass adds it to the scores of a row, the backward pass subtracts it from the row's log-sum-exp. Behind it a score
function gives each key another score, so with one such a bias is copied with all its keys.

A block pointer with stride 0, or with overlapping rows, would not work: the compiler recovers row and column of a tile
by dividing its offset by the stride between rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

NATIVE = (torch.float16, torch.bfloat16, torch.float32)


class Bias(NamedTuple):
    """A bias as kernels take it.

    `dims`: its dimensions inside a tile, "qk", "k", "q" or "1" (none); "" for no bias. The last one has stride 1.
    `strides`: of batch, head and query row, 0 where the bias is broadcast.
    """

    tensor: torch.Tensor | None = None
    dims: str = ""
    strides: tuple[int, int, int] = (0, 0, 0)

    def values(self, name: str) -> dict[str, Any]:
        """Return tensor and strides by kernel argument, for the bias that kernels call `name`."""
        b, h, m = self.strides
        return {f"{name}_ptr": self.tensor, f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_m": m}


def _four_strides(bias: torch.Tensor) -> list[int]:
    """Return the strides of (B, H, Sq, Sk), 0 where the bias is broadcast."""
    strides = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return [0] * (4 - bias.dim()) + strides


def _bias_view(bias: torch.Tensor, has_keys: bool) -> Bias:
    b, h, m, n = _four_strides(bias)
    return Bias(bias, ("q" if m else "") + ("k" if n or has_keys else "") or "1", (b, h, m))


def _fits_kernels(bias: torch.Tensor) -> bool:
    """Return whether kernels can read or write `bias` without a copy."""
    *_, m, n = _four_strides(bias)
    if bias.dtype not in NATIVE:
        return False
    return n == 1 and (m == 0 or m >= bias.shape[-1]) if n else m in (0, 1)


def as_read(bias: torch.Tensor | None, keys: int = 0) -> Bias:
    """Return `bias`, broadcastable to (B, H, Sq, Sk), for kernels that read it.

    It is copied first, without its broadcast dimensions, if kernels cannot read it: the chip lacks its dtype, its keys
    are not contiguous, or its rows overlap. `keys`: number of keys that it must have, for a call with a score function.
    """
    if bias is None:
        return Bias()
    if keys and (bias.shape[-1] != keys or bias.stride(-1) == 0):
        bias = bias.expand(*bias.shape[:-1], keys).contiguous()
    if not _fits_kernels(bias):
        for dim, stride in enumerate(bias.stride()):
            if stride == 0:
                bias = bias.narrow(dim, 0, 1)
        bias = bias.to(bias.dtype if bias.dtype in NATIVE else torch.float32, memory_format=torch.contiguous_format)
        bias = bias.contiguous()
    return _bias_view(bias, keys > 0)


def as_written(dbias: torch.Tensor, keys: int = 0) -> Bias:
    """Return the buffer that the kernel writes: `dbias`, or a new one whose values the caller copies to it.

    `keys`: as for `as_read`. A buffer with more keys than `dbias` has its summands."""
    if keys and dbias.shape[-1] != keys:
        return _bias_view(dbias.new_empty((*dbias.shape[:-1], keys), dtype=torch.float32), True)
    if _fits_kernels(dbias):
        return _bias_view(dbias, keys > 0)
    dtype = dbias.dtype if dbias.dtype in NATIVE else torch.float32
    return _bias_view(dbias.new_empty(dbias.shape, dtype=dtype), keys > 0)
