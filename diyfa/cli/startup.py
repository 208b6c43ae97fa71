"""What must be decided before PyTorch is imported."""

from __future__ import annotations

import importlib.util
import os
import sys


def prepare_environment() -> None:
    """Set what PyTorch reads when it is imported; call before that.

    Where torch_npu is installed without CANN, `import torch` itself fails while it loads torch_npu by itself. So the
    command line keeps PyTorch from doing that and loads torch_npu afterwards, where a failure can be explained.
    """
    if "torch" in sys.modules:
        return
    if importlib.util.find_spec("torch_npu") is not None:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Beside other processes, OpenMP threads that spin at barriers make small CPU operators many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
