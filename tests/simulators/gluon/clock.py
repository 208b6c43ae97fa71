"""Vector clocks: what has certainly happened before a point of the execution, whatever the timing.

An agent is a partition of warps or an asynchronous operation; each counts its own steps. Two proxies see shared memory:
register instructions (generic) and TMA and wgmma (asynchronous). Only from a `fence_async_shared` on, what the first
wrote is in the sight of the second, and the second cannot overwrite what the first still reads, so a clock keeps both.
"""

from __future__ import annotations

from collections.abc import Hashable

Steps = dict[Hashable, int]


def _join(into: Steps, other: Steps) -> None:
    for agent, step in other.items():
        if into.get(agent, 0) < step:
            into[agent] = step


class Clock:
    """`known`: the last step of each agent that happened before. `fenced`: the same for the asynchronous proxy."""

    __slots__ = ("fenced", "known")

    def __init__(self, known: Steps | None = None, fenced: Steps | None = None) -> None:
        self.known, self.fenced = known or {}, fenced or {}

    def copy(self) -> Clock:
        return Clock(dict(self.known), dict(self.fenced))

    def join(self, other: Clock) -> None:
        """Everything that happened before `other` also happened before this."""
        _join(self.known, other.known)
        _join(self.fenced, other.fenced)

    def fence(self) -> None:
        """Register writes so far become visible to the asynchronous proxy, and register reads so far are done."""
        _join(self.fenced, self.known)

    def learn(self, agent: Hashable, step: int) -> None:
        """The agent has certainly finished its step."""
        _join(self.known, {agent: step})
