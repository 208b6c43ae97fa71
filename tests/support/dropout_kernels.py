"""A kernel that writes a tile of a dropout mask with a backend's helpers, and what the compilers are asked about it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diyfa.problem import Launch

# Triton 3.9 has none; the Ascend compiler turns any other masked store into a loop over its elements.
BLOCK_POINTERS = tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 9)


@triton.jit
def mask_kernel(
    rng_state_ptr, keep_ptr, b, h, row0, column0, threshold, rows, columns,
    HEAD_KEYS: tl.constexpr, POSITION_WORDS: tl.constexpr, KEEP_TILE: tl.constexpr, ORIGINS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_POINTERS: tl.constexpr,
):  # fmt: skip
    """The mask at (b, h), all its tiles from (row0, column0) on -> keep [rows, columns] float32, 1 where kept."""
    row_key0, row_key1, column_key0, column_key1 = HEAD_KEYS(rng_state_ptr, b, h, ORIGINS)
    for m0 in range(0, rows, BLOCK_M):
        offs_m = tl.arange(0, BLOCK_M)
        r0, r1 = POSITION_WORDS(row_key0, row_key1, offs_m + (row0 + m0))
        for n0 in range(0, columns, BLOCK_N):
            offs_n = tl.arange(0, BLOCK_N)
            c0, c1 = POSITION_WORDS(column_key0, column_key1, offs_n + (column0 + n0))
            if TRANSPOSED:
                keep = KEEP_TILE(c0, c1, r0, r1, threshold)  # [BLOCK_N, BLOCK_M]
            else:
                keep = KEEP_TILE(r0, r1, c0, c1, threshold)  # [BLOCK_M, BLOCK_N]
            kept = tl.where(keep, 1.0, 0.0)
            if not BLOCK_POINTERS:
                if TRANSPOSED:
                    i, j = (m0 + offs_m)[None, :], (n0 + offs_n)[:, None]
                else:
                    i, j = (m0 + offs_m)[:, None], (n0 + offs_n)[None, :]
                tl.store(keep_ptr + i * columns + j, kept, mask=(i < rows) & (j < columns))
            elif TRANSPOSED:
                tile = tl.make_block_ptr(keep_ptr, (columns, rows), (1, columns), (n0, m0), (BLOCK_N, BLOCK_M), (0, 1))
                tl.store(tile, kept, boundary_check=(0, 1))
            else:
                tile = tl.make_block_ptr(keep_ptr, (rows, columns), (columns, 1), (m0, n0), (BLOCK_M, BLOCK_N), (1, 0))
                tl.store(tile, kept, boundary_check=(0, 1))


def constants(helpers, block_m, block_n, transposed, origins=False):
    """The kernel's constexprs for the module `diyfa.backends.<backend>.attention.dropout`."""
    return {
        "HEAD_KEYS": helpers.head_keys,
        "POSITION_WORDS": helpers.position_words,
        "KEEP_TILE": helpers.keep_tile,
        "ORIGINS": origins,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "TRANSPOSED": transposed,
        "BLOCK_POINTERS": BLOCK_POINTERS,
    }


def launch(threshold, constants, **options):
    """A launch without memory; `threshold` is an int or a float."""
    numbers = dict.fromkeys(("b", "h", "row0", "column0", "rows", "columns"), 7)
    pointers = {
        "rng_state_ptr": torch.empty(2, dtype=torch.int64, device="meta"), "keep_ptr": torch.empty(49, device="meta"),
    }  # fmt: skip
    return Launch(mask_kernel, 1, {**pointers, **numbers, "threshold": threshold}, constants, options)


def cuda_specs():
    """For `diyfa.lab.cuda.aot`."""
    from diyfa.backends.cuda.attention import dropout
    from diyfa.lab.cuda.aot import CompileSpec

    for transposed in (False, True):
        for num_warps, block_m, block_n in ((4, 64, 32), (8, 64, 64)):
            given = constants(dropout, block_m, block_n, transposed)
            case = f"{block_m}x{block_n}{' transposed' if transposed else ''}"
            yield CompileSpec(launch(7, given, num_warps=num_warps, num_stages=1), "dropout", case)


def npu_jobs():
    """For `diyfa.lab.npu.specs`."""
    from diyfa.backends.npu.attention import dropout
    from diyfa.lab.npu.specs import kernel_job

    for transposed in (False, True):
        case = "64x128 transposed" if transposed else "64x128"
        yield kernel_job("dropout", case, launch(7.0, constants(dropout, 64, 128, transposed)))
