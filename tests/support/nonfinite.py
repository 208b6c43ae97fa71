"""NaN and infinities put into the inputs of a call, and what of its results they may reach."""

from __future__ import annotations

import torch
from targets import Target

from diyfa.testing import (
    AttentionCase,
    Inputs,
    Results,
    assert_within_budget,
    attention_function,
    make_inputs,
    run_case,
)


def poison(inputs: Inputs, case: AttentionCase, name: str, value: float, at: int, feature: int = 3) -> Inputs:
    """`inputs` with `value` in one element of row `at` of the first sample and head of one of its tensors; of the bias
    in its element `at`, of the sinks in one of them."""
    x = inputs.options[name] if name in ("attn_bias", "sinks") else getattr(inputs, name)
    with torch.no_grad():
        if name in ("attn_bias", "sinks"):
            x.view(-1)[at % x.numel()] = value
        else:
            row = x[at, 0] if case.layout == "thd" else x[0, at, 0] if case.layout == "bshd" else x[0, 0, at]
            row[..., feature] = value
    return inputs


def same_nonfinite(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether both have NaN, +inf and -inf in the same places."""
    want = want.to(got.device)
    same = (f(got).equal(f(want)) for f in (torch.isnan, torch.isposinf, torch.isneginf))
    return all(same)


def others(x: torch.Tensor, field: str, case: AttentionCase) -> list[torch.Tensor]:
    """What of a result belongs to other samples or packed sequences than the first."""
    if case.lens_q is None:
        return [x[1:]]
    lens = case.key_lens if field in ("dk", "dv") else case.lens_q
    return [x[..., lens[0] :] if field == "lse" else x[lens[0] :]]


def assert_shows_in_what_depends(target: Target, case: AttentionCase, variant: str, name: str, value: float) -> None:
    """What is not finite on the CPU backend, which keeps values apart by rows, is not here either; other samples and
    sequences are as without the poison, and what is finite is right."""
    at = 23
    got, want = (
        run_case(
            attention_function(case, backend=backend, variant=how),
            poison(make_inputs(case, device), case, name, value, at),
        )
        for backend, device, how in ((target.backend, target.device, variant), ("cpu", "cpu", "auto"))
    )
    clean = run_case(
        attention_function(case, backend=target.backend, variant=variant), make_inputs(case, target.device)
    )
    rest = []
    for field, x, y, z in zip(Results._fields, got, want, clean, strict=True):
        if x is None:
            rest.append(None)
            continue
        # lse is +inf where a row sees nothing, poison or not
        depends = ~y.isfinite() & z.isfinite()
        assert not bool((depends & x.isfinite()).any()), f"{field}: hides what it depends on"
        if field in ("out", "lse", "dq", "dk", "dv"):
            for other, before in zip(others(x, field, case), others(z, field, case), strict=True):
                assert torch.equal(other, before), f"{field}: another sample or sequence has changed"
        rest.append(torch.where(x.isfinite(), x, z))
    assert_within_budget(Results(*rest), case, target.oracle_device)
