"""Repeated calls of which one tensor lies in memory otherwise: what is remembered of the others must not be used."""

from __future__ import annotations

import pytest
import torch
from targets import TARGETS

import diyfa

SIZES = {"q": (2, 2, 9, 16), "k": (2, 2, 12, 16), "v": (2, 2, 12, 16), "dout": (2, 2, 9, 16), "dlse": (2, 2, 9)}
SIZES |= {"attn_bias": (2, 2, 9, 12), "alibi_slopes": (2, 2)}
ON_THE_HOST = [name for name, target in TARGETS.items() if target.computes]


def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers with other strides; the last stays 1 but for "last", which only gradients may have."""
    if how == "swapped":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "inner" and x.dim() > 2:  # the dimension before the last goes outermost
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    if how == "last":
        return x.mT.contiguous().mT
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), float("nan"))  # "padded"
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("features", [False, True], ids=["plain", "features"])
@pytest.mark.parametrize("backend", ON_THE_HOST)
def test_each_tensor_may_lie_otherwise_in_a_repeated_call(backend: str, features: bool) -> None:
    device = TARGETS[backend].device
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(size, generator=generator).to(device) for name, size in SIZES.items()}

    def call(**changed: torch.Tensor) -> list[torch.Tensor]:
        given = {**tensors, **changed}
        leaves = [given[name].detach().requires_grad_() for name in "qkv"]
        options = {name: given[name] for name in ("attn_bias", "alibi_slopes")} if features else {}
        results = []
        with torch.no_grad():  # the calls that are repeated most
            results += diyfa.flash_attention(*leaves, True, return_lse=True, backend=backend, **options)
        out, lse = diyfa.flash_attention(*leaves, True, return_lse=True, backend=backend, **options)
        results += torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"]), retain_graph=True)
        return results + ([] if features else list(torch.autograd.grad(out, leaves, given["dout"])))

    want = [call() for _ in range(3)][-1]  # settled, by now
    for name in ("q", "attn_bias", "alibi_slopes") if features else ("q", "k", "v", "dout", "dlse"):
        ways = ["swapped", "padded", *(["inner"] if tensors[name].dim() > 2 else [])]
        for how in [*ways, *(["last"] if name in ("dout", "dlse") else [])]:
            changed = laid(tensors[name], how)
            assert changed.stride() != tensors[name].stride()
            for i, (a, b) in enumerate(zip(call(**{name: changed}), want, strict=True)):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=f"{name} {how}: result {i}")
        for a, b in zip(call(), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if features:  # one slope for each head, or for each sample and head
        row = tensors["alibi_slopes"][0].contiguous()
        for a, b in zip(call(alibi_slopes=row), call(alibi_slopes=row.repeat(2, 1)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
