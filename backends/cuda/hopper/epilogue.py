"""Stores of rows by address, for results that do not go through TMA.

Strides come from the tensors' descriptors. They are multiples of the 16 bytes that a thread moves at once. The compiler
has to be shown that: numbers are divided by CHUNK or WORDS and multiplied again.
"""

# Aggregates are checked against their annotations, so these must not be postponed.
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from diyfa.backends.cuda.attention.seq_info import load_clamped
from diyfa.backends.cuda.gluon.compat import aggregate, optimisation_barrier
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
def _in_chunks(elements):
    """Return a number of elements as an int64 that the compiler knows to be a multiple of CHUNK.

    The PTX is an `optimisation_barrier` for 64 bits.
    """
    elements = elements.to(gl.int64)
    hidden = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [elements], dtype=gl.int64, is_pure=False, pack=1)
    return hidden // CHUNK * CHUNK


@aggregate
class HeadRows:
    """The rows of one head of a sequence, in a tensor in memory."""

    pointer: gl.tensor  # address of the tensor
    offset: gl.tensor  # elements from there to the sequence's first row
    stride: gl.tensor  # elements from one row to the next
    columns: gl.tensor


@gluon.jit
def head_rows(pointer, tensor, b, h, first, IS_PACKED: gl.constexpr):
    """Return the rows of head h of sample b. `tensor`: the descriptor (`gluon/tma.py`) of the tensor at `pointer`.

    IS_PACKED: the sequence begins at row `first` of packed sequences.
    """
    RANK: gl.constexpr = len(tensor.block_shape)
    strides = tensor.strides
    index = first if IS_PACKED else b
    offset = index.to(gl.int64) * strides[RANK - 4].to(gl.int64) + h.to(gl.int64) * strides[RANK - 3].to(gl.int64)
    return HeadRows(pointer, offset, strides[RANK - 2], tensor.shape[RANK - 1])


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
def store_rows(x, rows, row0, end, column0):
    """Write x [64, columns] to `HeadRows` from row0 on, but before `end`, and columns from column0 on.

    x has an accumulator's rows, the tensor's dtype, and at least 32 columns.
    """
    LAYOUT: gl.constexpr = chunked_layout(x.shape[1])
    x = gl.convert_layout(x, LAYOUT)
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = column0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    end = optimisation_barrier(end)
    columns = optimisation_barrier(rows.columns) // CHUNK * CHUNK
    inside = (row < end)[:, None] & (column < columns)[None, :]
    at = _in_chunks(rows.offset) + row[:, None].to(gl.int64) * _in_chunks(rows.stride)
    gl.store(rows.pointer + at + column[None, :], x, mask=inside)


@gluon.jit
def store_float32(x, rows, row0, end, column0):
    """Write an accumulator as `store_rows` does, in its own layout: four threads write 32 bytes of a row at once."""
    LAYOUT: gl.constexpr = x.type.layout
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = column0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    inside = (row < end)[:, None] & (column < rows.columns // CHUNK * CHUNK)[None, :]
    at = rows.offset // WORDS * WORDS + row[:, None].to(gl.int64) * (rows.stride.to(gl.int64) // WORDS * WORDS)
    gl.store(rows.pointer + at + column[None, :], x, mask=inside)


@gluon.jit
def clear_others(cu_seqlens_ptr, batch, total, heads, o_ptr, o_tensor, lse_ptr):
    """Clear rows of out and lse that belong to no sequence, as `clear_others` of `attention/clear.py` does.

    For four warps. The rows are those before the first sequence and behind the last one. Unlike there, a sequence
    longer than the call said is computed whole, so nothing inside of it is cleared.
    """
    COLUMNS: gl.constexpr = 64
    LAYOUT: gl.constexpr = chunked_layout(COLUMNS)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    RANK: gl.constexpr = len(o_tensor.block_shape)
    first = load_clamped(cu_seqlens_ptr, total)
    last = load_clamped(cu_seqlens_ptr + batch, total)
    if (first > 0) | (last < total):
        for start in range(0, batch, 128):  # unused offsets may be 0: the sequences end at the largest one
            i = start + gl.arange(0, 128, layout=LANES)
            last = gl.maximum(last, gl.max(gl.load(cu_seqlens_ptr + i, mask=i < batch, other=0), 0))
        zeros = gl.zeros([ROWS, COLUMNS], o_ptr.dtype.element_ty, LAYOUT)
        for region in range(2):
            begin = gl.where(region == 0, 0, last)
            end = gl.where(region == 0, first, total)
            for i in range(gl.program_id(0), gl.cdiv(end - begin, ROWS) * heads, gl.num_programs(0)):
                h = (i % heads).to(gl.int64)
                row0 = begin + i // heads * ROWS
                offset = h * o_tensor.strides[RANK - 3].to(gl.int64)
                rows = HeadRows(o_ptr, offset, o_tensor.strides[RANK - 2], o_tensor.shape[RANK - 1])
                for column in range(0, rows.columns.to(gl.int32), COLUMNS):
                    store_rows(zeros, rows, row0, end, column)
                row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
                gl.store(lse_ptr + h * total + row, float("inf"), mask=row < end)
