"""Pages that a window hides from every query: whatever they hold, no result shows it, and their entries may be -1."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from poison import poisoned_allocations
from targets import TARGETS

import diyfa
from diyfa import registry

BACKENDS = [name for name in TARGETS if diyfa.kernels_for(name, "kvcache_fwd")]
H, HK, D = 4, 2, 16
WINDOW = (20, 0)


def call(page_size: int, n: int, queries: int, holds: str, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """A call of one sequence of `n` keys, and its result by the reference.

    The first pages `hold` a number that is not finite, or are given back: their entries are -1.
    """
    generator = torch.Generator().manual_seed(n)
    columns = -(-n // page_size)
    q = torch.randn(1, queries, H, D, generator=generator)
    caches = [torch.randn(columns + 1, page_size, HK, D, generator=generator).to(dtype) for _ in "kv"]
    table = torch.randperm(columns, generator=generator).int()[None] + 1
    keys = [cache.float()[table[0].long()].flatten(0, 1)[None, :n] for cache in caches]
    want = diyfa.reference_attention(q, *keys, window=WINDOW, layout="bshd")
    hidden = max(0, n - queries - WINDOW[0]) // page_size
    assert hidden, "a case shows something"
    pages = table[0, :hidden].long()
    if holds == "-1":
        table[0, :hidden] = -1
        pages = torch.cat([pages, torch.zeros(1, dtype=torch.int64)])
    for cache in caches:
        cache[pages] = torch.tensor(float("nan" if holds == "-1" else holds)).to(dtype)
    lengths = torch.tensor([n], dtype=torch.int32)
    return {"q": q, "k": caches[0], "v": caches[1], "block_table": table, "lengths": lengths}, want


@pytest.mark.parametrize("holds", ["nan", "inf", "-1"])
@pytest.mark.parametrize(("page_size", "n"), [(16, 77), (16, 300), (1, 77), (3, 300), (64, 300)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_pages_are_not_read(backend: str, page_size: int, n: int, holds: str) -> None:
    """By a call of one query or of several, with keys in splits, in the mode `batch_invariant`, and packed."""
    target = TARGETS[backend]
    for queries, splits, mode in ((1, 0, nullcontext), (3, 2, nullcontext), (5, 0, diyfa.batch_invariant)):
        given, want = call(page_size, n, queries, holds, torch.float32)
        packed_q = given["q"][0].to(target.device)
        q, k, v, table, lengths = (x.to(target.device) for x in given.values())
        offsets = torch.tensor([0, queries], dtype=torch.int32, device=target.device)
        with registry.use_backend(target.backend), poisoned_allocations(), mode():
            got = diyfa.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, block_table=table, window_size=WINDOW, num_splits=splits
            )
            packed = diyfa.flash_attention_varlen(
                packed_q, k, v, offsets, None, queries, n, window=WINDOW, block_table=table, seqused_k=lengths
            )
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.cpu(), want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("holds", ["nan", "-1"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "npu"])  # which refuses float8
def test_hidden_pages_of_float8_are_not_read(backend: str, holds: str) -> None:
    """Whose values kernels read as pairs of features."""
    target = TARGETS[backend]
    given, want = call(16, 300, 2, holds, torch.float8_e4m3fn)
    q, k, v, table, lengths = (x.to(target.device) for x in given.values())
    with registry.use_backend(target.backend), poisoned_allocations():
        got = diyfa.flash_attn_with_kvcache(
            q.bfloat16(), k, v, cache_seqlens=lengths, block_table=table, window_size=WINDOW
        )
    torch.testing.assert_close(got.cpu().float(), want, rtol=3e-2, atol=3e-2)
