"""The Hopper kernel in the Gluon interpreter, through its launcher and the public functions, on CPU tensors."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import hopper_gluon  # noqa: F401
import pytest
import torch
from poison import poisoned_allocations
from simulators.gluon import InterpretedKernel

import diyfa
from diyfa import plan as planning
from diyfa import registry
from diyfa.backends.cuda.attention import configs
from diyfa.backends.cuda.gluon import tile_counter
from diyfa.backends.cuda.hopper import bwd as hopper_bwd
from diyfa.backends.cuda.hopper import bwd_configs as hopper_bwd_configs
from diyfa.backends.cuda.hopper import bwd_dq as hopper_bwd_dq
from diyfa.backends.cuda.hopper import bwd_launch as hopper_bwd_launch
from diyfa.backends.cuda.hopper import bwd_wide_dq as hopper_bwd_wide_dq
from diyfa.backends.cuda.hopper import configs as hopper_configs
from diyfa.backends.cuda.hopper import fwd as hopper_fwd
from diyfa.backends.cuda.hopper import fwd_launch as hopper_fwd_launch
from diyfa.backends.cuda.hopper import prefill as hopper_prefill
from diyfa.backends.cuda.hopper import prefill_configs
from diyfa.backends.cuda.runtime.launch import is_interpreting
from diyfa.problem import AttentionProblem
from diyfa.testing import (
    YARDSTICK_DRAWS,
    AttentionCase,
    Results,
    attention_function,
    check_budget,
    make_inputs,
    run_case,
)

# What synchronises, each after what it imports of the others; the last one has the kernel.
interpreted_only = pytest.mark.skipif(
    not is_interpreting(), reason="CPU tensors are refused: here the kernel itself is run"
)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
runs_the_kernel = pytest.mark.skipif(
    not is_interpreting() and not ON_HOPPER, reason="neither interpreter nor sm_90 GPU"
)
DEVICE = "cpu" if is_interpreting() else "cuda"
KERNEL_MODULES = (
    "gluon.barriers", "gluon.channel", "gluon.ring", "gluon.scheduler", "gluon.tile_info", "hopper.mma",
    "hopper.overflow", "hopper.tiles", "hopper.float8", "hopper.chunks", "hopper.fwd_common", "hopper.fwd_producer",
    "hopper.fwd_consumer", "hopper.fwd",
)  # fmt: skip
BACKWARD_MODULES = (
    "gluon.barriers", "gluon.channel", "gluon.ring", "hopper.mma", "hopper.tiles", "hopper.bwd_mask",
    "hopper.bwd_tiles", "hopper.bwd_common", "hopper.bwd_dq", "hopper.bwd_rolling_dq", "hopper.bwd_wide",
    "hopper.bwd_mla", "hopper.bwd",
)  # fmt: skip
WIDE_BACKWARD_MODULES = (*BACKWARD_MODULES, "hopper.bwd_wide_dq")
BACKWARD_KERNELS = {
    "_prepare_kernel": hopper_bwd_dq, "_bwd_sm90_kernel": hopper_bwd, "_bwd_wide_dq_kernel": hopper_bwd_wide_dq,
    "_convert_kernel": hopper_bwd_dq,
}  # fmt: skip
FORWARD = hopper_configs.Sm90Config(1, 64, 4, True, 232, 24)  # one that takes all that the backward takes
MULTIPROCESSORS = 2
FROM_THE_TABLE = hopper_configs.select_config.__wrapped__  # without what problems keep


def interpret(
    monkeypatch: pytest.MonkeyPatch,
    config: hopper_configs.Sm90Config | None = None,
    seed: int = 0,
    interleave: bool = False,
    kernels: ModuleType = hopper_fwd,
    multiprocessors: int = MULTIPROCESSORS,
) -> InterpretedKernel:
    """From now on `variant="sm90"` runs here, and takes what `take_all` says. `kernels`: where the kernel is taken
    from. `multiprocessors`: that persistent grids see."""
    kernel = InterpretedKernel(kernels._fwd_sm90_kernel, seed, interleave)
    monkeypatch.setattr(hopper_fwd_launch, "_fwd_sm90_kernel", kernel)
    monkeypatch.setattr(tile_counter, "_counters", {})  # a run that a bug ended leaves its counter as it was
    monkeypatch.setattr(hopper_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_configs, "multiprocessors", lambda device: multiprocessors)
    take_all(monkeypatch, config)
    return kernel


def interpret_prefill(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> InterpretedKernel:
    """`interpret`, and from now on calls with a cache run here, too, where this kernel takes them, however few queries
    they have."""
    kernel = interpret(monkeypatch, *args, **options)
    monkeypatch.setattr(prefill_configs, "MIN_QUERIES", 0)
    choice = prefill_configs.select_config.__wrapped__
    monkeypatch.setattr(hopper_prefill, "select_config", choice)
    monkeypatch.setattr(prefill_configs, "select_config", choice)
    backend = registry.load_backend("cuda")
    named = next(k for k in backend.kernels if k.name == "sm90_prefill")
    chosen = replace(named, repeat=None)
    monkeypatch.setattr(backend, "kernels", [chosen, *(k for k in backend.kernels if k is not named)])
    return kernel


def take_all(monkeypatch: pytest.MonkeyPatch, config: hopper_configs.Sm90Config | None = None) -> None:
    """From now on `variant="sm90"` takes what `refuses` would not for being small, with `config` or as if the grid were
    large."""
    # What is decided here must not outlive the patches.
    monkeypatch.setattr(planning, "plans", {})
    monkeypatch.setattr(hopper_configs, "FULL_GPU", 0)
    monkeypatch.setattr(hopper_configs, "SHORT_KV_LOOP", 0)
    monkeypatch.setattr(configs, "TMA_MIN_WORK", 0)
    monkeypatch.setattr(hopper_configs, "TMA_MIN_WORK", 0)
    choice = FROM_THE_TABLE if config is None else lambda problem: config
    for module in (hopper_configs, hopper_fwd_launch):
        monkeypatch.setattr(module, "select_config", choice)
    if config is not None:
        every_config = {
            (head_dim, mask): hopper_configs.CONFIGS[head_dim, False]
            for head_dim, _ in hopper_configs.CONFIGS
            for mask in (0, 1)
        }
        monkeypatch.setattr(hopper_configs, "CONFIGS", every_config)


def interpret_backward(
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    interleave: bool = False,
    kernels: ModuleType = hopper_bwd,
    form: str = "",
    fixed_order: bool = False,
    multiprocessors: int = MULTIPROCESSORS,
) -> InterpretedKernel:
    """From now on the backward of `variant="sm90"` runs here, its forward too; the result is its main kernel.

    `form`: which one must be chosen. `fixed_order`: dQ must be added up in one."""
    interpret(monkeypatch, FORWARD)
    found = {}
    for name, module in BACKWARD_KERNELS.items():
        function = getattr(kernels, name, None) or getattr(module, name)
        found[name] = InterpretedKernel(function, seed, interleave, fixed_order)
    for name, kernel in found.items():
        monkeypatch.setattr(hopper_bwd_launch, name, kernel)
    monkeypatch.setattr(hopper_bwd_configs, "environment_refusal", lambda: None)
    monkeypatch.setattr(hopper_bwd_launch, "multiprocessors", lambda device: multiprocessors)
    choose = hopper_bwd_launch._config

    def checked(problem: AttentionProblem) -> hopper_bwd_configs.Sm90BwdConfig:
        chosen = choose(problem)
        assert form in ("", chosen.form)
        return chosen

    monkeypatch.setattr(hopper_bwd_launch, "_config", checked)
    return found["_bwd_sm90_kernel"]


def run_backward(case: AttentionCase) -> dict[str, str]:
    """The results and gradients of `case` that miss their error budgets, in words."""
    inputs = make_inputs(case, "cpu")
    with poisoned_allocations():
        results = run_case(attention_function(case, backend="cuda", variant="sm90"), inputs)
    return _misses(results, case)


def run(case: AttentionCase, draws: int = YARDSTICK_DRAWS, device: str = "cpu") -> dict[str, str]:
    """Out and lse of `case` that miss their error budgets, of so many draws of inputs, in words."""
    inputs = make_inputs(case, device)
    attend = attention_function(case, backend="cuda", variant="sm90")
    with torch.no_grad(), poisoned_allocations():
        out, lse = attend(*inputs.leaves, return_lse=True, **inputs.options)
    results = Results(out.cpu(), lse.cpu(), *[None] * (len(Results._fields) - 2))
    misses = _misses(results, case, device, draws)
    return {name: words for name, words in misses.items() if name in ("out", "lse")}


def _misses(results: Results, case: AttentionCase, device: str = "cpu", draws: int = YARDSTICK_DRAWS) -> dict[str, str]:
    return {
        name: f"{case.name}: {name} {check.problem or check.error}, allowed {check.budget}"
        for name, check in check_budget(results, case, device, draws).items()
        if not check.share <= 1
    }


def near_the_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """Out and lse of a call are near float64's."""
    out, lse = diyfa.flash_attention(q, k, v, return_lse=True, backend="cuda", variant="sm90", **options)
    want, want_lse = diyfa.reference_attention(q, k, v, return_lse=True, dtype=torch.float64, **options)
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def load_kernel(sources: dict[str, str], folder: Path, modules: tuple[str, ...] = KERNEL_MODULES) -> ModuleType:
    """All that `modules` define, made anew with these sources (by module) in place of their own."""
    package = "diyfa.backends.cuda"
    before = {}
    found = ModuleType("mutant")
    try:
        for name in modules:
            path = folder / f"{name.replace('.', '_')}_mutant.py"  # a file, which the interpreter reads again
            path.write_text(sources.get(name) or kernel_source(name))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            before[name] = sys.modules[f"{package}.{name}"]
            sys.modules[f"{package}.{name}"] = module  # what those after it import
            vars(found).update(vars(module))
    finally:
        for name, original in before.items():
            sys.modules[f"{package}.{name}"] = original
    return found


def load_without_fallback(folder: Path) -> ModuleType:
    """The kernels without the second pass over tiles in which a fixed maximum was too small."""
    source, flagged = kernel_source("hopper.fwd"), "if flags.any_flagged() != 0:"
    assert source.count(flagged) == 1
    return load_kernel({"hopper.fwd": source.replace(flagged, "if False:")}, folder)


def kernel_source(name: str) -> str:
    return (Path(hopper_fwd.__file__).parents[1] / f"{name.replace('.', '/')}.py").read_text()


def load_changed(name: str, before: str, after: str, folder: Path) -> ModuleType:
    """All that module `name` defines, made anew with `after` in the one place where its source has `before`."""
    source = kernel_source(name)
    assert source.count(before) == 1
    return load_kernel({name: source.replace(before, after)}, folder, (name,))
