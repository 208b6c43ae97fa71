"""The schedule of a ring: the attention calls of each step, from the segments that the ranks hold. No tensors here.

In a step a rank has its own queries and the keys of one rank. Two segments of one sequence, queries [a, a + n) and keys
[b, b + m), are one block of the score matrix. Attention over that block is an ordinary call. Its mask is aligned to the
block's bottom right corner, so the window's bounds shift by e, the distance from the block's last key to its last
query: left becomes left - e, right becomes right + e. Rows and keys that the mask hides are cut off first, so that no
bound is negative.

Adjacent blocks without a mask are joined. So a causal zigzag takes one call a step: all queries with the first half of
the keys, or the second half of the queries with all keys. Blocks of packed sequences with equal masks are one packed
call. Rows between two blocks of the call become a sequence without keys, and keys between them one without queries.

Dropout needs the position of each call's rows and keys in their sequence. So `separate_blocks` joins no blocks. It
joins only segments of one rank that are adjacent in their sequence.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from diyfa.distributed.sharding import Segment, Segments, joined
from diyfa.ops import normalised_window

Range = tuple[int, int]


class Origin(NamedTuple):
    """The origin of a block: its sequence, and the positions of its first query and first key in that sequence."""

    sequence: int
    query: int
    key: int


NOWHERE = Origin(0, 0, 0)  # for sequences without keys or without queries


class Block(NamedTuple):
    """A rectangle of the score matrix. A range is [first, end), counted from the first row of a rank's shard."""

    queries: Range  # in this rank's shard
    keys: Range  # in the shard of the rank that owns the keys
    window: tuple[int, int]  # (left, right); -1: unbounded
    has_diagonal: bool  # contains the key at each query's own position. A row has one such block, which adds the sink
    origin: Origin

    @property
    def is_unmasked(self) -> bool:
        return self.window == (-1, -1)


class Call(NamedTuple):
    """One attention call. The offsets of packed sequences count from the call's first row, or first key."""

    queries: Range
    keys: Range
    window: tuple[int, int]
    has_diagonal: bool
    origins: tuple[Origin, ...]  # one, or one for each packed sequence; a joined block has the first block's
    offsets_q: tuple[int, ...] = ()
    offsets_k: tuple[int, ...] = ()


class Step(NamedTuple):
    """The calls of a rank's queries on the keys of rank `rank - shift`."""

    shift: int
    calls: tuple[Call, ...]


def _block(q: Segment, k: Segment, q_row: int, k_row: int, window: tuple[int, int], packed: bool) -> Block | None:
    """Return the block of two segments without the rows and keys that the mask hides, or None if none remain.

    `q_row`, `k_row`: first rows of the segments in their shards. Bounds that hide nothing become -1, so that blocks can
    be joined. A packed sequence's block on its own keys keeps its bounds: they are equal for all sequences, which then
    make one call.
    """
    left, right = window
    q_begin, q_end, k_begin, k_end = q.start, q.stop, k.start, k.stop  # positions in the sequence
    if left >= 0:
        k_begin, q_end = max(k_begin, q.start - left), min(q_end, k.stop + left)
    if right >= 0:
        k_end, q_begin = min(k_end, q.stop + right), max(q_begin, k.start - right)
    if q_begin >= q_end or k_begin >= k_end:
        return None
    distance = q_end - k_end  # from the block's last key to its last query
    if not (packed and q == k):
        left = -1 if left < 0 or left - distance >= k_end - k_begin - 1 else left - distance
        right = -1 if right < 0 or right + distance >= q_end - q_begin - 1 else right + distance
    return Block(
        (q_row + q_begin - q.start, q_row + q_end - q.start), (k_row + k_begin - k.start, k_row + k_end - k.start),
        (left, right), q == k, Origin(q.sequence, q_begin, k_begin),
    )  # fmt: skip


def _join(blocks: list[Block]) -> list[Block]:
    """Join adjacent blocks of one sequence that have no mask, first along the keys, then along the queries."""
    for join in (_along_keys, _along_queries):
        joined_blocks: list[Block] = []
        for block in blocks:
            last = joined_blocks[-1] if joined_blocks else None
            both = join(last, block) if last and last.is_unmasked and block.is_unmasked else None
            if both:
                joined_blocks[-1] = both
            else:
                joined_blocks.append(block)
        blocks = joined_blocks
    return blocks


def _along_keys(a: Block, b: Block) -> Block | None:
    """Return two blocks as one, or None unless b's keys follow those of a."""
    if a.queries != b.queries or a.keys[1] != b.keys[0]:
        return None
    return a._replace(keys=(a.keys[0], b.keys[1]), has_diagonal=a.has_diagonal or b.has_diagonal)


def _along_queries(a: Block, b: Block) -> Block | None:
    """Return two blocks as one, or None unless b's queries follow those of a."""
    if a.keys != b.keys or a.has_diagonal != b.has_diagonal or a.queries[1] != b.queries[0]:
        return None
    return a._replace(queries=(a.queries[0], b.queries[1]))


def _by_sequence(segments: Segments) -> dict[int, list[tuple[Segment, int]]]:
    """Return {sequence: [(segment, its first row in the shard)]}."""
    by_sequence: dict[int, list[tuple[Segment, int]]] = {}
    row = 0
    for segment in segments:
        if segment.sequence >= 0:
            by_sequence.setdefault(segment.sequence, []).append((segment, row))
        row += segment.rows
    return by_sequence


def score_blocks(
    queries: Segments, keys: Segments, window: tuple[int, int], packed: bool, separate_blocks: bool = False
) -> list[Block]:
    """Return the blocks of the score matrix of one rank's queries and the keys of the same or another rank."""
    blocks = []
    by_sequence = _by_sequence(keys)
    for sequence, query_segments in _by_sequence(queries).items():
        key_segments = by_sequence.get(sequence, [])
        # A causal call on the rank's own keys needs one block: segments ascend by position, so the causal mask of the
        # shard's rows is that of the positions.
        if query_segments == key_segments and window == (-1, 0) and (len(query_segments) == 1 or not separate_blocks):
            rows = query_segments[0][1], query_segments[-1][1] + query_segments[-1][0].rows
            start = query_segments[0][0].start
            blocks.append(Block(rows, rows, window, True, Origin(sequence, start, start)))
            continue
        pairs = [_block(q, k, q_row, k_row, window, packed) for q, q_row in query_segments for k, k_row in key_segments]
        visible = [block for block in pairs if block is not None]
        blocks += visible if separate_blocks else _join(visible)
    return blocks


def _packed(blocks: list[Block]) -> Call:
    """Return one packed call of blocks with equal masks, each of which follows the one before in rows and in keys."""
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
        (first.queries[0], last.queries[1]), (first.keys[0], last.keys[1]), first.window, first.has_diagonal,
        tuple(origins), tuple(offsets_q), tuple(offsets_k),
    )  # fmt: skip


def _calls(blocks: list[Block], packed: bool) -> tuple[Call, ...]:
    """Return the calls of a step: one for each block, or packed calls of blocks with equal masks."""
    if not packed:
        return tuple(Call(*block[:-1], (block.origin,)) for block in blocks)
    calls = []
    in_order = sorted(blocks, key=lambda block: (not block.has_diagonal, block.window, block.queries, block.keys))
    for _, group in groupby(in_order, lambda block: (block.has_diagonal, block.window)):
        chains: list[list[Block]] = []  # blocks that become one call, ascending in rows and in keys
        for block in group:
            for chain in chains:
                last = chain[-1]
                gap_rows, gap_keys = block.queries[0] - last.queries[1], block.keys[0] - last.keys[1]
                # Rows between two blocks would add the sink, too. So blocks that add it may have no rows between them.
                if gap_keys >= 0 and (gap_rows == 0 if block.has_diagonal else gap_rows >= 0):
                    chain.append(block)
                    break
            else:
                chains.append([block])
        calls += [_packed(chain) for chain in chains]
    return tuple(calls)


@lru_cache(maxsize=64)
def ring_steps(
    layout: tuple[Segments, ...], rank: int, window: tuple[int, int], packed: bool, separate_blocks: bool = False
) -> tuple[Step, ...]:
    """Return the steps of one rank. All ranks have the same shifts: those at which any rank has work."""
    ranks = len(layout)
    if separate_blocks:
        layout = tuple(joined([segments]) for segments in layout)
    steps = []
    for shift in range(ranks):
        blocks = score_blocks(layout[rank], layout[rank - shift], window, packed, separate_blocks)
        pairs = ((layout[other], layout[other - shift]) for other in range(ranks))
        if shift == 0 or blocks or any(score_blocks(*pair, window, packed) for pair in pairs):
            steps.append(Step(shift, _calls(blocks, packed)))
    return tuple(steps)


def normalised(window: tuple[int, int], rows: int) -> tuple[int, int]:
    """Return the window with -1 for bounds that hide no key."""
    return normalised_window(*window, rows, rows)
