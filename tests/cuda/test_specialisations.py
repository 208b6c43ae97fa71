"""Nothing of the cuda backend is compiled for a length, a total, a batch size or a window.

Binaries are kept under constants and the kinds of arguments, beside which there is whether all strides are multiples of
16, and whether what a bias is read by is.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
from subprocesses import SUPPORT, run_python

FORWARD, SHORT = {"_fwd_kernel"}, {"_bwd_short_kernel"}
SPLIT = {"_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_sum_partials_kernel"}
HOPPER = {"_prepare_kernel", "_bwd_sm90_kernel"}  # for some lengths, where Triton has Gluon
# words of a run's name -> its kernels besides FORWARD
KERNELS = {"packed": SPLIT | {"_clear_kernel"}, "bshd": SPLIT, "bhsd": SPLIT, "bias": SPLIT | {"_bwd_dbias_kernel"},
           "short": SHORT, "short packed": SHORT | {"_clear_kernel"}}  # fmt: skip
RUNS = (
    "packed", "packed, window", "packed, cross", "packed, dlse", "packed, D=40", "bshd", "bhsd", "bhsd, cross",
    "bhsd, dlse", "bhsd, D=40", "short", "short, dlse", "short packed", "bias", "bias of keys", "bias of queries",
)  # fmt: skip
# kernel -> what may tell those for one tile apart: which results are cleared, sums of parts in float32, an alignment
CAUSES = {"_clear_kernel": {"y_ptr", "statistics_ptr", "strides"}, "_bwd_dkdv_kernel": {"dk_ptr", "dv_ptr"},
          "_prepare_kernel": {"strides"}}  # fmt: skip


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, dict]]:
    """200 calls, forward and backward, of random sizes for each run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")
    return json.loads(run_python(SUPPORT / "cuda_specialisations.py", TRITON_INTERPRET="0", DIYFA_ARCH="sm_90"))


@pytest.mark.parametrize("run", RUNS)
def test_kernels_compiled_do_not_grow_with_lengths(counts, run):
    kernels, expected = counts[run], FORWARD | KERNELS[run.split(",")[0].split(" of")[0]]
    assert expected <= set(kernels) <= expected | HOPPER
    of_run = {"declared"} if run in ("bias", "bias of keys") else set()
    for kernel, found in kernels.items():
        unexpected = set(found["causes"]) - CAUSES.get(kernel, set()) - of_run
        assert not unexpected, f"{kernel} is compiled anew for {sorted(unexpected)}"
        allowed = 1 + len(of_run) + (kernel in CAUSES) + (kernel == "_clear_kernel")
        assert found["keys"] <= allowed, f"{kernel}: {found['keys']} kernels for one tile"
        assert found["tiles"] <= 3, f"{kernel}: {found['tiles']} tiles"


def test_the_count_detects_alignment(counts):
    """The counting sees what it should: where a bias is read wide there is a kernel of its own."""
    assert counts["bias"]["_fwd_kernel"]["causes"] == ["declared"]


def test_hopper_kernel(counts):
    if "Hopper" not in counts:
        pytest.skip("the Hopper kernel is not written for this Triton")
    found = counts["Hopper"]["_fwd_sm90_kernel"]
    assert found["keys"] == 1, found
    assert 1 <= found["tiles"] <= 4, found  # with a masked end of the keys or without, for each of two tiles


ADDRESSES_OF_A_MASK = """
import torch
from diyfa.registry import load_backend
load_backend("cuda")
from diyfa.backends.cuda.attention.long_blocks import long_blocks_launch
from diyfa.backends.cuda.runtime.signature import launch_signature
from diyfa.problem import AttentionProblem, AttentionTensors
sizes = (1, 1, 1, 256, 256, 128, 128)
problem = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", *sizes, needs_grad=True, mask=(128, 128))
memory, numbers = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
for first in (0, 1):
    mask_blocks = memory[first : first + 20].view(1, 1, 20)
    tensors = AttentionTensors(memory, memory, memory, 1.0, mask_blocks=mask_blocks)
    launch = long_blocks_launch(problem, tensors, numbers, {"group_size": 1, "interleaved_heads": 1})
    assert launch_signature(launch).aligned_pointers, first
"""


def test_a_block_mask_at_any_address_has_the_same_kernel():
    """As for the other kernels with a mask. Otherwise an unaligned mask would compile one of its own."""
    pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")
    run_python(ADDRESSES_OF_A_MASK, TRITON_INTERPRET="0", DIYFA_ARCH="sm_90")
