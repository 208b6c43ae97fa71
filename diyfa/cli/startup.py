"""Settings that PyTorch reads when it is imported."""

from __future__ import annotations

import importlib.util
import os
import sys


def prepare_environment() -> None:
    """Set environment variables that PyTorch reads when it is imported. Call this before the import.

    If torch_npu is installed without CANN, `import torch` fails because it loads torch_npu automatically. So the
    command line switches that off and loads torch_npu later, when it can explain a failure.
    """
    if "torch" in sys.modules:
        return
    if importlib.util.find_spec("torch_npu") is not None:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # On a busy machine, OpenMP threads that spin at barriers make small CPU operators many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
