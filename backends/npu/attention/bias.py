"""How kernels see attn_bias: which of its dimensions exist, and how far apart they lie.

A bias that is broadcast over keys or over rows has kernels of its own. One that is the same for all keys is no tile at
all: forward it is added to the scores of a row, backward it is taken off the row's log-sum-exp.

A block pointer with a stride of 0 would not do, nor one whose rows overlap: the compiler finds row and column of a tile
again by dividing its offset by the stride between rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

NATIVE = (torch.float16, torch.bfloat16, torch.float32)


class Bias(NamedTuple):
    """A bias as kernels take it: `dims` names the dimensions that a tile has of it ("qk", "k", "q", "1"; "" for no
    bias), `strides` are those of batch, head and query row, 0 where it is broadcast. The last of `dims` has stride 1.
    """

    tensor: torch.Tensor | None = None
    dims: str = ""
    strides: tuple[int, int, int] = (0, 0, 0)

    def values(self, name: str) -> dict[str, Any]:
        """Tensor and strides by the names that kernels' arguments have where the bias is called `name`."""
        b, h, m = self.strides
        return {f"{name}_ptr": self.tensor, f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_m": m}


def _four_strides(bias: torch.Tensor) -> list[int]:
    """Strides in the order (B, H, Sq, Sk), 0 where the bias is the same for all."""
    strides = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return [0] * (4 - bias.dim()) + strides


def _described(bias: torch.Tensor) -> Bias:
    b, h, m, n = _four_strides(bias)
    return Bias(bias, ("q" if m else "") + ("k" if n else "") or "1", (b, h, m))


def _fits_kernels(bias: torch.Tensor) -> bool:
    """Whether kernels can read (or write) it as it lies."""
    *_, m, n = _four_strides(bias)
    if bias.dtype not in NATIVE:
        return False
    return n == 1 and (m == 0 or m >= bias.shape[-1]) if n else m in (0, 1)


def as_read(bias: torch.Tensor | None) -> Bias:
    """`bias`, broadcastable to (B, H, Sq, Sk), for kernels that read it.

    One that kernels cannot read as it lies (a dtype the chip has not, keys that are not contiguous, rows that overlap)
    is copied first, without what it repeats.
    """
    if bias is None:
        return Bias()
    if not _fits_kernels(bias):
        for dim, stride in enumerate(bias.stride()):
            if stride == 0:
                bias = bias.narrow(dim, 0, 1)
        bias = bias.to(bias.dtype if bias.dtype in NATIVE else torch.float32, memory_format=torch.contiguous_format)
        bias = bias.contiguous()
    return _described(bias)


def as_written(gradient: torch.Tensor) -> Bias:
    """A buffer like `gradient` for the kernel that writes it: itself, or one to be copied from."""
    if _fits_kernels(gradient):
        return _described(gradient)
    dtype = gradient.dtype if gradient.dtype in NATIVE else torch.float32
    return _described(gradient.new_empty(gradient.shape, dtype=dtype))
