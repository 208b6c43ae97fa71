"""What the tests of the Hopper kernel need of this environment."""

from __future__ import annotations

import pytest


def need_hopper_gluon() -> None:
    """Skip the test, or the module that is being imported, where Triton is not one whose Gluon the kernel is written
    in."""
    triton = pytest.importorskip("triton")
    from diyfa.backends.cuda.gluon.compat import has_gluon

    if not has_gluon():
        pytest.skip(f"the Hopper kernel is not written for Triton {triton.__version__}", allow_module_level=True)
