"""Do wgmma and mma.sync give equal bits? And do Triton and Gluon compute equal functions? On a Hopper GPU: a table.

    PYTHONPATH=. python tests/manual/tensor_core_bits.py [--output FILE.json] [--groups 48]

Batch-invariant mode wants one row to have the same bits in a kernel of wgmma (`hopper/fwd.py`) and in one of mma.sync
(`attention/decode.py`). Both kernels take the features of a score, and the keys of an output, 16 at a time and in the
same order. So they agree if and only if one step of 16 rounds equally in both instructions. No document says so.

Products: each form computes C + A B for the same A [64, 256], B [256, 256], C [64, 256], in steps of 16. The forms
differ in instruction, rows and columns of a tile, and where A lies. A line of the table has the elements that differ
from mma.sync with 16 rows. "zero steps": steps whose products are all 0 are inserted, as keys that a row does not see
are. They must change nothing.

Functions: Triton's and Gluon's exp2, log2, quotient, fma, x * y + z, rounding, over bit patterns of all exponents.

Exit status 1: an element differs. 20 s on an H100 is the aim.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

M, N, K = 64, 256, 256
STEP = 16
EXPECTED = {"mma.sync": "mma.sync.aligned.m16n8k16", "wgmma": "wgmma.mma_async.sync.aligned.m64"}


@triton.jit
def _triton_kernel(
    a_ptr, b_ptr, c_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """C + A B by `tl.dot`, which takes wgmma for 64 rows and four warps, else mma.sync."""
    group = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    corner = group * (M * N) + m[:, None] * N + n[None, :]
    acc = tl.load(c_ptr + corner)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + group * (M * K) + m[:, None] * K + k[None, :])
        if B_BY_COLUMN:
            b = tl.trans(tl.load(b_ptr + group * (K * N) + n[:, None] * K + k[None, :]))
        else:
            b = tl.load(b_ptr + group * (K * N) + k[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(o_ptr + corner, acc)


@gluon.jit
def _gluon_kernel(
    a_ptr, b_ptr, c_ptr, o_ptr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, B_BY_COLUMN: gl.constexpr, A_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """C + A B by wgmma, with instructions of BLOCK_N columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DTYPE: gl.constexpr = a_ptr.dtype.element_ty
    group = gl.program_id(0).to(gl.int64)
    first_n = gl.program_id(1) * BLOCK_N
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, ACC))[:, None]
    cols = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))[None, :]
    corner = group * (M * N) + rows * N + cols
    acc = gl.load(c_ptr + corner)
    a_shared = gl.allocate_shared_memory(DTYPE, [M, BLOCK_K], SHARED)
    if B_BY_COLUMN:
        b_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_K], SHARED)
    else:
        b_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_K, BLOCK_N], SHARED)
    for start in range(0, K, BLOCK_K):
        m = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        k = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        a_shared.store(gl.load(a_ptr + group * (M * K) + m * K + k))
        if B_BY_COLUMN:
            n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            b_shared.store(gl.load(b_ptr + group * (K * N) + n * K + k))
        else:
            k = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            b_shared.store(gl.load(b_ptr + group * (K * N) + k * N + n))
        fence_async_shared()
        gl.thread_barrier()
        if B_BY_COLUMN:
            b = b_shared.permute((1, 0))
        else:
            b = b_shared
        if A_IN_REGISTERS:
            acc = warpgroup_mma(a_shared.load(gl.DotOperandLayout(0, ACC, 2)), b, acc, is_async=True)
        else:
            acc = warpgroup_mma(a_shared, b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
    gl.store(o_ptr + corner, acc)


@triton.jit
def _triton_functions(x_ptr, y_ptr, z_ptr, o_ptr, half_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y, z = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)
    tl.store(o_ptr + i, tl.math.exp2(x))
    tl.store(o_ptr + count + i, tl.math.log2(x))
    tl.store(o_ptr + 2 * count + i, x / y)
    tl.store(o_ptr + 3 * count + i, tl.fma(x, y, z))
    tl.store(o_ptr + 4 * count + i, x * y + z)
    tl.store(o_ptr + 5 * count + i, tl.maximum(x, y))
    tl.store(half_ptr + i, x.to(half_ptr.dtype.element_ty))


@gluon.jit
def _gluon_functions(x_ptr, y_ptr, z_ptr, o_ptr, half_ptr, count, BLOCK: gl.constexpr):
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [4], [0]))
    x = gl.load(x_ptr + i)
    y = gl.load(y_ptr + i)
    z = gl.load(z_ptr + i)
    gl.store(o_ptr + i, gl.exp2(x))
    gl.store(o_ptr + count + i, gl.log2(x))
    gl.store(o_ptr + 2 * count + i, x / y)
    gl.store(o_ptr + 3 * count + i, gl.fma(x, y, z))
    gl.store(o_ptr + 4 * count + i, x * y + z)
    gl.store(o_ptr + 5 * count + i, gl.maximum(x, y))
    gl.store(half_ptr + i, x.to(half_ptr.dtype.element_ty))


FUNCTIONS = ("exp2", "log2", "quotient", "fma", "x * y + z", "maximum")

# name -> (instruction, function that runs a form). Columns of a tile are columns of the instruction in wgmma.
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
_checked: set[str] = set()


def _check(name: str, instruction: str, compiled: Any) -> None:
    """Raise if the kernel does not consist of the instruction that its name says."""
    if name not in _checked:
        ptx = compiled.asm["ptx"]
        others = [x for kind, x in EXPECTED.items() if kind != instruction]
        if EXPECTED[instruction] not in ptx or any(x in ptx for x in others):
            raise SystemExit(f"{name}: Triton did not compile it to {instruction} alone")
        _checked.add(name)


def _triton_form(name: str, instruction: str, block_m: int, block_n: int, block_k: int, warps: int = 4) -> Form:
    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, by_column: bool) -> torch.Tensor:
        out = torch.empty_like(c)
        grid = (a.shape[0], M // block_m, N // block_n)
        compiled = _triton_kernel[grid](
            a, b, c, out, M, N, a.shape[2], block_m, block_n, block_k, by_column, num_warps=warps, num_stages=1
        )
        _check(name, instruction, compiled)
        return out

    return run


def _gluon_form(name: str, block_n: int, block_k: int, in_registers: bool) -> Form:
    def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, by_column: bool) -> torch.Tensor:
        out = torch.empty_like(c)
        grid = (a.shape[0], N // block_n)
        compiled = _gluon_kernel[grid](
            a, b, c, out, M, N, a.shape[2], block_n, block_k, by_column, in_registers, num_warps=4
        )
        _check(name, "wgmma", compiled)
        return out

    return run


def forms() -> dict[str, Form]:
    """All forms by name; the first is the one that others are compared with."""
    result: dict[str, Form] = {}
    for m, n, k, warps in ((16, 32, 64, 1), (16, 64, 128, 4), (32, 64, 64, 4), (32, 128, 128, 4)):
        name = f"mma.sync {m}x{n}x{k}, {warps} warps"
        result[name] = _triton_form(name, "mma.sync", m, n, k, warps)
    for n, k in ((64, 64), (128, 64)):
        name = f"wgmma by tl.dot 64x{n}x{k}"
        result[name] = _triton_form(name, "wgmma", 64, n, k)
    for n, k in ((64, 64), (128, 64), (256, 64), (128, 128)):
        for in_registers in (False, True):
            name = f"wgmma by Gluon 64x{n}x{k}, A in {'registers' if in_registers else 'shared memory'}"
            result[name] = _gluon_form(name, n, k, in_registers)
    return result


def _normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g, device="cuda")


def _exponents(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(low, high, shape, generator=g, device="cuda").float())


def inputs(kind: str, groups: int, dtype: torch.dtype, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """A [groups, 64, 256], B [groups, 256, 256] and C [groups, 64, 256] of a kind."""
    a, b = _normal(g, groups, M, K), _normal(g, groups, K, N)
    c = torch.zeros(groups, M, N, device="cuda")
    if kind == "normal, C":
        c = _normal(g, groups, M, N) * 16
    elif kind == "weights":  # of a softmax, times values
        a = torch.exp2(-8 * a.abs())
        c = _normal(g, groups, M, N) * 8
    elif kind == "wide":
        a, b = a * _exponents(g, -9, 6, groups, M, K), b * _exponents(g, -9, 6, groups, K, N)
        c = _normal(g, groups, M, N) * _exponents(g, -20, 20, groups, M, N)
    elif kind == "large C":
        c = _normal(g, groups, M, N) * 2.0**18
    elif kind == "small C":
        c = _normal(g, groups, M, N) * 2.0**-18
    elif kind == "cancelling":  # neighbours, or elements of other halves of a step, are opposite but for some bits
        other = (
            torch.arange(K, device="cuda")
            ^ torch.tensor([1, 8], device="cuda")[torch.arange(K, device="cuda") // 16 % 2]
        )
        first = torch.arange(K, device="cuda") < other
        a = torch.where(first, a, a[:, :, other])
        b = torch.where(first[:, None], b, -b[:, other]) * (1 + _exponents(g, -10, -6, groups, K, N))
        c = _normal(g, groups, M, N) * 2.0**-6
    elif kind == "one large":  # of each step: what is cut off the others shows in the last bits
        k = torch.arange(K, device="cuda")
        large = (k % STEP == (k // STEP * 5) % STEP).float()
        a, b = a * (1 + large * 255), b * (1 + large * 63)[:, None]
    elif kind == "integers":  # products and sums of up to 24 bits and a little more: ties
        a = torch.randint(-127, 128, (groups, M, K), generator=g, device="cuda").float()
        b = torch.randint(-127, 128, (groups, K, N), generator=g, device="cuda").float()
        c = torch.randint(-(1 << 24), 1 << 24, (groups, M, N), generator=g, device="cuda").float() * 0.5
    elif kind == "tiny":  # denormal operands and sums
        low = torch.finfo(dtype).tiny
        a = a * low if dtype == torch.float16 else a * 2.0**-70
        b = b * 2.0**-4 if dtype == torch.float16 else b * 2.0**-70
        c = _normal(g, groups, M, N) * (2.0**-20 if dtype == torch.float16 else 2.0**-140)
    elif kind == "not finite":
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0], device="cuda")
        where = torch.rand(groups, M, K, generator=g, device="cuda") < 0.002
        a = torch.where(where, special[torch.randint(0, 5, where.shape, generator=g, device="cuda")], a)
    return a.to(dtype), b.to(dtype), c


KINDS = (
    "normal", "normal, C", "weights", "wide", "large C", "small C", "cancelling", "one large", "integers", "tiny",
    "not finite",
)  # fmt: skip


def differing(x: torch.Tensor, y: torch.Tensor) -> int:
    """Elements whose bits differ; NaN equals NaN."""
    bits = x.view(torch.int32 if x.element_size() == 4 else torch.int16) != y.view(
        torch.int32 if y.element_size() == 4 else torch.int16
    )
    return int((bits & ~(x.isnan() & y.isnan())).sum())


def with_zero_steps(a: torch.Tensor, b: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice as many steps, with the same order of the old ones. A is 0 in the new ones and B is not."""
    steps = K // STEP
    where = torch.randperm(2 * steps, generator=g, device="cuda")[:steps].sort().values
    columns = (where[:, None] * STEP + torch.arange(STEP, device="cuda")).flatten()
    wide_a = a.new_zeros(a.shape[0], M, 2 * K)
    wide_b = _normal(g, a.shape[0], 2 * K, N).to(b.dtype)
    wide_a[:, :, columns], wide_b[:, columns] = a, b
    return wide_a, wide_b


def compare_products(groups: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    g = torch.Generator("cuda").manual_seed(52)
    all_forms = forms()
    for dtype in (torch.bfloat16, torch.float16):
        for kind in KINDS:
            a, b, c = inputs(kind, groups, dtype, g)
            wide_a, wide_b = with_zero_steps(a, b, g)
            first = None
            for name, form in all_forms.items():
                out = form(a, b, c, False)
                by_column = form(a, b.transpose(1, 2).contiguous(), c, True)
                first = out if first is None else first
                zero_steps = 0 if kind == "not finite" else differing(form(wide_a, wide_b, c, False), out)
                rows.append({
                    "dtype": str(dtype)[6:], "kind": kind, "form": name, "elements": out.numel(),
                    "differing": differing(out, first), "differing_by_column": differing(by_column, first),
                    "differing_with_zero_steps": zero_steps,
                })  # fmt: skip
    return rows


def compare_functions() -> list[dict[str, Any]]:
    rows = []
    count, block = 1 << 24, 1024
    g = torch.Generator("cuda").manual_seed(52)

    def any_bits() -> torch.Tensor:
        return (
            torch.randint(-(1 << 31), 1 << 31, (count,), generator=g, device="cuda").to(torch.int32).view(torch.float32)
        )

    for values in ("any bits", "scores"):
        x, y, z = any_bits(), any_bits(), any_bits()
        if values == "scores":
            x, y, z = -80 * x.nan_to_num(0).abs().clamp(max=1e3) / 1e3, _normal(g, count), _normal(g, count) * 8
        for dtype in (torch.bfloat16, torch.float16):
            results = []
            for kernel in (_triton_functions, _gluon_functions):
                out = torch.empty(len(FUNCTIONS), count, device="cuda")
                half = torch.empty(count, dtype=dtype, device="cuda")
                kernel[(count // block,)](x, y, z, out, half, count, block, num_warps=4)
                results.append((*out, half))
            for name, ours, theirs in zip((*FUNCTIONS, f"to {str(dtype)[6:]}"), *results, strict=True):
                rows.append({
                    "function": name, "values": values, "elements": count, "differing": differing(ours, theirs),
                })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--groups", type=int, default=48, help="products of 64x256x256 of each kind")
    options = parser.parse_args()
    products = compare_products(options.groups)
    functions = compare_functions()
    device = torch.cuda.get_device_name()
    if options.output:
        document = {"device": device, "triton": triton.__version__, "products": products, "functions": functions}
        options.output.write_text(json.dumps(document, indent=1))
    print(f"{device}, Triton {triton.__version__}")
    print(f"{'form':<52} {'elements':>11} {'differing':>10} {'B by column':>11} {'zero steps':>10}  kinds that differ")
    bad = 0
    for name in dict.fromkeys(r["form"] for r in products):
        mine = [r for r in products if r["form"] == name]
        keys = ("elements", "differing", "differing_by_column", "differing_with_zero_steps")
        total, plain, column, zeros = (sum(r[key] for r in mine) for key in keys)
        kinds = [f"{r['dtype']} {r['kind']}" for r in mine if any(r[key] for key in keys[1:])]
        print(f"{name:<52} {total:>11,} {plain:>10,} {column:>11,} {zeros:>10,}  {'; '.join(kinds) or '-'}")
        bad += plain + column + zeros
    for r in functions:
        print(f"{r['function'] + ', ' + r['values']:<52} {r['elements']:>11,} {r['differing']:>10,}")
        bad += r["differing"]
    print("EQUAL: one table for wgmma and mma.sync" if not bad else f"{bad:,} elements DIFFER")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
