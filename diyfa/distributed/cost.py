"""A cost model of the two methods, from the speeds of a chip and its links. "auto" takes the cheaper method.

A ring overlaps the transfer of the next K/V shard with the current step. While a step takes longer than the transfer,
the ring costs its computation and the merges. A step's time falls with the square of a rank's rows, a transfer's only
with the rows. Ulysses overlaps nothing. But a rank of Ulysses sends about the same bytes for any number of ranks, and
if chips are linked pairwise Ulysses uses all links, a ring one. So Ulysses mostly wins inside a host, if the heads can
be divided; the ring wins over slower links from some length on.

The model leaves out that kernels are slower on small problems, and that other traffic uses the links.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from diyfa.distributed.ulysses import kv_head_repeats, refuses

BACKWARD_WORK = 2.5  # times the forward pass: five products instead of two


@dataclass(frozen=True)
class Machine:
    """Speeds of one chip and its links, in operations and bytes a second. Links count in one direction."""

    flops: float  # reached by attention kernels
    memory: float
    peer: float  # from one chip to its neighbour in the ring
    exchange: float  # out of each chip during an all-to-all
    latency: float = 20e-6  # least seconds of a transfer


# (prefix of the architecture's name, machine); the first match counts. Links: the vendors' figures times 0.8 (none
# measured here): NVLink 4 450 GB/s, NVLink 5 900, NVLink 3 300, PCIe 4 x16 32; HCCS of the 910B seven links of 28 GB/s,
# one to each other chip, of the 910_93 a switch with 196. Kernels: half of the dense peak in bfloat16.
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
    """The sizes of one call on each rank."""

    ranks: int
    batch: int
    heads: int
    heads_kv: int
    rows: int  # of one rank
    head_dim: int
    head_dim_v: int
    element_size: int
    share: float = 1.0  # fraction of all (query, key) pairs that the mask shows
    backward: bool = True
    steps: int = 0  # of a ring; 0: one for each rank

    @property
    def ring_steps(self) -> int:
        return self.steps or self.ranks

    @property
    def flops(self) -> float:
        """The operations of a rank in the forward pass."""
        pairs = self.batch * self.heads * self.rows * self.rows * self.ranks * self.share
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    def tensor_bytes(self, heads: int, head_dim: int) -> int:
        """Return the bytes of a tensor (batch, heads, rows, head_dim) of one rank."""
        return self.batch * heads * self.rows * head_dim * self.element_size

    @property
    def kv_bytes(self) -> int:
        """The bytes of a rank's K/V shard."""
        return self.tensor_bytes(self.heads_kv, self.head_dim) + self.tensor_bytes(self.heads_kv, self.head_dim_v)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the dk and dv sums that follow a K/V shard, in float32 at least."""
        return self.kv_bytes * max(4, self.element_size) // self.element_size

    @property
    def exchanged_bytes(self) -> float:
        """The bytes that a rank sends in both Ulysses exchanges of one pass."""
        heads_kv = self.heads_kv * kv_head_repeats(self.heads_kv, self.ranks)
        sent = self.tensor_bytes(self.heads, self.head_dim)
        sent += self.tensor_bytes(heads_kv, self.head_dim + self.head_dim_v)
        return (sent + self.tensor_bytes(self.heads, self.head_dim_v)) * (self.ranks - 1) / self.ranks

    @property
    def merged_bytes(self) -> float:
        """The bytes of memory traffic that one merge costs.

        It reads the accumulator and a partial output and writes the accumulator, all in float32. The kernel, too, wrote
        its output in float32 instead of the narrower input dtype.
        """
        elements = self.batch * self.heads * self.rows * self.head_dim_v
        wider = max(0, 4 - self.element_size)
        return elements * (3 * 4 + wider) * 0.75  # in a causal zigzag half of the steps have half of the rows


def visible_fraction(offsets: Sequence[int], window: tuple[int, int]) -> float:
    """Return about which fraction of all (query, key) pairs the packed sequences and the window show.

    `offsets`: of the sequences, then the number of all rows.
    """
    *starts, rows = offsets
    pairs = 0.0
    for length in (b - a for a, b in pairwise(starts)):
        seen = [length / 2 if bound < 0 else min(bound, length / 2) for bound in window]  # keys before, after a row
        pairs += length * sum(seen)
    return max(pairs, 1.0) / max(rows * rows, 1)


def ring_timeline(compute: Sequence[Sequence[float]], transfer: float) -> float:
    """Return the seconds until the last rank is done, from compute[rank][step] in seconds.

    The transfer for a step starts with the step before it.
    """
    now, arrived = [0.0] * len(compute), [0.0] * len(compute)
    for step in zip(*compute, strict=True):
        start = [max(pair) for pair in zip(now, arrived, strict=True)]
        arrived = [max(start[rank], start[rank - 1]) + transfer for rank in range(len(start))]
        now = [a + b for a, b in zip(start, step, strict=True)]
    return max(now)


def ring_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of the forward pass and, if work.backward, the backward pass."""
    step = work.flops / machine.flops / work.ring_steps
    merge = work.merged_bytes / machine.memory
    forward = [[step] + [step + merge] * (work.ring_steps - 1)] * work.ranks
    seconds = ring_timeline(forward, work.kv_bytes / machine.peer + machine.latency)
    if work.backward:
        last_hop = work.gradient_bytes / machine.peer + machine.latency
        backward = [[BACKWARD_WORK * step] * work.ring_steps] * work.ranks
        seconds += ring_timeline(backward, work.kv_bytes / machine.peer + last_hop) + last_hop * (work.ring_steps > 1)
    return seconds


def ulysses_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of the forward pass and, if work.backward, the backward pass."""
    passes = 2 if work.backward else 1
    compute = work.flops / machine.flops * (1 + BACKWARD_WORK * work.backward)
    return compute + passes * (work.exchanged_bytes / machine.exchange + 2 * machine.latency)


def cheapest(work: Work, machine: Machine) -> str:
    """Return "ring" or "ulysses"."""
    if refuses(work.heads, work.ranks):
        return "ring"
    return "ring" if ring_seconds(work, machine) < ulysses_seconds(work, machine) else "ulysses"


def machine_for(arch: str, group: dist.ProcessGroup) -> Machine:
    """Return the row of MACHINES for `arch`, with links of at most BETWEEN_HOSTS if the group spans hosts.

    torchrun's LOCAL_WORLD_SIZE tells which ranks share a host.
    """
    machine = next(machine for name, machine in MACHINES if arch.startswith(name))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local and len({rank // local for rank in dist.get_process_group_ranks(group)}) > 1:
        slower = min(machine.peer, BETWEEN_HOSTS), min(machine.exchange, BETWEEN_HOSTS)
        return Machine(machine.flops, machine.memory, *slower, machine.latency)
    return machine
