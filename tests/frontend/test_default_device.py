"""`torch.set_default_device` changes nothing: the library names the device of all that it makes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcache_cases import KVCACHE_CASES, make_call
from targets import TARGETS

import diyfa
from diyfa import registry, testing

ROOT = Path(diyfa.__file__).parent
# What PyTorch makes on its default device. `new_empty`, `empty_like` and the like follow a tensor.
FACTORIES = frozenset([
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
])  # fmt: skip


def _without_device(source: str) -> list[str]:
    """Calls of PyTorch's factories in `source` that name no device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def test_every_factory_names_its_device() -> None:
    found = {}
    for folder in (ROOT, ROOT / "backends"):  # which is a link, and not followed
        for path in folder.rglob("*.py"):
            if path.parts[-2] == "course":  # a learner's functions run on the default device
                continue
            if calls := _without_device(path.read_text(encoding="utf-8")):
                found[str(path.relative_to(ROOT))] = calls
    assert not found
    assert _without_device("torch.arange(3)") == ["line 1: torch.arange(3)"]
    assert not _without_device("torch.arange(3, device=x.device), x.new_zeros(3), torch.ones(3, **options)")


def _trains(device: str) -> Any:
    """out, lse and gradients of a call with lengths, a bias, slopes and dropout."""
    q, k, v = (torch.ones(2, 2, 20, 16, device=device).cumsum(i + 1).requires_grad_() for i in range(3))
    options = {
        "seq_lens": torch.tensor([7, 20], dtype=torch.int32, device=device), "causal": True, "dropout_p": 0.25,
        "alibi_slopes": torch.full((2,), 0.1, device=device), "attn_bias": torch.ones(20, 20, device=device),
        "rng_state": torch.tensor([1, 2], device=device),
    }  # fmt: skip
    out, lse = diyfa.flash_attention(q / 100, k / 100, v / 100, return_lse=True, **options)
    return out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))


def _over_cache(device: str) -> Any:
    with torch.device("cpu"):
        given = make_call(KVCACHE_CASES["kvcache_rotary"])
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return diyfa.flash_attn_with_kvcache(return_softmax_lse=True, **given)


@pytest.mark.parametrize("call", [_trains, _over_cache])
@pytest.mark.parametrize("backend", [name for name in TARGETS if name != "npu"])
def test_another_default_device_changes_nothing(backend: str, call: Callable[[str], Any]) -> None:
    target = TARGETS[backend]
    with registry.use_backend(target.backend):
        want = call(target.device)
        try:
            torch.set_default_device("meta")
            got = call(target.device)
        finally:
            torch.set_default_device(None)
    for x, y in zip(got, want, strict=True):
        assert x.device.type == torch.device(target.device).type
        torch.testing.assert_close(x, y)


def test_inputs_are_made_on_the_requested_device() -> None:
    case = testing.AttentionCase("case", seqlen_q=20, seqlen_k=20, dropout_p=0.2, seq_lens=(9, 20), batch=2)
    try:
        torch.set_default_device("meta")
        inputs = testing.make_inputs(case, "cpu")
    finally:
        torch.set_default_device(None)
    given = [*inputs.leaves, *(x for x in inputs.options.values() if isinstance(x, torch.Tensor))]
    assert all(x.is_cpu for x in given)
