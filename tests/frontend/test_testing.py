"""The instruments: poisoning poisons, the budget refuses what it must, validate_* tell right from wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from poison import poisoned_allocations

import diyfa
from diyfa import testing
from diyfa.reference import reference_attention
from diyfa.testing import (
    AttentionCase,
    Error,
    Results,
    assert_within_budget,
    check_budget,
    error_budget,
    expected_results,
    make_inputs,
    measure_error,
    rounding_unit,
    run_case,
    yardstick_results,
    yardsticks,
)
from diyfa.yardstick import plain_flash_attention

CASE = CASES["everything"]


def test_poisoning_reaches_every_allocation() -> None:
    x = torch.zeros(3, 4, dtype=torch.float16)
    allocations = (
        lambda: torch.empty(5),
        lambda: torch.empty((2, 3), dtype=torch.bfloat16),
        lambda: torch.empty_like(x.t()),
        lambda: torch.empty_strided((2, 3), (1, 2)),
        lambda: x.new_empty((2, 2), dtype=torch.float64),
        lambda: x.new_empty_strided((2, 3), (3, 1)),
    )
    with poisoned_allocations():
        for allocate in allocations:
            assert bool(allocate().isnan().all())
        assert int(torch.empty(3, dtype=torch.int32).min()) == 2**31 - 1
        assert bool(torch.zeros(3).eq(0).all())
    before = torch.empty, torch.Tensor.new_empty
    with pytest.raises(RuntimeError, match="inside"), poisoned_allocations():
        raise RuntimeError("inside")
    assert (torch.empty, torch.Tensor.new_empty) == before and torch.empty.__name__ == "empty"


def test_error_counts_nan_and_misplaced_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    want = torch.tensor([1.0, inf, -inf, 0.0], dtype=torch.float64)
    assert measure_error(want.clone(), want) == (0.0, 0.0)
    for wrong in ([nan, inf, -inf, 0.0], [1.0, 1.0, -inf, 0.0], [1.0, inf, inf, 0.0], [1.0, inf, -inf, inf]):
        assert measure_error(torch.tensor(wrong), want).max_abs == inf
    assert measure_error(want.clone(), torch.full_like(want, nan)).max_abs == inf
    assert measure_error(torch.tensor([1.5, inf, -inf, 0.0]), want) == (0.5, 0.25)
    with pytest.raises(ValueError, match="shapes differ"):
        measure_error(want[:3], want)


def test_budget_is_twice_the_yardstick_and_a_unit() -> None:
    want = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    unit = rounding_unit(want, torch.float16)
    assert unit == pytest.approx((2**-11, 2**-11 / 3**0.5), rel=0.01)
    assert error_budget(Error(0.25, 0.125), unit) == pytest.approx((0.5 + unit.max_abs, 0.25 + unit.rms))
    assert rounding_unit(want[:0], torch.float16) == rounding_unit(want[:3] * float("inf"), torch.float16) == (0.0, 0.0)


@pytest.mark.parametrize(
    "name", ["s64", "fp32", "peaked_8_bfloat16", "sinks_16_float16", "bias_large_fp32", "scale_zero"]
)
def test_the_lse_has_the_budget_of_float32(name: str) -> None:
    """2**-20 of the largest score beside the yardstick, whatever the dtype of q is: not to 16 bits."""
    case = CASES[name]
    inputs, want = make_inputs(case), expected_results(case)
    q, k = inputs.q.detach().double(), inputs.k.detach().double()
    scores = (q @ k.mT) * (case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale)
    largest = float(scores.abs().max()) + 20 * 5 * bool(case.bias) + case.sink_offset + 4
    checked = check_budget(yardstick_results(case), case)["lse"]
    assert checked.share <= 0.5 and checked.budget.max_abs < 2**-18 * largest
    for nats in (1e-4 * largest, -1e-4 * largest):
        wrong = yardstick_results(case)._replace(lse=(want.lse + nats).float())
        assert check_budget(wrong, case)["lse"].share > 1


def wrong_throughout(case: AttentionCase) -> Results:
    """Results for which all draws are looked at."""
    return Results(*(None if x is None else x + 10 for x in yardstick_results(case)))


def test_luck_is_bounded() -> None:
    """The error of one number is a matter of luck: its budget is a few standard errors on these inputs, not many."""
    ratios = []
    for seed in range(12):
        case = AttentionCase("one", heads=1, seqlen_q=24, head_dim=16, sinks=True, seed=seed)
        draws = [replace(case, nudge=1000 + i) for i in range(24)]
        errors = [measure_error(yardstick_results(x).dsinks, expected_results(x).dsinks).rms for x in draws]
        sigma = (sum(error**2 for error in errors) / len(errors)) ** 0.5
        ratios.append(check_budget(wrong_throughout(case), case)["dsinks"].budget.max_abs / sigma)
    assert 3 < sum(ratios) / len(ratios) < 5


def test_nudged_inputs_are_other_inputs_of_the_same_problem() -> None:
    own, nudged, again = (make_inputs(replace(CASE, nudge=n)) for n in (0, 1, 1))
    for name in ("q", "k", "v", "dout", "dlse"):
        a, b, c = (getattr(x, name).nan_to_num() for x in (own, nudged, again))
        assert torch.equal(b, c) and not torch.equal(a, b), name
        assert bool(((a - b).abs() <= a.abs() * 1.05 / 32).all()), name


def test_the_yardstick_is_as_exact_as_pytorchs_flash_attention() -> None:
    """Its forward and backward pass against the one PyTorch has for CPUs: no worse, or budgets were too wide."""
    for dtype, causal in product((torch.float16, torch.bfloat16), (False, True)):
        case = AttentionCase("sdpa", heads=4, seqlen_q=200, head_dim=64, causal=causal, dtype=str(dtype)[6:])
        inputs, want = make_inputs(case), expected_results(case)
        zero = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
        mine = run_case(plain_flash_attention, zero)
        want = run_case(partial(reference_attention, dtype=torch.float64), zero._replace(dout=inputs.dout.double()))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)
            theirs = (out, *torch.autograd.grad(out, inputs.leaves, inputs.dout))
        for name, theirs_x in zip(("out", "dq", "dk", "dv"), theirs, strict=True):
            exact = getattr(want, name)
            error = measure_error(getattr(mine, name), exact)
            assert error.rms <= 1.1 * measure_error(theirs_x, exact).rms, (name, dtype, causal)


def test_yardstick_is_the_worst_of_its_draws() -> None:
    errors = yardsticks(CASE)
    own = measure_error(yardstick_results(CASE).out, expected_results(CASE).out)
    assert errors["out"].max_abs >= own.max_abs > 0
    assert set(errors) == {name for name, x in expected_results(CASE)._asdict().items() if x is not None}
    overflowing = AttentionCase("overflow", sm_scale=1e6, seqlen_q=8)
    with pytest.raises(ValueError, match=r"a plain FlashAttention's .* in float16 is not finite"):
        yardsticks(overflowing)


def test_budget_refuses_wrong_results() -> None:
    good = yardstick_results(CASE)
    assert_within_budget(good, CASE)
    for name, value in good._asdict().items():
        if value is None:  # no such input
            continue
        finite = value.isfinite()
        scale = value[finite].double().square().mean().sqrt()
        shifted = (value.double() + 0.05 * scale).to(value.dtype)
        poisoned = value.clone()
        poisoned[(0,) * value.dim()] = float("nan")
        for wrong in (shifted, poisoned, value.double(), value[..., :-1], None):
            with pytest.raises(AssertionError, match=f"{name}:"):
                assert_within_budget(good._replace(**{name: wrong}), CASE)


@pytest.mark.parametrize("name", CASES)
def test_inputs_match_the_case(name: str) -> None:
    case = CASES[name]
    inputs, again = make_inputs(case), make_inputs(case)
    b, h, hk, sq, sk, d, dv = case.sizes
    samples, rows_q, rows_k = case.rows
    q_shape = {"bhsd": (b, h, sq, d), "bshd": (b, sq, h, d), "3d": (b * h, sq, d), "thd": (rows_q, h, d)}[case.layout]
    assert inputs.q.shape == q_shape
    assert inputs.v.numel() == samples * hk * rows_k * dv and inputs.dlse.numel() == samples * h * rows_q
    assert all(x.is_leaf and x.requires_grad and x.stride(-1) == 1 for x in inputs.leaves)
    assert len(inputs.leaves) == {"": 3, "kv": 2, "qkv": 1}[case.packing]
    if case.lens_q is not None:
        for cu, lens in (("cu_seqlens_q", case.lens_q), ("cu_seqlens_k", case.key_lens)):
            assert inputs.options[cu].diff().tolist() == list(lens) and inputs.options[cu].dtype == torch.int32
        end = sum(case.lens_q)
        assert bool(inputs.q[end:].isnan().all()) and bool(inputs.q[:end].isfinite().all())
        assert bool(inputs.dlse[:, end:].isnan().all()) and inputs.options["max_seqlen_k"] == sk + case.slack
    if case.dropout_p:
        assert torch.equal(inputs.options["rng_state"], again.options["rng_state"])
    if case.view != "contiguous":
        assert not inputs.q.is_contiguous()
    assert torch.equal(inputs.q.detach().nan_to_num(7), again.q.detach().nan_to_num(7))
    if case.seq_lens is not None and min(case.seq_lens) < max(sq, sk):
        assert bool(inputs.q.isnan().any()) or bool(inputs.k.isnan().any())


def cpu_attention(*args, **kwargs):
    return diyfa.flash_attention(*args, backend="cpu", **kwargs)


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_validate_attention(dtype: torch.dtype, causal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    validate = partial(diyfa.validate_attention, causal=causal, dtype=dtype, device="cpu", verbose=True)
    passed, difference = validate(cpu_attention, 2, 3, 50, 32)
    assert passed is True and 0 < difference < 0.02
    assert capsys.readouterr().out.startswith("PASS attention (2, 3, 50, 32)")
    wrong, difference = validate(lambda q, k, v, causal: cpu_attention(q, k, v, causal=not causal), 2, 3, 50, 32)
    assert wrong is False and difference > 0.1


@DTYPES
def test_validate_matmul(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    multiply = partial(diyfa.triton_matmul, backend="cpu")
    passed, difference = diyfa.validate_matmul(multiply, 70, 50, 130, dtype=dtype, device="cpu", verbose=True)
    assert passed is True and 0 < difference < 0.3
    assert capsys.readouterr().out.startswith("PASS matmul 70x50x130")
    for wrong in (lambda a, b: multiply(a, b) * 1.02, lambda a, b: torch.full((70, 50), float("nan"))):
        assert diyfa.validate_matmul(wrong, 70, 50, 130, dtype=dtype, device="cpu")[0] is False
    with pytest.raises(ValueError, match="returned shape"):
        diyfa.validate_matmul(lambda a, b: b, 4, 5, 6, device="cpu")


def test_validate_uses_the_available_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No "cuda" where there is an NPU or nothing."""
    monkeypatch.setattr(testing, "present_device", lambda: torch.device("cpu"))
    assert diyfa.validate_attention(cpu_attention, 1, 2, 20, 16)[0]
    with diyfa.use_backend("cpu"):
        assert diyfa.validate_matmul(diyfa.triton_matmul, 20, 16, 24)[0]
