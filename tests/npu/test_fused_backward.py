"""The fused backward: dq in parts from the kernel of dk and dv, only where it is asked for by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import test_npu_on_shim as shim
import test_training_features as training
import torch

import diyfa
from diyfa import registry
from diyfa.backends.npu.attention import bwd
from diyfa.backends.npu.compiler import aot
from diyfa.backends.npu.tables import configs

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
    from diyfa.backends.npu.attention import bwd

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


def test_it_is_deterministic(npu: torch.device) -> None:
    """Every part of dq is summed by one program and the parts in their order, so it may be asked for by both names."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, n, 32, dtype=torch.float16).to(npu) for n in (70, 400, 400, 70))
    gradients = []
    for deterministic in (True, True, False):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = diyfa.flash_attention(*leaves, variant="fused", deterministic=deterministic)
        gradients.append([x.cpu() for x in torch.autograd.grad(out, leaves, dout)])
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))
    assert diyfa.kernels_for("npu", "attention_bwd") == ["v2", "fused"]


SHARES = {  # batch, heads, keys, cores: shares, with tiles of 64 keys
    (1, 20, 8192, 20): 1,
    (2, 16, 8192, 20): 3,  # 96 tasks for 100 places, instead of 32 for 40
    (2, 16, 8192, 24): 3,
    (1, 1, 8192, 20): 19,  # 7 tiles of keys each, as with 20
    (1, 8, 64, 20): 1,
    (1, 8, 130, 20): 2,
    (3, 1, 0, 20): 1,
}


@pytest.mark.parametrize("sizes", SHARES, ids=str)
def test_shares(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, keys, cores = sizes
    problem = aot.example("Ascend910B3", batch=batch, heads_q=2 * heads, heads_kv=heads, seqlen_q=keys, seqlen_k=keys)
    assert configs.key_shares(problem, 64, cores) == SHARES[sizes]


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [
        ("Ascend910B3", {"float16"}),
        ("Ascend910_9362", {"float16"}),
    ],
)
def test_tile_with_a_mask_everywhere(arch: str, dtypes: set[str]) -> None:
    """Where dk/dv's tile has no room for it, another; the gate compiles it (`aot.always_masked_jobs`)."""
    for dtype, head_dim, window_right in itertools.product(("float16", "float32"), (64, 128, 256), (-1, 0)):
        problem = aot.example(arch, dtype=dtype, head_dim=head_dim, window_right=window_right)
        usual, always = (configs.fused_tile(problem, always_mask) for always_mask in (False, True))
        assert usual == configs.attention_tile(problem, "dkdv")
        changes = head_dim == 64 and dtype in dtypes
        assert ((always.block_m, always.block_n) == (64, 128)) if changes else (always == usual)
    jobs = [job for job in aot.always_masked_jobs(arch) if job.step == "fused"]
    assert {job.case.split()[0] for job in jobs} == dtypes
    assert {(job.case.split()[-1], job.constants["ALWAYS_MASK"]) for job in jobs} == {("64x128", True)}


def test_a_mask_everywhere_is_refused_on_the_950(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward tiles would not compile, so every kernel says which variable to unset."""
    kernels = [k for k in registry.load_backend("npu").kernels if k.op.startswith("attention")]
    problems = {arch: aot.example(arch, window_right=0) for arch in ("Ascend950PR_9589", "Ascend910B3")}
    for always in (False, True):
        monkeypatch.setattr(configs, "ALWAYS_MASK", always)
        for kernel in kernels:
            reasons = {arch: kernel.unsupported(problem) for arch, problem in problems.items()}
            assert reasons["Ascend910B3"] is None
            reason = reasons["Ascend950PR_9589"]
            assert (reason is not None and "DIYFA_NPU_ALWAYS_MASK=1" in reason and "unset" in reason) == always


def test_a_mask_everywhere(npu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIYFA_NPU_ALWAYS_MASK=1, with several tiles of keys and rows, the last ones partial."""
    monkeypatch.setattr(configs, "ALWAYS_MASK", True)
    case = shim.Case("always-mask", torch.float16, seqlen_q=150, seqlen_k=300, head_dim=48, causal=True)
    problem = aot.example("Ascend910B3", head_dim=48, window_right=0)
    assert (configs.fused_tile(problem).block_m, configs.fused_tile(problem).block_n) == (64, 128)
    monkeypatch.setattr(shim, "CASES", [case])  # which seeds its inputs
    shim.check_against_dense(case, npu, "fused")


@pytest.mark.parametrize("changes", [{}, {"seq_lens": (250, 10)}], ids=["dense", "seq-lens"])
def test_several_tiles_in_each_share(
    npu: torch.device, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of three and of four tiles of keys, the last tile partial; seq_lens leave some without work."""
    monkeypatch.setattr(bwd, "key_shares", lambda *_: 2)
    batch = 2 if changes else 1
    case = shim.Case("shares", torch.float32, batch=batch, seqlen_q=150, seqlen_k=430, causal=True, **changes)
    monkeypatch.setattr(shim, "CASES", [case])  # which seeds its inputs
    problem = aot.example("Ascend910B3", dtype="float32", head_dim=64, window_right=0)
    assert bwd.bwd_tiles(problem)["dkdv"].block_n == 64
    shim.check_against_dense(case, npu, "fused")


@pytest.mark.parametrize(
    ("arch", "head_dim", "fits"),
    [("Ascend950PR_9589", 256, True), ("Ascend950PR_9589", 257, False), ("Ascend910B3", 576, True)],
)
def test_wide_heads_are_refused_on_the_950(arch: str, head_dim: int, fits: bool) -> None:
    backend = registry.load_backend("npu")
    kernel = next(k for k in backend.kernels if (k.op, k.name) == ("attention_bwd", "fused"))
    reason = kernel.unsupported(aot.example(arch, head_dim=head_dim, head_dim_v=min(head_dim, 512)))
    assert reason is None if fits else f"head_dim {head_dim} do not fit the 950's L0C" in reason
