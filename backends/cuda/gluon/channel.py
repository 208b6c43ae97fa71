"""Channels: how one partition of a kernel hands items to others through a few stages of shared memory."""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.barriers import WARPS, arrive_per_lane, order_lanes, release, wait_full
from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class Channel:
    """Items are numbered from 0 on; item n uses stage n % STAGES. The memory of the stages belongs to the user.

    A stage has two mbarriers. `full` completes when the producer has filled the stage, `empty` when all consumers have
    released it. A barrier counts its phases, so nobody resets it: the n-th item of a stage (n = item // STAGES) waits
    for phase n, which it tells from phase n - 1 by its parity.

        producer:  acquire(item), fill the stage, commit(item); TMA completes full_barrier(item) by itself
        consumer:  wait(item), read the stage, release(item)

    The partitions that use it have one warp or WARPS warps. Each of WARPS warps waits and arrives for itself
    (`barriers.py`).
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor | gl.constexpr  # None: another channel tells the producer that a stage is free
    STAGES: gl.constexpr
    CHANNELS: gl.constexpr  # how many lie side by side in the same arrays
    INDEX: gl.constexpr  # which of them this is

    @gluon.jit
    def init(self, FILLS: gl.constexpr, RELEASES: gl.constexpr):
        """Initialise the barriers, as `allocate_channel` does."""
        for i in gl.static_range(self.CHANNELS * self.STAGES):
            mbarrier.init(self.full.index(i), count=FILLS)
            if RELEASES > 0:
                mbarrier.init(self.empty.index(i), count=RELEASES)

    @gluon.jit
    def invalidate(self):
        """Make the memory of all barriers free for `init`. The channel must have `empty` barriers."""
        for i in gl.static_range(self.CHANNELS * self.STAGES):
            mbarrier.invalidate(self.full.index(i))
            mbarrier.invalidate(self.empty.index(i))

    @gluon.jit
    def pick(self, i: gl.constexpr):
        """The i-th of several channels that were allocated together."""
        return Channel(self.full, self.empty, self.STAGES, self.CHANNELS, i)

    @gluon.jit
    def stage(self, item):
        """Return the number of the item's stage. Channels that were allocated together share one numbering."""
        return item % self.STAGES * self.CHANNELS + self.INDEX

    @gluon.jit
    def parity(self, item):
        """Return the parity, 0 or 1, of the phase in which the item's barriers complete."""
        return (item // self.STAGES) & 1

    @gluon.jit
    def full_barrier(self, item):
        """Return the barrier that completes when the item's stage is full."""
        return self.full.index(self.stage(item))

    @gluon.jit
    def acquire(self, item):
        """Wait until the item's stage is free."""
        # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
        _wait(self.empty.index(self.stage(item)), self.parity(item) ^ 1)

    @gluon.jit
    def commit(self, item):
        """Tell the consumers that all threads of this partition have filled the item's stage.

        A partition of WARPS warps arrives WARPS times, one warp LANES times: that is the channel's FILLS. Consumers
        that read the stage through TMA or wgmma need a `fence_async_shared` before it.
        """
        if gl.num_warps() == WARPS:
            order_lanes()
            release(self.full_barrier(item))
        else:
            arrive_per_lane(self.full_barrier(item))

    @gluon.jit
    def signal(self, item):
        """Arrive at the item's `full` barrier, once for each warp. For items without memory: it orders no stores."""
        _arrive(self.full_barrier(item))

    @gluon.jit
    def wait(self, item):
        """Wait until the item's stage is full."""
        _wait(self.full_barrier(item), self.parity(item))

    @gluon.jit
    def release(self, item):
        """Tell the producer that this partition has read the item's stage: one arrival of each warp."""
        _arrive(self.empty.index(self.stage(item)))


@gluon.jit
def _wait(barrier, parity):
    if gl.num_warps() == WARPS:
        wait_full(barrier, parity)
    else:
        mbarrier.wait(barrier, parity)


@gluon.jit
def _arrive(barrier):
    if gl.num_warps() == WARPS:
        release(barrier)
    else:
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def allocate_channel(
    STAGES: gl.constexpr,
    FILLS: gl.constexpr,  # arrivals that fill a stage
    RELEASES: gl.constexpr,  # arrivals that free it; 0: no `empty` barriers
    CHANNELS: gl.constexpr = 1,
):
    """One or more channels, with their barriers initialised. `Channel.pick` picks one of several."""
    COUNT: gl.constexpr = CHANNELS * STAGES
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    if RELEASES > 0:
        empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    else:
        empty = None
    channel = Channel(full, empty, STAGES, CHANNELS, 0)
    channel.init(FILLS, RELEASES)
    return channel
