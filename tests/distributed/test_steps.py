"""What the steps of a ring compute: every pair of query and key that the mask leaves, once; no processes here."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from diyfa.distributed.sharding import joined, ranges, rank_segments
from diyfa.distributed.steps import Call, ring_steps


def visible(sequences: tuple[int, ...], window: tuple[int, int]) -> torch.Tensor:
    """How often each pair is to be computed, [rows, rows]."""
    *offsets, rows = sequences
    found = torch.zeros(rows, rows, dtype=torch.int64)
    for start, stop in pairwise(offsets):
        distance = torch.arange(stop - start) - torch.arange(stop - start)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            seen &= distance >= -window[0]
        if window[1] >= 0:
            seen &= distance <= window[1]
        found[start:stop, start:stop] = seen
    return found


def pairs_of(call: Call) -> torch.Tensor:
    """The pairs that one call computes, of the rows that it is given: as flash_attention and its packed form do."""
    sizes = [stop - start for start, stop in (call.queries, call.keys)]
    found = torch.zeros(*sizes, dtype=torch.int64)
    offsets = (call.offsets_q, call.offsets_k) if call.offsets_q else ((0, sizes[0]), (0, sizes[1]))
    for (q0, q1), (k0, k1) in zip(pairwise(offsets[0]), pairwise(offsets[1]), strict=True):
        distance = torch.arange(k1 - k0) - (torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0))[:, None]
        left, right = call.window
        assert left >= -1 and right >= -1
        seen = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
        found[q0:q1, k0:k1] = seen
    return found


def assert_stands_where_it_says(call: Call, queries: torch.Tensor, keys: torch.Tensor) -> None:
    """`queries` and `keys`: (sequence, position) of each row that a call is given, [rows, 2]."""
    ends = (call.offsets_q, call.offsets_k) if call.offsets_q else ((0, len(queries)), (0, len(keys)))
    for (q0, q1), (k0, k1), origin in zip(pairwise(ends[0]), pairwise(ends[1]), call.origins, strict=True):
        if q0 < q1 and k0 < k1:
            for rows, first in ((queries[q0:q1], origin.query), (keys[k0:k1], origin.key)):
                assert set(rows[:, 0].tolist()) == {origin.sequence}
                assert rows[:, 1].tolist() == list(range(first, first + len(rows)))


def drawn(seed: int) -> tuple[tuple[int, ...], int, tuple[int, int], str, bool]:
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4, 8])
    rows = ranks * rng.randint(1, 20)
    packed = rng.random() < 0.6
    if packed:
        cuts = sorted(rng.randint(0, rows) for _ in range(rng.randint(1, 6)))
        sequences = (*cuts, rows)
    else:
        sequences = (0, rows, rows)
    wide = rng.choice([3, 10, rows])
    window = rng.choice([(-1, -1), (-1, 0), (rng.randint(0, wide), 0), (rng.randint(-1, wide), rng.randint(-1, wide))])
    return sequences, ranks, window, rng.choice(["zigzag", "none"]), packed


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_visible_pair_is_computed_once(first, apart):
    for seed in range(first, first + 50):
        sequences, ranks, window, load_balance, packed = drawn(seed)
        layout = rank_segments(sequences, ranks, load_balance)
        rows = [ranges((s.row, s.row + s.rows) for s in segments) for segments in layout]
        places = [
            torch.tensor([(s.sequence, x) for s in own for x in range(s.start, s.stop)]).view(-1, 2) for own in layout
        ]
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(sequences[-1])), seed
        assert {len(own) for own in rows} == {sequences[-1] // ranks}, seed
        found = torch.zeros(sequences[-1], sequences[-1], dtype=torch.int64)
        own_keys = torch.zeros(sequences[-1], dtype=torch.int64)
        shifts = set()
        for rank in range(ranks):
            steps = ring_steps(layout, rank, window, packed, apart)
            shifts.add(tuple(step.shift for step in steps))
            for step in steps:
                for call in step.calls:
                    queries, keys = rows[rank][slice(*call.queries)], rows[rank - step.shift][slice(*call.keys)]
                    found[queries[:, None], keys] += pairs_of(call)
                    if apart:
                        own = places[rank][slice(*call.queries)], places[rank - step.shift][slice(*call.keys)]
                        assert_stands_where_it_says(call, *own)
                    if call.has_diagonal:
                        own_keys[queries] += 1
        assert len(shifts) == 1, f"{seed}: all ranks pass on alike"
        assert torch.equal(found, visible(sequences, window)), seed
        inside = torch.zeros_like(own_keys)
        inside[sequences[0] : sequences[-2]] = 1
        assert torch.equal(own_keys, inside), f"{seed}: a sink joins each row of a sequence once"


def test_a_causal_zigzag_takes_one_call_of_equal_work_in_every_step():
    layout = rank_segments((0, 64, 64), 4, "zigzag")
    for rank in range(4):
        steps = ring_steps(layout, rank, (-1, 0), False)
        assert [len(step.calls) for step in steps] == [1] * 4
        assert [int(pairs_of(step.calls[0]).sum()) for step in steps] == [16 * 17 // 2, *[16 * 16 // 2] * 3]


def test_packed_sequences_of_any_lengths_are_balanced():
    rng = random.Random(0)
    lens = [rng.randint(1, 800) for _ in range(20)]
    lens[-1] += -sum(lens) % 8
    sequences = (0, *accumulate(lens), sum(lens))
    for steps in zip(*(ring_steps(rank_segments(sequences, 8, "zigzag"), rank, (-1, 0), True) for rank in range(8)),
                     strict=True):  # fmt: skip
        assert all(len(step.calls) == 1 for step in steps)
        pairs = [int(pairs_of(step.calls[0]).sum()) for step in steps]
        assert max(pairs) < 1.05 * sum(pairs) / 8


def test_a_window_visits_neighbours_only():
    layout = rank_segments((0, 800, 800), 8, "none")
    assert [step.shift for step in ring_steps(layout, 3, (100, 0), False)] == [0, 1]
    assert [step.shift for step in ring_steps(layout, 3, (101, 0), False)] == [0, 1, 2]
    assert [step.shift for step in ring_steps(layout, 3, (100, 30), False)] == [0, 1, 7]
    zigzag = rank_segments((0, 800, 800), 8, "zigzag")
    assert [step.shift for step in ring_steps(zigzag, 3, (50, 0), False)] == [0, 1, 7]


def test_packed_windows_without_balance_take_few_calls():
    rng = random.Random(0)
    cuts = sorted(rng.randint(0, 8192) for _ in range(60))
    layout = rank_segments((0, *cuts, 8192, 8192), 8, "none")
    for rank in range(8):
        assert all(len(step.calls) <= 1 for step in ring_steps(layout, rank, (100, 0), True))


def test_neighbouring_segments_join():
    layout = rank_segments((0, 64, 64), 8, "zigzag")
    assert joined(layout) == (layout[0][0]._replace(stop=64),)
    first, second = joined(layout[:4])
    assert (first.start, first.stop, second.start, second.stop) == (0, 16, 48, 64)


@pytest.mark.parametrize("ranks, rows", [(4, 30), (3, 8)])
def test_rows_that_cannot_be_divided_are_refused(ranks, rows):
    with pytest.raises(ValueError, match=f"{rows} rows cannot be divided evenly between {ranks} ranks"):
        rank_segments((0, rows, rows), ranks, "zigzag")
