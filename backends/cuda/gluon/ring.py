"""The ring of stages through which the producer hands blocks of K and V to the consumers."""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.channel import Channel
from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class KVRing:
    """Tiles of K and V, and the channel that hands them over. K of the n-th block is item 2n, its V item 2n + 1.

    ONE_RING: any stage may hold K or V. Otherwise the number of stages is even: K has the even ones, V the odd ones.
    `hopper/bwd_wide_dq.py` uses the ring the other way round: V is item 2n, and K is item 2n + 1.
    """

    k_buffers: gl.shared_memory_descriptor
    v_buffers: gl.shared_memory_descriptor  # ONE_RING: k_buffers, for tiles of K and V have the same shape
    channel: Channel  # TMA fills a stage, and each warp of each consumer releases it
    ONE_RING: gl.constexpr

    @gluon.jit
    def buffer_index(self, item):
        """Return the item's tile in `k_buffers` or `v_buffers`."""
        stage = self.channel.stage(item)
        if not self.ONE_RING:
            stage = stage // 2
        return stage
