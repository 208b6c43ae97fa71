"""The calls that a pack of compiled kernels serves: a table of problems, made into calls of the public functions.

A call is made with tensors without memory while its launches are recorded (`diyfa.ready.recording`), so that it goes
through all of diyfa's own decisions: which kernels are compiled for it is written nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple

import torch

from diyfa.attention import flash_attention, flash_attention_v2, flash_attention_varlen
from diyfa.kvcache import flash_attn_with_kvcache
from diyfa.matmul import triton_matmul
from diyfa.registry import batch_invariant

HALVES = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn


class Call(NamedTuple):
    """One call of a public function, and what it is called in messages."""

    name: str
    run: Callable[[], object]


_numbers = count(1)


def empty(*shape: int, dtype: torch.dtype = torch.int32, grad: bool = False) -> torch.Tensor:
    """Return a tensor without memory. It has an address, which no other one has: diyfa tells caches apart by that."""
    begin = next(_numbers) << 36
    flat = torch.empty(begin + math.prod(shape), dtype=dtype, device="meta")
    return flat[begin:].view(shape).requires_grad_(grad)


class Heads(NamedTuple):
    """Heads of a model, and features of each."""

    head_dim: int
    head_dim_v: int
    queries: int = 16
    keys: int = 16

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"D={dims} H={self.queries}/{self.keys}"


class Rows(NamedTuple):
    """Samples, and the queries and keys of each."""

    batch: int
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"B={self.batch} Sq={self.queries} Sk={self.keys}"


def attend(
    heads: Heads, rows: Rows, dtype: torch.dtype, packed: bool = False, backward: bool = True, **options: Any
) -> Call:
    """Attention, with its backward pass. `options` are those of `flash_attention`; True stands for a tensor, and a bias
    is the letters of its dimensions, as in "1hqk"."""
    words = [str(dtype).removeprefix("torch."), str(heads), str(rows), "packed" if packed else ""]
    words += [name if value is True else f"{name}={value}" for name, value in options.items()]

    def run() -> None:
        (b, m, n), (d, dv, h, hk) = rows, heads
        shapes = [((b, m) if i == 0 else (b, n)) + ((h, d), (hk, d), (hk, dv))[i] for i in range(3)]
        if packed:
            shapes = [(shape[0] * shape[1], *shape[2:]) for shape in shapes]
        q, k, v = (empty(*shape, dtype=dtype, grad=backward) for shape in shapes)
        given = dict(options)
        if given.get("sinks"):
            given["sinks"] = empty(h, dtype=torch.float32, grad=backward)
        if given.get("alibi_slopes"):
            given["alibi_slopes"] = empty(h, dtype=torch.float32)
        if given.get("seq_lens"):
            given["seq_lens"] = empty(b)
        grad = given.pop("bias_grad", False)
        if bias := given.get("attn_bias"):
            sizes = {"b": b, "h": h, "q": m, "k": n, "1": 1}
            given["attn_bias"] = empty(*(sizes[letter] for letter in bias), dtype=dtype, grad=grad)
        if packed:
            offsets = empty(b + 1)
            out = flash_attention_varlen(q, k, v, offsets, offsets, m, n, **given)
        elif given.pop("layout", "bshd") == "bshd":
            out = flash_attention_v2(q, k, v, **given)
        else:
            q, k, v = (x.transpose(1, 2).contiguous().detach().requires_grad_(backward) for x in (q, k, v))
            out = flash_attention(q, k, v, **given)
        if backward:
            out.backward(torch.empty_like(out))

    return Call(" ".join(filter(None, words)), run)
