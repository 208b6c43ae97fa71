"""Whose tile counter a launch gets."""

from __future__ import annotations

import pytest
import torch

from diyfa.backends.cuda.gluon import tile_counter
from diyfa.backends.cuda.gluon.tile_counter import launch_counter


@pytest.fixture(autouse=True)
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counter, "_counters", {})


def test_launches_on_one_stream_share_a_counter() -> None:
    x = torch.zeros(1)
    counter = launch_counter(x)
    assert counter.dtype == torch.int32 and counter.tolist() == [0, 0]
    assert launch_counter(x) is counter


def test_each_launch_in_a_graph_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    kept = launch_counter(x)
    monkeypatch.setattr(tile_counter, "_is_capturing", lambda x: True)
    first, second = launch_counter(x), launch_counter(x)
    assert len({kept.data_ptr(), first.data_ptr(), second.data_ptr()}) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: streams and graphs")
def test_streams_and_graphs_do_not_share() -> None:
    x = torch.zeros(1, device="cuda")
    here = launch_counter(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = launch_counter(x)
        assert launch_counter(x) is other
    assert other.data_ptr() != here.data_ptr() and other.tolist() == [0, 0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch_counter(x)
        captured += 1
    for _ in range(2):
        graph.replay()
        assert captured.tolist() == [1, 1]
    assert captured.data_ptr() not in (here.data_ptr(), other.data_ptr())
