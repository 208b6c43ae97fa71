"""Repeated calls of compiled kernels hand the driver, bit for bit, what Triton's launcher does.

All is Triton's own, down to its function in C, but for the driver (`tests/simulators/cuda_driver`).
"""

from __future__ import annotations

import json

import pytest
import torch
from subprocesses import ROOT, SUPPORT, run_python

from diyfa.backends.cuda.runtime import replay

if not replay.IS_KNOWN:
    pytest.skip("calls are not repeated with this Triton", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("there is a driver: test_repeat.py runs on the device", allow_module_level=True)

GROWING = {"growing": 3, "growing in the mode": 2}  # plans
CASES = ["absent tensors", "descriptors"]  # `replayed_launches.py` has others, which take longer


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    driver, cache = tmp_path_factory.mktemp("driver"), tmp_path_factory.mktemp("cache")
    printed = run_python(
        "from replayed_launches import main; main()", SUPPORT, ROOT / "tests",
        arguments=[str(driver), *CASES, "packed", *GROWING], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache),
    )  # fmt: skip
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_driver_gets_the_same(calls, case):
    assert calls[case]["described"] == [True, True, False, False]
    first, *others = calls[case]["launches"]
    assert first == others[0] == others[1] == others[2]
    (launch,) = first
    parameters = [x for x in launch if isinstance(x, list)]
    read = {word for x in parameters for word in x}
    assert {"q", "k", "v", "out", "lse"} <= read and not any("memory" in str(word) for word in read)
    assert any(len(x) == 16 for x in parameters) == (case == "descriptors")
    assert case == "descriptors" or "sinks" in read


def test_packed_gradients_are_cleared_where_no_sequence_is(calls):
    assert calls["packed"]["described"] == [True, True, False, False]
    first, *others = calls["packed"]["launches"]
    assert first == others[0] == others[1] == others[2]
    cleared = [
        {word for x in launch if isinstance(x, list) for word in x} - {0}
        for launch in first
        if "_clear_kernel" in launch
    ]
    assert "_fwd_kernel" in first[0]  # which clears its own rows
    of_queries, of_keys = cleared
    assert of_keys == {"cu_seqlens_k", "dk", "dv"}
    assert {"cu_seqlens_q", "dq"} < of_queries and len(of_queries) == 3  # delta, which is nobody's but the call's


@pytest.mark.parametrize("case", GROWING)
def test_a_cache_that_grows_is_handed_on_as_without_earlier_calls(calls, case):
    """Lengths that share a plan, and others in turn."""
    for replayed, usual in calls[case]["launches"]:
        assert replayed == usual and len(usual) == 2
        read = {word for launch in usual for x in launch if isinstance(x, list) for word in x}
        assert {"q", "k", "v", "out", "lse"} <= read
    assert calls[case]["plans"] == [GROWING[case]]
