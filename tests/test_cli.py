"""The commands, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import diyfa
from diyfa.cli import demo_train
from diyfa.cli.app import app
from diyfa.problem import CompileReport
from diyfa.reference import reference_attention
from diyfa.registry import load_backend

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, list(arguments), env={"COLUMNS": "160"})


def invoke_json(*arguments):
    result = invoke(*arguments, "--json")
    assert result.stdout.startswith("{"), result.output
    return result.exit_code, json.loads(result.stdout)


def test_version_and_help():
    assert invoke("--version").output.strip() == diyfa.__version__
    output = invoke("--help").output
    for command in ("info", "demo", "validate", "bench", "report", "compile"):
        assert command in output


def test_python_dash_m():
    result = subprocess.run([sys.executable, "-m", "diyfa", "--version"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == diyfa.__version__


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_its_libraries_it_says_what_to_install(monkeypatch, absent):
    import diyfa.cli

    real = diyfa.cli.importlib.util.find_spec
    monkeypatch.setattr(diyfa.cli.importlib.util, "find_spec", lambda name: None if name == absent else real(name))
    with pytest.raises(SystemExit, match=rf"needs {absent}: pip install 'diyfa\[cli\]'"):
        diyfa.cli.main()


# --- info -------------------------------------------------------------------------------------------------------------


def test_info_json():
    code, document = invoke_json("info")
    assert code == 0
    assert document["versions"]["torch"] == torch.__version__
    backends = {b["name"]: b for b in document["backends"]}
    assert set(backends) >= {"cpu", "cuda", "npu"}
    assert backends["cpu"]["loads"]
    assert backends["cpu"]["usable_here"]
    listed = {(k["op"], k["name"]) for k in backends["cpu"]["kernels"]}
    assert listed == {(k.op, k.name) for k in load_backend("cpu").kernels}
    for requirement in document["requirements"]:
        assert requirement["how"]
    assert any(
        r["what"] == "an NVIDIA GPU" and r["present"] == torch.cuda.is_available() for r in document["requirements"]
    )


def test_info_lists_refusals_with_the_backends_own_reason():
    from diyfa.cli.info import FEATURES, _typical

    _, document = invoke_json("info")
    cpu = load_backend("cpu")
    refusals = {
        (r["op"], r["feature"]): r["reason"] for b in document["backends"] if b["name"] == "cpu" for r in b["refusals"]
    }
    for feature, changes in FEATURES.items():
        problem = _typical(cpu, "cpu", "attention_fwd", **changes)
        kernels = [k for k in cpu.kernels if k.op == "attention_fwd"]
        refused = bool(cpu.unsupported(problem)) or all(k.unsupported(problem) for k in kernels)
        assert (("attention_fwd", feature) in refusals) == refused


def test_info_text():
    output = invoke("info").output
    assert "what enables what" in output
    assert "pip install 'diyfa[npu]'" in output.replace("\n", " ") or "torch_npu" in output


def test_info_survives_a_torch_npu_without_cann(tmp_path):
    """`import torch` itself fails there, because PyTorch loads torch_npu by itself; the command must not."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("def _autoload():\n    pass\nraise ImportError('libhccl.so: cannot open')\n")
    metadata = tmp_path / "torch_npu-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    env = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120)

    assert run("-c", "import torch").returncode != 0, "the state this test is about"
    result = run("-m", "diyfa", "info", "--json")
    assert result.returncode == 0, result.stderr
    npu = json.loads(result.stdout)["npu"]
    assert npu["installed"]
    assert not npu["available"]
    assert npu["version"] == "9.9"
    assert "libhccl.so" in npu["problem"]
    assert "set_env.sh" in npu["remedy"]


# --- demo -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    preset = demo_train.Preset(demo_train.GPTConfig(1, 2, 16, 32), 4, 20, 1e-2, 1e-4, 1e-3)
    monkeypatch.setitem(demo_train.PRESETS, "cpu", preset)
    return preset


def test_demo_json(tiny):
    code, document = invoke_json("demo", "--backend", "cpu", "--length", "20", "--prompt", "import ")
    assert code == 0, document
    assert document["agree"]
    assert document["max_relative_difference"] <= document["bound"]
    assert len(document["loss"]["diyfa"]) == len(document["loss"]["sdpa"]) == tiny.steps
    assert document["loss"]["diyfa"][0] == pytest.approx(5.55, abs=0.2)  # ln 256: nothing learnt yet
    assert document["loss"]["diyfa"][-1] < document["loss"]["diyfa"][0]
    assert document["text"].startswith("import ")
    assert len(document["text"].encode(errors="replace")) >= 27


def test_demo_text_and_plot(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.png"
    result = invoke("demo", "--backend", "cpu", "--steps", "4", "--length", "10", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "The two curves agree" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_when_the_curves_differ(tiny, monkeypatch):
    """An attention that forgets the softmax scale must not pass for PyTorch's."""

    def wrong(q, k, v, causal, backend):
        return reference_attention(q, k, v, causal=causal, sm_scale=1.0)

    real = demo_train.compare
    monkeypatch.setattr("diyfa.cli.demo.compare", lambda *arguments: real(*arguments, attention=wrong))
    code, document = invoke_json("demo", "--backend", "cpu", "--length", "0")
    assert code == 1
    assert not document["agree"]


def test_demo_fails_when_a_loss_is_not_a_number(tiny, monkeypatch):
    real = demo_train.compare

    def wrong(q, k, v, causal, backend):
        return v * float("nan")

    monkeypatch.setattr("diyfa.cli.demo.compare", lambda *arguments: real(*arguments, attention=wrong))
    code, document = invoke_json("demo", "--backend", "cpu", "--length", "0")
    assert code == 1
    assert document["max_relative_difference"] is None


def test_demo_is_reproducible(tiny):
    first = invoke_json("demo", "--backend", "cpu", "--length", "8", "--seed", "3")[1]
    second = invoke_json("demo", "--backend", "cpu", "--length", "8", "--seed", "3")[1]
    assert first["loss"]["sdpa"] == pytest.approx(second["loss"]["sdpa"], rel=1e-5)
    assert first["seed"] == 3


def test_unknown_backend():
    for command in ("demo", "validate", "bench"):
        result = invoke(command, "--backend", "tpu")
        assert result.exit_code == 2
        assert "there is no 'tpu'" in result.output


# --- validate, bench --------------------------------------------------------------------------------------------------


def test_validate(monkeypatch):
    from diyfa.cli import validate

    monkeypatch.setattr(validate, "CASES", validate.CASES[:2])
    code, document = invoke_json("validate", "--backend", "cpu")
    assert code == 0, document
    assert [c["status"] for c in document["cases"]] == ["pass"] * (2 + len(validate.MATMULS))
    assert all(0 < c["share"] <= 1 for c in document["cases"])


def test_validate_fails_on_a_wrong_result(monkeypatch):
    from diyfa.cli import validate

    monkeypatch.setattr(validate, "CASES", validate.CASES[:1])
    real = validate.run_case
    monkeypatch.setattr(validate, "run_case", lambda *a: (r := real(*a))._replace(dq=r.dq * 1.01))
    code, document = invoke_json("validate", "--backend", "cpu")
    assert code == 1
    assert (document["cases"][0]["status"], document["cases"][0]["result"]) == ("FAIL", "dq")


def test_bench_writes_json(tmp_path):
    path = tmp_path / "new" / "bench.json"
    arguments = ("bench", "--backend", "cpu", "--seq-len", "32", "--seq-len", "48", "--size", "64", "--head-dim", "16")
    code, document = invoke_json(*arguments, "--rep", "1", "--warmup", "0", "--causal", "--output", str(path))
    assert code == 0
    rows = document["rows"]
    assert {(r["op"], r["name"]) for r in rows} >= {("attention", "FlashAttention"), ("matmul", "Triton")}
    assert {tuple(r["size"]) for r in rows if r["op"] == "attention"} == {(4, 8, 32, 16), (4, 8, 48, 16)}
    assert json.loads(path.read_text())["rows"] == rows


@pytest.mark.parametrize("arguments", [("--op", "conv"), ("--dtype", "int8")])
def test_bench_with_impossible_options(arguments):
    result = invoke("bench", "--backend", "cpu", *arguments)
    assert result.exit_code == 2
    assert "must be one of" in result.output


# --- compile ----------------------------------------------------------------------------------------------------------


def test_compile_list_names_every_target():
    from diyfa.arch import GPU_SPECS, NPU_SPECS

    assert invoke_json("compile", "--list")[1] == {"cuda": list(GPU_SPECS), "npu": list(NPU_SPECS)}


@pytest.mark.parametrize("target", ["gfx942", "sm_", "Ascend310"])
def test_compile_for_an_unknown_target(target):
    result = invoke("compile", target)
    assert result.exit_code == 2
    assert "no such target" in result.output


def test_compile_without_a_target():
    assert invoke("compile").exit_code == 2


class Compiler:
    """A backend that compiles two kernels, the second as told."""

    def __init__(self, ok):
        self.ok = ok

    def compile(self, target, only=None):
        yield CompileReport("cuda", target, "attention_fwd/v2", "float16 D=64", True, 0.5, 128, 0, {"shared": 65536})
        yield CompileReport("cuda", target, "attention_bwd/v2", f"{only}", self.ok, 0.5, 255, 64, notes=("spills",))


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_compile_reports_and_gates(monkeypatch, ok, status):
    monkeypatch.setattr("diyfa.cli.compile.load_backend", lambda name: Compiler(ok))
    result = invoke("compile", "sm_90", "--only", "D=64")
    assert result.exit_code == status
    assert ("2 passed, 0 failed" if ok else "1 passed, 1 failed") in result.output
    assert "shared 64 KiB" in result.output
    code, document = invoke_json("compile", "sm_90", "--only", "D=64")
    assert code == status
    assert document["ok"] == ok
    assert document["reports"][1]["spill_bytes"] == 64
    assert document["reports"][1]["case"] == "D=64"


def test_compiling_nothing_is_no_success(monkeypatch):
    empty = Compiler(True)
    empty.compile = lambda target, only=None: iter(())
    monkeypatch.setattr("diyfa.cli.compile.load_backend", lambda name: empty)
    assert invoke("compile", "sm_90", "--only", "nothing").exit_code == 2


def test_compile_where_the_backend_does_not_load(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("triton is required by the cuda backend: pip install triton")

    monkeypatch.setattr("diyfa.cli.compile.load_backend", fail)
    result = invoke("compile", "sm_90")
    assert result.exit_code == 2
    assert "pip install triton" in result.output
