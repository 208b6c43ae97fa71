"""What `fast_path.plans` holds."""

from __future__ import annotations

from typing import Any

from diyfa import fast_path


def known_plans() -> set[Any]:
    """The plans in it, without the recent calls that they are also found by."""
    return {plan for plan in fast_path.plans.values() if not isinstance(plan, fast_path.Recent)}
