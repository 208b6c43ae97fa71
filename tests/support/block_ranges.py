"""Which keys a query sees, by definition, small configurations, and the comparison of block ranges with both."""

from __future__ import annotations

from itertools import product

import torch

LENGTHS = [0, 1, 31, 33, 64, 70]
BOUNDS = [0, 1, 2, 13, 14, 15, 16, 17, 29, 30, 31, 32, 33, 46, 62, 65, 94]
FOREVER = 10**6


def sees(queries: torch.Tensor, keys: torch.Tensor, offset: torch.Tensor, left, right) -> torch.Tensor:
    """The definition: query i sees keys from i + offset - left to i + offset + right."""
    distance = keys - (queries + offset)
    return (distance >= -left) & (distance <= right)


def configurations(
    block_m: int, block_n: int, has_left: bool, has_right: bool, of_keys: bool, rows: int = 0
) -> torch.Tensor:
    """Rows of (first row or column of the block, queries, keys, left, right), int32.

    `rows`: blocks up to here are in it even if the sequence is shorter.
    """
    lefts, rights = (BOUNDS if has else [FOREVER] for has in (has_left, has_right))
    if has_left and has_right:
        lefts = BOUNDS[::3]
    block = block_n if of_keys else block_m
    found = [
        (start, sq, sk, left, right)
        for sq, sk in product(LENGTHS, LENGTHS)
        for start in range(0, max(sk if of_keys else sq, rows), block)
        for left, right in product(lefts, rights)
    ]
    return torch.tensor(found, dtype=torch.int32)


def check(
    found: torch.Tensor,
    cases: torch.Tensor,
    of_keys: bool,
    blocks: tuple[int, int],
    pads_queries: bool,
    most_unseen: int = 1,
) -> bool:
    """Compare `found`, rows of (begin, full_begin, full_end, end), with the definition for each of `cases`.

    Exactly the blocks that some position of a case's own block sees must be visited. If there is none, `most_unseen`
    may be. All positions must see all of a full block. pads_queries: queries that do not exist may lie in it.

    Returns whether all visited blocks that need no mask are full.
    """
    block, other = reversed(blocks) if of_keys else blocks
    first, sq, sk, left, right = (x.long()[:, None, None] for x in cases.unbind(1))
    length, others = (sk, sq) if of_keys else (sq, sk)
    own = first + torch.arange(block)[:, None]
    at = torch.arange(-(-max(LENGTHS) // other) * other)
    pair = sees(at, own, sk - sq, left, right) if of_keys else sees(own, at, sk - sq, left, right)
    visible = (pair & (own < length) & (at < others)).any(1).unflatten(1, (-1, other)).any(-1)  # [cases, blocks]
    may_be_full = torch.where(at < others, pair | (own >= length), torch.tensor(pads_queries))
    whole = may_be_full.all(1).unflatten(1, (-1, other)).all(-1)
    begin, full_begin, full_end, end = (x[:, None] for x in found.long().unbind(1))
    start = at[::other]
    full = (full_begin <= start) & (start < full_end)
    visited = ((begin <= start) & (start < full_begin)) | full | ((full_end <= start) & (start < end))
    some = visible.any(1)
    assert torch.equal(visited[some], visible[some])
    assert bool((visited[~some].sum(1) <= most_unseen).all())
    assert not bool((full & ~whole).any())
    return torch.equal(full, whole & visited)
