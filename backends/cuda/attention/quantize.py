"""Quantise q, k or v to float8 or int8 in one to three passes over its rows (`diyfa.quantization`).

A descale is the largest magnitude of the rows that share it, divided by the dtype's largest number. The passes are

1. with `smooth`, the mean: `_sum_kernel` adds up chunks of rows, and `_mean_kernel` divides the sum of the chunks;
2. the largest magnitude: `_quantize_kernel` in mode MEASURE;
3. the result: `_quantize_kernel` in mode GIVEN multiplies rows by the descale's reciprocal and rounds them.

Two cases need fewer passes over the rows:

* With `smooth` and without rotation, pass 1 does the work of pass 2. In a column, |x - mean| is largest where x is the
  column's smallest or its largest number. `_sum_kernel` finds both beside the sum, and `_mean_kernel` the magnitude.
* With one descale for each block, one launch in mode BY_BLOCK does passes 2 and 3: a program that has a block in
  registers measures it and quantises it.

**Rotation.** `_quantize_kernel` rotates the rows that it reads, if asked, then subtracts the mean. Rotation is linear:
the mean of rotated rows is the rotated mean, so `_mean_kernel` rotates that vector alone. The Hadamard matrix of D
columns is the Kronecker product of two smaller ones, of D / SLICE and of SLICE columns. So each slice of SLICE columns
is multiplied by the smaller matrix, whose elements 1 and -1 make products exact, and then whole slices are added and
subtracted. Making the matrix takes more instructions than rotating a block of 64 rows, so a program rotates several
blocks with it.

**Speed.** These kernels have little work for each number. Memory limits them only if that work has at most about five
instructions of the slow kind: integer and logical instructions, comparisons and conversions, of which an SM starts 64
in a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import dot_add, round_to
from diyfa.backends.cuda.attention.launch import pointers
from diyfa.backends.cuda.attention.tile_io import cdiv, padded_head_dim
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import on_device
from diyfa.backends.cuda.runtime.launcher import launch_kernel
from diyfa.eight_bits import PER_BLOCK, PER_HEAD, PER_TENSOR, SMALLEST_DESCALE, Scheme
from diyfa.problem import Launch

SUMMED_ROWS = 512  # rows of a chunk, which one program of `_sum_kernel` adds up
ROWS_PER_CHUNK = tl.constexpr(SUMMED_ROWS)
# Columns of a slice of rotated rows; a quarter of D, if that is more. With 32 a call takes 1.17 times as long.
ROTATED_COLUMNS = 64
ROTATED_BLOCKS = 4  # blocks that share a program's Hadamard matrix
PREFETCHED_BYTES = 65536  # for blocks that are copied ahead; with the matrix they fit the shared memory of every GPU
MEASURE, BY_BLOCK, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # modes
TENSOR = tl.constexpr(PER_TENSOR)
SMALLEST = tl.constexpr(SMALLEST_DESCALE)
PARITIES = tl.constexpr(0x6996)  # bit i is the parity of i's bits
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has no fraction


@dataclass(frozen=True, eq=False)
class QuantizeConstants(Constants):
    """Constants of the kernels."""

    head_dim: int
    block_m: int  # rows of a block
    block_d: int
    blocks: int  # blocks of a program, one after another
    slice: int  # columns of a slice of the rows: all of them, or with a rotation those of one product
    mode: int  # MEASURE, BY_BLOCK or GIVEN; the kernels of the mean find the magnitude with MEASURE
    kind: int  # kind of descale: PER_TENSOR, PER_HEAD or PER_BLOCK
    rotate: bool
    smooth: bool
    integers: bool
    largest: float


@triton.jit
def _hadamard(N: tl.constexpr):
    """Return the Hadamard matrix [N, N], up to 256 columns, of 1.0 and -1.0."""
    bits = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    bits = bits ^ (bits >> 4)
    is_odd = (PARITIES >> (bits & 15)) & 1
    return tl.where(is_odd == 0, 1.0, -1.0)


@triton.jit
def _load(base, rows, columns, stride_m, n_rows, c: tl.constexpr):
    """Return rows of x [rows, columns]. Rows beyond the last repeat it, which changes no largest magnitude."""
    rows = tl.minimum(rows, n_rows - 1).to(tl.int64)
    pointers = base + rows[:, None] * stride_m + columns[None, :]
    if c.BLOCK_D == c.HEAD_DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < c.HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _sums_and_differences(slices, BIT: tl.constexpr):
    """Replace each two slices whose indices differ only in the bit of value BIT by their sum and their difference."""
    results = ()  # type: tuple[Any, ...]
    for i in tl.static_range(len(slices)):
        if i & BIT:
            results += (slices[i ^ BIT] - slices[i],)
        else:
            results += (slices[i] + slices[i ^ BIT],)
    return results


@triton.jit
def _load_slices(base, rows, stride_m, n_rows, matrix, scale, c: tl.constexpr):
    """Return rows of x, rotated if asked, as a tuple of slices [BLOCK_M, SLICE] fp32.

    `matrix`: the Hadamard matrix [SLICE, SLICE] of 1 and -1. `scale`: 1 / sqrt(D).
    """
    slices = ()  # type: tuple[Any, ...]
    for first in tl.static_range(0, c.BLOCK_D, c.SLICE):
        columns = first + tl.arange(0, c.SLICE)
        x = _load(base, rows, columns, stride_m, n_rows, c)
        if c.ROTATE:
            zero = tl.zeros([c.BLOCK_M, c.SLICE], tl.float32)
            x = dot_add(x, matrix, zero, "ieee")
            x = tl.where((columns < c.HEAD_DIM)[None, :], x * scale, 0.0)
        slices += (x.to(tl.float32),)
    if c.ROTATE:
        BITS: tl.constexpr = (1, 2, 4, 8, 16)
        for n in tl.static_range(len(BITS)):
            if BITS[n] < len(slices):
                slices = _sums_and_differences(slices, BITS[n])
    return slices


@triton.jit
def _descale_index(head, heads, group, c: tl.constexpr):
    """Return which descale of the tensor, or of (B, H // group), belongs to a head of (B, H)."""
    if c.KIND == TENSOR:
        return head * 0
    return head // heads * (heads // group) + head % heads // group


@triton.jit
def _descale(magnitude, c: tl.constexpr):
    descale = tl.div_rn(magnitude, c.LARGEST)
    return tl.where(descale < SMALLEST, SMALLEST, descale)  # a NaN stays


@triton.jit(do_not_specialize=("heads", "n_rows", "chunks"))
def _sum_kernel(
    x_ptr, sums_ptr, stride_xb, stride_xh, stride_xm, heads, n_rows, chunks, c: tl.constexpr,
):  # fmt: skip
    """Write the sum of each column over a chunk of rows of a head to sums (B, H, chunks, 3, D).

    Of the 3, index 0 is the sum. MEASURE: index 1 is the column's smallest value in the chunk, index 2 its largest.
    """
    pid = tl.program_id(0)
    head, chunk = (pid // chunks).to(tl.int64), pid % chunks
    base = x_ptr + head // heads * stride_xb + head % heads * stride_xh
    offs_d = tl.arange(0, c.BLOCK_D)
    # Rows of the same number modulo 8 mostly lie in the same threads, which add them without an exchange.
    total = tl.zeros([8, c.BLOCK_D], tl.float32)
    smallest = tl.full([8, c.BLOCK_D], float("inf"), tl.float32)
    largest = tl.full([8, c.BLOCK_D], float("-inf"), tl.float32)
    for start in tl.range(0, ROWS_PER_CHUNK, c.BLOCK_M, num_stages=3):
        rows = chunk * ROWS_PER_CHUNK + start + tl.arange(0, c.BLOCK_M)
        x = _load(base, rows, offs_d, stride_xm, n_rows, c).to(tl.float32)
        counted = tl.where((rows < n_rows)[:, None], x, 0.0)
        total += tl.sum(tl.reshape(counted, [c.BLOCK_M // 8, 8, c.BLOCK_D]), 0)
        if c.MODE == MEASURE:
            x = tl.reshape(x, [c.BLOCK_M // 8, 8, c.BLOCK_D])
            smallest = tl.minimum(smallest, tl.min(x, 0))
            largest = tl.maximum(largest, tl.max(x, 0))
    target = sums_ptr + (head * chunks + chunk) * 3 * c.HEAD_DIM + offs_d
    tl.store(target, tl.sum(total, 0), mask=offs_d < c.HEAD_DIM)
    if c.MODE == MEASURE:
        tl.store(target + c.HEAD_DIM, tl.min(smallest, 0), mask=offs_d < c.HEAD_DIM)
        tl.store(target + 2 * c.HEAD_DIM, tl.max(largest, 0), mask=offs_d < c.HEAD_DIM)


@triton.jit
def _rotated(x, N: tl.constexpr):
    """Return the product of x [N] with the Hadamard matrix of 1 and -1. N is at most 1024."""
    for n in tl.static_range(10):
        if 2**n < N:
            a, b = tl.split(tl.reshape(x, [N // 2, 2]))
            # The lowest bit of a number's index becomes the highest: after all steps bits are in order again.
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (1, 0)), [N])
    return x


@triton.jit(do_not_specialize=("heads", "n_rows", "group", "chunks"))
def _mean_kernel(sums_ptr, mean_ptr, magnitude_ptr, heads, n_rows, group, chunks, scale, c: tl.constexpr):
    """Write the mean of a head, rotated if asked, to `mean` (B, H, D), from the sums of `_sum_kernel`.

    MEASURE: also raise `magnitude` to the largest |x - mean|. It is at the smallest or largest value of a column, since
    rounding keeps the order of numbers. `scale`: 1 / sqrt(D).
    """
    head = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, c.BLOCK_D)
    total = tl.zeros([c.BLOCK_D], tl.float32)
    smallest = tl.full([c.BLOCK_D], float("inf"), tl.float32)
    largest = tl.full([c.BLOCK_D], float("-inf"), tl.float32)
    for start in range(0, chunks, 16):
        offs = start + tl.arange(0, 16)
        source = sums_ptr + (head * chunks + offs[:, None]) * 3 * c.HEAD_DIM + offs_d[None, :]
        inside = (offs < chunks)[:, None] & (offs_d < c.HEAD_DIM)[None, :]
        total += tl.sum(tl.load(source, mask=inside, other=0.0), 0)
        if c.MODE == MEASURE:
            smallest = tl.minimum(smallest, tl.min(tl.load(source + c.HEAD_DIM, mask=inside, other=float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.load(source + 2 * c.HEAD_DIM, mask=inside, other=float("-inf")), 0))
    mean = tl.div_rn(total, n_rows.to(tl.float32))
    if c.ROTATE:
        mean = _rotated(mean, c.BLOCK_D) * scale
    tl.store(mean_ptr + head * c.HEAD_DIM + offs_d, mean, mask=offs_d < c.HEAD_DIM)
    if c.MODE == MEASURE:
        # A NaN is in the mean, though `tl.min` and `tl.max` ignored it. An integer comparison puts it above infinity.
        above = tl.abs(largest - mean).to(tl.int32, bitcast=True)
        below = tl.abs(mean - smallest).to(tl.int32, bitcast=True)
        magnitude = tl.where(offs_d < c.HEAD_DIM, tl.maximum(above, below), 0)
        tl.atomic_max(magnitude_ptr + _descale_index(head, heads, group, c), tl.max(magnitude, 0), sem="relaxed")


@triton.jit(do_not_specialize=("heads", "n_rows", "group"))
def _quantize_kernel(
    x_ptr, mean_ptr, values_ptr, magnitude_ptr, descale_ptr,
    stride_xb, stride_xh, stride_xm, stride_vb, stride_vh, stride_vm,
    heads, n_rows, group,
    scale,  # of the matrix: 1 / sqrt(D)
    c: tl.constexpr,
):  # fmt: skip
    """Quantise BLOCKS blocks of BLOCK_M rows of a head of x (B, H, S, D) to `values` (B, H, S, D), or measure them.

    `mean`: (B, H, D), rotated if rows are. `magnitude`: for each descale the largest magnitude, the bits of an fp32
    number as int32. It is one number or (B, H // group), and starts at 0.

    * MEASURE: raise `magnitude` to that of these rows.
    * GIVEN: read `magnitude`, write the `descale` that follows from it, one number or (B, H // group), and quantise.
    * BY_BLOCK: write the descale of each block to `descale` (B, H, blocks), and quantise.
    """
    blocks = tl.cdiv(n_rows, c.BLOCK_M)
    programs = tl.cdiv(blocks, c.BLOCKS)  # of a head
    pid = tl.program_id(0)
    if c.MODE != MEASURE:
        pid = tl.num_programs(0) - 1 - pid  # L2 holds the rows that an earlier pass read last.
    head = (pid // programs).to(tl.int64)
    b, h = head // heads, head % heads
    base = x_ptr + b * stride_xb + h * stride_xh
    if c.ROTATE:
        matrix = _hadamard(c.SLICE).to(x_ptr.dtype.element_ty)
    else:
        matrix = None
    descale = 1.0
    if c.MODE == GIVEN:
        index = _descale_index(head, heads, group, c)
        descale = _descale(tl.load(magnitude_ptr + index).to(tl.float32, bitcast=True), c)
        is_first = (pid if c.KIND == TENSOR else pid % (programs * group)) == 0
        tl.store(descale_ptr + index, descale, mask=is_first)
    first_block = pid % programs * c.BLOCKS
    for block in range(first_block, tl.minimum(first_block + c.BLOCKS, blocks)):
        rows = block * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
        slices = _load_slices(base, rows, stride_xm, n_rows, matrix, scale, c)
        if c.SMOOTH:
            smoothed = ()  # type: tuple[Any, ...]
            for n in tl.static_range(len(slices)):
                columns = n * c.SLICE + tl.arange(0, c.SLICE)
                mean = tl.load(mean_ptr + head * c.HEAD_DIM + columns, mask=columns < c.HEAD_DIM, other=0.0)
                smoothed += (slices[n] - mean[None, :],)
            slices = smoothed
        if c.MODE != GIVEN:
            # An integer comparison puts NaN above infinity. `tl.max` of numbers would ignore it.
            largest = tl.abs(slices[0]).to(tl.int32, bitcast=True)
            for n in tl.static_range(1, len(slices)):
                largest = tl.maximum(largest, tl.abs(slices[n]).to(tl.int32, bitcast=True))
            # Over both axes at once: for sm_100 Triton 3.6 compiles no two reductions of a product one after another.
            magnitude = tl.max(largest)
            if c.MODE == MEASURE:
                tl.atomic_max(magnitude_ptr + _descale_index(head, heads, group, c), magnitude, sem="relaxed")
            else:
                descale = _descale(magnitude.to(tl.float32, bitcast=True), c)
                tl.store(descale_ptr + head * blocks + block, descale)
        if c.MODE != MEASURE:
            target = values_ptr + b * stride_vb + h * stride_vh + rows.to(tl.int64)[:, None] * stride_vm
            for n in tl.static_range(len(slices)):
                # At most LARGEST after rounding, because no magnitude is larger than descale * LARGEST.
                y = slices[n] * (1.0 / descale)
                if c.INTEGERS:
                    y = tl.where(y == y, (y + ROUNDING) - ROUNDING, 0.0)
                columns = n * c.SLICE + tl.arange(0, c.SLICE)
                inside = (rows < n_rows)[:, None] & (columns < c.HEAD_DIM)[None, :]
                tl.store(target + columns[None, :], round_to(y, values_ptr.dtype.element_ty), mask=inside)


def constants(x: torch.Tensor, scheme: Scheme, mode: int) -> QuantizeConstants:
    """Return the constants of a pass over x (B, H, S, D)."""
    block_d = padded_head_dim(x.shape[3])
    block_m = scheme.block if scheme.kind == PER_BLOCK else 64 if block_d <= 256 else 32
    return QuantizeConstants(
        head_dim=x.shape[3], block_m=block_m, block_d=block_d, blocks=ROTATED_BLOCKS if scheme.rotate else 1,
        slice=min(block_d, max(ROTATED_COLUMNS, block_d // 4)) if scheme.rotate else block_d, mode=mode,
        kind=scheme.kind, rotate=scheme.rotate, smooth=scheme.smooth, integers=scheme.dtype == torch.int8,
        largest=scheme.largest,
    )  # fmt: skip


def _options(c: QuantizeConstants, itemsize: int) -> dict[str, int]:
    """Return the compiler's options. While a program rotates a block it copies the next ones to shared memory."""
    bytes_per_block = c.block_m * c.block_d * itemsize
    return {
        "num_warps": 4 if c.block_m * c.block_d <= 8192 else 8,
        "num_stages": max(1, min(3, PREFETCHED_BYTES // bytes_per_block)) if c.rotate else 1,
    }


def mean_launches(
    x: torch.Tensor, sums: torch.Tensor, mean: torch.Tensor, magnitude: torch.Tensor | None, scheme: Scheme
) -> tuple[Launch, Launch]:
    """Return the launches that fill sums (B, H, chunks, 3, D) of x (B, H, S, D), and from them `mean` (B, H, D).

    If `magnitude` is given, they also raise it to that of the smoothed rows.
    """
    batch, heads, rows, head_dim = x.shape
    mode = BY_BLOCK if magnitude is None else MEASURE
    kind = PER_TENSOR if magnitude is None else scheme.kind  # with PER_BLOCK block_m would be that of the descales
    chunks, c = sums.shape[2], constants(x, scheme._replace(kind=kind), mode.value)
    sizes = {"heads": heads, "n_rows": rows, "chunks": chunks}
    arguments = {**pointers(x=x, sums=sums), **_strides("x", x), **sizes}
    to_mean = {**pointers(sums=sums, mean=mean, magnitude=magnitude), "group": scheme.group, **sizes}
    to_mean["scale"] = head_dim**-0.5
    return (
        Launch(_sum_kernel, batch * heads * chunks, arguments, {"c": c}, _options(c, x.element_size())),
        Launch(_mean_kernel, batch * heads, to_mean, {"c": c}, {"num_warps": 4, "num_stages": 1}),
    )


def _strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """Return the strides of x (B, H, S, D) over samples, heads and rows."""
    return {f"stride_{name}{dimension}": x.stride(i) for i, dimension in enumerate("bhm")}


def make_launch(
    x: torch.Tensor, mean: torch.Tensor | None, values: torch.Tensor | None, magnitude: torch.Tensor | None,
    descale: torch.Tensor | None, scheme: Scheme, mode: int,
) -> Launch:  # fmt: skip
    """Return the launch of `_quantize_kernel` over x (B, H, S, D). `mode`: MEASURE, BY_BLOCK or GIVEN."""
    batch, heads, rows, head_dim = x.shape
    c = constants(x, scheme, mode)
    arguments: dict[str, Any] = {
        **pointers(x=x, mean=mean, values=values, magnitude=magnitude, descale=descale),
        **_strides("x", x),
        **_strides("v", x if values is None else values),
        "heads": heads, "n_rows": rows, "group": scheme.group, "scale": head_dim**-0.5,
    }  # fmt: skip
    grid = batch * heads * cdiv(cdiv(rows, c.block_m), c.blocks)
    return Launch(_quantize_kernel, grid, arguments, {"c": c}, _options(c, x.element_size()))


def quantize(x: torch.Tensor, values: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fill `values`, shaped like x (B, H, S, D). Return the descale and the mean (B, H, D)."""
    batch, heads, rows, head_dim = x.shape
    by_block, mean, magnitude = scheme.kind == PER_BLOCK, None, None
    with on_device(x):
        if by_block:
            descale = x.new_empty((batch, heads, cdiv(rows, scheme.block)), dtype=torch.float32)
        else:
            shape = (batch, heads // scheme.group) if scheme.kind == PER_HEAD else ()
            descale = x.new_empty(shape, dtype=torch.float32)
            magnitude = x.new_zeros(shape, dtype=torch.int32)
        if scheme.smooth:
            sums = x.new_empty((batch, heads, cdiv(rows, SUMMED_ROWS), 3, head_dim), dtype=torch.float32)
            mean = x.new_empty((batch, heads, head_dim), dtype=torch.float32)
            for launch in mean_launches(x, sums, mean, None if scheme.rotate else magnitude, scheme):
                launch_kernel(launch)
        if not by_block and (scheme.rotate or not scheme.smooth):
            launch_kernel(make_launch(x, mean, None, magnitude, None, scheme, MEASURE.value))
        mode = BY_BLOCK if by_block else GIVEN
        launch_kernel(make_launch(x, mean, values, magnitude, descale, scheme, mode.value))
    return descale, mean
