"""Attention forward for Hopper (sm_90): a producer warp and consumer warpgroups, in Gluon.

The schedule is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, algorithm 2 with its section 3.2): one warp
does nothing but copy tiles to shared memory through TMA, two or three warpgroups of 64 queries each do the rest, and a
consumer issues the scores of the next key block before the values of this one, so the tensor cores work while it
computes exponentials. `docs/hopper.md` walks through it; which problems come here is decided in `sm90.py`.

Names of sizes: a tile is BLOCK_M = 64 * CONSUMERS queries of one head; keys come in blocks of BLOCK_N, from the last
one that the tile sees to the first, so that what a mask cuts comes first. K and V share one ring of SLOTS buffers:
K of the n-th block is item 2n, its V item 2n + 1.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention_launch import softmax_scale
from diyfa.backends.cuda.launch import Launch, Launches, on_device
from diyfa.backends.cuda.sm90 import CONSUMER_ROWS, Sm90Config, config_of, grid_of, heads_together
from diyfa.backends.cuda.tensor_maps import Box
from diyfa.problem import LAYOUTS, AttentionProblem, AttentionTensors, bhsd_strides

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(CONSUMER_ROWS)  # queries of one consumer: the M of one warpgroup instruction


@gluon.jit
def _tile(
    index, heads, heads_q, heads_at_once, seqlen_q, seqlen_k,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile number -> (sample, head, first query, key blocks it visits, at least one).

    `heads_at_once` heads take turns, so that their keys stay in L2 while the longest tiles of all of them start first.
    """
    tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
    first = index // (heads_at_once * tiles_m) * heads_at_once
    width = gl.minimum(heads_at_once, heads - first)
    rest = index % (heads_at_once * tiles_m)
    head = first + rest % width
    tile_m = rest // width
    end = seqlen_k
    if CAUSAL:
        tile_m = tiles_m - 1 - tile_m
        end = gl.minimum(seqlen_k, (tile_m + 1) * BLOCK_M + seqlen_k - seqlen_q)
    return head // heads_q, head % heads_q, tile_m * BLOCK_M, gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def _load(tensor, coordinates, buffer, full):
    """Start copying a tile; `full` completes when all its bytes have arrived."""
    SIZE: gl.constexpr = tensor.block_type.nbytes
    mbarrier.expect(full, SIZE)
    tma.async_copy_global_to_shared(tensor, coordinates, full, buffer)


@gluon.jit
def _producer(
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    q_buffers, kv_buffers, q_full, q_empty, kv_full, kv_empty,
    q_tensor, k_tensor, v_tensor, heads, heads_q, group, heads_at_once, seqlen_q, seqlen_k,
):  # fmt: skip
    """One warp: bring Q of each tile, then its K and V blocks, as soon as a buffer is free."""
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    tiles = gl.cdiv(seqlen_q, BLOCK_M) * heads
    item = 0
    turn = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, row0, n_blocks = _tile(
            index, heads, heads_q, heads_at_once, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL
        )  # fmt: skip
        hk = h // group
        for c in gl.static_range(CONSUMERS):
            # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            _load(q_tensor, [b, h, row0 + c * ROWS, 0], q_buffers.index(c), q_full.index(c))
        for i in range(n_blocks):
            start_n = (n_blocks - 1 - i) * BLOCK_N
            slot = item % SLOTS
            mbarrier.wait(kv_empty.index(slot), ((item // SLOTS) & 1) ^ 1)
            _load(k_tensor, [b, hk, start_n, 0], kv_buffers.index(slot), kv_full.index(slot))
            slot = (item + 1) % SLOTS
            mbarrier.wait(kv_empty.index(slot), (((item + 1) // SLOTS) & 1) ^ 1)
            _load(v_tensor, [b, hk, start_n, 0], kv_buffers.index(slot), kv_full.index(slot))
            item += 2
        turn += 1


@gluon.jit
def _named_barrier(action: gl.constexpr, number: gl.constexpr):
    """`bar.sync` or `bar.arrive` on a barrier of two warpgroups; Triton itself does not use numbers from 8 on."""
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; bar." + action + " " + number + ", 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr):
    """Block until the other consumer has handed over."""
    if CONSUMER == 0:
        _named_barrier("sync", "8")
    else:
        _named_barrier("sync", "9")


@gluon.jit
def _hand_over(CONSUMER: gl.constexpr):
    """The other consumer may issue its products; does not block."""
    if CONSUMER == 0:
        _named_barrier("arrive", "9")
    else:
        _named_barrier("arrive", "8")


@gluon.jit
def _softmax(s, m_i, l_i, start_n, last_key, scale_log2, MASKED: gl.constexpr, NEGATE: gl.constexpr):
    """Products s [64, BLOCK_N] -> (weights p, running maximum, running sum, factor of what was summed before).

    The maximum is in units of log2. MASKED: row i sees the keys up to last_key[i], maybe none.
    """
    if NEGATE:
        s = -s
    if MASKED:
        columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(columns[None, :] <= (last_key - start_n)[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale_log2)
    if MASKED:  # nothing seen so far: measure from 0 to avoid inf - inf
        m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_ref = m_new
    p = gl.exp2(s * scale_log2 - m_ref[:, None])
    alpha = gl.exp2(m_i - m_ref)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _attend_blocks(
    o,  # [64, D] fp32
    p,  # [64, BLOCK_N], weights of the block before, ready as an operand
    m_i, l_i, q, kv_buffers, kv_full, kv_empty, item, start, end, n_blocks, last_key, scale_log2,
    CONSUMER: gl.constexpr, PINGPONG: gl.constexpr,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, D: gl.constexpr, MASKED: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of the walk: scores of each one together with the values of the one before."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    for i in range(start, end):
        item += 2
        k_slot = item % SLOTS
        v_slot = (item - 1) % SLOTS
        k = kv_buffers.index(k_slot).reshape([BLOCK_N, D])
        v = kv_buffers.index(v_slot).reshape([BLOCK_N, D])
        mbarrier.wait(kv_full.index(k_slot), (item // SLOTS) & 1)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        if PINGPONG:
            _wait_turn(CONSUMER)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(kv_full.index(v_slot), ((item - 1) // SLOTS) & 1)
        o = warpgroup_mma(p, v, o, is_async=True)
        if PINGPONG:
            _hand_over(CONSUMER)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(kv_empty.index(k_slot), count=1)
        weights, m_i, l_i, alpha = _softmax(
            s, m_i, l_i, (n_blocks - 1 - i) * BLOCK_N, last_key, scale_log2, MASKED, NEGATE
        )  # fmt: skip
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(kv_empty.index(v_slot), count=1)
        p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    return o, p, m_i, l_i, item


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, OWN_O: gl.constexpr, PINGPONG: gl.constexpr,
    CAUSAL: gl.constexpr, CHECK_KEYS: gl.constexpr, NEGATE: gl.constexpr,
    q_buffers, kv_buffers, q_full, q_empty, kv_full, kv_empty,
    o_tensor, lse_ptr, o_buffers, heads, heads_q, heads_at_once, seqlen_q, seqlen_k, scale,
):  # fmt: skip
    """One warpgroup: 64 queries of each tile, from scores to the rows of out and lse."""
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    D: gl.constexpr = o_tensor.block_shape[3]
    DTYPE: gl.constexpr = o_tensor.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    MASKED: gl.constexpr = CAUSAL or CHECK_KEYS

    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    o_buffer = o_buffers.index(CONSUMER)
    scale_log2 = scale * LOG2E
    tiles = gl.cdiv(seqlen_q, BLOCK_M) * heads
    item = 0
    turn = 0
    if PINGPONG and CONSUMER == 1:  # the first turn is consumer 0's: without this both would wait forever
        _hand_over(CONSUMER)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, h, row0, n_blocks = _tile(
            index, heads, heads_q, heads_at_once, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL
        )  # fmt: skip
        row0 += CONSUMER * ROWS
        rows = row0 + gl.arange(0, ROWS, layout=S_ROWS)
        # Row i sees the keys up to last_key[i]; the first n_full blocks are seen by all rows.
        last_key = gl.full([ROWS], 0, gl.int32, S_ROWS) + (seqlen_k - 1)
        n_full = n_blocks
        if CAUSAL:
            last_key = rows + (seqlen_k - seqlen_q)
            n_full = gl.minimum(gl.maximum(row0 + seqlen_k - seqlen_q + 1, 0), seqlen_k) // BLOCK_N
        elif CHECK_KEYS:
            n_full = seqlen_k // BLOCK_N
        n_masked = gl.maximum(n_blocks - n_full, 1)  # of the walk, which begins at the last block

        # The first block has no block before it whose values could be added meanwhile.
        k_slot = item % SLOTS
        k = kv_buffers.index(k_slot).reshape([BLOCK_N, D])
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        mbarrier.wait(kv_full.index(k_slot), (item // SLOTS) & 1)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(kv_empty.index(k_slot), count=1)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
        l_i = gl.full([ROWS], 0.0, gl.float32, S_ROWS)
        weights, m_i, l_i, _ = _softmax(
            s, m_i, l_i, (n_blocks - 1) * BLOCK_N, last_key, scale_log2, MASKED, NEGATE
        )  # fmt: skip
        p = gl.convert_layout(weights.to(DTYPE), P)
        o = gl.zeros([ROWS, D], gl.float32, OUT)
        if MASKED:
            o, p, m_i, l_i, item = _attend_blocks(
                o, p, m_i, l_i, q, kv_buffers, kv_full, kv_empty, item, 1, n_masked, n_blocks, last_key, scale_log2,
                CONSUMER, PINGPONG, BLOCK_N, SLOTS, D, True, NEGATE,
            )  # fmt: skip
        o, p, m_i, l_i, item = _attend_blocks(
            o, p, m_i, l_i, q, kv_buffers, kv_full, kv_empty, item, n_masked, n_blocks, n_blocks, last_key, scale_log2,
            CONSUMER, PINGPONG, BLOCK_N, SLOTS, D, False, NEGATE,
        )  # fmt: skip
        if OWN_O:  # the last scores are there: the next tile's queries may come
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        v_slot = (item + 1) % SLOTS
        mbarrier.wait(kv_full.index(v_slot), ((item + 1) // SLOTS) & 1)
        o = warpgroup_mma(p, kv_buffers.index(v_slot).reshape([BLOCK_N, D]), o, is_async=True)
        # A row that saw no key: out 0, lse +inf.
        seen = l_i != 0.0
        total = gl.where(seen, l_i, 1.0)
        lse = gl.where(seen, (m_i + gl.log2(total)) * LN2, float("inf"))
        factor = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), O_ROWS)
        gl.store(lse_ptr + (b * heads_q + h).to(gl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(kv_empty.index(v_slot), count=1)
        item += 2

        # Out leaves through shared memory and TMA, which drops rows beyond the end; it may go on during the next tile.
        tma.store_wait(0)
        out = gl.where((factor > 0.0)[:, None], o * factor[:, None], 0.0)
        o_buffer.reshape([ROWS, D]).store(out.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_tensor, [b, h, row0, 0], o_buffer)
        if not OWN_O:  # out lies where the next queries will
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("heads", "heads_q", "group", "heads_at_once", "seqlen_q", "seqlen_k"))
def _fwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, o_tensor,  # (B, H, S, D) whatever the strides
    lse_ptr,  # (B, H, Sq) fp32
    heads,  # of all samples together
    heads_q,
    group,  # query heads that share one key head
    heads_at_once, seqlen_q, seqlen_k, scale,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, OWN_O: gl.constexpr, PINGPONG: gl.constexpr,
    CAUSAL: gl.constexpr, CHECK_KEYS: gl.constexpr, NEGATE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    D: gl.constexpr = q_tensor.block_shape[3]
    q_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, D], q_tensor.layout)
    kv_buffers = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, BLOCK_N, D], k_tensor.layout)
    if OWN_O:
        o_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, D], o_tensor.layout)
    else:
        o_buffers = q_buffers
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=CONSUMERS)
    fence_async_shared()

    pipe = (q_buffers, kv_buffers, q_full, q_empty, kv_full, kv_empty)
    consume = (o_tensor, lse_ptr, o_buffers, heads, heads_q, heads_at_once, seqlen_q, seqlen_k, scale)
    produce = (q_tensor, k_tensor, v_tensor, heads, heads_q, group, heads_at_once, seqlen_q, seqlen_k)
    # Constants go in as they are: a variable would make them values of the running kernel. The first partition runs on
    # the warps the kernel is launched with and takes the registers that are left.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, BLOCK_N, 2, SLOTS, OWN_O, PINGPONG, CAUSAL, CHECK_KEYS, NEGATE) + pipe + consume),
                (_consumer, (1, BLOCK_N, 2, SLOTS, OWN_O, PINGPONG, CAUSAL, CHECK_KEYS, NEGATE) + pipe + consume),
                (_producer, (BLOCK_N, 2, SLOTS, CAUSAL) + pipe + produce),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, BLOCK_N, 3, SLOTS, OWN_O, PINGPONG, CAUSAL, CHECK_KEYS, NEGATE) + pipe + consume),
                (_consumer, (1, BLOCK_N, 3, SLOTS, OWN_O, PINGPONG, CAUSAL, CHECK_KEYS, NEGATE) + pipe + consume),
                (_consumer, (2, BLOCK_N, 3, SLOTS, OWN_O, PINGPONG, CAUSAL, CHECK_KEYS, NEGATE) + pipe + consume),
                (_producer, (BLOCK_N, 3, SLOTS, CAUSAL) + pipe + produce),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def smem_layout(rows: int, head_dim: int) -> gl.NVMMASharedLayout:
    """How a tile of fp16 or bf16 lies in shared memory: in the swizzle that TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], gl.float16)


def constants(problem: AttentionProblem, config: Sm90Config, negate: bool) -> dict[str, object]:
    """The kernel's constexprs."""
    return {
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.consumers,
        "SLOTS": config.slots,
        "OWN_O": config.own_o,
        "PINGPONG": config.pingpong,
        "CAUSAL": problem.causal,
        "CHECK_KEYS": not problem.causal and problem.seqlen_k % config.block_n != 0,
        "NEGATE": negate,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
    }


_launches = Launches()


def _box(x: torch.Tensor, problem: AttentionProblem, rows: int) -> Box:
    shape = [x.shape[i] for i in LAYOUTS[problem.layout]]
    block = [1, 1, rows, problem.head_dim]
    return Box(shape, list(bhsd_strides(x, problem.layout)), block, smem_layout(rows, problem.head_dim))


def attention_forward(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Launch the Hopper kernel, which fills out and lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    config = config_of(problem)

    def make() -> Launch:
        scale, negate = softmax_scale(problem, tensors.sm_scale)
        boxes = (
            _box(q, problem, CONSUMER_ROWS),
            _box(k, problem, config.block_n),
            _box(v, problem, config.block_n),
            _box(out, problem, CONSUMER_ROWS),
            None,
        )
        heads = problem.batch * problem.heads_q
        scalars = (
            heads,
            problem.heads_q,
            problem.heads_q // problem.heads_kv,
            heads_together(problem),
            problem.seqlen_q,
            problem.seqlen_k,
            scale,
        )
        values = constants(problem, config, negate)
        grid = grid_of(problem, config, q.device)
        return Launch(_fwd_sm90_kernel, grid, boxes, scalars, values, {"num_warps": 4}, True)

    key = (config, problem, tensors.sm_scale, q.stride(), k.stride(), v.stride(), out.stride(), q.device)
    with on_device(q):
        _launches.get(key, make)(q, k, v, out, lse)
