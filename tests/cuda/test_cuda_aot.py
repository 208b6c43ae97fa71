"""The ahead-of-time compiler and its gate, on toy kernels, and a covering set of the shipped ones.

Kernels are compiled in a process of their own (`aot_kernels.py`), because in this one Triton's interpreter may be on.
"""

from __future__ import annotations

import json

import pytest
from subprocesses import ROOT, SUPPORT, run_python

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")
pytest.importorskip("typer")

from diyfa.arch import gpu_spec
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.lab.cuda import aot
from diyfa.lab.cuda.sass import spills_in_loops
from diyfa.problem import Launch

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SPEC = aot.CompileSpec(Launch(None, 1, {}, {}, {}), "k", "c")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    printed = run_python(
        "from aot_kernels import main; main()", SUPPORT, ROOT / "tests", TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles(found, arch):
    (report,) = found["plain"][arch].values()
    assert report["ok"], report["notes"]
    assert report["target"] == arch
    assert report["registers"] > 16
    assert report["spill_bytes"] == 0
    assert report["memory"]["shared"] >= 2 * 32 * 32 * 2  # one tile of each operand at least


def test_gate_fails_for_spills_and_compile_errors(found):
    reports = found["toys"]
    assert list(reports) == [
        "product plain", "product one warp", "product spilling", "product budgeted", "broken shapes"
    ]  # fmt: skip
    assert [r["ok"] for r in reports.values()] == [True, True, False, True, False]
    spilling = reports["product spilling"]
    assert spilling["spill_bytes"] > 0
    assert spilling["notes"] == [f"spills {spilling['spill_bytes']} bytes, 0 allowed"]
    assert reports["product budgeted"]["spill_bytes"] == spilling["spill_bytes"]
    assert "CompilationError" in reports["broken shapes"]["notes"][0]


def test_second_compilation_reports_the_same(found):
    """A binary in Triton's cache must not hide spills."""
    second = found["again"]["product spilling"]
    assert not second["ok"]
    assert second["spill_bytes"] == found["toys"]["product spilling"]["spill_bytes"] > 0


def test_helpers_for_dropout_compile(found):
    assert len(found["dropout"]) == 4
    for report in found["dropout"].values():
        assert report["ok"] and report["spill_bytes"] == 0, report


def test_merging_overwrites_statistics_after_every_warp_has_read_them(found):
    """Each warp reads the log-sum-exps of all its program's rows, one of them writes."""
    for ptx in found["merges"]:
        last = {word: ptx.rindex(word) for word in ("ld.global", "bar.sync", "st.global.b32")}
        assert last["ld.global"] < last["bar.sync"] < last["st.global.b32"]
        assert ptx.count("st.global.b32") == 1


def test_sums_of_parts_wait_for_them_in_every_program(found):
    """One without rows may not end first: kernels behind it would not wait for the one before it."""
    whole, packed = found["sums"]
    for ptx in (whole, packed):
        before, behind = ptx.split("griddepcontrol.wait")
        assert "bra" not in before and before.count("ld.global") == (2 if ptx is packed else 0)  # two offsets
        assert behind.count("ld.global") > 4


@pytest.mark.skipif(not is_interpreting(), reason="needs the interpreter")
def test_interpreter_is_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1; unset it"):
        aot.compile_spec("sm_80", SPEC)


@pytest.mark.parametrize("reason", [
    "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers",
    "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions",
    "Potential Performance Loss: wgmma.mma_async instructions are serialized, in words without a number",
])  # fmt: skip
def test_gate_on_serialised_wgmma_and_shared_memory(reason):
    clean = (
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    arrived = clean + "ptxas info    : (C7519) warpgroup.arrive is injected in around line 1 in function 'k'\n"
    serialised = clean + f"ptxas info    : {reason} in the function 'k'\n"

    def verdict(arch, log, shared=1024):
        return aot.judge(arch, gpu_spec(arch), SPEC, log, shared, 0.1)

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
    with pytest.raises(ValueError, match="unknown CUDA architecture 'sm_10'"):
        aot.jobs_for("sm_10")


def test_shipped_matmul_passes_the_gate(found):
    for status, printed in found["shipped"].values():
        assert status == 0, printed
        reports = json.loads(printed)["reports"]
        assert reports and {report["kernel"].split("/")[0] for report in reports} == {"matmul"}


def test_the_hopper_kernel_is_compiled_for_hopper_only(found):
    """For any other architecture LLVM ends the process at its instructions."""
    assert found["hopper"] == ([] if found["refusal of hopper"] else ["sm_90"])


def test_the_gate_compiles_what_calls_without_gqa_launch(found):
    """For one query head per key head Triton would compile a variant that no spec has."""
    assert found["unspecialised"] == []


def test_the_bias_counts_in_the_shared_memory(found):
    for (needed, counted, fits), limit in zip(found["biased"], (227 << 10, 227 << 10, 99 << 10), strict=True):
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


@pytest.mark.parametrize(("line", "instead", "found"), [
    ("EXIT", "EXIT", [0, 2]),
    ("STL [R1+0x8], R3", "STG.E.128 desc[UR4][R2.64], R4", [0, 1]),  # sums of a chunk leave from a loop over keys
    ("@P2 BRA", "BRA", [0]),  # code behind the kernel's end returns without a condition
])  # fmt: skip
def test_spills_in_loops_are_detected(line, instead, found):
    assert SASS.count(line) == 1
    assert spills_in_loops(SASS.replace(line, instead)) == found


def test_a_hopper_kernel_without_registers_spills_in_its_loops(found):
    import hopper_gluon  # noqa: F401

    fine, tight = found["few registers"]
    assert not fine
    assert any("in each loop with products" in note for note in tight), tight


def test_full_blocks_of_a_mask_run_the_loop_of_dense_calls(found):
    """No moves of weights between registers; and a masked block costs no more than a third of its loop."""
    import hopper_gluon  # noqa: F401

    dense, mask = found["loops"]["dense"], found["loops"]["mask"]
    assert min(mask) <= max(dense) + 8
    assert max(mask) <= max(dense) * 4 / 3 + 8
