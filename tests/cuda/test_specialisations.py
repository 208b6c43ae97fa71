"""Nothing of the cuda backend is compiled for a length, a total, a batch size or a window.

Triton compiles a kernel anew when an integer argument becomes, or ceases to be, a multiple of 16 (or 1, left out here):
a length costs two kernels at most, not one for each value.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTENTION = {"_fwd_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"}
SHORT = {"_fwd_kernel", "_bwd_short_kernel"}
LENGTHS = {"seqlen_q", "seqlen_k"}
# Strides that are lengths times something: heads of 40 features, and a bias.
OF_LENGTHS_TIMES_40 = {f"stride_{x}h" for x in ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
OF_WHAT_IS_CLEARED = {"y_ptr", "statistics_ptr", "stride_ym", "stride_yh"}  # out and lse, dq, dk and dv: three kernels
OF_BIAS = {f"stride_bias{x}" for x in "bhm"} | {f"stride_out{x}" for x in "bhm"}
# run -> (kernels for one tile at most, the arguments that may tell them apart). One length is a multiple of 16 or not,
# two lengths are so independently; products of lengths also by whether 4 or 2 divides the length.
EXPECTED: dict[str, tuple[int, set[str]]] = {
    "packed": (2, LENGTHS),
    "packed, window": (2, LENGTHS),
    "packed, cross": (4, LENGTHS),
    "packed, dlse": (2, LENGTHS),
    "packed, D=40": (2, LENGTHS),
    "bshd": (2, LENGTHS),
    "bhsd": (2, LENGTHS),
    "bhsd, cross": (4, LENGTHS),
    "bhsd, dlse": (2, LENGTHS),
    "bhsd, D=40": (3, LENGTHS | OF_LENGTHS_TIMES_40),
    "short": (4, LENGTHS),
    "short, dlse": (4, LENGTHS),
    "short, packed": (4, LENGTHS),
    "bias": (4, LENGTHS | OF_BIAS),
    "bias of keys": (5, LENGTHS | OF_BIAS),  # one sample has no stride
    "bias of queries": (4, LENGTHS | OF_BIAS),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, dict]]:
    """200 calls, forward and backward, of random sizes for each run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "DIYFA_ARCH": "sm_90", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/cuda_specialisations.py")],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("run", EXPECTED)
def test_kernels_compiled_do_not_grow_with_lengths(counts, run):
    most, causes = EXPECTED[run]
    kernels = counts[run]
    more = {"bias": {"_bwd_dbias_kernel"}, "packed": {"_clear_kernel"}}
    usual = SHORT if run.startswith("short") else ATTENTION
    of_features = {name for word, names in more.items() if word in run.replace(",", "").split() for name in names}
    assert set(kernels) == usual | of_features
    for kernel, found in kernels.items():
        own = kernel == "_clear_kernel"
        unexpected = set(found["causes"]) - (OF_WHAT_IS_CLEARED if own else causes)
        assert not unexpected, f"{kernel} is compiled anew for {sorted(unexpected)}"
        assert found["keys"] <= (3 if own else most), (
            f"{kernel}: {found['keys']} kernels for one tile, by {found['causes']}"
        )
        assert found["tiles"] <= 3, f"{kernel}: {found['tiles']} tiles"


def test_lengths_are_told_apart_at_all(counts):
    """The counting sees what it should: a multiple of 16 has a kernel of its own."""
    assert counts["bhsd"]["_fwd_kernel"]["keys"] == 2
    assert counts["bhsd"]["_fwd_kernel"]["causes"] == ["seqlen_k", "seqlen_q"]


def test_hopper_kernel(counts):
    if "Hopper" not in counts:
        pytest.skip("the Hopper kernel is not written for this Triton")
    (found,) = counts["Hopper"].values()
    assert found["keys"] == 1, found
    assert 1 <= found["tiles"] <= 4, found  # with a masked end of the keys or without, for each of two tiles


def test_preprocess_depends_on_no_length_of_keys(counts):
    assert counts["packed, cross"]["_bwd_preprocess_kernel"]["keys"] == 2
