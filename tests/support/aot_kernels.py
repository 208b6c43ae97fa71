"""Toy kernels for the tests of the ahead-of-time gate, and what it finds of them and of some shipped ones as JSON.

`main` needs Triton without its interpreter, and so a process of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import dropout_kernels
import triton
import triton.language as tl
from typer.testing import CliRunner

from diyfa.backends.cuda.attention.configs import AttentionConfig, fits, shared_bytes
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.cli.app import app
from diyfa.lab.cuda import aot, specs
from diyfa.lab.cuda.aot import CompileSpec
from diyfa.lab.cuda.sass import disassembled, loops_over_keys

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SHIPPED = {  # a covering few: the whole set is what `diyfa compile` compiles
    "sm_75": "pointers float16 64x64x16",
    "sm_80": "pointers bfloat16 128x128x32",
    "sm_90": "tma float16 128x256x64 w8 s4",
}
# Architecture, dtype, head_dim, kernel, dtype of the bias, form, tile; the first and the last were default tiles, which
# no GPU could launch.
BIASED = (
    ("sm_90", "float16", 256, "fwd", "float16", "tma", (64, 64, 4, 3)),
    ("sm_90", "float16", 256, "fwd", "float32", "tma", (128, 64, 8, 2)),
    ("sm_86", "float32", 256, "dkdv", "float32", "portable", (16, 32, 8, 1)),
)


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


def _ptx(spec: CompileSpec) -> str:
    options = {"num_warps": spec.num_warps, **aot.COMPILE_OPTIONS}
    return triton.compile(aot._source(spec), target=aot.target("sm_90"), options=options).asm["ptx"]


def _compiled(arch: str, source: Any, only: str | None = None) -> dict[str, dict[str, Any]]:
    return {f"{r.kernel} {r.case}": asdict(r) for r in aot.compile_all(arch, [source], only)}


def _shipped(arch: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compile", arch, "--only", SHIPPED[arch], "--json"])
    return done.exit_code, done.stdout


def _shared_with_a_bias(arch: str, dtype: str, head_dim: int, kind: str, bias: str, form: str, tile: Any) -> list[int]:
    """What the compiled kernel needs, what is counted, and whether that fits."""
    problem, config = specs._problem(arch, dtype, head_dim).replace(bias=bias), AttentionConfig(*tile, form)
    spec = specs._forward(problem, config) if kind == "fwd" else specs._gradient(kind, problem, config)
    needed = aot.compile_spec(arch, spec).memory["shared"]
    return [needed, shared_bytes(kind, config, problem), fits(kind, config, problem)]


def _unspecialised_groups() -> list[str]:
    """Kernels that Triton would compile once more for one query head per key head."""
    kernels = {spec.kernel: spec.fn for spec in specs.compile_specs("sm_90")}
    groups = {name: p for name, fn in kernels.items() for p in fn.params if p.name in ("group", "group_size")}
    assert {"attention_fwd/v2", "attention_bwd/dkdv", "attention_bwd/dq"} <= groups.keys()
    return [name for name, p in groups.items() if not p.do_not_specialize]


def _with_few_registers() -> list[tuple[str, ...]]:
    """The notes of a Hopper kernel as it is, and with too few registers."""
    spec = next(s for s in specs._hopper_specs("sm_90") if "D=128 causal 2x64x128" in s.case)
    tight = replace(spec.constexprs["config"], consumer_registers=160, block_n=128)
    others = replace(spec, constexprs={**spec.constexprs, "config": tight})
    return [aot.compile_spec("sm_90", each).notes for each in (spec, others)]


def _loops_with_a_block_mask() -> dict[str, list[int]]:
    """The numbers of instructions in the loops over keys of a dense call, and of one with a block mask."""
    lengths = {}
    for name, case in {"dense": "D=128 full 2x64x128", "mask": "D=128 mask full of 128x128"}.items():
        spec = next(s for s in specs._hopper_specs("sm_90") if case in s.case)
        options = {"num_warps": spec.num_warps, **aot.COMPILE_OPTIONS, **spec.options}
        with aot.post_processing():
            compiled = triton.compile(aot._source(spec), target=aot.target("sm_90"), options=options)
        lengths[name] = [len(body) for body in loops_over_keys(disassembled(compiled.asm["cubin"]))]
    return lengths


def main() -> None:
    try:
        incomplete = str(_compiled("sm_80", incomplete_specs))
    except Exception as error:
        incomplete = str(error)
    kernels = {arch: {spec.kernel for spec in specs.compile_specs(arch)} for arch in ARCHS}
    assert all("attention_fwd/v2" in found for found in kernels.values())
    refusal = hopper_configs.environment_refusal()
    print(json.dumps({
        "plain": {arch: _compiled(arch, compile_specs, "plain") for arch in ARCHS},
        "toys": _compiled("sm_80", compile_specs),
        "again": _compiled("sm_80", compile_specs, "spilling"),
        "descriptors": {arch: _compiled(arch, descriptor_specs) for arch in ("sm_80", "sm_90", "sm_100")},
        "incomplete": incomplete,
        "dropout": _compiled("sm_90", dropout_kernels.cuda_specs),
        "merges": [_ptx(spec) for spec in specs._merges()],
        "sums": [_ptx(spec) for spec in specs._sums("sm_90")],
        "shipped": {arch: _shipped(arch) for arch in SHIPPED},
        "refusal of hopper": refusal,
        "hopper": [arch for arch in ARCHS if "attention_fwd/sm90" in kernels[arch]],
        "unspecialised": _unspecialised_groups(),
        "biased": [_shared_with_a_bias(*each) for each in BIASED],
        "few registers": [] if refusal else _with_few_registers(),
        "loops": {} if refusal else _loops_with_a_block_mask(),
    }))  # fmt: skip
