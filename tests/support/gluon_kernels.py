"""Small Gluon kernels, right or with one planted bug each (BUG), for the tests of their interpreter."""

from __future__ import annotations

import hopper_gluon  # noqa: F401
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diyfa.backends.cuda.gluon.compat import async_load, async_store, reinterpret
from diyfa.backends.cuda.gluon.inline_ptx import RELEASE_MARKER, WAIT_MARKER

_RELEASE_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {RELEASE_MARKER}")
_WAIT_PER_WARP = gl.constexpr(f"mov.b32 $0, 0; {WAIT_MARKER}")


@gluon.jit
def _inline_ptx(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _barrier(action: gl.constexpr, number: gl.constexpr, count: gl.constexpr):
    gl.inline_asm_elementwise(
        "mov.b32 $0, 0; bar." + action + " " + number + ", " + count + ";",
        "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_tiles(source, ring, full, empty, n_tiles, STAGES: gl.constexpr, BUG: gl.constexpr):
    ROWS: gl.constexpr = source.block_shape[0]
    SIZE: gl.constexpr = source.block_type.nbytes
    for i in range(n_tiles):
        stage = i % STAGES
        if BUG == "marker_of_nothing":
            _inline_ptx(_RELEASE_PER_WARP)
        elif BUG == "wrong_parity":
            mbarrier.wait(empty.index(stage), 1)
        else:
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        if BUG == "too_few_bytes":
            mbarrier.expect(full.index(stage), SIZE // 2)
        elif BUG == "too_many_bytes":
            mbarrier.expect(full.index(stage), SIZE * 2)
        else:
            mbarrier.expect(full.index(stage), SIZE)
        async_load(source, [i * ROWS, 0], full.index(stage), ring.index(stage))


@gluon.jit
def _double_tiles(
    target, sums_ptr, n_rows, ring, buffer, full, empty, n_tiles,
    STAGES: gl.constexpr, PER_WARP: gl.constexpr, BUG: gl.constexpr,
):  # fmt: skip
    """PER_WARP: waits and releases are marked, as those of the Hopper kernel are."""
    ROWS: gl.constexpr = target.block_shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    OTHER: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    for i in range(n_tiles):
        stage = i % STAGES
        if BUG == "wrong_marker" or BUG == "two_markers":
            _inline_ptx(_RELEASE_PER_WARP)
        if PER_WARP and BUG != "wrong_marker":
            _inline_ptx(_WAIT_PER_WARP)
        if BUG != "no_wait":
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if BUG == "early_release":
            mbarrier.arrive(empty.index(stage), count=1)
        x = ring.index(stage).load(LAYOUT)
        if BUG != "no_fence_after_reading":
            fence_async_shared()
        if PER_WARP:
            _inline_ptx(_RELEASE_PER_WARP)
            mbarrier.arrive(empty.index(stage), count=1 if BUG == "one_arrival" else 4)
        elif BUG != "early_release" and BUG != "no_release":
            mbarrier.arrive(empty.index(stage), count=1)
        if BUG == "released_twice":
            mbarrier.arrive(empty.index(stage), count=1)
        if BUG == "layout_mismatch":
            x = x + gl.full([ROWS, x.shape[1]], 1.0, x.dtype, OTHER)
        if BUG == "wrong_warps":
            x = gl.convert_layout(x, gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
        rows = i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0 if BUG == "wrong_slice" else 1, LAYOUT))
        if BUG == "no_mask":
            gl.store(sums_ptr + rows, gl.sum(x.to(gl.float32), 1))
        else:
            gl.store(sums_ptr + rows, gl.sum(x.to(gl.float32), 1), mask=rows < n_rows)
        if BUG != "no_store_wait":
            tma.store_wait(0)
        buffer.store(x + x)
        if BUG != "no_fence":
            fence_async_shared()
        async_store(target, [i * ROWS, 0], buffer)
    if BUG != "store_at_the_end":
        tma.store_wait(0)
    if BUG == "marker_at_the_end":
        _inline_ptx(_WAIT_PER_WARP)


@gluon.jit
def double_rows(source, target, sums_ptr, n_rows, STAGES: gl.constexpr, PER_WARP: gl.constexpr, BUG: gl.constexpr):
    """target = 2 * source, sums = row sums of source: a ring of tiles between a producer and one consumer."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = source.block_shape[0]
    COLUMNS: gl.constexpr = source.block_shape[1]
    ring = gl.allocate_shared_memory(source.dtype, [STAGES, ROWS, COLUMNS], source.layout)
    buffer = gl.allocate_shared_memory(target.dtype, [ROWS, COLUMNS], target.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        if BUG != "no_init":
            mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=4 if PER_WARP else 1)
        if BUG == "init_twice":
            mbarrier.init(empty.index(stage), count=1)
    if BUG != "no_fence_after_init":
        fence_async_shared()
    n_tiles = gl.cdiv(n_rows, ROWS)
    gl.warp_specialize(
        [
            (_double_tiles, (target, sums_ptr, n_rows, ring, buffer, full, empty, n_tiles, STAGES, PER_WARP, BUG)),
            (_load_tiles, (source, ring, full, empty, n_tiles, STAGES, BUG)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _load_operands(a, b, a_buffers, b_buffers, full, empty, n_blocks, STAGES: gl.constexpr):
    SIZE: gl.constexpr = a.block_type.nbytes + b.block_type.nbytes
    K: gl.constexpr = a.block_shape[1]
    for i in range(n_blocks):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), SIZE)
        async_load(a, [0, i * K], full.index(stage), a_buffers.index(stage))
        async_load(b, [i * K, 0], full.index(stage), b_buffers.index(stage))


@gluon.jit
def _multiply(c_ptr, a_buffers, b_buffers, full, empty, n_blocks, STAGES: gl.constexpr, BUG: gl.constexpr):
    M: gl.constexpr = a_buffers.shape[1]
    N: gl.constexpr = b_buffers.shape[2]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WRONG: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * N, 16])
    copy = gl.allocate_shared_memory(a_buffers.dtype, a_buffers.shape[1:], a_buffers.layout)
    acc = gl.zeros([M, N], gl.float32, WRONG if BUG == "wrong_instruction" else OUT)
    for i in range(n_blocks):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        a = a_buffers.index(stage)
        if BUG == "operand_layout":
            a = a.load(gl.DotOperandLayout(0, OUT, 4))
        elif BUG == "through_registers":  # no bug
            a = a.load(gl.DotOperandLayout(0, OUT, 2))
            fence_async_shared()
        elif BUG == "through_shared":  # no bug
            copy.store(a.load(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])))
            fence_async_shared()
            a = copy
        running = warpgroup_mma(a, b_buffers.index(stage), acc, is_async=True)
        if BUG == "no_wait":
            acc = running * 1.0
        else:
            acc = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(empty.index(stage), count=1)
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, OUT))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, OUT))
    gl.store(c_ptr + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def multiply(a, b, c_ptr, n_blocks, STAGES: gl.constexpr, BUG: gl.constexpr):
    """c = a @ b, for one tile of c."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_buffers = gl.allocate_shared_memory(a.dtype, [STAGES, a.block_shape[0], a.block_shape[1]], a.layout)
    b_buffers = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_shape[0], b.block_shape[1]], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (c_ptr, a_buffers, b_buffers, full, empty, n_blocks, STAGES, BUG)),
            (_load_operands, (a, b, a_buffers, b_buffers, full, empty, n_blocks, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _take_turns(out_ptr, shared, ME: gl.constexpr, TURNS: gl.constexpr, BUG: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    MINE: gl.constexpr = "8" if ME == 0 else "9"
    THEIRS: gl.constexpr = "9" if ME == 0 else "8"
    if ME == 1 and BUG != "no_first_turn":
        _barrier("arrive", THEIRS, "256")
    for turn in range(TURNS):
        if BUG == "reserved_barrier":
            _barrier("sync", "1", "256")
        elif BUG == "wrong_count":
            _barrier("sync", MINE, "128" if ME == 0 else "256")
        elif BUG != "no_turns":
            _barrier("sync", MINE, "256")
        x = shared.load(LAYOUT)
        shared.store(x + 1)
        if BUG == "arrive_twice":
            _barrier("arrive", THEIRS, "256")
        if BUG != "no_turns" and (ME == 0 or turn + 1 < TURNS):
            _barrier("arrive", THEIRS, "256")
    if ME == 1:
        gl.store(out_ptr + gl.arange(0, 128, layout=LAYOUT), shared.load(LAYOUT))


@gluon.jit
def take_turns(out_ptr, TURNS: gl.constexpr, BUG: gl.constexpr):
    """Two partitions add 1 to the same memory, in turns by named barriers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if BUG != "no_start":
        shared.store(gl.zeros([128], gl.int32, LAYOUT))
    gl.warp_specialize(
        [(_take_turns, (out_ptr, shared, 0, TURNS, BUG)), (_take_turns, (out_ptr, shared, 1, TURNS, BUG))], [4], [64]
    )


@gluon.jit
def arithmetic(x_ptr, n, out_ptr, OPERATION: gl.constexpr):
    """One number by scalar arithmetic, to compare with what the hardware computes."""
    if OPERATION == "divide":  # towards zero
        gl.store(out_ptr, (n - 8) // 3)
    elif OPERATION == "remainder":
        gl.store(out_ptr, (n - 8) % 3)
    elif OPERATION == "carried":  # a Python number before the loop, not in it
        k = -7
        for _ in range(n):
            k += 0
        gl.store(out_ptr, k // 2)
    elif OPERATION == "unrolled":
        k = -7
        for _ in gl.static_range(3):
            k += 0
        gl.store(out_ptr, k // 2)
    elif OPERATION == "overflow":
        gl.store(out_ptr, n * 1000000000)
    elif OPERATION == "round":
        gl.store(out_ptr, gl.load(x_ptr).to(gl.bfloat16).to(gl.float32))
    elif OPERATION == "write_then_read":
        gl.store(x_ptr + gl.program_id(0), n)
        gl.store(out_ptr + gl.program_id(0), gl.load(x_ptr + gl.program_id(0)))
    elif OPERATION == "read_others":
        gl.store(x_ptr + gl.program_id(0), n)
        gl.store(out_ptr + gl.program_id(0), gl.load(x_ptr))
    elif OPERATION == "beyond":
        gl.store(out_ptr, gl.load(x_ptr + n))


@gluon.jit
def join_tiles(out_ptr, BUG: gl.constexpr):
    """out [64, 128] fp16: four tiles of 64 columns in shared memory, filled with their numbers; the last two as one."""
    SWIZZLE: gl.constexpr = 64 if BUG == "swizzle" else 128
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    tiles = gl.allocate_shared_memory(gl.float16, [4, 64, 64], TILE)
    for i in gl.static_range(4):
        tiles.index(i).store(gl.full([64, 64], i, gl.float16, REGISTERS))
    PAIRS: gl.constexpr = 3 if BUG == "bytes" else 2
    N_ROWS: gl.constexpr = 32 if BUG == "rows" else 64
    N_COLUMNS: gl.constexpr = 256 if BUG == "rows" else 128
    wide = reinterpret(tiles, gl.float16, [PAIRS, N_ROWS, N_COLUMNS], gl.NVMMASharedLayout(SWIZZLE, 16, 2))
    pair = wide.index(1).load(REGISTERS)
    rows = gl.arange(0, N_ROWS, layout=gl.SliceLayout(1, REGISTERS))
    columns = gl.arange(0, N_COLUMNS, layout=gl.SliceLayout(0, REGISTERS))
    gl.store(out_ptr + rows[:, None] * N_COLUMNS + columns[None, :], pair)


@gluon.jit
def split_tiles(out_ptr, N_ROWS: gl.constexpr):
    """out [64, 64] fp16: the second of two tiles whose parts of N_ROWS rows are filled with their numbers."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    REGISTERS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    COUNT: gl.constexpr = 64 // N_ROWS
    tiles = gl.allocate_shared_memory(gl.float16, [2, 64, 64], TILE)
    parts = reinterpret(tiles, gl.float16, [2 * COUNT, N_ROWS, 64], TILE)
    for i in gl.static_range(2 * COUNT):
        parts.index(i).store(gl.full([N_ROWS, 64], i, gl.float16, REGISTERS))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, REGISTERS))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, REGISTERS))
    gl.store(out_ptr + rows[:, None] * 64 + columns[None, :], tiles.index(1).load(REGISTERS))


@gluon.jit
def _instruction(name: gl.constexpr, x):
    return gl.inline_asm_elementwise(name + " $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def of_subnormals(x_ptr, out_ptr):
    """Functions of the smallest numbers: x = [2^-130, -130, 2^-20, 0.75 * 2^128, NaN], float32."""
    small = gl.load(x_ptr)
    low = gl.load(x_ptr + 1)
    half = gl.load(x_ptr + 2)
    large = gl.load(x_ptr + 3)
    nan = gl.load(x_ptr + 4)
    gl.store(out_ptr, gl.exp2(low))
    gl.store(out_ptr + 1, gl.exp(low * 0.6931471805599453))
    gl.store(out_ptr + 2, gl.log2(small))
    gl.store(out_ptr + 3, gl.log(small))
    gl.store(out_ptr + 4, small / 4.0)
    gl.store(out_ptr + 5, 1.0 / large)
    gl.store(out_ptr + 6, gl.floor(-small))
    gl.store(out_ptr + 7, gl.ceil(small))
    gl.store(out_ptr + 8, gl.sqrt(small))
    gl.store(out_ptr + 9, gl.rsqrt(small))
    gl.store(out_ptr + 10, small * 2.0)
    gl.store(out_ptr + 11, small - 2.0 * small)
    gl.store(out_ptr + 12, gl.maximum(small, nan))
    gl.store(out_ptr + 13, gl.where(small != 0.0, small, -1.0))
    gl.store(out_ptr + 14, small.to(gl.bfloat16).to(gl.float32))
    gl.store(out_ptr + 15, half.to(gl.float16).to(gl.float32))
    gl.store(out_ptr + 16, _instruction("rcp.approx.ftz.f32", large))
    gl.store(out_ptr + 17, _instruction("rcp.approx.ftz.f32", small))


@gluon.jit
def constant_in_rounds(out_ptr):
    for i in gl.static_range(2):
        TWICE: gl.constexpr = i * 2
        gl.store(out_ptr + i, TWICE)


@gluon.jit
def _product_of(x, factors=()):
    for i in gl.static_range(len(factors)):
        x *= factors[i]
    return x


@gluon.jit
def tuple_default(out_ptr):
    gl.store(out_ptr, _product_of(2))


@gluon.jit
def _store(out_ptr, values):
    gl.store(out_ptr + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0])), values)


@gluon.jit
def block_to_partition(out_ptr):
    """A partition gets a block of registers of the program."""
    values = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.warp_specialize([(_store, (out_ptr, values)), (_store, (out_ptr, values))], [4], [24])
