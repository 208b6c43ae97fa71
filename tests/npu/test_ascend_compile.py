"""The compile gate: every shipped NPU kernel through both halves of the real Ascend compiler, for three chips.

Each chip is compiled once, in a process of its own without the interpreter. The 910B gets every kernel, tile and
feature; A3, whose modules and memories are a 910B's, gets each kernel once; the 950, whose compiler takes four times as
long, gets some cases of each. With DIYFA_FULL_GATE=1 all get every feature in every dtype and head-dim class.
DIYFA_ASCENDNPU_IR names older releases of the compiler, with which every kernel and tile must pass as well (`make`
sets it). With DIYFA_GATE_EVERY=3 they get each kernel and one in three of its cases, the newest one still gets every
tile: for changes of neither kernels nor tiles.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from subprocesses import SUPPORT, run_python

from diyfa.arch import ELEMENT_BYTES, NPUArch, npu_spec
from diyfa.backends.npu.tables import configs
from diyfa.lab.npu import aot, gate

FULL = os.environ.get("DIYFA_FULL_GATE") == "1"
A2, A3, A5 = "Ascend910B3", "Ascend910_9362", "Ascend950PR_9589"
EVERY_NTH = 1 if FULL else int(os.environ.get("DIYFA_GATE_EVERY", "1"))
EVERY = {
    A2: ("--every-tile", "--every", f"{EVERY_NTH}") if EVERY_NTH > 1 else (),
    A3: ("--every", "1000"),  # of an A3, whose modules are a 910B's, one of each kernel
    A5: ("--every", f"{4 * EVERY_NTH}"),
}
TIMEOUT_S = 1500
COMPILING = {"TRITON_INTERPRET": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # environment of a process that compiles
# Where every tile has to be compiled.
_needs_full = pytest.mark.skipif(not FULL, reason="every tile of A3 and 950 with DIYFA_FULL_GATE=1")
WHOLE_A3, WHOLE_A5 = (pytest.param(target, marks=_needs_full) for target in (A3, A5))
# Without matrix products: there is nothing to split between cube and vector cores, or to pipeline.
VECTOR_KERNELS = (
    "preprocess", "dsinks", "dbias_rows", "captured", "finish", "sum", "pack", "combine", "append", "attention_merge",
)  # fmt: skip
GATHERING = "score_fn[relative]"  # of cases whose score function gathers: on one vector core


def _missing() -> str:
    """Which of the two compilers is not installed, if any."""
    for package in ("triton-ascend", "ascendnpu-ir"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return package
    return "" if importlib.util.find_spec("ascendnpuir") else "ascendnpuir"


needs_compilers = pytest.mark.skipif(bool(_missing()), reason=f"{_missing()} is not installed: see docs/npu-design.md")


def _compile(target: str, *options: str, limit_s: int = TIMEOUT_S) -> list[dict[str, Any]]:
    if not options:
        options = ("--full",) if FULL else EVERY.get(target, ())
    command = [sys.executable, "-m", "diyfa.lab.npu.aot", target, *options]
    environment = {**os.environ, **COMPILING}
    if len(releases(target)) == 1 and "--conservative" not in options:
        environment.pop("DIYFA_ASCENDNPU_IR", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def reports(target: str) -> list[dict[str, Any]]:
    """What the compiler said about every shipped kernel for `target`; all processes of one test run share it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _compile(target)
    folder = Path(tempfile.gettempdir()) / f"diyfa-gate-{run}"
    folder.mkdir(exist_ok=True)
    found = folder / f"{target}.json"
    with open(folder / f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(_compile(target)))
    return json.loads(found.read_text())


def _describe(report: dict[str, Any]) -> str:
    return f"{report['compiler']} {report['kernel']} {report['case']}: {'; '.join(report['notes'][:2])}"


def releases(target: str) -> list[str]:
    """Versions of the compiler that the gate runs. An A3's modules are a 910B's (the test below), and its memories too:
    the older releases need not see them twice."""
    found = [compiler.version for compiler in aot.back_halves(target)]
    return found[:1] if target == A3 and not FULL else found


@needs_compilers
def test_the_front_half_does_not_tell_a2_from_a3() -> None:
    code = (
        "from diyfa.lab.npu import aot, specs\n"
        f"jobs = [[*specs.attention_jobs(chip, specs.MODE_CASES['crowded']),\n"
        f"         *specs.v1_problem_jobs(specs.example(chip)),\n"
        f"         *specs.matmul_jobs(chip)] for chip in ({A2!r}, {A3!r})]\n"
        f"modules = [[aot.to_linalg(job, chip) for job in each] for each, chip in zip(jobs, ({A2!r}, {A3!r}))]\n"
        "print(len(modules[0]), modules[0] == modules[1])\n"
    )
    assert run_python(code, **COMPILING).split() == ["31", "True"]
    assert npu_spec(A2)._replace(arch=NPUArch.A3) == npu_spec(A3)


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A5, A2, A3])
def test_every_shipped_kernel_passes_the_gate(target: str) -> None:
    found = reports(target)
    assert {r["target"] for r in found} == {target}
    compiled = {
        version: [(r["kernel"], r["case"]) for r in found if r["compiler"] == f"ascendnpu-ir {version}"]
        for version in releases(target)
    }
    newest, *older = compiled.values()
    assert all(set(each) <= set(newest) for each in older)
    failed = [_describe(r) for r in found if not r["ok"]]
    assert not failed, "\n".join(failed)
    kernels = [{kernel for kernel, _ in each} for each in compiled.values()]
    forward, backward, cache = (f"{name}/" for name in ("attention_fwd", "attention_bwd/v2", "kvcache_fwd"))
    assert kernels == len(compiled) * [{
        *(forward + name for name in ("v2", "v1", "v1/finish", "tutorial")),
        *(backward + name for name in (
            "dkdv", "dq", "preprocess", "dbias", "dbias_rows", "dsinks", "score_gradient", "captured",
        )),
        *(cache + name for name in ("split_kv", "split_kv/pack", "split_kv/combine")),
        "kvcache_append/append", "attention_merge", "matmul/persistent",
    }]  # fmt: skip


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
def test_every_conservative_tile_compiles_with_the_oldest_compiler() -> None:
    """What calls fall back to on a machine whose compiler refuses the table's tile; an A3's modules are an A2's."""
    found = _compile(A2, "--conservative", "--every", f"{EVERY_NTH}")
    (oldest,) = {r["compiler"] for r in found}
    cases = [(r["kernel"], r["case"]) for r in found]
    modes = sum(len(configs.modes(kernel)) - (kernel == "dkdv") for kernel in ("fwd", "dq", "dkdv", "dbias"))
    cached = [kernel for kernel, _ in cases if kernel.startswith("kvcache_fwd")]
    masked = [case for _, case in cases if " mask" in case or " score_fn" in case]
    each = 2 * len(configs.HEAD_DIM_CLASSES)
    if EVERY_NTH == 1:  # a partial last tile of keys is no mode of dkdv
        assert masked and len(cases) - len(cached) - len(masked) == each * modes
        assert cached.count("kvcache_fwd/split_kv") == 2 * each
    known = tuple(gate.NOT_CONSERVATIVE)
    failed = [r for r in found if not r["ok"]]
    unknown = [_describe(r) for r in failed if not f"{r['kernel']} {r['case']}".startswith(known)]
    assert not unknown, "\n".join(unknown)
    if oldest.endswith(" 1.0.0") and EVERY_NTH == 1:
        assert all(any(f"{r['kernel']} {r['case']}".startswith(k) for r in failed) for k in known), "remove it"


@needs_compilers
@pytest.mark.timeout(7200)
def test_conservative_tiles_of_the_950_compile() -> None:
    """One of them; all take half an hour."""
    chosen = () if FULL else ("--only", "attention_fwd/v2 float16 D=128 causal")
    found = _compile(A5, "--conservative", *chosen, limit_s=7200)
    assert found and all(r["ok"] for r in found), [_describe(r) for r in found if not r["ok"]]


SAMPLE = (
    "attention_fwd/v2 float16 D=128 causal 64x256", "attention_bwd/v2/dq float16 D=128 causal 128x128",
    "attention_bwd/v2/dkdv float16 D=128 causal 64x64", "kvcache_fwd/split_kv float16 D=128 page=128 Sq=1 16x128",
    "matmul/persistent float16->float16 nn 128x256x256", "attention_merge float32 D=80",
)  # fmt: skip


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
def test_a_sample_passes_with_all_blocks_parallel() -> None:
    """As TRITON_ALL_BLOCKS_PARALLEL=1 compiles it; the compiler adds a loop over the blocks of the grid."""
    code = (
        "import json; from dataclasses import asdict, replace; from diyfa.lab.npu import aot\n"
        f"jobs = [job for job in aot.jobs_for({A2!r}) if f'{{job.kernel}} {{job.case}}' in {SAMPLE!r}]\n"
        "jobs = [replace(job, options={**job.options, aot.ALL_BLOCKS_PARALLEL: True}) for job in jobs]\n"
        f"print(json.dumps([asdict(report) for report in aot.compile_jobs(jobs, {A2!r})]))\n"
    )
    found = json.loads(run_python(code, **COMPILING))
    assert {f"{r['kernel']} {r['case']}" for r in found} == {*SAMPLE}
    assert {r["compiler"] for r in found} == {f"ascendnpu-ir {version}" for version in releases(A2)}
    assert [_describe(r) for r in found if not r["ok"]] == []


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A2, WHOLE_A3])
def test_decoding_is_bound_and_pipelined(target: str) -> None:
    """With keys in one piece and in pages of each size, without the table of exceptions."""
    found = [r for r in reports(target) if r["kernel"] == "kvcache_fwd/split_kv"]
    newest, *older = releases(target)[: 1 if EVERY_NTH > 1 else None]
    asked = [(newest, 128), *((newest, 64),) * (target == A2), *((version, 128) for version in older)]
    for version, head_dim in asked:
        for keys in ("contiguous", *(f"page={size}" for size in (16, 32, 64, 128, 256))):
            case = f"float16 D={head_dim} {keys} Sq=1 "
            (one,) = [
                r
                for r in found
                if r["case"].startswith(case) and r["case"].count(" ") == 4 and version in r["compiler"]
            ]
            assert "bound, pipeline 4" in one["notes"], _describe(one)


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
def test_every_tile_over_a_cache_is_compiled() -> None:
    """With each release; with keys in pages bound and four deep. Gathered keys are bound with the older one only."""
    found = {(r["compiler"].split()[1], r["case"]): r for r in reports(A2) if r["kernel"] == "kvcache_fwd/split_kv"}
    features = "Sq=16 window softcap alibi sinks leftpad"
    for (width, head_dim), (whole, gathered) in configs.DECODE_SHAPES.items():
        dtype = {2: "float16", 4: "float32"}[width]
        for version in releases(A2)[: 1 if EVERY_NTH > 1 else None]:
            paged = found[version, f"{dtype} D={head_dim} page=128 {features} {whole[0]}x{whole[1]}"]
            assert paged["ok"] and "bound, pipeline 4" in paged["notes"], _describe(paged)
            case = f"{dtype} D={head_dim} page=1 {features} batch_invariant {gathered[0]}x{gathered[1]}"
            alone = found[version, case]
            assert alone["ok"] and ("bound, pipeline 4" in alone["notes"]) == version.startswith("1.1."), _describe(
                alone
            )


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A2, WHOLE_A3])
def test_forward_is_bound_and_pipelined(target: str) -> None:
    """Said once more without the table of exceptions: both vector cores, four workspace buffers."""
    found = [r for r in reports(target) if r["kernel"] == "attention_fwd/v2"]
    dtypes = ("float16", "float32") if target == A3 else ELEMENT_BYTES
    for dtype, head_dim in itertools.product((*dtypes, "int8"), configs.HEAD_DIM_CLASSES):
        assert any(r["case"].startswith(f"{dtype} D={head_dim} ") for r in found), (dtype, head_dim)
    assert {r["compiler"] for r in found} == {f"ascendnpu-ir {version}" for version in releases(target)}
    for report in found:
        if GATHERING not in report["case"]:
            assert "bound, pipeline 4" in report["notes"], _describe(report)


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A2, WHOLE_A3, WHOLE_A5])
def test_every_tile_of_the_table_is_compiled(target: str) -> None:
    """Every kernel with every tile that a call can get. int8 q and k have the forward tiles of 16 bits."""
    specs = {chip: npu_spec(chip) for chip in (A2, A3, A5)}
    mixed = [r for r in reports(target) if r["kernel"].split("/")[-1] in ("v2", "dq", "dkdv", "dbias")]
    compiled = {(r["kernel"].split("/")[-1], *_tile_class(r["case"])) for r in mixed}
    for key in configs.ATTENTION_TILES:
        if key.cores:  # a row for chips with so many cores: one of them has to be compiled for
            assert any(spec and (spec.arch, spec.cube_cores) == (key.family, key.cores) for spec in specs.values()), key
        elif (key.family is NPUArch.A5) == (target == A5):
            tile = configs.ATTENTION_TILES[configs._chip_key(key, specs[target])]
            kernel = "v2" if key.kernel == "fwd" else key.kernel
            head_dim = configs.widest_head_dim(key)
            for width in (2, 1) if (kernel, key.width) == ("v2", 2) else (key.width,):
                assert (kernel, width, head_dim, f"{tile.block_m}x{tile.block_n}") in compiled, (key, width)


def _tile_class(case: str) -> tuple[int, int, str]:
    """(operand bytes, head dim, tile) of a report's case."""
    dtype, head_dim, *_, tile = case.split()
    return ELEMENT_BYTES.get(dtype, 1), int(head_dim.removeprefix("D=")), tile


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A2, WHOLE_A5])
def test_every_exception_is_needed(target: str) -> None:
    """Each stands for some kernel that is compiled; that it is no better than its exception, the gate says itself.
    A sample may hold none of an older release's."""
    used = {gate.exception_for(target, r["kernel"], r["case"], r["compiler"].split()[1]) for r in reports(target)}
    spec = npu_spec(target)
    assert spec is not None
    known = {
        e
        for e in gate.EXCEPTIONS
        if spec.arch in e.families and any(version.startswith(e.compiler) for version in releases(target))
    }
    assert known >= used - {None} >= {e for e in known if EVERY_NTH == 1 or not e.compiler}


def test_the_exceptions_may_only_shrink() -> None:
    """More than these are a step back: change the kernel or its tile instead, and lower the number when one goes."""
    assert len([e for e in gate.EXCEPTIONS if not e.compiler]) <= 3
    assert len([e for e in gate.EXCEPTIONS if e.compiler]) <= 2
    assert all(len(e.reason) > 20 for e in gate.EXCEPTIONS)


def test_what_the_gate_says_without_multibuffering() -> None:
    """Nothing is pipelined then, and every exception that allows less than bound still does."""
    for target, kernel, case, compiler in (
        (A2, "attention_fwd/v2", "float16 D=64 causal 128x128", "1.2.0"),
        (A2, "attention_fwd/v1", "float16 D=64 64x128", "1.1.0"),
    ):
        assert not gate.failures(target, kernel, case, True, 0, compiler, multibuffer=False)
        unbound = gate.failures(target, kernel, case, False, 0, compiler, multibuffer=False)
        assert unbound == ["gate: not split over both vector cores"]
    for target, kernel in ((A5, "attention_fwd/v2"), (A2, "matmul/persistent")):
        assert not gate.failures(target, kernel, "float16->float16 nn", False, 0, "1.2.0", multibuffer=False)


def test_what_the_gate_says() -> None:
    dkdv = "attention_bwd/v2/dkdv"
    for target in (A2, A3):
        assert not gate.failures(target, dkdv, "float16 D=64 causal 128x128", True, 4, "1.2.0")
        assert gate.failures(target, dkdv, "float16 D=64 causal 128x128", False, 4, "1.2.0") == [
            "gate: not split over both vector cores"
        ]
        assert gate.failures(target, dkdv, "float16 D=64 causal 128x128", True, 2, "1.2.0") == [
            "gate: pipeline depth 2, expected 4"
        ]
        assert not gate.failures(target, dkdv, "float32 D=512 causal 16x16", True, 2, "1.2.0")
        assert "worse" in gate.failures(target, dkdv, "float32 D=512 causal 16x16", False, 2, "1.2.0")[0]
        assert "has to go" in gate.failures(target, dkdv, "float32 D=512 causal 16x16", True, 4, "1.2.0")[0]
    assert not gate.failures(A5, dkdv, "float16 D=64 causal 128x128", False, 0, "1.2.0")
    assert "has to go" in gate.failures(A5, dkdv, "float16 D=64 causal 128x128", True, 0, "1.2.0")[0]
    v1 = "attention_fwd/v1"
    assert gate.failures(A2, v1, "float16 D=64 causal 128x128", True, 0, "1.2.0")
    assert not gate.failures(A2, v1, "float16 D=64 causal 128x128", True, 0, "1.1.0")
    assert "has to go" in gate.failures(A2, v1, "float16 D=64 causal 128x128", True, 4, "1.1.0")[0]


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("target", [A2, A5])
def test_memory_peaks_are_inside_the_chip(target: str) -> None:
    spec = npu_spec(target)
    assert spec is not None
    for report in reports(target):
        multiplies = report["kernel"].split("/")[-1] not in VECTOR_KERNELS
        assert (report["memory"].get("l0c", 0) > 0) == multiplies, _describe(report)
        if target == A2:  # a product that does not fit in slices fails the gate; here: that they were looked at
            assert {"l0a", "l0b", "l0c"} & report["memory"].keys() in ({"l0a", "l0b", "l0c"}, set()), _describe(report)
        for memory, used in report["memory"].items():
            assert 0 < used <= getattr(spec, memory), f"{memory} {used}: {_describe(report)}"


@needs_compilers
def test_the_library_is_the_one_that_was_read() -> None:
    """How products are cut (l0.py) was read from this file. When it changes, that has to be read again."""
    spec = importlib.util.find_spec("ascendnpuir")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "meta_op.aic.c220.bc"
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    assert digest == "120a5e2d695ec6134ae866b982489bec30a4211e46cbe861d5daa8cfd2c507e2"


@needs_compilers
@pytest.mark.timeout(TIMEOUT_S)
def test_head_dims_are_native_in_multiples_of_16() -> None:
    """L0C holds two tiles of scores and both accumulators, with as many columns as the head dims have."""
    seen = set()
    for report in reports(A2):
        if report["kernel"] != "attention_bwd/v2/dkdv":
            continue
        dtype, head_dim, *features, tile = report["case"].split()
        columns = {"D=80": 80 + 80, "D=96": 96 + 96, "D=160": 160 + 160, "D=192": 192 + 128}.get(head_dim)
        if dtype != "float16" or not columns:
            continue
        if ("head_dim_v" in features) == (head_dim == "D=192"):
            keys = int(tile.split("x")[1])
            assert report["memory"]["l0c"] == 4 * (2 * keys * keys + keys * columns), _describe(report)
            seen.add(head_dim)
    assert len(seen) == 4


@needs_compilers
@pytest.mark.timeout(300)
def test_a_sample_without_multibuffering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels; the log has the whole gate. One of them has another tile then."""
    monkeypatch.setenv("DIYFA_NPU_MULTIBUFFER", "0")
    for case in (
        "attention_fwd/v2 float16 D=256 alibi attn_bias[qk] dropout seq_lens",
        "attention_bwd/v2/dq float16 D=64 causal 1",
        "kvcache_fwd/split_kv float16 D=128 page=128 Sq=1 ",
    ):
        found = _compile(A2, "--only", case)
        assert found and all(r["ok"] and "bound, pipeline 0" in r["notes"] for r in found), found
        assert "dropout" not in case or all(r["case"].endswith(" 32x128") for r in found)


@needs_compilers
def test_the_gate_catches_an_unbound_kernel() -> None:
    """dq without a mask and without tile_mix_vector_loop stays on one vector core: the gate must say so."""
    code = (
        "from dataclasses import replace\n"
        "from diyfa.lab.npu import aot, specs\nfrom diyfa.backends.npu.tables import configs\n"
        f"problem = specs.example({A2!r})\n"
        "tile = replace(configs.attention_tile(problem, 'dq'), vector_loop=None)\n"
        f"report = next(aot.compile_jobs([specs.attention_job(problem, 'dq', tile)], {A2!r}))\n"
        "print(report.ok, report.notes[0])\n"
        "tile = replace(tile, block_m=512, block_n=512)\n"
        f"report = next(aot.compile_jobs([specs.attention_job(problem, 'fwd', tile)], {A2!r}))\n"
        "print(report.ok, 'overflow' in report.notes[0])\n"
    )
    lines = run_python(code, **COMPILING).splitlines()
    assert lines == ["False gate: not split over both vector cores", "False True"]


def test_a_missing_compiler_is_named() -> None:
    """Asked to compile without the compilers, or in the interpreter, the backend says what to do."""
    code = (
        "from diyfa.lab.npu import aot\n"
        "try:\n    next(aot.compile_jobs(aot.jobs_for('Ascend910B3'), 'Ascend910B3'))\n"
        "except aot.CompilerMissing as error:\n    print(error)\n"
        "try:\n    aot.jobs_for('Ascend310P3')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    expected = "unset it to compile" if _missing() != "triton-ascend" else "install triton-ascend"
    lines = run_python(code, TRITON_INTERPRET="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert len(lines) == 2
    assert expected in lines[0]
    assert "unknown Ascend chip 'Ascend310P3'" in lines[1]


def test_every_row_of_the_table_is_whole() -> None:
    """Each family, kernel, width and head-dim class has a tile for each mode, of sizes the cube unit takes."""
    keys = set(configs.ATTENTION_TILES)
    classes = 2 * 2 * len(configs.HEAD_DIM_CLASSES)
    modes = sum(len(configs.modes(kernel)) for kernel in ("fwd", "dq", "dkdv", "dbias"))
    assert len(keys) == classes * (modes - 1)  # a "tail" of dkdv runs as "even"
    for key, tile in configs.ATTENTION_TILES.items():
        assert tile.block_m % 16 == 0 and tile.block_n % 16 == 0, key
        assert tile.measured, key


@needs_compilers
@pytest.mark.timeout(300)
def test_each_pass_over_the_queries_ends_with_a_wait() -> None:
    """What one pass writes to memory the next one reads: both kinds of core drain their pipes in between."""
    code = (
        "from diyfa.lab.npu import aot, specs\n"
        f"example = specs.example({A2!r}, window_right=0)\n"
        f"print(aot.compiled_hivm(specs.v1_problem_jobs(example)[0], {A2!r}))\n"
    )
    cube, vector = run_python(code, **COMPILING).split("func.func @_fwd_v1_kernel_mix_aiv")
    for core in (cube, vector):  # by indentation: inside the loops over heads and keys, after the loop over queries
        barriers = [line for line in core.splitlines() if "pipe_barrier[<PIPE_ALL>]" in line]
        assert [len(line) - len(line.lstrip()) for line in barriers] == [8, 4], core[-3000:]


@needs_compilers
@pytest.mark.timeout(300)
def test_dropout_stays_on_the_vector_unit() -> None:
    """The mask in both orientations: integer vector operations, and no loop over single elements."""
    code = (
        "import dropout_kernels\n"
        "from diyfa.lab.npu import aot\n"
        "for job in dropout_kernels.npu_jobs():\n"
        f"    hivm = aot.compiled_hivm(job, {A2!r})\n"
        "    print(hivm.count('call @vmul_1d_int32_t'), hivm.count('call @vcmp_ge_1d_float'),\n"
        "          hivm.count('memref.store '), hivm.count('memref.load '))\n"
    )
    # One product and one comparison for the whole tile; the two scalars read are seed and offset.
    assert run_python(code, SUPPORT, **COMPILING).splitlines() == ["1 1 0 2", "1 1 0 2"]
