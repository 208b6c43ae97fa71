"""What the front end makes of a case, without running it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from diyfa import plan as planning
from diyfa import registry
from diyfa.problem import AttentionProblem
from diyfa.testing import AttentionCase, attention_function, make_inputs


class _Described(Exception):
    """Raised where a call would be launched."""


def case_problem(case: AttentionCase) -> AttentionProblem:
    """The description of its call."""

    def describe(op: str, problem: Any, *_: Any) -> None:
        raise _Described(problem)

    inputs = make_inputs(case)
    try:
        with mock.patch.object(registry, "choose", describe), mock.patch.object(planning, "plans", {}):
            attention_function(case, backend="cpu")(*inputs.leaves, **inputs.options)
    except _Described as seen:
        return seen.args[0]
    raise AssertionError(f"{case.name} ran")
