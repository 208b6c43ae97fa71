"""Vector clocks: the steps that have certainly happened before a point of the execution, with any timing.

An agent is a partition of warps or an asynchronous operation; each counts its own steps. Two proxies access shared
memory: register instructions (generic proxy), TMA and wgmma (asynchronous proxy). A `fence_async_shared` makes earlier
generic writes visible to the asynchronous proxy, and orders its writes after earlier generic reads. So a clock has one
set of steps for each proxy.
"""

from __future__ import annotations

from collections.abc import Hashable

Steps = dict[Hashable, int]


def _join(into: Steps, other: Steps) -> None:
    for agent, step in other.items():
        if into.get(agent, 0) < step:
            into[agent] = step


class Clock:
    """{agent: last step that happened before}: `known` for register instructions, `fenced` for the other proxy."""

    __slots__ = ("fenced", "known")

    def __init__(self, known: Steps | None = None, fenced: Steps | None = None) -> None:
        self.known, self.fenced = known or {}, fenced or {}

    def copy(self) -> Clock:
        return Clock(dict(self.known), dict(self.fenced))

    def join(self, other: Clock) -> None:
        """Add all steps of `other`."""
        _join(self.known, other.known)
        _join(self.fenced, other.fenced)

    def fence(self) -> None:
        """Make register accesses so far happen before later accesses of the asynchronous proxy."""
        _join(self.fenced, self.known)

    def learn(self, agent: Hashable, step: int) -> None:
        """Record that the agent has certainly finished its step."""
        _join(self.known, {agent: step})
