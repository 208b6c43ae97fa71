"""The instruments: poisoning poisons, the budget refuses what it must, validate_* tell right from wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CASES

import diyfa
from diyfa.testing import (
    AttentionCase,
    Error,
    assert_within_budget,
    attention_function,
    error_budget,
    expected_error,
    expected_results,
    low_precision_results,
    make_inputs,
    measure_error,
    poisoned_allocations,
    run_case,
    unavoidable_errors,
    yardsticks,
)

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
    assert torch.empty is not None and torch.empty.__name__ == "empty"


def test_poisoning_ends_with_the_block() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with pytest.raises(RuntimeError, match="inside"), poisoned_allocations():
        raise RuntimeError("inside")
    assert (torch.empty, torch.Tensor.new_empty) == before


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


def test_budget_is_twice_the_baseline() -> None:
    want = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    low = want.to(torch.float16)
    error = measure_error(low, want)
    budget = error_budget(want, error, low.dtype)
    assert budget == pytest.approx((2 * error.max_abs, 2 * error.rms), rel=0.02)
    # A lucky baseline leaves what rounding the exact result costs, and what is unavoidable before that.
    lucky = error_budget(want, Error(0.0, 0.0), low.dtype)
    assert error.max_abs <= lucky.max_abs == pytest.approx(2**-11)
    assert error.rms <= lucky.rms < 2**-11 / 3 * 1.1
    assert error_budget(want, error, low.dtype, Error(1.0, 0.5)) == pytest.approx((1 + 2**-11, 0.5 + lucky.rms))
    assert error_budget(want, error, low.dtype, Error(0.0, 1e-9)) == budget


def test_expected_error_allows_for_chance() -> None:
    assert expected_error(torch.tensor([2.0])) == (6.0, 6.0)
    assert expected_error(torch.full((10_000,), 2.0)) == pytest.approx((6.0, 2.04))
    assert expected_error(torch.zeros(0)) == expected_error(torch.zeros(5)) == (0.0, 0.0)
    one_of_many = torch.zeros(400)
    one_of_many[7] = 2.0
    assert expected_error(one_of_many) == pytest.approx((6.0, 6.0 / 20))
    rows = torch.full((4, 100), 2.0)
    assert expected_error(rows) == pytest.approx((6.0, 2.2))
    assert expected_error(rows, by_row=True) == pytest.approx((6.0, 4.0))


@pytest.mark.parametrize(
    "name", ["everything", "everything_dropout", "varlen_everything", "gqa_4_2", "3d", "bias_rows"]
)
def test_float32_errors_are_the_size_of_unavoidable_errors(name: str) -> None:
    """PyTorch's own float32 results err by no more, and by no less than a fraction: the model is no blank cheque."""
    case = replace(CASES[name], dtype="float32")
    low, expected, model = low_precision_results(case), expected_results(case), unavoidable_errors(case)
    for result, got, want in zip(low._fields, low, expected, strict=True):
        if want is not None:
            rounding = error_budget(want, Error(0.0, 0.0), torch.float32)
            error = measure_error(got, want)
            assert error.rms <= model[result].rms + rounding.rms, result
            assert error.max_abs <= model[result].max_abs + rounding.max_abs, result
            assert model[result].rms < 40 * error.rms, result
    assert set(model) == {result for result, want in zip(low._fields, expected, strict=True) if want is not None}


def test_the_unavoidable_is_found_where_pytorch_is_exact() -> None:
    """One key: PyTorch's weight is exp(0) = 1, a recomputed one is off by the rounding of score and log-sum-exp."""
    case = AttentionCase("one key", seqlen_q=8, seqlen_k=1, head_dim=64, sm_scale=1.0, dtype="float32")
    assert yardsticks(case)["out"].max_abs == 0
    assert 1e-6 < unavoidable_errors(case)["dv"].rms < 1e-4
    assert_within_budget(run_case(attention_function(case, backend="cpu"), make_inputs(case)), case)


def test_yardstick_is_the_worst_of_its_draws() -> None:
    errors = yardsticks(CASE)
    own = measure_error(low_precision_results(CASE).out, expected_results(CASE).out)
    assert errors["out"].max_abs >= own.max_abs > 0
    assert set(errors) == set(expected_results(CASE)._fields)
    overflowing = AttentionCase("overflow", sm_scale=1e6, seqlen_q=8)
    with pytest.raises(ValueError, match="PyTorch's own out in float16 is not finite"):
        yardsticks(overflowing)


def test_budget_refuses_wrong_results() -> None:
    good = low_precision_results(CASE)
    assert_within_budget(good, CASE)
    for name in good._fields:
        value = getattr(good, name)
        finite = value.isfinite()
        scale = value[finite].double().square().mean().sqrt()
        shifted = (value.double() + 0.05 * scale).to(value.dtype)
        poisoned = value.clone()
        poisoned[(0,) * value.dim()] = float("nan")
        for wrong in (shifted, poisoned, value.double(), value[..., :-1], None):
            with pytest.raises(AssertionError, match=f"{name}:"):
                assert_within_budget(good._replace(**{name: wrong}), CASE)


def test_expected_results_are_finite_and_double() -> None:
    expected = expected_results(CASE)
    for name, x in zip(expected._fields, expected, strict=True):
        assert x.dtype == torch.float64
        assert bool(x.isfinite().all()) or name == "lse"


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_what_the_case_says(name: str) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_validate_attention(dtype: torch.dtype, causal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    passed, difference = diyfa.validate_attention(
        cpu_attention, 2, 3, 50, 32, causal=causal, dtype=dtype, device="cpu", verbose=True
    )
    assert passed is True and 0 < difference < 0.02
    assert capsys.readouterr().out.startswith("PASS attention (2, 3, 50, 32)")
    wrong, difference = diyfa.validate_attention(
        lambda q, k, v, causal: cpu_attention(q, k, v, causal=not causal),
        2,
        3,
        50,
        32,
        causal,
        dtype=dtype,
        device="cpu",
    )
    assert wrong is False and difference > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_validate_matmul(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    with diyfa.use_backend("cpu"):
        passed, difference = diyfa.validate_matmul(
            diyfa.triton_matmul, 70, 50, 130, dtype=dtype, device="cpu", verbose=True
        )
        assert passed is True and 0 < difference < 0.3
        assert capsys.readouterr().out.startswith("PASS matmul 70x50x130")
        wrong, _ = diyfa.validate_matmul(
            lambda a, b: diyfa.triton_matmul(a, b) * 1.02, 70, 50, 130, dtype=dtype, device="cpu"
        )
        assert wrong is False
        nan, _ = diyfa.validate_matmul(lambda a, b: torch.full((70, 50), float("nan")), 70, 50, 130, device="cpu")
        assert nan is False


def test_validate_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="returned shape"):
        diyfa.validate_matmul(lambda a, b: b, 4, 5, 6, device="cpu")
