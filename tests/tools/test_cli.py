"""The commands, as a user runs them."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from rich.console import Console
from subprocesses import run_after_torch, run_python
from typer.testing import CliRunner

import diyfa
from diyfa import registry
from diyfa.arch import GPU_SPECS, NPU_SPECS, GPUArch
from diyfa.cli import info, output
from diyfa.cli.app import app
from diyfa.cli.info import FEATURES, _typical
from diyfa.cli.table import figure
from diyfa.lab import validate
from diyfa.lab.bench import timing
from diyfa.lab.bench.command import DEFAULTS
from diyfa.lab.compile import resolve
from diyfa.lab.compile_report import CompileReport, sample_jobs
from diyfa.lab.demo import task as demo_task
from diyfa.lab.demo import train as demo_train
from diyfa.lab.report.model import build_report
from diyfa.lab.results import read_results
from diyfa.problem import Kernel
from diyfa.reference import reference_attention
from diyfa.registry import load_backend

runner = CliRunner()
WIDTH = 160  # of the terminal, in columns


def invoke(*arguments, width=WIDTH):
    """A console keeps the width that COLUMNS says when it is made, and test runners set COLUMNS themselves."""
    output.out.width = output.err.width = width
    return runner.invoke(app, list(arguments), env={"COLUMNS": str(width)})


def invoke_json(*arguments):
    result = invoke(*arguments, "--json")
    assert result.stdout.startswith("{"), result.output
    return result.exit_code, json.loads(result.stdout)


def commands():
    return typer.main.get_command(app).commands


def plug_in(monkeypatch, name, load):
    """A third-party backend, as an entry point would bring it."""
    monkeypatch.setattr(registry, "_plugins", lambda: {name: SimpleNamespace(load=load)})
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))


def plug_in_kernels(monkeypatch, name, *kernels):
    """A third-party backend that is the CPU's with other kernels."""
    backend = type("Other", (type(load_backend("cpu")),), {"name": name, "kernels": kernels})()
    plug_in(monkeypatch, name, lambda: backend)
    return backend


def cells(printed):
    """The cells of the rows of all tables, stripped."""
    return [[cell.strip() for cell in line.strip("│|").split("│")] for line in printed.splitlines() if "│" in line]


def test_version_and_help():
    assert invoke("--version").output.strip() == diyfa.__version__
    output = invoke("--help").output
    for command in ("info", "demo", "validate", "bench", "report", "tune", "compile", "first-run", "pack", "warmup"):
        assert command in output
    assert invoke("-h").output == output and "--show-completion" in output
    assert invoke("bench", "-h").output == invoke("bench", "--help").output


def test_help_does_not_wait_for_pytorch():
    code = "import sys\nfrom diyfa.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    for arguments in (["--version"], ["--help"], ["compile", "--help"]):
        run_python(code, arguments=arguments)


@pytest.mark.parametrize("name", commands())
def test_every_option_has_help(name):
    command = commands()[name]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{name} {parameter.name}"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("bench", "--backend", "cpu", "--op", "conv"), "must be one of attention, matmul, ceilings, all"),
        (("bench", "--backend", "cpu", "--head-dim", "577"), "--head-dim"),
        (("bench", "--backend", "cpu", "--dtype", "int8"), "must be one of"),
        *(((name, "--backend", "tpu"), "there is no 'tpu'; there are: cuda, npu, cpu")
          for name in ("demo", "validate", "bench")),
        (("tune", "--backend", "cpu"), "the cpu backend has no autotuner"),
        (("tune", "--dtype", "int8"), "must be one of"),
        (("report", "absent.json"), "No such file or directory: 'absent.json'"),
        (("first-run", "--only", "everything"), "must be one of small tiles, float16, bfloat16, float32, dtypes,"),
        (("pack", "gfx942"), "name a CUDA architecture such as sm_90"),
        (("warmup",), "say what for: --model CONFIG.JSON, --shapes WORDS, or --all"),
        (("warmup", "--shapes", "D=64"), "needs H="),
        (("compile",), "name a target, or --list to see them"),
        (("compile", "gfx942"), "no such target: 'gfx942'; `diyfa compile --list` lists them"),
        (("compile", "sm_"), "no such target: 'sm_'; did you mean sm_70"),
        (("compile", "Ascend310"), "no such target: 'Ascend310'"),
        (("compile", "910B"), "910B3"),  # Ascend910B itself is another chip than the 910B family's
        (("compile", "910B3", "--chip", "910B3"), "name the chip once"),
        (("compile", "sm_90", "--kernel", "fwd"), "--kernel"),
        (("compile", "910B3", "--tile", "128"), "--tile"),
        (("compile", "910B3", "--tile", "128x"), "--tile"),
        (("compile", "910B3", "--tile", "100x128"), "multiples of 16"),
        (("compile", "910B3", "--head-dim", "1000"), "head_dim"),
        (("compile", "910B3", "--kernel", "sort"), "unknown kernel 'sort'"),
        (("demo", "--surprise"), "No such option: --surprise"),
        (("paint",), "No such command 'paint'"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line(arguments, reason):
    result = invoke(*arguments, width=80)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True), result.output
    assert result.output.count("\n") == 1 and reason in result.output, result.output
    assert result.output.startswith("diyfa" if arguments == ("paint",) else f"diyfa {arguments[0]}: ")
    refused = invoke(*arguments, "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["ok"] is False and reason in json.loads(refused.stdout)["error"]


@pytest.mark.parametrize("error", [ValueError("backend 'cpu' cannot run this:\n  no tile fits"), KeyError("oops")])
def test_a_refusal_of_the_backend_is_one_line_and_a_bug_its_traceback(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("diyfa.lab.bench.command.flash_attention", fail)
    result = invoke("bench", "--backend", "cpu", "--op", "attention", "--seq-len", "16")
    if isinstance(error, KeyError):
        assert result.exception is error
    else:
        assert result.exit_code == 2
        assert result.output.endswith("diyfa bench: backend 'cpu' cannot run this: no tile fits\n")


def test_a_broken_plug_in_breaks_nothing_else(monkeypatch):
    def load():
        raise AttributeError("module 'numpy' has no attribute 'float'")

    plug_in(monkeypatch, "broken", load)
    code, document = invoke_json("info")
    broken = document["backends"][-1]
    assert code == 0 and broken["name"] == "broken" and not broken["loads"] and "'float'" in broken["reason"]
    assert next(b for b in document["backends"] if b["name"] == "cpu")["loads"]
    assert re.search(r"broken +not available", invoke("info").output)
    result = invoke("validate", "--backend", "broken")
    assert result.exit_code == 2 and result.output.count("\n") == 1 and "'float'" in result.output


# --- terminals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cp1252", "cp437"))])
def test_no_command_needs_more_than_the_terminal_has(encoding, tmp_path):
    """All commands in one process, as the installed script runs them."""
    bench = "bench --backend cpu --batch 1 --heads 1 --seq-len 16 --head-dim 16 --size 16 --rep 1 --warmup 0 --output"
    lines = [
        "--help", *(f"{name} --help" for name in commands()), "info", "validate --backend cpu", "compile --list",
        f"{bench} {tmp_path / 'bench.json'}", f"report {tmp_path / 'bench.json'}",
        f"report {Path(__file__).parents[2] / 'benchmarks/results/npu-2026-11-23-tiles.json'}",
        "demo --backend cpu --steps 2 --length 20", "report Größe→.json", "bench --op 矩阵",
    ]  # fmt: skip
    code = f"""
import sys
from diyfa.cli import main
from diyfa.lab import validate
from diyfa.lab.demo import train as demo_train
validate.CASES = validate.CASES[:1]
gpt = demo_train.GPTConfig(1, 2, 16, 32)
demo_train.PRESETS["cpu"] = demo_train.Preset(gpt, 4, 20, 1e-2, 1e-4, 1e-3, long_context=256)
for line in {lines!r}:
    sys.argv = ["diyfa", *line.split(" ")]
    try:
        main()
    except SystemExit as done:
        assert done.code in (0, 2 if line in {lines[-2:]!r} else 0), (line, done.code)
    print("done:", ascii(line))
assert sys.stdout.errors == "strict"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path),
             "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
    )  # fmt: skip
    printed = done.stdout.decode(encoding)  # nothing that the encoding lacks
    assert done.returncode == 0, printed[-4000:] + done.stderr.decode(encoding)
    assert printed.count("done:") == len(lines)
    assert "16x16x16" in printed.replace("×", "x"), "not 16?16?16"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437"])
@pytest.mark.parametrize("with_rich", [True, False])
def test_the_library_prints_on_every_terminal(encoding, with_rich, monkeypatch):
    from diyfa import BenchmarkResult, BenchmarkRunner, device

    gpu = device.GPUCapabilities("GPU ™ 昇腾", device.GPUArch.UNKNOWN, (9, 0), True, True, True, 1, 1, 1.0)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(device, "detect", lambda: [gpu])
    real = importlib.util.find_spec
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda n: real(n) if with_rich or n != "rich" else None)
    diyfa.print_gpu_info()
    runner = BenchmarkRunner("cpu")
    runner.unavailable.append(("SDPA cuDNN", (1, 2, 3, 4), "µ"))
    runner.print_comparison_table([BenchmarkResult("Größe", (1, 2, 3), 1.0, 2.0)])
    stream.flush()
    printed = stream.buffer.getvalue().decode(encoding)
    assert "GPU " in printed and "1x2x3" in printed.replace("×", "x") and stream.errors == "strict"


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_missing_libraries_are_named(monkeypatch, absent):
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
    assert backends["cpu"]["loads"] and backends["cpu"]["usable_here"]
    listed = {(k["op"], k["name"]) for k in backends["cpu"]["kernels"]}
    assert listed == {(k.op, k.name) for k in load_backend("cpu").kernels}
    present = {r["what"]: r["present"] for r in document["requirements"] if r["how"]}
    assert len(present) == len(document["requirements"])
    assert present["an NVIDIA GPU"] == torch.cuda.is_available()


def test_info_shows_the_features_of_kernels(monkeypatch):
    """The table says "no" exactly where the dispatch refuses: asked of a backend made for this test, by `choose`."""
    refused = {"v1": {"dropout", "sinks"}, "v2": {"window"}}
    kernels = (
        replace(k, unsupported=lambda problem, k=k: ", ".join(refused[k.name] & problem.features) or None)
        for k in load_backend("cpu").kernels
        if k.op == "attention_fwd" and k.name in refused
    )
    picky = plug_in_kernels(monkeypatch, "picky-features", *kernels)
    _, document = invoke_json("info")
    features = document["backends"][-1]["features"]
    found = {(s["kernel"], s["feature"]): s["reason"] for s in features}
    assert set(found) == {(kernel, feature) for kernel in ("v1", "v2") for feature in FEATURES}
    for (kernel, feature), reason in found.items():
        problem = _typical(picky, "picky-features", "attention_fwd", **FEATURES[feature])
        try:
            registry.choose("attention_fwd", problem, picky, kernel)
        except ValueError as error:
            assert reason and reason in str(error)
        else:
            assert reason is None
    assert {key for key, reason in found.items() if reason} == {("v1", "dropout"), ("v1", "sinks"), ("v2", "window")}
    printed = invoke("info", "--all", width=80).output
    table = cells(printed.split("forward: picky-features")[1])
    assert ["dropout", "yes", "no"] in table and ["window", "no", "yes"] in table and ["softcap", "yes", "yes"] in table
    assert "forward v1: dropout" in printed and "no backward kernel" in printed


def test_info_fits_80_columns():
    """No line is longer, and no heading is cut: each kernel's whole name stands above its column."""
    for arguments in ("info",), ("info", "--all"):
        for line in invoke(*arguments, width=80).output.splitlines():
            assert len(line) <= 80, line
    printed = invoke("info", "--all", width=80).output
    assert "what enables what" in printed and "torch_npu" in printed
    headings = [{cell.strip() for cell in line.strip("┃").split("┃")} for line in printed.splitlines() if "┃" in line]
    for name in ("cuda", "npu", "cpu"):
        try:
            backend = load_backend(name)
        except ImportError:  # the CUDA backend beside triton-ascend
            continue
        for op in ("attention_fwd", "attention_bwd"):
            assert {k.name for k in backend.kernels if k.op == op} | {"feature"} in headings


@pytest.mark.parametrize("gpus", [0, 8])
def test_info_fits_one_screen(gpus, monkeypatch):
    """Also beside eight equal GPUs; `--all` prints them all."""
    gpu = diyfa.GPUCapabilities("NVIDIA H200", GPUArch.HOPPER, (9, 0), True, True, True, 233472, 132, 140.0)
    monkeypatch.setattr(info, "detect", lambda: [gpu] * gpus)
    output = invoke("info", width=80).output
    assert len(output.splitlines()) <= info.SCREEN
    assert ("8 x NVIDIA H200" in output) == bool(gpus)
    for name in ("cuda", "npu", "cpu"):
        assert f"\n{name} " in output
    assert "diyfa info --all" in output


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
    assert npu["installed"] and not npu["available"] and npu["version"] == "9.9"
    assert "libhccl.so" in npu["problem"] and "set_env.sh" in npu["remedy"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in npu["remedy"]


# --- demo -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    preset = demo_train.Preset(demo_train.GPTConfig(1, 2, 16, 32), 4, 20, 1e-2, 1e-4, 1e-3, long_context=256)
    monkeypatch.setitem(demo_train.PRESETS, "cpu", preset)
    return preset


def test_demo_json(tiny):
    """Equal runs have equal losses."""
    arguments = ("demo", "--backend", "cpu", "--length", "20", "--prompt", "import ", "--seed", "3")
    (code, document), (_, again) = invoke_json(*arguments), invoke_json(*arguments)
    assert code == 0, document
    assert document["loss"]["sdpa"] == pytest.approx(again["loss"]["sdpa"], rel=1e-5) and document["seed"] == 3
    assert document["agree"] and document["max_relative_difference"] <= document["bound"]
    assert len(document["loss"]["diyfa"]) == len(document["loss"]["sdpa"]) == tiny.steps
    assert document["loss"]["diyfa"][0] == pytest.approx(5.55, abs=0.2)  # ln 256: nothing learnt yet
    assert document["loss"]["diyfa"][-1] < document["loss"]["diyfa"][0]
    assert all(document[what][name] > 0 for what in ("tokens_per_second", "step_mib") for name in ("diyfa", "sdpa"))
    alone = document["attention_mib"]
    assert alone["tokens"] == 256 and alone["diyfa"] < alone["plain"]  # which stores 2 x 256 x 256 scores
    assert document["text"].startswith("import ")
    assert len(document["text"].encode(errors="replace")) >= 27


def test_demo_text_and_plot(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.png"
    result = invoke("demo", "--backend", "cpu", "--steps", "4", "--length", "10", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "The two curves agree" in result.output
    assert "tokens/s" in result.output and "a training step, MiB" in result.output
    assert result.output.rstrip().endswith("of 8 right.")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--backend", "cpu", "--plot"),
        ("bench", "--backend", "cpu", "--output"),
        ("report", str(Path(__file__).parents[2] / "benchmarks/results/h200-2026-11-21-host.json"), "--output"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(arguments, tmp_path, monkeypatch):
    for work in ("demo.command.compare", "bench.timing.time_calls", "report.command.build_report"):
        monkeypatch.setattr(f"diyfa.lab.{work}", lambda *a, **k: pytest.fail("began"))
    (tmp_path / "file").write_text("kept")
    result = invoke(*arguments, str(tmp_path / "file" / "x.out"))
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True), result.output
    assert "cannot write" in result.output and (tmp_path / "file").read_text() == "kept"
    result = invoke(*arguments, str(tmp_path / "missing" / "x.out"))
    assert result.exit_code == 2 and "there is no folder" in result.output and not (tmp_path / "missing").exists()


def test_the_model_of_the_demo_learns_to_sort():
    cpu = torch.device("cpu")
    attention = partial(diyfa.flash_attention, causal=True, backend="cpu")
    model = demo_task.train(cpu, demo_train.PRESETS["cpu"], 0, attention, steps=125)
    answers = demo_task.ask(model, cpu, 0)
    assert [each.answer for each in answers] == ["".join(sorted(each.question)) for each in answers]
    assert all(each.is_right for each in answers) and len({each.question for each in answers}) == demo_task.QUESTIONS


def test_demo_asks_for_matplotlib_before_it_trains(monkeypatch, tmp_path):
    from diyfa.lab.demo import command as demo

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    monkeypatch.setattr(demo, "compare", lambda *a, **k: pytest.fail("began"))
    result = invoke("demo", "--backend", "cpu", "--plot", str(tmp_path / "loss.png"))
    assert result.exit_code == 2 and "pip install 'diyfa[plot]'" in result.output
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("how", ["differs", "nan"])
def test_demo_fails_when_the_curves_differ(tiny, monkeypatch, how):
    """An attention that forgets the softmax scale, or gives NaN, must not pass for PyTorch's."""

    def wrong(q, k, v, causal, backend):
        return v * float("nan") if how == "nan" else reference_attention(q, k, v, causal=causal, sm_scale=1.0)

    real = demo_train.compare
    monkeypatch.setattr("diyfa.lab.demo.command.compare", lambda *arguments: real(*arguments, attention=wrong))
    code, document = invoke_json("demo", "--backend", "cpu", "--length", "0")
    assert code == 1
    assert not document["agree"]
    assert (document["max_relative_difference"] is None) == (how == "nan")


@pytest.mark.parametrize("device", demo_train.PRESETS)
def test_demo_detects_different_curves(device):
    """A tenth of the loss at the end, or a hundredth at the start on a CPU, is no rounding."""
    preset = demo_train.PRESETS[device]
    curve = [3.0 - step * 1e-3 for step in range(300)]

    def agrees(at: int, relative: float) -> bool:
        other = [loss * (1 + relative * (step == at)) for step, loss in enumerate(curve)]
        return demo_train.Comparison(curve, other).agrees(preset)

    assert agrees(299, 0.0) and agrees(10, 1e-5) and agrees(299, 1e-3)
    for relative in (0.1, -0.1, float("nan"), float("inf")):
        assert not agrees(299, relative) and not agrees(0, relative)
    assert not agrees(demo_train.EARLY_STEPS - 1, 0.01)


@pytest.mark.parametrize("command", ["demo", "validate", "bench", "tune"])
@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch_npu is loaded")
def test_a_backend_without_its_device_is_refused(command):
    result = invoke(command, "--backend", "npu")
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True), result.output
    assert "'npu' needs a device of type npu; here is" in " ".join(result.output.replace("│", "").split())


def test_a_backend_whose_language_is_not_installed(monkeypatch):
    monkeypatch.setattr(registry, "_loaded", {})
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    result = invoke("validate", "--backend", "cuda")
    assert result.exit_code == 2
    assert "pip install triton" in " ".join(result.output.replace("│", "").split())


# --- validate, bench --------------------------------------------------------------------------------------------------

BENCH = ("bench", "--backend", "cpu", "--rep", "1")
PRODUCT = (*BENCH, "--op", "matmul", "--size", "16")


def test_validate(monkeypatch):
    monkeypatch.setattr(validate, "CASES", validate.CASES[:2])
    code, document = invoke_json("validate", "--backend", "cpu")
    assert code == 0, document
    names = [case.name for case in validate.CASES]
    attention = [(c["case"], c["kernel"]) for c in document["cases"] if c["kernel"] != "matmul"]
    assert attention == list(itertools.product(names, diyfa.kernels_for("cpu"))), "every variant runs"
    assert [c["status"] for c in document["cases"]] == ["pass"] * (2 * 3 + len(validate.MATMULS))
    assert all(0 < c["share"] <= 1 for c in document["cases"])


def test_validate_fails_on_a_wrong_result(monkeypatch):
    monkeypatch.setattr(validate, "CASES", validate.CASES[:1])
    real = validate.run_case
    monkeypatch.setattr(validate, "run_case", lambda *a: (r := real(*a))._replace(dq=r.dq * 1.01))
    code, document = invoke_json("validate", "--backend", "cpu")
    assert code == 1
    assert (document["cases"][0]["status"], document["cases"][0]["result"]) == ("FAIL", "dq")


@pytest.mark.parametrize("checks_gradients", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_validate_takes_a_backend_without_a_backward_pass(monkeypatch, checks_gradients, wrong):
    """Whether its kernel says so, or there is just none for the backward pass."""
    cpu = load_backend("cpu")
    called = f"forward-{wrong}-{checks_gradients}"  # choices are kept by the backend's name

    def forward(problem, tensors, out, lse):
        cpu.kernels[0].launch(problem, tensors, out, lse)
        if wrong:
            lse += 1e-3

    def unsupported(problem):
        return "no gradients here" if checks_gradients and problem.needs_grad else None

    plug_in_kernels(monkeypatch, called, Kernel("only", "attention_fwd", "forward only", forward, unsupported))
    monkeypatch.setattr(validate, "CASES", validate.CASES[:2])
    code, document = invoke_json("validate", "--backend", called)
    found = document["cases"][:2]
    assert code == int(wrong)
    assert {(c["kernel"], c["passes"], c["status"]) for c in found} == {
        ("only", "forward", "FAIL" if wrong else "pass")
    }
    assert {c["status"] for c in document["cases"][2:]} == {"refused"}  # it multiplies no matrices
    assert "no gradients here" in found[0]["reason"] or "attention_bwd: it has no kernel" in found[0]["reason"]
    printed = invoke("validate", "--backend", called, width=80).output
    assert ("only, FAIL: " if wrong else "only, forward only: ") in printed and "matmul, refused: every case" in printed


def test_validate_continues_after_a_failing_kernel(monkeypatch):
    cpu = load_backend("cpu")

    def launch(*arguments):
        raise RuntimeError("launch failed")

    plug_in_kernels(monkeypatch, "breaking", *cpu.kernels, replace(cpu.kernels[0], name="v3", launch=launch))
    monkeypatch.setattr(validate, "CASES", validate.CASES[:1])
    code, document = invoke_json("validate", "--backend", "breaking")
    assert code == 1
    found = [(c["kernel"], c["status"]) for c in document["cases"][:4]]
    assert found == [("v2", "pass"), ("v1", "pass"), ("split_kv", "pass"), ("v3", "FAIL")]
    assert document["cases"][3]["reason"] == "RuntimeError: launch failed"


def test_bench_writes_json(tmp_path):
    path = tmp_path / "bench.json"
    arguments = ("--seq-len", "32", "--seq-len", "48", "--size", "64", "--head-dim", "16", "--warmup", "0", "--causal")
    code, document = invoke_json(*BENCH, *arguments, "--output", str(path))
    assert code == 0
    rows = document["rows"]
    assert {(r["kind"], r["implementation"]) for r in rows} >= {("attention", "diyfa"), ("matmul", "diyfa")}
    assert {r["case"] for r in rows if r["kind"] == "ceiling"} == {"matrix product", "read"}
    sizes = {tuple(r[name] for name in "BHSD") for r in rows if r["kind"] == "attention"}
    assert sizes == {(4, 8, 32, 16), (4, 8, 48, 16)}
    assert all(r["causal"] for r in rows if r["kind"] == "attention")
    assert all("spread" in r for r in rows) and all("error" in r for r in rows if r["kind"] != "ceiling")
    assert json.loads(path.read_text())["rows"] == rows
    assert read_results(path).rows == rows


def test_bench_continues_where_it_was_cut_off(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    arguments = (*BENCH, "--op", "attention", "--batch", "1", "--heads", "1", "--head-dim", "16", "--warmup", "0")
    arguments += ("--output", str(path))
    assert invoke(*arguments, "--seq-len", "16").exit_code == 0
    earlier = json.loads(path.read_text())["rows"]
    timed = []
    real = timing.time_calls
    monkeypatch.setattr("diyfa.lab.bench.runner.time_calls", lambda *a, **k: timed.append(a) or real(*a, **k))
    result = invoke(*arguments, "--seq-len", "16", "--seq-len", "24")
    assert result.exit_code == 0 and f"{len(earlier)} rows of an earlier run kept" in result.output.replace("\n", " ")
    rows = json.loads(path.read_text())["rows"]
    assert rows[: len(earlier)] == earlier and len(rows) == 2 * len(earlier) and len(timed) == len(earlier)
    assert invoke(*arguments, "--seq-len", "16", "--again").exit_code == 0
    assert len(json.loads(path.read_text())["rows"]) == len(earlier) and len(timed) == 2 * len(earlier)


def test_the_ceilings_of_bench(monkeypatch):
    """2·16³ operations and the bytes that the sum reads, in 1 ms."""
    monkeypatch.setattr("diyfa.lab.bench.command.time_calls", lambda *a: [0.8, 1.0, 1.0, 1.0, 1.2])
    arguments = (*BENCH, "--op", "ceilings", "--size", "16")
    product, read = invoke_json(*arguments)[1]["rows"]
    assert product["tflops"] == pytest.approx(2 * 16**3 / 1e-3 / 1e12)
    assert read["GB/s"] == pytest.approx(DEFAULTS["cpu"].read_mib * 2**20 / 1e-3 / 1e9)
    monkeypatch.setattr("diyfa.lab.bench.command.time_calls", lambda *a: [0.8, 0.8, 1.0, 1.2, 1.2])
    assert invoke(*arguments).output.count(": ~") == 2
    assert invoke(*arguments, "--spread-limit", "0.5").output.count(": ~") == 0


def test_bench_says_when_each_row_was_measured(tmp_path, monkeypatch):
    """Rows of a continued file keep their date and clocks, new ones have those of their own run."""
    path = tmp_path / "bench.json"
    arguments = (*PRODUCT, "--output", str(path))
    assert invoke(*arguments).exit_code == 0
    earlier = json.loads(path.read_text())
    path.write_text(json.dumps({**earlier, "date": "2026-01-02T03:04:05+00:00", "clocks": {"sm_mhz": 1.0}, "chip": 7}))
    assert invoke(*arguments, "--size", "24").exit_code == 0
    document = json.loads(path.read_text())
    assert (document["date"], document["clocks"]) == ("2026-01-02T03:04:05+00:00", {"sm_mhz": 1.0})
    assert document["chip"] == 7 and document["rows"][:2] == earlier["rows"]
    assert all(row["date"][:10] >= earlier["date"][:10] for row in document["rows"][2:])
    report = build_report([read_results(path)])
    (table,) = report["tables"]
    dates = [row[table["columns"].index("date")] for row in table["rows"]]
    assert dates[:2] == ["2026-01-02"] * 2 and dates[2:] == [document["rows"][2]["date"][:10]] * 2
    assert report["devices"][0]["dates"] == [dates[0], dates[2]]


def test_bench_shows_and_keeps_apart_what_was_measured_otherwise(tmp_path):
    """Another dtype is another table, and a larger product another ceiling."""
    path = tmp_path / "bench.json"
    arguments = (*BENCH, "--warmup", "0", "--output", str(path))
    small = ("--seq-len", "16", "--batch", "1", "--heads", "1", "--head-dim", "16", "--size", "16")
    assert invoke(*arguments, *small).exit_code == 0
    result = invoke(*arguments, *small, "--dtype", "bfloat16")
    assert result.exit_code == 0 and result.output.count("diyfa") == 2
    assert result.output.count("ceiling, ") == 2
    assert "product of 24: " in invoke(*arguments, "--op", "ceilings", "--size", "24").output
    found = [(row["dtype"], row["M"]) for row in read_results(path).rows if row.get("case") == "matrix product"]
    assert found == [("float32", 16), ("bfloat16", 16), ("float32", 24)]


def test_bench_saves_what_it_has_measured(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    calls = []

    def cut_off(*a):
        calls.append(a)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [1.0]

    monkeypatch.setattr("diyfa.lab.bench.runner.time_calls", cut_off)
    assert invoke(*PRODUCT, "--size", "24", "--output", str(path)).exit_code != 0
    assert [row["implementation"] for row in read_results(path).rows] == ["PyTorch", "diyfa"]


@pytest.mark.parametrize("change", [{"device": "another"}, {"versions": {"torch": "1"}}, {"benchmark": "decode"}, None])
def test_bench_does_not_continue_another_file(tmp_path, change):
    path = tmp_path / "bench.json"
    arguments = (*PRODUCT, "--output", str(path))
    assert invoke(*arguments).exit_code == 0
    path.write_text("{}" if change is None else json.dumps({**json.loads(path.read_text()), **change}))
    before = path.read_text()
    result = invoke(*arguments)
    assert result.exit_code == 2 and "--again starts afresh" in " ".join(result.output.split())
    assert path.read_text() == before


@pytest.mark.parametrize(("limit", "marked"), [("0.3", True), ("0.5", False)])
def test_bench_marks_unsteady_figures(monkeypatch, limit, marked):
    monkeypatch.setattr("diyfa.lab.bench.runner.time_calls", lambda *a: [8.0, 10.0, 12.0, 10.0, 10.0, 8.0, 12.0])
    printed = invoke(*PRODUCT, "--spread-limit", limit).output
    assert ("~10.0" in printed) == marked and ("figures are unsteady" in printed) == marked


def test_bench_does_not_time_a_wrong_result(monkeypatch):
    monkeypatch.setattr("diyfa.lab.bench.command.flash_attention", lambda q, k, v, causal: 1.1 * v)
    arguments = (*BENCH, "--op", "attention", "--seq-len", "16", "--head-dim", "576")
    code, document = invoke_json(*arguments)
    (row,) = (row for row in document["rows"] if row["implementation"] == "diyfa")
    assert code == 0 and "ms" not in row and row["unavailable"].startswith("wrong result: an error of")
    assert "diyfa not measured at" in invoke(*arguments).output


def test_bench_fits_80_columns(monkeypatch, capsys):
    """The widest of the default sizes, and figures of a slow and of a fast device."""
    from diyfa import BenchmarkResult, BenchmarkRunner

    monkeypatch.setenv("COLUMNS", "80")
    times = {"SDPA flash": (0.0123456, 0.0000758), "diyfa": (123.456, 712.3456), "SDPA math": (98765.4, 0.0712345)}
    sizes = [(4, 8, 8192, 64), (16, 32, 131072, 128), (8192, 8192, 8192)]
    results = [BenchmarkResult(name, size, *figures, 12345.67) for size in sizes for name, figures in times.items()]
    BenchmarkRunner("cpu").print_comparison_table(results)
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    rows = cells(printed)
    for size in sizes:
        assert ["×".join(map(str, size)), "SDPA flash", "0.0123", "7.58e-05", "12346", "100%"] in rows
    assert ["", "diyfa", "123", "712", "12346", "0%"] in rows
    assert ["", "SDPA math", "98765", "0.0712", "12346", "0%"] in rows


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.07123, "0.0712"), (9.996, "10.0"), (71.25, "71.2"), (999.6, "1000"), (71234.5, "71234"),
     (0.00012345, "0.000123"), (1.5e-9, "1.50e-09"), (-2.0, "-2.00"), (float("inf"), "inf")],
)  # fmt: skip
def test_three_significant_digits(value, text):
    assert figure(value) == text


# --- tune -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    block: int


@pytest.fixture
def tuner(monkeypatch, tmp_path):
    """The real autotuner with a fake timer, asked by an attention that computes nothing."""
    if not hasattr(pytest.importorskip("triton"), "knobs"):
        pytest.skip("the tuner knows ahead-of-time compilation, which takes a newer Triton than triton-ascend's 3.2")
    from diyfa.backends.cuda.runtime import tune

    monkeypatch.setenv("DIYFA_CACHE_DIR", str(tmp_path))
    times = itertools.cycle([2.0, 1.0])  # of the two tiles, in turns
    tuner = tune.Tuner(lambda run: next(times), device=lambda: (0, "Test GPU"), may_measure=lambda: True)
    seen = []

    def attend(q, k, v, causal):
        seen.append((tuple(q.shape), tuple(k.shape), causal, q.requires_grad))
        tuner.best("attention_fwd", (q.shape[2], causal), [Tile(32), Tile(64)], lambda tile: None, Tile(32))
        return q + (k.sum() + v.sum())

    monkeypatch.setattr("diyfa.cli.tune.flash_attention", attend)
    monkeypatch.setattr("diyfa.cli.tune.load_backend", lambda name: SimpleNamespace(tuning=tuner))
    monkeypatch.setattr("diyfa.cli.tune.device_for", lambda name: (torch.device("cpu"), "cuda"))
    tuner.seen = seen
    return tuner


def test_tune_measures_and_lists_new_tiles(tuner):
    command = ("tune", "--seq-len", "32", "--seq-len", "48", "--head-dim", "16", "--heads", "4", "--heads-kv", "2")
    status, document = invoke_json(*command)
    assert status == 0
    assert [call[2] for call in tuner.seen] == [False, True] * 2
    assert tuner.seen[0] == ((4, 4, 32, 16), (4, 2, 32, 16), False, True)
    assert {tile["bucket"] for tile in document["tiles"]} == {f"({s}, {m})" for s in (32, 48) for m in (False, True)}
    assert document["tiles"][0]["config"] == {"block": 64}
    again = invoke(*command)
    assert again.exit_code == 0 and "0 newly tuned" in again.output
    assert len(invoke_json("tune", "--list")[1]["tiles"]) == 4
    assert "block=64" in invoke("tune", "--list").output


def test_tune_forward_and_one_mask_only(tuner):
    assert invoke("tune", "--seq-len", "32", "--head-dim", "16", "--causal", "--forward").exit_code == 0
    assert [call[2:] for call in tuner.seen] == [(True, False)]


def test_tune_clears_its_files(tuner):
    invoke("tune", "--seq-len", "32", "--head-dim", "16")
    assert tuner.is_settled("attention_fwd", (32, True))
    assert invoke_json("tune", "--clear") == (0, {"backend": "cuda", "cleared": 2})
    assert not tuner.is_settled("attention_fwd", (32, True))
    assert invoke_json("tune", "--list")[1]["tiles"] == []
    assert "0 tuned tiles" in invoke("tune", "--clear").output
    assert invoke("tune", "--list", "--clear").exit_code == 2


def test_tune_without_autotuning(tuner):
    tuner.enabled = False
    result = invoke("tune")
    assert result.exit_code == 2 and "DIYFA_AUTOTUNE" in result.output and not tuner.seen


def test_tune_without_a_cache_folder(tuner, monkeypatch):
    """Before anything is measured, which takes long."""
    monkeypatch.setenv("DIYFA_CACHE_DIR", os.devnull)
    result = invoke("tune", "--seq-len", "32", "--head-dim", "16")
    assert result.exit_code == 2 and "cannot be written" in result.output and not tuner.seen
    assert "DIYFA_CACHE_DIR" in result.output


# --- compile ----------------------------------------------------------------------------------------------------------


def test_compile_list_names_every_target():
    assert invoke_json("compile", "--list")[1] == {"cuda": list(GPU_SPECS), "npu": list(NPU_SPECS)}


@pytest.fixture
def compile_to(monkeypatch):
    """Let `diyfa compile` print these reports; `asked` is what the compiler was called with."""

    def compile_to(*reports, cases=()):
        def jobs_for(target, only=None, every=1, select=None):
            compiler.asked = (target, only, select)
            return [SimpleNamespace(kernel="", case=case) for case in cases]

        compiler = SimpleNamespace(jobs_for=jobs_for, compile_jobs=lambda jobs, target: iter(reports))
        monkeypatch.setattr("diyfa.lab.compile.load_compiler", lambda name: compiler)
        return compiler

    return compile_to


def two_reports(ok):
    """Of two kernels, of which the second passes or not."""
    fields = ("attention_bwd/v2", "float16 D=64", ok, 0.5, 255, 64)
    return (
        CompileReport("cuda", "sm_90", "attention_fwd/v2", "float16 D=64", True, 0.5, 128, 0, {"shared": 65536}),
        CompileReport("cuda", "sm_90", *fields, notes=("spills",), spill_budget=96),
    )


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_compile_reports_and_gates(compile_to, ok, status):
    compiler = compile_to(*two_reports(ok))
    result = invoke("compile", "sm_90", "--only", "D=64")
    assert compiler.asked == ("sm_90", "D=64", None)
    assert result.exit_code == status
    assert ("2 passed, 0 failed" if ok else "1 passed, 1 failed") in result.output
    assert "64.0" in result.output and "64/96" in result.output, "spills beside the budget"
    code, document = invoke_json("compile", "sm_90", "--only", "D=64")
    assert code == status
    assert document["ok"] == ok
    assert (document["reports"][1]["spill_bytes"], document["reports"][1]["spill_budget"]) == (64, 96)


def test_compile_fits_80_columns(compile_to):
    """The longest names of the real kernels; no figure loses a digit."""
    case = "bfloat16 D=128 causal 128x128 features window alibi softcap dropout w8 s3"
    reports = [
        CompileReport("cuda", "sm_90", "attention_bwd/dbias_queries", case, ok, 123.45, 255, 10552, {"shared": 232448},
                      () if ok else ("spills 10552 bytes, 576 allowed",), spill_budget=10576)
        for ok in (True, False)
    ]  # fmt: skip
    compile_to(*reports)
    printed = invoke("compile", "sm_90", width=80).output
    assert all(len(line) <= 80 for line in printed.splitlines())
    rows = [row[1:] for row in cells(printed)]
    for result in ("ok", "FAILED"):
        assert ["255", "10552/10576", "227", "123.5", result] in rows, printed
    words = " ".join(row[0] for row in cells(printed))
    assert words.count("attention_bwd/dbias_queries") == words.count("causal 128x128") == 2, printed


def test_compiling_nothing_is_no_success(compile_to):
    compile_to()
    assert invoke("compile", "sm_90", "--only", "nothing").exit_code == 2


def test_compile_where_the_backend_does_not_load(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("triton is required by the cuda backend: pip install triton")

    monkeypatch.setattr("diyfa.lab.compile.load_compiler", fail)
    result = invoke("compile", "sm_90")
    assert result.exit_code == 2
    assert "pip install triton" in result.output


def test_compile_lists_kernels_and_cases_of_a_target():
    try:
        load_backend("cuda")
    except ImportError as reason:  # triton-ascend's Triton
        pytest.skip(str(reason))
    code = """if True:
        import sys
        from diyfa.cli import main
        only = ["--only", "attention_fwd/v1"]
        for arguments in (only, [*only, "--json"], ["--every", "1000"]):
            sys.argv = ["diyfa", "compile", "sm_90", "--list", *arguments]
            try:
                main()
            except SystemExit as status:
                assert not status.code, status
            print("---")
    """
    printed, document, few = run_after_torch(code, TRITON_INTERPRET="0").split("---\n")[:3]
    cases = json.loads(document)["cases"]
    assert cases and all("attention_fwd/v1" in each["kernel"] for each in cases)
    assert printed.splitlines() == [f"{each['kernel']} {each['case']}" for each in cases]
    kernels = [line.split()[0] for line in few.splitlines()]
    assert len(kernels) == len({*kernels}) > 10, "of each kernel one"


def test_a_bar_has_a_total_and_a_log_gets_lines(compile_to, monkeypatch):
    compile_to(*two_reports(False), cases=["one", "another"])
    monkeypatch.setattr(output.LoggedProgress, "SECONDS", 0.0)
    lines = invoke("compile", "sm_90", "--only", "x").stderr.splitlines()
    assert [line.split(" after")[0] for line in lines] == [f"compiling for sm_90: {n} of 2" for n in (1, 2)]
    assert lines[0].endswith("s, attention_fwd/v2 float16 D=64")
    assert lines[1].endswith("attention_bwd/v2 float16 D=64, 1 failed")
    assert not invoke("compile", "sm_90", "--json").stderr


# --- compile for Ascend chips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chip"),
    [("910B3", "Ascend910B3"), ("ascend910b3", "Ascend910B3"), ("910_9362", "Ascend910_9362"),
     ("910B7", "Ascend910B7"),  # an unlisted member of a known family
     ("910_93", "Ascend910_9362"), ("950", "Ascend950PR_9589"),  # families: their first chip
     ("310P3", "310P3"), ("sm_90", "sm_90")],
)  # fmt: skip
def test_a_chip_may_be_called_without_its_family(name, chip):
    assert resolve(name) == chip


WORK = {
    "cube_flops": 16.8e6, "cube_cycles": 2048, "vector_elements": 225 * 1024, "vector_passes_per_score": 7.0,
    "vector_cycles": 2461, "memory_cycles": 3575, "loaded_bytes": 131072, "stored_bytes": 0,
    "workspace_read_bytes": 262144, "workspace_written_bytes": 262144, "direct_bytes": 0, "scalar_accesses": 0,
}  # fmt: skip
MASK = {**dict.fromkeys(WORK, 0), "vector_passes_per_score": 5.0, "vector_elements": 160 * 1024}
# With everything that is read from a kernel.
ASCEND_REPORT = CompileReport(
    "npu", "Ascend910B3", "attention_fwd/v2", "float16 D=128 full 128x256", True, 0.5,
    memory={"ub": 184576, "l1": 458752, "l0a": 49152, "l0c": 131072},
    limits={"ub": 196608, "l1": 524288, "l0a": 65536, "l0b": 65536, "l0c": 131072},
    metrics={
        "bound": True, "pipelined": 4, "loops": [{"tile": WORK, "mask_adds": MASK}], "task": WORK,
        "prediction": {"predicted_share_of_cube_peak": 0.49},
    },
)  # fmt: skip


def test_compile_prints_what_was_read_from_an_ascend_kernel(compile_to, monkeypatch):
    compiler = compile_to(ASCEND_REPORT)
    arguments = ["compile", "--chip", "910B3", "--kernel", "fwd", "--kernel", "dq", "--dtype", "bfloat16"]
    arguments += ["--head-dim", "128", "--mode", "causal", "--tile", "128x256"]
    wide = Console(width=240, file=io.StringIO())
    monkeypatch.setattr("diyfa.lab.compile.out", wide)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = wide.file.getvalue()
    selected = {
        "kernel": ("fwd", "dq"), "dtype": ("bfloat16",), "head_dim": (128,), "mode": ("causal",), "tile": ((128, 256),),
    }  # fmt: skip
    assert compiler.asked == ("Ascend910B3", None, selected)
    cells = "180/192 448/512 48/64 ?/64 128/128 yes 7.0+5.0 225+160 2048/2461/3575 128+512"
    for cell in (*cells.split(), "49 %", "predicted"):
        assert cell in printed, cell
    narrow = Console(width=80, file=io.StringIO())  # where the table's columns would be two letters wide
    monkeypatch.setattr("diyfa.lab.compile.out", narrow)
    assert runner.invoke(app, arguments).exit_code == 0
    printed = " ".join(narrow.file.getvalue().split())
    for cell in ("UB KiB 180/192", "L0C KiB 128/128", "bound yes", "pipe 4", "passes +mask 7.0+5.0",
                 "cycles cube/vec/mem 2048/2461/3575", "predicted of peak 49 %"):  # fmt: skip
        assert cell in printed, cell
    code, document = invoke_json("compile", "Ascend910B3")
    assert code == 0
    assert compiler.asked == ("Ascend910B3", None, None)
    assert document["reports"][0]["metrics"]["loops"][0]["tile"]["workspace_read_bytes"] == 262144
    assert document["reports"][0]["limits"]["l0a"] == 65536


@pytest.mark.parametrize("package", ["triton-ascend", "ascendnpu-ir"])
def test_a_missing_ascend_compiler_is_named_with_its_pip_command(monkeypatch, package):
    import importlib.metadata
    import importlib.util

    real_version, real_spec = importlib.metadata.version, importlib.util.find_spec

    def version(name):
        if name == "triton-ascend" and package == name:
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.2.0" if name == "triton-ascend" else real_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "ascendnpuir" else real_spec(n, *a))
    if package == "ascendnpu-ir":  # with the front half in place
        monkeypatch.setattr("diyfa.lab.npu.aot.check_front_half", lambda: None)
    result = invoke("compile", "910B3", "--kernel", "fwd")
    assert result.exit_code == 2
    assert f"pip install {package}==" in result.output
    assert "Traceback" not in result.output


def test_some_cases_of_each_kernel():
    jobs = [
        SimpleNamespace(kernel=name, case=f"{case} of {tile}") for name in "ab" for case in range(100) for tile in "xyz"
    ]
    jobs.append(SimpleNamespace(kernel="c", case="0"))
    for target in ("sm_80", "sm_90"):
        found = list(sample_jobs(3, jobs, target))
        assert {(job.kernel, job.case[-1]) for job in found} == {*itertools.product("ab", "xyz"), ("c", "0")}
        assert 150 < len(found) < 250
    assert found != list(sample_jobs(3, jobs, "sm_80"))
    assert list(sample_jobs(1, jobs, "sm_90")) == jobs
