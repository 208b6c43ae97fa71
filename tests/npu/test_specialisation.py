"""Nothing is compiled for a length, a batch size, a count of heads, a window or a stride."""

from __future__ import annotations

import importlib.util
import json

import pytest
from subprocesses import SUPPORT, run_python


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.backends.ascend") is None,
    reason="triton-ascend is not installed: see docs/npu-design.md",
)
def test_one_kernel_serves_all_sizes() -> None:
    """384 calls of different sizes for each set of features. Keys that fill whole tiles have a kernel of their own."""
    counts = json.loads(
        run_python(SUPPORT / "npu_specialisations.py", TRITON_INTERPRET="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    )
    assert set(counts) >= {"bhsd full", "bshd causal", "thd featured", "bhsd biased"}
    for call, kernels in counts.items():
        assert {"_fwd_kernel", "_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"} <= set(kernels), call
        assert ("_bwd_dbias_kernel" in kernels) == (call.endswith(("biased", "by key"))), call
        assert ("_bwd_dbias_rows_kernel" in kernels) == call.endswith("by row"), call
        for kernel, count in kernels.items():
            unmasked = call.endswith("full") and not call.startswith("thd")
            even_too = unmasked and kernel in ("_fwd_kernel", "_bwd_dq_kernel")
            assert count == (2 if even_too else 1), f"{call}: {count} of {kernel}"
