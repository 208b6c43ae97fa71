"""Score functions of the tests: jit functions, and beside each the same in PyTorch, written by hand.

`FUNCTIONS`: name -> (jit function, function of PyTorch tensors, captured tensors of B samples, H heads, S positions).
The functions of PyTorch get index tensors that broadcast to (B, H, Sq, Sk).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

WIDTH = tl.constexpr(128)  # of tables by distance
MIDDLE = tl.constexpr(64)


class ScoreCase(NamedTuple):
    jit: Any
    plain: Callable[..., torch.Tensor]
    tensors: Callable[[int, int, int], tuple[torch.Tensor, ...]]


def table(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@triton.jit
def alibi(score, b, h, i, j):
    slope = tl.exp2(-(h + 1.0))
    return score - slope * tl.abs(i - j)


@triton.jit
def learned_alibi(score, b, h, i, j, slopes):
    """One number for each head: its gradient is the sum over a whole tile."""
    return score - tl.load(slopes + h) * (i - j)


@triton.jit
def relative(score, b, h, i, j, bias):
    return score + tl.load(bias + h * WIDTH + (i - j) + MIDDLE)


@triton.jit
def scaled_by_key(score, b, h, i, j, keys, queries):
    """One number for each key, which multiplies, and one for each query."""
    key = tl.load(keys + b * WIDTH + j)
    return score * key + tl.load(queries + i) * key


@triton.jit
def capped(score, b, h, i, j):
    cap: tl.constexpr = 3.0
    return cap * libdevice.tanh(score / cap)


@triton.jit
def documents(score, b, h, i, j, ids, bias, scale):
    """A document mask with a relative bias, times a learned number."""
    same = tl.load(ids + i) == tl.load(ids + j)
    near = tl.minimum(tl.maximum(i - j, -7), 8) + 7
    biased = score + tl.load(bias + near) * tl.load(scale)
    return tl.where(same, biased, float("-inf"))


@triton.jit
def small_numbers(score, b, h, i, j, kinds):
    """Products of int8 would wrap, and Triton has no int8 of 300."""
    kind = tl.load(kinds + j)
    return tl.where(kind * 3 > 100, score * 0.5, score) + tl.where(kind < 300, 0, 9) - (1000 - kind) * 0.0009765625


@triton.jit
def flagged(score, b, h, i, j, flags):
    """Booleans in differences and quotients are 0 and 1."""
    flag = tl.load(flags + j)
    return score - flag - (i > j) + i // (flag == flag) * 0.0078125


@triton.jit
def every_operation(score, b, h, i, j, numbers):
    x = tl.load(numbers + (i * 7 + j * 3) % 32, mask=(i ^ j) & 1 == 0, other=0.5)
    y = score.to(tl.float32) / (1.5 + tl.abs(x))
    y += tl.sin(x) * tl.cos(score) - tl.sigmoid(-score) * tl.exp(x * 0.25)
    y = tl.maximum(y, -4.0) + tl.sqrt(1.0 + x * x) - tl.log(2.0 + x * x) * tl.rsqrt(3.0 + score * score)
    z = tl.log2(1.0 + tl.exp2(tl.minimum(y, 3.0))) + tl.floor(x)
    z += (i >= j) * score + (i <= j) * score - score * (i == j)  # comparisons are numbers
    z -= score * (i == j) * ((j >= 3) + (j >= 9))
    z += tl.maximum(x, x) - tl.minimum(score, score)
    return tl.where((i // 3 + (j >> 1)) % 5 - 4, z, y)  # any number but 0 is true


def _plain_every_operation(score: Any, b: Any, h: Any, i: Any, j: Any, numbers: Any) -> Any:
    index = (i * 7 + j * 3) % 32
    x = torch.where((i - j) % 2 == 0, numbers[index.clamp(min=0)], 0.5)
    y = score / (1.5 + x.abs())
    y = y + x.sin() * score.cos() - (-score).sigmoid() * (x * 0.25).exp()
    y = y.clamp(min=-4.0) + (1 + x * x).sqrt() - (2 + x * x).log() / (3 + score * score).sqrt()
    z = (1 + torch.exp2(y.clamp(max=3.0))).log2() + x.detach().floor()
    z = z + torch.where(i == j, score * (1 - (j >= 3).int() - (j >= 9).int()), score) + x - score
    return torch.where((i.div(3, rounding_mode="trunc") + j.div(2, rounding_mode="floor")) % 5 != 4, z, y)


FUNCTIONS = {
    "alibi": ScoreCase(
        alibi, lambda s, b, h, i, j: s - 2.0 ** -(h + 1.0) * (i - j).abs(), lambda batch, heads, size: ()
    ),
    "learned_alibi": ScoreCase(
        learned_alibi, lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j),
        lambda batch, heads, size: (table(heads) / 8,),
    ),
    "relative": ScoreCase(
        relative, lambda s, b, h, i, j, bias: s + bias[h, i - j + 64], lambda batch, heads, size: (table(heads, 128),)
    ),
    "scaled_by_key": ScoreCase(
        scaled_by_key, lambda s, b, h, i, j, keys, queries: s * keys[b, j] + queries[i] * keys[b, j],
        lambda batch, heads, size: (table(batch, 128), table(size).flip(0)),
    ),
    "capped": ScoreCase(
        capped, lambda s, b, h, i, j: 3 * torch.tanh(s / 3), lambda batch, heads, size: ()
    ),
    "documents": ScoreCase(
        documents,
        lambda s, b, h, i, j, ids, bias, scale: torch.where(
            ids[i] == ids[j], s + bias[(i - j).clamp(-7, 8) + 7] * scale, -torch.inf
        ),
        lambda batch, heads, size: (torch.arange(size) // 11, table(16), table(1)),
    ),
    "small_numbers": ScoreCase(
        small_numbers,
        lambda s, b, h, i, j, kinds: torch.where(kinds[j] > 33, s / 2, s) - (1000 - kinds[j].long()) / 1024,
        lambda batch, heads, size: ((torch.arange(size) * 37 % 256 - 128).to(torch.int8),),
    ),
    "flagged": ScoreCase(
        flagged, lambda s, b, h, i, j, flags: s - flags[j].int() - (i > j).int() + i / 128,
        lambda batch, heads, size: (torch.arange(size) % 3 > 0,),
    ),
    "every_operation": ScoreCase(every_operation, _plain_every_operation, lambda batch, heads, size: (table(32),)),
}  # fmt: skip
