"""Judging results by the error budget of diyfa's own tests, and a client's attention with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diyfa import reference_attention
from diyfa.testing import Error, error_budget, measure_error, rounding_unit
from diyfa.yardstick import plain_flash_attention

NAMES = ("out", "dq", "dk", "dv", "dbias")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where clients are tried; what they are compared with is computed on the CPU."""


def assert_within_budget_of(
    yardstick: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, name: str = "", unit: Error | None = None
) -> None:
    """`got` is as exact as the yardstick's error allows. `unit`: of rounding; by default that of its dtype."""
    got, exact, yardstick = (x.detach().cpu() for x in (got, exact, yardstick))
    allowed = error_budget(measure_error(yardstick, exact), unit or rounding_unit(exact, yardstick.dtype))
    error = measure_error(got, exact)
    assert error.max_abs <= allowed.max_abs and error.rms <= allowed.rms, f"{name}: {error}, budget {allowed}"


def on_device(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of CPU tensors by way of DEVICE; of several results the first."""

    def moved(*inputs: torch.Tensor) -> torch.Tensor:
        result = call(*(x.to(DEVICE) for x in inputs))
        return (result[0] if isinstance(result, tuple) else result).cpu()

    return moved


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16, seed: int = 0) -> list[torch.Tensor]:
    """Random tensors that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype).requires_grad_() for shape in shapes]


def with_gradients(attend: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """attend(*inputs, **options) and the gradients of all inputs that want one, for a gradient of the output that is
    always the same."""
    out = attend(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    learning = [x for x in inputs if x.requires_grad]
    if not learning:
        return [out]
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device="cpu").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, learning, dout.to(out.device))]


def _with_bias(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, bias, **options: call(q, k, v, attn_bias=bias, **options)


def assert_matches_reference(
    attend: Callable[..., Any], inputs: list[torch.Tensor], layout: str = "bhsd", **options: Any
) -> None:
    """attend(q, k, v) is the attention that `options` of `reference_attention` describe, gradients included; a fourth
    input is an additive bias that learns."""
    reference, yardstick_call = reference_attention, plain_flash_attention
    if len(inputs) == 4:
        reference, yardstick_call = (_with_bias(call) for call in (reference, yardstick_call))
    actual = with_gradients(attend, inputs)
    double = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected = with_gradients(reference, double, layout=layout, **options)
    plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    yardstick = with_gradients(yardstick_call, plain, layout=layout, **options)
    for name, got, exact, low in zip(NAMES[: len(actual)], actual, expected, yardstick, strict=True):
        assert got.dtype == low.dtype, f"{name} is {got.dtype}, expected {low.dtype}"
        assert_within_budget_of(low, got, exact, name)
