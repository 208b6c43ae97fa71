"""Calls recorded for a GPU that is not here, and a pack of small kernels, for a process with Triton's compiler.

`python ready_calls.py FOLDER` prints what it found as JSON: see tests/cuda/test_ready.py.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from simulators.cuda_driver import install
from tools.pack_coverage import coverage

import diyfa
from diyfa import plan as planning
from diyfa.backends.cuda.runtime import jit, launch, launcher, pack, tune
from diyfa.cli.pack import run as run_pack
from diyfa.ready import calls, models, words
from diyfa.ready.recording import record, recording
from diyfa.registry import load_backend

ARCH = "sm_90"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None, "dtype": "bfloat16",
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3, "gemma2": GEMMA2}


def model_kernels(packed: dict[Any, Any]) -> dict[str, Any]:
    """Of each model: how many kernels it launches, and those that the pack lacks."""
    by_model = {}
    for name, config in CONFIGS.items():
        model = models.parse_model(config)
        calls = [*models.training(model), *models.serving(model, (0, 16))]
        recorded = record("cuda", ARCH, calls)
        lacking = [x.name for key, x in recorded.kernels.items() if key not in packed]
        by_model[name] = {"kernels": len(recorded.kernels), "lacking": lacking, "refused": recorded.refused}
    return by_model


def padded_steps(packed: dict[Any, Any]) -> list[str]:
    """Kernels that the pack lacks for one more token of a padded batch: Transformers then packs queries and keys."""

    def step(heads: int, heads_kv: int, head_dim: int, **options: Any) -> None:
        samples, keys = 16, 8192
        q, offsets = calls.empty(samples, heads, head_dim, dtype=calls.BF16), calls.empty(samples + 1)
        k, v = (calls.empty(samples * keys, heads_kv, head_dim, dtype=calls.BF16) for _ in range(2))
        diyfa.flash_attn_varlen_func(q, k, v, offsets, offsets, 1, keys, causal=True, **options)

    with recording("cuda", ARCH) as recorded:
        step(32, 8, 128)
        step(32, 8, 128, window_size=(1023, 0))
        step(8, 4, 256, softcap=50.0)
    return [x.name for key, x in recorded.items() if key not in packed]


def parsed_calls(packed: dict[Any, Any]) -> dict[str, Any]:
    """Whether calls in words are those they were printed by."""
    listed = calls.everything()
    parsed = [words.parse(call.name) for call in listed]
    some = record("cuda", ARCH, parsed[::40]).kernels
    return {"alike": [a.name for a in listed] == [b.name for b in parsed], "known": all(key in packed for key in some)}


def recorded_function() -> dict[str, Any]:
    """What a training step that is recorded launches, and what it computes meanwhile."""
    q, k, v = (torch.ones(2, 256, 4, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    results = []
    with recording("cuda", ARCH) as recorded:
        for _ in range(3):  # equal calls, which would be repeated
            out = diyfa.flash_attn_func(q, k, v, causal=True)
            (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
            results += [float(out.detach().abs().max()), float(dq.abs().max())]
    return {"kernels": Counter(x.name for x in recorded.values()), "largest": max(results)}


def pack_launches(folder: Path) -> dict[str, Any]:
    """A pack of the merging kernels, which the driver gets where nothing may be compiled."""
    compiled: list[str] = []
    compile_it = jit.compile_for
    jit.compile_for = lambda arch, launch, signature: (
        compiled.append(launch.kernel.__name__) or compile_it(arch, launch, signature)
    )
    driver = install(folder)
    status = run_pack(ARCH, folder / "wheels", 1, "merge", False, True)
    (wheel,) = (folder / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as file:
        assert file.testzip() is None
        file.extractall(folder / "site")
        names = file.namelist()
    warmed = diyfa.warmup(["merge D=64", "merge D=128"], arch=ARCH, quiet=True)
    sys.path.insert(0, str(folder / "site"))
    pack.installed.cache_clear()
    cache = folder / "binaries"
    for path in cache.rglob("*"):
        if path.is_file():
            path.unlink()
    out, lse = torch.zeros(1, 2, 64, 80), torch.zeros(1, 2, 64)
    load_backend("cuda").merge(out, lse, out.clone(), lse.clone())  # type: ignore[attr-defined]
    opened = pack.installed(ARCH).pack
    return {
        "status": status, "wheel": wheel.name, "names": names, "kernels": 0 if opened is None else len(opened),
        "warmed": warmed._asdict(), "launches": len(driver.launches), "compiled": compiled,
    }  # fmt: skip


def refusal_messages() -> dict[str, str]:
    """Why nothing is recorded, or what was recorded is not compiled."""
    (kernel,) = record("cuda", ARCH, [words.parse("merge D=64")]).kernels.values()

    def refused(run: Callable[[], object]) -> str:
        try:
            run()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    messages = {"other sources": refused(kernel._replace(key="0" * 32).compile)}  # type: ignore[attr-defined]
    for name, value, run in (
        ("DIYFA_CACHE_DIR", os.devnull, kernel.compile),
        ("DISABLE_PTXAS_OPT", "1", lambda: record("cuda", ARCH, [])),
    ):
        before = os.environ.get(name)
        os.environ[name] = value
        messages[name] = refused(run)
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
    return messages


def state() -> list[Any]:
    """What is another while launches are recorded."""
    recorders = launcher.recorder, launch.stand_in, tune._tuner.recording, tune._tuner.enabled
    return [*map(repr, recorders), *[id(kernel) for kernel in load_backend("cuda").kernels], id(planning.plans)]


def main() -> None:
    folder = Path(sys.argv[1])
    before = state()
    everything = record("cuda", ARCH, calls.everything())
    float8 = [call for call in calls.serving() if "float8" in call.name][:2]
    covered = coverage(ARCH, 12)
    print(json.dumps({
        "refused": everything.refused,
        "names": Counter(x.name for x in everything.kernels.values()),
        "refused by sm_80": record("cuda", "sm_80", float8).refused,
        "models": model_kernels(everything.kernels),
        "lacking for padded steps": padded_steps(everything.kernels),
        "words": parsed_calls(everything.kernels),
        "function": recorded_function(),
        "coverage": covered._asdict(),
        "refusals": refusal_messages(),
        "restored": state() == before,
        "pack": pack_launches(folder),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
