"""The form in which kernels take attn_bias: its dimensions that are not broadcast, and their strides.

Kernels are compiled for the dimensions that a bias has (`Bias.dims`). A bias that is the same for all keys needs no
tile of values: the forward pass adds one value to all scores of a row, and the backward pass subtracts it from the
row's log-sum-exp. That is not possible if a score function comes after the bias. Then such a bias is copied, with a
value for each key.

A broadcast dimension is not read with stride 0, and a bias whose rows overlap in memory is copied: the compiler finds
row and column of a block pointer's tile by dividing its offset by the stride between rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

NATIVE = (torch.float16, torch.bfloat16, torch.float32)


class Bias(NamedTuple):
    """A bias as kernels take it.

    `dims`: what its values in one head differ by. "qk": query and key; "k": key; "q": query; "1": nothing, a head has
    one value; "": there is no bias. The last of these dimensions has stride 1. `strides`: those of batch, head and
    query, 0 where the bias is broadcast.
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
    """Return a tensor as `Bias`, without a copy. `has_keys`: "k" is among its dims even if there is only one key."""
    b, h, m, n = _four_strides(bias)
    dims = ("q" if m else "") + ("k" if n or has_keys else "")
    return Bias(bias, dims or "1", (b, h, m))


def _fits_kernels(bias: torch.Tensor) -> bool:
    """Return whether kernels can read or write `bias` without a copy.

    With keys, these must be contiguous and rows must not overlap. Without keys, queries must be contiguous."""
    *_, m, n = _four_strides(bias)
    if bias.dtype not in NATIVE:
        return False
    if n:
        return n == 1 and (m == 0 or m >= bias.shape[-1])
    return m in (0, 1)


def as_read(bias: torch.Tensor | None, keys: int = 0) -> Bias:
    """Return `bias`, broadcastable to (B, H, Sq, Sk), for kernels that read it.

    It is copied first, without its broadcast dimensions, if kernels cannot read it: the chip lacks its dtype, its keys
    are not contiguous, or its rows overlap. `keys`: the number of keys that it must have, with a score function, else
    0.
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

    `keys`: as for `as_read`. If `dbias` lacks these keys, the buffer has the gradient of each key, and the caller sums
    it over the keys."""
    if keys and dbias.shape[-1] != keys:
        return _bias_view(dbias.new_empty((*dbias.shape[:-1], keys), dtype=torch.float32), True)
    if _fits_kernels(dbias):
        return _bias_view(dbias, keys > 0)
    dtype = dbias.dtype if dbias.dtype in NATIVE else torch.float32
    return _bias_view(dbias.new_empty(dbias.shape, dtype=dtype), keys > 0)
