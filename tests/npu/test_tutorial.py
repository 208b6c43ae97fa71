"""The kernel for learners computes attention."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

import diyfa
from diyfa.backends.npu.attention import tutorial
from diyfa.backends.npu.runtime.launch import run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_reference(causal: bool, dtype: torch.dtype) -> None:
    """Several tiles of rows and of keys, the last ones partial."""
    q, k, v = (torch.randn(2, 2, 150, 64, dtype=dtype) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    run(tutorial.make_launch("Ascend910B3", q, k, v, out, causal))
    expected = diyfa.reference_attention(q.double(), k.double(), v.double(), causal)
    torch.testing.assert_close(out, expected.to(dtype), atol=2e-3 if dtype is torch.float16 else 1.6e-2, rtol=1e-2)
