"""The command `diyfa`. `pip install 'diyfa[cli]'` installs the libraries it needs, typer and rich."""

from __future__ import annotations

import importlib.util
import os
import sys


def _prepare_environment() -> None:
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


def main() -> None:
    """Run the command line on `sys.argv`."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"The diyfa command needs {' and '.join(missing)}: pip install 'diyfa[cli]'")
    _prepare_environment()
    from diyfa.cli.app import app
    from diyfa.terminal import printable

    with printable():
        app()
