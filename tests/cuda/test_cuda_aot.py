"""The ahead-of-time compiler and its gate, on toy kernels, and a covering set of the shipped ones.

Kernels are compiled in a process of their own, because in this one Triton's interpreter may be on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hopper_gluon import need_hopper_gluon

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COMPILE = """
import json, sys
from dataclasses import asdict
import aot_kernels
from diyfa.lab.cuda import aot
arch, source, only = sys.argv[1:]
reports = aot.compile_all(arch, [getattr(aot_kernels, source)], only or None)
print(json.dumps([asdict(r) for r in reports]))
"""


def run_python(*arguments, interpret=False, cache, timeout=280):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    environment["TRITON_CACHE_DIR"] = str(cache)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def compile_toys(cache, arch, source="compile_specs", only=""):
    done = run_python("-c", COMPILE, arch, source, only, cache=cache)
    assert done.returncode == 0, done.stderr
    return {f"{r['kernel']} {r['case']}": r for r in json.loads(done.stdout)}


# The gate compiles for all of them but sm_86.
@pytest.mark.parametrize(
    "arch", [x if x in ("sm_75", "sm_86", "sm_90") else pytest.param(x, marks=pytest.mark.slow) for x in ARCHS]
)
def test_every_architecture_compiles(tmp_path, arch):
    (report,) = compile_toys(tmp_path, arch, only="plain").values()
    assert report["ok"], report["notes"]
    assert report["target"] == arch
    assert report["registers"] > 16
    assert report["spill_bytes"] == 0
    assert report["memory"]["shared"] >= 2 * 32 * 32 * 2  # one tile of each operand at least


def test_gate_fails_for_spills_and_compile_errors(tmp_path):
    reports = compile_toys(tmp_path, "sm_80")
    assert list(reports) == [
        "product plain", "product unaligned", "product spilling", "product budgeted", "broken shapes"
    ]  # fmt: skip
    assert [r["ok"] for r in reports.values()] == [True, True, False, True, False]
    spilling = reports["product spilling"]
    assert spilling["spill_bytes"] > 0
    assert spilling["notes"] == [f"spills {spilling['spill_bytes']} bytes, 0 allowed"]
    assert reports["product budgeted"]["spill_bytes"] == spilling["spill_bytes"]
    assert "CompilationError" in reports["broken shapes"]["notes"][0]


def test_second_compilation_reports_the_same(tmp_path):
    """A binary in Triton's cache must not hide spills."""
    first, second = (compile_toys(tmp_path, "sm_80", only="spilling")["product spilling"] for _ in range(2))
    assert not second["ok"]
    assert second["spill_bytes"] == first["spill_bytes"] > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_tensor_descriptors(tmp_path, arch):
    (report,) = compile_toys(tmp_path, arch, source="descriptor_specs").values()
    assert report["ok"], report["notes"]


PTX_OF = """
import json, sys
import triton
from diyfa.lab.cuda import aot, specs
def ptx(spec):
    options = {"num_warps": spec.num_warps, **aot.COMPILE_OPTIONS}
    return triton.compile(aot._source(spec), target=aot.target("sm_90"), options=options).asm["ptx"]
found = {"merges": specs._merges, "sums": lambda: specs._sums("sm_90")}[sys.argv[1]]()
print(json.dumps([ptx(spec) for spec in found]))
"""


def test_merging_overwrites_statistics_after_every_warp_has_read_them(tmp_path):
    """Each warp reads the log-sum-exps of all its program's rows, one of them writes."""
    done = run_python("-c", PTX_OF, "merges", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for ptx in json.loads(done.stdout):
        last = {word: ptx.rindex(word) for word in ("ld.global", "bar.sync", "st.global.b32")}
        assert last["ld.global"] < last["bar.sync"] < last["st.global.b32"]
        assert ptx.count("st.global.b32") == 1


def test_sums_of_parts_wait_for_them_in_every_program(tmp_path):
    """One without rows may not end first: kernels behind it would not wait for the one before it."""
    done = run_python("-c", PTX_OF, "sums", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, packed = json.loads(done.stdout)
    for ptx in (whole, packed):
        before, behind = ptx.split("griddepcontrol.wait")
        assert "bra" not in before and before.count("ld.global") == (2 if ptx is packed else 0)  # two offsets
        assert behind.count("ld.global") > 4


def test_interpreter_is_refused(tmp_path):
    done = run_python("-c", COMPILE, "sm_80", "compile_specs", "", cache=tmp_path, interpret=True)
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1; unset it" in done.stderr


def test_spec_that_misses_an_argument_is_refused(tmp_path):
    done = run_python("-c", COMPILE, "sm_80", "incomplete_specs", "", cache=tmp_path)
    assert done.returncode != 0
    assert "['REPEAT', 'b_ptr']" in done.stderr


@pytest.mark.parametrize(
    "reason",
    [
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers",
        "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions",
        "Potential Performance Loss: wgmma.mma_async instructions are serialized, in words without a number",
    ],
)
def test_gate_on_serialised_wgmma_and_shared_memory(reason):
    from diyfa.arch import gpu_spec
    from diyfa.lab.cuda import aot

    spec = aot.CompileSpec("k", "c", None, {}, {}, 4, 2)
    clean = (
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    arrived = clean + "ptxas info    : (C7519) warpgroup.arrive is injected in around line 1 in function 'k'\n"
    serialised = clean + f"ptxas info    : {reason} in the function 'k'\n"

    def verdict(arch, log, shared=1024):
        return aot.judge(arch, gpu_spec(arch), spec, log, shared, 0.1)

    assert verdict("sm_90", clean).ok
    assert verdict("sm_90", clean).registers == 168
    assert verdict("sm_90", arrived).ok
    assert not verdict("sm_90", serialised).ok
    assert [reason in note for note in verdict("sm_90", serialised).notes] == [True]
    assert verdict("sm_80", serialised).ok
    assert verdict("sm_90", clean, shared=227 * 1024).ok
    assert not verdict("sm_90", clean, shared=227 * 1024 + 1).ok
    assert not verdict("sm_80", "").ok, "without ptxas's log nothing is known"


def test_unknown_architecture():
    from diyfa.lab.cuda import aot

    with pytest.raises(ValueError, match="unknown CUDA architecture 'sm_10'"):
        list(aot.compile_all("sm_10", []))


@pytest.mark.parametrize(
    ("arch", "only"),
    [
        ("sm_75", "pointers float16 64x64x16"),
        ("sm_80", "pointers bfloat16 128x128x32"),
        ("sm_90", "tma float16 128x256x64 w8 s4"),
    ],
)
def test_shipped_matmul_passes_the_gate(tmp_path, arch, only):
    """A covering few; the whole set is what `diyfa compile` compiles."""
    done = run_python("-m", "diyfa", "compile", arch, "--only", only, "--json", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)["reports"]
    assert {report["kernel"] for report in reports} == {f"matmul/{only.split()[0]}"}


HOPPER_KERNELS = """
import json, sys
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.lab.cuda.specs import compile_specs
kernels = {arch: {spec.kernel for spec in compile_specs(arch)} for arch in sys.argv[1:]}
assert all("attention_fwd/v2" in found for found in kernels.values())
print(json.dumps([hopper_configs.environment_refusal(), [a for a in kernels if "attention_fwd/sm90" in kernels[a]]]))
"""


def test_the_hopper_kernel_is_compiled_for_hopper_only(tmp_path):
    """For any other architecture LLVM ends the process at its instructions."""
    done = run_python("-c", HOPPER_KERNELS, *ARCHS, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    refusal, archs = json.loads(done.stdout)
    assert archs == ([] if refusal else ["sm_90"])


SPECIALISED = """
import json
from diyfa.lab.cuda.specs import compile_specs
kernels = {spec.kernel: spec.fn for spec in compile_specs("sm_90")}
groups = {name: p for name, fn in kernels.items() for p in fn.params if p.name in ("group", "group_size")}
assert {"attention_fwd/v2", "attention_bwd/dkdv", "attention_bwd/dq"} <= groups.keys()
print(json.dumps([name for name, p in groups.items() if not p.do_not_specialize]))
"""


def test_the_gate_compiles_what_calls_without_gqa_launch(tmp_path):
    """For one query head per key head Triton would compile a variant that no spec has."""
    done = run_python("-c", SPECIALISED, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


SHARED_WITH_A_BIAS = """
import json, sys
from diyfa.lab.cuda import aot
from diyfa.lab.cuda import specs
from diyfa.backends.cuda.attention.configs import AttentionConfig, fits, shared_bytes
arch, dtype, head_dim, kind, bias, form, *tile = json.loads(sys.argv[1])
problem = specs._problem(arch, dtype, head_dim).replace(bias=bias)
tile = AttentionConfig(*tile, form)
spec = specs._forward(problem, tile) if kind == "fwd" else specs._gradient(kind, problem, tile)
report = aot.compile_spec(arch, spec)
print(json.dumps([report.memory["shared"], shared_bytes(kind, tile, problem), fits(kind, tile, problem)]))
"""


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "kind", "bias", "form", "tile", "limit"),
    [
        ("sm_90", "float16", 256, "fwd", "float16", "tma", (64, 64, 4, 3), 227 << 10),
        ("sm_90", "float16", 256, "fwd", "float32", "tma", (128, 64, 8, 2), 227 << 10),
        ("sm_86", "float32", 256, "dkdv", "float32", "portable", (16, 32, 8, 1), 99 << 10),
    ],
)
def test_the_bias_counts_in_the_shared_memory(tmp_path, arch, dtype, head_dim, kind, bias, form, tile, limit):
    """The first and the last were default tiles, which no GPU could launch."""
    case = json.dumps([arch, dtype, head_dim, kind, bias, form, *tile])
    done = run_python("-c", SHARED_WITH_A_BIAS, case, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    needed, counted, fits = json.loads(done.stdout)
    assert needed <= counted < needed + 2048
    assert fits == (needed <= limit)


# Three loops: over keys (a product, a branch back to 0010), the same that spills (0050), and over tiles, which may.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/               @P1 BRA 0x10 ;
        /*0050*/                   LDL R3, [R1+0x8] ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/                   STL [R1+0x8], R3 ;
        /*0080*/               @P2 BRA `(.L_x_1) 0x50 ;
        /*0090*/                   STL [R1+0x10], R5 ;
        /*00a0*/                   UTMASTG.4D [UR8], [UR4] ;
        /*00b0*/               @P3 BRA 0x0 ;
        /*00c0*/                   EXIT ;
"""
LOOPS = """
import json, sys
from diyfa.lab.cuda.sass import spills_in_loops
print(json.dumps(spills_in_loops(sys.argv[1])))
"""


TILE_LEAVES = "UTMASTG.4D [UR8], [UR4]"


@pytest.mark.parametrize(
    ("leaves", "found"),
    [
        (TILE_LEAVES, [0, 2]),
        ("STG.E.128 desc[UR4][R2.64], R4", [0, 2]),
        ("STG.E desc[UR4][R2.64], R4", [0, 2, 3]),  # a log-sum-exp tells nothing: more is looked at, not less
    ],
)
def test_spills_in_loops_are_detected(leaves, found, tmp_path):
    assert TILE_LEAVES in SASS
    done = run_python("-c", LOOPS, SASS.replace(TILE_LEAVES, leaves), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == found


CLEAN = """
import json
from dataclasses import replace
import aot_kernels
from diyfa.lab.cuda import aot
from diyfa.lab.cuda.specs import _hopper_specs
spec = next(s for s in _hopper_specs("sm_90") if "D=128 causal 2x64x128" in s.case)
tight = replace(spec.constexprs["config"], consumer_registers=160, block_n=128)
constexprs = {**spec.constexprs, "config": tight}
print(json.dumps([aot.compile_spec("sm_90", s).notes for s in (spec, replace(spec, constexprs=constexprs))]))
"""


def test_a_hopper_kernel_without_registers_spills_in_its_loops(tmp_path):
    need_hopper_gluon()
    done = run_python("-c", CLEAN, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    fine, tight = json.loads(done.stdout)
    assert not fine
    assert any("in each loop with products" in note for note in tight), tight
