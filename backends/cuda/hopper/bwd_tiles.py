"""Blocks of keys of the Hopper backward, and the blocks of queries that see them.

Queries lie in blocks of BLOCK_M rows of one head. Each sequence begins with a block of its own, so the statistics and
the fp32 dQ have blocks of their own for each sequence, too.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.block_info import end_visible, last_block, query_ranges
from diyfa.backends.cuda.attention.seq_info import seq_info
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED
from diyfa.backends.cuda.gluon.barriers import LANES, WARPS
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate
from diyfa.backends.cuda.gluon.tile_info import unpack_words
from diyfa.backends.cuda.hopper.bwd_configs import BOX_COLUMNS, CONSUMERS
from diyfa.backends.cuda.hopper.bwd_mask import QueryList, query_list

CONSUMER_COUNT = gl.constexpr(CONSUMERS)
BOX = gl.constexpr(BOX_COLUMNS)
# Arguments for whose values Triton must not compile versions of their own.
SIZES = (
    "heads_q", "group_size", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn", "steps_dob", "steps_dom",
    "interleaved_heads", "stride_slopeb",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")


@aggregate
class Sizes:
    """Sizes of a call, lengths of its sequences, the mask, and the order of the blocks of keys."""

    heads_q: gl.tensor
    group_size: gl.tensor | gl.constexpr
    batch: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    total_k: gl.tensor
    window_left: gl.tensor | gl.constexpr
    window_right: gl.tensor | gl.constexpr
    lengths_q_ptr: gl.tensor | gl.constexpr  # None where all are EQUAL
    lengths_k_ptr: gl.tensor | gl.constexpr
    interleaved_heads: gl.tensor | gl.constexpr  # heads of K, see `locate_key_block`
    mask: BlockMask | gl.constexpr  # None in kernels that take no block mask


@gluon.jit
def clipped_seq_info(b, sizes, LENGTHS: gl.constexpr):
    """Return the first row of sample b in q, its first row in k, and how many queries and keys it has.

    A packed sequence that is longer than the stated maximum is cut there. There is no memory for more, and no program
    draws the blocks beyond it, so others would wait for them for ever.
    """
    lengths = (
        sizes.lengths_q_ptr, sizes.lengths_k_ptr, sizes.lengths_k_ptr,
        sizes.seqlen_q, sizes.seqlen_k, sizes.total_q, sizes.total_k,
    )  # fmt: skip
    first_q, first_k, n_queries, n_keys = seq_info(b, lengths, LENGTHS)
    if LENGTHS == PACKED:
        n_queries = gl.minimum(n_queries, sizes.seqlen_q)
        n_keys = gl.minimum(n_keys, sizes.seqlen_k)
    return first_q, first_k, n_queries, n_keys


@gluon.jit
def first_query_block(b, h, first_q, sizes, BLOCK_M: gl.constexpr, LENGTHS: gl.constexpr):
    """The number of a sequence's first block of queries in head h.

    Packed, the blocks of sequence b begin at first_q // BLOCK_M + b within a head. The next sequence begins far enough
    behind, since floor(x + n) - floor(x) + 1 >= ceil(n).
    """
    if LENGTHS == PACKED:
        block = h * (sizes.total_q // BLOCK_M + sizes.batch) + first_q // BLOCK_M + b
    else:
        block = (b * sizes.heads_q + h) * gl.cdiv(sizes.seqlen_q, BLOCK_M)
    return block


@aggregate
class KeyBlock:
    """A block of BLOCK_N keys, and the blocks [begin, end) of queries that see some of them."""

    b: gl.tensor  # sample
    hk: gl.tensor  # head of K
    col0: gl.tensor  # first key
    first_q: gl.tensor  # first row of the sequence in packed q
    first_k: gl.tensor
    n_queries: gl.tensor  # of the sequence
    n_keys: gl.tensor
    begin: gl.tensor
    full_begin: gl.tensor  # blocks [full_begin, full_end) need no mask; the others, on both sides, do
    full_end: gl.tensor
    end: gl.tensor
    listed: QueryList | gl.constexpr  # of one head, see `seen_by`; None without a block mask

    @gluon.jit
    def seen_by(self, h, sizes, config):
        """Return the block of keys with the blocks of queries of head h. Only with a block mask do heads differ.

        Then [begin, end) and the other bounds are positions in the head's list, masked blocks first, and so are the
        results of `masked_block` and `visited_block`. Only `block` looks them up. Consumers compare no positions beside
        a block mask, so they need no block's number.
        """
        keys = self
        if config.MASK_Q > 0:
            listed = query_list(self.b, h, self.col0, sizes, config)
            begin = 0
            keys = KeyBlock(
                self.b, self.hk, self.col0, self.first_q, self.first_k, self.n_queries, self.n_keys,
                begin, listed.n_masked, listed.n_blocks, listed.n_blocks, listed,
            )  # fmt: skip
        return keys

    @gluon.jit
    def masked_count(self):
        """Return how many blocks need a mask."""
        return (self.full_begin - self.begin) + (self.end - self.full_end)

    @gluon.jit
    def masked_block(self, i):
        """Return the i-th block that needs a mask."""
        block = self.begin + i
        return gl.where(block < self.full_begin, block, block + (self.full_end - self.full_begin))

    @gluon.jit
    def visited_block(self, i, MASKED: gl.constexpr):
        """Return block i itself, or if MASKED the i-th block that needs a mask."""
        return self.masked_block(i) if MASKED else i

    @gluon.jit
    def block(self, i):
        """Return the number of the i-th of all blocks. Those that need a mask come first."""
        if self.listed is not None:
            block = self.listed.block(i)
        else:
            n_masked = self.masked_count()
            block = gl.where(i < n_masked, self.masked_block(i), self.full_begin + i - n_masked)
        return block

    @gluon.jit
    def adders_before(self, block, sizes, config):
        """Return how many programs add to dQ of a block of queries before this one: those with later keys that it sees.

        Those programs have lower numbers. Under a causal mask they also reach the block first.
        """
        last = gl.cdiv(self.n_keys, config.BLOCK_N) - 1
        if config.HAS_RIGHT:
            last_row = (block + 1) * config.BLOCK_M - 1
            end = end_visible(last_row + self.n_keys - self.n_queries, sizes.window_right, self.n_keys)
            last = last_block(end, config.BLOCK_N)
        return last - self.col0 // config.BLOCK_N


@gluon.jit
def locate_key_block(pid, sizes, config):
    """Return block of keys number `pid`. Blocks are numbered head by head, so that what they share stays in L2.

    Within a head the first keys come first: under a causal mask they have the most queries. DETERMINISTIC is the other
    way round, since dQ is added up from the last keys to the first (`KeyBlock.adders_before`).

    The last `interleaved_heads` heads are interleaved: the first blocks of each of them, then the second ones.
    Otherwise the longest blocks of the very last head would begin when there is little else to do. With DETERMINISTIC
    all heads are interleaved, `interleaved_heads` at a time: blocks of one head that began together would wait for each
    other at each block of queries.
    """
    blocks_n = gl.cdiv(sizes.seqlen_k, config.BLOCK_N)
    heads_kv = sizes.heads_q // sizes.group_size
    heads = sizes.batch * heads_kv
    n_sequential = heads - sizes.interleaved_heads
    if config.DETERMINISTIC:
        n_sequential = pid // (sizes.interleaved_heads * blocks_n) * sizes.interleaved_heads
    n_interleaved = gl.minimum(sizes.interleaved_heads, heads - n_sequential)
    interleaved_index = pid - n_sequential * blocks_n
    head = gl.where(interleaved_index < 0, pid // blocks_n, n_sequential + interleaved_index % n_interleaved)
    block_n = gl.where(interleaved_index < 0, pid % blocks_n, interleaved_index // n_interleaved)
    if config.DETERMINISTIC:
        block_n = blocks_n - 1 - block_n
    col0 = block_n * config.BLOCK_N
    b = head // heads_kv
    hk = head % heads_kv
    first_q, first_k, n_queries, n_keys = clipped_seq_info(b, sizes, config.LENGTHS)
    mask = (n_queries, n_keys, n_keys - n_queries, sizes.window_left, sizes.window_right)
    # Keys beyond the last one read as zeros, but their weights exp(0 - lse) may be infinite: they need a mask.
    begin, full_begin, full_end, end = query_ranges(col0, mask, False, True, config)
    begin = begin // config.BLOCK_M
    end = gl.maximum(gl.cdiv(end, config.BLOCK_M), begin)
    full_begin = full_begin // config.BLOCK_M
    full_end = gl.cdiv(full_end, config.BLOCK_M)
    if config.DETERMINISTIC and config.HAS_LEFT:
        # All blocks count as masked, so that they come in their own order. Otherwise each program would wait for most
        # of the one before.
        full_begin = end
        full_end = end
    return KeyBlock(b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end, None)


FIELDS = gl.constexpr(13)
END, KEYS, CHUNK_ONLY = (gl.constexpr(n) for n in range(3))  # kinds of iterations
WORDS = gl.constexpr(16)  # a power of two


@aggregate
class KeyBlocks:
    """The producer's messages to the other roles of a persistent program: the block of keys of each iteration.

    All iterations use the same memory. Adders release it when they have read it, consumers when they have finished the
    keys.
    """

    words: gl.shared_memory_descriptor  # [WORDS]
    channel: Channel

    @gluon.jit
    def write(self, iteration, keys, chunk, KIND: gl.constexpr):
        """Write an iteration's block of keys, and the number of the chunk of dQ to convert after it (`RollingDq`)."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
        fields = (
            KIND, chunk, keys.b, keys.hk, keys.col0, keys.first_q, keys.first_k, keys.n_queries, keys.n_keys,
            keys.begin, keys.full_begin, keys.full_end, keys.end,
        )  # fmt: skip
        field = gl.arange(0, WORDS, layout=LAYOUT)
        words = gl.zeros_like(field)
        for i in gl.static_range(FIELDS):
            words = gl.where(field == i, fields[i], words)
        self.channel.acquire(iteration)
        self.words.store(words)
        self.channel.commit(iteration)

    @gluon.jit
    def read(self, iteration, sizes, LENGTHS: gl.constexpr):
        """Wait for an iteration -> (its kind, chunk of dQ, block of keys)."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS], [32], [gl.num_warps()], [0])
        self.channel.wait(iteration)
        fields = unpack_words(self.words.load(LAYOUT), 0, FIELDS, LAYOUT)
        kind, chunk, b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end = fields
        if LENGTHS == EQUAL:  # all blocks have the same: no registers for it
            first_q = 0
            first_k = 0
            n_queries = sizes.seqlen_q
            n_keys = sizes.seqlen_k
        keys = KeyBlock(b, hk, col0, first_q, first_k, n_queries, n_keys, begin, full_begin, full_end, end, None)
        return kind, chunk, keys


@gluon.jit
def allocate_key_blocks():
    """`KeyBlocks` with its memory and barriers, initialised."""
    words = gl.allocate_shared_memory(gl.int32, [WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    channel = allocate_channel(1, LANES, CONSUMER_COUNT * (WARPS + 1))
    return KeyBlocks(words, channel)


@gluon.jit
def draw_key_block(scheduler, WAITS: gl.constexpr):
    """Draw the number of a program's next block of keys.

    A program's first block has the program's own number. But if programs wait for lower numbers (WAITS), the first one
    is drawn as well: a program that has not started may not hold a number.
    """
    index = scheduler.next_tile(0, scheduler.draw())
    if WAITS:
        index -= gl.num_programs(0)
    return index
