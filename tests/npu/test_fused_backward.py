"""The fused backward: dq added up atomically by the kernel of dk and dv, only where it is asked for by name."""

from __future__ import annotations

from typing import Any

import pytest
import test_npu_on_shim as shim
import test_training_features as training
import torch

import diyfa
from diyfa import registry
from diyfa.backends.npu import aot

DENSE = (
    "bf16-causal-gqa", "several-tiles", "more-queries-than-keys", "one-query", "one-key", "head-dim-17", "packed",
    "seq-lens", "seq-lens-causal", "window", "softcap", "everything",
)  # fmt: skip
PACKED = ("rows-of-no-sequence", "empty-sequences", "everything")
FEATURES = ("bias-fp32-of-bf16", "bias-scalar", "dropout-fp32-long", "everything")


def named(cases: Any, names: tuple[str, ...]) -> Any:
    """Those of `cases` as parameters; every name must exist."""
    found = {case.name: case for case in cases}
    return pytest.mark.parametrize("case", [found[name] for name in names], ids=names)


@named(shim.CASES, DENSE)
def test_against_dense(npu: torch.device, case: shim.Case) -> None:
    shim.check_against_dense(case, npu, "fused")


@named(training.PACKED, PACKED)
def test_packed_sequences(npu: torch.device, case: training.Packed) -> None:
    training.check_packed(case, npu, "fused")


@named(training.DENSE, FEATURES)
def test_features(npu: torch.device, case: training.Dense) -> None:
    training.check_dense(case, npu, "fused")


def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes for every launch of the backward pass whether it is the fused one."""
    from diyfa.backends.npu import bwd

    seen: list[bool] = []
    launch = bwd.attention_bwd

    def noted(*args: Any, fused: bool = False) -> None:
        seen.append(fused)
        launch(*args, fused=fused)

    monkeypatch.setattr(bwd, "attention_bwd", noted)
    return seen


def test_only_where_asked_for(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fused form dk and dv are the same bits, from the same kernel; without its name it never runs."""
    seen = launches(monkeypatch)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 70, 32) for _ in range(4))
    gradients = {}
    for variant in ("auto", "v2", "v1", "fused"):
        leaves = [x.to(npu).requires_grad_() for x in (q, k, v)]
        out = diyfa.flash_attention(*leaves, causal=True, variant=variant)
        gradients[variant] = [x.cpu() for x in torch.autograd.grad(out, leaves, dout.to(npu))]
    assert seen == [False, False, False, True]
    for one, other in zip(gradients["fused"][1:], gradients["v2"][1:], strict=True):
        assert torch.equal(one, other)


def test_deterministic_is_refused(npu: torch.device) -> None:
    q = torch.randn(1, 1, 16, 32, dtype=torch.float16).to(npu).requires_grad_()
    with pytest.raises(ValueError, match="deterministic gradients need one order of additions"):
        diyfa.flash_attention(q, q, q, variant="fused", deterministic=True)
    assert diyfa.kernels_for("npu", "attention_bwd") == ["v2", "fused"]


@pytest.mark.parametrize(
    ("arch", "head_dim", "fits"),
    [("Ascend950PR_9589", 256, True), ("Ascend950PR_9589", 257, False), ("Ascend910B3", 576, True)],
)
def test_wide_heads_are_refused_on_the_950(arch: str, head_dim: int, fits: bool) -> None:
    backend = registry.load_backend("npu")
    kernel = next(k for k in backend.kernels if (k.op, k.name) == ("attention_bwd", "fused"))
    reason = kernel.unsupported(aot.example(arch, head_dim=head_dim, head_dim_v=min(head_dim, 512)))
    assert reason is None if fits else f"head_dim {head_dim} do not fit the 950's L0C" in reason
