"""Matrix product for Ascend: persistent programs over output tiles in grouped order.

Each program loops over tiles of c. Within a group of `group_m` rows of tiles the order is column by column, so the
group's rows of a stay in L2 while b streams through (as in the Triton matrix multiplication tutorial). Operands may be
row-major or column-major. The vector cores apply bias and activation to the float32 sums of a tile before it is
rounded. A block pointer always follows memory, and a column-major tile is transposed in `tl.dot`. (A
block pointer with exchanged strides compiles to the product of the untransposed tile.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diyfa.backends.npu.attention.primitives import dot_add, narrow
from diyfa.backends.npu.runtime.compat import INTERPRETED, Constants, kernel
from diyfa.backends.npu.runtime.launch import cube_programs, device_guard, run
from diyfa.backends.npu.runtime.multibuffer import options_in_use
from diyfa.backends.npu.tables.configs import MatmulTile, matmul_tile
from diyfa.problem import Launch, MatmulProblem, MatmulTensors


@triton.jit
def load_operand(
    base_ptr, rows, cols, stride, row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Load [ROWS, COLS] of a row-major (TRANSPOSED: column-major) matrix, zero beyond its edges."""
    if TRANSPOSED:
        ptr = tl.make_block_ptr(base_ptr, (cols, rows), (stride, 1), (col0, row0), (COLS, ROWS), (1, 0))
        tile = tl.trans(tl.load(ptr, boundary_check=(0, 1), padding_option="zero"))
    else:
        ptr = tl.make_block_ptr(base_ptr, (rows, cols), (stride, 1), (row0, col0), (ROWS, COLS), (1, 0))
        tile = tl.load(ptr, boundary_check=(0, 1), padding_option="zero")
    return tile


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the activation of x: None, "relu", "gelu" (by the error function) or "silu". NaN stays NaN.

    The interpreter's maximum always filters NaN. On the chip a mask would take memory, and the maximum takes none.
    """
    if ACTIVATION == "relu":
        if INTERPRET:
            x = tl.where(x <= 0.0, 0.0, x)
        else:
            x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@dataclass(frozen=True)
class MatmulConstants(Constants):
    """Constants of `_matmul_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    a_transposed: bool
    b_transposed: bool
    compute: tl.dtype
    activation: str | None
    interpret: bool


@kernel
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr,
    c_ptr,
    stride_a, stride_b, stride_cm,
    m, n, k,
    c: tl.constexpr,
):  # fmt: skip
    blocks_m = tl.cdiv(m, c.BLOCK_M)
    blocks_n = tl.cdiv(n, c.BLOCK_N)
    tiles_per_group = c.GROUP_M * blocks_n
    for tile in range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0)):
        first_m = tile // tiles_per_group * c.GROUP_M
        group_rows = tl.minimum(blocks_m - first_m, c.GROUP_M)
        index_in_group = tile % tiles_per_group
        row0 = (first_m + index_in_group % group_rows) * c.BLOCK_M
        col0 = index_in_group // group_rows * c.BLOCK_N
        acc = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
        for k0 in range(0, k, c.BLOCK_K):
            a = load_operand(
                a_ptr, m, k, stride_a, row0, k0, c.BLOCK_M, c.BLOCK_K, c.A_TRANSPOSED
            )  # [BLOCK_M, BLOCK_K]
            b = load_operand(
                b_ptr, k, n, stride_b, k0, col0, c.BLOCK_K, c.BLOCK_N, c.B_TRANSPOSED
            )  # [BLOCK_K, BLOCK_N]
            acc = dot_add(a.to(c.COMPUTE), b.to(c.COMPUTE), acc, c.INTERPRET)
        if bias_ptr is not None:
            offs_n = col0 + tl.arange(0, c.BLOCK_N)
            acc += tl.load(bias_ptr + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
        acc = activate(acc, c.ACTIVATION, c.INTERPRET)
        c_block = tl.make_block_ptr(c_ptr, (m, n), (stride_cm, 1), (row0, col0), (c.BLOCK_M, c.BLOCK_N), (1, 0))
        tl.store(c_block, narrow(acc, c_ptr.dtype.element_ty, c.INTERPRET), boundary_check=(0, 1))


_TL_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


def _major(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Return (matrix, its stride other than 1, whether it is column-major). Copies x if neither stride is 1."""
    if x.stride(1) != 1 and x.stride(0) != 1:
        x = x.contiguous()
    if x.stride(1) == 1:
        return x, x.stride(0), False
    return x, x.stride(1), True


def make_launch(
    problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor
) -> Launch:
    """Return the launch that fills c, of contiguous columns, with activation(a @ b + bias)."""
    tile: MatmulTile = matmul_tile(problem)
    a, stride_a, a_transposed = _major(a)
    b, stride_b, b_transposed = _major(b)
    tasks = triton.cdiv(problem.m, tile.block_m) * triton.cdiv(problem.n, tile.block_n)
    strides = {"stride_a": stride_a, "stride_b": stride_b, "stride_cm": c.stride(0)}
    compute = _TL_DTYPES[problem.compute_dtype]
    constants = MatmulConstants(
        tile.block_m, tile.block_n, tile.block_k, tile.group_m, a_transposed, b_transposed, compute,
        problem.activation, INTERPRETED,
    )  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    tensors = {"a_ptr": a, "b_ptr": b, "bias_ptr": bias, "c_ptr": c}
    arguments = {**tensors, **strides, "m": problem.m, "n": problem.n, "k": problem.k}
    grid = cube_programs(problem.arch, a.device, tasks)
    return Launch(_matmul_kernel, grid, arguments, {"c": constants}, options_in_use(tile.compile_options(problem.arch)))


def matmul(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor) -> None:
    """Fill c (M, N) with activation(a @ b + bias). Block pointers write contiguous columns; others are copied."""
    result = c if c.stride(1) == 1 else c.new_empty(c.shape)
    with device_guard(c):
        run(make_launch(problem, tensors.a, tensors.b, tensors.bias, result))
        if result is not c:
            c.copy_(result)
