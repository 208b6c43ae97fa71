"""DIYFA_NPU_ALWAYS_MASK=1: a mask in every tile."""

from __future__ import annotations

import pytest
import test_npu_on_shim as shim
import torch

from diyfa import registry
from diyfa.backends.npu.tables import configs
from diyfa.lab.npu import specs


def test_a_mask_everywhere_is_refused_on_the_950(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward tiles would not compile, so every kernel says which variable to unset."""
    kernels = [k for k in registry.load_backend("npu").kernels if k.op.startswith("attention")]
    problems = {arch: specs.example(arch, window_right=0) for arch in ("Ascend950PR_9589", "Ascend910B3")}
    for always in (False, True):
        monkeypatch.setattr(configs, "ALWAYS_MASK", always)
        for kernel in kernels:
            mode = {"batch_invariant": kernel.name == "split_kv"}  # which runs in that mode only
            reasons = {arch: kernel.unsupported(problem.replace(**mode)) for arch, problem in problems.items()}
            assert reasons["Ascend910B3"] is None
            reason = reasons["Ascend950PR_9589"]
            assert (reason is not None and "DIYFA_NPU_ALWAYS_MASK=1" in reason and "unset" in reason) == always


def test_a_mask_everywhere(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several tiles of keys and rows, the last ones partial."""
    monkeypatch.setattr(configs, "ALWAYS_MASK", True)
    shim.check(shim.case("always-mask", seqlen_q=150, seqlen_k=300, head_dim=48, causal=True), npu)


@pytest.mark.parametrize("arch", ["Ascend910B3", "Ascend910_9362"])
def test_tiles_with_a_mask_everywhere(arch: str) -> None:
    """Where a tile has no room for it, another; the gate compiles it (`specs.always_masked_jobs`)."""
    jobs = list(specs.always_masked_jobs(arch))
    assert {job.step for job in jobs} == {"fwd", "dkdv"} and all(job.constants["c"].always_mask for job in jobs)
    for job in jobs:
        assert job.tile != configs.attention_tile(job.problem, job.step)
