"""The Hopper kernel for learners computes attention, and each of its waits, arrivals and fences is needed."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hopper_gluon import need_hopper_gluon

need_hopper_gluon()

from hopper_interpreted import load_kernel, source_of  # noqa: E402
from poison import poisoned_allocations  # noqa: E402
from simulators.gluon import InterpretedKernel, KernelBug  # noqa: E402

import diyfa  # noqa: E402
from diyfa.backends.cuda.hopper import tutorial  # noqa: E402
from diyfa.backends.cuda.runtime.launch import is_interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run")

BF16, FP16 = torch.bfloat16, torch.float16
# (batch, heads, KV heads, queries, keys, head dim, causal, dtype)
CASES = {
    "even": (1, 1, 1, 128, 256, 64, False, BF16),
    "odd": (2, 2, 2, 130, 301, 64, False, FP16),
    "128": (1, 2, 1, 77, 260, 128, False, BF16),
    "one_key": (1, 1, 1, 3, 1, 64, False, FP16),
    "causal": (1, 2, 2, 300, 300, 64, True, BF16),
    "causal_128": (1, 2, 1, 259, 259, 128, True, FP16),
    "causal_more_keys": (2, 4, 2, 130, 470, 64, True, FP16),
    "causal_more_queries": (1, 2, 1, 300, 130, 64, True, BF16),
}


def check(case: tuple, seed: int, kernels: ModuleType = tutorial, interleave: bool = False) -> None:
    """Compare out and lse of a case with the reference."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal, dtype = case
    torch.manual_seed(0)
    q = torch.randn(batch, heads, seqlen_q, head_dim).to(dtype)
    k, v = (torch.randn(batch, heads_kv, seqlen_k, head_dim).to(dtype) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, poisoned_allocations():
        patch.setattr(
            kernels, "_fwd_tutorial_kernel", InterpretedKernel(kernels._fwd_tutorial_kernel, seed, interleave)
        )
        out, lse = kernels.flash_attention(q, k, v, causal)
    expected, expected_lse = diyfa.reference_attention(q.double(), k.double(), v.double(), causal, return_lse=True)
    torch.testing.assert_close(out, expected.to(dtype), atol=2e-3 if dtype is FP16 else 1.6e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    check(CASES[name], seed=3)
