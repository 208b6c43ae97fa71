"""Context parallel attention over gloo processes: results as on one device, under the same error budget."""

from __future__ import annotations

import os

import pytest
from context_parallel_cases import MATRIX, How, drawn, run_sharded
from gloo_workers import Workers

from diyfa.testing import AttentionCase, assert_within_budget

RANKS = 4
DRAWN = int(os.environ.get("DIYFA_DRAWN_CASES", "12"))  # 200 take minutes


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    with Workers(RANKS, tmp_path_factory.mktemp("gloo")) as found:
        yield found


def check(workers: Workers, cases: list[tuple[AttentionCase, How]]) -> None:
    """Every case within its budget; all failures are told at once."""
    failures = []
    for case, how in cases:
        try:
            assert_within_budget(workers.run(run_sharded, case, how)[0], case)
        except AssertionError as error:
            failures.append(f"{how}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("method", ["ring", "ulysses", "both"])
def test_matrix(workers, method):
    check(workers, [(case, How(method)) for case in MATRIX])


@pytest.mark.parametrize("method", ["ring", "both"])
def test_matrix_without_balance(workers, method):
    check(workers, [(case, How(method, "none")) for case in MATRIX if case.causal or case.window != (-1, -1)])


def test_drawn(workers):
    check(workers, [drawn(seed, RANKS) for seed in range(DRAWN)])
