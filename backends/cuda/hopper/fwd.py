"""Attention forward for Hopper (sm_90): a producer warp and consumer warpgroups, in Gluon.

The schedule is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, algorithm 2 with its section 3.2): one warp
does nothing but copy tiles to shared memory through TMA, one to three warpgroups of 64 queries each do the rest, and a
consumer issues the scores of the next key block before the values of this one, so the tensor cores work while it
computes exponentials. `docs/hopper.md` walks through it; which problems come here is decided in `hopper/configs.py`.

Names of sizes: a tile is BLOCK_M = 64 * CONSUMERS queries of one head; keys come in blocks of BLOCK_N, from the last
one that the tile sees to the first, so that what a mask cuts comes first. K and V share one ring of SLOTS buffers:
K of the n-th block is item 2n, its V item 2n + 1. Where their tiles differ in shape, the ring's even slots are buffers
for K and its odd ones for V. Tiles are powers of two wide, with zeros beyond the head dim; one of 129 to 192 columns
comes in three pieces of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.attention.launch import softmax_scale
from diyfa.backends.cuda.attention.tile_io import EQUAL, PACKED, SEQ_LENS, lengths_of
from diyfa.backends.cuda.gluon.barriers import (
    await_kernels_before,
    await_stores,
    idle,
    release,
    releases_of,
    wait_full,
)
from diyfa.backends.cuda.gluon.inline_ptx import completing
from diyfa.backends.cuda.gluon.scheduler import (
    draw_ticket,
    end_place,
    first_place,
    leave,
    next_place,
    tile_number,
)
from diyfa.backends.cuda.gluon.tile_counter import ticket_counter
from diyfa.backends.cuda.gluon.tile_info import allocate_notices, is_last_turn, kept_notice, read_notice, write_notice
from diyfa.backends.cuda.gluon.tma import dense_box, ragged_box, steps_of
from diyfa.backends.cuda.hopper.configs import (
    CONSUMER_ROWS,
    Sm90Config,
    config_of,
    finds_ahead,
    grid_of,
    has_fixed_max,
    has_one_ring,
    heads_together,
    notices_of,
    pieces_of,
    schedule_of,
)
from diyfa.backends.cuda.hopper.epilogue import matrix, offset_of, store_rows
from diyfa.backends.cuda.hopper.mma import (
    ROWS,
    accumulator_layout,
    buffer_of,
    finish_values,
    held,
    held_queries,
    no_values,
    rescaled,
    run_count,
    run_length,
    run_start,
    start_scores,
    start_values,
    tile_at,
)
from diyfa.backends.cuda.hopper.overflow import (
    allocate_flags,
    end_flags,
    flag_tile,
    is_flagged,
    next_flagged,
    overflown_rows,
)
from diyfa.backends.cuda.hopper.softmax import LN2, LOG2E, add_sink, fixed_max_step, no_sums, softmax_step
from diyfa.backends.cuda.hopper.tiles import (
    block_at,
    edges_of,
    end_of,
    group_count,
    here,
    start_load,
    start_store,
    tile_count,
    tile_of,
)
from diyfa.backends.cuda.runtime.launch import Launch, Launches, on_device
from diyfa.backends.cuda.runtime.repeat import Pair, repeat_forward
from diyfa.problem import AttentionProblem, AttentionTensors


@gluon.jit
def _give_notice(
    place, turn, notices, written, lengths_q_ptr, lengths_k_ptr,
    heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right, tickets_ptr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LENGTHS: gl.constexpr, DEAL: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Find the first tile from `place` on and leave the notice of it, or of there being none -> its place."""
    if AHEAD:  # more is alive there
        heads_q = here(heads_q)
        heads_at_once = here(heads_at_once)
        seqlen_q = here(seqlen_q)
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    tiles = tile_count(heads, heads_q, batch, seqlen_q, total_q, BLOCK_M, LENGTHS)
    group = group_count(tiles, heads_at_once, seqlen_q, BLOCK_M, LENGTHS)
    end = end_place(tiles, group, DEAL)
    searching = True
    while searching:
        index, dealt = tile_number(gl.minimum(place, end - 1), tiles, group, DEAL)
        exists, b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = tile_of(
            index, lengths_q_ptr, lengths_k_ptr,
            heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
            BLOCK_M, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, LENGTHS,
        )  # fmt: skip
        more = (place < end) & (is_last_turn(turn - 1, notices, DEAL) == 0)
        searching = more & ((exists & dealt) == 0)
        if searching:
            place = next_place(place, draw_ticket(tickets_ptr, DEAL), DEAL)
        else:
            end_block = gl.where(more, end_block, 0)
            write_notice(
                turn, b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys, notices, written
            )  # fmt: skip
    return place


@gluon.jit
def _load_block(
    tensor, b, h, row, end, n_keys, buffers, item, kv_full, kv_empty,
    SLOTS: gl.constexpr, PIECES: gl.constexpr, ONE_RING: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Start copying an item of the ring, as soon as its buffer is free."""
    slot = item % SLOTS
    mbarrier.wait(kv_empty.index(slot), ((item // SLOTS) & 1) ^ 1)
    start_load(
        tensor, b, h, row, end, n_keys, buffers, buffer_of(slot, ONE_RING), kv_full.index(slot),
        PIECES, RAGGED,
    )  # fmt: skip


@gluon.jit
def _producer(
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, ONE_RING: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
    LENGTHS: gl.constexpr, DEAL: gl.constexpr, AHEAD: gl.constexpr, AGAIN: gl.constexpr,
    q_buffers, k_buffers, v_buffers, q_full, q_empty, kv_full, kv_empty, notices, written, flags,
    window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q,
    lengths_q_ptr, lengths_k_ptr, heads, heads_at_once, batch, total_k,
    q_tensor, k_tensor, v_tensor, group_size, tickets_ptr, steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,
):  # fmt: skip
    """One warp: find tile after tile, tell the consumers, and copy what they read, as soon as a buffer is free.

    AHEAD: the next tile is found before the last block of keys is copied, not after it. Where that takes long and the
    ring is short, the consumers would stand still meanwhile; elsewhere they would because the block comes later.

    AGAIN: only the tiles that are flagged.
    """
    RAGGED: gl.constexpr = LENGTHS != EQUAL
    item = 0
    used = 0  # how many queries have been loaded
    turn = 0
    if AGAIN:
        turn, notice = next_flagged(turn, notices, flags, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, CONSUMERS, 1)
    else:
        place = _give_notice(
            first_place(DEAL), turn, notices, written, lengths_q_ptr, lengths_k_ptr,
            heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
            tickets_ptr, BLOCK_N, CONSUMERS, CAUSAL, HAS_LEFT, HAS_RIGHT, LENGTHS, DEAL, AHEAD,
        )  # fmt: skip
        notice = kept_notice(turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, 1)
    b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = notice
    while end_block > 0:
        end_q = end_of(b, first_q, n_queries, steps_qb, steps_qm, LENGTHS)
        end_k = end_of(b, first_k, n_keys, steps_kb, steps_kn, LENGTHS)
        end_v = end_of(b, first_k, n_keys, steps_vb, steps_vn, LENGTHS)
        hk = h // group_size
        for c in gl.static_range(CONSUMERS):
            # A fresh barrier counts as one phase done: the first wait, for parity 1, passes.
            mbarrier.wait(q_empty.index(c), (used & 1) ^ 1)
            start_load(
                q_tensor, b, h, row0 + c * ROWS, end_q, n_queries, q_buffers, c, q_full.index(c), PIECES, RAGGED
            )  # fmt: skip
        n_right, n_left = edges_of(
            row0, first_block, end_block, n_queries, n_keys, window_left, window_right,
            ROWS * CONSUMERS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS,
        )  # fmt: skip
        n_blocks = end_block - first_block
        # The answer comes while a block waits for its buffers. Asking with the first block would commit programs a
        # whole tile ahead: with 8 tiles for each they would not end together.
        asking = n_blocks - 1
        if AHEAD:
            asking = gl.maximum(n_blocks - 2, 0)
        if is_last_turn(turn, notices, DEAL):  # a ticket that is drawn must be used
            asking = n_blocks
        ticket = 0
        for i in range(n_blocks):
            if not AGAIN:
                if i == asking:
                    ticket = draw_ticket(tickets_ptr, DEAL)
                if AHEAD:  # noqa: SIM102 (decided when it is compiled)
                    if i == n_blocks - 1:
                        place = _give_notice(
                            next_place(place, ticket, DEAL), turn + 1, notices, written,
                            lengths_q_ptr, lengths_k_ptr, heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k,
                            total_q, total_k, window_left, window_right, tickets_ptr,
                            BLOCK_N, CONSUMERS, CAUSAL, HAS_LEFT, HAS_RIGHT, LENGTHS, DEAL, AHEAD,
                        )  # fmt: skip
            start_n = block_at(i, first_block, end_block, n_right, n_left) * BLOCK_N
            _load_block(
                k_tensor, b, hk, start_n, end_k, n_keys, k_buffers, item, kv_full, kv_empty,
                SLOTS, PIECES, ONE_RING, RAGGED,
            )  # fmt: skip
            _load_block(
                v_tensor, b, hk, start_n, end_v, n_keys, v_buffers, item + 1, kv_full, kv_empty,
                SLOTS, PIECES_V, ONE_RING, RAGGED,
            )  # fmt: skip
            item += 2
        if AGAIN:
            used += 1
            turn, notice = next_flagged(turn + 1, notices, flags, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, CONSUMERS, 1)
        else:
            turn += 1
            used = turn
            if not AHEAD:
                place = _give_notice(
                    next_place(place, ticket, DEAL), turn, notices, written, lengths_q_ptr, lengths_k_ptr,
                    heads, heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k,
                    window_left, window_right, tickets_ptr,
                    BLOCK_N, CONSUMERS, CAUSAL, HAS_LEFT, HAS_RIGHT, LENGTHS, DEAL, AHEAD,
                )  # fmt: skip
            notice = kept_notice(turn, notices, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, 1)
        b, h, row0, first_block, end_block, first_q, first_k, n_queries, n_keys = notice
    if DEAL == "dynamic" and not AGAIN:
        leave(tickets_ptr)


@gluon.jit
def _named_barrier(action: gl.constexpr, number: gl.constexpr):
    """`bar.sync` or `bar.arrive` on a barrier of two warpgroups; Triton itself does not use numbers from 8 on."""
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; bar." + action + " " + number + ", 256;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr):
    """Block until the consumer before this one has handed over."""
    if CONSUMER == 0:
        _named_barrier("sync", "8")
    elif CONSUMER == 1:
        _named_barrier("sync", "9")
    else:
        _named_barrier("sync", "10")


@gluon.jit
def _hand_over(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """The next consumer, after the last one the first, may issue its products; does not block."""
    if CONSUMER == CONSUMERS - 1:
        _named_barrier("arrive", "8")
    elif CONSUMER == 0:
        _named_barrier("arrive", "9")
    else:
        _named_barrier("arrive", "10")


@gluon.jit
def _attend_blocks(
    o,  # pieces of [64, Dv] fp32
    p,  # weights of the block before, `held`
    m_i, l_i, q, q_buffers, k_buffers, v_buffers, kv_full, kv_empty, item, start, end,
    first_block, end_block, n_right, n_left,
    position, n_keys, window_left, window_right, scale, cap, slope,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr, BY_WARP: gl.constexpr,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, Q_HELD: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr, ONE_RING: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, NEGATE: gl.constexpr, LAZY: gl.constexpr, FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """Blocks `start` to `end` of the walk: scores of each one together with the values of the one before.

    FIXED_MAX: m_i stays, and l_i are the sums of `fixed_max_step`.
    """
    for i in range(start, end):
        item += 2
        k_slot = item % SLOTS
        v_slot = (item - 1) % SLOTS
        wait_full(kv_full.index(k_slot), (item // SLOTS) & 1, BY_WARP)
        if PINGPONG:
            _wait_turn(CONSUMER)
        s = start_scores(q, q_buffers, k_buffers, buffer_of(k_slot, ONE_RING), CONSUMER, BLOCK_N, PIECES, Q_HELD)
        wait_full(kv_full.index(v_slot), ((item - 1) // SLOTS) & 1, BY_WARP)
        o = start_values(p, v_buffers, buffer_of(v_slot, ONE_RING), o, PIECES_V, JOINED, PAIRS)
        if PINGPONG:
            _hand_over(CONSUMER, CONSUMERS)
        s = warpgroup_mma_wait(run_count(PIECES_V, JOINED), deps=[s])  # the values may still run
        release(kv_empty.index(k_slot), BY_WARP)
        start_n = block_at(i, first_block, end_block, n_right, n_left) * BLOCK_N
        if FIXED_MAX:
            weights, l_i = fixed_max_step(
                s, m_i, l_i, start_n, position, scale, cap, slope, SOFTCAP, ALIBI, NEGATE
            )  # fmt: skip
        else:
            weights, m_i, l_i, alpha = softmax_step(
                s, m_i, l_i, start_n, position, n_keys, window_left, window_right, scale, cap, slope,
                MASKED, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY,
            )  # fmt: skip
        o = finish_values(o, PIECES_V, JOINED)
        release(kv_empty.index(v_slot), BY_WARP)
        p = held(weights, o, v_buffers.dtype, PAIRS)
        if not FIXED_MAX:
            o = rescaled(o, alpha, PIECES_V, JOINED, LAZY)
    return o, p, m_i, l_i, item


@gluon.jit
def _pass_over(
    key0, first_block, end_block, n_keys, item, kv_full, kv_empty, window_right,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr, BY_WARP: gl.constexpr,
    BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Release the tile's last blocks, of which the mask on the right leaves this consumer's rows nothing -> next item.

    Row 0 is aligned with key0. At least one block is left. A slot must be full before it is released: until then
    others may still owe their release of what it held before.
    """
    end = key0 + ROWS if CAUSAL else key0 + ROWS + window_right
    own_end = gl.maximum(gl.cdiv(gl.minimum(end, n_keys), BLOCK_N), first_block + 1)
    for _ in range(own_end, end_block):
        if PINGPONG:  # as many turns as the others have
            _wait_turn(CONSUMER)
            _hand_over(CONSUMER, CONSUMERS)
        for j in gl.static_range(2):
            wait_full(kv_full.index((item + j) % SLOTS), ((item + j) // SLOTS) & 1, BY_WARP)
            release(kv_empty.index((item + j) % SLOTS), BY_WARP)
        item += 2
    return item


@gluon.jit
def _attend_tile(
    b, h, tile_row0, first_block, end_block, first_q, n_queries, n_keys, item, turn,
    q_buffers, k_buffers, v_buffers, q_full, q_empty, kv_full, kv_empty,
    heads_q, seqlen_q, total_q, window_left, window_right,
    o_tensor, lse_ptr, o_ptr, slopes_ptr, stride_slopeb, sinks_ptr, o_buffers, scale, cap,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
    OWN_O: gl.constexpr, DIRECT: gl.constexpr,
    PINGPONG: gl.constexpr, BY_WARP: gl.constexpr, OWN_WALK: gl.constexpr, Q_HELD: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr, ONE_RING: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SINKS: gl.constexpr, NEGATE: gl.constexpr,
    LAZY: gl.constexpr, FIXED_MAX: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 queries of a tile: from scores to the rows of out and lse -> (next item, overflown rows)."""
    WIDTH: gl.constexpr = o_tensor.block_shape[-1]
    DTYPE: gl.constexpr = o_tensor.dtype
    S_ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    O_PIECES: gl.constexpr = PIECES_V if OWN_O else PIECES  # buffers from one consumer's to the next one's
    MASKED: gl.constexpr = HAS_RIGHT or CHECK_KEYS  # the end of the keys is checked wherever there is a left edge

    row0 = tile_row0 + CONSUMER * ROWS
    n_right, n_left = edges_of(
        tile_row0, first_block, end_block, n_queries, n_keys, window_left, window_right,
        ROWS * CONSUMERS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS,
    )  # fmt: skip
    key0 = row0 + (n_keys - n_queries)
    if OWN_WALK:
        before = item
        item = _pass_over(
            key0, first_block, end_block, n_keys, item, kv_full, kv_empty, window_right,
            CONSUMER, CONSUMERS, PINGPONG, BY_WARP, BLOCK_N, SLOTS, CAUSAL,
        )  # fmt: skip
        passed = (item - before) // 2
        end_block -= passed
        n_right -= passed
    rows = row0 + gl.arange(0, ROWS, layout=S_ROWS)
    position = rows + (n_keys - n_queries)  # the key that each row is aligned with
    # Of the walk (`block_at`) the first n_masked blocks are cut by a mask or the end of the keys, or end there; what
    # comes behind the first n_first all rows see whole, and each row has seen a key before.
    n_blocks = end_block - first_block
    n_first = n_right + n_left
    n_masked = 1
    if HAS_LEFT:
        n_masked = n_first
    elif HAS_RIGHT:
        after = key0 + 1 if CAUSAL else key0 + 1 + window_right
        n_masked = end_block - (gl.maximum(gl.minimum(after, n_keys), 1) - 1) // BLOCK_N
        n_masked = gl.maximum(gl.minimum(n_masked, n_right), 1)

    slope = 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + b * stride_slopeb + h) * LOG2E
    # The first block has no block before it whose values could be added meanwhile.
    k_slot = item % SLOTS
    mbarrier.wait(q_full.index(CONSUMER), turn & 1)
    q = held_queries(q_buffers, CONSUMER, BLOCK_N, PIECES, Q_HELD)
    if (OWN_O or DIRECT) and Q_HELD == PIECES:  # all of them are in registers: the next tile's queries may come
        mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    wait_full(kv_full.index(k_slot), (item // SLOTS) & 1, BY_WARP)
    s = start_scores(q, q_buffers, k_buffers, buffer_of(k_slot, ONE_RING), CONSUMER, BLOCK_N, PIECES, Q_HELD)
    s = warpgroup_mma_wait(0, deps=[s])
    release(kv_empty.index(k_slot), BY_WARP)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    l_i = gl.full([ROWS], 0.0, gl.float32, S_ROWS)
    weights, m_i, l_i, _ = softmax_step(
        s, m_i, l_i, (end_block - 1) * BLOCK_N, position, n_keys, window_left, window_right, scale, cap, slope,
        MASKED, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY,
    )  # fmt: skip
    o = no_values(WIDTH, PIECES_V, JOINED)
    p = held(weights, o, DTYPE, PAIRS)
    if HAS_LEFT or HAS_RIGHT:
        o, p, m_i, l_i, item = _attend_blocks(
            o, p, m_i, l_i, q, q_buffers, k_buffers, v_buffers, kv_full, kv_empty, item, 1, n_masked,
            first_block, end_block, n_right, n_left, position, n_keys, window_left, window_right, scale, cap, slope,
            CONSUMER, CONSUMERS, PINGPONG, BY_WARP, BLOCK_N, SLOTS, Q_HELD, PIECES, PIECES_V, JOINED, PAIRS, ONE_RING,
            True, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY, False,
        )  # fmt: skip
    if FIXED_MAX:
        if not HAS_LEFT:
            o, p, m_i, l_i, item = _attend_blocks(
                o, p, m_i, l_i, q, q_buffers, k_buffers, v_buffers, kv_full, kv_empty, item, n_masked, n_first,
                first_block, end_block, n_right, n_left, position, n_keys, window_left, window_right, scale, cap, slope,
                CONSUMER, CONSUMERS, PINGPONG, BY_WARP, BLOCK_N, SLOTS, Q_HELD,
                PIECES, PIECES_V, JOINED, PAIRS, ONE_RING,
                False, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY, False,
            )  # fmt: skip
        # Nothing but -inf so far, of a row that sees the next blocks: a product that overflowed, or infinite inputs.
        lost = (m_i == float("-inf")) & (n_first < n_blocks)
        m_i = gl.where(m_i == float("-inf"), 0.0, m_i)
        sums = no_sums(ROWS, BLOCK_N, accumulator_layout(BLOCK_N))
        o, p, m_i, sums, item = _attend_blocks(
            o, p, m_i, sums, q, q_buffers, k_buffers, v_buffers, kv_full, kv_empty, item, n_first, n_blocks,
            first_block, end_block, n_right, n_left, position, n_keys, window_left, window_right, scale, cap, slope,
            CONSUMER, CONSUMERS, PINGPONG, BY_WARP, BLOCK_N, SLOTS, Q_HELD, PIECES, PIECES_V, JOINED, PAIRS, ONE_RING,
            False, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY, True,
        )  # fmt: skip
        l_i += gl.convert_layout(gl.sum(sums, 1), S_ROWS)
    else:
        o, p, m_i, l_i, item = _attend_blocks(
            o, p, m_i, l_i, q, q_buffers, k_buffers, v_buffers, kv_full, kv_empty, item, n_masked, n_blocks,
            first_block, end_block, n_right, n_left, position, n_keys, window_left, window_right, scale, cap, slope,
            CONSUMER, CONSUMERS, PINGPONG, BY_WARP, BLOCK_N, SLOTS, Q_HELD, PIECES, PIECES_V, JOINED, PAIRS, ONE_RING,
            False, CAUSAL, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, NEGATE, LAZY, False,
        )  # fmt: skip
    if (OWN_O or DIRECT) and Q_HELD < PIECES:  # the last scores are there: the next tile's queries may come
        mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    v_slot = (item + 1) % SLOTS
    wait_full(kv_full.index(v_slot), ((item + 1) // SLOTS) & 1, BY_WARP)
    o = start_values(p, v_buffers, buffer_of(v_slot, ONE_RING), o, PIECES_V, JOINED, PAIRS)
    # A row that saw no key, or lies beyond its sample's end: out 0, lse +inf.
    seen = l_i != 0.0
    total = gl.where(seen, l_i, 1.0)
    factor = gl.where(seen, 1.0 / total, 0.0)
    lse_log2 = gl.where(seen, m_i + gl.log2(total), float("-inf"))
    if SINKS:
        lse_log2, share = add_sink(lse_log2, gl.load(sinks_ptr + h) * LOG2E)
    lse = gl.where(lse_log2 == float("-inf"), float("inf"), lse_log2 * LN2)
    if LENGTHS == SEQ_LENS:
        factor = gl.where(rows < n_queries, factor, 0.0)
        lse = gl.where(rows < n_queries, lse, float("inf"))
    if LENGTHS == PACKED:
        gl.store(lse_ptr + h.to(gl.int64) * total_q + first_q + rows, lse, mask=rows < n_queries)
    else:
        gl.store(lse_ptr + (b * heads_q + h).to(gl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)
    o = finish_values(o, PIECES_V, JOINED)
    release(kv_empty.index(v_slot), BY_WARP)
    overflown = 0
    if FIXED_MAX:
        overflown = (lost | overflown_rows(l_i, o, PIECES_V, JOINED)).to(gl.int32)

    # Out leaves through shared memory and TMA, which drops rows beyond the end, and may go on during the next tile; or
    # from the registers.
    if DIRECT:
        rows_of_o = matrix(o_ptr, o_tensor, 0)
        offset = offset_of(rows_of_o, b, h, first_q, PACKED if LENGTHS == PACKED else EQUAL)
        end = n_queries if LENGTHS == PACKED else seqlen_q
    else:
        tma.store_wait(0)
    for run in gl.static_range(run_count(PIECES_V, JOINED)):
        by_row = gl.convert_layout(factor, gl.SliceLayout(1, o[run].type.layout))[:, None]
        out = gl.where(by_row == 0.0, 0.0, o[run] * by_row)  # a NaN among the scores is not 0
        if SINKS:  # by itself: float32 may hold both factors and not their product
            out *= gl.convert_layout(share, gl.SliceLayout(1, o[run].type.layout))[:, None]
        out = out.to(DTYPE)
        if DIRECT:
            store_rows(out, rows_of_o, offset, row0, end, run_start(run, PIECES_V, JOINED) * WIDTH)
        else:
            first = CONSUMER * O_PIECES + run_start(run, PIECES_V, JOINED)
            tile_at(o_buffers, first, run_length(run, PIECES_V, JOINED)).store(out)
    if not DIRECT:
        fence_async_shared()
        for j in gl.static_range(PIECES_V):
            o_buffer = o_buffers.index(CONSUMER * O_PIECES + j).reshape(o_tensor.block_shape)
            start_store(
                o_tensor, b, h, row0, j * WIDTH, first_q + n_queries, n_queries, o_buffer, LENGTHS == PACKED
            )  # fmt: skip
        if not OWN_O:  # out lies where the next queries will
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    return item + 2, overflown


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, OWN_O: gl.constexpr,
    DIRECT: gl.constexpr, PINGPONG: gl.constexpr, BY_WARP: gl.constexpr,
    OWN_WALK: gl.constexpr, Q_HELD: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr, ONE_RING: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SINKS: gl.constexpr, NEGATE: gl.constexpr,
    LAZY: gl.constexpr, FIXED_MAX: gl.constexpr,
    AGAIN: gl.constexpr,
    q_buffers, k_buffers, v_buffers, q_full, q_empty, kv_full, kv_empty, notices, written, flags,
    window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q,
    o_tensor, lse_ptr, o_ptr, slopes_ptr, stride_slopeb, sinks_ptr, o_buffers,
    scale, softcap,
):  # fmt: skip
    """One warpgroup: its 64 queries of each tile. AGAIN: of those that are flagged, with a running maximum."""
    NOTICES: gl.constexpr = notices.shape[0]
    # Scores in units of log2, which exponentials are base of; a softcap has brought in the inputs' scale itself.
    cap = softcap * LOG2E
    if not SOFTCAP:
        scale = scale * LOG2E
    item = 0
    used = 0  # how many queries have been loaded
    turn = 0
    if AGAIN:
        turn, notice = next_flagged(turn, notices, flags, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, CONSUMERS, 4)
    else:
        # The first turn is consumer 0's: without this all would wait forever. Once more it is left from the last block.
        if PINGPONG and CONSUMER == CONSUMERS - 1:
            _hand_over(CONSUMER, CONSUMERS)
        notice = read_notice(turn, notices, written, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, BY_WARP)
    b, h, row0, first_block, end_block, first_q, _, n_queries, n_keys = notice
    if FIXED_MAX and not AGAIN:
        all_overflown = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, accumulator_layout(BLOCK_N)))
    while end_block > 0:
        item, overflown = _attend_tile(
            b, h, row0, first_block, end_block, first_q, n_queries, n_keys, item, used,
            q_buffers, k_buffers, v_buffers, q_full, q_empty, kv_full, kv_empty,
            heads_q, seqlen_q, total_q, window_left, window_right,
            o_tensor, lse_ptr, o_ptr, slopes_ptr, stride_slopeb, sinks_ptr, o_buffers,
            scale, cap,
            CONSUMER, BLOCK_N, CONSUMERS, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
            PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS,
            LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY and not AGAIN, FIXED_MAX and not AGAIN,
        )  # fmt: skip
        if AGAIN:
            used += 1
            turn, notice = next_flagged(turn + 1, notices, flags, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, CONSUMERS, 4)
        else:
            if FIXED_MAX:
                flag_tile(flags, turn, overflown, CONSUMER, NOTICES)
                all_overflown = all_overflown | overflown
            turn += 1
            used = turn
            notice = read_notice(turn, notices, written, seqlen_q, seqlen_k, LENGTHS, HAS_LEFT, BY_WARP)
        b, h, row0, first_block, end_block, first_q, _, n_queries, n_keys = notice
    if FIXED_MAX and not AGAIN:
        end_flags(flags, turn, all_overflown, CONSUMER, NOTICES)
        await_stores()  # before the rows are written again
    else:
        tma.store_wait(0)


@gluon.jit
def _specialise(
    consume,  # what all consumers take
    produce,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, OWN_O: gl.constexpr,
    DIRECT: gl.constexpr, PINGPONG: gl.constexpr, BY_WARP: gl.constexpr,
    OWN_WALK: gl.constexpr, Q_HELD: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr, ONE_RING: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SINKS: gl.constexpr, NEGATE: gl.constexpr,
    LAZY: gl.constexpr, FIXED_MAX: gl.constexpr,
    DEAL: gl.constexpr, AHEAD: gl.constexpr, AGAIN: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run the consumers and the producer until all tiles are done; AGAIN: those that are flagged.

    Constants go in as they are: a variable would make them values of the running kernel. The first partition runs on
    the warps the kernel is launched with and takes the registers that are left. Idle warps fill up the producer's
    warpgroup, which has registers for four warps anyway.
    """
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, BLOCK_N, 1, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_producer, (BLOCK_N, 1, SLOTS, PIECES, PIECES_V, ONE_RING,
                             CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS, LENGTHS, DEAL, AHEAD, AGAIN) + produce),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, BLOCK_N, 2, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_consumer, (1, BLOCK_N, 2, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_producer, (BLOCK_N, 2, SLOTS, PIECES, PIECES_V, ONE_RING,
                             CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS, LENGTHS, DEAL, AHEAD, AGAIN) + produce),
                (idle, ()),
                (idle, ()),
            ],
            [4, 1, 1, 2],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, BLOCK_N, 3, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_consumer, (1, BLOCK_N, 3, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_consumer, (2, BLOCK_N, 3, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                             PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT,
                             CHECK_KEYS, LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, AGAIN) + consume),
                (_producer, (BLOCK_N, 3, SLOTS, PIECES, PIECES_V, ONE_RING,
                             CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS, LENGTHS, DEAL, AHEAD, AGAIN) + produce),
                (idle, ()),
                (idle, ()),
            ],
            [4, 4, 1, 1, 2],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _begin_phases(
    q_full, q_empty, kv_full, kv_empty, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, BY_WARP: gl.constexpr
):  # fmt: skip
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_empty.index(slot), count=releases_of(CONSUMERS, BY_WARP))


@gluon.jit
def _end_phases(q_full, q_empty, kv_full, kv_empty, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr):
    for c in gl.static_range(CONSUMERS):
        mbarrier.invalidate(q_full.index(c))
        mbarrier.invalidate(q_empty.index(c))
    for slot in gl.static_range(SLOTS):
        mbarrier.invalidate(kv_full.index(slot))
        mbarrier.invalidate(kv_empty.index(slot))


SIZES = (
    "heads", "heads_q", "heads_at_once", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k",
    "window_left", "window_right", "group_size", "stride_slopeb",
    "steps_qb", "steps_qm", "steps_kb", "steps_kn", "steps_vb", "steps_vn",
)  # fmt: skip
LENGTH_POINTERS = ("lengths_q_ptr", "lengths_k_ptr")
UNALIGNED_POINTERS = (*LENGTH_POINTERS, "slopes_ptr", "sinks_ptr")


@gluon.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED_POINTERS)
def _fwd_sm90_kernel(
    q_tensor, k_tensor, v_tensor, o_tensor,  # (B, H, S, D) whatever the strides, or ragged (`gluon/tma.py`)
    lengths_q_ptr, lengths_k_ptr,  # int32: cu_seqlens of packed sequences, or twice seq_lens
    lse_ptr,  # (B, H, Sq) fp32, packed (H, Tq)
    o_ptr,  # for DIRECT
    slopes_ptr,  # (H,) or (B, H) fp32, for ALIBI
    sinks_ptr,  # (H,) fp32, for SINKS
    tickets_ptr,  # int32, [next ticket, programs that left]: for a dynamic deal
    heads,  # of all samples together
    heads_q, heads_at_once, batch, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    group_size,  # query heads that share one key head
    stride_slopeb,
    steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn,  # `steps_of` each tensor
    scale, softcap,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, OWN_O: gl.constexpr,
    DIRECT: gl.constexpr, PINGPONG: gl.constexpr, BY_WARP: gl.constexpr,
    OWN_WALK: gl.constexpr, Q_HELD: gl.constexpr,
    PIECES: gl.constexpr, PIECES_V: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr, ONE_RING: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CHECK_KEYS: gl.constexpr,
    LENGTHS: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SINKS: gl.constexpr, NEGATE: gl.constexpr,
    LAZY: gl.constexpr,
    FIXED_MAX: gl.constexpr,  # the maximum of the first blocks serves the others (`fixed_max_step`, `overflow.py`)
    NOTICES: gl.constexpr, DEAL: gl.constexpr, AHEAD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_tensor.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMERS * PIECES] + q_tensor.block_shape, q_tensor.layout)
    K_SLOTS: gl.constexpr = SLOTS if ONE_RING else SLOTS // 2
    k_buffers = gl.allocate_shared_memory(DTYPE, [K_SLOTS * PIECES] + k_tensor.block_shape, k_tensor.layout)
    if ONE_RING:
        v_buffers = k_buffers
    else:
        v_buffers = gl.allocate_shared_memory(DTYPE, [K_SLOTS * PIECES_V] + v_tensor.block_shape, v_tensor.layout)
    if OWN_O:
        o_buffers = gl.allocate_shared_memory(DTYPE, [CONSUMERS * PIECES_V] + o_tensor.block_shape, o_tensor.layout)
    else:
        o_buffers = q_buffers
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    _begin_phases(q_full, q_empty, kv_full, kv_empty, CONSUMERS, SLOTS, BY_WARP)
    notices, written = allocate_notices(NOTICES)
    # Where nothing will be read any value stands for a pointer or memory: a tuple of values has no None.
    if FIXED_MAX:
        flags = allocate_flags(CONSUMERS, NOTICES)
    else:
        flags = heads
    fence_async_shared()
    await_kernels_before()

    both = (q_buffers, k_buffers, v_buffers, q_full, q_empty, kv_full, kv_empty, notices, written, flags)
    both += (window_left, window_right, heads_q, seqlen_q, seqlen_k, total_q)
    if DIRECT:
        address = o_ptr
    else:
        address = heads
    if ALIBI:
        slopes = slopes_ptr
    else:
        slopes = heads
    if SINKS:
        sinks = sinks_ptr
    else:
        sinks = heads
    consume = both + (o_tensor, lse_ptr, address, slopes, stride_slopeb, sinks, o_buffers, scale, softcap)
    if LENGTHS == EQUAL:
        lengths = (heads, heads)
    else:
        lengths = (lengths_q_ptr, lengths_k_ptr)
    if DEAL == "dynamic":
        tickets = (tickets_ptr,)
    else:
        tickets = (heads,)
    produce = both + lengths + (heads, heads_at_once, batch, total_k)
    produce += (q_tensor, k_tensor, v_tensor, group_size) + tickets
    produce += (steps_qb, steps_qm, steps_kb, steps_kn, steps_vb, steps_vn)
    _specialise(
        consume, produce, BLOCK_N, CONSUMERS, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
        PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS,
        LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, DEAL, AHEAD, False,
        CONSUMER_REGISTERS, PRODUCER_REGISTERS,
    )  # fmt: skip
    if FIXED_MAX:  # noqa: SIM102 (decided when it is compiled)
        if is_flagged(flags, NOTICES, CONSUMERS, NOTICES, 4) != 0:
            _end_phases(q_full, q_empty, kv_full, kv_empty, CONSUMERS, SLOTS)
            _begin_phases(q_full, q_empty, kv_full, kv_empty, CONSUMERS, SLOTS, BY_WARP)
            fence_async_shared()
            _specialise(
                consume, produce, BLOCK_N, CONSUMERS, SLOTS, OWN_O, DIRECT, PINGPONG, BY_WARP, OWN_WALK, Q_HELD,
                PIECES, PIECES_V, JOINED, PAIRS, ONE_RING, CAUSAL, HAS_LEFT, HAS_RIGHT, CHECK_KEYS,
                LENGTHS, SOFTCAP, ALIBI, SINKS, NEGATE, LAZY, FIXED_MAX, DEAL, AHEAD, True,
                CONSUMER_REGISTERS, PRODUCER_REGISTERS,
            )  # fmt: skip


def constants(problem: AttentionProblem, config: Sm90Config, negate: bool) -> dict[str, object]:
    """The kernel's constexprs."""
    ragged = lengths_of(problem) != EQUAL.value
    return {
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.consumers,
        "SLOTS": config.slots,
        "OWN_O": config.own_o,
        "DIRECT": config.direct,
        "PINGPONG": config.pingpong,
        "BY_WARP": config.by_warp,
        "OWN_WALK": config.own_walk and problem.window_right >= 0,
        "Q_HELD": min(config.q_held, pieces_of(problem.head_dim, problem.head_dim_v, config.piece)[1]),
        "PIECES": pieces_of(problem.head_dim, problem.head_dim_v, config.piece)[1],
        "PIECES_V": pieces_of(problem.head_dim_v, problem.head_dim, config.piece)[1],
        "JOINED": config.joined,
        "PAIRS": config.pairs,
        "ONE_RING": has_one_ring(problem, config.piece),
        "CAUSAL": problem.causal,
        "HAS_LEFT": problem.window_left >= 0,
        "HAS_RIGHT": problem.window_right >= 0,
        "CHECK_KEYS": problem.window_right < 0
        and (ragged or problem.window_left >= 0 or problem.seqlen_k % config.block_n != 0),
        "LENGTHS": lengths_of(problem),
        "SOFTCAP": problem.softcap != 0.0,
        "ALIBI": problem.alibi,
        "SINKS": problem.sinks,
        "NEGATE": negate,
        "LAZY": config.lazy,
        "FIXED_MAX": has_fixed_max(problem, config),
        "NOTICES": notices_of(config),
        "DEAL": config.deal,
        "AHEAD": finds_ahead(problem, config),
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
    }


_launches = Launches()


def _launch(problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, config: Sm90Config) -> Launch:
    q, k, v = tensors.q, tensors.k, tensors.v
    slopes = tensors.alibi_slopes
    stride_slopeb = 0 if slopes is None or slopes.dim() == 1 else slopes.stride(0)

    def make() -> Launch:
        scale, negate = softmax_scale(problem, tensors.sm_scale)
        layout = problem.layout
        d, dv = problem.head_dim, problem.head_dim_v
        width, width_v = pieces_of(d, dv, config.piece)[0], pieces_of(dv, d, config.piece)[0]
        box = ragged_box if problem.seq_lens or problem.varlen else dense_box
        boxes = (
            box(q, layout, CONSUMER_ROWS, width),
            box(k, layout, config.block_n, width),
            box(v, layout, config.block_n, width_v),
            # Rows beyond a sample's end are written, as zeros; rows beyond a packed sequence are another's.
            (ragged_box if problem.varlen else dense_box)(out, layout, CONSUMER_ROWS, width_v),
            *(None,) * 7,  # lengths, lse, o_ptr, slopes, sinks, tickets
        )
        scalars = (
            problem.batch * problem.heads_q,
            problem.heads_q,
            config.together or heads_together(problem),
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.total_q,
            problem.total_k,
            problem.window_left,
            problem.window_right,
            problem.heads_q // problem.heads_kv,
            stride_slopeb,
            *(n for x in (q, k, v) for n in (steps_of(x, layout) if box is ragged_box else (0, 0))),
            scale,
            problem.softcap,
        )
        values = constants(problem, config, negate)
        grid = grid_of(problem, config, q.device)
        return Launch(_fwd_sm90_kernel, grid, boxes, scalars, values, schedule_of(config), True)

    strides = (q.stride(), k.stride(), v.stride(), out.stride())
    key = (config, problem, tensors.sm_scale, strides, stride_slopeb, q.device)
    return _launches.get(key, make)


def attention_forward(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Launch the Hopper kernel, which fills out and lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    config = config_of(problem)
    lengths = (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if problem.varlen else (tensors.seq_lens,) * 2
    with on_device(q):
        tickets = ticket_counter(q) if config.deal == "dynamic" else None
        launch = _launch(problem, tensors, out, config)
        with completing() if launch.again is None else nullcontext():
            address = out if config.direct else None
            launch(q, k, v, out, *lengths, lse, address, tensors.alibi_slopes, tensors.sinks, tickets)


def repeat(
    problem: AttentionProblem, tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor
) -> Callable[..., Pair | None] | None:
    """`Kernel.repeat`: for calls without optional tensors whose launch is compiled."""
    decide, known = config_of, _launches
    config = decide(problem)
    launch = _launch(problem, tensors, out, config)
    no_tickets = () if config.deal == "dynamic" else (None,)

    def arguments(q: int, k: int, v: int, out: int, lse: int) -> tuple[int | None, ...]:
        return q, k, v, out, None, None, lse, out if config.direct else None, None, None, *no_tickets

    again = repeat_forward(launch, out, lse, arguments, None if no_tickets else ticket_counter)
    if again is None:
        return None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair | None:
        if config_of is not decide or _launches is not known:  # a sweep has put others in their place
            return None
        return again(q, k, v)

    return run
