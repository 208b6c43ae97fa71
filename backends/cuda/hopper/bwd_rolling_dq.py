"""Rolling dQ: the main kernel of the Hopper backward converts the fp32 dQ itself, a few heads behind its work.

Without rolling dQ the fp32 dQ of all queries is cleared, added up, and read again by `_convert_kernel`, which takes 75
us for 16384 tokens of 2048 columns. Rolling dQ needs memory for `slots` heads only, which stays in the L2 cache, and no
other kernel. `bwd.py` calls one method of `RollingDq` wherever a role has to do something for it. Unless ROLLING, the
methods do nothing. ROLLING excludes seq_lens, packed sequences, softcap and block masks.

* "Head" is a KV head here, with all query heads of its group or subgroup (`bwd_partials.py`).
* Blocks of keys are numbered head by head. Each head's dQ is divided into as many chunks as it has blocks of keys
  (`chunks_per_head`), and chunks have the same numbers.
* The program that draws block n also takes chunk n - delay * chunks_per_head. Its consumers convert that chunk when
  they have finished the block; its adders then clear the chunk, if a later head uses the same memory. When all blocks
  of keys are drawn, programs draw the last chunks.
* A head uses the memory of the head `slots` heads before it.
* Each head has two counts in global memory: blocks of keys that adders have added, and chunks that they have cleared.
  Each adder counts, so a block or chunk counts CONSUMER_COUNT times. Consumers read a chunk when the first count is
  complete. An adder begins with a head when the second count of the head that had the same memory is complete. Both
  waits are for lower numbers, which have been drawn before. `delay` and `slots` are large enough for waits to be rare
  (`bwd_launch.py`).
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from diyfa.backends.cuda.gluon.barriers import WARPS, wait_for_stores
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_store
from diyfa.backends.cuda.gluon.semaphore import increment_semaphore, wait_until_equal
from diyfa.backends.cuda.hopper.bwd_dq import HALF_DQ
from diyfa.backends.cuda.hopper.bwd_tiles import BOX, CHUNK_ONLY, CONSUMER_COUNT, Sizes, draw_key_block
from diyfa.backends.cuda.hopper.epilogue import from_register_order
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_buffer, box_matrix


@aggregate
class RollingDq:
    """The fp32 dQ, its counts, and the channels that order its conversion within a program."""

    pointer: gl.tensor | gl.constexpr  # [slots, query heads of a group, blocks of queries, BLOCK_M * D]
    counts_ptr: gl.tensor | gl.constexpr  # [heads, 2] int32, zeros: blocks added, chunks cleared, by each adder
    slots: gl.tensor | gl.constexpr  # heads that the memory holds
    delay: gl.tensor | gl.constexpr  # heads from a block of keys back to the chunk that is converted after it
    out_tensor: tma.tensor_descriptor | gl.constexpr  # dQ in 16 bits, (B, H, S, D) whatever the strides
    added: Channel  # from the producer to the consumers: the chunk of an iteration is added up
    converted: Channel  # from each consumer to its adder: the chunk of an iteration is converted
    sizes: Sizes
    config: gl.constexpr  # `Sm90BwdConstants`

    @gluon.jit
    def chunks_per_head(self):
        """Return the number of chunks of a head, which is that of its blocks of keys."""
        return gl.cdiv(self.sizes.seqlen_k, self.config.BLOCK_N)

    @gluon.jit
    def locate_chunk(self, number, CONSUMER: gl.constexpr):
        """Return a consumer's halves of the blocks of queries of chunk `number`; no blocks if it is negative."""
        chunks_per_head = self.chunks_per_head()
        blocks_per_head = self.sizes.group_size * gl.cdiv(self.sizes.seqlen_q, self.config.BLOCK_M)  # of queries
        blocks_per_chunk = gl.cdiv(blocks_per_head, chunks_per_head)
        start = number % chunks_per_head * blocks_per_chunk
        end = gl.where(number >= 0, gl.minimum(start + blocks_per_chunk, blocks_per_head), start)
        return DqChunk(number // chunks_per_head, start, end, CONSUMER)

    # ---- the producer

    @gluon.jit
    def chunk_with(self, index):
        """Return the number of the chunk to convert after block `index` of keys; -1: none."""
        chunk = -1
        if self.config.ROLLING:
            chunk = gl.maximum(index - self.delay * self.chunks_per_head(), -1)
        return chunk

    @gluon.jit
    def announce(self, chunk, iteration):
        """Wait until adders have added all blocks of keys of the chunk's head. Tell the consumers."""
        if self.config.ROLLING:
            if chunk >= 0:
                blocks = self.chunks_per_head()  # of keys
                wait_until_equal(self.counts_ptr + (chunk // blocks).to(gl.int64) * 2, blocks * CONSUMER_COUNT)
            self.added.signal(iteration)

    @gluon.jit
    def produce_last_chunks(self, index, count, iteration, no_keys, key_blocks, scheduler):
        """Draw and announce the chunks of the last `delay` heads, which come without keys -> the next iteration."""
        if self.config.ROLLING:
            delay = self.delay * self.chunks_per_head()  # in chunks
            while index < count + delay:
                key_blocks.write(iteration, no_keys, index - delay, CHUNK_ONLY)
                self.announce(index - delay, iteration)
                iteration += 1
                index = draw_key_block(scheduler, True)
        return iteration

    # ---- the adders

    @gluon.jit
    def first_dq_block(self, head, g):
        """Return the number of the first block of fp32 dQ of a head's g-th query head, counted through all slots."""
        blocks_m = gl.cdiv(self.sizes.seqlen_q, self.config.BLOCK_M)
        return head % self.slots * (self.sizes.group_size * blocks_m) + g * blocks_m

    @gluon.jit
    def wait_until_free(self, head):
        """Wait until all chunks of the head that had the same memory are cleared."""
        if self.config.ROLLING:
            if head >= self.slots:
                cleared = self.counts_ptr + (head - self.slots).to(gl.int64) * 2 + 1
                wait_until_equal(cleared, self.chunks_per_head() * CONSUMER_COUNT)

    @gluon.jit
    def finish_block(self, head, chunk, iteration, CONSUMER: gl.constexpr):
        """Count a block of keys as added. Clear the consumer's halves of the chunk that came with it, and count that.

        `head`: of the block of keys.
        """
        if self.config.ROLLING:
            wait_for_stores()
            increment_semaphore(self.counts_ptr + head.to(gl.int64) * 2)
            self.converted.pick(CONSUMER).wait(iteration)
            self.locate_chunk(chunk, CONSUMER).clear(self)
            if chunk >= 0:
                chunk_head = chunk // self.chunks_per_head()
                increment_semaphore(self.counts_ptr + chunk_head.to(gl.int64) * 2 + 1)

    @gluon.jit
    def skip_last_chunks(self, kind, iteration, key_blocks):
        """Read past the last chunks. Nobody needs their memory, so nothing is cleared."""
        if self.config.ROLLING:
            while kind == CHUNK_ONLY:
                key_blocks.channel.release(iteration)
                iteration += 1
                kind, _, _ = key_blocks.read(iteration, self.sizes, self.config.LENGTHS)

    # ---- the consumers

    @gluon.jit
    def wait_until_added(self, iteration):
        """Wait until the iteration's chunk may be read."""
        if self.config.ROLLING:
            self.added.wait(iteration)

    @gluon.jit
    def load_first(self, chunk, CONSUMER: gl.constexpr):
        """Start loading the first blocks of a chunk, which arrive while dV and dK are stored."""
        first_dq = ()
        if self.config.ROLLING:
            blocks = self.locate_chunk(chunk, CONSUMER)
            first_dq = blocks.load(blocks.start, self)
        return first_dq

    @gluon.jit
    def convert(self, chunk, first_dq, iteration, CONSUMER: gl.constexpr, item, gradients, sm_scale):
        """Convert a chunk. `first_dq`: from `load_first`.

        The chunk leaves through the memory of `gradients.dq`, which is free when the adder has taken the item before
        `item`. The conversion is no item of that channel: `item` stays the number of the next half of dQ.
        """
        if self.config.ROLLING:
            gradients.dq.pick(CONSUMER).acquire(item)
            self.locate_chunk(chunk, CONSUMER).store(first_dq, self, gradients.dq_boxes, sm_scale)
            self.converted.pick(CONSUMER).commit(iteration)

    @gluon.jit
    def convert_last_chunks(self, kind, chunk, iteration, CONSUMER: gl.constexpr, key_blocks, gradients, sm_scale):
        """Convert the chunks that no block of keys comes with.

        The memory of `gradients.dq` is free, as no dQ follows. Adders are not told, as they clear none of these chunks.
        """
        if self.config.ROLLING:
            while kind == CHUNK_ONLY:
                self.added.wait(iteration)
                key_blocks.channel.release(iteration)
                first_dq = self.load_first(chunk, CONSUMER)
                self.locate_chunk(chunk, CONSUMER).store(first_dq, self, gradients.dq_boxes, sm_scale)
                iteration += 1
                kind, chunk, _ = key_blocks.read(iteration, self.sizes, self.config.LENGTHS)


@aggregate
class DqChunk:
    """A consumer's halves of the blocks of queries [start, end) of a head, counted through all its query heads."""

    head: gl.tensor
    start: gl.tensor
    end: gl.tensor
    CONSUMER: gl.constexpr

    @gluon.jit
    def pointers(self, i, rolling_dq):
        """Return the addresses [HALF_DQ] of the half of block i."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        half = (rolling_dq.first_dq_block(self.head, 0) + i).to(gl.int64) * CONSUMER_COUNT + self.CONSUMER
        return rolling_dq.pointer + half * HALF_DQ + gl.arange(0, HALF_DQ, layout=LAYOUT)

    @gluon.jit
    def load(self, i, rolling_dq):
        """Load the fp32 dQ of the next BLOCK_N queries, from block i on: a tuple of [HALF_DQ] for each block."""
        dq = ()
        for j in gl.static_range(rolling_dq.config.BLOCK_N // rolling_dq.config.BLOCK_M):
            addresses = self.pointers(i + j, rolling_dq)
            dq += (gl.load(addresses, mask=i + j < self.end, cache_modifier=".cg"),)  # added up in the L2 cache
        return dq

    @gluon.jit
    def store(self, dq, rolling_dq, buffers, sm_scale):
        """Scale the chunk and write it in 16 bits. `dq`: its first blocks, from `load`.

        It leaves through the consumer's two boxes of `buffers`, which are free before and after.
        """
        config: gl.constexpr = rolling_dq.config
        sizes = rolling_dq.sizes
        M: gl.constexpr = config.BLOCK_M
        COUNT: gl.constexpr = config.BLOCK_N // M
        COLUMN: gl.constexpr = self.CONSUMER * BOX if config.BOXES > 1 else 0
        ROW: gl.constexpr = 0 if config.BOXES > 1 else self.CONSUMER * ROWS
        heads_kv = sizes.heads_q // sizes.group_size
        blocks_m = gl.cdiv(sizes.seqlen_q, M)
        for i in range(self.start, self.end, COUNT):
            for j in gl.static_range(COUNT):
                rows = from_register_order(dq[j] * sm_scale, BOX).to(buffers.dtype)
                rows = gl.convert_layout(rows, accumulator_layout(BOX), assert_trivial=True)
                box_matrix(buffers, self.CONSUMER, j, 2).store(rows)
            fence_async_shared()
            for j in gl.static_range(COUNT):
                if i + j < self.end:
                    h = self.head % heads_kv * sizes.group_size + (i + j) // blocks_m
                    async_store(
                        rolling_dq.out_tensor, [self.head // heads_kv, h, (i + j) % blocks_m * M + ROW, COLUMN],
                        box_buffer(buffers, self.CONSUMER, j, 2).reshape(rolling_dq.out_tensor.block_shape),
                    )  # fmt: skip
            dq = self.load(i + COUNT, rolling_dq)
            tma.store_wait(0)

    @gluon.jit
    def clear(self, rolling_dq):
        """Write zeros where the consumer has read, if a later head uses the memory."""
        sizes = rolling_dq.sizes
        heads = sizes.batch * (sizes.heads_q // sizes.group_size)
        for i in range(self.start, gl.where(self.head + rolling_dq.slots < heads, self.end, self.start)):
            zeros = gl.zeros([HALF_DQ], gl.float32, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
            gl.store(self.pointers(i, rolling_dq), zeros)


@gluon.jit
def make_rolling_dq(pointer, counts_ptr, slots, delay, out_tensor, sizes, config: gl.constexpr):
    """Return `RollingDq`, with its barriers initialised.

    Both channels have no `empty` barriers: `KeyBlocks` keeps the producer from the next iteration until consumers and
    adders have released the one before, which consumers do after they have waited for `added`.
    """
    added = allocate_channel(1, 1, 0)
    # Two stages: a consumer may convert the next chunk before its adder has waited for this one.
    converted = allocate_channel(2, WARPS, 0, CONSUMER_COUNT)
    return RollingDq(pointer, counts_ptr, slots, delay, out_tensor, added, converted, sizes, config)
