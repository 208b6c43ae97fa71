"""The ring of stages through which the producer hands blocks of K and V to the consumers."""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.barriers import WARPS, release, wait_full
from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class KVRing:
    """Stages in which item i uses stage i % STAGES. K of the n-th block is item 2n, its V item 2n + 1.

    Unless ONE_RING, STAGES is even: K has the even stages, V the odd ones.

    A stage has two barriers. `full` completes when TMA has delivered all bytes, `empty` when all warps of all consumers
    have arrived. Both count phases, so nobody resets them: the n-th item of a stage waits for the parity of n.
    """

    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor  # ONE_RING: k_buffers, for tiles of K and V have the same shape
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    ONE_RING: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def init(self):
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.full.index(stage), count=1)
            mbarrier.init(self.empty.index(stage), count=WARPS * self.CONSUMERS)

    @gluon.jit
    def invalidate(self):
        for stage in gl.static_range(self.STAGES):
            mbarrier.invalidate(self.full.index(stage))
            mbarrier.invalidate(self.empty.index(stage))

    @gluon.jit
    def buffer_index(self, item):
        """Return the item's tile in `k_buffers` or `v_buffers`."""
        stage = item % self.STAGES
        if not self.ONE_RING:
            stage = stage // 2
        return stage

    @gluon.jit
    def full_barrier(self, item):
        return self.full.index(item % self.STAGES)

    @gluon.jit
    def wait_empty(self, item):
        """In the producer, wait until the item's stage is free."""
        # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
        mbarrier.wait(self.empty.index(item % self.STAGES), ((item // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, item):
        """In a consumer, wait until the item has arrived."""
        wait_full(self.full.index(item % self.STAGES), (item // self.STAGES) & 1)

    @gluon.jit
    def release(self, item):
        """Tell the producer that this consumer has read the item."""
        release(self.empty.index(item % self.STAGES))
