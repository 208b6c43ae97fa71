"""How the Hopper kernel's PTX is post-processed, and when that happens."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import triton
from subprocesses import SUPPORT, run_python

from diyfa.backends.cuda.gluon import inline_ptx
from diyfa.backends.cuda.gluon.compat import has_gluon
from diyfa.backends.cuda.gluon.inline_ptx import (
    ARRIVE_MARKER,
    PREFETCH_MARKER,
    RELEASE_MARKER,
    WAIT_MARKER,
    post_process,
    post_processing,
)
from diyfa.backends.cuda.runtime.versions import TRITON

needs_triton = pytest.mark.skipif(not has_gluon(), reason=f"the PTX is not that of Triton {triton.__version__}")

# ---- text in, text out: PTX as Triton 3.6 to 3.9 write it

COPY = (
    "@%p7 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r1], [%rd3, {%r4, %r5, %r6, %r7}], [%r8];\n"
)
ARRIVAL = "bar.sync \t2, 128;\n// begin inline asm\n@%p9 mbarrier.arrive.shared::cta.b64 _, [%r10], 4;\n"
PER_WARP = (
    "\n// begin inline asm\n{ .reg .pred one; elect.sync _|one, 0xffffffff; "
    "@one mbarrier.arrive.shared::cta.b64 _, [%r10]; }\n"
)
POLL = "{\n.reg .pred complete;\nwaitLoop:\nmbarrier.try_wait.parity.shared.b64 complete, [%r11], %r12;\n}\n"
BARRIER = "bar.sync \t0, 128;\n"
OF_WARP = "bar.warp.sync \t-1;\n@%p9 mbarrier.arrive.shared::cta.b64 _, [%r10], 32;\n"
BY_LANE = "bar.warp.sync \t-1;\nmbarrier.arrive.shared::cta.b64 _, [%r10];\n"
MAPS = (
    ".param .align 64 .b8 kernel_param_0[128],\n.param .u32 kernel_param_1,\n.param .align 64 .b8 kernel_param_2[128]\n"
)
PREFETCHES = (
    "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    "@first prefetch.param.tensormap [kernel_param_0]; @first prefetch.param.tensormap [kernel_param_2]; }"
)
INIT = "\t@%p11 mbarrier.init.shared::cta.b64 [%r85], 1;\n"
ADDRESS = (
    "\t// end inline asm\n\t.loc\t3 35 22  // channel.py:35\n\tadd.s32 \t%r87, %r98, 204920;\n\t// begin inline asm\n"
)
NO_PREFETCH = PREFETCHES.split("@first")[0] + "}"
FULL = f".reqntid 256\n.maxnreg {inline_ptx.MAX_REGISTERS}\n{{\n"
TRANSFER = "\tsetmaxnreg.dec.sync.aligned.u32 \t24;\n"
STORE = "\tst.shared.b32 [%r1], %r2;\n"
OTHERS = ("$L__BB0_2:\n", "\tld.shared.b32 \t%r2, [%r1];\n", "\t@%p11 mbarrier.inval.shared::cta.b64 [%r85];\n")
OTHER = "\tadd.s32 %r20, %r21, 1;\n"

PROCESSED = {
    "a release": (f"{RELEASE_MARKER}{OTHER}{ARRIVAL}{OTHER}", f"{OTHER}{PER_WARP}{OTHER}"),
    "the release behind the marker only": (
        f"{ARRIVAL}{RELEASE_MARKER}{ARRIVAL}{ARRIVAL}",
        f"{ARRIVAL}{PER_WARP}{ARRIVAL}",
    ),
    "only the barrier in front of a release": (f"{RELEASE_MARKER}{BARRIER}{ARRIVAL}", f"{BARRIER}{PER_WARP}"),
    "a wait": (f"{WAIT_MARKER}{OTHER}{BARRIER}{OTHER}{POLL}", f"{OTHER}\n{OTHER}{POLL}"),
    "a wait without a barrier": (f"{WAIT_MARKER}{OTHER}{POLL}{BARRIER}{POLL}", f"{OTHER}{POLL}{BARRIER}{POLL}"),
    "only the barrier in front of a wait": (f"{WAIT_MARKER}{BARRIER}{BARRIER}{POLL}", f"{BARRIER}\n{POLL}"),
    "an arrival": (f"{ARRIVE_MARKER}{OTHER}{OF_WARP}{OF_WARP}", f"{OTHER}{BY_LANE}{OF_WARP}"),
    "prefetches": (f"{MAPS}{OTHER}{PREFETCH_MARKER}{OTHER}", f"{MAPS}{OTHER}{PREFETCHES}{OTHER}"),
    "barriers between initialisations": (
        f"{FULL}{INIT}{ADDRESS}{BARRIER}{ADDRESS}{INIT}{BARRIER}{INIT}{BARRIER}{OTHER}",
        f"{FULL}{INIT}{ADDRESS}{ADDRESS}{INIT}{INIT}{BARRIER}{OTHER}",
    ),
    "no barrier with a store, or between two threads' initialisations": (
        f"{FULL}{INIT}{STORE}{BARRIER}{INIT}{BARRIER}{STORE}{INIT}{BARRIER}{INIT.replace('p11', 'p12')}",
        f"{FULL}{INIT}{STORE}{BARRIER}{INIT}{BARRIER}{STORE}{INIT}{BARRIER}{INIT.replace('p11', 'p12')}",
    ),
    "no barrier beside a label, a load or another instruction of mbarriers": (
        "".join(f"{FULL}{INIT}{x}{BARRIER}{INIT}{BARRIER}{x}{INIT}" for x in OTHERS),
        "".join(f"{FULL}{INIT}{x}{BARRIER}{INIT}{BARRIER}{x}{INIT}" for x in OTHERS),
    ),
    "no transfers where all have the most registers": (
        f"{FULL}{PREFETCH_MARKER}{TRANSFER}{OTHER}{TRANSFER.replace('dec', 'inc')}",
        f"{FULL}{NO_PREFETCH}{OTHER}",
    ),
    "transfers among more warps": (
        f"{FULL.replace('256', '384')}{PREFETCH_MARKER}{TRANSFER}",
        f"{FULL.replace('256', '384')}{NO_PREFETCH}{TRANSFER}",
    ),
    "transfers among threads of fewer registers": (
        f"{FULL.replace(str(inline_ptx.MAX_REGISTERS), '80')}{PREFETCH_MARKER}{TRANSFER}",
        f"{FULL.replace(str(inline_ptx.MAX_REGISTERS), '80')}{NO_PREFETCH}{TRANSFER}",
    ),
    "no barrier among more warps": (
        f"{FULL}{INIT}{BARRIER.replace('128', '256')}{INIT}",
        f"{FULL}{INIT}{BARRIER.replace('128', '256')}{INIT}",
    ),
    "barriers between initialisations of more warps": (f"{INIT}{BARRIER}{INIT}", f"{INIT}{BARRIER}{INIT}"),
    "all of them": (
        f"{COPY}{WAIT_MARKER}{BARRIER}{POLL}{RELEASE_MARKER}{ARRIVAL}{WAIT_MARKER}{POLL}{ARRIVE_MARKER}{OF_WARP}",
        f"{COPY}\n{POLL}{PER_WARP}{POLL}{BY_LANE}",
    ),
    "nothing": (f"{COPY}{ARRIVAL}{BARRIER}{POLL}", f"{COPY}{ARRIVAL}{BARRIER}{POLL}"),
}


@pytest.mark.parametrize("name", PROCESSED)
def test_markers_are_post_processed(name: str) -> None:
    ptx, expected = PROCESSED[name]
    assert post_process(ptx) == expected


@pytest.mark.parametrize("ptx", [
    f"{ARRIVAL}{RELEASE_MARKER}{OTHER}",
    f"{RELEASE_MARKER}{ARRIVAL.replace('bar.sync', 'bar.warp.sync')}",
    f"{RELEASE_MARKER}{ARRIVAL.replace('128', '256')}",
    f"{RELEASE_MARKER}{ARRIVAL.replace('], 4;', '];')}",
    f"{RELEASE_MARKER}{BARRIER}{POLL}{ARRIVAL.split(';', 1)[1]}",
    f"{RELEASE_MARKER}{RELEASE_MARKER}{ARRIVAL}",
    f"{POLL}{WAIT_MARKER}{BARRIER}",
    f"{WAIT_MARKER}{WAIT_MARKER}{BARRIER}{POLL}",
    f"{OF_WARP}{ARRIVE_MARKER}{OTHER}",
    f"{ARRIVE_MARKER}{OF_WARP.replace('32;', '4;')}",
    f"{ARRIVE_MARKER}{POLL}{OF_WARP}",
])  # fmt: skip
def test_a_marker_without_its_instruction_is_an_error(ptx: str) -> None:
    with pytest.raises(RuntimeError, match="this Triton writes other PTX"):
        post_process(ptx)


def test_markers_change_with_this_file() -> None:
    """So that Triton does not take a kernel from its cache that was post-processed in another way."""
    markers = (RELEASE_MARKER, WAIT_MARKER, ARRIVE_MARKER, PREFETCH_MARKER)
    assert all(marker.endswith(f"_{inline_ptx._EDITION};") for marker in markers)
    assert not any(one in other for one in markers for other in markers if one != other)


# ---- the hook


def processed_by_hook(ptx: str) -> str:
    """What a compilation with the hook makes of `ptx`."""
    stages = {"ptx": lambda source, metadata: ptx}
    with post_processing():
        triton.knobs.runtime.add_stages_inspection_hook(None, stages, SimpleNamespace(ptx_version=None), None, 90)
    return stages["ptx"](None, {})


@needs_triton
@pytest.mark.parametrize("name", ["nothing", "a wait", "all of them"])
def test_the_hook_post_processes_what_is_compiled(name: str) -> None:
    ptx, expected = PROCESSED[name]
    assert processed_by_hook(ptx) == expected


@needs_triton
def test_the_hook_of_somebody_else_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *arguments: calls.append(arguments))
    ptx, expected = PROCESSED["all of them"]
    assert processed_by_hook(ptx) == expected
    assert [arguments[-1] for arguments in calls] == [90]


@needs_triton
@pytest.mark.parametrize("others", [None, ("key of somebody else", "hash")], ids=["alone", "beside another"])
def test_the_hook_says_what_kernels_are_kept_under(others: tuple | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks, without arguments, for (key, hash). Other kernels keep the key that they have without us."""
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", others and (lambda *arguments: others))
    with post_processing():
        key, hash_value = runtime.add_stages_inspection_hook()
    assert (key, hash_value) == (others or ("", ""))


@needs_triton
def test_the_hook_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_somebody_else(*arguments: object) -> None:
        raise AssertionError("nothing is compiled here")

    runtime = triton.knobs.runtime
    for before in (None, of_somebody_else):
        monkeypatch.setattr(runtime, "add_stages_inspection_hook", before)
        with post_processing(), post_processing():
            assert runtime.add_stages_inspection_hook is not before
        assert runtime.add_stages_inspection_hook is before
        with pytest.raises(KeyError), post_processing():
            raise KeyError
        assert runtime.add_stages_inspection_hook is before


def test_nothing_is_hooked_in_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_ptx, "has_gluon", lambda: False)
    monkeypatch.setattr(inline_ptx, "_change_stages", None)
    before = getattr(getattr(triton, "knobs", None), "runtime", None)
    hook = getattr(before, "add_stages_inspection_hook", None)
    with post_processing():
        assert getattr(before, "add_stages_inspection_hook", None) is hook


# ---- compiled: by the real ptxas, in a process without Triton's interpreter

COMPILE = """
import json, re
import aot_kernels, triton
from triton.backends.compiler import GPUTarget
from diyfa.backends.cuda.runtime.jit import triton_source
from diyfa.backends.cuda.runtime.signature import kernel_source, launch_signature
from diyfa.lab.cuda import matmul_specs, specs as attention_specs
from diyfa.lab.examples import example_attention
from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
from diyfa.backends.cuda.hopper.configs import Sm90Config
from diyfa.backends.cuda.hopper import matmul, matmul_configs
from diyfa.backends.cuda.gluon import inline_ptx
from diyfa.backends.cuda.gluon.inline_ptx import post_processing
from diyfa.problem import MatmulProblem

def compiled(spec):
    launch = spec.launch
    source = triton_source(launch.kernel, kernel_source(launch, launch_signature(launch)))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)

def counts(ptx):
    return {name: len(re.findall(pattern, ptx)) for name, pattern in PATTERNS.items()}

PATTERNS = {
    "arrivals of warps": r"elect\\.sync _\\|one, 0xffffffff; @one mbarrier\\.arrive",
    "arrivals of partitions": r"@%p\\d+ mbarrier\\.arrive\\.shared::cta\\.b64 _, \\[%r\\d+\\];",
    "arrivals of lanes": r"\\n\\s*mbarrier\\.arrive\\.shared::cta\\.b64 _, \\[%r\\d+\\];",
    "releases": r"\\.release_per_warp",
    "markers": r"\\.(release|wait)_per_warp|\\.arrive_per_lane|\\.prefetch_tensor_maps",
    "prefetches": r"prefetch\\.param\\.tensormap",
    "transfers": r"setmaxnreg\\.",
    "barriers between initialisations": r"(?s)r\\.init(?:(?!mbarrier).)*?bar\\.sync(?:(?!mbarrier).)*?mbarrier\\.init",
}
MOVING = ("_transpose", "_prepare", "_convert", "sum_partials", "preprocess", "_clear", "_merge", "/combine")
problem = attention_specs._problem("sm_90", "bfloat16", 128, False).replace(seqlen_q=16384, seqlen_k=16384)
config = Sm90Config(2, 64, 2, True, 240, 24)
launch = hopper_fwd_launch.make_launch(problem, *example_attention(problem), config)
spec = attention_specs._hopper_spec(problem, config, launch)
report = {}
try:
    compiled(spec)
except Exception as error:
    report["not processed"] = f"{type(error).__name__}: {error}"
(plain,) = [spec for spec in aot_kernels.compile_specs() if spec.case == "plain"]
before = compiled(plain)
triton.knobs.compilation.always_compile = True
made, post_process = [], inline_ptx.post_process
inline_ptx.post_process = lambda ptx: made.append(ptx) or post_process(ptx)
with post_processing():
    kernel = compiled(spec)
    report["processed"] = counts(kernel.asm["ptx"])
    report["ptxas 13"] = [b"compilation tools, release 13" in x.asm["cubin"] for x in (kernel, before)]
    report["made"] = counts(made[0])
    inside = compiled(plain)
    product = next(x for x in matmul_specs.compile_specs("sm_90") if "float8" in x.case and " c2 " in x.case)
    lines = compiled(product).asm["ttgir"].splitlines()
    # In the gate few rows of a have the default tiles that calls of so many rows take.
    every = matmul_specs.compile_specs("sm_90")
    product_kernels = {x.launch.constants["config"] for x in every if x.kernel == "matmul/sm90"}
    half = MatmulProblem("cuda", "sm_90", "float16", "float16", "float16", 1, 1, 4096, aligned=True)
    few = [half.replace(m=m, n=n, k=k) for m in (1, 32) for n in (1024, 4096, 8192) for k in (512, 4096)]
    called = [matmul.constants(x, matmul_configs.select_config(x)) for x in few]
    report["rows copied"] = sorted({x.a_rows for x in called})
    report["not in the gate"] = [str(x) for x in called if x not in product_kernels]
    few_rows = next(x for x in matmul_specs.compile_specs("sm_90") if x.case.endswith("16 rows"))
    report["few rows"] = counts(compiled(few_rows).asm["ptx"])
    report["few rows, made"] = counts(made[-1])
    report["narrow"], report["wide"] = {}, {}
    for x in attention_specs.compile_specs("sm_90"):
        if x.kernel.endswith(MOVING):
            found = re.findall(r"(?:ld|st)\\.global\\S*?\\.((?:v\\d\\.)?b\\d+)", compiled(x).asm["ptx"])
            report["wide"][x.kernel] = report["wide"].get(x.kernel, 0) + found.count("v4.b32")
            report["narrow"][f"{x.kernel} {x.case}"] = sorted({width for width in found if width in ("b8", "b16")})
    report["loops over tiles"] = [line for line in lines if "scf.for" in line and "step %programs" in line]
after = compiled(plain)
report["same"] = before.asm["ptx"] == inside.asm["ptx"] == after.asm["ptx"]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    cache = tmp_path_factory.mktemp("cache")
    out = run_python(COMPILE, SUPPORT, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    return json.loads(out.splitlines()[-1])


@needs_triton
def test_ptxas_refuses_markers(report: dict) -> None:
    assert "PTXASError" in report["not processed"]


@needs_triton
def test_warps_and_lanes_arrive_for_themselves(report: dict) -> None:
    made, processed = report["made"], report["processed"]
    assert not made["arrivals of warps"] and processed["arrivals of warps"] == made["releases"] > 0
    assert not made["arrivals of lanes"] and processed["arrivals of lanes"]  # that the tile info is there
    assert made["arrivals of partitions"] == processed["arrivals of partitions"]  # of the queries
    assert made["markers"] and not processed["markers"]


@needs_triton
def test_consumers_of_a_float8_product_count_items_on(report: dict) -> None:
    """Triton 3.6 had made 0 of the first item of each tile: programs of two tiles hung (docs/log/eight-bits.md)."""
    assert len(report["loops over tiles"]) == 2
    assert all("iter_args" in line for line in report["loops over tiles"])


@needs_triton
def test_kernels_that_move_tensors_take_16_bytes_at_a_time(report: dict) -> None:
    """By 2 bytes the conversion of dQ took 187 us instead of 50, and by 1 the transposition of V 29 instead of 18."""
    assert len(report["wide"]) == 9 and all(report["wide"].values())
    assert not [name for name, widths in report["narrow"].items() if widths]


@needs_triton
def test_what_needs_no_marker_matches_what_triton_writes(report: dict) -> None:
    """These edits raise no error if they find nothing. Triton 3.9 writes no barrier between initialisations."""
    made, processed = report["few rows, made"], report["few rows"]
    assert processed["prefetches"] == 3  # a, b, c
    assert made["transfers"] and not processed["transfers"]  # one consumer: all threads have the most registers
    assert report["made"]["transfers"] == report["processed"]["transfers"] > 0
    assert made["barriers between initialisations"] or TRITON > (3, 6)
    assert not processed["barriers between initialisations"]
    kept = "barriers between initialisations"  # three warpgroups: registers are scarce
    assert report["processed"][kept] == report["made"][kept]


@needs_triton
def test_the_gate_compiles_copies_of_few_rows(report: dict) -> None:
    """Products of few rows copy fewer rows of a than a tile has, in kernels of their own."""
    assert report["rows copied"] == [16, 32, 64] and report["not in the gate"] == []


def test_the_older_ptxas_compiles_the_kernel_and_no_other(report: dict) -> None:
    """`compat.ptxas_options`. What ptxas 13 has made says so."""
    assert report["ptxas 13"] == [False, TRITON >= (3, 9)]


@needs_triton
def test_other_kernels_are_left_alone(report: dict) -> None:
    assert report["same"]
