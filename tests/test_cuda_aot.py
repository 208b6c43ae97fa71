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

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia", reason="this Triton has no NVIDIA backend")

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COMPILE = """
import json, sys
from dataclasses import asdict
import aot_kernels
from diyfa.backends.cuda import aot
if __name__ == "__main__":
    arch, source, only, jobs = sys.argv[1:]
    reports = aot.compile_all(arch, [getattr(aot_kernels, source)], only or None, int(jobs))
    print(json.dumps([asdict(r) for r in reports]))
"""


def run_python(*arguments, interpret=False, cache, timeout=280):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment["TRITON_CACHE_DIR"] = str(cache)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def compile_toys(cache, arch, source="compile_specs", only="", jobs=1, interpret=False):
    script = cache / "compile_toys.py"  # a file: worker processes import the main module again
    script.write_text(COMPILE)
    done = run_python(str(script), arch, source, only, str(jobs), cache=cache, interpret=interpret)
    assert done.returncode == 0, done.stderr
    return {f"{r['kernel']} {r['case']}": r for r in json.loads(done.stdout)}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles(tmp_path, arch):
    (report,) = compile_toys(tmp_path, arch, only="plain").values()
    assert report["ok"], report["notes"]
    assert report["target"] == arch
    assert report["registers"] > 16
    assert report["spill_bytes"] == 0
    assert report["memory"]["shared"] >= 2 * 32 * 32 * 2  # one tile of each operand at least


def test_gate_fails_what_spills_and_what_does_not_compile(tmp_path):
    reports = compile_toys(tmp_path, "sm_80", jobs=2)
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


def test_interpreter_is_refused(tmp_path):
    script = tmp_path / "compile_toys.py"
    script.write_text(COMPILE)
    done = run_python(str(script), "sm_80", "compile_specs", "", "1", cache=tmp_path, interpret=True)
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1; unset it" in done.stderr


def test_spec_that_misses_an_argument_is_refused(tmp_path):
    script = tmp_path / "compile_toys.py"
    script.write_text(COMPILE)
    done = run_python(str(script), "sm_80", "incomplete_specs", "", "1", cache=tmp_path)
    assert done.returncode != 0
    assert "['REPEAT', 'b_ptr']" in done.stderr


def test_gate_on_serialised_wgmma_and_shared_memory():
    from diyfa.arch import gpu_spec
    from diyfa.backends.cuda import aot

    spec = aot.CompileSpec("k", "c", None, {}, {}, 4, 2)
    clean = (
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    serialised = clean + (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'k'\n"
    )

    def verdict(arch, log, shared=1024):
        return aot.judge(arch, gpu_spec(arch), spec, log, shared, 0.1)

    assert verdict("sm_90", clean).ok
    assert verdict("sm_90", clean).registers == 168
    assert not verdict("sm_90", serialised).ok
    assert "C7510" in verdict("sm_90", serialised).notes[0]
    assert verdict("sm_80", serialised).ok
    assert verdict("sm_90", clean, shared=227 * 1024).ok
    assert not verdict("sm_90", clean, shared=227 * 1024 + 1).ok
    assert not verdict("sm_80", "").ok, "without ptxas's log nothing is known"


def test_unknown_architecture():
    from diyfa.backends.cuda import aot

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
    """A covering few; the whole set is what the module's command line compiles."""
    done = run_python("-m", "diyfa.backends.cuda.aot", arch, "--only", only, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert f"matmul/{only.split()[0]}" in done.stdout


def test_command_line_fails_when_nothing_matches(tmp_path):
    done = run_python("-m", "diyfa.backends.cuda.aot", "sm_80", "--only", "no such kernel", cache=tmp_path)
    assert done.returncode == 1
    assert "0 kernels compiled" in done.stdout


HOPPER_KERNELS = """
import json, sys
from diyfa.backends.cuda import sm90
from diyfa.backends.cuda.attention_specs import compile_specs
kernels = {arch: {spec.kernel for spec in compile_specs(arch)} for arch in sys.argv[1:]}
assert all("attention_fwd/v2" in found for found in kernels.values())
print(json.dumps([sm90.environment_refusal(), [a for a in kernels if "attention_fwd/sm90" in kernels[a]]]))
"""


def test_the_hopper_kernel_is_compiled_for_hopper_only(tmp_path):
    """For any other architecture LLVM ends the process at its instructions."""
    done = run_python("-c", HOPPER_KERNELS, *ARCHS, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    refusal, archs = json.loads(done.stdout)
    assert archs == ([] if refusal else ["sm_90"])


# Of the machine code's backward branches, those around products are the consumers' loops over keys, masked or not, and
# the loop over tiles around them, which is longer. An address behind a branch is where it goes.
LOOPS = """
import json, re, subprocess, sys, tempfile
import triton
from diyfa.backends.cuda import aot, attention_specs, sm90
from diyfa.backends.cuda.sm90_multicast import completing
head_dim, causal = int(sys.argv[1]), sys.argv[2] == "causal"
problem = attention_specs._problem("sm_90", "bfloat16", head_dim, causal).replace(seqlen_q=4096, seqlen_k=4096, batch=4)
spec = attention_specs._hopper_spec(problem, sm90.config_of(problem))
options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
with completing():
    compiled = triton.compile(aot._source(spec), target=aot.target("sm_90"), options=options)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    text = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True)
code = [(int(address, 16), line) for address, line in re.findall(r"/\\*([0-9a-f]{4,5})\\*/\\s+(.*?);", text)]
number = {address: i for i, (address, _) in enumerate(code)}
loops = []
for i, (address, line) in enumerate(code):
    to = re.search(r"BRA.* 0x([0-9a-f]+)", line)
    if to and int(to[1], 16) < address:
        body = [line for _, line in code[number[int(to[1], 16)] : i + 1]]
        if any("HGMMA" in line for line in body):
            loops.append((len(body), sum("LDL" in line or "STL" in line for line in body)))
print(json.dumps(sorted(loops)))
"""


@pytest.mark.parametrize(("head_dim", "mask"), [(64, "full"), (128, "causal")])
def test_loops_over_keys_do_not_spill(tmp_path, head_dim, mask):
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6."):
        pytest.skip("the Hopper kernel is written in the Gluon of Triton 3.6")
    done = run_python("-c", LOOPS, str(head_dim), mask, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    loops = json.loads(done.stdout)
    # Each consumer has one, and with a mask another.
    inner = loops[: {64: 3, 128: 4}[head_dim]]
    assert all(200 < length < 900 for length, _ in inner), loops
    assert all(spills == 0 for _, spills in inner), loops
