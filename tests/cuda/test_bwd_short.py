"""The backward of sequences that one tile holds (`backends/cuda/attention/bwd_short.py`).

The matrix of cases runs it wherever it is the preferred kernel; here are the kernels for any length on those cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES
from described_cases import problem_of
from poison import poisoned_allocations
from targets import TARGETS

if "cuda" not in TARGETS:
    pytest.skip("the cuda backend is not tested in this run", allow_module_level=True)

import diyfa
from diyfa import plan as planning
from diyfa import registry
from diyfa.backends.cuda.attention import bwd
from diyfa.backends.cuda.runtime import tune
from diyfa.testing import assert_within_budget, attention_function, make_inputs, run_case

TARGET = TARGETS["cuda"]
BACKEND = registry.load_backend("cuda")
(SHORT,) = (kernel for kernel in BACKEND.kernels if kernel.name == "short")
WHOLE = ["_bwd_preprocess_kernel", "_bwd_dkdv_kernel", "_bwd_dq_kernel"]


def is_short(name: str) -> bool:
    """Whether the kernel takes the case on a Hopper GPU."""
    problem = problem_of(CASES[name]).replace(arch="sm_90")
    return not CASES[name].large and registry.refusal(BACKEND, SHORT, problem) is None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels of backward passes, none of which has a plan yet; all take the table's tiles, since a tuner
    that measures launches many times."""
    names: list[str] = []
    monkeypatch.setattr(tune._tuner, "enabled", False)
    launch = bwd.launch_kernel
    monkeypatch.setattr(bwd, "launch_kernel", lambda one: names.append(one.kernel.__name__) or launch(one))
    monkeypatch.setattr(planning, "plans", {})
    return names


@pytest.mark.parametrize("name", [name for name in CASES if is_short(name)])
def test_kernels_for_any_length(name: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    monkeypatch.setattr(BACKEND, "kernels", tuple(kernel for kernel in BACKEND.kernels if kernel is not SHORT))
    inputs = make_inputs(CASES[name], TARGET.device)
    with poisoned_allocations():
        results = run_case(attention_function(CASES[name], backend="cuda"), inputs)
    assert_within_budget(results, CASES[name], TARGET.oracle_device)
    assert launched[:3] == (WHOLE if launched else [])  # without a query or a key there is nothing to launch


def gradients(n: int, heads_kv: int = 6, row: int = 32, **options: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of windows of n tokens; rows of the gradient that they are of lie `row` elements apart."""
    generator = torch.Generator(TARGET.device).manual_seed(0)

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(2, n, heads, 32, generator=generator, device=TARGET.device).to(torch.bfloat16)

    q, k, v = (tensor(heads).requires_grad_() for heads in (6, heads_kv, heads_kv))
    dout = torch.cat([tensor(6), tensor(6)], -1)[..., :row].contiguous()[..., :32]
    out = diyfa.flash_attention_v2(q, k, v, backend="cuda", **options)
    return torch.autograd.grad(out, (q, k, v), dout)


def test_one_launch_where_one_tile_holds_a_sequence(launched: list[str]) -> None:
    for arguments, expected in (
        ({"n": 64}, ["_bwd_short_kernel"]),
        ({"n": 50, "causal": True, "deterministic": True}, ["_bwd_short_kernel"]),
        ({"n": 65}, WHOLE),
        ({"n": 64, "heads_kv": 3}, WHOLE),  # a loop over heads takes 40 registers
    ):
        launched.clear()
        gradients(**arguments)
        assert launched == expected, arguments


def test_explained() -> None:
    q = torch.empty(2, 64, 6, 32, dtype=torch.bfloat16, device=TARGET.device, requires_grad=True)
    explained = diyfa.explain(q, q, q, layout="bshd", backend="cuda").backward
    assert explained.kernel == "short" and explained.config.block_m == 64
    longer = torch.empty(2, 65, 6, 32, dtype=torch.bfloat16, device=TARGET.device, requires_grad=True)
    assert "holds 65 queries" in str(diyfa.explain(longer, longer, longer, layout="bshd", backend="cuda").backward)
    assert "short" in diyfa.kernels_for("cuda", "attention_bwd")


def test_a_gradient_that_is_not_aligned(launched: list[str]) -> None:
    """It is read through addresses as any other, by the same tile: the same bits."""
    for x, y in zip(gradients(64), gradients(64, row=33), strict=True):
        assert torch.equal(x, y)
    assert launched == ["_bwd_short_kernel"] * 2
