"""Importing this skips the module that is being imported if the Hopper kernels are not written for this Triton."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from diyfa.backends.cuda.gluon.compat import has_gluon  # noqa: E402

if not has_gluon():
    pytest.skip(f"the Hopper kernel is not written for Triton {triton.__version__}", allow_module_level=True)
