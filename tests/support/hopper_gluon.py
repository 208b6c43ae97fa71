"""Importing this skips a test, or the module that is being imported, if the Hopper kernels are not written for the
installed Triton's Gluon."""

from __future__ import annotations

import pytest


def need_hopper_gluon() -> None:
    triton = pytest.importorskip("triton")
    from diyfa.backends.cuda.gluon.compat import has_gluon

    if not has_gluon():
        pytest.skip(f"the Hopper kernel is not written for Triton {triton.__version__}", allow_module_level=True)


need_hopper_gluon()
