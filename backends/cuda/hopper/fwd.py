"""Attention forward for Hopper (sm_90): a producer warp and consumer warpgroups, in Gluon.

The schedule is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, algorithm 2 with its section 3.2). One producer
warp copies tiles to shared memory through TMA. One to three consumer warpgroups of 64 queries each compute. A consumer
issues the scores of the next key block before the values of this one, so the tensor cores work while it computes
exponentials. `docs/hopper.md` explains it; `hopper/configs.py` decides which problems come here.

A tile is BLOCK_M = 64 * CONSUMERS queries of one head. It visits its keys in blocks of BLOCK_N: first the blocks at the
right end, then those at the left end, then the rest from right to left (`BlockOrder` in `hopper/tiles.py`). So blocks
that a mask cuts come first. K and V share one ring of STAGES buffers (`gluon/ring.py`). If their tiles differ in shape,
even stages have buffers for K and odd ones for V. Tiles are powers of two wide, with zeros beyond the head dim. A tile
of 129 to 192 columns consists of three TMA boxes of 64.

Keys may be in a cache, contiguous or in pages (`hopper/prefill.py`). With a block mask a tile visits the listed blocks
only, partial ones first (`gluon/block_mask.py`). In batch-invariant mode it visits chunks of blocks from right to left,
and each chunk has sums of its own (`chunks.py`). `float8.py` has what differs for float8 and int8.

Read `_fwd_sm90_kernel` first, then `run_producer` and `run_consumer`.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from diyfa.backends.cuda.attention.tile_io import PACKED
from diyfa.backends.cuda.gluon.barriers import WARPS, idle_warps, wait_for_previous_kernels
from diyfa.backends.cuda.gluon.block_mask import BlockMask
from diyfa.backends.cuda.gluon.channel import allocate_channel
from diyfa.backends.cuda.gluon.compat import reinterpret
from diyfa.backends.cuda.gluon.ring import KVRing
from diyfa.backends.cuda.gluon.scheduler import TileScheduler
from diyfa.backends.cuda.gluon.tile_info import allocate_tile_infos
from diyfa.backends.cuda.hopper.chunks import Totals
from diyfa.backends.cuda.hopper.epilogue import clear_others
from diyfa.backends.cuda.hopper.float8 import Factors
from diyfa.backends.cuda.hopper.fwd_common import Inputs, Outputs, Shared, for_fallback
from diyfa.backends.cuda.hopper.fwd_consumer import run_consumer
from diyfa.backends.cuda.hopper.fwd_producer import run_producer
from diyfa.backends.cuda.hopper.mma import ROWS, Queries, allocate_ones, buffer_count
from diyfa.backends.cuda.hopper.overflow import OverflowFlags, allocate_flags
from diyfa.backends.cuda.hopper.score_functions import ScoreFunction
from diyfa.backends.cuda.hopper.softmax import Score
from diyfa.backends.cuda.hopper.tiles import KeyCache, Problem
from diyfa.score_programs import MAX_TENSORS


@gluon.jit
def _attend(problem, shared, inputs, outputs):
    """Run the consumers and the producer until all tiles are done.

    The first consumer runs on the warps that the kernel is launched with. Its threads have the registers that the other
    partitions leave. Registers are allocated by warpgroups of four warps, so idle warps fill up the producer's. A
    single consumer gives no registers away, so there are no idle warps beside it.
    """
    config: gl.constexpr = shared.config
    OTHERS: gl.constexpr = config.CONSUMERS - 1
    PRODUCERS: gl.constexpr = 3 if OTHERS else 1  # partitions of the producer's warpgroup
    R: gl.constexpr = config.CONSUMER_REGISTERS
    P: gl.constexpr = config.PRODUCER_REGISTERS
    gl.warp_specialize(
        [(run_consumer, (i, problem, shared, outputs)) for i in (0, 1, 2)[: OTHERS + 1]]
        + [(run_producer, (problem, shared, inputs)), (idle_warps, ()), (idle_warps, ())][:PRODUCERS],
        [4, 4][:OTHERS] + [1, 1, 2][:PRODUCERS],
        [R, R][:OTHERS] + [P, P, P][:PRODUCERS],
    )  # fmt: skip


# Arguments for whose values Triton must not compile another kernel.
SIZES = (
    "length", "added", "entries", "stride_table", "stride_maskb", "stride_maskh",
    "heads", "heads_q", "heads_in_parallel", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k",
    "window_left", "window_right", "group_size", "stride_slopeb",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn",
)  # fmt: skip
CACHE_ARGUMENTS = (
    "seqused_ptr", "block_table_ptr", "cache_batch_idx_ptr", "length", "added", "entries", "stride_table",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")
SCORE_TENSORS = tuple(f"score_tensor{n}" for n in range(MAX_TENSORS))
FACTORS = ("q_descale_ptr", "k_descale_ptr", "v_descale_ptr", "k_mean_ptr", "v_mean_ptr")
UNALIGNED_POINTERS = (
    *FACTORS,
    *(f"{name}_ptr" for name in SCORE_TENSORS),
    *LENGTH_POINTERS, "slopes_ptr", "sinks_ptr", "seqused_ptr", "block_table_ptr", "cache_batch_idx_ptr",
    "mask_blocks_ptr", "mask_bits_ptr",
)  # fmt: skip


@constexpr_function
def _with_rows(block, rows):
    """Return the shape of a box [..., its rows, columns] with another number of rows."""
    return [*block[:-2], rows, block[-1]]


@gluon.jit
def _key_buffers(tensor, COUNT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Allocate COUNT buffers of BLOCK_N rows for keys or values.

    One TMA box fills a buffer, or several boxes with fewer rows fill it from top to bottom: small pages, or blocks of a
    block mask.
    """
    SHAPE: gl.constexpr = _with_rows(tensor.block_shape, BLOCK_N)
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + SHAPE, tensor.layout)


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _fwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, o_tensor,  # (B, H, S, D) with any strides, or ragged (`gluon/tma.py`)
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences; or both are seq_lens
    lse_ptr,  # (B, H, Sq) fp32, packed (H, Tq)
    o_ptr,  # for STORE_FROM_REGISTERS and packed sequences
    slopes_ptr,  # (H,) or (B, H) fp32, for ALIBI
    sinks_ptr,  # (H,) fp32, for SINKS
    score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr,  # captured by SCORE_FN
    q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr,  # `Factors`
    counter_ptr,  # int32, [next tile, programs that left]: for a dynamic schedule
    totals_ptr,  # [programs, consumers, 64 * columns] fp32, for CHUNK without SHARED_TOTALS
    seqused_ptr, block_table_ptr, cache_batch_idx_ptr, length, added, entries, stride_table,  # `KeyCache`
    mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh,  # `BlockMask`
    heads,  # batch * heads_q
    heads_q, heads_in_parallel, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    group_size,  # query heads per KV head
    stride_slopeb,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,  # `descriptor_steps` of samples and rows
    scale, softcap,
    config: gl.constexpr,  # `Sm90Constants`
):  # fmt: skip
    """Compute out and lse of all tiles.

    1. Allocate shared memory, initialise barriers, wait for previous kernels on the stream.
    2. Run the producer and the consumers until all tiles of the program are done (`_attend`).
    3. FIXED_MAX: if consumers flagged tiles whose sums overflowed, run both for these with a running maximum.
    4. Packed: clear the rows that belong to no sequence.
    """
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Products read Q and K one box at a time, but several adjacent boxes of V as one matrix (`run_matrix`). Out has the
    # boxes of V. If it leaves through Q's buffers, these lie as V's do.
    Q_BUFFERS: gl.constexpr = buffer_count(
        config.CONSUMERS, config.BOXES, not config.SEPARATE_O_BUFFER and not config.STORE_FROM_REGISTERS
    )
    q_buffers = gl.allocate_shared_memory(DTYPE, [Q_BUFFERS] + q_tensor.block_shape, q_tensor.layout)
    K_STAGES: gl.constexpr = config.STAGES if config.ONE_RING else config.STAGES // 2
    K_BUFFERS: gl.constexpr = buffer_count(K_STAGES, config.BOXES, config.ONE_RING)
    k_buffers = _key_buffers(k_tensor, K_BUFFERS, config.BLOCK_N)
    if config.ONE_RING:
        v_buffers = k_buffers
    else:
        V_BUFFERS: gl.constexpr = buffer_count(K_STAGES, config.BOXES_V, True)
        # V of 8 bits is transposed: a buffer has a row for each column of V.
        V_ROWS: gl.constexpr = config.BLOCK_N if config.BITS_V == 16 else v_tensor.block_shape[2]
        v_buffers = _key_buffers(v_tensor, V_BUFFERS, V_ROWS)
    if config.SEPARATE_O_BUFFER:
        O_TILES: gl.constexpr = config.CONSUMERS * (2 if config.OUT_IN_TOTALS else 1)
        O_BUFFERS: gl.constexpr = buffer_count(O_TILES, config.BOXES_V, True)
        o_buffers = gl.allocate_shared_memory(o_tensor.dtype, [O_BUFFERS] + o_tensor.block_shape, o_tensor.layout)
    else:
        o_buffers = q_buffers
    q_full = gl.allocate_shared_memory(gl.int64, [config.CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [config.CONSUMERS, 1], BARRIER)
    queries = Queries(q_buffers, q_full, q_empty, config.CONSUMERS, config.BOXES)
    queries.init()
    READERS: gl.constexpr = WARPS * config.CONSUMERS
    ring = KVRing(k_buffers, v_buffers, allocate_channel(config.STAGES, 1, READERS), config.ONE_RING)
    tile_infos = allocate_tile_infos(config.TILE_INFOS)
    if config.FIXED_MAX:
        flags = allocate_flags(config.CONSUMERS, config.TILE_INFOS)
    else:
        flags = OverflowFlags(None, config.CONSUMERS, config.TILE_INFOS)
    ones = q_buffers
    if config.FIXED_MAX:
        ones = allocate_ones(v_tensor.dtype, config.BLOCK_N)
    TOTAL: gl.constexpr = ROWS * o_tensor.block_shape[-1] * config.BOXES_V
    if config.SHARED_TOTALS:
        TOTALS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        if config.OUT_IN_TOTALS:
            totals_buffers = reinterpret(o_buffers, gl.float32, [config.CONSUMERS, TOTAL], TOTALS_LAYOUT)
        else:
            totals_buffers = gl.allocate_shared_memory(gl.float32, [config.CONSUMERS, TOTAL], TOTALS_LAYOUT)
        totals = Totals(totals_buffers, None, config.CONSUMERS, TOTAL)
    else:
        totals = Totals(None, totals_ptr, config.CONSUMERS, TOTAL)
    fence_async_shared()
    wait_for_previous_kernels()

    problem = Problem(
        window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q, total_k, heads, heads_in_parallel, batch,
        lengths_q_ptr, lengths_k_ptr,
        KeyCache(
            seqused_ptr, block_table_ptr, cache_batch_idx_ptr, length, added, entries, stride_table, config.PAGE_SIZE
        ),
        BlockMask(mask_blocks_ptr, mask_bits_ptr, stride_maskb, stride_maskh, config.MASK_Q, config.MASK_K),
        config.LENGTHS, config.LENGTHS_K, config.CAUSAL, config.HAS_LEFT, config.HAS_RIGHT, config.CHECK_KEYS,
    )  # fmt: skip
    shared = Shared(config, queries, ring, tile_infos, flags, ones, totals)
    inputs = Inputs(
        q_tensor, k_tensor, v_tensor, group_size, steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,
        TileScheduler(counter_ptr, config.SCHEDULE),
    )  # fmt: skip
    score = Score(scale, softcap, config.SOFTCAP, config.ALIBI, config.NEGATE)
    function = None
    if config.SCORE_FN is not None:
        function = ScoreFunction(
            score_tensor0_ptr, score_tensor1_ptr, score_tensor2_ptr, score_tensor3_ptr, None, None, config
        )
    factors = Factors(q_descale_ptr, k_descale_ptr, v_descale_ptr, k_mean_ptr, v_mean_ptr, group_size)
    outputs = Outputs(
        o_tensor, lse_ptr, o_ptr, slopes_ptr, stride_slopeb, sinks_ptr, factors, o_buffers, score, function,
        config.SINKS,
    )  # fmt: skip
    _attend(problem, shared, inputs, outputs)
    if config.FIXED_MAX:  # noqa: SIM102 (decided when it is compiled)
        if flags.any_flagged() != 0:
            queries.invalidate()
            ring.channel.invalidate()
            queries.init()
            ring.channel.init(1, READERS)
            fence_async_shared()
            fallback_shared = Shared(for_fallback(config), queries, ring, tile_infos, flags, ones, totals)
            _attend(problem, fallback_shared, inputs, outputs)
    if config.LENGTHS == PACKED:
        clear_others(lengths_q_ptr, batch, total_q, heads_q, o_ptr, o_tensor, lse_ptr)
