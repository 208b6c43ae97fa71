"""A small Gluon kernel of two programs that share what they load, right or with one planted bug (BUG)."""

from __future__ import annotations

from diyfa.backends.cuda.sm90_multicast import (
    CLUSTER_RELEASE_MARK,
    COPIED_MARK,
    COPY_MARK,
    RELEASE_MARK,
    WAIT_MARK,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

_COPY_TO_ALL = gl.constexpr(f"mov.b32 $0, 0; {COPY_MARK}")
_COPIED = gl.constexpr(f"mov.b32 $0, 0; {COPIED_MARK}")
_RELEASE = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARK}")
_RELEASE_TO_ALL = gl.constexpr(f"mov.b32 $0, 0; {CLUSTER_RELEASE_MARK}")
_WAIT_BY_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARK}")
_SHOW = gl.constexpr("fence.mbarrier_init.release.cluster; mov.b32 $0, 0;")
_MEET = gl.constexpr("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, 0;")
PIECES = gl.constexpr(2)  # of a tile, one for each program to load


@gluon.jit
def _say(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _meet_at_end(BUG: gl.constexpr):
    if BUG == "no_end_of_one":
        if gl.program_id(0) % 2 == 0:
            _say(_MEET)
    elif BUG != "no_end" and BUG != "tail":
        _say(_MEET)


@gluon.jit
def _load_tiles(source, ring, full, empty, n_tiles, SLOTS: gl.constexpr, BUG: gl.constexpr):
    if BUG != "no_start":
        _say(_MEET)
    ROWS: gl.constexpr = source.block_shape[0]
    COLUMNS: gl.constexpr = source.block_shape[1]
    SIZE: gl.constexpr = source.block_type.nbytes
    rank = gl.program_id(0) % 2
    for i in range(n_tiles):
        slot = i % SLOTS
        if BUG != "early_copy":
            mbarrier.wait(empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        if BUG == "mark_of_nothing":
            _say(_RELEASE_TO_ALL)
        if BUG == "own_bytes":
            mbarrier.expect(full.index(slot), SIZE)
        elif BUG != "late_expect":
            mbarrier.expect(full.index(slot), SIZE * PIECES)
        for j in gl.static_range(PIECES):
            if BUG != "unmarked_copy" and BUG != "no_marks":
                _say(_COPY_TO_ALL)
            if BUG == "two_marks":
                _say(_COPY_TO_ALL)
            mine = (rank == j) | (BUG == "both_copy" or BUG == "no_marks")
            tma.async_copy_global_to_shared(
                source, [i * ROWS, j * COLUMNS], full.index(slot), ring.index(slot * PIECES + j), pred=mine
            )
            if BUG != "unmarked_copy" and BUG != "no_marks" and BUG != "no_end_of_copies":
                _say(_COPIED)
            if BUG == "no_copy":
                _say(_COPY_TO_ALL)
                _say(_COPIED)
        if BUG == "late_expect":  # no bug: the phase lacks its arrival until then
            mbarrier.expect(full.index(slot), SIZE * PIECES)
    if BUG == "tail":  # no bug: waits for all releases instead of meeting at the end
        for i in range(n_tiles, n_tiles + SLOTS):
            mbarrier.wait(empty.index(i % SLOTS), ((i // SLOTS) & 1) ^ 1)
    if BUG == "mark_at_the_end":
        _say(_COPY_TO_ALL)
    if BUG != "producer_leaves":
        _meet_at_end(BUG)


@gluon.jit
def _add_up(sums_ptr, ring, full, empty, n_tiles, SLOTS: gl.constexpr, BUG: gl.constexpr):
    if BUG != "no_start":
        _say(_MEET)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = ring.shape[1]
    for i in range(n_tiles):
        slot = i % SLOTS
        if BUG == "wrong_mark":
            _say(_RELEASE_TO_ALL)
        elif BUG != "no_marks":
            _say(_WAIT_BY_WARP)
        if BUG != "no_wait":
            mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        if BUG == "early_release":
            _say(_RELEASE_TO_ALL)
            mbarrier.arrive(empty.index(slot), count=4)
        sums = gl.sum(ring.index(slot * PIECES).load(LAYOUT).to(gl.float32), 1)
        sums += gl.sum(ring.index(slot * PIECES + 1).load(LAYOUT).to(gl.float32), 1)
        fence_async_shared()
        if BUG == "one_arrival":
            _say(_RELEASE_TO_ALL)
            mbarrier.arrive(empty.index(slot), count=1)
        elif BUG == "no_marks" or BUG == "own_release_counted":
            mbarrier.arrive(empty.index(slot), count=4)
        elif BUG == "own_release":
            _say(_RELEASE)
            mbarrier.arrive(empty.index(slot), count=4)
        elif BUG == "released_twice":
            for _ in gl.static_range(2):
                _say(_RELEASE_TO_ALL)
                mbarrier.arrive(empty.index(slot), count=4)
        elif BUG != "early_release" and BUG != "no_release":
            _say(_RELEASE_TO_ALL)
            mbarrier.arrive(empty.index(slot), count=4)
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        gl.store(sums_ptr + (gl.program_id(0) * n_tiles + i) * ROWS + rows, sums)
    _meet_at_end(BUG)


@gluon.jit
def _bystander(BUG: gl.constexpr):
    if BUG != "no_start":
        _say(_MEET)
    if BUG != "bystander_leaves":
        _meet_at_end(BUG)


@gluon.jit
def share_tiles(source, sums_ptr, n_tiles, CLUSTER: gl.constexpr, SLOTS: gl.constexpr, BUG: gl.constexpr):
    """Each program adds up the rows of the same tiles; each loads one of a tile's two pieces, for both."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = source.block_shape[0]
    COLUMNS: gl.constexpr = source.block_shape[1]
    ring = gl.allocate_shared_memory(source.dtype, [SLOTS * PIECES, ROWS, COLUMNS], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    if BUG == "late_show":
        _say(_SHOW)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=4 if BUG == "own_release_counted" or BUG == "no_marks" else 4 * CLUSTER)
    fence_async_shared()
    if BUG != "no_show" and BUG != "late_show":
        _say(_SHOW)
    if BUG == "meets_alone":
        _say(_MEET)
    if BUG == "no_bystanders":
        gl.warp_specialize(
            [
                (_add_up, (sums_ptr, ring, full, empty, n_tiles, SLOTS, BUG)),
                (_load_tiles, (source, ring, full, empty, n_tiles, SLOTS, BUG)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_add_up, (sums_ptr, ring, full, empty, n_tiles, SLOTS, BUG)),
                (_load_tiles, (source, ring, full, empty, n_tiles, SLOTS, BUG)),
                (_bystander, (BUG,)),
                (_bystander, (BUG,)),
            ],
            [1, 1, 2],
            [24, 24, 24],
        )
