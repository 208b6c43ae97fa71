"""Block masks in the Hopper backward: the blocks of queries that see a block of keys, and the bits of partial ones.

`diyfa.block_lists` describes the tensors. BLOCK_N keys are one block of the mask, so a head has one list for them. A
block of the mask has SPLIT blocks of BLOCK_M queries. As under other masks, blocks of queries that need a mask come
first: those of partial blocks.

The mask has a word for each query and each 32 keys. Scores are transposed, [keys, queries], and the two rows of a
thread lie in the same 32 keys. So a thread needs one word for each of its columns.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.gluon.barriers import LANES, WARPS
from diyfa.backends.cuda.gluon.block_mask import EMPTY, WORD
from diyfa.backends.cuda.gluon.channel import Channel, allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, optimisation_barrier
from diyfa.backends.cuda.hopper.mma import ROWS


@aggregate
class QueryList:
    """The list of the blocks of queries that see a block of keys in one head."""

    list_ptr: gl.tensor  # numbers of the mask's blocks of queries: full ones, then partial ones
    codes_ptr: gl.tensor  # code of the mask's first block of queries and this block of keys
    code_stride: gl.tensor  # entries from there to the code of the next block of queries
    bits_ptr: gl.tensor  # `mask_bits`
    n_full: gl.tensor  # full blocks of the mask
    n_masked: gl.tensor  # blocks of BLOCK_M queries in partial blocks of the mask
    n_blocks: gl.tensor  # all blocks of BLOCK_M queries
    SPLIT: gl.constexpr  # 1 or 2: blocks of BLOCK_M queries in a block of the mask
    WORDS: gl.constexpr  # words of a query in a block of the mask

    @gluon.jit
    def block(self, i):
        """Return the number of the i-th block of queries. Those of partial blocks come first, unlike in the list."""
        # Position in the list, counted in blocks of BLOCK_M queries.
        position = gl.where(i < self.n_masked, self.n_full * self.SPLIT + i, i - self.n_masked)
        return gl.load(self.list_ptr + position // self.SPLIT) * self.SPLIT + position % self.SPLIT

    @gluon.jit
    def words(self, block, BLOCK_M: gl.constexpr):
        """Return the address of the words of a block of queries that lies in a partial block of the mask."""
        code = gl.load(self.codes_ptr + block // self.SPLIT * self.code_stride)
        return self.bits_ptr + (code.to(gl.int64) * self.SPLIT + block % self.SPLIT) * (BLOCK_M * self.WORDS)


@gluon.jit
def query_list(b, h, col0, sizes, config: gl.constexpr):
    """Return the list of head h of sample b for the block of keys at col0.

    A head of `mask_blocks` has nq * nk codes, nq lists of 2 + nk entries, and nk lists of 2 + nq entries. Each list
    begins with two counts: of full blocks, of full and partial blocks.
    """
    mask = sizes.mask
    SPLIT: gl.constexpr = mask.MASK_Q // config.BLOCK_M
    # Without barriers the compiler would compute nq and nk once, and keep them in registers that the roles do not have.
    seqlen_q = optimisation_barrier(sizes.seqlen_q)
    nq = gl.cdiv(seqlen_q, mask.MASK_Q)
    nk = gl.cdiv(optimisation_barrier(sizes.seqlen_k), mask.MASK_K)
    block_k = col0 // mask.MASK_K
    codes_ptr = mask.blocks_ptr + b.to(gl.int64) * mask.stride_b + h.to(gl.int64) * mask.stride_h
    list_ptr = codes_ptr + (nq * nk + nq * (2 + nk) + block_k * (2 + nq) + 2)
    codes_ptr += block_k
    n_full = gl.load(list_ptr - 2)
    n_listed = gl.load(list_ptr - 1)
    n_masked = (n_listed - n_full) * SPLIT
    n_blocks = n_listed * SPLIT
    if SPLIT > 1:  # SPLIT is 2: in the mask's last block only the first half may have queries
        code = gl.load(codes_ptr + (nq - 1) * nk)
        missing = nq * SPLIT - gl.cdiv(seqlen_q, config.BLOCK_M)
        n_masked -= gl.where(code >= 0, missing, 0)
        n_blocks -= gl.where(code != EMPTY, missing, 0)
    return QueryList(
        list_ptr, codes_ptr, nk, mask.bits_ptr, n_full, n_masked, n_blocks, SPLIT, mask.MASK_K // WORD
    )  # fmt: skip


@aggregate
class MaskWords:
    """The words of a block of queries in a partial block of the mask, from the producer to the consumers.

    Consumers read them at the beginning of a block and release them. So one stage is enough: the producer fills it for
    the next block while the consumers go on with this one.
    """

    buffers: gl.shared_memory_descriptor  # [consumers, words of a query for a consumer's keys, BLOCK_M] int32
    channel: Channel

    @gluon.jit
    def copy(self, item, words_ptr):
        """In the producer, copy the words of a block as `item`: how many blocks of words were copied before."""
        CONSUMERS: gl.constexpr = self.buffers.shape[0]
        WORDS: gl.constexpr = self.buffers.shape[1]
        LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS, 1], [1, 32], [1, 1], [0, 1])
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        row = gl.arange(0, self.buffers.shape[2], layout=gl.SliceLayout(0, LAYOUT))[None, :]
        addresses = words_ptr + row * (CONSUMERS * WORDS) + word
        words = ()
        for c in gl.static_range(CONSUMERS):
            words += (gl.load(addresses + c * WORDS),)
        self.channel.acquire(item)
        for c in gl.static_range(CONSUMERS):
            self.buffers.index(c).store(words[c])
        self.channel.commit(item)

    @gluon.jit
    def visible_pairs(self, item, s, CONSUMER: gl.constexpr):
        """In a consumer, wait for the words of a block. Return which pairs of scores s [64, BLOCK_M] are visible."""
        LAYOUT: gl.constexpr = s.reshape([self.buffers.shape[1], WORD, s.shape[1]]).type.layout
        self.channel.wait(item)
        words = self.buffers.index(CONSUMER).load(gl.SliceLayout(1, LAYOUT))
        self.channel.release(item)
        # A thread has two keys of a word, which differ in bit 3: they are 8 apart. It shifts the word by the other bits
        # of the key once for both; the shift by 0 or 8 is known when the kernel is compiled.
        key = gl.arange(0, WORD, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
        is_visible = (words[:, None, :] >> (key & ~8) >> (key & 8)) & 1 != 0
        return gl.convert_layout(is_visible.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def allocate_mask_words(config: gl.constexpr):
    """`MaskWords`, with its barriers initialised."""
    CONSUMERS: gl.constexpr = config.BLOCK_N // ROWS
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = gl.allocate_shared_memory(gl.int32, [CONSUMERS, ROWS // WORD, config.BLOCK_M], LAYOUT)
    return MaskWords(buffers, allocate_channel(1, LANES, CONSUMERS * WARPS))
