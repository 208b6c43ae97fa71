"""Stores of rows by address, for results that do not go through TMA.

Strides come from the tensors' descriptors. They are multiples of the 16 bytes that a thread moves at once, which the
compiler has to be shown: it is why numbers are divided by CHUNK or WORDS and multiplied again.

A `matrix`, made by the function of that name, has six fields, by index: 0 the address of the tensor, 1 the stride of
samples, or for a ragged descriptor of steps, 2 of heads, 3 of rows, 4 the number of columns, 5 steps from one sample to
the next. Strides count elements.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.seq_info import load_clamped
from diyfa.backends.cuda.attention.tile_io import PACKED, SEQ_LENS
from diyfa.backends.cuda.gluon.compat import optimisation_barrier
from diyfa.backends.cuda.hopper.mma import ROWS

CHUNK = gl.constexpr(8)  # 16-bit elements in 16 bytes
WORDS = gl.constexpr(4)  # float32 elements in 16 bytes


@gluon.jit
def in_register_order(x, SHAPE: gl.constexpr):
    """Reorder an accumulator x [64, columns] to SHAPE: a thread gets 4 consecutive numbers, and a warp 128, of its own.

    In the accumulator a row is 16 * warp + 8 * half + lane // 4, and a column is 8 * n + 2 * (lane % 4) + bit.
    """
    split = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2])  # warp, half, lane // 4, n, lane % 4, bit
    return split.permute(3, 0, 2, 4, 1, 5).reshape(SHAPE)


@gluon.jit
def from_register_order(x, COLUMNS: gl.constexpr):
    """Undo `in_register_order`: return the accumulator [64, COLUMNS] of numbers x."""
    return x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([ROWS, COLUMNS])


@gluon.jit
def matrix(pointer, tensor, steps):
    """Return the fields of a `matrix`. `tensor`: a descriptor of `gluon/tma.py`. `pointer`: address of its tensor."""
    RANK: gl.constexpr = len(tensor.block_shape)
    strides = tensor.strides
    return pointer, strides[RANK - 4], strides[RANK - 3], strides[RANK - 2], tensor.shape[RANK - 1], steps


@gluon.jit
def optimisation_barrier_64(x):
    """Return x as int64 behind an `optimisation_barrier`."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _in_chunks(elements):
    """Return a number of elements as an int64 that the compiler knows to be a multiple of CHUNK."""
    return optimisation_barrier_64(elements) // CHUNK * CHUNK


@gluon.jit
def head_offset(matrix, b, h, first, LENGTHS: gl.constexpr):
    """Return the number of elements from a tensor's address to the first row of a sequence in a head.

    `first`: the sequence's first row, if PACKED. Steps, with SEQ_LENS, are those of `descriptor_steps`.
    """
    _, step, stride_h, _, _, steps = matrix
    if LENGTHS == PACKED:
        at = first.to(gl.int64)
    elif LENGTHS == SEQ_LENS:
        at = b.to(gl.int64) * steps
    else:
        at = b.to(gl.int64)
    return at * step.to(gl.int64) + h.to(gl.int64) * stride_h.to(gl.int64)


@constexpr_function
def chunked_layout(columns):
    """Return a layout of [64, columns] for four warps: at a time, a warp writes 64 bytes of each of 8 rows.

    A thread has chunks of 16 bytes. A warp has the rows that it has of an accumulator, so it exchanges data only within
    itself.
    """
    in_thread = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 1 << i] for i in range(5, columns.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(in_thread, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_rows(x, matrix, offset, row0, end, column0):
    """Write x [64, columns] to rows from row0 on, but before `end`, and columns from column0 on, of a matrix's head.

    `offset`: `head_offset`, from which rows count. x has an accumulator's rows, the matrix's dtype, and at least 32
    columns.
    """
    LAYOUT: gl.constexpr = chunked_layout(x.shape[1])
    x = gl.convert_layout(x, LAYOUT)
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = column0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    end = optimisation_barrier(end)
    columns = optimisation_barrier(matrix[4]) // CHUNK * CHUNK
    inside = (row < end)[:, None] & (column < columns)[None, :]
    at = _in_chunks(offset) + row[:, None].to(gl.int64) * _in_chunks(matrix[3])
    gl.store(matrix[0] + at + column[None, :], x, mask=inside)


@gluon.jit
def store_float32(x, matrix, offset, row0, end, column0):
    """Write an accumulator as `store_rows` does, in its own layout: four threads write 32 bytes of a row at once."""
    LAYOUT: gl.constexpr = x.type.layout
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = column0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    inside = (row < end)[:, None] & (column < matrix[4] // CHUNK * CHUNK)[None, :]
    at = offset // WORDS * WORDS + row[:, None].to(gl.int64) * (matrix[3].to(gl.int64) // WORDS * WORDS)
    gl.store(matrix[0] + at + column[None, :], x, mask=inside)


@gluon.jit
def clear_others(cu_seqlens_ptr, batch, total, heads, matrix, lse_ptr):
    """Clear rows that belong to no sequence, as `clear_others` of `attention/clear.py` does. For four warps.

    They are the rows before the first sequence, and those behind the last one. Unlike there, a sequence longer than the
    call said is computed whole, so nothing inside of it is cleared.
    """
    COLUMNS: gl.constexpr = 64
    LAYOUT: gl.constexpr = chunked_layout(COLUMNS)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first = load_clamped(cu_seqlens_ptr, total)
    last = load_clamped(cu_seqlens_ptr + batch, total)
    if (first > 0) | (last < total):
        for start in range(0, batch, 128):  # unused offsets may be 0: the sequences end at the largest one
            i = start + gl.arange(0, 128, layout=LANES)
            last = gl.maximum(last, gl.max(gl.load(cu_seqlens_ptr + i, mask=i < batch, other=0), 0))
        zeros = gl.zeros([ROWS, COLUMNS], matrix[0].dtype.element_ty, LAYOUT)
        for region in range(2):
            begin = gl.where(region == 0, 0, last)
            end = gl.where(region == 0, first, total)
            for i in range(gl.program_id(0), gl.cdiv(end - begin, ROWS) * heads, gl.num_programs(0)):
                h = (i % heads).to(gl.int64)
                row0 = begin + i // heads * ROWS
                for column in range(0, matrix[4].to(gl.int32), COLUMNS):
                    store_rows(zeros, matrix, h * matrix[2].to(gl.int64), row0, end, column)
                row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
                gl.store(lse_ptr + h * total + row, float("inf"), mask=row < end)
