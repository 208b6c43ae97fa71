"""Matrix product c = a @ b with float32 accumulation, in two forms that read tiles differently.

* `tma`: host-side tensor descriptors, for float16 and bfloat16 inputs with 16-byte aligned strides on Hopper and
  later. Programs may be persistent.
* `pointers`: plain masked pointers, for any strides, dtypes and architecture. K may be split among programs. A second
  kernel adds their partial sums in a fixed order, so results do not vary from run to run.

Descales, bias and activation are applied to the float32 sums before they are rounded (`epilogue.py`), with a split K by
the second kernel. Products of float8 are added to the sums step by step (`dot_float8`).

Programs are ordered in groups of row tiles, so that programs that run at the same time use the same operand tiles in
the L2 cache (Triton's matrix-multiplication tutorial). All addresses are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from diyfa.backends.cuda.attention.dots import dot_float8, dot_operand, round_to
from diyfa.backends.cuda.attention.launch import launching, pointers, repeating
from diyfa.backends.cuda.matmul.configs import MatmulConfig, candidates, default_config
from diyfa.backends.cuda.matmul.epilogue import activate, finish
from diyfa.backends.cuda.runtime import tune
from diyfa.backends.cuda.runtime.constants import Constants
from diyfa.backends.cuda.runtime.launch import multiprocessors
from diyfa.backends.cuda.runtime.passes import Pass, launch_each
from diyfa.backends.cuda.runtime.signature import Tiles, shared_box
from diyfa.problem import Launch, MatmulProblem, MatmulTensors, cached_per_problem
from diyfa.tuning import bucket_size

TL_DTYPE = {
    "float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "float8_e4m3fn": tl.float8e4nv
}  # fmt: skip
SUM_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class PointerConstants(Constants):
    """Constants of `_matmul_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    split_k: int
    even_k: bool  # block_k * split_k divides K: no mask along K
    compute_dtype: tl.dtype
    precision: str
    activation: str | None


@dataclass(frozen=True, eq=False)
class DescriptorConstants(Constants):
    """Constants of `_matmul_tma_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    a_transposed: bool
    b_transposed: bool
    persistent: bool
    store_halves: bool
    out_dtype: tl.dtype
    activation: str | None


@dataclass(frozen=True, eq=False)
class SumConstants(Constants):
    """Constants of `_sum_splits_kernel`."""

    split_k: int
    block: int
    activation: str | None


@triton.jit
def grouped_tile(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Return (row, column) of a tile number: down GROUP_M rows, then to the next column."""
    tiles_in_group = GROUP_M * num_tiles_n
    first_m = (tile // tiles_in_group) * GROUP_M
    group_m = tl.minimum(num_tiles_m - first_m, GROUP_M)
    return first_m + (tile % tiles_in_group) % group_m, (tile % tiles_in_group) // group_m


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr, a_descale_ptr, b_descale_ptr, c_ptr,
    stride_am, stride_ak, stride_bk, stride_bn, stride_bias, stride_a_descale, stride_b_descale, stride_cm, stride_cn,
    M, N, K, c: tl.constexpr
):  # fmt: skip
    """Compute a tile of the result (M, N), or of contiguous partial sums (SPLIT_K, M, N)."""
    pid_m, pid_n = grouped_tile(tl.program_id(0), tl.cdiv(M, c.BLOCK_M), tl.cdiv(N, c.BLOCK_N), c.GROUP_M)
    split = tl.program_id(1)
    offs_m = pid_m.to(tl.int64) * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    offs_n = pid_n.to(tl.int64) * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    offs_k = split.to(tl.int64) * c.BLOCK_K + tl.arange(0, c.BLOCK_K)
    mask_m = offs_m[:, None] < M
    mask_n = offs_n[None, :] < N
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn  # [BLOCK_K, BLOCK_N]
    # Split s reads steps s, s + SPLIT_K, ... `step` has 64 bits, for a stride may be nearly 2^31.
    step = tl.full((), c.BLOCK_K * c.SPLIT_K, tl.int64)
    acc = tl.zeros((c.BLOCK_M, c.BLOCK_N), tl.float32)
    for k in range(split * c.BLOCK_K, K, c.BLOCK_K * c.SPLIT_K):
        if c.EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m, other=0.0)
            b = tl.load(b_ptrs, mask=mask_n, other=0.0)
        else:
            n_left = K - k
            a = tl.load(a_ptrs, mask=mask_m & (tl.arange(0, c.BLOCK_K)[None, :] < n_left), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (tl.arange(0, c.BLOCK_K)[:, None] < n_left), other=0.0)
        if a.dtype == tl.float8e4nv:
            acc += dot_float8(a, b)
        else:
            a = dot_operand(a.to(c.COMPUTE_DTYPE))
            b = dot_operand(b.to(c.COMPUTE_DTYPE))
            acc = tl.dot(a, b, acc, input_precision=c.PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    if c.SPLIT_K == 1:
        vectors = (bias_ptr, stride_bias, a_descale_ptr, stride_a_descale, b_descale_ptr, stride_b_descale)
        acc = finish(acc, vectors, offs_m, offs_n, M, N, c.ACTIVATION)
    c_ptrs = c_ptr + (split.to(tl.int64) * M + offs_m[:, None]) * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, round_to(acc, c_ptr.dtype.element_ty), mask=mask_m & mask_n)


@triton.jit
def _sum_splits_kernel(
    partial_ptr, bias_ptr, a_descale_ptr, b_descale_ptr, c_ptr,
    stride_bias, stride_a_descale, stride_b_descale, stride_cm, stride_cn,
    size, N, c: tl.constexpr
):  # fmt: skip
    """Write the sums of partial[s, i] over s, in the order of s, with the epilogue, to element i of the result."""
    offs = tl.program_id(0).to(tl.int64) * c.BLOCK + tl.arange(0, c.BLOCK)
    mask = offs < size
    acc = tl.zeros((c.BLOCK,), tl.float32)
    for s in range(c.SPLIT_K):
        acc += tl.load(partial_ptr + tl.full((), s, tl.int64) * size + offs, mask=mask, other=0.0)
    row, column = offs // N, offs % N
    if a_descale_ptr is not None:
        acc *= tl.load(a_descale_ptr + row * stride_a_descale, mask=mask, other=0.0)
    if b_descale_ptr is not None:
        acc *= tl.load(b_descale_ptr + column * stride_b_descale, mask=mask, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column * stride_bias, mask=mask, other=0.0).to(tl.float32)
    acc = activate(acc, c.ACTIVATION)
    tl.store(c_ptr + row * stride_cm + column * stride_cn, round_to(acc, c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tma_kernel(
    a_desc,  # blocks of [BLOCK_M, BLOCK_K], or [BLOCK_K, BLOCK_M] if A_TRANSPOSED
    b_desc,  # blocks of [BLOCK_K, BLOCK_N], or [BLOCK_N, BLOCK_K] if B_TRANSPOSED
    c_desc,  # blocks of [BLOCK_M, BLOCK_N], half as wide if STORE_HALVES
    bias_ptr, a_descale_ptr, b_descale_ptr, stride_bias, stride_a_descale, stride_b_descale,
    M, N, K, c: tl.constexpr,
):  # fmt: skip
    """Compute tiles of c. Descriptors clip: elements beyond a or b read as 0, elements beyond c are not written."""
    num_tiles_m, num_tiles_n = tl.cdiv(M, c.BLOCK_M), tl.cdiv(N, c.BLOCK_N)
    # Flattened with the loop over K: loads of the next tile are in flight while this one is stored.
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=c.PERSISTENT):
        pid_m, pid_n = grouped_tile(tile, num_tiles_m, num_tiles_n, c.GROUP_M)
        start_m, start_n = pid_m * c.BLOCK_M, pid_n * c.BLOCK_N
        acc = tl.zeros((c.BLOCK_M, c.BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, c.BLOCK_K)):
            k = step * c.BLOCK_K
            if c.A_TRANSPOSED:
                a = a_desc.load([k, start_m]).T
            else:
                a = a_desc.load([start_m, k])
            if c.B_TRANSPOSED:
                b = b_desc.load([start_n, k]).T
            else:
                b = b_desc.load([k, start_n])
            if a.dtype == tl.float8e4nv:
                acc += dot_float8(a, b)
            else:
                acc = tl.dot(dot_operand(a), dot_operand(b), acc)
        vectors = (bias_ptr, stride_bias, a_descale_ptr, stride_a_descale, b_descale_ptr, stride_b_descale)
        acc = finish(acc, vectors, start_m, start_n, M, N, c.ACTIVATION)
        if c.STORE_HALVES:
            halves = tl.permute(tl.reshape(acc, (c.BLOCK_M, 2, c.BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)  # [BLOCK_M, BLOCK_N // 2]
            c_desc.store([start_m, start_n], round_to(left, c.OUT_DTYPE))
            c_desc.store([start_m, start_n + c.BLOCK_N // 2], round_to(right, c.OUT_DTYPE))
        else:
            c_desc.store([start_m, start_n], round_to(acc, c.OUT_DTYPE))


def _is_transposed(x: torch.Tensor) -> bool:
    """Return whether an aligned matrix is read along its first dimension, the one of stride 1."""
    rows, columns = x.stride()
    return not (columns == 1 and rows * x.element_size() % 16 == 0)


def _descriptor(x: torch.Tensor, transposed: bool, block: tuple[int, int]) -> Tiles:
    step = -1 if transposed else 1  # rows must be contiguous; `make_replay` recognises the base, so it is x itself
    return Tiles(x, x.shape[::step], x.stride()[::step], shared_box(x.dtype, block[::step]))


def _vector_stride(x: torch.Tensor | None) -> int:
    """Return the stride of a vector (N,), (N, 1) or (1, N); 0 if it is one number for all."""
    if x is None:
        return 1
    return 0 if x.numel() == 1 else max(zip(x.shape, x.stride(), strict=True))[1]


def epilogue_arguments(tensors: MatmulTensors | None) -> dict[str, Any]:
    """Return a kernel's arguments of the epilogue; without tensors they are None."""
    _, _, bias, a_descale, b_descale = tensors or (None,) * 5
    return {
        **pointers(bias=bias, a_descale=a_descale, b_descale=b_descale),
        "stride_bias": 1 if bias is None else bias.stride(0),
        "stride_a_descale": _vector_stride(a_descale),
        "stride_b_descale": _vector_stride(b_descale),
    }


def _launch_tma(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, config: MatmulConfig) -> Launch:
    m, n, k = problem.m, problem.n, problem.k
    a, b = tensors.a, tensors.b
    a_transposed, b_transposed = _is_transposed(a), _is_transposed(b)
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    arguments = {
        "a_desc": _descriptor(a, a_transposed, (config.block_m, config.block_k)),
        "b_desc": _descriptor(b, b_transposed, (config.block_k, config.block_n)),
        "c_desc": _descriptor(c, False, (config.block_m, config.block_n >> config.store_halves)),
        **epilogue_arguments(tensors),
        "M": m, "N": n, "K": k,
    }  # fmt: skip
    constants = DescriptorConstants.read_from(
        config, a_transposed=a_transposed, b_transposed=b_transposed, out_dtype=TL_DTYPE[problem.out_dtype],
        activation=problem.activation,
    )  # fmt: skip
    # In the interpreter only 2, so that each program has several tiles.
    programs = min(tiles, multiprocessors(a.device) or 2) if config.persistent else tiles
    return Launch(_matmul_tma_kernel, programs, arguments, {"c": constants}, _options(config))


def _launch_pointers(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, config: MatmulConfig) -> Launch:
    """Return the launch that writes the result to c, or partial sums if K is split."""
    m, n, k = problem.m, problem.n, problem.k
    a, b = tensors.a, tensors.b
    arguments = {
        **pointers(a=a, b=b, c=c),
        **epilogue_arguments(tensors if config.split_k == 1 else None),
        "stride_am": a.stride(0), "stride_ak": a.stride(1), "stride_bk": b.stride(0), "stride_bn": b.stride(1),
        "stride_cm": c.stride(-2), "stride_cn": c.stride(-1),
        "M": m, "N": n, "K": k,
    }  # fmt: skip
    constants = PointerConstants.read_from(
        config, even_k=k % (config.block_k * config.split_k) == 0, compute_dtype=TL_DTYPE[problem.compute_dtype],
        precision=problem.precision, activation=problem.activation if config.split_k == 1 else None,
    )  # fmt: skip
    grid = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), config.split_k
    aligned = tuple([name for name, size in (("N", n), ("K", k)) if size % 16 == 0])  # rows are read and written wide
    return Launch(_matmul_kernel, grid, arguments, {"c": constants}, _options(config), aligned)


def _options(config: MatmulConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def make_sum(problem: MatmulProblem, partials: torch.Tensor, tensors: MatmulTensors, c: torch.Tensor) -> Launch:
    """Return the launch that adds up partial sums (splits, M, N) and writes them with their epilogue to c."""
    size = problem.m * problem.n
    arguments = {
        **pointers(partial=partials, c=c),
        **epilogue_arguments(tensors),
        "stride_cm": c.stride(0), "stride_cn": c.stride(1), "size": size, "N": problem.n,
    }  # fmt: skip
    constants = {"c": SumConstants(partials.shape[0], SUM_BLOCK, problem.activation)}
    return Launch(_sum_splits_kernel, triton.cdiv(size, SUM_BLOCK), arguments, constants, {})


def make_launches(
    problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, config: MatmulConfig
) -> list[Launch]:
    """Return the launches that write the product with its epilogue to c."""
    if config.form == "tma":
        return [_launch_tma(problem, tensors, c, config)]
    if config.split_k == 1:
        return [_launch_pointers(problem, tensors, c, config)]
    partials = c.new_empty((config.split_k, problem.m, problem.n), dtype=torch.float32)
    return [_launch_pointers(problem, tensors, partials, config), make_sum(problem, partials, tensors, c)]


def run(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, config: MatmulConfig) -> None:
    """Write the product with its epilogue to c with the given tile, on the current device."""
    launch_each(make_launches(problem, tensors, c, config))


@cached_per_problem
def _bucket(problem: MatmulProblem) -> tuple[Any, ...]:
    sizes = tuple(bucket_size(x) for x in (problem.m, problem.n, problem.k))
    kinds = (problem.dtype, problem.compute_dtype, problem.out_dtype, problem.precision)
    return (*kinds, *sizes, *problem.k_major)


def _pass(problem: MatmulProblem, tensors: MatmulTensors, c: torch.Tensor, form: str) -> Pass:
    """Return the pass that writes the product with its epilogue to c."""
    config, is_settled = default_config(problem, form), None
    assert config is not None, "`unsupported` has asked"
    if problem.autotune and problem.block is None:
        name, bucket = f"matmul/{form}", _bucket(problem)
        tiles = candidates(problem, form)
        config = tune.best(name, bucket, tiles, lambda candidate: run(problem, tensors, c, candidate), config)
        is_settled = partial(tune.is_settled, name, bucket)
    launches = make_launches(problem, tensors, c, config)
    return Pass(launches, partials_of(launches), is_settled=is_settled)


def partials_of(launches: list[Launch]) -> list[torch.Tensor]:
    """Return the memory of the partial sums, if K is split."""
    return [launch.arguments["partial_ptr"] for launch in launches if "partial_ptr" in launch.arguments]


_tma_pass, _pointers_pass = partial(_pass, form="tma"), partial(_pass, form="pointers")
matmul_tma, repeat_tma = launching(_tma_pass), repeating(_tma_pass)
matmul_pointers, repeat_pointers = launching(_pointers_pass), repeating(_pointers_pass)
