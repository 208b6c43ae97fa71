"""A check that flags and barriers order every two conflicting accesses of a block.

An AI core has a scalar unit, which issues instructions, and pipes, which execute them concurrently. Only flags
(`set_flag`/`wait_flag` between two pipes, `sync_block_set`/`sync_block_wait` between cube and vector cores) and
`pipe_barrier` order different pipes. Inside a pipe instructions start in order but overlap. So each pipe is a thread
with a vector clock, and an access that is not ordered after an earlier conflicting one is a race. Without races every
schedule of the hardware computes the result of the schedule executed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from simulators.hivm.memory import Memory, Ref

PIPES = ("PIPE_S", "PIPE_MTE1", "PIPE_MTE2", "PIPE_MTE3", "PIPE_M", "PIPE_V", "PIPE_FIX")
# The scalar unit finishes each instruction before the next. Library functions themselves order matrix products on one
# accumulator, and loads into the double buffers in front of the cube unit.
IN_ORDER = {"PIPE_S", "PIPE_M", "PIPE_MTE1"}


class _Shadow:
    """The last write and last reads of each granule: thread, number of its instruction, line."""

    def __init__(self, memory: Memory, threads: int) -> None:
        self.granules = -(-memory.size // memory.granule)
        self.writer = np.full(self.granules, -1, np.int16)
        self.written = np.zeros(self.granules, np.int32)
        self.line = np.zeros(self.granules, np.int32)
        self.read: list[np.ndarray | None] = [None] * threads


class Blocks:
    """The blocks that read and wrote each granule of global memory. Nothing orders the blocks of a launch.

    Atomic additions of several blocks do not conflict with each other."""

    NONE, SEVERAL, ATOMIC = -1, -2, -3

    def __init__(self) -> None:
        self.uses: dict[int, tuple[Memory, np.ndarray, np.ndarray]] = {}

    def conflict(self, block: int, ref: Ref, write: bool, atomic: bool = False) -> str:
        """Record an access; return a description of the access that conflicts with it, or ""."""
        memory = ref.memory
        if id(memory) not in self.uses:
            granules = -(-memory.size // memory.granule)
            self.uses[id(memory)] = (memory, *(np.full(granules, self.NONE, np.int16) for _ in range(2)))
        _, writer, reader = self.uses[id(memory)]
        where = ref.granules()
        others = [(name, of[where]) for name, of in (("written", writer), ("read", reader)) if write or of is writer]
        known = (self.NONE, block, self.ATOMIC) if atomic else (self.NONE, block)
        found = [name for name, of in others if not np.isin(of, known).all()]
        if write:
            writer[where] = self.ATOMIC if atomic else block
        else:
            before = reader[where]
            reader[where] = np.where((before == self.NONE) | (before == block), block, self.SEVERAL)
        return f"{found[0]} by another block" if found else ""


class Order:
    """Vector clocks of the pipes of one block's cores."""

    def __init__(self, cores: list[str], block: int, blocks: Blocks) -> None:
        self.block, self.blocks = block, blocks
        self.cores = cores
        self.count = len(cores) * len(PIPES)
        self.issued = np.zeros(self.count, np.int32)  # instructions of each thread
        self.clock = np.zeros((self.count, self.count), np.int32)  # [thread, other]: instructions known to have ended
        self.shadows: dict[int, tuple[Memory, _Shadow]] = {}
        self.races: dict[tuple[Any, ...], str] = {}
        self.suspected: list[tuple[tuple[Any, ...], str, Ref, np.ndarray]] = []  # of the current instruction

    def thread(self, core: int, pipe: str) -> int:
        return core * len(PIPES) + PIPES.index(pipe)

    def _name(self, thread: int) -> str:
        return f"{self.cores[thread // len(PIPES)]} {PIPES[thread % len(PIPES)]}"

    # ---- synchronisation ---------------------------------------------------------------------------------------

    def issue(self, core: int, pipe: str) -> int:
        """Let the scalar unit issue an instruction to `pipe`: what it waited for has ended. Return the thread."""
        thread, scalar = self.thread(core, pipe), self.thread(core, "PIPE_S")
        if thread != scalar:
            own = self.clock[thread, scalar]
            np.maximum(self.clock[thread], self.clock[scalar], out=self.clock[thread])
            self.clock[thread, scalar] = own  # the scalar unit's stores are not visible to a pipe without a flag
        return thread

    def message(self, core: int, pipe: str) -> np.ndarray:
        """Return the clock of a flag that `pipe` sets after all its instructions so far."""
        thread = self.issue(core, pipe)
        message = self.clock[thread].copy()
        message[thread] = self.issued[thread]
        return message

    def receive(self, core: int, pipe: str, message: np.ndarray) -> None:
        """Record that `pipe` waited for a flag."""
        thread = self.issue(core, pipe)
        np.maximum(self.clock[thread], message, out=self.clock[thread])

    def barrier(self, core: int, pipe: str) -> None:
        """Record a `pipe_barrier`: the pipe, or every pipe of the core, has finished its instructions."""
        if pipe != "PIPE_ALL":
            thread = self.issue(core, pipe)
            self.clock[thread, thread] = self.issued[thread]
            return
        messages = np.stack([self.message(core, each) for each in PIPES])
        first = self.thread(core, PIPES[0])
        self.clock[first : first + len(PIPES)] = messages.max(0)

    # ---- accesses ----------------------------------------------------------------------------------------------

    def instruction(
        self, core: int, pipe: str, reads: list[Ref], writes: list[Ref], line: int, what: str, atomic: bool = False
    ) -> None:
        """Record the reads and writes of one instruction of `pipe`. `atomic`: it adds to global memory."""
        thread = self.issue(core, pipe)
        for ref in reads:
            self._access(thread, ref, False, line, what, False)
        for ref in writes:
            self._access(thread, ref, True, line, what, atomic)
        self.issued[thread] += 1
        now = self.issued[thread]
        for ref in reads:
            shadow = self._shadow(ref.memory)
            read = shadow.read[thread]
            if read is None:
                read = shadow.read[thread] = np.zeros(shadow.granules, np.int32)
            read[ref.granules()] = now
        for ref in writes:
            shadow = self._shadow(ref.memory)
            where = ref.granules()
            shadow.writer[where], shadow.written[where], shadow.line[where] = thread, now, line
        if PIPES[thread % len(PIPES)] in IN_ORDER:
            self.clock[thread, thread] = now

    def _shadow(self, memory: Memory) -> _Shadow:
        found = self.shadows.get(id(memory))
        if found is None:
            found = self.shadows[id(memory)] = (memory, _Shadow(memory, self.count))
        return found[1]

    def _access(self, thread: int, ref: Ref, write: bool, line: int, what: str, atomic: bool) -> None:
        if ref.memory.shared and (conflict := self.blocks.conflict(self.block, ref, write, atomic)):
            self.races.setdefault((line, conflict), f"line {line}: {self._name(thread)} {what}: {ref} is {conflict}")
        shadow, where, known = self._shadow(ref.memory), ref.granules(), self.clock[thread]
        writer = shadow.writer[where]
        late = (writer >= 0) & (shadow.written[where] > known[writer])
        if late.any():
            first = int(np.argmax(late))
            self._race(thread, int(writer[first]), int(shadow.line[where][first]), ref, line, what, write, True)
        if write:
            for other, read in enumerate(shadow.read):
                if read is not None and (read[where] > known[other]).any():
                    self._race(thread, other, 0, ref, line, what, True, False)

    def _race(
        self, thread: int, other: int, other_line: int, ref: Ref, line: int, what: str, write: bool, written: bool
    ) -> None:
        key = (thread, other, line, other_line, write, written)
        earlier = f"written by {self._name(other)} (line {other_line})" if written else f"read by {self._name(other)}"
        doing = "writes" if write else "reads"
        text = f"line {line}: {self._name(thread)} {what} {doing} {ref}, {earlier}, without an order between them"
        self.suspected.append((key, text, ref, ref.read()))

    def done(self) -> None:
        """Record the races of the instruction, which has run.

        A write that changed no bit is no race: both vector cores store the same scalar, or NaN, for the cube core.
        """
        for key, text, ref, before in self.suspected:
            if not (key[-2] and before.tobytes() == ref.read().tobytes()):
                self.races.setdefault(key, text)
        self.suspected.clear()
