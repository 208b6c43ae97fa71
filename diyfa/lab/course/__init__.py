"""Imports of the course "FlashAttention from the ground up" (docs/course): checks of exercises, and the simulator."""

from __future__ import annotations

from diyfa.lab.course.checks import check
from diyfa.lab.course.simulator import gluon_simulator

__all__ = ["check", "gluon_simulator"]
