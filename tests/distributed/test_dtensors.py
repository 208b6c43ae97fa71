"""DTensors sharded over batch or heads run through `flash_attention` and its relatives, over gloo processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dtensor_cases import run_compiled, run_flash_attn, run_packed, run_padded, run_refused
from gloo_workers import Workers

RANKS = 4
CUTS = [("batch", "heads"), ("heads", "batch"), ("whole", "heads"), ("heads", "heads"), ("batch", "batch"),
        ("whole", "whole")]  # fmt: skip


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    with Workers(RANKS, folder) as found:
        yield found


@pytest.mark.parametrize("cuts", CUTS, ids="-".join)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_out_lse_and_gradients(workers: Workers, layout: str, cuts: tuple[str, str]) -> None:
    for features, dropout_p in ((False, 0.0), (True, 0.0), (True, 0.3)):
        assert workers.run(run_padded, layout, cuts, features, dropout_p) == [[]] * RANKS


def test_a_batch_that_the_mesh_does_not_divide(workers: Workers) -> None:
    for batch in (5, 1):
        assert workers.run(run_padded, "bhsd", ("batch", "heads"), True, 0.3, batch) == [[]] * RANKS


@pytest.mark.parametrize("cuts", [("whole", "heads"), ("heads", "heads")], ids="-".join)
def test_packed_sequences(workers: Workers, cuts: tuple[str, str]) -> None:
    for dropout_p in (0.0, 0.3):
        assert workers.run(run_packed, cuts, dropout_p) == [[]] * RANKS


@pytest.mark.parametrize("packing", ["", "kv", "qkv"])
def test_flash_attn_functions(workers: Workers, packing: str) -> None:
    for cuts in (("batch", "heads"), ("heads", "whole")):
        assert workers.run(run_flash_attn, packing, cuts) == [[]] * RANKS


def test_compiled(workers: Workers) -> None:
    assert workers.run(run_compiled) == [[]] * RANKS


def test_refusals(workers: Workers) -> None:
    expected = [
        "ValueError: q is sharded along its sequence, S(2): call diyfa.distributed.context_parallel_attention",
        "ValueError: q must be replicated or Shard(0) (batch), Shard(1) (heads), got placements (R, S(3))",
        "ValueError: q must be replicated or Shard(0) (batch), Shard(1) (heads), got placements (P(sum), R)",
        "ValueError: q, k, v must have equal placements on one mesh, got q (S(0), R) and k (R, S(1))",
        "ValueError: q, k, v must have equal placements on one mesh",
        "TypeError: q, k, v must all be DTensors or none, got DTensor, Tensor, Tensor",
        "ValueError: the 3 heads of k must be a multiple of 2 shards",
        "TypeError: alibi_slopes must be a DTensor beside q, k and v, got Tensor",
        "ValueError: alibi_slopes must have shape (16,) or (4, 16), got (8,)",
        "ValueError: rng_state must have shape (2,), seed and offset, got (34,)",
        "ValueError: DTensors must have 4 dimensions",
        *(f"TypeError: {name} is a DTensor: give each rank's part" for name in ("q", "q", "a", "sinks")),
    ]
    for found in workers.run(run_refused):
        for got, want in zip(found, expected, strict=True):
            message = re.sub(r"Shard\(dim=(\d)\)", r"S(\1)", got).replace("Replicate()", "R").replace("Partial", "P")
            assert message.startswith(want), got
