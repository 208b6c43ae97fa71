"""Toy kernels for the tests of the ahead-of-time gate; imported only in processes without Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from diyfa.lab.cuda.aot import CompileSpec


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr, REPEAT: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]  # [BLOCK, BLOCK]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i in range(REPEAT):
        a = tl.load(a_ptr + i * BLOCK * BLOCK + tile)
        b = tl.load(b_ptr + i * BLOCK * BLOCK + tile)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + tile, acc.to(tl.float16))


@triton.jit
def descriptor_kernel(a_desc, c_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M
    c_desc.store([row, 0], a_desc.load([row, 0]))  # [BLOCK_M, BLOCK_N]


@triton.jit
def broken_kernel(a_ptr, BLOCK: tl.constexpr):
    tl.store(a_ptr + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


def _product(case, block, num_warps, **options):
    pointers = ("a_ptr", "b_ptr", "c_ptr")
    constants = {"BLOCK": block, "REPEAT": 4}
    signature = dict.fromkeys(pointers, "*fp16")
    return CompileSpec(
        "product", case, product_kernel, signature, constants, num_warps, 2, options, aligned=frozenset(pointers)
    )


def compile_specs(arch):
    yield _product("plain", 32, 4)
    yield _product("unaligned", 16, 1)
    # A 128x128 float32 accumulator is 128 registers for each of 128 threads: 64 cannot hold it.
    yield _product("spilling", 128, 4, maxnreg=64)
    yield replace(_product("budgeted", 128, 4, maxnreg=64), spill_budget=1 << 20)
    yield CompileSpec("broken", "shapes", broken_kernel, {"a_ptr": "*i32"}, {"BLOCK": 16}, 4, 2)


def descriptor_specs(arch):
    block = {"BLOCK_M": 64, "BLOCK_N": 32}
    signature = {"a_desc": "tensordesc<fp16[64,32]>", "c_desc": "tensordesc<fp16[64,32]>"}
    yield CompileSpec("descriptor", "copy", descriptor_kernel, signature, block, 4, 2)


def incomplete_specs(arch):
    yield CompileSpec("product", "no b_ptr", product_kernel, {"a_ptr": "*fp16", "c_ptr": "*fp16"}, {"BLOCK": 16}, 1, 1)
