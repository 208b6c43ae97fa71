"""What `planning.plans` holds."""

from __future__ import annotations

from typing import Any

from diyfa import plan as planning


def known_plans() -> set[Any]:
    """The plans in it, without the recent calls that they are also found by."""
    return set(planning.plans.values())
