"""The two tensors of a block mask, which kernels read: `mask_blocks` and `mask_bits`.

The scores (Sq, Sk) of a head are divided into blocks of BLOCK_Q queries and BLOCK_K keys, `nq` times `nk` of them. A
block is empty (no query sees a key of it), full (every query sees every key) or partial. A block that extends beyond
the keys is never full, so kernels need no other check for the end of the keys. Queries beyond the end do not count.

* `mask_blocks` (B or 1, H or 1, L) int32. The L entries of a head are three tables, one after another:
  - codes (nq, nk): EMPTY, FULL, or the index in `mask_bits` of a partial block;
  - for each block of queries (nq, 2 + nk): the number of full blocks, the number of full and partial blocks, and the
    key blocks, full ones first, then partial ones, each in ascending order; kernels do not read the rest;
  - the same for each block of keys (nk, 2 + nq), with query blocks.
* `mask_bits` (P, BLOCK_Q, BLOCK_K / 32) int32. Bit j % 32 of word [i, j // 32] of a block is 1 if its query i sees its
  key j. Bits of rows and columns beyond the end are 0.

`Selection` and `edge_blocks` are what `diyfa.select_blocks` and the backends' kernels for it share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

EMPTY, FULL = -2, -1
WORD = 32  # bits of a word
BLOCK_SIZES = (64, 128)


class Selection(NamedTuple):
    """How `diyfa.select_blocks` selects key blocks; its arguments of the same names."""

    topk: int
    causal: bool
    sinks: int
    local: int
    by_group: bool
    block: tuple[int, int]


def edge_blocks(how: Selection, sizes: tuple[int, int]) -> int:
    """Return the largest number of key blocks that the diagonal or the end of the keys cuts, for one block of queries.

    These edge blocks are consecutive. With `causal` the first one contains the first query's own position. Without,
    only the last key block may be cut.
    """
    block_q, block_k = how.block
    return (block_q - 1) // block_k + 2 if how.causal else int(sizes[1] % block_k > 0)


def n_blocks(seqlen_q: int, seqlen_k: int, block: tuple[int, ...]) -> tuple[int, int]:
    """Return (nq, nk), the numbers of blocks of queries and of keys. `block`: (BLOCK_Q, BLOCK_K)."""
    return -(-seqlen_q // block[0]), -(-seqlen_k // block[1])


def list_length(nq: int, nk: int) -> int:
    """Return L, the number of entries of `mask_blocks` for one head."""
    return nq * nk + nq * (2 + nk) + nk * (2 + nq)


def block_of(mask_bits: torch.Tensor | None) -> tuple[int, ...]:
    """Return (BLOCK_Q, BLOCK_K) of `mask_bits`, or () without a mask."""
    return () if mask_bits is None else (mask_bits.shape[1], mask_bits.shape[2] * WORD)


def _ordered(codes: torch.Tensor) -> torch.Tensor:
    """Return the lists (..., rows, 2 + columns) of codes (..., rows, columns): both counts, then the columns."""
    rank = torch.where(codes == FULL, 0, torch.where(codes >= 0, 1, 2))
    order = rank.argsort(dim=-1, stable=True)
    counts = torch.stack([(rank == 0).sum(-1), (rank < 2).sum(-1)], -1)
    return torch.cat([counts, order], -1).to(torch.int32)


def make_lists(codes: torch.Tensor) -> torch.Tensor:
    """Return `mask_blocks` of codes (B, H, nq, nk) int32."""
    tables = codes, _ordered(codes), _ordered(codes.mT)
    return torch.cat([x.flatten(-2) for x in tables], -1).contiguous()


def codes_of(mask_blocks: torch.Tensor, nq: int, nk: int) -> torch.Tensor:
    """Return the codes (B or 1, H or 1, nq, nk)."""
    return mask_blocks[..., : nq * nk].unflatten(-1, (nq, nk))


def pack_bits(keep: torch.Tensor) -> torch.Tensor:
    """Return booleans (..., n · 32) as words (..., n) int32."""
    bits = keep.unflatten(-1, (-1, WORD)).to(torch.int32)
    return (bits << torch.arange(WORD, dtype=torch.int32, device=keep.device)).sum(-1, dtype=torch.int32)


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """Return words (..., n) int32 as booleans (..., n · 32)."""
    bits = words.unsqueeze(-1) >> torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().flatten(-2)


def visible_pairs(
    mask_blocks: torch.Tensor, mask_bits: torch.Tensor, sizes: tuple[int, int], rows: slice, columns: slice
) -> torch.Tensor:
    """Return the mask (B or 1, H or 1, rows, columns) of some rows and columns: True where the query sees the key.

    `sizes`: (Sq, Sk). Each slice has a start and a stop, which lie within Sq or Sk.
    """
    block_q, block_k = block_of(mask_bits)
    codes = codes_of(mask_blocks, *n_blocks(*sizes, (block_q, block_k)))
    i0, i1 = rows.start // block_q, -(-rows.stop // block_q)
    j0, j1 = columns.start // block_k, -(-columns.stop // block_k)
    codes = codes[..., i0:i1, j0:j1]
    keep = (codes == FULL)[..., None, None]
    if mask_bits.shape[0]:
        bits = unpack_bits(mask_bits[codes.clamp(min=0).long()])  # (B, H, blocks, blocks, BLOCK_Q, BLOCK_K)
        keep = keep | ((codes >= 0)[..., None, None] & bits)
    keep = keep.expand(*codes.shape, block_q, block_k).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    first_row, first_column = i0 * block_q, j0 * block_k
    return keep[
        ..., rows.start - first_row : rows.stop - first_row, columns.start - first_column : columns.stop - first_column
    ]


def visible_area(mask_blocks: torch.Tensor, block: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Return the number of scores in blocks that are not empty, for each sample and head: (B or 1, H or 1) int64."""
    nq, nk = n_blocks(seqlen_q, seqlen_k, block)
    device = mask_blocks.device
    rows = (seqlen_q - torch.arange(nq, device=device) * block[0]).clamp(max=block[0])
    columns = (seqlen_k - torch.arange(nk, device=device) * block[1]).clamp(max=block[1])
    return ((codes_of(mask_blocks, nq, nk) != EMPTY) * (rows[:, None] * columns)).sum((-2, -1))
