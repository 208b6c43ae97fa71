"""What a call costs by each method, predicted from a chip's and its links' speeds; "auto" takes the cheapest.

A ring hides a transfer behind the step that is computed meanwhile, so it costs its computation as long as a step takes
longer than keys and values take to pass on; steps get shorter with the square of the rows, transfers with the rows.
Then it pays for the merges alone. Ulysses hides nothing, but what a rank sends is the same however many ranks there
are, and where chips are linked pairwise it uses all links and a ring one. So inside a host Ulysses mostly wins, if the
heads can be divided; over slower links the ring does, from some length on.

The model leaves out that a kernel is slower on small problems, and that links are shared with others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from diyfa.distributed.ulysses import refuses, repeats_of

BACKWARD_WORK = 2.5  # of the forward pass: five products instead of two


@dataclass(frozen=True)
class Machine:
    """Speeds of one chip and its links, all in one direction, in operations and bytes a second."""

    flops: float  # that attention kernels reach
    memory: float
    peer: float  # from one chip to its neighbour in the ring
    exchange: float  # out of each chip while all send to all
    latency: float = 20e-6  # seconds that a transfer takes at least


# By the beginning of the architecture's name. Links: what vendors state, times 0.8 (none of it measured here): NVLink 4
# 450 GB/s, NVLink 5 900, NVLink 3 300, PCIe 4 x16 32; HCCS of the 910B seven links of 28 GB/s, one to each other chip,
# of the 910_93 a switch with 196. Kernels: half of the dense peak in bfloat16.
MACHINES: tuple[tuple[str, Machine], ...] = (
    ("sm_80", Machine(156e12, 2.0e12, 240e9, 240e9)),
    ("sm_90", Machine(500e12, 3.3e12, 360e9, 360e9)),
    ("sm_100", Machine(1100e12, 8.0e12, 720e9, 720e9)),
    ("sm_103", Machine(1100e12, 8.0e12, 720e9, 720e9)),
    ("sm_", Machine(80e12, 0.9e12, 25e9, 25e9)),
    ("Ascend910B", Machine(160e12, 1.6e12, 22e9, 156e9)),
    ("Ascend910_93", Machine(160e12, 1.6e12, 156e9, 156e9)),
    ("Ascend", Machine(160e12, 1.6e12, 22e9, 22e9)),
    ("", Machine(50e9, 20e9, 1e9, 1e9, 200e-6)),  # processes on CPUs
)
BETWEEN_HOSTS = 40e9  # one adapter of 400 Gb/s for each chip, times 0.8


@dataclass(frozen=True)
class Work:
    """One call as each rank has it."""

    ranks: int
    batch: int
    heads: int
    heads_kv: int
    rows: int  # of each rank
    head_dim: int
    head_dim_v: int
    element_size: int
    share: float = 1.0  # of all pairs of query and key that a mask leaves
    backward: bool = True
    steps: int = 0  # of a ring; 0: as many as ranks

    @property
    def ring_steps(self) -> int:
        return self.steps or self.ranks

    @property
    def flops(self) -> float:
        """Operations of a rank in the forward pass."""
        pairs = self.batch * self.heads * self.rows * self.rows * self.ranks * self.share
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    def bytes_of(self, heads: int, head_dim: int) -> int:
        """Of a tensor of a rank's rows."""
        return self.batch * heads * self.rows * head_dim * self.element_size

    @property
    def keys(self) -> int:
        """Bytes of a rank's keys and values."""
        return self.bytes_of(self.heads_kv, self.head_dim) + self.bytes_of(self.heads_kv, self.head_dim_v)

    @property
    def sums(self) -> int:
        """Bytes of the gradients' sums that follow them, in float32."""
        return self.keys * max(4, self.element_size) // self.element_size

    @property
    def exchanged(self) -> float:
        """Bytes that a rank sends in Ulysses' exchanges of one pass, back and forth."""
        heads_kv = self.heads_kv * repeats_of(self.heads_kv, self.ranks)
        there = self.bytes_of(self.heads, self.head_dim) + self.bytes_of(heads_kv, self.head_dim + self.head_dim_v)
        return (there + self.bytes_of(self.heads, self.head_dim_v)) * (self.ranks - 1) / self.ranks

    @property
    def merged(self) -> float:
        """Bytes of memory traffic of one merge: the sum and a partial output read, the sum written, all in float32, of
        which the kernel wrote more than of a rounded output."""
        elements = self.batch * self.heads * self.rows * self.head_dim_v
        wider = max(0, 4 - self.element_size)
        return elements * (3 * 4 + wider) * 0.75  # half of the steps of a causal zigzag have half of the rows


def share_of(sequences: Sequence[int], window: tuple[int, int]) -> float:
    """The part of all pairs that packed sequences (offsets and all rows) and a window leave, about."""
    *offsets, rows = sequences
    pairs = 0.0
    for length in (b - a for a, b in pairwise(offsets)):
        seen = [length / 2 if bound < 0 else min(bound, length / 2) for bound in window]  # before and after a row
        pairs += length * sum(seen)
    return max(pairs, 1.0) / max(rows * rows, 1)


def ring_timeline(compute: Sequence[Sequence[float]], transfer: float) -> float:
    """Seconds until the last rank is done; compute[rank][step]. A transfer begins with the step before it."""
    now, arrived = [0.0] * len(compute), [0.0] * len(compute)
    for step in zip(*compute, strict=True):
        start = [max(pair) for pair in zip(now, arrived, strict=True)]
        arrived = [max(start[rank], start[rank - 1]) + transfer for rank in range(len(start))]
        now = [a + b for a, b in zip(start, step, strict=True)]
    return max(now)


def ring_seconds(work: Work, machine: Machine) -> float:
    """Forward, and backward where there is one."""
    step = work.flops / machine.flops / work.ring_steps
    merge = work.merged / machine.memory
    forward = [[step] + [step + merge] * (work.ring_steps - 1)] * work.ranks
    seconds = ring_timeline(forward, work.keys / machine.peer + machine.latency)
    if work.backward:
        home = work.sums / machine.peer + machine.latency
        backward = [[BACKWARD_WORK * step] * work.ring_steps] * work.ranks
        seconds += ring_timeline(backward, work.keys / machine.peer + home) + home * (work.ring_steps > 1)
    return seconds


def ulysses_seconds(work: Work, machine: Machine) -> float:
    """Forward, and backward where there is one."""
    passes = 2 if work.backward else 1
    compute = work.flops / machine.flops * (1 + BACKWARD_WORK * work.backward)
    return compute + passes * (work.exchanged / machine.exchange + 2 * machine.latency)


def cheapest(work: Work, machine: Machine) -> str:
    """ "ring" or "ulysses"."""
    if refuses(work.heads, work.ranks):
        return "ring"
    return "ring" if ring_seconds(work, machine) < ulysses_seconds(work, machine) else "ulysses"


def machine_of(arch: str, group: dist.ProcessGroup) -> Machine:
    """The table's row; for a group that spans hosts, as torchrun's LOCAL_WORLD_SIZE tells, with the links between."""
    machine = next(machine for name, machine in MACHINES if arch.startswith(name))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local and len({rank // local for rank in dist.get_process_group_ranks(group)}) > 1:
        slower = min(machine.peer, BETWEEN_HOSTS), min(machine.exchange, BETWEEN_HOSTS)
        return Machine(machine.flops, machine.memory, *slower, machine.latency)
    return machine
