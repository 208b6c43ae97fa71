"""Attention forward for Hopper (sm_90) in few lines, to be read before fwd.py. No call comes here.

A program computes a tile: 128 queries of one head. Its warps are specialised (FlashAttention-3, arXiv:2407.08608):

* A producer warp copies Q, K and V to shared memory by TMA. It computes nothing, so it needs few registers.
* Two consumer warpgroups have 64 queries each. They multiply on the tensor cores and compute the softmax.

Three overlaps keep the tensor cores busy:

1. Copies run ahead of the products by up to STAGES blocks: the ring (`gluon/ring.py`).
2. A consumer starts Q Kᵀ of the next block and P V of the present one, and computes the next softmax while P V runs.
3. Consumers issue their products in turns: one multiplies while the other computes its softmax ("ping-pong").

docs/hopper.md draws it. Read the kernel first, then `_producer`, `_consumer` and `_online_softmax`.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.gluon.barriers import WARPS, turn
from diyfa.backends.cuda.gluon.channel import allocate_channel
from diyfa.backends.cuda.gluon.compat import aggregate, async_load, async_store, ptxas_options
from diyfa.backends.cuda.gluon.ring import KVRing
from diyfa.backends.cuda.gluon.tma import dense_descriptor
from diyfa.backends.cuda.hopper.mma import accumulator_layout
from diyfa.backends.cuda.hopper.softmax import LN2, LOG2E
from diyfa.backends.cuda.runtime.passes import launch_each, on_device
from diyfa.problem import Launch

CONSUMERS = gl.constexpr(2)  # warpgroups
ROWS = gl.constexpr(64)  # queries of a consumer: the M of a warpgroup's product
BLOCK_N = gl.constexpr(128)  # keys of a block
STAGES = gl.constexpr(4)  # blocks of K or V in shared memory


@aggregate
class Tile:
    """128 queries of one head. Query `row` sees the keys up to `row + diagonal`."""

    b: gl.tensor
    h: gl.tensor
    row0: gl.tensor
    diagonal: gl.tensor
    seqlen_k: gl.tensor
    n_blocks: gl.tensor  # blocks of keys that the tile sees; at least 1


@gluon.jit
def _load(tensor, b, h, row, barrier, buffer):
    """Start a TMA copy of rows, zeros beyond the end. `barrier` completes when all bytes have arrived."""
    mbarrier.expect(barrier, tensor.block_type.nbytes)
    async_load(tensor, [b, h, row, 0], barrier, buffer)


@gluon.jit
def _matrix(buffers, i):
    """[rows, D], the i-th of `buffers`, which TMA knows as [1, 1, rows, D]."""
    return buffers.index(i).reshape([buffers.shape[3], buffers.shape[4]])


@gluon.jit
def _producer(q_tensor, k_tensor, v_tensor, q_buffers, q_full, ring, tile):
    """One warp: copy Q, then K and V of block after block, each as soon as a stage is free."""
    for c in gl.static_range(CONSUMERS):
        _load(q_tensor, tile.b, tile.h, tile.row0 + c * ROWS, q_full.index(c), q_buffers.index(c))
    hk = tile.h // (q_tensor.shape[1] // k_tensor.shape[1])  # GQA: query heads share a KV head
    for i in range(tile.n_blocks):
        row = (tile.n_blocks - 1 - i) * BLOCK_N  # last block first: the masked blocks come before all others
        k, v = 2 * i, 2 * i + 1
        ring.channel.acquire(k)
        _load(k_tensor, tile.b, hk, row, ring.channel.full_barrier(k), ring.k_buffers.index(ring.buffer_index(k)))
        ring.channel.acquire(v)
        _load(v_tensor, tile.b, hk, row, ring.channel.full_barrier(v), ring.v_buffers.index(ring.buffer_index(v)))


@gluon.jit
def _online_softmax(s, m_i, l_i, start_n, last_key, scale, MASKED: gl.constexpr):
    """Scores [64, BLOCK_N] -> (weights P, running maximum, running sum, factor alpha for what was summed before)."""
    if MASKED:
        offs_n = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(offs_n[None, :] <= last_key[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far: avoid inf - inf
    p = gl.exp2(s * scale - m_ref[:, None])
    alpha = gl.exp2(m_i - m_ref)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _consumer(INDEX: gl.constexpr, q_buffers, q_full, ring, tile, o_tensor, lse_ptr, scale):
    """One warpgroup: out and LSE of its 64 queries."""
    DTYPE: gl.constexpr = o_tensor.dtype
    HEAD_DIM: gl.constexpr = o_tensor.block_shape[3]
    S_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = accumulator_layout(HEAD_DIM)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    row0 = tile.row0 + INDEX * ROWS
    offs_m = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    last_key = gl.minimum(offs_m + tile.diagonal, tile.seqlen_k - 1)  # [64]
    # The first row sees fewest keys. Blocks [0, n_whole), which it sees whole, need no mask.
    n_whole = gl.maximum(gl.minimum(row0 + tile.diagonal + 1, tile.seqlen_k), 0) // BLOCK_N
    n_masked = gl.maximum(tile.n_blocks - n_whole, 1)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.zeros([ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)

    # Prologue: the first block's scores. There is no P yet whose product could overlap with its softmax.
    q = _matrix(q_buffers, INDEX)
    mbarrier.wait(q_full.index(INDEX), 0)
    ring.channel.wait(0)
    s = warpgroup_mma(q, _matrix(ring.k_buffers, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    ring.channel.release(0)
    p, m_i, l_i, _ = _online_softmax(s, m_i, l_i, (tile.n_blocks - 1) * BLOCK_N, last_key, scale, True)
    if INDEX == 1:
        turn("arrive", 0)  # consumer 0 has the first turn; otherwise both would wait forever

    # The KV loop, compiled twice: for masked blocks, then for whole ones. i counts blocks in the order of their copies:
    # K of the i-th one is item 2i of the ring, its V item 2i + 1.
    for whole in gl.static_range(2):
        for i in range(n_masked if whole else 1, tile.n_blocks if whole else n_masked):
            # Start S = Q Kᵀ of the i-th block and O += P V of the one before.
            p = gl.convert_layout(p.to(DTYPE), P_LAYOUT)  # free: a thread has the elements that P V reads already
            ring.channel.wait(2 * i)
            turn("sync", INDEX)
            k = _matrix(ring.k_buffers, ring.buffer_index(2 * i))
            s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            ring.channel.wait(2 * i - 1)
            o = warpgroup_mma(p, _matrix(ring.v_buffers, ring.buffer_index(2 * i - 1)), o, is_async=True)
            turn("arrive", 1 - INDEX)
            # Products finish in order: with one still running S is there, and P V runs on during the softmax.
            s = warpgroup_mma_wait(1, deps=[s])
            ring.channel.release(2 * i)
            start_n = (tile.n_blocks - 1 - i) * BLOCK_N
            p, m_i, l_i, alpha = _online_softmax(s, m_i, l_i, start_n, last_key, scale, whole == 0)
            o = warpgroup_mma_wait(0, deps=[o])
            ring.channel.release(2 * i - 1)
            o *= gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]  # from the old maximum to the new one

    # Epilogue: P V of the last block visited, then out and LSE. A row without keys has out 0 and LSE +inf.
    item = 2 * tile.n_blocks - 1
    ring.channel.wait(item)
    p = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
    o = warpgroup_mma(p, _matrix(ring.v_buffers, ring.buffer_index(item)), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    lse = gl.where(l_i == 0.0, float("inf"), (m_i + gl.log2(l_i)) * LN2)
    lse_ptr += (tile.b * o_tensor.shape[1] + tile.h).to(gl.int64) * o_tensor.shape[2]
    gl.store(lse_ptr + offs_m, lse, mask=offs_m < o_tensor.shape[2])
    total = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), gl.SliceLayout(1, O_LAYOUT))
    q.store((o / total[:, None]).to(DTYPE))  # no product reads Q any more, so out may lie there
    fence_async_shared()  # TMA must see what threads have stored
    async_store(o_tensor, [tile.b, tile.h, row0, 0], q_buffers.index(INDEX))  # rows beyond the end are not written
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["diagonal"])
def _fwd_tutorial_kernel(q_tensor, k_tensor, v_tensor, o_tensor, lse_ptr, diagonal, scale):
    """Make buffers and barriers, then split into partitions. The grid is (tiles, heads, batch).

    Tensors are TMA descriptors of (B, H, S, D); LSE is (B, H, Sq) fp32. `scale` makes scores in units of log2.
    """
    seqlen_k = k_tensor.shape[2]
    # The last queries see most keys: their tiles start first, so that no long tile is left at the end.
    row0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * (CONSUMERS * ROWS)
    end = gl.minimum(row0 + CONSUMERS * ROWS + diagonal, seqlen_k)  # one behind the last key that the tile sees
    n_blocks = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
    tile = Tile(gl.program_id(2), gl.program_id(1), row0, diagonal, seqlen_k, n_blocks)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffers = gl.allocate_shared_memory(q_tensor.dtype, [CONSUMERS] + q_tensor.block_shape, q_tensor.layout)
    buffers = gl.allocate_shared_memory(k_tensor.dtype, [STAGES] + k_tensor.block_shape, k_tensor.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    # A stage is filled by one arrival, which TMA completes, and released by each warp of the consumers.
    ring = KVRing(buffers, buffers, allocate_channel(STAGES, 1, CONSUMERS * WARPS), True)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    fence_async_shared()  # TMA must see the barriers

    # The first partition runs on the warps of the launch; the lists say warps, and registers per thread, of the others.
    gl.warp_specialize(
        [
            (_consumer, (0, q_buffers, q_full, ring, tile, o_tensor, lse_ptr, scale)),
            (_consumer, (1, q_buffers, q_full, ring, tile, o_tensor, lse_ptr, scale)),
            (_producer, (q_tensor, k_tensor, v_tensor, q_buffers, q_full, ring, tile)),
        ],
        [4, 1],
        [240, 24],
    )


def make_launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float
) -> Launch:
    """Return the launch that fills out and lse."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k, rows, keys = k.shape[2], ROWS.value, BLOCK_N.value
    arguments = {
        "q_tensor": dense_descriptor(q, "bhsd", rows, head_dim),
        "k_tensor": dense_descriptor(k, "bhsd", keys, head_dim),
        "v_tensor": dense_descriptor(v, "bhsd", keys, head_dim),
        "o_tensor": dense_descriptor(out, "bhsd", rows, head_dim),
        "lse_ptr": lse,
        "diagonal": seqlen_k - seqlen_q if causal else seqlen_k,  # the last query sees the last key, or all do
        "scale": scale * LOG2E.value,
    }
    grid = (triton.cdiv(seqlen_q, CONSUMERS.value * rows), heads, batch)
    return Launch(_fwd_tutorial_kernel, grid, arguments, {}, {"num_warps": 4, **ptxas_options()})


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and LSE of q (B, H, Sq, D) and k, v (B, Hk, Sk, D), of 16 bits, D = 64 or 128, sm_scale > 0."""
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    if q.shape[-1] not in (64, 128) or scale <= 0:
        raise ValueError(f"head_dim must be 64 or 128 and sm_scale positive, got {q.shape[-1]} and {scale}")
    q, k, v = (x.contiguous() for x in (q, k, v))  # TMA wants rows that are contiguous and aligned
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with on_device(q):
        launch_each([make_launch(q, k, v, out, lse, causal, scale)])
    return out, lse
