"""Every case of `kvcache_cases.py` on every backend with a kernel for it, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvcache_cases import KVCACHE_CASES, CacheCase, assert_appended, assert_in_budget, run_case
from refusals import refusal
from targets import TARGETS

import diyfa
from diyfa import registry
from diyfa.testing import poisoned_allocations

BACKENDS = [name for name in TARGETS if diyfa.kernels_for(name, "kvcache_fwd")]
SMALLER = 3  # where kernels run in an interpreter, one of so many drawn calls is enough


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _check(backend: str, case: CacheCase) -> None:
    target = TARGETS[backend]
    with registry.use_backend(target.backend), poisoned_allocations():
        out, lse, k_cache, v_cache = run_case(case, target.device)
    assert_in_budget(case, out, lse)
    assert_appended(case, k_cache, v_cache)


@pytest.mark.parametrize("combination", [(b, name) for b in BACKENDS for name in KVCACHE_CASES], ids="-".join)
def test_kvcache(combination: tuple[str, str]) -> None:
    backend, name = combination
    target = TARGETS[backend]
    reason = refusal(backend, registry.load_backend(backend).arch(torch.device(target.device)), "auto", name)
    if reason is None:
        _check(backend, KVCACHE_CASES[name])
        return
    with registry.use_backend(target.backend), pytest.raises(ValueError, match="cannot run") as error:
        run_case(KVCACHE_CASES[name], target.device)
    assert reason in str(error.value)
