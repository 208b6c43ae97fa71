"""The fp32 dQ of the Hopper backward, and the kernels before and behind the main one.

dQ lies in blocks of BLOCK_M queries, in the order of the consumers' registers, so it is added and read as it is. Where
all sequences have the same length (ROLLING) the main kernel converts it, and no other has to:

* A head of K stands for all query heads of its group, or of a part of it. Programs draw blocks of keys in the order of
  heads, of which some take turns. Who draws one also takes a share of the head that lies `lag` heads before: its
  consumers convert that when they have done with the keys, and its adders leave zeros where a head follows. Behind the
  last block of keys there are only shares to draw.
* So dQ needs room for no more than `slots` heads, which stay in the L2 cache. A head has the memory of the one `slots`
  heads before.
* Each head has two numbers: how often an adder has added a block of keys, and how often one has cleared a share. Who
  converts waits for the first, who adds to the next head in the same memory for the second. Both wait only for what
  belongs to lower numbers, which have been drawn before. `lag` and `slots` are such that this is rare.

Else `_convert_kernel` does it, and dQ has room for all queries.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import WARPS, wait_for_previous_kernels, wait_for_stores
from diyfa.backends.cuda.gluon.compat import aggregate, async_store
from diyfa.backends.cuda.gluon.semaphore import end_turn, wait_for_turn
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    LENGTH_POINTERS,
    SIZES,
    Sizes,
    first_query_block,
    sequence_of,
)
from diyfa.backends.cuda.hopper.epilogue import chunked_layout
from diyfa.backends.cuda.hopper.mma import ROWS, accumulator_layout, box_of, buffer_of
from diyfa.backends.cuda.hopper.softmax import LOG2E
from diyfa.backends.cuda.runtime.constants import Constants

DQ_ROWS = gl.constexpr(16)  # of the box in which a consumer's half of dQ leaves
DQ_COLUMNS = gl.constexpr(256)
HALF_DQ = gl.constexpr(DQ_ROWS.value * DQ_COLUMNS.value)  # 64 x 64 numbers
IN_ORDER = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # of HALF_DQ numbers as they follow each other


@dataclass(frozen=True, eq=False)
class QueryConstants(Constants):
    """What `_prepare_kernel` and `_convert_kernel` are compiled for."""

    block_m: int
    block_d: int
    block_dv: int
    lengths: int
    has_dlse: bool
    keep_delta: bool
    deterministic: bool
    rolling: bool


@gluon.jit
def to_register_order(dq):
    """[64, columns], an accumulator -> the same numbers so that each thread has four that follow each other, and a warp
    128; 64 columns are DQ_ROWS rows.

    A row is 16 * warp + 8 * half + lane // 4, a column 8 * n + 2 * (lane % 4) + bit.
    """
    parts = dq.reshape([4, 2, 8, dq.shape[1] // 8, 4, 2])  # warp, half, lane // 4, n, lane % 4, bit
    return parts.permute(3, 0, 2, 4, 1, 5).reshape([dq.shape[1] // 4, DQ_COLUMNS])


@gluon.jit
def from_register_order(x):
    """The opposite, of 64 x 64 numbers that follow each other in memory."""
    return x.reshape([8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([ROWS, BOX])


@aggregate
class RollingDq:
    """The fp32 dQ of a call, and how far its heads are. `heads` are those of K, of all samples."""

    pointer: gl.tensor | gl.constexpr  # [slots, query heads of a group, blocks of queries, BLOCK_M * D]
    counts_ptr: gl.tensor | gl.constexpr  # [heads, 2] int32, zeros: blocks of keys that were added, shares cleared
    slots: gl.tensor | gl.constexpr
    lag: gl.tensor | gl.constexpr
    out_tensor: tma.tensor_descriptor | gl.constexpr  # dq, (B, H, S, D) whatever the strides

    @gluon.jit
    def first_block(self, head, sizes, BLOCK_M: gl.constexpr):
        """The number of a head's first block of queries."""
        return head % self.slots * (sizes.group_size * gl.cdiv(sizes.seqlen_q, BLOCK_M))

    @gluon.jit
    def wait_until_free(self, head, sizes, BLOCK_N: gl.constexpr):
        """An adder waits until all shares of the head that had the same memory are cleared."""
        if head >= self.slots:
            place = self.counts_ptr + (head - self.slots).to(gl.int64) * 2 + 1
            wait_for_turn(place, gl.cdiv(sizes.seqlen_k, BLOCK_N) * CONSUMER_COUNT)

    @gluon.jit
    def end_adding(self, head):
        """An adder has done with a block of keys of the head."""
        wait_for_stores()
        end_turn(self.counts_ptr + head.to(gl.int64) * 2)

    @gluon.jit
    def wait_until_added(self, share, sizes, BLOCK_N: gl.constexpr):
        """The producer waits until both adders have done with all blocks of keys of a share's head, if there is one."""
        if share >= 0:
            shares = gl.cdiv(sizes.seqlen_k, BLOCK_N)
            wait_for_turn(self.counts_ptr + (share // shares).to(gl.int64) * 2, shares * CONSUMER_COUNT)

    @gluon.jit
    def end_converting(self, share, sizes, BLOCK_N: gl.constexpr):
        """An adder has cleared what the consumer whose halves it adds has converted of a share, if there is one."""
        if share >= 0:
            head = share // gl.cdiv(sizes.seqlen_k, BLOCK_N)
            end_turn(self.counts_ptr + head.to(gl.int64) * 2 + 1)


@aggregate
class Share:
    """A consumer's halves of the blocks of queries [start, end) of a head of K, which are to be converted."""

    head: gl.tensor
    start: gl.tensor
    end: gl.tensor
    CONSUMER: gl.constexpr

    @gluon.jit
    def pointers(self, i, dq, sizes, BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr):
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
        half = (dq.first_block(self.head, sizes, BLOCK_M) + i).to(gl.int64) * CONSUMER_COUNT + self.CONSUMER
        return dq.pointer + half * HALF_DQ + gl.arange(0, HALF_DQ, layout=LAYOUT)

    @gluon.jit
    def load(self, i, dq, sizes, config: gl.constexpr):
        """The fp32 dQ of the blocks from i on, as many as belong to a block of keys."""
        found = ()
        for j in gl.static_range(config.BLOCK_N // config.BLOCK_M):
            at = self.pointers(i + j, dq, sizes, config.BLOCK_M, WARPS)
            found += (gl.load(at, mask=i + j < self.end, cache_modifier=".cg"),)  # added up in the L2 cache
        return found

    @gluon.jit
    def store(self, first, dq, buffers, sm_scale, sizes, config: gl.constexpr):
        """Write dq from the fp32 one, of which the `first` blocks are loaded, through the consumer's two `buffers`,
        which are free before and after."""
        M: gl.constexpr = config.BLOCK_M
        COUNT: gl.constexpr = config.BLOCK_N // M
        COLUMN: gl.constexpr = self.CONSUMER * BOX if config.BOXES > 1 else 0
        ROW: gl.constexpr = 0 if config.BOXES > 1 else self.CONSUMER * ROWS
        heads_kv = sizes.heads_q // sizes.group_size
        blocks_m = gl.cdiv(sizes.seqlen_q, M)
        x = first
        for i in range(self.start, self.end, COUNT):
            for j in gl.static_range(COUNT):
                rows = from_register_order(x[j] * sm_scale).to(buffers.dtype)
                rows = gl.convert_layout(rows, accumulator_layout(BOX), assert_trivial=True)
                box_of(buffers, self.CONSUMER, j, 2).store(rows)
            fence_async_shared()
            for j in gl.static_range(COUNT):
                if i + j < self.end:
                    h = self.head % heads_kv * sizes.group_size + (i + j) // blocks_m
                    async_store(
                        dq.out_tensor, [self.head // heads_kv, h, (i + j) % blocks_m * M + ROW, COLUMN],
                        buffer_of(buffers, self.CONSUMER, j, 2).reshape(dq.out_tensor.block_shape),
                    )  # fmt: skip
            x = self.load(i + COUNT, dq, sizes, config)
            tma.store_wait(0)

    @gluon.jit
    def clear(self, dq, sizes, config: gl.constexpr):
        """An adder leaves zeros where its consumer has read, if there is a head that needs them."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
        heads = sizes.batch * (sizes.heads_q // sizes.group_size)
        for i in range(self.start, gl.where(self.head + dq.slots < heads, self.end, self.start)):
            zeros = gl.zeros([HALF_DQ], gl.float32, LAYOUT)
            gl.store(self.pointers(i, dq, sizes, config.BLOCK_M, 1), zeros)


@gluon.jit
def share_of(number, sizes, CONSUMER: gl.constexpr, config: gl.constexpr):
    """What is to be converted with a share, each head's being numbered as its blocks of keys; nothing if it is -1."""
    shares = gl.cdiv(sizes.seqlen_k, config.BLOCK_N)
    count = sizes.group_size * gl.cdiv(sizes.seqlen_q, config.BLOCK_M)
    each = gl.cdiv(count, shares)
    start = number % shares * each
    end = gl.where(number >= 0, gl.minimum(start + each, count), start)
    return Share(number // shares, start, end, CONSUMER)


@gluon.jit(do_not_specialize=(*SIZES, "dq_blocks"), do_not_specialize_on_alignment=LENGTH_POINTERS)
def _prepare_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lengths_q_ptr, lengths_k_ptr,
    statistics_ptr,
    dq_ptr,  # None where nothing is added up in memory
    semaphores_ptr,
    counter_ptr,
    counts_ptr,  # of `RollingDq`, or None
    delta_ptr,  # (B, H, Sq) or (H, Tq) fp32, for KEEP_DELTA
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim_v,
    dq_blocks,  # of queries, that the fp32 dQ has room for
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """A block of queries: delta = rowsum(dO * O) - dLSE, beside lse for the main kernel, and zeros for dQ."""
    D: gl.constexpr = config.BLOCK_D
    DV: gl.constexpr = config.BLOCK_DV
    M: gl.constexpr = config.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    wait_for_previous_kernels()
    sizes = Sizes(heads_q, 1, batch, seqlen_q, seqlen_k, total_q, total_k, -1, -1, lengths_q_ptr, lengths_k_ptr, 1)
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    block = pid % blocks_m
    h = pid // blocks_m % heads_q
    b = pid // blocks_m // heads_q
    first_q, _, n_queries, _ = sequence_of(b, sizes, config.LENGTHS)
    row0 = block * M
    if pid == 0:
        gl.store(counter_ptr, 0)
    R: gl.constexpr = M if DV <= 128 else M // 2  # rows at a time: more would not fit the registers
    columns = gl.arange(0, DV, layout=gl.SliceLayout(0, LAYOUT))
    if row0 < n_queries:
        o_at = o_ptr + b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
        do_at = do_ptr + b.to(gl.int64) * stride_dob + h.to(gl.int64) * stride_doh
        if config.LENGTHS == PACKED:
            of_rows = h.to(gl.int64) * total_q + first_q
        else:
            of_rows = (b * heads_q + h).to(gl.int64) * seqlen_q
        number = first_query_block(b, h, first_q, sizes, M, config.LENGTHS) + block
        statistics = statistics_ptr + number.to(gl.int64) * (2 * M)
        for start in range(0, M, R):
            in_block = start + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
            rows = row0 + in_block
            at = (first_q + rows).to(gl.int64)[:, None]
            exists = rows < n_queries
            inside = exists[:, None] & (columns < head_dim_v)[None, :]
            o = gl.load(o_at + at * stride_om + columns[None, :], mask=inside, other=0.0)
            do = gl.load(do_at + at * stride_dom + columns[None, :], mask=inside, other=0.0)
            delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
            lse = gl.load(lse_ptr + of_rows + rows, mask=exists, other=float("inf"))
            if config.HAS_DLSE:
                dlse_at = dlse_ptr + b.to(gl.int64) * stride_dlb + h.to(gl.int64) * stride_dlh
                delta -= gl.load(dlse_at + (first_q + rows).to(gl.int64) * stride_dlm, mask=exists, other=0.0)
            if config.KEEP_DELTA:
                gl.store(
                    delta_ptr + of_rows + rows, delta, mask=rows < (n_queries if config.LENGTHS == PACKED else seqlen_q)
                )
            gl.store(statistics + in_block, lse * LOG2E)
            gl.store(statistics + M + in_block, delta)
        if dq_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
            if number < dq_blocks:
                zeros = gl.zeros([HALF_DQ], gl.float32, IN_ORDER)
                part_at = dq_ptr + number.to(gl.int64) * (M * D) + gl.arange(0, HALF_DQ, layout=IN_ORDER)
                for part in gl.static_range(M * D // HALF_DQ):
                    gl.store(part_at + part * HALF_DQ, zeros)
        if config.ROLLING:
            for i in gl.static_range(2):  # of as many query heads as heads of K, or more
                gl.store(counts_ptr + (b * heads_q + h) * 2 + i, 0, mask=block == 0)
        if config.DETERMINISTIC:
            for half in gl.static_range(CONSUMER_COUNT):
                gl.store(semaphores_ptr + number * CONSUMER_COUNT + half, 0)
    elif config.KEEP_DELTA and config.LENGTHS == SEQ_LENS:
        of_sample = (b * heads_q + h).to(gl.int64) * seqlen_q
        rows = row0 + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        gl.store(delta_ptr + of_sample + rows, gl.zeros_like(rows).to(gl.float32), mask=rows < seqlen_q)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _convert_kernel(
    dq_ptr, lengths_q_ptr, lengths_k_ptr,
    out_ptr,
    stride_dqb, stride_dqh, stride_dqm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim,
    sm_scale,
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """Half of a block of queries, what one consumer has added up: scaled, in order, and in dq's dtype."""
    M: gl.constexpr = config.BLOCK_M
    D: gl.constexpr = config.BLOCK_D
    LAYOUT: gl.constexpr = chunked_layout(BOX)
    wait_for_previous_kernels()
    sizes = Sizes(heads_q, 1, batch, seqlen_q, seqlen_k, total_q, total_k, -1, -1, lengths_q_ptr, lengths_k_ptr, 1)
    HALVES: gl.constexpr = M * D // HALF_DQ
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    half = pid % HALVES
    block = pid // HALVES % blocks_m
    h = pid // HALVES // blocks_m % heads_q
    b = pid // HALVES // blocks_m // heads_q
    first_q, _, n_queries, _ = sequence_of(b, sizes, config.LENGTHS)
    row0 = block * M
    column0 = 0
    if D > BOX:
        column0 = half * BOX
    else:
        row0 += half * ROWS
    end = n_queries if config.LENGTHS == PACKED else seqlen_q
    number = first_query_block(b, h, first_q, sizes, M, config.LENGTHS) + block
    # Behind the end of a sequence there may be no block: what is read instead is not written.
    number = gl.where(row0 < n_queries, number, 0)
    at = dq_ptr + (number.to(gl.int64) * HALVES + half) * HALF_DQ
    x = from_register_order(gl.load(at + gl.arange(0, HALF_DQ, layout=IN_ORDER)) * sm_scale)
    x = gl.convert_layout(x.to(out_ptr.dtype.element_ty), LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column0 + gl.arange(0, BOX, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.where((rows < n_queries)[:, None], x, 0.0)
    out = out_ptr + h.to(gl.int64) * stride_dqh
    if config.LENGTHS == PACKED:
        out += first_q.to(gl.int64) * stride_dqm
    else:
        out += b.to(gl.int64) * stride_dqb
    inside = (rows < end)[:, None] & (columns < head_dim)[None, :]
    gl.store(out + rows.to(gl.int64)[:, None] * stride_dqm + columns[None, :], x, mask=inside)
