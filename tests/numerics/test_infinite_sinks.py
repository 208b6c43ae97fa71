"""Sinks of -inf, which are none, of +inf, which make their head NaN as a softmax over an infinite score is, and of the
largest finite numbers.

On every backend, forward and backward, also for rows that see no key, in tiles of their own and beside rows that do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from targets import TARGETS, Target

import diyfa
from diyfa.reference import reference_attention

INF = float("inf")
ROWS, KEYS = 170, 30  # the first 140 rows see nothing under a causal mask: more than a tile of 128

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window_softcap": {"window": (5, 2), "softcap": 10.0},
    "lengths": {"causal": True, "seq_lens": (28,)},
    "row_bias": {"causal": True, "bias": True},
    # The bottom-right triangle, as a block mask. All gradients of q are 0 or NaN.
    "row_bias_mask": {"bias": True, "mask": True, "sm_scale": 0.0},
    "packed": {"causal": True, "layout": "thd"},  # the last sequence has no keys
    "no_keys": {"keys": 0},
}
VARIANTS = {"cpu": ("v2", "v1"), "npu": ("auto", "v2")}


def call(target: Target, variant: str, sinks: torch.Tensor | None, **options: Any) -> dict[str, torch.Tensor]:
    """Results of one call, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    keys, packed = options.pop("keys", KEYS), options.pop("layout", "bhsd") == "thd"
    shapes = [(1, heads, rows, 16) for heads, rows in ((4, ROWS), (2, keys), (2, keys), (4, ROWS))]
    *inputs, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    dlse = torch.randn(1, 4, ROWS, generator=generator)
    bias = torch.randn(1, 4, ROWS, 1, generator=generator) if options.pop("bias", False) else None
    if options.pop("mask", False):
        keep = torch.ones(ROWS, keys, dtype=torch.bool).tril(keys - ROWS)
        options["mask"] = diyfa.BlockMask.from_dense(keep).to(target.device)
    if "seq_lens" in options:
        options["seq_lens"] = torch.tensor(options["seq_lens"], dtype=torch.int32).to(target.device)
    if packed:  # the rows before and after the sequences belong to none
        inputs, dout = [x.transpose(1, 2).flatten(0, 1) for x in inputs], dout.transpose(1, 2).flatten(0, 1)
        dlse = dlse.transpose(0, 1).flatten(1)
        cu_q, cu_k = ([3, 120, 120, 148], [5, 25, 25, 25])
        offsets = [torch.tensor(x, dtype=torch.int32).to(target.device) for x in (cu_q, cu_k)]
    named = {**dict(zip(("dq", "dk", "dv"), inputs, strict=True)), "dsinks": sinks, "dbias": bias}
    leaves = {name: x.to(target.device).requires_grad_() for name, x in named.items() if x is not None}
    if target.backend == "reference":
        options |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "layout": "thd"} if packed else {}
        attend = reference_attention
    else:
        options |= {"backend": target.backend, "variant": variant}
        attend = diyfa.flash_attention
        if packed:
            attend = diyfa.flash_attention_varlen
            options |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "max_seqlen_q": 117, "max_seqlen_k": 20}
    out, lse = attend(
        leaves["dq"], leaves["dk"], leaves["dv"], return_lse=True, sinks=leaves.get("dsinks"),
        **({"attn_bias": leaves["dbias"]} if bias is not None else {}), **options,
    )  # fmt: skip
    results = {"out": out, "lse": lse}
    if target.backend != "reference":
        gradients = torch.autograd.grad(
            [out, lse], list(leaves.values()), [dout.to(target.device), dlse.to(target.device)]
        )
        results |= dict(zip(leaves, gradients, strict=True))
    return {name: x.detach().cpu() for name, x in results.items()}


CPU, REFERENCE = Target("cpu", "cpu", False), Target("reference", "cpu", False)
COMBINATIONS = [
    (backend, variant, name) for backend in TARGETS for variant in VARIANTS.get(backend, ("auto",)) for name in CASES
]


def served(target: Target, name: str) -> AbstractContextManager[object]:
    """Without a key the sinks are all there is, and PyTorch's operators do the rest: the host shim has none."""
    if target.computes or name != "no_keys":
        return nullcontext()
    from npu_interpreter import WITHOUT_KEYS, on_the_host

    return on_the_host(*WITHOUT_KEYS)


@pytest.mark.parametrize(("backend", "variant", "name"), COMBINATIONS)
def test_a_sink_of_minus_infinity_is_none(backend: str, variant: str, name: str) -> None:
    """To the bit, with gradient 0."""
    target = TARGETS[backend]
    with served(target, name):
        got = call(target, variant, torch.full((4,), -INF), **CASES[name])
        want = call(target, variant, None, **CASES[name])
    assert int(got.pop("dsinks").count_nonzero()) == 0
    assert got.keys() == want.keys()
    for field, x in got.items():
        assert torch.equal(x, want[field]), field


@pytest.mark.parametrize(("backend", "variant", "name"), COMBINATIONS)
def test_infinite_sinks_beside_others(backend: str, variant: str, name: str) -> None:
    """Each in one head; out and lse as the reference has them, gradients as the CPU backend."""
    target, sinks = TARGETS[backend], torch.tensor([0.5, -INF, INF, 1.0])
    with served(target, name):
        got = call(target, variant, sinks, **CASES[name])
    want = call(CPU, "auto", sinks, **CASES[name]) | call(REFERENCE, "", sinks, **CASES[name])
    assert got.keys() == want.keys()
    assert bool(want["out"].isnan().any()) and bool(want["dsinks"].isnan()[2])
    assert_close(got, want)


@pytest.mark.parametrize(("backend", "variant", "name"), COMBINATIONS)
def test_sinks_as_large_as_there_are(backend: str, variant: str, name: str) -> None:
    """float32 does not hold them in units of log2. They leave nothing to other keys, or are as good as none."""
    target, largest = TARGETS[backend], torch.finfo(torch.float32).max
    sinks = torch.tensor([3e38, largest, 1e20, -largest if name == "full" else 1.0])
    with served(target, name):
        got = call(target, variant, sinks, **CASES[name])
    want = call(CPU, "auto", sinks, **CASES[name]) | call(REFERENCE, "", sinks, **CASES[name])
    assert not any(bool(x.isnan().any()) for x in want.values())
    assert_close(got, want)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for field, x in got.items():
        torch.testing.assert_close(
            x, want[field], rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, f=field: f"{f}: {m}"
        )
