"""The fp32 dQ of the Hopper backward, and the kernels before and after the main one.

`_prepare_kernel` writes the statistics and clears the fp32 dQ. The main kernel adds to it. `_convert_kernel` writes dq
from it, unless the main kernel does that (`bwd_rolling_dq.py`).

The fp32 dQ consists of blocks of BLOCK_M queries, numbered over all heads (`first_query_block`). A block consists of
*halves* of 64 x 64 numbers, mostly two: 64 queries each, or 64 columns if there are more of them. A half is in the
order of a consumer's registers, so that adding and reading it takes no exchange between threads.

Head dims are multiples of CHUNK, and strides of 16 bytes. The compiler has to see that, or it moves 2 bytes at a time.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.barriers import wait_for_previous_kernels
from diyfa.backends.cuda.hopper.bwd_tiles import (
    BOX,
    CONSUMER_COUNT,
    LENGTH_POINTERS,
    SIZES,
    Sizes,
    clipped_seq_info,
    first_query_block,
)
from diyfa.backends.cuda.hopper.epilogue import CHUNK, chunked_layout, from_register_order, in_register_order
from diyfa.backends.cuda.hopper.mma import ROWS
from diyfa.backends.cuda.hopper.softmax import LOG2E
from diyfa.backends.cuda.runtime.constants import Constants

# A half leaves a consumer as a box [DQ_ROWS, DQ_COLUMNS].
DQ_ROWS = gl.constexpr(16)
DQ_COLUMNS = gl.constexpr(256)
HALF_DQ = gl.constexpr(DQ_ROWS.value * DQ_COLUMNS.value)
IN_ORDER = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # layout of HALF_DQ consecutive numbers


@dataclass(frozen=True, eq=False)
class QueryConstants(Constants):
    """Constants of `_prepare_kernel` and `_convert_kernel`."""

    block_m: int
    block_d: int
    block_dv: int
    lengths: int


@gluon.jit
def to_register_order(dq):
    """Return an accumulator [64, columns] `in_register_order`. 64 columns become DQ_ROWS rows of DQ_COLUMNS."""
    return in_register_order(dq, [dq.shape[1] // 4, DQ_COLUMNS])


@gluon.jit
def _whole_chunks(stride, pointer):
    """Return a stride in elements of `pointer` as an int64 that the compiler knows to be a multiple of 16 bytes."""
    ELEMENTS: gl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    return stride.to(gl.int64) // ELEMENTS * ELEMENTS


@gluon.jit
def _query_sizes(heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, lengths_q_ptr, lengths_k_ptr):
    """Return the `Sizes` of a kernel that knows no mask and no order of key blocks."""
    return Sizes(
        heads_q=heads_q, group_size=1, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=total_q,
        total_k=total_k, window_left=-1, window_right=-1, lengths_q_ptr=lengths_q_ptr, lengths_k_ptr=lengths_k_ptr,
        interleaved_heads=1, mask=None,
    )  # fmt: skip


@gluon.jit(do_not_specialize=(*SIZES, "dq_blocks"), do_not_specialize_on_alignment=LENGTH_POINTERS)
def _prepare_kernel(
    o_ptr, do_ptr, lse_ptr,
    dlse_ptr,  # or None
    lengths_q_ptr, lengths_k_ptr,
    statistics_ptr,
    dq_ptr,  # None where dQ is not added up in memory
    semaphores_ptr,  # None unless it is added up in order
    counter_ptr,
    counts_ptr,  # of `RollingDq`, or None
    n_long_ptr,  # the number of long blocks of keys, or None without a block mask
    delta_ptr,  # (B, H, Sq) or (H, Tq) fp32, or None
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim_v,
    dq_blocks,  # blocks of queries that the fp32 dQ has room for
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """Prepare a block of M queries of a head for the main kernel.

    1. Write the block's statistics: lse in units of log2 and delta = rowsum(dO * O) - dLSE, two rows of M numbers. If
       `delta` is given, delta also goes there, with zeros for rows beyond a sample's end.
    2. Clear the block's dQ, counts and semaphores. The first program clears what all programs of the main kernel share.
    """
    D: gl.constexpr = config.BLOCK_D
    DV: gl.constexpr = config.BLOCK_DV
    M: gl.constexpr = config.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])  # a warp reads whole rows
    R: gl.constexpr = M if DV <= 128 else M // 2  # rows that fit the registers
    wait_for_previous_kernels()
    sizes = _query_sizes(heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, lengths_q_ptr, lengths_k_ptr)
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    block = pid % blocks_m
    h = pid // blocks_m % heads_q
    b = pid // blocks_m // heads_q
    first_q, _, n_queries, _ = clipped_seq_info(b, sizes, config.LENGTHS)
    row0 = block * M
    if pid == 0:
        gl.store(counter_ptr, 0)
        if n_long_ptr is not None:
            gl.store(n_long_ptr, 0)
    columns = gl.arange(0, DV, layout=gl.SliceLayout(0, LAYOUT))
    if row0 < n_queries:
        o_head = o_ptr + b * _whole_chunks(stride_ob, o_ptr) + h * _whole_chunks(stride_oh, o_ptr)
        do_head = do_ptr + b * _whole_chunks(stride_dob, do_ptr) + h * _whole_chunks(stride_doh, do_ptr)
        if config.LENGTHS == PACKED:
            first_row = h.to(gl.int64) * total_q + first_q
        else:
            first_row = (b * heads_q + h).to(gl.int64) * seqlen_q
        block_number = first_query_block(b, h, first_q, sizes, M, config.LENGTHS) + block
        statistics = statistics_ptr + block_number.to(gl.int64) * (2 * M)
        for start in range(0, M, R):
            offs = start + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
            rows = row0 + offs
            row = (first_q + rows).to(gl.int64)[:, None]
            exists = rows < n_queries
            inside = exists[:, None] & (columns < head_dim_v // CHUNK * CHUNK)[None, :]
            # This kernel reads o and dO once. If they leave the L2 cache first, it takes 48 us instead of 51.
            o_row, do_row = row * _whole_chunks(stride_om, o_ptr), row * _whole_chunks(stride_dom, do_ptr)
            o = gl.load(o_head + o_row + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            do = gl.load(do_head + do_row + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            delta = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
            lse = gl.load(lse_ptr + first_row + rows, mask=exists, other=float("inf"))
            if dlse_ptr is not None:
                dlse_head = dlse_ptr + b.to(gl.int64) * stride_dlb + h.to(gl.int64) * stride_dlh
                delta -= gl.load(dlse_head + (first_q + rows).to(gl.int64) * stride_dlm, mask=exists, other=0.0)
            if delta_ptr is not None:
                end = n_queries if config.LENGTHS == PACKED else seqlen_q
                gl.store(delta_ptr + first_row + rows, delta, mask=rows < end)
            gl.store(statistics + offs, lse * LOG2E)
            gl.store(statistics + M + offs, delta)
        if dq_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
            if block_number < dq_blocks:
                zeros = gl.zeros([HALF_DQ], gl.float32, IN_ORDER)
                half_addresses = dq_ptr + block_number.to(gl.int64) * (M * D) + gl.arange(0, HALF_DQ, layout=IN_ORDER)
                for i_half in gl.static_range(M * D // HALF_DQ):
                    gl.store(half_addresses + i_half * HALF_DQ, zeros)
        if counts_ptr is not None:
            for i in gl.static_range(2):  # there are at least as many query heads as heads of K
                gl.store(counts_ptr + (b * heads_q + h) * 2 + i, 0, mask=block == 0)
        if semaphores_ptr is not None:
            for half in gl.static_range(CONSUMER_COUNT):
                gl.store(semaphores_ptr + block_number * CONSUMER_COUNT + half, 0)
    elif delta_ptr is not None and config.LENGTHS == SEQ_LENS:  # the whole block is beyond the sample's end
        first_row = (b * heads_q + h).to(gl.int64) * seqlen_q
        rows = row0 + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        gl.store(delta_ptr + first_row + rows, gl.zeros_like(rows).to(gl.float32), mask=rows < seqlen_q)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=LENGTH_POINTERS)
def _convert_kernel(
    dq_ptr, lengths_q_ptr, lengths_k_ptr,
    out_ptr,
    stride_dqb, stride_dqh, stride_dqm,
    heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, head_dim,
    sm_scale,
    config: gl.constexpr,  # `QueryConstants`
):  # fmt: skip
    """Write a half of a block of queries to dq: scale it, restore the order of its numbers, and convert it."""
    M: gl.constexpr = config.BLOCK_M
    D: gl.constexpr = config.BLOCK_D
    LAYOUT: gl.constexpr = chunked_layout(BOX)
    wait_for_previous_kernels()
    sizes = _query_sizes(heads_q, batch, seqlen_q, seqlen_k, total_q, total_k, lengths_q_ptr, lengths_k_ptr)
    HALVES: gl.constexpr = M * D // HALF_DQ
    blocks_m = gl.cdiv(seqlen_q, M)
    pid = gl.program_id(0)
    half = pid % HALVES
    block = pid // HALVES % blocks_m
    h = pid // HALVES // blocks_m % heads_q
    b = pid // HALVES // blocks_m // heads_q
    first_q, _, n_queries, _ = clipped_seq_info(b, sizes, config.LENGTHS)
    row0 = block * M
    column0 = 0
    if D > BOX:  # the halves are columns
        column0 = half * BOX
    else:
        row0 += half * ROWS
    end = n_queries if config.LENGTHS == PACKED else seqlen_q
    block_number = first_query_block(b, h, first_q, sizes, M, config.LENGTHS) + block
    # Beyond the end of a sequence there may be no block. Another one is read then, but not written.
    block_number = gl.where(row0 < n_queries, block_number, 0)
    half_address = dq_ptr + (block_number.to(gl.int64) * HALVES + half) * HALF_DQ
    x = from_register_order(gl.load(half_address + gl.arange(0, HALF_DQ, layout=IN_ORDER)) * sm_scale, BOX)
    x = gl.convert_layout(x.to(out_ptr.dtype.element_ty), LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column0 + gl.arange(0, BOX, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.where((rows < n_queries)[:, None], x, 0.0)
    stride_row = _whole_chunks(stride_dqm, out_ptr)
    out = out_ptr + h * _whole_chunks(stride_dqh, out_ptr)
    if config.LENGTHS == PACKED:
        out += first_q * stride_row
    else:
        out += b * _whole_chunks(stride_dqb, out_ptr)
    inside = (rows < end)[:, None] & (columns < head_dim // CHUNK * CHUNK)[None, :]
    gl.store(out + rows[:, None] * stride_row + columns[None, :], x, mask=inside)
