"""The tests here need an environment with torch_npu; `tests/support/npu_env.py` gives them one without an NPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def npu() -> torch.device:
    """The NPU, or the host shim's imitation of one."""
    module = getattr(torch, "npu", None)
    if module is None or not module.is_available():
        pytest.skip("no NPU and no host shim: run these tests with python tests/support/npu_env.py")
    return torch.device("npu", 0)
