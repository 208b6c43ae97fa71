"""The simulator of Hopper kernels, for a chapter that runs in a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[3] / "tests"


def gluon_simulator() -> ModuleType:
    """Return the package `simulators.gluon` of this checkout. It is no part of the installed package."""
    if not (TESTS / "simulators" / "gluon").is_dir():
        raise RuntimeError(
            "the simulator of Hopper kernels is in the folder tests/simulators of diyfa's repository: clone it, "
            "install it with `pip install -e .`, and run this chapter again"
        )
    for folder in (TESTS / "support", TESTS):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module("simulators.gluon")
