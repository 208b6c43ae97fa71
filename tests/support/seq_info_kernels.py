"""The functions of `backends/cuda/attention/seq_info.py`, on one sequence in each program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.seq_info import cache_entry, cached_keys, left_padding, packed_info, packed_keys


@triton.jit
def _packed_kernel(cu_ptr, seqused_ptr, out_ptr, total):
    b = tl.program_id(0)
    first, rows = packed_info(cu_ptr, b, total)
    first_k, n_keys = packed_keys(cu_ptr, seqused_ptr, b, total)
    tl.store(out_ptr + b * 4, first)
    tl.store(out_ptr + b * 4 + 1, rows)
    tl.store(out_ptr + b * 4 + 2, first_k)
    tl.store(out_ptr + b * 4 + 3, n_keys)


@triton.jit
def _cached_kernel(cu_ptr, seqused_ptr, index_ptr, leftpad_ptr, out_ptr, length, added, capacity, entries):
    b = tl.program_id(0)
    n_keys = cached_keys(cu_ptr, seqused_ptr, b, length, added, capacity)
    entry, n_keys = cache_entry(index_ptr, b, entries, n_keys)
    tl.store(out_ptr + b * 3, entry)
    tl.store(out_ptr + b * 3 + 1, n_keys)
    tl.store(out_ptr + b * 3 + 2, left_padding(leftpad_ptr, b, capacity))


def packed(cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> list[list[int]]:
    """Rows of `packed_info` and `packed_keys` of each sequence."""
    batch = len(cu_seqlens) - 1
    out = torch.full((batch, 4), -7, dtype=torch.int32, device=cu_seqlens.device)
    _packed_kernel[(batch,)](cu_seqlens, seqused, out, total)
    return out.tolist()


def cached(
    batch: int, tensors: tuple[torch.Tensor | None, ...], length: int, added: int, capacity: int, entries: int
) -> list[list[int]]:
    """Entry, keys and padding of each sequence. `tensors`: cu_seqlens_k, seqused, cache_batch_idx, leftpad."""
    device = next((x.device for x in tensors if x is not None), torch.device("cpu"))
    out = torch.full((batch, 3), -7, dtype=torch.int32, device=device)
    _cached_kernel[(batch,)](*tensors, out, length, added, capacity, entries)
    return out.tolist()
