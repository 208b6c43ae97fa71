"""Random cases on every backend against the float64 reference.

The default few are always the same; DIYFA_FUZZ=N runs N new ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from poison import poisoned_allocations
from refusals import refused_features
from strategies import cases
from targets import TARGETS, by_the_host_without_keys

from diyfa.testing import (
    YARDSTICK_DRAWS,
    AttentionCase,
    assert_within_budget,
    attention_function,
    make_inputs,
    run_case,
)

# Among thousands of random cases are some in which the yardstick's error is large in few draws of inputs only.
DRAWS = 4 * YARDSTICK_DRAWS
EXAMPLES = int(os.environ.get("DIYFA_FUZZ", "0"))


@pytest.mark.parametrize("backend", TARGETS)
def test_random_cases(backend: str) -> None:
    target = TARGETS[backend]

    @settings(
        max_examples=EXAMPLES or (5 if target.interpreted else 40),
        derandomize=not EXAMPLES,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(70 if target.interpreted else 200, refused_features(backend)))
    def check(case: AttentionCase) -> None:
        attend = attention_function(case, backend=backend)
        inputs = make_inputs(case, target.device)
        with poisoned_allocations(), by_the_host_without_keys(target, case):
            results = run_case(attend, inputs)
        assert_within_budget(results, case, target.oracle_device, DRAWS)

    check()
