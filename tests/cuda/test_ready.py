"""Kernels compiled before they are called: the calls of a pack, a pack of small kernels, and `diyfa.warmup`.

A process of its own records calls for sm_90 and compiles (`ready_calls.py`), whose driver is a simulated one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from subprocesses import ROOT, SUPPORT, run_python
from typer.testing import CliRunner

import diyfa
from diyfa.backends.cuda.runtime import launch
from diyfa.cli.app import app
from diyfa.ready import building, calls, words
from diyfa.ready.building import Built, build
from diyfa.ready.models import parse_model, read_model
from diyfa.ready.warming import Warmed
from diyfa.ready.wheel import write_wheel
from diyfa.registry import load_backend


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("there is a driver: the simulated one is for machines without")
    folder = tmp_path_factory.mktemp("ready")
    printed = run_python(
        "from ready_calls import main; main()", SUPPORT, ROOT / "tests", arguments=[str(folder)],
        TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder), DIYFA_CACHE_DIR=str(folder),
    )  # fmt: skip
    return json.loads(printed.splitlines()[-1])


# ---- The calls of a pack ------------------------------------------------------------------------------------------


def test_every_call_of_a_pack_runs(found):
    assert found["refused"] == []


def test_a_pack_has_every_kernel(found):
    """But for those that are there to be read, serve float8, score functions or rare masks, or that no call chooses."""
    lines = [line for path in (ROOT / "backends" / "cuda").rglob("*.py") for line in path.read_text().splitlines()]
    kernels = {match[1] for line in lines if (match := re.match(r"def (_\w+_kernel)\(", line))}
    absent = {"_fwd_v1_kernel", "_fwd_tutorial_kernel", "_transpose_kernel"}
    absent |= {"_quantize_kernel", "_sum_kernel", "_mean_kernel"}
    absent |= {"_edge_bits_kernel", "_means_kernel", "_select_kernel", "_bwd_captured_kernel", "_matmul_tma_kernel"}
    assert sorted(kernels - {*found["names"]}) == sorted(absent)


def test_a_pack_serves_generation_with_padding(found):
    assert found["lacking for padded steps"] == []


def test_missing_features_of_an_architecture_are_reported(found):
    assert len(found["refused by sm_80"]) == 2
    assert all("float8 needs sm_89 or later" in reason for reason in found["refused by sm_80"])


def test_calls_of_the_tests_missing_in_a_pack_are_listed(found):
    covered = found["coverage"]
    assert covered["lacking"] and 0 < covered["known"] < covered["kernels"]
    assert all(kernels for kernels in covered["lacking"].values())


# ---- Calls in words, of models, of functions ----------------------------------------------------------------------


def test_words_parse_to_the_calls_they_name(found):
    assert found["words"] == {"alike": True, "known": True}


@pytest.mark.parametrize(
    "text, reason",
    [
        ("attention D=64 H=8 B=1 S=128 casual", "unknown words casual"),
        ("attention D=64 H=8 S=128", "needs B="),
        ("attention D=64 B=1 S=128", "needs H="),
        ("attention D=64/a H=8 B=1 S=128", "needs D="),
        ("cache D=64 H=8 B=1 Sq=1 Sk=0", "needs Sk="),
        ("product float16 16x16", "sizes of the product"),
        ("merge D=64 now", "unknown words now"),
        ("mask S=4096", "needs the name of one mask"),
        ("mask causal document S=4096", "needs the name of one mask"),
        ("mask tree S=4096", "unknown words tree"),
        ("D=64 H=8 B=1 S=128 mask=32,32", "mask in .* must be the queries and keys of a block"),
        ("D=64 H=8 B=1 S=128 softcap=high", "softcap in .* must be a number, got 'high'"),
        ("D=64 H=8 B=1 S=128 window=5", "window in .* must be two whole numbers"),
        ("D=64 H=8 B=1 S=128 attn_bias=xyz", "attn_bias in .* must be the letters of its dimensions"),
        ("D=64 H=8 B=1 S=128 out_dtype=float33", "out_dtype in .* must be one of bfloat16"),
        ("D=64 H=8 B=1 S=128 packed=no", "packed in .* must be True or False"),
        ("cache D=64 H=8 B=1 Sq=1 Sk=64 page=-16", "page in .* must be a whole number from 0 on"),
        ("product float16 16x16x16 out_dtype=int4", "out_dtype in .* must be one of"),
        ("D=64 D=128 H=8 B=1 S=128", "says something twice"),
        ("float16 bfloat16 D=64 H=8 B=1 S=128", "says something twice"),
    ],
)
def test_unknown_words_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        words.parse(text)


def test_a_tensor_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="is too large"):
        words.parse(f"merge D={10**30}").run()


def test_masks_that_operators_make_are_not_made(monkeypatch):
    """On an NPU a warm-up of everything would otherwise compute billions of pairs."""
    monkeypatch.setattr(calls.masks, "block_mask", None)
    with diyfa.use_backend("cpu"):
        words.parse("mask causal S=32768").run()


def test_documents_have_ids_of_either_dtype(monkeypatch):
    """A process with a pack would otherwise compile for ids of int32."""
    made = []
    monkeypatch.setattr(calls.masks, "document", lambda ids: made.append(ids.dtype) or calls.masks.causal)
    calls.MASKS["document"](64)
    assert made == [torch.int64, torch.int32]


def test_words_have_defaults():
    assert words.parse("D=128 H=32/8 B=4 S=64 causal").name == "attention bfloat16 D=128 H=32/8 B=4 Sq=64 Sk=64 causal"


@pytest.mark.parametrize(
    "name, heads", [("llama", "D=128 H=32/8"), ("qwen3", "D=128 H=16/8"), ("gemma2", "D=256 H=8/4")]
)
def test_a_pack_serves_a_model(found, name, heads):
    from ready_calls import CONFIGS

    model = parse_model(CONFIGS[name])
    assert str(model.heads) == heads and model.dtype == torch.bfloat16
    of_model = found["models"][name]
    assert of_model["refused"] == [] and of_model["lacking"] == [] and of_model["kernels"] > 40


@pytest.mark.parametrize(
    "config, options",
    [
        ({"model_type": "gpt_oss", "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
         [{"causal": True, "sinks": True}, {"causal": True, "sinks": True, "window": (127, 0)}]),
        ({"model_type": "mistral", "sliding_window": 4096}, [{"causal": True, "window": (4095, 0)}]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [{"causal": True}]),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, [{}]),
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, [{}]),
        ({"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "is_decoder": True}, [{"causal": True}]),
        ({"model_type": "bloom"}, [{"causal": True, "alibi_slopes": True}]),
    ],
)  # fmt: skip
def test_layers_of_a_model(config, options):
    model = parse_model({"hidden_size": 1024, "num_attention_heads": 16, **config})
    assert [*model.options] == options and model.heads == (64, 0, 16, 16)


def test_a_latent_cache():
    model = parse_model({
        "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "hidden_size": 7168,
    })  # fmt: skip
    assert model.heads == (192, 128, 128, 128) and model.latent == (576, 512, 128, 1)


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 0}, {"num_attention_heads": -8}])
def test_an_incomplete_config_is_refused(config):
    with pytest.raises(ValueError, match="num_attention_heads"):
        parse_model({"hidden_size": 64, **config})


def test_malformed_config_entries_are_skipped():
    odd = {
        "text_config": None, "attn_config": "flash", "architectures": [1], "torch_dtype": "load", "head_dim": "64",
        "sliding_window": 0, "attn_logit_softcapping": "none",
    }  # fmt: skip
    model = parse_model({"hidden_size": 1024, "num_attention_heads": 16, **odd})
    assert model == ((64, 0, 16, 16), torch.bfloat16, ({"causal": True},), None)


def test_an_invalid_config_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for text in ("", "[]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json (is no JSON|holds no object)"):
            read_model(path)


def test_a_function_is_recorded_with_zeros_for_results(found):
    """However often it makes the same call."""
    of_function = found["function"]
    assert of_function["largest"] == 0
    assert {"_fwd_sm90_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel", "_bwd_preprocess_kernel"} == {
        *of_function["kernels"]
    }


def test_after_a_recording_everything_is_restored(found):
    assert found["restored"]


def test_binaries_that_cannot_be_stored_are_not_compiled(found):
    refusals = found["refusals"]
    assert refusals["DISABLE_PTXAS_OPT"] == (
        "ValueError: nothing that is compiled now would be found: DISABLE_PTXAS_OPT is set"
    )
    assert re.fullmatch(r"ToolMissing: /dev/null\S+ cannot be written: .*", refusals["DIYFA_CACHE_DIR"])
    assert refusals["other sources"] == "RuntimeError: the sources of diyfa have changed meanwhile"


def test_without_a_device_an_architecture_must_be_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="no GPU or NPU is usable here"):
        diyfa.warmup("D=64 H=8 B=1 S=128", quiet=True)
    with pytest.raises(ValueError, match=r"unknown CUDA architecture|TRITON_INTERPRET"):
        diyfa.warmup("D=64 H=8 B=1 S=128", arch="sm_1", quiet=True)


# ---- A pack -------------------------------------------------------------------------------------------------------


def test_a_small_pack_serves_its_calls_without_a_compiler(found):
    of_pack = found["pack"]
    assert of_pack["status"] == 0 and of_pack["kernels"] == 5
    assert of_pack["compiled"] == []  # in this process
    assert of_pack["launches"] == 1
    assert of_pack["wheel"] == f"diyfa_sm90-{diyfa.__version__}+some-py3-none-any.whl"  # not all: `--only merge`
    assert of_pack["names"][:2] == ["diyfa_sm90/__init__.py", "diyfa_sm90/binaries.pack"]


def test_nothing_is_compiled_twice(found):
    warmed = found["pack"]["warmed"]
    assert (warmed["kernels"], warmed["compiled"], warmed["failures"], warmed["refused"]) == (2, 0, [], [])


def test_a_wheel_says_what_it_needs_and_holds(tmp_path):
    files = {"diyfa_sm90/a": b"1", "diyfa_sm90/b": b""}
    path = write_wheel(tmp_path, "diyfa_sm90", "1.2", "Kernels", files, local="some")
    with zipfile.ZipFile(path) as wheel:
        read = {name: wheel.read(name) for name in wheel.namelist()}
    info = "diyfa_sm90-1.2+some.dist-info"
    assert path.name.startswith("diyfa_sm90-1.2+some-") and b"\nVersion: 1.2+some\n" in read[f"{info}/METADATA"]
    assert b"\nRequires-Dist: diyfa==1.2\n" in read[f"{info}/METADATA"]
    rows = [line.split(",") for line in read[f"{info}/RECORD"].decode().splitlines()]
    assert [name for name, *_ in rows] == [*read] and rows.pop()[1:] == ["", ""]
    for name, digest, size in rows:
        expected = base64.urlsafe_b64encode(hashlib.sha256(read[name]).digest()).decode().rstrip("=")
        assert digest == f"sha256={expected}" and int(size) == len(read[name])


def test_a_kernel_that_does_not_compile_makes_no_wheel(monkeypatch, tmp_path):
    recording = SimpleNamespace(refused=[], kernels={"a": "a kernel"})
    monkeypatch.setattr("diyfa.cli.pack.record", lambda *_: recording)
    monkeypatch.setattr("diyfa.cli.pack.compile_missing", lambda *_: Warmed(1, 0, ("it failed",), (), 1.0))
    done = CliRunner().invoke(app, ["pack", "90", "--only", "merge", "--out", str(tmp_path)])
    assert done.exit_code == 1 and not [*tmp_path.iterdir()]


def test_the_pack_is_listed_without_compiling(monkeypatch):
    monkeypatch.setattr("diyfa.cli.pack.record", lambda *_: type("Recording", (), {"refused": []}))
    done = CliRunner().invoke(app, ["pack", "90", "--list", "--only", "merge"])
    assert done.exit_code == 0 and done.stdout.splitlines() == [x.name for x in calls.others() if "merge" in x.name]
    assert CliRunner().invoke(app, ["pack", "Ascend910B3"]).exit_code == 2


# ---- Processes that compile ---------------------------------------------------------------------------------------


class Kernel:
    """What processes are sent: `verdict` is what one makes of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_stored(self) -> bool:
        return False

    def compile(self) -> None:
        import os
        import sys

        if self.name.startswith("waits"):
            time.sleep(0.3)
            Path(self.name.partition(" ")[2]).touch()
        if self.name == "fails":
            print("printed by a compiler", file=sys.stderr, flush=True)
            raise RuntimeError("no such instruction")
        if self.name == "crashes":
            os._exit(9)
        if self.name == "fails with its process":
            raise RuntimeError(f"{os.getpid()}")


def test_a_failing_or_crashing_compilation_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr(Kernel, "__module__", "test_ready")
    monkeypatch.syspath_prepend(ROOT / "tests" / "cuda")
    done: list[Built] = []
    build([Kernel(name) for name in ("a", "fails", "crashes", "b")], 1, done.append)
    errors = {built.name: built.error for built in done}
    assert [*errors] == ["a", "fails", "crashes", "b"] and errors["a"] == errors["b"] == ""
    assert errors["fails"] == "RuntimeError: no such instruction printed by a compiler"
    assert errors["crashes"] == "the process that compiles it ended with 9"


def test_a_process_compiles_a_limited_number_of_kernels(monkeypatch):
    """It frees no memory."""
    monkeypatch.setattr(Kernel, "__module__", "test_ready")
    monkeypatch.syspath_prepend(ROOT / "tests" / "cuda")
    monkeypatch.setattr(building, "PER_PROCESS", 2)
    done: list[Built] = []
    build([Kernel("fails with its process") for _ in range(5)], 1, done.append)
    errors = [built.error.partition(" ")[2] for built in done]
    assert all(error.isdigit() for error in errors)
    assert errors[0] == errors[1] != errors[2] == errors[3] != errors[4] != errors[0]


def test_after_an_interrupt_no_kernel_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(Kernel, "__module__", "test_ready")
    monkeypatch.syspath_prepend(ROOT / "tests" / "cuda")

    def interrupt(built: Built) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([Kernel(f"waits {tmp_path / str(i)}") for i in range(20)], 2, interrupt)
    known = len([*tmp_path.iterdir()])
    time.sleep(2)
    assert len([*tmp_path.iterdir()]) == known <= 4


@pytest.mark.parametrize("jobs", [0, -3])
def test_fewer_processes_than_one_are_refused(jobs):
    with pytest.raises(ValueError, match=f"jobs must be at least 1, got {jobs}"):
        build([Kernel("a")], jobs, print)


def test_processes_that_compile_do_not_interpret(monkeypatch):
    started = []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(building.subprocess, "Popen", lambda command, **how: started.append(how["env"]))
    building._start()
    assert "TRITON_INTERPRET" not in started[0] and started[0]["OMP_NUM_THREADS"] == "1"


def test_the_local_gpu_is_used_for_its_architecture(monkeypatch):
    """A model may lie on it while calls are recorded for another."""
    backend, gpu = load_backend("cuda"), torch.device("cuda", 0)
    monkeypatch.setattr(launch, "stand_in", launch.StandIn("sm_80", 108))
    assert backend.arch(gpu) == "sm_80" and launch.multiprocessors(gpu) == 108
