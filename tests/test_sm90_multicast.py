"""What the Hopper kernel's PTX is completed with, when that happens, and which problems clusters are for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from diyfa.backends.cuda.sm90_multicast import (
    ARRIVE_MARK,
    CLUSTER_RELEASE_MARK,
    COPIED_MARK,
    COPY_MARK,
    RELEASE_MARK,
    WAIT_MARK,
    complete,
    completing,
)
from subprocesses import run_python

from diyfa.backends.cuda import sm90, sm90_multicast
from diyfa.backends.cuda.sm90 import Sm90Config, may_share
from diyfa.problem import VARLEN, AttentionProblem

needs_triton = pytest.mark.skipif(
    not sm90_multicast.IS_KNOWN, reason=f"the PTX is that of Triton 3.6, this is Triton {triton.__version__}"
)

# ---- text in, text out: PTX as Triton 3.6 writes it

NAME = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
COPY = f"@%p7 {NAME} [%r1], [%rd3, {{%r4, %r5, %r6, %r7}}], [%r8];\n"
COPY_TO_ALL = (
    f"{{ .reg .b16 all; mov.b16 all, 3; @%p7 {NAME}.multicast::cluster [%r1], [%rd3, {{%r4, %r5, %r6, %r7}}], [%r8], "
    "all; }\n"
)
ARRIVAL = "bar.sync \t2, 128;\n// begin inline asm\n@%p9 mbarrier.arrive.shared::cta.b64 _, [%r10], 4;\n"
BY_WARP = (
    "\n// begin inline asm\n{ .reg .pred one; elect.sync _|one, 0xffffffff; "
    "@one mbarrier.arrive.shared::cta.b64 _, [%r10]; }\n"
)
IN_CLUSTER = (
    "\n// begin inline asm\n{ .reg .pred one; .reg .b32 other, there; elect.sync _|one, 0xffffffff; "
    "mov.u32 other, %cluster_ctarank; xor.b32 other, other, 1; mapa.shared::cluster.u32 there, %r10, other; "
    "@one mbarrier.arrive.shared::cta.b64 _, [%r10]; @one mbarrier.arrive.shared::cluster.b64 _, [there]; }\n"
)
POLL = "{\n.reg .pred complete;\nwaitLoop:\nmbarrier.try_wait.parity.shared.b64 complete, [%r11], %r12;\n}\n"
BARRIER = "bar.sync \t0, 128;\n"
OF_WARP = "bar.warp.sync \t-1;\n@%p9 mbarrier.arrive.shared::cta.b64 _, [%r10], 32;\n"
BY_LANE = "bar.warp.sync \t-1;\nmbarrier.arrive.shared::cta.b64 _, [%r10];\n"
OTHER = "\tadd.s32 %r20, %r21, 1;\n"

COMPLETED = {
    "a copy": (f"{COPY_MARK}{OTHER}{COPY}{COPIED_MARK}{OTHER}", f"{OTHER}{COPY_TO_ALL}{OTHER}"),
    # A tile wider than its swizzle takes several instructions.
    "all copies between the marks": (
        f"{COPY_MARK}{COPY}{OTHER}{COPY}{COPIED_MARK}",
        f"{COPY_TO_ALL}{OTHER}{COPY_TO_ALL}",
    ),
    "no copy before or after": (f"{COPY}{COPY_MARK}{COPY}{COPIED_MARK}{COPY}", f"{COPY}{COPY_TO_ALL}{COPY}"),
    "a release": (f"{RELEASE_MARK}{OTHER}{ARRIVAL}{OTHER}", f"{OTHER}{BY_WARP}{OTHER}"),
    "a release in a cluster": (f"{CLUSTER_RELEASE_MARK}{OTHER}{ARRIVAL}{OTHER}", f"{OTHER}{IN_CLUSTER}{OTHER}"),
    "the release behind the mark only": (f"{ARRIVAL}{RELEASE_MARK}{ARRIVAL}{ARRIVAL}", f"{ARRIVAL}{BY_WARP}{ARRIVAL}"),
    "only the barrier in front of a release": (f"{RELEASE_MARK}{BARRIER}{ARRIVAL}", f"{BARRIER}{BY_WARP}"),
    "a wait": (f"{WAIT_MARK}{OTHER}{BARRIER}{OTHER}{POLL}", f"{OTHER}\n{OTHER}{POLL}"),
    "a wait without a barrier": (f"{WAIT_MARK}{OTHER}{POLL}{BARRIER}{POLL}", f"{OTHER}{POLL}{BARRIER}{POLL}"),
    "only the barrier in front of a wait": (f"{WAIT_MARK}{BARRIER}{BARRIER}{POLL}", f"{BARRIER}\n{POLL}"),
    "an arrival": (f"{ARRIVE_MARK}{OTHER}{OF_WARP}{OF_WARP}", f"{OTHER}{BY_LANE}{OF_WARP}"),
    "all of them": (
        f"{COPY_MARK}{COPY}{COPIED_MARK}{WAIT_MARK}{BARRIER}{POLL}{CLUSTER_RELEASE_MARK}{ARRIVAL}{WAIT_MARK}{POLL}",
        f"{COPY_TO_ALL}\n{POLL}{IN_CLUSTER}{POLL}",
    ),
    "nothing": (f"{COPY}{ARRIVAL}{BARRIER}{POLL}", f"{COPY}{ARRIVAL}{BARRIER}{POLL}"),
}


@pytest.mark.parametrize("name", COMPLETED)
def test_marks_are_completed(name: str) -> None:
    ptx, expected = COMPLETED[name]
    assert complete(ptx) == expected


@pytest.mark.parametrize(
    "ptx",
    [
        f"{COPY}{COPY_MARK}{OTHER}{COPIED_MARK}",
        f"{COPY_MARK}{COPIED_MARK}{COPY}",
        f"{COPY_MARK}{COPY}",
        f"{COPY_MARK}{COPY.replace('@%p7 ', '')}{COPIED_MARK}",
        f"{COPY_MARK}{COPY}{COPY_MARK}{COPY}{COPIED_MARK}",
        f"{ARRIVAL}{RELEASE_MARK}{OTHER}",
        f"{RELEASE_MARK}{ARRIVAL.replace('bar.sync', 'bar.warp.sync')}",
        f"{RELEASE_MARK}{ARRIVAL.replace('128', '256')}",
        f"{CLUSTER_RELEASE_MARK}{ARRIVAL.replace('], 4;', '];')}",
        f"{CLUSTER_RELEASE_MARK}{BARRIER}{POLL}{ARRIVAL.split(';', 1)[1]}",
        f"{CLUSTER_RELEASE_MARK}{CLUSTER_RELEASE_MARK}{ARRIVAL}",
        f"{POLL}{WAIT_MARK}{BARRIER}",
        f"{WAIT_MARK}{WAIT_MARK}{BARRIER}{POLL}",
        f"{OF_WARP}{ARRIVE_MARK}{OTHER}",
        f"{ARRIVE_MARK}{OF_WARP.replace('32;', '4;')}",
        f"{ARRIVE_MARK}{POLL}{OF_WARP}",
    ],
)
def test_a_mark_without_its_instruction_is_an_error(ptx: str) -> None:
    with pytest.raises(RuntimeError, match="this Triton writes other PTX"):
        complete(ptx)


def test_marks_change_with_this_file() -> None:
    """So that Triton does not take a kernel from its cache that was completed in another way."""
    marks = (COPY_MARK, COPIED_MARK, RELEASE_MARK, CLUSTER_RELEASE_MARK, WAIT_MARK, ARRIVE_MARK)
    assert all(mark.endswith(f"_{sm90_multicast._EDITION};") for mark in marks)
    assert not any(one in other for one in marks for other in marks if one != other)


# ---- the hook


def stages_of(ptx: str) -> tuple[str, dict]:
    """What a compilation with the hook makes of `ptx`, and its metadata."""
    stages, metadata = {"ptx": lambda source, metadata: ptx}, {"num_ctas": 1}
    with completing():
        triton.knobs.runtime.add_stages_inspection_hook(None, stages, None, None, 90)
    return stages["ptx"](None, metadata), metadata


@needs_triton
@pytest.mark.parametrize(
    ("name", "clusters"), [("nothing", 1), ("a wait", 1), ("a release", 1), ("a copy", 2), ("all of them", 2)]
)
def test_kernels_that_copy_to_a_cluster_are_launched_in_clusters(name: str, clusters: int) -> None:
    ptx, expected = COMPLETED[name]
    assert stages_of(ptx) == (expected, {"num_ctas": clusters})


@needs_triton
def test_the_hook_of_somebody_else_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *arguments: calls.append(arguments))
    ptx, expected = COMPLETED["all of them"]
    assert stages_of(ptx)[0] == expected
    assert [arguments[-1] for arguments in calls] == [90]


@needs_triton
def test_the_hook_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_somebody_else(*arguments: object) -> None:
        raise AssertionError("nothing is compiled here")

    runtime = triton.knobs.runtime
    for before in (None, of_somebody_else):
        monkeypatch.setattr(runtime, "add_stages_inspection_hook", before)
        with completing(), completing():
            assert runtime.add_stages_inspection_hook is not before
        assert runtime.add_stages_inspection_hook is before
        with pytest.raises(KeyError), completing():
            raise KeyError
        assert runtime.add_stages_inspection_hook is before


def test_nothing_is_hooked_in_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_multicast, "IS_KNOWN", False)
    monkeypatch.setattr(sm90_multicast, "_wrap_ptx_stage", None)
    before = getattr(getattr(triton, "knobs", None), "runtime", None)
    hook = getattr(before, "add_stages_inspection_hook", None)
    with completing():
        assert getattr(before, "add_stages_inspection_hook", None) is hook


# ---- compiled: by the real ptxas, in a process without Triton's interpreter

COMPILE = """
import json, re, sys
import aot_kernels, triton
from diyfa.backends.cuda import aot, attention_specs
from diyfa.backends.cuda.sm90 import Sm90Config
from diyfa.backends.cuda.sm90_multicast import completing

def compiled(spec):
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    return triton.compile(aot._source(spec), target=aot.target("sm_90"), options=options)

def counts(kernel):
    sass = kernel.asm["sass"]
    found = {name: len(re.findall(pattern, sass)) for name, pattern in PATTERNS.items()}
    return {**found, "num_ctas": kernel.metadata.num_ctas}

PATTERNS = {
    "copies to both": r"UTMALDG\\.4D\\.MULTICAST",
    "copies": r"UTMALDG\\.4D ",
    "remote arrivals": r"SYNCS\\.ARRIVE\\.TRANS64\\.RED\\.A1T0",
    "meetings": r"UCGABAR_WAIT",
}
problem = attention_specs._problem("sm_90", "bfloat16", 128, False).replace(seqlen_q=16384, seqlen_k=16384)
form = Sm90Config(2, 64, 2, True, 240, 24, cluster=2)
specs = {
    "one piece": attention_specs._hopper_spec(problem, form),
    "two pieces": attention_specs._hopper_spec(problem, Sm90Config(2, 64, 2, True, 240, 24, cluster=2, piece=64)),
    "by warp": attention_specs._hopper_spec(problem, Sm90Config(2, 64, 2, True, 240, 24, by_warp=True)),
}
report = {}
try:
    compiled(specs["one piece"])
except Exception as error:
    report["not completed"] = f"{type(error).__name__}: {error}"
(plain,) = [spec for spec in aot_kernels.compile_specs("sm_90") if spec.case == "plain"]
before = compiled(plain)
triton.knobs.compilation.always_compile = True
with completing():
    report |= {name: counts(compiled(spec)) for name, spec in specs.items()}
    inside = compiled(plain)
after = compiled(plain)
report["plain"] = [kernel.metadata.num_ctas for kernel in (before, inside, after)]
report["same"] = before.asm["ptx"] == inside.asm["ptx"] == after.asm["ptx"]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    cache = tmp_path_factory.mktemp("cache")
    out = run_python(COMPILE, Path(__file__).parent, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    return json.loads(out.splitlines()[-1])


@needs_triton
def test_ptxas_refuses_marks(report: dict) -> None:
    assert "PTXASError" in report["not completed"]


@needs_triton
@pytest.mark.parametrize("name", ["one piece", "two pieces"])
def test_machine_code_of_a_cluster(name: str, report: dict) -> None:
    """128 columns are two copies, as a tile of two swizzles or as two pieces. Those of K and V reach both programs."""
    found = report[name]
    assert found["num_ctas"] == 2
    assert found["copies to both"] == 2 * 2  # of K and V
    assert found["copies"] == 2 * 2  # of each consumer's queries
    assert found["remote arrivals"] == 2 * 4  # each consumer's: first K, K and V in the loop, last V
    assert found["meetings"] == 2 * 5  # of two consumers, the producer and two bystanders


@needs_triton
def test_machine_code_without_a_cluster(report: dict) -> None:
    found = report["by warp"]
    assert found["num_ctas"] == 1
    assert not found["copies to both"] and not found["remote arrivals"] and not found["meetings"]


@needs_triton
def test_other_kernels_are_left_alone(report: dict) -> None:
    assert report["same"] and report["plain"] == [1, 1, 1]


# ---- who gets one

FORM = Sm90Config(2, 128, 4, True, 240, 24, cluster=2)


@pytest.mark.parametrize(
    "changes", [{"consumers": 1}, {"deal": "dynamic"}, {"consumers": 1, "deal": "dynamic"}], ids=str
)
def test_what_a_cluster_cannot_have(changes: dict) -> None:
    assert replace(FORM, cluster=1, **changes).cluster == 1
    with pytest.raises(ValueError, match="two or three consumers and no dynamic deal"):
        replace(FORM, **changes)


@pytest.mark.parametrize("changes", [{"consumers": 3}, {"deal": "balanced"}, {"persistent": True}], ids=str)
def test_what_a_cluster_can_have(changes: dict) -> None:
    assert replace(FORM, **changes).cluster == 2


def problem(**changes) -> AttentionProblem:
    size = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 16384, "seqlen_k": 16384}
    plain = AttentionProblem("cuda", "sm_90", "bfloat16", "bhsd", *size.values(), head_dim=128, head_dim_v=128)
    return plain.replace(**changes)


SHARES = [
    ({}, FORM, True),
    ({"window_right": 0}, FORM, True),
    ({"heads_kv": 16, "head_dim": 64, "head_dim_v": 128}, FORM, True),
    ({"seqlen_k": 100}, FORM, True),
    # Sequences of different lengths, and what takes the producer's registers.
    ({"seq_lens": True}, FORM, False),
    ({"layout": VARLEN, "total_q": 65536, "total_k": 65536}, FORM, False),
    ({"window_left": 512, "window_right": 0}, FORM, False),
    ({"softcap": 30.0}, FORM, False),
    # One tile of 33 is lost, one of 31 would be too much.
    ({"seqlen_q": 32 * 128}, FORM, True),
    ({"seqlen_q": 32 * 128 + 1}, FORM, True),
    ({"seqlen_q": 31 * 128 + 1}, FORM, True),
    ({"seqlen_q": 31 * 128}, FORM, False),
    ({"seqlen_q": 128}, FORM, False),
    ({"seqlen_q": 129}, FORM, True),
    ({"seqlen_q": 2 * 192}, replace(FORM, consumers=3), True),
    ({"seqlen_q": 2 * 192 + 1}, replace(FORM, consumers=3), False),
    # Without a cluster nothing is shared.
    ({"seq_lens": True}, replace(FORM, cluster=1), True),
    ({"seqlen_q": 128}, replace(FORM, cluster=1), True),
]


@pytest.mark.parametrize(("changes", "form", "expected"), SHARES, ids=str)
def test_may_share(changes: dict, form: Sm90Config, expected: bool) -> None:
    assert may_share(problem(**changes), form) == expected


def test_rows_for_clusters_are_taken_by_those_that_may_share() -> None:
    """Each such row of the table: by long sequences, not by packed ones."""
    cases = {(case, most) for case, rows in sm90.CONFIGS.items() for most, row in rows if row.cluster > 1}
    assert cases
    for (columns, masked), most in cases:
        length = min(most, 16384)
        size = {"head_dim": columns, "head_dim_v": columns, "window_right": 0 if masked else -1}
        case = problem(**size, seqlen_q=length, seqlen_k=length)
        assert sm90.config_of(case).cluster == 2
        assert sm90.config_of(case.replace(layout=VARLEN, total_q=65536, total_k=65536)).cluster == 1
        assert sm90.config_of(case.replace(softcap=30.0)).cluster == 1
