"""Toy kernels for the tests of the ahead-of-time gate, and what it finds of them and of some shipped ones as JSON.

`main` needs Triton without its interpreter, and so a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import dropout_kernels
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

from diyfa.backends.cuda.attention.configs import AttentionConfig, fits, shared_bytes
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.runtime.jit import compile_for
from diyfa.backends.cuda.runtime.signature import launch_signature
from diyfa.cli.app import app
from diyfa.lab.cuda import aot, specs
from diyfa.lab.cuda.aot import CompileSpec
from diyfa.lab.cuda.sass import disassembled, loops_over_keys
from diyfa.problem import Launch

POINTERS = ("a_ptr", "b_ptr", "c_ptr")
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
def broken_kernel(a_ptr, BLOCK: tl.constexpr):
    tl.store(a_ptr + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


def _product(case, block, num_warps, **options):
    pointers = {name: torch.empty(4, block, block, dtype=torch.float16, device="meta") for name in POINTERS}
    options |= {"num_warps": num_warps, "num_stages": 2}
    return CompileSpec(Launch(product_kernel, 1, pointers, {"BLOCK": block, "REPEAT": 4}, options), "product", case)


def compile_specs():
    yield _product("plain", 32, 4)
    yield _product("one warp", 16, 1)
    # A 128x128 float32 accumulator is 128 registers for each of 128 threads: 64 cannot hold it.
    yield _product("spilling", 128, 4, maxnreg=64)
    yield replace(_product("budgeted", 128, 4, maxnreg=64), spill_budget=1 << 20)
    a = torch.empty(32, dtype=torch.int32, device="meta")
    yield CompileSpec(Launch(broken_kernel, 1, {"a_ptr": a}, {"BLOCK": 16}, {}), "broken", "shapes")


def _ptx(spec: CompileSpec) -> str:
    return compile_for("sm_90", spec.launch, launch_signature(spec.launch)).asm["ptx"]


def _compiled(arch: str, specs: Iterable[CompileSpec]) -> dict[str, dict[str, Any]]:
    return {f"{spec.kernel} {spec.case}": asdict(aot.compile_spec(arch, spec)) for spec in specs}


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
    kernels = {spec.kernel: spec.launch.kernel for spec in specs.compile_specs("sm_90")}
    groups = {name: p for name, fn in kernels.items() for p in fn.params if p.name in ("group", "group_size")}
    assert {"attention_fwd/v2", "attention_bwd/dkdv", "attention_bwd/dq"} <= groups.keys()
    return [name for name, p in groups.items() if not p.do_not_specialize]


def _with_few_registers() -> list[tuple[str, ...]]:
    """The notes of a Hopper kernel as it is, and with too few registers."""
    spec = next(s for s in specs._hopper_specs("sm_90") if "D=128 causal 2x64x128" in s.case)
    constants = spec.launch.constants
    tight = replace(constants["config"], consumer_registers=160, block_n=128)
    others = replace(spec, launch=spec.launch._replace(constants={**constants, "config": tight}))
    return [aot.compile_spec("sm_90", each).notes for each in (spec, others)]


def _loops_with_a_block_mask() -> dict[str, list[int]]:
    """The numbers of instructions in the loops over keys of a dense call, and of one with a block mask."""
    lengths = {}
    for name, case in {"dense": "D=128 full 2x64x128", "mask": "D=128 mask full of 128x128"}.items():
        spec = next(s for s in specs._hopper_specs("sm_90") if case in s.case)
        compiled = compile_for("sm_90", spec.launch, launch_signature(spec.launch))
        lengths[name] = [len(body) for body in loops_over_keys(disassembled(compiled.asm["cubin"]))]
    return lengths


def main() -> None:
    kernels = {arch: {spec.kernel for spec in specs.compile_specs(arch)} for arch in ARCHS}
    assert all("attention_fwd/v2" in found for found in kernels.values())
    refusal = hopper_configs.environment_refusal()
    print(json.dumps({
        "plain": {arch: _compiled(arch, [_product("plain", 32, 4)]) for arch in ARCHS},
        "toys": _compiled("sm_80", compile_specs()),
        "again": _compiled("sm_80", [_product("spilling", 128, 4, maxnreg=64)]),
        "dropout": _compiled("sm_90", dropout_kernels.cuda_specs()),
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
