"""What each step of a ring computes, decided from the segments that the ranks hold; no tensors here.

In a step a rank has its own queries and the keys of one rank. Two segments, queries [a, a + n) and keys [b, b + m) of
one sequence, are one block of the score matrix. Attention of that block alone is an ordinary call: masks are aligned to
its bottom right, so a bound of `left` keys before a query becomes left - e, where e is how far the last query of the
block stands behind its last key; once rows and keys outside the mask are cut off, no bound is negative.

Blocks side by side that hide nothing are one block, so a causal zigzag takes one call in every step: all queries with
the first half of the keys, or the second half of the queries with all keys. The blocks of packed sequences that share a
mask are one packed call; rows and keys between them become sequences without keys, or without queries.

With dropout a call says where its rows and keys stand in their sequence, so that only blocks are one whose rows and
keys are neighbours there, too: `apart`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from diyfa.distributed.sharding import Segment, Segments, joined
from diyfa.ops import bounds_that_exclude

Range = tuple[int, int]


class Origin(NamedTuple):
    """Of a block: its sequence, and the positions there of its first query and key."""

    sequence: int
    query: int
    key: int


NOWHERE = Origin(0, 0, 0)  # of sequences without keys, or without queries


class Block(NamedTuple):
    """Queries and keys by the rows [first, last) that this rank and the keys' owner hold; -1 is unbounded."""

    queries: Range
    keys: Range
    window: tuple[int, int]
    own: bool  # whether it holds every query's own key: once for each row, where a sink joins
    origin: Origin

    @property
    def whole(self) -> bool:
        return self.window == (-1, -1)


class Call(NamedTuple):
    """One attention call of these rows; of packed sequences with their offsets within them. Where blocks were joined
    an origin is that of the first."""

    queries: Range
    keys: Range
    window: tuple[int, int]
    own: bool
    origins: tuple[Origin, ...]  # one, or of each packed sequence
    offsets_q: tuple[int, ...] = ()
    offsets_k: tuple[int, ...] = ()


class Step(NamedTuple):
    """The keys come from the rank `shift` places before this one."""

    shift: int
    calls: tuple[Call, ...]


def _block(q: Segment, k: Segment, q_row: int, k_row: int, window: tuple[int, int], packed: bool) -> Block | None:
    """The block of two segments without what the mask hides at its edges; None where nothing is left.

    Bounds that hide nothing are dropped, so that blocks can be joined; but not those of packed sequences' own keys,
    which are all the same and make one call.
    """
    left, right = window
    q_first, q_last, k_first, k_last = q.start, q.stop, k.start, k.stop
    if left >= 0:
        k_first, q_last = max(k_first, q.start - left), min(q_last, k.stop + left)
    if right >= 0:
        k_last, q_first = min(k_last, q.stop + right), max(q_first, k.start - right)
    if q_first >= q_last or k_first >= k_last:
        return None
    behind = q_last - k_last
    if not (packed and q == k):
        left = -1 if left < 0 or left - behind >= k_last - k_first - 1 else left - behind
        right = -1 if right < 0 or right + behind >= q_last - q_first - 1 else right + behind
    return Block(
        (q_row + q_first - q.start, q_row + q_last - q.start),
        (k_row + k_first - k.start, k_row + k_last - k.start),
        (left, right),
        q == k,
        Origin(q.sequence, q_first, k_first),
    )


def _join(blocks: list[Block]) -> list[Block]:
    """Blocks of one sequence with neighbours that hide nothing made one: first along the keys, then the queries."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last and last.whole and block.whole and last.queries == block.queries and last.keys[1] == block.keys[0]:
            found[-1] = last._replace(keys=(last.keys[0], block.keys[1]), own=last.own or block.own)
        else:
            found.append(block)
    blocks, found = found, []
    for block in blocks:
        last = found[-1] if found else None
        alike = last and last.whole and block.whole and last.keys == block.keys and last.own == block.own
        if last and alike and last.queries[1] == block.queries[0]:
            found[-1] = last._replace(queries=(last.queries[0], block.queries[1]))
        else:
            found.append(block)
    return found


def _by_sequence(segments: Segments) -> dict[int, list[tuple[Segment, int]]]:
    """The segments of each sequence, each with the row at which it is held."""
    found: dict[int, list[tuple[Segment, int]]] = {}
    row = 0
    for segment in segments:
        if segment.sequence >= 0:
            found.setdefault(segment.sequence, []).append((segment, row))
        row += segment.rows
    return found


def blocks_of(
    queries: Segments, keys: Segments, window: tuple[int, int], packed: bool, apart: bool = False
) -> list[Block]:
    """The blocks that queries of one rank and keys of another have in common."""
    found = []
    by_sequence = _by_sequence(keys)
    for sequence, own in _by_sequence(queries).items():
        theirs = by_sequence.get(sequence, [])
        # Held in the order of their positions: causal as they lie.
        if own == theirs and window == (-1, 0) and (len(own) == 1 or not apart):
            rows = own[0][1], own[-1][1] + own[-1][0].rows
            first = own[0][0].start
            found.append(Block(rows, rows, window, True, Origin(sequence, first, first)))
            continue
        pairs = [_block(q, k, q_row, k_row, window, packed) for q, q_row in own for k, k_row in theirs]
        some = [block for block in pairs if block is not None]
        found += some if apart else _join(some)
    return found


def _packed(blocks: list[Block]) -> Call:
    """One call of blocks that ascend in rows and keys."""
    first, last = blocks[0], blocks[-1]
    offsets_q, offsets_k, origins = [0], [0], []
    for block in blocks:
        q0, q1 = (row - first.queries[0] for row in block.queries)
        k0, k1 = (row - first.keys[0] for row in block.keys)
        if q0 > offsets_q[-1]:
            offsets_q.append(q0)
            offsets_k.append(offsets_k[-1])
            origins.append(NOWHERE)
        if k0 > offsets_k[-1]:
            offsets_q.append(offsets_q[-1])
            offsets_k.append(k0)
            origins.append(NOWHERE)
        offsets_q.append(q1)
        offsets_k.append(k1)
        origins.append(block.origin)
    return Call(
        (first.queries[0], last.queries[1]),
        (first.keys[0], last.keys[1]),
        first.window,
        first.own,
        tuple(origins),
        tuple(offsets_q),
        tuple(offsets_k),
    )


def _calls(blocks: list[Block], packed: bool) -> tuple[Call, ...]:
    if not packed:
        return tuple(Call(*block[:-1], (block.origin,)) for block in blocks)
    calls = []
    in_order = sorted(blocks, key=lambda block: (not block.own, block.window, block.queries, block.keys))
    for _, group in groupby(in_order, lambda block: (block.own, block.window)):
        ascending: list[list[Block]] = []
        for block in group:
            for chain in ascending:
                rows, keys = (after[0] - before[1] for before, after in zip(chain[-1][:2], block[:2], strict=True))
                # Rows of a sequence without keys still meet the sink, so own blocks leave none between them.
                if keys >= 0 and (rows == 0 if block.own else rows >= 0):
                    chain.append(block)
                    break
            else:
                ascending.append([block])
        calls += [_packed(chain) for chain in ascending]
    return tuple(calls)


@lru_cache(maxsize=64)
def steps_of(
    layout: tuple[Segments, ...], rank: int, window: tuple[int, int], packed: bool, apart: bool = False
) -> tuple[Step, ...]:
    """The steps of one rank. All ranks have the same shifts, those at which any has something to compute."""
    ranks = len(layout)
    if apart:
        layout = tuple(joined([own]) for own in layout)
    found = []
    for shift in range(ranks):
        blocks = blocks_of(layout[rank], layout[rank - shift], window, packed, apart)
        anyone = (
            shift == 0
            or blocks
            or any(blocks_of(layout[other], layout[other - shift], window, packed) for other in range(ranks))
        )
        if anyone:
            found.append(Step(shift, _calls(blocks, packed)))
    return tuple(found)


def normalised(window: tuple[int, int], rows: int) -> tuple[int, int]:
    """The window without bounds beyond every key."""
    return bounds_that_exclude(*window, rows, rows)
