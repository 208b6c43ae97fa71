"""Every case of `cases.py` on every backend, forward and backward, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from kvcache_cases import KVCACHE_CASES
from poison import poisoned_allocations
from refusals import ANY, ONLY, REFUSALS, refusal
from targets import SPECIALISED, TARGETS, by_the_host_without_keys

import diyfa
from diyfa import registry
from diyfa.testing import assert_within_budget, attention_function, make_inputs, run_case


def _combinations() -> list[tuple[str, str, str]]:
    """(backend, variant, case): the preferred kernel for every case, each kernel for the cases that say so."""
    rows = []
    for name, target in TARGETS.items():
        kernels = [kernel for kernel in diyfa.kernels_for(name) if kernel not in SPECIALISED]
        for case in CASES.values():
            if case.large and target.interpreted:
                continue
            rows += [(name, variant, case.name) for variant in ("auto", *(kernels if case.all_variants else ()))]
    return rows


@pytest.mark.parametrize("combination", _combinations(), ids="-".join)
def test_attention(combination: tuple[str, str, str]) -> None:
    backend, variant, name = combination
    target, case = TARGETS[backend], CASES[name]
    inputs = make_inputs(case, target.device)
    arch = registry.load_backend(backend).arch(torch.device(target.device))
    reason = refusal(backend, arch, variant, name)
    attend = attention_function(case, backend=target.backend, variant=variant)
    if reason is not None:
        with pytest.raises(ValueError, match="cannot run") as error:
            attend(*inputs.leaves, **inputs.options)
        assert reason in str(error.value)
        return
    with poisoned_allocations(), by_the_host_without_keys(target, case):
        results = run_case(attend, inputs)
    assert_within_budget(results, case, target.oracle_device)


def test_refusals_name_existing_cases() -> None:
    """The list cannot hide behind names that nothing runs."""
    for backend, variant, case in REFUSALS:
        assert backend.split("@")[0] in registry.BUILTIN_BACKENDS
        assert case == ONLY or case in CASES or case in KVCACHE_CASES, f"refusals.txt lists the unknown case {case}"
        assert case == ONLY or variant in (ANY, "auto") or CASES[case].all_variants
