"""The cost model of context parallel attention: its arithmetic by hand, and what "auto" chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diyfa.distributed.cost import (
    BETWEEN_HOSTS,
    MACHINES,
    Machine,
    Work,
    cheapest,
    machine_for,
    ring_seconds,
    ring_timeline,
    ulysses_seconds,
    visible_fraction,
)

HOPPER, ATLAS_A2 = (dict(MACHINES)[name] for name in ("sm_90", "Ascend910B"))
LONG = Work(8, 1, 32, 8, 131072, 128, 128, 2, share=0.5)


def test_a_ring_hides_transfers_shorter_than_a_step():
    assert ring_timeline([[1.0, 1.0, 1.0]] * 3, 0.5) == 3.0
    assert ring_timeline([[1.0, 1.0, 1.0]] * 3, 2.0) == 5.0
    # A late rank is waited for by the one that it sends to, and one step later by that one's neighbour.
    assert ring_timeline([[3.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 0.5) == 5.0


def test_seconds_by_hand():
    machine = Machine(flops=1e12, memory=1e30, peer=1e9, exchange=2e9, latency=0.0)
    work = Work(4, 1, 8, 2, 1000, 64, 64, 2, backward=False)
    flops = 4 * 8 * 1000 * 4000 * 64
    assert work.flops == flops
    assert work.kv_bytes == 2 * 2 * 1000 * 64 * 2
    step, transfer = flops / 1e12 / 4, work.kv_bytes / 1e9
    assert ring_seconds(work, machine) == pytest.approx(step + 3 * max(step, transfer))
    # q, out and four key/value heads, two of them sent twice; three quarters leave the rank.
    exchanged = (8 + 8 + 4 + 4) * 1000 * 64 * 2 * 3 / 4
    assert ulysses_seconds(work, machine) == pytest.approx(flops / 1e12 + exchanged / 2e9)
    both = replace(work, backward=True)
    home = 2 * work.kv_bytes / 1e9
    backward = 2.5 * step + 3 * max(2.5 * step, transfer + home) + home
    assert ring_seconds(both, machine) == pytest.approx(ring_seconds(work, machine) + backward)


def test_long_sequences_over_slow_links_take_the_ring():
    hosts = replace(HOPPER, peer=BETWEEN_HOSTS, exchange=BETWEEN_HOSTS)
    assert cheapest(LONG, hosts) == "ring"
    assert cheapest(replace(LONG, rows=2048), hosts) == "ulysses"
    assert cheapest(LONG, HOPPER) == "ulysses"  # nothing is cheaper than NVLink, and nothing to merge
    assert cheapest(replace(LONG, rows=2048, heads=30, heads_kv=30), hosts) == "ring"  # which eight ranks cannot share


def test_one_million_tokens_scale():
    """Against the same work on one chip, at the speed of the kernels alone."""
    for machine in (HOPPER, ATLAS_A2):
        forward = replace(LONG, backward=False)
        assert forward.flops / machine.flops / ring_seconds(forward, machine) > 0.9
        assert LONG.flops * 3.5 / machine.flops / ring_seconds(LONG, machine) > 0.93


def test_visible_fraction():
    assert visible_fraction((0, 100, 100), (-1, -1)) == 1.0
    assert visible_fraction((0, 100, 100), (-1, 0)) == 0.5
    assert visible_fraction((0, 100, 100), (10, 0)) == 0.1
    assert visible_fraction((0, 50, 100, 100), (-1, -1)) == 0.5
    assert visible_fraction((0, 0), (-1, -1)) == 1.0


def test_a_window_takes_the_ring():
    """Which then has two steps, where Ulysses moves as much as ever."""
    windowed = replace(LONG, share=visible_fraction((0, 2**20, 2**20), (4096, 0)), steps=2)
    assert cheapest(windowed, HOPPER) == "ring"


def test_a_group_that_spans_hosts_has_their_links(monkeypatch):
    groups = ([0, 1, 2, 3], "4", HOPPER.peer), ([2, 3, 4], "4", BETWEEN_HOSTS), ([0, 9], "0", HOPPER.peer)
    for ranks, local, peer in groups:
        monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _, ranks=ranks: ranks)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert machine_for("sm_90", None).peer == peer
